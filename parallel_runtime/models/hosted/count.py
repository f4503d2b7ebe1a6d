"""What a call of ComfyUI's module takes, counted operation by operation: FLOPs, bytes through memory, what ranks send.

Weights without values compute nothing, so a model of any size is counted in seconds; a module whose forward reads
values of them, or of what comes of them, is counted in small real calls instead. The call is counted twice: by one
rank, and by the first of two ranks that share its tokens, through the same hooks as in the workers over exchanges that
only note their bytes. What is halved is shared, the rest every rank computes. Each count is fitted as a polynomial of
image and text tokens.

Runs in a process of its own that has imported ComfyUI with its attention replaced (reference.py). Owns counting and
fitting. What it is good for is the planner's, whose `CountedModel` is made of the result. FLOPs of an operation are
those of torch.utils.flop_counter.
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ...parallel.attention import QKV, AttentionFunction, SequenceParallelAttention
from ...parallel.collectives import Axis
from ..specs import find_spec
from ..specs.spec import Keeps, ShardingSpec
from .attention import installed
from .count_kept import STORED, KeepsOtherwiseError, filled_once, kept_bytes, options_of
from .first_block import CachedBlocks, Residuals, refuse_step_cache
from .hooks import SharedModel
from .kept_state import keeps_of
from .random_calls import Size, call_of, find_widths, latent_shapes
from .stage import staged_blocks
from .valueless import Valueless, has_values

RANKS = 2  # that share the tokens in the second count
RESIDUAL_BYTES = "residual_bytes"  # what a step cache keeps, which all tokens' ranks share out
FEW_KEYS = "few_keys"  # of the bytes that are exchanged, those of attention of more queries than keys
MODULE, ATTENDED, EXCHANGE = "module", "attended", "exchange"  # where an operation belongs
Counts = dict[str, float]


class OperationCounter(TorchDispatchMode):
    """Adds up what the operations inside take, by where they belong: `counts["module.matmul_flops"]` and so on."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counts = defaultdict(float)
        self.where, self.off = MODULE, False
        self.live = 0  # bytes of all tensors that the operations made and that are still held
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run the operation, and count it."""
        given = dict(kwargs or {})
        out = func(*args, **given)
        if not self.off:
            self._count(func, args, given, out)
            self.hold(out, given=(args, given))
        return out

    def hold(self, out: Any, *, given: Any) -> None:  # noqa: ANN401
        """Count the bytes of new tensors until they are freed; the most at once is `counts["held_bytes"]`.

        An output in the memory of what was `given`, such as a view of a weight, is not new.
        """
        old = {id(storage) for storage in _storages_of(given)}
        for storage in _storages_of(out):
            key, size = id(storage), storage.nbytes()
            if key in self._storages or key in old:
                continue

            def let_go(_: object, key: int = key, size: int = size) -> None:
                self.live -= size
                self._storages.pop(key, None)

            self._storages[key] = weakref.ref(storage, let_go)
            self.live += size
        self.counts["held_bytes"] = max(self.counts["held_bytes"], self.live)

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:  # noqa: ANN401
        self.add("operations", 1)
        returned = func._schema.returns
        if returned and all(each.alias_info is not None and not each.alias_info.is_write for each in returned):
            return  # a view moves nothing
        tensors = [each for each in tree_leaves((args, dict(kwargs), out)) if isinstance(each, Tensor)]
        flops = flop_registry.get(func._overloadpacket)
        if flops is None:
            self.add("moved_bytes", float(sum(each.nbytes for each in {id(each): each for each in tensors}.values())))
        else:
            self.add("matmul_flops", flops(*args, **kwargs, out_val=out))

    def add(self, name: str, amount: float) -> None:
        """Count an amount where the counter stands."""
        self.counts[f"{self.where}.{name}"] += amount

    @contextmanager
    def at(self, where: str, *, off: bool = False) -> Iterator[None]:
        """Inside, operations belong to `where`; `off`: they are not counted."""
        before, self.where, self.off = (self.where, self.off), where, off
        try:
            yield
        finally:
            self.where, self.off = before

    def attention(self, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """ComfyUI's attention function, counted as one operation that keeps no scores."""

        def counted(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            heads: int,
            mask: Any = None,  # noqa: ANN401
            attn_precision: torch.dtype | None = None,
            skip_reshape: bool = False,
            *more: Any,  # noqa: ANN401
            **options: Any,  # noqa: ANN401
        ) -> Tensor:
            q, k, v = map(installed().kernel.take, (q, k, v))
            with self.at(self.where, off=True):
                out = stock(q, k, v, heads, mask, attn_precision, skip_reshape, *more, **options)
            self.hold(out, given=(q, k, v))
            dim = 2 if skip_reshape else 1
            scores = float(q.shape[0] * heads * q.shape[dim] * k.shape[dim])
            self.add("attention_flops", 4.0 * scores * (q.numel() / (q.shape[0] * heads * q.shape[dim])))
            self.add("scores", scores)
            self.add("operations", 1)
            self.add("moved_bytes", float(sum(each.nbytes for each in (q, k, v, out))))
            self.counts["tokens"] = max(self.counts["tokens"], k.shape[dim])
            return out

        return counted


