"""The schema of a report: what it takes, what it refuses, and that its page says the same."""

import copy
import json
import re
from pathlib import Path

import pytest
from made_replies import BEYOND, BEYOND_RUN, run_reply, step_reply

from parallel_runtime.devices import parse_devices
from parallel_runtime.plan import BatchSlice, ParallelPlan
from parallel_runtime.proof import NOT_NEEDED, NOT_PROVEN, PROVEN, Proof
from parallel_runtime.report.build import (
    CLOCKS_AGREE,
    CLOCKS_AGREE_S,
    Span,
    cached_calls,
    case,
    kept_part,
    new_report,
    plan_part,
    proof_part,
    rank_parts,
    span_timings,
    spans_of_run,
)
from parallel_runtime.report.schema import ReportError, fields, validate
from parallel_runtime.report.text import describe
from parallel_runtime.wire.replies import CachedCalls, KeptCalls, Memory, StepReply

PAGE = Path(__file__).resolve().parents[2] / "docs" / "report.md"
DEVICES = parse_devices("cpu:2").devices


def told(rank: int, *, began_s: float, step_s: float) -> StepReply:
    """What a rank says of one request, a fifth of it in collectives."""
    regions = {"double_blocks_s": step_s / 2, "communication_s": step_s / 5}
    memory = Memory(resident_bytes=1000 + rank)
    return step_reply(memory=memory, began_s=began_s, step_s=step_s, collectives=4, sent_bytes=64, regions=regions)


def two_steps() -> list[Span]:
    """A step of two requests and one of one; rank 1 ends 0.1 s after rank 0, but for the last step."""
    first = [[told(r, began_s=10.0, step_s=1.0 + r / 10) for r in (0, 1)] for _ in range(2)]
    second = [[told(0, began_s=13.0, step_s=1.5), told(1, began_s=13.0, step_s=1.0)]]
    return [Span(wall_s=3.0, requests=first), Span(wall_s=2.0, requests=second)]


def denoise() -> dict:
    ranks = rank_parts(two_steps(), DEVICES, began_s=9.0)
    timings = {"per": "step", "denoise_s": 5.0, "first_step_s": 3.0, "step_s": [3.0, 2.0], **span_timings(ranks)}
    return new_report(
        "denoise",
        devices=DEVICES,
        comfyui="0.30.0",
        prompt_id="0b1c",
        plan=plan_part(ParallelPlan(ulysses=2)),
        sampling={"steps": 2, "seed": 2**64 - 1, "sampler": "multistep/euler", "scheduler": "simple"},
        timings=timings,
        ranks=ranks,
    )


def test_compute_communication_and_idle_add_up_to_the_step() -> None:
    report = denoise()
    for rank in report["ranks"]:
        parts = zip(rank["compute_s"], rank["communication_s"], rank["idle_s"], strict=True)
        assert [sum(part) for part in parts] == pytest.approx(report["timings"]["step_s"])


def test_the_slowest_rank_and_the_skew_stand_beside_rank_0() -> None:
    timings = denoise()["timings"]
    assert timings["rank0_s"] == pytest.approx([2.0, 1.5])
    assert timings["slowest_rank_s"] == pytest.approx([2.2, 1.5])
    assert timings["slowest_rank"] == [1, 0]
    assert timings["skew_s"] == pytest.approx([0.1, 0.5])


def test_regions_of_several_requests_add_up() -> None:
    ranks = denoise()["ranks"]
    assert ranks[0]["regions"]["double_blocks_s"] == pytest.approx([1.0, 0.75])
    assert ranks[1]["collectives"] == [8, 4]
    assert ranks[1]["begin_s"] == pytest.approx([1.0, 4.0])


def test_a_step_of_several_requests_ends_with_the_last() -> None:
    requests = [[told(rank, began_s=began, step_s=0.5) for rank in (0, 1)] for began in (1.0, 2.0)]
    (rank, _) = rank_parts([Span(wall_s=3.0, requests=requests)], DEVICES, began_s=0.0)
    assert (rank["begin_s"], rank["end_s"]) == ([1.0], [2.5])


