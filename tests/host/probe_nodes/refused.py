"""What nodes that are refused take, and nodes that do as those of other packs do: they catch, they write later."""

from types import SimpleNamespace
from typing import Any

import comfy.clip_vision
import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy.patcher_extension import WrappersMP
from comfy_api.latest import io
from comfy_api.torch_helpers import set_torch_compile_wrapper

from .node import node

STATES = 27  # of CLIP vision: USO takes the twentieth from the end


class Projector:
    """Stands for the module that makes tokens of InfiniteTalk's audio."""

    seq_len = 5

    def __call__(self, first: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        """Tokens of each frame."""
        return torch.zeros(1 + later.shape[1], 2, 8)


@node("RefusedInputs", gives=[io.ModelPatch, io.ClipVisionOutput, io.AudioEncoderOutput])
def refused_inputs() -> io.NodeOutput:
    """Inputs of stock nodes that patch blocks: a model patch, what CLIP vision sees, what an audio encoder hears."""
    patch = SimpleNamespace(model=SimpleNamespace(cond_in_channels=3, audio_proj=Projector()))
    seen = comfy.clip_vision.Output()
    seen["all_hidden_states"] = torch.zeros(1, STATES, 4, 8)
    seen["penultimate_hidden_states"] = torch.zeros(1, 4, 8)
    return io.NodeOutput(patch, seen, {"encoded_audio_all_layers": [torch.zeros(1, 20, 8)] * 3})


def go_on(model: Any) -> Any:
    """Patch a block, and take no notice of an error."""
    model = model.clone()
    try:
        model.set_model_patch(lambda args: args, "double_block")
    except ValueError:
        pass
    return model


def compile_and_go_on(model: Any) -> Any:
    """Compile the transformer by ComfyUI's own helper, and do without where that fails."""
    compiled = model.clone()
    try:
        set_torch_compile_wrapper(model=compiled, backend="eager")
    except ValueError:
        compiled.model_options["compiled"] = False
    return compiled


def compile_or_say_little(model: Any) -> Any:
    """The same with an error that says nothing of the cause, as KJNodes' compile nodes raise it."""
    compiled = model.clone()
    try:
        set_torch_compile_wrapper(model=compiled, backend="eager")
    except Exception:  # noqa: BLE001
        raise RuntimeError("Failed to compile model") from None
    return compiled


def read_and_go_on(model: Any) -> Any:
    """Read weights of the MODEL that came in, of which no copy was made."""
    try:
        model.get_key_patches("diffusion_model.")
    except ValueError:
        pass
    return model.clone()


def at_each_step(model: Any) -> Any:
    """Another attention function for each call of the model, as block sparse attention has it."""

    def attend(function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def wrapper(
        executor: Any, x: Any, t: Any, c_concat: Any, c_crossattn: Any, control: Any, options: Any, **more: Any
    ) -> Any:
        return executor(
            x, t, c_concat, c_crossattn, control, {**options, "optimized_attention_override": attend}, **more
        )

    model = model.clone()
    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "at_each_step", wrapper)
    return model


def in_place(model: Any) -> Any:
    """Another attention function in the MODEL that came in, of which no copy was made."""

    def attend(function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    model.model_options["transformer_options"]["optimized_attention_override"] = attend
    return model


def write_a_block(model: Any) -> Any:
    """A block replaced, straight into the options."""
    model = model.clone()
    replaced = {("single_block", 1): lambda args, extra: extra["original_block"](args)}
    model.model_options["transformer_options"]["patches_replace"] = {"dit": replaced}
    return model


def keep_object(model: Any) -> Any:
    """An object among the options of each call, as caches of key frames are kept."""
    model = model.clone()
    model.model_options["transformer_options"]["frames_kept"] = Projector()
    return model


WAYS = {
    "go on": go_on,
    "compile and go on": compile_and_go_on,
    "compile or say little": compile_or_say_little,
    "read and go on": read_and_go_on,
    "at each step": at_each_step,
    "in place": in_place,
    "keep object": keep_object,
    "write a block": write_a_block,
}


@node("RefusedLater", way=list(WAYS), gives=[io.Model])
def refused_later(model: io.Model, way: str) -> io.NodeOutput:
    """Does what is refused in one of WAYS, each of which a pack was seen to do."""
    return io.NodeOutput(WAYS[way](model))


@node("LoadAsGGUF", gives=[io.Model])
def load_as_gguf(unet_name: str, published: str) -> io.NodeOutput:
    """Makes a MODEL of tensors that it read itself, as loaders of GGUF files do: ComfyUI does not know of what file."""
    path = folder_paths.get_full_path("diffusion_models", unet_name)
    return io.NodeOutput(comfy.sd.load_diffusion_model_state_dict(comfy.utils.load_torch_file(path)))


@node("LoadOnDevice", gives=[io.Model])
def load_on_device(unet_name: str) -> io.NodeOutput:
    """A MODEL for a device of the loader's own, as loaders of ComfyUI-MultiGPU give it; it need not be there."""
    model = comfy.sd.load_diffusion_model(folder_paths.get_full_path("diffusion_models", unet_name))
    model.load_device = torch.device("cuda", 1)
    return io.NodeOutput(model)


@node("PatchInside", gives=[io.Model], schema={"enable_expand": True})
def patch_inside(model: io.Model) -> io.NodeOutput:
    """A node that is a graph of its own: ReachIntoModel, under a number that no user has seen."""
    from comfy_execution.graph_utils import GraphBuilder

    graph = GraphBuilder()
    reach = graph.node("ReachIntoModel", model=model, way="override attention")
    return io.NodeOutput(reach.out(0), expand=graph.finalize())
