"""Attention kernels: parts merged through the log-sum-exp equal the whole; empty input is safe."""

import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from rounding import ROUNDING

from parallel_runtime.parallel import kernels
from parallel_runtime.parallel.kernels import Kernel, attention, attention_with_lse, choose_kernel, merge
from parallel_runtime.proof import relative_error

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TURING, AMPERE, ADA, HOPPER, BLACKWELL, RTX_BLACKWELL = (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)
FUSED = (Kernel.FLASH, Kernel.CUDNN)


def make(tokens: int, *, batch: int = 2, heads: int = 3, width: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, tokens, heads, width, generator=torch.Generator().manual_seed(seed)) * 2


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bshd,bthd->bhst", q.double(), k.double()) / q.shape[-1] ** 0.5
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v.double()).float()


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 33), (64, 1), (130, 257)])
def test_every_kernel_agrees_with_the_formula(queries: int, keys: int) -> None:
    q, k, v = make(queries, seed=1), make(keys, seed=2), make(keys, seed=3)
    expected = by_hand(q, k, v)
    assert relative_error(attention(q, k, v), expected) <= ROUNDING
    out, lse = attention_with_lse(q, k, v)
    assert relative_error(out, expected) <= ROUNDING
    scores = torch.einsum("bshd,bthd->bsht", q.double(), k.double()) / q.shape[-1] ** 0.5
    assert relative_error(lse, scores.logsumexp(-1, keepdim=True).float()) <= ROUNDING
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

    assert relative_error(fold(zero_lse=False), expected) <= ROUNDING
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
    q = make(0)
    assert attention(q, make(5), make(5)) is q


@pytest.mark.parametrize(
    ("capability", "dtype", "kernel"),
    [
        (None, BF16, Kernel.CPU),
        (None, FP32, Kernel.CPU),
        (TURING, FP16, Kernel.EFFICIENT),  # "FlashAttention only supports Ampere GPUs or newer."
        (TURING, FP32, Kernel.EFFICIENT),
        (TURING, BF16, Kernel.EFFICIENT_FP32),
        ((7, 0), FP16, Kernel.EFFICIENT),
        *((capability, FP16, Kernel.FLASH) for capability in (AMPERE, (8, 6), ADA, RTX_BLACKWELL)),
        *((capability, BF16, Kernel.FLASH) for capability in (AMPERE, (8, 6), ADA, RTX_BLACKWELL)),
        *((capability, dtype, Kernel.CUDNN) for capability in (HOPPER, BLACKWELL) for dtype in (FP16, BF16)),
        *((capability, FP32, Kernel.EFFICIENT) for capability in (AMPERE, (8, 6), ADA, HOPPER, BLACKWELL)),
    ],
)
def test_the_kernel_with_a_log_sum_exp_is_one_that_the_device_has(
    capability: tuple[int, int] | None, dtype: torch.dtype, kernel: Kernel
) -> None:
    def chosen(*, masked: bool = False, head_dim: int = 128) -> Kernel:
        return choose_kernel(dtype, capability=capability, with_lse=True, masked=masked, head_dim=head_dim)

    assert chosen() is kernel
    assert chosen(masked=True) is (Kernel.EFFICIENT if kernel in FUSED else kernel), "flash takes no mask"
    assert chosen(head_dim=264) is (Kernel.EFFICIENT if kernel in FUSED else kernel), "nor so wide a head"
    assert chosen(head_dim=256) is (Kernel.FLASH if kernel in FUSED else kernel), (
        "the widest that flash attention takes"
    )
    with mock.patch.object(torch.version, "hip", "6.4"):
        assert chosen() is (Kernel.FLASH if kernel is Kernel.CUDNN else kernel), "AMD's 9.0 is no Hopper"
    assert chosen(head_dim=192) is (Kernel.FLASH if kernel in FUSED else kernel), "cuDNN's takes 128 everywhere"
    assert chosen(head_dim=100) is (Kernel.CPU if capability is None else Kernel.FORMULA), "kernels do not pad heads"


@pytest.mark.parametrize("capability", [None, TURING, AMPERE, HOPPER])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_without_a_log_sum_exp_torch_chooses_but_for_bf16_before_ampere(
    capability: tuple[int, int] | None, dtype: torch.dtype
) -> None:
    emulated = capability == TURING and dtype == BF16
    kernel = choose_kernel(dtype, capability=capability, with_lse=False, masked=True, head_dim=128)
    assert kernel is (Kernel.EFFICIENT_FP32 if emulated else Kernel.DISPATCHED)


