"""One template after the other in one ComfyUI: stock, ours, ours without exchange; every latent compared.

Owns: what is queued, what becomes of it in a row, and the file of rows by which a run goes on. Does not own: the graphs
(swap.py), the page (page.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from host.client import ComfyClient, PromptRefusedError, PromptResult, ServerGoneError, Workflow
from host.formats import allowed_by
from host.pack_workflows import TOLERANCE, relative_error

from .files import Files
from .graph import NotTriedError
from .swap import Small, ours, small, stock_otherwise, without_exchange

EQUAL, REFUSED, STOCK_FAILS, NOT_TRIED, WRONG = "equal", "refused", "stock fails", "not tried", "wrong"
VISIBLE = 1e-3  # what the control has to differ by: 100 times the tolerance
PROMPT_S = 180.0
CLASSES_OF_REFUSALS = ("ValueError",)  # what the pack raises for what a user can change
SHARED = {"mode": "manual", "devices": "cpu:2", "ring": 1}
# What stock may compute exactly otherwise than its server does: attention_pytorch on one thread, both sides of guidance
# in one batch, which a plan that shares out rows computes apart.
OTHER_WAYS: tuple[dict[str, Any], ...] = (
    {"kernel": "attention_basic", "threads": 1},
    {"kernel": "attention_sub_quad", "threads": 2},
    {"kernel": "attention_pytorch", "threads": 2},
    {"kernel": "attention_pytorch", "threads": 1, "apart": True},
)
NAMES = {True: "ulysses 2", False: "cfg 2"}
PLANS = {True: {**SHARED, "ulysses": 2}, False: {**SHARED, "ulysses": 1, "cfg": 2}}


@dataclass(frozen=True)
class Row:
    """What became of a template. `node`: the class that refused or failed; `why` in its words.

    `rounding`: where the error is above the tolerance, what stock's own latents differ by, computed otherwise.
    """

    name: str
    result: str
    uses: int = 0
    plan: str = ""
    error: float = 0.0
    control: float = 0.0
    rounding: float = 0.0
    latents: int = 0
    models: tuple[str, ...] = ()
    node: str = ""
    why: str = ""
    wall_s: float = 0.0


class Rows:
    """Rows in a file, one a line: a run that was ended goes on with it. What was wrong is tried again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.known: dict[str, Row] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                said = json.loads(line)
                row = Row(**{**said, "models": tuple(said["models"])})
            except (ValueError, TypeError, KeyError):  # a line that was cut off, or of another version
                continue
            self.known[row.name] = row

    def done(self, name: str) -> bool:
        """Whether it need not be tried again."""
        return name in self.known and self.known[name].result != WRONG

    def add(self, row: Row) -> None:
        """Keeps a row."""
        self.known[row.name] = row
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(("" if not text or text.endswith("\n") else "\n") + json.dumps(asdict(row)) + "\n")


@dataclass
class _FailedError(Exception):
    """A prompt that did not end well."""

    node: str
    why: str
    kind: str = ""


