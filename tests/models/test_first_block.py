"""What a first-block cache compares, keeps and skips, in exact numbers. In workers it is test_step_cache.py's."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_runtime.models.hosted.first_block import CachedBlocks, CachedCall, Residuals, refuse_stages_with_cache
from parallel_runtime.models.specs.spec import ShardingSpec

from .test_cuts import calls


class Adds(nn.Module):
    """Adds so much of what it is given to it, in place; counts how often it ran."""

    def __init__(self, by: float, *, last: bool = False) -> None:
        super().__init__()
        self.by, self.last, self.ran = by, last, 0

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        self.ran += 1
        x.mul_(1 + self.by)
        return x if y is None else (x, None if self.last else y - self.by)


class Model(nn.Module):
    """A list of one stream, then one of two, whose last block returns the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.ModuleList([Adds(0.5), Adds(1.0)])
        self.pairs = nn.ModuleList([Adds(0.5), Adds(1.0, last=True)])
        self.order = (0, 1, 2, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x.clone()
        for number in self.order:
            if number < 2:
                x = self.single[number](x)
            else:
                x, y = self.pairs[number - 2](x, y)
        return x, y

    @property
    def ran(self) -> list[int]:
        return [each.ran for each in (*self.single, *self.pairs)]


SPEC = ShardingSpec(
    attention={"single": "img", "pairs": "img"},
    cut={"single.0": {"x": "img"}, "pairs.0": {"y": "txt"}},
    gather={"pairs.-1": "img"},
    hands={"single": "x", "pairs": ("x", "y")},
)
X, Y = torch.ones(2, 3, 4), torch.full((2, 2, 4), 7.0)


def run(model: Model, cached: CachedBlocks, kept: Residuals, x: Tensor, threshold: float = 0.5, **more: Any) -> Any:
    """A call; what it came to, and its outputs."""
    given = {"total": lambda sums: sums, "call_of": lambda: None} | more
    with cached.calling(kept, threshold=threshold, **given) as seen:
        out = model(x, Y)
    return seen, out


def test_while_the_first_block_changes_little_each_list_adds_what_it_had_added() -> None:
    model, kept = Model(), Residuals()
    cached = CachedBlocks(model, SPEC)
    seen, (x, y) = run(model, cached, kept, X)
    assert isinstance(seen, CachedCall) and (seen.next, seen.change, seen.skips) == (4, math.inf, False)
    assert y is None and x.unique().tolist() == [9.0] and model.ran == [1] * 4
    assert kept.first is not None and [each.unique().tolist() for each in kept.first] == [[0.5]]
    assert kept.others.keys() == {"single", "pairs"} and kept.others["single"][0].unique().tolist() == [1.5]
    assert kept.others["pairs"][0].unique().tolist() == [6.0] and kept.others["pairs"][1] is None
    assert kept.nbytes == 3 * X.nbytes

    seen, (x, y) = run(model, cached, kept, X * 1.25)
    assert (seen.change, seen.skips) == (0.25, True) and model.ran == [2, 1, 1, 1] and y is None
    assert x.unique().tolist() == [1.25 * 1.5 + 1.5 + 6]
    assert kept.first[0].unique().tolist() == [0.5], "of the last call that ran all"

    seen, (x, y) = run(model, cached, kept, X * 1.5)
    assert (seen.change, seen.skips) == (0.5, False) and model.ran == [3, 2, 2, 2], "no less than the threshold"
    assert x.unique().tolist() == [13.5] and kept.first[0].unique().tolist() == [0.75]
    assert model(X, Y)[0].unique().tolist() == [9.0] and model.ran == [4, 3, 3, 3], "outside of calls as it is"


def test_sums_of_all_ranks_decide_and_one_that_knows_nothing_has_all_run() -> None:
    model, kept = Model(), Residuals()
    cached = CachedBlocks(model, SPEC)
    told: list[list[float]] = []
    run(model, cached, kept, X, total=lambda sums: told.append(sums.tolist()) or sums)
    for theirs, change in (((6.0, 12.0, 0.0), 0.375), ((0.0, 0.0, 1.0), math.inf)):
        others = torch.tensor(theirs, dtype=torch.float64)
        seen, _ = run(
            model, cached, kept, X * 1.25, total=lambda sums, o=others: told.append(sums.tolist()) or sums + o
        )
        assert seen.change == change and seen.skips == (change < 0.5)
    assert told == [[0.0, 12.0, 1.0], [3.0, 12.0, 0.0], [3.0, 12.0, 0.0]]
    seen, _ = run(model, cached, kept, torch.cat((X, X)))
    assert seen.change == math.inf, "of another batch"
    kept.first, kept.others = [torch.zeros(4, 3, 4)], kept.others
    assert run(model, cached, kept, torch.zeros(4, 3, 4))[0].change == math.inf, "nothing beside nothing"


@pytest.mark.parametrize(("rank", "change"), [(0, 1.2), (1, 0.0)])
def test_rows_that_every_rank_has_count_on_the_first(rank: int, change: float) -> None:
    """One row of text, which all have and which changes, and rows of an image, which do not."""
    spec = ShardingSpec(
        attention={"single": "few+img"},
        cut={"single.0": {"x": "few+img"}, "a": {"x": "img", "y": "few"}},
        gather={"single.-1": "img"},
        hands={"single": "x"},
    )
    model, kept, call = Model(), Residuals(), calls(2, few=1, img=8)[rank]
    model.order = (0, 1)
    cached, other = CachedBlocks(model, spec), torch.ones(2, 5, 4)
    run(model, cached, kept, other.clone(), call_of=lambda: call)
    other[:, 0] = 7
    seen, _ = run(model, cached, kept, other, call_of=lambda: call)
    assert seen.change == pytest.approx(change)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ((0, 1), "Model ran 2 of its 4 blocks in a call; set step_cache to 0"),
        ((0, 2, 1, 3), "Model runs block 3 of 4 where its plan has block 2; set step_cache to 0"),
    ],
)
def test_blocks_in_another_order_are_refused(order: tuple[int, ...], said: str) -> None:
    model = Model()
    model.order = order
    with pytest.raises(ValueError, match=said):
        run(model, CachedBlocks(model, SPEC), Residuals(), X)


def test_a_pipeline_has_no_step_cache() -> None:
    for stages, threshold in ((1, 0.1), (2, 0.0)):
        refuse_stages_with_cache(stages, threshold)
    with pytest.raises(ValueError, match="step_cache=0.1 needs all blocks on one rank, and pipefusion=2 gives each"):
        refuse_stages_with_cache(2, 0.1)
