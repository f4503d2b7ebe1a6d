"""A stock MODEL that attends as ranks do that exchange nothing.

Owns: how much a model's output depends on attention at all, which a parity test has to know of its weights. Only for
models that hand their `transformer_options` to attention.
"""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io

CATEGORY = "tests"


class AttendInHalves(io.ComfyNode):
    """Each half of the tokens attends to itself alone; attention to other tokens than its own is left as it is."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs, outputs = [io.Model.Input("model")], [io.Model.Output()]
        return io.Schema(node_id="AttendInHalves", category=CATEGORY, inputs=inputs, outputs=outputs)

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
        model = model.clone()
        model.model_options["transformer_options"]["optimized_attention_override"] = attend_in_halves
        return io.NodeOutput(model)


def attend_in_halves(
    function: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: Any = None, **kwargs: Any
) -> Any:
    """ComfyUI's own attention on each half; the tokens are the last dimension but one in each of its layouts.

    LTX's guides have their queries in parts, each with a mask over all keys; other unequal lengths are those of
    attention to a text or another stream.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    if queries != keys and (mask is None or queries > keys):
        return function(q, k, v, heads, mask=mask, **kwargs)
    halves = zip(*(each.tensor_split(2, dim=-2) for each in (q, k, v)), masks_of_halves(mask), strict=True)
    dim = -2 if kwargs.get("skip_output_reshape") else 1
    return torch.cat([function(*half, heads, mask=part, **kwargs) for *half, part in halves], dim=dim)


def masks_of_halves(mask: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The mask of each half of the queries and the same half of the keys; one row may stand for all queries."""
    if mask is None:
        return [None, None]
    rows = [mask, mask] if mask.shape[-2] == 1 else mask.tensor_split(2, dim=-2)
    return [row.tensor_split(2, dim=-1)[half] for half, row in enumerate(rows)]
