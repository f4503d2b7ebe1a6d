"""The loop over blocks: marries one adapter, one set of weights and one plan's strategy, and answers requests.

Owns the handles (models and meshes by number) and one step. Knows no ComfyUI, no socket, and no arithmetic of a model.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil
import torch

from ..adapters.flux import FluxAdapter
from ..adapters.flux_config import FluxConfig
from ..checkpoint import ModelSpec, read_header
from ..errors import RequestCancelledError
from ..plan import ParallelPlan
from ..strategies.kernels import additive_mask
from ..strategies.sequence import LocalAttention, SequenceAttention
from ..strategies.shard import SequenceShard
from ..timing import RegionTimer
from ..wire.channel import SegmentTable
from ..wire.protocol import Message, Op, TensorSpec
from .changes import WeightChanges
from .mapped_file import MappedFile
from .mesh import Mesh
from .weights import ReplicatedWeights, compute_dtype, file_names, file_scales, weight_bytes


@dataclass(frozen=True)
class LoadedModel:
    """A model handle: the functions of the model and this rank's weights."""

    adapter: FluxAdapter
    weights: ReplicatedWeights
    dtype: torch.dtype
    changes: WeightChanges


class Engine:
    """What one rank holds and does. `handle` is called with one request at a time."""

    def __init__(self, *, rank: int, device: torch.device, segments: SegmentTable) -> None:
        self.rank = rank
        self.device = device
        self.segments = segments
        self.models: dict[int, LoadedModel] = {}
        self.meshes: dict[int, Mesh] = {}

    def handle(
        self,
        message: Message,
        *,
        progress: Callable[[dict], None],
        cancelled: Callable[[], bool],
        beat: Callable[[], None],
    ) -> dict:
        """Do what the message asks and return the reply's body. Raises what goes wrong."""
        if message.op is Op.LOAD:
            return self._load(message.body, progress=progress, cancelled=cancelled, beat=beat)
        if message.op is Op.UNLOAD:
            return self._unload(message.body)
        if message.op is Op.PATCH:
            tensors = {spec.name: self.segments.tensor(spec) for spec in message.tensors}
            model = self.models[message.body["model"]]
            return model.changes.take(message.body, tensors, cancelled=cancelled, beat=beat) | {
                "memory": self._memory()
            }
        if message.op is Op.MESH:
            self.meshes[message.body["mesh"]] = Mesh(ParallelPlan.from_dict(message.body["plan"]), device=self.device)
            return {}
        if message.op is Op.STEP:
            with torch.inference_mode():
                return self._step(message.body, message.tensors, beat=beat)
        if message.op is Op.CHECK:
            return {"wrong_bytes": self.meshes[message.body["mesh"]].wrong_bytes(self.device)}
        raise ValueError(f"a rank cannot do {message.op.name}; it answers LOAD, UNLOAD, PATCH, MESH, STEP and CHECK")

    def _load(
        self,
        body: Mapping,
        *,
        progress: Callable[[dict], None],
        cancelled: Callable[[], bool],
        beat: Callable[[], None],
    ) -> dict:
        def report(loaded: int, total: int) -> None:
            beat()
            progress({"loaded_bytes": loaded, "total_bytes": total})

        spec = ModelSpec(body["path"], body["dtype"], body["adapter"], body["size_bytes"], body["mtime_ns"])
        spec.refuse_changed()
        header, file = read_header(spec.path), MappedFile(spec)
        config = FluxConfig.from_header(header)
        adapter = FluxAdapter(config)
        names = file_names(header, config.prefix, config.expected_shapes())
        dtype = compute_dtype(header, names, body["dtype"])
        needed = weight_bytes(header, names, dtype)
        evicted = self._make_room(needed, order=body["eviction_order"], budget=body["budget_bytes"])
        weights = ReplicatedWeights(
            header,
            file=file,
            names=names,
            scales=file_scales(header, names),
            prefixes=tuple(block.prefix for block in adapter.blocks),
            dtype=dtype,
            device=self.device,
        )
        try:
            weights.load(progress=report, cancelled=cancelled)
        except RequestCancelledError:  # what had to go for it is gone all the same, and the parent must know
            return {"cancelled": True, "evicted": evicted}
        self.models[body["model"]] = LoadedModel(adapter, weights, dtype, WeightChanges(weights))
        return {
            "parameter_bytes": weights.parameter_bytes,
            "dtype": str(dtype).removeprefix("torch."),
            "evicted": evicted,
            "memory": self._memory(),
        }

    def _make_room(self, needed: int, *, order: list[int], budget: int | None) -> list[int]:
        """Evict models in the given order until `needed` bytes fit; returns the handles of those evicted.

        One that does not fit with all others gone is loaded all the same: what the device says is the better error.
        """
        evicted = []
        for handle in order:
            held = sum(model.weights.parameter_bytes for model in self.models.values())
            if needed <= (free_bytes(self.device) if budget is None else budget - held):
                break
            if self.models.pop(handle, None) is not None:
                evicted.append(handle)
                self._give_back()
        return evicted

    def _unload(self, body: Mapping) -> dict:
        self.models.pop(body["model"], None)
        self._give_back()
        return {"memory": self._memory()}

    def _step(self, body: Mapping, specs: tuple[TensorSpec, ...], *, beat: Callable[[], None]) -> dict:
        model, mesh = self.models[body["model"]], self.meshes[body["mesh"]]
        if not mesh.member:
            return {"member": False}
        model.weights.refuse_changed_file()
        options = body.get("options", {})
        began = time.perf_counter()
        timer = RegionTimer(self.device)
        mesh.traffic.reset()
        sequence = mesh.sequence()
        whole = {spec.name: self.segments.tensor(spec) for spec in specs}
        out = whole.pop("out")
        shard = SequenceShard(whole["txt"].shape[1], whole["img"].shape[1], sequence.parts, sequence.index)
        with timer.region("hand_over"):
            inputs = {name: self._mine(model, shard, name, tensor) for name, tensor in whole.items()}
        rows = self._forward(
            model,
            LocalAttention() if options.get("local_attention") else sequence,
            shard,
            inputs,
            options=options,
            beat=beat,
            timer=timer,
        )
        with timer.region("gather"):
            shard.take(out, stream="image", dim=1).copy_(rows)  # waits for the device
        return timer.seconds() | {
            "step_s": time.perf_counter() - began,
            "communication_s": mesh.traffic.seconds,
            "calls": mesh.traffic.calls,
            "bytes": mesh.traffic.num_bytes,
            "memory": self._memory(),
        }

    def _mine(self, model: LoadedModel, shard: SequenceShard, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's rows of one input, on its device. Residual `control_in.3` is split as `control_in`."""
        split = model.adapter.split_plan.get(name.partition(".")[0])
        if split is not None:
            tensor = shard.take(tensor, stream=split.stream, dim=split.dim)
        return tensor.to(self.device)

    @staticmethod
    def _forward(
        model: LoadedModel,
        strategy: SequenceAttention | LocalAttention,
        shard: SequenceShard,
        inputs: Mapping[str, torch.Tensor],
        *,
        options: Mapping,
        beat: Callable[[], None],
        timer: RegionTimer,
    ) -> torch.Tensor:
        """One call of the model on this rank's tokens; returns its rows of the output."""
        adapter, weights = model.adapter, model.weights
        lengths = shard.lengths
        residuals = {"double": options.get("control_in", ()), "single": options.get("control_out", ())}
        with timer.region("embed"), weights.block("") as w:
            tokens = adapter.embed(w, inputs["img"], adapter.condition(w, inputs))
            mask = _mask_in_part_order(inputs.get("mask"), shard, tokens.x.dtype)
        with timer.region("blocks"):
            for block in adapter.blocks:
                with weights.block(block.prefix) as w:
                    mod = adapter.modulation(block, adapter.modulation_rows(block, w, tokens.vec), tokens)
                    q, k, v, carry = adapter.qkv(block, w, tokens, mod)
                    attn = strategy.attend(q, k, v, lengths=lengths, mask=mask).flatten(2)
                    residual = _residual(block.kind, block.index, residuals[block.kind], inputs)
                    adapter.finish(block, w, tokens, attn, mod, carry=carry, residual=residual)
                beat()
        with timer.region("head"), weights.block("") as w:
            return adapter.head(w, tokens)

    def _give_back(self) -> None:
        """Memory that torch keeps for later goes back to the device, where ComfyUI or another rank may want it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _memory(self) -> dict[str, int]:
        """Bytes this rank occupies: resident in the process and, on a GPU, allocated and reserved by torch."""
        memory = {"resident_bytes": psutil.Process().memory_info().rss}
        if self.device.type == "cuda":
            memory["allocated_bytes"] = torch.cuda.memory_allocated(self.device)
            memory["reserved_bytes"] = torch.cuda.memory_reserved(self.device)
        return memory


def free_bytes(device: torch.device) -> int:
    """Bytes that new weights may take on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def _mask_in_part_order(mask: torch.Tensor | None, shard: SequenceShard, dtype: torch.dtype) -> torch.Tensor | None:
    """The attention mask as the strategies take it: added to the scores, tokens in the order of the parts."""
    if mask is None:
        return None
    order = torch.tensor(shard.order, device=mask.device)
    return additive_mask(mask, dtype).index_select(1, order).index_select(2, order)


def _residual(
    kind: str, index: int, numbers: list[int | None], inputs: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """The ControlNet residual of one block, or None. `numbers` names each block's, since several may share one."""
    number = numbers[index] if index < len(numbers) else None
    if number is None:
        return None
    return inputs[f"{'control_in' if kind == 'double' else 'control_out'}.{number}"]
