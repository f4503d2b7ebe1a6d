"""docs/templates.md: what became of each template, and the share of use that runs.

Owns: the page and the last line. Does not own: the rows (trial.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from host.formats import KERNEL_ALLOWANCE

from ..tables import markdown
from .trial import EQUAL, NOT_TRIED, REFUSED, STOCK_FAILS, TOLERANCE, VISIBLE, WRONG, Row

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "templates.md"
WORDS = {
    EQUAL: "run and equal stock",
    REFUSED: "are refused by name",
    STOCK_FAILS: "fail in stock ComfyUI, here",
    NOT_TRIED: "were not tried",
    WRONG: "are wrong",
}
APART = {
    REFUSED: ("Refused, and by which node", ("node", "what it says")),
    WRONG: ("Wrong", ("node", "what happens")),
    STOCK_FAILS: ("Stock fails", ("node", "what it says")),
    NOT_TRIED: ("Not tried, and why", ("", "why")),
}
INTRODUCTION = """# ComfyUI's own templates

Each template that loads a diffusion model, of the package that ComfyUI's `requirements.txt` names. ComfyUI's own editor
opens it in a browser, and one ComfyUI runs it three times: as it is; with the loader swapped (Parallel Model Loader for
Load Diffusion Model, Parallelize Model behind a checkpoint's loader); and so swapped with ranks that exchange nothing,
the control. Every latent that a sampler gives is compared. On two CPU ranks, under `ulysses 2`, or under `cfg 2` where
no plan shares the model's tokens. `make templates` writes this page.

What is small: models are tiny files of the same class with random weights, LoRAs are made for them, encoders and VAEs
have no weights, pictures, videos and sounds are made up, sizes and lengths are cut, steps are at most four. So a row
says that the template's nodes, links and values work with a parallel MODEL. It says nothing about speed, and what a
decoder makes of the latents is not compared. An error is at most {tolerance:.0e}; a control is more than {visible:.0e},
or "none" where ranks had nothing to exchange (one row of a batch under `cfg 2`). An error above that limit counts as
equal only where it is at most {allowance:g} times what stock by itself differs by, with another of its exact attention
kernels, on two threads, or with the two sides of guidance computed apart; the cell says so. Uses are those that the
package's index says.
"""


def summary(rows: Sequence[Row]) -> str:
    """The last line."""
    return f"{len(rows)} templates, {sum(row.result == WRONG for row in rows)} wrong"


def document(tried: Mapping[str, Sequence[Row]], page: str = "", *, left: Sequence[Row] = ()) -> str:
    """The page of rows by what they were tried with, as "ComfyUI 0.30.0, comfyui-workflow-templates 0.11.27".

    `page`: as it is, whose sections of other titles stay. `left`: templates that no run has reached yet.
    """
    sections = dict(part.split("\n\n", 1) for part in page.split("\n## ")[1:])
    sections |= {title: section(rows, left) for title, rows in tried.items()}
    text = INTRODUCTION.format(tolerance=TOLERANCE, visible=VISIBLE, allowance=KERNEL_ALLOWANCE)
    return text + "".join(f"\n## {title}\n\n{sections[title].rstrip()}\n" for title in sorted(sections))


def section(rows: Sequence[Row], left: Sequence[Row] = ()) -> str:
    """The tables of one ComfyUI; `left` are templates beside these that no run has reached yet."""
    count, uses = Counter(row.result for row in rows), Counter[str]()
    for row in rows:
        uses[row.result] += row.uses
    total = max(1, sum(uses.values()))
    parts = [(f"{count[result]}", WORDS[result], f"{uses[result] / total:.1%}") for result in WORDS if count[result]]
    ran, tried = uses[EQUAL], total - uses[NOT_TRIED] - uses[STOCK_FAILS]
    text = markdown(("templates", "that", "share of use"), parts)
    if left:
        share = total / max(1, total + sum(row.uses for row in left))
        part = f"A part of them: {len(rows)} of {len(rows) + len(left)} templates, {share:.1%} of the use of all."
        text = f"**{part}** The others are still to be tried.\n\n{text}"
    text += f"\n**{ran / total:.1%}** of the use of these templates runs by swapping the loader"
    text += f", {ran / max(1, tried):.1%} of the use of those that could be tried.\n" if tried != total else ".\n"
    for result, (title, head) in APART.items():
        text += _apart(title, [row for row in rows if row.result == result], head)
    lines = [
        (f"`{row.name}`", row.uses, ", ".join(row.models), row.plan, row.latents, error(row), control(row))
        for row in rows
        if row.result == EQUAL
    ]
    if lines:
        head = ("template", "uses", "tiny files", "plan", "latents", "largest error", "control")
        text += f"\n### Equal\n\n{markdown(head, lines)}"
    return f"{text}\n{summary(rows)}\n"


def error(row: Row) -> str:
    """The largest error of a latent; beside it what it is held against, where that is not the tolerance."""
    return f"{row.error:.1e}" + (f" (stock by itself {row.rounding:.1e})" if row.rounding else "")


def control(row: Row) -> str:
    """The largest error without exchange; what else is known of it."""
    if row.why:
        return cell(row.why)
    if row.control > VISIBLE:
        return f"{row.control:.1e}"
    return "none" if "cfg 2" in row.plan else f"not seen: {row.control:.1e}"


def _apart(title: str, rows: Sequence[Row], head: tuple[str, str]) -> str:
    if not rows:
        return ""
    lines = [(f"`{row.name}`", row.uses, *((row.node,) if head[0] else ()), cell(row.why)) for row in rows]
    return f"\n### {title}\n\n{markdown(('template', 'uses', *(each for each in head if each)), lines)}"


def cell(text: str) -> str:
    """A text that does not end a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")
