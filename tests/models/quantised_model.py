"""Files in ComfyUI's quantised formats, as a rank has them: written, loaded, changed by a LoRA, called, counted.

Owns the model and its LoRA, and layers that round their inputs as on GPUs that multiply in their format. Does not own
the bounds (test_quantised.py), nor which kinds there are (host/quantised.py).
"""

import itertools
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from host.fetch import comfyui_path
from host.quantised import KINDS, MIXED, TOLD_IN_THE_HEADER, quantised
from parallel_runtime.checkpoint import ComfyUI, ModelSpec
from parallel_runtime.models.hosted.calls import forward_call
from parallel_runtime.models.hosted.scales import shared as shared_scales
from parallel_runtime.models.parts import plain_parts
from parallel_runtime.parallel.attention import SequenceParallelAttention
from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.plan import BatchSlice, ParallelPlan
from parallel_runtime.timing import RegionTimer
from parallel_runtime.weight_delta import DeltaBatch, WeightDelta, pack
from parallel_runtime.wire.requests import ChangeWeights
from parallel_runtime.worker.held_state import HeldState
from parallel_runtime.worker.hosted import HostedForward, HostedModel
from parallel_runtime.worker.hosted_weights import HostedWeights
from parallel_runtime.worker.mesh import Groups, Mesh

from .tiny import at, build, difference, noise

CPU = torch.device("cpu")
COMFYUI = ComfyUI(str(comfyui_path()), ("--use-pytorch-cross-attention",))
SIZES = {"dim": 320, "ffn_dim": 640, "num_heads": 5, "num_layers": 2, "freq_dim": 32, "text_dim": 48}
SIZES |= {"in_dim": 16, "out_dim": 16}
TOLD = {name: SIZES[name] for name in ("num_heads", "freq_dim", "text_dim")}
INPUTS = {"x": (2, 16, 1, 10, 14), "context": (2, 9, 48)}
LORA = {"blocks.0.self_attn.q": (320, 320), "blocks.1.ffn.0": (640, 320), "text_embedding.0": (320, 48)}
# So that a token is moved much by what it attends to: else rounding would hide what a wrong exchange does.
LOUDER = {"self_attn.norm_q.weight": 2.0, "self_attn.norm_k.weight": 2.0, "self_attn.o.weight": 6.0}
ON_A_GPU = ", its inputs rounded too"
FROM_INPUT = tuple(f"{kind}{ON_A_GPU}" for kind in ("nvfp4", "nvfp4, scale of the input", "nvfp4, smoothed", "mxfp8"))
LAYOUTS = ("replicated", "sharded")  # the second over a ring of 2, else over the heads
CASES = (*KINDS, *FROM_INPUT)
# What `make test` runs: each format, those of MIXED in one file, and each way to say it.
SOME = ("mxfp8", MIXED, TOLD_IN_THE_HEADER, FROM_INPUT[0])


def write(path: Path, case: str) -> ModelSpec:
    """A file of that kind, all of one model. Raises StockFailsError for kinds that this ComfyUI does not have."""
    model = build("comfy.ldm.wan.model.WanModel", model_type="t2v", text_len=9, **SIZES)
    whole = {name: tensor * LOUDER.get(name.split(".", 2)[-1], 1.0) for name, tensor in model.state_dict().items()}
    tensors, said = quantised(whole, case.removesuffix(ON_A_GPU))
    if dist.get_rank() == 0:
        save_file(tensors, path, metadata={"config": json.dumps({"transformer": TOLD})} | said)
    dist.barrier()
    return ModelSpec.of(str(path), "float32", comfyui=COMFYUI)


def loaded(spec: ModelSpec, group: Axis) -> HostedModel:
    """The model as a worker loads it."""
    weights = HostedWeights(spec, device=CPU, group=group, offloaded=False)
    weights.load(progress=lambda *_: None, cancelled=lambda: False)
    return HostedModel(weights)


@contextmanager
def kernels(case: str) -> Iterator[None]:
    """Layers of a case round their inputs or do not; what was rounded is multiplied in fp32, as no CPU can else."""
    import comfy.model_management as management
    import comfy_kitchen

    def missing(*_: object, **__: object) -> Tensor:
        raise RuntimeError("no such product on a CPU")

    def can(*_: object, **__: object) -> bool:
        return case.endswith(ON_A_GPU)

    logging.getLogger("comfy_kitchen").setLevel(logging.ERROR)
    with (
        mock.patch.multiple(comfy_kitchen, scaled_mm_nvfp4=missing, scaled_mm_mxfp8=missing),
        mock.patch.multiple(management, supports_nvfp4_compute=can, supports_mxfp8_compute=can),
    ):
        yield


def change(model: HostedModel, *, lora: bool, side_branch: bool = False) -> None:
    """Have a LoRA merged or beside the weights, or nothing."""
    patches = [
        WeightDelta(
            key=f"{name}.weight", kind="lora", strength=0.7, values=(noise(rows, 4), 0.1 * noise(4, columns), 4.0, None)
        )
        for name, (rows, columns) in (LORA if lora else {}).items()
    ]
    batch = next(pack(patches), DeltaBatch([], {}))
    said = ChangeWeights(model=0, records=tuple(batch.records), side_branch=side_branch, first=True, last=True)
    model.changes.take(said, batch.tensors, cancelled=lambda: False, beat=lambda: None)


