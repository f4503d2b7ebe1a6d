"""Holds the direction of imports that design.md draws, by reading the source and never running it.

`python tests/test_imports_point_down.py` prints the drawing, a folder or top-level file a line, from the top down.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# From the top down. A unit imports only itself and units of lower layers; units of one layer ignore each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("entrypoint",),
    ("nodes",),
    ("nodes/host",),
    ("runtime/__main__",),
    ("runtime/cli",),
    ("runtime/trials",),
    ("runtime/pool", "runtime/worker"),
    ("runtime/machines",),
    ("runtime/models/hosted", "runtime/weights"),
    ("runtime/report",),
    ("runtime/models",),
    ("runtime/planner",),
    ("runtime/process",),
    ("runtime/wire", "runtime/parallel"),
    ("runtime/mapped_file",),
    (
        "runtime/checkpoint",
        "runtime/choices",
        "runtime/compiling",
        "runtime/devices",
        "runtime/exchange_groups",
        "runtime/model_call",
        "runtime/nvlink",
        "runtime/packages",
        "runtime/torch_flags",
        "runtime/weight_delta",
        "runtime/sampler_recurrence",
        "runtime/stock_caches",
        "runtime/pinned",
        "runtime/proof",
        "runtime/timing",
    ),
    ("runtime/shares", "runtime/exchange_formats"),
    ("runtime/plan",),
    ("runtime/models/specs",),
    ("runtime/daemon_futures", "runtime/errors", "runtime/kernel_calls", "runtime/redact_paths", "runtime/user_files"),
    ("runtime/__init__",),
)
# Programs of their own: nodes import none of them.
ENDS = {"runtime/__main__", "runtime/cli", "runtime/trials", "runtime/worker"}
COMFY_PUBLIC = {"comfy_api", "folder_paths"}
COMFY_INTERNAL = {"comfy", "comfy_execution", "comfy_extras", "comfyui_version", "execution", "latent_preview"}
COMFY_INTERNAL |= {"server", "nodes"}
MODEL_UNITS = (["specs"], ["hosted"])  # of runtime/models, each a unit of its own
HOSTED = "runtime/models/hosted"  # alone in the runtime imports comfy: in a function, which a worker calls
NEVER = {"pickle", "multiprocessing", "marshal", "shelve", "dill", "cloudpickle"}


@dataclass(frozen=True)
class Import:
    """One import statement: where it stands and the module it names, absolute (`pack.` before the pack's own)."""

    file: str
    line: int
    unit: str
    module: str
    in_function: bool = False

    @property
    def target(self) -> str | None:
        """The unit of the pack it reaches, None for anything outside."""
        return unit_of(self.module.split(".")[1:]) if self.module.split(".")[0] == "pack" else None

    @property
    def outside(self) -> str:
        """The top-level name of a module outside the pack, "" inside."""
        return "" if self.target else self.module.split(".")[0]


def unit_of(parts: list[str]) -> str:
    """The unit of a module given by its dotted parts below the pack: a folder, or a file at the top of the runtime."""
    if parts[:2] == ["nodes", "host"]:
        return "nodes/host"
    if parts[:1] == ["nodes"]:
        return "nodes"
    if parts[:2] == ["parallel_runtime", "models"]:
        return "/".join(["runtime", *parts[1 : 3 if parts[2:3] in MODEL_UNITS else 2]])
    if parts[:1] == ["parallel_runtime"]:
        return f"runtime/{parts[1]}" if len(parts) > 1 else "runtime/__init__"
    return "entrypoint"


def sources(root: Path) -> Iterator[Path]:
    """Every Python file the pack is made of: the entrypoint, nodes, the runtime."""
    yield from (path for path in [root / "__init__.py"] if path.exists())
    for folder in ("nodes", "parallel_runtime"):
        yield from sorted((root / folder).rglob("*.py"))


def read_imports(root: Path) -> list[Import]:
    """All imports of the pack, those in functions and under TYPE_CHECKING included."""
    found = []
    for path in sources(root):
        relative = path.relative_to(root)
        package = list(relative.parent.parts)
        unit = unit_of([*package, *([] if path.stem == "__init__" else [path.stem])])
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        in_functions = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for node in ast.walk(function)
        }
        for node in ast.walk(tree):
            for module in modules_named(node, package, root):
                found.append(Import(str(relative), node.lineno, unit, module, id(node) in in_functions))
    return found


