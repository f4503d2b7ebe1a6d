"""The form in which a call of ComfyUI's transformer travels: a tree of lists, dicts and constants, tensors by number.

Owns what of a call stays behind, which of its tensors have rows of each image, and the tree, which JSON carries:
nothing is built on the other side but what the tags below name. Does not own how tensors travel (arena and channel),
nor what a rank does with the call (worker/hosted.py). Letters: `B` batch.

A constant is itself, a float that JSON has no word for and a tensor or container an object of one key:
``{"t": number}``, ``{"f": "nan"}``, ``{"l": [...]}`` a list, ``{"u": [...]}`` a tuple, ``{"d": {...}}`` a dict.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ...model_call import ModelCall
from ...wire.protocol import DTYPE_BYTES, MAX_DIMS, ProtocolError, dtype_name

Tree: TypeAlias = "None | bool | int | float | str | dict[str, object]"
INSIDE = "inside"  # an option of a call: of the transformer's `_forward`, not of all that its `forward` does
DEPTH = 32  # deeper is a mistake, or meant to exhaust us
RUN_KEY = "parallel_dit_run"  # under which a run's context lies (nodes/host/sampling/run_context.py)
# Entries of transformer_options that are this process's own business, or were checked to be empty.
STAY_HERE = frozenset(
    ("wrappers", "callbacks", "patches", "patches_replace", "uuids", "prefetch_dynamic_vbars", "block")
    + ("block_index", "block_type", "total_blocks", "model_conds", "multigpu_thread_pool", "grid_sizes")
    + (RUN_KEY,)
    + ("easycache", "context_window")  # what the wrappers of step caches and context windows keep
    + ("ExtraOptions", "model_sampling")  # objects that RES4LYF's samplers hand to its own classes of models
)
# Classes that mix the rows of a batch: both sides of cfg, by their places; ACE-Step's timbres all go to the first row;
# Trellis 2 has the voxels of all shapes of a batch in one list, SenseNova one prompt for several images.
WHOLE_BATCH = frozenset(
    (
        "comfy.ldm.seedvr.model.NaDiT",
        "comfy.ldm.trellis2.model.Trellis2",
        "comfy.ldm.sensenova.model.SenseNovaU15",
        "comfy.ldm.hunyuan3dv2_1.hunyuandit.HunYuanDiTPlain",
        "comfy.ldm.ace.ace_step15.AceStepConditionGenerationModel",
    )
)
# Classes that read these arguments of several rows for each row, the first one's or the largest number: rows in which
# they differ cannot be computed apart. The names are those of `forward` and of ComfyUI's `apply_model`.
READ_OF_OTHER_ROWS: dict[str, tuple[str, ...]] = {
    "comfy.ldm.lightricks.av_model.LTXAVModel": ("timestep", "denoise_mask", "audio_denoise_mask"),
    # the text has its own places for references, which position_ids tell
    "comfy.ldm.hidream_o1.model.HiDreamO1Transformer": ("ref_pixel_values", "ref_image_grid_thw", "position_ids"),
}
# What a class builds anew from the rest of the call where it is missing.
BUILT_AGAIN = {"minimax_payload": ("layout",)}


class CannotTravelError(ValueError):
    """A value of a call is neither a tensor nor plain; `path` says where it stands in the call."""

    def __init__(self, path: str, value: object) -> None:
        self.path, self.value = path, value
        super().__init__(
            f"{path} is a {type(value).__name__}, which cannot be sent to the workers: only tensors and plain values "
            "can; remove the node that adds it, or use the stock loader for this graph"
        )


def forward_call(
    transformer: torch.nn.Module,
    channels: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    inside: bool = False,
) -> ModelCall:
    """A call of the transformer itself; `channels` are those of a latent, an input may have more.

    `inside`: of its `_forward`, which ComfyUI's wrappers are around.

    Raises `ValueError` for what cannot travel, naming where it stands in the call.
    """
    x, kwargs = args[0], without(kwargs)
    xs = [x] if isinstance(x, torch.Tensor) else list(x)
    shapes = tuple(tuple(each.shape) for each in xs)
    if isinstance(x, torch.Tensor):
        shapes = ((x.shape[0], channels, *x.shape[2:]),)
    named = dict(zip(_arguments(type(transformer).forward), args, strict=False)) | kwargs
    batch = shapes[0][0] // rows_that_belong_together(transformer, named, shapes[0][0])
    rows = list(with_rows([*args, *kwargs.values(), *(kwargs.get("control") or {}).values()], shapes[0][0], batch))
    title = type(transformer).__name__
    tensors, sent = travelling(title, args, kwargs, batched=rows)
    sent |= {INSIDE: True} if inside else {}
    numbers = sum(torch.Size(shape).numel() for shape in shapes) // batch
    return ModelCall(tensors=tensors, options=sent, out_shape=(batch, numbers), shapes=shapes)


def without(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments without what stays behind, or is built anew where it is missing."""
    kept = dict(kwargs)
    options = kept.get("transformer_options") or {}
    kept["transformer_options"] = {name: value for name, value in options.items() if name not in STAY_HERE}
    for name, parts in BUILT_AGAIN.items():
        if isinstance(kept.get(name), dict):
            kept[name] = {part: value for part, value in kept[name].items() if part not in parts}
    return kept


