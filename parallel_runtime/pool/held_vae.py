"""The VAE that one generation of ranks holds, and tiles that they decode.

Owns which VAE that is, the messages that bring its weights, and which rank decodes which tile. Does not own the tiling
and its blending, which are ComfyUI's own, nor how ranks are asked (worker_group.py).
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..checkpoint import ComfyUI
from ..wire.protocol import dtype_name
from ..wire.replies import DecodeReply
from ..wire.requests import DecodeTiles, HoldVae, Unload
from .generation import Generation
from .held_weights import Check

ENOUGH_BYTES = 64 << 20  # of weights in one message
MAX_NAMES = 500  # of weights in one message, whose text is limited


@dataclass(frozen=True, kw_only=True, eq=False)
class VaeWeights:
    """A VAE of ComfyUI's: its weights by name, on any device, the dtype it computes in, what its class is told beside.

    `flags` as `ModelSpec`'s. `key` stands for these very weights, and is never used for others.
    """

    key: str
    comfyui: ComfyUI
    dtype: torch.dtype
    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, bool | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A part of a latent, any device, and the shape and dtype of its pixels."""

    latent: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Pixels of each tile, on the CPU, and what each rank says."""

    pixels: list[torch.Tensor]
    ranks: list[DecodeReply]


class Held(NamedTuple):
    """The handle of the VAE that ranks hold, and seconds that bringing it took, 0 where it was there."""

    handle: int
    load_s: float


class HeldVae:
    """At most one VAE on all ranks of `generation`.

    `handles` gives new numbers; `load_deadline_s`: of taking its weights.
    """

    def __init__(self, generation: Generation, handles: Iterator[int], load_deadline_s: float) -> None:
        self._generation, self._handles, self._load_deadline_s = generation, handles, load_deadline_s
        self._held: tuple[str, int] | None = None
        self.partly_held = 0  # the handle of one whose weights did not all come, and ranks may keep; 0: none

    def hold(self, vae: VaeWeights, check: Check) -> Held:
        """Have the VAE on every rank, in place of any other. Given up, no rank counts as having it; `free` is due."""
        if self._held is not None and self._held[0] == vae.key:
            return Held(self._held[1], 0.0)
        self.free(check)
        began, handle = time.perf_counter(), next(self._handles)
        batches = list(_batches(vae.tensors))
        for number, names in enumerate(batches):
            request = HoldVae(
                vae=handle,
                comfyui=vae.comfyui,
                dtype=dtype_name(vae.dtype),
                metadata=dict(vae.metadata),
                names=tuple(names),
                first=number == 0,
                last=number == len(batches) - 1,
                flags=dict(vae.flags),
            )
            specs, _ = self._generation.arena.place({f"w{at}": vae.tensors[name] for at, name in enumerate(names)})
            self.partly_held = handle
            self._generation.ask(request, check, specs, deadline_s=self._load_deadline_s)
        self._held, self.partly_held = (vae.key, handle), 0
        return Held(handle, time.perf_counter() - began)

    def host_bytes(self, vae: VaeWeights) -> int:
        """Bytes of this machine's memory that `hold` will take: each rank has a copy. 0 where they hold it."""
        if self._held is not None and self._held[0] == vae.key:
            return 0
        ranks = min(self._generation.reach(), self._generation.devices_by_machine[0])
        return ranks * sum(tensor.nbytes for tensor in vae.tensors.values())

    def free(self, check: Check) -> None:
        """Have no rank keep any of a VAE; nothing where none does."""
        if self._held is not None:
            self.partly_held, self._held = self._held[1], None
        if self.partly_held:

            def freed(_: object) -> None:
                self.partly_held = 0

            self._generation.ask(Unload(model=self.partly_held), check, on_done=freed)

    def decode(
        self,
        vae: VaeWeights,
        tiles: Sequence[Tile],
        check: Check,
        *,
        method: str,
        last: bool,
        on_tiles: Callable[[int], None],
    ) -> Decoded:
        """The pixels of tiles. The largest go first, each to the rank with least to do.

        Holds the VAE where the ranks lack it. `method` is that of its class which decodes one; `last`: no more of this
        picture follow; `on_tiles(done)` is told of how many are done. Cancelled, it ends between two layers.
        """
        handle = self.hold(vae, check).handle
        latents = {f"in{number}": tile.latent for number, tile in enumerate(tiles)}
        pictures = {
            f"out{number}": torch.empty(tile.shape, dtype=tile.dtype, device="meta")
            for number, tile in enumerate(tiles)
        }
        specs, _ = self._generation.arena.place(latents, pictures)
        request = DecodeTiles(
            vae=handle, method=method, tiles=assign_tiles(tiles, num_ranks=self._generation.reach()), last=last
        )
        ranks = self._generation.ask(
            request,
            check,
            specs,
            on_progress=lambda said: on_tiles(sum(each.done for each in said.values())),
        )
        pixels = [self._generation.arena.take(spec) for spec in specs[len(tiles) :]]
        if last:  # a video's tiles are the largest that lie there
            self._generation.arena.give_back()
        return Decoded(pixels=pixels, ranks=ranks)


def assign_tiles(tiles: Sequence[Tile], *, num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """The numbers of each rank's tiles, by how many latent pixels they have."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = [0] * num_ranks
    for number in sorted(range(len(tiles)), key=lambda number: -tiles[number].latent.numel()):
        rank = sums.index(min(sums))
        shares[rank].append(number)
        sums[rank] += tiles[number].latent.numel()
    return tuple(tuple(sorted(share)) for share in shares)


def _batches(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Names of weights that go in one message."""
    batch: list[str] = []
    num_bytes = 0
    for name, tensor in tensors.items():
        if batch and (num_bytes + tensor.nbytes > ENOUGH_BYTES or len(batch) == MAX_NAMES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(name)
        num_bytes += tensor.nbytes
    yield batch
