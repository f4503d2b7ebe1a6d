"""Judges the planner against published figures; writes planner.md.

    python -m benchmarks.planner_table

Owns the report. Rows are planner_rows.json, constants planner_constants.json (planner_fit.py makes them).
"""

import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

from benchmarks.planner_errors import (
    Contest,
    Judged,
    as_auto,
    contests,
    held_out_errors,
    kept_constants,
    planners,
    quickest,
    rule_of_thumb,
)
from benchmarks.planner_fit import FREE, TABLE_CONSTANTS, table_rows
from benchmarks.planner_model import HERE

MEDIAN_ERROR, RIGHT = 0.15, 0.90  # the targets
RULE = "rule of thumb"
JUDGED = ("calibrated", "table", "table elsewhere")  # the planners that the targets are for


def _row(figure: str, cells: Sequence[str], target: str = "") -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in (figure, *cells, target))


def _verdict(target: str, met: Mapping[str, bool]) -> str:
    """The target, and whether each planner reaches it."""
    missed = [name for name, reached in met.items() if not reached]
    if not missed:
        return f"{target}: met"
    return f"{target}: missed" if len(missed) == len(met) else f"{target}: missed by {', '.join(missed)}"


def _summary() -> list[str]:
    """The result: a figure a line, a planner a column."""
    found = planners()
    columns = [*found, RULE]
    return [
        _row("figure", columns, "target"),
        "| --- " * (len(columns) + 2) + "|",
        *_counts(found),
        *_errors(found),
        *_choices(found, "a setting, any number of ranks", by_ranks=False),
        *_choices(found, "a setting and a number of ranks", by_ranks=True),
    ]


def _counts(found: Mapping[str, list[Judged]]) -> list[str]:
    judged = found["calibrated"]
    fitted = [each.row for each in judged if each.row.fitted]
    exchanged = sum(len(table_rows(fitted, shared=shared)) for shared in (False, True))
    more = f"and {TABLE_CONSTANTS} more constants, of {exchanged} of the rows"
    return [
        _row("rows fitted to", [str(len(fitted)), f"the same, {more}", "of them none of the machine's", "", ""]),
        _row("constants free in the fit", [str(len(FREE)), f"{len(FREE)} + {TABLE_CONSTANTS}", "", "", ""]),
        _row("rows held out", [str(len(judged) - len(fitted)), *[""] * 4]),
    ]


def _errors(found: Mapping[str, list[Judged]]) -> list[str]:
    held = {name: sorted(held_out_errors(judged)) for name, judged in found.items()}
    medians = {name: statistics.median(errors) for name, errors in held.items()}
    met = {name: medians[name] <= MEDIAN_ERROR for name in JUDGED}
    fitted = [statistics.median(abs(each.error) for each in j if each.row.fitted) for j in found.values()]
    unseen = {name: [abs(each.error) for each in j if each.row.use == "unseen"] for name, j in found.items()}
    spread = [f"{statistics.mean(e):.1%}, {e[int(0.9 * len(e))]:.1%}" for e in held.values()]
    number = len(unseen["calibrated"])
    return [
        _row(
            "median relative time error, held out",
            [*(f"{value:.1%}" for value in medians.values()), ""],
            _verdict("at most 15 %", met),
        ),
        _row("mean, and 90th percentile, held out", [*spread, ""]),
        _row(
            f"median relative time error, the {number} unseen of them",
            [*(f"{statistics.median(each):.1%}" for each in unseen.values()), ""],
        ),
        _row("median relative time error, fitted", [*(f"{value:.1%}" for value in fitted), ""]),
    ]


