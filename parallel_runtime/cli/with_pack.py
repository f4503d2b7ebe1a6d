"""A process that has the whole pack as a package, as ComfyUI loads it: commands ask it what the nodes' code does.

Owns the import alone. It answers as `planner/comfyui_process.py` asks; the answers are nodes/without_server.py's.
"""

import importlib
import importlib.util
import sys

from ..planner.comfyui_process import PACK_ROOT

PACK = "parallel_dit_pack"  # as ComfyUI does, which names a pack by its folder: that may be no name of Python's


def main() -> None:
    """Import the pack, and answer until the other side goes."""
    spec = importlib.util.spec_from_file_location(PACK, PACK_ROOT / "__init__.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{PACK_ROOT} has no __init__.py that Python can load")
    sys.modules[PACK] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[PACK])
    importlib.import_module(f"{PACK}.nodes.without_server").main()


if __name__ == "__main__":
    main()
