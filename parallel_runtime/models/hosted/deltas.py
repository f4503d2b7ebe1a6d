"""Weight deltas of one of ComfyUI's modules, merged by ComfyUI's own functions, and taken back to the last bit.

Owns which weights are changed and what they were. Does not own how a change travels (weight_delta.py). A changed weight
is made anew each time from what the file says, in the dtype that ComfyUI's loader would hold it in, and rounded by the
dice that the ComfyUI that asks would take.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Protocol

import torch

from ...errors import RequestCancelledError
from ...weight_delta import Value, WeightDelta, misfit
from ..parts import as_parameter, plain_parts

PREFIX = "diffusion_model."
SMALL_LAYER = 16 << 10  # bytes, to which dynamic VRAM changes a layer when it loads it (ModelPatcherDynamic.load)
IN_FP32 = ("oft", "boft")  # kinds that ComfyUI merges in no other dtype: in one of 16 bits it leaves them out


class HeldElsewhere(Protocol):
    """Weights that lie elsewhere than in the module, or that can be read again.

    A protocol of `FileViews` here and of `BlockShards`, which is in weights/: no layer may import its neighbour.
    With `collective`, all ranks of a group must make the same changes.
    """

    collective: bool

    def pristine(self, path: str) -> torch.nn.Parameter | None:
        """A weight as the file says it, on the host; None for one that is whole on every rank."""

    def by_block(self, paths: Iterable[str]) -> list[list[str]]:
        """The same weights, those of one block together."""

    def change(self, weights: Mapping[str, torch.nn.Parameter | None]) -> None:
        """Have these weights of one block; None: what the file says."""


class MergedDeltas:
    """The changed weights of `module`. `declared`: the dtypes that its class made its weights with, by name.

    `spread` has those weights that are not whole here. `computes_in`: the dtype of the module's calls; `kept`: weights
    are rounded when they are loaded.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        declared: Mapping[str, torch.dtype],
        spread: HeldElsewhere | None,
        computes_in: torch.dtype = torch.float32,
        *,
        kept: bool = False,
    ) -> None:
        self._module, self._declared, self._spread = module, declared, spread
        self._computes_in, self._kept = computes_in, kept
        self._pristine: dict[str, torch.nn.Parameter] = {}  # of changed weights that are whole here
        self._changed_parts: set[str] = set()  # the others

    def pristine(self, name: str) -> torch.nn.Parameter:
        """A weight as the file says it. Raises `ValueError` for one that the module has not."""
        elsewhere = None if self._spread is None else self._spread.pristine(name)
        if elsewhere is not None:
            return elsewhere
        return self._pristine[name] if name in self._pristine else self._weight(name)

    def merge(
        self,
        deltas: Mapping[str, Sequence[WeightDelta]],
        *,
        device: torch.device,
        cancelled: Callable[[], bool],
        beat: Callable[[], None],
    ) -> None:
        """Change these weights by these deltas. Raises `ValueError` for a weight that the module has not."""
        for names in self._by_block(deltas):
            self._refuse_cancelled(cancelled)
            parts: dict[str, torch.nn.Parameter | None] = {}
            for name in names:
                pristine = None if self._spread is None else self._spread.pristine(name)
                if pristine is None:
                    self._merge(name, self._pristine.setdefault(name, self._weight(name)), deltas[name], device)
                else:
                    parts[name] = self._merged(name, pristine, deltas[name], device)
                beat()
            if self._spread is not None and parts:
                self._changed_parts |= parts.keys()
                self._spread.change(parts)

    def undo_except(self, names: set[str], *, cancelled: Callable[[], bool], beat: Callable[[], None]) -> None:
        """Make every other changed weight what it was before any change.

        Each is read again from a file, which takes long where its disk is slow. Cancelled half-way, the next call
        undoes the others.
        """
        for name in self._pristine.keys() - names:
            self._refuse_cancelled(cancelled)
            self._put(name, self._pristine.pop(name))
            beat()
        for each in self._by_block(sorted(self._changed_parts - names)):
            self._refuse_cancelled(cancelled)
            if self._spread is not None:
                self._spread.change(dict.fromkeys(each))
            self._changed_parts.difference_update(each)
            beat()

    def _refuse_cancelled(self, cancelled: Callable[[], bool]) -> None:
        """Raise `RequestCancelledError` once `cancelled()` is true, but where all ranks must make the same changes:
        they hear of it one by one."""
        if cancelled() and not (self._spread is not None and self._spread.collective):
            raise RequestCancelledError("changing weights was cancelled")

    def _by_block(self, names: Iterable[str]) -> list[list[str]]:
        return [[name] for name in names] if self._spread is None else self._spread.by_block(names)

    def _merged(
        self, name: str, pristine: torch.nn.Parameter, deltas: Sequence[WeightDelta], device: torch.device
    ) -> torch.nn.Parameter:
        """The changed weight, which the module does not keep."""
        self._merge(name, pristine, deltas, device)
        changed = self._weight(name)
        self._put(name, None)
        return changed

    def _merge(
        self, name: str, pristine: torch.nn.Parameter, deltas: Sequence[WeightDelta], device: torch.device
    ) -> None:
        from comfy.model_patcher import ModelPatcher

        dtype = self._declared.get(name, pristine.dtype)
        weight = pristine
        if type(weight.data) is torch.Tensor and weight.dtype != dtype:  # as the file has it
            weight = torch.nn.Parameter(weight.to(device).to(dtype), requires_grad=False)
        self._put(name, weight)
        holder = torch.nn.Module()
        holder.diffusion_model = self._module
        patcher = ModelPatcher(holder, device, weight.device)
        key = PREFIX + name
        patcher.patches = {key: [_entry(delta) for delta in deltas]}
        with complaints() as said:
            if self._is_merged_where_used(name, deltas):
                merges_in = self._merges_in(name, weight, device)
                self._put(name, _merged_where_used(weight, key, patcher.patches[key], device, merges_in))
            else:
                patcher.patch_weight_to_device(key, device_to=device)
        meant = next((delta.new_shape for delta in reversed(deltas) if delta.new_shape), tuple(pristine.shape))
        if said or self._weight(name).shape != meant:
            self._put(name, pristine)
            raise misfit(name, deltas, list(pristine.shape))

    def _is_merged_where_used(self, name: str, deltas: Sequence[WeightDelta]) -> bool:
        """Whether dynamic VRAM leaves the weight to its layer, which it does not with small ones and other shapes."""
        import comfy.model_management

        path, _, last = name.rpartition(".")
        layer = self._module.get_submodule(path)
        if last not in ("weight", "bias") or not hasattr(layer, "comfy_cast_weights"):
            return False
        if any(not each.where_used or each.new_shape is not None or each.kind in IN_FP32 for each in deltas):
            return False
        elsewhere = layer._parameters.get("weight") is None  # as of large layers alone
        return elsewhere or bool(comfy.model_management.module_size(layer) > SMALL_LAYER)

    def _merges_in(self, name: str, weight: torch.nn.Parameter, device: torch.device) -> torch.dtype:
        """The dtype of the layer's calls, but where it multiplies in fp8 (comfy/ops.py, `fp8_linear`), as with weights
        that the file has so."""
        import comfy.model_management
        import comfy.ops

        layer = self._module.get_submodule(name.rpartition(".")[0])
        if self._kept or type(layer) not in vars(comfy.ops.fp8_ops).values() or weight.dtype != torch.float8_e4m3fn:
            return self._computes_in
        dtype: torch.dtype = comfy.model_management.lora_compute_dtype(device)
        return dtype

    def _weight(self, name: str) -> torch.nn.Parameter:
        path, _, last = name.rpartition(".")
        try:
            weight = self._module.get_submodule(path)._parameters[last]
        except (AttributeError, KeyError):
            weight = None
        if weight is None:
            raise ValueError(
                f"a patch names {name}, which {type(self._module).__name__} has not; use one made for this model"
            )
        return weight

    def _put(self, name: str, weight: torch.nn.Parameter | None) -> None:
        path, _, last = name.rpartition(".")
        self._module.get_submodule(path)._parameters[last] = weight


