"""What a rank says to the parent, one dataclass a kind of message, and what it counted and timed.

Both ends import these, as those of requests.py, whose classes name the reply that each is answered with. Imports no
torch: a rank says `Hello` before it does. Owns the fields. Does not own their form in a message (records.py) nor what
is made of them (pool/ and report/).
"""

from dataclasses import dataclass
from typing import NamedTuple

from ..packages import Package
from ..plan import BatchSlice
from .protocol import Op


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The rank's process runs, before it imports torch. `version` is that of its code."""

    pid: int
    version: str


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The rank's process group stands."""


@dataclass(frozen=True, kw_only=True)
class RankError:
    """The last thing a rank says: the error's type, its text and its traceback, both cut to fit.

    `bases`: the names of the type and of all that it derives from; () where no exception was raised. `module`: the path
    of the model's module that raised it, "" where none did.
    """

    kind: str
    text: str
    traceback: str
    bases: tuple[str, ...] = ()
    module: str = ""


WAITING = ("communication_s", "weights_s")  # the regions in which a rank waits for others


@dataclass(frozen=True, kw_only=True)
class TimeSpent:
    """Seconds of a rank since the first step of a run began: it computed, waited for other ranks, and had no work."""

    compute_s: float
    communication_s: float
    idle_s: float


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a request is: bytes of a load, steps of a sampling run; of a timed one, what the rank did so far."""

    done: int
    total: int
    spent: TimeSpent | None = None


@dataclass(frozen=True, kw_only=True)
class Compiling:
    """The rank begins to make a graph of a block, or has made it."""

    begins: bool


@dataclass(frozen=True, kw_only=True)
class Cancelled:
    """The rank gave the request up, as it was told to. Models in `evicted` had gone for it already."""

    evicted: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that a rank occupies: resident in the process and, on a GPU, allocated and reserved by torch.

    Of those allocated, `staying_bytes` are of whole blocks that others may have (weights/whole_blocks.py).
    """

    resident_bytes: int
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    staying_bytes: int | None = None

    def known(self) -> dict[str, int]:
        """The figures that there are, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class EmptyReply:
    """It is done."""


@dataclass(frozen=True, kw_only=True)
class MemoryReply:
    """It is done, and the rank occupies this much now."""

    memory: Memory


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Packages of a rank that change a result, and options of ComfyUI that its own command line does not know."""

    left_out: tuple[str, ...] = ()
    packages: tuple[Package, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LoadReply(MemoryReply):
    """The model is there. A rank that the layout leaves out, or that had it, says 0 bytes and no dtype.

    `dtype` is what the rank computes in, without "torch."; `load_s` is None where nothing was loaded; `evicted` are the
    models that had to go; `imported` is None where nothing was loaded.
    """

    parameter_bytes: int = 0
    dtype: str = ""
    load_s: float | None = None
    evicted: tuple[int, ...] = ()
    imported: Imported | None = None


@dataclass(frozen=True, kw_only=True)
class StrengthsReply(MemoryReply):
    """Whether other strengths were enough; they are not where some deltas are merged into the weights."""

    changed: bool


@dataclass(frozen=True, kw_only=True)
class CompiledReport:
    """Graphs that the process has made so far; of this request, blocks that ran without one and seconds for graphs.

    `reason`: why blocks ran without one, where that is so of all blocks of their kind.
    """

    graphs: int
    uncompiled_blocks: int
    compile_s: float
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class CachedCalls:
    """Calls that a step cache was asked about, and how many of them skipped their blocks but the first.

    `kept_bytes`: what it keeps on this rank of the call of which it keeps most.
    """

    calls: int
    skipped: int
    kept_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class KeptCalls:
    """Calls of a class that keeps something between them: how many, and how many found what they need in it.

    `rows`: tokens that this rank's first block computed in all of them; `kept_bytes`: what it keeps after the last.
    """

    calls: int
    found: int
    rows: int
    kept_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """What a rank of the plan ran in one request, and sent: collectives and bytes, of activations and of weights.

    `attention`: the kernels that have attended so far in the rank's process. `exchange`: as what heads travelled, where
    that rounded.
    """

    batch_group: int
    pieces: tuple[BatchSlice, ...]
    collectives: int
    sent_bytes: int
    weight_collectives: int
    weight_bytes: int
    compiled: CompiledReport | None = None
    cached: CachedCalls | None = None
    kept: KeptCalls | None = None
    attention: tuple[str, ...] = ()
    exchange: str = ""


@dataclass(frozen=True, kw_only=True)
class RankStep(RankWork):
    """One request of calls. `began_s` is on the machine's monotonic clock, which its ranks share.

    `regions` are seconds by name, where they were asked for; `trace_bytes` is the length of the trace, where one was;
    `tokens` those of the largest attention call that a hosted model shared.
    """

    began_s: float
    step_s: float
    regions: dict[str, float] | None = None
    trace_bytes: int | None = None
    tokens: int | None = None


class ChunkSpan(NamedTuple):
    """When a stage was ready for a chunk of patches, when the chunk was there, and when it was done."""

    call: int
    first_patch: int
    patch_stop: int
    cond: int
    asked_s: float
    began_s: float
    ended_s: float


@dataclass(frozen=True, kw_only=True)
class StageTimeline:
    """The chunks of one stage in order, as far as a message has room; `left_out` are how many more there were."""

    stage: int
    spans: tuple[ChunkSpan, ...]
    left_out: int


@dataclass(frozen=True, kw_only=True)
class RankRun(RankWork):
    """A whole sampling run: seconds of each step, of what came before the first and after the last.

    `began_s` is when each step began; `regions` has a list for each, an entry a step, which says nothing of steps that
    are none of `timed_steps`, and `prepare_regions` what was before the first. A run of very many steps goes without
    `began_s` and `regions`, as a message has room for no more.
    `skipped_calls` are those that EasyCache or LazyCache stood for; None without one. `drained`: why the pipeline was
    empty between steps, said by its last stage; None where it was not, or there was none.
    """

    step_s: tuple[float, ...]
    prepare_s: float
    finish_s: float
    began_s: tuple[float, ...] | None = None
    regions: dict[str, tuple[float, ...]] | None = None
    timed_steps: tuple[int, ...] | None = None
    prepare_regions: dict[str, float] | None = None
    timeline: StageTimeline | None = None
    skipped_calls: int | None = None
    drained: str | None = None


@dataclass(frozen=True, kw_only=True)
class StepReply(MemoryReply):
    """The rank has answered one request of calls. `ran` is None on a rank beyond the plan."""

    ran: RankStep | None


@dataclass(frozen=True, kw_only=True)
class SampleReply(MemoryReply):
    """The rank has sampled a whole run. `ran` is None on a rank beyond the plan."""

    ran: RankRun | None


@dataclass(frozen=True, kw_only=True)
class DecodeReply(MemoryReply):
    """Tiles that the rank decoded, and seconds for them; `refused`: why it did not, "" where it did."""

    num_tiles: int
    decode_s: float
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckReply:
    """How many bytes of the known pattern arrived wrong."""

    wrong_bytes: int


@dataclass(frozen=True, kw_only=True)
class MeasureReply:
    """What a rank's device is. `gflops`: 10^9 operations a second, of a matrix product."""

    name: str
    free_bytes: int
    gflops: float


@dataclass(frozen=True, kw_only=True)
class ProbeReply:
    """Pairs of (amount, seconds), small to large: operations of `matmul` and `attention`, bytes moved by the others.

    `narrow_attention` is attention with heads so small that the softmax's exponentials count, `elementwise` what stands
    between matrices, `operations` counts operations too small to take time of the device.
    A rank in no group has none, and there are no exchanges on an axis of one rank.
    """

    matmul: tuple[tuple[float, float], ...] = ()
    attention: tuple[tuple[float, float], ...] = ()
    memory: tuple[tuple[float, float], ...] = ()
    all_to_all: tuple[tuple[float, float], ...] = ()
    narrow_attention: tuple[tuple[float, float], ...] = ()
    elementwise: tuple[tuple[float, float], ...] = ()
    operations: tuple[tuple[float, float], ...] = ()


# What a rank says with an op of its own; a request's reply comes as DONE.
OPS: dict[type, Op] = {
    Hello: Op.HELLO,
    Ready: Op.READY,
    RankError: Op.ERROR,
    Progress: Op.PROGRESS,
    Compiling: Op.COMPILING,
    Cancelled: Op.CANCELLED,
}
