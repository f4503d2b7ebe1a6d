"""What tests allow two exact results to differ by is this machine's, and tells a mistake from rounding."""

import pytest
import torch
from rounding import MARGIN, ROUNDING, by_products, chain, fused, kernels_differ, unfused
from torch import Tensor

LEAST_MISTAKE = 1e-3  # the controls of tests move a result by more
EPSILON = torch.finfo(torch.float32).eps


def test_what_is_allowed_is_more_than_a_last_digit_and_far_from_a_mistake() -> None:
    """Fails on a machine whose fp32 is coarser than fp32, whatever made it so: no test could tell mistakes there."""
    assert EPSILON < kernels_differ() == ROUNDING / MARGIN < 10 * ROUNDING < LEAST_MISTAKE


def without_a_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fused(q, k[..., 1:, :], v[..., 1:, :])


def by_another_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return by_products(1.001 * q, k, v)


@pytest.mark.parametrize("wrong", [without_a_key, by_another_scale])
def test_no_small_mistake_of_attention_is_within_it(wrong) -> None:
    assert kernels_differ((unfused, wrong)) > 10 * ROUNDING


def test_it_leaves_the_number_of_threads_whatever_a_kernel_does() -> None:
    before = torch.get_num_threads()

    def raises(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        kernels_differ((fused, raises))
    assert torch.get_num_threads() == before
    assert torch.equal(chain(fused), chain(fused))
