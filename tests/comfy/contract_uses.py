"""Which names of ComfyUI the pack's own files use, read from their syntax: what the contract must name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from host.server import PACK_ROOT

HOST = PACK_ROOT / "nodes" / "host"
RANKS = PACK_ROOT / "parallel_runtime" / "models" / "hosted"
DOOR = "comfyui"  # nodes/host/comfyui.py
ROOTS = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "folder_paths", "latent_preview", "server", "nodes"}
ROOTS |= {"execution", "node_helpers", "comfyui_version"}


def dotted(node: ast.expr) -> list[str]:
    """The parts of `a.b.c`; [] for anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []


def doors() -> dict[str, str]:
    """What nodes/host/comfyui.py gives, by name: ComfyUI's full name of it."""
    found: dict[str, str] = {}
    for node in ast.parse((HOST / f"{DOOR}.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, node.value
            if isinstance(value, ast.Call) and dotted(value.func) == ["Part"]:
                found[name] = ast.literal_eval(value.args[0])
            elif (parts := dotted(value)) and parts[0] in found:
                found[name] = ".".join([found[parts[0]], *parts[1:]])
    return found


def names_of(tree: ast.Module) -> dict[str, str]:
    """The names in a file that stand for something of ComfyUI's, by its full name."""
    given, found = doors(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and (node.module or "").rpartition(".")[2] == DOOR:
            found |= {each.asname or each.name: given[each.name] for each in node.names if each.name in given}
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] in ROOTS:
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] in ROOTS:
                    found[each.asname or each.name.partition(".")[0]] = (
                        each.name if each.asname else each.name.partition(".")[0]
                    )
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            parts = dotted(node.value)
            if isinstance(node.value, ast.Call) and dotted(node.value.func) == ["Part"]:
                found[node.targets[0].id] = ast.literal_eval(node.value.args[0])
            if parts and parts[0] in found:
                found[node.targets[0].id] = ".".join([found[parts[0]], *parts[1:]])
    return found


def uses_in(path: Path) -> Iterator[tuple[str, int]]:
    """Each full name of ComfyUI's that a file uses, with its line: the longest chain of attributes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = names_of(tree)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner and isinstance(node.ctx, ast.Load):
            parts = dotted(node)
            if parts and parts[0] in names:
                yield ".".join([names[parts[0]], *parts[1:]]), node.lineno
        if isinstance(node, ast.Call) and dotted(node.func)[-1:] == ["import_module"]:
            if isinstance(node.args[0], ast.Constant):
                yield node.args[0].value, node.lineno


def files() -> list[Path]:
    """The pack's files that may name ComfyUI."""
    at_door = HOST / f"{DOOR}.py"
    nodes = [*(PACK_ROOT / "nodes").rglob("*.py"), PACK_ROOT / "__init__.py"]
    return sorted({*nodes, *RANKS.rglob("*.py")} - {at_door})
