"""ComfyUI's list of models: each class of it shares its tokens by a plan that cases show, or is refused by its name.

Read from the ComfyUI under test, so a class that is new to it fails here. Does not own: parity (test_hosted_parity.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from families.class_list import DOCUMENT, section, with_section, written
from parallel_runtime.models.plans import PLANS, WITHOUT

from .supported import Found

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def said(results: Path) -> Found:
    """What the process that forked the ranks found in its ComfyUI."""
    return json.loads((results / "classes.json").read_text())


def test_each_class_of_the_list_has_a_plan_or_a_reason_to_have_none(said: Found) -> None:
    unknown = {name: each["path"] for name, each in said["classes"].items() if each["path"] not in {*PLANS, *WITHOUT}}
    assert not unknown, "add a plan, or a reason to models/plans/without.py"
    assert len(said["classes"]) > 90


def test_every_plan_is_shown_by_a_case_and_no_reason_is_of_a_class_that_is_not_there(said: Found) -> None:
    paths = {each["path"] for each in said["classes"].values()}
    assert set(WITHOUT) <= paths
    shown = [PLANS.get(path) for path in said["cases"].values()]
    assert not [path for path, plan in PLANS.items() if plan not in shown], "add a case to cases_*.py"


def test_a_class_without_a_plan_says_its_own_reason(said: Found) -> None:
    refused = {each["path"]: each["refused"] for each in said["classes"].values() if each["refused"]}
    for path, sentence in refused.items():
        reason, instead = WITHOUT[path]
        assert sentence.startswith(path.rpartition(".")[2])
        assert sentence.endswith(f": {reason}; {instead}")
    assert set(refused) == set(WITHOUT)


def test_the_page_has_the_section_that_the_code_writes(said: Found) -> None:
    text, page = section(said), DOCUMENT.read_text(encoding="utf-8")
    assert written(page) == text, "make models-list"
    assert with_section(with_section(page, text + "more\n\n"), text) == page
    assert "SDXL" in text
    assert "shared, a plan of" in text
