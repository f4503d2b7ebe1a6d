"""The work that a plan is chosen for: its sizes, nothing else."""

import math
from dataclasses import dataclass

from ..exchange_formats import EXACT

KEPT_ON = ("auto", "gpu", "cpu", "off")  # the device where there is room and else the host; the device; the host
STORED_AS = "default"  # in the dtype that is computed in


@dataclass(frozen=True, kw_only=True)
class Work:
    """One image (or video, or batch) to denoise. `guided` is a cfg scale above 1: every row runs twice a step.

    `element_bytes` is of activations. `step_cache`: what blocks added is kept from call to call. `graphs`: blocks may
    run as CUDA graphs. `exchange`: as what heads travel between ranks (exchange_formats.py). `kept_on`, `kept_as`:
    where and how a class keeps what it finds again in the steps behind the first one, of `KEPT_ON`, and the name of a
    format. Tokens whose keys it keeps count as text, `reference_tokens` of them of references.
    `frames`: of a video, where it is known.
    """

    image_tokens: int
    text_tokens: int
    guided: bool = False
    batch: int = 1
    steps: int = 20
    element_bytes: int = 2
    step_cache: bool = False
    graphs: bool = False
    kept_on: str = KEPT_ON[0]
    kept_as: str = STORED_AS
    reference_tokens: int = 0
    exchange: str = EXACT
    frames: int = 1

    def __post_init__(self) -> None:
        lowest = {"image_tokens": 1, "text_tokens": 0, "batch": 1, "steps": 1, "element_bytes": 1}
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


def image_tokens(width: int, height: int) -> int:
    """Tokens of an image in pixels: latents of eight by eight pixels, patches of two by two."""
    return math.ceil(width // 8 / 2) * math.ceil(height // 8 / 2)
