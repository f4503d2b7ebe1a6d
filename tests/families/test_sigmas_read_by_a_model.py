"""A class that reads the run's sigmas in its forward: a distilled HunyuanVideo is told where each step leads.

Of ComfyUI's samplers, uni_pc writes another last sigma before its first call, which the model then reads.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from rounding import ROUNDING

from host.client import ComfyClient
from host.pack_workflows import relative_error, saved_latent
from parity.runner import parallelized

from .files import tiny, write_model_files
from .hunyuan import SIZES
from .variants import BY_NAME

FILE = tiny("hunyuan_video_meanflow", "hunyuan_video.model.HunyuanVideo", 72, SIZES | {"meanflow": True})
VARIANT = replace(BY_NAME["hunyuanvideo t2v"], file=FILE.name)


@pytest.mark.parametrize("sampler", ["uni_pc", "uni_pc_bh2", "euler"])
def test_a_model_that_reads_the_sigmas_samples_in_the_workers_as_stock_does(
    sampler: str, hosted_client: ComfyClient, family_models: Path
) -> None:
    folder = family_models / "diffusion_models"
    if not (folder / FILE.name).exists():
        write_model_files(folder, [FILE])
    graph = VARIANT.graph(steps=3)
    graph["sampler"]["inputs"]["sampler_name"] = sampler
    stock = saved_latent(hosted_client, hosted_client.queue(graph))
    ours = parallelized(graph, devices="cpu:2", ulysses=2)
    ours["sampler"]["class_type"] = "ParallelSampler"
    result = hosted_client.queue(ours)
    assert result.report()["loop"] == {"kind": "resident"}
    assert relative_error(saved_latent(hosted_client, result), stock) <= ROUNDING
