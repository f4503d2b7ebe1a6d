"""Which of torch's kernels a rank tries first, by the compute capability that its device pretends to have."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from parallel_runtime.choices import choice_for
from parallel_runtime.models.hosted import sdpa, stock_attention
from parallel_runtime.models.hosted.attention import AttentionSwitch
from parallel_runtime.models.hosted.sdpa import NAMES, ORDER, backend_of, put_first, try_first
from parallel_runtime.models.hosted.stock_functions import OVERRIDE

WITHOUT = ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]
STOCK = ["FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in ((sdpa, "_FALLBACK", []), (sdpa, "_FAILED", []), (stock_attention, "ATTENDED", set())):
        monkeypatch.setattr(module, name, value)


def ops(*names: str) -> ModuleType:
    """ComfyUI's module with a list of these; without a list where none is named."""
    module = ModuleType("comfy.ops")
    if names:
        setattr(module, ORDER, [getattr(SDPBackend, name) for name in names])
    return module


def order(module: ModuleType) -> list[str]:
    return [each.name for each in getattr(module, ORDER)]


@pytest.mark.parametrize("capability", [None, (8, 9), (9, 0), (12, 1)])
def test_cudnn_comes_first_where_the_table_has_it_and_the_others_keep_their_order(capability: Any) -> None:
    module = ops(*STOCK)
    held = getattr(module, ORDER)
    put_first(module, choice_for(capability))
    moved = ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]
    assert order(module) == (moved if capability == (9, 0) else STOCK)
    assert getattr(module, ORDER) is held, "ComfyUI's function reads this very list"


def test_a_comfyui_without_a_list_or_without_the_kernel_stays_as_it_is() -> None:
    bare, without = ops(), ops("FLASH_ATTENTION", "MATH")
    for module in (bare, without):
        put_first(module, choice_for((9, 0)))
    assert not hasattr(bare, ORDER)
    assert order(without) == ["FLASH_ATTENTION", "MATH"]


def test_the_kernel_that_torch_takes_is_named() -> None:
    """Of the CPU's two, by what each takes; and "" for what torch does not say."""
    q = torch.randn(1, 4, 8, 16)
    assert backend_of(ops(), q, q, q, None) == NAMES["FLASH_ATTENTION"]
    assert backend_of(ops("MATH"), q, q, q, None) == NAMES["MATH"]
    assert backend_of(ops(), q, q[:, :, :, :3], q, None) in NAMES.values()
    assert {*NAMES} >= set(STOCK)


def test_torch_is_told_of_groups_where_keys_have_fewer_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, enable_gqa: told.append(enable_gqa) or 0)
    q = torch.randn(1, 4, 8, 16)
    for k in (q, q[:, :2]):
        backend_of(ops(), q, k, k, None)
    assert told == [False, True]


def test_a_torch_that_says_nothing_of_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 4, 8, 16)
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda q: 1)  # other arguments
    assert backend_of(ops(), q, q, q, None) == ""
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: 99)  # another number
    assert backend_of(ops(), q, q, q, None) == ""
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    assert backend_of(ops(), q, q, q, None) == ""


