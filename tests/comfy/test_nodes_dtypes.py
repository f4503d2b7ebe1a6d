"""What is computed in a half, against stock ComfyUI on the same file.

In half precision nothing agrees to the last digit: ours may differ from stock's picture by half as much again as
stock's own exact attention kernels do. fp16 under every plan is runtime/test_parity.py's, files in fp8 are
families/test_hosted_fp8.py's and models/test_quantised.py's, files of several dtypes models/test_formats_as_stock.py's.
"""

import copy

from host import workflows
from host.client import ComfyClient, Workflow
from host.formats import same_picture
from host.pack_workflows import latent_of, parallel, relative_error, saved_latent, to_latent
from host.tiny_models import TinyModels
from host.workflows import between
from parity.runner import PLANS, switched_off

LOOPS = {"host": "host", "auto": "resident"}


def ours_of(graph: Workflow, plan: str, loop: str) -> Workflow:
    graph = copy.deepcopy(graph)
    graph["sampler"]["inputs"]["model"] = graph.pop("dtype")["inputs"]["model"]
    settings = {"mode": "manual", **PLANS[plan]}
    graph = parallel(graph, weight_dtype="bfloat16", sampler="ParallelFluxSampler", **settings)
    graph["sampler"]["inputs"] |= {"loop": loop, "modulations": "keep"}
    return graph


def test_a_picture_in_half_precision_is_stocks_in_either_loop(client: ComfyClient, tiny_models: TinyModels) -> None:
    """Its sigmas are no numbers that a half holds."""
    graph = to_latent(workflows.text_to_image(tiny_models, steps=2, width=112, height=80))
    graph["sampler"]["inputs"]["scheduler"] = "beta"
    graph = between(graph, "dtype", "ModelComputeDtype", dtype="bf16")
    stock, allowed = same_picture(client, graph)
    for plan, loop in (("ulysses 2", "host"), ("ring 2", "auto")):
        result = client.queue(ours_of(graph, plan, loop)).require_success()
        assert result.report()["loop"]["kind"] == LOOPS[loop]
        assert relative_error(saved_latent(client, result), stock) <= allowed, f"{plan}, {loop} loop"
    wrong = switched_off(ours_of(graph, "ring 2", "host"))
    assert relative_error(latent_of(client, wrong), stock) > 2 * allowed, "stock moves so far that it would pass"
