"""The form in which a call of ComfyUI's transformer travels to the ranks, made where the call is made.

Owns what of a call stays behind and which of its tensors have a row an image. Does not own the tree (wire/tree.py) nor
what a rank does with it (worker/hosted.py). Letters: `B` batch.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...wire.tree import to_tree

# Entries of transformer_options that are this process's own business, or were checked to be empty.
STAY_HERE = frozenset(
    ("wrappers", "callbacks", "patches", "patches_replace", "uuids", "prefetch_dynamic_vbars", "block")
    + ("block_index", "block_type", "total_blocks", "model_conds", "multigpu_thread_pool", "grid_sizes")
    + ("easycache", "context_window")  # what the wrappers of step caches and context windows keep
)
# Classes that mix the rows of a batch: both sides of cfg, by their places; ACE-Step's timbres all go to the first row.
WHOLE_BATCH = frozenset(
    (
        "comfy.ldm.seedvr.model.NaDiT",
        "comfy.ldm.hunyuan3dv2_1.hunyuandit.HunYuanDiTPlain",
        "comfy.ldm.ace.ace_step15.AceStepConditionGenerationModel",
    )
)
# What a class builds anew from the rest of the call where it is missing.
BUILT_AGAIN = {"minimax_payload": ("layout",)}


@dataclass(frozen=True, kw_only=True)
class HostedCall:
    """A call as it travels: tensors by name, options of the request, and (B, numbers) of the result."""

    tensors: Mapping[str, torch.Tensor]
    options: Mapping[str, object]
    out_shape: tuple[int, int]
    shapes: tuple[tuple[int, ...], ...]  # of the outputs that the numbers of all rows are

    def outputs(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The outputs that a result (B, numbers) holds side by side."""
        numbers = [torch.Size(shape).numel() // self.out_shape[0] for shape in self.shapes]
        return [part.reshape(shape) for part, shape in zip(flat.split(numbers, 1), self.shapes, strict=True)]


def method_call(
    title: str, name: str, args: Sequence[object], kwargs: Mapping[str, object], shape: torch.Size
) -> HostedCall:
    """A call of a method whose result has this shape."""
    tensors, options = _sent(title, args, kwargs, method=name)
    return HostedCall(tensors=tensors, options=options, out_shape=(1, shape.numel()), shapes=(tuple(shape),))


def forward_call(
    transformer: torch.nn.Module,
    channels: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    stay_here: Collection[str] = STAY_HERE,
) -> HostedCall:
    """A call of the transformer itself; `channels` are those of a latent, an input may have more beside it.

    Raises `ValueError` for what cannot travel, naming where it stands in the call.
    """
    x, kwargs = args[0], dict(kwargs)
    options = kwargs.pop("transformer_options", None) or {}
    plain = {name: value for name, value in options.items() if name not in stay_here}
    for name, parts in BUILT_AGAIN.items():
        if isinstance(kwargs.get(name), dict):
            kwargs[name] = {part: value for part, value in kwargs[name].items() if part not in parts}
    xs = [x] if isinstance(x, torch.Tensor) else list(x)
    shapes = tuple(tuple(each.shape) for each in xs)
    if isinstance(x, torch.Tensor):
        shapes = ((x.shape[0], channels, *x.shape[2:]),)
    batch = 1 if _rows_belong_together(transformer, kwargs) else shapes[0][0]
    rows = list(_with_rows([*args, *kwargs.values(), *(kwargs.get("control") or {}).values()], batch))
    title = type(transformer).__name__
    tensors, sent = _sent(title, args, {**kwargs, "transformer_options": plain}, batched=rows)
    numbers = sum(torch.Size(shape).numel() for shape in shapes) // batch
    return HostedCall(tensors=tensors, options=sent, out_shape=(batch, numbers), shapes=shapes)


def _sent(
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


def _rows_belong_together(transformer: torch.nn.Module, kwargs: Mapping[str, object]) -> bool:
    """Whether the rows of a batch are not an image each, so that no batch group can take some of them."""
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(transformer).__mro__}
    return bool(kinds & WHOLE_BATCH) or kwargs.get("num_video_frames") is not None


def _numbers(tensors: Sequence[torch.Tensor], some: Sequence[object]) -> list[int]:
    """Which of the tensors are among `some`, by identity."""
    wanted = {id(each) for each in some}
    return [number for number, tensor in enumerate(tensors) if id(tensor) in wanted]


def _with_rows(values: Sequence[object], batch: int) -> Iterator[torch.Tensor]:
    """Tensors with a row an image: those that ComfyUI hands over by themselves, in lists, and a ControlNet's.

    What is deeper in the call is one for all images: ComfyUI repeats nothing there.
    """
    if batch == 1:
        return
    for value in values:
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, torch.Tensor) and each.ndim and each.shape[0] == batch:
                yield each