def test_the_formula_agrees_with_the_kernel_of_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make(33, width=36, seed=1), make(70, width=36, seed=2), make(70, width=36, seed=3)
    mask = kernels.additive_mask(torch.rand(2, 33, 70, generator=torch.Generator().manual_seed(4)) > 0.3, FP32)
    for given in (None, mask):
        expected = attention_with_lse(q, k, v, mask=given)
        with monkeypatch.context() as patched:
            patched.setattr(kernels, "choose_kernel", lambda *_, **__: Kernel.FORMULA)
            for found, wanted in zip(attention_with_lse(q, k, v, mask=given), expected, strict=True):
                assert relative_error(found, wanted) <= ROUNDING
            if given is None:
                assert relative_error(attention(q, k, v), expected[0]) <= ROUNDING


class PretendHopper:
    """Attention with the log-sum-exp as on a Hopper, whose kernels are made up of the exact one for the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.called: list[Kernel] = []
        self.raises: dict[Kernel, Exception] = {}
        chosen = kernels.choose_kernel
        monkeypatch.setattr(kernels, "_FAILED", set())
        monkeypatch.setattr(kernels, "ATTENDED", set())
        monkeypatch.setattr(
            kernels, "choose_kernel", lambda dtype, **given: chosen(BF16, **given | {"capability": HOPPER})
        )
        monkeypatch.setattr(
            kernels, "_WITH_LSE", {each: self.kernel(each) for each in kernels._WITH_LSE} | {Kernel.CPU: kernels._cpu}
        )

    def kernel(self, each: Kernel):
        def run(q, k, v, mask):
            self.called.append(each)
            if each in self.raises:
                raise self.raises[each]
            return kernels._cpu(q, k, v, mask)

        return run


@pytest.mark.parametrize(
    "error",
    [RuntimeError("No available kernel.\nmore"), TypeError("6 arguments"), AttributeError("no such operator")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("after_it_ran", [False, True])
def test_a_kernel_that_raises_gives_way_says_so_once_and_is_not_called_again_for_such_heads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, after_it_ran: bool
) -> None:
    device = PretendHopper(monkeypatch)
    attention_with_lse(make(9, width=32), make(9, width=32), make(9, width=32))
    q, k, v = make(33, seed=1), make(70, seed=2), make(70, seed=3)
    if after_it_ran:
        attention_with_lse(q, k, v)
    device.raises[Kernel.CUDNN] = error
    device.called.clear()
    for _ in range(2):
        assert relative_error(attention_with_lse(q, k, v)[0], by_hand(q, k, v)) <= ROUNDING
    assert device.called == [Kernel.CUDNN, Kernel.FLASH, Kernel.FLASH]
    assert [record.getMessage() for record in caplog.records] == [
        f"cuDNN's attention failed and is not used again for heads of {q.shape[-1]} in torch.float32: "
        f"{str(error).splitlines()[0]}"
    ]
    del device.raises[Kernel.CUDNN]
    attention_with_lse(make(9, width=32), make(9, width=32), make(9, width=32))
    assert device.called[3:] == [Kernel.CUDNN], "heads of another size have it still"
    assert "flash attention" in kernels.ATTENDED


def test_memory_that_is_short_is_no_reason_for_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    device = PretendHopper(monkeypatch)
    q = make(9)
    device.raises[Kernel.CUDNN] = torch.OutOfMemoryError("full")
    with pytest.raises(torch.OutOfMemoryError):
        attention_with_lse(q, q, q)
    del device.raises[Kernel.CUDNN]
    attention_with_lse(q, q, q)
    assert set(device.called) == {Kernel.CUDNN}


@pytest.mark.parametrize("kernel", [*FUSED, Kernel.EFFICIENT, Kernel.EFFICIENT_FP32], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("masked", [False, True])
def test_outputs_and_log_sum_exps_of_a_gpus_kernels_are_of_one_shape(kernel: Kernel, masked: bool) -> None:
    """Operators pad rows, or return (B, H, S, 1): torch's own functions of the shapes say so."""
    q, k, v = (torch.empty(2, 3, tokens, 64, dtype=BF16, device="meta") for tokens in (5, 37, 37))
    mask = torch.empty(1, 5, 37, dtype=BF16, device="meta") if masked else None
    if masked and kernel in FUSED:
        with pytest.raises(ValueError, match="mask; choose_kernel never gives it one"):
            kernels._WITH_LSE[kernel](q, k, v, mask)
        return
    out, lse = kernels._WITH_LSE[kernel](q, k, v, mask)
    assert (out.shape, lse.shape, out.dtype, lse.dtype) == ((2, 3, 5, 64), (2, 3, 5), BF16, FP32)


