"""A fixed part of the matrix: a graph of every kind that reaches our code in a way of its own, by plan.

Of the other kinds there is one each for the weekly run and `make test-host`; `make parity` runs all of the matrix.
"""

import pytest

from host.client import ComfyClient
from host.server import ComfyServer
from host.tiny_models import TinyModels
from tools.graphs import BY_NAME, KINDS, SAMPLERS, SCHEDULERS

from .edits import from_picture
from .graphs import of
from .runner import PLANS, VISIBLE, Bench, compared, effect, prepare

# By plan, so that the workers of one are not started over and over.
SUBSET: dict[str, tuple[str, ...]] = {
    "ulysses 2": ("ModelSamplingFlux", "fill, noise mask, cfg 2", "ScaleROPE", "attention mask, halves"),
    "ring 2": ("differential diffusion", "uxo/uno, 2 reference(s)", "StyleModelApply (Redux), multiply"),
    "cfg 2": (
        *("PerpNegGuider", "batch 2, cfg 3, unequal prompts", "XLabs, cfg 2, batch 2", "EasyCache, cfg 2"),
        "LoRA, cfg 2, reference",
    ),
    "ring 3": ("Union",),
    "cfg 2 x ulysses 2": ("ConditioningSetArea, cfg 3",),
}
# Settings, other files, and nodes that change no more than numbers of a call.
REST = (
    *("schnell", "norm keys as ComfyUI saves them", "begins with a picture", "72 x 104", "sampler dpmpp_2m_sde"),
    *("scheduler beta", "FluxDisableGuidance", "RescaleCFG", "cfg 3, unequal prompts"),
)
CELLS = [pytest.param(name, plan) for plan, names in SUBSET.items() for name in names]
CELLS += [pytest.param(name, "ring 2", marks=pytest.mark.full) for name in REST]
FIRST = [(names[0], plan) for plan, names in SUBSET.items()]  # all of them have more than settings
# Of each exchange; batch groups alone have none that could be switched off.
CONTROLS = [(name, plan) for name, plan in FIRST if plan in ("ulysses 2", "ring 2")]


@pytest.fixture(scope="module")
def bench(comfy_server: ComfyServer, tiny_models: TinyModels) -> Bench:
    return prepare(ComfyClient(comfy_server.url), tiny_models)


# What has two workers runs before the cells, the last of which have four: to go back would start two again.
@pytest.mark.parametrize(("name", "plan"), CONTROLS)
def test_without_the_exchange_no_graph_of_the_subset_passes(name: str, plan: str, bench: Bench) -> None:
    row = compared(BY_NAME[name], plan, bench.without_exchange(BY_NAME[name], plan), bench.stock(BY_NAME[name]))
    assert row.error > VISIBLE
    assert row.problems[0].startswith("relative error")
    assert len(row.problems) == 1, "the control differs in more than its exchange"


def test_a_missing_step_is_seen(bench: Bench) -> None:
    ours, other = of("", "2 steps", steps=2), of("", "3 steps", steps=3)
    row = compared(ours, "ring 2", bench.ours(ours, "ring 2"), bench.stock(other))
    assert [problem.split(":")[0] for problem in row.problems[1:]] == ["progress", "previews", "calls"]


def test_a_prompt_without_a_step_is_no_parity(bench: Bench) -> None:
    row = bench.compare(of("", "no step", from_picture("picture_a.png"), denoise=0.0), "ring 2")
    assert row.problems == ("no progress or no preview to compare",)


@pytest.mark.parametrize(("name", "plan"), CELLS)
def test_our_loader_equals_the_stock_loader(name: str, plan: str, bench: Bench) -> None:
    assert bench.compare(BY_NAME[name], plan).require_equal().calls > 0


@pytest.mark.parametrize("name", [name for name, _ in FIRST])
def test_what_the_graph_is_about_shows_in_its_latent(name: str, bench: Bench) -> None:
    assert effect(bench, BY_NAME[name]) > VISIBLE


def test_every_kind_of_graph_and_every_plan_is_there() -> None:
    assert {BY_NAME[name].kind for name in (*sum(SUBSET.values(), ()), *REST)} == set(KINDS)
    assert set(SUBSET) == set(PLANS)


def test_every_sampler_and_scheduler_of_the_host_is_in_the_matrix(bench: Bench) -> None:
    inputs = bench.client.object_info("KSampler")["KSampler"]["input"]["required"]
    for name, known in {"sampler_name": SAMPLERS, "scheduler": SCHEDULERS}.items():
        kind, *options = inputs[name]
        listed = options[0]["options"] if kind == "COMBO" else kind
        assert set(listed) <= set(known)
