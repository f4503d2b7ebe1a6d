"""What stands for ComfyUI's attention function in a rank: every mask, scale and layout, containers, heads in chunks."""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from parallel_runtime.models.hosted.attention import AttentionSwitch, install, installed
from parallel_runtime.models.hosted.call import TokenCall
from parallel_runtime.models.hosted.count import OperationCounter, SilentAxis
from parallel_runtime.models.hosted.stock_attention import attend_to_all, split_heads
from parallel_runtime.models.hosted.stock_functions import OVERRIDE, attention_named, overriding
from parallel_runtime.models.specs.words import UNPLANNED, Attention, parse_attention
from parallel_runtime.parallel.attention import SequenceParallelAttention

from .gloo_group import GlooGroup
from .ranks import in_ranks, refused


def shared_attention(group: GlooGroup, queries: Tensor, keys: Tensor, word: Attention) -> TokenCall:
    """A call whose streams are the rows of these, and whose attention is over them."""
    call = TokenCall(group, "Tiny")
    call.introduce("q", queries.shape[2])
    call.introduce("k", keys.shape[2])
    call.attention = word
    return call


@contextmanager
def under_way(call: TokenCall) -> Iterator[AttentionSwitch]:
    """The switch, in the middle of a call."""
    switch = installed()
    switch.call = call
    try:
        yield switch
    finally:
        switch.call = None


def mine(call: TokenCall, stream: str, tensor: Tensor, dim: int = 2) -> Tensor:
    """This rank's rows."""
    return tensor.narrow(dim, call.start(stream), call.streams[stream][call.index])


@in_ranks(3)
def test_attention_is_stocks_for_every_mask_scale_layout_and_group_of_heads(group: GlooGroup) -> None:
    numbers = torch.Generator().manual_seed(5)
    batch, rows, columns, width = 2, 7, 11, 8
    q = torch.randn(batch, 6, rows, width, generator=numbers)
    added = torch.randn(batch, 6, rows, columns, generator=numbers)
    masks = {
        "none": None,
        "4 dims, each head": added,
        "4 dims, bool": added[:, :1] > -1,
        "4 dims, one row": added[:, :1, :1],
        "3 dims": added[:, 0],
        "2 dims": added[0, 0],
    }
    for heads, (name, mask), scale in product((6, 2), masks.items(), (None, 0.5)):
        k, v = (torch.randn(batch, heads, columns, width, generator=numbers) for _ in range(2))
        options = {"scale": scale} if scale else {}
        options |= {"enable_gqa": True} if heads < 6 else {}
        call = shared_attention(group, q, k, parse_attention("q<-k"))
        want = mine(call, "q", installed().kernel.stock(q, k, v, 6, mask, skip_reshape=True, **options), 1)
        with under_way(call) as attention:
            given = mine(call, "q", q), mine(call, "k", k), mine(call, "k", v)
            got = attention(*given, 6, mask=mask, skip_reshape=True, **options)
            torch.testing.assert_close(got, want, msg=f"{heads} heads, mask of {name}, scale {scale}")
            by_head = attention(*given, 6, mask, skip_reshape=True, skip_output_reshape=True, **options)
            torch.testing.assert_close(by_head.transpose(1, 2).flatten(2), want)
            flat = [each.transpose(1, 2).flatten(2) for each in given]
            torch.testing.assert_close(attention(*flat, 6, mask, None, **options), want)


@in_ranks(3)
def test_a_mask_of_this_ranks_queries_or_keys_is_gathered_and_one_of_all_is_not(group: GlooGroup) -> None:
    """One row is for all queries, or of the one query of this rank: with a query more than ranks some have one; with as
    many, all have."""
    numbers = torch.Generator().manual_seed(8)
    stock = installed().kernel.stock
    for queries in (2 * group.parts + 1, group.parts + 1, group.parts):
        q, k = torch.randn(1, 2, queries, 4, generator=numbers), torch.randn(1, 2, 11, 4, generator=numbers)
        mask = torch.randn(1, 1, queries, 11, generator=numbers) * 3
        call = shared_attention(group, q, k, parse_attention("q<-k"))
        parts = mine(call, "q", q), mine(call, "k", k), mine(call, "k", k)
        row, rows = mask[:, :, :1], mine(call, "q", mask)
        with under_way(call) as attention:
            for whole, given in ((mask, rows), (mask, mask), (row, row), (row, mine(call, "k", row, 3))):
                want = mine(call, "q", stock(q, k, k, 2, whole, skip_reshape=True), 1)
                torch.testing.assert_close(attention(*parts, 2, given, skip_reshape=True), want)
            if queries > 2 * group.parts:  # each rank has several
                with refused("Tiny: a mask of", "this rank's keys alone", "use cfg parallel"):
                    attention(*parts, 2, mine(call, "k", rows, 3), skip_reshape=True)


