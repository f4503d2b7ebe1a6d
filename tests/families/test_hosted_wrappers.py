"""Stock nodes around a model: what changes cfg, windows of a long video, with a pipeline and without; wrong inputs."""

from rounding import ROUNDING

from host.client import ComfyClient, Workflow
from host.pack_workflows import latent_of, parallel, relative_error, saved_latent

from .conftest import Stock
from .hosted import VISIBLE, between, ours, small
from .variants import BY_NAME

LOADER = "ParallelModelLoader"


def piped(graph: Workflow) -> Workflow:
    """The same graph in two stages."""
    return parallel(graph, loader=LOADER, mode="manual", devices="cpu:4", pipefusion=2)


def test_nodes_that_change_cfg_equal_stock(hosted_client: ComfyClient, stock: Stock) -> None:
    plain = small(seed=41)
    graph = between(between(plain, "tcfg", "TCFG"), "zero star", "CFGZeroStar")
    graph = between(graph, "norm", "CFGNorm", strength=0.8)
    graph = between(graph, "rescaled", "RescaleCFG", multiplier=0.5)
    right = stock(graph)
    assert relative_error(stock(plain), right) > VISIBLE
    assert relative_error(latent_of(hosted_client, ours(graph, "cfg 2")), right) <= ROUNDING


def test_windows_of_a_long_video_equal_stock_and_do_not_read_each_others_keys(
    hosted_client: ComfyClient, stock: Stock
) -> None:
    """In stages: their conditionings are the same and so are their shapes, so each goes through whole."""
    sizes = {"context_length": 9, "context_overlap": 4, "context_stride": 1, "closed_loop": False}
    sizes |= {"freenoise": True, "retain_first_frame": False, "split_conds_to_windows": False}
    settings = {"context_schedule": "standard_static", "fuse_method": "pyramid"}
    plain = small(seed=45, steps=3)
    graph = between(plain, "windows", "WanContextWindowsManual", **sizes, **settings)
    right = stock(graph)
    assert relative_error(stock(plain), right) > VISIBLE
    for mine in (ours(graph), piped(graph)):
        assert relative_error(latent_of(hosted_client, mine), right) <= ROUNDING


def test_what_cannot_be_in_stages_is_refused_in_one_line_before_workers_are_asked(hosted_client: ComfyClient) -> None:
    before = [pool["generation"] for pool in hosted_client.get("/parallel_dit/state")["pools"]]
    said = hosted_client.queue(piped(BY_NAME["wan 2.1 vace"].graph())).error_line(LOADER)
    parts = ("pipefusion=2: VaceWanModel cannot run in stages", "take turns", "use pipefusion=1")
    assert [part for part in parts if part not in said] == [], said
    assert [pool["generation"] for pool in hosted_client.get("/parallel_dit/state")["pools"]] == before


def test_blocks_that_ranks_cannot_skip_are_refused_by_the_node_before_a_step(hosted_client: ComfyClient) -> None:
    layers = {"double_layers": "0", "single_layers": "", "start_percent": 0.0, "end_percent": 1.0}
    skipped = between(BY_NAME["wan 2.1 vace"].graph(), "skip", "SkipLayerGuidanceDiT", **layers, scale=3.0)
    skipped["skip"]["inputs"]["rescaling_scale"] = 0.0
    result = hosted_client.queue(ours(skipped))
    assert not result.progress
    said = result.error_message.splitlines()[0]
    assert said.startswith("SkipLayerGuidanceDiT (node skip): it skips blocks of VaceWanModel (double_block 0; "), said


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
    assert relative_error(saved_latent(hosted_client, hosted_client.queue(ours(graph))), stock(graph)) <= ROUNDING
