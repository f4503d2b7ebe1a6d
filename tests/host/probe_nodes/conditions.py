"""What encoders would give, without one: random conditionings, pictures, a vision output, a VAE that pools.

Letters: `N` pictures, `H` and `W` their pixels, `C` latent channels, `T` latent frames.
"""

import zlib
from typing import Any

import comfy.clip_vision
import comfy.conds
import comfy.model_patcher
import comfy.nested_tensor
import node_helpers
import torch
from comfy_api.latest import io

from .node import node


def random_values(seed: int, *shape: int) -> torch.Tensor:
    """Normal values that depend on the seed and shape alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@node("RandomConditioning", gives=[io.Conditioning])
def random_conditioning(tokens: int, width: int, seed: int, pooled: int = 0, masked: int = -1) -> io.NodeOutput:
    """What a text encoder gives: `tokens` of `width`, a pooled vector unless its width is 0, a mask if told."""
    more = {"pooled_output": random_values(seed + 1000, 1, pooled)} if pooled else {}
    if masked >= 0:
        more["attention_mask"] = padding(tokens, masked)
    return io.NodeOutput([[random_values(seed, 1, tokens, width), more]])


@node("MoreText", gives=[io.Conditioning])
def more_text(
    conditioning: io.Conditioning, name: str, tokens: int, width: int, seed: int, count: int = 0, masked: int = -1
) -> io.NodeOutput:
    """What a second text encoder puts beside a conditioning, by ComfyUI's name for it.

    A tensor; with `count`, a list of so many; with `masked`, and a mask of as many tokens that are padding.
    """
    texts = [random_values(seed + number, 1, tokens, width) for number in range(count or 1)]
    given: dict[str, Any] = {name: texts if count else texts[0]}
    if masked >= 0:
        given[name.replace("conditioning", "attention_mask")] = padding(tokens, masked)
    return io.NodeOutput(node_helpers.conditioning_set_values(conditioning, given))


def padding(tokens: int, masked: int) -> torch.Tensor:
    """A mask of so many tokens, of which the last ones are padding."""
    return (torch.arange(tokens) < tokens - masked).long()[None]


@node("TextOfTokens", gives=[io.Conditioning])
def text_of_tokens(conditioning: io.Conditioning, tokens: int, seed: int) -> io.NodeOutput:
    """What Anima's second tokenizer puts beside a conditioning: numbers of T5's words, and their weights."""
    words = torch.randint(0, 32128, (tokens,), generator=torch.Generator().manual_seed(seed))
    given = {"t5xxl_ids": words, "t5xxl_weights": 1 + 0.2 * random_values(seed, tokens)}
    return io.NodeOutput(node_helpers.conditioning_set_values(conditioning, given))


@node("RandomPictures", gives=[io.Image])
def random_pictures(width: int, height: int, count: int, seed: int) -> io.NodeOutput:
    """A batch of pictures, each pixel its own."""
    return io.NodeOutput(random_values(seed, count, height, width, 3).mul(0.25).add(0.5).clamp(0, 1))


@node("RandomVisionOutput", gives=[io.ClipVisionOutput])
def random_vision_output(tokens: int, width: int, seed: int) -> io.NodeOutput:
    """What CLIP vision gives of one picture."""
    seen = comfy.clip_vision.Output()
    seen["penultimate_hidden_states"] = random_values(seed, 1, tokens, width)
    seen["last_hidden_state"] = random_values(seed + 1000, 1, tokens, width)
    seen["image_embeds"] = random_values(seed + 2000, 1, width)
    return io.NodeOutput(seen)


@node("ObjectInConditioning", gives=[io.Conditioning])
def object_in_conditioning(conditioning: io.Conditioning) -> io.NodeOutput:
    """A conditioning that hands the model a Python object, as packs with modules of their own do."""
    given = {"model_conds": {"adapter": comfy.conds.CONDConstant(torch.nn.Identity())}}
    return io.NodeOutput(node_helpers.conditioning_set_values(conditioning, given))


class PoolingVAE:
    """Encodes as a VAE does, by shape: pictures (N, H, W, 3) to latents (1, C, T, h, w). Decodes by shape too.

    After the first picture, each `temporal` of them make a frame; with `temporal` 0, to (N, C, h, w).
    Each latent pixel is the mean of its pixels, with contrast added, in random mixtures for the channels.
    """

    def __init__(self, channels: int, spatial: int, temporal: int) -> None:
        self.latent_channels, self.spatial, self.temporal = channels, spatial, temporal
        self.downscale_index_formula = (temporal, spatial, spatial)
        self.mixture = random_values(5, channels, 3)
        self.device, self.vae_dtype, self.disable_offload = torch.device("cpu"), torch.float32, False
        self.patcher = comfy.model_patcher.ModelPatcher(torch.nn.Linear(1, 1), self.device, self.device)

    def spacial_compression_encode(self) -> int:
        """Pixels a side of a latent pixel; the name is ComfyUI's."""
        return self.spatial

    spacial_compression_decode = spacial_compression_encode

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        picture = (pixels[..., :3].movedim(-1, 1) - 0.5) * self.spatial * 4
        picture = torch.nn.functional.avg_pool2d(picture, self.spatial)  # (N, 3, h, w)
        if not self.temporal:
            return torch.einsum("cp,nphw->nchw", self.mixture, picture)
        parts = [picture[:1], *picture[1:].split(self.temporal)]
        frames = torch.stack([part.mean(dim=0) for part in parts if len(part)], dim=1)  # (3, T, h, w)
        return torch.einsum("cp,pthw->cthw", self.mixture, frames)[None]

    def memory_used_decode(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Bytes; ComfyUI makes room for them."""
        return shape.numel() * dtype.itemsize

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Pictures (N, H, W, 3), or of videos (N, frames, H, W, 3), of latents (N, C, h, w) or (N, C, T, h, w)."""
        colours = torch.einsum("cp,nc...->n...p", self.mixture, latents.float()).sigmoid()
        wide = colours.repeat_interleave(self.spatial, -3).repeat_interleave(self.spatial, -2)
        return wide if latents.ndim == 4 else wide.repeat_interleave(self.temporal, 1)[:, self.temporal - 1 :]


@node("RandomVAE", gives=[io.Vae])
def random_vae(channels: int, spatial: int, temporal: int) -> io.NodeOutput:
    """A VAE for nodes that encode: latents of any format's shape, and no weights."""
    return io.NodeOutput(PoolingVAE(channels, spatial, temporal))


class PretendTextEncoder:
    """A CLIP object for nodes that encode their own prompt: random tokens by the prompt's length and text.

    Pictures add tokens of theirs at the front, tagged as MiniMax H3's encoder tags them: 0 pictures, 1 text.
    """

    def __init__(self, tokens: int, width: int, pooled: int = 0) -> None:
        self.tokens, self.width, self.pooled = tokens, width, pooled

    def tokenize(self, text: str, images: tuple = (), minimax_ref_items: tuple = (), **_: Any) -> tuple[str, int]:
        """The text and how many pictures go with it."""
        return text, len(images) + sum("data" in item for item in minimax_ref_items)

    def encode_from_tokens_scheduled(self, tokens: tuple[str, int]) -> list[Any]:
        text, pictures = tokens
        tags = torch.ones(self.tokens, dtype=torch.long)
        tags[1 : 1 + 2 * pictures] = 0
        seed = zlib.crc32(text.encode())
        pooled = random_values(seed + 1000, 1, self.pooled) if self.pooled else None
        values = random_values(seed, 1, self.tokens, self.width)
        return [[values, {"pooled_output": pooled, "minimax_token_tags": tags}]]


@node("RandomTextEncoder", gives=[io.Clip])
def random_text_encoder(tokens: int, width: int, pooled: int = 0) -> io.NodeOutput:
    """A CLIP without weights, for nodes that take a CLIP and a prompt."""
    return io.NodeOutput(PretendTextEncoder(tokens, width, pooled))


@node("HiDreamO1Prompt", gives=[io.Conditioning])
def hi_dream_o1_prompt(prompt: str) -> io.NodeOutput:
    """A prompt's tokens, by ComfyUI's own tokenizer of HiDream-O1, whose text encoder has no weights."""
    import comfy.text_encoders.hidream_o1 as hidream_o1

    tokens = hidream_o1.HiDreamO1Tokenizer().tokenize_with_weights(prompt)
    text, _, more = hidream_o1.HiDreamO1TE().encode_token_weights(tokens)
    return io.NodeOutput([[text, more]])


@node("EmptySplatLatent", gives=[io.Latent])
def empty_splat_latent(tokens: int, channels: int, camera: int) -> io.NodeOutput:
    """What TripoSplat samples: a shape of any number of tokens, where its own node has 8192, and a camera."""
    parts = (torch.zeros(1, tokens, channels), torch.zeros(1, 1, camera))
    return io.NodeOutput({"samples": comfy.nested_tensor.NestedTensor(parts)})