def test_a_step_that_needed_no_worker_is_idle_and_not_unknown() -> None:
    spans = [*two_steps(), Span(wall_s=0.5, requests=[])]
    (rank, _) = rank_parts(spans, DEVICES, began_s=9.0)
    assert (rank["busy_s"][2], rank["idle_s"][2], rank["regions"]["double_blocks_s"][2]) == (0, 0.5, 0)
    assert "begin_s" not in rank


def test_a_run_in_the_workers_reads_like_one_step_after_the_other() -> None:
    regions = {"weights_s": (0.25, 0.0)}
    told_once = run_reply(step_s=(1.0, 0.5), began_s=(2.0, 3.0), regions=regions, collectives=8, sent_bytes=640)
    spans = spans_of_run([told_once, BEYOND_RUN], [1.5, 0.75])
    ranks = rank_parts(spans, DEVICES, began_s=1.0)
    first = {"busy_s": [1.0, 0.5], "compute_s": [0.75, 0.5], "communication_s": [0.25, 0.0], "idle_s": [0.5, 0.25]}
    assert ranks[0].items() >= {**first, "begin_s": [1.0, 2.0], "end_s": [2.0, 2.5], "lane": 0}.items()
    assert not {"collectives", "sent_bytes", "weight_bytes"} & set(ranks[0]), "counts of the whole run are of no step"
    assert (ranks[0]["run_sent_bytes"], ranks[0]["run_weight_bytes"]) == (640, 0)
    assert ranks[1] == {"rank": 1, "device": "cpu:1", "memory": {"resident_bytes": 1000}}, "it is beyond the plan"
    assert span_timings(ranks)["slowest_rank"] == [0, 0] and "skew_s" not in span_timings(ranks)


def test_what_a_run_in_the_workers_does_around_its_steps_is_the_ranks_own() -> None:
    around = {"prepare_s": 0.5, "prepare_regions": {"hand_over_s": 0.125, "modulation_s": 0.25}, "finish_s": 0.0625}
    told_once = run_reply(step_s=(1.0,), began_s=(2.0,), regions={"gather_s": (0.25,)}, **around)
    ranks = rank_parts(spans_of_run([told_once, BEYOND_RUN], [1.5]), DEVICES, began_s=1.0)
    ranks[0]["load_s"] = 3.0
    timings = {"load_s": 4.0, "prepare_s": 0.5, "denoise_s": 2.0, **span_timings(ranks)}
    report = new_report("denoise", devices=DEVICES, sampling={"steps": 1}, timings=timings, ranks=ranks)
    validate(json.loads(json.dumps(report)))
    assert report["ranks"][0].items() >= around.items()
    assert ranks[0]["busy_s"] == [1.0], "it is no part of a step"
    assert not {"load_s", *around} & set(report["ranks"][1]), "a rank beyond the plan prepared nothing"
    text = describe(report)
    assert "load 4.00 s, weights 3.00 s on the slowest rank" in text
    assert "prepare 500 ms in the workers" in text
    assert "compute 1.00 s (gather 250 ms of it)" in text


def test_a_rank_of_one_step_has_all_that_it_told() -> None:
    told_once = step_reply(
        **{"began_s": 1.0, "pieces": (BatchSlice(0, 1, 2),), "collectives": 2, "sent_bytes": 3, "weight_bytes": 4},
        **{"attention": ("sdpa", "flash"), "regions": {"gather_s": 0.25, "weights_s": 0.125}, "batch_group": 5},
    )
    spans = [Span(wall_s=3.0, requests=[[told_once, BEYOND]])]
    assert rank_parts(spans, DEVICES, began_s=0.5, utilisation={0: 0.75})[0] == {
        **{"rank": 0, "device": "cpu:0", "lane": 5, "attention": "sdpa, flash", "utilisation": 0.75},
        **{"busy_s": [1.0], "idle_s": [2.0], "communication_s": [0.125], "compute_s": [0.875]},
        **{"begin_s": [0.5], "end_s": [1.5], "collectives": [2], "sent_bytes": [3], "weight_bytes": [4]},
        **{"pieces": [[[0, 1, 2]]], "regions": {"gather_s": [0.25], "weights_s": [0.125]}},
        "memory": {"resident_bytes": 1000},
    }
    (late,) = rank_parts(spans, DEVICES[:1], began_s=9.0)
    assert (late["begin_s"], late["end_s"]) == ([0.0], [0.0])


