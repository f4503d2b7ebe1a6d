"""Every option of a ComfyUI's command line that its ranks get: `python each_option.py COMFYUI`, in its own process.

Prints JSON: "options", by name what the host's value was and what a rank makes of what it is sent, for each option
given alone; "runs", command lines in which each of them is given once, as far as the parser takes them together.
"""

import argparse
import contextlib
import enum
import importlib
import json
import sys
from itertools import zip_longest
from typing import Any

from parallel_runtime.models.hosted.options import REASONS, apply_options, read_options

VALUES = {str: "a value", int: "-3", float: "-1.5", None: ""}  # of an option that takes one


def main(path: str) -> None:
    sys.path.insert(0, path)
    import comfy.cli_args

    parser = comfy.cli_args.parser
    sent = [each for each in parser._actions if each.dest != "help" and not REASONS.keys() & set(each.option_strings)]
    given = {action.option_strings[0]: words_of(action) for action in sent}
    options = {name: compared(words) for name, words in given.items()}
    together = {id(action): group for group in parser._mutually_exclusive_groups for action in group._group_actions}
    groups: dict[int, list[str]] = {}
    for action in sent:
        groups.setdefault(id(together.get(id(action), action)), []).append(action.option_strings[0])
    runs = [[word for name in names if name for word in given[name]] for names in zip_longest(*groups.values())]
    sys.stdout.write(json.dumps({"options": options, "runs": runs}))


def words_of(action: argparse.Action) -> list[str]:
    """The option as a user writes it, with one value where it takes any."""
    name = action.option_strings[0]
    if action.nargs == 0:
        return [name]
    if isinstance(action.type, type) and issubclass(action.type, enum.Enum):
        return [name, next(iter(action.type)).value]
    return [f"{name}={(action.choices or [VALUES[action.type]])[0]}"]


def compared(words: list[str]) -> dict[str, Any]:
    """What is sent of this option given alone, and which values of all options a rank then has otherwise."""
    host = read(words)
    told = read_options(host.parser, host.args)
    theirs = vars(host.args)
    rank = read([])
    left_out = apply_options(rank.parser, rank.args, told.told, cpu=False)
    names = ((action.dest, action.option_strings[0]) for action in rank.parser._actions)
    kept = {dest for dest, name in names if name in REASONS}
    unlike = [dest for dest, value in vars(rank.args).items() if dest not in kept and text(value) != text(theirs[dest])]
    return {"told": told.told, "untold": told.untold, "left_out": left_out, "unlike": unlike}


def read(words: list[str]) -> Any:
    """ComfyUI's module of its command line, executed anew with these words."""
    import comfy.cli_args
    import comfy.options

    comfy.options.enable_args_parsing()
    sys.argv = ["main.py", *words]
    with contextlib.redirect_stdout(sys.stderr):
        return importlib.reload(comfy.cli_args)


def text(value: object) -> str:
    """Type and value; members are of a class that each execution makes anew."""
    if isinstance(value, set):
        return f"set of {sorted(map(str, value))}"
    return f"{type(value).__name__} {value}"


if __name__ == "__main__":
    main(sys.argv[1])
