"""Attention kernels: parts merged through the log-sum-exp equal the whole; empty input is safe."""

import pytest
import torch

from parallel_runtime.strategies.kernels import attention, attention_with_lse, merge


def make(tokens: int, *, batch: int = 2, heads: int = 3, width: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, tokens, heads, width, generator=torch.Generator().manual_seed(seed)) * 2


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bshd,bthd->bhst", q.double(), k.double()) / q.shape[-1] ** 0.5
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v.double()).float()


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 33), (64, 1), (130, 257)])
def test_every_kernel_agrees_with_the_formula(queries: int, keys: int) -> None:
    q, k, v = make(queries, seed=1), make(keys, seed=2), make(keys, seed=3)
    expected = by_hand(q, k, v)
    torch.testing.assert_close(attention(q, k, v), expected, rtol=1e-5, atol=1e-5)
    out, lse = attention_with_lse(q, k, v)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    scores = torch.einsum("bshd,bthd->bsht", q.double(), k.double()) / q.shape[-1] ** 0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1, keepdim=True).float(), rtol=1e-5, atol=1e-5)
    assert lse.dtype == torch.float32


def test_merged_parts_equal_the_whole_and_a_wrong_log_sum_exp_does_not() -> None:
    q, k, v = make(40, seed=1), make(100, seed=2), make(100, seed=3)
    expected = by_hand(q, k, v)

    def fold(*, zero_lse: bool) -> torch.Tensor:
        out = lse = None
        for start, stop in ((0, 1), (1, 64), (64, 100)):
            part, part_lse = attention_with_lse(q, k[:, start:stop], v[:, start:stop])
            part_lse = torch.zeros_like(part_lse) if zero_lse else part_lse
            out, lse = (part, part_lse) if out is None or lse is None else merge(out, lse, part, part_lse)
        assert out is not None
        return out

    torch.testing.assert_close(fold(zero_lse=False), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(fold(zero_lse=True), expected, rtol=1e-2, atol=1e-2)


def test_merging_keeps_the_log_sum_exp_in_fp32_when_the_parts_are_bf16() -> None:
    q, k, v = (make(90, seed=seed).bfloat16() for seed in (1, 2, 3))
    out, lse = attention_with_lse(q, k[:, :45], v[:, :45])
    part, part_lse = attention_with_lse(q, k[:, 45:], v[:, 45:])
    merged, total = merge(out.float(), lse, part, part_lse)
    assert merged.dtype == total.dtype == torch.float32
    error = (merged - by_hand(q, k, v)).norm() / by_hand(q, k, v).norm()
    one_kernel = (attention(q, k, v).float() - by_hand(q, k, v)).norm() / by_hand(q, k, v).norm()
    assert error <= 1.1 * one_kernel + 1e-3


def test_no_queries_is_no_crash() -> None:
    assert attention(make(0), make(5), make(5)).shape == (2, 0, 3, 64)
