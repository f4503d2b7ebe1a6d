"""A call of a model computed by a plan and whole, to see whether both are the same; proof.py has the verdict.

Owns which calls are made and how large they may be. Every rank of the plan computes the whole call by ComfyUI's own
module with its hooks off; blocks are still gathered one at a time, so sharded weights stay sharded. A class that keeps
something between calls is called twice in a run of its own: the second call finds what the first one kept. Does not own
when it is asked, nor what memory there is (nodes/host/proof/proving.py), nor what a rank computes (worker/hosted.py).
"""

import math
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import OutOfMemoryInRankError, RaisedInRankError
from ..exchange_formats import EXACT
from ..models.hosted.calls import from_tree
from ..proof import NOT_PROVEN, REFUSED, Proof, judged
from ..redact_paths import redact_paths
from .calls import ModelCall, RunResult

MAX_TOKENS = 8192  # in one attention call; beyond, a whole call on one device takes long, or does not fit
STEP, LEAST = 8, 8  # of the height and width of a smaller latent: what patches of any family divide
AGAIN = {
    "timed": False,
    "trace": False,
    "local_attention": False,
    "whole": False,
    "step_cache": 0.0,
    "place": None,
    "attention": "",
    "exchange": EXACT,
}

Ask = Callable[[Sequence[ModelCall]], RunResult]
Room = Callable[[ModelCall], float]  # bytes that are free for a whole call's activations, over those it needs


def prove(
    ask: Ask,
    call: ModelCall,
    dtype: str,
    *,
    room: Room,
    possible: Callable[[ModelCall], bool],
    retract: Callable[[], None] = lambda: None,
    coarse: float = 0.0,
    keeps: bool = False,
) -> Proof:
    """Compute a call of a hosted model shared, whole and without exchange, and judge it; `coarse` as `judged`.

    `keeps`: its class keeps something between the calls of a run, so each is computed twice, and both are judged.

    A call with more than `MAX_TOKENS`, or that has no `room` (below 1), is made smaller, if `possible` says that the
    class takes what comes of it.

    Where the shared call raises and the whole one does not, the plan is refused with the error. Where the shared call
    works, so does the run: calls that are made for the proof alone and raise, or find no memory, prove nothing. In both
    cases the workers ended with the error: `retract` has that failure forgotten. Raises PoolError for every other
    failure, and where the shared call raises and the whole one too.
    """
    began, counted = time.perf_counter(), _ProofCalls(ask)
    try:
        proof = _attempt(
            counted, call, dtype, room=room, possible=possible, retract=retract, coarse=coarse, keeps=keeps
        )
    except (RaisedInRankError, OutOfMemoryInRankError) as error:
        if not counted.works:
            raise
        retract()
        reason = f"a call that is made for the proof alone failed: {redact_paths(error.cause)}"
        proof = Proof(verdict=NOT_PROVEN, reason=reason)
    return replace(proof, tokens=counted.tokens, calls=counted.calls, seconds=time.perf_counter() - began)


@dataclass
class _ProofCalls:
    """The calls of one proof. `works`: the run's own call came back; `tokens`: of the last call that was shared."""

    ask: Ask
    calls: int = 0
    tokens: int = 0
    works: bool = False

    def __call__(self, call: ModelCall) -> RunResult:
        self.calls += 1
        return self.ask([call])


def _attempt(
    ask: _ProofCalls,
    call: ModelCall,
    dtype: str,
    *,
    room: Room,
    possible: Callable[[ModelCall], bool],
    retract: Callable[[], None],
    coarse: float,
    keeps: bool,
) -> Proof:
    """The verdict of `prove` and its reason. Raises for each call that fails, but where that refuses the plan."""
    reason = ""
    times = 2 if keeps else 1
    shared: ModelCall | None = _under(call)
    while shared is not None:
        again = _of_a_run(shared, keeps=keeps)
        outs: list[RunResult] = []
        try:
            outs.append(ask(again))
            ask.tokens = tokens = max((step.tokens or 0 for step in outs[0].ran), default=0)
            fits = room(shared)
            small = tokens <= MAX_TOKENS and fits >= 1
            if small:
                outs += [ask(again) for _ in range(times - 1)]
        except RaisedInRankError as error:
            if ask.works and not outs:  # a latent that the run does not have, or that this class takes in no way
                raise
            retract()
            fitting = shared if (fits := room(shared)) >= 1 else smaller_call(shared, fits)
            fitting = fitting if fitting is not None and possible(fitting) else shared
            _computed(ask, _of_a_run(fitting, keeps=keeps, whole=True), times)
            return Proof(verdict=REFUSED, reason=redact_paths(error.cause))
        first, ask.works = not ask.works, True
        if small:
            whole = _computed(ask, _of_a_run(shared, keeps=keeps, whole=True), times)
            control = _computed(ask, _of_a_run(shared, keeps=keeps, local_attention=True), times)
            return judged(dtype, shared=_side_by_side(outs), whole=whole, control=control, coarse=coarse)
        reason = (
            f"{tokens} tokens are more than the {MAX_TOKENS} that one device computes whole"
            if tokens > MAX_TOKENS
            else f"a whole call of {tokens} tokens does not fit into the memory of one device"
        )
        share = min(MAX_TOKENS / max(tokens, 1), fits)
        smaller = smaller_call(shared, share) if first else None
        shared = smaller if smaller is not None and possible(smaller) else None
    return Proof(verdict=NOT_PROVEN, reason=f"{reason}, and no smaller latent fits the call's other inputs")


