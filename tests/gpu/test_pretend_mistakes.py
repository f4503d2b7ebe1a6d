"""Every mistake of `make pretend-cuda` can still be made, once. Cheap, so that whoever moves code hears of it."""

from __future__ import annotations

from pathlib import Path

from gpu.pretend_cuda.mistakes import MISTAKES

PRODUCT = Path(__file__).resolve().parents[2] / "parallel_runtime"


def test_every_mistake_of_pretend_cuda_applies_once() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in PRODUCT.rglob("*.py")}
    found = {mistake.name: texts[mistake.file].count(mistake.old) for mistake in MISTAKES}
    assert {name: count for name, count in found.items() if count != 1} == {}
    for mistake in MISTAKES:
        compile(texts[mistake.file].replace(mistake.old, mistake.new), mistake.file, "exec")
