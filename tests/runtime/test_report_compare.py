"""Which runs are held against each other, and what is said of them: by the newest alike, never by one that is not."""

import re
from pathlib import Path
from typing import Any

import pytest

from parallel_runtime.plan import ParallelPlan
from parallel_runtime.report.build import plan_part
from parallel_runtime.report.compare import (
    ROUNDING,
    Facts,
    facts_of,
    name_works,
    quicker,
    quoted,
    speedup,
    suggestion,
    summary,
    time_fractions,
    verdict,
    work_of,
)

ALONE_DEGREES = {"data": 1, "cfg": 1, "pipefusion": 1, "ring": 1, "ulysses": 1}
ALONE, PAIR, RINGS = ParallelPlan(), ParallelPlan(ulysses=2), ParallelPlan(ring=2)
GPU = {"name": "cuda:0", "kind": "cuda", "model": "RTX 3090"}


def run(plan: ParallelPlan, step_s: float, /, **changes: Any) -> dict[str, Any]:
    """A report of a sampling run, as far as it is read here."""
    report = {
        "kind": "denoise",
        "model": {"file": "a.safetensors", "dtype": "bfloat16"},
        "devices": [GPU],
        "plan": plan_part(plan),
        "sizes": {"width": 512, "height": 512, "batch": 1},
        "sampling": {"steps": 20, "sampler": "euler", "cfg": 1.0, "denoise": 1.0},
        "timings": {"step_s": [step_s] * 20, "denoise_s": 20 * step_s},
    }
    return report | changes


def named(report: dict[str, Any]) -> dict[str, Any]:
    """The same with its work, as a new report has it."""
    name_works(report)
    return report


def benchmark(**run_s: float) -> dict[str, Any]:
    """One of one rank and these plans, by the median of their runs; stock ComfyUI has no plan."""
    plans = {"one": ALONE, "uly2": PAIR, "ring2": RINGS}
    rows = [{"name": name, "plan": plan_part(plans[name]), "median_s": took} for name, took in run_s.items()]
    return run(ALONE, 1.0) | {"kind": "benchmark", "contenders": [*rows, {"name": "ComfyUI", "median_s": 9.0}]}


def known(*reports: dict[str, Any]) -> list[list[Facts]]:
    """The facts of reports that came in this order, from number 1 on."""
    return [facts_of(named(report), number) for number, report in enumerate(reports, 1)]


def compared(*reports: dict[str, Any]) -> dict | None:
    """How the last of these runs compares."""
    facts = known(*reports)
    return speedup(facts[-1][0], [each for found in facts for each in found])


def test_a_run_is_held_against_the_newest_on_one_device() -> None:
    found = compared(run(ALONE, 0.9), run(ALONE, 0.42), run(PAIR, 0.28))
    expected = {"factor": pytest.approx(1.5), "one_s": 0.42, "plan_s": 0.28, "plan": "uly2", "number": 2}
    assert found == expected | {"kind": "denoise"}


PROOF = {"verdict": "proven", "error": 6e-3, "tolerance": 1e-2}
CACHE = {"name": "EasyCache", "threshold": 0.2, "skipped": 1, "of": 4}


def test_the_share_card_knows_the_same_kernels_as_rounding() -> None:
    card = (Path(__file__).resolve().parents[2] / "web" / "panel" / "share_card.mjs").read_text(encoding="utf-8")
    assert f"const ROUNDING = /{'|'.join(ROUNDING)}/i" in card


@pytest.mark.parametrize(
    ("changes", "exact"),
    [
        ({"proof": PROOF}, {"exact": "proven", "error": 6e-3, "dtype": "bfloat16"}),
        ({"proof": PROOF | {"error": 1e-2}}, {"exact": "proven", "error": 1e-2, "dtype": "bfloat16"}),
        ({"proof": PROOF | {"error": 2e-2}}, {}),
        ({"proof": {"verdict": "not proven"}}, {}),
        ({"proof": {"verdict": "not needed"}}, {"exact": "whole"}),
        ({}, {}),
        ({"proof": PROOF, "step_caches": [CACHE]}, {}),
        ({"proof": PROOF, "ranks": [{"attention": "SageAttention, which rounds"}]}, {}),
        ({"proof": PROOF, "ranks": [{"attention": "sage"}]}, {}),
        (
            {"proof": PROOF, "ranks": [{"attention": "pytorch: flash attention"}]},
            {"exact": "proven", "error": 6e-3, "dtype": "bfloat16"},
        ),
        ({"proof": PROOF, "exchange": "fp8"}, {}),
        ({"proof": PROOF, "plan": plan_part(ParallelPlan(pipefusion=2))}, {}),
    ],
)
def test_what_is_quoted_was_measured_and_is_as_exact_as_the_proof_found(changes: dict, exact: dict) -> None:
    report, found = run(PAIR, 0.28) | changes, {"factor": 1.5}
    assert quoted(report, found) == {"devices": 2, "factor": 1.5} | exact
    assert quoted(report, None) is None  # no run on one device
    if "plan" not in changes:  # of a version before pipelines
        old = report["plan"] | {"degrees": {"ulysses": 2}}
        assert quoted(report | {"plan": old}, found) == {"devices": 2, "factor": 1.5} | exact
        assert Facts(number=1, source="", work="", plan=old, step_s=1.0).exact
    assert quoted(run(ALONE, 0.42) | changes | {"plan": plan_part(ALONE)}, found) is None


