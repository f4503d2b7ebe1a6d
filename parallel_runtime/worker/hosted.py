"""One of ComfyUI's own models on one rank: loaded, changed, run. ComfyUI is imported when the first one is loaded.

Owns the marriage of the module with this rank's part of a plan. Does not own the module (models/hosted/build.py), how
its calls are shared (models/hosted/hooks.py), nor the exchange (parallel/uneven.py).
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..checkpoint import ModelSpec, read_header
from ..errors import RequestCancelledError
from ..models.hosted.block_patches import OPTION, Beside
from ..models.hosted.build import build, recognise
from ..models.hosted.changes import Changes, FileViews, HeldElsewhere
from ..models.hosted.comfyui import import_comfyui
from ..models.hosted.hooks import SharedModel
from ..models.hosted.scales import shared as shared_scales
from ..models.parts import plain_parts
from ..models.plans import BETWEEN, find_plan, plan_for
from ..parallel.collectives import Axis
from ..parallel.uneven import AttentionFunction, UnevenSequence
from ..plan import BatchSlice, Layout
from ..timing import RegionTimer
from ..weight_patch import BESIDE, unpack
from ..weights.block_shards import BlockShards, blocks_of
from ..weights.mapped_file import MappedFile
from ..wire.requests import ChangeWeights
from ..wire.tree import from_tree
from .inputs import RequestInputs, call_tensors
from .mesh import Mesh

# What a call may name beside the model's forward: ComfyUI asks it of the module before a run, and it needs weights.
METHODS = ("preprocess_text_embeds",)


class HostedWeights:
    """The weights of one model on this rank, in the module that uses them. Nothing is read before `load`.

    Of blocks, a rank holds all of them, or a part that is spread over `group`; what is outside is whole.
    """

    def __init__(self, spec: ModelSpec, *, device: torch.device, group: Axis, offloaded: bool) -> None:
        self.device = device
        self.dtype = getattr(torch, spec.dtype)
        self.shards: BlockShards | None = None
        self._group, self._offloaded = group, offloaded
        self._spec = spec
        self._file = MappedFile(spec)
        self.viewed_file = self._file if device.type == "cpu" else None  # as `ModelWeights.viewed_file`
        self._module: torch.nn.Module | None = None
        self.declared: dict[str, torch.dtype] = {}
        self.beside = Beside()
        self._views: FileViews | None = None

    @property
    def elsewhere(self) -> HeldElsewhere | None:
        """Where a weight is found as the file says it; None where the module has it, a view of the file."""
        return self.shards if self.shards is not None else self._views

    @property
    def module(self) -> torch.nn.Module:
        """ComfyUI's transformer."""
        if self._module is None:
            raise RuntimeError(f"{self._spec.path} is not loaded")
        return self._module

    @property
    def blocks(self) -> dict[str, torch.nn.Module]:
        """The module's blocks by path: those of its plan, without one the modules in its outermost lists."""
        plan = find_plan(type(self.module))
        return blocks_of(self.module, [] if plan is None else list(plan.attention))

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights this rank holds."""
        weights = [] if self._module is None else list(self._module.parameters())
        here = sum(part.nbytes for weight in weights for part in plain_parts(weight)[0])
        return here + (0 if self.shards is None else self.shards.num_bytes)

    @property
    def device_bytes(self) -> int:
        """Bytes that they and what they need to be used take on the device."""
        held = self.parameter_bytes + self.beside.num_bytes
        if self.shards is None:
            return held
        return held + self.shards.buffer_bytes - (self.shards.num_bytes if self._offloaded else 0)

    @property
    def needed_bytes(self) -> int:
        """Bytes on the device that `load` will take, but for the buffers of blocks."""
        return 0 if self._offloaded else self._spec.size_bytes // self._group.size

    def load(self, *, progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> None:
        """Import ComfyUI if need be and make the module. Raises `RequestCancelledError` once `cancelled()` is true."""
        total = self._spec.size_bytes
        for done in self._loading():
            if cancelled():
                self._module = self.shards = None
                raise RequestCancelledError("loading was cancelled")
            progress(min(done, total), total)
        progress(total, total)

    def _loading(self) -> Iterator[int]:
        yield 0
        import_comfyui(self._spec.comfyui, self.device)
        yield 0
        header = read_header(self._spec.path)
        tensors = {name: self._file.tensor(entry) for name, entry in header.tensors.items()}
        recognised = recognise(self._spec.path, tensors, header.metadata)
        yield 0
        spread = self._group.size > 1 or self._offloaded
        in_place = self.device.type == "cpu" and not spread
        built = build(self._spec.path, recognised, self.dtype, cast_in_use=in_place)
        self._module, self.declared = built.module, built.declared
        if in_place:  # a copy of each rank's own would take as much as the model
            built = built.casting_in_use(self.blocks)
        if spread:
            self.shards = BlockShards(
                self.blocks, self._group, rounded=built.rounded, device=self.device, offloaded=self._offloaded
            )
            yield from self.shards.load()
        elif self.device.type != "cpu":
            views = {name: weight for name, weight in self._module.named_parameters() if name not in built.rounded}
            self._views = FileViews(self._module, views, self.device)
        built.round_here()
        if self.device.type != "cpu":
            self._module.to(self.device)
        self._file.give_back()  # of what was converted or went to the device

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Around a call of the module, or of a method of it."""
        if self.shards is None:
            yield
            return
        self.shards.begin()
        try:
            yield
        finally:
            self.shards.end()

    def begin(self, passes: int) -> None:
        """Nothing to prepare: each call gathers what it needs."""

    def end(self) -> None:
        """Nothing to end."""


