"""What the rest of the runtime asks of a family whose blocks are ours: `Family`, and of one of its files `OwnModel`.

Owns the words; what a worker computes with is base.py's `Adapter`. Which families there are is registry.py's.
"""

import os
from collections.abc import Mapping
from typing import Protocol

import torch

from ..checkpoint import CheckpointHeader, TensorEntry
from ..plan import ParallelPlan
from .base import Adapter, Sizes


class StepSizes(Sizes, Protocol):
    """The sizes of a model that a step's inputs depend on."""

    @property
    def in_channels(self) -> int:
        """Numbers an image token comes with."""
        ...

    @property
    def out_channels(self) -> int:
        """Numbers an image token leaves with."""
        ...

    @property
    def context_dim(self) -> int:
        """Numbers a text token comes with."""
        ...

    @property
    def vec_dim(self) -> int:
        """Numbers of what describes the whole text."""
        ...

    @property
    def guidance(self) -> bool:
        """Whether it takes a guidance."""
        ...


class OwnModel(Protocol):
    """What is known of one file of a family whose blocks are ours. Reads headers, no weights."""

    @property
    def config(self) -> StepSizes:
        """The model's sizes."""
        ...

    @property
    def adapter(self) -> Adapter:
        """Its blocks."""
        ...

    def names(self, header: CheckpointHeader) -> dict[str, str]:
        """Where each of its weights stands in the file: our name to the file's."""
        ...

    def scales(self, header: CheckpointHeader, names: Mapping[str, str]) -> dict[str, str]:
        """Where the scale of each fp8 weight stands: our name of the weight to the file's of the scale."""
        ...

    def matrix_bytes(self, header: CheckpointHeader) -> int:
        """Bytes of a number of the file's matrices."""
        ...

    def check_plan(self, plan: ParallelPlan) -> None:
        """Raise `ValueError` when the plan cannot split this model."""
        ...

    def cast_inputs(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """A step's tensors as ComfyUI rounds them for a model that computes in `dtype`."""
        ...

    def write_sample(self, path: str | os.PathLike[str]) -> None:
        """Write a file of these sizes, of random weights."""
        ...


class Reference(Protocol):
    """One process of a model that somebody else wrote, for verify and bench."""

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The output of a step."""
        ...


class MakeReference(Protocol):
    """The class of a reference."""

    def __call__(
        self, path: str, *, dtype: torch.dtype | None = ..., device: str = ..., scale_dtype: torch.dtype = ...
    ) -> Reference:
        """The reference of a file. `scale_dtype` is what the scales of fp8 weights are rounded to."""
        ...


class Family(Protocol):
    """What is known of a family whose blocks are ours, beside any file."""

    @property
    def title(self) -> str:
        """As users know it."""
        ...

    def recognises(self, header: CheckpointHeader) -> bool:
        """Whether a file is of this family, be it damaged or in a format that is not read."""
        ...

    def weights(self, header: CheckpointHeader) -> dict[str, TensorEntry]:
        """What a file of this family has of the model itself, by the file's names; not its text encoders and VAE."""
        ...

    def read(self, header: CheckpointHeader) -> OwnModel:
        """The model in a file. Raises `ValueError` when it holds none of this family, or none that can be read."""
        ...

    def sample(self, *, heads: int = ..., head_dim: int = ..., depth: int = ..., depth_single: int = ...) -> OwnModel:
        """A small model of random weights for checks that have none."""
        ...

    def reference(self) -> MakeReference:
        """The class of its reference, whose packages are imported now."""
        ...
