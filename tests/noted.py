"""What engines of tests find, which has no field in a reply: a file for each rank.

A call's option says in which folder, so an engine that writes there is asked by `options=found.option`. A rank finds
this module through `python_path`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

FOLDER = str(Path(__file__).parent)


class Notes:
    """A folder for the notes of one request."""

    def __enter__(self) -> Notes:
        self._folder = tempfile.TemporaryDirectory()
        self.option = {"notes": self._folder.name}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

    def read(self) -> list:
        """What each rank noted, in rank order."""
        return [json.loads(path.read_text()) for path in sorted(Path(self._folder.name).iterdir())]


def note(options: Mapping, rank: int, found: object) -> None:
    """Note what a rank found, where the call asks for it."""
    if "notes" in options:
        Path(options["notes"], f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