def test_one_device_is_held_against_the_newest_on_several() -> None:
    found = compared(run(PAIR, 0.28), run(RINGS, 0.21), run(ALONE, 0.42))
    assert found is not None
    assert (found["factor"], found["plan"], found["number"]) == (pytest.approx(2.0), "ring2", 2)


LORA = {"name": "0123456789ab", "weights": 8, "strengths": [0.8], "side_branch": False}
CONTROL = {"kind": "ControlNet", "name": "0123456789ab", "strength": 0.7, "start": 0.0, "end": 1.0}
PATCHED = {"file": "a.safetensors", "dtype": "bfloat16", "patches": LORA}
UNLIKE = {
    "a LoRA": {"model": PATCHED},
    "a ControlNet": {"controls": [CONTROL]},
    "file": {"model": {"file": "b.safetensors", "dtype": "bfloat16"}},
    "dtype": {"model": {"file": "a.safetensors", "dtype": "float32"}},
    "size": {"sizes": {"width": 512, "height": 768, "batch": 1}},
    "batch": {"sizes": {"width": 512, "height": 512, "batch": 2}},
    "frames": {"sizes": {"width": 512, "height": 512, "batch": 1, "frames": 21}},
    "device": {"devices": [GPU | {"model": "H100"}]},
    "steps": {"sampling": {"steps": 4, "sampler": "euler", "cfg": 1.0, "denoise": 1.0}},
    "sampler": {"sampling": {"steps": 20, "sampler": "heun", "cfg": 1.0, "denoise": 1.0}},
    "cfg above 1": {"sampling": {"steps": 20, "sampler": "euler", "cfg": 3.5, "denoise": 1.0}},
    "a step cache": {
        "step_caches": [{"name": "EasyCache", "threshold": 0.2, "skipped": 3, "of": 20, "counts": "steps"}]
    },
    "weights in host memory": {"plan": plan_part(ParallelPlan(weights="offloaded"))},
    "the loop": {"loop": {"kind": "resident"}},
    "blocks that were compiled": {"ranks": [{"regions": {"compile_s": [3.0] + [0.0] * 19}}]},
    "a list of images": {"sizes": {"width": 512, "height": 512, "batch": 1, "images": 4}},
    "no step timed": {"timings": {"step_s": []}},
    "one step timed": {"timings": {"step_s": [0.42]}},
    "a clock that stood still": {"timings": {"step_s": [0.0] * 20}},
    "no parallel MODEL": {"model": {}},
}


@pytest.mark.parametrize("changes", UNLIKE.values(), ids=UNLIKE)
def test_runs_that_differ_are_not_compared(changes: dict[str, Any]) -> None:
    facts = known(run(ALONE, 0.42, **changes), run(PAIR, 0.28))
    assert speedup(facts[1][0], [*facts[0], *facts[1]]) is None
    alike = known(run(ALONE, 0.42), run(PAIR, 0.28))
    assert speedup(alike[1][0], [*alike[0], *alike[1]]) is not None


def test_the_work_of_a_run_is_what_was_sampled_how_and_where() -> None:
    cache = {"step_caches": [CACHE | {"of": count, "skipped": count} for count in (0, 1)]}
    made = {"model": PATCHED, "controls": [CONTROL], "loop": {"kind": "host"}, "graphs": 3}
    report = run(PAIR, 0.28, **made, **cache)
    assert work_of(report, report) == (
        *("a.safetensors", "bfloat16", "0123456789ab", False, (("ControlNet", "0123456789ab", 0.0, 1.0),), "RTX 3090"),
        *(False, (("EasyCache", 0.2, 0.0), ("EasyCache", 0.2, 1.0)), "host", False, True),
        *(512, 512, None, 1, None, None, None),
        *(20, "euler", 1.0),
    )
    plain = run(ParallelPlan(weights="offloaded"), 0.28, sampling={"cfg": 3.5}, devices=[{"kind": "cpu"}])
    assert work_of(plain, plain)[2:11] == (None, False, (), "cpu", True, (), None, True, False)
    name_works(report)
    assert re.fullmatch(r"[0-9a-f]{12}", report["work"])
    stock = run(ALONE, 0.28)
    del stock["plan"]
    assert "work" not in named(stock)


