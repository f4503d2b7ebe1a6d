"""A case in stages, of one rank or several, and what PipeFusion computes of it in one process.

The simulation runs the unmodified module on all tokens, once for each patch, and replaces the attention function alone:
it keeps the keys of every call, writes those of the patch's tokens, and has all queries see what is kept. Of a run, the
rows of its patch are right: all else in a block works token by token. Shares nothing with the hooks but a plan's words:
which tokens a patch has is counted here once more.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_runtime.models.hosted.attention import installed
from parallel_runtime.models.hosted.call import TokenCall
from parallel_runtime.models.hosted.hook_points import find_hook_points
from parallel_runtime.models.hosted.hooks import SharedModel
from parallel_runtime.models.hosted.pass_call import PassCall, PassEndsError
from parallel_runtime.models.hosted.stage import StagedBlocks
from parallel_runtime.models.specs import ShardingSpec, spec_of
from parallel_runtime.models.specs.words import FIRST, GRID, Each, Grid, Tokens, Word, parse, streams_in
from parallel_runtime.parallel.attention import SequenceParallelAttention
from parallel_runtime.parallel.collectives import Axis, Traffic
from parallel_runtime.parallel.kept_keys import HeldRows
from parallel_runtime.parallel.pipefusion import balanced_stages
from parallel_runtime.weights.block_shards import blocks_of

from .cases import CASES
from .gloo_group import GlooGroup
from .tiny import call, difference

Call = Callable[[nn.Module, dict[str, Any]], Tensor]
PATCHES = 3


def moved(inputs: dict[str, Any], amount: float) -> dict[str, Any]:
    """The inputs of the next step: the latent a little elsewhere."""
    numbers = torch.Generator().manual_seed(77)

    def one(x: Tensor) -> Tensor:
        return x + amount * torch.randn(x.shape, generator=numbers)

    name, x = next(iter(inputs.items()))
    return {**inputs, name: one(x) if isinstance(x, Tensor) else [one(each) for each in x]}


class GlooNeighbours:
    """The same parts of the stages before and after, with blocking messages."""

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def receive(self, like: list[Tensor]) -> list[Tensor]:
        """In the shapes and dtypes of these."""
        found = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in like]
        for tensor in found:
            dist.recv(tensor, dist.get_rank() - self.parts)
        return found

    def send(self, tensors: list[Tensor]) -> None:
        """To the next rank."""
        for tensor in tensors:
            dist.send(tensor.contiguous(), dist.get_rank() + self.parts)


class Pipeline:
    """A model whose blocks are in stages of so many ranks on each `axes`. The last stage has the results."""

    def __init__(self, model: nn.Module, patches: int, axes: dict[str, Axis]) -> None:
        self.model, self.patches, plan = model, patches, spec_of(type(model))
        self.group = SequenceParallelAttention(**axes)
        self.parts = self.group.parts
        rank, ranks = dist.get_rank() // self.parts, dist.get_world_size() // self.parts
        blocks = blocks_of(model, plan.staged)
        costs = [float(sum(weight.nbytes for weight in block.parameters())) for block in blocks.values()]
        run = balanced_stages(costs, ranks)[rank]
        before = blocks_of(model, plan.before_stages) if plan.before_stages else {}
        self.staged = StagedBlocks(model, plan, blocks, run, before=before)
        self.shared = SharedModel(model, plan, self.group)
        self.last = rank == ranks - 1
        self.held = HeldRows()

    def __call__(self, call: Call, inputs: dict[str, Any], *, warm: bool) -> Tensor | None:
        """A step; None on all ranks but the last."""
        self.staged.neighbours = GlooNeighbours(self.parts)
        out = None
        for patch in [None] if warm else range(self.patches):
            self.shared.new_call = partial(
                PassCall,
                self.group,
                patches=self.patches,
                patch=patch,
                held=self.held,
                before=self.staged.before,
                ends=self.last and patch is not None and patch + 1 < self.patches,
            )
            self.staged.begin(later=bool(patch))
            try:
                out = call(self.model, inputs)
            except PassEndsError:
                assert not (self.last and (warm or patch == self.patches - 1))
        assert (out is not None) == self.last
        return out


class Simulation:
    """The same in one process, for stages of `parts` ranks. `call` runs the model."""

    def __init__(self, model: nn.Module, patches: int, parts: int, call: Call, inputs: dict[str, Any]) -> None:
        self.model, self.patches, self.parts, self.call = model, patches, parts, call
        self.plan = spec_of(type(model))
        self.streams: dict[str, int] = {}
        self.grid = (0, 0, 0)
        self.sites: list[tuple[str, ...] | None] = []  # each call of the attention function: streams of its keys
        self._look(inputs)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.outputs: dict[str, list[Tensor]] = {}

    def __call__(self, inputs: dict[str, Any], *, warm: bool) -> Tensor:
        """A step."""
        for patch in [None] if warm else range(self.patches):
            with self._stale(patch), self._merging(patch):
                out = self.call(self.model, inputs)
        return out

    def _look(self, inputs: dict[str, Any]) -> None:
        """Which attention is over which streams, and how long they are."""
        switch, alone = installed(), SequenceParallelAttention()
        stock, simulation = switch.kernel.stock, self
        over: list[tuple[str, ...] | None] = [None]

        class Looking(TokenCall):
            def attend(self, kernel: Any, qkv: Any, attention: Any, **options: Any) -> Any:
                over[0] = attention.keys
                simulation.streams, simulation.grid = {name: sum(n) for name, n in self.streams.items()}, self.grid
                return super().attend(kernel, qkv, attention, **options)

        def noted(*arguments: Any, **options: Any) -> Tensor:
            self.sites.append(over[0])
            over[0] = None
            return stock(*arguments, **options)

        shared = SharedModel(self.model, self.plan, alone)
        shared.new_call = lambda name: Looking(alone, name)
        switch.kernel.stock = noted
        try:
            self.call(self.model, inputs)
        finally:
            switch.kernel.stock = stock
            shared.remove()

    def rows(self, streams: tuple[str, ...], patch: int) -> Tensor:
        """Where a patch's tokens are among those of these streams."""
        found, first = [], 0
        for stream in streams:
            name, total = stream.removeprefix(FIRST), self.streams[stream]
            order = list(self.streams).index(name)
            tokens = torch.arange(self.streams[name])
            runs = tokens.tensor_split(self.patches * self.parts)
            if order % 2 == 0:  # the longer runs come last
                lengths = [len(run) for run in runs][::-1]
                runs = tokens.split(lengths)
            patches = [torch.cat(runs[first:][: self.parts]) for first in range(0, len(runs), self.parts)]
            mine = patches[patch][patches[patch] < total]
            if (
                self.streams[name] < self.patches * self.parts
            ):  # each patch has all of it; its keys count with the first
                alone = all(self.streams[each] < self.patches * self.parts for each in streams)
                mine = tokens if alone or not patch else tokens[:0]
            if stream == GRID:
                frames, height, width = self.grid
                places = torch.arange(math.prod(self.grid)).view(frames, height, width)
                mine = (places[:, mine] if height >= width else places[:, :, mine]).flatten()
                total = math.prod(self.grid)
            found.append(first + mine)
            first += total
        return torch.cat(found)

    @contextmanager
    def _stale(self, patch: int | None) -> Iterator[None]:
        switch = installed()
        stock, number = switch.kernel.stock, iter(range(len(self.sites)))

        def stale(q: Tensor, k: Tensor, v: Tensor, heads: int, *arguments: Any, **options: Any) -> Tensor:
            site = next(number)
            q, k, v = map(switch.kernel.take, (q, k, v))
            streams = self.sites[site]
            if streams is not None and not self.plan.streams_before.issuperset(streams):
                by_head = arguments[2] if len(arguments) > 2 else options.get("skip_reshape", False)
                if patch is None:
                    self.kept[site] = k.clone(), v.clone()
                else:
                    rows, dim = self.rows(streams, patch), 2 if by_head else 1
                    for kept, fresh in zip(self.kept[site], (k, v), strict=True):
                        kept.index_copy_(dim, rows, fresh.index_select(dim, rows))
                k, v = (each.clone() for each in self.kept[site])
            return stock(q, k, v, heads, *arguments, **options)

        switch.kernel.stock = stale
        try:
            yield
        finally:
            switch.kernel.stock = stock

    @contextmanager
    def _merging(self, patch: int | None) -> Iterator[None]:
        """What is gathered by the plan has each patch's rows of its own run."""
        modules = dict(self.model.named_modules())
        handles = []
        for point in find_hook_points(self.model, self.plan):
            path = next(name for name, module in modules.items() if module is point.module)
            word = self._gathered(path, self.plan)
            if word is not None and not self.plan.streams_before.issuperset(streams_in(word)):
                merge = partial(self._merge, path, word, patch)
                handles.append(point.module.register_forward_hook(merge))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _gathered(self, path: str, plan: ShardingSpec) -> Word | None:
        blocks, _, last = path.rpartition(".")
        for table in plan.gathers:
            names = [path]
            if last.isdigit() and int(last) == len(self.model.get_submodule(blocks)) - 1:
                names.append(f"{blocks}.-1")
            for name in names:
                if name in table:
                    return parse(table[name])
        return None

    def _merge(self, path: str, word: Word, patch: int | None, _: nn.Module, __: Any, out: Any) -> Any:
        outs = list(out) if isinstance(word, Each) else [out]
        words = word.words if isinstance(word, Each) else (word,)
        kept = self.outputs.setdefault(path, [None] * len(outs))
        for number, (value, each) in enumerate(zip(outs, words, strict=True)):
            if each is None:
                continue
            if patch is None:
                kept[number] = value.clone()
            elif isinstance(each, Grid):
                flat = value.flatten(each.dim, each.dim + 2)
                rows = self.rows((GRID,), patch)
                whole = (
                    kept[number]
                    .flatten(each.dim, each.dim + 2)
                    .index_copy(each.dim, rows, flat.index_select(each.dim, rows))
                )
                kept[number] = whole.view(kept[number].shape)
            else:
                assert isinstance(each, Tokens)
                rows = self.rows(tuple(run.stream for run in each.runs), patch)
                kept[number] = kept[number].index_copy(each.dim, rows, value.index_select(each.dim, rows))
            outs[number] = kept[number].clone()
        return type(out)(outs) if isinstance(word, Each) else outs[0]


