"""Transformers in odd shapes that no ComfyUI has, which attend by ComfyUI's function: what a finder may meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .tiny import fill, noise

WIDTH, HEADS, TOKENS, FRAMES = 96, 6, 35, 5


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


class UShaped(Odd):
    """Half of the tokens in the middle blocks; the outer ones' rows are added again."""

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, 16)."""
        first = self.blocks[0](self.embed(x))
        half = self.blocks[2](self.blocks[1](first[:, ::2] + 0.5 * first[:, ::2].roll(1, 1)))
        return self.head(self.blocks[3](first + half.repeat_interleave(2, 1)[:, : x.shape[1]]))


class Registers(Odd):
    """Tokens of its own in the middle of the image's, which go before the end."""

    def __init__(self) -> None:
        super().__init__()
        self.registers = nn.Parameter(torch.zeros(1, 3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, 16)."""
        x, half = self.embed(x), x.shape[1] // 2
        x = torch.cat((x[:, :half], self.registers.expand(x.shape[0], -1, -1), x[:, half:]), 1)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.cat((x[:, :half], x[:, half + 3 :]), 1))


class FrameMixing(Block):
    """Adds to each row that of the frame before."""

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, C)."""
        x = super().forward(x)
        return x + 0.5 * x.unflatten(1, (FRAMES, -1)).roll(1, 1).flatten(1, 2)


class InBatch(Block):
    """Attends in each frame by itself, so frames are rows of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, C)."""
        return super().forward(x.unflatten(1, (FRAMES, -1)).flatten(0, 1)).unflatten(0, (-1, FRAMES)).flatten(1, 2)


class Counting(Block):
    """Its attention is another in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, C)."""
        self.calls += 1
        return super().forward(x) if self.calls % 2 else super().forward(super().forward(x))


class OtherOrder(Odd):
    """Its blocks run the other way round in every second call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, 16)."""
        self.calls += 1
        x = self.embed(x)
        for block in list(self.blocks)[:: 1 if self.calls % 2 else -1]:
            x = block(x)
        return self.head(x)


class Deaf(Block):
    """Takes nothing from its attention."""

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, C)."""
        return x + 0.0 * (super().forward(x) - x) + torch.tanh(self.mlp(x))


MADE: dict[str, Callable[[], nn.Module]] = {
    "plain": Odd,
    "u-shaped": UShaped,
    "registers": Registers,
    "mixes frames": lambda: Odd(FrameMixing),
    "tokens in the batch": lambda: Odd(InBatch),
    "state between calls": lambda: Odd(Counting),
    "another order": OtherOrder,
    "deaf": lambda: Odd(Deaf),
}


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """One of them with random weights, and a call."""
    model, numbers = MADE[name](), torch.Generator().manual_seed(3)
    for each, weight in model.named_parameters():
        fill(each, weight.data, numbers, parameter=True)
    return model.eval().requires_grad_(False), {"x": noise(2, TOKENS, 16)}
