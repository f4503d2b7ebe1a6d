"""Families once beside stock ComfyUI, in a real server; `make parity-models` runs each variant under each plan.

Of a family that is not here, tests/models runs the class over 2 and 3 ranks (`AS_MODULES`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from host.client import ComfyClient
from host.server import ComfyServer
from models.cases import CASES
from parity.runner import Bench, seen

from . import qwen21, wan_animate2
from .cases import CFG, CONTROL_PLAN, PLANS, Case, cases
from .comfy_classes import detected
from .variants import BY_NAME, FAMILIES, FILES, NEWER, SMALL, write_families

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
# Families whose files are large, or whose class another family has: cases of tests/models, which take less time.
AS_MODULES = {
    "Qwen-Image": ["Qwen-Image, text mask", "Qwen-Image-Edit, two references"],
    "Chroma": ["Chroma"],
    "Lumina 2": ["Lumina 2, 2 groups of heads"],
    "Z-Image": ["Z-Image", "Z-Image Omni, reference and what vision sees"],
    "Krea 2": ["Krea 2, reference at timestep zero"],
    "SD3.5": ["SD3.5 medium, ControlNet", "SD3.5 large"],
    "PixArt": ["PixArt alpha"],
    "HunyuanDiT": ["HunyuanDiT, long skips"],
    "Lens": ["Lens, text mask, ControlNet"],
    "Ideogram 4": ["Ideogram 4, text mask", "Ideogram 4, without text"],
    "JoyImage": ["JoyImage, two references"],
    "Kandinsky 5": ["Kandinsky 5"],
    "Ernie-Image": ["Ernie-Image"],
    "Boogu": ["Boogu, references"],
    "Mage-Flow": ["Mage-Flow, reference, text mask, ControlNet"],
    "PixelDiT": ["PixelDiT"],
    "PiD": ["PiD"],
    "Z-Image in pixels": ["Z-Image in pixel space"],
    "Chroma Radiance": ["Chroma Radiance, mask, ControlNet"],
    "CogVideoX": ["CogVideoX 1.5", "CogVideoX 1.5 i2v, two frames a token"],
    "HiDream-O1": ["HiDream-O1", "HiDream-O1, two references"],
    "Hunyuan3D": ["Hunyuan3D 2", "Hunyuan3D 2.1, experts, long skips"],
}
if qwen21 in NEWER:
    AS_MODULES[qwen21.FAMILY] = ["Qwen-Image 2.1", "Qwen-Image 2.1, 2 references in the text"]
# One of each such family in a server, for the weekly run and `make test-host`.
REST = [
    (case, CONTROL_PLAN)
    for case in {case.kind: case for case in reversed(cases(FAMILIES)) if case.cfg == 1}.values()
    if case.kind in AS_MODULES
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
    served = {case.kind for case, _ in SUBSET}
    assert {case.variant.name for case, _ in SUBSET} <= set(SMALL)
    assert served.isdisjoint(AS_MODULES)
    assert served | set(AS_MODULES) == {variant.family for variant in FAMILIES}
    assert {name for names in AS_MODULES.values() for name in names} <= set(CASES)
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
