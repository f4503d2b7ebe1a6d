"""Files in ComfyUI's quantised formats, shared by ranks, equal the same module in one process.

Owns: the bounds and the controls for every kind of file, replicated and sharded, with a LoRA and when it is taken back.
Does not own: which kinds there are (host/quantised.py), stock ComfyUI beside them
(tools/formats.py).
"""

from pathlib import Path

import pytest
import torch
from rounding import ROUNDING
from torch import Tensor

from host.formats import allowed_by
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.parallel.attention import SequenceParallelAttention
from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.plan import BatchSlice, ParallelPlan
from parallel_runtime.worker.own_tokens import OwnTokens

from .gloo_group import GlooGroup
from .quantised_model import (
    CASES,
    LAYOUTS,
    ON_A_GPU,
    SOME,
    alone,
    by_plan,
    bytes_elsewhere,
    call,
    exchanged,
    kernels,
    loaded,
    moves,
    over_groups,
    runs,
    unrounded,
    write,
)
from .ranks import in_ranks
from .tiny import difference

# Layers of these round what they are given, to 255 values or to 15. A last digit, which another order of additions
# moves, sends a number to the other side of a step. By how much that moves the output differs by processor, so the
# bound is what one process moves by here with other exact kernels and numbers of threads; at least one such step.
ROUNDED = 1e-2
ROUND_INPUTS = ("int8", "w4a4", "mixed")
CONTROL = 0.1  # without exchange each case must be this wrong
OWN_SCALES = 2  # and so many bounds wrong, where each rank takes a scale from its own tokens
NO_LAYERS = 18_000  # bytes in fp32 of Wan's modulations, which nothing casts where it is used
# Layers of two blocks: q, k, v and the output twice, and two of the MLP; q, k and v of the image's tokens have one
# exchange together, and k and v of the text's. Where each channel is smoothed before, each layer rounds its own.
LAYERS, TOGETHER = 2 * 10, 2 * 7
FROM_ALL_TOKENS = [f"{kind}{ON_A_GPU}" for kind in ("nvfp4", "nvfp4, smoothed")]

RUNS = [
    pytest.param(
        case, ranks, id=f"{case}, {ranks} ranks", marks=() if (case in SOME and ranks == 2) else pytest.mark.full
    )
    for ranks in (2, 3)
    for case in CASES
]


@pytest.mark.parametrize(("case", "ranks"), RUNS)
@in_ranks()
def test_a_shared_file_equals_the_same_module_in_one_process(group: GlooGroup, case: str, tmp_path: str) -> None:
    spec = write(Path(tmp_path) / "model.safetensors", case)
    with kernels(case):
        model = loaded(spec, Axis("one"))
        want = runs(model, alone())
        rounds = case.startswith(ROUND_INPUTS) or case.endswith(ON_A_GPU)
        bound = allowed_by(moves(model, want["plain"]), least=ROUNDED) if rounds else ROUNDING
        assert bound < CONTROL, "one process moves so far that a wrong plan would pass"
        assert rounds or difference(want["beside"], unrounded(model)) <= ROUNDING, "a LoRA beside a weight rounds it"
        for layout in LAYOUTS:
            ring = layout == "sharded" and group.parts == 2
            judge(group, case, spec, want, bound, sharded=layout == "sharded", ring=ring)


@in_ranks(2)
def test_where_one_rank_has_no_kernel_for_a_format_none_rounds_to_it(group: GlooGroup, tmp_path: str) -> None:
    case, first = FROM_ALL_TOKENS[0], group.axis.index == 0
    spec = write(Path(tmp_path) / "model.safetensors", case)
    one, as_in_file = Axis("one"), case.removesuffix(ON_A_GPU)
    with kernels(as_in_file):
        want = call(loaded(spec, one), alone()).flatten()
    with kernels(case):
        assert difference(call(loaded(spec, one), alone()).flatten(), want) > ROUNDED, "rounding shows"
    with kernels(case if first else as_in_file):
        model = loaded(spec, one)
        both = by_plan(model, ParallelPlan(ulysses=2), [[BatchSlice(0, 0, 2)]])
        assert not first or difference(both.flatten(), want) <= ROUNDING
        assert difference(over_groups(loaded(spec, one), (0, 0)), want) <= ROUNDING


def judge(
    group: GlooGroup, case: str, spec: ModelSpec, want: dict[str, Tensor], bound: float, *, sharded: bool, ring: bool
) -> None:
    """Raises AssertionError for a file in this layout that is further from one process than `bound`."""
    everybody, one = group.axis, Axis("one")
    sequence = SequenceParallelAttention(ring=everybody if ring else one, ulysses=one if ring else everybody)
    model = loaded(spec, everybody if sharded else one)
    assert bytes_elsewhere(model, spec.path) <= NO_LAYERS, "weights are held beside the file's pages"
    found = runs(model, sequence)
    for name in ("plain", "LoRA", "beside"):
        assert difference(found[name], want[name]) <= bound, name
    assert torch.equal(found["plain"], found["again"]), "a LoRA was not taken back to the last bit"
    assert difference(found["LoRA"], found["plain"]) > CONTROL
    by_all = case in FROM_ALL_TOKENS
    if group.parts == 2 and not sharded:
        assert difference(over_groups(model, (0, 0)), want["plain"].flatten()) <= bound
        own = difference(over_groups(model, (0, 1)), want["plain"].flatten())
        assert own > OWN_SCALES * bound if by_all else own <= bound
    asks = LAYERS if by_all else 0
    assert exchanged(model, sequence) == (TOGETHER if case == FROM_ALL_TOKENS[0] else asks)
    if by_all:  # of other files no layer is watched, and no scale is exchanged
        for layer in model.module.modules():
            vars(layer).pop("forward", None) if hasattr(layer, "layout_type") else None
        assert exchanged(model, sequence) == asks, "of layers that nobody watches"
        assert difference(call(model, sequence, scales=False), want["plain"]) > OWN_SCALES * bound
    sequence.attend = OwnTokens.attend.__get__(sequence)  # type: ignore[method-assign]
    assert difference(call(model, sequence), want["plain"]) > CONTROL, "without exchange it must be wrong"
