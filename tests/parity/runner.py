"""Runs a graph with the stock loader and with ours in one server, and says where they differ."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image

from host import layouts
from host.client import ComfyClient, PromptRefusedError, PromptResult, Workflow
from host.outcomes import RefusedError, StockFailsError
from host.pack_workflows import LOADER, TOLERANCE, relative_error, saved_latent
from host.tiny_models import TinyModels, write_layout

from .edits import INSTANTX, PICTURES
from .graphs import Graph

Plans = Mapping[str, Mapping[str, Any]]
PLANS: dict[str, dict[str, Any]] = {
    "ulysses 2": {"devices": "cpu:2", "ulysses": 2},
    "ring 2": {"devices": "cpu:2", "ring": 2},
    "cfg 2": {"devices": "cpu:2", "cfg": 2},
    "ring 3": {"devices": "cpu:4", "ring": 3},  # other devices are other workers
    "cfg 2 x ulysses 2": {"devices": "cpu:4", "cfg": 2, "ulysses": 2},
}
SAMPLERS = ("KSampler", "KSamplerAdvanced")
GUIDERS = ("BasicGuider", "CFGGuider", "DualCFGGuider", "DualModelGuider", "PerpNegGuider")
MODELS_OF_A_GUIDER = ("model", "model_negative")
RELEASE: Workflow = {"end": {"class_type": "ReleaseParallelPool", "inputs": {}}}
VISIBLE = 1e-3  # an edit that changes the latent less than this would hide an error of ours: 100 x the tolerance


class Case(Protocol):
    """What is compared: `saves` are the ids of its SaveLatent nodes.

    `previews`: whether stock shows any.
    """

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def saves(self) -> tuple[str, ...]: ...
    @property
    def previews(self) -> bool: ...
    def workflow(self) -> Workflow: ...


@dataclass(frozen=True)
class Run:
    """What one run left: the latents, progress as (node, value, max), and two counts."""

    latents: tuple[torch.Tensor, ...]
    progress: tuple[tuple[str, int, int], ...]
    previews: int
    calls: int

    @property
    def latent(self) -> torch.Tensor:
        """That of a graph which saves one."""
        (latent,) = self.latents
        return latent


@dataclass(frozen=True)
class Row:
    """One cell of the matrix. `error` is relative; `failure` is the first line of an error, and then the rest is 0.

    `least` is the smallest error of a latent where a graph saves several.
    """

    graph: str
    kind: str
    plan: str
    error: float = 0.0
    least: float = 0.0
    calls: int = 0
    previews: int = 0
    failure: str = ""
    problems: tuple[str, ...] = ()
    of_stock: bool = False
    refused: bool = False

    def require_equal(self) -> Row:
        """Returns itself; raises StockFailsError or RefusedError where there is nothing to compare, AssertionError
        for anything in which the runs differ."""
        if self.of_stock:
            raise StockFailsError(self.failure)
        if self.refused:
            raise RefusedError(self.failure)
        assert self.problems == ()
        return self


def progress_of(result: PromptResult) -> tuple[tuple[str, int, int], ...]:
    """Progress as (node, value, max). Without previews ComfyUI leaves out what comes soon after another report, so
    only each node's first and last are told then."""
    told = ((each.node, each.value, each.max) for each in result.progress)
    return tuple((node, value, most) for node, value, most in told if result.previews or value in (1, most))


class FailedRunError(RuntimeError):
    """A prompt that did not succeed; the text is one line. `refused`: whether a user is told what to do instead."""

    def __init__(self, said: str, *, refused: bool = False) -> None:
        self.refused = refused
        super().__init__(said)


class FailedStockRunError(FailedRunError, StockFailsError):
    """The same of stock ComfyUI."""


class Bench:
    """Runs graphs on one server, under plans by their names; every stock result is made once."""

    def __init__(self, client: ComfyClient, plans: Plans = PLANS) -> None:
        self.client, self.plans = client, plans
        self._stock: dict[str, Run] = {}

    def stock(self, graph: Case) -> Run:
        """What stock ComfyUI makes of `graph`; raises FailedStockRunError when it does not."""
        if graph.name not in self._stock:
            try:
                self._stock[graph.name] = self.run(counted(graph.workflow()), graph.saves)
            except FailedRunError as failed:
                raise FailedStockRunError(str(failed)) from failed
        return self._stock[graph.name]

    def ours(self, graph: Case, plan: str) -> Run:
        """What our loader makes of it; raises FailedRunError when it does not."""
        return self.run(counted(self._parallelized(graph, plan)), graph.saves)

    def without_exchange(self, graph: Case, plan: str) -> Run:
        """As `ours`, with ranks that attend to their own tokens alone: what must not pass for parity."""
        return self.run(counted(switched_off(self._parallelized(graph, plan))), graph.saves)

    def compare(self, graph: Case, plan: str) -> Row:
        return self._cell(graph, plan, self.ours)

    def control(self, graph: Case, plan: str) -> Row:
        """The same cell without the exchange; its problems are what they should be when `seen` says so."""
        return self._cell(graph, plan, self.without_exchange)

    def run(self, workflow: Workflow, saves: Sequence[str] = ("save",)) -> Run:
        """One prompt; raises FailedRunError when it is refused or does not succeed."""
        try:
            result = self.client.queue(workflow)
        except PromptRefusedError as refused:
            raise FailedRunError(str(refused)) from refused
        if result.status != "success":
            said = f"{result.status} in {result.error_node}: {first_line(result.error_message)}"
            raise FailedRunError(said, refused=result.error_type == "ValueError")
        latents = tuple(saved_latent(self.client, result, node=node) for node in saves)
        return Run(latents, progress_of(result), len(result.previews), calls_of(result))

    def _parallelized(self, graph: Case, plan: str) -> Workflow:
        return parallelized(graph.workflow(), **self.plans[plan])

    def _cell(self, graph: Case, plan: str, run: Callable[[Case, str], Run]) -> Row:
        try:
            stock = self.stock(graph)  # first: where it fails, ours has nothing to equal
            return compared(graph, plan, run(graph, plan), stock)
        except FailedRunError as failed:
            problem = str(failed)
            self.client.queue(RELEASE)  # or three failures in a row would fail every cell after them as well
            why = {"of_stock": isinstance(failed, FailedStockRunError), "refused": failed.refused}
            return Row(graph.name, graph.kind, plan, failure=problem, problems=(problem,), **why)


