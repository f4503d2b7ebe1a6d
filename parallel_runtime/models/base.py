"""What a worker knows of a model whose blocks it runs itself: an `Adapter`, its blocks and what passes between them.

Letters: `B` batch, `S` tokens of this rank (text first, then image), `C` hidden size, `H` heads, `D` head size.

Owns the seam between the loop over blocks (worker/forward.py) and a model's arithmetic. What else such
a family says is family.py's; a model that ComfyUI's own module computes has no adapter (models/hosted).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Modulation = tuple[torch.Tensor, ...]
StartMlp = Callable[[], Any]  # what of a block's MLP goes without its attention, and `finish` takes as `mlp`


class Weights(Protocol):
    """The weights of one block, or all outside the blocks, by their names there."""

    def __getitem__(self, name: str) -> torch.Tensor:
        """One weight."""
        ...

    def linear(self, name: str, x: torch.Tensor, *, rows: slice = ..., columns: slice = ...) -> torch.Tensor:
        """x (..., columns) through the linear layer `name`, or these rows and columns of it, to (..., rows)."""
        ...

    def add_linear(self, out: torch.Tensor, name: str, x: torch.Tensor, *, columns: slice) -> None:
        """Add to out (..., rows), contiguous, the product of x (..., columns) with these columns, without the bias."""
        ...


@dataclass(frozen=True, kw_only=True)
class Split:
    """How one input or output is shared out: along `dim`, by the tokens of `stream`."""

    stream: str
    dim: int


@dataclass(frozen=True)
class Block:
    """One block of the loop: its kind, its number there and the canonical prefix of its weights."""

    kind: str
    index: int
    prefix: str


@dataclass
class Tokens:
    """One rank's state between blocks: x (B, S, C), text rows first; what modulates and rotates it."""

    x: torch.Tensor
    num_text: int
    vec: torch.Tensor  # (B, 1 or 2, C), already through SiLU: every modulation needs it so
    rope: torch.Tensor  # (1, S, 1, D / 2) complex
    zero_timestep: torch.Tensor | None = None  # (S,) which of vec's two a row takes: 1 for rows at timestep zero


@dataclass
class Condition:
    """What a call needs beside the image, the same for every call of a prompt but for `vec`."""

    txt: torch.Tensor  # (B, text rows, C), projected; behind the first stage as it came, for its number of rows
    vec: torch.Tensor  # (..., B, 1 or 2, C), already through SiLU: every modulation needs it so
    rope: torch.Tensor  # (1, S, 1, D / 2) complex
    zero_timestep: torch.Tensor | None = None  # as in Tokens


class Sizes(Protocol):
    """The sizes of a model that the keys of a stage depend on."""

    @property
    def hidden_size(self) -> int:
        """Numbers a token."""
        ...

    @property
    def num_heads(self) -> int:
        """Heads of the attention."""
        ...

    @property
    def head_dim(self) -> int:
        """Numbers a head."""
        ...


class Adapter(Protocol):
    """The functions of one transformer, of one rank's tokens. Holds sizes, no weights and no state.

    Knows no rank and no collective. A weight's name is the file's.
    """

    @property
    def config(self) -> Sizes:
        """The model's sizes."""
        ...

    @property
    def split_plan(self) -> Mapping[str, Split]:
        """Which inputs and outputs are shared out over the ranks of a sequence; the rest is whole on each of them."""
        ...

    @property
    def batched(self) -> frozenset[str]:
        """What has a row for each row of the batch, in dim 0."""
        ...

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks, in the order in which they run."""
        ...

    @property
    def block_prefixes(self) -> tuple[str, ...]:
        """How the names of the blocks' weights begin."""
        ...

    def block_cost(self, block: Block) -> float:
        """What a pass through a block costs, in FLOPs."""
        ...

    def outside_of_other_stages(self, *, first: bool, last: bool) -> tuple[str, ...]:
        """How the names of weights outside the blocks begin that such a stage has no need of."""
        ...

    def modulation_numbers(self, block: Block, vec: torch.Tensor) -> int:
        """How many numbers `modulation_rows` makes of vec (..., B, 1 or 2, C)."""
        ...

    def condition(self, w: Weights, inputs: Mapping[str, torch.Tensor], *, text: bool = True) -> Condition:
        """What a call needs beside the image; `text`: whether the text is projected, which the first stage needs."""
        ...

    def embed(self, w: Weights, img: torch.Tensor, condition: Condition) -> Tokens:
        """From this rank's rows of the image to the first block's tokens. `w` holds the weights outside the blocks."""
        ...

    def received(self, x: torch.Tensor, condition: Condition) -> Tokens:
        """Tokens (B, S, C) as another stage left them, ready for the next block."""
        ...

    def modulation_rows(self, block: Block, w: Weights, vec: torch.Tensor) -> Modulation:
        """What a block makes of vec (..., B, 1 or 2, C), for `modulation` to take apart."""
        ...

    def modulation(self, block: Block, rows: Modulation, tokens: Tokens) -> Modulation:
        """Shift, 1 + scale and gate of a block's tokens, each (B, 1 or S, C)."""
        ...

    def qkv(
        self, block: Block, w: Weights, tokens: Tokens, mod: Modulation, *, shared: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, StartMlp]:
        """Queries, keys and values, each (B, S, H, D), and what starts its MLP while they travel."""
        ...

    def overlapped_mlp(self, block: Block, w: Weights, mlp: Any) -> Any:  # noqa: ANN401 the adapter's own
        """What more can be done while the attention's output travels; it may return what it is given."""
        ...

    def finish(
        self,
        block: Block,
        w: Weights,
        tokens: Tokens,
        attn: torch.Tensor,
        mod: Modulation,
        *,
        mlp: Any,  # noqa: ANN401
        residual: torch.Tensor | None,
    ) -> None:
        """The rest of the block, in place on `tokens.x`. attn (B, S, H, D), residual (B, <= image rows, C)."""
        ...

    def head(self, w: Weights, tokens: Tokens) -> torch.Tensor:
        """From the last block to this rank's rows of the output, (B, image rows, out channels)."""
        ...
