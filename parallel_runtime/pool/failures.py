"""What failed: which rank is to blame, the one error that the caller sees, and what a pool remembers of it."""

import errno
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .. import VERSION, installed_version
from ..checkpoint import LOAD_AGAIN, ModelSpec
from ..devices import Device
from ..errors import BrokenCopiesError, OutOfMemoryInRankError, PoolError, RaisedInRankError, SilentWorkersError
from ..machines.machine import Machine
from ..plan import ParallelPlan, refuse_unfit_machines
from ..process.rank_process import RankProcess
from ..process.signs import OUT_OF_MEMORY
from ..wire.replies import RankError
from .known_errors import TRY_COPIES, KnownError, find_known
from .remote_ranks import RemoteRank

FRESH = "the next prompt starts fresh workers"
VARIABLE = "PARALLEL_DIT_DEADLINE_S"  # what a user of ComfyUI sets
REACH_EACH_OTHER = "see that a firewall lets these machines reach each other at every TCP port"
LONGER = 5  # times the deadline that was missed: what is advised
AGAIN = "the next prompt tries again"
BUS_ERROR = "killed by SIGBUS"
ABORTED = "killed by SIGABRT"  # how an exception in a thread of C++ ends a process: Python never sees it
# Exceptions of the machine, its devices and the exchange between ranks. Any other one is of code that met something
# else than it was written for: ComfyUI and the packages that it uses raise `Exception` and types of their own.
NOT_RAISED_BY_CODE = {"MemoryError", "OutOfMemoryError", "OSError", "ProtocolError"}
NOT_RAISED_BY_CODE |= {"DistError", "AcceleratorError", "CudaError"}
# How errors of CUDA and NCCL begin, also those of which nothing is known; and how a crash in their libraries ends.
OF_DEVICES = re.compile(r"^(?:DistBackendError|AcceleratorError|\w+: (?:CUDA|HIP) error): ")
CRASHES = {ABORTED, BUS_ERROR, "killed by SIGSEGV"}
SYSTEM_REMEDIES = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the system has no open file left; close other programs",
    errno.ENOMEM: "free some memory",
    errno.EAGAIN: "raise the limit of processes (ulimit -u)",
}


@dataclass(frozen=True)
class Failure:
    """A sign that a rank failed. `weak`: perhaps only because another one did. `said`: its error's type and text.

    `silent`: no rank showed life. `held`: a signal holds the rank. `by_code`: Python code raised, for no reason that
    lies in the machine.
    """

    rank: int
    cause: str
    said: str = ""
    detail: str = ""
    remedy: str = FRESH
    weak: bool = False
    silent: bool = False
    held: bool = False
    by_code: bool = False


def failure_of_error(rank: int, error: RankError) -> Failure:
    """The failure that an ERROR message tells of."""
    lines = error.text.strip().splitlines()
    said = f"{error.kind}: {error.text}"
    found = find_known(said)
    inside = f" (in {error.module})" if error.module else ""
    return Failure(
        rank,
        (f"{error.kind}: {lines[0]}" if lines else error.kind) + inside,
        said=said,
        detail=error.traceback.strip(),
        weak=error.kind == "DistBackendError" if found is None or found.known.vague else found.known.consequence,
        by_code="Exception" in error.bases and NOT_RAISED_BY_CODE.isdisjoint(error.bases),
    )


def other_version(rank: int, found: str) -> Failure | None:
    """The failure of a rank whose code is of version `found`; None when that is ours."""
    if found == VERSION:
        return None
    cause = f"the pack was updated: ComfyUI runs its version {VERSION}, {found} is installed"
    return Failure(rank, cause, remedy="restart ComfyUI")


def silence(
    rank: RankProcess | RemoteRank, asked: str, *, silent_s: float, deadline_s: float, alive: bool = False
) -> Failure:
    """The failure of a rank that has shown no life for `silent_s`, or none but that its process is `alive`."""
    held = rank.is_stopped()
    remedy = f"the deadline is {deadline_s:g} s; {FRESH}"
    if alive and not held:
        longer_s = LONGER * deadline_s
        remedy = (
            f"the deadline is {deadline_s:g} s; if it only is slow, start ComfyUI with {VARIABLE}={longer_s:g}; {FRESH}"
        )
    by_signal = " and its process is held by a signal" if held else ""
    return Failure(
        rank.rank,
        f"no answer to {asked} and no heartbeat for {silent_s:.1f} s{by_signal}",
        remedy=remedy,
        silent=True,
        held=held,
    )


def choose(signs: Sequence[Failure]) -> Failure:
    """The earliest failure that no other failure caused, the earliest of all when each may be a consequence."""
    return next((sign for sign in signs if not sign.weak), signs[0])


def explain(failure: Failure, *, files: Iterable[ModelSpec], starting: bool) -> Failure:
    """`failure` with what lies behind it, where that is known. `files` are those that ranks have mapped.

    A rank of another version may fail while it starts in any way, before it can say which one it is. Reading past the
    end of a mapped file is a SIGBUS.
    """
    if starting:
        return other_version(failure.rank, installed_version()) or failure
    return _blame_files(failure, list(files)) if failure.cause == BUS_ERROR else failure


