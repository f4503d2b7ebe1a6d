"""Tries the plan of a class: `make try-plan CASE="Wan VACE"`; cases are those of cases_*.py, by a part of their name.

A tiny model of the class is run in one process, then shared by 2 and by 3 ranks. Printed: how far they are apart, also
without exchange, and the first module whose output on some rank is not that of one process. Where the class has no plan
or with `--show`: what a plan has to name. Exit code 1 when a plan is missing, fails or differs.

Owns the comparison of modules. Does not own cases, plans, nor how ranks meet (ranks.py).
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models.gloo_group import GlooGroup, OwnTokensOnly
from models.ranks import Ranks, RanksFailedError
from models.tiny import call, difference

RANKS = (2, 3)
ERROR = 1e-5  # of the model's output
UNLIKE = 1e-4  # of one module's, whose rows may be small
CONTROL = 1e-3
BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
Key = str  # of one tensor that a module returns in one of its calls


def say(*lines: str) -> None:
    """Print."""
    print(*lines, sep="\n", flush=True)  # noqa: T201


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors of floats in what a module returns or is given."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)


class Outputs:
    """What each module of a model returned in one call, in the order in which they ended; and which are under way."""

    def __init__(self, model: nn.Module) -> None:
        self.found: dict[Key, Tensor] = {}
        self.under_way: list[str] = []
        self._calls: Counter[str] = Counter()
        self._handles = []
        for path, module in model.named_modules():
            if path:
                self._handles.append(module.register_forward_pre_hook(partial(self._enter, path)))
                self._handles.append(module.register_forward_hook(partial(self._keep, path)))

    def _enter(self, path: str, module: nn.Module, args: object) -> None:
        self.under_way.append(f"{path} ({type(module).__name__})")

    def _keep(self, path: str, module: nn.Module, args: object, out: object) -> None:
        self.under_way.pop()
        self._calls[path] += 1
        for number, tensor in enumerate(tensors_in(out)):
            which = f", its call {self._calls[path]}" if self._calls[path] > 1 else ""
            key = f"{path} ({type(module).__name__}){which}" + (f", tensor {number + 1}" if number else "")
            self.found[key] = tensor.detach().clone()

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def unlike(part: Tensor, whole: Tensor) -> float | None:
    """How far a rank's output is from the whole one, relative; None where nothing can be said.

    Of a tensor with fewer rows in one dim, each row must be one of the whole's, wherever: the largest distance counts.
    """
    if part.shape == whole.shape:
        return difference(part, whole) if whole.any() else None
    dims = [dim for dim, sizes in enumerate(zip(part.shape, whole.shape, strict=False)) if sizes[0] != sizes[1]]
    if part.ndim != whole.ndim or len(dims) != 1 or not part.numel():
        return None
    mine, all_rows = (each.movedim(dims[0], 0).flatten(1).double() for each in (part, whole))
    nearest = torch.cdist(mine, all_rows, compute_mode="donot_use_mm_for_euclid_dist").min(1).values.max()
    return float(nearest / (all_rows.norm() / len(all_rows) ** 0.5).clamp_min(1e-12))


def first_unlike(found: dict[Key, Tensor], wanted: dict[Key, Tensor]) -> dict[str, Any] | None:
    """The first module of one process whose output on this rank is another."""
    for number, (key, whole) in enumerate(wanted.items()):
        if key in found and ((error := unlike(found[key], whole)) is not None) and not error <= UNLIKE:
            shapes = f"{tuple(found[key].shape)} of {tuple(whole.shape)}"
            return {"number": number, "module": key, "error": error, "shapes": shapes}
    return None


def tried(group: GlooGroup, name: str) -> dict[str, Any]:
    """What one rank finds of a case. Raises ValueError for a class without a plan."""
    from models.cases import CASES
    from parallel_runtime.models.hosted.hooks import SharedModel
    from parallel_runtime.models.specs import spec_of

    model, inputs = CASES[name]()
    plan = spec_of(type(model))
    wanted = Outputs(model)
    want = call(model, inputs)
    wanted.remove()
    row: dict[str, Any] = {"first": None, "raised": ""}
    outputs = Outputs(model)  # before the plan's hooks, so that a rank's own rows are seen
    try:
        shared = SharedModel(model, plan, group)
        row["error"] = difference(call(model, inputs), want)
        outputs.remove()
        shared.group = OwnTokensOnly()
        row["control"] = difference(call(model, inputs), want)
    except Exception as error:  # noqa: BLE001  said with the module before it
        inside = f"in {outputs.under_way[-1]}: " if outputs.under_way else ""
        row["raised"] = f"{inside}{type(error).__name__}: {error}"
    return row | {"first": first_unlike(outputs.found, wanted.found)}


def verdict(ranks: int, rows: list[dict[str, Any]]) -> tuple[bool, str]:
    """Whether the plan is right, and the line that says so."""
    firsts = [{**row["first"], "rank": rank} for rank, row in enumerate(rows) if row["first"]]
    where = ""
    if firsts:
        first = min(firsts, key=lambda each: each["number"])
        where = f"; first in {first['module']}, rank {first['rank']}: {first['error']:.1e}, {first['shapes']}"
    raised = next((row["raised"] for row in rows if row["raised"]), "")
    if raised:
        return False, f"{ranks} ranks: {raised}{where}"
    error, control = max(row["error"] for row in rows), min(row["control"] for row in rows)
    said = f"error {error:.1e}, without exchange {control:.1e}"
    if error > ERROR:
        return False, f"{ranks} ranks: differs, {said}{where}"
    if control <= CONTROL:
        return False, f"{ranks} ranks: equal, {said}, which says nothing: make attention matter more in this case"
    return True, f"{ranks} ranks: equal, {said}"


def shown(value: object) -> str:
    """An argument, as short as it can be."""
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    if isinstance(value, (tuple, list)) and len(value) < 4:
        return f"[{', '.join(map(shown, value))}]"
    return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def what_to_name(model: nn.Module, inputs: dict[str, Any]) -> list[str]:
    """Lists of blocks with their arguments, the attention in them, and the modules that run after them."""
    from parallel_runtime.models.hosted.attention import installed

    lines: dict[str, None] = {}  # a set in order
    stack: list[str] = []
    lists = {path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}

    def any_of(path: str) -> str:
        parent, _, last = path.rpartition(".")
        return (f"{any_of(parent)}.{'*' if parent in lists else last}" if parent else last) if path else ""

    def enter(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stack.append(path)
        if path.rpartition(".")[0] in lists or "." not in path:
            taken = [each for each in inspect.signature(module.forward).parameters.values() if each.kind in BY_PLACE]
            names = [each.name for each in taken] + [f"#{number}" for number in range(len(taken), len(args))]
            given = dict(zip(names, args, strict=False)) | kwargs
            said = ", ".join(f"{name} {shown(value)}" for name, value in given.items())
            lines[f"{'  ' * any_of(path).count('.')}{any_of(path)} ({type(module).__name__}): {said}"] = None

    def leave(*_: object) -> None:
        stack.pop()

    switch = installed()
    stock = switch.kernel.stock

    def attention(q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        q, k, v = map(switch.kernel.take, (q, k, v))
        by_head = (args[2] if len(args) > 2 else kwargs.get("skip_reshape", False)) or q.ndim == 4
        queries, keys = (each.shape[2 if by_head else 1] for each in (q, k))
        lines[f"    attention in {any_of(stack[-1])}: {queries} queries, {keys} keys, {heads} heads"] = None
        return stock(q, k, v, heads, *args, **kwargs)

    handles = [
        handle
        for path, module in model.named_modules()
        if path
        for handle in (
            module.register_forward_pre_hook(partial(enter, path), with_kwargs=True),
            module.register_forward_hook(leave),
        )
    ]
    switch.kernel.stock = attention
    try:
        call(model, inputs)
    finally:
        switch.kernel.stock = stock
        for handle in handles:
            handle.remove()
    return list(lines)


def described(_: object, name: str, show: bool) -> tuple[bool, list[str]]:
    """Whether a case's class has a plan, and what is to be said before it is tried."""
    from models.cases import CASES
    from parallel_runtime.models.specs import spec_of

    model, inputs = CASES[name]()
    lines = [f"{name}: {type(model).__module__}.{type(model).__qualname__}"]
    try:
        spec_of(type(model))
    except ValueError as error:
        return False, [*lines, str(error), *what_to_name(model, inputs)]
    return True, [*lines, *(what_to_name(model, inputs) if show else [])]


