"""Mistakes in what a report says of what was measured."""

from __future__ import annotations

from .mutant import Mutant

SUMS = "test_report_schema.py::test_regions_of_several_requests_add_up"
BESIDE = "test_report_schema.py::test_the_slowest_rank_and_the_skew_stand_beside_rank_0"
IN_THE_WORKERS = "test_report_schema.py::test_a_run_in_the_workers_reads_like_one_step_after_the_other"

MUTANTS = (
    Mutant(
        "a step's idle time is what the rank was busy",
        'max(0.0, span.wall_s - step["step_s"])',
        'max(0.0, step["step_s"] - span.wall_s)',
        ("test_report_schema.py::test_compute_communication_and_idle_add_up_to_the_step",),
    ),
    Mutant(
        "waiting counts as computing",
        'max(0.0, step["step_s"] - wait) for step, wait',
        'max(0.0, step["step_s"]) for step, wait',
        ("test_report_schema.py::test_compute_communication_and_idle_add_up_to_the_step",),
    ),
    Mutant(
        "waiting for weights is no waiting",
        'WAITING = ("communication_s", "weights_s")',
        'WAITING = ("communication_s",)',
        (IN_THE_WORKERS,),
    ),
    Mutant(
        "the last request of a step is all of it",
        "regions[name] = regions.get(name, 0.0) + seconds",
        "regions[name] = seconds",
        (SUMS,),
    ),
    Mutant(
        "a step ends where its first request does",
        'total["ended_s"] = reports[-1]["began_s"] + reports[-1]["step_s"]',
        'total["ended_s"] = reports[0]["began_s"] + reports[0]["step_s"]',
        ("test_report_schema.py::test_a_step_of_several_requests_ends_with_the_last",),
    ),
    Mutant(
        "the slowest rank is called by its place among the busy ones",
        '"slowest_rank": [numbers[step.index(max(step))] for step in steps],',
        '"slowest_rank": [step.index(min(step)) for step in steps],',
        (BESIDE,),
    ),
    Mutant(
        "the skew is that of the beginnings",
        'ends = [rank["end_s"] for rank in ranks if "end_s" in rank]',
        'ends = [rank["begin_s"] for rank in ranks if "end_s" in rank]',
        (BESIDE,),
    ),
    Mutant(
        "every step of a whole run is read as its first",
        "Span(wall_s=seconds, requests=[ranks], step=number)",
        "Span(wall_s=seconds, requests=[ranks])",
        (IN_THE_WORKERS,),
    ),
    Mutant(
        "a speed-up is the other way round",
        'row["speedup"] = one_rank["median_s"] / row["median_s"]',
        'row["speedup"] = row["median_s"] / one_rank["median_s"]',
        ("test_report_chart.py::test_a_benchmark_names_what_the_run_loses_of_what_the_blocks_gain",),
    ),
    Mutant(
        "any process is the one that workers are held against",
        'if each["kind"] == "one_process" and each.get("threads") == row.get("threads"))',
        'if each["kind"] == "one_process")',
        ("test_report_chart.py::test_workers_are_held_against_the_process_of_as_many_threads",),
    ),
    Mutant(
        "a clock that was read early is not noticed",
        "if waited > CLOCKS_AGREE * busy + CLOCKS_AGREE_S]",
        "if waited > 2 * CLOCKS_AGREE * busy + CLOCKS_AGREE_S]",
        ("test_report_schema.py::test_a_rank_that_waited_longer_than_its_step_took_is_named",),
    ),
    Mutant(
        "a chart's timeline has no row for the last rank",
        '    present = [rank for rank in ranks if "begin_s" in rank]\n    for place',
        '    present = [rank for rank in ranks if "begin_s" in rank][:-1]\n    for place',
        ("test_report_chart.py::test_a_timeline_has_a_row_for_each_rank_with_the_area_of_its_seconds",),
    ),
    Mutant(
        "a chart draws waiting where the step begins",
        "[(b + busy - wait, wait) for b, busy, wait in spans]",
        "[(b, wait) for b, busy, wait in spans]",
        ("test_report_chart.py::test_a_timeline_has_a_row_for_each_rank_with_the_area_of_its_seconds",),
    ),
    Mutant(
        "a chart's bars are seconds",
        'value = base["median_s"] / each["median_s"]',
        'value = each["median_s"] / base["median_s"]',
        ("test_report_chart.py::test_speed_ups_are_over_one_rank_or_over_the_case_that_is_named",),
    ),
    Mutant(
        "a report counts the generations of workers from nought",
        '"pool": {"generation": pooled.pool.generation},',
        '"pool": {"generation": pooled.pool.generation - 1},',
        ("test_nodes_report.py::test_the_sampler_reports_each_rank_and_each_step",),
    ),
    Mutant(
        "verify shows a pipeline's exact steps for those with old keys",
        'runner.sampling_run = "verify"',
        "runner.sampling_run = None",
        ("test_command_line.py::test_verify_shows_a_pipeline_exact_in_warm_up_and_what_its_old_keys_change",),
    ),
)