def test_steps_that_were_not_timed_have_the_parts_of_the_timed_one_before() -> None:
    steps = {"step_s": (2.0, 1.0, 4.0, 2.0), "regions": {"communication_s": (0.0, 0.25, 0.0, 1.0)}}
    for timed, waited in (((1, 3), [0.5, 0.25, 1.0, 1.0]), ((), None), (None, [0.0, 0.25, 0.0, 1.0])):
        spans = spans_of_run([run_reply(**steps, timed_steps=timed)], [2.0, 1.0, 4.0, 2.0])
        (rank,) = rank_parts(spans, DEVICES[:1], began_s=0.0)
        assert rank.get("communication_s") == waited
        assert rank.get("compute_s") == (waited and [s - each for s, each in zip(steps["step_s"], waited, strict=True)])


def test_steps_without_requests_lend_no_parts_and_a_rank_that_no_request_has_is_idle() -> None:
    timed, untimed = step_reply(regions={"communication_s": 0.5}), [step_reply(step_s=each) for each in (2.0, 4.0)]
    replies = [None, untimed[0], timed, None, untimed[1]]
    spans = [Span(wall_s=4.0, requests=[[reply]] if reply else []) for reply in replies]
    first, second = rank_parts(spans, DEVICES, began_s=0.0)
    assert first["communication_s"] == [0.0, 1.0, 0.5, 0.0, 2.0]
    assert second["busy_s"] == [0] * 5 and "memory" not in second
    instant = [step_reply(step_s=0.0, regions={"communication_s": 0.0}), untimed[0]]
    assert (
        "compute_s"
        not in rank_parts([Span(wall_s=1.0, requests=[[each]]) for each in instant], DEVICES[:1], began_s=0)[0]
    )
    (rank,) = rank_parts([Span(wall_s=1.0, requests=[[run_reply(step_s=(1.0, 2.0))]])], DEVICES[:1], began_s=0.0)
    assert rank["busy_s"] == [1.0], "of a run it is the first step"


def test_what_a_step_cache_skipped_is_counted_once_for_the_ranks_of_a_group() -> None:
    told_of = [
        step_reply(batch_group=group, cached=cached)
        for group, cached in (
            *((0, CachedCalls(calls=2, skipped=1)), (0, CachedCalls(calls=2, skipped=1))),
            *((1, CachedCalls(calls=3, skipped=3)), (2, None)),
        )
    ]
    assert cached_calls([*told_of, BEYOND]) == CachedCalls(calls=5, skipped=4)


def test_a_case_has_its_median_its_ends_and_its_middle_half() -> None:
    row = case("uly2", "plan", "parallel-dit", (4.0, 1.0, 2.0, 3.0), threads=None, error=0.5)
    assert row == {
        **{"name": "uly2", "kind": "plan", "engine": "parallel-dit", "run_s": [4.0, 1.0, 2.0, 3.0]},
        **{"median_s": 2.5, "min_s": 1.0, "max_s": 4.0, "spread_s": 1.5, "error": 0.5},
    }
    assert "spread_s" in case("a", "plan", "b", [1.0, 2.0]) and "spread_s" not in case("a", "plan", "b", [1.0])


