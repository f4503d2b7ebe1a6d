"""The section of docs/models.md with a row for each class of ComfyUI's list of models: `make models-list` writes it.

Owns its text. Does not own what is asked of ComfyUI (models/supported.py), nor the rest of the page (matrix.py).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from host.server import PACK_ROOT
from models.supported import Found, ask
from parallel_runtime.models.plans import PLANS
from parity.table import markdown

from . import usage
from .plan_lines import plan_lines
from .variants import FAMILIES, FILES

DOCUMENT = PACK_ROOT / "docs" / "models.md"
TITLE = "## Every class of ComfyUI"
SECTION = re.compile(rf"^{TITLE}.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
SHARE = re.compile(rf"^{usage.TITLE}.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def section(said: Found) -> str:
    """The section's text, ending in an empty line."""
    classes = said["classes"]
    shared = [name for name, each in classes.items() if not each["refused"]]
    text = f"""{TITLE} {said["version"]}

`comfy.supported_models.models` has {len(classes)} classes. {len(shared)} of them share their tokens over ranks. The
others say why not, in the words that a user reads; what they say works instead runs ComfyUI's module on whole calls.
The parity of a plan is shown by the cases of its class in the second table: those of `tests/models` compare ComfyUI's
module over 2 and 3 ranks with one process. `make models-list` writes this section.

"""
    rows = [(name, f"`{_short(each['path'])}`", _plan(each)) for name, each in classes.items()]
    text += markdown(("class", "transformer or U-Net", "tokens"), rows)
    text += "\nOf each class with a plan, the cases that show its parity:\n\n"
    paths = dict.fromkeys([each["path"] for each in classes.values() if not each["refused"]] + list(PLANS))
    shown = [(f"`{_short(path)}`", f"{plan_lines(path)} lines", _cases(path, said), _variants(path)) for path in paths]
    return text + markdown(("transformer", "plan", "over 2 and 3 ranks", "beside stock ComfyUI"), shown) + "\n"


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


def _plan(each: dict[str, str]) -> str:
    return each["refused"] or f"shared, a plan of {plan_lines(each['path'])} lines"


def _cases(path: str, said: Found) -> str:
    return _names(name for name, each in said["cases"].items() if each == path)


def _variants(path: str) -> str:
    return _names(each.name for each in FAMILIES if FILES[each.file].class_path == path)


def _names(names: Iterable[str]) -> str:
    return "; ".join(names)


if __name__ == "__main__":
    DOCUMENT.write_text(
        with_share(with_section(DOCUMENT.read_text(encoding="utf-8"), section(ask()))), encoding="utf-8"
    )
    sys.stdout.write(f"{DOCUMENT.relative_to(PACK_ROOT)} is written\n")