def _storages_of(values: Any) -> list[torch.UntypedStorage]:  # noqa: ANN401
    """The memory of all dense tensors in there."""
    tensors = (each for each in tree_leaves(values) if isinstance(each, Tensor) and each.layout is torch.strided)
    return [(each.meta if isinstance(each, Valueless) else each).untyped_storage() for each in tensors]


class SilentAxis(Axis):
    """An axis without other ranks: what is sent is counted, what arrives is zeros."""

    def all_to_all(self, send: Tensor, *, send_lengths: tuple[int, ...], receive_lengths: tuple[int, ...]) -> Tensor:
        """As `Axis.all_to_all`."""
        row_bytes = send.nbytes // max(1, send.shape[0])
        self.traffic.add((send.shape[0] - send_lengths[self.index]) * row_bytes)
        return send.new_zeros((sum(receive_lengths), *send.shape[1:]))

    def start_all_to_all(self, send: Tensor, **lengths: tuple[int, ...]) -> Any:  # noqa: ANN401
        """As `Axis.start_all_to_all`; what arrives is there at once."""
        return _Arrived(self.all_to_all(send, **lengths))

    def all_gather(self, mine: Tensor, whole: Tensor) -> None:
        """As `Axis.all_gather`."""
        self.start_all_gather(mine, whole)

    def start_all_gather(self, mine: Tensor, whole: Tensor, lengths: object = None) -> Any:  # noqa: ANN401
        """As `Axis.start_all_gather`; what arrives is there at once."""
        self.traffic.add((self.size - 1) * mine.nbytes)
        return _Arrived(whole)


class _Arrived:
    def __init__(self, received: Tensor) -> None:
        self._received = received

    def wait(self) -> Tensor:
        """Nothing is under way."""
        return self._received


