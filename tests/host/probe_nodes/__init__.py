"""A ComfyUI node pack for test hosts only: what no stock node gives, and a count of the model's calls.

Owns: a style model of tiny widths, attention masks and skipped steps as popular packs make them, and two nodes that
count. Does not own: text encoders (tiny_text_encoders), nodes that reach into a model (reaching.py, refused.py), what
the pack would choose by itself (choosing.py), runs that take turns (taking_turns.py), what rounds (rounding.py),
what encoders would give (conditions.py, sounds.py), VAEs (vaes.py), where a run stays for a while (holding.py). Linked
into a test host's custom_nodes, never part of the pack.
Letters: `L` text and image tokens.
"""

from __future__ import annotations

from typing import Any

import comfy.clip_vision
import comfy.ldm.flux.redux
import comfy.sd
import node_helpers
import torch
from comfy.patcher_extension import WrappersMP
from comfy_api.latest import ComfyExtension, io

from . import starting  # noqa: F401  how ranks start, in a test host
from .changing import ChangeModules
from .choosing import LikeKnownGpus
from .conditions import (
    EmptySplatLatent,
    HiDreamO1Prompt,
    MoreText,
    ObjectInConditioning,
    RandomConditioning,
    RandomPictures,
    RandomTextEncoder,
    RandomVAE,
    RandomVisionOutput,
    TextOfTokens,
)
from .controls import RandomInpaintingControlNet, RandomModelPatch
from .holding import HoldSteps
from .looking import LookAtSteps, ReportLooks, SampleByPack
from .reaching import ReachIntoModel, SwitchLoopWrong, SwitchOffExchange
from .refused import LoadAsGGUF, PatchInside, RefusedInputs, RefusedLater
from .rounding import StockAttention
from .sounds import RandomSound, RandomSoundVAE
from .taking_turns import SampleInTurn
from .vaes import CompareImages, RandomLatent, SmallVAE, TileHere

Calls = io.Custom("MODEL_CALLS")
CATEGORY = "tests"


class CountModelCalls(io.ComfyNode):
    """Put right before a sampler or guider, it sees what skipping and caching leave over."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs, outputs = [io.Model.Input("model")], [io.Model.Output(), Calls.Output()]
        return io.Schema(node_id="CountModelCalls", category=CATEGORY, inputs=inputs, outputs=outputs)

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> float:
        """Never equal to itself: what samples after it always runs, even if the graph was just queued."""
        return float("nan")

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
        calls: list[None] = []

        def count(executor: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(None)
            return executor(*args, **kwargs)

        count.parallel_dit_any_order = True  # a count is the same in any order
        model = model.clone()
        model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "count_model_calls", count)
        return io.NodeOutput(model, calls)


class ReportModelCalls(io.ComfyNode):
    """Reports how often the model was called until `latent` was there."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Latent.Input("latent"), Calls.Input("calls")]
        return io.Schema(node_id="ReportModelCalls", category=CATEGORY, inputs=inputs, is_output_node=True)

    @classmethod
    def execute(cls, latent: dict[str, Any], calls: list[None]) -> io.NodeOutput:
        return io.NodeOutput(ui={"model_calls": [len(calls)]})


class ReportModelBytes(io.ComfyNode):
    """Reports what ComfyUI's memory manager is told that a MODEL takes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Model.Input("model")]
        return io.Schema(node_id="ReportModelBytes", category=CATEGORY, inputs=inputs, is_output_node=True)

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
        return io.NodeOutput(ui={"model_bytes": [model.model_size()]})


class TinyStyle(io.ComfyNode):
    """Redux as its loaders give it: ComfyUI's own class, random weights of the text's width, and `tokens` to style."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Int.Input("width", default=64), io.Int.Input("tokens", default=29)]
        outputs = [io.StyleModel.Output(), io.ClipVisionOutput.Output()]
        return io.Schema(node_id="TinyStyle", category=CATEGORY, inputs=inputs, outputs=outputs)

    @classmethod
    def execute(cls, width: int, tokens: int) -> io.NodeOutput:
        generator = torch.Generator().manual_seed(11)
        redux = comfy.ldm.flux.redux.ReduxImageEncoder(redux_dim=32, txt_in_features=width)
        values = {name: 0.2 * torch.randn(each.shape, generator=generator) for name, each in redux.state_dict().items()}
        redux.load_state_dict(values)
        seen = comfy.clip_vision.Output()
        seen["last_hidden_state"] = torch.randn((1, tokens, 32), generator=generator)
        return io.NodeOutput(comfy.sd.StyleModel(redux), seen)