def modules_named(node: ast.AST, package: list[str], root: Path) -> Iterator[str]:
    """The absolute names of the modules an import statement names; nothing for any other node."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield within_pack(alias.name)
    elif isinstance(node, ast.ImportFrom):
        base = (node.module or "").split(".") if node.module else []
        if node.level == 0:
            yield within_pack(".".join(base))
            return
        parent = package[: len(package) - node.level + 1] + base
        for alias in node.names:
            child = root.joinpath(*parent, alias.name)  # `from .. import plan` names the module, not the package
            is_module = child.with_suffix(".py").exists() or child.is_dir()
            yield ".".join(["pack", *parent, *([alias.name] if is_module else [])])


def within_pack(name: str) -> str:
    """An absolute import of the runtime is one of the pack; `nodes` without dots is ComfyUI's own module."""
    return f"pack.{name}" if name.split(".")[0] == "parallel_runtime" else name


def offences(imports: list[Import]) -> list[str]:
    """One line for each import that points up, sideways, or at something its place may not know."""
    depth = {unit: index for index, layer in enumerate(LAYERS) for unit in layer}
    named = {each.unit for each in imports} | {each.target for each in imports if each.target}
    lines = [f"{unit} is in no layer; add it to LAYERS where design.md has it" for unit in sorted(named - depth.keys())]
    for each in imports:
        where = f"{each.file}:{each.line} ({each.unit})"
        known = each.unit in depth and each.target in depth
        if known and each.target != each.unit and depth[each.target] <= depth[each.unit]:
            lines.append(f"{where} imports {each.target}, which is not below it")
        if each.unit in ("entrypoint", "nodes", "nodes/host") and each.target in ENDS:
            lines.append(f"{where} imports {each.target}, a program of its own; move what both need below it")
        if each.outside in NEVER:
            lines.append(f"{where} imports {each.outside}, which nothing here may")
        if each.outside == "comfy" and each.unit == HOSTED:
            if not each.in_function:
                lines.append(f"{where} imports ComfyUI's {each.module} at its top; import it in a function")
        elif each.outside in COMFY_INTERNAL and each.unit != "nodes/host":
            lines.append(f"{where} imports ComfyUI's {each.module}; only nodes/host touches its internals")
        if each.outside in COMFY_PUBLIC and each.unit.startswith("runtime/"):
            lines.append(f"{where} imports ComfyUI's {each.module}; the runtime does not know ComfyUI")
    return lines


def drawing(imports: list[Import]) -> str:
    """Units from the top down, each with the units it imports and what of ComfyUI it touches."""
    lines = []
    for unit in (unit for layer in LAYERS for unit in layer):
        own = [each for each in imports if each.unit == unit]
        below = sorted({each.target for each in own if each.target and each.target != unit})
        comfy = sorted({each.outside for each in own} & (COMFY_PUBLIC | COMFY_INTERNAL))
        ordered = [name for layer in LAYERS for name in layer if name in below]
        if ordered or comfy:
            touches = f"   [ComfyUI: {', '.join(comfy)}]" if comfy else ""
            lines.append(f"{unit:20} -> {', '.join(ordered) or '-'}{touches}")
        elif own or any(each.target == unit for each in imports):
            lines.append(unit)
    return "\n".join(lines)


def test_imports_point_down_and_only_the_host_folder_knows_comfyui() -> None:
    imports = read_imports(ROOT)
    assert {each.unit for each in imports} >= {"nodes", "nodes/host", "runtime/pool", "runtime/worker"}, (
        "files not found"
    )
    assert offences(imports) == []


if __name__ == "__main__":
    print(drawing(read_imports(ROOT)))  # noqa: T201
    problems = offences(read_imports(ROOT))
    raise SystemExit("\n".join(problems) or 0)
