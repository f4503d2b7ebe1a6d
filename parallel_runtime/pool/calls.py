"""Calls of a model as a caller gives them, what comes back of them, and their form on the wire.

Owns the names of several calls' tensors in one request and the sharing out of their rows. Does not own how tensors
travel (arena.py) nor what a rank does with its rows (worker/).
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..parallel.batch_groups import share_out
from ..plan import BatchSlice, ParallelPlan
from ..wire.replies import RankStep, StepReply
from .arena import OUT, Extent, dtype_name

TRACE_BYTES = 8 << 20  # gzipped; 57 blocks take about 0.1 MB
STREAMS = ("img", "txt")  # the inputs whose second dim counts tokens
TIMES = 10  # a step may be silent for as long as so many of the slowest of its like
REMEMBERED_SHAPES = 64
REMEMBERED_STEPS = 8
CHANGING = ("img", "timesteps", "control_in", "control_out")  # with each step; the others seldom within a prompt


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """One call of a model: `tensors` on any device, the shape and dtype of its result, and options of the engine.

    The first dim of the result is the batch: its rows may be run by different batch groups.
    """

    tensors: Mapping[str, torch.Tensor]
    out_shape: tuple[int, ...]
    out_dtype: torch.dtype
    options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if OUT in self.tensors:
            raise ValueError(f"a tensor is named {OUT!r}, which is the result's name; rename it")

    @property
    def rows(self) -> int:
        """The batch; 1 for a result without dims."""
        return self.out_shape[0] if self.out_shape else 1

    @property
    def tokens(self) -> int:
        """Tokens of a row, image and text; 1 for inputs that have none."""
        return sum(self.tensors[name].shape[1] for name in STREAMS if name in self.tensors) or 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Batch, image tokens, text tokens; 0 for tokens that nobody here can count."""
        img, txt = (self.tensors[name].shape[1] if name in self.tensors else 0 for name in STREAMS)
        return self.rows, img, txt


@dataclass(frozen=True)
class RunResult:
    """The calls' results in memory of their own, the ranks' replies in rank order, and the time that it took.

    The time is from copying the inputs to having the results, without loading, patching or starting before.
    `traces` are the ranks' traces, gzipped JSON, by rank; {} where nobody asked.
    """

    outs: list[torch.Tensor]
    ranks: list[StepReply]
    wall_s: float
    traces: dict[int, bytes]

    @property
    def ran(self) -> list[RankStep]:
        """What each rank of the plan ran."""
        return [reply.ran for reply in self.ranks if reply.ran is not None]

    @property
    def compile_s(self) -> float:
        """Seconds that the slowest rank took for graphs of its blocks."""
        return max((rank.compiled.compile_s for rank in self.ran if rank.compiled is not None), default=0.0)


def split_rows(calls: Sequence[ModelCall], plan: ParallelPlan) -> tuple[tuple[BatchSlice, ...], ...]:
    """The pieces of each of the plan's batch groups. Raises `ValueError` for no calls, and for a call without rows."""
    if not calls:
        raise ValueError("no calls to run; give at least one")
    # those of a call of ComfyUI's own module the ranks alone count (models/hosted/pass_call.py)
    counted = [call.tensors["img"].shape[1] for call in calls if "img" in call.tensors]
    tokens = min(counted, default=plan.num_patches)
    if plan.num_patches > tokens:
        raise ValueError(
            f"patches={plan.num_patches} is more than the image's {tokens} tokens; use fewer, or a bigger image"
        )
    if plan.batch_groups == 1 and all(call.rows for call in calls):  # nothing to share out
        return (tuple(BatchSlice(number, 0, call.rows) for number, call in enumerate(calls)),)
    return share_out([call.rows for call in calls], [call.tokens for call in calls], plan.batch_groups)


def shape_of(calls: Sequence[ModelCall]) -> Hashable:
    """What makes two requests of one model and plan take as long: the shapes of all that goes in."""
    return tuple(tuple((name, tuple(tensor.shape)) for name, tensor in call.tensors.items()) for call in calls)


class StepHistory:
    """How long the last steps of each shape took. A shape is whatever makes two steps take as long."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[Hashable, deque[float]] = OrderedDict()

    def note(self, shape: Hashable, seconds: float) -> None:
        """A step of that shape took `seconds`."""
        self._seconds.setdefault(shape, deque(maxlen=REMEMBERED_STEPS)).append(seconds)
        self._seconds.move_to_end(shape)
        if len(self._seconds) > REMEMBERED_SHAPES:
            self._seconds.popitem(last=False)

    def deadline_s(self, shape: Hashable, *, least_s: float) -> float:
        """The deadline of the next step of that shape, in seconds."""
        return max(least_s, TIMES * max(self._seconds.get(shape, (0.0,))))


def inputs_of(calls: Sequence[ModelCall]) -> dict[str, torch.Tensor]:
    """All tensors of one request: input `img` of call 1 is `1.img`.

    Those that last come first, so that they keep their places whatever the size of the others.
    """
    found = {f"{number}.{name}": tensor for number, call in enumerate(calls) for name, tensor in call.tensors.items()}
    return dict(sorted(found.items(), key=lambda item: item[0].split(".")[1] in CHANGING))


def results_of(calls: Sequence[ModelCall]) -> list[Extent]:
    """Where the results are to go, named `0.out` and so on."""
    return [
        Extent(f"{number}.{OUT}", dtype_name(call.out_dtype), tuple(call.out_shape))
        for number, call in enumerate(calls)
    ]


def traces_of(calls: Sequence[ModelCall], *, num_ranks: int) -> list[Extent]:
    """Room for each rank's trace, where a call has the option `trace`; [] where none has."""
    if not any(call.options.get("trace") for call in calls):
        return []
    return [Extent(f"trace.{rank}", "uint8", (TRACE_BYTES,)) for rank in range(num_ranks)]


def whole_trace(room: torch.Tensor, num_bytes: int) -> bytes:
    """A rank's trace, gzipped JSON. Raises `ValueError` for one that had no room."""
    if num_bytes > TRACE_BYTES:
        raise ValueError(f"a trace of {num_bytes} bytes, at most {TRACE_BYTES}; trace fewer calls, or a smaller batch")
    return bytes(room[:num_bytes].numpy())
