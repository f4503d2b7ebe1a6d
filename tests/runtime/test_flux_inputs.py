"""A step's inputs: what is refused before a rank sees it, and how it is said."""

import pytest
import torch

from parallel_runtime.cli.workload import Workload
from parallel_runtime.models.flux.family import FluxModel
from parallel_runtime.models.flux.inputs import check_step
from parallel_runtime.models.flux.sample import sample_config
from parallel_runtime.plan import ParallelPlan

CONFIG = sample_config()
GOOD = Workload(width=64, height=48, text_tokens=7, batch=2).tensors(CONFIG)  # 12 image tokens


def with_value(name: str, value: float) -> dict[str, torch.Tensor]:
    tensor = GOOD[name].clone()
    tensor.view(-1)[3] = value
    return {name: tensor}


BAD = {
    "NaN in the latent": (with_value("img", torch.nan), ["img holds 1 values that are NaN", "of 1536", "look at"]),
    "infinite conditioning": (with_value("txt", torch.inf), ["txt holds 1 values", "infinite"]),
    "no number as guidance": ({"guidance": torch.tensor([3.5, torch.nan])}, ["guidance=nan", "look at the node"]),
    "guidance in fp16": (
        {"guidance": torch.tensor([3.5, 66.0]).half()},
        ["guidance=66 times 1000 is more than float16 holds", "at most 65.5"],
    ),
    "empty conditioning": ({"txt": torch.zeros(2, 0, 64)}, ["conditioning is empty", "connect a text encoder"]),
    "no image": ({"img": torch.zeros(0, 12, 64)}, ["shape [0, 12, 64]", "at least one image"]),
    "no tokens": ({"img": torch.zeros(2, 0, 64)}, ["shape [2, 0, 64]", "one token"]),
    "channels": ({"img": torch.zeros(2, 12, 16)}, ["16 channels", "takes 64", "use a Flux latent"]),
    "text width": ({"txt": torch.zeros(2, 7, 96)}, ["96 wide", "takes 64", "text encoders"]),
    "batch of the text": ({"txt": torch.zeros(1, 7, 64)}, ["txt has shape [1, 7, 64]", "[2, 7, 64]"]),
    "pooled": ({"y": torch.zeros(2, 9)}, ["y has shape [2, 9]", "[2, 32]"]),
    "timesteps": ({"timesteps": torch.zeros(3)}, ["timesteps has shape [3]", "[2]"]),
    "ids": ({"img_ids": torch.zeros(11, 3)}, ["img_ids has shape [11, 3]", "[12, 3]"]),
    "rows at zero": (
        {"zero_timestep_rows": torch.zeros(5, dtype=torch.uint8)},
        ["zero_timestep_rows has shape [5]", "[12]"],
    ),
    "mask": ({"mask": torch.zeros(2, 19, 18)}, ["attention mask has shape [2, 19, 18]", "[2, 19, 19]"]),
    "residual": ({"control_in.0": torch.zeros(2, 13, 768)}, ["control_in.0 has shape [2, 13, 768]", "ControlNet"]),
    "residual width": ({"control_out.0": torch.zeros(2, 12, 512)}, ["[2, 12, 512]", "[2, 12, 768]"]),
}


@pytest.mark.parametrize("mistake", BAD)
def test_a_step_that_cannot_be_names_the_value_the_limit_and_the_remedy(mistake: str) -> None:
    changes, words = BAD[mistake]
    with pytest.raises(ValueError) as caught:
        check_step(CONFIG, {**GOOD, **changes})
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_step_without_an_input_names_it() -> None:
    for name in ("img", "txt", "y", "timesteps", "img_ids", "txt_ids"):
        with pytest.raises(ValueError, match=f"{name} is missing"):
            check_step(CONFIG, {key: value for key, value in GOOD.items() if key != name})


def test_good_steps_pass_with_all_that_is_optional() -> None:
    check_step(CONFIG, {key: value for key, value in GOOD.items() if key != "guidance"})
    mask = torch.full((1, 19, 19), -torch.inf)
    zero_timestep = torch.zeros(12, dtype=torch.uint8)
    for guidance in (torch.tensor([0.0, 1e4]), torch.tensor([0.0, 1e4]).bfloat16(), torch.tensor([0.0, 65.0]).half()):
        check_step(CONFIG, {**GOOD, "guidance": guidance})
    check_step(
        CONFIG, {**GOOD, "mask": mask, "zero_timestep_rows": zero_timestep, "control_in.0": torch.zeros(2, 4, 768)}
    )


def test_a_plan_is_held_against_the_heads() -> None:
    FluxModel(CONFIG).check_plan(ParallelPlan(ulysses=8))
    with pytest.raises(ValueError, match="ulysses=7 does not divide 24 heads"):
        FluxModel(CONFIG).check_plan(ParallelPlan(ulysses=7))
