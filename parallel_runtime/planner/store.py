"""Calibrations kept between runs: one small JSON file in the user's cache folder, an entry for each set of devices.

Owns the file: `$XDG_CACHE_HOME/parallel-dit/calibration.json`, without that variable `~/.cache/...`. Written whole to a
new file that then takes the old one's place, so a reader never sees half of it. A file that is damaged, or of another
version, counts as empty and is replaced by the next write; delete it to forget everything.

    {"version": 1, "devices": {"2 x NAME, torch 2.6": {"rates": {...}, "link": {...}, "software": {...}, ...}}}
"""

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .hardware import Calibration, Link, Rates, Software

VERSION = 1
FOLDER, FILE = "parallel-dit", "calibration.json"
MAY_BE_ZERO = ("latency_s", "contention", "ring_overlap", "block_s", "exchange_s", "hop_s", "passes", "merge_passes")


def default_path(environ: Mapping[str, str], home: Path) -> Path:
    """The file's place for a user. A relative XDG_CACHE_HOME is not valid and ignored, as its specification says."""
    root = Path(environ.get("XDG_CACHE_HOME", ""))
    return (root if root.is_absolute() else home / ".cache") / FOLDER / FILE


@dataclass(frozen=True)
class CalibrationStore:
    """The calibrations in one file."""

    path: Path

    def load(self, device_set: str) -> Calibration | None:
        """The constants kept for these devices, None when there are none that can be used."""
        entry = self._entries().get(device_set)
        return None if entry is None else _calibration(entry)

    def load_all(self, kind: str) -> dict[int, Calibration]:
        """The constants kept for sets of devices of one kind ("NAME, torch 2.6"), by how many devices each set has."""
        found = {}
        for name in self._entries():
            count, _, rest = name.partition(" x ")
            calibration = self.load(name) if rest == kind and count.isdecimal() else None
            if calibration is not None:
                found[int(count)] = calibration
        return found

    def save(self, device_set: str, calibration: Calibration) -> None:
        """Keep them. Raises `OSError` where the folder cannot be written."""
        entries = {**self._entries(), device_set: asdict(calibration)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{FILE}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({"version": VERSION, "devices": entries}, file, indent=1, allow_nan=False)
            os.replace(name, self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _entries(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        usable = isinstance(content, dict) and content.get("version") == VERSION
        devices = content.get("devices") if usable else None
        return devices if isinstance(devices, dict) else {}


def _calibration(entry: object) -> Calibration | None:
    """The entry as constants; None when anything in it is missing, of the wrong kind, or no rate."""
    if not isinstance(entry, dict):
        return None
    try:
        network = entry["network"]
        return Calibration(
            rates=Rates(**_fields(Rates, entry["rates"])),
            link=Link(**_fields(Link, entry["link"])),
            software=Software(**_fields(Software, entry["software"])),
            network=None if network is None else Link(**_fields(Link, network)),
            source=str(entry["source"]),
            node_ranks=int(_number("node_ranks", entry["node_ranks"])),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _fields(kind: type, values: Mapping[str, object]) -> dict[str, Any]:
    """The values of one part of the entry, all there and nothing else. Raises `ValueError` otherwise."""
    known = {field.name: field.type for field in fields(kind)}
    if set(values) != set(known):
        raise ValueError(f"{kind.__name__} has {sorted(values)}, not {sorted(known)}")
    for name, value in values.items():
        if known[name] in (str, bool):
            if type(value) is not known[name]:
                raise ValueError(f"{name}={value!r} is no {known[name]}")
        else:
            _number(name, value)
    return dict(values)


def _number(name: str, value: object) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (value == 0 and name not in MAY_BE_ZERO):  # type: ignore[operator]  # a number by now
        raise ValueError(f"{name}={value!r} is no rate")
    return value  # type: ignore[return-value]  # a number by now
