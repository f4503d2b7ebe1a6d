"""The sentences that the pack's Python says to users, read from the source: constants and f-strings.

Owns which files speak to users and which strings are sentences. `{1}`, `{2}` ... are the places of an f-string's
values, in their order. What an f-string is given may be a sentence of its own, which is found where it stands.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from parallel_runtime.models.hosted.contract import FEATURES

ROOT = Path(__file__).resolve().parents[1]
FILES = tuple(
    f"{folder}/{name}.py"
    for folder, names in {
        "nodes": "benchmark choice config list_sampler parallelize report roles",
        "nodes/host/contract": "known_nodes refusals",
        "nodes/host/model": (
            "block_hooks changed_model changed_modules convert_stock_model files forward found_plans measures "
            "new_model patcher pooled_model readable_weights source stand_in weight_deltas"
        ),
        "nodes/host/panel": "actions machines progress routes tuning",
        "nodes/host/proof": "begin_tries benchmark_cases proving trying tuning",
        "nodes/host/sampling": "corrected_shares run_context stock worker_loop worker_loop_calls",
        "nodes/host/tasks": "list_sampling",
        "nodes/host/vae": "decoding parallel_decode",
        "parallel_runtime": "checkpoint compiling devices exchange_formats packages plan proof",
        "parallel_runtime/cli": "check doctor gpu_checks machine_checks",
        "parallel_runtime/machines": "files",
        "parallel_runtime/models/hosted": "build compiled contract_check owners stage stock_functions",
        "parallel_runtime/models/specs": "found without",
        "parallel_runtime/planner": "automatic choose known machine tries",
        "parallel_runtime/pool": "calls failures generation known_errors pool ranks",
        "parallel_runtime/process": "nccl_files",
        "parallel_runtime/worker": "steady_pipeline",
    }.items()
    for name in names.split()
)
# Arguments that are not said here: words of the schema have files of their own (locales), patterns are searched for.
OTHER_ARGUMENTS = {"tooltip", "description", "display_name", "pattern", "node_id", "help", "category", "then"}
# Calls whose texts are a log's, the command line's, or tooltips, which have a file of their own.
NOT_SAID = {"debug", "info", "warning", "getLogger", "compile", "phase"}
NOT_SAID |= {"_degree", "_choice_input", "_text_input"}
# What is put together of single words, and the parts of a step that a plan is limited by.
EXTRA = ("{1} sleeps", "compute", "communication", "launch", "proven")
# What a missing line of the host contract turns off, and what happens instead.
EXTRA += tuple(text for each in FEATURES.values() for text in (each.title, each.instead))
# Names that are the same in every language.
SAME = {"cuda", "torch", "comfyui", "rocm", "nccl", "mig", "mps", "RTX 2000 Ada", "Parallelize Model", "side branch"}
SAME |= {
    "RTX 6000 Ada",
    *(f"RTX PRO 6000 Blackwell {form} Edition" for form in ("Workstation", "Max-Q Workstation", "Server")),
}
SAME |= {"Parallel Benchmark", "Parallel Flux List Sampler", "Timed VAE Decode", "written and found"}


def sentences(source: str) -> list[str]:
    """The sentences of a file's text, without repeats."""
    tree = ast.parse(source)
    return list(dict.fromkeys(text for text in _said(tree) if _is_sentence(text)))


def all_sentences() -> dict[str, list[str]]:
    return {name: sentences((ROOT / name).read_text(encoding="utf-8")) for name in FILES}


def check_names() -> list[str]:
    found = []
    for name in ("doctor", "gpu_checks", "machine_checks"):
        source = (ROOT / "parallel_runtime" / "cli" / f"{name}.py").read_text(encoding="utf-8")
        for call in ast.walk(ast.parse(source)):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Check":
                given = {each.arg: each.value for each in call.keywords}.get("name")
                found += [given.value] if isinstance(given, ast.Constant) else []
    return sorted(set(found))


def _said(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant):
        yield from [node.value] if isinstance(node.value, str) else []
    elif isinstance(node, ast.JoinedStr):
        yield _template(node)
        for part in node.values:
            yield from _said(part.value) if isinstance(part, ast.FormattedValue) else []
    elif not (isinstance(node, ast.Call) and _called(node) in NOT_SAID):
        for child in _children(node):
            yield from _said(child)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if (
                not isinstance(child, ast.AST)
                or field in ("annotation", "returns")
                or _is_docstring(node, field, child)
            ):
                continue
            if isinstance(child, ast.keyword) and child.arg in OTHER_ARGUMENTS:
                continue
            if isinstance(child, ast.keyword) and child.arg == "name" and _called(node) == "KnownError":
                continue  # tests name it
            yield child


def _template(node: ast.JoinedStr) -> str:
    number, text = 0, ""
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += str(part.value)
        else:
            number += 1
            text += f"{{{number}}}"
    return text


def _called(call: ast.AST) -> str:
    function = getattr(call, "func", None)
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_docstring(node: ast.AST, field: str, child: ast.AST) -> bool:
    return field == "body" and isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)


def _is_sentence(text: str) -> bool:
    words = re.findall(r"[A-Za-z]{2,}", re.sub(r"\{\d+\}", " ", text))
    return len(words) >= 2 and "%s" not in text and " " in text.strip() and re.search(r"[a-z]{2}", text) is not None