@in_ranks(1)
def test_the_kernel_is_comfyuis_function_with_the_callers_options(group: GlooGroup) -> None:
    q, k = torch.randn(1, 6, 7, 4), torch.randn(1, 2, 7, 4)
    call = shared_attention(group, q, k, parse_attention("q<-k"))
    seen: list[dict[str, Any]] = []

    def stock(q: Tensor, k: Tensor, v: Tensor, heads: int, *arguments: Any, **options: Any) -> Tensor:
        seen.append(options)
        assert arguments[1:] == (torch.float32, True, True), "precision, skip_reshape, skip_output_reshape"
        return installed().kernel.stock(q, k, v, heads, *arguments, **options)

    switch = AttentionSwitch(stock)
    switch.call = call
    said = {"transformer_options": {"a": 1}, "low_precision_attention": False, "option_of_later": 3}
    parts = mine(call, "q", q), mine(call, "k", k), mine(call, "k", k)
    switch(*parts, 6, None, torch.float32, True, enable_gqa=True, **said)
    parts = mine(call, "q", q), mine(call, "k", q), mine(call, "k", q)
    switch(*parts, 6, None, torch.float32, True, **said)
    switch(*parts, 6, None, torch.float32, True, causal=False)
    assert seen == [{**said, "enable_gqa": True}, said, {"causal": False}]
    with refused("Tiny: attention is causal, which no plan says"):
        switch(*parts, 6, None, torch.float32, True, causal=True)


class Container:
    """A tensor that belongs to the function that takes it: the rules of newer ComfyUIs' AttentionTensorContainer."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor

    def take(self) -> Tensor:
        """The tensor, once."""
        assert self.tensor is not None, "taken twice"
        tensor, self.tensor = self.tensor, None
        return tensor


def container_class() -> Any:
    """ComfyUI's own where this one has it."""
    import comfy.ldm.modules.attention as module

    return getattr(module, "AttentionTensorContainer", Container)


@in_ranks(2)
def test_containers_are_taken_where_a_call_is_shared_and_handed_on_where_it_is_not(group: GlooGroup) -> None:
    q, k = torch.randn(1, 6, 7, 4), torch.randn(1, 6, 12, 4)
    call, kind = shared_attention(group, q, k, parse_attention("q<-k")), container_class()
    stock, seen = installed().kernel.stock, []

    def counted(*given: Any, **options: Any) -> Tensor:
        seen.append([isinstance(each, kind) for each in given[:3]])
        return stock(*(each.take() if isinstance(each, kind) else each for each in given[:3]), *given[3:], **options)

    switch = AttentionSwitch(counted, kind)
    parts = mine(call, "q", q), mine(call, "k", k), mine(call, "k", k)
    for word in ("q<-k", "k<-q|q<-k"):  # of alternatives, the lengths that are in the containers choose
        switch.call, call.attention = call, parse_attention(word)
        given = [kind(each) for each in parts]
        want = switch(*parts, 6, skip_reshape=True)
        assert torch.equal(switch(*given, 6, skip_reshape=True), want), word
        assert all(each.tensor is None for each in given), "each was taken"
        with refused("Tiny: attention was given a container whose tensor another call has taken already"):
            switch(*given, 6, skip_reshape=True)
    seen.clear()
    for switch.call, word in ((None, "q<-k"), (call, "local")):
        call.attention = parse_attention(word)
        switch(*(kind(each) for each in (q, q, q)), 6, skip_reshape=True)
    assert seen == [[True] * 3] * 2, seen


