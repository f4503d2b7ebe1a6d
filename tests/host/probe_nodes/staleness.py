"""Stock ComfyUI's Flux with keys of the step before, as PipeFusion attends: what a pipeline's picture must be.

Owns: which tokens go through together, and the keys and values of the rest. Everything else is ComfyUI's own model,
called once for each patch. Shares no code with the pack.
Letters: `B` batch, `H` heads, `L` text and image tokens, `D` head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP
from comfy_api.latest import io

CATEGORY = "tests"


class UseOldKeys(io.ComfyNode):
    """A stock MODEL of one conditioning whose calls, but the first `warm_calls`, go patch by patch."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Model.Input("model"), io.Int.Input("patches", min=2), io.Int.Input("warm_calls", min=1)]
        return io.Schema(node_id="UseOldKeys", category=CATEGORY, inputs=inputs, outputs=[io.Model.Output()])

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> float:
        """Never equal to itself: each sampling run begins with no keys."""
        return float("nan")

    @classmethod
    def execute(cls, model: Any, patches: int, warm_calls: int) -> io.NodeOutput:
        keys, calls = OldKeys(), []

        def call(executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            flux = executor.class_obj
            calls.append(flux)
            flux.forward_orig = keys.through(flux.forward_orig, patches if len(calls) > warm_calls else 1)
            try:
                return executor(*args, **kwargs)
            finally:
                del flux.forward_orig  # the class has it still

        model = model.clone()
        model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "use_old_keys", call)
        return io.NodeOutput(model)


class OldKeys:
    """Each block's keys and values (B, H, L, D) of all tokens, as they were when their patch last went through."""

    def __init__(self) -> None:
        self._held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def through(self, model: Callable[..., torch.Tensor], patches: int) -> Callable[..., torch.Tensor]:
        """`model`, which takes tokens of image and text, as a function that calls it once for each patch."""

        def by_patch(
            img: torch.Tensor,
            img_ids: torch.Tensor,
            txt: torch.Tensor,
            txt_ids: torch.Tensor,
            *args: Any,
            transformer_options: dict[str, Any],
            **kwargs: Any,
        ) -> torch.Tensor:
            outs, text, image = [], txt.shape[1], img.shape[1]
            # of each stream a patch has a run; the picture's longer ones come last, the text's first
            rows = zip(torch.arange(text).tensor_split(patches), runs(image, patches), strict=True)
            for of_text, of_image in rows:
                places = torch.cat((of_text, text + of_image))
                attend = self._attend(places, text + image)
                tokens = img[:, of_image], img_ids[:, of_image], txt[:, of_text], txt_ids[:, of_text]
                options = {**transformer_options, "optimized_attention_override": attend}
                outs.append(model(*tokens, *args, transformer_options=options, **kwargs))
            return torch.cat(outs, 1)

        return by_patch

    def _attend(self, places: torch.Tensor, tokens: int) -> Callable[..., torch.Tensor]:
        """Attention of the tokens at `places` to all; the blocks ask one after another."""
        block = iter(range(1000))

        def attend(
            kernel: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, *args: Any, **kwargs: Any
        ) -> torch.Tensor:
            number = next(block)
            if number == len(self._held):
                whole = (*k.shape[:2], tokens, k.shape[3])
                self._held.append((k.new_full(whole, torch.nan), v.new_full(whole, torch.nan)))
            keys, values = self._held[number]
            keys[:, :, places], values[:, :, places] = k, v
            return kernel(q, keys, values, heads, *args, **kwargs)

        return attend


def runs(total: int, patches: int) -> list[torch.Tensor]:
    """The places of so many tokens by patch, longer runs last."""
    lengths = [len(run) for run in torch.arange(total).tensor_split(patches)]
    return list(torch.arange(total).split(lengths[::-1]))
