"""What the nodes measure: present where it was measured, absent where not, in /history for headless clients."""

from collections.abc import Callable
from typing import Any

import numpy as np

from host import workflows
from host.client import ComfyClient, Workflow
from host.pack_workflows import parallel
from host.server import ComfyServer
from host.tiny_models import TinyModels
from host.workers import generation


def timed(tiny: TinyModels, *, seed: int, steps: int = 3) -> Workflow:
    """The whole graph with all of our nodes."""
    graph = parallel(workflows.text_to_image(tiny, seed=seed, steps=steps), sampler="ParallelFluxSampler")
    graph["decode"]["class_type"] = "TimedVAEDecode"
    return graph


def test_a_run_is_told_with_its_prompt_settings_workers_and_devices_and_takes_less_than_its_prompt(
    client: ComfyClient, comfy_server: ComfyServer, tiny_models: TinyModels
) -> None:
    graph = timed(tiny_models, seed=91)
    graph["sampler"]["inputs"]["loop"] = "host"
    result = client.queue(graph)
    report = result.report()
    assert report["prompt_id"] == result.prompt_id
    assert report["versions"]["comfyui"][0].isdigit()
    assert [device["name"] for device in report["devices"]] == ["cpu:0", "cpu:1"]
    assert all(device["memory_bytes"] > device["free_bytes"] > 0 for device in report["devices"])
    assert report["pool"] == {"generation": generation(comfy_server)}
    sampling = {"steps": 3, "seed": 91, "cfg": 1.0, "sampler": "euler", "scheduler": "simple", "denoise": 1.0}
    assert report["sampling"] == sampling
    timings = report["timings"]
    whole_s = timings["load_s"] + timings["denoise_s"]
    assert sum(timings["step_s"]) <= timings["denoise_s"] < whole_s < result.wall_s


def test_loras_and_controlnets_are_told_by_what_they_hold_and_make_it_other_work(
    client: ComfyClient, tiny_models: TinyModels, hint: str
) -> None:
    def measured(change: Callable[[Workflow], Workflow], **plan: Any) -> dict[str, Any]:
        graph = change(workflows.text_to_image(tiny_models, seed=96, steps=1))
        return client.queue(parallel(graph, sampler="ParallelSampler", **plan)).report()

    def lora(name: str, strength: float) -> Callable[[Workflow], Workflow]:
        return lambda graph: workflows.with_lora(graph, name, strength=strength)

    def control(strength: float) -> Callable[[Workflow], Workflow]:
        return lambda graph: workflows.with_controlnet(
            graph, tiny_models, tiny_models.controlnet_union, hint, strength=strength
        )

    plain, one = measured(lambda graph: graph), measured(lora(tiny_models.lora_fused, 0.8))
    weaker = measured(lora(tiny_models.lora_fused, 0.3), mode="manual", ring=2)
    other = measured(lora(tiny_models.lora_diffusers, 0.8))
    patches = one["model"]["patches"]
    assert (patches["strengths"], patches["side_branch"]) == ([0.8], False)
    assert patches["weights"] > 1
    assert weaker["model"]["patches"] == patches | {"strengths": [0.3]}
    assert other["model"]["patches"]["name"] != patches["name"]
    assert "patches" not in plain["model"] and "controls" not in plain
    assert weaker["work"] == one["work"]
    guided, soft = measured(control(0.7)), measured(control(0.4))
    (told,) = guided["controls"]
    assert (told["kind"], told["strength"], told["start"], told["end"]) == ("ControlNet", 0.7, 0.0, 1.0)
    assert soft["controls"] == [told | {"strength": 0.4}]
    assert soft["work"] == guided["work"]
    assert len({report["work"] for report in (plain, one, other, guided)}) == 4


def test_timed_vae_decode_gives_vae_decodes_image_and_counts_only_the_decode(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    graph = timed(tiny_models, seed=94)
    graph["stock"] = {"class_type": "VAEDecode", "inputs": graph["decode"]["inputs"]}
    graph["save_stock"] = {"class_type": "SaveImage", "inputs": {"images": ["stock", 0], "filename_prefix": "stock"}}
    result = client.queue(graph)
    report = result.report("decode")
    assert (report["kind"], report["vae"]["device"]) == ("vae", "cpu")
    assert (report["vae"]["latent"], report["vae"]["image"]) == ([1, 16, 16, 16], [1, 128, 128, 3])
    assert 0 < report["vae"]["decode_s"] < result.wall_s
    pictures = [client.image(result.outputs[node]["images"][0]) for node in ("save", "save_stock")]
    assert np.array_equal(*(np.asarray(picture) for picture in pictures))
    assert "vae" not in result.report()
