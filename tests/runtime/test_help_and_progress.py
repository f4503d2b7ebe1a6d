"""What a person reads of the command line: every option explained, examples that parse, and what goes on meanwhile."""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from host.fetch import comfyui_path
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.cli.parser import make_parser
from parallel_runtime.cli.terminal import CLEAR, Progress
from parallel_runtime.report.text import verdict

ROOT = Path(__file__).resolve().parents[2]
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


def test_an_option_without_help_and_an_example_that_fails_are_found() -> None:
    parser = argparse.ArgumentParser(epilog="examples:\n  python -m parallel_runtime plan --no-such-option")
    parser.add_argument("--silent")
    found = list(unexplained("made up", parser))
    assert [text.partition(": ")[2].split(" ")[0] for text in found] == ["['--silent']", "the"]


def on_a_terminal(*arguments: str, **environ: str) -> tuple[int, str]:
    """Exit code, and all that a person with a terminal sees of a command: both streams are the terminal's."""
    ours, theirs = pty.openpty()
    base = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm"}
    command = [sys.executable, "-m", "parallel_runtime", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs, env=base | environ)
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    return process.wait(), seen.decode().replace("\r\n", "\n")


@pytest.mark.slow
def test_colours_and_moving_lines_are_a_terminals_alone() -> None:
    code, seen = on_a_terminal(*PLAN)
    assert (code, "\x1b[32mplan: ulysses=2" in seen) == (0, True)
    _, without = on_a_terminal(*PLAN, NO_COLOR="1")
    assert "\x1b[32m" not in without
    _, dumb = on_a_terminal(*PLAN, TERM="dumb")
    assert ESCAPE not in dumb
    command = [sys.executable, "-m", "parallel_runtime", *PLAN]
    piped = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ESCAPE not in piped.stdout + piped.stderr
    assert piped.stderr == ""


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_with_a_bar_and_a_file_a_line_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    told = {}
    for stream in (Terminal(), io.StringIO()):
        progress = Progress(stream)
        progress.phase("timing")
        progress.count(3, 4, "uly2")
        progress.end()
        told[type(stream)] = stream.getvalue()
    assert told[Terminal].split(CLEAR) == ["", "timing ...", f"timing [{'#' * 18}{'-' * 6}] 75% uly2", ""]
    assert told[io.StringIO] == "timing ...\n"


def test_plan_answers_first_and_last_and_marks_what_it_chose(command: Callable) -> None:
    done = command(*PLAN)
    lines = done.stdout.splitlines()
    assert lines[0] == lines[-1]
    assert re.fullmatch(r"plan: ulysses=2, \S+ s a step, 1\.\d\dx as fast as one device \(predicted\)", lines[0])
    (chosen,) = [line for line in lines if line.startswith("> ")]
    assert chosen.split()[1] == "uly2"
    assert "2 device(s) of RTX 3090, 24.0 GiB on each" in done.stdout
    whole = command("plan", "--kind", "RTX 3090")
    assert "sharded" in whole.stdout.splitlines()[0], "in bf16 it does not fit whole, in fp8 it does"


def test_phases_are_told_while_it_works_and_the_last_line_is_the_answer(
    command: Callable, tiny_hosted: ModelSpec
) -> None:
    size = ("--width", "64", "--height", "64", "--text-tokens", "4", "--comfyui", str(comfyui_path()))
    done = command("verify", "--model", tiny_hosted.path, "--plan", "ulysses=2", *size)
    assert [line.removesuffix(" ...") for line in done.stderr.splitlines() if line.endswith(" ...")] == [
        "computing random calls in a ComfyUI process",
        "starting 2 rank(s) and loading the model",
        "computing uly2",
        "computing the same by ComfyUI in one process",
    ]
    assert done.stdout.splitlines()[0].startswith("uly2: equal to one process: relative error")
    assert done.stdout.splitlines()[-1] == "uly2: equal to one process"


@pytest.mark.parametrize(
    ("speedups", "said"),
    [
        ({"uly2": 1.46, "ring2": 1.2}, "uly2 is 1.46x faster than one device"),
        ({"uly2": 0.9}, "no plan is faster than one device: uly2, the best, reaches 0.90x"),
        ({}, "one device was not timed, so nothing says whether a plan is faster"),
    ],
)
def test_a_benchmark_says_whether_it_was_worth_it(speedups: dict[str, float], said: str) -> None:
    rows = [{"name": name, "kind": "plan", "speedup": value} for name, value in speedups.items()]
    assert verdict({"contenders": [{"name": "one rank", "kind": "one_rank"}, *rows]}) == said
