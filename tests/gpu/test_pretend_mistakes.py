"""Every mutant of `make pretend-cuda` can still be made, once. Cheap, so that whoever moves code hears of it."""

from __future__ import annotations

from gpu.pretend_cuda.mutants import MUTANTS, PRODUCT, ROOT


def test_every_mutant_of_pretend_cuda_applies_once() -> None:
    files = {path.name: path for path in (ROOT / PRODUCT).rglob("*.py")}
    found = {mutant.name: files[mutant.file].read_text(encoding="utf-8").count(mutant.old) for mutant in MUTANTS}
    assert {name: count for name, count in found.items() if count != 1} == {}
