"""How much of the use of ComfyUI's templates the models here cover, counted from a table of templates (usage.csv).

Each row is a template without API nodes that was used: how often, the models that the index of templates names, the
least ComfyUI that it asks for, and the class of ComfyUI that its main model's file is loaded as; "unknown" for a class
whose file could not be looked up, "none" where nothing is sampled. Uses and versions are those of `index.json` in the
package comfyui-workflow-templates-json 0.1.123 (October 2026); classes are read from the templates' file names and
ComfyUI's detection, of newer models from what ComfyUI's documentation says that they are (Marigold v2 is LoRAs of
Qwen-Image-Edit, Pixal3D a mode of Trellis 2, LTX-2.5 LTX-2's class, Ming-Image Z-Image's).
"""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from parallel_runtime.models.specs import SPECS, WITHOUT

from .tables import markdown

TABLE = Path(__file__).with_name("usage.csv")
TITLE = "## Share of template use"
UNKNOWN, NONE = "unknown", "none"
SHARED = "shares its tokens over ranks"
WHOLE = "runs on whole calls (cfg, data, sharded weights)"
UNSEEN, NOTHING = "is of a class that could not be looked up", "is not sampled (upscalers, masks, depth, text)"
KINDS = (SHARED, WHOLE, UNSEEN, NOTHING)


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
        if path in SPECS:
            return SHARED
        if path in WITHOUT:
            return WHOLE
        return {UNKNOWN: UNSEEN, NONE: NOTHING}[self.loaded_as]


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
    sampled = total - uses[NOTHING]
    text = f"""{TITLE}

**{uses[SHARED] / total:.1%}** of {total:,} uses of ComfyUI's templates for open models are of a class whose tokens
ranks share: {uses[SHARED] / sampled:.1%} of those that sample. Counted by the class of a template's main model, in
`tools/usage.csv`; nodes in a template that a loader refuses, such as patches between blocks, are not counted
off. A template needs a ComfyUI that has its class, which the next section says.

"""
    named = {
        kind: "; ".join(f"{name} {part / total:.1%}" for name, part in models[kind].most_common(6)) for kind in KINDS
    }
    lines = [(kind, f"{uses[kind]:,}", f"{uses[kind] / total:.1%}", named[kind]) for kind in KINDS]
    return text + markdown(("templates whose model", "uses", "share", "most used"), lines) + "\n"
