"""The last reports of this process, for the panel, each with how it compares. Owns which are kept, and for how long.

What may be compared, and what comes of it, is `parallel_runtime/report/compare.py`'s.
"""

import itertools
import threading
from collections import deque
from collections.abc import Mapping

from ....parallel_runtime.report.compare import Facts, facts_of, quicker, quoted, speedup, summary
from ..contract.comfyui import PromptServer
from ..contract.version import off
from ..contract.writers import executing

KEPT = 6  # of each kind, so that many runs do not push the one benchmark out
END = "parallel-dit-measure"  # the node that ends what the panel queues for a comparison: web/panel/graph.mjs
REMEMBERED = 64  # plans of some work whose newest time is known, so that many runs do not push one device's out


class ReportHistory:
    """Reports by number, from 1 on in the order they were made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._kept: dict[str, deque[dict]] = {}
        self._facts: dict[tuple, Facts] = {}

    def add(self, report: Mapping, advice: Mapping | None = None) -> None:
        """Keep a report of the node that executes now; `advice` is the planner's suggestion for such a run."""
        context = executing()
        entry = {"kind": str(report.get("kind", "")), "report": dict(report), "summary": summary(report)}
        if context is not None:
            entry |= {"node_id": str(context.node_id)} | origin_of(context.prompt_id)
        if advice is not None:
            entry["advice"] = dict(advice)
        with self._lock:
            entry["number"] = next(self._numbers)
            entry["facts"] = facts_of(report, entry["number"])
            self._kept.setdefault(entry["kind"], deque(maxlen=KEPT)).append(entry)
            for each in entry["facts"]:
                self._remember(each)

    def _remember(self, facts: Facts) -> None:
        """Keep the newest of each plan and work; of the others, the oldest go."""
        key = (facts.work, facts.plan["name"], facts.source.partition(" ")[0])
        self._facts.pop(key, None)
        self._facts[key] = facts
        while len(self._facts) > REMEMBERED:
            del self._facts[next(iter(self._facts))]

    def entries(self) -> list[dict]:
        """What is there without the reports themselves, oldest first: number, kind, node, and `summary`."""
        with self._lock:
            found = [entry for kept in self._kept.values() for entry in kept]
            known = list(self._facts.values())
        return [_brief(entry, known) for entry in sorted(found, key=lambda entry: entry["number"])]

    def report(self, number: int) -> dict | None:
        """The report of a number; None when there is none, or none any more."""
        with self._lock:
            found = [entry["report"] for kept in self._kept.values() for entry in kept if entry["number"] == number]
        return found[0] if found else None


def origin_of(prompt_id: str) -> dict:
    """`graph`: the id of the editor's workflow that a running prompt was queued from, where it has one; `reference`,
    where the panel queued it for a comparison alone.
    """
    if off("panel"):
        return {}
    for _, running, prompt, found, *_ in list(PromptServer.instance.prompt_queue.currently_running.values()):
        for part in ("extra_pnginfo", "workflow", "id"):  # whatever a client sent
            found = found.get(part) if isinstance(found, Mapping) else None
        if running == prompt_id:
            return ({"graph": found} if isinstance(found, str) else {}) | ({"reference": True} if END in prompt else {})
    return {}


def graph_of(prompt_id: str) -> dict[str, str]:
    """`graph` alone of `origin_of`."""
    return {name: value for name, value in origin_of(prompt_id).items() if name == "graph"}


def _brief(entry: Mapping, known: list[Facts]) -> dict:
    """An entry without its report, compared with all that is known by now."""
    brief = {name: entry[name] for name in ("number", "kind", "node_id", "graph", "reference") if name in entry}
    told = dict(entry["summary"])
    if entry["kind"] != "benchmark" and entry["facts"]:
        (run,) = entry["facts"]
        gained = speedup(run, known)
        found = {"speedup": gained, "suggestion": quicker(run, known) or entry.get("advice")}
        found["quote"] = quoted(entry["report"], gained)
        told |= {name: value for name, value in found.items() if value is not None}
        told["comparable"] = True
    return brief | {"summary": told}


HISTORY = ReportHistory()  # the one of this process; never rebound


def published(report: dict, advice: Mapping | None = None) -> dict:
    """A node's `ui` output with its report, which the panel shows from now on; `advice` as `ReportHistory.add`."""
    HISTORY.add(report, advice)
    return {"parallel_dit": [report]}
