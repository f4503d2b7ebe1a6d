"""What the finding of a plan decides, in this process: stand-ins look, and say what ranks would compute.

That a class's plan is found, and what ranks compute by it, is test_found_plans.py's and test_find_plan.py's.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from parallel_runtime.models.finder import NotFoundError
from parallel_runtime.models.hosted.random_calls import Size
from parallel_runtime.models.specs import ShardingSpec
from parallel_runtime.models.specs.written import to_data
from parallel_runtime.worker import finding
from parallel_runtime.worker.finding import LOOKED_AT, PROVEN, TOLERANCE, Finding, rests_on, shorten
from parallel_runtime.worker.forked_ranks import RanksDisagreeError, RanksLostError

SPEC, OTHER = (
    ShardingSpec(attention={"blocks": "img"}, cut={"blocks.0": {"x": "img"}}, gather={name: "img"})
    for name in ("head", "tail")
)
GOOD, BAD, BLIND = ([TOLERANCE], 1.0), ([0.0, 2 * TOLERANCE], 1.0), ([0.0], 10 * TOLERANCE)


def call(value: float = 1.0) -> torch.Tensor:
    return torch.full((2,), value)


class Ranks:
    """What ranks say of each spec and call; what they were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *candidates: ShardingSpec) -> None:
        self.said: dict[tuple[int, object], object] = {}
        self.asked = list[tuple[str, int, list[float]]]()
        listed = [SimpleNamespace(spec=spec, cuts=f"cuts {number}") for number, spec in enumerate(candidates)]
        monkeypatch.setattr(finding, "plans", lambda seen: listed)
        monkeypatch.setattr(finding, "errors_of", self.errors_of)
        monkeypatch.setattr(finding, "look", lambda model, call, attention_to: SimpleNamespace(lists={}, reasons={}))

    def errors_of(self, model: object, spec: ShardingSpec, calls: Any, wanted: Any, ranks: int) -> Any:
        (name,) = spec.gather
        self.asked.append((name, ranks, [float(each[0]) for each in wanted]))
        said = self.said.get((ranks, name), self.said.get((0, name), GOOD))
        if isinstance(said, Exception):
            raise said
        return said


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Finding:
    """Of a model with two calls to look at and two to prove, which no kinds of calls are tried for besides."""
    made = Finding()
    made.kind = "a kind"
    calls = [call, lambda: call(2.0)]
    monkeypatch.setattr(made, "_calls", lambda: (nn.Linear(1, 1), calls, calls, "whole"))
    monkeypatch.setattr(finding, "kinds_of", lambda whole, size: [])
    return made


def test_a_plan_is_proven_over_two_and_three_ranks_by_its_largest_error_and_least_control(
    monkeypatch: pytest.MonkeyPatch, found: Finding
) -> None:
    ranks = Ranks(monkeypatch, SPEC, OTHER)
    ranks.said = {(2, "head"): ([1e-7, 3e-6], 0.5), (3, "head"): ([2e-6, 1e-6], 0.25)}
    told = found.find("a file", limit_s=1e9)
    assert told.pop("seconds") > 0
    assert told == {
        **{"class": "torch.nn.modules.linear.Linear", "source": told["source"], "kind": "a kind", "tried": []},
        **{"refused": "", "with": [], "plan": to_data(SPEC), "rests_on": []},
        **{"cuts": "cuts 0", "error": 3e-6, "control": 0.25},
    }
    assert ranks.asked == [("head", 2, [1.0, 2.0]), ("head", 3, [1.0, 2.0])]


def test_plans_are_tried_in_turn_until_one_holds_and_what_was_wrong_with_each_is_told(
    monkeypatch: pytest.MonkeyPatch, found: Finding
) -> None:
    ranks = Ranks(monkeypatch, OTHER, SPEC)
    for wrong, said in ((BAD, "relative error 2.0e-05, at most 1.0e-05"), (RanksDisagreeError("a  b\nc"), "a b c")):
        ranks.said = {(3, "tail"): wrong}
        told = found.find("a file")
        assert (told["cuts"], told["tried"], told["refused"]) == ("cuts 1", [f"cuts 0: {said}"], "")
    ranks.said = {(0, "tail"): BAD, (0, "head"): ([float("nan")], 1.0)}
    told = found.find("a file")
    assert "plan" not in told and len(told["tried"]) == 2
    assert told["refused"] == f"no plan was equal to one process; the last: {told['tried'][1]}"
    Ranks(monkeypatch)
    assert found.find("a file")["refused"].endswith("the last: none explains its calls")


