"""A browser on the session's server: Debian's Chromium, no download; a page without errors, in either renderer.

Owns: starting the browser, opening ComfyUI, and the end-of-test check that no page raised anything. Does not own what
is done on the page (comfy_page.py).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from host.server import ComfyServer
from host.tiny_models import TinyModels

from .comfy_page import ComfyPage

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def chromium() -> str:
    """The browser's path. Raises FileNotFoundError where there is none: these tests are never skipped."""
    found = os.environ.get("CHROMIUM_PATH") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise FileNotFoundError("no Chromium; apt-get install chromium, or set CHROMIUM_PATH")
    return found


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One browser for this folder. Not for the session: while it runs, nobody else in this thread may run asyncio."""
    expect.set_options(timeout=30_000)  # five seconds are few where others want the processor too
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), headless=True, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def open_page(
    browser: Browser, comfy_server: ComfyServer, tiny_models: TinyModels
) -> Iterator[Callable[..., ComfyPage]]:
    """Opens further pages, each a browser tab of its own. At the end none may have raised an error."""
    context = browser.new_context(viewport={"width": 1600, "height": 950})
    context.route(lambda url: not url.startswith((comfy_server.url, "data:", "blob:")), lambda route: route.abort())
    pages: list[ComfyPage] = []

    def opened(*, nodes2: bool = False, before: Callable[[Page], None] | None = None) -> ComfyPage:
        page = context.new_page()
        pages.append(ComfyPage(page, comfy_server, tiny_models, nodes2=nodes2))
        if before is not None:
            before(page)
        pages[-1].open()
        return pages[-1]

    yield opened
    errors = [error for page in pages for error in page.errors]
    context.close()
    assert errors == []


@pytest.fixture(params=[False, True], ids=["classic", "nodes2"])
def comfy(request: pytest.FixtureRequest, open_page: Callable[..., ComfyPage]) -> ComfyPage:
    """ComfyUI's page in one renderer and then in the other."""
    return open_page(nodes2=request.param)
