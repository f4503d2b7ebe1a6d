"""Windows and macOS: everything imports, and what is missing is said."""

import pytest

from faults.programs import POOL, ROOT
from parallel_runtime.devices import STOCK_NODES, SYSTEMS

# In a ComfyUI that is loaded, as on a real machine of that kind: what other systems have not is taken away before
# anything of ours is imported, which what it was forked from has.
PROGRAM = """
import argparse, asyncio, importlib.util, mmap, os, select, signal, sys
OF_WINDOWS = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM"}
for name in [each for each in sys.modules if each.partition(".")[0] == "parallel_runtime"]:
    del sys.modules[name]
for name in ("memfd_create", "pidfd_open", "eventfd", "waitid", "sched_getaffinity", "posix_fadvise"):
    delattr(os, name)
for name in ("killpg", "pipe2", "getuid", "setsid", "register_at_fork"):
    delattr(os, name)
for name in {each for each in dir(signal) if each.startswith("SIG") and each[3] != "_"} - OF_WINDOWS:
    delattr(signal, name)
for name in [each for each in dir(mmap) if each.startswith(("MAP_", "MADV_"))]:
    delattr(mmap, name)
del select.poll, select.epoll
sys.modules["fcntl"] = sys.modules["resource"] = sys.modules["pwd"] = None
_, _, sys.platform, root, pool = sys.argv
sys.path[:0] = [root, pool]

from echo_pool import make_pool
from parallel_runtime.errors import PoolError
with make_pool(2) as pool:
    try:
        pool.start()
    except PoolError as error:
        print(error)
    print(pool.status()["state"])

from parallel_runtime.cli import doctor
from parallel_runtime.process.nccl_files import present_files
none = {"machines": "", **dict.fromkeys(("model", "comfyui", "calibrate", "token_file"))}
found = doctor.run(argparse.Namespace(devices="cpu:2", **none))
print(found["can_run"], [check["name"] for check in found["checks"] if check["needed"] and not check["ok"]])
print(isinstance(present_files(), list))

where = importlib.util.spec_from_file_location("pack", f"{root}/__init__.py", submodule_search_locations=[root])
pack = sys.modules["pack"] = importlib.util.module_from_spec(where)
where.loader.exec_module(pack)
extension = asyncio.run(pack.comfy_entrypoint())
names = {node.define_schema().node_id: node for node in asyncio.run(extension.get_node_list())}
print(len(names) >= 6 and not hasattr(pack, "NODE_CLASS_MAPPINGS"))  # which stand-ins would have
try:
    names["SPConfig"].execute("auto", "cpu:2", 1, 1)
except ValueError as error:
    print(error)
sys.platform, os.environ["PATH"] = "linux", ""
choice = names["SPConfig"].execute("manual", "cpu:2", 2, 1, compiled="blocks").args[0]
print(choice.compiled, choice.describe()[-1])
"""


@pytest.mark.parametrize("system", ["win32", pytest.param("darwin", marks=pytest.mark.full)])
def test_another_system_can_import_the_nodes_and_the_pool_and_both_say_what_is_missing(in_comfyui, system):
    missing = f"workers need Linux, this is {SYSTEMS[system]}; {STOCK_NODES}"
    assert in_comfyui(PROGRAM, system, str(ROOT), str(POOL)) == [
        *(missing, "stopped"),
        *("False ['system']", "True"),
        *("True", missing),
        "False blocks run uncompiled: compiling needs a C++ compiler, and g++ is not there; install g++",
    ]