def _merged_where_used(
    weight: torch.nn.Parameter, key: str, patches: list[tuple], device: torch.device, dtype: torch.dtype
) -> torch.nn.Parameter:
    """What a layer has of a weight from its second call on (comfy/ops.py, `resolve_cast_module_with_vbar`): changed in
    the dtype of the call, and rounded by dice of the layer's name, where the loader takes the weight's."""
    import comfy.float
    import comfy.lora
    import comfy.quant_ops
    import comfy.utils

    held: Any = weight.data.to(device)  # maybe one of comfy.quant_ops
    quantised = isinstance(held, comfy.quant_ops.QuantizedTensor)
    wide: Any = held.to(dtype=dtype)
    wide = wide.dequantize() if quantised else wide.clone() if wide is held else wide
    wide = comfy.lora.calculate_weight(patches, wide, key, intermediate_dtype=wide.dtype)
    dice = comfy.utils.string_to_seed(key.rpartition(".")[0])
    if quantised and hasattr(held, "requantize_from_float"):
        changed = held.requantize_from_float(wide, scale="recalculate", stochastic_rounding=dice)
    elif quantised:  # by ComfyUI 0.24's comfy-kitchen
        changed = type(held).from_float(wide, held._layout_cls, scale="recalculate", stochastic_rounding=dice)
    else:
        changed = comfy.float.stochastic_rounding(wide, held.dtype, seed=dice)
    return as_parameter(changed)


