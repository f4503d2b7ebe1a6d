"""Loads a model that ComfyUI's modules compute on a pretend device, as a rank does; prints the devices it touched.

`python touched_devices.py COMFYUI MODEL INDEX [unselected]`, with this folder and the product on the path. Touched is a
device whose memory was asked for, allocated or waited for: on a real one each of these makes a context of some hundred
MiB. `unselected` leaves out that the process chooses its device, as a control.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # ComfyUI imports it, and on the pretend device it finds less than it asks for
from pretend_cuda.device import device_index, install

from parallel_runtime.checkpoint import ComfyUI, ModelSpec
from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.worker.hosted_weights import HostedWeights

DEVICES = 8
MAKING_CONTEXTS = ("mem_get_info", "synchronize", "memory_stats")


def main(comfyui: str, model: str, index: int, *, selected: bool) -> list[int]:
    """The numbers of the devices."""
    install()
    touched: set[int] = set()

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(device: Any = None, *args: Any, **options: Any) -> Any:
            touched.add(device_index(device))
            return function(device, *args, **options)

        return call

    for name in MAKING_CONTEXTS:
        setattr(torch.cuda, name, noted(getattr(torch.cuda, name)))
    if not selected:
        torch.cuda.set_device = lambda device: None
    spec = ModelSpec.of(model, "float32", comfyui=ComfyUI(comfyui, ()))
    device = torch.device("cuda", index)
    weights = HostedWeights(spec, device=device, group=Axis("shards"), offloaded=ParallelPlan().layout.offloaded)
    weights.load(progress=lambda done, total: None, cancelled=lambda: False)
    assert {weight.device for weight in weights.module.parameters()} == {device}
    return sorted(touched | {each for each in range(DEVICES) if torch.cuda.memory_reserved(each)})


if __name__ == "__main__":
    found = main(sys.argv[1], sys.argv[2], int(sys.argv[3]), selected="unselected" not in sys.argv)
    sys.stdout.write(f"\n{json.dumps(found)}\n")
