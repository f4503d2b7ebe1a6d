"""An engine whose steps are checks of sharded weights, so that they run in real ranks with real process groups.

A step's options name the check and say what it needs; what it finds is the rank's note. Owns what runs in the ranks;
`test_sharded_weights.py` says what must be found.
"""

import torch
import torch.distributed as dist
from noted import note

from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.workload import relative_error
from parallel_runtime.errors import RequestCancelledError
from parallel_runtime.models.flux.adapter import FluxAdapter
from parallel_runtime.models.flux.config import FluxConfig, file_names, file_scales
from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.parallel.kernels import attention
from parallel_runtime.weight_patch import WeightPatch
from parallel_runtime.weights.branches import Branch
from parallel_runtime.weights.mapped_file import MappedFile
from parallel_runtime.weights.model_file import ModelFile, compute_dtype, weight_bytes
from parallel_runtime.weights.model_weights import ReplicatedWeights
from parallel_runtime.weights.sharded import ShardedWeights
from parallel_runtime.wire.protocol import Op
from parallel_runtime.wire.replies import EmptyReply, LoadReply, Memory, StepReply

LORA, LOHA, DORA = "double_blocks.0.img_attn.qkv.weight", "double_blocks.1.img_mlp.0.weight", "img_in.weight"
BIAS, SECOND = "single_blocks.1.linear2.bias", "single_blocks.0.linear1.weight"

CPU = torch.device("cpu")
NO_MEMORY = Memory(resident_bytes=0)
TOLERANCE = 1e-6  # of outputs, relative: they differed by 3e-7 at most, and by 6e-2 with a side branch left out


class ShardEngine:
    """Answers LOAD and MESH so far as the pool needs it; a step is one check."""

    def __init__(self, *, rank, device, segments):
        self.rank = rank
        self.axes = {}

    def handle(self, message, *, progress, cancelled, beat):
        if message.op is Op.LOAD:
            return LoadReply(dtype="float32", memory=NO_MEMORY)
        if message.op is Op.MESH:
            size = message.body.plan.ulysses
            self.axes[message.body.mesh] = Axis("shard", size, self.rank, dist.new_group(list(range(size))))
            return EmptyReply()
        axis, options = self.axes[message.body.mesh], dict(message.body.calls[0])
        with torch.inference_mode():
            notes = {"notes": options.pop("notes")}
            found = CHECKS[options.pop("check")](axis, **options) if self.rank < axis.size else {}
        note(notes, self.rank, found)
        return StepReply(ran=None, memory=NO_MEMORY)


def sharded(path, axis, *, dtype="default", offloaded=False):
    """This rank's part of the file's weights, not loaded."""
    return ShardedWeights(described(path, dtype), device=CPU, group=axis, offloaded=offloaded)


def replicated(path, *, dtype="default"):
    """All the file's weights, loaded."""
    weights = ReplicatedWeights(described(path, dtype), device=CPU)
    load(weights)
    return weights


def described(path, dtype):
    header = read_header(path)
    config = FluxConfig.from_header(header)
    names = file_names(header, config.prefix, config.expected_shapes())
    return ModelFile(
        header,
        file=MappedFile(ModelSpec.of(path, dtype)),
        names=names,
        scales=file_scales(header, names),
        prefixes=tuple(block.prefix for block in FluxAdapter(config).blocks),
        dtype=compute_dtype(header, names, dtype),
        device=CPU,
    )


def load(weights, *, progress=lambda done, total: None, cancelled=lambda: False):
    weights.load(progress=progress, cancelled=cancelled)


def units(path):
    return ["", *(block.prefix for block in FluxAdapter(FluxConfig.from_header(read_header(path))).blocks)]


def differences(path, ours, whole):
    """Names of the weights that are not, bit for bit, those of `whole`, in one pass."""
    ours.begin(1)
    different = []
    for prefix in (*units(path), ""):
        with ours.block(prefix) as mine, whole.block(prefix) as expected:
            assert mine.tensors.keys() == expected.tensors.keys()
            for name, tensor in expected.tensors.items():
                same = mine[name].dtype == tensor.dtype and torch.equal(as_bytes(mine[name]), as_bytes(tensor))
                different += [] if same else [prefix + name]
    return different


