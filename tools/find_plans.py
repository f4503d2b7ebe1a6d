"""Finds the plan of every class of tests/models as if nobody had written one: `python -m tools.find_plans [CLASS ...]`.

For each class: all its cases are looked at, and the first plan is taken that is equal to one process over 2 and over 3
ranks in every case. Then ten other calls of each case (other numbers, timesteps, texts and sizes) must be equal too.
`--wrong N`: so many found plans with one word made wrong; what the proof says of them, and of those that it does not
refuse, whether other calls are equal. `--cases FILE`: of classes that are none of ours; the file adds cases as those of
tests/models do, and has `UNSEEN`, cases by class, and `ORIGIN`. `--tree VERSION`: only whether plans are equal there.
`--update` writes docs/found_plans.md. Exit code 1 where a proven plan is wrong.

Owns the comparison. Does not own finding (parallel_runtime/models/finder), cases, how ranks meet, nor the page
(found_page.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

from models.gloo_group import GlooGroup, OwnTokensOnly
from models.other_calls import other_calls
from models.ranks import Ranks, RanksFailedError
from models.tiny import call, difference
from tools.found_page import ERROR, Known, Row

RANKS = (2, 3)
CONTROL, OTHERS = 1e-3, 10
MORE_CASES = "FOUND_PLANS_CASES"  # tells ranks the file of --cases
NO_EFFECT = "its output does not depend on its attention, so a proof has nothing to see"


def say(*lines: str) -> None:
    """Print."""
    print(*lines, sep="\n", flush=True)  # noqa: T201


def all_cases() -> dict[str, Callable[[], Any]]:
    """Those of tests/models, and of the file of --cases."""
    from models.cases import CASES

    if os.environ.get(MORE_CASES):
        runpy.run_path(os.environ[MORE_CASES])
    return CASES


def looked(_: GlooGroup, names: list[str]) -> dict[str, Any]:
    """The plans that explain a class's cases, and the cases that could not be explained."""
    from parallel_runtime.models.finder import NotFoundError, look, plans
    from parallel_runtime.models.hosted.finding import attention_to
    from parallel_runtime.models.specs.written import to_data

    began = time.perf_counter()
    seen, skipped = [], []
    cases = all_cases()
    for name in names:
        model, inputs = cases[name]()
        try:
            seen.append(look(model, partial(call, model, inputs), attention_to))
        except NotFoundError as error:
            skipped.append(f"{name}: {error}")
    try:
        found = [(each.cuts, to_data(each.spec)) for each in plans(seen)] if seen else []
    except NotFoundError as error:
        found, skipped = [], [*skipped, str(error)]
    return {"plans": found, "skipped": skipped, "seconds": time.perf_counter() - began}


def compared(group: GlooGroup, name: str, data: dict[str, Any], others: int) -> dict[str, Any]:
    """One case shared by the ranks beside one process: errors of its own call and of other calls."""
    from parallel_runtime.models.hosted.hooks import SharedModel
    from parallel_runtime.models.specs.written import from_data
    from parallel_runtime.proof import finite

    model, inputs = all_cases()[name]()
    wanted = [(False, inputs, call(model, inputs))]
    for resized, given in other_calls(inputs, others, partial(call, model)):
        wanted.append((resized, given, call(model, given)))
    shared = SharedModel(model, from_data(data), group)
    errors = [finite(difference(call(model, given), want)) for _, given, want in wanted]  # NaN is no maximum's
    shared.group = OwnTokensOnly()
    control = difference(call(model, inputs), wanted[0][2])
    return {"errors": errors, "control": control, "resized": sum(each[0] for each in wanted)}


def refused(ranks: Ranks, names: list[str], data: dict[str, Any], row: Row | None = None) -> str:
    """Why the proof refuses a plan; "" for one that is equal in all cases."""
    control = 0.0
    for number in RANKS:
        for name in names:
            try:
                rows = ranks.run(compared, name, data, 0, ranks=number)
            except RanksFailedError as error:
                return f"{name}, {number} ranks: {str(error).strip().splitlines()[-1][:200]}"
            worst = max(each["errors"][0] for each in rows)
            control = max(control, *(each["control"] for each in rows))
            if not worst <= ERROR:
                return f"{name}, {number} ranks: error {worst:.1e}"
            if row is not None:
                row.error, row.control = max(row.error, worst), control
    return "" if control > CONTROL else NO_EFFECT


