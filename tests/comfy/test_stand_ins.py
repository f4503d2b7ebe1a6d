"""What stands for our nodes in a ComfyUI that cannot have them has their inputs and outputs, so workflows keep both."""

import json
from typing import Any

from tools.stand_ins import FILE, described


def test_the_stand_ins_are_our_nodes_as_comfyui_describes_them(object_info: dict[str, Any]) -> None:
    """`make stand-ins` writes the file anew."""
    found = described(object_info)
    kept = json.loads(FILE.read_text(encoding="utf-8"))
    assert kept.keys() == found.keys() and len(kept) == 11
    for name in kept:
        assert kept[name] == found[name], name
