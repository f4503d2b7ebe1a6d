"""Kernels of packages by name: the choice, the refusals, the merging, with exact kernels behind yunchang's call."""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rounding import ROUNDING

from parallel_runtime.models.hosted.attention import AttentionSwitch, install
from parallel_runtime.parallel import named_kernels
from parallel_runtime.parallel.attention import SequenceParallelAttention
from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.parallel.kernels import attention_with_lse
from parallel_runtime.parallel.named_kernels import NAMED, attend_heads, attend_with_lse, missing
from parallel_runtime.parallel.ring import RingPass
from parallel_runtime.proof import relative_error

NAMES = list(NAMED)


def tensors(*shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(*shape, generator=generator) * 2 for _ in range(3)]


class Packages:
    """yunchang, and the packages of all kernels, made up: each call is noted, and attends exactly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.answer: Callable[[torch.Tensor, torch.Tensor], object] = lambda out, lse: (out, lse)
        self.monkeypatch = monkeypatch
        self.modules = {name: self.module(name) for name in ("yunchang", *(each.package for each in NAMED.values()))}
        kernels = self.modules["yunchang.kernels"] = self.module("yunchang.kernels")
        kernels.AttnType = SimpleNamespace(**{each.member: each.member for each in NAMED.values()})
        kernels.select_flash_attn_impl = self.select
        for attribute in ("_FAILED", "ATTENDED"):
            monkeypatch.setattr(named_kernels, attribute, set())
        self.versions: dict[str, str | None] = {}  # by package, None where the metadata lack it
        monkeypatch.setattr(named_kernels, "version", self.version)
        named_kernels._function.cache_clear()

    def module(self, name: str) -> ModuleType:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        self.monkeypatch.setitem(sys.modules, name, module)
        return module

    def version(self, package: str) -> str | None:
        if package not in self.versions:
            raise PackageNotFoundError(package)
        return self.versions[package]

    def lack(self, name: str) -> None:
        self.monkeypatch.delitem(sys.modules, name)

    def select(self, member: str, stage: str) -> Callable[..., object]:
        assert stage == "fwd-only"

        def flash(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax):
            assert (dropout_p, causal, window_size) == (0.0, False, (-1, -1))
            assert member != "FLASHINFER" or len(q) == 1, "it takes one image a call"
            return self.attend(member, q, k, v, softmax_scale)

        def sage(q, k, v, is_causal, sm_scale):
            assert not is_causal
            return self.attend(member, q, k, v, sm_scale)

        return sage if member == "SAGE_AUTO" else flash

    def attend(self, member: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> object:
        """As theirs: the log-sum-exp is (B, H, S)."""
        self.calls.append(member)
        assert q.shape[2:] == k.shape[2:], "each head has its own keys"
        out, lse = attention_with_lse(q * (scale * q.shape[-1] ** 0.5), k, v)
        return self.answer(out, lse.squeeze(-1).transpose(1, 2))


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Packages:
    cached = named_kernels._function
    yield Packages(monkeypatch)
    cached.cache_clear()


class RingOfTwo(Axis):
    """The second rank's keys and values arrive; nothing is sent."""

    def __init__(self, theirs: torch.Tensor) -> None:
        super().__init__("ring", 2, 0)
        self.theirs = theirs

    def start_shift(self, send: torch.Tensor, shape: tuple[int, ...]) -> Any:
        return SimpleNamespace(wait=lambda: self.theirs)


def around_a_ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cut: int, named: str) -> torch.Tensor | None:
    ring = RingOfTwo(torch.stack((k[:, cut:], v[:, cut:])))
    passing = RingPass(ring, k[:, :cut], v[:, :cut], lengths=(cut, k.shape[1] - cut))
    return passing.attend(q, mask=None, named=named)