def other_errors(ranks: Ranks, names: list[str], data: dict[str, Any], count: int) -> tuple[list[float], int]:
    """Errors of other calls over 2 ranks, infinite for a call that fails, and how many of them had other sizes."""
    errors, resized = list[float](), 0
    each = -(-count // len(names))
    for name in names:
        try:
            rows = ranks.run(compared, name, data, each, ranks=2)
        except RanksFailedError as error:
            say(f"    {name}: {str(error).strip().splitlines()[-1][:200]}")
            return [*errors, float("inf")], resized
        errors += [max(pair) for pair in zip(*(row["errors"][1:] for row in rows), strict=True)]
        resized += rows[0]["resized"]
    return errors, resized


def find(ranks: Ranks, path: str, names: list[str], others: int = OTHERS) -> Row:
    """The plan of one class, proven, and tried on so many other calls."""
    row = Row(path)
    began = time.perf_counter()
    try:
        (said,) = ranks.run(looked, names, ranks=1)
    except RanksFailedError as error:
        row.reason = f"looking failed: {str(error).strip().splitlines()[-1][:200]}"
        return row
    row.skipped = said["skipped"]
    for cuts, data in said["plans"]:
        why = refused(ranks, names, data, row)
        if not why:
            row.cuts, row.plan = cuts, data
            break
        row.tried.append(f"{cuts}: {why}")
    row.seconds = time.perf_counter() - began
    if not row.plan:
        row.reason = " ".join((row.skipped or row.tried or ["no list of blocks attends"])[-1].split())
        return row
    errors, row.resized = other_errors(ranks, names, row.plan, others)
    row.others, row.wrong = len(errors), sum(not each <= ERROR for each in errors)
    return row


def wrong_words(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The plan with one word made wrong, in each way that there is; with what was changed."""
    for table_name in ("attention", "cut", "gather"):
        for path, words in data[table_name].items():
            keys = list(words) if isinstance(words, dict) else [None]
            for key in keys:
                word = words if key is None else words[key]
                for other in _others_than(word, may_lack=key is not None and table_name == "cut"):
                    changed = json.loads(json.dumps(data))
                    if key is None:
                        changed[table_name][path] = other
                    elif other is None:
                        del changed[table_name][path][key]
                    else:
                        changed[table_name][path][key] = other
                    yield f"{table_name}[{path}]{f'[{key}]' if key else ''}: {word} becomes {other}", changed


def _others_than(word: Any, *, may_lack: bool) -> Iterator[Any]:  # noqa: ANN401
    if may_lack:
        yield None
    if isinstance(word, list):
        yield word[::-1]
        return
    base, at, dim = word.partition("@")
    if "+" in base and ":" not in base:
        yield "+".join(base.split("+")[::-1]) + at + dim
    if at:
        yield base
    elif word not in ("local",) and "within" not in word and "|" not in word:
        yield f"{word}@2" if ":" not in word else word.partition(":")[2]
    if word == "local":
        yield "img"


def try_wrong(ranks: Ranks, rows: list[Row], cases: dict[str, list[str]], count: int) -> dict[str, Any]:
    """So many found plans with one wrong word: how many the proof refuses, and what the others compute."""
    every = [(row, what, data) for row in rows if row.plan for what, data in wrong_words(row.plan)]
    random.Random(0).shuffle(every)  # noqa: S311  a choice, no secret
    found: dict[str, Any] = {"tried": 0, "refused": 0, "equal": [], "wrong": []}
    for row, what, data in every[:count]:
        names, label = cases[row.path], f"{row.path.rpartition('.')[2]} {what}"
        why = refused(ranks, names, data)
        found["tried"] += 1
        if why:
            found["refused"] += 1
            continue
        errors, _ = other_errors(ranks, names, data, OTHERS)
        found["equal" if all(each <= ERROR for each in errors) else "wrong"].append(label)
        say(f"  not refused: {label}: other calls {'equal' if label in found['equal'] else 'WRONG'}")
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", help="parts of the dotted paths of classes (default: all)")
    parser.add_argument("--wrong", type=int, default=0, help="so many found plans with one word made wrong")
    parser.add_argument("--cases", help="a file of cases of classes that are none of ours")
    parser.add_argument("--tree", help="note only whether plans are equal, as those of this version of ComfyUI")
    parser.add_argument("--update", action="store_true", help="write docs/found_plans.md")
    arguments = parser.parse_args()
    from host.fetch import comfyui_path

    names = names_of(arguments.cases)
    wanted = [path for path in names if not arguments.classes or any(each in path for each in arguments.classes)]
    rows, wrong = dict[str, Row](), dict[str, Any]()
    with closing(Ranks(comfyui_path())) as ranks:
        for path in wanted:
            rows[path] = row = find(ranks, path, names[path], 0 if arguments.tree else OTHERS)
            others = f"{row.others} other calls ({row.resized} of other sizes), {row.wrong} wrong"
            say(f"{path}: {f'{row.cuts}, {row.error:.1e}, {others}' if row.plan else 'none: ' + row.reason}")
            for each in row.tried:
                say(f"    {each}")
            if arguments.update:
                note(row, arguments)
        if arguments.wrong:
            wrong = try_wrong(ranks, [rows[path] for path in wanted], names, arguments.wrong)
            say(json.dumps(wrong, indent=1))
    if arguments.update and wrong:
        known = Known.read()
        known.wrong = wrong
        known.write()
    return 1 if any(row.wrong for row in rows.values()) or wrong.get("wrong") else 0


def names_of(file: str | None) -> dict[str, list[str]]:
    """The cases of each class: of a file, else of tests/models."""
    if file is not None:
        os.environ[MORE_CASES] = os.path.abspath(file)
        unseen: dict[str, list[str]] = runpy.run_path(file)["UNSEEN"]
        return unseen
    from tools.known import cases

    names: dict[str, list[str]] = defaultdict(list)
    for known in cases().values():
        if known.name in all_cases():
            names[known.path].append(known.name)
    return names


def note(row: Row, arguments: argparse.Namespace) -> None:
    """Keep a row in its place, now: what comes after it may be stopped."""
    from host.fetch import comfyui_path
    from parallel_runtime.models.specs.found import class_source
    from tools.ship_plans import file_in

    known = Known.read()
    if arguments.tree and "ModuleNotFoundError" in row.reason:
        return  # this ComfyUI has not the class
    if arguments.tree:
        known.trees.setdefault(arguments.tree, {})[row.path] = row.cuts
    elif arguments.cases:
        row.origin = runpy.run_path(arguments.cases)["ORIGIN"].get(row.path, "")
        row.source = class_source(file_in(comfyui_path(), row.path))
        known.unseen[row.path] = row
    else:
        known.rows[row.path] = row
    known.write()


if __name__ == "__main__":
    sys.exit(main())
