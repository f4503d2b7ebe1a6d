"""What a class keeps between the calls of a run, by a class of a few lines: on any ComfyUI.

Qwen-Image 2.1 itself is test_kept_calls.py's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from rounding import ROUNDING

from parallel_runtime.model_call import ModelCall
from parallel_runtime.models.hosted import count, count_kept
from parallel_runtime.models.hosted.hooks import SharedModel
from parallel_runtime.models.hosted.kept_state import (
    FreeMemory,
    KeptState,
    alike_over,
    host_memory_for,
    kept_state,
    log,
)
from parallel_runtime.parallel.shard import split_lengths
from parallel_runtime.pool.calls import RunResult
from parallel_runtime.pool.proving import prove
from parallel_runtime.proof import PROVEN, REFUSED, Proof

from .gloo_group import GlooGroup, OwnTokensOnly
from .keeper import BLOCKS, ELEMENT, PLAN, WIDTH, Keeper, NoChoice, OtherChoice, OtherMemory, OtherReset
from .ranks import in_ranks
from .tiny import call, difference, noise

CPU = torch.device("cpu")
CONTROL = 1e-3
TEXT, PICTURE = 9, 35  # tokens
KEPT = 2 * BLOCKS * TEXT * WIDTH * ELEMENT + TEXT * WIDTH * ELEMENT  # keys and values, and the text that they are of


def step(number: int, *, text: int = 0) -> dict[str, Any]:
    """A call of a step, of one prompt or another."""
    return {"x": noise(1, PICTURE, WIDTH) * (1 + number), "context": noise(1, TEXT, WIDTH) + text}


def state_of(model: Keeper) -> KeptState:
    """What it keeps, of which `KeptState` knows by its plan."""
    assert PLAN.keeps is not None
    return KeptState(model, PLAN, PLAN.keeps)


def mine(group: GlooGroup) -> int:
    """The tokens of the picture that this rank has: the second stream of a call has its longer runs on the first."""
    return split_lengths(PICTURE, group.parts)[group.index]


@in_ranks(2)
def test_a_call_computes_the_picture_alone_where_it_finds_the_text(group: GlooGroup) -> None:
    model, alone = Keeper(), Keeper()
    kept, shared = state_of(model), SharedModel(model, PLAN, group)
    alike = alike_over(group, CPU)
    kept.begin("run")
    for number, (text, found) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        with kept.calling(alike):
            got = call(model, step(number, text=text))
        assert difference(got, call(alone, step(number, text=text))) <= ROUNDING, number
        counted = kept.take_counted()
        assert (counted.calls, counted.found, counted.kept_bytes) == (1, found, KEPT), counted
        assert counted.rows == mine(group) + (0 if found else TEXT), counted
    shared.group = OwnTokensOnly()
    with kept.calling(alike):
        got = call(model, step(3, text=1))
    assert kept.take_counted().found == 1, "the control is of what was kept"
    assert difference(got, call(alone, step(3, text=1))) > CONTROL, "nothing was exchanged"


@in_ranks(2)
def test_nothing_of_the_class_is_kept_of_another_run_nor_outside_of_one(group: GlooGroup) -> None:
    model = Keeper()
    kept, _ = state_of(model), SharedModel(model, PLAN, group)
    for run, found in ((1, 0), (1, 1), (2, 0), (2, 1), (None, 0), (2, 0)):
        if run is None:
            kept.end()
            assert model.kept is None, "what was kept is freed"
        else:
            kept.begin(run)
        with kept.calling(alike_over(group, CPU)):
            assert difference(call(model, step(0)), call(Keeper(), step(0))) <= ROUNDING
        counted = kept.take_counted()
        assert (counted.found, counted.kept_bytes) == (found, 0 if run is None else KEPT), f"run {run}"


@in_ranks(2)
def test_ranks_of_which_one_has_no_room_keep_nothing_together(group: GlooGroup) -> None:
    model, full = Keeper(), group.index == 0
    kept, _ = state_of(model), SharedModel(model, PLAN, group)
    model.memory.get_free_memory = lambda device: 0 if full else 1 << 40
    kept.begin("run")
    for _ in range(2):
        with kept.calling(alike_over(group, CPU)):
            assert difference(call(model, step(0)), call(Keeper(), step(0))) <= ROUNDING
        counted = kept.take_counted()
        assert (counted.found, counted.rows, counted.kept_bytes) == (0, mine(group) + TEXT, 0)


def test_rows_are_counted_of_calls_that_ranks_share_alone() -> None:
    model = Keeper()
    kept, out = state_of(model), noise(1, PICTURE, WIDTH)
    kept._count_rows(model, (), out)
    with kept.calling(lambda _: True):
        kept._count_rows(model, (), (out, out))  # a block that hands on two streams
        assert kept.take_counted().rows == 0
        kept._count_rows(model, (), out)
        assert kept.take_counted().rows == PICTURE


@contextmanager
def lines() -> Iterator[list[str]]:
    """What is logged of classes that keep otherwise."""
    found: list[str] = []
    log.addFilter(note := lambda record: found.append(record.getMessage()) or True)
    try:
        yield found
    finally:
        log.removeFilter(note)


@in_ranks(2)
def test_a_class_that_keeps_otherwise_shares_its_calls_and_keeps_nothing(group: GlooGroup) -> None:
    for kind, why in ((OtherReset, "'why'"), (NoChoice, "'choose' is no method"), (OtherMemory, "memory")):
        model = kind()
        with lines() as said:
            assert kept_state(model, PLAN) is kept_state(model, PLAN) is None
        assert len(said) == 1 and kind.__name__ in said[0] and why in said[0], said
        SharedModel(model, PLAN, group)
        for number in range(2):
            assert difference(call(model, step(number)), call(Keeper(), step(number))) <= ROUNDING, kind


@in_ranks(2)
def test_a_class_that_decides_otherwise_keeps_nothing_from_its_first_call_on(group: GlooGroup) -> None:
    model = OtherChoice()
    kept, _ = kept_state(model, PLAN), SharedModel(model, PLAN, group)
    assert kept is not None
    for run in range(2):
        kept.begin(run)
        for number in range(2):
            with lines() as said, kept.calling(alike_over(group, CPU)):
                assert difference(call(model, step(number)), call(Keeper(), step(number))) <= ROUNDING
            assert ["tuple, not" in line for line in said] == ([] if run or number else [True])
            counted = kept.take_counted()
            assert (counted.found, counted.rows, counted.kept_bytes) == (0, mine(group) + TEXT, 0)
            assert (model.kept, model.enabled) == (None, False)


@in_ranks(1)
def test_what_is_decided_in_another_form_is_nothing_where_it_is_none_or_begins_with_it(group: GlooGroup) -> None:
    kept, told = state_of(Keeper()), list[int]()
    for decided, nothing in ((None, 1), ((None, False, 2), 1), ((), 0), (({}, False, 2), 0), ("kept", 0)):
        with kept.calling(lambda said: told.append(said) or len(told) < 6):
            assert kept._decided(lambda each=decided: each) is decided
        assert told[-1] == nothing
    with kept.calling(lambda _: False), pytest.raises(RuntimeError, match="keeps something on some ranks and not on"):
        kept._decided(lambda: None)


@in_ranks(2)
def test_a_call_that_finds_is_counted_and_what_is_kept_for_it(group: GlooGroup) -> None:
    """On the meta device, where no values can be compared."""
    assert PLAN.keeps is not None
    with torch.inference_mode(False):  # in which a layer is one operation, and no product of matrices
        model = Keeper().to("meta")
        inputs = {name: torch.empty(each.shape, device="meta") for name, each in step(0).items()}

        told = list[object]()

        def asked(**options: Any) -> Any:
            told.append(options.get("keeper"))
            return model(**inputs, transformer_options=options)

        others = OtherChoice().to("meta")
        (alone,) = count._calls_of_a_run(others, PLAN, PLAN.keeps, 1, lambda **_: others(**inputs))
        finds, fills = count._calls_of_a_run(model, PLAN, PLAN.keeps, 1, asked)
        assert told == [{"device": "gpu", "dtype": "default"}] * 2, "kept as it is computed, where it is"
        assert count_kept.kept_bytes(model, PLAN.keeps, asked)["default"] == KEPT
    of_text = 2 * TEXT * WIDTH**2 * 4 * BLOCKS  # q, k, v and what is behind them
    assert alone["module.matmul_flops"] == fills["module.matmul_flops"], "of a class that keeps otherwise"
    assert fills["module.matmul_flops"] - finds["module.matmul_flops"] == of_text
    assert fills["attended.scores"] == finds["attended.scores"] == BLOCKS * 3 * PICTURE * (PICTURE + TEXT)
    assert finds["key_bytes"] == BLOCKS * 2 * PICTURE * WIDTH * ELEMENT, "what every rank has is not sent"
    assert (model.kept, model.enabled) == (None, False), "the model is as it was"


@in_ranks(1)
def test_a_class_that_keeps_otherwise_is_counted_as_one_that_keeps_nothing(group: GlooGroup) -> None:
    def inputs(size: Any) -> dict[str, Any]:
        rows = {"x": size.width * size.height // 256, "context": size.text_tokens}
        return {name: torch.empty(1, tokens, WIDTH, device="meta") for name, tokens in rows.items()}

    made = {
        "find_widths": lambda *_: None,
        "latent_shapes": lambda model, size: [(1, 4, size.width // 8, size.height // 8)],
        "call_of": lambda model, size, *_: (
            lambda **options: model.diffusion_model(**inputs(size), transformer_options=options)
        ),
        "residual_bytes": lambda module, spec, calls: [{} for _ in calls],
    }
    found = list[dict[str, Any]]()
    with torch.inference_mode(False), mock.patch.multiple(count, find_spec=lambda _: PLAN, **made):
        for keeps in (PLAN.keeps, None):
            with mock.patch.object(count, "keeps_of", lambda *_, keeps=keeps: keeps):
                model: Any = mock.Mock(diffusion_model=OtherChoice().to("meta"))
                found.append(count.count_model(model, torch.device("meta")))
    assert found[0] == found[1] and found[0]["kept_bytes"] == {} and found[0]["whole"]["module.matmul_flops"][1] > 0


def proof_of(model: Keeper, group: GlooGroup, *, keeps: bool) -> Proof:
    """What a proof finds of the class, the ranks of the group being those that are asked."""
    kept, shared = state_of(model), SharedModel(model, PLAN, group)

    def ask(calls: list[ModelCall]) -> RunResult:
        (asked,) = calls
        told = asked.options
        shared.group = None if told["whole"] else OwnTokensOnly() if told["local_attention"] else group
        if asked.place:
            kept.begin(asked.place.run)
        else:
            kept.end()
        with kept.calling(alike_over(group, CPU)):
            return RunResult(outs=[call(model, step(0))[None]], wall_s=0.0, ranks=[], traces={})

    asked = ModelCall(tensors={}, out_shape=(1, PICTURE * WIDTH), out_dtype=torch.float32, options={})
    return prove(ask, asked, "float32", room=lambda _: 2.0, possible=lambda _: True, keeps=keeps)


@in_ranks(2)
def test_a_proof_covers_the_call_that_finds_what_another_one_kept(group: GlooGroup) -> None:
    right = proof_of(Keeper(), group, keeps=True)
    assert (right.verdict, right.calls) == (PROVEN, 6), right
    # a later version of the class, which keeps a row of the picture too: each rank its own
    verdicts = [proof_of(Keeper(more=1), group, keeps=keeps).verdict for keeps in (True, False)]
    assert verdicts == [REFUSED, PROVEN], "its first call is right, which says nothing of the next ones"


@in_ranks(1)
def test_memory_of_the_host_is_shared_by_its_ranks(group: GlooGroup) -> None:
    import comfy.model_management as management

    def free(dev: object = None, torch_free_too: bool = False) -> Any:
        return (1000, 10) if torch_free_too else 1000

    with mock.patch.object(management, "get_free_memory", free):
        for ranks, part in ((1, 1000), (4, 250)):
            with host_memory_for(ranks):
                for ask in (FreeMemory().get_free_memory, management.get_free_memory):
                    assert (ask(CPU), ask("cpu"), ask(torch.device("meta"))) == (part, part, 1000)
                assert management.get_free_memory() == 1000, "ComfyUI's device"
                assert management.get_free_memory(CPU, torch_free_too=True) == (1000, 10)
        assert management.get_free_memory is free


@in_ranks(1)
def test_a_class_asks_for_pinned_memory_for_all_ranks_of_a_host(group: GlooGroup) -> None:
    import comfy.model_management as management

    asked: list[tuple[int, ...]] = []

    def ensure(*given: int, more: int = 0) -> None:
        asked.append((*given, more))

    with mock.patch.object(management, "ensure_pin_budget", ensure, create=True):
        for ranks in (1, 3):
            with host_memory_for(ranks):
                management.ensure_pin_budget(10, more=2)
        management.ensure_pin_budget(10)
        assert asked == [(10, 2), (30, 2), (10, 0)]
        del management.ensure_pin_budget
        with host_memory_for(3):
            assert not hasattr(management, "ensure_pin_budget"), "of a ComfyUI that has none"
        management.ensure_pin_budget = ensure


def test_what_is_kept_is_counted_in_the_formats_that_a_comfyui_can_store(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = set[str]()

    @contextmanager
    def filled(*_: object) -> Iterator[Any]:
        yield mock.Mock(state="state")

    def made(**options: dict[str, str]) -> None:
        if options[PLAN.keeps.option]["dtype"] in lacks:
            raise NotImplementedError("no such format")

    monkeypatch.setattr(count_kept, "filled_once", filled)
    monkeypatch.setattr(count_kept, "bytes_in", lambda _: 8)
    assert count_kept.kept_bytes(torch.nn.Identity(), PLAN.keeps, made) == dict.fromkeys(
        ("default", "int8", "int4"), 8.0
    )
    lacks.add("int4")
    assert count_kept.kept_bytes(torch.nn.Identity(), PLAN.keeps, made) == {"default": 8.0, "int8": 8.0}
    lacks.add("default")
    with pytest.raises(NotImplementedError, match="no such format"):
        count_kept.kept_bytes(torch.nn.Identity(), PLAN.keeps, made)
