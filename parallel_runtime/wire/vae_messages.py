"""What the parent asks of its ranks of a VAE, and what they answer; requests.py has these among its own."""

from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from ..checkpoint import ComfyUI
from .protocol import Op
from .replies import MemoryReply


@dataclass(frozen=True, kw_only=True)
class DecodeReply(MemoryReply):
    """Tiles that the rank decoded, and seconds for them; `refused`: why it did not, "" where it did."""

    num_tiles: int
    decode_s: float
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class HoldVae:
    """One message of a VAE's weights, tensors `w0` on by `names`; with the last, ComfyUI's class is built of them all.

    A rank holds one VAE: the first message lets another go. `metadata` is what ComfyUI's class is told beside them;
    `flags` as `ModelSpec`'s.
    """

    op: ClassVar = Op.VAE
    reply: ClassVar = MemoryReply
    vae: int
    comfyui: ComfyUI
    dtype: str
    metadata: dict[str, str]
    names: tuple[str, ...]
    first: bool
    last: bool
    flags: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class DecodeTiles:
    """Decode tiles `in0` on to `out0` on by the VAE's method of that name; `tiles` has the numbers of each rank's.

    With `last`, the VAE's weights then leave the rank's device for host memory.
    """

    op: ClassVar = Op.DECODE
    reply: ClassVar = DecodeReply
    vae: int
    method: str
    tiles: tuple[tuple[int, ...], ...]
    last: bool


OfVae: TypeAlias = HoldVae | DecodeTiles
