"""A MODEL of a stock loader made ours: the file it was read from, and everything that was applied to it since.

Owns the recovery of both, and the refusal of a MODEL that has no file or carries what the workers cannot take.
"""

import inspect
import os
from collections.abc import Sequence
from functools import partial

from ....parallel_runtime.checkpoint import COMPUTE_DTYPES, FAST, FP8
from ....parallel_runtime.models.hosted.calls import RUN_KEY
from ....parallel_runtime.wire.protocol import dtype_name
from ..contract.comfyui import ModelPatcher, WrappersMP, comfy
from ..contract.known_nodes import ANY_SMALL, small_file
from ..contract.refusals import (
    COMPILED,
    COMPILES,
    COPIES,
    check_transformer_options,
    is_attention,
    is_compiled,
    is_of_transformer,
    refuse_by,
    refuse_value,
)
from ..contract.version import refuse_off
from ..contract.writers import loader_of_model, nodes_like, packs_with_models, values_in
from ..tasks.cond_tasks import TOGETHER_KEY
from .changed_model import carry_set, moved, refuse_set
from .changed_modules import refuse_changed_stock, refuse_held
from .new_model import Chooser, Reader, remote_patcher
from .patcher import RemotePatcher
from .source import read_hosted

NODE = "Parallelize Model"
COMPUTE_DTYPE = "manual_cast_dtype"  # the object patch of ModelComputeDtype
OURS = (RUN_KEY, TOGETHER_KEY)  # the keys of wrappers
LOADERS = ("load_diffusion_model", "load_checkpoint_guess_config")
THEIR_NODES = ("UNETLoader", "CheckpointLoaderSimple", "ImageOnlyCheckpointLoader", "unCLIPCheckpointLoader")


def parallelized(model: ModelPatcher, asked: Chooser) -> RemotePatcher:
    """The same MODEL as SP Config asks for it. LoRAs, model sampling, wrappers and options come along.

    Raises `ValueError` for a MODEL that cannot be taken.
    """
    refuse_off("parallelize")
    if isinstance(model, RemotePatcher):
        raise ValueError(f"{NODE}: this MODEL is parallel already; remove {NODE}, and change SP Config instead")
    path, options, read = _source(model)
    ours = remote_patcher(path, _compute_dtype(model, options), asked, read=read)
    _refuse_what_stays_behind(model)
    refuse_changed_stock(model.model.diffusion_model, ours.model.diffusion_model, model.object_patches_backup.keys())
    refuse_set(model, ours.model)
    refuse_held(values_in([model.model_options, model.wrappers, model.callbacks]), model.model.diffusion_model)
    ours.note_kernels()
    carry_set(model, ours)
    copy_changes(model, ours)
    refuse_held(ours.object_patches.values(), model.model.diffusion_model)
    ours.tell_misfits(ours.patches, {})
    return ours


def copy_changes(model: ModelPatcher, to: ModelPatcher) -> None:
    """Give another MODEL of the same file what was applied to this one, but its dtype and the pack's own wrappers."""
    to.patches = {name: list(entries) for name, entries in model.patches.items()}
    to.patches_uuid = model.patches_uuid
    for name, value in model.object_patches.items():
        if name != COMPUTE_DTYPE:  # it was made for one
            to.add_object_patch(name, moved(value, model, to))
    to.model_options = comfy.utils.deepcopy_list_dict(model.model_options)
    to.attachments = dict(model.attachments)
    to.additional_models = {name: [each.clone() for each in models] for name, models in model.additional_models.items()}
    to.callbacks = _copied(model.callbacks)
    for kind, by_key in _copied(model.wrappers).items():
        applied = {key: wrappers for key, wrappers in by_key.items() if key not in OURS}
        to.wrappers.setdefault(kind, {}).update(applied)


def _source(model: ModelPatcher) -> tuple[str, dict, Reader]:
    """The path of the file, the options it was loaded with, and what reads the file as that loader does."""
    recipe = vars(model).get("cached_patcher_init")
    if recipe is None or recipe[0].__module__ != comfy.sd.__name__ or recipe[0].__name__ not in LOADERS:
        raise _refuse_loader([] if recipe is None else recipe[1])
    function, arguments = recipe[:2]
    given = inspect.signature(function).bind(*arguments).arguments
    read = partial(read_hosted, checkpoint=function.__name__ != LOADERS[0])
    return arguments[0], given["model_options"], read


