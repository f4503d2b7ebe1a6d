"""ComfyUI's EasyCache and LazyCache in a run inside the workers: which are known, and what the ranks are told of them.

A cache is taken into the ranks where it is ComfyUI's own and, on a made-up run, its functions skip what
parallel_runtime/stock_caches.py skips and return the same: that is tried, so it depends on no version. Another one is
a wrapper like any other. Owns both, and what a stock call shows of a run. Does not own the arithmetic in the ranks.
"""

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ....parallel_runtime.sampler_recurrence import SamplerRecurrence
from ....parallel_runtime.stock_caches import COMPUTE, MAY_SKIP, NOTE, CachedRows, SkipDecision, StockCache
from ....parallel_runtime.wire.protocol import dtype_name
from ..contract.comfyui import WrappersMP, comfy
from ..contract.order import of_step_cache
from .model_sampling import HostLoopError
from .run_context import run_of
from .worker_loop_calls import captured, cond_names

# The kinds of wrappers of each cache inside a run, the deciding one last.
KINDS = {
    "EasyCacheHolder": (WrappersMP.CALC_COND_BATCH, WrappersMP.DIFFUSION_MODEL),
    "LazyCacheHolder": (WrappersMP.PREDICT_NOISE,),
}
EASY = "EasyCacheHolder"
TRIED = (1, 4, 24, 24)  # the latent of the made-up run
TRIED_THRESHOLD, TRIED_CALLS = 0.4, 12
# What a cache of another version may raise where it is made or called in another way.
OTHERWISE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True)
class RunCache:
    """A run's cache.

    `cache`: as the ranks take it; `looked_at`: a latent (1, C, ..) of ones where it looks; `holder`: ComfyUI's own,
    which counts what was skipped.
    """

    cache: StockCache
    looked_at: torch.Tensor
    holder: Any


@dataclass(frozen=True, kw_only=True)
class SeenCalls:
    """What stock calls of the model show.

    `sides` of each call in its order; `dtype` of what goes in; `is_latent`: whether ComfyUI makes the denoised latent
    of just that.
    """

    sides: list[list[int]]
    dtype: torch.dtype
    is_latent: bool


def cache_keys(model_options: Mapping[str, Any], inside: Mapping[str, Mapping[str, list]]) -> list[tuple[str, str]]:
    """Kind and key of the wrappers `inside` a run that are a known cache's alone; none for another cache."""
    try:
        return _cache_keys(model_options, inside)
    except OTHERWISE:
        return []


def _cache_keys(model_options: Mapping[str, Any], inside: Mapping[str, Mapping[str, list]]) -> list[tuple[str, str]]:
    holder = model_options.get("transformer_options", {}).get("easycache")
    kinds = KINDS.get(type(holder).__name__, ())
    found = {
        kind: [(key, each) for key, wrappers in by_key.items() for each in wrappers if of_step_cache(each)]
        for kind, by_key in inside.items()
    }
    found = {kind: each for kind, each in found.items() if each}
    if holder is None or not of_step_cache(type(holder)) or set(found) != set(kinds):
        return []
    if any(len(each) > 1 for each in found.values()) or holder.verbose:  # it logs each step
        return []
    ((_, decides),) = found[kinds[-1]]
    known = _tried(type(holder), decides, holder.subsample_factor, holder.offload_cache_diff)
    keys = [(kind, key) for kind, each in found.items() for key, _ in each]
    return [(kind, key) for kind, key in keys if known is not None and len(inside[kind][key]) == 1]


