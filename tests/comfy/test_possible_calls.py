"""Before a proof: a smaller call is tried without values; a stored one is of the files that compute the class."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from models.keeper import PLAN, WIDTH, Keeper
from parallel_runtime.model_call import ModelCall
from parallel_runtime.models.hosted.calls import DEPTH, CannotTravelError, to_tree
from parallel_runtime.models.hosted.count_kept import Roomy


class OnMeta(Keeper):
    """Asks no ComfyUI for its attention."""

    attention = staticmethod(F.scaled_dot_product_attention)


@pytest.mark.parametrize(("keeps", "possible"), [(True, [True, True, False]), (False, [True, False, False])])
def test_a_class_that_keeps_something_compares_no_values_that_are_not_there(
    keeps: bool, possible: list[bool], module_of_pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ComfyUI lets it keep something before each run; the second call would be compared with the first."""
    proving: ModuleType = module_of_pack("nodes.host.proof.proving")
    monkeypatch.setattr(proving, "find_spec", lambda kind: PLAN if keeps else None)
    model = OnMeta().to("meta")
    model.memory = Roomy()
    prover = proving.Prover(model, None, SimpleNamespace(keeps_state=True), lambda shape: 1.0)
    found = []
    for numbers in (35, 35, 36):
        model.enabled = True
        x, context = torch.zeros(1, 35, WIDTH), torch.zeros(1, 9, WIDTH)
        tree, tensors = to_tree({"args": [x, context], "kwargs": {"transformer_options": {}}})
        named = {f"t{number}": tensor for number, tensor in enumerate(tensors)}
        shape = (1, numbers * WIDTH)
        call = ModelCall(tensors=named, out_shape=shape, out_dtype=torch.float32, options={"call": tree})
        found.append(prover._possible(call))
    assert found == possible


