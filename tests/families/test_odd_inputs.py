"""Inputs that are rare or wrong, with models of any family, beside stock ComfyUI in a real server."""

from __future__ import annotations

from host.client import ComfyClient
from host.pack_workflows import TOLERANCE, latent_of, relative_error, saved_latent

from .conftest import Stock
from .hosted import ours, small
from .variants import BY_NAME


def test_sound_of_no_frames_runs_where_stock_fails_in_the_model_and_the_next_prompt_is_right(
    hosted_client: ComfyClient, stock: Stock
) -> None:
    """LTX-2 gives the video alone then, which stock cannot pair with two latents; here no numbers are no numbers."""
    graph = BY_NAME["ltx-2 t2v"].graph(steps=2)
    graph["sound"]["inputs"] |= {"frames_number": 1, "frame_rate": 1000.0}  # a thousandth of a second
    result = hosted_client.queue(graph)
    assert (result.status, result.error_node) == ("error", "KSampler")
    assert saved_latent(hosted_client, hosted_client.queue(ours(graph))).isfinite().all()
    graph = BY_NAME["ltx-2 t2v"].graph(steps=2, seed=92)
    assert relative_error(saved_latent(hosted_client, hosted_client.queue(ours(graph))), stock(graph)) <= TOLERANCE


def test_a_file_in_another_familys_graph_is_one_error_and_the_next_prompt_is_right(
    hosted_client: ComfyClient, stock: Stock
) -> None:
    """Wan's nodes and texts with LTX's file, by the loader's earlier name too, which takes files of any family."""
    for loader in ("ParallelModelLoader", "ParallelFluxLoader"):
        wrong = ours(small(), loader=loader)
        wrong["model"]["inputs"]["unet_name"] = BY_NAME["ltx-video t2v"].file
        result = hosted_client.queue(wrong)
        said = result.error_line("KSampler")
        assert "LTXVModel is called with" in said and "as graphs of another model do" in said, said
        assert "attention_mask" in said, said
        right = ours(small(seed=91), loader=loader)
        assert relative_error(latent_of(hosted_client, right), stock(small(seed=91))) <= TOLERANCE
    plain = small()
    plain["model"]["inputs"]["unet_name"] = BY_NAME["ltx-video t2v"].file
    assert hosted_client.queue(plain).status == "error", "stock runs it"
