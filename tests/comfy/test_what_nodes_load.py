"""ComfyUI's process loads no program of the pack that runs beside it: not what ranks run, and no commands."""

from host.server import PACK_ROOT

# Every module of the nodes, those too that are imported where they are first used.
SCRIPT = """
import asyncio, importlib, importlib.util, sys
from pathlib import Path
pack = Path(sys.argv[2])
spec = importlib.util.spec_from_file_location("the_pack", pack / "__init__.py")
sys.modules["the_pack"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert asyncio.run(asyncio.run(module.comfy_entrypoint()).get_node_list())
for file in sorted((pack / "nodes").rglob("*.py")):
    parts = file.relative_to(pack).with_suffix("").parts
    importlib.import_module(".".join(["the_pack", *parts]).removesuffix(".__init__"))
print("the modules:", *(name for name in sys.modules if name.partition(".")[0] == "the_pack"))
"""
APART = ("worker", "trials", "cli", "__main__")


def test_nodes_load_nothing_of_what_ranks_and_commands_run(in_comfyui) -> None:
    loaded = in_comfyui(SCRIPT, str(PACK_ROOT))[-1].removeprefix("the modules: ").split()
    assert {"the_pack.nodes.extension", "the_pack.parallel_runtime.pool.pool"} <= set(loaded)
    roots = [f"the_pack.parallel_runtime.{name}" for name in APART]
    assert [name for name in loaded if any(f"{name}.".startswith(f"{root}.") for root in roots)] == []
