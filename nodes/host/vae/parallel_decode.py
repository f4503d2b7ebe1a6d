"""ComfyUI's tiled VAE decode with its tiles decoded by the workers: equal to VAE Decode (Tiled) as that node stands.

ComfyUI's own code cuts the latent into tiles and blends what they become, in this process, in its own order. It runs
twice: once with tensors that have shapes alone, which tells the tiles; then with pixels that the ranks made. Owns what
stands for the VAE meanwhile, and which VAEs that can be done with. Does not own the workers' part (pool/held_vae.py).
"""

import copy
import json
import logging
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch

from ....parallel_runtime.devices import Device
from ....parallel_runtime.errors import PoolError
from ....parallel_runtime.pool.held_vae import Held, HeldVae, Tile, VaeWeights
from ....parallel_runtime.pool.held_weights import HOST_LEFT_BYTES
from ....parallel_runtime.pool.pool import Pool
from ....parallel_runtime.pool.remote_ranks import NoComfyUIError
from ....parallel_runtime.torch_flags import read_flags
from ....parallel_runtime.weights.host_memory import host_memory
from ....parallel_runtime.wire.protocol import DTYPE_BYTES
from ....parallel_runtime.wire.replies import DecodeReply
from ..contract.comfyui import VAE, ModelPatcher, comfy, comfy_nodes
from ..contract.version import off
from ..model.pools import POOLS
from ..model.source import this_comfyui
from ..panel.progress import NodeText

log = logging.getLogger(__name__)
ROUND_BYTES = 256 << 20  # of pixels that come back at once, as far as each rank has a tile then
ROUND_TILES = 256
GIB = 1 << 30
OWN_TILES = "_decode_pixels"  # the network of one tile, in a class that tiles by itself (MiniMax H3)
CPU = torch.device("cpu")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
PLAIN = (bool, int, float, str, type, NoneType)
LOOKED_AT = 4096  # numbers of each weight


@dataclass(frozen=True, kw_only=True)
class Known:
    """A VAE that was decoded over ranks: the key of its weights, numbers of them, and what a rank builds of them, on
    meta; and what that is built by, beside their shapes: their dtypes, the VAE's, and its class's settings."""

    key: str
    numbers: torch.Tensor
    built_by: tuple[object, ...]
    again: torch.nn.Module


_KNOWN: "weakref.WeakKeyDictionary[torch.nn.Module, Known]" = weakref.WeakKeyDictionary()


class CannotShareError(Exception):
    """Why ranks cannot decode this; ComfyUI can."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A decode over ranks: the pictures (B, H, W, 3), seconds for bringing the weights, and what each rank says."""

    image: torch.Tensor
    load_s: float
    num_tiles: int
    ranks: list[DecodeReply]


def decode_over(vae: VAE, latent: dict, devices: Sequence[Device], *, clock: Callable[[], None]) -> Shared:
    """What VAE Decode (Tiled) makes with its defaults. `clock` is called once the ranks have the weights.

    Raises `CannotShareError` for what ComfyUI has to decode, `PoolError` when a rank fails, and ComfyUI's interrupt
    when the user cancels.
    """
    if off("decode"):
        raise CannotShareError(off("decode"))
    samples = _refuse_unfit(vae, latent, devices)
    tiles = tiles_of(vae, samples)
    if len(tiles) == 1 or all(tile.latent.shape[2:] == samples.shape[2:] for tile in tiles):
        raise CannotShareError("the picture is one tile")
    weights = weights_of(vae)
    pool = POOLS.pool(tuple(devices))
    check = comfy.model_management.throw_exception_if_processing_interrupted
    _make_room(vae, tiles, weights, devices)
    NodeText().say(f"bringing the VAE to {len(devices)} devices")
    try:
        load_s = pool.vae(lambda held, check: _hold(held, weights, check), check_cancelled=check).load_s
    except NoComfyUIError as error:
        raise CannotShareError(str(error)) from error
    clock()
    image, ranks = blended(vae, samples, tiles, weights, pool, check_cancelled=check)
    return Shared(image=image, load_s=load_s, num_tiles=len(tiles), ranks=ranks)