def test_the_same_lora_and_controlnet_at_other_strengths_are_the_same_work() -> None:
    weaker = {"model": PATCHED | {"patches": LORA | {"strengths": [0.1]}}, "controls": [CONTROL | {"strength": 0.1}]}
    assert compared(run(ALONE, 0.42, model=PATCHED, controls=[CONTROL]), run(PAIR, 0.28, **weaker)) is not None
    late = {"model": PATCHED, "controls": [CONTROL | {"end": 0.5}]}
    assert compared(run(ALONE, 0.42, model=PATCHED, controls=[CONTROL]), run(PAIR, 0.28, **late)) is None
    beside = {"model": PATCHED | {"patches": LORA | {"side_branch": True}}}
    assert compared(run(ALONE, 0.42, model=PATCHED), run(PAIR, 0.28, **beside)) is None


def cached(skipped: int) -> dict[str, Any]:
    """That a step cache skipped so many of 20 steps."""
    cache = {"name": "EasyCache", "threshold": 0.2, "skipped": skipped, "of": 20, "counts": "steps"}
    return {"step_caches": [cache]}


def test_runs_with_a_step_cache_are_compared_by_all_their_time_where_as_much_was_skipped() -> None:
    steps = [0.01] * 12 + [1.0] * 8  # the median step is a skipped one
    alone = run(ALONE, 1.0, timings={"step_s": steps, "denoise_s": 9.0}, **cached(12))
    pair = run(PAIR, 1.0, timings={"step_s": steps, "denoise_s": 6.0}, **cached(12))
    found = compared(alone, pair)
    assert found is not None
    assert (found["one_s"], found["plan_s"], found["factor"]) == (0.45, 0.3, pytest.approx(1.5))
    assert summary(pair)["step_s"] == 0.3
    assert compared(alone, pair | cached(11)) is None


def test_the_first_of_two_steps_does_not_count() -> None:
    found = compared(run(ALONE, 1.0, timings={"step_s": [5.0, 0.6]}), run(PAIR, 1.0, timings={"step_s": [9.0, 0.4]}))
    assert found is not None
    assert (found["one_s"], found["plan_s"]) == (0.6, 0.4)
    assert facts_of(run(PAIR, 1.0, timings={"step_s": [9.0]}), 1) == []
    (three,) = facts_of(named(run(PAIR, 1.0, timings={"step_s": [9.0, 0.4, 0.6]})), 1)
    assert three.step_s == 0.6


def test_cases_of_a_benchmark_whose_loops_ran_elsewhere_are_not_compared() -> None:
    report = benchmark(one=10.0, uly2=5.0)
    for case, kind in zip(report["contenders"], ("host", "resident"), strict=False):
        case["loop"] = {"kind": kind}
    assert compared(report, run(PAIR, 0.28, loop={"kind": "resident"})) is None
    report["contenders"][0]["loop"] = {"kind": "resident"}
    assert compared(report, run(PAIR, 0.28, loop={"kind": "resident"})) is not None


def test_a_benchmark_compares_its_own_cases_and_never_with_a_run() -> None:
    found = compared(benchmark(one=10.0, uly2=5.0), run(PAIR, 0.28))
    assert found == {"factor": 2.0, "one_s": 0.5, "plan_s": 0.25, "plan": "uly2", "number": 1, "kind": "benchmark"}
    assert compared(benchmark(uly2=5.0), run(PAIR, 0.28)) is None
    assert compared(benchmark(one=10.0, ring2=5.0), run(PAIR, 0.28)) is None, "it has another plan"
    assert facts_of(named(benchmark(one=10.0, uly2=5.0)) | {"sampling": {}}, 1) == [], "of how many steps is not known"
    newer = compared(benchmark(one=10.0, uly2=5.0), run(ALONE, 0.42), run(PAIR, 0.28))
    assert newer is not None
    assert newer["number"] == 2