def test_a_model_that_no_proof_can_see_has_no_plan(monkeypatch: pytest.MonkeyPatch, found: Finding) -> None:
    ranks = Ranks(monkeypatch, SPEC)
    ranks.said = {(0, "head"): BLIND}
    assert "Linear: its output does not depend on its attention" in found.find("a file")["refused"]
    ranks.said = {(0, "head"): ([0.0], 11 * TOLERANCE)}
    assert found.find("a file")["refused"] == ""
    for value in (0.0, float("inf")):
        monkeypatch.setattr(found, "_calls", lambda value=value: (nn.Linear(1, 1), [], [lambda: call(value)], "whole"))
        assert "Linear computes nothing finite in float32" in found.find("a file")["refused"]


def test_ranks_that_are_lost_end_the_process_and_any_other_error_is_the_models(
    monkeypatch: pytest.MonkeyPatch, found: Finding
) -> None:
    ranks = Ranks(monkeypatch, SPEC)
    for lost in (RanksLostError("gone"), MemoryError("full")):
        ranks.said = {(0, "head"): lost}
        with pytest.raises(type(lost), match=str(lost)):
            found.find("a file")
    ranks.said = {(0, "head"): KeyError("odd")}
    with pytest.raises(ValueError, match="looking at Linear ended with KeyError: 'odd'"):
        found.find("a file")
    monkeypatch.setattr(finding, "kinds_of", lambda whole, size: ["refs"])
    monkeypatch.setattr(finding, "calls_of", lambda whole, size: [call])
    for lost in (RanksLostError("gone"), MemoryError("full")):  # in a call with references
        monkeypatch.setattr(finding, "errors_of", Mock(side_effect=[GOOD, GOOD, lost]))
        with pytest.raises(type(lost), match=str(lost)):
            found.find("a file")


def test_a_plan_is_kept_for_more_kinds_of_calls_or_another_is_found_that_holds_for_all(
    monkeypatch: pytest.MonkeyPatch, found: Finding
) -> None:
    """`tail` holds for references where `head` does not; none holds for masks, and calls with a camera are not made."""
    ranks, numbers = Ranks(monkeypatch, SPEC, OTHER), {"refs": 3.0, "mask": 4.0, "text": 5.0}
    made = list[tuple[Size, str]]()

    def calls_of(whole: object, size: Size) -> list[Any]:
        (kind,) = size.more
        made.append((size, kind))
        return [lambda: call(numbers[kind])]

    def errors_of(model: object, spec: ShardingSpec, calls: Any, wanted: Any, over: int) -> Any:
        values = {float(each[0]) for each in wanted}
        if 4.0 in values or (3.0 in values and spec is not OTHER and "tail" not in spec.gather):
            raise RanksDisagreeError("no")
        return ranks.errors_of(model, spec, calls, wanted, over)

    known = {LOOKED_AT[0]: ["refs", "camera", "mask", "text"]}
    monkeypatch.setattr(finding, "kinds_of", lambda whole, size: known[size])
    monkeypatch.setattr(finding, "calls_of", calls_of)
    monkeypatch.setattr(finding, "errors_of", errors_of)
    told = found.find("a file")
    assert (told["plan"], told["cuts"], told["with"]) == (to_data(OTHER), "cuts 1", ["refs", "text"])
    assert [(size.seed, kind) for size, kind in made[:2]] == [(1, "refs"), (2, "refs")]
    assert ranks.asked[-2:] == [("tail", over, [5.0]) for over in (2, 3)]
    for limit_s, kinds in ((9.0, ["refs", "text"]), (8.9, [])):  # of which calls of a text alone have taken 3
        now_s, computed_s = iter((0.0, 5.0, 7.0)), iter((1.0, 4.0))
        monkeypatch.setattr(finding, "time", SimpleNamespace(perf_counter=lambda now_s=now_s: next(now_s)))
        monkeypatch.setattr(finding, "_computed_s", lambda computed_s=computed_s: next(computed_s))
        assert (told := found.find("a file", limit_s=limit_s))["with"] == kinds
        assert told["seconds"] == 7.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))


def test_of_each_list_of_blocks_the_first_and_the_last_stay() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(Block() for _ in range(5))
    model.two = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    model.mixed = nn.ModuleList([nn.Linear(1, 1), nn.Identity(), nn.Linear(1, 1)])
    model.blocks_2 = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
    last = model.blocks[4]
    shorten(model)
    assert [len(each) for each in (model.blocks, model.two, model.mixed, model.blocks_2)] == [2, 2, 3, 2]
    assert model.blocks[1] is last and len(last.layers) == 4, "lists in a list's blocks stay"


