"""From a file's tensors to ComfyUI's own module, as ComfyUI's loader makes it, with weights that are views of the file.

Owns which of ComfyUI's classes it is, the dtype of every weight, and which of them are copies. Does not own where the
tensors come from, nor how the module's calls are shared (hooks.py). Source: `load_diffusion_model_state_dict` in
ComfyUI's comfy/sd.py; what it rounds when it loads is rounded here. What it only widens is widened too where a device
has a copy of its own; else it stays as the file has it and is widened where it is used.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...checkpoint import FAST, FP8
from ..specs import may_be_found
from .formats import check_formats, check_metadata, give_back_copies
from .stock_attention import attend_to_all

META = torch.device("meta")
CPU = torch.device("cpu")
CASTS_TO = torch.float32  # any dtype that a layer may compute in

# Weights whose dtype a class reads, to round what it multiplies by them: they have the dtype that ComfyUI's loader
# gives them, though it only widens what the file has.
READ_DTYPES = {
    "comfy.ldm.cogvideo.model.CogVideoXTransformer3DModel": r"patch_embed\.(text_)?proj\.weight",
    "comfy.ldm.hidream_o1.model.HiDreamO1Transformer": r"visual\.pos_embed\.weight",
    "comfy.ldm.hunyuan3dv2_1.hunyuandit.HunYuanDiTPlain": r"(t_embedder\.mlp\.0|x_embedder|.*\.to_k)\.weight",
    "comfy.ldm.ideogram4.model.Ideogram4Transformer2DModel": r".*\.mlp_in\.weight",  # in ComfyUI 0.24
    "comfy.ldm.lumina.model.NextDiTPixelSpace": r"dec_net\.cond_embed\.weight",
    "comfy.ldm.triposplat.model.LatentSeqMMFlowModel": r"t_embedder\.mlp\.0\.weight",
}


@dataclass(frozen=True)
class Recognised:
    """A file as ComfyUI knows it: its description of the model, and the weights by ComfyUI's names.

    `around`: what a checkpoint has besides them, where ComfyUI looks for what the model predicts and for layers of its
    own outside of the transformer; `prefix`: that of the transformer's names there. `dtypes_kept`: those of weights by
    name, where they are rounded to fp8. `kind`: a hash of the description, the same for files that differ in their
    weights' values and formats alone.
    """

    config: Any  # comfy.supported_models_base.BASE
    weights: dict[str, torch.Tensor]
    around: Mapping[str, torch.Tensor] = field(default_factory=dict)
    prefix: str = ""
    dtypes_kept: Mapping[str, torch.dtype] = field(default_factory=dict)
    kind: str = ""

    @property
    def quantised(self) -> bool:
        """Whether ComfyUI keeps weights in a format of its own, with scales."""
        return getattr(self.config, "quant_config", None) is not None

    def declare(self, dtype: torch.dtype, kept: str) -> None:
        """Have models made from now on compute in `dtype`, their weights in the fp8 of that name or, of none, in it.

        Which layers cast, and which multiply in fp8, is ComfyUI's to say, by its options and the device.
        """
        self.config.custom_operations = None
        if not kept:
            # what stock ComfyUI says to its classes: quantised layers cast by themselves
            self.config.set_inference_dtype(dtype, dtype if self.quantised else None)
            return
        self.config.set_inference_dtype(FP8[kept], dtype)
        self.config.optimizations = {**self.config.optimizations, "fp8": kept.endswith(FAST)}

    def operations(self) -> Any:  # noqa: ANN401  a class of comfy.ops
        """The layers that ComfyUI would choose for what was declared."""
        import comfy.ops

        config = self.config
        return comfy.ops.pick_operations(
            config.unet_config.get("dtype"),
            config.manual_cast_dtype,
            fp8_optimizations=config.optimizations.get("fp8", False),
            model_config=config,
        )

    def model(self, device: torch.device) -> Any:  # noqa: ANN401
        """ComfyUI's model, a comfy.model_base.BaseModel, whose transformer is on `device` and has no weights yet."""
        named = {f"{self.prefix}{name}": weight for name, weight in self.weights.items()}
        tensors = {**self.around, **named}
        try:
            return self.config.get_model(tensors, self.prefix, device=device)
        except RuntimeError as error:  # some classes read a value of what they make, which meta tensors have not
            if device != META or "meta tensor" not in str(error):
                raise
        whole = self.config.get_model(tensors, self.prefix, device=CPU)
        whole.diffusion_model.to(META)
        return whole


