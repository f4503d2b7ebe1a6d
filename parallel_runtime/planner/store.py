"""Calibrations kept between runs: one small JSON file in the user's cache folder, an entry for each set of devices.

Owns the file `calibration.json` in the user's cache folder (user_files.py); delete it to forget everything.

    {"version": 1, "devices": {"2 x NAME, torch 2.6": {"rates": {...}, "link": {...}, "software": {...}, ...}}}
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from ..plan import MAX_RANKS
from ..user_files import Store
from .hardware import Calibration, Interconnect, Rates, Software

NO_LONGER_READ = {"ring_overlap", "passes", "block_s", "exchange_s", "hop_s", "swap_calls"}  # of the software
MAY_BE_ZERO = (
    *("latency_s", "contention", "merge_passes"),
    *("score_s", "elementwise_bandwidth", "most_chunks"),
)


class CalibrationStore(Store):
    """The calibrations in one file."""

    FILE, NAME, VERSION = "calibration.json", "devices", 1

    def load(self, device_set: str) -> Calibration | None:
        """The constants kept for these devices, None when there are none that can be used."""
        entry = self.entries.all().get(device_set)
        return None if entry is None else _calibration(entry)

    def load_for(self, kind: str, devices: int) -> Calibration | None:
        """The constants for so many GPUs of a kind ("NAME, torch 2.6"): theirs, else those of the smallest larger set.

        What one device computes is the same among two and among eight, and `source` says which set was measured. A
        smaller set does not stand for a larger one: it says nothing of exchanges among more. On published runs measured
        constants find the best plan no more often than the table's (benchmarks/planner.md), so nothing is lost by it.
        """
        for count in range(devices, MAX_RANKS + 1):
            found = self.load(f"{count} x {kind}")
            if found is not None and count > devices:
                found = replace(found, source=f"measured on {count} of these devices by doctor, {devices} are offered")
            if found is not None:
                return found
        return None

    def save(self, device_set: str, calibration: Calibration) -> None:
        """Keep them. Raises `OSError` where the folder cannot be written."""
        entry = {name: value for name, value in asdict(calibration).items() if value is not None}
        for of_devices in ("machines", "speeds"):  # theirs to say
            del entry[of_devices]
        if not calibration.kinds:
            del entry["kinds"]
        self.entries.put(device_set, entry)


def _calibration(entry: object) -> Calibration | None:
    """The entry as constants; None when anything in it is missing, of the wrong kind, or no rate."""
    if not isinstance(entry, dict):
        return None
    try:
        return Calibration(
            rates=Rates(**_fields(Rates, entry["rates"])),
            link=Interconnect(**_fields(Interconnect, entry["link"])),
            software=Software(**_fields(Software, entry["software"])),
            source=str(entry["source"]),
            kinds=tuple((str(name), Rates(**_fields(Rates, rates))) for name, rates in entry.get("kinds", ())),
            between=Interconnect(**_fields(Interconnect, entry["between"])) if "between" in entry else None,
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _fields(kind: type, values: Mapping[str, object]) -> dict[str, Any]:
    """The values of one part of the entry. Raises `ValueError` for a wrong one, `KeyError` for an unknown one."""
    known = {field.name: field.type for field in fields(kind)}
    found = {name: value for name, value in values.items() if name not in NO_LONGER_READ}
    for name, value in found.items():
        if not (type(value) is known[name] if known[name] in (str, bool) else _is_rate(name, value)):
            raise ValueError(f"{name}={value!r} is no {known[name]}")
    return found


def _is_rate(name: str, value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    return number and (value != 0 or name in MAY_BE_ZERO)
