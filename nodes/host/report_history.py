"""The last reports of this process, for the panel. Owns which are kept; knows nothing of what is in them."""

import itertools
import threading
from collections import deque
from collections.abc import Mapping

from comfy_api.latest import get_executing_context

KEPT = 6  # of each kind, so that many runs do not push the one benchmark out


class ReportHistory:
    """Reports by number, from 1 on in the order they were made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._kept: dict[str, deque[dict]] = {}

    def add(self, report: Mapping) -> None:
        """Keep a report of the node that executes now."""
        context = get_executing_context()
        entry = {"kind": str(report.get("kind", "")), "report": dict(report)}
        if context is not None:
            entry["node_id"] = str(context.node_id)
        with self._lock:
            entry["number"] = next(self._numbers)
            self._kept.setdefault(entry["kind"], deque(maxlen=KEPT)).append(entry)

    def entries(self) -> list[dict]:
        """What is there without the reports themselves, oldest first."""
        with self._lock:
            found = [entry for kept in self._kept.values() for entry in kept]
        brief = [{key: value for key, value in entry.items() if key != "report"} for entry in found]
        return sorted(brief, key=lambda entry: entry["number"])

    def report(self, number: int) -> dict | None:
        """The report of a number; None when there is none, or none any more."""
        with self._lock:
            found = [entry["report"] for kept in self._kept.values() for entry in kept if entry["number"] == number]
        return found[0] if found else None


HISTORY = ReportHistory()  # the one of this process; never rebound


def published(report: dict) -> dict:
    """A node's `ui` output with its report, which the panel shows from now on."""
    HISTORY.add(report)
    return {"parallel_dit": [report]}