def blended(
    vae: VAE,
    samples: torch.Tensor,
    tiles: Sequence[Tile],
    weights: VaeWeights,
    pool: Pool,
    *,
    check_cancelled: Callable[[], None],
) -> tuple[torch.Tensor, list[DecodeReply]]:
    """The pictures (B, H, W, 3) of a latent's tiles, decoded by all ranks of the pool, and what each rank says.

    Raises `CannotShareError` where a rank says why it cannot, and as `decode_over`.
    """
    rounds, text, method = _Rounds(tiles, num_ranks=len(pool.devices)), NodeText(), "decode"
    if tiles_by_itself(vae):
        method = OWN_TILES

    def decode(some: Sequence[Tile], *, before: int) -> list[torch.Tensor]:
        def told(done: int) -> None:
            text.say(f"{before + done} of {len(tiles)} tiles, on {len(pool.devices)} devices")

        last = before + len(some) == len(tiles)
        decoded = pool.vae(
            lambda held, check: held.decode(weights, some, check, method=method, last=last, on_tiles=told),
            check_cancelled=check_cancelled,
        )
        if refused := [rank.refused for rank in decoded.ranks if rank.refused]:
            raise CannotShareError(refused[0])
        rounds.note(decoded.ranks)
        return decoded.pixels

    try:
        image = tiled(vae, samples, rounds.pixels_by(decode), output=vae.output_device)
    except BaseException:  # a Cancel between two rounds: they have the VAE on their GPUs for the next one
        with suppress(PoolError):
            pool.give_back(pool.devices)
        raise
    return image, rounds.ranks


def _make_room(vae: VAE, tiles: Sequence[Tile], weights: VaeWeights, devices: Sequence[Device]) -> None:
    """Have ComfyUI unload models, those of the ranks too, until a GPU has room for the VAE and its largest tile."""
    if all(device.kind == "cpu" for device in devices):
        return
    largest = max(vae.memory_used_decode(shape, vae.vae_dtype) for shape in {tuple(t.latent.shape) for t in tiles})
    held = sum(each.numel() * each.element_size() for each in weights.tensors.values())
    comfy.model_management.free_memory(largest + held, comfy.model_management.get_torch_device())


def _hold(held: HeldVae, weights: VaeWeights, check: Callable[[], None]) -> Held:
    """Have the VAE on every rank. Raises `CannotShareError` where host memory has no room for a copy on each."""
    if needed := held.host_bytes(weights):
        held.free(check)  # another VAE, whose memory is to count as free
        if needed > (left := max(0, host_memory()[0] - HOST_LEFT_BYTES)):
            raise CannotShareError(
                f"a copy of the VAE for each device takes {needed / GIB:.1f} GiB of host memory, of which "
                f"{left / GIB:.1f} GiB can be used; free host memory, or name fewer devices in SP Config"
            )
    return held.hold(weights, check)


def tiles_by_itself(vae: VAE) -> bool:
    """Whether the VAE's class cuts its tiles, and ComfyUI does not; older ComfyUIs have no such class."""
    return bool(vars(vae).get("handles_tiling"))


def tiles_of(vae: VAE, samples: torch.Tensor) -> list[Tile]:
    """The tiles that ComfyUI cuts this latent into, in its order, all passes over the picture one after another."""
    found: list[Tile] = []

    def note(latent: torch.Tensor) -> torch.Tensor:
        tile = Tile(
            latent=latent, shape=_pixels_of(vae, latent), dtype=latent.dtype if tiles_by_itself(vae) else torch.float32
        )
        found.append(tile)
        return torch.empty(tile.shape, dtype=tile.dtype, device="meta")

    with _no_progress():
        tiled(vae, samples, note, output=torch.device("meta"))
    return found


class _Rounds:
    """Tiles in the order in which ComfyUI asks for their pixels, decoded some at a time."""

    def __init__(self, tiles: Sequence[Tile], *, num_ranks: int) -> None:
        self._tiles, self._num_ranks = tiles, num_ranks
        self.ranks: list[DecodeReply] = []

    def note(self, said: Sequence[DecodeReply]) -> None:
        """Add what ranks say of a round to what they said before."""
        before = self.ranks or [DecodeReply(memory=each.memory, num_tiles=0, decode_s=0.0) for each in said]
        self.ranks = [
            DecodeReply(
                memory=now.memory, num_tiles=now.num_tiles + old.num_tiles, decode_s=now.decode_s + old.decode_s
            )
            for now, old in zip(said, before, strict=True)
        ]

    def pixels_by(self, decode: Callable[..., list[torch.Tensor]]) -> Callable[[torch.Tensor], torch.Tensor]:
        """What to call for each tile in order; `decode(tiles, before=)` makes the pixels of the next ones."""
        coming = self._pixels(decode)

        def pixels(latent: torch.Tensor) -> torch.Tensor:
            tile, found = next(coming)
            if tile.latent.shape != latent.shape:
                raise RuntimeError(f"ComfyUI asks for a tile of {tuple(latent.shape)} after {tuple(tile.latent.shape)}")
            return found

        return pixels

    def _pixels(self, decode: Callable[..., list[torch.Tensor]]) -> Iterator[tuple[Tile, torch.Tensor]]:
        start = 0
        while start < len(self._tiles):
            stop = self._end_of_round(start)
            some = self._tiles[start:stop]
            yield from zip(some, decode(some, before=start), strict=True)
            start = stop

    def _end_of_round(self, start: int) -> int:
        stop, num_bytes = start, 0
        while stop < min(len(self._tiles), start + ROUND_TILES):
            tile = self._tiles[stop]
            num_bytes += torch.Size(tile.shape).numel() * tile.dtype.itemsize
            if num_bytes > ROUND_BYTES and stop - start >= self._num_ranks:
                break
            stop += 1
        return stop


