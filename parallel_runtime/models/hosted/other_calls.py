"""Calls that travel besides those of a transformer's forward: of its methods, and of ComfyUI's `apply_model`.

Letters: `B` batch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...model_call import ModelCall
from .calls import travelling, with_rows, without

# Methods of a transformer that a call may name in place of its forward: ComfyUI calls them before a run, and they need
# its weights.
METHODS = ("preprocess_text_embeds",)


def method_call(
    title: str, name: str, args: Sequence[object], kwargs: Mapping[str, object], shape: torch.Size
) -> ModelCall:
    """A call of a method whose result has this shape."""
    tensors, options = travelling(title, args, kwargs, method=name)
    return ModelCall(tensors=tensors, options=options, out_shape=(1, shape.numel()), shapes=(tuple(shape),))


def apply_call(title: str, shape: torch.Size, sides: Sequence[int], kwargs: Mapping[str, Any]) -> ModelCall:
    """A call of ComfyUI's `apply_model` for a latent of this `shape` (B, ...), without the latent and its sigma.

    `sides`: of cfg, one or both, whose rows follow each other. Raises `ValueError` for what cannot travel, naming where
    it stands in the call.
    """
    kwargs, rows = without(kwargs), shape[0] * len(sides)
    tensors, sent = travelling(title, [], kwargs, batched=list(with_rows(list(kwargs.values()), rows, rows)))
    sent |= {"latent": list(shape[1:]), "sides": list(sides)}
    out_shape = (shape[0], shape[1:].numel())
    return ModelCall(tensors=tensors, options=sent, out_shape=out_shape, shapes=(tuple(shape),))
