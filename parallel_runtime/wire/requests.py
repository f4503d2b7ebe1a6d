"""What the parent asks of its ranks, one dataclass a kind of request, each with the reply that it is answered with.

Both ends import these, so neither can name a field that the other lacks. Owns the fields. Does not own their form in a
message (records.py), where tensors lie (channel.py), the replies (replies.py), nor what a rank does (worker/).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, get_args

from ..checkpoint import ComfyUI, ModelSpec
from ..exchange_groups import ExchangeGroup, OverlapRates
from ..model_call import CallPlace
from ..plan import BatchSlice, Layout, ParallelPlan
from ..sampler_recurrence import SamplerRecurrence
from ..stock_caches import StockCache
from .protocol import Op
from .replies import (
    CheckReply,
    DecodeReply,
    EmptyReply,
    LoadReply,
    MeasureReply,
    MemoryReply,
    ProbeReply,
    SampleReply,
    StepReply,
    StrengthsReply,
)

Options: TypeAlias = dict[str, Any]  # of one call of the model, as the engine takes them
Reply = TypeVar("Reply", covariant=True)


class Request(Protocol[Reply]):
    """A request: its op, and the kind of reply that every rank answers it with."""

    @property
    def op(self) -> Op: ...

    @property
    def reply(self) -> type[Reply]: ...


@dataclass(frozen=True, kw_only=True)
class Load:
    """Have a model on ranks `first_rank` to `layout.ranks`; those before hold theirs already.

    `plan`: that by which ranks put sharded weights together. Ranks without room first free models in `eviction_order`.
    """

    op: ClassVar = Op.LOAD
    reply: ClassVar = LoadReply
    model: int
    spec: ModelSpec
    layout: Layout
    first_rank: int
    plan: ParallelPlan | None
    budget_bytes: int | None
    eviction_order: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Unload:
    """Free a model or a VAE; nothing on a rank that does not hold it."""

    op: ClassVar = Op.UNLOAD
    reply: ClassVar = MemoryReply
    model: int


@dataclass(frozen=True, kw_only=True)
class ChangeWeights:
    """One message of a model's deltas, as `weight_delta.pack` writes them; the last takes back what none has named.

    With `side_branch`, plain LoRAs run beside the weights.
    """

    op: ClassVar = Op.CHANGE
    reply: ClassVar = MemoryReply
    model: int
    records: tuple[Options, ...]
    side_branch: bool
    first: bool
    last: bool


@dataclass(frozen=True, kw_only=True)
class SetStrengths:
    """Other strengths for the LoRAs that run beside a model's weights, in the order in which they came."""

    op: ClassVar = Op.STRENGTHS
    reply: ClassVar = StrengthsReply
    model: int
    strengths: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class MakeMesh:
    """Forget the meshes of `dropped` plans, free the groups `freed` in their order, then make those of a plan.

    What is freed is in no mesh that is left, and no weights that are held use it. `overlap`: by what ranks choose into
    how many chunks they send heads; None: one.
    """

    op: ClassVar = Op.MESH
    reply: ClassVar = EmptyReply
    plan: ParallelPlan
    dropped: tuple[ParallelPlan, ...]
    freed: tuple[ExchangeGroup, ...]
    overlap: OverlapRates | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """Calls of a model under a plan that has a mesh. `batch_groups` has the pieces of each batch group.

    `repeated` has the content's number of each input that lies where the last request left it. `places` are those of
    the calls; () where none leaves anything. What calls of another `epoch` left is not to be used.
    """

    op: ClassVar = Op.STEP
    reply: ClassVar = StepReply
    model: int
    plan: ParallelPlan
    calls: tuple[Options, ...]
    batch_groups: tuple[tuple[BatchSlice, ...], ...]
    repeated: dict[str, int]
    epoch: int = 0
    places: tuple[CallPlace | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GroupWork:
    """What of a whole run one batch group does: images `start` to `stop`, for the conditionings named.

    With `shares_cfg`, the others of the cfg axis do the same images for the other conditionings.
    """

    start: int
    stop: int
    conds: tuple[int, ...]
    shares_cfg: bool = False


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A whole sampling run; fields as those of `pool/calls.py`'s `WorkerLoopRun`."""

    op: ClassVar = Op.SAMPLE
    reply: ClassVar = SampleReply
    model: int
    plan: ParallelPlan
    recurrence: SamplerRecurrence
    cfg: float
    batch_groups: tuple[GroupWork, ...]
    calls: tuple[Options, ...]
    timeline: bool
    cache: StockCache | None = None


@dataclass(frozen=True, kw_only=True)
class CheckCopies:
    """Exchange a known pattern over a plan's mesh, and count the bytes that arrive wrong."""

    op: ClassVar = Op.CHECK
    reply: ClassVar = CheckReply
    plan: ParallelPlan


@dataclass(frozen=True, kw_only=True)
class MeasureDevice:
    """Say what the device is: memory and speed."""

    op: ClassVar = Op.MEASURE
    reply: ClassVar = MeasureReply


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Measure the device, and the exchanges over the ulysses axis of a plan's mesh."""

    op: ClassVar = Op.PROBE
    reply: ClassVar = ProbeReply
    plan: ParallelPlan


@dataclass(frozen=True, kw_only=True)
class Trim:
    """Let go what is kept of sampling runs that ended; with `graphs`, the graphs of blocks stay for the next run.

    `ranks` give back what torch caches on their device, too.
    """

    op: ClassVar = Op.TRIM
    reply: ClassVar = MemoryReply
    ranks: tuple[int, ...]
    graphs: bool = False


@dataclass(frozen=True, kw_only=True)
class HoldVae:
    """One message of a VAE's weights, tensors `w0` on by `names`; with the last, ComfyUI's class is built of them all.

    A rank holds one VAE: the first message lets another go. `metadata` is what ComfyUI's class is told beside them;
    `flags` as `ModelSpec`'s.
    """

    op: ClassVar = Op.VAE
    reply: ClassVar = MemoryReply
    vae: int
    comfyui: ComfyUI
    dtype: str
    metadata: dict[str, str]
    names: tuple[str, ...]
    first: bool
    last: bool
    flags: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class DecodeTiles:
    """Decode tiles `in0` on to `out0` on by the VAE's method of that name; `tiles` has the numbers of each rank's.

    With `last`, the VAE's weights then leave the rank's device for host memory.
    """

    op: ClassVar = Op.DECODE
    reply: ClassVar = DecodeReply
    vae: int
    method: str
    tiles: tuple[tuple[int, ...], ...]
    last: bool


OfVae: TypeAlias = HoldVae | DecodeTiles
AnyRequest: TypeAlias = (
    Load
    | Unload
    | ChangeWeights
    | SetStrengths
    | MakeMesh
    | Step
    | Sample
    | CheckCopies
    | Trim
    | MeasureDevice
    | Probe
    | OfVae
)
KINDS: dict[Op, type[AnyRequest]] = {kind.op: kind for kind in get_args(AnyRequest)}
