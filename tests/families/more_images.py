"""PixArt alpha and sigma, HunyuanDiT with its long skips, Lens with 5 heads, JoyImage with 3, Kandinsky 5, Ideogram 4.

ComfyUI's detection fixes PixArt at 16 heads of 72, HunyuanDiT at 16 heads and the widths of its texts, and Ideogram 4
at 18 heads of 256, so its file is of 1.1 GB in bf16 with one layer.
"""

from host.client import Workflow

from .files import Rule, large, tiny
from .graphs import HEIGHT, LENGTH, WIDTH, encoder, picture, picture_of, prompts, second_text, through, with_references
from .variant import variants

PIXART, HUNYUAN_DIT = "PixArt", "HunyuanDiT"
LENS, JOY, KANDINSKY, IDEOGRAM = "Lens", "JoyImage", "Kandinsky 5", "Ideogram 4"
LAYERS, LENS_TEXT = 2, 48  # of the text encoder that Lens's conditioning holds
JOY_TEXT, TEXT, POOLED, LLM = 4096, 3584, 768, 53248  # fixed by ComfyUI's detection
LENS_SIZES = {"in_channels": 128, "out_channels": 32, "num_layers": 2, "num_attention_heads": 5}
LENS_SIZES |= {"enc_hidden_dim": LENS_TEXT, "selected_layer_index": [0, 1]}
JOY_SIZES = {"in_channels": 16, "hidden_size": 384, "num_attention_heads": 3, "num_layers": 2, "text_dim": JOY_TEXT}
KANDINSKY_SIZES = {"model_dim": 320, "in_text_dim": TEXT, "in_text_dim2": POOLED, "time_dim": 64, "ff_dim": 640}
KANDINSKY_SIZES |= {"visual_embed_dim": 132, "num_text_blocks": 1, "num_visual_blocks": 2}
PIXART_SIZES = {"depth": 2, "model_max_length": 120}
BERT, T5 = {"tokens": 77, "width": 1024, "masked": 66}, {"tokens": 256, "width": 2048, "masked": 240}
FILES = (
    # alpha has vectors of the picture's size and aspect
    large("pixart_alpha", "pixart.pixartms.PixArtMS", 82, PIXART_SIZES | {"micro_condition": True}),
    large("pixart_sigma", "pixart.pixartms.PixArtMS", 83, PIXART_SIZES | {"micro_condition": False}),
    # the last two blocks take what the first two gave
    large("hunyuan_dit", "hydit.models.HunYuanDiT", 84, {"hidden_size": 384, "depth": 6}),
    tiny("lens", "lens.model.LensTransformer2DModel", 90, LENS_SIZES),
    tiny(
        "joyimage",
        "joyimage.model.JoyImageTransformer3DModel",
        91,
        JOY_SIZES,
        rules=(Rule(r"modulate_table$", std=0.3, mean=0.5),),
    ),
    tiny("kandinsky_5", "kandinsky5.model.Kandinsky5", 92, KANDINSKY_SIZES),
    large("ideogram_4", "ideogram4.model.Ideogram4Transformer2DModel", 93, {"num_layers": 1}),
)


# 15 x 19 tokens: of fewer than 32 latent pixels a side, stock divides by zero. Prompts are of unequal length, as stock
# lets the pictures of one batch attend to each other's texts.
pixart = picture_of(4096, "EmptyLatentImage", width=304, height=240)
lens = picture_of(LAYERS * LENS_TEXT, "EmptyFlux2LatentImage", masked=2)  # attention leaves the padding out
ideogram = picture_of(LLM, "EmptyFlux2LatentImage", masked=2)  # the padding sees itself alone


def hunyuan_dit(graph: Workflow) -> None:
    """35 tokens of picture; each prompt through two encoders, most of it padding."""
    prompts(graph, **BERT)
    second_text(graph, "conditioning_mt5xl", **T5)
    through(graph, "latent", "EmptyLatentImage", "latent_image", width=WIDTH, height=HEIGHT, batch_size=1)


def joy_image(graph: Workflow) -> None:
    """35 tokens of picture; prompts of unequal length."""
    prompts(graph, width=JOY_TEXT, tokens=11, negative_tokens=7)
    size = {"width": WIDTH, "height": HEIGHT, "length": 1, "batch_size": 1}
    through(graph, "latent", "EmptyHunyuanLatentVideo", "latent_image", **size)


def joy_image_edit(graph: Workflow) -> None:
    """Pictures of 6 and 4 tokens as references of both prompts."""
    joy_image(graph)
    encoder(graph)
    with_references(graph, (48, 32), (32, 32))


def kandinsky(graph: Workflow) -> None:
    """175 tokens of video; prompts of unequal length."""
    prompts(graph, width=TEXT, tokens=11, negative_tokens=7, pooled=POOLED)
    inputs = {"positive": ["positive", 0], "negative": ["negative", 0], "vae": encoder(graph), "width": WIDTH}
    inputs |= {"height": HEIGHT, "length": LENGTH, "batch_size": 1}
    through(graph, "video", "Kandinsky5ImageToVideo", "positive", "negative", "latent_image", **inputs)


def kandinsky_i2v(graph: Workflow) -> None:
    """The first frame is given."""
    kandinsky(graph)
    graph["video"]["inputs"]["start_image"] = picture(graph, "picture")


VARIANTS = variants(
    ("pixart alpha", PIXART, "pixart_alpha", pixart),
    ("pixart sigma", PIXART, "pixart_sigma", pixart),
    ("hunyuandit", HUNYUAN_DIT, "hunyuan_dit", hunyuan_dit),
    ("lens", LENS, "lens", lens),
    ("joyimage", JOY, "joyimage", joy_image),
    ("joyimage edit", JOY, "joyimage", joy_image_edit),
    ("kandinsky 5 t2v", KANDINSKY, "kandinsky_5", kandinsky),
    ("kandinsky 5 i2v", KANDINSKY, "kandinsky_5", kandinsky_i2v),
    ("ideogram 4", IDEOGRAM, "ideogram_4", ideogram),
)
