"""`python -m parallel_runtime doctor | plan | verify | find-plan | tune | join`: parses, calls, prints, exits.

0: well, or within tolerance. 1: it ran and the answer is no. 2: it could not be run as asked; one line says why.
130: interrupted by Ctrl-C.
"""

import argparse
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from types import ModuleType

from . import pack_folder
from .cli.parser import GONE, make_parser
from .cli.terminal import PhaseLine, paint_for, write
from .errors import PoolError

MODELS = ("diffusion_models", "unet", "checkpoints")  # of a ComfyUI's models
EXIT_OK, EXIT_NO, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
# By command, the field of its report that is the answer, and whether it is true where all is well.
SAYS = {
    "doctor": ("can_run", True),
    "plan": ("chosen", True),
    "verify": ("within_tolerance", True),
    "find-plan": ("refused", False),
    "tune": ("kept", True),
}


def main(argv: Sequence[str] | None = None, *, begin: Callable[[], None] = lambda: None) -> int:
    """Run one command and return its exit code. `begin` is called once the command's modules are imported."""
    given = sys.argv[1:] if argv is None else argv
    if given and given[0] in GONE:
        write(sys.stderr, f"{GONE[given[0]]}\n")
        return EXIT_USAGE
    arguments = make_parser().parse_args(given)
    for name in {"model", "file"} & vars(arguments).keys():
        setattr(arguments, name, model_file(getattr(arguments, name)))
    progress = PhaseLine(sys.stderr)
    try:
        command = import_module(f".cli.{arguments.command.replace('-', '_')}", __package__)
        begin()
        if arguments.command == "join":
            command.run(arguments)  # until it is ended
        return _run(command, arguments, progress)
    except (ValueError, PoolError) as error:
        progress.end()
        if vars(arguments).get("json"):
            write(sys.stdout, json.dumps({"error": str(error).splitlines()[0], "detail": str(error)}) + "\n")
        else:
            write(sys.stderr, f"{arguments.command}: {error}\n")
        return EXIT_USAGE if isinstance(error, ValueError) else EXIT_NO
    except KeyboardInterrupt:  # the pool has ended its ranks on the way here
        progress.end()
        write(sys.stderr, f"{arguments.command}: interrupted\n")
        return EXIT_INTERRUPTED


def model_file(text: str | None, pack: Path | None = None) -> str | None:
    """A file by its path, or by its name in the models of the ComfyUI whose custom_nodes hold the pack."""
    pack = pack or pack_folder(os.environ)
    if text is None or os.path.isfile(text) or pack.parent.name != "custom_nodes":
        return text
    found = (str(pack.parents[1] / "models" / folder / text) for folder in MODELS)
    return next(filter(os.path.isfile, found), text)


def _run(command: ModuleType, arguments: argparse.Namespace, progress: PhaseLine) -> int:
    """Run a command, print its report, and return the exit code that it means.

    What libraries print meanwhile goes to stderr: stdout is for the report alone. transformers prints, for one, where
    docstrings are stripped (-OO).
    """
    with redirect_stdout(sys.stderr):
        report = command.run(arguments, progress)
    progress.end()
    text = _json(report) if arguments.json else command.describe(report, paint_for(sys.stdout, os.environ))
    write(sys.stdout, f"{text}\n")
    field, well = SAYS[arguments.command]
    return EXIT_OK if bool(report[field]) is well else EXIT_NO


def _json(report: dict) -> str:
    return json.dumps(_plain(report), indent=2, allow_nan=False)


def _plain(value: object) -> object:
    """Strict JSON: NaN and infinity, which JSON has no words for, become null wherever they stand."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _end_in_order() -> None:
    """Have `timeout`, a service's stop and a closed terminal end a command as Ctrl-C does: with its files and ranks.

    Not while torch is imported: there is nothing to end yet, and its C++ may abort, or drop the exception.
    """
    for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP, nohup ignores it
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))


if __name__ == "__main__":
    sys.exit(main(begin=_end_in_order))