def recognise(
    path: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], *, checkpoint: bool = False
) -> Recognised:
    """What ComfyUI takes the tensors of a file for; `checkpoint`: as Load Checkpoint reads it, with all that is in it.

    Raises `ValueError` when it knows no such model, and for quantised layers that it could not load.
    """
    import comfy.model_detection as detection
    import comfy.utils

    check_metadata(path, metadata)
    if checkpoint and (whole := _of_checkpoint(path, tensors, metadata)) is not None:
        return whole
    weights, found = comfy.utils.convert_old_quants(dict(tensors), "", metadata=dict(metadata))
    prefix = detection.unet_prefix_from_state_dict(weights)
    inside = comfy.utils.state_dict_prefix_replace(dict(weights), {prefix: ""}, filter_keys=True)
    if inside:  # the transformer of a whole checkpoint
        weights, found = comfy.utils.convert_old_quants(inside, "", metadata=found)
    check_formats(path, weights)
    config = detection.model_config_from_unet(weights, "", metadata=found)
    if config is None:
        config = detection.model_config_from_diffusers_unet(weights)
        names = {} if config is None else comfy.utils.unet_to_diffusers(config.unet_config)
        weights = {names[name]: weight for name, weight in weights.items() if name in names}
    if config is None:
        _refuse_names_of_diffusers(path, tensors)
        raise ValueError(
            f"{path}: ComfyUI recognises no diffusion model in this file; choose a file of diffusion_models, not a "
            "text encoder, a VAE or a LoRA, or update ComfyUI for a newer model"
        )
    return Recognised(config, weights, kind=_kind_of(config))


