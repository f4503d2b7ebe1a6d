"""docs/refusals.md: what is refused and what the user reads, taken from a real server.

`PYTHONPATH=tests python -m tools.refusals_table` writes it; test_refusals.py holds it to what the server says.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from host.client import ComfyClient
from host.server import PACK_ROOT, ComfyServer
from host.tiny_models import TinyModels, write_tiny_models
from refusals.cases import CASES, Case

DOCUMENT = PACK_ROOT / "docs" / "refusals.md"
INTRODUCTION = """# What a parallel MODEL cannot take

The weights lie in the workers, so whatever reads or changes the model's inside in ComfyUI's own process cannot reach
them. It is refused before any step ends. The message is the first line of ComfyUI's error, on the node that is named
second; it begins with the node that did it, which may be another. A node that catches the error and goes on is refused
when the MODEL is sampled. `ReachIntoModel`, `RefusedLater` and `ChangeModules` stand for nodes of others, whose names
[nodes.md](nodes.md) has. Written by `make refusals`
from the messages of a real server; a row of a node that the server's ComfyUI has not, by a newer one.

| what | told by | message |
| --- | --- | --- |
"""


def message(client: ComfyClient, case: Case, tiny: TinyModels) -> str:
    """The first line of the error; raises RuntimeError when the graph runs or fails elsewhere."""
    result = client.queue(case.build(tiny))
    if (result.status, result.error_node) != ("error", case.node):
        raise RuntimeError(f"{case.what}: {result.status} {result.error_node}: {result.error_message}")
    if result.progress:
        raise RuntimeError(f"{case.what}: a step ran before the refusal")
    return result.error_message.splitlines()[0]


def row(case: Case, said: str) -> str:
    """A line of the table."""
    return f"| {case.what} | {case.node} | {said.replace('|', chr(92) + '|')} |"


def has_node(client: ComfyClient, case: Case) -> bool:
    """Whether this ComfyUI has the node that a case is about."""
    return not case.needs or case.needs in client.object_info()


def document(messages: Mapping[str, str]) -> str:
    """The whole table from the messages by `Case.what`; a row that they lack stays as another ComfyUI wrote it."""
    before = {line.split(" | ")[0]: line for line in DOCUMENT.read_text(encoding="utf-8").splitlines()}
    rows = [row(case, messages[case.what]) if case.what in messages else before.get(f"| {case.what}") for case in CASES]
    return INTRODUCTION + "".join(f"{each}\n" for each in rows if each is not None)


def main() -> int:
    """Command line: writes the document."""
    with tempfile.TemporaryDirectory() as folder:
        tiny = write_tiny_models(Path(folder))
        with ComfyServer(models=tiny.models) as server:
            client = ComfyClient(server.url)
            there = [case for case in CASES if has_node(client, case)]
            DOCUMENT.write_text(document({case.what: message(client, case, tiny) for case in there}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