def _choices(found: Mapping[str, list[Judged]], what: str, *, by_ranks: bool) -> list[str]:
    """How often each planner, and the rule, takes the best plan: in all settings, and in those not fitted to."""
    all_of = {name: contests(judged, by_ranks=by_ranks) for name, judged in found.items()}
    all_of[RULE] = contests(found["calibrated"], by_ranks=by_ranks, choose=rule_of_thumb)
    kinds: tuple[tuple[str, Callable[[Contest], bool]], ...] = (
        (f"best plan found: {what}, as published", lambda each: each.published),
        ("the same, where the fastest row is held out", lambda each: each.published and not each.fastest.row.fitted),
        ("the same, in settings without a fitted row", lambda each: each.published and not each.any_fitted),
        ("the same, all and our own on two CPU cores", lambda each: True),
    )
    lines = []
    for text, counts in kinds:
        chosen = {name: [each for each in rows if counts(each)] for name, rows in all_of.items()}
        right = {name: sum(each.right for each in rows) for name, rows in chosen.items()}
        met = {name: right[name] >= RIGHT * len(chosen[name]) for name in JUDGED}
        cells = [_share(right[name], len(rows)) for name, rows in chosen.items()]
        lines.append(_row(text, cells, _verdict("at least 90 %", met)))
    near = [[each.near for each in rows if each.published] for rows in all_of.values()]
    return [*lines, _row("or one within 5 % of it, as published", [_share(sum(each), len(each)) for each in near])]


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({math.floor(100 * part / whole)}%)"


def _misses(found: Mapping[str, list[Judged]]) -> list[str]:
    """The choices that differ from the fastest: calibrated, and by the table."""
    lines = ["| choice | planner | taken | fastest | slower by |", "| --- | --- | --- | --- | --- |"]
    for by_ranks in (False, True):
        missed: dict[tuple[str, str], tuple[list[str], Contest]] = {}
        for planner in ("calibrated", "table"):
            for contest in contests(found[planner], by_ranks=by_ranks):
                if not contest.right:
                    taken = contest.taken.row.plan_name
                    missed.setdefault((contest.name, taken), ([], contest))[0].append(planner)
        for (name, taken), (who, contest) in missed.items():
            fastest = contest.fastest.row.plan_name
            lines.append(f"| {name} | {', '.join(who)} | {taken} | {fastest} | {contest.loss:.1%} |")
    return lines


def two_over_pcie(judged: Sequence[Judged], choose: Callable[[Sequence[Judged]], Judged] = as_auto) -> list[Contest]:
    """The choices among published plans of two ranks over PCIe. PipeFusion is left out, as auto never takes it."""
    rows = [
        each
        for each in judged
        if "NVLink" not in each.row.machine and each.row.published and each.row.plan.pipefusion == 1
    ]
    return [each for each in contests(rows, by_ranks=True, choose=choose) if each.name.endswith(", 2 ranks")]