@contextmanager
def complaints() -> Iterator[list[str]]:
    """What ComfyUI says meanwhile: it logs that a delta does not fit, and goes on without it.

    It does so for want of memory, too: that is raised at the end.
    """
    said: list[str] = []
    full: list[torch.OutOfMemoryError] = []
    here = get_ident()

    def note(record: logging.LogRecord) -> None:
        if record.thread != here:  # of others, who log meanwhile
            return
        said.append(record.getMessage())
        if isinstance(error := sys.exc_info()[1], torch.OutOfMemoryError):
            full.append(error)

    listener = logging.Handler(logging.WARNING)
    listener.emit = note  # type: ignore[method-assign]
    logging.getLogger().addHandler(listener)
    try:
        yield said
    finally:
        logging.getLogger().removeHandler(listener)
    if full:
        raise full[0]


class FileViews:
    """The file's weights as views of its pages, for a module on a device: of a changed one nothing is kept there.

    Made before the module goes there. `dtypes`: those that some weights have there, by name, where that is not the
    file's.
    """

    collective = False

    def __init__(self, module: torch.nn.Module, device: torch.device, dtypes: Mapping[str, torch.dtype]) -> None:
        self._module, self._device, self._dtypes = module, device, dtypes
        self._views = {name: _apart(weight) for name, weight in module.named_parameters(remove_duplicate=False)}

    def pristine(self, path: str) -> torch.nn.Parameter | None:
        """A weight as it is in the file, before it has its dtype; None for one that the file has not."""
        return self._views.get(path)

    def by_block(self, paths: Iterable[str]) -> list[list[str]]:
        """Each by itself."""
        return [[path] for path in paths]

    def change(self, weights: Mapping[str, torch.nn.Parameter | None]) -> None:
        """Have these weights in the module; None: the file's, rounded on the device, one after the other."""
        for path, weight in weights.items():
            owner, _, last = path.rpartition(".")
            moved: torch.Tensor = (self._views[path] if weight is None else weight).to(self._device)
            if weight is None and path in self._dtypes:
                moved = moved.to(self._dtypes[path])
            self._module.get_submodule(owner)._parameters[last] = torch.nn.Parameter(moved, requires_grad=False)


def _apart(weight: torch.nn.Parameter) -> torch.nn.Parameter:
    """The same weight as another object: `Module.to` puts the device's tensors into the module's own."""
    parts, make = plain_parts(weight)
    return as_parameter(make(parts))


def _entry(delta: WeightDelta) -> tuple:
    """A delta as ComfyUI's ModelPatcher keeps it."""
    import comfy.utils

    function = comfy.utils.swap_scale_shift if delta.swap else None
    return delta.strength, _change(delta.kind, delta.values), delta.strength_model, delta.offset, function


def _change(kind: str, values: tuple[Value, ...]) -> object:
    from comfy.weight_adapter import LoRAAdapter, adapters

    if kind in ("diff", "set"):
        return kind, values
    if kind == "padded_diff":
        return "diff", (*values, {"pad_weight": True})
    if kind == "lora":  # without a core and without another shape, as weight_delta.py has it
        up, down, alpha, dora = values
        values = (up, down, alpha, None, dora, None)
    elif kind == "lora_core":
        *others, shape = values
        return LoRAAdapter(set(), (*others, shape.tolist() if isinstance(shape, torch.Tensor) else None))
    (adapter,) = (each for each in adapters if each.name == kind)
    return adapter(set(), values)
