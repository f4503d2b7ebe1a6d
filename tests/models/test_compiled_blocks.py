"""Blocks of ComfyUI's own classes by graphs of torch's compiler: the same numbers, a graph for each kind of block.

Owns the bounds and the counts. In a pool each test counts from what graphs there are when it begins, so they run in any
order.
"""

import copy
import inspect
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from rounding import ROUNDING
from torch import Tensor

from host.tiny_hosted import call
from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.compiling import compile_environment
from parallel_runtime.model_call import CallPlace
from parallel_runtime.models.hosted.compiled import TOLD, CompiledRun, _kind_of, blocks_of
from parallel_runtime.models.hosted.graphs import Graphs, Watch
from parallel_runtime.models.hosted.hooks import SharedModel
from parallel_runtime.models.hosted.side_branches import SideBranches
from parallel_runtime.models.specs import spec_of
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import RunResult
from parallel_runtime.pool.pool import Pool
from parallel_runtime.timing import RegionTimer
from parallel_runtime.weight_delta import PRISTINE, WeightDelta, WeightDeltas

from .cases import CASES
from .gloo_group import GlooGroup, OwnTokensOnly
from .ranks import in_ranks
from .tiny import call as called
from .tiny import difference

# To make a graph takes some 10 s of a core, and minutes where others use them.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CONTROL = 1e-3  # without exchange a case must be this wrong

QWEN_21 = "Qwen-Image 2.1"  # which not every ComfyUI has
# Case -> graphs: kinds of blocks, of which some classes have several (the last block is another one); and after a
# whole call, if its blocks are given other things.
GRAPHS = {
    "MiniMax H3, references, tagged text": 1,  # how many ranges there are differs by rank and by prompt
    "Z-Image": 1,
    "Flux.1": 2,
    "HunyuanVideo, text mask": 2,
    "Qwen-Image, text mask": 1,
    "Krea 2": 1,
    "SD3.5 large": 2,
    "PixArt alpha": 1,
    "Wan t2v": 1,
    "LTX-Video": 1,
    "LTX-2, a timestep for each frame": (1, 2),  # of frames, where a call is whole
    "Kandinsky 5": 1,
    "Stable Audio 1": 1,
    QWEN_21: (1, 2),  # of functions, one is given the keys of the text where the call is whole
}
# Case -> what is said of blocks that have none.
NONE = {"Wan HuMo, reference, audio by frames": "WanAttentionBlockAudio shares tokens inside, at "}
ANIMATE2 = "Wan-Animate 2, pose"  # which not every ComfyUI has
NONE |= {
    ANIMATE2: "the model calls its blocks by forward_pose and forward_gen and ",
    "Hunyuan3D 2.1, experts, long skips": "torch's compiler can make no graph of HunYuanDiTBlock: ",
    "LTX-Video, guide at half strength": "BasicTransformerBlock attends by masks of guide frames, ",
}
QUICK = ("Z-Image", QWEN_21, "Wan HuMo, reference, audio by frames", ANIMATE2)


LONGER = {9: 13, 10: 14, 14: 18}  # text tokens, height and width of the cases' latents


