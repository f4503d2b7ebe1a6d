"""Layouts kept between steps: made once a size, equal, and not where values count."""

import importlib
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from host.outcomes import StockFailsError
from parallel_runtime.models.hosted.kept_layouts import MOST, KeptLayouts, keep_layouts

from .cases import CASES
from .gloo_group import GlooGroup
from .ranks import in_ranks

CPU = torch.device("cpu")
MODULE = "comfy.ldm.minimax.model"


@in_ranks(1)
def test_layouts_of_minimax_h3_are_made_once_for_each_size_and_change_no_bit(group: GlooGroup) -> None:
    try:
        module = importlib.import_module(MODULE)
    except ImportError as error:
        raise StockFailsError("this ComfyUI has no MiniMax H3") from error
    stock = module.PackedLayout
    made: list[Any] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(each, torch.Tensor) and each.is_meta for each in tree_leaves((args, kwargs))):
            made.append(args)
        return stock(*args, **kwargs)

    cases, failed = (
        {name: make for name, make in CASES.items() if name.startswith("MiniMax H3")},
        dict[str, Exception](),
    )
    for name, make in cases.items():
        model, given = make()
        with torch.no_grad():
            try:
                want = [model(**given) for _ in range(3)]
            except AttributeError as error:  # as of a mask in a class between 0.37 and 0.39
                failed[name] = error
                continue
            module.PackedLayout = counting
            try:
                made.clear()
                stock_makes = len([model(**given) for _ in range(3)]) and len(made)
                keep_layouts(type(model), CPU)
                assert isinstance(module.PackedLayout, KeptLayouts)
                made.clear()
                got = [model(**given) for _ in range(3)]
            finally:
                module.PackedLayout = stock
        assert stock_makes == 3, "the control: the class makes one in each step"
        assert len(made) <= 2, "a layout without tensors in its call is made twice: tried, then kept"
        for each, other in zip(got, want, strict=True):
            for mine, theirs in zip(each, other, strict=True):
                assert torch.equal(mine, theirs)
    for name, error in failed.items():
        raise StockFailsError(f"{name}: {error}") from error
    assert cases


class OfSizes:
    """A layout of sizes alone."""

    def __init__(self, length: int, refs: list[dict[str, torch.Tensor]]) -> None:
        self.places = torch.arange(length + sum(each["x"].shape[0] for each in refs))


class OfValues:
    """A layout that reads a tensor."""

    def __init__(self, length: int, refs: list[dict[str, torch.Tensor]]) -> None:
        self.places = torch.arange(length + int(refs[0]["x"].sum()))


@in_ranks(1)
def test_a_layout_that_reads_values_is_not_kept_and_other_sizes_are_other_layouts(group: GlooGroup) -> None:
    sizes, values = KeptLayouts(OfSizes, CPU), KeptLayouts(OfValues, CPU)
    ones, twos = [{"x": torch.ones(3)}], [{"x": torch.full((3,), 2.0)}]
    assert sizes(4, ones) is sizes(4, twos)
    assert len(sizes(4, [{"x": torch.ones(5)}]).places) == 9
    assert sizes(5, ones) is not sizes(4, ones)
    assert (len(values(4, ones).places), len(values(4, twos).places)) == (7, 10)
    first = sizes(1, ones)
    for length in range(10, 10 + MOST):
        sizes(length, ones)
    assert sizes(1, ones) is not first, "the oldest goes"
