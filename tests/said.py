"""The sentences that the pack's Python says to users, read from the source: constants and f-strings.

Owns which files speak to users and which strings are sentences. `{1}`, `{2}` ... are the places of an f-string's
values, in their order. What an f-string is given may be a sentence of its own, which is found where it stands.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from parallel_runtime.models.hosted.contract import FEATURES

ROOT = Path(__file__).resolve().parents[1]
FILES = (
    *("nodes/choice.py", "nodes/config.py", "nodes/roles.py", "nodes/list_sampler.py", "nodes/benchmark.py"),
    *("nodes/host/panel/actions.py", "nodes/host/model/readable_weights.py"),
    *(
        "nodes/host/proof/benchmark_cases.py",
        "nodes/host/model/block_hooks.py",
        "nodes/host/model/convert_stock_model.py",
    ),
    *("nodes/host/model/pooled_model.py", "nodes/host/model/files.py", "nodes/host/model/source.py"),
    *("nodes/host/model/found_plans.py", "parallel_runtime/models/specs/found.py"),
    *("nodes/report.py", "nodes/host/vae/decoding.py", "nodes/host/model/forward.py"),
    *(
        "nodes/host/sampling/worker_loop_calls.py",
        "nodes/host/sampling/worker_loop.py",
        "nodes/host/tasks/list_sampling.py",
    ),
    *(
        "nodes/host/panel/machines.py",
        "nodes/host/vae/parallel_decode.py",
        "nodes/host/panel/progress.py",
        "nodes/host/proof/proving.py",
    ),
    *("nodes/host/sampling/stock.py", "nodes/host/proof/tuning.py", "nodes/host/proof/begin_tries.py"),
    "nodes/host/sampling/corrected_shares.py",
    *("nodes/host/panel/tuning.py", "nodes/host/proof/trying.py", "parallel_runtime/planner/tries.py"),
    "parallel_runtime/models/hosted/contract_check.py",
    *("parallel_runtime/models/hosted/build.py", "parallel_runtime/models/hosted/stage.py"),
    *("parallel_runtime/models/hosted/owners.py", "parallel_runtime/worker/steady_pipeline.py"),
    "nodes/host/sampling/run_context.py",
    "parallel_runtime/models/hosted/compiled.py",
    "parallel_runtime/pool/pool.py",
    *(
        "nodes/host/model/measures.py",
        "nodes/host/model/new_model.py",
        "nodes/host/model/patcher.py",
        "nodes/host/contract/refusals.py",
        "nodes/host/contract/known_nodes.py",
        "nodes/host/model/changed_modules.py",
        "parallel_runtime/models/hosted/stock_functions.py",
    ),
    *("nodes/host/model/weight_deltas.py", "parallel_runtime/checkpoint.py", "parallel_runtime/cli/check.py"),
    *("parallel_runtime/cli/doctor.py", "parallel_runtime/cli/gpu_checks.py", "parallel_runtime/cli/machine_checks.py"),
    *("parallel_runtime/compiling.py", "parallel_runtime/devices.py"),
    *("parallel_runtime/models/specs/without.py", "parallel_runtime/plan.py", "parallel_runtime/planner/automatic.py"),
    "parallel_runtime/exchange_formats.py",
    "parallel_runtime/packages.py",
    *("parallel_runtime/planner/choose.py", "parallel_runtime/planner/known.py", "parallel_runtime/pool/generation.py"),
    *("parallel_runtime/pool/failures.py", "parallel_runtime/pool/known_errors.py"),
    *("parallel_runtime/pool/nccl_files.py", "parallel_runtime/pool/generation.py", "parallel_runtime/proof.py"),
)
# Arguments that are not said here: words of the schema have files of their own (locales), patterns are searched for.
OTHER_ARGUMENTS = {"tooltip", "description", "display_name", "pattern", "node_id", "help", "category", "then"}
# Calls whose texts are a log's, the command line's, or tooltips, which have a file of their own.
NOT_SAID = {"debug", "info", "warning", "getLogger", "compile", "phase", "_degree"}
# What is put together of single words, and the parts of a step that a plan is limited by.
EXTRA = ("{1} sleeps", "compute", "communication", "launch", "proven")
# What a missing line of the host contract turns off, and what happens instead.
EXTRA += tuple(text for each in FEATURES.values() for text in (each.title, each.instead))
# Names that are the same in every language.
SAME = {"cuda", "torch", "comfyui", "rocm", "nccl", "mig", "mps", "RTX 2000 Ada", "Parallelize Model", "side branch"}
SAME |= {"Parallel Benchmark", "Parallel Flux List Sampler", "Timed VAE Decode", "written and found"}


def sentences(source: str) -> list[str]:
    """The sentences of a file's text, without repeats."""
    tree = ast.parse(source)
    return list(dict.fromkeys(text for text in _said(tree) if _is_sentence(text)))


def all_sentences() -> dict[str, list[str]]:
    """The sentences of each file that speaks to users."""
    return {name: sentences((ROOT / name).read_text(encoding="utf-8")) for name in FILES}


def check_names() -> list[str]:
    """The names of the doctor's findings."""
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
    """The parts of a node that may say something."""
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
