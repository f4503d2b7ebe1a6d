"""The measure of a cold start: a process that loads a file into diffusers' model, runs it once and ends."""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file

from parallel_runtime.models.flux.reference import ReferenceModel


def main(model: str, inputs: str, threads: str) -> None:
    """One call of the file's model on a step's tensors."""
    torch.set_num_threads(int(threads))
    ReferenceModel(model)(load_file(inputs))


if __name__ == "__main__":
    main(*sys.argv[1:])