def test_what_a_plan_rests_on_is_a_line_a_list() -> None:
    flows = [SimpleNamespace(name="img", tokens=60), SimpleNamespace(name="txt", tokens=11)]
    lists = {path: SimpleNamespace(blocks=SimpleNamespace(paths=[1, 2]), flows=flows) for path in ("double", "refiner")}
    seen: Any = SimpleNamespace(lists=lists, large={"double"}, reasons={"vision": "no attention"})
    assert rests_on([seen]) == [
        "double: 2 blocks, tokens handed on: img 60, txt 11",
        "refiner: 2 blocks, tokens handed on: img 60, txt 11; few tokens, so every rank computes all of them",
        "vision is computed whole: no attention",
    ]


@pytest.mark.parametrize(
    ("refused", "sizes"),
    [
        (0, ((320, 192, 1), (192, 256, 2))),
        (1, ((320, 192, 1), (192, 256, 1))),
        (2, ((640, 384, 1), (384, 512, 2))),
        (3, ((320, 192, 1), (192, 256, 2))),
        (6, None),
    ],
)
def test_a_class_is_called_with_sizes_that_it_takes_and_with_all_of_its_blocks_where_it_needs_them(
    monkeypatch: pytest.MonkeyPatch, refused: int, sizes: tuple[tuple[int, int, int], ...] | None
) -> None:
    """The first `refused` of the sizes raise: usual ones, one image, larger ones; with two blocks a list, with all. Of
    the last of those the size that is looked at does not."""
    made, lengths = list[tuple[Size, tuple[int, ...]]](), list[int]()

    def build(path: str, recognised: object, dtype: torch.dtype) -> Any:
        module: Any = nn.Module()
        module.blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
        return SimpleNamespace(whole=module, module=module, round_here=int)

    def calls_of(whole: Any, size: Size, *texts: int) -> list[Any]:
        made.append((size, texts))
        lengths.append(len(whole.blocks))
        wrong = len(made) <= 2 * refused and len(made) != 2 * refused - 1  # one to look at and one to prove
        return [(lambda: 1 / 0) if wrong else call] * 2

    found: Any = Finding()
    found.path = "a file"
    monkeypatch.setattr(found, "_recognise", lambda: None)
    monkeypatch.setattr(finding, "build", build)
    monkeypatch.setattr(finding, "calls_of", calls_of)
    if sizes is None:
        with pytest.raises(ValueError, match="no call of Module can be made: ZeroDivisionError: division by zero"):
            found._calls()
        return
    model, looked_at, proven, whole = found._calls()
    assert (len(looked_at), len(proven), whole is model) == (2, 2, True)
    assert tuple((size.width, size.height, size.batch) for size in found.sizes) == sizes
    assert [(size.text_tokens, texts) for size, texts in made[-2:]] == [(11, (13,)), (19, (7,))]
    assert lengths[-1] == len(model.blocks) == (3 if refused >= 3 else 2)


def test_sizes_that_are_looked_at_and_proven_share_no_length() -> None:
    (first, text), (second, other_text) = LOOKED_AT, PROVEN
    lengths = [first.width, first.height, first.text_tokens, text, second.height, second.text_tokens, other_text]
    assert len({*lengths}) == len(lengths) and first.seed != second.seed


def test_a_model_without_a_plan_says_why(monkeypatch: pytest.MonkeyPatch, found: Finding) -> None:
    Ranks(monkeypatch, SPEC)

    def look(*_: object) -> None:
        raise NotFoundError("its blocks have no tokens")

    monkeypatch.setattr(finding, "look", look)
    told = found.find("a file")
    assert (told["refused"], told["tried"], "plan" in told) == ("its blocks have no tokens", [], False)


def test_sizes_at_which_the_call_that_is_looked_at_ends_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ran, module = Finding(), list[Size](), nn.Linear(1, 1)
    built = SimpleNamespace(module=module, whole="whole", round_here=lambda: None)

    def calls_of(whole: object, size: Size, length: int) -> list[Any]:
        def made_call() -> None:
            ran.append(size)
            if size == LOOKED_AT[0]:
                raise ValueError("not of this size")

        return [made_call]

    monkeypatch.setattr(made, "_recognise", lambda: "recognised")
    given = {"build": lambda *_: built, "shorten": print, "calls_of": calls_of, "note_module": print}
    for name, value in given.items():
        monkeypatch.setattr(finding, name, value)
    assert made._calls()[0] is module
    assert made.sizes == tuple(finding._changed(each[0], scale=2) for each in (LOOKED_AT, PROVEN))
    assert ran == [LOOKED_AT[0], LOOKED_AT[0], *made.sizes], "as it is, one image a call, and larger"
