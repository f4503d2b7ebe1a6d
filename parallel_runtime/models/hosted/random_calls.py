"""Random calls of any of ComfyUI's models, as a sampling run would make them: latents, conditionings, timesteps.

Everything that a model can be asked is asked of it: channels and sides of its latent, what it makes of a conditioning
(`extra_conds`), its timesteps (`apply_model`). How wide its conditioning is no class says, so a conditioning of a width
that no model has is tried, and what the first layer that meets it wants is what it shall be. Runs in a process that has
imported ComfyUI. Owns what a family needs besides that. Letters: `B` batch, `C` channels, `T` frames of the latent.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from ...model_call import ModelCall
from .calls import forward_call

log = logging.getLogger(__name__)
CPU = torch.device("cpu")
FRAMES = 9  # of a video where no number is given
USUAL_FRAMES = 81  # of one that people make, for which memory is counted
RATE = 24  # frames a second
# Widths that no model has, so that a layer which meets one is known by it.
PROBE_WIDTHS = {"cross_attn": 4099, "pooled_output": 7919}
SPREAD = 4096  # at most this much goes with a pooled text into its first layer
TRIES = 8
PROBED = 384  # pixels a side, in which widths are found; PixArt takes no 256
START = 0.3  # of the way from noise to image, where one single call is made
# Models that take the number of text tokens from a mask of them, and go without one.
COUNTED = frozenset(("GenmoMochi", "LTXV"))
TEXT_MASK = "attention_mask"  # of all text tokens, for models that do not
# Models of images whose latents have frames all the same, by ComfyUI's names.
IMAGES = frozenset(("QwenImage", "Krea2", "JoyImage", "CosmosPredict2", "Anima", "MageFlow", "MingImage"))

# What graphs give besides a text: a picture to edit, smaller than the image; a mask by which the first half of the
# latent's frames, or of its rows, stays; a mask of the text, whose last tokens are padding.
MORE = REFERENCES, MASK, MASKED_TEXT = "references", "mask", "masked text"


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of a call: pixels, tokens of the text, images, frames of a video (None: a few), and the seed of its numbers.

    `more`: of `MORE`, what a graph gives besides a text.
    """

    width: int
    height: int
    text_tokens: int
    batch: int
    seed: int
    frames: int | None = None
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recorded:
    """A call that the transformer was given, and its outputs (B, numbers) fp32 on the CPU."""

    call: ModelCall
    out: torch.Tensor


def make_calls(
    model: Any,  # noqa: ANN401
    size: Size,
    texts: Sequence[int],
    *,
    steps: int,
    device: torch.device,
) -> list[list[Recorded]]:
    """The calls of each of `steps` Euler steps, as many in each as there are texts of so many tokens.

    `model` is ComfyUI's BaseModel with weights on `device`. Raises `ValueError` for a model that cannot be called so.
    """
    name = type(model).__name__
    shapes = latent_shapes(model, size)
    widths = find_widths(model, size, device)
    sides = [replace(size, seed=size.seed + number, text_tokens=tokens) for number, tokens in enumerate(texts)]
    found: list[list[Recorded]] = [[] for _ in range(steps)]
    for side in sides:
        run = _SampledSide(model, side, shapes, widths, device)
        try:
            recorded = run.euler(steps)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{name}: {_no_call(error)}") from error
        for step, call in enumerate(recorded):
            found[step].append(call)
    return found


