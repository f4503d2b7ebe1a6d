"""A node at which a prompt stays until a test lets it go on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import comfy.model_management
from comfy_api.latest import io

CATEGORY = "tests"
LOOK_S = 0.02


class HoldLatent(io.ComfyNode):
    """The latent, once a file is there; cancelled as any node."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs, outputs = [io.Latent.Input("latent"), io.String.Input("gate")], [io.Latent.Output()]
        return io.Schema(node_id="HoldLatent", category=CATEGORY, inputs=inputs, outputs=outputs)

    @classmethod
    def execute(cls, latent: Any, gate: str) -> io.NodeOutput:
        while not Path(gate).exists():
            comfy.model_management.throw_exception_if_processing_interrupted()
            time.sleep(LOOK_S)
        return io.NodeOutput(latent)
