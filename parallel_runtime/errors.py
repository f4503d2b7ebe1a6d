"""What can go wrong between the caller and the workers, in one type.

A mistake the user can correct (a plan, a file, a shape) is a `ValueError`, raised before any worker is touched.
"""

import traceback
from typing import Any


class PoolError(RuntimeError):
    """The workers failed: one of them died, raised, or went silent. All of them have been ended and reaped.

    The first line reads "rank R: CAUSE; REMEDY", or "rank R (cuda:1): ..." where the rank has a GPU, or
    "rank R (cuda:1 of machine NAME (ADDRESS)): ..." where it is another machine's. `detail` (a
    worker's traceback or its last output) follows on lines of its own, because most clients show only the first line.
    """

    def __init__(
        self, cause: str, *, rank: int | None = None, device: str = "", remedy: str = "", detail: str = ""
    ) -> None:
        self.cause = cause
        self.rank = rank
        self.device = device
        self.remedy = remedy
        self.detail = detail
        there = f" ({device})" if device.startswith("cuda") or " of machine " in device else ""
        where = "" if rank is None else f"rank {rank}{there}: "
        first = "; ".join(part for part in (f"{where}{cause}", remedy) if part)
        super().__init__(f"{first}\n{detail}" if detail else first)


class SilentWorkersError(PoolError):
    """The workers failed: no rank showed life for as long as the request's deadline."""


class BrokenCopiesError(PoolError):
    """The workers failed as they do where copies between GPUs are broken.

    What ranks sent each other arrived damaged or not at all, or CUDA or NCCL failed in a rank without another reason.
    """


class RaisedInRankError(PoolError):
    """The workers failed: Python code in a rank raised, and no known fault of the machine explains it.

    Out of memory, lost ranks and errors of drivers and of NCCL are none of these.
    """


class OutOfMemoryInRankError(PoolError):
    """The workers failed: a rank found no memory, of its device or of the host."""


BESIDE_BLOCKS = "beside blocks of sharded or offloaded weights that stay whole"  # what a rank adds to an error


class RequestCancelledError(RuntimeError):
    """The caller cancelled a request. The workers are well and take the next one."""


def note_module(error: BaseException, model: Any) -> None:  # noqa: ANN401  a torch.nn.Module: nothing here imports torch
    """Note at the error in which module of `model` it was raised: the path of the innermost whose code was running, the
    class of the model for its own."""
    paths = {id(module): path or type(model).__name__ for path, module in model.named_modules()}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found = paths.get(id(frame.f_locals.get("self")), found)
    error.raised_in_module = found  # type: ignore[attr-defined]


def module_of(error: BaseException) -> str:
    """The path that was noted at the error, "" for none."""
    return str(getattr(error, "raised_in_module", ""))


def in_one_line(error: BaseException) -> str:
    """The error's type, its text and the module that was noted at it."""
    said, inside = f"{type(error).__name__}: {' '.join(str(error).split())}"[:240], module_of(error)
    return f"{said} (in {inside})" if inside else said