def latent_shapes(model: Any, size: Size, *, usual_frames: int = FRAMES) -> list[tuple[int, ...]]:  # noqa: ANN401
    """The shapes of the latents that a run begins with: (B, C, height, width) or (B, C, T, ...), sound behind video.

    `usual_frames`: of a video, where `size` says no number.
    """
    name, form = type(model).__name__, model.latent_format
    dims, side = form.latent_dimensions, form.spacial_downscale_ratio
    frames = frames_of(model, size, usual_frames=usual_frames)
    plane = (size.height // side, size.width // side)
    if min(plane) < 1:
        raise ValueError(f"--width={size.width} --height={size.height}: {name} needs at least {side} pixels a side")
    time = (frames - 1) // form.temporal_downscale_ratio + 1
    first = (size.batch, form.latent_channels, *(() if dims == 2 else (time,)), *plane)
    return MORE_LATENTS.get(name, _nothing_more)(model, first, frames)


def frames_of(model: Any, size: Size, *, usual_frames: int = FRAMES) -> int:  # noqa: ANN401
    """Frames of what a model makes, 1 of an image. Raises `ValueError` for a model that makes neither images nor
    videos, and for frames of an image."""
    name, dims = type(model).__name__, model.latent_format.latent_dimensions
    if dims not in (2, 3):
        raise ValueError(f"{name} makes neither images nor videos; only those are called with random inputs")
    if dims == 3 and name not in IMAGES:
        return size.frames or usual_frames
    if size.frames is not None:
        raise ValueError(f"--frames={size.frames}: {name} makes images; leave --frames out")
    return 1


Shapes = list[tuple[int, ...]]


def _nothing_more(_: object, first: tuple[int, ...], frames: int) -> Shapes:
    return [first]


def _ltx_sound(model: Any, first: tuple[int, ...], frames: int) -> Shapes:  # noqa: ANN401
    """25 latents a second of as many frames, each of 8 channels."""
    channels = 8
    width = model.diffusion_model.audio_in_channels // channels
    return [first, (first[0], channels, max(1, frames), width)]


def _minimax_sound(_: object, first: tuple[int, ...], frames: int) -> Shapes:
    """Frames come in groups of 17 behind 5; 40 latents of sound a second, in stereo."""
    groups = max(0, -(-(frames - 5) // 17))
    batch, _, _, *plane = first
    sound = round((5 + 17 * groups) / RATE * 40)
    return [(batch, 24, 2 + 5 * groups, *plane), (batch, 32, 2, sound)]


MORE_LATENTS: Mapping[str, Callable[[Any, tuple[int, ...], int], Shapes]] = {
    "LTXAV": _ltx_sound,
    "MiniMaxH3": _minimax_sound,
}


def call_of(
    model: Any,  # noqa: ANN401
    size: Size,
    shapes: Sequence[tuple[int, ...]],
    widths: Mapping[str, int | None],
    device: torch.device,
) -> Callable[..., Any]:
    """One call of the transformer, whose weights are on `device`, as often as one likes; on the meta device too.

    It takes transformer options by their names. What ComfyUI makes of latents and conditionings reads their values, so
    then it is made on the CPU.
    """
    given = _SampledSide(model, size, shapes, widths, _made_on(device)).arguments()
    args, kwargs = tree_map(lambda each: each.to(device) if isinstance(each, torch.Tensor) else each, given)

    def call(**options: object) -> Any:  # noqa: ANN401
        told = {**kwargs.get("transformer_options", {}), **options}
        return model.diffusion_model(*args, **(kwargs | ({"transformer_options": told} if told else {})))

    return call


def uncomputed_call(
    model: Any,  # noqa: ANN401
    size: Size,
    shapes: Sequence[tuple[int, ...]],
    widths: Mapping[str, int | None],
) -> ModelCall:
    """A call as a step makes it, of all rows of `size`, which nothing computes: the weights may be on the meta device.

    Raises `ValueError` for a model that cannot be called so.
    """
    args, kwargs = _SampledSide(model, size, shapes, widths, CPU).arguments()
    return forward_call(model.diffusion_model, model.latent_format.latent_channels, args, kwargs)


def asks_for(
    model: Any,  # noqa: ANN401
    size: Size,
    shapes: Sequence[tuple[int, ...]],
    widths: Mapping[str, int | None],
) -> list[str]:
    """What of `MORE` makes the transformer's arguments others, in number, names or shapes. The weights may be on meta.

    Raises `ValueError` for a model that cannot be called without any.
    """

    def given(more: tuple[str, ...]) -> object:
        args, kwargs = _SampledSide(model, replace(size, more=more), shapes, widths, CPU).arguments()
        leaves, tree = tree_flatten((args, kwargs))
        return str(tree), [each.shape if isinstance(each, torch.Tensor) else None for each in leaves]

    found, plain = [], given(())
    for each in MORE:
        try:
            found += [each] if given((each,)) != plain else []
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            log.info("%s takes no %s as they are made up: %s", type(model).__name__, each, error)
    return found


def _made_on(device: torch.device) -> torch.device:
    """Where ComfyUI makes a call's arguments for weights on `device`: some models compute a part of them with these."""
    return CPU if device.type == "meta" else device


class _CalledWith(Exception):  # noqa: N818  nothing went wrong
    """Carries the arguments of a call out of it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.arguments = args, kwargs


class _SampledSide:
    """One side of a sampling run: a latent, a conditioning, and the calls that ComfyUI makes of them."""

    def __init__(
        self,
        model: Any,  # noqa: ANN401
        size: Size,
        shapes: Sequence[tuple[int, ...]],
        widths: Mapping[str, int | None],
        device: torch.device,
    ) -> None:
        import comfy.utils

        self.model, self.device = model, device
        numbers = torch.Generator().manual_seed(size.seed)
        parts = [torch.randn(shape, generator=numbers) for shape in shapes]
        self.noise = parts[0] if len(parts) == 1 else comfy.utils.pack_latents(parts)[0]
        self.noise = self.noise.to(device)
        cond: dict[str, Any] = {}
        if type(model).__name__ in COUNTED or TEXT_MASK in widths or MASKED_TEXT in size.more:
            cond[TEXT_MASK] = torch.ones(1, size.text_tokens, dtype=torch.long)
        if MASKED_TEXT in size.more:
            cond[TEXT_MASK][:, size.text_tokens - size.text_tokens // 3 :] = 0
        shape_of = {"cross_attn": (1, size.text_tokens), "pooled_output": (1,)}
        for name, width in widths.items():
            if width is not None and name != TEXT_MASK:
                cond[name] = torch.randn(*shape_of[name], width, generator=numbers)
        self.cond: dict[str, Any] = {name: tensor.to(device) for name, tensor in cond.items()} | {"model_conds": {}}
        self.shapes, self.batch = [torch.Size(shape) for shape in shapes], size.batch
        self.mask: torch.Tensor | None = None
        if REFERENCES in size.more:
            self.cond["reference_latents"] = [torch.randn(_reference(shapes[0]), generator=numbers).to(device)]
        if MASK in size.more:
            masks = [_half(part) for part in parts]
            self.mask = (masks[0] if len(masks) == 1 else comfy.utils.pack_latents(masks)[0]).to(device)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the transformer is given in one call, which is not made."""
        transformer = self.model.diffusion_model

        def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            raise _CalledWith(args, kwargs)

        transformer.forward = forward
        try:
            self._steps(1)
        except _CalledWith as called:
            return called.arguments
        finally:
            del transformer.forward
        raise ValueError(f"{type(self.model).__name__} was not called in a step")

    def euler(self, steps: int) -> list[Recorded]:
        """The calls of the transformer in each step, and its outputs; a single one is in the middle of a run."""
        with recording(self.model) as recorded:
            self._steps(steps)
        return recorded

    def _steps(self, steps: int) -> None:
        import comfy.samplers

        sampling = self.model.model_sampling
        if steps == 1:
            sigmas = [float(sampling.percent_to_sigma(START)), 0.0]
        else:
            sigmas = [float(sigma) for sigma in comfy.samplers.calculate_sigmas(sampling, "normal", steps)]
        conds = self._conds()
        x = sampling.noise_scaling(torch.tensor(sigmas[0]), self.noise, torch.zeros_like(self.noise))
        for now, after in zip(sigmas[:-1], sigmas[1:], strict=True):
            sigma = torch.full((self.batch,), now, device=self.device)
            options = {"cond_or_uncond": [0], "sigmas": sigma, "sample_sigmas": torch.tensor(sigmas)}
            denoised = self.model.apply_model(x, sigma, **conds, transformer_options=options)
            x = x + (x - denoised) / now * (after - now)

    def _conds(self) -> dict[str, Any]:
        """What ComfyUI hands to `apply_model` of the conditioning."""
        import comfy.samplers

        (entry,) = comfy.samplers.encode_model_conds(
            self.model.extra_conds,
            [self.cond],
            self.noise,
            self.device,
            "positive",
            latent_image=torch.zeros_like(self.noise),
            denoise_mask=self.mask,
            seed=0,
            latent_shapes=self.shapes,
        )
        made = entry["model_conds"].items()
        return {name: cond.process_cond(batch_size=self.batch, area=None).cond for name, cond in made}


def _reference(shape: Sequence[int]) -> tuple[int, ...]:
    """The latent of one picture of three quarters of the sides of a latent."""
    _, channels, *time, height, width = shape
    sides = (max(2, 3 * side // 4 // 2 * 2) for side in (height, width))
    return 1, channels, *(1 for _ in time), *sides


def _half(latent: torch.Tensor) -> torch.Tensor:
    """A mask of a latent, 0 in its first half: of the frames where it has some, else of the rows."""
    mask = torch.ones_like(latent)
    dim = 2 if latent.ndim > 4 and latent.shape[2] > 1 else -2
    mask.narrow(dim, 0, latent.shape[dim] // 2).zero_()
    return mask


@contextmanager
def recording(model: Any) -> Iterator[list[Recorded]]:  # noqa: ANN401
    """Inside, every call of the transformer is noted with its outputs."""
    transformer, channels = model.diffusion_model, model.latent_format.latent_channels
    stock, recorded = transformer.forward, []

    def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        call = forward_call(transformer, channels, args, kwargs)
        kept = {name: tensor.detach().to("cpu", copy=True) for name, tensor in call.tensors.items()}
        out = stock(*args, **kwargs)
        recorded.append(Recorded(replace(call, tensors=kept), flat(out, call.out_shape[0])))
        return out

    transformer.forward = forward
    try:
        yield recorded
    finally:
        del transformer.forward


def flat(out: Any, rows: int) -> torch.Tensor:  # noqa: ANN401
    """The outputs of a call side by side, (B, numbers) fp32 on the CPU."""
    outs = [out] if isinstance(out, torch.Tensor) else out
    return torch.cat([each.reshape(rows, -1).float().cpu() for each in outs], 1)


def find_widths(model: Any, size: Size, device: torch.device) -> dict[str, int | None]:  # noqa: ANN401
    """How wide each part of the conditioning is, None for what the model does not look at. `TEXT_MASK` is among them
    for a model that does not go without one."""
    name = type(model).__name__
    small = replace(size, width=min(size.width, PROBED), height=min(size.height, PROBED), batch=1)
    shapes = latent_shapes(model, small)
    widths: dict[str, int | None] = dict(PROBE_WIDTHS)
    if name in SAID_WIDTHS:
        widths["cross_attn"] = SAID_WIDTHS[name](model.diffusion_model, device)
    if name in CUT_POOLED:
        widths["pooled_output"] = model.diffusion_model.params.vec_in_dim
    without_mask: Exception | None = None
    for _ in range(TRIES):
        with _last_layer(model.diffusion_model) as last:
            try:
                with torch.no_grad():
                    call_of(model, small, shapes, widths, device)()
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
                if _mend(widths, last):
                    continue
                if TEXT_MASK in widths:
                    raise ValueError(f"{name}: {_no_call(without_mask or error)}") from error
                without_mask = error
                widths[TEXT_MASK] = 1
                continue
        used = {part: width if width != PROBE_WIDTHS.get(part) else None for part, width in widths.items()}
        try:
            _SampledSide(model, small, shapes, used, _made_on(device)).arguments()
        except KeyError:  # it is asked for, though any width will do
            return widths
        return used
    raise ValueError(f"{name}: {_no_call(RuntimeError('its layers want widths that do not go together'))}")


def _ltx_width(transformer: Any, device: torch.device) -> int:  # noqa: ANN401
    """The connectors put tokens of their own before the text, so no layer meets it first.

    On the meta device, where nothing computes what they make of it, as wide as what they make.
    """
    made = device.type == "meta"
    if made and not transformer.caption_proj_before_connector:
        return int(2 * transformer.caption_channels)
    if made:
        return int(transformer.cross_attention_dim + transformer.audio_cross_attention_dim)
    if transformer.caption_proj_before_connector and transformer.caption_projection_first_linear:
        width: int = transformer.caption_channels
        return width
    video, audio = (getattr(transformer, f"{half}_embeddings_connector").inner_dim for half in ("video", "audio"))
    return int(video if video == audio else video + audio)  # of LTX-2.3 the text has a half for each


def _krea_width(transformer: Any, _: torch.device) -> int:  # noqa: ANN401
    """Layers of a text encoder side by side."""
    return int(transformer.txtlayers * transformer.txtdim)


def _lens_width(transformer: Any, _: torch.device) -> int:  # noqa: ANN401
    """The same."""
    norm = transformer.txt_norm
    return sum(each.weight.shape[0] for each in (norm if transformer.multi_layer_encoder_feature else [norm]))


# Models that cut a pooled text to their width before a layer meets it.
CUT_POOLED = frozenset(("Flux", "HunyuanVideo"))
# Models that cut the text apart before a layer meets it.
SAID_WIDTHS: Mapping[str, Callable[[Any, torch.device], int]] = {
    "Krea2": _krea_width,
    "LTXAV": _ltx_width,
    "Lens": _lens_width,
}


def _no_call(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0] or type(error).__name__
    return (
        f"no random call of it can be made ({first[:200]}); compare it in ComfyUI, with the stock loader and Parallel "
        "Model Loader in one graph"
    )


def _mend(widths: dict[str, int | None], last: Sequence[tuple[int, int]]) -> bool:
    """Set the width that the layer called last wants; False where the layer was given none of `PROBE_WIDTHS`."""
    if not last:
        return False
    wanted, given = last[-1]
    for part, probe_width in PROBE_WIDTHS.items():
        beside = given - probe_width
        if widths[part] == probe_width and 0 <= beside < (1 if part == "cross_attn" else SPREAD) and wanted > beside:
            widths[part] = wanted - beside
            return True
    return False


@contextmanager
def _last_layer(module: torch.nn.Module) -> Iterator[list[tuple[int, int]]]:
    """Inside, (width that it wants, width that it was given) of the layer that was called last."""
    last: list[tuple[int, int]] = []

    def note(layer: torch.nn.Module, args: tuple[Any, ...]) -> None:
        weight = getattr(layer, "weight", None)
        if args and isinstance(args[0], torch.Tensor) and isinstance(weight, torch.Tensor) and 1 <= weight.ndim <= 2:
            last[:] = [(weight.shape[-1], args[0].shape[-1])]

    handles = [layer.register_forward_pre_hook(note) for layer in module.modules() if not any(layer.children())]
    try:
        yield last
    finally:
        for handle in handles:
            handle.remove()
