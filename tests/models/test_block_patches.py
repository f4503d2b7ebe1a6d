"""Patches between blocks: those that `HookModules` rebuilds, between the blocks of a shared model.

Does not own the list of patches nor how they reach a rank (tests/families/test_controlnets_in_turn.py).
"""

from types import SimpleNamespace
from typing import Any

import torch
from rounding import ROUNDING
from torch import Tensor, nn

from parallel_runtime.models.hosted.block_hooks import HookModules, config_of
from parallel_runtime.models.hosted.hooks import SharedModel
from parallel_runtime.models.specs import BETWEEN, spec_of

from .cases_images import described, picture, qwen, z_image
from .gloo_group import GlooGroup, OwnTokensOnly
from .ranks import in_ranks, refused
from .tiny import build, difference, noise

SIDES = (80, 112)  # of the picture, which the VAE makes a latent of 10 x 14 of
QWEN_SIZES = {"num_layers": 2, "in_dim": 64, "dim": 96}
Z_SIZES = {"dim": 288, "n_heads": 6, "n_kv_heads": 6, "n_control_layers": 2}


class Pooling:
    """A VAE: the mean of 8 x 8 pixels in 16 channels; with `frames`, of videos."""

    def __init__(self, *, frames: bool) -> None:
        self.frames = frames

    def encode(self, pixels: Tensor) -> Tensor:
        """(B, height, width, 3) to (B, 16, height / 8, width / 8), behind the channels the one frame."""
        means = nn.functional.avg_pool2d(pixels.movedim(-1, 1), 8).repeat(1, 6, 1, 1)[:, :16]
        return means.unsqueeze(2) if self.frames else means

    def spacial_compression_encode(self) -> int:
        """Pixels a side of a latent's pixel."""
        return 8


def stock_patch(name: str, module: nn.Module, **more: Any) -> Any:
    """A patch as its node makes it."""
    import comfy_extras.nodes_model_patch as extras

    image = noise(1, *SIDES, 3).sigmoid()
    vae = Pooling(frames=name == "DiffSynthCnetPatch")
    return getattr(extras, name)(SimpleNamespace(model=module), vae, image, 0.8, **more)


def record_of(beside: HookModules, patch: Any, kinds: list[str], number: int = 7) -> dict[str, Any]:
    """What travels of a patch in a call; the weights of its module, which have this number, are handed to `beside`."""
    module = patch.model_patch.model
    for name, weight in module.state_dict().items():
        beside.take(f"{number}/{name}", weight.clone())
    state = {name: vars(patch)[name] for name in ("strength", "encoded_image", "encoded_image_size")}
    state |= {"is_inpaint": vars(patch).get("is_inpaint", False)}
    record = {"patch": type(patch).__name__, "kinds": kinds, "module": number, "config": config_of(module)}
    return record | {"state": state, "compression": 8}


def rebuilt(patch: Any, kinds: list[str]) -> dict[str, list[Any]]:
    """The same patch as a rank makes it of what travels."""
    beside = HookModules()
    return beside.patches([record_of(beside, patch, kinds)])


def compare(group: GlooGroup, model: nn.Module, inputs: dict[str, Any], patch: Any) -> None:
    """A model with a patch, whole with stock's object and shared with the rebuilt one."""
    kinds = ["double_block"] if type(patch).__name__ == "DiffSynthCnetPatch" else ["noise_refiner", "double_block"]

    def call(patches: dict[str, list[Any]]) -> Tensor:
        given = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
        return model(**given, transformer_options={"patches": patches})

    plain, want = call({}), call({kind: [patch] for kind in kinds})
    assert difference(plain, want) > 1e-3, "the patch changes nothing"
    shared = SharedModel(model, spec_of(type(model), BETWEEN), group)
    for _ in range(2):
        got = call(rebuilt(patch, kinds))
        assert difference(got, want) <= ROUNDING, f"{type(patch).__name__}: {difference(got, want):.1e}"
    assert difference(call({}), plain) <= ROUNDING
    shared.group = OwnTokensOnly()
    assert difference(call(rebuilt(patch, kinds)), want) > 1e-3, "without exchange it must be wrong"
    shared.remove()


@in_ranks(2)
def test_a_patch_between_the_blocks_of_qwen_image_meets_whole_tokens(group: GlooGroup) -> None:
    module = build("comfy_extras.nodes_model_patch.QwenImageBlockWiseControlNet", **QWEN_SIZES)
    for more in ({}, {"ref_latents": [noise(2, 16, 1, 6, 8)], "ref_latents_method": "index_timestep_zero"}):
        compare(group, qwen(), picture(**more), stock_patch("DiffSynthCnetPatch", module))


@in_ranks(2)
def test_a_patch_between_the_blocks_of_z_image_meets_whole_tokens_of_the_refiner_too(group: GlooGroup) -> None:
    for more in ({}, {"additional_in_dim": 17, "refiner_control": True}):
        sizes = Z_SIZES | more
        module = build("comfy.ldm.lumina.controlnet.ZImage_Control", **sizes)
        compare(group, z_image(), described(), stock_patch("ZImageControlPatch", module))


@in_ranks(2)
def test_a_patch_that_is_not_on_the_list_and_one_without_weights_are_refused(group: GlooGroup) -> None:
    beside = HookModules()
    record = {"patch": "UsoStyleProjectorPatch", "kinds": ["double_block"], "module": 7, "config": {}, "state": {}}
    with refused("'UsoStyleProjectorPatch' is no patch that ranks rebuild", "DiffSynthCnetPatch"):
        beside.patches([record])
    with refused("module 7, which this rank has not"):
        beside.patches([record | {"patch": "DiffSynthCnetPatch"}])
    beside.take("7/a", torch.ones(3))
    beside.take("8/a", torch.ones(2))
    assert beside.num_bytes == 20
    beside.keep(["8/a"])
    assert beside.num_bytes == 8
