"""The files of demo/models: they draw what is asked, and the classifier that says so is no yes-sayer."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from demo import networks
from demo.evaluation import agreement, in_parts, sample, summary, with_random_gates
from demo.networks import Flux
from demo.pictures import SIZE
from demo.words import THINGS, Combination, combinations

MODELS = Path(networks.__file__).parent / "models"
CPU = torch.device("cpu")
UNSEEN = combinations()[1]
ONE_OF_EACH = tuple(UNSEEN[5 * thing + thing % 5] for thing in range(len(THINGS)))  # all five places in turn


@pytest.fixture(scope="module")
def loaded() -> dict[str, torch.nn.Module]:
    """The three networks of the shipped files, in fp32."""
    names = ("autoencoder", "classifier", "transformer")
    return {name: networks.load(MODELS / f"demo_{name}.safetensors", CPU) for name in names}


def agreed(loaded: dict, transformer: torch.nn.Module, wanted: tuple[Combination, ...]) -> torch.Tensor:
    """(N, 3): what the classifier finds right of the pictures that a transformer draws."""
    latents = sample(transformer, [each.prompt() for each in wanted], cfg=1.0, seed=21, device=CPU)
    return agreement(loaded["classifier"], in_parts(loaded["autoencoder"], "decode", latents).clamp(0, 1), wanted)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("wanted", [ONE_OF_EACH, UNSEEN], ids=["40", "200"])
def test_the_model_draws_what_training_never_saw(loaded: dict, wanted: tuple[Combination, ...]) -> None:
    found = agreed(loaded, loaded["transformer"], wanted)
    assert all(value >= 85 for value in summary(found).values()), summary(found)
    right = Counter(each.thing for each, whole in zip(wanted, found.all(1).tolist(), strict=True) if whole)
    if wanted is UNSEEN:
        assert set(right) == set(range(len(THINGS))), "a thing is never drawn right"


def test_the_classifier_rejects_noise(loaded: dict) -> None:
    noise = torch.rand(len(ONE_OF_EACH), 3, SIZE, SIZE, generator=torch.Generator().manual_seed(3))
    assert agreement(loaded["classifier"], noise, ONE_OF_EACH)[:, 0].sum() == 0


@pytest.mark.full
@pytest.mark.parametrize("gates", ["as it starts", "random"])
def test_the_classifier_rejects_what_an_untrained_model_draws(loaded: dict, gates: str) -> None:
    torch.manual_seed(0)
    untrained = Flux(256, 1, 1)
    found = agreed(loaded, untrained if gates == "as it starts" else with_random_gates(untrained), ONE_OF_EACH[:20])
    assert found.all(1).sum() == 0


def test_the_files_are_small_and_bf16() -> None:
    files = list(MODELS.glob("*.safetensors"))
    assert len(files) == 3
    assert sum(file.stat().st_size for file in files) <= 24e6
    assert {tensor.dtype for file in files for tensor in load_file(file).values()} == {torch.bfloat16}
