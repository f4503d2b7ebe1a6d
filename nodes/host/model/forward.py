"""What stands for a transformer's `forward` and methods where the workers have its weights (stand_in.py).

Does not own the form of a call (parallel_runtime/models/hosted/calls.py) nor what the workers do with it
(worker/hosted.py).
"""

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ....parallel_runtime.models.hosted.block_hooks import OPTION
from ....parallel_runtime.models.hosted.calls import RUN_KEY, CannotTravelError, forward_call
from ....parallel_runtime.models.hosted.other_calls import method_call
from ....parallel_runtime.models.hosted.stock_functions import OVERRIDE
from ....parallel_runtime.models.hosted.valueless import without_values
from ....parallel_runtime.models.specs import BETWEEN
from ....parallel_runtime.weight_delta import HOOK_WEIGHT
from ..contract.allocations import forget_records, is_recorded, unrecorded
from ..contract.comfyui import WrappersMP, check_cancelled, get_all_wrappers
from ..contract.refusals import INSIDE_BLOCKS, check_skipping, check_transformer_options, refuse_added, refuse_by
from ..contract.writers import nodes_of
from ..sampling.run_context import RunContext, place_of, run_inside
from .block_hooks import records
from .changed_modules import have_packs_around, refuse_changed
from .pooled_model import PooledModel
from .source import refuse_unplanned
from .stock_functions import sent

AROUND_FORWARD = WrappersMP.DIFFUSION_MODEL
RECORDS = "malloc_graph_begin"  # what a class's `forward` calls that has allocations recorded
# What of a call's transformer_options a class writes to, by the node that adds it.
WRITTEN = {"ar_state": "SamplerARVideo"}


def alive(module: "weakref.ReferenceType[torch.nn.Module]") -> torch.nn.Module:
    """The module that a part of it refers to weakly, so that it goes with its last user and not some time later.

    Raises `RuntimeError` where the part was kept longer than the module.
    """
    found = module()
    if found is None:
        raise RuntimeError("a call of a MODEL that is gone; queue the prompt again")
    return found


class _Remote:
    """What a call of the transformer is sent with."""

    def __init__(self, transformer: torch.nn.Module, pooled: PooledModel) -> None:
        self._transformer, self.pooled = weakref.ref(transformer), pooled

    @property
    def transformer(self) -> torch.nn.Module:
        """ComfyUI's, without weights. It holds this, so that it is not held here."""
        return alive(self._transformer)

    def _run(self, transformer_options: Mapping[str, Any]) -> RunContext:
        """The run that a call belongs to: what its options say, else the one around, else the MODEL loaded last."""
        run = transformer_options.get(RUN_KEY)
        if run is None or run.model is not self.pooled:
            run = run_inside(self.pooled)
        return self.transformer.outside_runs if run is None else run