class _Tiles:
    """Stands for the network of a VAE whose tiles ComfyUI cuts: what a tile becomes is asked of `function`."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.decode = function


def tiled(
    vae: VAE, samples: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor], *, output: torch.device
) -> torch.Tensor:
    """VAE Decode (Tiled) with its defaults, where `function` makes the pixels of each tile."""
    stand_in = copy.copy(vae)
    if tiles_by_itself(vae):
        stand_in.first_stage_model = _own_tiles(vae.first_stage_model, function, output=output)
    else:
        stand_in.first_stage_model = _Tiles(function)
    stand_in.device, stand_in.output_device = CPU, output
    stand_in.patcher = ModelPatcher(
        torch.nn.Linear(1, 1),  # nothing to make room for
        load_device=CPU,
        offload_device=CPU,
    )
    stand_in.memory_used_decode = lambda *_: 0
    defaults = {
        name: options["default"]
        for name, (_, *rest) in comfy_nodes.VAEDecodeTiled.INPUT_TYPES()["required"].items()
        for options in rest
    }
    (image,) = comfy_nodes.VAEDecodeTiled().decode(stand_in, {"samples": samples}, **defaults)
    return image


def _own_tiles(
    module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], *, output: torch.device
) -> torch.nn.Module:
    """A module that tiles by itself; `function` makes the pixels of each tile, and its pictures are on `output`."""
    own = copy.copy(module)
    vars(own)[OWN_TILES] = function
    if hasattr(own, "decode_output_shape"):  # since ComfyUI 0.33 it writes into a buffer; its own is on the CPU

        def decode(latent: torch.Tensor) -> torch.Tensor:
            pictures = torch.empty(own.decode_output_shape(latent.shape), dtype=torch.float32, device=output)
            return type(own).decode(own, latent, output_buffer=pictures)

        vars(own)["decode"] = decode
    return own


def _pixels_of(vae: VAE, latent: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tile's pixels."""
    if tiles_by_itself(vae):
        decoder = vae.first_stage_model.decoder
        frames, height, width = latent.shape[2:]
        side = decoder.patch_size
        return latent.shape[0], decoder.out_channels, frames * decoder.patch_size_t, height * side, width * side
    sizes = latent.shape[2:]
    scales = vae.upscale_ratio if isinstance(vae.upscale_ratio, tuple | list) else [vae.upscale_ratio] * len(sizes)
    grown = [round(scale(size) if callable(scale) else scale * size) for size, scale in zip(sizes, scales, strict=True)]
    return latent.shape[0], vae.output_channels, *grown


def _refuse_unfit(vae: VAE, latent: dict, devices: Sequence[Device]) -> torch.Tensor:
    """The latent as tiled decode takes it, on the CPU. Raises `CannotShareError`."""
    if len(devices) < 2:
        raise CannotShareError(f"one device ({devices[0]}) has no other to share with")
    if type(vae) is not VAE:
        raise CannotShareError(f"a {type(vae).__name__} is not ComfyUI's own VAE")
    kind = type(vae.first_stage_model).__name__
    if vae.latent_dim not in (2, 3) or vars(vae).get("extra_1d_channel") is not None:
        raise CannotShareError(f"{kind} makes no pictures")
    if vae.patcher.patches or vae.patcher.object_patches:
        raise CannotShareError(f"a node has changed the weights or parts of {kind}")
    if tiles_by_itself(vae) and not hasattr(vae.first_stage_model, OWN_TILES):
        raise CannotShareError(f"{kind} tiles in a way of its own")
    samples = latent["samples"]
    if samples.is_nested:
        samples = samples.unbind()[0]
    if vae.latent_dim == 2 and samples.ndim == 5:
        samples = samples[:, :, 0]
    if samples.ndim != vae.latent_dim + 2:
        raise CannotShareError(f"ComfyUI does not tile a latent of {samples.ndim} dims for {kind}")
    return samples.to(CPU)


