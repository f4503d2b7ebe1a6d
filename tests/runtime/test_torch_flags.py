"""torch's switches for fp32: all digits inside, and after it what was before, by whichever name it was set."""

from collections.abc import Callable, Iterator

import pytest
import torch

from parallel_runtime.torch_flags import exact_fp32, read_flags, set_flags

FP32 = ("allow_tf32", "fp32_precision", "float32_matmul_precision")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = read_flags()
    yield
    set_flags(before)


def by_old_name() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def by_precision() -> None:
    torch.set_float32_matmul_precision("high")


def by_medium() -> None:
    torch.set_float32_matmul_precision("medium")


def by_both_names() -> None:
    """Products exact, by the newer name, after TF32 by the older."""
    torch.set_float32_matmul_precision("high")
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # torch 2.9
        torch.backends.cuda.matmul.fp32_precision = "ieee"


def by_none() -> None:
    """torch's default: convolutions alone."""


@pytest.mark.parametrize("way", [by_none, by_old_name, by_precision, by_medium, by_both_names])
def test_products_of_fp32_are_exact_inside_and_as_they_were_outside(way: Callable[[], None]) -> None:
    way()
    before = read_flags()
    assert torch.backends.cudnn.allow_tf32, "the default has changed, and this shows nothing"
    with pytest.raises(KeyError), exact_fp32():
        inside = {name: value for name, value in read_flags().items() if name.endswith(FP32)}
        assert set(inside.values()) <= {False, "highest", "ieee", "none"} and len(inside) >= 3, inside
        assert not (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)
        raise KeyError
    assert read_flags() == before


@pytest.mark.parametrize("way", [by_none, by_old_name, by_precision, by_medium, by_both_names])
def test_another_process_has_what_was_set_by_either_name(way: Callable[[], None]) -> None:
    torch.set_float32_matmul_precision("highest")
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # torch 2.9
        torch.backends.cuda.matmul.fp32_precision = "none"  # as it is before anybody sets one
    others = read_flags()
    way()
    wanted = read_flags()
    set_flags(others)
    assert read_flags() == others
    set_flags(wanted)
    assert read_flags() == wanted