def _of_auto(found: Mapping[str, list[Judged]]) -> list[str]:
    """What auto takes of two ranks over PCIe, beside the plan that is predicted quickest."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for planner in JUDGED:
        for plain, auto in zip(two_over_pcie(found[planner], quickest), two_over_pcie(found[planner]), strict=True):
            plans = (each.row.plan_name for each in (plain.taken, auto.taken, auto.fastest))
            rows.setdefault((auto.name, *plans, f"{auto.loss:.1%}"), []).append(planner)
    lines = ["| setting | quickest predicted | auto takes | fastest | slower by | planner |", "| --- " * 6 + "|"]
    return lines + [_row(cells[0], cells[1:], ", ".join(planners)) for cells, planners in rows.items()]


def _constants(constants: dict) -> list[str]:
    lines = ["| constant | value |", "| --- | --- |"]
    lines.append(f"| decode, operations a pixel | {constants['decode_flops_per_pixel']:.3g} |")
    for kind in ("software", "devices", "links"):
        for name, values in constants[kind].items():
            text = ", ".join(f"{key} {value:.3g}" for key, value in values.items())
            lines.append(f"| {name} | {text} |")
    for name, values in constants["table_links"].items():
        lines.append(f"| table's {name} | {_link(values)} |")
    for name, values in constants["table_links_without"].items():
        lines.append(f"| the same without {name} | {_link(values)} |")
    return lines


def _link(values: Mapping[str, float]) -> str:
    return f"bandwidth {values['bandwidth']:.3g}, contention {values['contention']:.3g}"


def _tables(judged: Sequence[Judged]) -> list[str]:
    """A line a published setting: its source, its plans with published seconds and signed error."""
    sources = {table["id"]: table for table in json.loads((HERE / "planner_rows.json").read_text())}
    lines = ["| setting | rows: plan, published s, error (* fitted) | held-out median |", "| --- | --- | --- |"]
    for name, table in sources.items():
        rows = [each for each in judged if each.row.table == name]
        held = held_out_errors(rows)
        median = f"{statistics.median(held):.0%}" if held else "-"
        text = "; ".join(
            f"{each.row.plan_name}{'*' if each.row.fitted else ''} {each.row.seconds:g} {each.error:+.0%}"
            for each in rows
        )
        source = f"[{name}]({table['source']})" if table["source"].startswith("http") else f"{name} ({table['source']})"
        notes = ", ".join(part for part in (table["machine"], table["software"], table["read"], table["note"]) if part)
        lines.append(f"| {source}: {notes} | {text} | {median} |")
    return lines


def report() -> str:
    """The whole page."""
    found, constants = planners(), kept_constants()
    judged, losses = found["calibrated"], constants["table_losses"]
    columns = _COLUMNS.format(one=losses["one link for all"], two=losses["two"])
    parts = [
        ["# The planner, judged", "", *_INTRO.strip().splitlines(), ""],
        [
            "## Result",
            "",
            *_summary(),
            "",
            *columns.strip().splitlines(),
            "",
        ],
        ["## Two devices over PCIe, as auto takes them", "", *_AUTO.strip().splitlines(), "", *_of_auto(found), ""],
        ["## Constants", "", *_CONSTANTS.strip().splitlines(), "", *_constants(constants), ""],
        ["## Where it chose otherwise", "", *_misses(found), "", *_MISSES.strip().splitlines(), ""],
        ["## Every row", "", "Errors are those of the calibrated planner.", "", *_tables(judged), ""],
    ]
    return "\n".join(line for part in parts for line in part) + "\n"


_INTRO = """
Predictions of `parallel_runtime/planner` beside published figures. Written by `python -m benchmarks.planner_table` from
`planner_rows.json` (the published figures, each with its source and how it was read) and `planner_constants.json`
(made by `python -m benchmarks.planner_fit` from the rows marked fitted, and from no others). None of the published
figures is ours; rows named own-cpu are, the medians of [peers.md](peers.md) as of commit 6981401, and counted apart.

The constants saw only the fitted rows, but the form of the model was settled while the held-out rows were in view (that
half of what could hide behind attention does, that the host's time for an exchange is paid once a block, that the last
operation does not hide behind the host). Rows marked unseen were first read when the first form was final; the rest was
settled later, and they have no part in it. A choice counts as right when the plan predicted fastest is the plan
published as fastest, among the plans published for that setting.

Each published model is priced as every model is: its sizes become the counts that `models/hosted/count.py` would give
(`Shape.counted` in `planner_model.py`), and `planner/cost.py` prices those.
"""
_COLUMNS = """
- **calibrated**: the link of every machine was fitted to rows of that machine: what a machine gets after
  `doctor --calibrate`, as far as a fit to a few published runs stands for a measurement.
- **table**: the table that ships (`parallel_runtime/planner/known.py`): what `plan` and SP Config's auto take on a
  machine that nobody has calibrated. It knows the device by its name, and one PCIe 4.0 link for machines of up to
  four devices, another for larger ones, each fitted to the fitted rows of all such machines at once.
  What this project measured of its own engine on an H100 (`parallel_runtime/planner/measured.json`), which they take as
  well, is left out: these rows are other engines'.
- **table elsewhere**: the same, with the PCIe link fitted without the rows of the machine it is judged on. No fit saw
  your machine's link either: of these columns this is the nearest to what the table is worth on PCIe. Fractions of the
  devices and the host's seconds were still fitted with those rows. On NVLink it equals the column before.
- **computing only**: a planner without communication and launch. **rule of thumb**: no planner; without PipeFusion the
  most ranks, cfg parallel first, then the largest ulysses degree.

