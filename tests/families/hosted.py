"""What tests of hosted models share: Wan with 5 heads (uneven for 2 ranks), Qwen-Image, two plans, nodes in between."""

from typing import Any

from host import pack_workflows
from host.client import Workflow
from host.pack_workflows import parallel
from host.workflows import between

from .variants import BY_NAME

WAN, QWEN = BY_NAME["wan 2.1 t2v"], BY_NAME["qwen-image"]
VARIANTS = {"Wan": WAN, "Qwen-Image": QWEN}
PLANS: dict[str, dict[str, int]] = {"ulysses 2": {"ulysses": 2}, "cfg 2": {"cfg": 2}}
VISIBLE = 1e-3  # 100 x the tolerance of parity: what moves a latent less than this could not be judged


def small(family: str = "Wan", *, seed: int = 7, steps: int = 2) -> Workflow:
    """A stock graph at cfg 3, so that both plans have work for two ranks."""
    return VARIANTS[family].graph(cfg=3.0, seed=seed, steps=steps)


def with_loras(graph: Workflow, *loras: tuple[str, float]) -> Workflow:
    """Stock LoRA loaders one behind the other before the sampler, by file name and strength."""
    for number, (name, strength) in enumerate(loras):
        graph = between(graph, f"lora {number}", "LoraLoaderModelOnly", lora_name=name, strength_model=strength)
    return graph


def parallelized(graph: Workflow, plan: str = "ulysses 2") -> Workflow:
    """The same graph with Parallelize Model, under that plan."""
    return pack_workflows.parallelized(graph, mode="manual", **PLANS[plan])


def ours(graph: Workflow, plan: str = "ulysses 2", **more: Any) -> Workflow:
    """The same graph with our loader, under that plan."""
    return parallel(graph, mode="manual", **PLANS[plan], **more)