def longer(value: Any) -> Any:
    """Another prompt and another size: noise in a tensor's new shape, masks with everything, numbers as they are."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(longer, value))
    if isinstance(value, dict):
        return {key: longer(each) for key, each in value.items()}
    if not isinstance(value, Tensor) or not {*value.shape} & {*LONGER}:
        return value
    shape = [LONGER.get(size, size) for size in value.shape]
    if not value.is_floating_point():
        return value.new_ones(shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


CASES_OF = {name: (graphs, "") for name, graphs in GRAPHS.items()} | {name: (None, said) for name, said in NONE.items()}
EAGER = "eager"  # what is traced, run as it is: a graph is the same, and made in a tenth of the time
RUNS = [pytest.param(name, EAGER, 2, id=name) for name in QUICK if name in CASES_OF and name in CASES]
RUNS += [
    pytest.param(name, "inductor", 2, id=f"{name}, compiled", marks=pytest.mark.full)
    for name in CASES_OF
    if name in CASES
]


@pytest.mark.parametrize(("name", "backend", "ranks"), RUNS)
@in_ranks()
def test_blocks_by_graphs_are_the_blocks_for_every_prompt_and_size(group: GlooGroup, name: str, backend: str) -> None:
    """A case by graphs, then with other lengths of text and sizes of picture, then without exchange, then whole."""
    import torch._dynamo as dynamo

    model, inputs = CASES[name]()
    plan, blocks = spec_of(type(model)), blocks_of(model)
    shared = SharedModel(model, plan, group)
    other = {key: longer(value) for key, value in copy.deepcopy(inputs).items()}
    if "transformer_options" in inspect.signature(type(model).forward).parameters:
        other["transformer_options"] = {"sigmas": torch.ones(1), "cond_or_uncond": [0], "patches": {}}
    want, want_longer = called(model, inputs), called(model, other)
    assert want.abs().max() > 0.3, "numbers that are near 0 hide an error"
    watch = Watch(RegionTimer(torch.device("cpu"), on=False), lambda: None, lambda _: None)
    run, asked, lookup = CompiledRun(blocks, Graphs(), watch, SideBranches().form), list[str](), dynamo.lookup_backend
    made = []
    with (
        mock.patch.dict(os.environ, compile_environment(os.environ)),
        mock.patch.object(dynamo, "lookup_backend", lambda named: (asked.append(named), lookup(backend))[1]),
        run.calling(),
    ):
        for given, expected in ((inputs, want), (other, want_longer), (inputs, want)):
            assert difference(called(model, given), expected) <= ROUNDING
            made.append(run.report().graphs)
        shared.group = OwnTokensOnly()
        assert difference(called(model, inputs), want) > CONTROL, "without exchange the case must be wrong"
        shared.group = None
        whole = called(model, inputs)
    report = run.report()
    assert difference(whole, called(model, inputs)) <= ROUNDING
    graphs, said = CASES_OF[name]
    assert report.reason.startswith(said) and bool(report.reason) == bool(said), report.reason
    if graphs is None:
        assert report.uncompiled_blocks > 0 or "forward alone" in report.reason
        return
    shared_graphs, of_whole = graphs if isinstance(graphs, tuple) else (graphs, graphs)
    assert (*made, report.graphs) == (shared_graphs, shared_graphs, shared_graphs, of_whole)
    assert not report.uncompiled_blocks
    assert "inductor" in asked, "no block ran by a graph"


# A module with a block that hands its options on to a helper, which it finds in one of these ways.
BLOCK = """
import functools, torch
def reads(options): return options.get("block_index")
def hands_on(options): return reads(options)
class Reads:
    def __call__(self, options): return options.get("uuids")
def closing(inner):
    def within(options): return inner(options)
    return within
{helper}
class Block(torch.nn.Module):
    def forward(self, x, transformer_options):
        return x if helper(transformer_options) else x + 1
