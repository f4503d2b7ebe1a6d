"""From the arguments of ComfyUI's Flux to a step's tensors: what is the workers' own, and what is left as it came."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

BATCH, IMAGE, TEXT, HIDDEN = 2, 12, 5, 96


@pytest.fixture(scope="module")
def door(module_of_pack) -> ModuleType:
    return module_of_pack("parallel_runtime.models.flux.inputs")


@pytest.fixture(scope="module")
def config(module_of_pack) -> Any:
    return module_of_pack("parallel_runtime.models.flux.sample").sample_config(heads=3, depth=4, depth_single=3)


@pytest.fixture(scope="module")
def sent(door, config) -> Any:
    """What a step sends, of a bf16 model's inputs and these changes: (tensors, options)."""

    def step(**changes: object) -> tuple[dict, dict]:
        given = {
            "img": torch.zeros(BATCH, IMAGE, 64, dtype=torch.bfloat16),
            "img_ids": torch.zeros(BATCH, IMAGE, 3),
            "txt": torch.zeros(BATCH, TEXT, 64, dtype=torch.bfloat16),
            "txt_ids": torch.zeros(BATCH, TEXT, 3),
            "timesteps": torch.tensor([0.7003, 0.2502]),
            "y": torch.zeros(BATCH, 32, dtype=torch.bfloat16),
            "guidance": torch.full((BATCH,), 3.5),
            "control": None,
        }
        return door.step_tensors(door.ForwardArguments(**given | changes), config)

    return step


def test_the_timestep_reaches_the_workers_as_it_came(sent) -> None:
    """bf16 would make 0.69921875 of the first."""
    tensors, _ = sent()
    assert tensors["timesteps"].dtype == torch.float32
    assert torch.equal(tensors["timesteps"], torch.tensor([0.7003, 0.2502]))


def test_runs_of_rows_at_timestep_zero_are_marked(sent) -> None:
    tensors, _ = sent(timesteps=torch.tensor([0.7, 0.2, 0.0, 0.0]), zero_timestep=((4, 6), (9, 12)))
    assert tensors["zero_timestep_rows"].tolist() == [0] * 4 + [1] * 2 + [0] * 3 + [1] * 3
    assert tensors["timesteps"].tolist() == pytest.approx([0.7, 0.2]), "those of the rows at zero are none of the batch"
    assert "zero_timestep_rows" not in sent()[0]


def test_a_residual_of_several_blocks_travels_once_and_each_block_knows_its_own(sent) -> None:
    a, b, c = (torch.full((BATCH, IMAGE, HIDDEN), value) for value in (1.0, 2.0, 3.0))
    tensors, options = sent(control={"input": [a, None, b, a, c], "output": [c]})
    assert options == {"control_in": [0, None, 1, 0], "control_out": [0, None, None]}, "no fifth double block"
    found = {name: float(tensor.flatten()[0]) for name, tensor in tensors.items() if name.startswith("control")}
    assert found == {"control_in.0": 1.0, "control_in.1": 2.0, "control_out.0": 3.0}


def test_masks_of_any_shape_that_attention_takes_become_one_of_each_image(sent) -> None:
    tokens = IMAGE + TEXT
    plain = torch.randn(BATCH, tokens, tokens)
    for mask, expected in ((plain[0], plain[:1]), (plain, plain), (plain[:, None], plain)):
        assert torch.equal(sent(mask=mask)[0]["mask"], expected)
    with pytest.raises(ValueError, match="the attention mask has shape"):
        sent(mask=plain[:, None].expand(-1, 3, -1, -1))


def test_without_pooled_text_it_is_zeros(sent) -> None:
    tensors, _ = sent(y=None)
    assert torch.equal(tensors["y"], torch.zeros(BATCH, 32, dtype=torch.bfloat16))
