"""How many lines a plan of `parallel_runtime/models/specs` takes: what a class costs beside ComfyUI's own code.

Read from the source: the entry of the class in its file's SPECS, and what that entry takes from the same file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from host.server import PACK_ROOT

FOLDER = PACK_ROOT / "parallel_runtime" / "models" / "specs"


@cache
def plan_lines(class_path: str) -> int:
    """Lines of the plan of ComfyUI's class at this dotted path. Raises ValueError when no file has one."""
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = {name: value for name, value in _assigned(tree)}
        for key, value in _entries(named.get("SPECS")):
            if isinstance(key, ast.Constant) and key.value == class_path:
                return len(_lines(value, named))
    raise ValueError(f"{class_path} is in no SPECS of {FOLDER.relative_to(PACK_ROOT)}; add a spec there")


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for each in tree.body:
        if isinstance(each, ast.Assign):
            yield from ((target.id, each.value) for target in each.targets if isinstance(target, ast.Name))
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.value:
            yield each.target.id, each.value


def _entries(plans: ast.expr | None) -> Iterator[tuple[ast.expr | None, ast.expr]]:
    if isinstance(plans, ast.Dict):
        yield from zip(plans.keys, plans.values, strict=True)


def _lines(value: ast.expr, named: dict[str, ast.expr]) -> set[int]:
    """The lines of an expression and of the names of its file that it uses."""
    lines = set(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    for each in ast.walk(value):
        if isinstance(each, ast.Name) and each.id in named:
            lines |= _lines(named[each.id], named)
    return lines
