"""What nodes/host/contract/stand_ins.json has to be: our nodes as ComfyUI describes them, without words and files.

`python -m tools.stand_ins` writes it (`make stand-ins`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from host.client import ComfyClient
from host.server import PACK_ROOT, ComfyServer

FILE = PACK_ROOT / "nodes" / "host" / "contract" / "stand_ins.json"
OWN_OPTIONS = ("unet_name", "sampler_name", "scheduler")  # ComfyUI's, other ones in each
KEPT = ("default", "min", "max", "step", "round", "multiline", "options", "control_after_generate")


def described(object_info: Mapping[str, Any]) -> dict[str, Any]:
    """Our nodes in what a server says of all, by id."""
    ours = {name: node for name, node in object_info.items() if node["python_module"].endswith("parallel-dit")}
    return {
        name: {
            "display_name": node["display_name"],
            "category": node["category"],
            "input": {
                kind: {each: _input(each, *given) for each, given in inputs.items()}
                for kind, inputs in node["input"].items()
                if kind in ("required", "optional")
            },
            "output": node["output"],
            "output_name": node["output_name"],
            "output_node": node["output_node"],
        }
        for name, node in sorted(ours.items())
    }


def _input(name: str, kind: object, options: Mapping[str, Any] | None = None) -> list[Any]:
    kept = {key: value for key, value in (options or {}).items() if key in KEPT and value is not None}
    if name in OWN_OPTIONS:
        kept = {"options": []}
    return [kind, kept]


def main() -> None:
    """Write the file."""
    with ComfyServer() as server:
        found = described(ComfyClient(server.url).object_info())
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