def weights_of(vae: VAE) -> VaeWeights:
    """The loaded VAE's weights, if from them alone ComfyUI builds the same again. Raises `CannotShareError`.

    A node may change a VAE in place that was decoded before: then it is another, or none that ranks can have.
    """
    module, patcher = vae.first_stage_model, vae.patcher
    if patcher.model.current_weight_patches_uuid not in (None, patcher.patches_uuid):
        comfy.model_management.load_models_gpu([patcher])  # takes back what a copy of it had patched in
    tensors = {name: weight.detach() for name, weight in module.state_dict().items()}
    kind = type(module).__name__
    if odd := {str(each.dtype) for each in tensors.values()} - {f"torch.{name}" for name in DTYPE_BYTES}:
        raise CannotShareError(f"{kind} has weights of {', '.join(sorted(odd))}")
    config = vars(module).get("config")
    metadata = {"config": json.dumps({"vae": config})} if isinstance(config, dict) else {}
    built_by = (vae.vae_dtype, metadata, [each.dtype for each in tensors.values()])
    known = _KNOWN.get(module)
    if known is not None and known.built_by != built_by:
        known = None
    again = _again(vae, tensors, metadata) if known is None else known.again
    if again is None:
        raise CannotShareError(f"ComfyUI builds a {kind} like this from values of its weights")
    if not _alike(module, again):
        raise CannotShareError(f"ComfyUI builds something else from the weights of this {kind}")
    numbers = _numbers_of(tensors.values())
    if known is None or not torch.equal(numbers, known.numbers):
        known = _KNOWN[module] = Known(key=uuid.uuid4().hex, numbers=numbers, built_by=built_by, again=again)
    return VaeWeights(
        key=known.key,
        comfyui=this_comfyui(),
        dtype=vae.vae_dtype,
        tensors=tensors,
        metadata=metadata,
        flags=read_flags(),
    )


def _numbers_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Some numbers of each tensor, evenly from all over it, as the bits of fp64.

    An edit of all of it, or of one of the parts of its first dimension, changes some if those are at most `LOOKED_AT`.
    """
    flat = (each.reshape(-1) for each in tensors)
    numbers = torch.cat([each[:: len(each) // LOOKED_AT + 1].to(CPU, torch.float64) for each in flat])
    return numbers.view(torch.int64)  # of which one that is no number equals itself


def _again(vae: VAE, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> torch.nn.Module | None:
    """The module that a rank will build of these weights, without memory; None where ComfyUI's code needs their values,
    as of quantised layers."""
    try:
        with torch.device("meta"):
            shapes = {name: torch.empty_like(each, device="meta") for name, each in tensors.items()}
            again: Any = VAE(sd=shapes, device=CPU, dtype=vae.vae_dtype, metadata=metadata)
    except Exception as error:  # noqa: BLE001  whatever a class of ComfyUI's raises of tensors without values
        log.info("%s cannot be built without its weights: %r", type(vae.first_stage_model).__name__, error)
        return None
    return again.first_stage_model


def _alike(module: torch.nn.Module, again: torch.nn.Module) -> bool:
    """Whether two modules have the same layers, settings and weights' shapes."""
    if str(module) != str(again):
        return False
    books = vars(ModelPatcher(torch.nn.Identity(), CPU, CPU).model).keys()  # what ComfyUI's patcher notes on any module
    if any(not _same_settings(*each, books) for each in zip(module.modules(), again.modules(), strict=True)):
        return False
    one, other = module.state_dict(), again.state_dict()
    return {name: each.shape for name, each in one.items()} == {name: each.shape for name, each in other.items()}


def _same_settings(layer: torch.nn.Module, other: torch.nn.Module, books: Collection[str]) -> bool:
    """Whether both were told the same, where their text does not show it, as of what class of ComfyUI's a latent is.

    A layer that a node gave a method of its own, as for seamless pictures, or a hook is another. `books` do not count.
    """
    one = {name: value for name, value in vars(layer).items() if name not in books}
    two = {name: value for name, value in vars(other).items() if name not in books}
    if any(callable(one[name]) and not isinstance(one[name], type) for name in one.keys() - two.keys()):
        return False
    if any(len(getattr(layer, name)) != len(getattr(other, name)) for name in HOOKS):
        return False
    told = [name for name in one.keys() & two.keys() if not name.startswith(("_", "comfy"))]
    pairs = [(one[name], two[name]) for name in told if isinstance(one[name], PLAIN) or isinstance(two[name], PLAIN)]
    return all(type(value) is type(its) and value == its for value, its in pairs)


@contextmanager
def _no_progress() -> Iterator[None]:
    """Without ComfyUI's progress bar: of the pass that only tells the tiles it would be full at once."""
    hook = comfy.utils.PROGRESS_BAR_HOOK
    comfy.utils.set_progress_bar_global_hook(None)
    try:
        yield
    finally:
        comfy.utils.set_progress_bar_global_hook(hook)