def axes_of(parts: int, kind: str, groups: list[dist.ProcessGroup | None]) -> dict[str, Axis]:
    """Both axes of a stage of so many ranks, one of which has all of them; `groups` are those of the stages."""
    traffic, rank = Traffic(show_waiting=lambda _: None), dist.get_rank()
    axes = {"ring": Axis("ring"), "ulysses": Axis("ulysses")}
    return axes | {kind: Axis(kind, parts, rank % parts, groups[rank // parts], traffic)} if parts > 1 else axes


def errors(group: GlooGroup, name: str, kind: str) -> dict[str, float]:
    """Of a case in two stages over these ranks, on the last one: in warm-up, and in the two steps after one.

    `kind`: the axis that the ranks of a stage have. `stale`: how far PipeFusion is from the module itself.
    """
    model, inputs = CASES[name]()
    steps = [inputs, moved(inputs, 0.3), moved(inputs, 0.6)]
    parts, judges = group.parts // 2, group.index == group.parts - 1
    groups = [dist.new_group(list(range(first, first + parts))) for first in range(0, group.parts, parts)]
    if judges:  # before the hooks of a pipeline are on the model
        wanted = [call(model, each) for each in steps]
        simulation = Simulation(model, PATCHES, parts, call, inputs)
        simulated = [simulation(each, warm=not number) for number, each in enumerate(steps)]
    pipeline = Pipeline(model, PATCHES, axes_of(parts, kind, groups))
    got = [pipeline(call, copy.copy(each), warm=not number) for number, each in enumerate(steps)]
    again = pipeline(call, steps[1], warm=True)
    if not judges:
        return {}
    return {
        "warm": max(difference(got[0], wanted[0]), difference(again, wanted[1])),
        "simulated": max(difference(got[step], simulated[step]) for step in (1, 2)),
        "stale": difference(got[2], wanted[2]),
    }
