"""Builds the pretend device's library with g++, once for each source and torch, in build/."""

import hashlib
import os
import subprocess
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("device.cpp")
BUILD = Path(__file__).resolve().parents[3] / "build" / "pretend_cuda"


def library() -> Path:
    """The library's path; made first where it is missing. Raises `CalledProcessError` when g++ refuses the source."""
    found = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    path = BUILD / f"device-{found}.so"
    if not path.exists():
        from torch.utils.cpp_extension import include_paths, library_paths  # here: it takes a second

        BUILD.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(f".{os.getpid()}")
        places = [f"-I{folder}" for folder in include_paths()] + [f"-L{folder}" for folder in library_paths()]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        flags = ["-O1", "-shared", "-fPIC", "-std=c++20", abi, *places, "-ltorch", "-ltorch_cpu", "-lc10"]
        subprocess.run(["/usr/bin/env", "g++", str(SOURCE), "-o", str(made), *flags], check=True)
        made.rename(path)
    return path