@dataclass
class Trial:
    """Templates in one server. `output` is where it saves, `files` writes what it loads, `info` is what it has."""

    client: ComfyClient
    output: Path
    files: Files
    info: Mapping[str, Any]
    say: Callable[[str], None] = field(default=lambda text: None)

    def row(self, name: str, uses: int, graph: Workflow) -> Row:
        """Tries an expanded template. Raises ServerGoneError or TimeoutError where the server is of no more use."""
        began = time.monotonic()
        found = self._found(graph)
        return Row(name=name, uses=uses, **{**found, "wall_s": round(time.monotonic() - began, 1)})

    def _found(self, graph: Workflow) -> dict[str, Any]:
        try:
            made = small(graph, self.info)
            self.files.need(made.files)
        except NotTriedError as error:
            return {"result": NOT_TRIED, "why": str(error)}
        except RuntimeError as error:  # of ComfyUI's classes, when they are asked for a file's tensors
            return {"result": NOT_TRIED, "why": f"its tiny file cannot be written: {last_line(str(error))}"}
        known: dict[str, Any] = {"models": tuple(made.models)}
        try:
            stock = self._latents(made.graph)
            if not stock:
                raise _FailedError("", "no sampler gave a latent")
            if not all(value.isfinite().all() for value in stock.values()):
                raise _FailedError("", "its latent is not finite")
        except _FailedError as error:
            return {**known, "result": STOCK_FAILS, "node": error.node, "why": error.why}
        known |= {"plan": " and ".join(NAMES[shares] for shares in sorted(made.ways)), "latents": len(stock)}
        try:
            found = self._latents(ours(made, PLANS))
        except _FailedError as error:
            refused = error.kind in CLASSES_OF_REFUSALS
            return {**known, "result": REFUSED if refused else WRONG, "node": error.node, "why": error.why}
        known["error"], differs = compared(stock, found)
        if differs and known["error"] < VISIBLE:
            known["rounding"] = self._rounding(made, stock)
            differs = "" if known["error"] <= allowed_by(known["rounding"], least=TOLERANCE) else differs
        if differs:
            return {**known, "result": WRONG, "why": differs}
        return {**known, **self._control(made, stock)}

    def _rounding(self, made: Small, stock: Mapping[str, torch.Tensor]) -> float:
        """How far stock's latents are from those that it computes as exactly in another way."""
        return max(compared(stock, self._latents(stock_otherwise(made, each)))[0] for each in OTHER_WAYS)

    def _control(self, made: Small, stock: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        try:
            apart = self._latents(without_exchange(made, PLANS))
        except _FailedError as error:
            return {"result": EQUAL, "why": f"the control fails: {error.node}: {error.why}"}
        control, _ = compared(stock, apart)
        return {"result": EQUAL, "control": control}

    def _latents(self, graph: Workflow) -> dict[str, torch.Tensor]:
        """Each latent that is kept, by the sampler's output and the part of it. Raises _FailedError."""
        try:
            result = self.client.queue(graph, timeout_s=PROMPT_S)
        except PromptRefusedError as error:
            raise _FailedError("the server", first_line(str(error).replace("\n", "; "))) from error
        if result.status != "success":
            raise _FailedError(result.error_node, first_line(result.error_message), result.error_type)
        if result.node_errors:  # ComfyUI runs the other outputs of such a graph
            body = {"error": "an output is not valid", "node_errors": result.node_errors}
            raise _FailedError("the server", first_line(str(PromptRefusedError(body)).replace("\n", "; ")))
        return self._kept(result)

    def _kept(self, result: PromptResult) -> dict[str, torch.Tensor]:
        found = {}
        for output in result.outputs.values():
            for item in output.get("kept", ()):
                path = self.output / item["file"]
                found |= {f"{item['name']} {part}": value for part, value in load_file(path).items()}
                path.unlink()
        return found


def first_line(text: str, most: int = 300) -> str:
    """A message's first line."""
    return text.strip().partition("\n")[0][:most]


def last_line(text: str, most: int = 300) -> str:
    """The last line of what a process said, which names the error."""
    return text.strip().rpartition("\n")[2][:most]


def compared(stock: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error of any latent, and what is wrong with it; "" for nothing."""
    if stock.keys() != found.keys():
        return float("inf"), f"{len(found)} latents where stock has {len(stock)}"
    worst = 0.0
    for name, value in stock.items():
        if value.shape != found[name].shape:
            return float("inf"), f"latent {name}: {tuple(found[name].shape)} where stock has {tuple(value.shape)}"
        error = relative_error(found[name], value)
        worst = max(worst, float("inf") if error != error else error)  # not a number, where one latent is not
    return worst, f"differs by {worst:.1e}, more than {TOLERANCE:.0e}" if not worst <= TOLERANCE else ""


GONE = (ServerGoneError, TimeoutError, ConnectionError)