The targets are for the first three. That the table has two PCIe links and not one was decided when the choices it
missed with one were known, and on the fitted rows: squared logarithms of their errors add up to {one:.2f} with one link
and to {two:.2f} with two.
"""
_AUTO = """
The figures above are of the plan predicted quickest. auto, which never takes PipeFusion by itself, holds predictions
within 2 % for equal and takes the plan with fewer ranks, then the one without a ring (`best_of` in
`planner/choose.py`). But where two ranks wait over PCIe for heads that cannot go in chunks, for 4 % of a step or
longer, it takes a ring of two that is predicted up to 4 % slower: published runs of Flux.1 with a ring of two were up
to 10 % quicker than predicted beside ulysses, those of CogVideoX between 4 % quicker and 3 % slower. That rule was made
in view of these rows. Without it auto took ulysses in all four settings of Flux.1, by the table, which was 2.4, 3.3,
6.2 and 6.7 % slower than the ring. No engine in these rows sends heads in chunks. Ranks here do where that hides the
exchange, so the rule is for what cannot: a model with fewer than two groups of heads a rank, or a card whose row of
`choices.json` says one chunk.
"""
_CONSTANTS = """
Device fractions are of the spec sheet's dense bf16 rate, and a fraction or a link never exceeds its spec sheet. There
are nearly as many free constants as fitted rows, so that the error of the fitted rows says nothing; that of the others
does. Rows fitted to are what a calibration of the machine measures too: one device at one or two sizes, one exchange at
each group size of a PCIe machine. Not fitted but taken as they are: NVLink (60 % of its bandwidth, latency 25 us),
latencies of PCIe, attention on A100 (FlashAttention-2's published 70 %), RTX 4090, H20's matrices, the host's seconds
of compiled blocks, their passes (22, counted: norms and modulation 4, q and k 4, GELU 8, gates 6), the CPU's memory,
and that a CPU's attention is as fast as its matrices.

`passes` are activations through memory in a block; `block_operations` and `exchange_operations` are what the host
starts for a block and for its exchange, at 10 us each; `contention` is the exponent by which an all-to-all among n
ranks is slower than between two. Passes and operations are those of the engines in these tables (xDiT, diffusers and
others) and of their hosts: of a model that runs here they are counted. A hop around the ring is 18 operations, as
counted of ours. All are priced with two exchanges a block, as ours has, where theirs have four.

A host that is the limit makes plans equal but for what the device does last: when the host has started the last
operation, the device still has to do it, so a step lasts the longer of both times and, of the shorter one, what one
operation takes. That is less than 0.1 % of a step. Without it two settings that the host limits are ties (uly4 and
uly2 on H100, uly8 and uly4 on A100), and the first row wins.

The table that ships keeps the links of the fit before models were counted (pcie4 31.5 GB/s and 0.323, pcie4-shared
23.3 GB/s and 2.42): of the rows they are fitted to, their loss is at most 1.3 % above that of the links below.

On Ada devices matrices end at their limit of 1: their large cache serves part of the passes counted against memory.

What overlaps is `parallel_runtime/parallel/overlap.py`'s: a hop of a ring behind the part of attention that runs
meanwhile, a chunk of heads behind the attention to the one before. Of what could hide so, `HIDDEN` = 0.5 does. The
fitted rows do not tell it: with nothing hidden their loss is 0.155, with half 0.164, with all 0.174. The choices do.
With nothing the ring is too slow on two devices, with all it is too fast on four and eight: at 4096 x 4096 on L40 their
hops hid nothing. No engine here sends heads in chunks, so these rows say nothing of chunks, and rings that gather
(diffusers) hide nothing but are predicted as the others. On a CPU nothing hides: its cores copy.
"""
_MISSES = """
Most of these are ties: published runs of one setting differ by 8 % between two sources (12.77 s and 13.84 s for
FLUX.1-dev on one A100). PipeFusion on eight A100 is predicted too fast: there the source's own pipeline loses time
that the model does not know. ConsisID has a face branch beside CogVideoX that is not shared out and not in the shape.
The largest errors of time are launch-bound rows on H100 (the host's speed is not published, and differs: 2.8 s and
4.2 s for the same work) and rings on eight devices.
"""


def main() -> int:
    """Write the page and print its result."""
    (HERE / "planner.md").write_text(report())
    sys.stdout.write("\n".join(_summary()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
