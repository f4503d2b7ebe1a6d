"""What graphs of blocks have to get right, chapter by chapter, on a pool whose graphs are tapes.

Each asks the same ranks for the same calls with and without graphs. The model is a tiny Wan whose blocks are given the
length of the pictures' part of the context as a plain number. Owns the chapters. Whose ranks they are put to, and what
is spoilt in them, is the caller's.
"""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from host.hosted_runs import euler, make_run, with_options
from host.tiny_hosted import BLOCKS, CHANNELS, CLASS, TEXT_DIM, spec_of, write_tiny
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.devices import Device
from parallel_runtime.model_call import ModelCall
from parallel_runtime.models.hosted.calls import travelling
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import RunResult, WorkerLoopResult
from parallel_runtime.proof import relative_error
from parallel_runtime.weight_delta import PRISTINE, WeightDelta, WeightDeltas

PICTURE_DIM, GIVEN_CHANNELS = 1280, 36  # of ComfyUI's class and of its kind
SAME = 1e-6  # one kernel may take another path where tensors lie otherwise
WEIGHT = "blocks.1.ffn.0.weight"


class Asked(Protocol):
    """What is asked of a `Pool`; a pretend one is told settings, too."""

    devices: tuple[Device, ...]
    run: Callable[..., RunResult]
    sample: Callable[..., WorkerLoopResult]
    give_back: Callable[..., None]
    exchange_pattern: Callable[[ParallelPlan], list[int]]


@functools.cache
def model(kind: str = "i2v") -> ModelSpec:
    """Written once a process, in a folder that ends with it."""
    folder = tempfile.TemporaryDirectory(prefix="graphs-")
    sizes = {"model_type": kind, "in_dim": GIVEN_CHANNELS if kind == "i2v" else CHANNELS}
    spec = spec_of(write_tiny(Path(folder.name) / f"{kind}.safetensors", **sizes))
    FOLDERS.append(folder)
    return spec


FOLDERS: list[tempfile.TemporaryDirectory] = []


def call(
    step: int = 0,
    *,
    text: int = 7,
    pictures: int = 5,
    size: tuple[int, int, int] = (2, 8, 12),
    more: int = 0,
    options: dict[str, object] | None = None,
) -> ModelCall:
    """A call of one image: tokens of the text, of the `pictures`, of the latent, and `more` of another latent."""
    numbers = torch.Generator().manual_seed(step)
    shapes = ((GIVEN_CHANNELS, *size), (text, TEXT_DIM), (pictures, PICTURE_DIM), (GIVEN_CHANNELS, 1, 2, 2))
    x, context, seen, other = (torch.randn(1, *shape, generator=numbers) for shape in shapes)
    given = [x, torch.full((1,), 900.0 - step), context]
    named: dict[str, Any] = {"clip_fea": seen, "transformer_options": {}}
    if more:
        named["context_latents"] = [other] * more
    tensors, told = travelling(CLASS, given, named, batched=[*given, seen, other])
    shape = (1, x[0, :CHANNELS].numel())
    return ModelCall(tensors=tensors, out_shape=shape, out_dtype=torch.float32, options={**told, **(options or {})})


def compared(
    pool: Asked,
    plan: ParallelPlan,
    *,
    replayed: bool | None = None,
    deltas: WeightDeltas = PRISTINE,
    refused: str = "",
    graphs_first: bool = False,
    **told: Any,
) -> str:
    """What is wrong with one call by graphs: its numbers, what it exchanged, how many blocks `replayed`, all or none,
    or what is said where graphs are `refused`. `graphs_first`: the call without comes after it."""
    asked = call(**told)
    by_graphs = ModelCall(**{**vars(asked), "options": {**asked.options, "graphs": True}})
    both = [by_graphs, asked] if graphs_first else [asked, by_graphs]
    results = [pool.run(model(), plan, [each], deltas=deltas) for each in both]
    found, plain = results if graphs_first else results[::-1]
    error = relative_error(found.outs[0], plain.outs[0])
    said = f"{told}: "
    if not error <= SAME:
        return f"{said}differs by {error:.1e} from blocks without graphs"
    if refused and not all(each.compiled is not None and refused in each.compiled.reason for each in found.ran):
        return f"{said}blocks run by graphs, which are to be refused: {refused}"
    if replayed is None:
        return ""
    for before, now in zip(plain.ran, found.ran, strict=True):
        assert now.compiled is not None
        if not now.pieces:  # a batch group without work
            continue
        if now.compiled.uncompiled_blocks != (0 if replayed else BLOCKS):
            return f"{said}{now.compiled.uncompiled_blocks} of {BLOCKS} blocks ran as they are ({now.compiled.reason})"
        if (before.sent_bytes, before.collectives) != (now.sent_bytes, now.collectives):
            return f"{said}{now.sent_bytes} bytes in {now.collectives} exchanges, without graphs {before}"
    return ""


def begun(chapter: Callable[[Asked, ParallelPlan], str]) -> Callable[[Asked, ParallelPlan], str]:
    """The chapter on ranks that have no graphs yet."""

    @functools.wraps(chapter)
    def begins(pool: Asked, plan: ParallelPlan) -> str:
        pool.give_back(pool.devices)
        return chapter(pool, plan)

    return begins


