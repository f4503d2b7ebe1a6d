"""The weights of one of ComfyUI's own models on one rank: loaded and changed.

ComfyUI is imported when the first one is loaded. Does not own the making of the module (models/hosted/build.py) nor how
deltas are merged (models/hosted/deltas.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..checkpoint import ModelSpec, read_header
from ..errors import RequestCancelledError
from ..mapped_file import MappedFile
from ..models.block_chain import entries_of
from ..models.hosted.block_hooks import HookModules
from ..models.hosted.build import Built, build, recognise
from ..models.hosted.comfyui import import_comfyui
from ..models.hosted.deltas import FileViews, HeldElsewhere, MergedDeltas
from ..models.hosted.formats import says_formats
from ..models.hosted.kept_layouts import keep_layouts
from ..models.hosted.scales import watch
from ..models.hosted.side_branches import WEIGHT, LowRank, SideBranches, runs_as_branch
from ..models.parts import plain_parts
from ..models.specs import find_spec, spec_of
from ..models.specs.found import give_found, of_text
from ..models.specs.whole import find_whole
from ..parallel.attention import SequenceParallelAttention
from ..parallel.collectives import Axis
from ..parallel.pipefusion import balanced_stages
from ..weight_delta import HOOK_WEIGHT, WeightDelta, unpack
from ..weights.block_shards import BlockShards, blocks_of
from ..wire.requests import ChangeWeights

IN_CHECKPOINT = "model.diffusion_model."  # how names of the model begin there, as ComfyUI looks for them first


class HostedWeights:
    """The weights of one model on this rank, in the module that uses them. Nothing is read before `load`.

    Of blocks, a rank holds all of them, or a part that is spread over `group`; what is outside is whole. Of several
    `stages`, it has the blocks of one alone.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        device: torch.device,
        group: Axis,
        offloaded: bool,
        stages: int = 1,
        stage: int = 0,
        shares: tuple[int, ...] = (),
        stage_shares: tuple[int, ...] = (),
    ) -> None:
        """`shares`: how much of the blocks each rank of `group` holds; `stage_shares`: how many each stage has; () for
        equal ones."""
        self._shares, self._stage_shares = shares, stage_shares
        self.device = device
        self.stages, self._stage = stages, stage
        self.blocks_before: dict[str, torch.nn.Module] = {}  # by path, those that every stage has
        self.staged_blocks: dict[str, torch.nn.Module] = {}  # those that stages share, of other stages too
        self.run = range(0)  # which of them this stage has
        self.dtype = getattr(torch, spec.dtype)
        self.shards: BlockShards | None = None
        self.group, self._offloaded = group, offloaded
        self.spec = spec
        self._file = MappedFile(spec)
        self.viewed_file = self._file if device.type == "cpu" else None  # whose pages weights are
        self._whole: Any = None  # comfy.model_base.BaseModel
        self.quantised = False  # whether the file is in a format of ComfyUI's, with scales
        self.scaled_by_all: set[Any] | None = None  # layers that take a scale of all they are given (scales.py)
        self.agreed: WeakKeyDictionary[SequenceParallelAttention, set[bool]] = WeakKeyDictionary()  # by whom, on these
        self.declared: dict[str, torch.dtype] = {}
        self.hook_modules = HookModules()
        self.branches = SideBranches()
        self._elsewhere: set[str] = set()  # weights of other stages
        self._views: FileViews | None = None

    @property
    def elsewhere(self) -> HeldElsewhere | None:
        """Where a weight is found as the file says it; None where the module has it, a view of the file."""
        return self.shards if self.shards is not None else self._views

    @property
    def whole(self) -> Any:  # noqa: ANN401  comfy.model_base.BaseModel
        """ComfyUI's model, with the transformer in it."""
        if self._whole is None:
            raise RuntimeError(f"{self.spec.path} is not loaded")
        return self._whole

    @property
    def module(self) -> torch.nn.Module:
        """ComfyUI's transformer."""
        module: torch.nn.Module = self.whole.diffusion_model
        return module

    @property
    def computes_in(self) -> torch.dtype:
        """The dtype of its calls."""
        dtype: torch.dtype = self.whole.get_dtype_inference()
        return dtype

    @property
    def blocks(self) -> dict[str, torch.nn.Module]:
        """The blocks that this rank has, by path."""
        paths = list(self.staged_blocks)[self.run.start : self.run.stop]
        return self.blocks_before | {path: self.staged_blocks[path] for path in paths}

    def _share_out_blocks(self) -> None:
        """Tell the blocks that stages have parts of from those that every stage has."""
        blocks, spec = self._find_blocks(), find_spec(self.module)
        self.staged_blocks = blocks
        if self.stages > 1 and spec is not None:
            self.staged_blocks = blocks_of(self.module, spec.staged)
        self.blocks_before = {path: block for path, block in blocks.items() if path not in self.staged_blocks}

    def _find_blocks(self) -> dict[str, torch.nn.Module]:
        """The module's blocks by path: those that are known of its class, else the modules in its outermost lists.

        Raises `ValueError` where there are none and the weights are spread.
        """
        spec, whole = find_spec(self.module), find_whole(type(self.module))
        if spec is None and whole is not None:
            found = blocks_of(self.module, whole.blocks, inner=whole.inner)
        else:
            found = blocks_of(self.module, [] if spec is None else list(spec.attention))
        if self._spread and not found:
            told, title = "offloaded" if self._offloaded else "sharded", type(self.module).__name__
            raise ValueError(f"weights={told} brings blocks one by one, and {title} has none; use weights=replicated")
        return found

    def methods_of(self, path: str) -> tuple[str, ...]:
        """The methods by which the module calls the block at a path."""
        spec = find_spec(self.module)
        return entries_of(self.blocks[path]) if spec is None else spec.methods_of(path.rpartition(".")[0])

    @property
    def in_order(self) -> bool:
        """Whether every call is known to run the blocks in the same order."""
        return find_spec(self.module) is not None or find_whole(type(self.module)) is not None

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights this rank holds."""
        named = [] if self._whole is None else list(self.module.named_parameters())
        shards = self.shards
        weights = (weight for name, weight in named if shards is None or shards.pristine(name) is None)
        here = sum(part.nbytes for weight in weights for part in plain_parts(weight)[0])
        return here + (0 if shards is None else shards.num_bytes)

    @property
    def device_bytes(self) -> int:
        """Bytes that they and what they need to be used take on the device."""
        held = self.parameter_bytes + self.hook_modules.num_bytes + self.branches.num_bytes
        if self.shards is None:
            return held
        return held + self.shards.buffer_bytes - (self.shards.num_bytes if self._offloaded else 0)

    @property
    def needed_bytes(self) -> int:
        """Bytes on the device that `load` will take, but for the buffers of blocks."""
        of_it = self._shares[self.group.index] / sum(self._shares) if self._shares else 1 / self.group.size
        of_stages = self._stage_shares or (1,) * self.stages
        of_it *= of_stages[self._stage] / sum(of_stages)
        return 0 if self._offloaded else int(self._file_bytes * of_it)

    @property
    def _file_bytes(self) -> int:
        """Bytes of the file's weights, in a checkpoint of the model's alone; as they are held, if not as in the file.

        One a number where weights are kept in fp8; where narrow ones are widened, those of the compute dtype.
        """
        widened = self.own_copy and not self.spec.kept
        header = read_header(self.spec.path)
        tensors = header.tensors
        inside = {name: entry for name, entry in tensors.items() if name.startswith(IN_CHECKPOINT)} or tensors
        least = self.dtype.itemsize if widened and not says_formats(inside, header.metadata) else 1
        numbers = [(each.num_bytes // each.dtype.itemsize, each.dtype.itemsize) for each in inside.values()]
        return sum(number * (1 if self.spec.kept else max(size, least)) for number, size in numbers)

    @property
    def _spread(self) -> bool:
        return self.group.size > 1 or self._offloaded

    @property
    def own_copy(self) -> bool:
        """Whether this rank has whole weights of its own, and so as ComfyUI's loader holds them."""
        return self.device.type != "cpu" and not self._spread

    def load(self, *, progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> None:
        """Import ComfyUI if need be and make the module. Raises `RequestCancelledError` once `cancelled()` is true."""
        total = self._file_bytes
        for done in self._loading():
            if cancelled():
                self._whole = self.shards = None
                raise RequestCancelledError("loading was cancelled")
            progress(min(done, total), total)
        progress(total, total)

    def _loading(self) -> Iterator[int]:
        yield 0
        import_comfyui(self.spec.comfyui, self.device)
        yield 0
        header = read_header(self.spec.path)
        tensors = {name: self._file.tensor(entry) for name, entry in header.tensors.items()}
        recognised = recognise(self.spec.path, tensors, header.metadata, checkpoint=self.spec.checkpoint)
        self.quantised = recognised.quantised
        yield 0
        in_place = not self._spread and not self.own_copy
        kept, widened = self.spec.kept, self.own_copy
        built = build(self.spec.path, recognised, self.dtype, kept=kept, cast_in_use=in_place, widened=widened)
        self._take(built)
        self._share_out_blocks()
        self.run = self._own_run()
        self._leave_others()
        if in_place:  # a copy of each rank's own would take as much as the model
            built = built.casting_in_use(self.blocks)
        if self._spread:
            self.shards = BlockShards(
                self.blocks,
                self.group,
                rounded=built.rounded,
                device=self.device,
                offloaded=self._offloaded,
                methods=self.methods_of,
                shares=self._shares,
            )
            yield from self.shards.load()
        if self.own_copy:
            self._views = FileViews(self.module, self.device, built.rounded)
            there = 0
            for name in built.rounded:
                if not built.widens(name):
                    self._views.change({name: None})
                    there += _num_bytes(self.module.get_parameter(name))
                    yield there
        else:
            built.round_here()
        if self.own_copy:
            yield from (there + more for more in move(self.module, self.device))
            built.round_here()  # what the device widens
        elif self.device.type != "cpu":
            self.module.to(self.device)
        keep_layouts(type(self.module), self.device)
        self._file.give_back()  # of what was converted or went to the device
        self.refuse_changed()  # what was copied may be of two files

    def _take(self, built: Built) -> None:
        self._whole, self.declared = built.whole, built.declared
        if self.spec.found:
            give_found(self.module, of_text(self.spec.found))
        if self.quantised:
            self.scaled_by_all = watch(self.module)

    def refuse_changed(self) -> None:
        """Raise `ValueError` when the file was written to since it was identified."""
        self._file.refuse_changed()

    def _own_run(self) -> range:
        """Which blocks this stage has, by what a token takes in each: one that hands on several streams has weights
        for each of them, and a token is of one."""
        if self.stages == 1:
            return range(len(self.staged_blocks))
        spec, costs = spec_of(self.module), list[float]()
        for path, block in self.staged_blocks.items():
            num_bytes = sum(part.nbytes for weight in block.parameters() for part in plain_parts(weight)[0])
            handed = spec.handed_on(path.rpartition(".")[0])
            costs.append(num_bytes / (1 if isinstance(handed, str) else len(handed)))
        return balanced_stages(costs, self.stages, self._stage_shares)[self._stage]

    def _leave_others(self) -> None:
        """Have nothing of the blocks of other stages."""
        for path in self.staged_blocks.keys() - self.blocks.keys():
            for name, owner in self.staged_blocks[path].named_modules(prefix=path):
                for key, weight in owner._parameters.items():
                    if weight is not None:
                        empty = torch.empty(0, dtype=weight.dtype)
                        owner._parameters[key] = torch.nn.Parameter(empty, requires_grad=False)
                        self._elsewhere.add(f"{name}.{key}")

    def has(self, name: str) -> bool:
        """Whether a weight is on this stage; not asked of one that the model lacks."""
        return name not in self._elsewhere


def move(module: torch.nn.Module, device: torch.device) -> Iterator[int]:
    """Move a module to a device, layer by layer. Yields the bytes that it has moved."""
    moved = 0
    for layer in module.modules():
        if next(layer.children(), None) is None:
            moved += sum(_num_bytes(weight) for weight in layer.parameters() if weight.device.type != device.type)
            layer.to(device)
            yield moved
    module.to(device)


def _num_bytes(weight: torch.Tensor) -> int:
    return sum(part.nbytes for part in plain_parts(weight)[0])


class DeltaReceiver:
    """The change of weights under way, or the last one, of one model."""

    def __init__(self, weights: HostedWeights) -> None:
        self._weights = weights
        self._changes: MergedDeltas | None = None
        self._merged: set[str] = set()
        self._hook_weights: set[str] = set()  # weights of modules between the blocks
        self._loras: dict[str, list[LowRank]] = {}  # by the layer that they are side branches of
        # Of all deltas as they came: that layer; or the strength that one was merged with; None: another stage's.
        self._order: list[str | float | None] = []
        self.version = 0  # another one after each change

    @property
    def changed(self) -> bool:
        """Whether the weights are others than the file's."""
        return bool(self._order)

    def take(
        self,
        change: ChangeWeights,
        tensors: Mapping[str, torch.Tensor],
        *,
        cancelled: Callable[[], bool],
        beat: Callable[[], None],
    ) -> None:
        """Take one message of a change. The last one takes back whatever the change has not named.

        Changed weights are made anew of what the file says: raises `ValueError` when it was written to.
        """
        self.version += 1
        self._weights.refuse_changed()
        if self._changes is None:
            held = self._weights
            kept = bool(held.spec.kept)
            self._changes = MergedDeltas(held.module, held.declared, held.elsewhere, held.computes_in, kept=kept)
        if change.first:
            self._merged, self._hook_weights, self._loras, self._order = set(), set(), {}, []
        merged = {}
        for name, deltas in unpack(change.records, tensors).items():
            if not self._weights.has(name):
                self._order += [None for _ in deltas]
            elif change.side_branch and (loras := self._loras_of(name, deltas)):
                layer = name.removesuffix(WEIGHT)
                self._loras[layer] = loras
                self._order += [layer for _ in deltas]
            else:
                self._order += [delta.strength for delta in deltas]
                if deltas[0].kind == HOOK_WEIGHT:
                    self._take_hook_weight(name, deltas[0])
                else:
                    merged[name] = deltas
            beat()
        self._merged |= merged.keys()
        self._changes.merge(merged, device=self._weights.device, cancelled=cancelled, beat=beat)
        if change.last:
            self._changes.undo_except(self._merged, cancelled=cancelled, beat=beat)
            self._weights.branches.have(self._weights.module, self._loras)
            self._weights.hook_modules.keep(self._hook_weights)
            self._loras = {}
            self._weights.refuse_changed()  # what was read meanwhile may be of two files

    def _take_hook_weight(self, key: str, delta: WeightDelta) -> None:
        (weight,) = delta.values
        self._hook_weights.add(key)
        if isinstance(weight, torch.Tensor):
            self._weights.hook_modules.take(key, weight.to(self._weights.device, copy=True))

    def _loras_of(self, name: str, deltas: Sequence[WeightDelta]) -> list[LowRank] | None:
        """The LoRAs that can be side branches of the layer of this weight; None where a delta has to be merged."""
        weights, changes = self._weights, self._changes
        if changes is None or not name.endswith(WEIGHT):
            return None
        weight, layer = changes.pristine(name), weights.module.get_submodule(name.removesuffix(WEIGHT))
        if not all(runs_as_branch(delta, layer, weight) for delta in deltas):
            return None
        dtype = weights.declared.get(name, weight.dtype)
        if not dtype.is_floating_point or dtype.itemsize < 2:
            dtype = weights.dtype
        return [LowRank.of(delta, weight, dtype=dtype, device=weights.device) for delta in deltas]

    def set_strengths(self, strengths: Sequence[float]) -> bool:
        """Change the strengths alone; false where a delta was merged with another one than it is to have."""
        self.version += 1
        by_layer: dict[str, list[float]] = {}
        for known, strength in zip(self._order, strengths, strict=True):
            if isinstance(known, str):
                by_layer.setdefault(known, []).append(strength)
            elif known is not None and known != strength:
                return False
        self._weights.branches.set_strengths(by_layer)
        return True
