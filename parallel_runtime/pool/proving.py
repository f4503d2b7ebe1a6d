"""A call of a model computed by a plan and whole, to see whether both are the same; proof.py has the verdict.

Owns which calls are made and how large they may be. Every rank of the plan computes the whole call by ComfyUI's own
module with its hooks off; blocks are still gathered one at a time, so sharded weights stay sharded. A class that keeps
something between calls is called twice in a run of its own: the second call finds what the first one kept. A plan that
was found is proven on two sizes. Does not own when it is asked, nor what memory there is (nodes/host/proof/proving.py),
nor what a rank computes (worker/hosted.py).
"""

import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import OutOfMemoryInRankError, RaisedInRankError
from ..exchange_formats import EXACT
from ..model_call import CallPlace, ModelCall
from ..models.hosted.calls import from_tree
from ..proof import NOT_PROVEN, PROVEN, REFUSED, Proof, judged
from ..redact_paths import redact_paths
from .calls import RunResult

MAX_TOKENS = 8192  # in one attention call; beyond, a whole call on one device takes long, or does not fit
STEP, LEAST = 8, 8  # of the height and width of a smaller latent: what patches of any family divide
ONE_SIZE = "a plan that was found is proven on two sizes, and no other size of latent fits the call's other inputs"
AGAIN = {
    "timed": False,
    "trace": False,
    "local_attention": False,
    "whole": False,
    "step_cache": 0.0,
    "attention": "",
    "exchange": EXACT,
    "exact_fp32": True,  # TF32 rounds a shared call otherwise than a whole one, by more than a proof allows fp32
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
    two_sizes: bool = False,
) -> Proof:
    """Compute a call of a hosted model shared, whole and without exchange, and judge it; `coarse` as `judged`.

    `keeps`: its class keeps something between the calls of a run, so each is computed twice, and both are judged.
    `two_sizes`: the same again with a latent of another size, and both have to be proven; a call of which no other size
    can be made proves nothing. One that `possible` does not say of is tried all the same.

    A call with more than `MAX_TOKENS`, or that has no `room` (below 1), is made smaller, if `possible` says that the
    class takes what comes of it.

    Where the shared call raises and the whole one does not, the plan is refused with the error. Where the shared call
    works, so does the run: calls that are made for the proof alone and raise, or find no memory, prove nothing. In both
    cases the workers ended with the error: `retract` has that failure forgotten. Raises PoolError for every other
    failure, and where the shared call raises and the whole one too.
    """
    began = time.perf_counter()
    trial = _Trial(ask, dtype, room, possible, retract, coarse, keeps)
    try:
        proof, at = trial.attempt(call)
        tokens = trial.tokens
        if two_sizes and proof.verdict == PROVEN:
            others = [each for each in other_sizes(at) if room(each) >= 1]
            other = next(filter(possible, others), others[0] if others else None)  # ranks may take what needs values
            proof = trial.at_another_size(proof, other)
            trial.tokens = tokens
    except (RaisedInRankError, OutOfMemoryInRankError) as error:
        if not trial.works:
            raise
        retract()
        reason = f"a call that is made for the proof alone failed: {redact_paths(error.cause)}"
        proof = Proof(verdict=NOT_PROVEN, reason=reason)
    return replace(proof, tokens=trial.tokens, calls=trial.calls, seconds=time.perf_counter() - began)


