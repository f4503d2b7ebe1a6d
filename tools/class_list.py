"""The section of docs/models.md with a row for each class of ComfyUI's list of models: `make models-list` writes it.

Owns its text. Does not own what is known of ComfyUI's classes (known.py), nor the rest of the page (model_matrix.py).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from families.variants import KNOWN
from host.server import PACK_ROOT
from parallel_runtime.models.specs import NOT_SAMPLED, SPECS, WITHOUT

from . import usage
from .known import KnownClass, came_with, cases, classes, number
from .plan_lines import plan_lines
from .tables import markdown

DOCUMENT = PACK_ROOT / "docs" / "models.md"
TITLE = "## Every class of ComfyUI"
SECTION = re.compile(rf"^{TITLE}.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
SHARE = re.compile(rf"^{usage.TITLE}.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def section() -> str:
    """The section's text, ending in an empty line."""
    known = classes()
    shared = [each for each in known.values() if each.path in SPECS]
    text = f"""{TITLE}

`comfy.supported_models.models` of ComfyUI {_newest(known)} and, in brackets, transformers of later versions whose file
alone was at hand: {len(known)} classes. {len(shared)} of them share their tokens over ranks. The others say why not, in
the words that a user reads; what they say works instead runs ComfyUI's module on whole calls. "Came with" is the oldest
ComfyUI looked at that has the class, "tried on" the newest on which its cases were equal over two ranks; 0.38 stands
for 0.33.0 with files of 0.37 and 0.38. The parity of a plan is shown by the cases of its class in the second table:
those of `tests/models` compare ComfyUI's module over 2 and 3 ranks with one process. `make models-list` writes this
section, of what `python -m tools.known` noted of each ComfyUI.

"""
    rows = [
        (each.name, f"`{_short(each.path)}`", _plan(each.path), came_with(each.since), each.newest or "-")
        for each in known.values()
    ]
    text += markdown(("class", "transformer or U-Net", "tokens", "came with", "tried on"), rows)
    text += "\nOf each class with a plan, the cases that show its parity:\n\n"
    paths = dict.fromkeys([each.path for each in shared] + list(SPECS))
    shown = [(f"`{_short(path)}`", f"{plan_lines(path)} lines", _cases(path), _variants(path)) for path in paths]
    return text + markdown(("transformer", "plan", "over 2 and 3 ranks", "beside stock ComfyUI"), shown) + "\n"


def _newest(known: dict[str, KnownClass]) -> str:
    """Of the versions looked at the newest whose list was at hand."""
    return max((each.since for each in known.values() if not each.name.startswith("(")), key=number)


def with_section(page: str, text: str) -> str:
    """A page whose section is this text; it comes before the cases of the page, or last."""
    if SECTION.search(page):
        return SECTION.sub(lambda _: text, page)
    before, cases, after = page.partition("## Each case")
    return f"{before}{text}{cases}{after}" if cases else f"{page}\n{text}"


def with_share(page: str) -> str:
    """A page whose share of use is what the table of templates says; it has that section."""
    return SHARE.sub(lambda _: usage.section(), page)


def written(page: str) -> str:
    """The section that a page has; "" for none."""
    match = SECTION.search(page)
    return match.group() if match else ""


def _short(path: str) -> str:
    return path.removeprefix("comfy.ldm.")


def _plan(path: str) -> str:
    if path in SPECS:
        return f"shared, a plan of {plan_lines(path)} lines"
    (reason, instead), name = WITHOUT[path], path.rpartition(".")[2]
    no_plan = "" if instead == NOT_SAMPLED else " has no plan to share its tokens"
    return f"{name}{no_plan}: {reason}; {instead}"


def _cases(path: str) -> str:
    return _names(each.name for each in cases().values() if each.path == path)


def _variants(path: str) -> str:
    """Those that a ComfyUI at hand can load."""
    loaded = {each.path for each in classes().values() if not each.name.startswith("(")}
    return _names(name for name, (_, each) in KNOWN.items() if each == path and each in loaded)


def _names(names: Iterable[str]) -> str:
    return "; ".join(names)


if __name__ == "__main__":
    DOCUMENT.write_text(with_share(with_section(DOCUMENT.read_text(encoding="utf-8"), section())), encoding="utf-8")
    sys.stdout.write(f"{DOCUMENT.relative_to(PACK_ROOT)} is written\n")
