"""A browser: Debian's Chromium, no download; on the session's server in either renderer, or without ComfyUI."""

import os
import shutil
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from host.server import ComfyServer

from .bare_page import BarePage, Files, serve_files
from .comfy_page import WAIT_MS, ComfyPage
from .made_up import MadeUp

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Nothing but this machine has a name. To intercept requests would do as well, and takes the browser's cache away.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
FAILED = pytest.StashKey[bool]()


def chromium() -> str:
    """The browser's path. Raises FileNotFoundError where there is none: these tests are never skipped."""
    found = os.environ.get("CHROMIUM_PATH") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise FileNotFoundError("no Chromium; apt-get install chromium, or set CHROMIUM_PATH")
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Remember whether a test's body failed: its tab is then closed, and what still runs is ended."""
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One browser for this folder. Not for the session: while it runs, nobody else in this thread may run asyncio."""
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), headless=True, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="package")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """One profile for this folder, so that ComfyUI's page is read once."""
    opened = browser.new_context(viewport={"width": 1600, "height": 950})
    opened.set_default_timeout(WAIT_MS)
    yield opened
    opened.close()


class Tabs:
    """The browser tabs that tests share, as to open ComfyUI takes longer than most tests. A failure closes all."""

    def __init__(self, context: BrowserContext, server: ComfyServer | Files) -> None:
        self._context, self._server = context, server
        self._kind = ComfyPage if isinstance(server, ComfyServer) else BarePage
        self._open: dict[str, ComfyPage] = {}

    def get(self, name: str, *, nodes2: bool = False, before: Callable[[Page], None] | None = None) -> ComfyPage:
        """The tab of a name as a test finds it: an empty graph, no panel, no toast. `before` is done to a new page."""
        if name not in self._open:
            self._open[name] = self._kind(self._context.new_page(), self._server, nodes2=nodes2)
            if before is not None:
                before(self._open[name].page)
            self._open[name].open()
        self._open[name].page.bring_to_front()  # a tab behind another draws one frame a second
        self._open[name].tidy()
        return self._open[name]

    def close(self, name: str) -> None:
        """Close a tab that no other test can use."""
        self._open.pop(name).page.close()

    def end_of_test(self, request: pytest.FixtureRequest) -> None:
        """No tab may have raised an error, and none has a test's answers any more."""
        for page in self._open.values():
            page.page.unroute_all()
        errors = {name: page.errors for name, page in self._open.items() if page.errors}
        if request.node.stash.get(FAILED, True) or errors:
            for page in self._open.values():
                page.end_runs()
                page.page.close()
            self._open.clear()
        assert errors == {}


@pytest.fixture(scope="package")
def all_tabs(context: BrowserContext, comfy_server: ComfyServer) -> Tabs:
    return Tabs(context, comfy_server)


@pytest.fixture
def tabs(request: pytest.FixtureRequest, all_tabs: Tabs) -> Iterator[Tabs]:
    """Tabs by name. At the end of the test none may have raised an error."""
    yield all_tabs
    all_tabs.end_of_test(request)


# The renderer that new installations have; the other in the full tier.
@pytest.fixture(params=[pytest.param("classic", marks=pytest.mark.full), "nodes2"])
def comfy(request: pytest.FixtureRequest, tabs: Tabs) -> ComfyPage:
    """ComfyUI's page in one renderer and then in the other."""
    return tabs.get(request.param, nodes2=request.param == "nodes2")


@pytest.fixture
def told_comfy(comfy: ComfyPage) -> Iterator[MadeUp]:
    """ComfyUI's page, which believes whatever a test says of the server's workers and reports."""
    told = MadeUp(comfy)
    yield told
    if not comfy.page.is_closed():
        told.end()


@pytest.fixture(scope="package")
def files() -> Iterator[Files]:
    with serve_files() as found:
        yield found


@pytest.fixture(scope="package")
def all_bare(context: BrowserContext, files: Files) -> Tabs:
    return Tabs(context, files)


@pytest.fixture
def bare(request: pytest.FixtureRequest, all_bare: Tabs) -> Iterator[Tabs]:
    """Tabs without ComfyUI by name. At the end of the test none may have raised an error."""
    yield all_bare
    all_bare.end_of_test(request)


@pytest.fixture
def made_up(bare: Tabs) -> MadeUp:
    """A page without ComfyUI that believes whatever a test says of the server's workers and reports."""
    return MadeUp(bare.get("bare"))


@pytest.fixture(scope="package")
def plain_page(context: BrowserContext, files: Files) -> Iterator[Page]:
    """A page for the panel's modules alone. It may raise no error."""
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{files.url}/extensions/parallel-dit/panel/style.css")
    yield page
    page.close()
    assert errors == []
