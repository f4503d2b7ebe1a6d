"""What a person reads of the command line: every option explained, examples that parse, and what goes on meanwhile."""

import argparse
import io
import os
import pty
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TextIO

import pytest

from parallel_runtime import __main__ as command_line
from parallel_runtime.__main__ import main
from parallel_runtime.cli import join
from parallel_runtime.cli.parser import make_parser
from parallel_runtime.cli.terminal import CLEAR, PhaseLine, write
from parallel_runtime.report.text import verdict

ESCAPE = "\x1b["
PLAN = ("plan", "--kind", "RTX3090", "--file-dtype", "fp8")


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parser of each command."""
    (found,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return found.choices


def unexplained(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """What lacks words: an option without help, a command without an example that it takes."""
    for action in parser._actions:
        if not (action.help or "").strip():
            yield f"{name}: {action.option_strings or action.dest} has no help"
    lines = re.findall(r"^  python -m parallel_runtime (.+)$", parser.epilog or "", re.MULTILINE)
    if not lines:
        yield f"{name}: no example"
    for line in lines:
        try:
            make_parser().parse_args(shlex.split(line))
        except SystemExit:
            yield f"{name}: the example {line!r} is not taken"


def test_every_option_is_explained_and_every_command_has_examples_that_it_takes() -> None:
    parser = make_parser()
    assert list(unexplained("all", parser)) == []
    for name, each in commands(parser).items():
        assert list(unexplained(name, each)) == []


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "coloured"),
    [
        (Terminal, {"TERM": "xterm"}, True),
        (Terminal, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (Terminal, {"TERM": "dumb"}, False),
        (io.StringIO, {"TERM": "xterm"}, False),
    ],
)
def test_colours_and_moving_lines_are_a_terminals_alone(
    stream: type[io.StringIO], environment: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    out, err = stream(), stream()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    assert main(PLAN) == 0
    seen = out.getvalue()
    assert ("\x1b[32mplan: ulysses=2" in seen) == coloured
    if not stream().isatty() or environment["TERM"] == "dumb":
        assert ESCAPE not in seen + err.getvalue()
    assert stream is Terminal or err.getvalue() == ""


def test_a_terminal_has_one_line_with_a_bar_and_a_file_a_line_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    told = {}
    for stream in (Terminal(), io.StringIO()):
        progress = PhaseLine(stream)
        progress.phase("timing")
        progress.count(3, 4, "uly2")
        progress.end()
        told[type(stream)] = stream.getvalue()
    assert told[Terminal].split(CLEAR) == ["", "timing ...", f"timing [{'#' * 18}{'-' * 6}] 75% uly2", ""]
    assert told[io.StringIO] == "timing ...\n"
    progress = PhaseLine(stream := Terminal())
    for done, of in ((0, 4), (5, 4), (0, 0)):
        progress.count(done, of)
    assert stream.getvalue().split(CLEAR) == ["", f" [{'-' * 24}] 0%", f" [{'#' * 24}] 100%"], "no more than all of it"


def test_a_report_stands_where_the_moving_line_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(command_line, "write", lambda _, text: stream.write(text))

    def run(_: object, progress: PhaseLine) -> dict:
        progress.phase("timing")
        print("a library's words")  # noqa: T201
        return {"refused": why}

    command = SimpleNamespace(run=run, describe=lambda report, _: f"refused: {report['refused']}")
    for why, code in (("", 0), ("it mixes tokens", 1)):
        stream = Terminal()
        asked = SimpleNamespace(json=False, command="find-plan")
        assert command_line._run(command, asked, PhaseLine(stream)) == code
        assert stream.getvalue() == f"{CLEAR}timing ...{CLEAR}refused: {why}\n"
        assert capsys.readouterr() == ("", "a library's words\n")


def read_by_nobody() -> TextIO:
    """A stream whose reader has seen enough."""
    read, written = os.pipe()
    os.close(read)
    return open(written, "w", encoding="utf-8")


def without_terminal() -> TextIO:
    """A stream of a terminal that is gone."""
    terminal, ours = pty.openpty()
    os.close(terminal)
    return open(ours, "w", encoding="utf-8")


def closed() -> None:
    """What Python has in place of a stream that its owner closed."""


@pytest.mark.parametrize("end", [read_by_nobody, without_terminal, closed])
def test_whoever_closes_a_stream_changes_no_exit_code(
    end: Callable[[], TextIO | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, given, code in (
        *(("stdout", PLAN, 0), ("stdout", (*PLAN, "--json"), 0), ("stderr", PLAN, 0)),
        *(("stderr", ("plan", "--kind", "Voodoo"), 2), ("stderr", ("bench",), 2)),
    ):
        with monkeypatch.context() as without, end() or nullcontext() as stream:
            without.setattr(sys, name, stream)
            assert main(given) == code
    for tell in (join._say, lambda line: PhaseLine(sys.stdout).phase(line)):
        with monkeypatch.context() as without, end() or nullcontext() as stream:
            without.setattr(sys, "stdout", stream)
            for line in ("hello", "again"):
                tell(line)


def test_a_full_disk_is_said() -> None:
    with pytest.raises(OSError, match="No space left"), open("/dev/full", "w", encoding="utf-8") as full:
        write(full, "a report")


@pytest.mark.parametrize(
    ("speedups", "said"),
    [
        ({"uly2": 1.46, "ring2": 1.2}, "uly2 is 1.46x faster than one device"),
        ({"uly2": 1.02}, "uly2 is 1.02x faster than one device"),
        ({"uly2": 0.9}, "no plan is faster than one device: uly2, the best, reaches 0.90x"),
        ({}, "one device was not timed, so nothing says whether a plan is faster"),
    ],
)
def test_a_benchmark_says_whether_it_was_worth_it(speedups: dict[str, float], said: str) -> None:
    rows = [{"name": name, "kind": "plan", "speedup": value} for name, value in speedups.items()]
    assert verdict({"contenders": [{"name": "one rank", "kind": "one_rank"}, *rows]}) == said