class HostedChanges:
    """The change of weights under way, or the last one, of one model; as `changes.WeightChanges`."""

    def __init__(self, weights: HostedWeights) -> None:
        self._weights = weights
        self._changes: Changes | None = None
        self._named: set[str] = set()

    def take(
        self,
        change: ChangeWeights,
        tensors: Mapping[str, torch.Tensor],
        *,
        cancelled: Callable[[], bool],
        beat: Callable[[], None],
    ) -> None:
        """Take one message of a change. The last one takes back whatever the change has not named."""
        if self._changes is None:
            self._changes = Changes(self._weights.module, self._weights.declared, self._weights.elsewhere)
        if change.first:
            self._named = set()
        patches = unpack(change.records, tensors)
        self._named |= patches.keys()
        for key in [key for key, (first, *_) in patches.items() if first.kind == BESIDE]:
            ((each,),) = (patch.values for patch in patches.pop(key))
            if isinstance(each, torch.Tensor):
                self._weights.beside.take(key, each.to(self._weights.device, copy=True))
            beat()
        self._changes.merge(patches, device=self._weights.device, cancelled=cancelled, beat=beat)
        if change.last:
            self._changes.unpatch_except(self._named)
            self._weights.beside.keep(self._named)

    def set_strengths(self, strengths: Sequence[float]) -> bool:
        """Whether that was enough, which it never is: these patches are merged."""
        return False


@dataclass
class HostedModel:
    """A model of ComfyUI's on this rank, and the hooks by which it shares its tokens once that was asked for."""

    weights: HostedWeights
    group: Axis
    changes: HostedChanges
    shared: SharedModel | None = None
    between: SharedModel | None = None  # the same for calls with patches of the blocks
    beat: Callable[[], None] | None = None

    @property
    def tokens(self) -> int:
        """Of the largest attention call that the last call shared."""
        return max((each.tokens for each in (self.shared, self.between) if each is not None), default=0)

    def under(self, sequence: UnevenSequence, beat: Callable[[], None], *, patched: bool = False) -> torch.nn.Module:
        """The module with its calls shared by the ranks of `sequence`; `beat` is called after each block.

        `patched`: they come with patches of the blocks, which meet whole tokens.
        """
        module = self.weights.module
        if self.beat is None:
            for block in self.weights.blocks.values():
                block.register_forward_hook(self._block_done)
        self.beat = beat
        if sequence.parts > 1 and patched and self.between is None:
            self.between = SharedModel(module, plan_for(type(module), BETWEEN), sequence)
        if sequence.parts > 1 and not patched and self.shared is None:
            self.shared = SharedModel(module, plan_for(type(module)), sequence)
        for shared, serves in ((self.shared, not patched), (self.between, patched)):
            if shared is not None:
                shared.active, shared.group = serves and sequence.parts > 1, sequence
        return module

    def _block_done(self, *_: object) -> None:
        if self.beat is not None:
            self.beat()


