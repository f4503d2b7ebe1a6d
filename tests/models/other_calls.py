"""Other calls of a case: other numbers and timesteps, and where the class takes them other texts and sizes."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

TEXTS = (5, 7, 11, 13)  # tokens
SIDES = ((2, 0), (4, 2), (0, 4), (-2, 4), (-4, -2))  # are added to height and width of the latent


def other_calls(
    inputs: dict[str, Any], count: int, run: Callable[[dict[str, Any]], Tensor]
) -> Iterator[tuple[bool, dict[str, Any]]]:
    """So many of them, each with whether its sizes are others; `run` raises for sizes that the class does not take."""
    for number in range(count):
        given = renumbered(resized(inputs, TEXTS[number % len(TEXTS)], SIDES[number % len(SIDES)]), number)
        runs = _runs(given, run)
        yield runs, given if runs else renumbered(inputs, number)


def _runs(given: dict[str, Any], run: Callable[[dict[str, Any]], Tensor]) -> bool:
    try:
        return bool(run(given).isfinite().all())
    except Exception:  # noqa: BLE001  a class says in any way that sizes do not go together
        return False


def resized(inputs: dict[str, Any], text: int, sides: tuple[int, int]) -> dict[str, Any]:
    """The call with a text of other length, and an image of other sides; what has these sizes gets them too."""
    context, latent = inputs.get("context"), inputs.get("x", inputs.get("hidden_states"))
    latent = latent[0] if isinstance(latent, (list, tuple)) else latent
    tokens = context.shape[1] if isinstance(context, Tensor) else -1
    plane = tuple(latent.shape[-2:]) if isinstance(latent, Tensor) and latent.ndim > 3 else ()

    def change(value: Any, name: str) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(change(each, name) for each in value)
        if type(value) is int and name == "num_tokens" and value == tokens:
            return text
        if not isinstance(value, Tensor):
            return value
        shape = list(value.shape)
        if plane and value.ndim > 3 and tuple(shape[-2:]) == plane:
            shape[-2:] = [max(2, side + more) for side, more in zip(plane, sides, strict=True)]
        if name in ("context", "attention_mask", "text_embedding_mask") and len(shape) > 1 and shape[1] == tokens:
            shape[1] = text
        if shape == list(value.shape):
            return value
        return value.new_ones(shape) if not value.is_floating_point() else torch.randn(shape)

    return {name: change(value, name) for name, value in inputs.items()}


def renumbered(inputs: dict[str, Any], seed: int) -> dict[str, Any]:
    """The call with other numbers of about the same size in all of its tensors of floats."""
    numbers = torch.Generator().manual_seed(1000 + seed)

    def change(value: Any, name: str) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(change(each, name) for each in value)
        if isinstance(value, dict):
            return {key: change(each, key) for key, each in value.items()}
        if not isinstance(value, Tensor) or not value.is_floating_point() or "mask" in name or name == "keyframe_idxs":
            return value
        if value.min() >= 0:  # timesteps and the like, each a little less
            return value * (0.5 + 0.5 * torch.rand(value.shape[:1] + (1,) * (value.ndim - 1), generator=numbers))
        return torch.randn(value.shape, generator=numbers) * value.std(correction=0)

    return {name: change(value, name) for name, value in inputs.items()}
