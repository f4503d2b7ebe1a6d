"""What commands take, refuse and print, from values made up here: nothing is started."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_replies import step_reply
from safetensors.torch import load_file

from parallel_runtime.checkpoint import COMPUTE_DTYPES, FP8, read_header
from parallel_runtime.cli import doctor, doctor_model, find_plan, plan, tune, verify
from parallel_runtime.cli.cached import Cached, describe_cached
from parallel_runtime.cli.calibrate import describe_calibration
from parallel_runtime.cli.doctor_model import Needed, _memory, _plans
from parallel_runtime.cli.parser import DTYPES, make_parser
from parallel_runtime.cli.sample import write_sample
from parallel_runtime.devices import Device, parse_devices
from parallel_runtime.machines.server import Offer
from parallel_runtime.model_call import ModelCall
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.planner.counting import usual_counted
from parallel_runtime.planner.hardware import NARROW, WIDE
from parallel_runtime.planner.known import known_calibration, known_link
from parallel_runtime.trials.calibrate import (
    _between,
    _link,
    _operation_s,
    _score_s,
    _slowest,
    _spans,
)
from parallel_runtime.trials.reference_model import _is_flux
from parallel_runtime.trials.trial import Trial
from parallel_runtime.trials.workload import Workload
from parallel_runtime.wire.replies import BatchSlice, CachedCalls, ProbeReply

FLUX_WEIGHTS = usual_counted().model.weight_bytes // 2  # numbers
SIZE = {"width": 1024, "height": 1024, "frames": None, "text_tokens": 512, "batch": 1, "comfyui": None}
TAKEN: dict[str, tuple[list[str], dict[str, Any]]] = {
    "doctor": (
        [],
        {"devices": None, "calibrate": False, "machines": "", "token_file": None, "model": None, "comfyui": None},
    ),
    "plan": (
        [],
        SIZE
        | {"model": None, "cfg": 1.0, "steps": 20, "dtype": "bfloat16", "file_dtype": None, "devices": None}
        | {"kind": None, "link": None, "bandwidth_gbs": None, "latency_us": None, "free_gib": None, "beside": 0}
        | {"compiled": False, "stale": False},
    ),
    "verify": (
        ["--model", "a", "--plan", "ring=2"],
        SIZE
        | {"model": "a", "plan": "ring=2", "seed": 0, "devices": None, "dtype": "default", "threads_per_rank": 1}
        | {"step_cache": None, "compile": False, "against": "comfyui", "weights": None, "steps": 1, "warmup": None}
        | {"patches": None, "negative_control": False},
    ),
    "find-plan": (["a"], {"file": "a", "comfyui": None}),
    "tune": (
        ["a"],
        SIZE
        | {"file": "a", "devices": "all", "cfg": 1.0, "seconds": 60.0, "dtype": "default", "weights": "replicated"}
        | {"comfyui_options": ""},
    ),
}


@pytest.mark.parametrize("command", TAKEN)
def test_a_command_has_these_options_with_these_defaults(command: str) -> None:
    given, expected = TAKEN[command]
    assert vars(make_parser().parse_args([command, *given])) == {"command": command, "json": False, **expected}


def test_the_dtypes_of_commands_are_the_loaders() -> None:
    assert DTYPES == (*COMPUTE_DTYPES, *FP8)


def test_a_trial_of_latents_with_more_than_one_frame_says_how_many() -> None:
    trial = object.__new__(Trial)
    trial.title, trial._workload = "Wan", Workload(width=64, height=32, text_tokens=3, batch=2)
    same = {"model": "Wan", "width": 64, "height": 32, "batch": 2, "text_tokens": 3}
    for shape, more in (([2, 16, 4, 8], {}), ([2, 16, 1, 4, 8], {}), ([2, 16, 2, 4, 8], {"frames": 2})):
        trial.shapes = [shape]
        assert trial.sizes == same | more


def test_join_has_these_options() -> None:
    given = vars(make_parser().parse_args(["join", "h:1", "--token-file", "t"]))
    assert given == {"command": "join", "address": "h:1", "token_file": "t", "devices": "all"} | dict.fromkeys(
        ("models", "comfyui", "name")
    )
    unknown = [
        [*command, "--dtype", "fp16"] for command in (["verify", "--model", "a", "--plan", "ring=2"], ["tune", "a"])
    ]
    for command in ([], ["join", "h:1"], ["verify", "--model", "a"], ["verify", "--plan", "a"], *unknown):
        with pytest.raises(SystemExit):
            make_parser().parse_args(command)


@pytest.mark.parametrize(
    ("plan_text", "steps", "step_cache", "words"),
    [
        ("ring=2", 1, None, ""),
        ("ring=2", 2, 0.1, ""),
        ("pipefusion=2", 1, None, ""),
        ("pipefusion=2,warmup_steps=2", 2, None, ""),
        ("ring=2", 0, None, "--steps=0 is below 1"),
        ("pipefusion=2,warmup_steps=3", 2, None, "warmup_steps=3 is more than --steps=2"),
        ("ring=2", 2, 0.0, "--step-cache=0 is no number above 0"),
        ("ring=2", 2, float("inf"), "--step-cache=inf is no number above 0"),
        ("pipefusion=2", 2, 0.1, "--step-cache needs all blocks on one rank, and pipefusion=2"),
        ("ring=2", 1, 0.1, "--step-cache skips what a step before it computed"),
        ("data=2", 2, 0.1, "--step-cache: replicas of data=2 decide apart"),
    ],
)
def test_steps_and_a_step_cache_that_verify_cannot_run_are_refused(
    plan_text: str, steps: int, step_cache: float | None, words: str
) -> None:
    arguments = SimpleNamespace(steps=steps, step_cache=step_cache)
    said = ""
    try:
        verify._refuse_steps(arguments, ParallelPlan.parse(plan_text))
    except ValueError as error:
        said = str(error)
    assert said.startswith(words) and bool(said) == bool(words)


def test_the_control_of_verify_is_wrong_in_what_the_plan_shares() -> None:
    two, one = (Workload(width=64, height=64, text_tokens=3, batch=batch) for batch in (2, 1))
    for text, work, options in (
        *(("ring=2", one, {"local_attention": True}), ("ulysses=1", one, {"local_attention": True})),
        *(("data=2", two, {}), ("cfg=2", one, {})),
    ):
        assert verify.control_options(ParallelPlan.parse(text), work) == options
    with pytest.raises(ValueError, match="--negative-control of data2-ring1-uly1 needs two rows"):
        verify.control_options(ParallelPlan.parse("data=2"), one)


def test_the_weights_of_verify_are_named_once() -> None:
    assert verify.chosen_plan("ring=2", "sharded", patches=None) == ParallelPlan(ring=2, weights="sharded")
    with pytest.raises(
        ValueError, match="--warmup 2 and --plan pipefusion=2,warmup_steps=1 both name the warmup_steps"
    ):
        verify.chosen_plan("pipefusion=2,warmup_steps=1", None, warmup_steps=2)


def ran(*pieces: tuple[int, int, int]) -> Any:
    """What a rank says that ran these rows."""
    return step_reply(pieces=tuple(BatchSlice(*piece) for piece in pieces), collectives=3, sent_bytes=4096).ran


def test_groups_without_work_are_named_and_errors_are_told_by_rank_and_piece() -> None:
    halves = [ran((0, 0, 1)), ran(), ran(), ran()]
    assert verify.idle_groups(ParallelPlan(data=2, ring=2), halves) == [
        "batch group 1 of 2 had no work (ranks 2 to 3); use a larger --batch or fewer batch groups (data x cfg)"
    ]
    assert verify.idle_groups(ParallelPlan(cfg=2), halves[:2]) == [
        "batch group 1 of 2 had no work (rank 1); use a larger --batch or fewer batch groups (data x cfg)"
    ]
    results, references = [torch.tensor([[1.0], [2.2]])], [torch.tensor([[1.0], [2.0]])]
    trial = SimpleNamespace(text_tokens=[7])
    found = verify._errors(trial, results, references, [ran((0, 0, 1), (0, 1, 2)), ran((0, 0, 1)), ran()])
    assert found["per_rank"] == [pytest.approx(0.1), 0.0, None]
    assert found["pieces_by_rank"][0][0] == {"call": 0, "start": 0, "stop": 1, "rel_err": 0.0}
    assert [len(pieces) for pieces in found["pieces_by_rank"]] == [2, 1, 0]
    assert (found["text_tokens_by_call"], found["max_rel_err"]) == ([7], pytest.approx(0.1))
    told = verify._plan_report(ParallelPlan(data=2, ring=2), halves)
    assert told == {
        **{"plan": "ring=2,data=2", "name": "data2-ring2-uly1", "weights": "replicated", "lanes": 2},
        **{"lane_by_rank": [0] * 4, "bytes_per_step": [4096] * 4, "calls_per_step": [3] * 4},
        "weight_bytes_per_step": [0] * 4,
    }


VERIFIED = {
    **{"name": "ring2", "dtype": "float32", "model": "Flux", "width": 64, "height": 32, "batch": 1, "steps": 3},
    **{"text_tokens_by_call": [7, 4], "max_rel_err": 2e-6, "tolerance": 1e-5, "within_tolerance": True},
    **{"negative_control": False, "lanes": 1, "lane_by_rank": [0], "weights": "replicated", "warnings": ["hot"]},
    **{"per_rank": [2e-6], "pieces_by_rank": [[{"call": 0, "start": 0, "stop": 2}]], "calls_per_step": [3]},
    **{"bytes_per_step": [4096], "weight_bytes_per_step": [5000], "parameter_bytes_per_rank": [6000]},
}
RANK = "relative error 2.00e-06{}, 3 collectives and 4,096 bytes{} sent a step, 6,000 bytes of parameters"


def test_verify_says_what_was_found_first_and_last() -> None:
    said = [
        "ring2: equal to one process: relative error 2.00e-06, tolerance 1.00e-05, float32",
        "  Flux, 64 x 32 px + 7 and 4 text tokens, batch 1, 3 step(s)",
        "  rank 0: " + RANK.format("", ""),
        "warning: hot",
        "ring2: equal to one process",
    ]
    assert verify.describe(VERIFIED).splitlines() == said
    wrong = "ring2: NOT equal to one process (negative control: made wrong on purpose)"
    report = VERIFIED | {"within_tolerance": False, "negative_control": True, "frames": 5, "warnings": []}
    report |= {"lanes": 2, "weights": "sharded", "stale_difference": 0.5, "warmup_steps": 1, "patches": 4}
    report["step_cache"] = CACHED
    assert verify.describe(report, lambda text, name: f"<{name} {text}>").splitlines() == [
        f"<bad {wrong}>: relative error 2.00e-06, tolerance 1.00e-05, float32, every step a warm-up",
        "  Flux, 64 x 32 px x 5 latent frames + 7 and 4 text tokens, batch 1, 3 step(s)",
        "  after 1 step(s) of warm-up, 2 with keys a step old, in 4 patches: 5.00e-01 from one process, "
        "as PipeFusion is",
        f"  {describe_cached(CACHED)}",
        "  rank 0, batch group 0: " + RANK.format(" (rows 0 to 1 of call 0)", " and 5,000 of weights"),
        f"<bad {wrong}>",
    ]
    idle = verify.describe(VERIFIED | {"per_rank": [None], "pieces_by_rank": [[]]}).splitlines()[2]
    assert idle.startswith("  rank 0: no work, 3 collectives")


def test_a_call_of_its_first_row_has_it_in_place_of_all_others() -> None:
    """Of two images: what has a row for each of them, for each of them twice, and what is for all."""
    tensors = {f"t{number}": torch.arange(2.0 + number)[:, None] for number in range(3)}
    call = ModelCall(tensors=tensors, out_shape=(2, 5), options={"batched": [0, 2]})
    found = {name: tensor.flatten().tolist() for name, tensor in call.of_first_row().tensors.items()}
    assert found == {"t0": [0, 0], "t1": [0, 1, 2], "t2": [0, 1, 0, 1]}


CACHED = {"threshold": 0.1, "skipped": 2, "of": 6, "one_rank_skipped": 1, "one_rank_of": 3}
CACHED |= {"one_rank_rel_err": 1e-7, "difference": 0.01}


def test_a_cache_agrees_where_the_same_share_of_each_step_is_skipped() -> None:
    cached = object.__new__(Cached)
    cached._threshold = 0.1
    cached._mine, cached._one_rank = [torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 1.0])]
    cached._seen = [CachedCalls(calls=4, skipped=2), CachedCalls(calls=2, skipped=0), CachedCalls(calls=0, skipped=0)]
    cached._seen_alone = [
        CachedCalls(calls=2, skipped=1),
        CachedCalls(calls=1, skipped=0),
        CachedCalls(calls=0, skipped=0),
    ]
    assert cached.agrees(2.0) and not cached.agrees(1e-3)
    told = cached.report([torch.tensor([1.0, 2.0])])
    assert told.pop("one_rank_rel_err") == pytest.approx(2**-0.5)
    assert told == {
        **{"threshold": 0.1, "skipped": 2, "of": 6, "one_rank_skipped": 1, "one_rank_of": 3, "difference": 0.0}
    }
    cached._seen_alone[0] = CachedCalls(calls=2, skipped=2)
    assert not cached.agrees(2.0)
    assert describe_cached(CACHED) == (
        "with a step cache at 0.1: 2 of 6 calls skipped (one rank: 1 of 3), 1.00e-07 from one rank with it, "
        "1.00e-02 from the exact result"
    )


@pytest.mark.parametrize(("text", "unloaded"), [("ring=2", []), ("ring=2,weights=sharded", ["unload"])])
def test_weights_that_one_rank_cannot_use_go_before_its_own_come(text: str, unloaded: list[str]) -> None:
    done, plan = list[str](), ParallelPlan.parse(text)
    runner: Any = SimpleNamespace(plan=plan, options={}, spec="a model")
    runner.pool = SimpleNamespace(unload=lambda spec: done.append("unload"))
    runner.beside = lambda plan, *_, **__: SimpleNamespace(run=lambda _: done.append(plan.describe()), replies=[])
    trial: Any = SimpleNamespace(results=lambda run: run([]))
    Cached(runner, trial, 0.1)
    assert done == [plan.describe(), *unloaded, ParallelPlan().describe()]


def line(rate: float, latency_s: float = 0.0) -> tuple[tuple[float, float], ...]:
    """Two points of a call that takes so long before it begins."""
    return tuple((amount, latency_s + amount / rate) for amount in (100.0, 1000.0))


@pytest.mark.parametrize(
    ("ranks", "spans"),
    [
        (1, {1: "ulysses=1"}),
        (2, {2: "ulysses=2"}),
        (3, {3: "ulysses=3"}),
        (4, {4: "ulysses=4", 2: "ulysses=2,ring=2"}),
        (8, {8: "ulysses=8", 2: "ulysses=2,ring=4"}),
    ],
)
def test_exchanges_are_probed_among_all_and_in_pairs(ranks: int, spans: dict[int, str]) -> None:
    assert _spans(ranks) == {span: ParallelPlan.parse(text) for span, text in spans.items()}


def test_constants_follow_from_the_slowest_rank_of_each_probe() -> None:
    pair, all_four = ([ProbeReply(all_to_all=line(rate, 0.5)) for rate in rates] for rates in ((99.0, 80.0), (20.0,)))
    assert _slowest([line(99.0), (), line(80.0)]) == list(line(80.0))
    found = _link({2: pair, 4: all_four})
    assert (found.bandwidth, found.latency_s, found.contention) == (
        *(pytest.approx(80.0), pytest.approx(0.5)),
        pytest.approx(2.0),  # a quarter of it among twice as many
    )
    assert _link({2: pair}).contention == 0.0 == _link({2: all_four, 4: pair}).contention
    assert _link({1: pair}) == known_link("memory")
    between = _between(pair)
    assert (between.name, between.bandwidth) == ("measured between machines", pytest.approx(80.0))
    assert between.latency_s == pytest.approx(0.5)
    assert _operation_s([ProbeReply(operations=line(50.0)), ProbeReply(operations=line(40.0))]) == pytest.approx(1 / 40)
    wide, narrow = 1.0, 1 / (1 + 3 * (1 / (4 * NARROW) - 1 / (4 * WIDE)))  # an exponential takes 3 s
    assert _score_s([ProbeReply(attention=line(wide), narrow_attention=line(narrow))]) == pytest.approx(3.0)
    assert _score_s([ProbeReply(attention=line(narrow), narrow_attention=line(wide))]) == 0.0


def test_a_calibration_is_told_in_the_units_of_spec_sheets() -> None:
    constants = {
        "rates": {"matmul_flops": 2e12, "attention_flops": 1e12, "memory_bandwidth": 3e9},
        "link": {"bandwidth": 4e9, "latency_s": 5e-6},
        "software": {"operation_s": 6e-6},
        "between": None,
    }
    kept = {"devices": "2 x A", "wall_s": 7.0, "file": "~/f", "constants": constants}
    said = (
        "calibrated 2 x A in 7.0 s: matrices 2 TFLOP/s, attention 1 TFLOP/s, memory 3 GB/s, link 4 GB/s and 5 us, "
        "{}operation 6.0 us\nkept in ~/f; plan uses it from now on"
    )
    assert describe_calibration(kept) == said.format("")
    constants["between"] = {"bandwidth": 1e9, "latency_s": 1e-4}
    assert describe_calibration(kept) == said.format("between machines 8 Gbit/s and 100 us, ")


def check(name: str, *, ok: bool, needed: bool = True) -> dict[str, Any]:
    return {"name": name, "ok": ok, "needed": needed, "seen": f"{name} seen", "remedy": f"mend {name}"}


def test_doctor_says_what_fails_first_then_what_to_look_at_then_what_is_well() -> None:
    devices = [{"device": "cuda:0", "name": "A", "free_bytes": 2**30, "total_bytes": 2**31}]
    devices.append({"device": "cuda:1", "name": "it does not answer", "free_bytes": None, "total_bytes": None})
    report = {
        **{"warnings": ["hot"], "versions": {"torch": "2.6", "python": "3.12"}, "devices": devices, "can_run": False},
        "checks": [check("a", ok=True), check("b", ok=False), check("c", ok=False, needed=False)],
    }
    answer = "it cannot run here until this is mended: b"
    assert doctor.describe(report).splitlines() == [
        *(answer, "warning: hot", "FAIL  b: b seen; mend b", "note  c: c seen; mend c", "pass  a: a seen"),
        "versions: torch 2.6, python 3.12",
        "device cuda:0: A, 1.0 GiB free of 2.0",
        "device cuda:1: it does not answer",
        answer,
    ]
    well = report | {"can_run": True, "checks": report["checks"][::2]}
    assert doctor.describe(well).startswith("everything needed is there; look at: c\n")
    assert doctor.describe(well | {"checks": well["checks"][:1]}).endswith("\neverything needed is there")
    assert doctor._check_pattern([0, 3]).seen == "rank 1 got 3 wrong bytes" and not doctor._check_pattern([0, 3]).ok
    assert doctor._check_pattern([0, 0]).seen == "every byte arrived as it was sent"


def test_doctor_refuses_to_let_machines_join_at_an_address_that_is_not_this_machines() -> None:
    offered = Offer("192.0.2.1:7861", 1), b"x" * 32  # an address for documents, RFC 5737
    with pytest.raises(ValueError, match=r"cannot join at 192\.0\.2\.1:7861: .*; give an address of this machine"):
        doctor._calibrated(offered, parse_devices("cpu:1"))


def planned(**changes: Any) -> dict[str, Any]:
    row = {
        "name": "uly2",
        "seconds_per_step": 0.5,
        "seconds_per_run": 10.0,
        "bytes_per_rank": 2**31,
        "bound": "compute",
    }
    row |= {"fits": True, "exact": True, "graphs": False, "blocks_that_stay": 0.0, "reload_s": 0.0}
    slow = row | {"name": "pipe2", "seconds_per_step": 0.7, "fits": False, "exact": False}
    work = {"image_tokens": 4096, "text_tokens": 512, "batch": 1, "guided": False, "steps": 20}
    return {
        **{"model": "flux1-dev", "work": work, "plan": "ulysses=2", "chosen": row, "speedup": 1.5, "reasons": ["so"]},
        **{"free_bytes": [2**34, 2**33], "calibration": {"rates": {"name": "L4"}}, "table": [row, slow]},
        "warnings": [],
        **changes,
    }


def test_plan_says_its_answer_the_table_and_why() -> None:
    said = [
        "plan: ulysses=2, 0.5 s a step, 1.50x as fast as one device (predicted)",
        "flux1-dev: 4096 image + 512 text tokens, batch 1, 20 steps, 2 device(s) of L4, 8.0 GiB on each",
        "  plan                        s a step   s a run  GiB a rank  limited by",
        "> uly2                             0.5        10         2.0  compute",
        "  pipe2                            0.7        10         2.0  compute (does not fit, result differs)",
        *("why:", "  so", "plan: ulysses=2, 0.5 s a step, 1.50x as fast as one device (predicted)"),
    ]
    assert plan.describe(planned()).splitlines() == said
    none = planned(chosen=None, speedup=None, table=[], work=planned()["work"] | {"guided": True}, warnings=["hot"])
    assert plan.describe(none).splitlines()[:3] == [
        *("plan: none fits", "warning: hot"),
        "flux1-dev: 4096 image + 512 text tokens, batch 1, with cfg, 20 steps, 2 device(s) of L4, 8.0 GiB on each",
    ]
    graphed = planned(table=[planned()["chosen"] | {"graphs": True}])
    assert plan.describe(graphed, lambda text, name: f"<{name} {text}>").splitlines()[3] == (
        "  uly2                             0.5        10         2.0  compute (with graphs of blocks)"
    )
    for rows, more in ((12, []), (13, ["  and 1 more (--json lists them)"])):
        table = [planned()["chosen"] | {"name": str(number)} for number in range(rows)]
        lines = plan.describe(planned(table=table)).splitlines()
        assert lines.index("why:") == 3 + 12 + len(more)
        assert [line for line in lines if "more" in line] == more


@pytest.mark.parametrize(("taken", "last"), [(11, 11), (12, 12), (14, 14), (None, 11)])
def test_plans_table_has_the_plan_that_is_taken(taken: int | None, last: int) -> None:
    table = [planned()["chosen"] | {"name": f"plan {number}", "fits": number == taken} for number in range(15)]
    chosen = None if taken is None else table[taken]
    rows = plan.describe(planned(table=table, chosen=chosen)).splitlines()[3:16]
    numbers = [int(row[2:].removeprefix("plan ").split()[0]) for row in rows[:-1]]
    assert numbers == [*range(11), last] and rows[-1] == "  and 3 more (--json lists them)"
    assert [number for number, row in zip(numbers, rows, strict=False) if row[0] == ">"] == ([taken] if chosen else [])


@pytest.mark.parametrize(
    ("given", "bandwidth", "latency_s"),
    [
        ({}, None, None),
        ({"bandwidth_gbs": 2.0}, 2e9, None),
        ({"latency_us": 3.0}, None, 3e-6),
        ({"bandwidth_gbs": 1e9, "latency_us": 1e9}, 1e18, 1e3),
    ],
)
def test_a_link_that_is_told_stands_in_the_tables(
    given: dict[str, float], bandwidth: float | None, latency_s: float | None
) -> None:
    known = known_calibration("L20")
    told = plan._with_link(SimpleNamespace(**{"bandwidth_gbs": None, "latency_us": None} | given), known)
    assert told.link.bandwidth == pytest.approx(bandwidth or known.link.bandwidth)
    assert told.link.latency_s == pytest.approx(latency_s or known.link.latency_s)
    assert told.source == known.source + ("; link as given" if given else "")


def test_find_plan_says_the_plan_and_what_it_rests_on() -> None:
    found = {
        **{"class": "a.Model", "comfyui": "0.9", "seconds": 3.4, "tried": ["one"], "refused": "", "rests_on": ["two"]},
        **{"with": ["references"], "written": True, "kept": "/k", "plan": {"cut": {}}, "cuts": "cut once"},
        **{"error": 1e-7, "control": 0.1},
    }
    assert find_plan.describe(found).splitlines() == [
        *("a.Model of ComfyUI 0.9, 3 s", "  refused: one", "  {'cut': {}}", "  seen: two"),
        *(
            "  it holds for calls with references too",
            "  the pack has a plan that people wrote for this class, and uses that",
        ),
        *("  kept in /k", "found, proven: cut once, relative error 1.0e-07, without exchange 1.0e-01"),
    ]
    assert len(find_plan.describe(found | {"written": False, "kept": ""}).splitlines()) == 6
    assert find_plan.describe(found | {"refused": "blocks.0 mixes tokens"}).splitlines()[1:] == [
        "  refused: one",
        "no plan: blocks.0 mixes tokens; cfg parallel, data parallel and sharded weights need no plan",
    ]


def test_tune_says_what_was_predicted_and_measured_of_each_plan() -> None:
    rows = [
        {"name": "uly2", "predicted_s": 0.5, "failed": "", "step_s": 0.25, "graphs_s": 0.2},
        {"name": "ring2", "predicted_s": 0.75, "failed": "", "step_s": None, "graphs_s": None},
        {"name": "cfg2", "predicted_s": 1.0, "failed": "lost", "step_s": None, "graphs_s": None},
    ]
    report = {
        **{"line": "kept ulysses 2", "kept": "/k", "model": "a", "work": "one image", "devices": ["cpu:0", "cpu:1"]},
        **{"plans": rows, "copies": 6, "took_s": 2.0, "warnings": ["hot"]},
    }
    assert tune.describe(report, lambda text, name: f"<{name} {text}>").splitlines() == [
        *("<good kept ulysses 2>", "<note warning: hot>", "a: one image, on cpu:0, cpu:1"),
        "  plan                       predicted s  measured s",
        "  uly2                               0.5        0.25  0.2 with graphs of blocks",
        "  ring2                             0.75 not measured",
        "  cfg2                                 1        lost",
        "6 copies of a step in 2.0 s",
        "kept for the next run of such work in ComfyUI, where SP Config's mode is auto: /k",
        "<good kept ulysses 2>",
    ]
    assert tune.describe(report | {"kept": None}).splitlines()[-2:] == ["6 copies of a step in 2.0 s", "kept ulysses 2"]


def test_the_sample_is_a_small_wan_of_numbers_as_a_trained_one_has(tmp_path: Path) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for path in (first, second):
        write_sample(path)
    tensors = load_file(first)
    assert first.read_bytes() == second.read_bytes() and len(tensors) == 69
    assert sum(each.numel() for each in tensors.values()) == 699_760
    assert json.loads(read_header(first).metadata["config"]) == {
        "transformer": {"num_heads": 12, "freq_dim": 32, "text_dim": 32}
    }
    spread = {name: float(each.std()) for name, each in tensors.items()}
    assert spread["patch_embedding.weight"] == pytest.approx(1 / 8, rel=0.1)  # of 16 x 1 x 2 x 2 numbers each
    assert spread["blocks.1.ffn.0.bias"] == pytest.approx(0.02, rel=0.3)
    norm = tensors["blocks.0.norm3.weight"]
    assert (float(norm.mean()), float(norm.std())) == (pytest.approx(1, rel=0.05), pytest.approx(0.1, rel=0.3))


def test_diffusers_computes_flux_alone() -> None:
    names = ("img_in.weight", "vector_in.in_layer.weight", "double_blocks.0.img_attn.qkv.weight")
    names += ("single_blocks.0.linear1.weight",)
    for prefix in ("", "model.diffusion_model."):
        header = SimpleNamespace(tensors={prefix + name: None for name in names})
        assert _is_flux(header)
        for name in names:
            fewer = {each: None for each in header.tensors if each != prefix + name}
            assert not _is_flux(SimpleNamespace(tensors=fewer))
    mixed = {**dict.fromkeys(names[:2]), **{f"a.{name}": None for name in names[2:]}}
    assert not _is_flux(SimpleNamespace(tensors=mixed))


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ("--width 16 --height 16384", {"image_tokens": 1024}),
        ("--cfg 1", {"guided": False}),
        ("--cfg 1.5 --batch 2 --steps 3 --text-tokens 7", {"guided": True, "batch": 2, "steps": 3, "text_tokens": 7}),
        ("--cfg 1000 --dtype float32", {"guided": True, "element_bytes": 4}),
        ("--dtype float16 --file-dtype fp8", {"element_bytes": 2}),
        ("--width 15", None),
        ("--height 16385", None),
        ("--cfg 1001", None),
        ("--frames 9", None),
        ("--comfyui /comfy", None),
    ],
)
def test_plan_weighs_the_work_that_is_asked_for(given: str, changed: dict[str, Any] | None) -> None:
    arguments = make_parser().parse_args(["plan", "--kind", "L40", *given.split()])
    if changed is None:
        option, value = given.split()
        with pytest.raises(ValueError, match=f"^{option}={value}"):
            plan.run(arguments)
        return
    report = plan.run(arguments)
    work = {"image_tokens": 4096, "text_tokens": 512, "guided": False, "batch": 1, "steps": 20, "element_bytes": 2}
    assert report["work"].items() >= (work | changed).items()
    assert report["free_bytes"] == [48 * 2**30] * 2 and report["warnings"] == []
    row = report["table"][0]
    assert row["seconds_per_step"] == pytest.approx(row["compute_s"] + row["communication_s"] + row["launch_s"])
    single = next(each for each in report["table"] if each["name"] == "single")
    num_bytes = {"float32": 4, "bfloat16": 2}.get(arguments.dtype, 1)  # of float16, with a file of fp8
    assert single["weight_bytes_per_rank"] == pytest.approx(FLUX_WEIGHTS * num_bytes, rel=1e-6)
    assert (single["ranks"], single["host_bytes_per_rank"], single["exact"]) == (1, 0, True)


@pytest.mark.parametrize(
    ("ranks", "texts"),
    [
        (1, "ulysses=1 weights=offloaded"),
        (
            2,
            "ulysses=2 ring=2 cfg=2 data=2 ulysses=2,weights=sharded cfg=2,weights=sharded ulysses=2,weights=offloaded",
        ),
        (3, "ulysses=3 ring=3 data=3 ulysses=3,weights=sharded ulysses=3,weights=offloaded"),
    ],
)
def test_doctor_tries_each_way_to_use_all_devices(ranks: int, texts: str) -> None:
    assert list(_plans(ranks)) == [ParallelPlan.parse(text) for text in texts.split()]


@pytest.mark.parametrize(
    ("device", "plan", "free", "fits"),
    [
        ("cuda", "ulysses=2,weights=sharded", [11, 9], False),
        ("cuda", "ulysses=2,weights=sharded", [12, 10], True),  # host memory is another
        ("cuda", "ulysses=2,weights=sharded", [12, None], None),
        ("cpu", "ulysses=2,weights=sharded", [25], False),
        ("cpu", "ulysses=2,weights=sharded", [26], True),  # both ranks have it of one memory
        ("cpu", "ulysses=2", [13], True),  # whole weights are the file's pages, which both ranks have
        ("cpu", "ulysses=2", [12], False),
    ],
)
def test_doctor_says_whether_a_plan_fits(device: str, plan: str, free: list[int | None], fits: bool | None) -> None:
    devices = [Device(device, 0)]
    said = _memory(Needed(10, 3), ParallelPlan.parse(plan), devices, free)
    assert said == {"bytes_per_rank": 10, "host_bytes_per_rank": 3, "fits": fits}
    assert set(_memory(None, ParallelPlan(), devices, free).values()) == {None}


def test_doctor_says_of_a_file_what_each_plan_takes() -> None:
    row = {"plan": "uly2", "takes": True, "why": "", "bytes_per_rank": 2**29, "host_bytes_per_rank": 0, "fits": True}
    rows = [
        row,
        row | {"host_bytes_per_rank": 2**31, "fits": False},
        row | {"fits": None},
        row | {"takes": False, "why": "odd"},
    ]
    file = {"file": "a.safetensors", "model": "A", "computed_by": "it", "file_bytes": 2**28, "tokens": "shared"}
    assert doctor_model.describe(file | {"plans": rows}) == [
        "model a.safetensors: A, computed by it, 0.25 GiB",
        "  uly2: yes, 0.50 GiB a rank",
        "  uly2: yes, 0.50 GiB a rank and 2.00 GiB of host memory, which does not fit",
        "  uly2: yes, 0.50 GiB a rank",
        "  uly2: no: odd",
    ]
    assert doctor_model.describe(file | {"tokens": "tokens mix", "plans": []})[0].endswith("0.25 GiB; tokens mix")


@pytest.mark.parametrize(("kind", "computes"), [("cpu", "cpu"), ("cuda", "cuda:1")])
@pytest.mark.parametrize("unshared", ["", "it mixes tokens"])
def test_doctor_adds_up_what_comfyui_says_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, computes: str, unshared: str
) -> None:
    said = {"model": "A", "class": "a.B", "dtype": "bf16", "latent": [1, 2], "block_bytes": [30, 30, 42]}
    said |= {"weight_bytes": 150, "activation_bytes": 7, "unshared": unshared}
    asked = list[object]()

    class Answering(SimpleNamespace):
        def __enter__(self) -> Answering:
            return self

        def __exit__(self, *_: object) -> None:
            asked.append("ended")

    def started(*given: object) -> Answering:
        asked.extend(given)
        return Answering(ask=lambda what, **how: asked.extend([what, how]) or said)

    monkeypatch.setattr(doctor_model, "ComfyUIProcess", started)
    monkeypatch.setattr(doctor_model, "find_comfyui", lambda told: f"found {told}")
    write_sample(path := tmp_path / "a.safetensors")
    report = doctor_model.describe_file(str(path), "/c", [Device(kind, 1), Device(kind, 0)], [186, 400])
    assert asked == ["found /c", computes, "describe", {"path": str(path)}, "ended"]
    rows = {row.pop("plan"): tuple(row.values()) for row in report.pop("plans")}
    assert report == {
        **{"file": "a.safetensors", "file_bytes": path.stat().st_size, "model": "A", "latent": [1, 2]},
        **{"computed_by": "ComfyUI's a.B in bf16", "tokens": unshared or "shared"},
    }
    refused, on_cpu = (False, unshared, None, None, None), kind == "cpu"
    at_hand, others = 2 * 42, 150 - 102
    whole, half = (True, "", 157, 0, True), (True, "", 154, 0, True)
    assert rows == {
        **dict.fromkeys(("ulysses=2", "ring=2"), refused if unshared else half),
        **dict.fromkeys(("cfg=2", "data=2"), whole),
        "ulysses=2,weights=sharded": refused if unshared else (True, "", others + at_hand + 4 + 51, 0, False),
        "cfg=2,weights=sharded": (True, "", others + at_hand + 7 + 51, 0, False),
        "ulysses=2,weights=offloaded": refused if unshared else (True, "", others + at_hand + 4, 51, not on_cpu),
    }


def test_verify_tells_of_the_ranks_that_compiled_their_graphs_and_of_each_reason_once() -> None:
    reasons = [None, "", "A has no graph", "A has no graph"]
    ranks: Any = [
        SimpleNamespace(compiled=None if reason is None else SimpleNamespace(graphs=number, reason=reason))
        for number, reason in enumerate(reasons)
    ]
    assert verify._graphs_of(ranks) == ([1, 2, 3], ["blocks run uncompiled: A has no graph"])
    assert verify._graphs_of(ranks[:1]) == ([], [])
