"""One stage of a pipeline: this rank's blocks for chunks of conditionings, and the keys that it keeps of each.

Letters: `B` images, `S` this rank's tokens of a chunk, `C` hidden size, `E` calls.

Owns what a stage has of a conditioning and one pass of a chunk through its blocks. When which chunk comes is the
business of pipeline.py (a whole sampling run) and pipelined_step.py (one request). What attention sees is
parallel/displaced.py's.
"""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial

import torch

from ..models.base import Block, Condition, Modulation, Tokens
from ..models.stages import stage_blocks
from ..parallel.kernels import additive_mask
from ..parallel.pipefusion import PatchedSequence
from ..parallel.sequence import LocalAttention, PendingOutput
from .forward import Forward
from .mesh import Mesh


@dataclass(frozen=True)
class PartRows:
    """This rank's rows of all patches, as `Forward.inputs` asks for them."""

    sequence: PatchedSequence
    part: int

    def take(self, tensor: torch.Tensor, *, stream: str, dim: int) -> torch.Tensor:
        return self.sequence.take(tensor, part=self.part, stream=stream, dim=dim)


@dataclass
class ChunkInputs:
    """What a chunk's pass needs of one conditioning: views of what is there for the whole."""

    inputs: dict[str, torch.Tensor]
    condition: Condition
    mask: torch.Tensor | None


@dataclass
class CondState:
    """One conditioning on this stage. `held` has the keys and values, by block prefix."""

    sequence: PatchedSequence
    chunks: dict[range, ChunkInputs]
    held: dict[str, torch.Tensor]


class Stage:
    """This rank's place in the pipeline of `mesh`'s plan, with the model of `forward`."""

    def __init__(self, forward: Forward, mesh: Mesh) -> None:
        self.forward, self._plan, self._attention = forward, mesh.plan, mesh.displaced()
        self.part = self._attention.index
        self.size, self.index = mesh.plan.pipefusion, mesh.axes["pipefusion"].index
        self.blocks = stage_blocks(forward.adapter, stages=self.size, stage=self.index)
        self.first, self.last = self.index == 0, self.index == self.size - 1

    def sequence(self, whole: Mapping[str, torch.Tensor], *, longest_text: int | None = None) -> PatchedSequence:
        """The patches of a call's tokens; `longest_text` where other calls have the same patches of the image."""
        tokens = whole["txt"].shape[1], whole["img"].shape[1]
        return PatchedSequence(*tokens, self._plan.num_patches, self._attention.parts, longest_text)

    def side(
        self,
        sequence: PatchedSequence,
        inputs: Mapping[str, torch.Tensor],
        condition: Condition,
        *,
        held: dict[str, torch.Tensor] | None = None,
    ) -> CondState:
        """A conditioning's views by chunk, and the memory for its keys and values, unless it is there: `held`.

        `inputs` are this rank's, of all patches.
        """
        weights = self.forward.weights
        mask = inputs.get("mask")
        mask = None if mask is None else additive_mask(mask, weights.dtype)
        chunks = {
            chunk: ChunkInputs(
                self._image_views(inputs, sequence.image_rows(self.part, chunk)),
                _chunk_condition(condition, sequence, self.part, chunk),
                None if mask is None else self._attention.mask_rows(sequence, chunk, mask),
            )
            for chunk in (sequence.whole, *(range(patch, patch + 1) for patch in sequence.whole))
        }
        return CondState(sequence, chunks, self._new_held(sequence, inputs["img"].shape[0]) if held is None else held)

    def hidden_shape(self, sequence: PatchedSequence, chunk: range, *, images: int) -> tuple[int, int, int]:
        """(B, S, C) of what passes from stage to stage."""
        return images, sequence.lengths(chunk)[self.part], self.forward.adapter.config.hidden_size

    def embed(self, img: torch.Tensor, condition: Condition) -> Tokens:
        """The first block's tokens, of this rank's rows of the image."""
        with self.forward.timer.region("embed"), self.forward.weights.block("") as w:
            return self.forward.adapter.embed(w, img, condition)

    def run_blocks(
        self,
        tokens: Tokens,
        side: CondState,
        chunk: range,
        options: Mapping,
        *,
        modulations: MutableMapping[str, Modulation],
    ) -> None:
        """A chunk through this stage's blocks. `options` are its call's; `modulations` as `Forward.run_blocks`."""
        there = side.chunks[chunk]

        def start(block: Block, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], PendingOutput]:
            if options.get("local_attention"):
                return partial(LocalAttention().start(q, k, v, lengths=()), None)
            complete = self._attention.start_displaced(
                q, k, v, held=side.held[block.prefix], sequence=side.sequence, chunk=chunk
            )
            return partial(complete, there.mask)

        self.forward.run_blocks(
            self.blocks, tokens, there.inputs, options, start_attention=start, modulations=modulations
        )

    def end_pass(self) -> None:
        """Weights are gone through in the order of the blocks, with those outside before and after each pass."""
        with self.forward.weights.block(""):
            pass

    def _new_held(self, sequence: PatchedSequence, images: int) -> dict[str, torch.Tensor]:
        config, weights = self.forward.adapter.config, self.forward.weights
        like = torch.empty(config.head_dim, dtype=weights.dtype, device=self.forward.device)
        return {
            block.prefix: self._attention.new_buffer(sequence, like=like, batch=images, heads=config.num_heads)
            for block in self.blocks
        }

    def _image_views(self, inputs: Mapping[str, torch.Tensor], rows: slice) -> dict[str, torch.Tensor]:
        """Of each input with a row for each image token these rows, as far as it has them."""
        found = {}
        for name, tensor in inputs.items():
            split = self.forward.adapter.split_plan.get(name.partition(".")[0])
            if split is not None and split.stream == "image":
                start, stop = (min(end, tensor.shape[split.dim]) for end in (rows.start, rows.stop))
                found[name] = tensor.narrow(split.dim, start, stop - start)
        return found


def _chunk_condition(condition: Condition, sequence: PatchedSequence, part: int, chunk: range) -> Condition:
    """What of a conditioning a chunk needs: its rows of what has a row for each token."""
    rows, num_text = sequence.rows(part, chunk), sequence.num_rows(part, chunk, stream="text")
    zero_timestep = None if condition.zero_timestep is None else condition.zero_timestep[rows]
    return Condition(condition.txt[:, :num_text], condition.vec, condition.rope[:, rows], zero_timestep)
