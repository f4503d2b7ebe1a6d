"""Installs the peers into the virtual environment that runs this script, an environment of their own.

xfuser brings what neither the pack nor its tests need, and nothing here should change what those run with. As
everywhere, the constraints keep torch the build it is.
"""

from __future__ import annotations

import shutil
import sys
import tempfile

from host.install import METADATA, ROOT, pip_install


def main() -> None:
    """Torch first, then the pack's own dependencies with the extra that names the peers."""
    if sys.prefix == sys.base_prefix:
        raise SystemExit(f"{sys.executable} is not in a virtual environment; run `make peers`")
    pip_install("torch")
    with tempfile.TemporaryDirectory() as scratch:  # built outside the repository, so nothing is left in it
        for name in METADATA:
            shutil.copy(ROOT / name, scratch)
        pip_install(f"{scratch}[peers]")


if __name__ == "__main__":
    main()
