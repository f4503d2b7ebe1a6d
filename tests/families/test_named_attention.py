"""SP Config's input `attention`, from the node to the ranks: kernels of packages, made up here, and what is refused."""

from typing import Any

import pytest
from rounding import ROUNDING

from host.client import ComfyClient, PromptRefusedError, Workflow
from host.pack_workflows import parallel, relative_error, saved_latent

from .conftest import Drifted
from .variants import BY_NAME

FLUX = BY_NAME["flux.1 t2i"]
PLANS: dict[str, dict[str, int]] = {"ring 2": {"ring": 2}, "cfg 2": {"cfg": 2}}


def ours(plan: str, attention: str) -> Workflow:
    config: dict[str, Any] = {"devices": "cpu:2", "mode": "manual", **PLANS[plan], "attention": attention}
    return parallel(FLUX.graph(steps=2), loader="ParallelModelLoader", sampler="ParallelSampler", **config)


def ran(client: ComfyClient, plan: str, attention: str) -> tuple[Any, list[str]]:
    """The latent, and what the ranks say that they attended with."""
    result = client.queue(ours(plan, attention)).require_success()
    report = result.report()
    return saved_latent(client, result), [rank.get("attention", "") for rank in report["ranks"]]


def test_the_kernel_that_is_named_attends_in_the_ranks(drifted: Drifted) -> None:
    usual, before = ran(drifted.client, "ring 2", "auto")
    found, after = ran(drifted.client, "ring 2", "FlashInfer")
    rounding, by_sage = ran(drifted.client, "ring 2", "SageAttention")
    assert relative_error(found, usual) < ROUNDING
    assert relative_error(rounding, usual) < ROUNDING
    for name, names in (("FlashInfer", after), ("SageAttention", by_sage)):
        assert [name in each for each in names] == [True, True], names
    assert not any("FlashInfer" in names for names in [*before, *by_sage]), "a report names what ran in its run"
    _, alone = ran(drifted.client, "cfg 2", "FlashInfer")
    assert any(alone) and not any("FlashInfer" in names for names in alone), alone


def test_what_this_python_lacks_is_refused_by_sp_config_before_anything_runs(drifted: Drifted) -> None:
    words = r"SPConfig.*\n?.*attention=FlashAttention 3: this Python has no flash_attn_interface; pip install yunchang"
    with pytest.raises(PromptRefusedError, match=words):
        drifted.client.queue(ours("ring 2", "FlashAttention 3"))
