"""Makes torchvision and torchaudio importable beside a CPU build of torch, in this virtual environment only.

Owns: the one known mismatch of a test machine without a GPU: the registry's torchvision and torchaudio are built
for CUDA, so their native libraries do not load beside CPU torch, and importing them (ComfyUI and diffusers do) fails.
Does not own: which versions are installed (constraints.txt), and never anybody's own ComfyUI: it refuses to run
outside the repository's `.venv`. On a machine whose torch is a CUDA build it changes nothing.

Run as a script by `make venv`. Idempotent; installed packages change on disk, so hosts and workers run as they are.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

MARK = "# mended for CPU torch"

MISSING_OPERATORS = f"""
{MARK}: torchvision's own registrations
# refer to these two operators, and without the native library nobody has defined them. They have no kernel:
# calling one still raises.
if not _has_ops():
    _mended_library = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _mended_library.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def import_error(module: str) -> str:
    """Returns what a fresh interpreter prints when it cannot import `module`, or "" when it can."""
    command = [sys.executable, "-c", f"import {module}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return result.stderr.strip() if result.returncode else ""


def package_folder(package: str) -> Path:
    """Where `package` is installed; found without importing it. Raises SystemExit outside a virtual environment."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed in {sys.prefix}; run `make venv`")
    folder = Path(spec.submodule_search_locations[0]).resolve()
    if sys.prefix == sys.base_prefix or Path(sys.prefix).resolve() not in folder.parents:
        raise SystemExit(f"{folder} is not inside a virtual environment; refusing to change it")
    return folder


def mend_torchvision() -> None:
    """Defines the two missing operators where torchvision finds that its native library did not load."""
    path = package_folder("torchvision") / "extension.py"
    text = path.read_text(encoding="utf-8")
    if MARK not in text:
        path.write_text(text + MISSING_OPERATORS, encoding="utf-8")


def mend_torchaudio() -> None:
    """Removes the native libraries, which torchaudio takes for "built without extensions"."""
    for library in (package_folder("torchaudio") / "lib").glob("*.so"):
        library.unlink()


def main() -> None:
    """Mends what fails to import for the known reason; any other reason is printed and is an error."""
    known = (
        ("torchvision", "operator torchvision::nms does not exist", mend_torchvision),
        ("torchaudio", "Could not load this library", mend_torchaudio),
    )
    for module, reason, mend in known:
        error = import_error(module)
        if reason in error:
            mend()
            error = import_error(module)
            print(f"{module}: mended for CPU torch in {sys.prefix}")  # noqa: T201
        if error:
            raise SystemExit(f"{module} cannot be imported, and not for the reason known here:\n{error}")


if __name__ == "__main__":
    main()
