"""Which patch of a pipeline writes which numbers of a latent, of models made up here.

Each model's tokens are its latent's numbers, and one block hands them on. ComfyUI's are test_hosted_pipelines.py's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_runtime.models.hosted.call import TokenCall
from parallel_runtime.models.hosted.owners import MixedPatchesError, find_owners
from parallel_runtime.parallel.attention import SequenceParallelAttention

LATENT = torch.ones(1, 1, 7)


class Tiny:
    """A model and its block; `tokens`, `beside` and `out` are what it makes of the latent and of the block's output."""

    name, before = "Tiny", ()

    def __init__(self, **how: Callable[..., Any]) -> None:
        same: dict[str, Callable[..., Any]] = {
            "tokens": lambda x: x,
            "beside": lambda x: None,
            "out": lambda out, x: out,
        }
        self.how = same | how

    @contextmanager
    def looked_at(self, look: Callable[[int, Any, Any], Any]) -> Iterator[None]:
        self.look = look
        yield

    def outputs(
        self, x: Tensor, alone: SequenceParallelAttention, new_call: Callable[[str], TokenCall]
    ) -> list[Tensor]:
        call = new_call(self.name)
        lengths = call.introduce("x", x.shape[2])
        start = sum(lengths[: call.index])
        mine = self.how["tokens"](x)[:, :, start : start + lengths[call.index]]
        out = call.gather("x", self.look(0, mine, self.how["beside"](x)), dim=2)
        return [self.how["out"](out, x)]

    def owners(self, *, parts: int = 1) -> list[int]:
        return find_owners(self.outputs, self, LATENT, patches=2, parts=parts).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [1, 2])
def test_a_patch_has_the_numbers_that_the_tokens_of_all_its_ranks_become(parts: int) -> None:
    assert Tiny().owners(parts=parts) == [0, 0, 0, 1, 1, 1, 1]
    flipped = Tiny(tokens=lambda x: x.flip(2), beside=torch.ones_like, out=lambda out, x: out.flip(2))
    assert flipped.owners(parts=parts) == [1, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"tokens": lambda x: x + x.roll(1, 2)}, "mixes the tokens of patches outside of its blocks"),
        ({"out": lambda out, x: out + out.roll(1, 2)}, "mixes the tokens of patches outside of its blocks"),
        (
            {"beside": lambda x: (3, {"a": x.mean()})},
            "gives its blocks or its output more of the latent than its tokens",
        ),
        ({"out": lambda out, x: out + x}, "gives its blocks or its output more of the latent than its tokens"),
    ],
)
def test_patches_that_share_numbers_are_refused_with_what_the_model_does(
    how: dict[str, Callable[..., Any]], said: str
) -> None:
    with pytest.raises(MixedPatchesError, match=f"Tiny {said}"):
        Tiny(**how).owners()
