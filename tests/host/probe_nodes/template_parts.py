"""What templates load beside their model, without weights; numbers made small; what keeps a sampler's latents."""

from __future__ import annotations

import copy
import json
import uuid
import zlib
from pathlib import Path
from typing import Any

import comfy.clip_vision
import comfy.model_patcher
import folder_paths
import torch
from comfy_api.latest import io
from safetensors.torch import save_file

from .conditions import random_values
from .node import node

MOST_STEPS = 4


class Tokens(dict):
    """What a tokenizer gives: under any encoder's name the words of this text, which nodes may exchange."""

    def __init__(self, words: str) -> None:
        super().__init__(words=[[(zlib.crc32(words.encode()), 1.0)]])

    def __missing__(self, name: str) -> Any:
        return self["words"]


class WeightlessText:
    """A CLIP object: random tokens by the text, as many and as wide as `sizes` say (StandInText)."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        self.sizes = sizes
        self.cond_stage_model = torch.nn.Linear(1, 1)
        self.patcher = comfy.model_patcher.ModelPatcher(self.cond_stage_model, torch.device("cpu"), torch.device("cpu"))
        self.use_clip_schedule = False

    def clone(self, *_: Any, **__: Any) -> WeightlessText:
        """A copy, as ComfyUI's loaders of LoRAs make one."""
        return copy.copy(self)

    def add_patches(self, *_: Any, **__: Any) -> list[str]:
        """Takes a LoRA and changes nothing."""
        return []

    def clip_layer(self, layer: int) -> None:
        """Which layer counts; all are alike."""

    def set_tokenizer_option(self, name: str, value: Any) -> None:
        """A tokenizer's option; there is none."""

    def load_model(self, *_: Any) -> None:
        """Nothing is loaded."""

    def tokenize(self, text: str, **more: Any) -> Tokens:
        said = {name: value for name, value in more.items() if isinstance(value, (str, int, float))}
        return Tokens(f"{text}{sorted(said.items())}")

    def encode_from_tokens(self, tokens: Tokens, *_: Any, **__: Any) -> Any:
        """The values of the one conditioning, and its pooled vector."""
        ((values, more),) = self.encode_from_tokens_scheduled(tokens)
        return values, more.get("pooled_output")

    def encode_from_tokens_scheduled(
        self, tokens: Tokens, unprojected: bool = False, add_dict: dict[str, Any] | None = None, **_: Any
    ) -> list[Any]:
        sizes = self.sizes
        seed = zlib.crc32(repr(sorted(tokens.items())).encode())
        more: dict[str, Any] = {"pooled_output": None}
        if sizes.get("pooled"):
            more["pooled_output"] = random_values(seed + 1, 1, sizes["pooled"])
        if sizes.get("mask"):
            more["attention_mask"] = torch.ones(1, sizes["tokens"], dtype=torch.long)
        for number, (name, shape) in enumerate(sorted(sizes.get("more", {}).items())):
            more[name] = random_values(seed + 2 + number, *shape)
        for name, shape in sizes.get("words", {}).items():  # numbers of words, and their weights
            more[name] = torch.randint(0, 6000, shape, generator=torch.Generator().manual_seed(seed))
            if name.endswith("_ids"):
                more[name.replace("_ids", "_weights")] = torch.ones(shape)
        if sizes.get("tags"):  # as MiniMax H3's encoder tags its tokens: 0 pictures, 1 text
            more["minimax_token_tags"] = torch.ones(sizes["tokens"], dtype=torch.long)
        return [[random_values(seed, 1, sizes["tokens"], sizes["width"]), more | (add_dict or {})]]


@node("StandInText", gives=[io.Clip])
def stand_in_text(sizes: str) -> io.NodeOutput:
    """A text encoder. `sizes` in JSON: `tokens`, `width`; `pooled`, a width; `mask`; `more`, shapes by name."""
    return io.NodeOutput(WeightlessText(json.loads(sizes)))


class WeightlessVision:
    """A CLIP vision object: `tokens` of `width` by the picture's mean; `wide` is the width of what it pools."""

    def __init__(self, tokens: int, width: int, wide: int) -> None:
        self.tokens, self.width, self.wide = tokens, width, wide

    def encode_image(self, image: torch.Tensor, crop: bool = True) -> comfy.clip_vision.Output:
        """What is seen in pictures (N, H, W, 3): their mean colours, mixed at random."""
        count = image.shape[0]
        colours = image[..., :3].float().mean(dim=(1, 2)) * 4 - 2  # (N, 3)
        seen = comfy.clip_vision.Output()
        tokens = torch.einsum("nc,ctw->ntw", colours, random_values(21, 3, self.tokens, self.width))
        seen["penultimate_hidden_states"] = seen["last_hidden_state"] = tokens
        seen["image_embeds"] = colours @ random_values(22, 3, self.wide)
        seen["image_sizes"] = [(3, 224, 224)] * count
        return seen


@node("StandInVision", gives=[io.ClipVision])
def stand_in_vision(tokens: int, width: int, wide: int) -> io.NodeOutput:
    return io.NodeOutput(WeightlessVision(tokens, width, wide))


@node("StandInHearing", gives=[io.Custom("AUDIO_ENCODER_OUTPUT")])
def stand_in_hearing(layers: int, frames: int, width: int) -> io.NodeOutput:
    """What an audio encoder gives: `layers` of `frames` of `width`."""
    heard = tuple(random_values(31 + layer, 1, frames, width) for layer in range(layers))
    return io.NodeOutput({"encoded_audio": heard[-1], "encoded_audio_all_layers": heard, "audio_samples": frames * 320})


@node("AtMost", gives=[io.Int])
def at_most(value: int, most: int) -> io.NodeOutput:
    """A number, or `most` where it is larger."""
    return io.NodeOutput(min(value, most))


@node("FewSteps", gives=[io.Int])
def few_steps(step: int, steps: int) -> io.NodeOutput:
    """One of a schedule's steps (or their number) when it has at most four: the same share of them."""
    few = min(MOST_STEPS, steps)
    share = round(min(step, steps) * few / max(1, steps))
    return io.NodeOutput(share if step in (0, steps) or step > steps else min(max(1, share), max(1, few - 1)))


@node("KeepLatent", shows=True)
def keep_latent(samples: io.Latent, name: str) -> io.NodeOutput:
    """Keeps a latent of any kind, its parts by number, and says in which file."""
    values = samples["samples"]
    parts = values.unbind() if getattr(values, "is_nested", False) else [values]
    path = Path(folder_paths.get_output_directory()) / f"kept-{uuid.uuid4().hex}.safetensors"
    save_file({str(number): part.detach().float().cpu().contiguous() for number, part in enumerate(parts)}, path)
    return io.NodeOutput(ui={"kept": [{"name": name, "file": path.name}]})