def several(pool: Asked, plan: ParallelPlan, *, first: int = 0, **told: Any) -> str:
    """Calls of one form in four steps: seen, recorded, and replayed twice. The first thing that is wrong."""
    for step in range(4):
        replayed = {0: False, 1: None}.get(step, True)  # ranks agree while they record
        if said := compared(pool, plan, step=first + step, replayed=replayed, **told):
            return said
    return ""


def replays(pool: Asked, plan: ParallelPlan) -> str:
    """Steps of one conditioning."""
    return several(pool, plan)


def constants(pool: Asked, plan: ParallelPlan) -> str:
    """As many tokens of context, of which other ones are of pictures."""
    return several(pool, plan) or several(pool, plan, first=9, text=8, pictures=4)


def lengths(pool: Asked, plan: ParallelPlan) -> str:
    """One token more, which is another rank's: what the first is given looks the same."""
    return several(pool, plan) or several(pool, plan, first=9, more=1)


def alike(pool: Asked, plan: ParallelPlan) -> str:
    """Two arguments of one shape: a rank's tokens and the context."""
    return several(pool, plan, size=(1, 8, 6 * plan.ulysses))


def weights(pool: Asked, plan: ParallelPlan) -> str:
    """Weights that change, without graphs meanwhile, and are as they were again."""
    numbers = torch.Generator().manual_seed(1)
    width = 144
    diff = 0.05 * torch.randn(2 * width, width, generator=numbers)
    delta = WeightDelta(key=WEIGHT, kind="diff", strength=1.0, values=(diff,))
    changed = WeightDeltas("other weights", (delta,))
    said = several(pool, plan)
    for step in (4, 5, 6):
        said = said or compared(pool, plan, step=step, deltas=changed, refused="the weights are changed")
    return said or several(pool, plan, first=7)


def control(pool: Asked, plan: ParallelPlan) -> str:
    """A proof's control: the same ranks and lengths, and attention that exchanges nothing."""
    local: dict[str, object] = {"local_attention": True}
    return several(pool, plan) or compared(pool, plan, step=4, options=local) or several(pool, plan, first=5)


def loop(pool: Asked, plan: ParallelPlan) -> str:
    """The sampler's loop in the ranks, two texts of other lengths, two images."""
    run = make_run(batch=2, texts=(7, 12), recurrence=euler(5))
    outs = []
    for asked in (run, with_options(run, graphs=True)):
        result = pool.sample(model("t2v"), plan, asked, on_step=lambda *_: None)
        outs.append(result.out)
    ran = [rank.ran.compiled for rank in result.ranks if rank.ran is not None]
    if not all(each.graphs == 2 * BLOCKS and each.uncompiled_blocks == 2 * BLOCKS for each in ran):
        return f"{ran}, where each block is to be recorded for two texts"
    error = relative_error(outs[1], outs[0])
    return "" if error <= SAME else f"differs by {error:.1e} from blocks without graphs"


def given_back(pool: Asked, plan: ParallelPlan) -> str:
    """The first rank's device is wanted by others: all ranks begin anew."""
    for first in (0, 9):
        if said := several(pool, plan, first=first):
            return said
        pool.give_back(pool.devices[:1])
    return ""


def stay(pool: Asked, plan: ParallelPlan) -> str:
    """A run has ended, and its graphs may stay: the next replays at once. Behind one without they have gone."""
    said = several(pool, plan)
    pool.give_back(pool.devices, graphs=True)
    said = said or compared(pool, plan, step=8, replayed=True, graphs_first=True)
    pool.give_back([], graphs=True)  # of ComfyUI's GPU, where no rank is
    said = said or several(pool, plan, first=9)
    for text in range(8, 12):  # with the length before, more than are kept
        said = said or compared(pool, plan, step=9, text=text, replayed=False)
    pool.give_back(pool.devices, graphs=True)
    return said or compared(pool, plan, step=9, text=11, replayed=False, graphs_first=True)


def groups_end(pool: Asked, plan: ParallelPlan) -> str:
    """Plans of other groups come, until that of three ranks, which graphs exchange over, has ended."""
    plan = ParallelPlan(ulysses=3)
    if said := several(pool, plan):
        return said
    for other in OTHERS:
        pool.exchange_pattern(ParallelPlan.parse(other))
    return several(pool, plan, first=9)


def one_cannot(pool: Asked, plan: ParallelPlan) -> str:
    """The second rank can record nothing: none replays."""
    if said := compared(pool, plan):  # ranks have started, as they were told to before
        return said
    pool.tell({"records_nothing": 1})  # type: ignore[attr-defined]  # pretend_cuda/pool.py
    pool.give_back(pool.devices)
    for step in range(4):
        if said := compared(pool, plan, step=step, replayed=None if step == 1 else False):
            return said
    return ""


OTHERS = (
    *("ulysses=2,ring=2", "cfg=2,ulysses=2", "pipefusion=4", "pipefusion=2,ulysses=2", "ring=2", "pipefusion=3"),
    *("ulysses=2,ring=2,weights=sharded", "pipefusion=2,ring=2", "data=2,ulysses=2,weights=sharded", "cfg=3"),
)
CHAPTERS: dict[str, Callable[..., str]] = {
    each.__name__: begun(each)
    for each in (replays, constants, lengths, alike, weights, control, loop, given_back, stay, groups_end, one_cannot)
}