def alike(one, other):
    """Outputs of the same weights in other places: on some CPUs a product adds in another order by where it begins."""
    return relative_error(one, other) <= TOLERANCE


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def forward(path, weights, *, passes=1):
    """A whole call of the model on one rank's own tokens, `passes` times over."""
    config = FluxConfig.from_header(read_header(path))
    adapter = FluxAdapter(config)
    inputs = {
        "img": noise(1, 12, config.in_channels),
        "txt": noise(1, 5, config.context_dim),
        "timesteps": torch.tensor([0.7]),
        "guidance": torch.tensor([3.5]),
        "y": noise(1, config.vec_dim),
        "txt_ids": torch.zeros(5, 3),
        "img_ids": torch.arange(36.0).reshape(12, 3),
    }
    outs = []
    weights.begin(passes)
    for _ in range(passes):
        with weights.block("") as w:
            tokens = adapter.embed(w, inputs["img"], adapter.condition(w, inputs))
        for block in adapter.blocks:
            with weights.block(block.prefix) as w:
                mod = adapter.modulation(block, adapter.modulation_rows(block, w, tokens.vec), tokens)
                q, k, v, start_mlp = adapter.qkv(block, w, tokens, mod)
                out = attention(q, k, v)
                adapter.finish(block, w, tokens, out, mod, mlp=start_mlp(), residual=None)
        with weights.block("") as w:
            outs.append(adapter.head(w, tokens))
    return torch.stack(outs)