@dataclass
class _Trial:
    """The calls of one proof, with what `prove` was given for them. `works`: the run's own call came back; `tokens`: of
    the last call that was shared."""

    ask: Ask
    dtype: str
    room: Room
    possible: Callable[[ModelCall], bool]
    retract: Callable[[], None]
    coarse: float
    keeps: bool
    calls: int = 0
    tokens: int = 0
    works: bool = False

    def attempt(self, call: ModelCall) -> tuple[Proof, ModelCall]:
        """The verdict of `prove` on one size and its reason, and the last call that it is about.

        Raises for each call that fails, but where that refuses the plan.
        """
        reason = ""
        shared: ModelCall | None = _under(call)
        while shared is not None:
            again = self._of_a_run(shared)
            outs: list[RunResult] = []
            try:
                outs.append(self._asked(again))
                self.tokens = tokens = max((step.tokens or 0 for step in outs[0].ran), default=0)
                fits = self.room(shared)
                small = tokens <= MAX_TOKENS and fits >= 1
                if small and self.keeps:
                    outs.append(self._asked(again))
            except RaisedInRankError as error:
                if self.works and not outs:  # a latent that the run does not have, or that this class takes in no way
                    raise
                self.retract()
                fitting = shared if (fits := self.room(shared)) >= 1 else smaller_call(shared, fits)
                fitting = fitting if fitting is not None and self.possible(fitting) else shared
                self._computed(fitting, whole=True)
                return Proof(verdict=REFUSED, reason=redact_paths(error.cause)), shared
            first, self.works = not self.works, True
            if small:
                return self._judged(shared, _side_by_side(outs)), shared
            reason = (
                f"{tokens} tokens are more than the {MAX_TOKENS} that one device computes whole"
                if tokens > MAX_TOKENS
                else f"a whole call of {tokens} tokens does not fit into the memory of one device"
            )
            share = min(MAX_TOKENS / max(tokens, 1), fits)
            smaller = smaller_call(shared, share) if first else None
            shared = smaller if smaller is not None and self.possible(smaller) else None
        return Proof(verdict=NOT_PROVEN, reason=f"{reason}, and no smaller latent fits the call's other inputs"), call

    def at_another_size(self, proof: Proof, other: ModelCall | None) -> Proof:
        """What is known once the call of another size is judged too; of both errors the larger."""
        if other is None:
            return Proof(verdict=NOT_PROVEN, reason=ONE_SIZE)
        here = self._judged(other, self._computed(other))
        if here.verdict != PROVEN or here.error is None or here.control is None:
            return replace(here, reason=f"at another size: {here.reason}")
        error, control = max(proof.error or 0.0, here.error), min(proof.control or 0.0, here.control)
        return replace(proof, error=error, control=control)

    def _judged(self, call: ModelCall, shared: torch.Tensor) -> Proof:
        """The verdict on a call that was computed shared."""
        whole, control = self._computed(call, whole=True), self._computed(call, local_attention=True)
        return judged(self.dtype, shared=shared, whole=whole, control=control, coarse=self.coarse)

    def _asked(self, call: ModelCall) -> RunResult:
        self.calls += 1
        return self.ask([call])

    def _computed(self, call: ModelCall, **options: bool) -> torch.Tensor:
        """The result of the call under these options, of a class that keeps something the results of two."""
        again = self._of_a_run(call, **options)
        return _side_by_side([self._asked(again) for _ in range(2 if self.keeps else 1)])

    def _of_a_run(self, call: ModelCall, **options: bool) -> ModelCall:
        """The call under these options; of a class that keeps something, in a run of its own."""
        return _under(call, place=CallPlace(f"proof {uuid.uuid4().hex}", "") if self.keeps else None, **options)


def arguments_of(call: ModelCall, *, closely: bool = False) -> tuple[str, ...]:
    """The names of a call's arguments, what is in them and what steers a class (words, yes and no), without sizes.

    Sorted; a tensor is told with its number of dims, an argument that is None not at all. `closely`: of each number,
    too, whether it is 0, 1 or between them, since classes choose by that: by the side of cfg, by a strength of 1, which
    needs no mask.
    """
    return tuple(sorted(set(_named(call.options["call"], call, "", closely=closely))))


def smaller_call(call: ModelCall, share: float) -> ModelCall | None:
    """The same call with a corner of its latent, of at most about `share` of its size; None where there is no smaller.

    Whatever has the latent's height and width is cut alike: a mask, a picture beside it, a ControlNet's rows;
    what has a multiple of both, or a row for each number of a channel. Of a latent without a height, the length is.
    """
    old = _size_of(call)
    new = _smaller(old, share / 2)  # text and references stay as long as they are
    return None if new == old else _resized(call, new)


def other_sizes(call: ModelCall) -> Iterator[ModelCall]:
    """The same call with about half of its latent, and with some rows more, which repeat its first ones."""
    smaller, old = smaller_call(call, 1.0), _size_of(call)
    if smaller is not None:
        yield smaller
    if old:
        yield _resized(call, (old[0] + STEP, *old[1:]))


