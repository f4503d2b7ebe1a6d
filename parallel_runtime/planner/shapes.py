"""What the planner must know of a model and of the work: sizes, nothing else.

Owns the counting of weights. Reads no file: a family says the shape of its own. Letters: `d` hidden width, `m` hidden
width of the MLP.
"""

import math
from dataclasses import dataclass

from ..parallel.shard import SequenceShard

KEPT_ON = ("auto", "gpu", "cpu", "off")  # the device where there is room and else the host; the device; the host
STORED_AS = "default"  # in the dtype that is computed in


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A diffusion transformer with joint attention over text and image.

    A double block has weights of its own for text and image, a single block shares them; both attend to everything.
    `modulation` is the matrices of the adaptive norms in units of d * d a block: (double, single); figures published of
    other models need others. `other_params` is what stands outside the blocks.
    """

    name: str
    double_blocks: int
    single_blocks: int
    hidden: int
    heads: int
    mlp_hidden: int
    channels: int = 64
    modulation: tuple[int, int] = (12, 3)
    other_params: int = 0

    @property
    def blocks(self) -> int:
        """How many blocks a token passes."""
        return self.double_blocks + self.single_blocks

    @property
    def token_params(self) -> int:
        """Weights that one token is multiplied with in one block: qkv and projection 4 d d, MLP 2 d m."""
        return 4 * self.hidden**2 + 2 * self.hidden * self.mlp_hidden

    @property
    def block_params(self) -> int:
        """Weights of all blocks."""
        double, single = self._params_of_blocks
        return self.double_blocks * double + self.single_blocks * single

    @property
    def largest_block_params(self) -> int:
        """Weights of the block that has the most."""
        double, single = self._params_of_blocks
        return double if self.double_blocks else single

    @property
    def params(self) -> int:
        """Weights of the whole model."""
        return self.block_params + self.other_params

    @property
    def _params_of_blocks(self) -> tuple[int, int]:
        square = self.hidden**2
        return 2 * self.token_params + self.modulation[0] * square, self.token_params + self.modulation[1] * square


@dataclass(frozen=True, kw_only=True)
class Work:
    """One image (or video, or batch) to denoise. `guided` is a cfg scale above 1: every row runs twice a step.

    `element_bytes` is of activations, `weight_bytes` of one weight as it lies in memory. `step_cache`: what blocks
    added is kept from call to call. `kept_on`, `kept_as`: where and how a class keeps what it finds again in the steps
    behind the first one, of `KEPT_ON`, and the name of a format. Tokens whose keys it keeps count as text,
    `reference_tokens` of them of references.
    """

    image_tokens: int
    text_tokens: int
    guided: bool = False
    batch: int = 1
    steps: int = 20
    element_bytes: int = 2
    weight_bytes: int = 2
    step_cache: bool = False
    kept_on: str = KEPT_ON[0]
    kept_as: str = STORED_AS
    reference_tokens: int = 0

    def __post_init__(self) -> None:
        lowest = {"image_tokens": 1, "text_tokens": 0, "batch": 1, "steps": 1, "element_bytes": 1, "weight_bytes": 1}
        for name, low in lowest.items():
            value = getattr(self, name)
            if value < low:
                raise ValueError(f"{name}={value} is below {low}; use a whole number from {low}")

    @property
    def tokens(self) -> int:
        """Text and image tokens of one row."""
        return self.image_tokens + self.text_tokens

    @property
    def rows(self) -> int:
        """Rows of the batch that run a step, guidance included."""
        return self.batch * (2 if self.guided else 1)

    def lengths(self, parts: int) -> tuple[int, ...]:
        """Tokens of each part of one row, as the engine cuts them."""
        return SequenceShard(self.text_tokens, self.image_tokens, parts, 0).lengths


def image_tokens(width: int, height: int) -> int:
    """Tokens of an image in pixels: latents of eight by eight pixels, patches of two by two."""
    return math.ceil(width // 8 / 2) * math.ceil(height // 8 / 2)