@pytest.mark.parametrize("name", NAMES)
def test_a_ring_merges_by_the_log_sum_exp_of_the_kernel_that_was_asked_for(packages: Packages, name: str) -> None:
    q, k, v = tensors(2, 50, 3, 64)
    expected = attention_with_lse(q, k, v)[0]
    assert relative_error(around_a_ring(q, k, v, cut=19, named=name), expected) <= ROUNDING
    assert packages.calls == [NAMED[name].member] * (4 if name == "FlashInfer" else 2)
    assert named_kernels.ATTENDED == {f"{name}, which rounds" if name == "SageAttention" else name}
    packages.answer = lambda out, lse: (out, torch.zeros_like(lse))  # the control: as kernels that return none
    found = around_a_ring(q, k, v, cut=19, named=name)
    assert found is not None
    assert (found - expected).norm() > 0.05 * expected.norm()


@pytest.mark.parametrize("name", NAMES)
def test_heads_of_a_model_attend_by_it_grouped_of_two_widths_and_with_the_models_scale(
    packages: Packages, name: str
) -> None:
    q = tensors(2, 6, 33, 24)[0]
    k, v = tensors(2, 3, 40, 24)[1], tensors(2, 3, 40, 16)[2]
    found = attend_heads(name, q, k, v, scale=0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
    assert relative_error(found, expected) <= ROUNDING
    assert set(packages.calls) == {NAMED[name].member}


def test_flashinfer_attends_each_image_of_a_batch_in_a_call_of_its_own(packages: Packages) -> None:
    q, k, v = tensors(5, 2, 3, 64)  # more images than queries
    found = attend_with_lse("FlashInfer", q, k, v)
    for mine, exact in zip(found, attention_with_lse(q, k, v), strict=True):
        assert relative_error(mine, exact) <= ROUNDING
    assert packages.calls == ["FLASHINFER"] * 5


def test_nothing_is_imported_until_it_is_used_and_a_mask_is_torchs_kernels(packages: Packages) -> None:
    packages.monkeypatch.setattr(named_kernels, "_function", lambda name: pytest.fail(f"{name} was asked for"))
    q, k, v = tensors(1, 9, 2, 16)
    mask = torch.zeros(1, 9, 9)
    for name in ("", "SageAttention"):
        given = None if not name else mask
        expected = attention_with_lse(q, k, v, mask=given)
        for found, wanted in zip(attend_with_lse(name, q, k, v, mask=given), expected, strict=True):
            assert torch.equal(found, wanted)
    assert packages.calls == []


@pytest.mark.parametrize("name", NAMES)
def test_what_is_missing_is_refused_with_the_line_that_installs_it(packages: Packages, name: str) -> None:
    assert missing(name) == ""
    packages.lack(NAMED[name].package)
    assert missing(name).startswith(f"attention={name}: this Python has no {NAMED[name].package}; pip install yunchang")
    packages.lack("yunchang")
    assert f"no yunchang and no {NAMED[name].package}" in missing(name)
    assert missing(name).endswith("or set attention in SP Config to auto")
    with pytest.raises(ValueError, match="this Python has no yunchang"):
        attend_with_lse(name, *tensors(1, 9, 2, 16))


@pytest.mark.parametrize("found", ["1.0.6", "1.0.6+cu128", "0"])
def test_a_version_that_is_too_old_is_refused_before_it_is_imported(packages: Packages, found: str) -> None:
    packages.versions["sageattention"] = found
    said = f"attention=SageAttention: this Python has sageattention {found}, and 2 or newer is needed; pip install yun"
    assert missing("SageAttention").startswith(said)
    assert missing("SageAttention").endswith("or set attention in SP Config to auto")
    with pytest.raises(ValueError, match="and 2 or newer is needed"):
        attend_with_lse("SageAttention", *tensors(1, 9, 2, 16))


@pytest.mark.parametrize("found", ["2.0.0", "2.2.0+cu128torch2.9.0", "10.1", "unknown", "", None])
def test_a_version_that_is_new_enough_or_not_known_passes(packages: Packages, found: str | None) -> None:
    packages.versions["sageattention"] = found
    assert missing("SageAttention") == ""


@pytest.mark.parametrize("name", ["FlashAttention 3", "FlashInfer"])
def test_of_other_kernels_any_version_passes(packages: Packages, name: str) -> None:
    packages.versions[NAMED[name].package] = "0.0.1"
    assert missing(name) == ""


@pytest.mark.parametrize("without", ["select_flash_attn_impl", "AttnType", "libcudart.so.13"])
def test_another_version_or_one_that_does_not_load_is_refused_with_that_line_too(
    packages: Packages, without: str
) -> None:
    def unloadable(member: str, stage: str) -> None:
        raise OSError(f"{without}: cannot open shared object file")

    if without.startswith("lib"):
        packages.modules["yunchang.kernels"].select_flash_attn_impl = unloadable
    else:
        delattr(packages.modules["yunchang.kernels"], without)
    with pytest.raises(ValueError, match=r"attention=FlashInfer: this version of yunchang .*; pip install yunchang"):
        attend_with_lse("FlashInfer", *tensors(1, 9, 2, 16))


@pytest.mark.parametrize(
    "answer",
    [
        lambda out, lse: out,
        lambda out, lse: (out, None),
        lambda out, lse: (out, lse[..., :1]),
        lambda out, lse: (lse, out),
    ],
    ids=["no log-sum-exp", "None for it", "one of another shape", "the other way round"],
)
def test_a_version_that_returns_something_else_is_refused(packages: Packages, answer: Callable) -> None:
    packages.answer = answer
    with pytest.raises(ValueError, match="attention=SageAttention: this version returns.*SageAttention 2 from"):
        attend_with_lse("SageAttention", *tensors(1, 9, 2, 16))


class CompilationError(Exception):
    """As Triton's."""


@pytest.mark.parametrize("after_it_ran", [False, True])
@pytest.mark.parametrize("kind", [RuntimeError, AssertionError, ValueError, FileNotFoundError, CompilationError])
def test_one_that_raises_gives_way_says_so_once_and_is_not_called_again_for_such_heads(
    packages: Packages, caplog: pytest.LogCaptureFixture, kind: type[Exception], after_it_ran: bool
) -> None:
    def fail(out: torch.Tensor, lse: torch.Tensor) -> object:
        raise kind("unsupported capability\nmore")

    q, k, v = tensors(1, 9, 2, 16)
    if after_it_ran:
        attend_with_lse("SageAttention", q, k, v)
    works, packages.answer = packages.answer, fail
    packages.calls.clear()
    for _ in range(2):
        assert torch.equal(attend_with_lse("SageAttention", q, k, v)[0], attention_with_lse(q, k, v)[0])
    assert packages.calls == ["SAGE_AUTO"]
    assert [record.getMessage() for record in caplog.records] == [
        "SageAttention failed and is not used again for heads of 16 in torch.float32: unsupported capability"
    ]
    assert bool(named_kernels.ATTENDED) == after_it_ran
    packages.answer = works
    attend_with_lse("SageAttention", *tensors(1, 9, 2, 24))
    assert packages.calls == ["SAGE_AUTO"] * 2, "heads of another size have it still"


def test_memory_that_is_short_is_no_reason_for_another_kernel(packages: Packages) -> None:
    def fail(out: torch.Tensor, lse: torch.Tensor) -> object:
        raise torch.OutOfMemoryError("full")

    packages.answer = fail
    with pytest.raises(torch.OutOfMemoryError):
        attend_with_lse("SageAttention", *tensors(1, 9, 2, 16))
    assert named_kernels._FAILED == set()
    named_kernels._function.cache_clear()
    packages.modules["yunchang.kernels"].select_flash_attn_impl = lambda *_, **__: fail(*tensors(1)[:2])
    with pytest.raises(torch.OutOfMemoryError, match="full"):  # while the package loads
        attend_with_lse("SageAttention", *tensors(1, 9, 2, 16))


@pytest.mark.parametrize(("name", "kept_out"), [("SageAttention", True), ("FlashInfer", False)])
def test_a_call_whose_model_forbids_rounding_is_not_given_to_a_kernel_that_rounds(
    packages: Packages, name: str, kept_out: bool
) -> None:
    """As Wan and ACE-Step ask for some of theirs; in Ulysses, where ComfyUI's function attends then, and in Ring."""
    q, k, v = tensors(1, 2, 9, 16)
    switch = AttentionSwitch(lambda q, k, v, *_, **__: torch.nn.functional.scaled_dot_product_attention(q, k, v))
    call = SimpleNamespace(group=SimpleNamespace(named=name))
    for options, called in (({}, True), ({"low_precision_attention": False}, not kept_out)):
        packages.calls.clear()
        switch._kernel(call, None, options, owned=False)([q, k, v], 2, None)
        assert bool(packages.calls) == called, options
    theirs = torch.stack((k, v)).transpose(2, 3)
    sequence = SequenceParallelAttention(ring=RingOfTwo(theirs), ulysses=Axis("ulysses"))
    sequence.named = name
    for exact, called in ((False, True), (True, not kept_out)):
        packages.calls.clear()
        sequence.attend(None, [q, k, v], query_lengths=(9, 9), key_lengths=(9, 9), exact=exact)  # type: ignore[arg-type]
        assert bool(packages.calls) == called, exact


def test_ulysses_has_it_too_but_for_masks_and_a_precision_that_is_asked_for(packages: Packages) -> None:
    stock_calls = []

    def stock(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **options):
        stock_calls.append((mask is not None, attn_precision))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    switch = AttentionSwitch(stock)
    call = SimpleNamespace(group=SimpleNamespace(named="FlashInfer"))
    q, k, v = tensors(1, 2, 9, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    for mask, precision in ((None, None), (torch.zeros(1, 1, 9, 9), None), (None, torch.float32)):
        found = switch._kernel(call, precision, {}, owned=False)([q, k, v], 2, mask)
        assert relative_error(found, expected) <= ROUNDING
    assert packages.calls == ["FLASHINFER"]
    assert stock_calls == [(True, None), (False, torch.float32)]
    call.group.named = ""
    switch._kernel(call, None, {}, owned=False)([q, k, v], 2, None)
    assert len(packages.calls) == 1


def test_files_of_comfyuis_that_took_its_attention_early_are_given_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its own file of attention imports one; what is somebody else's keeps the stock function, so it fails."""
    stock, masked, chooser = (lambda *given: given[0] for _ in range(3))
    path = "comfy.ldm.modules.attention"
    parts = [path.rsplit(".", up)[0] for up in (3, 2, 1, 0)]
    modules = {name: ModuleType(name) for name in (*parts, "comfy.ldm.early", "somebody.early")}
    for owner, name in zip(parts, parts[1:], strict=False):
        setattr(modules[owner], name.rpartition(".")[2], modules[name])
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    attention, early, other = modules[path], modules["comfy.ldm.early"], modules["somebody.early"]
    attention.optimized_attention, attention.optimized_attention_masked = stock, masked
    attention.optimized_attention_for_device = early.optimized_attention_for_device = chooser
    early.optimized_attention, early.optimized_attention_masked = stock, None
    other.optimized_attention = stock
    with pytest.raises(RuntimeError, match="somebody.early was imported before"):
        install()
    assert attention.optimized_attention is early.optimized_attention is stock
    del other.optimized_attention
    switch = install()
    assert switch is install() is attention.optimized_attention is attention.optimized_attention_masked
    assert early.optimized_attention is switch and switch.kernel.stock is stock
    assert early.optimized_attention_for_device is attention.optimized_attention_for_device is not chooser
    choose = attention.optimized_attention_for_device
    assert choose("a device") == "a device", "no call is shared"
    switch.handed_on = True
    assert choose("a device") is switch
    switch.handed_on = False
    switch.call = SimpleNamespace(attention=None)
    assert choose("a device") == "a device"
    switch.call.attention = "shared"
    assert choose("a device") is switch
