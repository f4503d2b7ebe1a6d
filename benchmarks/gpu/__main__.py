"""Experiments for one GPU, one after the other, each under eight minutes; what is done is not done again.

    python -m benchmarks.gpu                    what is left for this device and these versions, in order
    python -m benchmarks.gpu --only 3           one of them, again
    python -m benchmarks.gpu --small            each in small form on the CPU: do they run?

Results are kept in --state after each experiment, so a programme may take several half hours. At the end, or with
--page alone, tables go to benchmarks/gpu.md, choices to parallel_runtime/choices.json and constants to
parallel_runtime/planner/measured.json. Exit status: 0 when all is done, 1 when an experiment failed, 2 for a machine on
which they cannot run.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from .programme import BY_NUMBER, EXPERIMENTS, LIMIT_S, apply, failed_of, section, write_page
from .setting import ROOT, Setting, find_setting
from .state import State

PAGE = Path(__file__).resolve().parents[1] / "gpu.md"
BUILD = ROOT / "build" / "gpu"


def main(words: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=int, choices=sorted(BY_NUMBER), help="this experiment, whether done or not")
    parser.add_argument("--here", action="store_true", help="in this process, without the limit of eight minutes")
    parser.add_argument("--small", action="store_true", help="in small form on the CPU; nothing but --state is written")
    parser.add_argument("--page", action="store_true", help="measure nothing, write what is kept")
    parser.add_argument("--minutes", type=float, default=25.0, help="begin no experiment after these (default: 25)")
    parser.add_argument("--state", type=Path, default=BUILD / "state.json", help="(default: %(default)s)")
    parser.add_argument("--models", type=Path, default=BUILD / "models", help="where files of models go")
    parser.add_argument("--comfyui", help="the folder of its main.py (default: the one that this pack is in)")
    arguments = parser.parse_args(words)
    try:
        setting = find_setting(small=arguments.small, comfyui=arguments.comfyui, models=arguments.models)
        state = State(arguments.state, setting.key())
        for other in state.others:
            say(f"kept for others, and not taken: {', '.join(other.values())}")
        well = True if arguments.page else measure(arguments, setting, state)
        # each experiment's own process has added to the file meanwhile
        write(setting, State(arguments.state, setting.key()))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0 if well else 1


def measure(arguments: argparse.Namespace, setting: Setting, state: State) -> bool:
    """Run what is to be run; whether all of it went well."""
    began, well = time.monotonic(), True
    if setting.device.type == "cpu" and arguments.here:
        torch.set_num_threads(1)
    done = [number for number, result in state.results.items() if not failed_of(result)]
    todo = [each for each in EXPERIMENTS if each.number not in done]
    if arguments.only is not None:
        todo = [BY_NUMBER[arguments.only]]
    for each in todo:
        if time.monotonic() - began > 60 * arguments.minutes:
            say(f"{arguments.minutes:g} minutes are over: {each.number} and what follows is left for the next run")
            break
        started = time.monotonic()
        if arguments.here:
            say(f"{each.number}. {each.title}")
            with contextlib.redirect_stdout(sys.stderr):  # ComfyUI prints
                result = each.run(setting)
            state.keep(each.number, result.kept())
            say(*result.table, "", *(f"{name} failed: {why}" for name, why in result.failed.items()))
            say(f"{each.number}: {result.decided}; {time.monotonic() - started:.0f} s")
            well &= not result.failed
        else:
            well &= in_process(each.number, arguments)
    return well


def in_process(number: int, arguments: argparse.Namespace) -> bool:
    """Run one experiment in a process group of its own, which ends with the limit; whether it went well."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--only", str(number), "--here"]
    command += ["--state", str(arguments.state), "--models", str(arguments.models)]
    command += ["--small"] * arguments.small + ([] if arguments.comfyui is None else ["--comfyui", arguments.comfyui])
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)  # noqa: S603  our own module
    try:
        status = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        say(f"{number} took more than {LIMIT_S} s and was ended; its figures of before stay")
        return False
    if status:
        say(f"{number} ended with status {status}; the others go on")
    return status == 0


def write(setting: Setting, state: State) -> None:
    """The page and both tables, of a GPU's results."""
    capability = setting.capability
    if capability is None or not state.results:
        return
    write_page(PAGE, section(state.key, state.results))
    apply(state.key, capability, state.results)


def say(*lines: str) -> None:
    """Lines, at once."""
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
