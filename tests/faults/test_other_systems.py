"""Windows and macOS: everything imports, and what is missing is said."""

import pytest

from faults.programs import ROOT, run_program
from host.fetch import comfyui_path
from parallel_runtime.devices import STOCK_NODES

# What other systems have not, to be taken away before anything of ours is imported.
MISSING = """
        import os, signal, sys, torch
        def take_away(system):
            for name in ("memfd_create", "pidfd_open", "eventfd", "waitid", "sched_getaffinity", "posix_fadvise"):
                delattr(os, name)
            sys.modules["fcntl"] = sys.modules["resource"] = None
            sys.platform = system
"""


@pytest.mark.parametrize("system", ["win32", pytest.param("darwin", marks=pytest.mark.full)])
def test_another_system_can_import_the_nodes_and_the_pool_and_both_say_what_is_missing(system):
    """In ComfyUI's own process: its modules are imported first, as on a real machine of that kind."""
    program = """
        import asyncio, importlib.util
        sys.argv = ["main.py", "--cpu"]
        sys.path.insert(0, "COMFYUI")
        import comfy.options
        comfy.options.enable_args_parsing()
        import comfy.model_base, comfy.sd, comfy.samplers, comfy_api.latest, nodes, folder_paths, latent_preview
        import aiohttp, server
        take_away("SYSTEM")
        from echo_pool import make_pool
        from parallel_runtime.errors import PoolError
        with make_pool(2) as pool:
            try:
                pool.start()
            except PoolError as error:
                print(error)
            print(pool.status()["state"])
        where = importlib.util.spec_from_file_location("pack", "ROOT/__init__.py", submodule_search_locations=["ROOT"])
        pack = sys.modules["pack"] = importlib.util.module_from_spec(where)
        where.loader.exec_module(pack)
        extension = asyncio.run(pack.comfy_entrypoint())
        names = {node.define_schema().node_id: node for node in asyncio.run(extension.get_node_list())}
        print(len(names) >= 6)
        try:
            names["SPConfig"].execute("auto", "cpu:2", 1, 1)
        except ValueError as error:
            print(error)
        sys.platform, os.environ["PATH"] = "linux", ""
        choice = names["SPConfig"].execute("manual", "cpu:2", 2, 1, compiled="blocks").args[0]
        print(choice.compiled, choice.describe()[-1])
    """
    program = program.replace("SYSTEM", system).replace("COMFYUI", str(comfyui_path()))
    missing = f"workers need Linux, this is {system}; {STOCK_NODES}"
    assert run_program(MISSING + program.strip("\n").replace("ROOT", str(ROOT))) == [
        *(missing, "stopped"),
        *("True", missing),
        "False blocks run uncompiled: compiling needs a C++ compiler, and g++ is not there; install g++",
    ]