def noise(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def patches_for(path):
    """By weight: a LoRA of all rows and one of some, LoHa, DoRA, a plain difference of a bias."""
    header = read_header(path)
    rows, columns = header.tensors[LORA].shape
    wide, narrow = header.tensors[LOHA].shape
    hidden, channels = header.tensors[DORA].shape
    third = rows // 3
    (length,) = header.tensors[BIAS].shape
    pair = lambda o, i, seed: (noise(o, 4, seed=seed, scale=0.3), noise(4, i, seed=seed + 1, scale=i**-0.5))  # noqa: E731
    lora = WeightPatch(key=LORA, kind="lora", strength=0.8, values=(*pair(rows, columns, 1), 2.0, None))
    some = WeightPatch(
        key=LORA, kind="lora", strength=-0.5, values=(*pair(third, columns, 3), 2.0, None), offset=(0, third, third)
    )
    loha_values = (*pair(wide, narrow, 5), 2.0, *pair(wide, narrow, 7), None, None, None)
    dora_values = (*pair(hidden, channels, 9), 2.0, noise(hidden, 1, seed=11).abs() + 1)
    return {
        LORA: [lora, some],
        LOHA: [WeightPatch(key=LOHA, kind="loha", strength=1.0, values=loha_values)],
        DORA: [WeightPatch(key=DORA, kind="lora", strength=1.0, values=dora_values)],
        BIAS: [WeightPatch(key=BIAS, kind="diff", strength=1.0, values=(noise(length, seed=12),))],
    }


def change(weights, patches):
    """A whole change of weights, as `changes.py` makes one."""
    for name, group in patches.items():
        weights.patch(name, group)
    weights.unpatch_except(patches, lambda: None)


def check_equal(axis, *, path, dtype="default", offloaded=False):
    """Pristine, with every kind of patch, with one of them, with another, and pristine again."""
    ours, whole = sharded(path, axis, dtype=dtype, offloaded=offloaded), replicated(path, dtype=dtype)
    load(ours)
    everything = patches_for(path)
    held = {"sharded": ours.parameter_bytes, "replicated": whole.parameter_bytes, "buffers": ours.buffer_bytes}
    held |= {"needed": ours.needed_bytes}
    different, moved = {"pristine": differences(path, ours, whole)}, {}
    before = forward(path, whole)
    for stage, kept in (("all", everything), ("lora", [LORA]), ("bias", [BIAS]), ("again", [])):
        for weights in (ours, whole):
            change(weights, {name: everything[name] for name in kept})
        different[stage] = differences(path, ours, whole)
        moved[stage] = float((forward(path, whole) - before).abs().max())
        different[f"{stage}, output"] = [] if alike(forward(path, ours), forward(path, whole)) else ["output"]
    return {
        "different": {stage: names for stage, names in different.items() if names},
        "stages": len(different),
        "moved": moved,
        "idle": ours.idle,
        "parameters_again": ours.parameter_bytes,
        **held,
    }


def check_beside(axis, *, path):
    """A side branch gives the same output as beside replicated weights, and is taken off again."""
    ours, whole = sharded(path, axis), replicated(path)
    load(ours)
    before = forward(path, whole)
    patches = [patch for patch in patches_for(path)[LORA]]
    branches = [Branch.of(patch, dtype=whole.dtype, device=whole.device) for patch in patches]
    for weights in (ours, whole):
        weights.set_lora_branches({LORA: branches})
    beside = forward(path, whole)
    equal = alike(forward(path, ours), beside)
    for weights in (ours, whole):
        weights.set_lora_branches({})
    return {"equal": equal, "moved": not alike(before, beside), "back": alike(forward(path, ours), before)}


class Recorder:
    """A group that notes when each gather was started."""

    def __init__(self, axis, order):
        self.axis, self.order, self.events = axis, list(order), []
        self.size, self.index = axis.size, axis.index

    def start_all_gather(self, mine, whole):
        self.events.append(["start", self.order.pop(0)])
        self.last = self.axis.start_all_gather(mine, whole)
        return self.last


def check_order(axis, *, path, passes, offloaded=False):
    """Events of `passes` passes; in each block, the next unit arrives before the present one is looked at."""
    names = units(path)
    group = Recorder(axis, ["", *([*names[1:], ""] * passes)])
    ours, whole = sharded(path, group, offloaded=offloaded), replicated(path)
    load(ours)
    axis.traffic.reset()
    ours.begin(passes)
    touched = []
    for _ in range(passes):
        for prefix in (*names, ""):
            with ours.block(prefix) as mine, whole.block(prefix) as expected:
                group.events.append(["compute", prefix])
                group.last.wait()
                touched += [prefix + name for name, one in expected.tensors.items() if not torch.equal(mine[name], one)]
    return {
        "events": group.events,
        "touched": touched,
        "idle": ours.idle,
        "calls": axis.traffic.calls,
        "bytes": axis.traffic.num_bytes,
    }


def check_idle(axis, *, path):
    """Rank 0 has no work in the second of two passes; the others do, and all are well in the next step."""
    ours, whole = sharded(path, axis), replicated(path)
    load(ours)
    beats = []
    if axis.index == 0:
        ours.begin(3)
        for _ in range(3):
            ours.join_gathers(lambda: beats.append(1))
        equal = True
    else:
        equal = alike(forward(path, ours, passes=3), forward(path, whole, passes=3))
    return {"equal": equal, "beats": len(beats), "idle": ours.idle, "after": differences(path, ours, whole)}


def check_out_of_turn(axis, *, path):
    """What is said when the order is broken; the passes can be ended all the same."""
    ours = sharded(path, axis)
    load(ours)
    said = []
    for prefix in ("", "double_blocks.1."):
        try:
            with ours.block(prefix):
                said.append("nothing")
        except RuntimeError as error:
            said.append(str(error))
        if not prefix:
            ours.begin(1)
    try:
        ours.begin(1)
    except RuntimeError as error:
        said.append(str(error))
    ours.join_gathers(lambda: None)
    return {"said": said, "idle": ours.idle}


def check_cancel(axis, *, path):
    """A load given up at its third report, then one that is not."""
    ours, whole, seen = sharded(path, axis), replicated(path), []
    try:
        load(ours, progress=lambda *report: seen.append(report), cancelled=lambda: len(seen) == 3)
        cancelled = False
    except RequestCancelledError:
        cancelled = True
    load(ours, progress=lambda *report: seen.append(report))
    return {"cancelled": cancelled, "seen": seen, "different": differences(path, ours, whole)}


def check_corrupted(axis, *, path, spoilt):
    """The first number of one rank's part of each unit is four times as large, or a quarter: who sees it?"""
    ours, whole = sharded(path, axis), replicated(path)
    load(ours)
    if axis.index == spoilt:
        for shard in ours._shards.values():
            shard[3] ^= 1
    return {
        "different": differences(path, ours, whole),
        "equal": alike(forward(path, ours), forward(path, whole)),
    }


def check_small(axis, *, path):
    """A unit of four bytes and one of none over every rank."""
    header = read_header(path)
    file = ModelFile(
        header,
        file=MappedFile(ModelSpec.of(path)),
        names={name: name for name in header.tensors},
        scales={},
        prefixes=("b.0.", "b.1."),
        dtype=torch.float32,
        device=CPU,
    )
    ours = ShardedWeights(file, device=CPU, group=axis)
    load(ours)
    ours.begin(1)
    with ours.block("") as w:
        outside = dict(w.tensors)
    with ours.block("b.0.") as w:
        small = w["w"].tolist()
    with ours.block("b.1.") as w:
        large = w["w"].tolist()
    with ours.block(""):
        pass
    return {"outside": list(outside), "small": small, "large": large, "bytes": ours.parameter_bytes}


def check_load(axis, *, path, dtype, offloaded):
    """Load and gather every unit once, while the parent watches the memory."""
    ours = sharded(path, axis, dtype=dtype, offloaded=offloaded)
    load(ours)
    ours.begin(1)
    ours.join_gathers(lambda: None)
    header = read_header(path)
    config = FluxConfig.from_header(header)
    whole = weight_bytes(header, file_names(header, config.prefix, config.expected_shapes()), ours.dtype)
    return {"shard": ours.parameter_bytes, "buffers": ours.buffer_bytes, "whole": whole}


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}
