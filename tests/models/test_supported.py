"""ComfyUI's list of models: each class of it shares its tokens by a plan that cases show, or is refused by its name.

Read from the ComfyUI under test, so a class that is new to it fails here. Does not own: parity (test_hosted_parity.py).
"""

import re

import pytest

from host.fetch import comfyui_path
from parallel_runtime.models.hosted.build import READ_DTYPES
from parallel_runtime.models.specs import SPECS, WITHOUT
from tools.class_list import DOCUMENT, section, with_section, with_share, written
from tools.known import came_with, cases, classes, is_there, number
from tools.readme_table import README, table, with_table
from tools.usage import KINDS, templates

from .cases import CASES
from .ranks import Ranks
from .supported import Found, found
from .tiny import LACKING

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def said(comfyui_ranks: Ranks) -> Found:
    """What a rank found in its ComfyUI."""
    (told,) = comfyui_ranks.run(found, ranks=1)
    return told


def test_each_class_of_the_list_has_a_plan_or_a_reason_to_have_none(said: Found) -> None:
    unknown = {name: path for name, path in said["classes"].items() if path not in {*SPECS, *WITHOUT}}
    assert not unknown, "add a plan, or a reason to models/specs/without.py"
    assert len(said["classes"]) > 90


def test_every_plan_is_shown_by_a_case_and_no_reason_is_of_a_class_that_is_not_there(said: Found) -> None:
    assert {path for path in WITHOUT if is_there(path)} <= set(said["classes"].values())
    shown = [SPECS.get(path) for path in said["cases"].values()]
    missing = [path for path, plan in SPECS.items() if is_there(path) and plan not in shown]
    assert not missing, "add a case to cases_*.py"


def test_what_is_known_of_classes_is_so_in_this_comfyui(said: Found) -> None:
    known, remedy = classes(), "python -m tools.known, then make models-list"
    assert said["classes"].items() <= {(name, each.path) for name, each in known.items()}, remedy
    version = number(said["version"])
    assert not [name for name in said["classes"] if number(known[name].since) > version], remedy
    assert not [each.name for each in known.values() if each.path in SPECS and not each.newest], remedy
    assert {each.path for each in known.values()} == {*SPECS, *WITHOUT}, "a plan or a reason is of no class"
    assert {each.name for each in cases().values()} == CASES.keys() | LACKING, remedy
    assert {(name, path) for name, path in said["cases"].items()} <= {(e.name, e.path) for e in cases().values()}
    assert came_with("0.20.1") == "0.20.1 or before"
    assert came_with("0.30.0") == "after 0.24.0, by 0.30.0"


READS = re.compile(r"\b(weight|bias|parameters\(\)\))\.dtype")
BESIDE = {"comfy.ldm.hidream_o1.model.HiDreamO1Transformer": "comfy.text_encoders.qwen35"}  # its vision tower's module


def test_classes_that_read_the_dtype_of_a_weight_are_known(said: Found) -> None:
    """What they round by it is right in a rank when that weight has the dtype of ComfyUI's loader (READ_DTYPES)."""
    reading = set()
    there = {path for path in SPECS if is_there(path)}
    for path in there:
        modules = [path.rpartition(".")[0], *([BESIDE[path]] if path in BESIDE else [])]
        texts = [(comfyui_path() / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8") for name in modules]
        if any(READS.search(text) for text in texts):
            reading.add(path)
    # in whose module the class for pixel space reads one
    assert reading - {"comfy.ldm.lumina.model.NextDiT"} <= set(READ_DTYPES)


def test_each_used_template_is_of_a_known_class_or_says_why_not() -> None:
    known = {each.path for each in classes().values()}
    rows = templates()
    assert {row.loaded_as for row in rows if f"comfy.ldm.{row.loaded_as}" not in known} == {"unknown", "none"}
    early = [row.name for row in rows if row.loaded_as == "unknown" and number(row.least) <= (0, 33, 0)]
    assert not early, "their classes can be looked up"
    assert [row.uses for row in rows] == sorted((row.uses for row in rows), reverse=True)
    assert len({row.name for row in rows}) == len(rows)
    assert {row.kind for row in rows} == set(KINDS)


def test_the_page_has_the_section_that_the_code_writes_and_the_readme_the_table_that_the_page_gives() -> None:
    text, page = section(), DOCUMENT.read_text(encoding="utf-8")
    assert written(page) == text, "make models-list"
    assert with_section(with_section(page, text + "more\n\n"), text) == page
    assert with_share(page) == page, "make models-list"
    readme, models = README.read_text(encoding="utf-8"), table(page)
    assert with_table(readme, models) == readme, "make readme-models"
    assert "SDXL" in text and "Qwen-Image" in models
    assert "shared, a plan of" in text