def travelling(
    title: str,
    args: Sequence[object],
    kwargs: Mapping[str, Any],
    *,
    batched: Sequence[torch.Tensor] = (),
    method: str | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """Tensors and options of a call."""
    tree, tensors = to_tree({"args": list(args), "kwargs": dict(kwargs)}, title)
    residuals = [each for listed in (kwargs.get("control") or {}).values() for each in listed or ()]
    options: dict[str, object] = {
        "call": tree,
        "tensors": len(tensors),
        "batched": _numbers(tensors, batched),
        "residuals": _numbers(tensors, residuals),
        "method": method,
    }
    return {f"t{number}": tensor for number, tensor in enumerate(tensors)}, options


def rows_that_belong_together(
    transformer: torch.nn.Module, kwargs: Mapping[str, object], rows: int, *, sides: int = 1
) -> int:
    """How many of a batch's rows one batch group has to take at once: the frames of a video, of some classes all, of
    others those after which what they read of other rows repeats. `sides`: of cfg, whose rows follow each other in
    `kwargs`, and are taken together."""
    frames = kwargs.get("num_video_frames") or 1
    if not isinstance(frames, int) or takes_whole_batches(type(transformer)) or rows % frames:
        return rows
    read = [
        each.unflatten(0, (sides, rows)).transpose(0, 1)
        for each in read_of_other_rows(type(transformer), kwargs)
        if each.ndim and each.shape[0] == sides * rows
    ]
    periods = (each for each in range(frames, rows, frames) if rows % each == 0)
    return next((each for each in periods if all(torch.equal(part[each:], part[:-each]) for part in read)), rows)


def read_of_other_rows(kind: type, kwargs: Mapping[str, object]) -> list[torch.Tensor]:
    """What a class reads of other rows than the one it computes, of a call's arguments by their names."""
    paths = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    given = [kwargs.get(name) for path in paths for name in READ_OF_OTHER_ROWS.get(path, ())]
    each_alone = [each for value in given for each in (value if isinstance(value, list | tuple) else [value])]
    return [each for each in each_alone if isinstance(each, torch.Tensor) and not each.is_meta]


@functools.cache
def _arguments(forward: Callable[..., object]) -> tuple[str, ...]:
    """What a class's forward takes besides itself, in its order."""
    return tuple(inspect.signature(forward).parameters)[1:]


def takes_whole_batches(kind: type) -> bool:
    """Whether what a class computes for an image depends on the other rows of the batch, so that one rank takes all."""
    return any(f"{base.__module__}.{base.__qualname__}" in WHOLE_BATCH for base in kind.__mro__)


def _numbers(tensors: Sequence[torch.Tensor], some: Sequence[object]) -> list[int]:
    """Which of the tensors are among `some`, by identity."""
    wanted = {id(each) for each in some}
    return [number for number, tensor in enumerate(tensors) if id(tensor) in wanted]


def with_rows(values: Sequence[object], rows: int, batch: int) -> Iterator[torch.Tensor]:
    """Tensors with so many rows, each image's of the batch: those that ComfyUI hands over by themselves, in lists, and
    a ControlNet's.

    What is deeper in the call is one for all images: ComfyUI repeats nothing there.
    """
    if batch == 1:
        return
    for value in values:
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, torch.Tensor) and each.ndim and each.shape[0] == rows:
                yield each


def to_tree(value: object, path: str = "call") -> tuple[Tree, list[torch.Tensor]]:
    """The tree of a value, and its tensors; one that stands in several places is there once.

    Raises `ValueError` for what cannot travel, naming where it stands in the call.
    """
    writer = _Writer()
    return writer.write(value, path, 0), writer.tensors


