"""ComfyUI's step caches are known by what they do, and one that does something else is not (host/try_caches.py)."""

import json
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "host" / "try_caches.py"


def test_a_cache_is_known_by_a_made_up_run_and_another_version_of_it_is_not(in_comfyui) -> None:
    """EasyCache's result of a skipped call overwrites what went in; a version that leaves it alone is known as such."""
    found = json.loads(in_comfyui(SCRIPT)[-1])
    known = {"EasyCacheHolder": True, "EasyCacheHolder: what goes in is left alone": False, "LazyCacheHolder": False}
    assert {name: told for name, told in found.items() if told is not None} == known
    assert len(found) == len(known) + 5