@dataclass(frozen=True)
class OpenedHosted:
    """A model whose weights are still to be loaded, and the bytes on the device that they will need."""

    model: HostedModel
    needed_bytes: int


def open_hosted(spec: ModelSpec, layout: Layout, *, device: torch.device, group: Axis) -> OpenedHosted:
    """The model in that layout. Raises `ValueError` for a layout that it cannot have."""
    if layout.stages > 1:
        raise ValueError(f"{os.path.basename(spec.path)} cannot be {layout.name}; use pipefusion=1")
    weights = HostedWeights(spec, device=device, group=group, offloaded=layout.offloaded)
    model = HostedModel(weights, group, HostedChanges(weights))
    return OpenedHosted(model, weights.needed_bytes)


class OwnTokens(UnevenSequence):
    """The negative control: each rank attends to its own tokens alone. Wrong on purpose for more than one rank."""

    def attend(
        self, kernel: AttentionFunction, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: object
    ) -> torch.Tensor:
        """As `UnevenSequence.attend`, without any exchange and without the mask."""
        return kernel(q, k, v, q.shape[1], None)


class HostedForward:
    """The model on one rank, for as long as one request takes. Tokens are shared by the ranks of `sequence`."""

    adapter = None  # it reports nothing of its own

    def __init__(
        self,
        model: HostedModel,
        sequence: UnevenSequence,
        timer: RegionTimer,
        beat: Callable[[], None],
        sent: RequestInputs,
    ) -> None:
        self.model, self.sequence, self.timer, self.beat, self.sent = model, sequence, timer, beat, sent
        self.tokens = 0  # of the largest attention call that was shared

    def run_batch_groups(
        self,
        batch_groups: Sequence[Sequence[BatchSlice]],
        mesh: Mesh,
        tensors: Mapping[str, torch.Tensor],
        calls: Sequence[Mapping[str, Any]],
    ) -> None:
        """Run this rank's pieces of a request, and with the others of its replica what needs its part of the weights.

        Blocks are gathered in the order in which the module runs them. That of a class with a plan is the same in every
        call; of others nobody knows, so all batch groups of a replica run each piece, and one of them writes it.
        """
        module = self.model.weights.module
        spread = self.model.weights.shards is not None and self.model.group.size > mesh.plan.parts
        alike = not spread or find_plan(type(module)) is not None
        for number in range(max(len(batch_groups[batch_group]) for batch_group in mesh.replica_groups)):
            due = [batch_group for batch_group in mesh.replica_groups if len(batch_groups[batch_group]) > number]
            if mesh.batch_group in due and alike:
                due = [mesh.batch_group]
            elif alike:
                due = due[:1] if spread else []
            for batch_group in due:
                piece = batch_groups[batch_group][number]
                source = BatchSlice(0, 0, 1) if calls[piece.call].get("first_row") else piece  # a negative control
                whole = call_tensors(tensors, source.call) | {"out": call_tensors(tensors, piece.call)["out"]}
                meanwhile = [batch_groups[each][number : number + 1] for each in mesh.replica_groups]
                same_call = all(each and each[0].call == piece.call for each in meanwhile)
                over = mesh.axes["cfg"] if alike and same_call else None
                self.run(
                    piece, whole, calls[source.call], source=source, write=batch_group == mesh.batch_group, over=over
                )

    def run(
        self,
        piece: BatchSlice,
        whole: Mapping[str, torch.Tensor],
        options: Mapping[str, Any],
        *,
        source: BatchSlice | None = None,
        write: bool = True,
        over: Axis | None = None,
    ) -> None:
        """Run a piece: `whole` has all tensors of its call, and "out", of which these rows are written.

        `source`: the rows that it is computed of, where they are not its own. `over`: the batch groups that run other
        rows of the same call meanwhile, as scales that ComfyUI takes from all rows are those of all of them. "out" is
        (B, numbers) fp32: the outputs side by side, each a row of numbers an image.
        """
        with self.timer.region("hand_over"):
            given: Any = from_tree(options["call"], self._inputs(source or piece, whole, options))
        told = given["kwargs"].get("transformer_options", {})
        records = told.pop(OPTION, None)
        if records:
            told["patches"] = self.model.weights.beside.patches(records)
        sequence = self._sequence(options)
        module = self.model.under(sequence, self.beat, patched=bool(records))
        method = options.get("method")
        if method is not None and method not in METHODS:
            raise ValueError(f"{type(module).__name__} is asked for {method}, which is none of {', '.join(METHODS)}")
        function = module if method is None else getattr(module, method)
        forget: Callable[[], None] | None = getattr(module, "clear_kv_cache", None)
        if forget is not None:  # it goes by the address of a tensor, which here may be another's in each call
            forget()
        sharing = [sequence] if over is None else [sequence, UnevenSequence(ring=Axis("ring"), ulysses=over)]
        with self.model.weights.calling(), shared_scales([each for each in sharing if each.parts > 1]):
            out = function(*given["args"], **given["kwargs"])
        self.tokens = max(self.tokens, self.model.tokens)
        if write:
            with self.timer.region("gather"):
                rows = (source or piece).stop - (source or piece).start
                self._write(piece, whole["out"], [out] if isinstance(out, torch.Tensor) else out, rows)
        self.beat()

    def _sequence(self, options: Mapping[str, Any]) -> UnevenSequence:
        """Who shares the tokens. A proof asks for none, and for the negative control (pool/proving.py)."""
        if options.get("whole"):
            return UnevenSequence(ring=Axis("ring"), ulysses=Axis("ulysses"))
        if options.get("local_attention"):
            return OwnTokens(ring=self.sequence.ring, ulysses=self.sequence.ulysses, whole=self.sequence.whole)
        return self.sequence

    def _inputs(
        self, piece: BatchSlice, whole: Mapping[str, torch.Tensor], options: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """The call's tensors on this rank's device; of those with a row an image, the rows of this piece.

        A module may write to its inputs, and other ranks and later steps read the same memory: so it gets copies, but
        of a ControlNet's residuals, which are large, and which blocks add and no more.
        """
        batched, residuals = frozenset(options.get("batched", ())), frozenset(options.get("residuals", ()))
        found = []
        for number in range(options["tensors"]):
            tensor = whole[f"t{number}"]
            part = tensor[piece.start : piece.stop] if number in batched else tensor
            here = self.sent.on_device(tensor, part)
            found.append(here if number in residuals else here.clone())
        return found

    def _write(self, piece: BatchSlice, room: torch.Tensor, outs: Sequence[torch.Tensor], rows: int) -> None:
        """Write outputs of `rows` rows into those of the piece; of ranks that have the same ones, the first does."""
        flat = [out.reshape(rows, -1) for out in outs]
        numbers = sum(each.shape[1] for each in flat)
        if numbers != room.shape[1]:
            raise ValueError(
                f"{type(self.model.weights.module).__name__} made outputs {[tuple(out.shape) for out in outs]}, "
                f"{numbers} numbers an image where {room.shape[1]} were expected; report the model and the node"
            )
        if self.sequence.index == 0:
            at = 0
            for each in flat:
                room[piece.start : piece.stop, at : at + each.shape[1]].copy_(each)
                at += each.shape[1]
