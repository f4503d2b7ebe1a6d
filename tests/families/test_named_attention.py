"""SP Config's input `attention`, from the node to the ranks: kernels of packages, made up here, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from host.client import ComfyClient, PromptRefusedError, Workflow
from host.forked_ranks import FOR_COMFYUI
from host.pack_workflows import TOLERANCE, parallel, relative_error, saved_latent
from host.server import ComfyServer

from .hosted import WAN
from .variant import Variant
from .variants import BY_NAME, write_families

FLUX = BY_NAME["flux.1 t2i"]
PLANS: dict[str, dict[str, int]] = {"ulysses 2": {"ulysses": 2}, "ring 2": {"ring": 2}, "cfg 2": {"cfg": 2}}
# As yunchang's, of version 0.6: exact, and its log-sum-exp is (B, H, S).
YUNCHANG = """
from types import SimpleNamespace
import torch
AttnType = SimpleNamespace(FLASHINFER="flashinfer", SAGE_AUTO="sage")
def select_flash_attn_impl(kind, stage):
    def attend(q, k, v, sm_scale=None, softmax_scale=None, **options):
        assert kind == "sage" or len(q) == 1
        scale = softmax_scale or sm_scale
        scores = torch.einsum("bshd,bthd->bhst", q * scale, k)
        lse = scores.logsumexp(-1)
        return torch.einsum("bhst,bthd->bshd", (scores - lse.unsqueeze(-1)).exp(), v), lse
    return attend
"""


@pytest.fixture(scope="module")
def with_packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyClient]:
    """A server whose Python has them, and no FlashAttention 3."""
    folder = tmp_path_factory.mktemp("packages")
    for name, text in {"yunchang": "", "flashinfer": "", "sageattention": "def sageattn(): ...\n"}.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(text)
    (folder / "yunchang" / "kernels.py").write_text(YUNCHANG)
    models = write_families(tmp_path_factory.mktemp("models"), only=[WAN.name, FLUX.name])
    with ComfyServer(models=models, environment={"PYTHONPATH": str(folder), **FOR_COMFYUI}) as server:
        yield ComfyClient(server.url)


def ours(graph: Workflow, plan: str, **config: object) -> Workflow:
    config = {"devices": "cpu:2", "mode": "manual", **PLANS[plan], **config}
    return parallel(graph, loader="ParallelModelLoader", sampler="ParallelSampler", **config)


def ran(client: ComfyClient, plan: str, attention: str, variant: Variant = WAN) -> tuple[Any, list[str]]:
    result = client.queue(ours(variant.graph(), plan, attention=attention)).require_success()
    (report,) = result.outputs["sampler"]["parallel_dit"]
    return saved_latent(client, result), [rank.get("attention", "") for rank in report["ranks"]]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ulysses 2", "ring 2"])
def test_the_kernel_that_is_named_attends_in_the_ranks(with_packages: ComfyClient, plan: str) -> None:
    usual, before = ran(with_packages, plan, "auto")
    found, after = ran(with_packages, plan, "FlashInfer")
    rounding, by_sage = ran(with_packages, plan, "SageAttention")
    assert relative_error(found, usual) < TOLERANCE
    assert relative_error(rounding, usual) < TOLERANCE
    assert all("FlashInfer" in names for names in after)
    assert not any("FlashInfer" in names for names in [*before, *by_sage]), "a report names what ran in its run"
    _, of_flux = ran(with_packages, plan, "FlashInfer", FLUX)
    assert all("FlashInfer" in names for names in of_flux)
    if plan == "ulysses 2":
        _, alone = ran(with_packages, "cfg 2", "FlashInfer")
        assert any(alone) and not any("FlashInfer" in names for names in alone), alone


@pytest.mark.slow
def test_what_this_python_lacks_is_refused_by_sp_config_before_anything_runs(with_packages: ComfyClient) -> None:
    words = r"SPConfig.*\n?.*attention=FlashAttention 3: this Python has no flash_attn_interface; pip install yunchang"
    with pytest.raises(PromptRefusedError, match=words):
        with_packages.queue(ours(WAN.graph(), "ring 2", attention="FlashAttention 3"))
