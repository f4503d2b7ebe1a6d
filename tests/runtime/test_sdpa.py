"""Which of torch's kernels a rank tries first, by the compute capability that its device pretends to have."""

from types import ModuleType

import pytest
import torch
from torch.nn.attention import SDPBackend

from parallel_runtime.models.hosted.sdpa import NAMES, ORDER, backend_of, put_first

STOCK = ["FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]


def ops(*names: str) -> ModuleType:
    """ComfyUI's module with a list of these; without a list where none is named."""
    module = ModuleType("comfy.ops")
    if names:
        setattr(module, ORDER, [getattr(SDPBackend, name) for name in names])
    return module


def order(module: ModuleType) -> list[str]:
    return [each.name for each in getattr(module, ORDER)]


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_cudnn_comes_first_where_the_table_has_it_and_the_others_keep_their_order(capability: tuple[int, int]) -> None:
    module = ops(*STOCK)
    held = getattr(module, ORDER)
    put_first(module, capability)
    assert order(module) == ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]
    assert getattr(module, ORDER) is held, "ComfyUI's function reads this very list"


@pytest.mark.parametrize("capability", [None, (7, 5), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1)])
def test_nowhere_else(capability: tuple[int, int] | None) -> None:
    module = ops(*STOCK)
    put_first(module, capability)
    assert order(module) == STOCK


def test_a_comfyui_without_a_list_or_without_the_kernel_stays_as_it_is() -> None:
    bare, without = ops(), ops("FLASH_ATTENTION", "MATH")
    for module in (bare, without):
        put_first(module, (9, 0))
    assert not hasattr(bare, ORDER)
    assert order(without) == ["FLASH_ATTENTION", "MATH"]


def test_the_kernel_that_torch_takes_is_named() -> None:
    """Of the CPU's two, by what each takes; and "" for what torch does not say."""
    q = torch.randn(1, 4, 8, 16)
    assert backend_of(ops(), q, q, q, None) == NAMES["FLASH_ATTENTION"]
    assert backend_of(ops("MATH"), q, q, q, None) == NAMES["MATH"]
    assert backend_of(ops(), q, q[:, :, :, :3], q, None) in NAMES.values()
    assert {*NAMES} >= set(STOCK)


def test_a_torch_that_says_nothing_of_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 4, 8, 16)
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda q: 1)  # other arguments
    assert backend_of(ops(), q, q, q, None) == ""
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: 99)  # another number
    assert backend_of(ops(), q, q, q, None) == ""
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    assert backend_of(ops(), q, q, q, None) == ""
