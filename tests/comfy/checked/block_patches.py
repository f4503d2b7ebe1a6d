"""What ranks are told of a stock patch between a model's blocks: its weights, and its picture for the latent's size.

Run in a ComfyUI that is loaded (test_checked_in_comfyui.py); ends with the first assertion that does not hold.
"""

import importlib
import sys
from types import SimpleNamespace
from uuid import uuid4

import torch
from trace_samplers import NAME, load

load(sys.argv[1])
block_hooks = importlib.import_module(f"{NAME}.nodes.host.model.block_hooks")
extras = importlib.import_module("comfy_extras.nodes_model_patch")
qwen, wan = (importlib.import_module(f"comfy.ldm.{name}.model") for name in ("qwen_image", "wan"))
torch.set_grad_enabled(False)
module = extras.QwenImageBlockWiseControlNet(num_layers=2, in_dim=64, dim=24, operations=torch.nn)
x, image = torch.empty(1, 16, 1, 6, 8), torch.rand(1, 80, 112, 3)


class Pooling:
    """A VAE: the mean of 8 x 8 pixels in 16 channels, of one frame."""

    def encode(self, pixels):
        return torch.nn.functional.avg_pool2d(pixels.movedim(-1, 1), 8).repeat(1, 6, 1, 1)[:, :16, None]

    def spacial_compression_encode(self):
        return 8


def patch_of(pictures):
    return extras.DiffSynthCnetPatch(SimpleNamespace(model=module, patches_uuid=uuid4()), Pooling(), pictures, 0.8)


def told(patch, transformer=qwen.QwenImageTransformer2DModel):
    return block_hooks.records({"patches": {"double_block": [patch]}}, transformer.__new__(transformer), x)


def refused(*given):
    try:
        told(*given)
    except ValueError as error:
        return str(error)
    raise AssertionError(given)


stock, patch = patch_of(image), patch_of(image)
before = stock.encoded_image
stock({"x": x, "img": torch.zeros(1, 12, 24), "block_index": 0})
assert stock.encoded_image.shape != before.shape, "it encodes its picture for the size of the latent"
(record,) = told(patch)
state = record.pop("state")
assert torch.equal(state.pop("encoded_image"), stock.encoded_image)
assert state == {"strength": 0.8, "encoded_image_size": (48, 64)}
(number,) = {delta.key.partition("/")[0] for delta in block_hooks.hook_weights({"patches": {"a": [patch, patch]}})}
assert record == {
    **{"patch": "DiffSynthCnetPatch", "kinds": ["double_block"], "module": int(number), "compression": 8},
    "config": {"additional_in_dim": 0, "in_dim": 64, "dim": 24, "num_layers": 2},
}
derived = type("DiffSynthCnetPatch", (extras.DiffSynthCnetPatch,), {})
assert told(derived(patch.model_patch, patch.vae, image, 0.8)) == [], "whose code ranks do not have"
assert refused(patch_of(image.repeat(2, 1, 1, 1))) == (
    "the control image of DiffSynthCnetPatch has 2 pictures; use one"
)
assert refused(patch, wan.WanModel).startswith("DiffSynthCnetPatch is made for QwenImageTransformer2DModel, and this ")
