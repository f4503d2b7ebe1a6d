"""How much of the use of ComfyUI's templates the models here cover, counted from a table of templates (usage.csv).

Each row is a template without API nodes that was used: how often, the models that the index of templates names, the
least ComfyUI that it asks for, and the class of ComfyUI 0.30.0 that its main model's file is loaded as; "later" for a
template that asks for a later ComfyUI, "none" where nothing is sampled. Uses and versions are those of `index.json` in
the package comfyui-workflow-templates-json 0.1.123 (October 2026); classes are read from the templates' file names and
ComfyUI's detection.
"""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from parallel_runtime.models.plans import PLANS, WITHOUT
from parity.table import markdown

TABLE = Path(__file__).with_name("usage.csv")
TITLE = "## Share of template use"
LATER, NONE = "later", "none"
SHARED = "shares its tokens over ranks"
WHOLE = "runs on whole calls (cfg, data, sharded weights)"
NEWER, NOTHING = "needs a later ComfyUI than 0.30.0", "is not sampled (upscalers, masks, depth, text)"
KINDS = (SHARED, WHOLE, NEWER, NOTHING)


@dataclass(frozen=True)
class Template:
    """A template: its name, uses, the models it names, the least ComfyUI, and the class of its main model."""

    name: str
    uses: int
    models: str
    least: str
    loaded_as: str

    @property
    def kind(self) -> str:
        """One of KINDS. Raises KeyError for a class that has neither a plan nor a reason to have none."""
        path = f"comfy.ldm.{self.loaded_as}"
        if path in PLANS:
            return SHARED
        if path in WITHOUT:
            return WHOLE
        return {LATER: NEWER, NONE: NOTHING}[self.loaded_as]


def templates() -> list[Template]:
    """The rows of the table, most used first."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [Template(name, int(uses), *rest) for name, uses, *rest in list(csv.reader(file))[1:]]


def section() -> str:
    """The section of docs/models.md, ending in an empty line."""
    rows = templates()
    total = sum(row.uses for row in rows)
    uses: Counter[str] = Counter()
    models: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for row in rows:
        uses[row.kind] += row.uses
        models[row.kind][row.models] += row.uses
    sampled = total - uses[NEWER] - uses[NOTHING]
    qwen = models[NEWER]["Qwen Image 2.1"] / total
    text = f"""{TITLE}

**{uses[SHARED] / total:.1%}** of {total:,} uses of ComfyUI's templates for open models are of a class whose tokens
ranks share: {uses[SHARED] / sampled:.1%} of those that ComfyUI 0.30.0 opens to sample. Counted by the class of a
template's main model, in `tests/families/usage.csv`; nodes in a template that a loader refuses, such as patches between
blocks, are not counted off. Qwen-Image 2.1 ({qwen:.1%}) is a class of ComfyUI 0.37 (`qwen_image21`) whose weights have
other names; ComfyUI 0.30.0 recognises no model in its file, and our loader says so.

"""
    named = {
        kind: "; ".join(f"{name} {part / total:.1%}" for name, part in models[kind].most_common(6)) for kind in KINDS
    }
    lines = [(kind, f"{uses[kind]:,}", f"{uses[kind] / total:.1%}", named[kind]) for kind in KINDS]
    return text + markdown(("templates whose model", "uses", "share", "most used"), lines) + "\n"
