"""Nodes for a ComfyUI that cannot have ours: they have the same ids, inputs and outputs, and say why when they run.

So workflows open, keep their values and are saved as they were. In ComfyUI's first form of nodes, which every version
knows. `stand_ins.json` has their inputs and outputs as ComfyUI describes ours; `make stand-ins` writes it.
"""

import json
from pathlib import Path
from typing import Any, NoReturn

FILE = Path(__file__).with_suffix(".json")


class StandIn:
    """What the nodes have in common; `WHY` is what they say."""

    FUNCTION = "refuse"
    WHY = TITLE = ""
    INPUTS: dict[str, Any]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        """As the node has them."""
        return {kind: {name: tuple(each) for name, each in inputs.items()} for kind, inputs in cls.INPUTS.items()}

    @classmethod
    def VALIDATE_INPUTS(cls, **_: object) -> bool:  # noqa: N802  ComfyUI's name
        """Every value will do: the node says why it does not run when it runs."""
        return True

    def refuse(self, **_: object) -> NoReturn:
        """Raises `ValueError` with the reason."""
        raise ValueError(self.WHY)


def stand_ins(why: str) -> dict[str, type[StandIn]]:
    """A class for each node, by its id."""
    return {
        name: type(
            name,
            (StandIn,),
            {
                "WHY": why,
                "TITLE": node["display_name"],
                "CATEGORY": node["category"],
                "INPUTS": node["input"],
                "RETURN_TYPES": tuple(node["output"]),
                "RETURN_NAMES": tuple(node["output_name"]),
                "OUTPUT_NODE": node["output_node"],
            },
        )
        for name, node in json.loads(FILE.read_text(encoding="utf-8")).items()
    }
