"""Pictures that attend to themselves and then to the text: PixArt alpha and sigma, and HunyuanDiT with its long skips.

ComfyUI's detection fixes PixArt at 16 heads of 72 and HunyuanDiT at 16 heads and the widths of its texts.
"""

from __future__ import annotations

import torch

from host.client import Workflow

from .files import ModelFile
from .graphs import HEIGHT, WIDTH, picture_of, prompts, second_text, through
from .variant import Variant

PIXART, HUNYUAN_DIT = "PixArt", "HunyuanDiT"
ALPHA, SIGMA, HYDIT = (f"tiny_{name}.safetensors" for name in ("pixart_alpha", "pixart_sigma", "hunyuan_dit"))
BERT, T5 = {"tokens": 77, "width": 1024, "masked": 66}, {"tokens": 256, "width": 2048, "masked": 240}


def pixart_file(name: str, *, seed: int, sizes: bool) -> ModelFile:
    """Two blocks. `sizes`: with vectors of the picture's size and aspect, as alpha has them."""
    arguments = {"depth": 2, "model_max_length": 120, "micro_condition": sizes}
    path = "comfy.ldm.pixart.pixartms.PixArtMS"
    return ModelFile(
        name=name, class_path=path, arguments=arguments, seed=seed, dtype=torch.bfloat16, only_when_full=True
    )


FILES = (
    pixart_file(ALPHA, seed=82, sizes=True),
    pixart_file(SIGMA, seed=83, sizes=False),
    ModelFile(
        name=HYDIT,
        class_path="comfy.ldm.hydit.models.HunYuanDiT",
        arguments={"hidden_size": 384, "depth": 6},  # the last two blocks take what the first two gave
        seed=84,
        dtype=torch.bfloat16,
        only_when_full=True,
    ),
)


# 15 x 19 tokens: of fewer than 32 latent pixels a side, stock divides by zero. Prompts are of unequal length, as stock
# lets the pictures of one batch attend to each other's texts.
pixart = picture_of(4096, "EmptyLatentImage", width=304, height=240)


def hunyuan_dit(graph: Workflow) -> None:
    """35 tokens of picture; each prompt through two encoders, most of it padding."""
    prompts(graph, **BERT)
    second_text(graph, "conditioning_mt5xl", **T5)
    through(graph, "latent", "EmptyLatentImage", "latent_image", width=WIDTH, height=HEIGHT, batch_size=1)


VARIANTS = tuple(
    Variant(name=name, family=family, file=file, add=add)
    for name, family, file, add in (
        ("pixart alpha", PIXART, ALPHA, pixart),
        ("pixart sigma", PIXART, SIGMA, pixart),
        ("hunyuandit", HUNYUAN_DIT, HYDIT, hunyuan_dit),
    )
)