def _kind_of(config: Any) -> str:  # noqa: ANN401  comfy.supported_models_base.BASE
    """Before a model is made of it: some change it."""
    described = json.dumps(config.unet_config, sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.sha256(f"{type(config).__name__} {described}".encode()).hexdigest()[:16]


def _refuse_names_of_diffusers(path: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `ValueError` for a transformer with diffusers' names, which Load Diffusion Model joins to other matrices.

    Ranks compute with views of the file; joined matrices would be a copy of the model in each of them.
    """
    import comfy.model_detection as detection

    there = {name: torch.empty_like(each, device=META) for name, each in tensors.items()}
    if detection.convert_diffusers_mmdit(there, "") is not None:
        raise ValueError(
            f"{path} names its weights as diffusers does, which ranks cannot share from the file; choose the model's "
            "file for ComfyUI, or make one: Load Diffusion Model, then Save Model (ModelSave), and choose what it wrote"
        )


def _of_checkpoint(path: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Recognised | None:
    """The same with the checkpoint's other tensors; None where ComfyUI reads it as a diffusion model alone."""
    import comfy.model_detection as detection
    import comfy.utils

    prefix = detection.unet_prefix_from_state_dict(tensors)
    given, found = comfy.utils.convert_old_quants(dict(tensors), prefix, metadata=dict(metadata))
    config = detection.model_config_from_unet(given, prefix, metadata=found)
    if config is None:
        return None
    weights = {name.removeprefix(prefix): each for name, each in given.items() if name.startswith(prefix)}
    around = {name: each for name, each in given.items() if not name.startswith(prefix)}
    check_formats(path, weights)
    return Recognised(config, weights, around, prefix, kind=_kind_of(config))


@dataclass(frozen=True)
class Built:
    """ComfyUI's transformer with the file's tensors for weights, on the host.

    `whole`: ComfyUI's model around it. `declared`: the dtype that its class made each weight with, by name, in which
    ComfyUI's loader would hold it.
    `rounded`: those of them that ComfyUI would round to that, or that nothing casts when it computes; see `round_here`.
    """

    whole: Any  # comfy.model_base.BaseModel
    declared: dict[str, torch.dtype]
    rounded: dict[str, torch.dtype]

    @property
    def module(self) -> torch.nn.Module:
        """The transformer."""
        module: torch.nn.Module = self.whole.diffusion_model
        return module

    def casting_in_use(self, blocks: Mapping[str, torch.nn.Module]) -> "Built":
        """The same, but for the matrices of these blocks, by path: they stay views of the file and are rounded in use.

        `build` must have been asked for layers that cast. What a call computes is the same, to the last bit.
        """
        rounded = dict(self.rounded)
        for path, block in blocks.items():
            for inner, layer in block.named_modules(prefix=path):
                name = f"{inner}.weight"
                matrix = isinstance(layer, torch.nn.Linear) and getattr(layer, "comfy_cast_weights", False)
                to_fp8 = rounded.get(name, CASTS_TO).itemsize == 1  # which is not what a layer casts to
                if matrix and not to_fp8 and not reads_dtype(self.module, name):
                    rounded.pop(name, None)
        return replace(self, rounded=rounded)

    def widens(self, name: str) -> bool:
        """Whether the weight is the file's still, and only gets larger when it is rounded."""
        return name in self.rounded and _widens(self.module.get_parameter(name).dtype, self.rounded[name])

    def round_here(self) -> None:
        """Give the weights that the module has now the dtypes of `rounded`, as ComfyUI's loader does."""
        for path, owner in self.module.named_modules():
            for name, weight in owner.named_parameters(recurse=False):
                dtype = self.rounded.get(f"{path}.{name}" if path else name, weight.dtype)
                if weight.dtype != dtype:
                    setattr(owner, name, torch.nn.Parameter(weight.to(dtype), requires_grad=False))


def build(
    path: str,
    recognised: Recognised,
    dtype: torch.dtype,
    *,
    kept: str = "",
    cast_in_use: bool = False,
    widened: bool = False,
) -> Built:
    """ComfyUI's transformer with the file's weights, to compute in `dtype`; nothing is rounded or copied yet.

    `kept`: the fp8 that its weights are rounded to, "" for the file's. With `cast_in_use` its layers can round weights
    as they are used; `widened`: no layer widens what ComfyUI's loader would hold wider than the file, once the weights
    are rounded. Raises `ValueError` when the file lacks weights that the class has.
    """
    import comfy.ops

    config = recognised.config
    recognised.declare(dtype, kept)
    stored = {each.dtype for each in recognised.weights.values() if each.is_floating_point()}
    casts = any((_widens(each, dtype) and not widened) or (cast_in_use and each != dtype) for each in stored)
    uncast = comfy.ops.disable_weight_init
    if casts and not recognised.quantised and recognised.operations() is uncast:  # stock holds what it computes in
        config.custom_operations = comfy.ops.manual_cast
    # a quantised layer has no weight before it is loaded, and is loaded to where it was made
    whole, declared, missing = _assigned(recognised, CPU if recognised.quantised else META)
    model = whole.diffusion_model
    plain = give_back_copies(model, recognised.weights) if recognised.quantised else {}  # widened by loading
    declared |= plain
    if missing:
        raise ValueError(
            f"{path} lacks {len(missing)} weight(s) of {type(model).__name__}, {missing[0]} for one; download it again"
        )
    if any(buffer.is_meta for buffer in model.buffers()):  # computed when the module is made, so no file has it
        whole, declared, _ = _assigned(recognised, CPU)
    attend_to_all(whole.diffusion_model)
    rounded = _rounded(whole.diffusion_model, declared, quantised=recognised.quantised, widened=widened)
    return Built(whole, declared, rounded | plain if widened else rounded)


def _assigned(recognised: Recognised, device: torch.device) -> tuple[Any, dict[str, torch.dtype], list[str]]:
    """The model made on `device` with the file's tensors for weights, the dtypes that they were made with, and which
    of them the file lacks.
    """
    weights, whole = dict(recognised.weights), recognised.model(device)
    made = dict(whole.diffusion_model.named_parameters())
    declared = {name: weight.dtype for name, weight in made.items()}
    whole.load_model_weights(weights, "", assign=True)
    missing = [name for name, weight in whole.diffusion_model.named_parameters() if weight is made.get(name)]
    for path, layer in whole.diffusion_model.named_modules():  # quantised layers have no weight before they are loaded
        if hasattr(layer, "factory_kwargs") and getattr(layer, "weight", layer) is None:
            missing.insert(0, f"{path}.weight")
    return whole, declared, missing


def _rounded(
    model: torch.nn.Module, declared: Mapping[str, torch.dtype], *, quantised: bool, widened: bool
) -> dict[str, torch.dtype]:
    """The weights that lose digits in the dtype that the class made them with, or that nothing casts, and that dtype.

    ComfyUI's loader copies into the class's own weights; with `widened`, so it is with all that have another dtype.
    Quantised layers load their weights themselves.
    """
    found = {}
    for path, module in model.named_modules():
        layer = hasattr(module, "comfy_cast_weights")  # of comfy.ops
        if layer and quantised:
            continue
        casts = layer and module.comfy_cast_weights  # when it computes
        for name, weight in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            dtype = declared.get(full, weight.dtype)
            widened_in_use = casts and not widened and _widens(weight.dtype, dtype) and not reads_dtype(model, full)
            if weight.dtype != dtype and not widened_in_use:
                found[full] = dtype
    return found


def reads_dtype(model: torch.nn.Module, name: str) -> bool:
    """Whether a transformer's own code reads the dtype of its weight of that name, or may: the code of a class
    without a written plan has not been read."""
    if may_be_found(type(model)):
        return True
    paths = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__)
    return any(re.fullmatch(READ_DTYPES[path], name) for path in paths if path in READ_DTYPES)


def _widens(stored: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether `dtype` holds every value of another dtype that a file has."""
    if stored == dtype or dtype.itemsize == 1 or not (stored.is_floating_point and dtype.is_floating_point):
        return False
    return stored.itemsize == 1 or torch.promote_types(stored, dtype) == dtype
