"""A rank with a pretend device: what its command line names in the place of the product's entry.

Imports the product anew, since what it was forked from has imported it (host/forked_ranks.py), and with a mistake in it
where the settings tell one.
"""

import json
import runpy
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

PRODUCT = "parallel_runtime"


def spoil(file: str, old: str, new: str) -> None:
    """Have the product's file of that name be read with `new` in the place of `old`."""
    read = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        path = Path(loader.path)
        if path.name != file or name.partition(".")[0] != PRODUCT:
            return read(loader, name)
        return compile(path.read_text(encoding="utf-8").replace(old, new), path, "exec")

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


if __name__ == "__main__":
    left = [sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == PRODUCT]
    from pretend_cuda import device

    settings = json.loads(device.settings_file().read_text(encoding="utf-8"))
    if "mistake" in settings:
        spoil(*settings["mistake"])
    device.install()
    runpy.run_module(f"{PRODUCT}.worker.entry", run_name="__main__", alter_sys=True)