def _blame_files(failure: Failure, files: Sequence[ModelSpec]) -> Failure:
    """With the file that was cut short, else one that was changed in another way, else all of them."""
    changed: dict[bool, ValueError] = {}
    for spec in files:
        try:
            spec.refuse_changed()
        except ValueError as error:
            changed.setdefault(_is_shorter(spec), error)
    if changed:
        return replace(failure, cause=f"{failure.cause}: {changed.get(True) or changed[False]}")
    names = " or ".join(sorted({Path(spec.path).name for spec in files}))
    if not names:
        return failure
    reason = f"{names} could not be read where it is mapped"
    remedy = f"see that its disk or network drive is there and well, then {LOAD_AGAIN}"
    return replace(failure, cause=f"{failure.cause}: {reason}; {remedy}")


def _is_shorter(spec: ModelSpec) -> bool:
    """Whether the file has fewer bytes than it had. Another one of its name leaves the one that is mapped whole."""
    try:
        return os.stat(spec.path).st_size < spec.size_bytes
    except OSError:
        return False


def pool_error(failure: Failure, *, printed: str, device: str, starting: bool, hangs_by: str = "") -> PoolError:
    """The error for the caller: one line that says all, then the traceback and what the rank `printed` last.

    An error that the table of known ones has is told in its words; the rank's own are in the traceback.
    `hangs_by`: what to look at where ranks that exchange as these do hang (`hint`).
    """
    cause, remedy = failure.cause, AGAIN if starting and failure.remedy is FRESH else failure.remedy
    hangs = failure.silent and not failure.held
    warned = _warned_by_nccl(printed) if hangs else printed
    said = cause if cause == OUT_OF_MEMORY else failure.said
    found = find_known(said, warned) if said or hangs or cause == ABORTED else None
    if found is not None:
        cause = found.cause or cause if said else f"{cause}: {found.cause or found.words}"
        remedy = f"{found.known.remedy}; {remedy}"
    elif hangs and hangs_by:
        remedy = f"{hangs_by}; {remedy}"
    detail = "\n".join(
        part for part in (failure.detail, f"rank {failure.rank} printed last:\n{printed}" if printed else "") if part
    )
    kind = _kind_of(failure, None if found is None else found.known)
    return kind(cause, rank=failure.rank, device=device, remedy=remedy, detail=detail)


def hint(*, over_nccl: bool, machines: bool, starting: bool) -> str:
    """What to look at where ranks hang: NCCL's copies, which none has made yet at a start, and ports of machines."""
    hints = [REACH_EACH_OTHER] if machines else []
    return "; ".join([*hints, TRY_COPIES] if over_nccl and not (machines and starting) else hints)


def _warned_by_nccl(printed: str) -> str:
    """Of what a rank that hangs printed, what may say why: all else may be of long ago, and was got over."""
    return "\n".join(line for line in printed.splitlines() if "NCCL WARN" in line)


def _kind_of(failure: Failure, known: KnownError | None) -> type[PoolError]:
    if failure.silent:
        return SilentWorkersError
    if known is not None and known.out_of_memory:
        return OutOfMemoryInRankError
    if known is not None:
        return BrokenCopiesError if known.copies else PoolError
    if failure.cause in CRASHES or OF_DEVICES.match(failure.said):
        return BrokenCopiesError
    return RaisedInRankError if failure.by_code else PoolError


def system_error(what: str, error: OSError) -> PoolError:
    """The error for something that the system refused us."""
    reason = error.strerror or str(error)
    return PoolError(f"{what}: {reason}", remedy=SYSTEM_REMEDIES.get(error.errno or 0, AGAIN))


def refuse_without(plan: ParallelPlan, devices: Sequence[Device], machines: Sequence[Machine], died: PoolError) -> None:
    """Raise PoolError, what ranks have died of since the last request, where the plan cannot run on the ranks that are
    left.

    `devices` as `Pool` has it, of this machine first; `machines` are those that are there.
    """
    here = sum(not device.machine for device in devices)
    try:
        refuse_unfit_machines(plan, [here, *(len(machine.devices) for machine in machines)])
    except ValueError:
        raise PoolError(  # a copy, so that what is remembered of the failure keeps no frame alive
            died.cause, rank=died.rank, device=died.device, remedy=died.remedy, detail=died.detail
        ) from None


MAX_FAILURES = 3
WINDOW_S = 60.0
RELEASE = "use Release Parallel Pool, then queue again"


class Failures:
    """What went wrong, since the beginning or since `forget`. `last` is a copy without the caller's frames."""

    def __init__(self) -> None:
        self.last: PoolError | None = None
        self._times: deque[float] = deque(maxlen=MAX_FAILURES)

    def note(self, error: PoolError) -> None:
        """Remember that workers have failed."""
        # A copy: the error itself will carry the caller's frames, and with them its tensors.
        self.last = PoolError(
            error.cause, rank=error.rank, device=error.device, remedy=error.remedy, detail=error.detail
        )
        self._times.append(time.monotonic())

    def retract(self) -> None:
        """The last failure was dealt with by other workers: it neither counts nor is shown."""
        self.last = None
        if self._times:
            self._times.pop()

    def forget(self) -> None:
        """Begin anew: the user has acted."""
        self._times.clear()
        self.last = None

    def refuse_storm(self) -> None:
        """Raise PoolError when workers failed again and again: they need the user, not another start."""
        times = self._times
        if len(times) == MAX_FAILURES and times[-1] - times[0] <= WINDOW_S and self.last is not None:
            raise PoolError(
                f"the workers failed {MAX_FAILURES} times in {times[-1] - times[0]:.0f} s, "
                f"last with: {self.last.cause}",
                rank=self.last.rank,
                device=self.last.device,
                remedy=RELEASE,
                detail=self.last.detail,
            )