def test_only_plans_that_cut_tokens_are_proven_and_what_fails_is_refused_or_left(
    module_of_pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    proving: ModuleType = module_of_pack("nodes.host.proof.proving")
    plan_of = module_of_pack("parallel_runtime.plan").ParallelPlan.parse
    model, pooled = torch.nn.Identity(), SimpleNamespace(found_by="")
    prover, left = proving.Prover(model, None, pooled, lambda shape: 1.0), list[Any]()
    call = SimpleNamespace(options={"method": None})
    proof = proving.Proof(verdict="proven", error=0.0, control=1.0, tolerance=1.0)
    verdicts = {each: replace(proof, verdict=each) for each in ("proven", "not proven", "refused")}
    for name, value in {"_refusal": "refused", "_by_another_plan": proof}.items():
        monkeypatch.setattr(proving.Prover, name, lambda *_, value=value: value)
    monkeypatch.setattr(proving.Prover, "_go_on_without", lambda *given: left.append(given[-1]))

    def noted(
        plan: str, verdict: str, *, automatic: bool = True, found_by: str = "", looks: bool = True, whole: bool = False
    ) -> Any:
        noted: list[Any] = []
        pooled.found_by = found_by
        monkeypatch.setattr(proving.Prover, "_proof", lambda *_: verdicts[verdict])
        run = SimpleNamespace(plan=plan_of(plan), note=noted.append, decision=SimpleNamespace(automatic=automatic))
        run.whole = whole
        prover.check(run, call, lambda: None, looks=looks)
        return noted

    for plan in ("ulysses=1", "cfg=2", "data=2"):
        assert noted(plan, "refused") == [proving.WHOLE] and not left
    assert noted("ulysses=2", "refused", whole=True) == [proving.WHOLE] and not left
    assert noted("pipefusion=2", "refused") == noted("pipefusion=2,ulysses=2", "refused") == [proving.STAGED]
    for plan in ("ulysses=2", "ring=2"):
        assert noted(plan, "proven", automatic=False, found_by="a look") == [proof]
        assert noted(plan, "not proven", automatic=False) == [verdicts["not proven"]] and not left
        assert noted(plan, "refused", found_by="a look") == [proof] and not left
        assert noted(plan, "refused", found_by="a look", looks=False) == [proving.WHOLE]
        assert noted(plan, "not proven", found_by="a look") == noted(plan, "refused") == [proving.WHOLE]
        assert left == [verdicts["refused"], verdicts["not proven"], verdicts["refused"]]
        left.clear()
        for verdict, found_by in (("refused", ""), ("not proven", "a look")):
            with pytest.raises(ValueError, match="refused"):
                noted(plan, verdict, automatic=False, found_by=found_by)
    call.options["method"] = "m"
    assert noted("ring=2", "refused") == []


def test_a_refused_plan_makes_way_for_the_one_that_is_found_with_this_file(
    module_of_pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    proving: ModuleType = module_of_pack("nodes.host.proof.proving")
    proof = proving.Proof(verdict="proven", error=0.0, control=1.0, tolerance=1.0)
    refused, again = (replace(proof, verdict="refused", reason=reason) for reason in ("an error", "another error"))
    plan, taken, model = module_of_pack("parallel_runtime.plan").ParallelPlan(ring=2), list[Any](), torch.nn.Identity()
    pooled = SimpleNamespace(
        spec=SimpleNamespace(path="/m/a.safetensors"), take_plan=lambda *given, **_: taken.append(given)
    )
    prover = proving.Prover(model, SimpleNamespace(kind="5b"), pooled, lambda shape: 1.0)
    run = SimpleNamespace(plan=plan, deltas="d")
    for spec, why, proven, wanted in (
        (None, "", proof, refused),
        (None, "none fits", proof, replace(refused, reason="an error; with this file none fits")),
        ("a spec", "", proof, proof),
        ("a spec", "", again,
         replace(again, reason="an error; by the plan that was found with this file: another error")),
    ):  # fmt: skip
        found, asked = SimpleNamespace(spec=spec, why=why), list[Any]()
        looking = SimpleNamespace(instead_of=lambda *given, found=found, asked=asked: asked.append(given) or found)
        monkeypatch.setattr(proving, "LOOKING", looking)
        monkeypatch.setattr(proving.Prover, "_proof", lambda *_, proven=proven: proven)
        prover._known["a kind"] = refused
        assert prover._by_another_plan(run, None, print, refused) == wanted
        assert asked == [(model, "5b", pooled.spec, print)] and bool(prover._known) is (spec is None)
        assert taken == ([] if spec is None else [(found, plan, "d")])
        taken.clear()


FILES = {  # of a ComfyUI, and whether they compute the class `comfy.ldm.flux.model.Model`
    "comfy/ops.py": True,
    "comfy/ldm/modules/attention.py": True,
    "comfy/ldm/base.py": True,
    "comfy/ldm/flux/math.py": True,
    "comfy/ldm/common.py": True,
    "comfy/ldm/wan/model.py": False,
}
MODEL = """
import torch
import comfy.ops
from comfy.ldm.base import (
    Base,
)
class Model(Base):
    pass
"""
BASE = "import torch\nfrom .flux import math\nclass Base(torch.nn.Module):\n    pass\n"


@pytest.fixture
def small_comfyui(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a `comfy` with nothing but those files; imported in place of any other."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "comfy"}
    texts = dict.fromkeys(FILES, "") | {"comfy/ldm/base.py": BASE, "comfy/ldm/flux/model.py": MODEL}
    texts["comfy/ldm/flux/math.py"] = "def rope():\n    from ..common import pad\n    return pad\n"
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in before:
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    try:
        for name in texts:
            importlib.import_module(name.removesuffix(".py").replace("/", "."))
        yield tmp_path
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "comfy"]:
            del sys.modules[name]
        sys.modules.update(before)


def test_a_change_of_any_file_that_computes_a_class_makes_another_key_of_its_proof(
    small_comfyui: Path, module_of_pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    proving: ModuleType = module_of_pack("nodes.host.proof.proving")
    monkeypatch.setattr(proving, "spec_of", lambda kind, **_: None)
    model = sys.modules["comfy.ldm.flux.model"].Model()

    def source() -> str:
        return proving.Prover(model, None, SimpleNamespace(), lambda shape: 1.0)._source

    for name, computes in FILES.items():
        before = source()
        assert before == source()
        (small_comfyui / name).write_text(f"{(small_comfyui / name).read_text()}# changed in place\n")
        assert (source() != before) == computes, name


def test_a_set_of_blocks_travels_and_a_set_of_other_values_does_not() -> None:
    assert to_tree({"blocks": frozenset((14, 2))}) == ({"d": {"blocks": {"l": [14, 2]}}}, [])
    assert to_tree({"double", "single"})[0] == {"l": ["double", "single"]}
    with pytest.raises(CannotTravelError, match="is a set, which cannot be sent"):
        to_tree({1.5})


@pytest.mark.parametrize("deeper", [lambda each: {"a": each}, lambda each: [each], lambda each: (each,)])
def test_what_is_nested_deeper_than_any_call_does_not_travel(deeper: Any) -> None:
    value: Any = 1
    for _ in range(DEPTH):
        value = deeper(value)
    assert to_tree(value)[1] == []
    with pytest.raises(ValueError, match=f"is nested deeper than {DEPTH}, which cannot be sent"):
        to_tree(deeper(value))