def try_case(comfyui: Ranks, name: str, *, show: bool) -> bool:
    """Run one case; returns whether its plan is right."""
    ((right, lines),) = comfyui.run(described, name, show, ranks=1)
    say(*lines)
    for ranks in RANKS if right else ():
        try:
            well, line = verdict(ranks, comfyui.run(tried, name, ranks=ranks))
        except RanksFailedError as error:
            well, line = False, f"{ranks} ranks: {error}"
        say(line)
        right = right and well
    return right


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", help="a case's name, or a part of it; a case for each class is in tests/models")
    parser.add_argument("--show", action="store_true", help="what a plan of this class can name, with shapes")
    parser.add_argument("--comfyui", help="a folder with ComfyUI (default: the one of the tests)")
    arguments = parser.parse_args()
    if arguments.comfyui:
        os.environ["COMFYUI_PATH"] = arguments.comfyui  # whose classes decide which cases there are
    from host.fetch import comfyui_path
    from models.cases import CASES

    names = [name for name in CASES if arguments.case in name]
    if not names:
        parser.error(f"no case's name contains {arguments.case!r}; there are {', '.join(CASES)}")
    with closing(Ranks(comfyui_path())) as comfyui:
        return 0 if all([try_case(comfyui, name, show=arguments.show) for name in names]) else 1


if __name__ == "__main__":
    sys.exit(main())
