"""Counts of models, kept between runs: one small JSON file, an entry for each file as it is on the disk.

Owns the file `counts.json` in the user's cache folder (user_files.py) and what an entry holds for: a file, ComfyUI,
torch and this pack as they were when it was counted. Does not own the counting (counting.py).

What cannot be counted has no entry: it may lack a package, or memory, that is there next time.

    {"version": 1, "counts": {"2f1c...": {"key": {...}, "counted": {...}}}}
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from ..checkpoint import ComfyUI
from ..user_files import Key, Store

KEPT = 100  # entries; the oldest go first
PACK = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class CountKey(Key):
    """What counts hold for. `sources`: a hash of when ComfyUI's files and the pack's were changed."""

    file: str
    num_bytes: int
    changed_ns: int
    dtype: str
    options: tuple[str, ...]
    found: str
    size: tuple[tuple[str, object], ...]
    torch: str
    sources: str


class KeptCounts(Store):
    """The entries of one file."""

    FILE, NAME, VERSION, MOST = "counts.json", "counts", 1, KEPT
    THEN = "models are counted again"

    def load(self, key: CountKey) -> dict[str, object] | None:
        """What was counted; None where there is nothing that can be used."""
        counted = (self.entries.of(key) or {}).get("counted")
        return counted if isinstance(counted, dict) else None

    def save(self, key: CountKey, counted: Mapping[str, object]) -> None:
        """Keep it, where the folder can be written."""
        self.keep(key, {"counted": dict(counted)})


def count_key(
    file: str, num_bytes: int, changed_ns: int, dtype: str, comfyui: ComfyUI, found: str, size: tuple
) -> CountKey:
    """The key of a file that is counted now, by this ComfyUI. Raises `OSError` for sources that cannot be looked at,
    and `PackageNotFoundError` for a torch that does not say its version."""
    return CountKey(
        file=file,
        num_bytes=num_bytes,
        changed_ns=changed_ns,
        dtype=dtype,
        options=comfyui.options,
        found=hashlib.sha256(found.encode()).hexdigest()[:16] if found else "",
        size=size,
        torch=version("torch"),
        sources=sources_of(comfyui.path),
    )


@cache
def sources_of(comfyui: str) -> str:
    """A hash of what the sources of a ComfyUI and of this pack are: another one after an update of either."""
    root, told = Path(comfyui), hashlib.sha256()
    for file in sorted((*_sources(root, ("*.py", "comfy/**/*.py")), *_sources(PACK, ("**/*.py", "**/*.json")))):
        now = file.stat()
        told.update(f"{file}\0{now.st_size}\0{now.st_mtime_ns}\n".encode())
    return told.hexdigest()[:16]


def _sources(root: Path, patterns: Iterable[str]) -> set[Path]:
    return {file for pattern in patterns for file in root.glob(pattern)}
