"""One request and one reply of each kind, with a value in every field, for tests of how they travel."""

from parallel_runtime.checkpoint import ComfyUI, ModelSpec
from parallel_runtime.exchange_groups import ExchangeGroup
from parallel_runtime.model_call import CallPlace
from parallel_runtime.packages import Package
from parallel_runtime.parallel.overlap import OverlapRates
from parallel_runtime.plan import BatchSlice, Layout, ParallelPlan
from parallel_runtime.sampler_recurrence import RecurrenceStep, SamplerRecurrence
from parallel_runtime.wire import replies, requests

PROGRAM = SamplerRecurrence(
    states=(
        RecurrenceStep(given=True, sigma=1.0, timestep=0.5),
        RecurrenceStep(inputs=((0, 0.25),), denoised=((0, 0.75),)),
    ),
    step_ends=(0,),
)
SPEC = ModelSpec("/models/flux.safetensors", "bfloat16", 7, 8)
LOAD = requests.Load(
    model=1, spec=SPEC, layout=Layout(ranks=2, shards=2), first_rank=0, plan=None, budget_bytes=9, eviction_order=(3, 2)
)
PLAN = ParallelPlan(ulysses=2, cfg=2)
SAMPLE = requests.Sample(
    model=1,
    plan=PLAN,
    recurrence=PROGRAM,
    cfg=2.5,
    batch_groups=(requests.GroupWork(start=0, stop=1, conds=(0, 1), shares_cfg=True),),
    calls=({},),
    timeline=False,
)
CASES = [
    LOAD,
    requests.Unload(model=1),
    requests.ChangeWeights(model=1, records=({"key": "a"},), side_branch=True, first=True, last=False),
    requests.SetStrengths(model=1, strengths=(0.5, -1.0)),
    requests.MakeMesh(
        plan=PLAN,
        dropped=(ParallelPlan(ring=2), ParallelPlan(data=2)),
        freed=(ExchangeGroup(purpose="link", ranks=(1, 0)),),
        overlap=OverlapRates(attention_flops=1e14, bandwidth=1e10, latency_s=4e-5),
    ),
    requests.Step(
        model=1,
        plan=PLAN,
        calls=({"timed": False}, {}),
        batch_groups=((BatchSlice(0, 0, 1),), (BatchSlice(1, 0, 2), BatchSlice(1, 2, 3))),
        repeated={"0.txt": 5},
        epoch=1,
        places=(CallPlace("a run", "a text"), None),
    ),
    SAMPLE,
    requests.CheckCopies(plan=PLAN),
    requests.MeasureDevice(),
    requests.Probe(plan=PLAN),
    requests.Trim(ranks=(0, 1)),
    requests.HoldVae(
        vae=5,
        comfyui=ComfyUI("/comfyui", ("--fast",)),
        dtype="bfloat16",
        metadata={"config": "{}"},
        names=("decoder.conv_in.weight",),
        first=True,
        last=False,
        flags={"torch.backends.cudnn.benchmark": True},
    ),
    requests.DecodeTiles(vae=5, method="decode", tiles=((0, 2), (1,)), last=True),
]


MEMORY = replies.Memory(resident_bytes=5, reserved_bytes=7)
WORK = {
    "batch_group": 1,
    "pieces": (BatchSlice(0, 0, 1), BatchSlice(1, 2, 3)),
    "collectives": 4,
    "sent_bytes": 64,
    "weight_collectives": 1,
    "weight_bytes": 32,
    "compiled": replies.CompiledReport(graphs=5, uncompiled_blocks=0, compile_s=0.5),
}
STEP = replies.StepReply(
    memory=MEMORY, ran=replies.RankStep(**WORK, began_s=1.5, step_s=0.25, regions={"embed_s": 0.125}, trace_bytes=9)
)
RUN = replies.SampleReply(
    memory=MEMORY,
    ran=replies.RankRun(
        **WORK,
        step_s=(0.5, 0.25),
        prepare_s=0.125,
        finish_s=0.0,
        began_s=(1.0, 1.5),
        regions={"embed_s": (0.125, 0.0)},
        prepare_regions={"embed_s": 0.125},
        timeline=replies.StageTimeline(
            stage=1, spans=(replies.ChunkSpan(0, 0, 2, 0, asked_s=1.0, began_s=1.25, ended_s=1.5),), left_out=0
        ),
    ),
)
REPLIES = [
    replies.Hello(pid=4, version="0.3.0"),
    replies.Ready(),
    replies.RankError(kind="ValueError", text="no", traceback="Traceback"),
    replies.RankError(
        kind="KeyError", text="no", traceback="", bases=("KeyError", "LookupError", "Exception"), module="a.0"
    ),
    replies.Progress(done=1, total=2),
    replies.Progress(done=1, total=2, spent=replies.TimeSpent(compute_s=0.3, communication_s=0.1, idle_s=0.0)),
    replies.Compiling(begins=True),
    replies.Cancelled(evicted=(3,)),
    replies.EmptyReply(),
    replies.MemoryReply(memory=MEMORY),
    replies.LoadReply(
        memory=MEMORY,
        parameter_bytes=9,
        dtype="bfloat16",
        load_s=0.5,
        evicted=(3, 2),
        imported=replies.Imported(left_out=("--fast",), packages=(Package("torch", "2.13.0", "/packages"),)),
    ),
    replies.StrengthsReply(memory=MEMORY, changed=True),
    STEP,
    replies.StepReply(memory=MEMORY, ran=None),
    RUN,
    replies.SampleReply(memory=MEMORY, ran=None),
    replies.DecodeReply(memory=MEMORY, num_tiles=3, decode_s=0.5, refused="no"),
    replies.CheckReply(wrong_bytes=7),
    replies.MeasureReply(name="a GPU", free_bytes=1, gflops=3.5),
    replies.ProbeReply(matmul=((1.0, 0.5), (2.0, 0.75)), memory=((1.0, 0.5),)),
]
