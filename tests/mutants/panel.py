"""Mistakes in what the panel reads from a report, draws and exports. They are JavaScript, so they are kept by hand."""

from dataclasses import dataclass
from pathlib import Path

NAMES = ("panel_drawing", "benchmark_bars", "gained_and_compared")
DRAWING, BENCHMARK, TIMELINE = (f"tests/browser/test_{name}.py" for name in NAMES)


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new`. `old` stands exactly once in all files of the panel, or in those named `file`.

    name: what is wrong now, in a few words. tests: nodes of pytest that must find it, with or without parameters.
    """

    name: str
    old: str
    new: str
    tests: tuple[str, ...]
    file: str = "*.*js"

    def place(self, root: Path) -> Path:
        """The file in which it stands, relative to the repository. Raises `ValueError`."""
        found = [
            path for path in (root / "web").rglob(self.file) for _ in range(path.read_text("utf-8").count(self.old))
        ]
        if len(found) != 1:
            raise ValueError(
                f"{self.name}: its old text stands {len(found)} times in {self.file} of web/; mend panel.py"
            )
        return found[0].relative_to(root)


AREAS = f"{DRAWING}::test_every_rank_has_a_row_and_each_colour_the_area_of_its_seconds"
TRACE = f"{DRAWING}::test_the_exported_trace_has_a_track_a_rank_and_each_steps_seconds"
NUMBERS = f"{DRAWING}::test_numbers_read_as_people_write_them"
SAVED = f"{TIMELINE}::test_the_timeline_looks_at_a_step_and_saves_what_it_shows"
BARS = f"{BENCHMARK}::test_bars_are_as_long_as_their_cases_are_quick"

MUTANTS = (
    Mutant(
        "the colours of computing and waiting are swapped",
        "compute: '#4e79a7', communication: '#f28e2b'",
        "compute: '#f28e2b', communication: '#4e79a7'",
        (AREAS,),
        file="timeline_rows.mjs",
    ),
    Mutant(
        "all parts of a step are drawn from its beginning",
        "      at_s += rank[name][step]\n",
        "",
        (AREAS,),
    ),
    Mutant(
        "every rank is drawn in the first row",
        "    const y = TOP + index * row\n",
        "    const y = TOP\n",
        (AREAS,),
    ),
    Mutant(
        "every row is that of rank 0",
        "if (rank.begin) drawRank(frame, rank, y + row * 0.12, row * 0.76)",
        "if (rank.begin) drawRank(frame, ranks[0], y + row * 0.12, row * 0.76)",
        (AREAS,),
    ),
    Mutant(
        "a column of pixels shows its first step alone",
        "for (const name of Object.keys(sums)) sums[name] += rank[name][step]\n      step++",
        "for (const name of Object.keys(sums)) sums.idle += rank[name][step]\n      step++",
        (f"{AREAS}[steps narrower than pixels]",),
    ),
    Mutant(
        "a part of the time begins at the left of the whole",
        "fill(frame, name, (at_s - from_s) * pixels_a_s, rank[name][step] * pixels_a_s, y, height)",
        "fill(frame, name, at_s * pixels_a_s, rank[name][step] * pixels_a_s, y, height)",
        (f"{AREAS}[a part of the time]",),
    ),
    Mutant(
        "what a rank idles is left out of a report",
        "const idle = numbers(rank.idle_s) ?? busy.map(() => 0)",
        "const idle = busy.map(() => 0)",
        (f"{AREAS}[several steps]",),
    ),
    Mutant(
        "waiting counts as computing in a report",
        "const compute = numbers(rank.compute_s) ?? busy\n",
        "const compute = busy\n",
        (f"{AREAS}[several steps]",),
    ),
    Mutant("a trace is in milliseconds", "ts: at * 1e6,", "ts: at * 1e3,", (TRACE,)),
    Mutant(
        "a trace's parts begin together",
        "        at += length\n",
        "",
        (TRACE,),
        file="exports.mjs",
    ),
    Mutant(
        "a trace has all ranks in one track",
        "            ph: 'X',\n            pid: 0,\n            tid: rank.rank,",
        "            ph: 'X',\n            pid: 0,\n            tid: 0,",
        (TRACE,),
    ),
    Mutant("a trace counts steps from nought", "args: { step: step + 1 }", "args: { step }", (TRACE,)),
    Mutant(
        "the middle of an even number is the upper one",
        "(sorted[middle - 1] + sorted[middle]) / 2",
        "sorted[middle]",
        (NUMBERS,),
    ),
    Mutant(
        "a click looks at the step after",
        "  return low - 1\n",
        "  return low\n",
        (f"{DRAWING}::test_a_place_on_the_timeline_is_the_time_and_the_step_there",),
    ),
    Mutant(
        "an older state replaces a newer one",
        "known.session === state.session && known.revision > state.revision) return",
        "known.session === state.session && known.revision < state.revision) return",
        (f"{DRAWING}::test_only_a_newer_state_of_the_same_server_is_taken",),
    ),
    Mutant(
        "the saved report is what the panel made of it",
        "jsonBlob(this.report.raw)",
        "jsonBlob(this.report)",
        (SAVED,),
    ),
    Mutant(
        "the saved picture has its charts one over the other",
        "    y += heightOf(part)\n",
        "",
        (SAVED,),
    ),
    Mutant("bars begin above nought", "beginAtZero: zero === true,", "beginAtZero: false,", (BARS,)),
    Mutant("a plan that lost is drawn as a gain", "row.factor >= 1 ? BAR.good", "row.factor >= 0 ? BAR.good", (BARS,)),
)