def test_a_kernel_is_named_of_as_many_heads_as_queries_and_keys_have(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(stock_attention, "backend_of", lambda _, *qkvm: seen.append([each.shape for each in qkvm[:3]]))
    monkeypatch.setitem(sys.modules, "comfy.ops", ops())
    rank = stock_attention.StockAttention(Rank.attention_pytorch, Container)
    q, k = torch.zeros(1, 8, 64), torch.zeros(1, 9, 32)
    by_head = [(1, 4, 8, 16), (1, 2, 9, 16), (1, 2, 9, 16)]
    assert rank._name([q, k, k], 4, None, False) == "pytorch"
    assert rank._name([each.unflatten(2, (-1, 16)) for each in (q, k, k)], 4, None, False) == "pytorch"
    assert rank._name([torch.zeros(shape) for shape in by_head], 4, None, True) == "pytorch"
    assert seen == [by_head] * 3


def test_a_function_that_a_layers_file_names_is_named_where_it_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two layers alike but for that each by its own, and a node's function before both."""

    def attention_comfy_kitchen_int8() -> None: ...

    def override() -> None: ...

    rank, q = Rank(monkeypatch), torch.randn(1, 4, 8, 16)
    asked = {"preferred_attention": SimpleNamespace(function=attention_comfy_kitchen_int8)}
    for options in ({}, {"preferred_attention": SimpleNamespace(function=None)}):
        rank.switch(q, q, q, 4, None, None, True, True, **options)
    plain = set(stock_attention.ATTENDED)
    rank.switch(q, q, q, 4, None, None, True, True, **asked)
    assert stock_attention.ATTENDED - plain == {"comfy_kitchen_int8"} and len(plain) == 1
    rank.switch(q, q, q, 4, None, None, True, True, **asked, transformer_options={OVERRIDE: override})
    assert stock_attention.ATTENDED - plain == {"comfy_kitchen_int8", "override"}


def test_a_kernel_is_named_again_for_other_heads_and_not_for_another_length(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[int] = []
    monkeypatch.setattr(
        stock_attention.StockAttention, "_name", lambda _, qkv, *__: named.append(qkv[1].shape[1]) or "pytorch"
    )
    rank, q = stock_attention.StockAttention(lambda q, *_, **__: q, Container), torch.randn(1, 4, 8, 16)
    for heads, tokens in ((4, 8), (4, 9), (2, 8), (2, 9)):
        k = torch.randn(1, heads, tokens, 16)
        rank(q, k, k, 4, None, None, True, True, {})
    assert named == [4, 2]


class Container:
    """As ComfyUI's: whoever takes the tensor has it alone."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor

    def take(self) -> torch.Tensor:
        tensor, self.tensor = self.tensor, None
        assert tensor is not None
        return tensor


class Rank:
    """A rank whose ComfyUI attends by torch, on a device of that capability whose cuDNN raises `error`, if anything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
        self.ops, self.error, self.calls = ops(*STOCK), None, list[str]()
        monkeypatch.setitem(sys.modules, "comfy.ops", self.ops)
        put_first(self.ops, choice_for(capability))
        self.raises_for = {"CUDNN_ATTENTION"}
        self.switch = AttentionSwitch(self.attention_pytorch, Container)

    def attention_pytorch(self, q: Any, k: Any, v: Any, _: int, mask: Any, *__: Any, **___: Any) -> torch.Tensor:
        q, k, v = (each.take() if isinstance(each, Container) else each for each in (q, k, v))
        self.calls.append(next(name for name in order(self.ops) if mask is None or name != "FLASH_ATTENTION"))
        if self.error is not None and self.calls[-1] in self.raises_for:
            raise self.error
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)

    def attend(self, q: torch.Tensor, *, owned: bool, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.switch(*(Container(q) if owned else q for _ in range(3)), q.shape[1], mask, None, True, True)


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("capability", [(9, 0), (8, 6)])
def test_where_cudnn_raises_comfyuis_order_attends_without_it_and_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, owned: bool, capability: tuple[int, int]
) -> None:
    """Flash attention takes no mask, so cuDNN's is the first that does, whether it was moved or not."""
    rank, q, mask = Rank(monkeypatch, capability), torch.randn(1, 4, 8, 16), torch.zeros(8, 8)
    rank.error = RuntimeError("No execution plans support the graph.\nmore")
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, mask)
    for given in (mask, mask, None):
        assert torch.allclose(rank.attend(q, owned=owned, mask=given), expected)
    assert rank.calls == ["CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "EFFICIENT_ATTENTION", "FLASH_ATTENTION"]
    assert order(rank.ops) == WITHOUT
    assert [record.getMessage() for record in caplog.records] == [
        "cuDNN's attention failed; this worker keeps ComfyUI's order of kernels without cuDNN's: "
        "No execution plans support the graph."
    ]
    assert "pytorch: flash attention (cuDNN's attention failed)" in stock_attention.ATTENDED
    rank.raises_for = set(STOCK)
    with pytest.raises(RuntimeError, match="No execution plans"):
        rank.attend(q, owned=owned, mask=mask)
    assert order(rank.ops) == WITHOUT and len(caplog.records) == 1, "there is no other order"


def test_what_raises_while_a_graph_is_recorded_is_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, recording = Rank(monkeypatch, (8, 6)), [True]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording[0])
    rank.error, q, mask = RuntimeError("due to a previous error"), torch.randn(1, 4, 8, 16), torch.zeros(8, 8)
    with pytest.raises(RuntimeError, match="previous error"):
        rank.attend(q, owned=False, mask=mask)
    assert order(rank.ops) == STOCK and rank.calls == ["CUDNN_ATTENTION"]
    recording[:] = [False]
    rank.attend(q, owned=False, mask=mask)
    assert order(rank.ops) == WITHOUT


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("sizes"), TypeError("a keyword")])
@pytest.mark.parametrize("capability", [(9, 0), (8, 6)])
def test_what_raises_in_any_order_or_is_short_memory_leaves_the_order(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    capability: tuple[int, int],
) -> None:
    rank, q, mask = Rank(monkeypatch, capability), torch.randn(1, 4, 8, 16), torch.zeros(8, 8)
    before = order(rank.ops)
    rank.error, rank.raises_for = error, set(STOCK)
    with pytest.raises(type(error), match=str(error)):
        rank.attend(q, owned=True, mask=mask)
    assert order(rank.ops) == before and not caplog.records
    assert len(rank.calls) == (2 if type(error) is RuntimeError else 1)
    rank.error = None
    rank.attend(q, owned=True, mask=mask)
    assert rank.calls[-1] == "CUDNN_ATTENTION"
    rank.error, rank.raises_for = RuntimeError("No execution plans support the graph."), {"CUDNN_ATTENTION"}
    rank.attend(torch.randn(1, 4, 8, 16), owned=False)
    assert rank.calls[-1] == "FLASH_ATTENTION", "it gives way where it fails by itself"