def test_a_new_report_has_what_it_is_given_and_nothing_else() -> None:
    plan = plan_part(ParallelPlan(ring=2), chosen_for="a picture", reasons=("it is quick",))
    degrees = {"data": 1, "cfg": 1, "pipefusion": 1, "ring": 2, "ulysses": 1}
    assert plan == {
        **{"name": "ring2", "ranks": 2, "degrees": degrees, "weights": "replicated", "chosen_for": "a picture"},
        "reasons": ["it is quick"],
    }
    staged = plan_part(ParallelPlan(pipefusion=2, patches=8, warmup_steps=3))
    assert (staged["patches"], staged["warmup_steps"]) == (8, 3)
    assert new_report("denoise", devices=DEVICES, sampling={"steps": 1}, timings={"denoise_s": 1.0}, plan=staged)
    parts = {"sampling": {"steps": 1}, "timings": {"denoise_s": 1.0}, "plan": plan}
    report = new_report("denoise", devices=DEVICES, comfyui="0.35", prompt_id="1f", loop=None, **parts)
    assert report.items() >= {**parts, "from_cache": False, "prompt_id": "1f", "kind": "denoise"}.items()
    made = {"schema", "kind", "run_id", "created", "from_cache", "versions", "devices", "prompt_id"}
    assert (
        set(report) == made | set(parts)
        and "comfyui" not in new_report("denoise", devices=DEVICES, **parts)["versions"]
    )
    measured = {"model": {"file": "a", "dtype": "b"}, "sizes": {"width": 64}}
    assert "work" in new_report("denoise", devices=DEVICES, **parts, **measured)
    with pytest.raises(ReportError, match="timings is missing"):
        new_report("denoise", devices=DEVICES, sampling={"steps": 1})
    reasons = ["'/opt/my tools/g++' failed", "counted: C:\\models\\a.safetensors is torn"]
    told = new_report(
        "denoise", devices=DEVICES, **(parts | {"plan": plan | {"reasons": reasons}, "warnings": reasons})
    )
    redacted = ["'g++' failed", "counted: a.safetensors is torn"]
    assert (told["plan"]["reasons"], told["warnings"]) == (redacted, redacted), "or a run would end without its picture"
    assert report["versions"]["comfyui"] == "0.35" and [each["name"] for each in report["devices"]] == [
        "cpu:0",
        "cpu:1",
    ]


@pytest.mark.parametrize(
    ("waited_s", "early"), [(0.9, False), (1.0, False), (CLOCKS_AGREE + CLOCKS_AGREE_S, False), (1.01, True)]
)
def test_a_rank_that_waited_longer_than_its_step_took_is_named(waited_s: float, early: bool) -> None:
    spans = [Span(wall_s=2.0, requests=[[step_reply(regions={"communication_s": waited_s}), step_reply()]])]
    ranks = rank_parts(2 * spans, DEVICES, began_s=0.0)  # of several steps the first is named
    parts = {"sampling": {"steps": 1}, "timings": {"denoise_s": 2.0}, "ranks": ranks, "warnings": ["another"]}
    report = new_report("denoise", devices=DEVICES, **parts)
    assert len(report["warnings"]) == 1 + early
    assert ("rank 0: it waited for others 1.010000 s of a step of 1.000000 s" in report["warnings"][-1]) == early
    row = case("uly2", "plan", "parallel-dit", [1.0], ranks=ranks)
    parts = {"contenders": [row], "warmup": 0, "runs": 1, "sizes": {"width": 64}}
    report = new_report("benchmark", devices=DEVICES, **parts)
    assert ("uly2, rank 0:" in str(report.get("warnings"))) == early


def test_what_was_not_measured_is_absent() -> None:
    very_long = [run_reply(step_s=(1.0,)), BEYOND_RUN]  # so that its ranks' messages had no room for more
    (rank, _) = rank_parts(spans_of_run(very_long, [2.0]), DEVICES, began_s=0.0)
    assert not {"begin_s", "end_s", "regions", "compute_s", "pieces", "prepare_regions"} & set(rank)
    report = new_report("vae", devices=DEVICES[:1], vae={"decode_s": 0.0, "device": "cpu"}, warnings=[], plan={})
    assert not {"warnings", "plan", "prompt_id", "ranks"} & set(report)
    assert "null" not in json.dumps(report)


