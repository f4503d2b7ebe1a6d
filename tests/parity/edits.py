"""Building blocks of the matrix's graphs: each edit changes one thing of a stock graph that ends in a saved latent."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from host.client import Workflow
from host.layouts import FluxShape
from host.pack_workflows import to_latent
from host.tiny_models import TinyModels
from host.workflows import text_to_image

Edit = Callable[[Workflow], None]
FILES = TinyModels(base=Path(), shape=FluxShape())  # only the names are used here
INSTANTX = "tiny_controlnet_instantx.safetensors"  # the union file without its modes
PICTURES = {"picture_a.png": (64, 96), "picture_b.png": (88, 56)}  # width and height; both partly transparent
HERE = ["what the slot holds", 0]
LONG = "blurry " * 300  # more tokens than the 256 every shorter prompt is padded to


def plain(
    *, width: int = 64, height: int = 96, scheduler: str = "simple", denoise: float = 1.0, **settings: Any
) -> Workflow:
    """The stock graph all edits start from, `settings` being those of `text_to_image`."""
    graph = to_latent(text_to_image(FILES, width=width, height=height, **settings))
    graph["sampler"]["inputs"] |= {"scheduler": scheduler, "denoise": denoise}
    return graph


def set_inputs(node: str, **inputs: Any) -> Edit:
    """Other values for inputs of a node that is there."""
    return lambda graph: graph[node]["inputs"].update(inputs)


def add(node: str, class_type: str, **inputs: Any) -> Edit:
    """Another node, for later edits to link to."""
    return lambda graph: graph.update({node: {"class_type": class_type, "inputs": inputs}})


def on(slot: str, class_type: str, **inputs: Any) -> Edit:
    """A node before the sampler's `slot` (model, positive, negative, latent_image); HERE is what the slot had."""

    def edit(graph: Workflow) -> None:
        held = graph["sampler"]["inputs"][slot]
        name = f"{slot} {len(graph)}"
        filled = {key: held if value is HERE else value for key, value in inputs.items()}
        graph[name] = {"class_type": class_type, "inputs": filled}
        graph["sampler"]["inputs"][slot] = [name, 0]

    return edit


def on_model(class_type: str, **inputs: Any) -> Edit:
    """A node that takes and gives a MODEL."""
    return on("model", class_type, model=HERE, **inputs)


def on_positive(class_type: str, **inputs: Any) -> Edit:
    """A node that takes and gives a CONDITIONING."""
    return on("positive", class_type, conditioning=HERE, **inputs)


def on_both(class_type: str, **inputs: Any) -> Edit:
    """A node that takes both conditionings and gives them as its first two outputs."""

    def edit(graph: Workflow) -> None:
        slots = graph["sampler"]["inputs"]
        name = f"both {len(graph)}"
        given = {"positive": slots["positive"], "negative": slots["negative"], **inputs}
        graph[name] = {"class_type": class_type, "inputs": given}
        slots["positive"], slots["negative"] = [name, 0], [name, 1]

    return edit


def guided(cfg: float, *, negative: str = "blurry") -> Edit:
    """A cfg above 1, with a negative prompt."""

    def edit(graph: Workflow) -> None:
        prompt("other prompt", negative)(graph)
        graph["sampler"]["inputs"] |= {"cfg": cfg, "negative": ["other prompt", 0]}

    return edit


def prompt(node: str, text: str) -> Edit:
    """Another prompt, for later edits to link to."""
    return add(node, "CLIPTextEncode", clip=["clip", 0], text=text)


def picture(name: str) -> Edit:
    """One of PICTURES as `name` (image and mask), and encoded as "latent of `name`"."""

    def edit(graph: Workflow) -> None:
        add(name, "LoadImage", image=name)(graph)
        add(f"latent of {name}", "VAEEncode", pixels=[name, 0], vae=["vae", 0])(graph)

    return edit


def from_picture(name: str) -> Edit:
    """Begin with a picture in place of an empty latent."""

    def edit(graph: Workflow) -> None:
        picture(name)(graph)
        graph["sampler"]["inputs"]["latent_image"] = [f"latent of {name}", 0]

    return edit