class CountedSequence(SequenceParallelAttention):
    """A rank's part of a sequence, whose attention and exchanges are counted apart."""

    def __init__(self, parts: int, counter: OperationCounter) -> None:
        super().__init__(ring=SilentAxis("ring"), ulysses=SilentAxis("ulysses", size=parts))
        self.counter = counter

    def attend(self, kernel: AttentionFunction, qkv: QKV, **more: Any) -> Tensor:  # noqa: ANN401
        """As `SequenceParallelAttention.attend`."""
        q, k, v = qkv
        counts, before = self.counter.counts, self.ulysses.traffic.num_bytes
        counts["exchanges"] += 1
        sent = {"query_bytes": q.nbytes + q.nbytes // q.shape[-1] * v.shape[-1]}  # the output goes back
        # of the keys: the others are on every rank
        sent["key_bytes"] = (1 - more.get("common", 0) / k.shape[2]) * (k.nbytes + v.nbytes)
        for name, num_bytes in sent.items():
            counts[name] += num_bytes
            if sum(more["key_lengths"]) < sum(more["query_lengths"]):  # whose keys ranks gather where that is less
                counts[f"{FEW_KEYS}.{name}"] += num_bytes
        counts["key_heads"] = min(counts.get("key_heads", math.inf), k.shape[1])

        def counted(*args: Any) -> Tensor:  # noqa: ANN401
            with self.counter.at(ATTENDED):
                return kernel(*args)

        with self.counter.at(EXCHANGE):
            out = super().attend(counted, qkv, **more)
        counts["sent_bytes"] += self.ulysses.traffic.num_bytes - before
        return out

    def gather(self, tensor: Tensor, *, dim: int, lengths: Sequence[int]) -> Tensor:
        """As `SequenceParallelAttention.gather`."""
        if self.counter.where == EXCHANGE:  # too few heads: part of an attention
            return super().gather(tensor, dim=dim, lengths=lengths)
        self.counter.counts["gathers"] += 1
        self.counter.counts["gathered_bytes"] += tensor.nbytes
        with self.counter.at(EXCHANGE):
            return super().gather(tensor, dim=dim, lengths=lengths)


def count_call(module: torch.nn.Module, spec: ShardingSpec | None, parts: int, call: Callable[[], object]) -> Counts:
    """What `call`, which calls `module`, takes on the first of `parts` ranks. Without a spec no tokens are shared."""
    counter, switch = OperationCounter(), installed()
    shared = None if spec is None else SharedModel(module, spec, CountedSequence(parts, counter))
    stock, switch.kernel.stock = switch.kernel.stock, counter.attention(switch.kernel.stock)
    try:
        with torch.no_grad(), counter:
            call()
    finally:
        switch.kernel.stock = stock
        if shared is not None:
            shared.remove()
    return dict(counter.counts)


def residual_bytes(
    module: torch.nn.Module, spec: ShardingSpec | None, calls: Sequence[Callable[[], object]]
) -> list[Counts]:
    """What a step cache keeps of each call, by its name among the counts; nothing where it can skip no block."""
    try:
        refuse_step_cache(module, 1.0)
    except ValueError:
        spec = None
    if spec is None:
        return [{} for _ in calls]
    blocks, found = CachedBlocks(module, spec), list[Counts]()

    def unknown(_: Tensor) -> Tensor:  # nothing is kept yet, so the call is computed
        return torch.tensor([0.0, 0.0, 1.0])

    for call in calls:
        kept = Residuals()
        with torch.no_grad(), blocks.calling(kept, threshold=0.0, total=unknown, call_of=lambda: None):
            call()
        found.append({RESIDUAL_BYTES: float(kept.nbytes)})
    return found


@dataclass(frozen=True)
class Point:
    """A call that is counted: a picture of so many pixels a side, and tokens of text."""

    width: int
    height: int
    text_tokens: int

    def size(self, frames: int | None) -> Size:
        """As random calls are asked for."""
        return Size(width=self.width, height=self.height, text_tokens=self.text_tokens, batch=1, seed=0, frames=frames)


# Sides and tokens that every patch and window divides, and two ranks; PixArt takes no side of 256. Six for six
# coefficients.
POINTS = tuple(
    Point(*each)
    for each in ((384, 384, 32), (512, 384, 32), (512, 512, 32), (384, 384, 64), (512, 384, 64), (384, 384, 96))
)
# Computed, so smaller; text counts there as tokens of the picture do.
REAL_POINTS = tuple(Point(*each) for each in ((256, 256, 32), (512, 256, 32), (512, 512, 32)))
# Of which each rank has all of one part and some of the other.
SHARED = frozenset(
    f"{MODULE}.{name}" for name in ("attention_flops", "matmul_flops", "moved_bytes", "operations", "scores")
)
Polynomial = tuple[float, ...]  # of 1, n, n n, t, n t, t t, for n tokens of the picture and t of the text


def count_model(model: Any, device: torch.device, *, frames: int | None = None) -> dict[str, Any]:  # noqa: ANN401
    """What ComfyUI's BaseModel takes a call and a row, as `planner.counted.CountedModel` reads it.

    `device`: where its weights are, or say that they are; they are computed with only if they have values. Raises
    `ValueError` for a model that cannot be called so, and `RuntimeError` or `NotImplementedError` for one that reads
    values which are not there.
    """
    module = model.diffusion_model
    spec, real = find_spec(module), has_values(module)
    points = REAL_POINTS if real else POINTS
    widths = find_widths(model, points[0].size(frames), device)
    numbers, calls = [], []
    for point in points:
        shapes = latent_shapes(model, point.size(frames))
        calls.append(call_of(model, point.size(frames), shapes, widths, device))
        numbers.append(float(sum(math.prod(shape) for shape in shapes)))
    skipping = residual_bytes(module, spec, calls)  # first: its functions go with those that are taken off
    keeps = keeps_of(module, spec)
    alone = [_calls_of_a_run(module, spec, keeps, 1, call) for call in calls]
    keeps = keeps if len(alone[0]) > 1 else None
    shared = alone if spec is None else [_calls_of_a_run(module, spec, keeps, RANKS, call) for call in calls]
    for counts, bytes_of_call in zip(alone, skipping, strict=True):
        counts[0] |= bytes_of_call
    counted = [each[0].get("tokens", 0.0) for each in alone]
    per_number = _tokens_a_number(numbers, counted, channels=shapes[0][1])
    tokens = [(number * per_number, float(point.text_tokens)) for number, point in zip(numbers, points, strict=True)]
    kept: dict[str, Polynomial] = {}
    if keeps is not None:
        of_calls = [kept_bytes(module, keeps, call) for call in calls]
        kept = {name: _fit(tokens, [each[name] for each in of_calls], real=real) for name in of_calls[0]}
        for one, two, bytes_of_call in zip(alone, shared, of_calls, strict=True):
            for filling in (one[1], two[1]):  # what the counter saw it keep
                filling["held_bytes"] -= bytes_of_call[STORED[0]]
    whole, split = _fitted(tokens, alone, shared, 0, shares=spec is not None, real=real)
    return {
        "numbers_per_token": 1 / per_number,
        "key_heads": int(alone[0][0].get("key_heads", 0)),
        "from_real_calls": real,
        "staged_blocks": 0 if spec is None or spec.one_stage else staged_blocks(module, spec),
        "whole": whole,
        "shared": split,
        "kept_bytes": kept,
        "filling": _fitted(tokens, alone, shared, 1, shares=True, real=real) if kept else None,
    }


def _calls_of_a_run(
    module: torch.nn.Module, spec: ShardingSpec | None, keeps: Keeps | None, parts: int, call: Callable[..., object]
) -> list[Counts]:
    """What a call takes; of a class that keeps something as planned, one that finds it, and the one that fills it."""
    if keeps is not None:
        given = partial(call, **options_of(keeps, STORED[0]))
        with suppress(KeepsOtherwiseError), filled_once(module, keeps):
            filling = count_call(module, spec, parts, given)
            return [count_call(module, spec, parts, given), filling]
    return [count_call(module, spec, parts, call)]


def _fitted(
    tokens: Sequence[tuple[float, float]],
    alone: Sequence[Sequence[Counts]],
    shared: Sequence[Sequence[Counts]],
    number: int,
    *,
    shares: bool,
    real: bool,
) -> tuple[dict[str, Polynomial], dict[str, Polynomial]]:
    """Of these calls of a run what every rank takes and what ranks share, by name; `shares`: they share tokens."""
    one_rank, of_two = ([counts[number] for counts in found] for found in (alone, shared))
    whole: dict[str, Polynomial] = {}
    split: dict[str, Polynomial] = {}
    for name in sorted({name for counts in (*one_rank, *of_two) for name in counts} - {"tokens"}):
        ones, twos = ([counts.get(name, 0.0) for counts in found] for found in (one_rank, of_two))
        if name == "held_bytes":  # the most at once is no polynomial, and grows with the tokens
            whole[name], split[name] = _held(sum(tokens[2]), ones[2], twos[2])
            continue
        if name == RESIDUAL_BYTES:
            split[name] = _fit(tokens, ones, real=real)
        elif name in SHARED and shares:
            whole[name] = _fit(tokens, [2 * two - one for one, two in zip(ones, twos, strict=True)], real=real)
            split[name] = _fit(tokens, [2 * (one - two) for one, two in zip(ones, twos, strict=True)], real=real)
        else:
            exchanged = name.startswith(EXCHANGE) or name == "sent_bytes"
            whole[name] = _fit(tokens, twos if exchanged else ones, real=real)
    return whole, split


def _tokens_a_number(numbers: Sequence[float], tokens: Sequence[float], *, channels: int) -> float:
    """How many tokens one more number of the latent makes, of the first two points, whose texts are equal; as if
    patches were of 2 x 2 where no tokens were counted."""
    return (tokens[1] - tokens[0]) / (numbers[1] - numbers[0]) or 1 / (4 * channels)


def _fit(tokens: Sequence[tuple[float, float]], amounts: Sequence[float], *, real: bool) -> Polynomial:
    """The polynomial through all points; of real calls in the tokens of picture and text together."""
    if real:
        rows = [[1.0, n + t, (n + t) ** 2] for n, t in tokens]
        constant, linear, square = _solved(rows, amounts)
        return constant, linear, square, linear, 2 * square, square
    return _solved([[1.0, n, n * n, t, n * t, t * t] for n, t in tokens], amounts)


def _held(tokens: float, one: float, two: float) -> tuple[Polynomial, Polynomial]:
    """What every rank holds, and what they share, of what one rank and one of two held at so many tokens."""
    everywhere, slope = max(0.0, 2 * two - one) / tokens, min(one, 2 * (one - two)) / tokens
    return (0.0, everywhere, 0.0, everywhere, 0.0, 0.0), (0.0, slope, 0.0, slope, 0.0, 0.0)


def _solved(rows: Sequence[Sequence[float]], amounts: Sequence[float]) -> Polynomial:
    left = torch.tensor(rows, dtype=torch.float64)
    scale = left.abs().amax(0)  # else squares of thousands stand next to ones
    found = torch.linalg.solve(left / scale, torch.tensor(amounts, dtype=torch.float64)) / scale
    return tuple(found.tolist())
