"""A plugin of pytest for a recording: it tells each process which test runs, and notes how long each test took."""

import functools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from line_coverage import MEASURED
from measured_process import FOLDER, RUNNING, switch

WRITE_S = 10.0


class Seconds:
    """How long each test took by itself, and each fixture that it shares with others. Of one process of pytest."""

    def __init__(self) -> None:
        self.own: dict[str, float] = defaultdict(float)
        self.shared: dict[str, float] = {}
        self.uses: dict[str, list[str]] = {}
        self.failed: set[str] = set()
        self._shared_meanwhile = 0.0
        self._written = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Say which test runs from now on, here and to the processes that it started or will start."""
        note = RUNNING / str(os.getpid())
        written = note.with_suffix(".new")
        written.write_text(item.nodeid, encoding="utf-8")
        written.replace(note)
        forget_answers()
        switch(item.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """Time what lives longer than a test."""
        began = time.monotonic()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                took = time.monotonic() - began
                self.shared[fixturedef.argname] = max(took, self.shared.get(fixturedef.argname, 0.0))
                self._shared_meanwhile += took

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Add a test's own seconds."""
        report: Any = yield
        self.own[item.nodeid] += max(0.0, call.duration - self._shared_meanwhile)
        self._shared_meanwhile = 0.0
        self.uses[item.nodeid] = list(item.fixturenames)
        if report.failed:
            self.failed.add(item.nodeid)
        return report

    def pytest_runtest_logfinish(self) -> None:
        """Write it from time to time, so that a run that is stopped leaves it."""
        if time.monotonic() > self._written + WRITE_S:
            self.pytest_sessionfinish()

    def pytest_sessionfinish(self) -> None:
        """Write it all beside the lines."""
        self._written = time.monotonic()
        tests = {
            test: {"own_s": own, "shares": [name for name in self.uses[test] if name in self.shared]}
            for test, own in self.own.items()
            if test not in self.failed
        }
        (FOLDER / "seconds").mkdir(exist_ok=True)
        file = FOLDER / "seconds" / f"{os.getpid()}.json"
        file.write_text(json.dumps({"tests": tests, "shared_s": self.shared}), encoding="utf-8")


def forget_answers() -> None:
    """Have each test run what the pack's functions would answer from memory: the first alone is noted for it else."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in MEASURED:
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def pytest_configure(config: pytest.Config) -> None:
    """In pytest itself."""
    config.pluginmanager.register(Seconds())