def cache_of_run(
    guider: comfy.samplers.CFGGuider,
    model_options: Mapping[str, Any],
    x: torch.Tensor,
    sigma: torch.Tensor,
    recurrence: SamplerRecurrence,
) -> RunCache | None:
    """The cache of a run whose wrappers `cache_keys` knows; None without, and where ComfyUI would never ask it.

    `x` (B, C, ..) at `sigma` (1,), as the first call. Raises `HostLoopError` for a latent that the ranks cannot
    compare as it does.
    """
    holder = model_options.get("transformer_options", {}).get("easycache")
    wrappers = model_options.get("transformer_options", {}).get("wrappers", {})
    kinds = KINDS.get(type(holder).__name__, ())
    around = [each for key in wrappers.get(kinds[-1], {}) for each in wrappers[kinds[-1]][key]] if kinds else []
    decides = next((each for each in around if of_step_cache(each)), None)
    if decides is None:
        return None
    easy, plan = type(holder).__name__ == EASY, run_of(model_options).plan
    if plan.data > 1 and len(x) > 1:
        raise HostLoopError(
            f"{holder.name} compares all images, and data={plan.data} keeps them apart; use cfg or ulysses"
        )
    if x.shape[1] != holder.output_channels and x.ndim > 3:
        raise HostLoopError(f"{holder.name} compares {holder.output_channels} of the latent's {x.shape[1]} channels")
    told: dict[str, Any] = {"dtype": "float32"}
    if easy:
        if computes_around(type(guider.inner_model.diffusion_model)):
            raise HostLoopError(f"the model computes around what {holder.name} keeps")
        seen = _seen(guider, model_options, x, sigma, holder)
        if seen is None:
            return None
        in_place = _tried(type(holder), decides, holder.subsample_factor, holder.offload_cache_diff)
        told = {
            "dtype": dtype_name(seen.dtype),
            "first": seen.sides[0][0],
            "together": len(seen.sides[0]) > 1,
            "overwrites": bool(in_place) and seen.is_latent,
        }
    calls = _letters(holder, [state.sigma for state in recurrence.states if state.sigma is not None], easy=easy)
    cache = StockCache(easy=easy, threshold=float(holder.reuse_threshold), calls=calls, **told)
    return RunCache(cache=cache, looked_at=_looked_at(holder, x.shape, easy=easy), holder=holder)


def computes_around(kind: type) -> bool:
    """Whether the forward of a class of ComfyUI computes with what wrappers around its `_forward` return."""
    forward = next(vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base))
    *_, last = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0].body  # type: ignore[attr-defined]
    value = last.value if isinstance(last, ast.Return) else None
    return not (isinstance(value, ast.Call) and getattr(value.func, "attr", "") in ("execute", "forward"))


def _letters(holder: Any, sigmas: Iterable[float], *, easy: bool) -> str:  # noqa: ANN401  ComfyUI's
    """What each call is to the cache. EasyCache keeps nothing of calls before the first that it may skip."""
    letters = ""
    for sigma in sigmas:
        at = torch.tensor([sigma])
        if holder.is_past_end_timestep(at):
            letters += COMPUTE
        elif holder.should_do_easycache(at):
            letters += MAY_SKIP
        else:
            letters += COMPUTE if easy and MAY_SKIP not in letters else NOTE
    return letters


def _looked_at(holder: Any, shape: Iterable[int], *, easy: bool) -> torch.Tensor:  # noqa: ANN401
    """A latent (1, C, ..) of zeros, of ones where the cache compares numbers."""
    probe, (_, *each) = holder.clone(), shape
    mask = torch.zeros(1, *each)
    if easy:
        probe.first_cond_uuid = "side"
        probe.subsample(mask, ["side"], clone=False).fill_(1.0)
    else:
        probe.subsample(mask, clone=False).fill_(1.0)
    return mask