def _latent(call: ModelCall) -> tuple[torch.Tensor, bool]:
    """The call's latent, of several the first, and whether it is the only one."""
    given: Any = from_tree(call.options["call"], list(call.tensors.values()))
    first = given["args"][0]
    return (first, True) if isinstance(first, torch.Tensor) else (first[0], False)


def _size_of(call: ModelCall) -> tuple[int, ...]:
    """Height and width of a latent (B, C, ..., H, W), the length of one (B, C, S)."""
    return tuple(_latent(call)[0].shape[2:][-2:])


def _resized(call: ModelCall, new: tuple[int, ...]) -> ModelCall:
    """The call with its first rows and columns alone, or with these once more at its end."""
    (x, alone), old = _latent(call), _size_of(call)

    tokens = math.prod(x.shape[2:])

    def fit(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim in (2, 3) and tensor.shape[1] == tokens and tensor is not x:  # a timestep for each of them
            return _with_sides(tensor, {1: tokens * math.prod(new) // math.prod(old)})
        here = tensor.shape[-len(old) :]
        times = here[0] // old[0] if tensor.ndim > len(old) else 0  # a camera's rays have a row for each pixel
        if not times or here != tuple(times * side for side in old) or (times > 1 and len(old) < 2):
            return tensor
        return _with_sides(tensor, {dim - len(old): times * side for dim, side in enumerate(new)})

    def fit_rows(tensor: torch.Tensor) -> torch.Tensor:  # a ControlNet's, (B, S, C): a row for each token of the latent
        rows, rest = divmod(tensor.shape[1] * math.prod(new), math.prod(old))
        return fit(tensor) if tensor.ndim != 3 or rest or not rows else _with_sides(tensor, {1: rows})

    listed: Any = call.options.get("residuals", ())
    residuals = {f"t{number}" for number in listed}
    tensors = {name: (fit_rows if name in residuals else fit)(tensor) for name, tensor in call.tensors.items()}
    rows, numbers = call.out_shape
    if alone:  # its output may have fewer channels, and is all there is
        numbers = numbers * math.prod(new) // math.prod(old)
    else:
        numbers -= (x.numel() - fit(x).numel()) // rows
    return replace(call, tensors=tensors, out_shape=(rows, numbers))


def _with_sides(tensor: torch.Tensor, sides: Mapping[int, int]) -> torch.Tensor:
    """The tensor with its first rows of some dims alone, or with these once more at its end."""
    for dim, side in sides.items():
        copies = -(-side // tensor.shape[dim])
        tensor = torch.cat([tensor] * copies, dim).narrow(dim, 0, side)
    return tensor.contiguous()


def _side_by_side(results: Sequence[RunResult]) -> torch.Tensor:
    """The outputs of requests of one call each, (B, all their numbers)."""
    return torch.cat([result.outs[0] for result in results], 1)


def _under(call: ModelCall, place: CallPlace | None = None, **options: object) -> ModelCall:
    return replace(call, place=place, options={**call.options, **AGAIN, **options})


def _smaller(size: Sequence[int], share: float) -> tuple[int, ...]:
    """A size of the same proportions, multiples of `STEP`, or what it was where that is less."""
    scale = share ** (1 / max(1, len(size)))
    return tuple(min(side, max(LEAST, int(side * scale) // STEP * STEP)) for side in size)


def _named(tree: object, call: ModelCall, path: str, *, closely: bool) -> Iterator[str]:
    """Each leaf of a tree (models/hosted/calls.py) by its path; entries of a list are one."""
    if tree is None:
        return
    if not isinstance(tree, dict):
        said = f"={tree}" if isinstance(tree, bool | str) or (closely and tree in (0, 1)) else ""
        yield path + ("=part" if closely and isinstance(tree, float) and 0 < tree < 1 else said)
        return
    ((tag, inner),) = tree.items()
    if tag == "t":
        yield f"{path}:{call.tensors[f't{inner}'].ndim}"
    elif tag == "d":
        for name, each in inner.items():
            yield from _named(each, call, f"{path}.{name}" if path else name, closely=closely)
    elif tag in ("l", "u"):
        several = [f"[{number}]" for number in range(len(inner))] if path == "args" else ["[]"] * len(inner)
        for index, each in zip(several, inner, strict=True):
            yield from _named(each, call, path + index, closely=closely)
    else:
        yield path