def call(model: HostedModel, sequence: SequenceParallelAttention, *, scales: bool = True) -> Tensor:
    """One call over the ranks of `sequence`, with their scales as one or each rank's own."""
    module = model.install_hooks(sequence, lambda: None)
    inputs = {name: noise(*shape) for name, shape in INPUTS.items()} | {"timestep": at(700, 650)}
    with model.calling(), shared_scales([sequence] if scales and sequence.parts > 1 else []):
        out: Tensor = module(**inputs)
    return out


def runs(model: HostedModel, sequence: SequenceParallelAttention) -> dict[str, Tensor]:
    """The outputs of a model, of it with a LoRA merged and beside its weights, and of it again."""
    plain = call(model, sequence)
    change(model, lora=True)
    merged = call(model, sequence)
    change(model, lora=True, side_branch=True)
    beside = call(model, sequence)
    change(model, lora=False)
    return {"plain": plain, "LoRA": merged, "beside": beside, "again": call(model, sequence)}


def unrounded(model: HostedModel) -> Tensor:
    """The output with the LoRA added to the numbers that its weights stand for, which are not rounded again."""
    for name, (rows, columns) in LORA.items():
        layer = model.module.get_submodule(name)
        numbers = layer.weight.dequantize() if len(plain_parts(layer.weight)[0]) > 1 else layer.weight
        merged = numbers.float() + 0.7 * noise(rows, 4) @ (0.1 * noise(4, columns))
        layer.weight = torch.nn.Parameter(merged, requires_grad=False)
    return call(model, alone())


def moves(model: HostedModel, right: Tensor) -> float:
    """How far a model's output is from itself in one process with other exact kernels and numbers of threads."""
    found = 0.0
    for backend, threads in itertools.product((SDPBackend.FLASH_ATTENTION, SDPBackend.MATH), (1, 2)):
        torch.set_num_threads(threads)
        with sdpa_kernel(backend):
            found = max(found, difference(call(model, alone()), right))
    torch.set_num_threads(1)
    return found


def alone() -> SequenceParallelAttention:
    """Nobody to share with."""
    return SequenceParallelAttention()


def exchanged(model: HostedModel, sequence: SequenceParallelAttention) -> int:
    """How many maxima ranks exchange in a call."""
    maxima: list[Tensor] = []
    sequence.maximum = lambda each: maxima.append(each) or SequenceParallelAttention.maximum(sequence, each)  # type: ignore[method-assign, func-returns-value]
    call(model, sequence)
    del sequence.maximum
    return len(maxima)


def over_groups(model: HostedModel, calls: tuple[int, int]) -> Tensor:
    """Two rows, each run by a batch group of cfg parallel, that are of these calls: of one, or each of another."""
    rank = dist.get_rank()
    out = by_plan(model, ParallelPlan(cfg=2), [[BatchSlice(calls[0], 0, 1)], [BatchSlice(calls[1], 1, 2)]])
    everybody = Axis("all", 2, rank, dist.group.WORLD)
    rows = SequenceParallelAttention(ulysses=everybody).gather(out[rank : rank + 1], dim=0, lengths=(1, 1))
    return rows.flatten()


def by_plan(model: HostedModel, plan: ParallelPlan, groups: list[list[BatchSlice]]) -> Tensor:
    """What this rank wrote (2, numbers) of the pieces of calls that each batch group runs."""
    module = model.weights.module
    mesh = Mesh(plan, device=CPU, groups=Groups(), show_waiting=lambda _: None)
    inputs = {name: noise(*shape) for name, shape in INPUTS.items()}
    made = forward_call(module, 16, [inputs["x"], at(700, 650)], {"context": inputs["context"]})
    out = torch.zeros(made.out_shape)
    given = {**made.tensors, "out": out}
    tensors = {f"{each.call}.{name}": given[name] for pieces in groups for each in pieces for name in given}
    forward = HostedForward(model, mesh.attention, RegionTimer(CPU, on=False), lambda: None, HeldState(CPU))
    forward.run_batch_groups(groups, mesh, tensors, [made.options] * 2)
    return out


def bytes_elsewhere(model: HostedModel, path: str) -> int:
    """Of the weights as the file says them, how many bytes lie elsewhere than in the file's own pages."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(path)]
    pages = [tuple(int(each, 16) for each in line[0].split("-")) for line in lines]
    shards = model.weights.shards
    units = [] if shards is None else shards._units.values()
    held = [*model.weights.module.parameters(), *(weight for unit in units for weight in unit.pristine.values())]
    parts = [part for weight in held for part in plain_parts(weight)[0]]
    assert parts and pages
    return sum(part.nbytes for part in parts if not any(low <= part.data_ptr() < high for low, high in pages))