@in_ranks(1)
def test_what_came_in_containers_is_freed_before_the_kernel_ends(group: GlooGroup) -> None:
    """Of q, k and v, what this rank sent away is gone when the kernel runs, and what the kernel takes is its alone."""
    found = []

    def stock(*given: Any, **_: Any) -> Tensor:
        found.append([each() is None for each in before])
        tensors = [each.take() for each in given[:3]]
        seen, out = [weakref.ref(each) for each in tensors], tensors[0] + 0
        del tensors
        found.append([each() is None for each in seen])
        return out

    stock.__name__ = "attention_pytorch"  # which computes each head alone, so heads may come in chunks
    for skip_reshape, chunks in product((True, False), (1, 3)):
        ulysses = SilentAxis("ulysses", size=2)
        call = TokenCall(SequenceParallelAttention(ulysses=ulysses, chunks=lambda _, chunks=chunks: chunks), "Tiny")
        call.introduce("q", 14)
        call.attention = parse_attention("q")
        switch = AttentionSwitch(stock, container_class())
        switch.call = call
        given = [torch.randn(1, 6, 7, 4) if skip_reshape else torch.randn(1, 7, 24) for _ in range(3)]
        before = [weakref.ref(each) for each in given]
        given = [switch.kernel.container(each) for each in given]
        found.clear()
        switch(*given, 6, skip_reshape=skip_reshape)
        assert found == [[True] * 3] * 2 * chunks, found


@in_ranks(1)
def test_heads_come_in_chunks_where_the_function_computes_each_alone(group: GlooGroup) -> None:
    """Else, and where a layer or an override names a function that nobody has looked at, all of a rank's at once."""
    called = []

    def named(name: str) -> Callable[..., Tensor]:
        def function(q: Tensor, *_: Any, **__: Any) -> Tensor:
            called.append(name)
            return q

        function.__name__ = name
        return function

    ulysses = SilentAxis("ulysses", size=2)
    call = TokenCall(SequenceParallelAttention(ulysses=ulysses, chunks=lambda _: 3), "Tiny")
    call.introduce("q", 14)
    call.attention = parse_attention("q")
    int8, flash = (SimpleNamespace(function=named(f"attention_{name}")) for name in ("comfy_kitchen_int8", "flash"))
    for options, chunks in (
        ({}, 3),
        ({"preferred_attention": SimpleNamespace(function=None)}, 3),
        ({"preferred_attention": flash}, 3),
        ({"preferred_attention": int8}, 1),
        ({"transformer_options": {"optimized_attention_override": int8.function}}, 1),
    ):
        called.clear()
        switch = AttentionSwitch(named("attention_pytorch"))
        switch.call = call
        q = torch.randn(1, 6, 7, 4)
        switch(q, q, q, 6, skip_reshape=True, **options)
        assert len(called) == chunks, options
    switch.kernel.stock = named("attention_sub_quad")
    called.clear()
    switch(q, q, q, 6, skip_reshape=True)
    assert len(called) == 1


@in_ranks(1)
def test_heads_in_chunks_hold_no_more_at_once_than_all_together(group: GlooGroup) -> None:
    """Two chunks a twelfth more: both are there while the message is. `whole`: what a rank has of q, k and v."""
    most = {}
    for chunks in (1, 2, 3, 5):
        sequence = SequenceParallelAttention(
            ulysses=SilentAxis("ulysses", size=2), chunks=lambda _, chunks=chunks: chunks
        )

        def kernel(qkv: list[Tensor], heads: int, mask: Tensor | None) -> Tensor:
            shape = qkv[0].shape
            qkv.clear()
            return torch.empty(shape)

        with OperationCounter() as counter:
            qkv = [torch.empty(1, 30, 64, 16) for _ in range(3)]
            whole = sum(each.nbytes for each in qkv)
            sequence.attend(kernel, qkv, query_lengths=(64, 64), key_lengths=(64, 64))
        most[chunks] = counter.counts["held_bytes"] / whole
    assert most[1] == most[3] == most[5] == 2 and most[2] <= 2 + 1 / 6, most