class SetAttentionMask(io.ComfyNode):
    """Regional attention: image tokens of the left and right halves see only themselves and the text, or are biased."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            io.Conditioning.Input("conditioning"),
            io.Combo.Input("kind", options=["halves", "halves as bias", "random bias"]),
            io.Int.Input("width", default=64, tooltip="Pixels of the picture the mask is made for."),
            io.Int.Input("height", default=64),
        ]
        outputs = [io.Conditioning.Output()]
        return io.Schema(node_id="SetAttentionMask", category=CATEGORY, inputs=inputs, outputs=outputs)

    @classmethod
    def execute(cls, conditioning: list[Any], kind: str, width: int, height: int) -> io.NodeOutput:
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


class SkipEverySecondCall(io.ComfyNode):
    """A step skipper of the kind that wraps the model's function: every second call gives the result before."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs, outputs = [io.Model.Input("model")], [io.Model.Output()]
        return io.Schema(node_id="SkipEverySecondCall", category=CATEGORY, inputs=inputs, outputs=outputs)

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
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


class MakeList(io.ComfyNode):
    """A ComfyUI list of what is connected or written, in order; of nothing, an empty one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.AnyType.Input(f"item_{number}", optional=True) for number in range(5)]
        outputs = [io.AnyType.Output(is_output_list=True)]
        return io.Schema(node_id="MakeList", category=CATEGORY, inputs=inputs, outputs=outputs)

    @classmethod
    def execute(cls, **items: Any) -> io.NodeOutput:
        return io.NodeOutput([items[name] for name in sorted(items)])


class EmptyBatch(io.ComfyNode):
    """A latent of no images, as a filter may leave it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        outputs = [io.Latent.Output()]
        return io.Schema(node_id="EmptyBatch", category=CATEGORY, inputs=[], outputs=outputs)

    @classmethod
    def execute(cls) -> io.NodeOutput:
        return io.NodeOutput({"samples": torch.zeros((0, 16, 8, 8))})


class ProbeNodes(ComfyExtension):
    """The extension ComfyUI asks for its nodes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        nodes = [CountModelCalls, ReportModelCalls, ReportModelBytes, TinyStyle, SetAttentionMask, SkipEverySecondCall]
        nodes += [MakeList, EmptyBatch, LikeKnownGpus, ReachIntoModel]
        nodes += [RandomConditioning, MoreText, RandomPictures, RandomVisionOutput, RandomVAE]
        nodes += [RandomTextEncoder, RandomSound, RandomSoundVAE, SwitchLoopWrong, SwitchOffExchange]
        nodes += [LookAtSteps, ReportLooks, SampleByPack]
        nodes += [TextOfTokens, RandomInpaintingControlNet, HoldSteps, ObjectInConditioning]
        nodes += [RandomModelPatch, HiDreamO1Prompt, EmptySplatLatent, RefusedInputs, RefusedLater, PatchInside]
        nodes += [ChangeModules, LoadAsGGUF]
        return [*nodes, SampleInTurn, StockAttention, SmallVAE, RandomLatent, CompareImages, TileHere]


async def comfy_entrypoint() -> ProbeNodes:
    """ComfyUI's entry into the pack."""
    return ProbeNodes()
