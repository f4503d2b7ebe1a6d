"""This engine's own loop over blocks on one rank, without a pool: what is left of its time is not the hand-over's."""

from __future__ import annotations

import torch

from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.parallel.batch_groups import BatchSlice
from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.parallel.sequence import SequenceAttention
from parallel_runtime.plan import Layout
from parallel_runtime.timing import RegionTimer
from parallel_runtime.worker.forward import Forward
from parallel_runtime.worker.inputs import RepeatedInputs
from parallel_runtime.worker.loading import open_model

from .process import Forward as Run
from .process import Place, serve

ALONE = Axis("alone")


def make_forward(place: Place) -> Run:
    """The engine's forward of the file, as a rank runs it once a request has arrived."""
    spec = ModelSpec.of(place.model, str(place.dtype).removeprefix("torch."))
    model = open_model(spec, Layout(ranks=1), rank=0, device=place.device, group=ALONE).model
    model.weights.load(progress=lambda _, __: None, cancelled=lambda: False)
    sequence, timer = SequenceAttention(ring=ALONE, ulysses=ALONE), RegionTimer(place.device, on=False)
    sent = RepeatedInputs(place.device).of_request({}, {})
    forward = Forward(model.adapter, model.weights, sequence, place.device, timer, lambda: None, sent)

    @torch.inference_mode()
    def run(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        out = torch.empty(*inputs["img"].shape[:2], model.adapter.config.out_channels)
        forward.run(BatchSlice(0, 0, out.shape[0]), {**inputs, "out": out}, {})
        return out

    return run


if __name__ == "__main__":
    place = Place.parse()
    torch.set_num_interop_threads(1)
    serve(place, make_forward(place))
