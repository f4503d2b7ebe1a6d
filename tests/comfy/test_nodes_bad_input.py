"""What does not fit: text encoders of another model, a latent of no images, a workflow for eight devices on two."""

from rounding import ROUNDING

from host import workflows
from host.client import ComfyClient
from host.pack_workflows import latent_of, parallel, relative_error, to_latent
from host.server import ComfyServer
from host.tiny_models import TinyModels, write_flux


def test_other_text_encoders_are_one_error_that_says_so(client: ComfyClient, tiny_models: TinyModels) -> None:
    wide = write_flux(tiny_models.diffusion_model("wide.safetensors"), ctx=96)
    graph = workflows.text_to_image(tiny_models)
    graph["model"]["inputs"]["unet_name"] = wide.name
    result = client.queue(to_latent(parallel(graph)))
    wide.unlink()
    first_line = result.error_line("KSampler")
    assert "shapes cannot be multiplied" in first_line and "text encoders that belong to this one" in first_line, (
        first_line
    )


def test_a_workflow_saved_for_eight_devices_runs_on_what_is_there(
    client: ComfyClient, comfy_server: ComfyServer, tiny_models: TinyModels
) -> None:
    graph = workflows.text_to_image(tiny_models, seed=31)
    config = {"devices": "all", "mode": "manual", "ulysses": 4, "ring": 2}
    assert relative_error(latent_of(client, parallel(graph, **config)), latent_of(client, graph)) <= ROUNDING
    assert "ulysses=4,ring=2 needs 8 ranks" in comfy_server.log


def test_a_latent_of_no_images_is_refused_by_name(client: ComfyClient, tiny_models: TinyModels) -> None:
    graph = to_latent(parallel(workflows.text_to_image(tiny_models, steps=1)))
    graph["latent"] = workflows.node("EmptyBatch")
    told = "latent_image has shape [0, 16, 8, 8], a batch of 0 images; connect a latent of at least one"
    assert client.queue(graph).error_line("KSampler") == told
