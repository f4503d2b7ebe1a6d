"""What tries found, kept between runs: one small JSON file, an entry for each kind of work on each set of devices.

Owns the file `plans.json` in the user's cache folder (user_files.py) and what an entry holds for. One that was made
with another driver, torch, ComfyUI or pack, or on other devices, has another key and is not found.

    {"version": 1, "plans": {"2f1c...": {"key": {...}, "plan": "ring=2", "seconds": {"ring=2": 0.41, ...}, ...}}}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..plan import ParallelPlan
from ..user_files import Key, Store
from .tries import KeptPlan

KEPT = 500  # entries; the oldest go first
LONGEST_S = 1e6  # no step takes longer


@dataclass(frozen=True, kw_only=True)
class TriesKey(Key):
    """What seconds of a step hold for; work of any other kind is tried by itself."""

    devices: tuple[str, ...]  # names in rank order, with their places, threads on a CPU, and machines
    driver: str
    torch: str
    comfyui: str
    pack: str
    model: str  # the class, and how many bytes of weights: one class has models of several sizes
    weights: str  # formats, what is computed in, and how they lie
    kernels: str  # options of ComfyUI and of the run that choose how a step is computed
    work: tuple[tuple[str, str], ...]  # tokens, batch, sides


class KeptPlans(Store):
    """The entries of one file."""

    FILE, NAME, VERSION, MOST = "plans.json", "plans", 1, KEPT
    THEN = "plans are tried again"

    def load(self, key: TriesKey) -> KeptPlan | None:
        """What is kept for the key; None when there is nothing that can be used."""
        entry = self.entries.of(key)
        return None if entry is None else _kept(entry)

    def save(self, key: TriesKey, kept: KeptPlan) -> bool:
        """Keep it; False where the folder cannot be written."""
        entry = {
            "plan": kept.plan.describe(),
            "seconds": {plan.describe(): seconds for plan, seconds in kept.seconds.items()},
            "failed": {plan.describe(): why for plan, why in kept.failed.items()},
            "expected_s": kept.expected_s,
            "again": kept.again,
            "graphs_s": {plan.describe(): seconds for plan, seconds in kept.graphs_s.items()},
        }
        return self.keep(key, entry)


def _kept(entry: Mapping[str, Any]) -> KeptPlan | None:
    """The entry as it was saved; None when anything in it is missing, of the wrong kind or out of range."""
    seconds, failed = entry.get("seconds"), entry.get("failed")
    if not isinstance(seconds, dict) or not isinstance(failed, dict) or type(entry.get("again")) is not bool:
        return None
    graphs_s = entry.get("graphs_s")
    if not isinstance(graphs_s, dict):  # files of before have a number, of the kept plan alone, or none
        graphs_s = {}
    if not all(map(_is_seconds, [*seconds.values(), *graphs_s.values(), entry.get("expected_s")])):
        return None
    if not all(type(text) is str for text in (entry.get("plan"), *failed.values())):
        return None
    try:
        return KeptPlan(
            plan=ParallelPlan.parse(entry["plan"]),
            seconds={ParallelPlan.parse(name): float(value) for name, value in seconds.items()},
            failed={ParallelPlan.parse(name): why for name, why in failed.items()},
            expected_s=float(entry["expected_s"]),
            again=entry["again"],
            graphs_s={ParallelPlan.parse(name): float(value) for name, value in graphs_s.items()},
        )
    except ValueError:
        return None


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LONGEST_S  # NaN is not