def test_a_call_like_one_that_ran_is_repeated_where_its_tensors_are_there_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those in containers are not held through every call: it raises, and the next one has the fallback."""
    for owned in (False, True):
        rank, q = Rank(monkeypatch), torch.randn(1, 4, 8, 16)
        rank.attend(q, owned=owned)
        rank.error = RuntimeError("No execution plans support the graph.")
        if owned:
            with pytest.raises(RuntimeError, match="No execution plans"):
                rank.attend(q, owned=True)
        rank.attend(q, owned=owned)
        assert rank.calls == ["CUDNN_ATTENTION", "CUDNN_ATTENTION", "FLASH_ATTENTION"]


def test_a_little_attention_by_cudnn_is_tried_before_any_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.dtype] = []
    raises: list[Exception] = []

    def attend(q: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        tried.append(q.dtype)
        if q.dtype == torch.float16 and raises:
            raise raises[0]
        return q

    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", attend)
    for found, first in (
        ([], "CUDNN_ATTENTION"),
        ([RuntimeError("no cuDNN")], "FLASH_ATTENTION"),
        ([torch.OutOfMemoryError("full")], "CUDNN_ATTENTION"),
    ):
        tried.clear()
        raises[:] = found
        module = ops(*STOCK)
        put_first(module, choice_for((9, 0)))
        try_first(torch.device("cpu"))
        assert order(module)[0] == first
        assert tried == [torch.bfloat16, torch.float16]
    tried.clear()
    put_first(ops(*STOCK), choice_for((8, 6)))
    try_first(torch.device("cpu"))
    sdpa._FALLBACK.clear()
    try_first(torch.device("cpu"))
    for capability in (None, (7, 5), (9, 0)):
        module = ops("CUDNN_ATTENTION", *WITHOUT)  # ComfyUI 0.24's
        put_first(module, choice_for(capability))
        try_first(torch.device("cpu"))
        assert order(module)[0] == "CUDNN_ATTENTION" and sdpa.may_fall_back()
    assert not tried, "nothing was moved"