def arguments_of(call: ModelCall) -> tuple[str, ...]:
    """The names of a call's arguments, what is in them and what steers a class (words, yes and no), without sizes.

    Sorted; a tensor is told with its number of dims, an argument that is None not at all.
    """
    return tuple(sorted(set(_named(call.options["call"], call, ""))))


def smaller_call(call: ModelCall, share: float) -> ModelCall | None:
    """The same call with a corner of its latent, of at most about `share` of its size; None where there is no smaller.

    Whatever has the latent's height and width is cut alike: a mask, a picture beside it.
    """
    given: Any = from_tree(call.options["call"], list(call.tensors.values()))
    first = given["args"][0]
    x = first if isinstance(first, torch.Tensor) else first[0]
    if x.ndim < 4:
        return None
    old = x.shape[-2:]
    new = _smaller(old, share / 2)  # text and references stay as long as they are
    if new is None:
        return None

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[..., : new[0], : new[1]].contiguous() if tensor.shape[-2:] == old else tensor

    tensors = {name: cut(tensor) for name, tensor in call.tensors.items()}
    rows, numbers = call.out_shape
    if x is first:  # its output may have fewer channels, and is all there is
        numbers = numbers * math.prod(new) // math.prod(old)
    else:
        numbers -= (x.numel() - cut(x).numel()) // rows
    return replace(call, tensors=tensors, out_shape=(rows, numbers))


def _of_a_run(call: ModelCall, *, keeps: bool, **options: bool) -> ModelCall:
    """The call under these options; of a class that keeps something, in a run of its own."""
    run = {"place": {"run": f"proof {uuid.uuid4().hex}", "key": ""}} if keeps else {}
    return _under(call, **options, **run)


def _computed(ask: _ProofCalls, call: ModelCall, times: int) -> torch.Tensor:
    return _side_by_side([ask(call) for _ in range(times)])


def _side_by_side(results: Sequence[RunResult]) -> torch.Tensor:
    """The outputs of requests of one call each, (B, all their numbers)."""
    return torch.cat([result.outs[0] for result in results], 1)


def _under(call: ModelCall, **options: object) -> ModelCall:
    return replace(call, options={**call.options, **AGAIN, **options})


def _smaller(size: Sequence[int], share: float) -> tuple[int, int] | None:
    """Height and width of the same proportions, multiples of `STEP`, or what they were where that is less."""
    scale = math.sqrt(share)
    height, width = (min(side, max(LEAST, int(side * scale) // STEP * STEP)) for side in size)
    return None if (height, width) == tuple(size) else (height, width)


def _named(tree: object, call: ModelCall, path: str) -> Iterator[str]:
    """Each leaf of a tree (models/hosted/calls.py) by its path; entries of a list are one."""
    if tree is None:
        return
    if not isinstance(tree, dict):
        yield f"{path}={tree}" if isinstance(tree, bool | str) else path
        return
    ((tag, inner),) = tree.items()
    if tag == "t":
        yield f"{path}:{call.tensors[f't{inner}'].ndim}"
    elif tag == "d":
        for name, each in inner.items():
            yield from _named(each, call, f"{path}.{name}" if path else name)
    elif tag in ("l", "u"):
        several = [f"[{number}]" for number in range(len(inner))] if path == "args" else ["[]"] * len(inner)
        for index, each in zip(several, inner, strict=True):
            yield from _named(each, call, path + index)
    else:
        yield path