class _Writer:
    """What a value's tree is made with: its tensors so far, and their numbers by identity.

    All of them are alive in the list, so no id can have been used twice.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def write(self, value: object, path: str, depth: int) -> Tree:
        if depth > DEPTH:
            raise ValueError(f"{path} is nested deeper than {DEPTH}, which cannot be sent to the workers")
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"f": repr(float(value))}  # numpy's has a name in it
        if isinstance(value, torch.Tensor):
            return {"t": self._number(value, path)}
        if type(value) in (list, tuple, torch.Size):
            items = [self.write(each, f"{path}[{index}]", depth + 1) for index, each in enumerate(_items(value))]
            return {"l" if isinstance(value, list) else "u": items}
        if isinstance(value, set | frozenset) and all(type(each) in (int, str) for each in value):
            return {"l": sorted(value, key=str)}  # classes ask what is in it
        if type(value) is dict:
            return {"d": {_key(key, path): self.write(each, f"{path}.{key}", depth + 1) for key, each in value.items()}}
        raise CannotTravelError(path, value)

    def _number(self, tensor: torch.Tensor, path: str) -> int:
        if id(tensor) not in self._numbers:
            _check_tensor(tensor, path)
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._numbers[id(tensor)]


def from_tree(tree: object, tensors: Sequence[torch.Tensor], *, path: str = "call") -> object:
    """The value of a tree. Raises `ProtocolError` for a tag, a number or a form that `to_tree` does not write."""
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if not isinstance(tree, dict) or len(tree) != 1:
        raise ProtocolError(f"{path} is {str(tree)[:80]!r}, no value of a tree")
    ((tag, inner),) = tree.items()
    read = _READERS.get(tag)
    if read is None:
        raise ProtocolError(f"{path} has the tag {str(tag)[:80]!r}; it is one of {', '.join(_READERS)}")
    return read(inner, tensors, path)


def _check_tensor(tensor: torch.Tensor, path: str) -> None:
    name = dtype_name(tensor.dtype)
    if tensor.is_meta:
        raise ValueError(
            f"{path} is computed from the model's weights, which are in the workers; remove the node that adds it, or "
            "use the stock loader for this graph"
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        raise ValueError(f"{path} is a {type(tensor).__name__}, which cannot be sent to the workers; use plain tensors")
    if name not in DTYPE_BYTES or tensor.ndim > MAX_DIMS:
        raise ValueError(
            f"{path} is a tensor of {name} with {tensor.ndim} dims, which cannot be sent to the workers; they take at "
            f"most {MAX_DIMS} dims of {', '.join(DTYPE_BYTES)}"
        )


def _key(key: object, path: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{path} has the key {key!r}, not a text, which cannot be sent to the workers")
    return key


def _items(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else ()


def _tensor(inner: object, tensors: Sequence[torch.Tensor], path: str) -> torch.Tensor:
    if isinstance(inner, bool) or not isinstance(inner, int) or not 0 <= inner < len(tensors):
        raise ProtocolError(f"{path} is tensor {str(inner)[:80]!r} of {len(tensors)}")
    return tensors[inner]


def _float(inner: object, tensors: Sequence[torch.Tensor], path: str) -> float:
    if inner not in ("nan", "inf", "-inf"):
        raise ProtocolError(f"{path} is the number {str(inner)[:80]!r}; it is one of nan, inf, -inf")
    return float(str(inner))


def _list(inner: object, tensors: Sequence[torch.Tensor], path: str) -> list[object]:
    if not isinstance(inner, list):
        raise ProtocolError(f"{path} is {str(inner)[:80]!r}, not a list")
    return [from_tree(each, tensors, path=f"{path}[{index}]") for index, each in enumerate(inner)]


def _tuple(inner: object, tensors: Sequence[torch.Tensor], path: str) -> tuple[object, ...]:
    return tuple(_list(inner, tensors, path))


def _dict(inner: object, tensors: Sequence[torch.Tensor], path: str) -> dict[str, object]:
    if not isinstance(inner, dict):
        raise ProtocolError(f"{path} is {str(inner)[:80]!r}, not an object")
    return {key: from_tree(each, tensors, path=f"{path}.{key}") for key, each in inner.items()}


_READERS: dict[str, Callable[[object, Sequence[torch.Tensor], str], object]] = {
    "t": _tensor,
    "f": _float,
    "l": _list,
    "u": _tuple,
    "d": _dict,
}
