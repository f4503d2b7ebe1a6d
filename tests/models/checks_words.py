"""More of what every rank checks: words of plans that ask a module for one of its attributes."""

from __future__ import annotations

from dataclasses import replace

import torch

from parallel_runtime.models.hosted.attention import installed
from parallel_runtime.models.hosted.hooks import SharedModel
from parallel_runtime.models.specs.words import UNPLANNED, parse_attention

from .checks import check, fresh, mine, number_of_hooks, refused, shared_attention, under_way
from .gloo_group import GlooGroup


@check
def a_model_in_which_an_attribute_is_set_that_a_plan_excludes_is_refused_with_both_names(group: GlooGroup) -> None:
    model, plan, _ = fresh("Stable Audio 1")
    windowed = {"transformer.layers": {"ff": "x within width"}}
    for wrong in ({"unless": {"transformer": "width"}}, {"attention": windowed}):
        with refused("AudioDiffusionTransformer", "no attribute 'width'", "use a ComfyUI that the plan was made for"):
            SharedModel(model, replace(plan, **wrong), group)
    model.transformer.layers[1].self_attn.feat_scale = True
    with refused("transformer.layers.1.self_attn has feat_scale", "use cfg parallel"):
        SharedModel(model, plan, group)
    assert number_of_hooks(model) == 0


@check
def a_window_of_this_ranks_tokens_is_that_of_all(group: GlooGroup) -> None:
    x = torch.randn(1, 6, 11, 4, generator=torch.Generator().manual_seed(6))
    at, stock = torch.arange(11), installed().kernel.stock
    for window in (0, 2, 5, 99):
        call = shared_attention(group, x, x, UNPLANNED)
        call.attention = replace(parse_attention("k within width"), window=window)
        far = torch.zeros(11, 11).masked_fill((at[:, None] - at).abs() > window, torch.finfo(x.dtype).min)
        want = mine(call, "k", stock(x, x, x, 6, far, skip_reshape=True), 1)
        part = mine(call, "k", x)
        own = far[: part.shape[2], : part.shape[2]]  # what a module makes of its own tokens
        with under_way(call) as attention:
            got = attention(part, part, part, 6, own[None, None], skip_reshape=True)
        torch.testing.assert_close(got, want, msg=f"{window} tokens")