"""
HELPERS = {
    "helper = reads": {"block_index"},
    "helper = hands_on": {"block_index"},
    "helper = functools.partial(hands_on)": {"block_index"},
    "helper = closing(reads)": {"block_index"},
    "helper = functools.lru_cache(reads)": {"block_index"},
    "helper = Reads()": TOLD,  # not known: all is left in
    "helper = torch.is_tensor": set(),
}


@pytest.mark.parametrize("helper", HELPERS)
def test_options_that_a_blocks_helper_reads_are_left_in_for_its_graph(helper: str) -> None:
    names: dict[str, Any] = {"__name__": "comfy.ldm.some.model"}
    exec(BLOCK.format(helper=helper), names)  # noqa: S102  of this file
    plan = SimpleNamespace(methods_of=lambda _: ["forward"], row_ranges={})
    assert TOLD - _kind_of(names["Block"](), plan, "blocks").unread == HELPERS[helper]  # type: ignore[arg-type]


def run(
    pool: Pool,
    spec: ModelSpec,
    plan: str,
    *,
    deltas: WeightDeltas = PRISTINE,
    size: int = 8,
    place: CallPlace | None = None,
    **options: object,
) -> RunResult:
    """A call by a plan, of a text and a video of this size."""
    made = call(1, text=size, size=(2, size, 12))
    made = replace(made, place=place, options={**made.options, **options})
    return pool.run(spec, ParallelPlan.parse(plan), [made], deltas=deltas)


def merged_lora(spec: ModelSpec, *keys: str) -> WeightDeltas:
    """A LoRA of rank 4 of these weights."""
    numbers, deltas = torch.Generator().manual_seed(3), []
    for key in keys:
        rows, columns = read_header(spec.path).tensors[key].shape
        up, down = torch.randn(rows, 4, generator=numbers), torch.randn(4, columns, generator=numbers)
        values = (up, down * columns**-0.5, 4.0, None)
        deltas.append(WeightDelta(key=key, kind="lora", strength=0.3, values=values))
    return WeightDeltas(f"lora {keys}", tuple(deltas))


@pytest.mark.full
def test_a_graph_outlives_plans_weights_that_move_and_merged_loras(pool: Pool, wan: ModelSpec) -> None:
    states: list[str] = []
    first = call(1, text=8, size=(2, 8, 12))
    first = replace(first, options={**first.options, "compiled": True, "timed": True})
    step = pool.run(wan, ParallelPlan(ulysses=2), [first], check_cancelled=lambda: states.append(pool.state))
    assert "compiling" in states
    for rank in step.ran:
        assert (rank.compiled.graphs, rank.compiled.uncompiled_blocks, rank.compiled.reason) == (1, 0, "")
        assert rank.regions["compile_s"] == pytest.approx(rank.compiled.compile_s)
    changed = merged_lora(wan, "blocks.0.self_attn.q.weight", "blocks.1.ffn.0.weight")
    for plan, deltas in (
        ("ulysses=2", PRISTINE),
        ("ulysses=2", changed),
        ("ring=2", PRISTINE),
        ("ulysses=1", PRISTINE),
        ("ulysses=2,weights=sharded", PRISTINE),
        ("ulysses=2,weights=sharded", changed),
        ("ulysses=1,weights=offloaded", PRISTINE),
        ("pipefusion=2,patches=2", PRISTINE),
    ):
        for size in (8, 14):
            first, again = (CallPlace(f"{plan} {size}{which}", "text") for which in ("", " again"))
            want = run(pool, wan, plan, deltas=deltas, size=size, place=first)
            got = run(pool, wan, plan, deltas=deltas, size=size, place=again, compiled=True)
            assert difference(got.outs[0], want.outs[0]) <= ROUNDING, plan
            assert all(rank.compiled is None for rank in want.ran)
            counts = {(rank.compiled.graphs, rank.compiled.uncompiled_blocks) for rank in got.ran}
            assert counts == {(1, 0)}, f"{plan}: {counts}"
    plain, with_lora = (run(pool, wan, "ulysses=2", deltas=each, compiled=True).outs[0] for each in (PRISTINE, changed))
    assert difference(plain, with_lora) > CONTROL, "the graph has another LoRA's weights"
    alone = run(pool, wan, "ulysses=2", compiled=True, local_attention=True).outs[0]
    assert difference(plain, alone) > CONTROL, "without exchange the call must be wrong"


@pytest.mark.full
def test_a_step_cache_that_comes_later_keeps_the_graphs(pool: Pool, wan: ModelSpec) -> None:
    told = {"place": CallPlace("cached", "text"), "compiled": True}
    before = run(pool, wan, "ulysses=2", **told)
    first, second = (run(pool, wan, "ulysses=2", step_cache=10.0, **told) for _ in range(2))
    assert torch.equal(first.outs[0], before.outs[0])
    assert [rank.cached.skipped for rank in second.ran] == [1, 1]
    assert {rank.compiled.graphs for rank in second.ran} == {rank.compiled.graphs for rank in before.ran}
    assert {rank.compiled.uncompiled_blocks for rank in first.ran} == {0}
