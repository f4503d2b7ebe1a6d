"""Which names of ComfyUI the pack's own files use, read from their syntax: what the contract must name.

Also the attributes of what ComfyUI's functions return, of instances of its classes, and of arguments and variables that
are said to be one; named by the class.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from host.server import PACK_ROOT

HOST = PACK_ROOT / "nodes" / "host"
RANKS = PACK_ROOT / "parallel_runtime" / "models" / "hosted"
DOOR = "comfyui"  # nodes/host/contract/comfyui.py
ROOTS = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "folder_paths", "latent_preview", "server", "nodes"}
ROOTS |= {"execution", "node_helpers", "comfyui_version"}

CONTEXT, REGISTRY = "comfy_execution.utils.ExecutionContext", "comfy_execution.progress.ProgressRegistry"
# The classes of what functions return and attributes are: ComfyUI's, and ours that hand it on.
CLASS_OF = {
    "comfy_api.latest.get_executing_context": CONTEXT,
    "comfy_api.latest.get_progress_state": REGISTRY,
    f"{REGISTRY}.dynprompt": "comfy_execution.graph.DynamicPrompt",
    "server.PromptServer.instance": "server.PromptServer",
    "server.PromptServer.prompt_queue": "execution.PromptQueue",
    "executing": CONTEXT,
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def dotted(node: ast.expr) -> list[str]:
    """The parts of `a.b.c`; [] for anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []


def doors() -> dict[str, str]:
    """What nodes/host/contract/comfyui.py gives, by name: ComfyUI's full name of it."""
    found: dict[str, str] = {}
    for node in ast.parse((HOST / "contract" / f"{DOOR}.py").read_text()).body:
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


def named(node: ast.expr, names: dict[str, str]) -> str:
    """The full name of what an expression is, of an instance that of its class; "" for what is not ComfyUI's."""
    match node:
        case ast.Name():
            return names.get(node.id, "")
        case ast.Attribute():
            owner = named(node.value, names)
            if not owner or is_class(owner.rpartition(".")[0]):  # of an attribute of an instance nobody knows the class
                return owner
            full = f"{owner}.{node.attr}"
            return CLASS_OF.get(full, full)
        case ast.Call():
            function = named(node.func, names) or (dotted(node.func) or [""])[-1]
            return CLASS_OF.get(function, function if is_class(function) else "")
        case ast.BinOp(op=ast.BitOr()):  # `ControlBase | None`
            return named(node.left, names)
        case ast.IfExp():
            return named(node.body, names) or named(node.orelse, names)
    return ""


def is_class(name: str) -> bool:
    """Whether a full name is that of a class, as such are written."""
    return "." in name and name.rpartition(".")[2][:1].isupper()


def inside(function: ast.FunctionDef | ast.AsyncFunctionDef, names: dict[str, str]) -> dict[str, str]:
    """The names in a function: those of its file, and its arguments and variables that are ComfyUI's."""
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    found = {name: full for name, full in names.items() if name not in {each.arg for each in given}}
    said = [(each.arg, each.annotation) for each in given if each.annotation is not None]
    said += [(each.target.id, each.annotation) for each in ast.walk(function) if is_said(each)]
    found |= {name: full for name, kind in said if is_class(full := named(kind, names))}
    for each in ast.walk(function):
        if isinstance(each, ast.Assign):
            target, value = each.targets[0], each.value
            several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            for name, given in zip(target.elts, value.elts, strict=False) if several else [(target, value)]:
                if isinstance(name, ast.Name) and (full := named(given, found)):
                    found[name.id] = full
    return found


def is_said(node: ast.AST) -> bool:
    """Whether it says of which class a variable is."""
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def uses_in(path: Path) -> Iterator[tuple[str, int]]:
    """Each full name of ComfyUI's that a file uses, with its line: the longest chain of attributes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield from uses_below(tree, names_of(tree), set())


def uses_below(tree: ast.AST, names: dict[str, str], inner: set[int]) -> Iterator[tuple[str, int]]:
    """Those in a part of a file; `inner` are the parts of longer chains."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Attribute):
            inner.add(id(node.value))
        if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner and isinstance(node.ctx, ast.Load):
            full = named(node, names)
            if full and full not in CLASS_OF.values():
                yield full, node.lineno
        if isinstance(node, ast.Call) and dotted(node.func)[-1:] == ["import_module"]:
            if isinstance(node.args[0], ast.Constant):
                yield node.args[0].value, node.lineno
        yield from uses_below(node, inside(node, names) if isinstance(node, FUNCTIONS) else names, inner)


def files() -> list[Path]:
    """The pack's files that may name ComfyUI."""
    at_door = HOST / "contract" / f"{DOOR}.py"
    nodes = [*(PACK_ROOT / "nodes").rglob("*.py"), PACK_ROOT / "__init__.py"]
    return sorted({*nodes, *RANKS.rglob("*.py")} - {at_door})
