"""The VAE of one rank: its weights as they come, ComfyUI's module made of them, and tiles that it decodes.

A rank holds one VAE, besides the models. It has the tiles it was given and nothing else of a picture. On a GPU the
weights are there while a decode lasts and lie in host memory between.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from ..errors import RequestCancelledError
from ..models.hosted.vae import build_vae
from ..torch_flags import set_flags
from ..wire.channel import SegmentTable
from ..wire.protocol import TensorSpec
from ..wire.replies import DecodeReply, Memory, MemoryReply, Progress
from ..wire.requests import DecodeTiles, HoldVae, OfVae

METHODS = ("decode", "_decode_pixels")  # the latter of a class that tiles by itself: the network of one tile
CPU = torch.device("cpu")


class RankVae:
    """What `HoldVae` and `DecodeTiles` ask of rank `rank`, tensors in `segments`. `memory` says what it occupies."""

    def __init__(
        self, *, rank: int, device: torch.device, segments: SegmentTable, memory: Callable[[], Memory]
    ) -> None:
        self._rank, self._device, self._segments, self._memory = rank, device, segments, memory
        self._held: tuple[int, torch.nn.Module, Mapping[str, bool | str]] | None = None
        self._handle = 0  # of what is held or coming
        self._coming: dict[str, torch.Tensor] = {}
        self._on_host: dict[str, torch.Tensor] = {}  # its weights, while they are on a GPU, too
        self.on_device = False  # on a GPU: between the rounds of a decode, and after one that was given up there
        self._sign_of_life: Callable[[], None] = lambda: None  # of the request that runs

    def answer(
        self,
        request: OfVae,
        specs: Sequence[TensorSpec],
        *,
        progress: Callable[[Progress], None],
        cancelled: Callable[[], bool],
        beat: Callable[[], None],
    ) -> MemoryReply:
        """Do what is asked. Raises RequestCancelledError once `cancelled()`, which is looked at before each layer."""

        def sign_of_life() -> None:
            beat()
            if cancelled():
                raise RequestCancelledError

        self._sign_of_life = sign_of_life
        tensors = {spec.name: self._segments.tensor(spec) for spec in specs}
        if isinstance(request, HoldVae):
            return self._hold(request, tensors)
        try:
            return self._decode(request, tensors, progress)
        except RequestCancelledError:
            self.leave_device()
            raise

    def _random_state(self) -> bytes:
        state = torch.get_rng_state() if self._device.type == "cpu" else torch.cuda.get_rng_state(self._device)
        return state.numpy().tobytes()

    def leave_device(self) -> None:
        """The module has its weights in host memory, which nothing has changed meanwhile."""
        if self._held is not None and self.on_device:
            module = self._held[1]
            module.load_state_dict(self._on_host, assign=True)
            module.to(CPU)  # what else it has
            torch.cuda.empty_cache()
        self._on_host, self.on_device = {}, False

    def drop(self, handle: int) -> None:
        """Keep nothing of a VAE, whether all of it came or not; nothing where another is held."""
        if handle == self._handle:
            self._held, self._coming, self._on_host, self.on_device = None, {}, {}, False

    def _hold(self, request: HoldVae, tensors: Mapping[str, torch.Tensor]) -> MemoryReply:
        if request.first:
            self.drop(self._handle)
            self._handle = request.vae
        for number, name in enumerate(request.names):
            self._coming[name] = tensors[f"w{number}"].clone()
        if request.last:
            parts, self._coming = self._coming, {}
            dtype = getattr(torch, request.dtype)
            module = build_vae(request.comfyui, parts, dtype=dtype, metadata=request.metadata, device=self._device)
            for layer in module.modules():
                if next(layer.children(), None) is None:
                    layer.register_forward_pre_hook(lambda *_: self._sign_of_life())
            self._held = (request.vae, module, request.flags)
        return MemoryReply(memory=self._memory())

    def _decode(
        self, request: DecodeTiles, tensors: Mapping[str, torch.Tensor], progress: Callable[[Progress], None]
    ) -> DecodeReply:
        if self._held is None or self._held[0] != request.vae or request.method not in METHODS:
            raise ValueError(f"rank {self._rank} was asked for {request.method} of VAE {request.vae}, which it lacks")
        began, (_, module, flags) = time.perf_counter(), self._held
        set_flags(flags)  # ComfyUI's import sets some, and models have theirs
        try:
            refused = self._decode_tiles(request, module, tensors, progress)
        except torch.OutOfMemoryError:  # ComfyUI's own decode makes room, and takes smaller tiles
            refused = f"{self._device} has no memory left for a tile"
        decode_s = time.perf_counter() - began
        if request.last or refused:
            self.leave_device()
        return DecodeReply(
            memory=self._memory(), num_tiles=len(request.tiles[self._rank]), decode_s=decode_s, refused=refused
        )

    def _decode_tiles(
        self,
        request: DecodeTiles,
        module: torch.nn.Module,
        tensors: Mapping[str, torch.Tensor],
        progress: Callable[[Progress], None],
    ) -> str:
        """Decode this rank's tiles into their room. Returns why they cannot be, "" where they were."""
        mine = request.tiles[self._rank]
        random = self._random_state()
        if mine:
            if self._device.type != "cpu" and not self.on_device:
                self._on_host, self.on_device = dict(module.state_dict()), True
            module.to(self._device)
        for done, number in enumerate(mine, start=1):
            self._sign_of_life()
            given, room = tensors[f"in{number}"], tensors[f"out{number}"]
            # a copy, since a module may write to its input and ranks share the memory
            pixels = getattr(module, request.method)(given.to(self._device, copy=True))
            if self._random_state() != random:
                return "it draws random numbers as it decodes, others for each tile"
            if pixels.shape != room.shape:
                made, meant = tuple(pixels.shape), tuple(room.shape)
                return f"of {tuple(given.shape)} it makes {made}, where ComfyUI's tiles have {meant}"
            room.copy_(pixels)  # which waits for the device: it is no pinned memory
            progress(Progress(done=done, total=len(mine)))
        return ""
