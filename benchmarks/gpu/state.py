"""What was measured so far: kept after each experiment, so that several half hours make one programme.

Owns the file. A result counts for the device and the versions that it was measured with, and for no others.
"""

import json
import os
from pathlib import Path
from typing import Any

FORMAT = 1


class State:
    """The results by experiment, of one device with its versions. Raises `ValueError` for a file of another format."""

    def __init__(self, path: Path, key: dict[str, str]) -> None:
        self.path, self.key = path, key
        self._all: dict[str, Any] = {"format": FORMAT, "machines": []}
        if path.is_file():
            self._all = _read(path)
        same = [each for each in self._all["machines"] if each["key"] == key]
        if not same:
            same = [{"key": key, "results": {}}]
            self._all["machines"] += same
        self._mine: dict[str, Any] = same[0]["results"]

    @property
    def results(self) -> dict[int, dict[str, Any]]:
        """What is done, by experiment."""
        return {int(number): result for number, result in self._mine.items()}

    @property
    def others(self) -> list[dict[str, str]]:
        """Other devices or versions that the file has results of."""
        return [each["key"] for each in self._all["machines"] if each["key"] != self.key and each["results"]]

    def keep(self, number: int, result: dict[str, Any]) -> None:
        """Add a result. A process that ends meanwhile leaves the file as it was before."""
        self._mine[str(number)] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(self.path.name + ".new")
        new.write_text(json.dumps(self._all, indent=1) + "\n", encoding="utf-8")
        os.replace(new, self.path)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = found["format"] == FORMAT and isinstance(found["machines"], list)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error!r}); name another file with --state, or remove it") from error
    if not known:
        raise ValueError(f"{path} has format {found['format']}, not {FORMAT}; name another file with --state")
    return found