def _refuse_loader(arguments: Sequence[object]) -> ValueError:
    """The error for a MODEL of a loader of a pack's own, which may have noted by what arguments it loads it again, or
    for one that a pack made of a stock loader's."""
    loader = loader_of_model()
    if not arguments and loader is not None and loader.class_type in THEIR_NODES:
        if packs := packs_with_models():
            return refuse_by(packs, "it hands on another MODEL, one that names no file")
    files = [os.path.basename(each) for each in arguments if isinstance(each, str) and each.endswith(".safetensors")]
    if len(files) > 1:
        return ValueError(
            f"{loader or NODE}: it makes one MODEL of {' and '.join(files)}, which the workers cannot; remove that "
            "node, and use Parallel Model Loader with one file that has all of it"
        )
    file = files[0] if files else ANY_SMALL if loader is None else small_file(loader.settings)
    return ValueError(
        f"{loader or NODE}: it reads the MODEL otherwise than Load Diffusion Model and Load Checkpoint do, which "
        f"the workers cannot; remove that node, and use Parallel Model Loader with {file}"
    )


def _compute_dtype(model: ModelPatcher, options: dict) -> str:
    """What ComfyUI would compute this MODEL in, as the workers are told; of fp8 weights, the name of their dtype."""
    if options.get("dtype") in FP8.values():
        if COMPUTE_DTYPE in model.object_patches:
            raise ValueError(
                f"{NODE}: the loader casts the weights to {options['dtype']} and ModelComputeDtype says what they are "
                "multiplied in; remove ModelComputeDtype, or set weight_dtype of Load Diffusion Model to default"
            )
        fast = bool(options.get("fp8_optimizations"))
        return next(name for name in FP8 if FP8[name] == options["dtype"] and name.endswith(FAST) == fast)
    # What this graph says. The model itself has what the last graph that sampled with it said.
    dtype = model.get_model_object(COMPUTE_DTYPE) or model.model_dtype()
    name = dtype_name(dtype)
    if name not in COMPUTE_DTYPES:
        raise ValueError(
            f"{NODE}: the model computes in {name}, the workers in {', '.join(COMPUTE_DTYPES[1:])}; "
            "put ModelComputeDtype with one of those before it"
        )
    return name


def _refuse_what_stays_behind(model: ModelPatcher) -> None:
    check_transformer_options(model.model_options["transformer_options"])
    patched = {name: layer for name, layer in model.object_patches.items() if is_of_transformer(name)}
    replaced = {name: layer for name, layer in patched.items() if not is_attention(layer)}
    # ComfyUI's wrapper holds the stock model, and would run that.
    if COMPILED in model.wrappers.get(WrappersMP.APPLY_MODEL, {}) or any(map(is_compiled, replaced.values())):
        raise refuse_by(nodes_like("compile"), *COMPILES)
    if model.additional_models.get("multigpu"):
        raise refuse_by(nodes_like("multigpu_workunits"), *COPIES)
    if model.load_device != comfy.model_management.get_torch_device():
        raise _refuse_device(f"it puts the model on {model.load_device}")
    held = {
        "it changes weights by a hook": model.hook_patches,
        "it wraps weights": model.weight_wrapper_patches,
        "it injects modules into the model": model.injections,
    }
    held |= {f"it replaces {name}": [layer] for name, layer in replaced.items()}
    for what, values in held.items():
        for value in values_in(values):
            raise refuse_value(value, what)


def _refuse_device(what: str) -> ValueError:
    """The error for a MODEL on another device than ComfyUI's: Select Model Device put it there, or a pack's loader."""
    loader, selecting = loader_of_model(), nodes_like("selectmodeldevice")
    if loader is None or loader.stock or any("selectmodeldevice" in node.class_type.lower() for node in selecting):
        return refuse_by(selecting, what, "name that device in SP Config")
    return refuse_by([loader], what, "load the file by Parallel Model Loader, and name that device in SP Config")


def _copied(by_kind: dict[str, dict[str, list]]) -> dict[str, dict[str, list]]:
    return {kind: {key: list(values) for key, values in by_key.items()} for kind, by_key in by_kind.items()}
