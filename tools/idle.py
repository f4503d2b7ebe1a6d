"""What the page costs while nothing happens: Chromium's processor time with our web/ and without, in turns.

`PYTHONPATH=tests python -m tools.idle [--seconds 60] [--turns 5] [--control]` ends with 1 where the page with us
takes more than `MOST` of a core more. With us, the sidebar and the timeline are open after a run; without, server and
graph are the same, and only the pack's web/ is not let through. `--control` adds a timer with work of some 5 % of a
core to the page with us, which must be found. Owns the measurement; the page is comfy_page.py's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
from playwright.sync_api import Browser, sync_playwright

from browser.comfy_page import WAIT_MS, ComfyPage
from browser.conftest import FLAGS, chromium
from demo.graphs import TEXT_ENCODER, add_demo_model
from host.server import ComfyServer

MOST = 0.02  # of a core
SETTLE_S = 10.0  # after the page was made: fonts, previews, the first pictures of the panel
OURS = "**/extensions/parallel-dit/parallel_dit.js"  # which loads all else of it
LOADED = "() => Boolean(window.app?.extensionManager?.setting && app.graph)"
BURN = "() => setInterval(() => { for (let at = 0; at < 3e7; at++) window.burnt = Math.sqrt(at) }, 1000)"


def processor_s() -> float:
    """Seconds that all processes of the browser, which this one started, have had a core."""
    found = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times() if "chrom" in process.name() else None
        except psutil.NoSuchProcess:
            continue
        found += times.user + times.system if times else 0.0
    return found


def share(browser: Browser, server: ComfyServer, *, ours: bool, seconds: float, burn: bool) -> float:
    """Of a core, what the browser takes while one page is open and nobody does anything."""
    context = browser.new_context(viewport={"width": 1600, "height": 950})
    context.set_default_timeout(WAIT_MS)
    try:
        comfy = ComfyPage(context.new_page(), server, nodes2=True)
        if ours:
            comfy.open()
        else:
            comfy.page.route(OURS, lambda route: route.fulfill(body="", content_type="text/javascript"))
            comfy.page.goto(server.url, wait_until="domcontentloaded")
            comfy.page.wait_for_function(LOADED)
            comfy.setting("Comfy.VueNodes.Enabled", True)
        comfy.load_example()
        if ours:
            comfy.open_sidebar()
            comfy.open_timeline()
            comfy.page.get_by_test_id("pdit-rows").wait_for()
        if burn:
            comfy.page.evaluate(BURN)
        time.sleep(SETTLE_S)
        before, began = processor_s(), time.monotonic()
        time.sleep(seconds)
        return (processor_s() - before) / (time.monotonic() - began)
    finally:
        context.close()


def run_once(browser: Browser, server: ComfyServer) -> None:
    """Leave workers and a report on the server."""
    context = browser.new_context()
    comfy = ComfyPage(context.new_page(), server, nodes2=True)
    comfy.open()
    comfy.load_example()
    comfy.run()
    context.close()


def main() -> int:
    """Measure in turns, print each turn and the medians; 1 where the limit does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--control", action="store_true")
    given = parser.parse_args()
    found: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as scratch:
        add_demo_model(Path(scratch))
        with ComfyServer(models=Path(scratch), packs=(TEXT_ENCODER,)) as server, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium(), headless=True, args=FLAGS)
            run_once(browser, server)
            for turn in range(given.turns):
                for ours in (True, False) if turn % 2 else (False, True):
                    burn = ours and given.control
                    found[ours].append(share(browser, server, ours=ours, seconds=given.seconds, burn=burn))
                print(  # noqa: T201
                    f"turn {turn + 1}: with us {found[True][-1]:.2%} of a core, without {found[False][-1]:.2%}, "
                    f"load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
            browser.close()
    with_us, without = statistics.median(found[True]), statistics.median(found[False])
    more = with_us - without
    print(f"medians: with us {with_us:.2%}, without {without:.2%}: {more:+.2%} of a core, at most {MOST:.0%}")  # noqa: T201
    return 0 if more <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
