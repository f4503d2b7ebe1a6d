"""docs/get_models.md: for each template the shell lines that get its files, their size, and what fits on two cards.

`PYTHONPATH=tests python -m tools.get_models` checks the page and the templates' notes against what each template itself
offers to download, names and folders, and ends with 1 where they differ. `--write` writes the page anew, and the notes.
Owns: the page. Does not own: addresses, sizes, the words of notes (templates.py), the templates (drawn_workflows.py).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .templates import (
    CARDS_GB,
    COUNTED_GIB,
    TEMPLATES,
    USERS_OWN,
    model_files,
    offered,
    on_each_card,
    shell_lines,
    size_of,
    weights_on,
)

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "get_models.md"
WORKFLOWS = ROOT / "example_workflows"
NOTE = "MarkdownNote"
LINE = re.compile(r"^wget -c -P models/(\S+) (https://\S+)$", re.MULTILINE)
SECTION = re.compile(r"^## [^\n]*?\((`[^\n]*`)\)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
HEAD = """# Get the files of a model

ComfyUI's page offers to download what a template lacks. A browser saves that on its own computer. On a rented machine,
use the lines below instead: go to ComfyUI's folder there and paste them, then press R on the page. `wget -c` continues
a download that broke off.

Sizes are in GB (10^9 bytes), as published in November 2026; "about" where no list with the bytes was seen. A file may
need an account and an agreement on its page: then `wget` ends with 401 or 403. Agree there, make a token of your
account, and add `--header "Authorization: Bearer TOKEN"` to the line.

**How two cards hold the weights** is predicted. It has not been seen on two GPUs.

- *whole*: each card holds the model. This is the quickest.
- *sharded*: each card holds half of it, and gets each block from the other card just before it computes it. Blocks
  that it has room for stay whole until the run ends.
- *offloaded*: the weights are in host memory, which must hold the file; blocks that a card has room for stay there
  until the run ends. This is the slowest.

The table has the first of them that fits in 95 % of an empty card, of a video with 81 frames; for a much longer one set
`weights` yourself. SP Config in `auto` mode takes another one where it is predicted to be quicker: above all where
weights leave the VAE no room on the first card (6 GiB, for a video 14), and would be loaded again before each run.

"GiB a card" is what the planner counts for the three, on
two cards, for a picture of 1024 x 1024 and, of Wan 2.2, for 121 frames of 1280 x 704. "By its size" is the file, or
half of it, and 2 GiB of room, for a video 5.3 GiB. Larger pictures and longer videos need more:
`python -m parallel_runtime plan --model FILE --width W --height H --frames N` counts yours, in the pack's folder with
ComfyUI's Python. Of two cards with different memory the smaller one decides: 24 + 8 GB hold what 8 + 8 GB hold
([plans.md](plans.md#unequal-devices)).
The text encoder and the VAE are ComfyUI's: it loads each of them when it is needed, on the first card.
`flux_batch_over_replicas` and `flux_pipefusion` have plans of their own, for cards that hold the whole model and half
of it. `flux_lora_controlnet` wants a LoRA and a ControlNet of yours, too: choose them in its nodes.

"""


def files_of(name: str) -> list[dict[str, str]]:
    """What a template offers to download, by its own file."""
    return offered(drawn(name)["nodes"])


def chosen(name: str) -> set[tuple[str, str]]:
    """Folder and name of each file that a template's loaders choose, but for the user's own."""
    graph = json.loads((ROOT / "api_workflows" / f"{name}.json").read_text(encoding="utf-8"))
    files = {each for node in graph.values() for each in model_files(node["inputs"])}
    return {each for each in files if each[1] not in USERS_OWN}


def as_page() -> str:
    """The text of docs/get_models.md: a table, and a section for each set of files."""
    rows = [f"| model | files, GB | {' | '.join(f'2 x {card} GB' for card in CARDS_GB)} | GiB a card | templates |"]
    rows.append("| --- | --- |" + " --- |" * len(CARDS_GB) + " --- | --- |")
    sections = []
    groups: dict[str, list[str]] = {}
    for name in TEMPLATES:
        groups.setdefault(shell_lines(files_of(name)), []).append(name)
    for lines, names in groups.items():
        files = files_of(names[0])
        size, named = size_of(files), ", ".join(f"`{name}`" for name in names)
        each = " | ".join(weights_on(files, card) for card in CARDS_GB)
        room = " / ".join(f"{gib:.1f}" for gib in on_each_card(files)) if was_counted(files) else "by its size"
        rows.append(
            f"| {TEMPLATES[names[0]].family} | {size.removesuffix(' GB').lower()} | {each} | {room} | {named} |"
        )
        sections.append(f"## {TEMPLATES[names[0]].family} ({named})\n\n{size}:\n\n```\n{lines}\n```\n")
    return HEAD + "\n".join(rows) + "\n\n" + "\n".join(sections)


def was_counted(files: Sequence[dict[str, str]]) -> bool:
    """Whether the planner counted the model among these files."""
    return any(file["name"] in COUNTED_GIB for file in files)


def differences(name: str, text: str) -> list[str]:
    """What the shell lines of a text get otherwise than the template's own list and its loaders say."""
    lines = LINE.findall(text)
    own = {(file["directory"], file["name"]) for file in files_of(name)}
    urls = {file["url"] for file in files_of(name)}
    got = {(folder, url.rpartition("/")[2]) for folder, url in lines}
    found = [f"{name}: no line gets {folder}/{file}" for folder, file in sorted((own | chosen(name)) - got)]
    found += [f"{name}: {folder}/{file} is not of this template" for folder, file in sorted(got - own)]
    found += [f"{name}: {url} is another address than the template's" for _, url in lines if url not in urls]
    return found


def problems(page: str) -> list[str]:
    """What is wrong with the page and with the notes, in sentences; none where all agree."""
    sections = {name: text for names, text in SECTION.findall(page) for name in re.findall(r"`(\w+)`", names)}
    found = [f"{name}: the page has no section for it" for name in TEMPLATES if name not in sections]
    found += [f"{name}: the page has a section, but there is no such template" for name in sections.keys() - TEMPLATES]
    for name in TEMPLATES:
        found += differences(name, sections.get(name, ""))
        found += [f"in the note, {each}" for each in differences(name, note_of(drawn(name)))]
    return found


def note_of(file: dict[str, Any]) -> str:
    """The text of a template's note."""
    (note,) = (node for node in file["nodes"] if node["type"] == NOTE)
    return note["widgets_values"][0]


def drawn(name: str) -> dict[str, Any]:
    """A template as the editor reads it."""
    return json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))


def with_notes() -> None:
    """Write the notes of all templates anew; nothing else of them changes, so that no server is needed."""
    from .drawn_workflows import as_note, text_of  # which brings Pillow and the client

    for name, template in TEMPLATES.items():
        file = drawn(name)
        place, old = next((place, node) for place, node in enumerate(file["nodes"]) if node["type"] == NOTE)
        file["nodes"][place] = as_note(old["id"], template.note(files_of(name)))
        (WORKFLOWS / f"{name}.json").write_text(text_of(file), encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Check, or write and check; returns the exit status."""
    if "--write" in arguments:
        with_notes()
        PAGE.write_text(as_page(), encoding="utf-8")
    found = problems(PAGE.read_text(encoding="utf-8"))
    sys.stdout.write("".join(f"{each}\n" for each in found) or f"{len(TEMPLATES)} templates: page and notes agree\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
