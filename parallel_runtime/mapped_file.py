"""A weights file in memory: mapped once, read where it is needed, its pages given back once copied.

Owns the mapping. Knows offsets and dtypes, no names. Weights that stay as they are become views of the mapping, whose
pages all ranks share with each other and with the system's file cache.
"""

import mmap
import os
import warnings

import torch

from .checkpoint import ModelSpec, TensorEntry, unreadable


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
