"""A step of one of ComfyUI's own models on one rank.

Owns how the module runs under this rank's part of a plan. Does not own the module and its weights
(hosted_weights.py), how its calls are shared (models/hosted/hooks.py), nor the exchange (parallel/attention.py).
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch

from ..errors import note_module
from ..exchange_formats import EXACT
from ..models.block_chain import BEAT, around_another, hook_entries
from ..models.hosted.attention import installed
from ..models.hosted.block_graphs import BlockGraphs, GraphRun
from ..models.hosted.block_hooks import OPTION, acting, spec_behind, takes_rows
from ..models.hosted.call import TokenCall
from ..models.hosted.calls import INSIDE, from_tree
from ..models.hosted.compiled import CompiledBlocks, CompiledRun, blocks_of
from ..models.hosted.cuda_graphs import GraphRecorder
from ..models.hosted.cuts import Moved
from ..models.hosted.first_block import CachedBlocks, Residuals, total_over
from ..models.hosted.graphs import Watch
from ..models.hosted.hooks import SharedModel
from ..models.hosted.kept_state import KeptState, alike_over, forget_keys, kept_state
from ..models.hosted.other_calls import METHODS
from ..models.hosted.scales import agree
from ..models.hosted.scales import shared as shared_scales
from ..models.hosted.stage import StagedBlocks
from ..models.hosted.stock_functions import ATTENTION, OVERRIDE, SKIPPED, SkippedBlocks, attention_named
from ..models.specs import BETWEEN, spec_of
from ..models.specs.spec import ShardingSpec
from ..parallel.attention import SequenceParallelAttention
from ..parallel.collectives import Axis
from ..plan import BatchSlice, ParallelPlan
from ..timing import RegionTimer
from ..torch_flags import exact_fp32
from ..weights.whole_blocks import WholeBlocks
from ..wire.replies import CachedCalls, KeptCalls
from ..wire.requests import GroupWork, Sample, Step
from .held_state import HeldState
from .hosted_weights import DeltaReceiver, HostedWeights
from .inputs import call_tensors, to_host
from .mesh import Mesh
from .own_tokens import OwnTokens

NewCall: TypeAlias = Callable[[str], TokenCall]

log = logging.getLogger(__name__)


@dataclass
class HostedModel:
    """A model of ComfyUI's on this rank, and the hooks by which it shares its tokens once that was asked for."""

    weights: HostedWeights
    shared: SharedModel | None = None
    between: SharedModel | None = None  # the same for calls with patches between the blocks that need all tokens
    beat: Callable[[], None] | None = None
    graphs: BlockGraphs | None = None
    graphs_under: ParallelPlan | None = None  # the plan of the last request that asked for graphs
    graphs_left: bool = False  # there are some of a run that has ended, and no request was made since

    @property
    def group(self) -> Axis:
        """The ranks that put its blocks together."""
        return self.weights.group

    @cached_property
    def changes(self) -> DeltaReceiver:
        """The change of its weights under way, or the last one."""
        return DeltaReceiver(self.weights)

    @cached_property
    def whole_blocks(self) -> WholeBlocks | None:
        """Which blocks stay whole, of weights that are sharded or offloaded."""
        shards = self.weights.shards
        return None if shards is None else WholeBlocks(shards, self.group, self.weights.device)

    def drop_whole_blocks(self, *, for_a_step: bool) -> None:
        """Have no such blocks: what is loaded or decoded next wants their memory, or a step of another model."""
        if "whole_blocks" in vars(self) and self.whole_blocks is not None:
            self.whole_blocks.drop(for_a_step=for_a_step)

    @cached_property
    def staged(self) -> StagedBlocks:
        """The blocks of this rank's stage."""
        module, weights = self.module, self.weights
        spec = spec_of(module)
        return StagedBlocks(module, spec, weights.staged_blocks, weights.run, before=weights.blocks_before)

    @cached_property
    def cached_blocks(self) -> CachedBlocks:
        """The blocks, which a step cache can skip."""
        return CachedBlocks(self.module, spec_of(self.module))

    @cached_property
    def skipped_blocks(self) -> SkippedBlocks:
        """The blocks, which a node can have skipped."""
        return SkippedBlocks(self.module, spec_of(self.module))

    @cached_property
    def module(self) -> torch.nn.Module:
        """ComfyUI's transformer, once it is loaded."""
        return self.weights.module

    @cached_property
    def blocks(self) -> CompiledBlocks:
        """The blocks, which graphs can run."""
        return blocks_of(self.module)

    def by_graphs(
        self, plan: ParallelPlan, options: Mapping[str, Any], watch: Watch, new_recorder: Callable[[], GraphRecorder]
    ) -> GraphRun:
        """One request whose calls run by a graph of each block, but where something of it is not in graphs yet."""
        _ = self.kept  # looks at the module before links of graphs are on its blocks
        if self.graphs is None:
            self.graphs = BlockGraphs(self.blocks, new_recorder)
        several = self.weights.quantised and plan.cfg > 1  # scales of all rows are those of both sides
        reasons = {
            f"graphs hold exchanges of one group, and {plan.name} has several": several or not plan.takes_graphs,
            "the weights are sharded or offloaded": self.weights.shards is not None,
            "the weights are changed, as by LoRAs": self.changes.changed,
            "a step cache skips blocks": bool(options.get("step_cache")),
        }
        why_not = next((f"no graphs of blocks: {reason}" for reason, holds in reasons.items() if holds), "")
        return GraphRun(self.graphs, version=self.changes.version, watch=watch, why_not=why_not)

    def keep_graphs_of(self, plan: ParallelPlan) -> None:
        """Have none but of this plan, and none at all where more forms came than are kept: what each of them needs
        stays longer than its graph. Every rank that has the model is told, in the plan or not: ranks of an earlier plan
        replay together, so they drop its graphs together. Those of one plan find alike which forms there are."""
        if self.graphs_under != plan or (self.graphs is not None and self.graphs.forgot):
            self.drop_graphs()
            self.graphs_under = plan

    def drop_graphs(self) -> None:
        """Have no graphs of blocks: what they exchange over ends, or others want their memory."""
        if self.graphs is not None:
            self.graphs.drop()

    @cached_property
    def kept(self) -> KeptState | None:
        """What the module keeps between calls of a run; before any hook is on it."""
        return kept_state(self.module)

    def end_run(self) -> None:
        """Forget what the module kept of a run."""
        if "kept" in vars(self) and self.kept is not None:
            self.kept.end()

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Around a call of the module, or of a method of it: its shards are gathered as its blocks run."""
        shards = self.weights.shards
        if shards is None or shards.idle:
            yield
            return
        shards.begin()
        try:
            yield
        finally:
            shards.end()

    @contextmanager
    def without_blocks(self) -> Iterator[None]:
        """Inside, calls of the module run no block: what it takes to run them stays where it is."""
        shards = self.weights.shards
        if shards is not None:
            shards.idle = True
        try:
            yield
        finally:
            if shards is not None:
                shards.idle = False

    def install_hooks(
        self,
        sequence: SequenceParallelAttention,
        beat: Callable[[], None],
        *,
        between: ShardingSpec | None = None,
        new_call: NewCall | None = None,
        moved: Moved | None = None,
    ) -> torch.nn.Module:
        """The module with its calls shared by the ranks of `sequence`; `beat` is called after each block.

        `between`: the spec of calls with patches between the blocks, which meet whole tokens; None: the class's own.
        `new_call`: they are passes of a pipeline, whose state it makes. `moved`: brings rows of the next call's
        residuals to the device; None: they are there.
        """
        module = self.module
        if self.beat is None:
            for path, block in self.weights.blocks.items():
                hook_entries(block, self.weights.methods_of(path), BEAT, after=self._block_done)
        self.beat = beat
        cut = sequence.parts > 1 or new_call is not None
        if cut and between is not None and (self.between is None or self.between.spec != between):
            if self.between is not None:
                self.between.remove()
            self.between = SharedModel(module, between, sequence)
        if cut and between is None and self.shared is None:
            self.shared = SharedModel(module, spec_of(module), sequence)
        for shared, serves in ((self.shared, between is None), (self.between, between is not None)):
            if shared is not None:
                shared.group, shared.new_call = sequence if serves and cut else None, new_call
                shared.moved = moved if serves else None
        return module

    def _block_done(self) -> None:
        if self.beat is not None:
            self.beat()


class HostedForward:
    """The model on one rank, for as long as one request takes. Tokens are shared by the ranks of `sequence`."""

    def __init__(
        self,
        model: HostedModel,
        sequence: SequenceParallelAttention,
        timer: RegionTimer,
        beat: Callable[[], None],
        held: HeldState,
    ) -> None:
        self.model, self.sequence, self.timer, self.beat, self.held = model, sequence, timer, beat, held
        sequence.most_keys, sequence.rounded = 0, False
        self.by_graphs: CompiledRun | GraphRun | None = None  # with which blocks run as graphs
        self.cached: CachedCalls | None = None  # of pieces of this rank's that a step cache was asked about
        self.drain: Callable[[], None] = lambda: None  # waits for the blocks that are queued, with a sign of life each
        self._in_run = False  # whether calls may find what the module kept of others

    def take_kept(self) -> KeptCalls | None:
        """The calls that the module might keep something of, since this was asked last."""
        if not self._in_run or self.model.kept is None:
            return None
        return self.model.kept.take_counted()

    def begin_run(self, run: object, *, ranks: int) -> None:
        """The next calls are of this run, by any name, on `ranks` ranks; None: of none, so the module keeps nothing."""
        self._in_run = run is not None
        if self.model.kept is None:
            return
        if run is None:
            self.model.kept.end()
        else:
            self.model.kept.begin(run, ranks=ranks)

    def begin_step(self, request: Step | Sample, tensors: Mapping[str, torch.Tensor]) -> None:
        """A step of a request begins, which takes as much memory as others of its form. A pipeline's stages take more
        in later ones, a class that keeps something looks at what is free, and where `lean` is asked ComfyUI wants
        memory within a step: no blocks stay whole there."""
        if self.model.whole_blocks is not None:
            asked = tuple(map(_form_of, request.calls))
            sizes = tuple((name, tuple(each.shape), each.dtype) for name, each in tensors.items())
            lean = any(each.get("lean") for each in request.calls) or request.plan.pipefusion > 1
            lean = lean or self.model.kept is not None
            form = (request.op, request.plan, request.batch_groups, asked, sizes)
            self.model.whole_blocks.begin(form, wanted=not lean)

    def end_step(self) -> None:
        """The host has queued all of the step."""
        if self.model.whole_blocks is not None:
            self.model.whole_blocks.end()

    def gathers_beyond(self, parts: int) -> bool:
        """Whether blocks are put together by more ranks than the `parts` that share the tokens of a call."""
        return self.model.weights.shards is not None and self.model.group.size > parts

    def groups_to_run(self, mesh: Mesh, busy: Sequence[int], *, alike: bool = True) -> Sequence[int]:
        """Of the replica's batch groups that have work, `busy`, those whose work this rank runs: its own group's.

        Ranks that put blocks together make the same calls: without work of its own, this rank runs another group's and
        writes nothing. Blocks are gathered in the order in which the module runs them. Where that is not `alike` in
        every call, all groups run the work of each.
        """
        if not alike:
            return busy
        if mesh.batch_group in busy:
            return [mesh.batch_group]
        return busy[:1] if self.gathers_beyond(mesh.plan.parts) else []

    def work_to_run(self, mesh: Mesh, batch_groups: Sequence[GroupWork]) -> GroupWork:
        """What this rank runs of a sampling run: the work of its own batch group, or what `groups_to_run` says."""
        busy = [batch_group for batch_group in mesh.replica_groups if batch_groups[batch_group].conds]
        return batch_groups[next(iter(self.groups_to_run(mesh, busy)), mesh.batch_group)]

    def run_batch_groups(
        self,
        batch_groups: Sequence[Sequence[BatchSlice]],
        mesh: Mesh,
        tensors: Mapping[str, torch.Tensor],
        calls: Sequence[Mapping[str, Any]],
    ) -> None:
        """Run this rank's pieces of a request, and those of its replica that need its part of the weights."""
        alike = self.model.weights.in_order or not self.gathers_beyond(mesh.plan.parts)
        for number in range(max(len(batch_groups[batch_group]) for batch_group in mesh.replica_groups)):
            busy = [batch_group for batch_group in mesh.replica_groups if len(batch_groups[batch_group]) > number]
            one_call = len({batch_groups[each][number].call for each in busy}) == 1
            over = mesh.axes["cfg"] if alike and one_call and len(busy) == len(mesh.replica_groups) else None
            for batch_group in self.groups_to_run(mesh, busy, alike=alike):
                piece = batch_groups[batch_group][number]
                whole, mine = call_tensors(tensors, piece.call), batch_group == mesh.batch_group
                self.run(piece, whole, calls[piece.call], write=mine, over=over)

    def run(
        self,
        piece: BatchSlice,
        whole: Mapping[str, torch.Tensor],
        options: Mapping[str, Any],
        *,
        write: bool = True,
        over: Axis | None = None,
    ) -> None:
        """Run a piece: `whole` has all tensors of its call, and "out", of which these rows are written.

        `over`: the batch groups that run other rows of the same call meanwhile, as scales that ComfyUI takes from all
        rows are those of all of them. "out" is (B, numbers) fp32: the outputs side by side, each a row of numbers an
        image.
        """
        sequence = self.sequence_of(options)
        residuals = self.held.residuals_of(piece) if options.get("step_cache") else None
        out = self.call(piece, whole, options, sequence=sequence, over=over, residuals=residuals, write=write)
        if write:
            self.write(piece, whole["out"], out)
        self.beat()

    def call(
        self,
        rows: BatchSlice,
        whole: Mapping[str, torch.Tensor],
        options: Mapping[str, Any],
        *,
        sequence: SequenceParallelAttention,
        over: Axis | None,
        new_call: NewCall | None = None,
        residuals: Residuals | None = None,
        write: bool = True,
    ) -> Any:  # noqa: ANN401  a tensor or several
        """What the module, or a method of it, returns for these rows; `sequence`, `new_call`: of `install_hooks`.

        `residuals`: what a step cache kept of the call before; with `write` the call counts for this rank.
        """
        with self.timer.region("hand_over"):
            given, moved = self._given(rows, whole, options, cut=sequence.parts > 1 and new_call is None)
        told = given["kwargs"].get("transformer_options", {})
        records = told.pop(OPTION, None)
        between = self._with_patches(told, records, sequence, new_call) if records else None
        if blocks := told.pop(SKIPPED, None):
            told["patches_replace"] = self.model.skipped_blocks.replacing((kind, number) for kind, number in blocks)
        if name := told.pop(ATTENTION, ""):
            told[OVERRIDE] = attention_named(name)
        module = self.model.install_hooks(sequence, self.beat, between=between, new_call=new_call, moved=moved)
        method = options.get("method")
        if method is not None and method not in METHODS:
            raise ValueError(f"{type(module).__name__} is asked for {method}, which is none of {', '.join(METHODS)}")
        function: Any = module if method is None else getattr(module, method)
        inner: Any = module._forward if options.get(INSIDE) else None
        with (
            self._around(sequence, options, residuals, over=over, counts=write),
            self._scales(sequence, over),
            nullcontext() if inner is None else around_another(module, inner),
        ):
            try:
                return function(*given["args"], **given["kwargs"])
            except Exception as error:
                note_module(error, module)
                raise

    def _with_patches(
        self,
        told: dict[str, Any],
        records: Sequence[Mapping[str, Any]],
        sequence: SequenceParallelAttention,
        new_call: NewCall | None,
    ) -> ShardingSpec | None:
        """Have patches between the blocks in a call's options; returns the spec by which the call is shared.

        None: it is shared by the class's own, or by nobody.
        """
        hooks, module = self.model.weights.hook_modules, self.model.module
        if new_call is not None:
            told["patches"] = hooks.patches(records)
            return spec_of(module, BETWEEN)
        if sequence.parts == 1:
            told["patches"] = hooks.patches(records)
            return None
        if takes_rows(records):
            told["patches"] = hooks.patches(records, call_of=lambda: installed().call)
            return None
        behind = acting(module, records)
        told["patches"] = hooks.patches(records, behind=behind)
        return spec_behind(module, behind)

    def write(self, piece: BatchSlice, room: torch.Tensor, out: Any) -> None:  # noqa: ANN401
        """Write what `call` returned for a piece into its rows. Of ranks that have the same rows, the first does."""
        outs, rows = [out] if isinstance(out, torch.Tensor) else out, piece.stop - piece.start
        with self.timer.region("gather"):
            flat = [each.reshape(rows, -1) for each in outs]
            numbers = sum(each.shape[1] for each in flat)
            if numbers != room.shape[1]:
                raise ValueError(
                    f"{type(self.model.module).__name__} made outputs {[tuple(out.shape) for out in outs]}, "
                    f"{numbers} numbers an image where {room.shape[1]} were expected; report the model and the node"
                )
            if self.sequence.index == 0:
                self.drain()
                at = 0
                for each in flat:
                    to_host(room[piece.start : piece.stop, at : at + each.shape[1]], each)
                    at += each.shape[1]

    def apply(
        self,
        x: torch.Tensor,
        sigma: torch.Tensor,
        given: Mapping[str, Any],
        *,
        options: Mapping[str, Any],
        residuals: Residuals | None = None,
        over: Axis | None = None,
        sequence: SequenceParallelAttention | None = None,
        new_call: NewCall | None = None,
    ) -> torch.Tensor:
        """What ComfyUI's `apply_model` makes of a latent (B, ...) at `sigma` (B,), `given` the rest of its call.

        `residuals`: what a step cache kept of the call before; ranks of `over` have the other rows of the step.
        `sequence`, `new_call`: as of `install_hooks`. Returns (B, ...) fp32, on every rank that shares the
        tokens.
        """
        sequence = self.sequence_of(options) if sequence is None else sequence
        self.model.install_hooks(sequence, self.beat, new_call=new_call)
        with self._around(sequence, options, residuals, over=over), self._scales(sequence, None):
            out: torch.Tensor = self.model.weights.whole.apply_model(x, sigma, **given)
        self.beat()
        return out

    @contextmanager
    def _around(
        self,
        sequence: SequenceParallelAttention,
        options: Mapping[str, Any],
        residuals: Residuals | None,
        *,
        over: Axis | None,
        counts: bool = True,
    ) -> Iterator[None]:
        """Around a call: its blocks have their weights, what the module kept, what a step cache kept, and graphs."""
        forget_keys(self.model.module)
        skipping: AbstractContextManager[None] = nullcontext()
        if residuals is not None:
            skipping = self._skipping(sequence, options, residuals, over=over, counts=counts)
        graphs = nullcontext() if self.by_graphs is None else self.by_graphs.calling(sequence)
        exact = exact_fp32() if options.get("exact_fp32") else nullcontext()
        with self.model.calling(), self._keeping(sequence), skipping, graphs, exact:
            yield

    @contextmanager
    def _skipping(
        self,
        sequence: SequenceParallelAttention,
        options: Mapping[str, Any],
        residuals: Residuals,
        *,
        over: Axis | None,
        counts: bool,
    ) -> Iterator[None]:
        """Around a call: its blocks but the first are skipped where that changed little, on all ranks of the call.

        `counts`: the call counts for this rank.
        """
        sharing = [sequence] if over is None else [sequence, SequenceParallelAttention(ulysses=over)]
        threshold, call_of = float(options["step_cache"]), lambda: installed().call
        cached = self.model.cached_blocks
        with cached.calling(residuals, threshold=threshold, total=total_over(sharing), call_of=call_of) as seen:
            yield
        if counts:
            before = self.cached or CachedCalls(calls=0, skipped=0)
            self.cached = CachedCalls(
                calls=before.calls + 1,
                skipped=before.skipped + seen.skips,
                kept_bytes=max(before.kept_bytes, residuals.nbytes),
            )

    def _keeping(self, sequence: SequenceParallelAttention) -> AbstractContextManager[None]:
        """Around a call: all ranks that run the same blocks at a time use what the module kept, or none of them."""
        kept, group = self.model.kept, self.model.group
        if kept is None or not self._in_run:
            return nullcontext()
        together = SequenceParallelAttention(ulysses=group) if self.gathers_beyond(sequence.parts) else sequence
        return kept.calling(alike_over(together, self.timer.device))

    def _scales(self, sequence: SequenceParallelAttention, over: Axis | None) -> AbstractContextManager[None]:
        """Around a call: where a quantised layer takes a scale of all rows, it is that of all ranks that have some."""
        weights = self.model.weights
        if not weights.quantised:
            return nullcontext()
        sharing = [sequence] if over is None else [sequence, SequenceParallelAttention(ulysses=over)]
        sharing = [each for each in sharing if each.parts > 1]
        if weights.scaled_by_all is not None and sharing:
            agreed, with_rows = weights.agreed.setdefault(sequence, set()), over is not None
            if with_rows not in agreed:
                agreed.add(with_rows)
                if not agree(weights.scaled_by_all, sharing, self.timer.device):
                    log.warning("a format is not rounded to, as not every device of these has a kernel for it")
        return shared_scales(sharing)

    def sequence_of(self, options: Mapping[str, Any]) -> SequenceParallelAttention:
        """Attention over the ranks that share the tokens. A proof asks for none, and for the negative control."""
        if options.get("whole"):
            return SequenceParallelAttention()
        if options.get("local_attention"):
            return OwnTokens(ring=self.sequence.ring, ulysses=self.sequence.ulysses, whole=self.sequence.whole)
        self.sequence.named = str(options.get("attention", ""))
        self.sequence.exchange = str(options.get("exchange", EXACT))
        return self.sequence

    def _given(
        self, piece: BatchSlice, whole: Mapping[str, torch.Tensor], options: Mapping[str, Any], *, cut: bool
    ) -> tuple[Any, Moved | None]:
        """The call's arguments, and what brings rows of a ControlNet's residuals to the device; None: they are there.

        `cut`: the ranks of the call have different tokens. Residuals that hooks cut are then views of the host, of
        which each rank copies its own rows: whole they are gigabytes. Patches between blocks may want whole ones.
        """
        residuals: Sequence[int] = options.get("residuals", ()) if cut else ()
        spec = spec_of(self.model.module) if residuals else None
        if spec is None or not spec.control or spec.each_call:
            return from_tree(options["call"], self._inputs(piece, whole, options)), None
        inputs = self._inputs(piece, whole, options, residuals_here=False)
        given: Any = from_tree(options["call"], inputs)
        if OPTION in given["kwargs"].get("transformer_options", {}):
            for number in residuals:
                inputs[number] = self.held.input_here(whole[f"t{number}"], inputs[number])
            return from_tree(options["call"], inputs), None
        wholes = {id(inputs[number]): whole[f"t{number}"] for number in residuals}  # `given` has them meanwhile
        return given, lambda residual, rows: self.held.input_here(wholes[id(residual)], rows)

    def _inputs(
        self,
        piece: BatchSlice,
        whole: Mapping[str, torch.Tensor],
        options: Mapping[str, Any],
        *,
        residuals_here: bool = True,
    ) -> list[torch.Tensor]:
        """The call's tensors on this rank's device; of those with a row an image, the rows of this piece.

        A module may write to its inputs, and other ranks and later steps read the same memory: so it gets copies, but
        of a ControlNet's residuals, which are large, and which blocks add and no more. Without `residuals_here` these
        stay on the host.
        """
        batched, residuals = frozenset(options.get("batched", ())), frozenset(options.get("residuals", ()))
        found = []
        for number in range(options["tensors"]):
            tensor = whole[f"t{number}"]
            each = tensor.shape[0] // whole["out"].shape[0] if number in batched else 1  # more than one of a video
            part = tensor[piece.start * each : piece.stop * each] if number in batched else tensor
            if number in residuals and not residuals_here:
                found.append(part)
            else:
                found.append(self.held.input_here(tensor, part, copy=number not in residuals))
        return found


def _form_of(options: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What of a call's options may change what it takes: those that are there, and the values of texts and sizes."""
    told = {name: said for name, said in options.items() if said and name not in ("step", "timed")}
    return tuple(sorted((name, "" if name == "call" else str(said)) for name, said in told.items()))