def broken(path: str, value: object) -> dict:
    """A good report with one value, by its dotted path, replaced; deleted when the value is `Ellipsis`."""
    report = copy.deepcopy(denoise())
    *way, last = path.split(".")
    inner = report
    for key in way:
        inner = inner[int(key)] if key.isdigit() else inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return report


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("schema", "parallel-dit/report/2", "parallel-dit/report/1"),
        ("kind", "denoising", "one of denoise"),
        ("kind", "vae", "vae is missing"),
        ("created", "2026-01-31 12:00", "UTC"),
        ("from_cache", 0, "true or false"),
        ("run_id", ..., "run_id is missing"),
        ("timings.denoise_s", None, "leave it out"),
        ("timings.denoise_s", float("nan"), "finite"),
        ("timings.denoise_s", -1.0, "0 or more"),
        ("timings.step_s", 3.0, "use a list"),
        ("timings.per", "call", "step, request"),
        ("timings.seconds", 1.0, "timings.seconds is not a field"),
        ("ranks.0.busy_s", [1.0], "different lengths"),
        ("ranks.1.regions.attention_s", [1.0, 2.0, 3.0], "different lengths"),
        ("ranks.1.utilisation", 57, "0 to 1"),
        ("sampling.steps", True, "whole number"),
        ("sampling.sampler", "/samplers/euler", "without the path"),
        ("warnings", ["see /home/me/log"], "without the path"),
        ("versions.torch", "~/torch", "without the path"),
        ("devices", {}, "use a list"),
        ("plan.degrees.ring", ..., "plan.degrees.ring is missing"),
        ("prompt", "a lighthouse", "prompt is not a field"),
        ("sampling.sampler", "", "a text that is not empty"),
        *(("prompt_id", name, "a name without slashes") for name in ("", 3, "a/b", "a\\b")),
        ("run_id", "1f", "32 hexadecimal digits"),
        ("work", "1f", "12 hexadecimal digits"),
        ("work", 3, "12 hexadecimal digits"),
        ("ranks.0.pieces", [[[0, 1]], []], "a list of [call, first row"),
        ("ranks.0.pieces", [[[0, 1, -1]], []], "a list of [call, first row"),
        ("ranks.0.pieces", [["012"], []], "a list of [call, first row"),
    ],
)
def test_what_the_schema_does_not_have_is_refused_by_name(path: str, value: object, words: str) -> None:
    validate(broken("ranks.0.pieces", [[[0, 0, 1], [1, 0, 1]], []]))
    with pytest.raises(ReportError, match=re.escape(words)):
        validate(broken(path, value))


def test_what_a_class_kept_is_counted_once_for_the_ranks_that_share_a_call() -> None:
    steps = [(0, 18 + 9), (2, 18)]  # found, tokens of a rank
    requests = [
        [step_reply(kept=KeptCalls(calls=2, found=found, rows=rows, kept_bytes=500_000)) for _ in range(2)] + [BEYOND]
        for found, rows in steps
    ]
    part = kept_part(requests)
    assert part == {"calls": 4, "found": 2, "tokens": [54, 36], "bytes": 500_000}
    report = denoise() | {"kept": part}
    validate(report)
    assert "keys kept between steps: found in 2 of 4 calls, 0.5 MB a rank; tokens computed: 54, 36" in describe(report)
    assert kept_part([[step_reply()], [BEYOND]]) == {}


def test_the_page_explains_every_field_and_no_other() -> None:
    cells = re.findall(r"^\| ((?:`[^`]+`(?:, )?)+) \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    explained = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert len(explained) == len(set(explained))
    assert set(explained) == {name for name, _ in fields()}


@pytest.mark.parametrize(
    ("verdicts", "told"),
    [
        ([], None),
        ([PROVEN], "proven with this ComfyUI: error 2.0e-07, at most 1e-05"),
        ([PROVEN, NOT_NEEDED], "proven"),
        ([NOT_NEEDED], "proof not needed: because"),
        ([PROVEN, NOT_PROVEN], None),  # which the caller warns of
    ],
)
def test_a_report_says_the_least_that_is_known_of_the_plan(verdicts: list[str], told: str | None) -> None:
    numbers = {"error": 2e-7, "control": 0.2, "tolerance": 1e-5, "tokens": 105, "calls": 3, "seconds": 0.4}
    known = {PROVEN: numbers, NOT_PROVEN: {"reason": "because", "calls": 1}, NOT_NEEDED: {"reason": "because"}}
    part = proof_part([Proof(verdict=verdict, **known[verdict]) for verdict in verdicts])
    report = denoise() | ({"proof": part} if part else {})
    validate(report)
    assert part.get("verdict") == (verdicts[-1] if verdicts[1:] == [NOT_PROVEN] else (verdicts or [None])[0])
    assert ("tokens" in part) == (part.get("verdict") in (PROVEN, NOT_PROVEN)), "what was not measured is absent"
    lines = [line for line in describe(report).splitlines() if line.startswith(("proof", "proven"))]
    assert len(lines) == (told is not None) and (told is None or lines[0].startswith(told))