class _WithForward:
    """A transformer as its class's own `forward` sees it, with another `_forward`, around which that has wrappers."""

    def __init__(self, remote: "RemoteForward") -> None:
        """`remote`: a proxy, so that it goes with the last user of the transformer."""
        vars(self)["_remote"] = remote

    def _forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return self._remote.inside(*args, **kwargs)

    @property
    def __class__(self) -> type:  # type: ignore[override]  # wrappers are given this, and may ask what it is
        return type(self._remote.transformer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return self._remote.transformer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(vars(self)["_remote"].transformer, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._remote.transformer, name, value)


class RemoteForward(_Remote):
    """Stands for the transformer's `forward`: same arguments, same result.

    Where there are wrappers, the class's own `forward` runs in this process: it says in which order they get the
    arguments of `_forward`, which is sent then, and may compute around them.
    """

    def __init__(self, transformer: torch.nn.Module, pooled: PooledModel, channels: int) -> None:
        super().__init__(transformer, pooled)
        self.channels = channels  # of a latent; a call's input may have more channels
        self.wrapped = runs_wrappers(type(transformer))
        self.records = RECORDS in inspect.unwrap(type(transformer).forward).__code__.co_names
        self.signature = inspect.signature(type(transformer).forward)
        self.signature_inside = inspect.signature(type(transformer)._forward) if self.wrapped else self.signature
        self._stand = _WithForward(weakref.proxy(self))

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        options = kwargs.get("transformer_options") or {}
        self._bound(self.signature, x, *args, **kwargs)
        for name, node in WRITTEN.items():
            if options.get(name) is not None:
                raise refuse_by(nodes_of(node), f"it keeps state in the model ({name})")
        if not self.wrapped or not get_all_wrappers(AROUND_FORWARD, options):
            return self._send(x, args, kwargs)
        if not self.records or not is_recorded((x if isinstance(x, torch.Tensor) else x[0]).device):
            return type(self.transformer).forward(self._stand, x, *args, **kwargs)
        self._run(options).call_late()  # ComfyUI records a preview, too, and no record inside of another
        try:
            return type(self.transformer).forward(self._stand, x, *args, **kwargs)
        except BaseException:
            forget_records()
            raise

    def inside(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """As `_forward`, in whatever way a wrapper hands on its arguments."""
        given = self._bound(self.signature_inside, *args, **kwargs)
        _, (_, x), *others = given.arguments.items()  # of which the first is the transformer
        named = {}
        for name, value in others:
            of = self.signature_inside.parameters[name]
            if value is not of.default:  # as of a class's own kinds of values, which cannot travel
                named |= value if of.kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        named["transformer_options"] = named.get("transformer_options") or {}
        with unrecorded() if self.records else nullcontext():
            return self._send(x, (), named, inside=True)

    def _send(self, x: Any, args: Sequence[Any], kwargs: dict[str, Any], *, inside: bool = False) -> Any:  # noqa: ANN401
        options = kwargs.get("transformer_options") or {}
        run = self._run(options)
        if run.packs_around or have_packs_around(options):
            refuse_changed(self.transformer, deep=True)
        if not INSIDE_BLOCKS.isdisjoint(options):
            check_transformer_options(options, written=run.written)
            check_skipping(type(self.transformer), options, run.written)
            told = {**options, **dict(sent(options))}
            told.pop(OVERRIDE, None)
            kwargs = {**kwargs, "transformer_options": told}
        if options.get("patches") and (patches := records(options, self.transformer, x)):
            refuse_unplanned(self.transformer, run.plan, BETWEEN)
            there = {delta.key.partition("/")[0] for delta in run.deltas.deltas if delta.kind == HOOK_WEIGHT}
            for patch in patches:
                if str(patch["module"]) not in there:
                    raise refuse_by([], f"it has patches of blocks that another MODEL carries ({patch['patch']})")
            kwargs["transformer_options"] = {**kwargs["transformer_options"], OPTION: patches}
        try:
            call = forward_call(self.transformer, self.channels, [x, *args], kwargs, inside=inside)
        except CannotTravelError as error:
            raise refuse_added(error, run.written) from error
        xs = [x] if isinstance(x, torch.Tensor) else x
        parts = call.outputs(run.call(call, place=place_of(options), check_cancelled=check_cancelled))
        # what a class computes around its `_forward`, it computes in its dtype
        outs = [
            part.to(each.device, each.dtype if inside else None, non_blocking=True)
            for part, each in zip(parts, xs, strict=True)
        ]
        return outs[0] if len(outs) == 1 else outs

    def _bound(self, signature: inspect.Signature, *args: Any, **kwargs: Any) -> inspect.BoundArguments:  # noqa: ANN401
        """Raise `ValueError` for a call that lacks what the class asks for; in a rank it would end the workers."""
        try:
            return signature.bind(self.transformer, *args, **kwargs)
        except TypeError as error:
            raise ValueError(
                f"{type(self.transformer).__name__} is called with {error}, as graphs of another model do; use the "
                "text encoder, the latent and the nodes that belong to the loaded file, or load another file"
            ) from error


def runs_wrappers(kind: type) -> bool:
    """Whether a class of ComfyUI runs the wrappers around its forward by itself; SD3, PixArt and HunyuanDiT do not."""
    forwards = [vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)]
    return any("DIFFUSION_MODEL" in inspect.getsource(each) for each in forwards)


class RemoteMethod(_Remote):
    """Stands for a method of the transformer that needs weights, called before a run; its result is one tensor."""

    def __init__(self, transformer: torch.nn.Module, pooled: PooledModel, name: str) -> None:
        super().__init__(transformer, pooled)
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        """As ComfyUI's. The stock method, tried without values, says which shape and dtype comes back."""
        stock: Callable[..., torch.Tensor] = getattr(type(self.transformer), self.name)
        result = without_values(self.transformer, stock, *args, **kwargs)
        (first, *_) = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
        call = method_call(type(self.transformer).__name__, self.name, args, kwargs, result.shape)
        (out,) = call.outputs(self._run({}).call(call, check_cancelled=check_cancelled))
        return out.to(first.device, result.dtype)
