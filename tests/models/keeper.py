"""A class of a few lines that keeps something between the calls of a run, as Qwen-Image 2.1 does, on any ComfyUI.

Text comes first and sees nothing of the picture, so its keys are the same in every step. Knows no ranks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallel_runtime.models.specs.spec import Keeps, ShardingSpec

WIDTH, HEADS, BLOCKS = 24, 3, 2
ELEMENT = 4  # bytes
PLAN = ShardingSpec(
    attention={"blocks": "img<-txt+img|img<-kept:txt+img|local"},
    cut={"blocks.*": {"prefix": "every:txt"}, "blocks.0": {"x": "rest:txt+img"}},
    gather={"out": "img"},
    unstaged="its blocks are given a function that has the keys of all tokens",
    keeps=Keeps(reset="forget", decide="choose", patcher="memory", option="keeper"),
)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from comfy.ldm.modules.attention import optimized_attention

    return optimized_attention(q, k, v, HEADS)


class Block(nn.Module):
    """x (B, S, C); `prefix`: how many of the S are text."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, prefix: int, attend: Attend) -> Tensor:
        """The tokens behind the block."""
        return x + self.mlp(attend(*self.qkv(x).chunk(3, -1)))


class Keeper(nn.Module):
    """`more`: so many keys of the picture are kept with those of the text. No plan can know that."""

    memory: Any
    attention = staticmethod(_attention)

    def __init__(self, *, more: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.text, self.image, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.more, self.kept, self.enabled = more, None, False

    def forget(self, enabled: bool) -> None:
        """Free what is kept."""
        self.kept, self.enabled = None, enabled

    def choose(self, key: Tensor, num_bytes: int, *, off: bool) -> tuple[dict[str, Any] | None, bool]:
        """What is kept, and whether all that the call needs is in it."""
        if off or self.memory.get_free_memory(key.device) < num_bytes:
            return None, False
        if self.kept is not None and torch.equal(self.kept["key"], key):
            return self.kept, True
        self.kept = {"key": key, "blocks": []}
        return self.kept, False

    def forward(self, x: Tensor, context: Tensor, transformer_options: dict[str, Any] | None = None) -> Tensor:
        """x (B, S, C) the picture, context (B, P, C) the text; returns (B, S, C)."""
        text, image, prefix = self.text(context), self.image(x), context.shape[1]
        kept, found = None, False
        if self.enabled:
            said = (transformer_options or {}).get("keeper", {})
            kept, found = self.choose(context, 2 * BLOCKS * text.nbytes, off=said.get("device") == "off")[:2]
        if kept is None:
            rows = torch.cat((text, image), 1)
            for block in self.blocks:
                rows = block(rows, prefix, partial(self._causal, prefix))
            return self.out(rows[:, prefix:])
        for number, block in enumerate(self.blocks):
            if not found:
                text = block(text, prefix, partial(self._noted, kept["blocks"]))
            image = block(image, 0, partial(self._behind, kept["blocks"], number, found))
        return self.out(image)

    def _behind(self, kept: list[tuple[Tensor, Tensor]], number: int, found: bool, *qkv: Tensor) -> Tensor:
        """Attention over the keys that are kept and those of the picture."""
        q, k, v = qkv
        before = kept[number]
        if not found:
            kept[number] = tuple(
                torch.cat((old, new[:, : self.more]), 1) for old, new in zip(before, (k, v), strict=True)
            )
        return self.attention(q, *(torch.cat(each, 1) for each in zip(before, (k, v), strict=True)))

    def _causal(self, prefix: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        text = self.attention(q[:, :prefix], k[:, :prefix], v[:, :prefix])
        return torch.cat((text, self.attention(q[:, prefix:], k, v)), 1)

    def _noted(self, kept: list[tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.append((k.clone(), v.clone()))
        return self.attention(q, k, v)


class OtherReset(Keeper):
    """Of a ComfyUI whose method asks for more."""

    def forget(self, enabled: bool, why: str) -> None:
        """Free what is kept."""
        super().forget(enabled)


class NoChoice(Keeper):
    """Of a ComfyUI that decides elsewhere."""

    choose = None


class OtherMemory(Keeper):
    """Of a ComfyUI that looks for its memory itself."""

    @property
    def memory(self) -> Any:
        """There is none without a loader."""
        raise LookupError("no loader")


class OtherChoice(Keeper):
    """Of a ComfyUI that decides one thing more."""

    def choose(self, key: Tensor, num_bytes: int, *, off: bool) -> tuple[Any, ...]:
        """What is kept, whether all that the call needs is in it, and one thing more."""
        return *super().choose(key, num_bytes, off=off), "more"
