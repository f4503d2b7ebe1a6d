"""The engine's forward pass on one rank, in the process of the test: no worker, no group, the same code."""

from collections.abc import Mapping

import torch

from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.models.flux.adapter import FluxAdapter
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.parallel.batch_groups import BatchSlice
from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.parallel.sequence import SequenceAttention
from parallel_runtime.timing import RegionTimer
from parallel_runtime.worker.forward import Forward
from parallel_runtime.worker.inputs import RequestInputs
from runtime.shard_engine import replicated

CPU = torch.device("cpu")


class OneRank:
    """The model of a file on this process's CPU, in the dtype that `spec` names."""

    def __init__(self, spec: ModelSpec) -> None:
        self.weights = replicated(spec.path, dtype=spec.dtype)
        self.adapter = FluxAdapter(FluxConfig.from_header(read_header(spec.path)))

    @torch.inference_mode()
    def __call__(self, tensors: Mapping[str, torch.Tensor], **options: object) -> torch.Tensor:
        """The velocity (B, S_img, out channels) of a step's inputs, in fp32."""
        forward = Forward(
            adapter=self.adapter,
            weights=self.weights,
            sequence=SequenceAttention(ring=Axis("ring"), ulysses=Axis("ulysses")),
            device=CPU,
            timer=RegionTimer(CPU, on=False),
            beat=lambda: None,
            sent=RequestInputs(CPU, {}),
        )
        batch, image_tokens = tensors["img"].shape[:2]
        out = torch.empty(batch, image_tokens, self.adapter.config.out_channels)
        forward.run(BatchSlice(0, 0, batch), {**tensors, "out": out}, options)
        return out
