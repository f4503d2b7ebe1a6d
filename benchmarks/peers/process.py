"""One rank of a peer, as a process: it joins its group, then runs the model once for every line it is sent.

Owns the command line, the group and the clock. Does not own a peer: `diffusers_peer.py` and `xfuser_peer.py` do.

Lines in: the number of threads to run with. Lines out: `ready`, then the seconds of each run. A run begins behind a
barrier and ends when rank 0 holds the whole output and its device has finished.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from parallel_runtime.models.flux.reference import ReferenceModel

Forward = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one rank stands, and what it is given."""

    rank: int
    ulysses: int
    ring: int
    device: torch.device
    dtype: torch.dtype
    model: str  # a file under the original names
    inputs: str  # a step's tensors, named as the engine names them
    output: str  # where rank 0 leaves its last output
    rendezvous: str
    answers: int  # a descriptor: libraries print to stdout

    @property
    def ranks(self) -> int:
        """How many share the sequence."""
        return self.ulysses * self.ring

    def oracle(self) -> ReferenceModel:
        """The unmodified diffusers model of the file."""
        return ReferenceModel(self.model, dtype=self.dtype, device=str(self.device))

    def join(self) -> None:
        """Make the default group, if there is anybody to join."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.ranks > 1:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            store = dist.FileStore(self.rendezvous, self.ranks)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.ranks)

    @classmethod
    def parse(cls) -> Place:
        """From the command line that `ranks.py` writes."""
        parser = argparse.ArgumentParser(description="One rank of a peer; started by `python -m benchmarks.peers`.")
        for name in ("rank", "ulysses", "ring", "answers"):
            parser.add_argument(f"--{name}", type=int, required=True)
        for name in ("model", "inputs", "output", "rendezvous"):
            parser.add_argument(f"--{name}", required=True)
        parser.add_argument("--device", type=torch.device, required=True)
        parser.add_argument("--dtype", type=lambda name: getattr(torch, name), required=True)
        return cls(**vars(parser.parse_args()))


def serve(place: Place, forward: Forward) -> None:
    """Answer until the lines end."""
    tensors = {name: tensor.to(place.device) for name, tensor in load_file(place.inputs).items()}
    answers = os.fdopen(place.answers, "w", buffering=1)
    answers.write("ready\n")
    out = None
    for line in sys.stdin:
        torch.set_num_threads(int(line))
        if place.ranks > 1:
            dist.barrier()
        began = time.perf_counter()
        out = forward(tensors)
        if place.device.type == "cuda":
            torch.cuda.synchronize()
        answers.write(f"{time.perf_counter() - began}\n")
    if place.rank == 0 and out is not None:
        save_file({"out": out.float().cpu().contiguous()}, place.output)
    if place.ranks > 1:
        with suppress(RuntimeError):  # the other rank may have left already
            dist.destroy_process_group()


def as_diffusers(inputs: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A step's tensors under the names of diffusers' `FluxTransformer2DModel.forward`."""
    return {
        "hidden_states": inputs["img"].to(dtype),
        "encoder_hidden_states": inputs["txt"].to(dtype),
        "pooled_projections": inputs["y"].to(dtype),
        "timestep": inputs["timesteps"],
        "guidance": inputs["guidance"],
        "img_ids": inputs["img_ids"],
        "txt_ids": inputs["txt_ids"],
    }