def _seen(
    guider: comfy.samplers.CFGGuider,
    model_options: Mapping[str, Any],
    x: torch.Tensor,
    sigma: torch.Tensor,
    holder: Any,  # noqa: ANN401
) -> SeenCalls | None:
    """What EasyCache would see; None where the model's class asks no wrapper."""
    given: list[torch.Tensor] = []
    found: list[SeenCalls] = []

    def apply_model(executor: Callable[..., Any], latent: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        given.append(latent)
        return executor(latent, *args, **kwargs)

    def model(executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        options = kwargs.get("transformer_options") or next(each for each in args[::-1] if isinstance(each, dict))
        if not isinstance(args[0], torch.Tensor):
            raise HostLoopError(f"{holder.name} keeps the parts of a latent apart")
        mine = args[0][:, : holder.output_channels]
        sampling, sides = guider.inner_model.model_sampling, options["cond_or_uncond"]
        wanted = sampling.calculate_input(sigma.expand(x.shape[0]), x).to(mine.dtype)
        if not torch.equal(mine, torch.cat([wanted] * len(sides))):
            raise HostLoopError(f"{holder.name} sees the latent changed")
        same = args[0].untyped_storage().data_ptr() == given[-1].untyped_storage().data_ptr()
        found.append(SeenCalls(sides=[list(sides)], dtype=mine.dtype, is_latent=same))
        return executor(*args, **kwargs)

    around = {WrappersMP.APPLY_MODEL: apply_model, WrappersMP.DIFFUSION_MODEL: model}
    captured(guider, cond_names(guider, model_options), model_options, x, sigma.expand(x.shape[0]), around)
    if not found:
        return None
    return SeenCalls(
        sides=[sides for each in found for sides in each.sides], dtype=found[0].dtype, is_latent=found[0].is_latent
    )


@functools.lru_cache(maxsize=8)
def _tried(kind: type, decides: Callable[..., Any], factor: int, offload: bool) -> bool | None:
    """Whether a cache of ComfyUI's writes the result of a skipped call to what went in too.

    None where a made-up run of its functions skips other calls than ours, or returns something else.
    """
    try:
        return _try(kind, decides, factor, offload)
    except OTHERWISE:
        return None


def _try(kind: type, decides: Callable[..., Any], factor: int, offload: bool) -> bool | None:
    easy, (_, channels, *_) = kind.__name__ == EASY, TRIED
    holder: Any = kind(TRIED_THRESHOLD, 0.0, 1.0, factor, offload, output_channels=channels)
    holder.start_t, holder.end_t = 2.0, -1.0
    sides = [1, 0] if easy else [0]
    cache = StockCache(
        easy=easy, threshold=TRIED_THRESHOLD, calls=MAY_SKIP * TRIED_CALLS, first=sides[0], together=easy
    )
    rows = CachedRows(cache, _looked_at(holder, TRIED, easy=easy)[0].flatten(1), sides=sides)
    decision = SkipDecision(cache, lambda sums: sums)
    made = torch.Generator().manual_seed(1)
    start, drift, told = (torch.randn(TRIED, generator=made) for _ in range(3))
    skipped, in_place = [], set[bool]()
    for call in range(TRIED_CALLS):
        x = start + drift * (call / 20 + (call == TRIED_CALLS // 2))  # a jump, which no cache may skip
        outs = [(x * 0.5 + told * (0.1 + call**2 / 40)) * (side + 1) for side in sides]
        given, ran = torch.cat([x] * len(sides)), list[int]()
        before = given.clone()

        def executor(*_: Any, ran: list[int] = ran, outs: list[torch.Tensor] = outs, **__: Any) -> torch.Tensor:  # noqa: ANN401
            ran.append(1)
            return torch.cat(outs)

        at = torch.tensor([1.0])
        inside = {"easycache": holder, "sigmas": at, "uuids": [f"side {side}" for side in sides]}
        holder.skip_current_step = False
        stock = decides(executor, given, at, inside if easy else {"transformer_options": inside})
        skips = decision.skips(call, rows, x.flatten(2))
        if skips == bool(ran):
            return None
        ours = torch.cat(rows.again(x.flatten(2))) if skips else torch.cat(outs).flatten(2)
        if not torch.allclose(stock.flatten(2), ours, rtol=1e-5, atol=1e-5):
            return None
        if skips:
            in_place.add(not torch.equal(given, before))
        else:
            rows.note(call, x.flatten(2), [out.flatten(2) for out in outs])
        skipped.append(skips)
    runs = [skips for skips, _ in itertools.groupby(skipped)]
    if len(runs) < 4 or len(in_place) != 1 or holder.total_steps_skipped != decision.skipped:
        return None
    return in_place.pop()
