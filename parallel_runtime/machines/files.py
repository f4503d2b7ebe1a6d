"""A weights file on two machines: what makes it the same file, and where a machine looks for its own copy.

Owns the identity and the search. The model file never travels: each machine reads its own copy.
"""

import functools
import hashlib
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path, PurePosixPath

from ..checkpoint import read_header
from ..daemon_futures import in_daemons
from .messages import FileIdentity, FoundFile

LENGTH = struct.Struct("<Q")  # of the header of a safetensors file, first in it
SAMPLES = 2048  # tensors that are looked into, evenly chosen where the file has more
SAMPLE_BYTES = 1024  # from the middle of each
CHUNK_BYTES = 16 << 20  # that a thread reads at a time
MAX_THREADS = 8
REMEMBERED = 64  # files whose content is known
MAX_ENTRIES = 200_000  # files and folders of a search


def identify(path: str | os.PathLike[str], name: str) -> FileIdentity:
    """The identity of a file: its size, its header, and a piece from the middle of each of its tensors.

    Quick, to find a copy by; two files that differ in one number elsewhere are taken for one, so `content_sha256` is
    compared, too. Raises ValueError for what is no safetensors file.
    """
    header = read_header(path)
    entries = sorted(header.tensors.values(), key=lambda entry: (entry.start, entry.end))
    step = max(1, -(-len(entries) // SAMPLES))
    sample = hashlib.sha256()
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        (num_bytes,) = LENGTH.unpack(file.read(LENGTH.size))
        text = file.read(num_bytes)
        for entry in entries[::step]:
            start = max(entry.start, (entry.start + entry.end - SAMPLE_BYTES) // 2)
            sample.update(os.pread(file.fileno(), min(SAMPLE_BYTES, entry.end - start), start))
    return FileIdentity(name, size, hashlib.sha256(text).hexdigest(), sample.hexdigest())


def content_sha256(path: str | os.PathLike[str]) -> str:
    """A hash of every byte, for the file as it is now: read once, in threads, and remembered while this process lives.

    It is the SHA-256 of the SHA-256 of each 16 MiB. Raises OSError, ValueError for a file that changes meanwhile.
    """
    status = os.stat(path)
    return _content_sha256(os.path.abspath(path), _version_of(status))


def _version_of(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@functools.lru_cache(REMEMBERED)
def _content_sha256(path: str, version: tuple[int, ...]) -> str:
    with open(path, "rb") as file:
        starts = range(0, os.fstat(file.fileno()).st_size, CHUNK_BYTES)
        chunks = [functools.partial(_digest_at, file.fileno(), start) for start in starts]
        futures = in_daemons(chunks, at_once=min(MAX_THREADS, os.cpu_count() or 1))
        try:
            digests = [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)  # before the file is closed, whose number may be another file's then
        if _version_of(os.fstat(file.fileno())) != version:
            raise ValueError(f"{path} changes while it is read; wait until it is complete, and queue again")
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _digest_at(fd: int, start: int) -> bytes:
    digest = hashlib.sha256()
    at = start
    while at < start + CHUNK_BYTES and (data := os.pread(fd, min(1 << 20, start + CHUNK_BYTES - at), at)):
        digest.update(data)
        at += len(data)
    return digest.digest()


def find(number: int, identity: FileIdentity, folders: Sequence[str]) -> FoundFile:
    """The file in one of the folders: under the name that ComfyUI lists, else wherever a file is called so.

    Where there is none, or another, the answer says the path to put it to.
    """
    parts = PurePosixPath(identity.name).parts
    if not parts or PurePosixPath(identity.name).is_absolute() or {"..", "."} & set(parts) or "\0" in identity.name:
        return FoundFile(number, problem=f"{identity.name!r} is no name within a model folder")
    problems = []
    for path in _candidates(parts, folders):
        try:
            found = identify(path, identity.name)
            status = os.stat(path)
            content = content_sha256(path) if found == identity else ""
        except (ValueError, OSError) as error:
            problems.append(str(error).partition("\n")[0])
            continue
        if content:
            return FoundFile(number, path, status.st_size, status.st_mtime_ns, content)
        problems.append(f"{path} is another file than beside ComfyUI: {_difference(found, identity)}")
    place = os.path.join(folders[0], *parts) if folders else identity.name
    if problems:
        return FoundFile(number, problem=f"{'; '.join(problems[:3])}; copy ComfyUI's file to {place}")
    where = ", ".join(folders) or "no folder"
    return FoundFile(number, problem=f"{identity.name} is not in {where}; copy ComfyUI's file to {place}")


def _difference(found: FileIdentity, wanted: FileIdentity) -> str:
    if found.size_bytes != wanted.size_bytes:
        return f"{found.size_bytes} bytes, not {wanted.size_bytes}"
    if found.header_sha256 != wanted.header_sha256:
        return f"of the same {found.size_bytes} bytes, with another header"
    return f"of the same {found.size_bytes} bytes and header, with other weights"


def _candidates(parts: Sequence[str], folders: Sequence[str]) -> Iterator[str]:
    """Plain files called so, the likeliest first, each once."""
    seen = set()
    for path in (*(os.path.join(folder, *parts) for folder in folders), *_called(parts[-1], folders)):
        try:
            there = os.stat(path)
        except OSError:
            continue
        if stat.S_ISREG(there.st_mode) and (there.st_dev, there.st_ino) not in seen:
            seen.add((there.st_dev, there.st_ino))
            yield path


def _called(name: str, folders: Sequence[str]) -> Iterator[str]:
    """Paths of that name anywhere below the folders; links to folders are followed, each folder once."""
    left, seen = MAX_ENTRIES, set()
    for folder in folders:
        for where, below, files in os.walk(folder, followlinks=True):
            status = Path(where).stat()
            if (status.st_dev, status.st_ino) in seen:
                below.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            left -= len(below) + len(files)
            if left < 0:
                return
            if name in files:
                yield os.path.join(where, name)
