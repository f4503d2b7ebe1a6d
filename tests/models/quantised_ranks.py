"""Runs files in every quantised format whole and shared, over gloo.

`python -m models.quantised_ranks COMFYUI FOLDER 2,3 all` (or `some` of the cases). A file of each kind is loaded as a
worker loads it (`HostedWeights`), called whole in one process, then in forked ranks: replicated and sharded, plain,
with a LoRA, and after it was taken back. Once more for those whose layers round their inputs on GPUs that multiply in
them, with layers that do so here. Writes FOLDER/RANKS.json with a row a case, checks-RANKS-RANK.json, and left_out.json
with the kinds that this ComfyUI does not have.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from host.outcomes import StockFailsError
from host.quantised import KINDS, MIXED, TOLD_IN_THE_HEADER, quantised
from parallel_runtime.checkpoint import ComfyUI, ModelSpec
from parallel_runtime.models.hosted.calls import forward_call
from parallel_runtime.models.hosted.comfyui import import_comfyui
from parallel_runtime.models.hosted.scales import shared as shared_scales
from parallel_runtime.models.parts import plain_parts
from parallel_runtime.parallel.attention import SequenceParallelAttention
from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.plan import BatchSlice, ParallelPlan
from parallel_runtime.timing import RegionTimer
from parallel_runtime.weight_delta import DeltaBatch, WeightDelta, pack
from parallel_runtime.wire.requests import ChangeWeights
from parallel_runtime.worker.hosted import HostedForward, HostedModel
from parallel_runtime.worker.hosted_weights import DeltaReceiver, HostedWeights
from parallel_runtime.worker.inputs import RepeatedInputs
from parallel_runtime.worker.mesh import Groups, Mesh
from parallel_runtime.worker.own_tokens import OwnTokens

from .quantised_checks import CHECKS
from .ranks import difference, fork_ranks
from .tiny import at, build, noise

CPU = torch.device("cpu")
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
# What `make test` runs: one of each format, and each way to say it.
SOME = ("fp8 e4m3", "mxfp8", "int8, rotated", MIXED, TOLD_IN_THE_HEADER)
SOME += FROM_INPUT[:1]


def write_files(folder: Path, comfyui: ComfyUI, cases: Sequence[str]) -> tuple[dict[str, ModelSpec], dict[str, str]]:
    """A file of each kind, of one model, by case; and why there is none, of kinds that this ComfyUI does not have."""
    model = build("comfy.ldm.wan.model.WanModel", model_type="t2v", text_len=9, **SIZES)
    whole = {name: tensor * LOUDER.get(name.split(".", 2)[-1], 1.0) for name, tensor in model.state_dict().items()}
    specs, absent = {}, {}
    for number, case in enumerate(cases):
        try:
            tensors, said = quantised(whole, case.removesuffix(ON_A_GPU))
        except StockFailsError as error:
            absent[case] = str(error)
            continue
        path = folder / f"{number}.safetensors"
        save_file(tensors, path, metadata={"config": json.dumps({"transformer": TOLD})} | said)
        specs[case] = ModelSpec.of(str(path), "float32", comfyui=comfyui)
    return specs, absent


def loaded(case: str, spec: ModelSpec, group: Axis) -> HostedModel:
    """The model as a worker loads it."""
    import comfy.model_management as management

    can = case.endswith(ON_A_GPU)
    management.supports_nvfp4_compute = management.supports_mxfp8_compute = lambda *_: can
    weights = HostedWeights(spec, device=CPU, group=group, offloaded=False)
    weights.load(progress=lambda *_: None, cancelled=lambda: False)
    return HostedModel(weights, group, DeltaReceiver(weights))


def without_products() -> None:
    """Have the layouts of nvfp4 and mxfp8 multiply what was rounded in fp32: a CPU has no product of such numbers."""
    import comfy_kitchen

    def missing(*_: object, **__: object) -> Tensor:
        raise RuntimeError("no such product on a CPU")

    comfy_kitchen.scaled_mm_nvfp4 = comfy_kitchen.scaled_mm_mxfp8 = missing
    logging.getLogger("comfy_kitchen").setLevel(logging.ERROR)


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


def compare(case: str, spec: ModelSpec, want: dict[str, Tensor], *, sharded: bool, ring: bool) -> dict[str, float]:
    """Errors of one kind of file in this layout, by case."""
    size, index = dist.get_world_size(), dist.get_rank()
    everybody = Axis("all", size, index, dist.group.WORLD)
    one = Axis("one")
    sequence = SequenceParallelAttention(ring=everybody if ring else one, ulysses=one if ring else everybody)
    model = loaded(case, spec, everybody if sharded else one)
    elsewhere = bytes_elsewhere(model, spec.path)
    found = runs(model, sequence)
    errors = {name: difference(found[name], want[name]) for name in ("plain", "LoRA", "beside")}
    errors["taken back"] = float(not torch.equal(found["plain"], found["again"]))
    errors["bytes elsewhere"] = elsewhere
    errors["LoRA changes"] = difference(found["LoRA"], found["plain"])
    if size == 2 and not sharded:
        errors["cfg"] = difference(over_groups(model, (0, 0)), want["plain"].flatten())
        errors["cfg, own scales"] = difference(over_groups(model, (0, 1)), want["plain"].flatten())
    errors["exchanged"] = exchanged(model, sequence)
    for layer in model.module.modules():
        vars(layer).pop("forward", None) if hasattr(layer, "layout_type") else None
    errors["exchanged, unwatched"] = exchanged(model, sequence)
    errors["own scales"] = difference(call(model, sequence, scales=False), want["plain"])
    sequence.attend = OwnTokens.attend.__get__(sequence)  # type: ignore[method-assign]
    errors["control"] = difference(call(model, sequence), want["plain"])
    return errors


def exchanged(model: HostedModel, sequence: SequenceParallelAttention) -> int:
    """How many maxima ranks exchange in a call."""
    maxima: list[Tensor] = []
    sequence.maximum = lambda each: maxima.append(each) or SequenceParallelAttention.maximum(sequence, each)  # type: ignore[method-assign, func-returns-value]
    call(model, sequence)
    del sequence.maximum
    return len(maxima)


def over_groups(model: HostedModel, calls: tuple[int, int]) -> Tensor:
    """Two rows, each run by a batch group of cfg parallel, that are of these calls: of one, or each of another."""
    module, rank = model.weights.module, dist.get_rank()
    mesh = Mesh(ParallelPlan(cfg=2), device=CPU, groups=Groups(), show_waiting=lambda _: None)
    inputs = {name: noise(*shape) for name, shape in INPUTS.items()}
    made = forward_call(module, 16, [inputs["x"], at(700, 650)], {"context": inputs["context"]})
    out = torch.zeros(made.out_shape)
    tensors = {f"{call}.{name}": tensor for call in calls for name, tensor in {**made.tensors, "out": out}.items()}
    sent = RepeatedInputs(CPU).of_request({}, {})
    forward = HostedForward(model, mesh.attention, RegionTimer(CPU, on=False), lambda: None, sent)
    forward.run_batch_groups(
        [[BatchSlice(calls[0], 0, 1)], [BatchSlice(calls[1], 1, 2)]], mesh, tensors, [made.options] * 2
    )
    everybody = Axis("all", 2, rank, dist.group.WORLD)
    rows = SequenceParallelAttention(ulysses=everybody).gather(out[rank : rank + 1], dim=0, lengths=(1, 1))
    return rows.flatten()


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


def rank_main(
    rank: int, ranks: int, folder: Path, specs: dict[str, ModelSpec], want: dict[str, dict[str, Tensor]]
) -> None:
    """One rank: every kind, in order; the first one writes."""
    rows: dict[str, Any] = {}
    with torch.inference_mode():
        for case, spec in specs.items():
            for layout in LAYOUTS:
                ring = layout == "sharded" and ranks == 2
                rows[f"{case} | {layout}"] = compare(case, spec, want[case], sharded=layout == "sharded", ring=ring)
        found = run_checks(Axis("all", ranks, rank, dist.group.WORLD))
    (folder / f"checks-{ranks}-{rank}.json").write_text(json.dumps(found))
    if rank == 0:
        (folder / f"{ranks}.json").write_text(json.dumps(rows))


def run_checks(axis: Axis) -> dict[str, str]:
    """Check -> what was wrong on this rank, "" when nothing was."""
    from . import checks_files  # noqa: F401  which adds to them

    found = {}
    for name, check in CHECKS.items():
        try:
            check(axis)
            found[name] = ""
        except (AssertionError, KeyError, RuntimeError, TypeError, ValueError):
            found[name] = traceback.format_exc()
    return found


def main(comfyui: str, folder: Path, numbers: list[int], cases: Sequence[str]) -> int:
    """Everything. Returns 0 when all ranks ended well."""
    torch.set_num_threads(1)
    said = ComfyUI(comfyui, ("--use-pytorch-cross-attention",))
    import_comfyui(said, CPU)
    specs, absent = write_files(folder, said, cases)
    (folder / "left_out.json").write_text(json.dumps(absent))
    without_products()
    with torch.inference_mode():
        want, moved, rounded = {}, {}, {}
        for case, spec in specs.items():
            model = loaded(case, spec, Axis("one"))
            want[case] = runs(model, alone())
            moved[case] = moves(model, want[case]["plain"])
            right = unrounded(model)
            rounded[case] = {each: difference(want[case][each], right) for each in ("beside", "LoRA")}
    (folder / "moved.json").write_text(json.dumps(moved))
    (folder / "rounded.json").write_text(json.dumps(rounded))
    well = [
        fork_ranks(ranks, folder, partial(rank_main, ranks=ranks, folder=folder, specs=specs, want=want))
        for ranks in numbers
    ]
    return 0 if all(well) else 1


if __name__ == "__main__":
    some = {"all": CASES, "some": SOME}[sys.argv[4]]
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), [int(each) for each in sys.argv[3].split(",")], some))