@pytest.mark.parametrize(("keys", "row"), [(32, 32), (33, 40), (39, 40)])
def test_a_bias_has_a_mask_for_every_head_in_rows_that_start_at_multiples_of_16_bytes(keys: int, row: int) -> None:
    for mask in (torch.rand(1, 5, keys), torch.rand(2, 5, keys)):
        bias = kernels._aligned_bias(mask, torch.empty(2, 3, 5, 8))
        assert torch.equal(bias, mask[:, None].expand(2, 3, 5, keys)) and bias.stride(2) == row


def test_a_kernel_of_no_choice_that_raises_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    device, q = PretendHopper(monkeypatch), make(9)
    device.raises = dict.fromkeys(
        (Kernel.CUDNN, Kernel.FLASH, Kernel.EFFICIENT, Kernel.FORMULA), RuntimeError("broken")
    )
    with pytest.raises(RuntimeError, match="broken"):
        attention_with_lse(q, q, q)
    assert device.called == [Kernel.CUDNN, Kernel.FLASH, Kernel.EFFICIENT, Kernel.FORMULA]


def test_the_efficient_kernel_has_a_mask_for_each_row_and_head_and_its_padding_is_cut(monkeypatch) -> None:
    masks = []

    def kernel(q: torch.Tensor, _k: object, _v: object, bias: torch.Tensor, _lse: bool) -> tuple[torch.Tensor, ...]:
        masks.append(tuple(bias.shape))
        return q, torch.zeros(*q.shape[:2], 32)

    monkeypatch.setattr(kernels, "aten", SimpleNamespace(_scaled_dot_product_efficient_attention=kernel))
    q, keys = torch.ones(2, 3, 5, 8), torch.ones(2, 3, 7, 8)
    assert kernels._efficient(q, keys, keys, torch.zeros(1, 5, 7))[1].shape == (2, 3, 5)
    assert masks == [(2, 3, 5, 7)]


@pytest.mark.parametrize(("times", "base"), [(1.0, 1.0), (1 / math.log(2), math.log(2))])
def test_a_log_sum_exp_to_base_2_of_amds_kernels_is_made_one_to_base_e(
    times: float, base: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = make(9, seed=1), make(21, seed=2), make(21, seed=3)
    wanted = attention_with_lse(q, k, v)
    calls = list[int]()

    def amds(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(given[1].shape[2])
        out, lse = kernels._cpu(*given)
        return out, lse * times

    monkeypatch.setitem(kernels._WITH_LSE, Kernel.CPU, amds)
    assert attention_with_lse(q, k, v)[1].equal(wanted[1] * times), "of other makers it is not looked at"
    assert calls == [21]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    kernels.log_base.cache_clear()
    for _ in range(2):
        out, lse = attention_with_lse(q, k, v)
        assert out.equal(wanted[0]) and relative_error(lse, wanted[1]) <= ROUNDING
    assert calls == [21, 21, 1, 21] and kernels.log_base(Kernel.CPU, FP32, q.device) == base
    kernels.log_base.cache_clear()


def test_a_kernel_of_amds_with_another_log_sum_exp_gives_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    q, k, v = make(9, seed=1), make(21, seed=2), make(21, seed=3)
    monkeypatch.setattr(kernels, "_FAILED", set())
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(kernels, "_kernel_for", lambda *_, **__: Kernel.FORMULA if kernels._FAILED else Kernel.FLASH)
    monkeypatch.setitem(kernels._WITH_LSE, Kernel.FLASH, lambda *given: (kernels._cpu(*given)[0], given[0][..., 0] * 3))
    kernels.log_base.cache_clear()
    out, lse = attention_with_lse(q, k, v)
    assert relative_error(out, by_hand(q, k, v)) <= ROUNDING and lse.shape == (2, 9, 3, 1)
    assert "the log-sum-exp of one key is 3, and has to be 8" in caplog.text
    assert kernels._FAILED == {(Kernel.FLASH, FP32, 64)}
    kernels.log_base.cache_clear()
