"""A weights file in memory: mapped once, read where it is needed, its pages given back once copied.

Owns the mapping. Knows offsets and dtypes, no names. Weights that stay as they are become views of the mapping, whose
pages all ranks share with each other and with the system's file cache. Weights that are converted or sent to a device
are copied in pieces, and the pages of each piece leave this process before the next: a load never holds two copies.
"""

import mmap
import os
import warnings
from collections.abc import Iterator

import torch

from ..checkpoint import ModelSpec, TensorEntry, unreadable

PIECE_BYTES = 32 << 20
# Linux 5.14: read the pages now and map them. Python names it from 3.13 on.
MADV_POPULATE_READ = 22


class MappedFile:
    """A file mapped read-only, its descriptor kept. Views keep the mapping alive; there is nothing to close.

    Raises `ValueError` when it is not the file that was identified, then or at `refuse_changed`, and where its file
    system maps no files. Another file of the same name leaves the mapping as it is; this file written over in place
    would show in it, and cut short it would end the process (SIGBUS).
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec, self._identity = spec, (spec.size_bytes, spec.mtime_ns)
        self._file = open(spec.path, "rb")
        self.refuse_changed()
        try:
            self._map = mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
        except OSError as error:
            raise unreadable(spec.path, error) from error

    def refuse_changed(self) -> None:
        """Raise `ValueError` when the file was written to since it was identified."""
        now = os.fstat(self._file.fileno())
        if (now.st_size, now.st_mtime_ns) != self._identity:
            raise self._spec.changed(now)

    def read(self, entry: TensorEntry) -> Iterator[int]:
        """Have the tensor's pages read; yields the bytes done so far, piece by piece."""
        for start, stop in _pieces(entry):
            self._advise(start, stop, MADV_POPULATE_READ, otherwise=mmap.MADV_WILLNEED)
            yield stop - entry.start

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor as a view of the mapping. It must not be written to."""
        return self._rows(entry.dtype, entry.start, entry.end).reshape(entry.shape)

    def give_back(self) -> None:
        """Let go of all pages that were read; those that views still need are read again from the file's cache."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def _rows(self, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
        if start == stop:
            return torch.empty(0, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "the buffer is not writable": it is meant not to be
            return torch.frombuffer(self._map, dtype=dtype, count=(stop - start) // dtype.itemsize, offset=start)

    def _advise(self, start: int, stop: int, advice: int, *, otherwise: int) -> None:
        first = start - start % mmap.PAGESIZE
        try:
            self._map.madvise(advice, first, stop - first)
        except OSError:  # an older kernel does not know the advice
            self._map.madvise(otherwise, first, stop - first)


def _pieces(entry: TensorEntry) -> Iterator[tuple[int, int]]:
    """Byte ranges of whole elements; an empty tensor is one empty piece."""
    if entry.start == entry.end:
        yield entry.start, entry.end
    for start in range(entry.start, entry.end, PIECE_BYTES):
        yield start, min(start + PIECE_BYTES, entry.end)