@in_ranks(2)
def test_an_attention_function_that_returns_no_tensor_is_named(group: GlooGroup) -> None:
    """As one of a later ComfyUI may, with what it has measured: a failed proof, and no traceback of a reshape."""
    q = torch.randn(1, 2, 7, 4)
    switch = AttentionSwitch(lambda q, *_, **__: (q, None))
    switch.call = shared_attention(group, q, q, parse_attention("q<-k"))
    part, keys = mine(switch.call, "q", q), mine(switch.call, "k", q)
    with pytest.raises(TypeError, match="ComfyUI's attention function returned a tuple instead of a tensor"):
        switch(part, keys, keys, 2, skip_reshape=True)


@in_ranks(2)
def test_attention_that_the_plan_does_not_know_is_refused(group: GlooGroup) -> None:
    q = torch.randn(1, 2, 7, 4)
    call = shared_attention(group, q, q, UNPLANNED)
    with under_way(call) as attention:
        with refused("Tiny: attention in a block, outside of the modules that the plan names"):
            attention(q, q, q, 2, skip_reshape=True)
        call.attention = parse_attention("q<-k")
        for _ in range(2):  # the lengths by the plan are known the second time
            with refused("Tiny: attention over q has 7 queries and 7 keys on this rank", "by the plan"):
                attention(q, q, q, 2, skip_reshape=True)
        for outside in (None, parse_attention("local")):
            call.attention = outside
            want = attention.kernel.stock(q, q, q, 2, skip_reshape=True)
            assert torch.equal(attention(q, q, q, 2, skip_reshape=True), want)


@in_ranks(1)
def test_attention_is_not_replaced_after_a_models_file_was_imported(group: GlooGroup) -> None:
    import comfy.ldm.modules.attention as module

    switch = install()
    assert install() is switch, "once a process"
    late = ModuleType("late_model")
    late.optimized_attention = switch.kernel.stock
    sys.modules["late_model"], module.optimized_attention = late, switch.kernel.stock
    try:
        with pytest.raises(RuntimeError, match="late_model was imported before"):
            install()
    finally:
        module.optimized_attention = switch
        del sys.modules["late_model"]


@in_ranks(3)
def test_an_attention_function_of_comfyuis_is_called_by_its_name(group: GlooGroup) -> None:
    import comfy.ldm.modules.attention as module

    def other(q: Tensor, *given: object, **named: object) -> Tensor:
        return q + 1

    with mock.patch.dict(module.REGISTERED_ATTENTION_FUNCTIONS, {"of the test": other}):
        override = attention_named("of the test")
    q = torch.rand(1, 4, 2, 8)
    options = {"transformer_options": {OVERRIDE: override}}
    stock = installed().kernel
    assert torch.equal(stock(q, q, q, 4, None, None, True, True, options), q + 1)
    assert overriding(options) == "of the test" and not overriding({"transformer_options": {}})
    assert stock.each_head_alone({}) and not stock.each_head_alone(options)
    for config, function in ((None, None), ({"attention": "int8"}, None), ({"attention": "int8"}, other)):
        preferred = {"preferred_attention": SimpleNamespace(config=config, function=function)}
        assert stock.each_head_alone(preferred) is (config is None), "alike on a rank whose card lacks the function"
    with refused("no attention function 'another'"):
        attention_named("another")


@pytest.mark.parametrize("tokens", [3, 0])
def test_heads_lie_apart_of_any_number_of_tokens(tokens: int) -> None:
    for shape in ((2, tokens, 20), (2, tokens, 5, 4)):
        assert split_heads(torch.zeros(shape), 4).shape == (2, 5, tokens, 4)


def test_layers_attend_to_all_tokens_where_their_file_asks_for_a_function_that_leaves_some_out() -> None:
    def attention_comfy_kitchen_sol() -> None: ...
    def attention_comfy_kitchen_int8() -> None: ...

    asked = (partial(attention_comfy_kitchen_sol, tau=0.5), attention_comfy_kitchen_int8, None)
    kind = type("ComfyAttention", (nn.Module,), {})
    module = nn.ModuleList(kind() for _ in asked)
    for each, function in zip(module, asked, strict=True):
        each.function = function
    attend_to_all(module)
    assert [each.function for each in module] == [None, attention_comfy_kitchen_int8, None]