def test_the_plan_that_was_quickest_at_the_same_is_what_to_try() -> None:
    def tried(*reports: dict[str, Any]) -> dict | None:
        facts = known(*reports)
        return quicker(facts[-1][0], [each for found in facts for each in found])

    found = tried(run(RINGS, 0.25), run(ALONE, 0.26), run(PAIR, 0.5))
    assert found == {
        "plan": "ring2",
        "degrees": {"data": 1, "cfg": 1, "pipefusion": 1, "ring": 2, "ulysses": 1},
        "weights": "replicated",
        "factor": 2.0,
        "by": "measured",
    }
    assert tried(run(RINGS, 0.49), run(PAIR, 0.5)) is None, "2 % is nothing"
    assert tried(run(RINGS, 1.0), run(PAIR, 1.05)) is not None
    images = ParallelPlan(data=2)
    for others, plan in (
        (((RINGS, 0.25), (images, 0.2)), "data2-ring1-uly1"),
        (((RINGS, 0.25), (images, 0.25)), "ring2"),
    ):
        best = tried(*(run(other, step_s) for other, step_s in others), run(PAIR, 0.5))
        assert best is not None and best["plan"] == plan
    old = {"name": "uly2", "degrees": {"ulysses": 2}, "weights": "replicated"}
    assert suggestion(old, factor=2.0, by="measured")["degrees"] == ALONE_DEGREES | {"ulysses": 2}
    assert tried(run(PAIR, 0.2), run(PAIR, 0.5)) is None, "it is the plan of this run"
    assert tried(run(RINGS, 0.2, exchange="fp8"), run(PAIR, 0.5)) is None, "heads travelled rounded"
    assert tried(run(ParallelPlan(pipefusion=2), 0.1), run(PAIR, 0.5)) is None, "its picture is another"
    assert tried(run(RINGS, 0.1, model=UNLIKE["file"]["model"]), run(PAIR, 0.5)) is None
    by_benchmark = tried(benchmark(uly2=10.0, ring2=5.0), run(PAIR, 0.5))
    assert by_benchmark is not None
    assert (by_benchmark["plan"], by_benchmark["factor"]) == ("ring2", 2.0)
    assert tried(benchmark(ring2=1.0), run(PAIR, 0.5)) is None, "the two were not timed alike"


@pytest.mark.parametrize(("compute", "said"), [(0.75, "good"), (0.7, "fair"), (0.5, "fair"), (0.3, "poor")])
def test_where_the_time_went_makes_the_verdict(compute: float, said: str) -> None:
    rank = {"compute_s": [0, compute, compute], "communication_s": [0] + [0.9 - compute] * 2, "idle_s": [9.0, 0.1, 0.1]}
    shares = time_fractions([rank, {"rank": 1}])  # the first step also proves the plan
    assert shares == {"compute": compute, "communication": pytest.approx(0.9 - compute), "idle": 0.1}
    assert verdict(shares) == said
    told = summary(run(PAIR, 0.28) | {"ranks": [rank]})
    assert (told["verdict"], told["step_s"], told["ranks"], told["shares"]) == (said, 0.28, 2, shares)
    assert "verdict" not in summary(run(ALONE, 0.28) | {"ranks": [rank]}), "one device waits for nobody"


def test_a_report_of_a_decode_has_a_summary_and_nothing_to_compare() -> None:
    report = {"kind": "vae", "sizes": {"width": 512, "height": 512, "images": 1}, "devices": [GPU], "vae": {}}
    assert facts_of(report, 1) == []
    assert summary(report) == {"width": 512, "height": 512, "images": 1}


def test_a_summary_names_the_run_in_a_few_words() -> None:
    sizes = {"width": 512, "height": 256, "frames": 5, "batch": 2, "images": 3, "text_tokens": 7}
    report = run(PAIR, 0.28, sizes=sizes, timings={"step_s": [0.5, 0.25, 0.3], "denoise_s": 1.05})
    assert summary(report) == {
        **{"width": 512, "height": 256, "frames": 5, "batch": 2, "images": 3, "steps": 20, "denoise_s": 1.05},
        **{"plan": "uly2", "ranks": 2, "step_s": 0.3},
    }
    few = {"compute_s": [1.0, 0.5], "communication_s": [0.25, 0.0], "idle_s": [0.25, 0.0]}
    assert time_fractions([few]) == {"compute": 0.75, "communication": 0.125, "idle": 0.125}, "two steps, both count"
    three = {"compute_s": [9.0, 0.1, 0.2], "communication_s": [9.0, 0.6, 0.0], "idle_s": [0.0] * 3}
    assert time_fractions([three]) == {"compute": 0.3333, "communication": 0.6667, "idle": 0.0}
    assert time_fractions([{"compute_s": [0.0], "communication_s": [0.0], "idle_s": [0.0]}]) == {}
