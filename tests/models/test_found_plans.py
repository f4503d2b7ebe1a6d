"""A plan that is found by looking at a model's calls equals one process.

Owns: what is found of a class whose plan people wrote, and of models in odd shapes. The sweep over all classes is
`python -m tools.find_plans`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rounding import ROUNDING
from torch import Tensor, nn

from parallel_runtime.models.finder import Candidate, look, plans
from parallel_runtime.models.hosted.finding import attention_to
from parallel_runtime.models.hosted.hooks import SharedModel
from parallel_runtime.models.specs.written import from_data, to_data

from .cases import CASES
from .gloo_group import GlooGroup, OwnTokensOnly
from .ranks import in_ranks
from .tiny import call, difference, fill, noise

CONTROL = 1e-3


def candidates(model: nn.Module, inputs: dict[str, Any]) -> list[Candidate]:
    """The plans that explain a call."""
    return list(plans([look(model, partial(call, model, inputs), attention_to)]))


# Case -> what the plan that people wrote for its class cuts.
WRITTEN: dict[str, dict[str, Any]] = {
    "Wan 5B, a timestep for each frame": {
        "blocks.0": {"x": "img"},
        "blocks.*": {"freqs": "img", "e": "frames4:img"},
        "head": {"e": "frames3:img"},
    },
    "Flux.1, ControlNet and mask": {
        "double_blocks.0": {"img": "img", "txt": "txt"},
        "double_blocks.*": {"pe": "txt+img@2", "attn_mask": "order:txt+img"},
        "single_blocks.*": {"pe": "txt+img@2", "attn_mask": "order:txt+img"},
    },
    "Cosmos Predict2, a timestep for each frame": {
        "blocks.0": {"x_B_T_H_W_D": "grid@1"},
        "blocks.*": {"rope_emb_L_1_1_D": "flat:grid@1", "extra_per_block_pos_emb": "grid@1"},
    },
    "Mochi, cropped text": {
        "blocks.0": {"x": "img", "y": "txt"},
        "blocks.*": {"**rope_cos": "img@0", "**rope_sin": "img@0", "**crop_y": "index:txt"},
    },
    "Mage-Flow, reference, text mask, ControlNet": {  # the last token is padding in all texts
        "transformer_blocks.0": {"hidden_states": "img", "encoder_hidden_states": "txt"},
        "transformer_blocks.*": {"image_rotary_emb": "txt+img@2", "encoder_hidden_states_mask": "txt"},
    },
}


@pytest.mark.parametrize("name", WRITTEN)
@in_ranks(2)
def test_what_is_found_is_what_people_wrote_and_equals_one_process(group: GlooGroup, name: str) -> None:
    """One rank looks, as one process does for all, and tells the other."""
    model, inputs = CASES[name]()
    want = call(model, inputs)
    looked = candidates(model, inputs)[0].spec if group.index == 0 else None
    told = [looked and to_data(looked)]
    dist.broadcast_object_list(told)
    spec = from_data(told[0])
    assert looked in (None, spec)
    assert {path: dict(words) for path, words in spec.cut.items()} == WRITTEN[name]
    shared = SharedModel(model, spec, group)
    assert difference(call(model, inputs), want) <= ROUNDING
    shared.group = OwnTokensOnly()
    assert difference(call(model, inputs), want) > CONTROL


WIDTH, HEADS, TOKENS = 96, 6, 35


class Block(nn.Module):
    """Attends over all of its rows, then a layer for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, C)."""
        import comfy.ldm.modules.attention as attention

        x = x + self.out(attention.optimized_attention(*self.qkv(x).chunk(3, -1), HEADS))
        return x + torch.tanh(self.mlp(x))


class Odd(nn.Module):
    """Four blocks, one after another."""

    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)
        self.blocks = nn.ModuleList([kind() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, 16)."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Registers(Odd):
    """Tokens of its own in the middle of the image's, which go before the end."""

    def __init__(self) -> None:
        super().__init__()
        self.registers = nn.Parameter(torch.zeros(1, 3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x, half = self.embed(x), x.shape[1] // 2
        x = torch.cat((x[:, :half], self.registers.expand(x.shape[0], -1, -1), x[:, half:]), 1)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.cat((x[:, :half], x[:, half + 3 :]), 1))


class TakesResiduals(Odd):
    """Takes a residual of a ControlNet before each block, as HunYuanDiT does, whose lists are as long as its own."""

    def forward(self, x: Tensor, control: dict[str, Any] | None = None) -> Tensor:
        left = None if control is None else control.get("output", None)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x if left is None else x + left.pop())
        return self.head(x)


MADE: dict[str, Callable[[], nn.Module]] = {
    "plain": Odd,
    "registers": Registers,
    "takes residuals": TakesResiduals,
}


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """One of them with random weights, and a call."""
    model, numbers = MADE[name](), torch.Generator().manual_seed(3)
    for each, weight in model.named_parameters():
        fill(each, weight.data, numbers, parameter=True)
    return model.eval().requires_grad_(False), {"x": noise(2, TOKENS, 16)}


@pytest.mark.parametrize("name", MADE)
@in_ranks(2)
def test_an_odd_model_is_equal(group: GlooGroup, name: str) -> None:
    """The plan that cuts least is tried where those that cut more differ, as the proof does."""
    model, inputs = made(name)
    want = call(model, inputs)
    found = candidates(model, inputs)
    shared = SharedModel(model, found[-1].spec, group)
    assert difference(call(model, inputs), want) <= ROUNDING
    shared.group = OwnTokensOnly()
    assert difference(call(model, inputs), want) > CONTROL
    assert list(found[0].spec.control) == ["output"] * (name == "takes residuals")
