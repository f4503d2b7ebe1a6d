"""Families once beside stock ComfyUI, in a real server; `make parity-models` runs each variant under each plan.

Of a family that is not here, its files being large or another having its class, tests/models runs the class over ranks.
"""

from pathlib import Path

import pytest

from host.client import ComfyClient
from host.server import ComfyServer
from models.cases import CASES
from parity.runner import Bench, seen
from tools.known import cases as known_cases

from . import wan_animate2
from .cases import CFG, CONTROL_PLAN, PLANS, Case, cases
from .comfy_classes import detected
from .variants import BY_NAME, FAMILIES, FILES, KNOWN, NEWER, SMALL, write_families

# A plan for each family, so that every plan that exchanges tokens is there, with one prompt and with both.
SUBSET = (
    (Case(BY_NAME["wan 2.1 i2v"]), "ulysses 3"),
    (Case(BY_NAME["ltx-video t2v"]), "ring 2"),
    (Case(BY_NAME["minimax h3 references"]), "ulysses 2 x ring 2"),
    (Case(BY_NAME["ltx-2 t2v"], CFG), "cfg 2 x ulysses 2"),
    (Case(BY_NAME["flux.1 kontext"]), "ulysses 2"),
    (Case(BY_NAME["flux.2 edit"], CFG), "cfg 2 x ulysses 2, sharded"),
    (Case(BY_NAME["hunyuanvideo i2v"]), "ulysses 2, sharded"),
    (Case(BY_NAME["anima"], CFG), "ulysses 2"),  # whose text a method of the class reads before the run
    (Case(BY_NAME["triposplat"]), "ring 2"),  # of which a class reads the dtype of a weight, told sizes
)
if wan_animate2 in NEWER:
    SUBSET += ((Case(BY_NAME["wan-animate 2, pose in some steps"], CFG), "cfg 2 x ulysses 2, sharded"),)
SERVED = {case.kind for case, _ in SUBSET}
# One of each other family in a server, for the weekly run and `make test-host`.
REST = [
    (case, CONTROL_PLAN)
    for case in {case.kind: case for case in reversed(cases(FAMILIES)) if case.cfg == 1}.values()
    if case.kind not in SERVED
]


def named(pairs):
    """Parameters with ids that say what runs."""
    return [pytest.param(case, plan, id=f"{case.kind}, {case.name}, {plan}") for case, plan in pairs]


@pytest.fixture(scope="module")
def bench(hosted_server: ComfyServer) -> Bench:
    return Bench(ComfyClient(hosted_server.url), PLANS)


@pytest.fixture
def file(case: Case, family_models: Path) -> None:
    """The case's file, which may be one of those that only full tests write."""
    write_families(family_models, only=[case.variant.name])


@pytest.mark.parametrize(("case", "plan"), named(SUBSET))
def test_our_loader_equals_the_stock_loader_and_without_exchange_it_does_not(
    case: Case, plan: str, bench: Bench
) -> None:
    assert bench.compare(case, plan).require_equal().calls > 0
    control = bench.control(case, plan)
    assert seen(control), control


@pytest.mark.full
@pytest.mark.usefixtures("file")
@pytest.mark.parametrize(("case", "plan"), named(REST))
def test_a_family_of_large_files_equals_the_stock_loader(case: Case, plan: str, bench: Bench) -> None:
    bench.compare(case, plan).require_equal()


def test_every_family_and_every_plan_that_exchanges_is_in_the_subset() -> None:
    assert {case.variant.name for case, _ in SUBSET} <= set(SMALL)
    as_modules = {known.path for known in known_cases().values() if known.name in CASES}
    alone = [each.name for each in FAMILIES if each.family not in SERVED and KNOWN[each.name][1] not in as_modules]
    assert not alone, "add a case of its class to tests/models, or a plan to SUBSET"
    assert set(PLANS) - {plan for _, plan in SUBSET} == {"cfg 2"}


@pytest.mark.parametrize(
    "names", [SMALL, pytest.param([name for name in BY_NAME if name not in SMALL], marks=pytest.mark.full)]
)
def test_every_file_is_detected_as_its_class_with_exactly_its_tensors(names: list[str], family_models: Path) -> None:
    folder = write_families(family_models, only=names) / "diffusion_models"
    files = {str(folder / BY_NAME[name].file): FILES[BY_NAME[name].file] for name in names}
    files = {path: file for path, file in files.items() if Path(path).exists()}  # of classes that this ComfyUI has
    for path, found in detected(list(files)).items():
        assert found == {"class": files[path].class_path, "missing": [], "unexpected": []}
