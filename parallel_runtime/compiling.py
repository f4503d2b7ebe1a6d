"""What compiling the blocks needs of a machine: a compiler, Python's headers, and a folder for what it makes.

Owns the checks and the environment of a rank in which torch's compiler (TorchInductor) works. Does not own what is
compiled nor when (the model's compiled.py). Imports no torch.

What torch keeps in its folder are C++ and Triton sources and the libraries made of them. Its caches of whole graphs are
pickles, and stay switched off: a rank that starts traces its graphs anew and finds their libraries there.
"""

import importlib.util
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
COMPILERS = {"cpu": ("CXX", ("g++",)), "cuda": ("CC", ("gcc", "clang"))}  # what torch, or Triton, calls
COMPILE_S = 600.0  # how long one graph may take before a rank gives no more signs of life


def why_not(kinds: Collection[str], environ: Mapping[str, str]) -> str | None:
    """Why blocks cannot be compiled for devices of these kinds, and what to do, in a sentence; None where they can.

    Makes the folder for what will be compiled, to which no other user may write.
    """
    for kind in sorted(set(kinds)):
        variable, usual = COMPILERS[kind]
        names = (environ[variable],) if environ.get(variable) else usual
        if not any(shutil.which(name, path=environ.get("PATH")) for name in names):
            return f"compiling needs a C++ compiler, and {' or '.join(names)} is not there; install g++"
    if "cuda" in kinds and importlib.util.find_spec("triton") is None:
        return "compiling for a GPU needs Triton, which is not there; pip install triton"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "compiling needs Python's headers, which are not there; install python3-dev, or its like for this Python"
    return _why_no_folder(cache_folder(environ))


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where torch keeps what it compiled: where the user says, else in the user's cache folder.

    Where that cannot be written, a folder of this user's among the temporary files.
    """
    if environ.get(FOLDER):
        return Path(environ[FOLDER])
    root = Path(environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():
        root = Path(environ.get("HOME", ""), ".cache")
    if root.is_absolute() and _can_be_made(root):
        return root / "parallel-dit" / "compiled"
    return Path(environ.get("TMPDIR") or tempfile.gettempdir(), f"parallel-dit-compiled-{os.getuid()}")


def compile_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What a rank's environment adds to the caller's. Costs nothing until something is compiled."""
    return {
        FOLDER: str(cache_folder(environ)),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else every rank starts as many processes as there are CPUs
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    }


def _can_be_made(folder: Path) -> bool:
    """Whether the folder can be written, or made."""
    there = next(each for each in (folder, *folder.parents) if os.access(each, os.F_OK))
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _why_no_folder(folder: Path) -> str | None:
    """Make the folder; why it cannot be used: libraries are loaded from it, so no other user may write there."""
    remedy = f"set {FOLDER} to a folder of your own before starting"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        return f"compiling has no folder for its libraries ({error.strerror}); {remedy}"
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or not folder.is_dir():
        return f"compiling keeps libraries in a folder that others can write to; {remedy}"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"compiling cannot write to its folder; {remedy}"
