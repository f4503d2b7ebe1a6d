"""States and reports as the server tells them, made up, and a page that believes them and hears no real worker."""

import copy
import itertools
import json
import re
from typing import Any

from playwright.sync_api import Route

from parallel_runtime.report.compare import name_works

from .comfy_page import ComfyPage

GB = 10**9
ONE = {"data": 1, "cfg": 1, "pipefusion": 1, "ring": 1, "ulysses": 1}
SESSIONS = itertools.count(1)
# What the server says of a run of uly2 that another, ring2, was quicker than.
GAINED = {"plan": "uly2", "ranks": 2, "width": 256, "height": 256, "steps": 4, "step_s": 0.28, "comparable": True}
GAINED |= {"shares": {"compute": 0.59, "communication": 0.35, "idle": 0.06}, "verdict": "fair"}
GAINED |= {"speedup": {"factor": 1.5, "one_s": 0.42, "plan_s": 0.28, "plan": "uly2", "number": 2, "kind": "denoise"}}
GAINED |= {"suggestion": {"plan": "ring2", "degrees": ONE | {"ring": 2}, "weights": "replicated", "factor": 1.25}}
ONLY_OURS = """() => {
  if (window.onlyOurs) return
  window.onlyOurs = EventTarget.prototype.dispatchEvent  // which the page's api calls with what the server sends
  EventTarget.prototype.dispatchEvent = function (event) {
    const real = event.type === 'parallel_dit.state' && !event.detail.session.startsWith('made up')
    return real ? false : window.onlyOurs.call(this, event)
  }
}"""
HEAR_ALL = """() => {
  EventTarget.prototype.dispatchEvent = window.onlyOurs
  delete window.onlyOurs
  app.api.dispatchCustomEvent('reconnected')  // the page then asks for the state
}"""
# Keeps what takes the server's states.
KEEP_STORES = """async () => {
  const { Store } = await import('/extensions/parallel-dit/panel/store.mjs')
  if (window.stores) return
  window.stores = new Set()
  const { take } = Store.prototype
  Store.prototype.take = function (state) { window.stores.add(this); take.call(this, state) } }"""
TELL = "(state) => app.api.dispatchCustomEvent('parallel_dit.state', state)"
# Keeps what is written on canvases.
DRAWN_TEXTS = """() => {
  const write = CanvasRenderingContext2D.prototype.fillText
  window.written = []
  CanvasRenderingContext2D.prototype.fillText = function (text, ...all) {
    window.written.push(String(text))
    if (this.canvas.style.position === 'fixed') {  // where the card's timeline is drawn
      const pixels = parseFloat(/([\\d.]+)px/.exec(this.font)[1]) * this.getTransform().a
      window.smallest = Math.min(window.smallest ?? pixels, pixels)
    }
    return write.call(this, text, ...all)
  }
}"""
# As of a page that is not secure, which has none.
NO_CLIPBOARD = "Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })"
CLIPBOARD = "delete navigator.clipboard"


def a_pool(numbers: int = 2, *, plan: dict[str, int] | None = None, **changes: Any) -> dict[str, Any]:
    """A pool as the server tells of it."""
    ranks = [{"rank": n, "device": f"cuda:{n}", "kind": "cuda", "memory_bytes": 24 * GB} for n in range(numbers)]
    plans = [ONE | ({"ulysses": 2} if plan is None else plan)]
    pool = {"state": "idle", "generation": 1, "models": [], "plans": plans, "peer_access": True, "ranks": ranks}
    return pool | {"last_failure": None, "failed_rank": None, "sampling": False} | changes


def a_report(numbers: int, steps: int, **changes: Any) -> dict[str, Any]:
    """A report of a sampling run, as schema 1 has it."""
    times = {"begin_s": [0.5 * step for step in range(steps)], "busy_s": [0.4] * steps, "compute_s": [0.3] * steps}
    times |= {"communication_s": [0.1] * steps, "idle_s": [0.1] * steps}
    report = {
        "schema": "parallel-dit/report/1",
        "kind": "denoise",
        "timings": {"step_s": [0.5] * steps, "denoise_s": 0.5 * steps},
    }
    report["ranks"] = [{"rank": rank, "device": f"cuda:{rank}", **times} for rank in range(numbers)]
    return report | changes


def uneven(numbers: int, steps: int) -> dict[str, Any]:
    """A report whose ranks differ: rank r computes 0.2 + 0.1 r / numbers of each second, waits 0.3, idles the rest."""
    report = a_report(numbers, steps)
    for number, rank in enumerate(report["ranks"]):
        compute = 0.2 + 0.3 * number / numbers
        series = {"begin_s": 0.0, "compute_s": compute, "communication_s": 0.3, "busy_s": compute + 0.3}
        rank |= {name: [value] * steps for name, value in series.items()} | {"idle_s": [0.7 - compute] * steps}
        rank["begin_s"] = [float(step) for step in range(steps)]
    return report


def named(report: dict[str, Any]) -> dict[str, Any]:
    """The same report with its work, as the server names it by the one rule of what may be compared."""
    report = copy.deepcopy(report)
    name_works(report)
    return report


class MadeUp:
    """A tab that believes us; each of these objects is another server to it."""

    def __init__(self, comfy: ComfyPage) -> None:
        self._state: dict[str, Any] = {"session": f"made up {next(SESSIONS)}", "revision": 0, "run": None}
        self._state |= {"version": "0", "devices": [], "pools": [], "reports": [], "action": None}
        self._state |= {"doctor": {"state": "never"}}
        self._reports: dict[int, Any] = {}
        self.comfy = comfy
        page = comfy.page
        page.route(re.compile(r"/parallel_dit/state$"), lambda route: route.fulfill(json=self._state))
        page.route(re.compile(r"/parallel_dit/reports/\d+$"), self._answer_report)
        page.evaluate(ONLY_OURS)
        page.evaluate(KEEP_STORES)
        self.tell()

    def end(self) -> None:
        """Let the tab hear its server again."""
        self.comfy.page.unroute_all()
        self.comfy.page.evaluate(HEAR_ALL)

    def tell(self, **state: Any) -> None:
        """Let the page hear this from the server, as any change is told."""
        self._state["revision"] += 1
        self.comfy.page.evaluate(TELL, self._state | state)

    def report(self, number: int, report: dict[str, Any]) -> dict[str, Any]:
        """Keep a report under a number, as the server does; returns its entry in a state."""
        self._reports[number] = report
        return {"number": number, "kind": report.get("kind", "denoise")}

    def _answer_report(self, route: Route) -> None:
        report = self._reports[int(route.request.url.rpartition("/")[2])]
        route.fulfill(body=json.dumps(report), content_type="application/json")