def compared(graph: Case, plan: str, ours: Run, stock: Run) -> Row:
    """A cell out of two runs, with everything in which they differ. Of several latents, the error is the largest."""
    errors = [relative_error(mine, theirs) for mine, theirs in zip(ours.latents, stock.latents, strict=True)]
    error = max(errors)
    problems = [] if error <= TOLERANCE else [f"relative error {error:.1e}, the limit is {TOLERANCE:.0e}"]
    for what in ("progress", "previews", "calls"):
        mine, theirs = getattr(ours, what), getattr(stock, what)
        if mine != theirs:
            problems.append(f"{what}: {mine} with our loader, {theirs} with the stock loader")
    if not stock.progress or graph.previews > bool(stock.previews):
        problems.append("no progress or no preview to compare")
    if stock.previews and not graph.previews:
        problems.append("previews of what is said to have none")
    row = {"error": error, "least": min(errors), "calls": ours.calls, "previews": ours.previews}
    return Row(graph.name, graph.kind, plan, **row, problems=tuple(problems))


def seen(control: Row) -> bool:
    """Whether a run without exchange differs from stock in every latent, far above the tolerance, and in no count."""
    return len(control.problems) == 1 and control.least > VISIBLE


def effect(bench: Bench, graph: Graph) -> float:
    """How far the edits move stock ComfyUI's own latent: near 0, parity would prove nothing about them."""
    return relative_error(bench.stock(graph).latent, bench.stock(graph.without_edits()).latent)


def parallelized(graph: Workflow, *, devices: str, **degrees: Any) -> Workflow:
    """The same graph with our loader wherever there was UNETLoader."""
    graph = copy.deepcopy(graph)
    config = {"mode": "manual", "devices": devices, "ulysses": 1, "ring": 1} | degrees
    for node in graph.values():
        if node["class_type"] == "UNETLoader":
            node["class_type"] = LOADER
            node["inputs"]["sp_config"] = ["config", 0]
    return graph | {"config": {"class_type": "SPConfig", "inputs": config}}


def switched_off(graph: Workflow) -> Workflow:
    """The same graph, the exchange of our loaders' MODELs switched off."""
    graph = copy.deepcopy(graph)
    for name in [name for name, node in graph.items() if node["class_type"] == LOADER]:
        for node in graph.values():
            links = {slot: [f"off {name}", 0] for slot, value in node["inputs"].items() if value == [name, 0]}
            node["inputs"] |= links
        graph[f"off {name}"] = {"class_type": "SwitchOffExchange", "inputs": {"model": [name, 0]}}
    return graph


def counted(graph: Workflow) -> Workflow:
    """The same graph, counting calls of the model right before each sampler or guider."""
    graph = copy.deepcopy(graph)
    saved = graph["save"]["inputs"]["samples"]
    samples = {name: node["inputs"] for name, node in graph.items() if node["class_type"] in (*SAMPLERS, *GUIDERS)}
    for name, inputs in samples.items():
        for slot in set(inputs) & set(MODELS_OF_A_GUIDER):
            count = f"count {name} {slot}"
            graph[count] = {"class_type": "CountModelCalls", "inputs": {"model": inputs[slot]}}
            inputs[slot] = [count, 0]
            links = {"latent": saved, "calls": [count, 1]}
            graph[f"report {name} {slot}"] = {"class_type": "ReportModelCalls", "inputs": links}
    return graph


def calls_of(result: PromptResult) -> int:
    """The calls that all ReportModelCalls of a graph made by `counted` told."""
    return sum(sum(output.get("model_calls", [])) for output in result.outputs.values())


def first_line(text: str) -> str:
    """What a user sees first of a message."""
    return text.splitlines()[0] if text else ""


def prepare(client: ComfyClient, tiny: TinyModels) -> Bench:
    """Puts the pictures and files that only the matrix uses where the server finds them."""
    shape = layouts.FluxShape(**{**vars(tiny.shape), "depth": 1, "single": 1})
    without_modes = layouts.controlnet_union(shape)[:-1]
    write_layout(tiny.models / "controlnet" / INSTANTX, without_modes, seed=12)
    for number, (name, (width, height)) in enumerate(PICTURES.items()):
        pixels = np.random.default_rng(number).integers(0, 255, (height, width, 4), dtype=np.uint8)
        pixels[:, :, 3] = 255
        pixels[height // 4 : height // 2, width // 4 :, 3] = 0
        client.upload_image(Image.fromarray(pixels), name)
    return Bench(client)
