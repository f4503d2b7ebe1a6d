"""A ComfyUI node pack for test hosts only: what no stock node gives, and a count of the model's calls.

Linked into a test host's custom_nodes, never part of the pack; node.py is how a node is written.
Letters: `L` text and image tokens.
"""

from typing import Any

import comfy.clip_vision
import comfy.ldm.flux.redux
import comfy.sd
import node_helpers
import torch
from comfy.patcher_extension import WrappersMP
from comfy_api.latest import ComfyExtension, io

from . import (  # noqa: F401  each adds its nodes
    changing,
    choosing,
    conditions,
    controls,
    holding,
    looking,
    reaching,
    refused,
    rounding,
    setting,
    sounds,
    starting,
    template_parts,
    vaes,
)
from .node import NODES, node

Calls = io.Custom("MODEL_CALLS")


@node("CountModelCalls", gives=[io.Model, Calls], anew=True)
def count_model_calls(model: io.Model) -> io.NodeOutput:
    """Put right before a sampler or guider, it sees what skipping and caching leave over."""
    calls: list[None] = []

    def count(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return executor(*args, **kwargs)

    count.parallel_dit_any_order = True  # a count is the same in any order
    model = model.clone()
    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "count_model_calls", count)
    return io.NodeOutput(model, calls)


@node("ReportModelCalls", shows=True)
def report_model_calls(latent: io.Latent, calls: Calls) -> io.NodeOutput:
    """Reports how often the model was called until `latent` was there."""
    return io.NodeOutput(ui={"model_calls": [len(calls)]})


@node("ReportModelBytes", shows=True)
def report_model_bytes(model: io.Model) -> io.NodeOutput:
    """Reports what ComfyUI's memory manager is told that a MODEL takes."""
    return io.NodeOutput(ui={"model_bytes": [model.model_size()]})


@node("TinyStyle", gives=[io.StyleModel, io.ClipVisionOutput])
def tiny_style(width: int = 64, tokens: int = 29) -> io.NodeOutput:
    """Redux as its loaders give it: ComfyUI's own class, random weights of the text's width, and `tokens` to style."""
    generator = torch.Generator().manual_seed(11)
    redux = comfy.ldm.flux.redux.ReduxImageEncoder(redux_dim=32, txt_in_features=width)
    values = {name: 0.2 * torch.randn(each.shape, generator=generator) for name, each in redux.state_dict().items()}
    redux.load_state_dict(values)
    seen = comfy.clip_vision.Output()
    seen["last_hidden_state"] = torch.randn((1, tokens, 32), generator=generator)
    return io.NodeOutput(comfy.sd.StyleModel(redux), seen)


@node("SetAttentionMask", kind=["halves", "halves as bias", "random bias"], gives=[io.Conditioning])
def set_attention_mask(conditioning: io.Conditioning, kind: str, width: int = 64, height: int = 64) -> io.NodeOutput:
    """Regional attention: image tokens of the left and right halves see only themselves and the text, or are biased."""
    rows, columns = -(-height // 16), -(-width // 16)
    masked = []
    for text, values in conditioning:
        mask = attention_mask(kind, text.shape[1], rows, columns)
        extra = {"attention_mask": mask, "attention_mask_img_shape": (rows, columns)}
        masked += node_helpers.conditioning_set_values([[text, values]], extra)
    return io.NodeOutput(masked)


def attention_mask(kind: str, text: int, rows: int, columns: int) -> torch.Tensor:
    """A mask of (1, L, L), `text` tokens first: bool for "halves", else what is added to the scores."""
    tokens = text + rows * columns
    if kind == "random bias":
        return torch.randn((1, tokens, tokens), generator=torch.Generator().manual_seed(12))
    right = (torch.arange(columns) >= columns // 2).repeat(rows)
    allowed = torch.ones((1, tokens, tokens), dtype=torch.bool)
    allowed[:, text:, text:] = right[:, None] == right[None, :]
    return allowed if kind == "halves" else torch.where(allowed, 0.0, -4.0)


@node("SkipEverySecondCall", gives=[io.Model])
def skip_every_second_call(model: io.Model) -> io.NodeOutput:
    """A step skipper of the kind that wraps the model's function: every second call gives the result before."""
    results: list[torch.Tensor | None] = []

    def skip(apply_model: Any, args: dict[str, Any]) -> torch.Tensor:
        if len(results) % 2:
            results.append(None)
            return results[-2]
        results.append(apply_model(args["input"], args["timestep"], **args["c"]))
        return results[-1]

    model = model.clone()
    model.set_model_unet_function_wrapper(skip)
    return io.NodeOutput(model)


ITEMS = [io.AnyType.Input(f"item_{number}", optional=True) for number in range(5)]


@node("MakeList", schema={"inputs": ITEMS, "outputs": [io.AnyType.Output(is_output_list=True)]})
def make_list(**items: Any) -> io.NodeOutput:
    """A ComfyUI list of what is connected or written, in order; of nothing, an empty one."""
    return io.NodeOutput([items[name] for name in sorted(items)])


@node("EmptyBatch", gives=[io.Latent])
def empty_batch() -> io.NodeOutput:
    """A latent of no images, as a filter may leave it."""
    return io.NodeOutput({"samples": torch.zeros((0, 16, 8, 8))})


class ProbeNodes(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES


async def comfy_entrypoint() -> ProbeNodes:
    return ProbeNodes()
