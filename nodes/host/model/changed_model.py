"""What nodes set on ComfyUI's model itself, `model.model`: a shift, a latent format, what conditionings are made by.

ComfyUI has one model for all MODELs of a loader, and no MODEL carries what was set on it. A parallel MODEL has another
one. Owns what it gets of the stock loader's, and the refusal of what it cannot get. Does not own its transformer
(changed_modules.py).
"""

import enum
from collections.abc import Iterator
from typing import Any

import torch

from ..contract.comfyui import BaseModel, ModelPatcher
from ..contract.foreign_code import PLAIN, foreign, is_trusted
from .changed_modules import refuse_on_stock
from .kept_by_functions import keeping
from .patcher import RemotePatcher

SAMPLING = "model_sampling"
# Plain values and objects that ComfyUI reads in this process while a run is prepared or ends.
READ_HERE = ("latent_format", "concat_keys", "model_type", "adm_channels", "image_to_video")
TRANSFORMER, CONFIG = "diffusion_model", "model_config"
# Modules besides these are carried as well. Not carried, and no picture depends on it:
# - `manual_cast_dtype` is what the workers compute in: convert_stock_model.py asks for it;
# - `model_config` but its `unet_config` is of the file, which both were read from, and of their layers, which differ;
# - `memory_usage_factor` and the like estimate activations in this process, where the transformer has none;
# - `device`, `current_patcher` and counts of bytes are ComfyUI's notes on where the weights are;
# - names that ComfyUI's class does not have: only the pack that set them reads them, of the model that it set them on.


def refuse_set(model: ModelPatcher, fresh: BaseModel) -> None:
    """Raise `ValueError` for methods and the class of a stock loader's model in whose place a node of the graph set its
    own: they compute with that model's weights. `fresh`: ComfyUI's model of the same file."""
    refuse_on_stock(_of_packs(model, fresh))


def _of_packs(model: ModelPatcher, fresh: BaseModel) -> Iterator[tuple[str, object]]:
    kind = type(model.model)
    if kind is not type(fresh) and not is_trusted(kind.__module__):
        yield f"it replaces the class of {type(fresh).__name__}", kind
    for name in [name for name in vars(model.model) if name not in model.object_patches]:
        value = model.get_model_object(name)  # not what another MODEL of the loader, which is in use, patches
        if not callable(value) or not hasattr(fresh, name):
            continue
        own = getattr(value, "__func__", None) is getattr(kind, name, value)  # as ComfyUI leaves it behind a patch
        if not own and foreign(value):
            yield f"it replaces {name}", value


def sample_by(patcher: RemotePatcher, sampling: torch.nn.Module) -> None:
    """Have a new MODEL sample by this object.

    Nodes set a shift in place. As with stock's loader, what they set is another loader's MODEL's no more; where they
    set it on the model itself, it is the newest MODEL's.
    """
    root = patcher.parent
    patcher.add_object_patch(SAMPLING, sampling)
    if SAMPLING in root.object_patches_backup:
        root.object_patches_backup[SAMPLING] = sampling
    root.model.model_sampling = sampling


def carry_set(model: ModelPatcher, to: RemotePatcher) -> None:
    """Give a new MODEL what was set on the model of a stock loader's. What a MODEL patches hides what was set there.

    It samples by stock's own object, no copy: what a node sets there later takes effect on both, as on two stock MODELs
    of a loader.
    """
    if SAMPLING not in model.object_patches:
        sample_by(to, model.get_model_object(SAMPLING))
    for name in sorted((_read_here(model) & _read_here(to)) - model.object_patches.keys()):
        value = model.get_model_object(name)
        if not _alike(value, to.get_model_object(name)):
            to.add_object_patch(name, value)
    if CONFIG in model.object_patches:
        return
    given, own = (each.get_model_object(CONFIG) for each in (model, to))
    differing = {name for name, value in given.unet_config.items() if not _alike(value, own.unet_config.get(name))}
    if differing - {"dtype"}:
        changed = {name: given.unet_config[name] for name in differing - {"dtype"}}
        config = type(own).__new__(type(own))  # no copy.copy: for it, ComfyUI's class has every method, as None
        vars(config).update(vars(own), unet_config={**own.unet_config, **changed})
        to.add_object_patch(CONFIG, config)


def moved(value: Any, model: ModelPatcher, to: ModelPatcher) -> Any:  # noqa: ANN401  of any kind
    """An object patch of one MODEL for another one: a function that keeps the former's model or transformer, as packs
    have it that call the method which they replace, keeps the latter's. It would read weights and values without what
    the other MODEL patches."""
    kept = [(each.model, each.model.diffusion_model) for each in (model, to)]
    return keeping({id(old): new for old, new in zip(*kept, strict=True)}, value)


def _read_here(model: ModelPatcher) -> set[str]:
    """The names of the values and modules of a model that ComfyUI reads in this process."""
    modules = vars(model.model)["_modules"].keys() - {SAMPLING, TRANSFORMER}
    return modules | {name for name in READ_HERE if hasattr(model.model, name)}


def _alike(one: Any, other: Any) -> bool:  # noqa: ANN401  of any kind
    """Whether two objects have one class and the same values, as far as they have values here; functions of ComfyUI's
    are alike."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        meta = one.is_meta or other.is_meta
        return one.shape == other.shape and (meta or torch.equal(one.detach().cpu(), other.detach().cpu()))
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.nn.Module):
        return _alike(_tensors(one), _tensors(other)) and not any(map(foreign, filter(callable, vars(one).values())))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if callable(one):
        return foreign(one) == foreign(other)
    if isinstance(one, (*PLAIN, enum.Enum)) or not hasattr(one, "__dict__"):
        return bool(one == other)
    return _alike(vars(one), vars(other))


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
