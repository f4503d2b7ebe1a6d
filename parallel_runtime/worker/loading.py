"""From a file and a layout to a model on one rank, nothing read of its weights yet.

Owns the choice of the class of weights and the reading of the header. When it is loaded, and what must go for it, is
the engine's to say.
"""

from dataclasses import dataclass

import torch

from ..checkpoint import HOSTED, ModelSpec, read_header
from ..models.base import Adapter
from ..models.registry import read_own
from ..models.stages import stage_blocks, stage_weights
from ..parallel.collectives import Axis
from ..plan import Layout
from ..weights.changes import WeightChanges
from ..weights.mapped_file import MappedFile
from ..weights.model_file import ModelFile
from ..weights.model_weights import (
    ModelWeights,
    ReplicatedWeights,
    compute_dtype,
    weight_bytes,
)
from ..weights.sharded import ShardedWeights
from .hosted import OpenedHosted, open_hosted


@dataclass(frozen=True)
class LoadedModel:
    """The functions of a model, this rank's weights, and the ranks that hold the others."""

    adapter: Adapter
    weights: ModelWeights
    group: Axis
    changes: WeightChanges


@dataclass(frozen=True)
class OpenedModel:
    """A model whose weights are still to be loaded, and the bytes on the device that they will need."""

    model: LoadedModel
    needed_bytes: int


def open_model(
    spec: ModelSpec, layout: Layout, *, rank: int, device: torch.device, group: Axis
) -> OpenedModel | OpenedHosted:
    """The model in that layout. Raises `ValueError` for a file that changed or cannot be used."""
    spec.refuse_changed()
    if spec.adapter == HOSTED:
        return open_hosted(spec, layout, device=device, group=group)
    header = read_header(spec.path)
    own = read_own(header)
    adapter, whole = own.adapter, own.names(header)
    dtype = compute_dtype(header, whole, spec.dtype)  # the same on every rank, whatever it holds
    stage = layout.stage_of(rank)
    held = stage_weights(adapter, whole, stages=layout.stages, stage=stage)
    names = {name: there for name, there in whole.items() if name in held}
    file = ModelFile(
        header,
        file=MappedFile(spec),
        names=names,
        scales=own.scales(header, names),
        prefixes=tuple(block.prefix for block in stage_blocks(adapter, stages=layout.stages, stage=stage)),
        elsewhere=whole.keys() - held,
        dtype=dtype,
        device=device,
    )
    weights: ModelWeights
    if layout.shards == 1 and not layout.offloaded:
        weights = ReplicatedWeights(file, device=device)
        needed = weight_bytes(header, names, dtype)
    else:
        weights = ShardedWeights(file, device=device, group=group, offloaded=layout.offloaded)
        needed = weights.needed_bytes
    return OpenedModel(LoadedModel(adapter, weights, group, WeightChanges(weights)), needed)