def reference(name: str) -> Edit:
    """Kontext: a picture as further tokens."""

    def edit(graph: Workflow) -> None:
        picture(name)(graph)
        on_positive("ReferenceLatent", latent=[f"latent of {name}", 0])(graph)

    return edit


def painted_anew(name: str, *, noise_mask: bool) -> Edit:
    """Fill: the transparent part of a picture."""

    def edit(graph: Workflow) -> None:
        picture(name)(graph)
        graph["model"]["inputs"]["unet_name"] = FILES.fill
        given = {"vae": ["vae", 0], "pixels": [name, 0], "mask": [name, 1], "noise_mask": noise_mask}
        on_both("InpaintModelConditioning", **given)(graph)
        graph["sampler"]["inputs"]["latent_image"] = [graph["sampler"]["inputs"]["positive"][0], 2]

    return edit


def controlnet(file: str, *, union_type: str = "", strength: float = 0.7, end_percent: float = 1.0) -> Edit:
    """A ControlNet on both conditionings."""

    def edit(graph: Workflow) -> None:
        number = len(graph)
        loader = f"controlnet {number}"
        picture("picture_a.png")(graph)
        add(loader, "ControlNetLoader", control_net_name=file)(graph)
        if union_type:
            add(f"type {number}", "SetUnionControlNetType", control_net=[loader, 0], type=union_type)(graph)
            loader = f"type {number}"
        strengths = {"strength": strength, "start_percent": 0.0, "end_percent": end_percent}
        sources = {"control_net": [loader, 0], "image": ["picture_a.png", 0], "vae": ["vae", 0]}
        on_both("ControlNetApplyAdvanced", **sources, **strengths)(graph)

    return edit


def lora(file: str, strength: float) -> Edit:
    """A LoRA between the sampler and the model it has."""
    return on_model("LoraLoaderModelOnly", lora_name=file, strength_model=strength)


def custom_sampling(guider: str, **inputs: Any) -> Edit:
    """SamplerCustomAdvanced in place of KSampler; `inputs` of the guider, HERE being the slot of the same name."""

    def edit(graph: Workflow) -> None:
        was = graph["sampler"]["inputs"]
        given = {name: was[name] if value is HERE else value for name, value in inputs.items()}
        add("guider", guider, model=was["model"], **given)(graph)
        add("noise", "RandomNoise", noise_seed=was["seed"])(graph)
        add("select", "KSamplerSelect", sampler_name=was["sampler_name"])(graph)
        schedule = {name: was[name] for name in ("model", "scheduler", "steps", "denoise")}
        add("sigmas", "BasicScheduler", **schedule)(graph)
        links = {"noise": ["noise", 0], "guider": ["guider", 0], "sampler": ["select", 0], "sigmas": ["sigmas", 0]}
        add("sampler", "SamplerCustomAdvanced", **links, latent_image=was["latent_image"])(graph)

    return edit


def then_base_model(graph: Workflow) -> None:
    """A second sampler that goes on with the unchanged model, so one graph uses the weights both ways."""
    first = graph["sampler"]["inputs"]
    graph["first sampler"] = {"class_type": "KSampler", "inputs": first}
    inputs = {"model": ["model", 0], "latent_image": ["first sampler", 0], "denoise": 0.6}
    graph["sampler"] = {"class_type": "KSampler", "inputs": first | inputs}


def in_two_parts(graph: Workflow) -> None:
    """KSampler (Advanced) twice: the second takes over halfway, noise and all."""
    whole = graph["sampler"]["inputs"]
    half = whole["steps"] // 2
    shared = {name: value for name, value in whole.items() if name not in ("seed", "denoise")}
    shared |= {"noise_seed": whole["seed"], "end_at_step": half, "start_at_step": 0}
    begin = shared | {"add_noise": "enable", "return_with_leftover_noise": "enable"}
    end = shared | {"add_noise": "disable", "return_with_leftover_noise": "disable"}
    end |= {"latent_image": ["first part", 0], "start_at_step": half, "end_at_step": whole["steps"]}
    graph["first part"] = {"class_type": "KSamplerAdvanced", "inputs": begin}
    graph["sampler"] = {"class_type": "KSamplerAdvanced", "inputs": end}
