"""One request of calls on one stage of a pipeline, as the host's loop makes them step by step.

    stage 0 | p0 | p1 | p2 |              a step begins and ends with the pipeline empty: the bubble that a whole run
    stage 1      | p0 | p1 | p2 |         in the pool (pipeline.py) does not have

The first stage reads the image from shared memory, the last writes the velocity there. Owns the order of chunks and the
keys and values that outlive a request. Which call may use them is the parent's to say (pool/kv_cache_tracker.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..models.base import Modulation
from ..models.hosted.first_block import Residuals
from ..parallel.links import Expected, Inbox, Outbox
from ..plan import BatchSlice
from ..wire.requests import CachedKeys, Step
from .forward import Forward
from .inputs import call_tensors, to_host
from .mesh import Mesh
from .stage import CondState, PartRows, Stage


@dataclass
class HeldKeys:
    """What calls of one epoch left, by slot: keys and values, of our own blocks by prefix, of ComfyUI's modules a
    `HeldRows`; or what blocks added, for a step cache."""

    epoch: int = 0
    slots: dict[tuple[int, BatchSlice], Any] = field(default_factory=dict)

    def enter(self, epoch: int) -> None:
        """Drop what is of another epoch."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.drop()

    def residuals_of(self, told: Sequence[CachedKeys], piece: BatchSlice) -> Residuals | None:
        """What a step cache keeps of a piece; None for one of a call that no other will follow."""
        self.enter(told[piece.call].epoch)
        slot = told[piece.call].slot
        return None if slot is None else self.slots.setdefault((slot, piece), Residuals())

    def drop(self) -> None:
        """Free all of them. The parent has calls that used them be of another epoch."""
        self.slots = {}


class PipelinedStep:
    """The pieces of a request on this rank. `step` is the request, `tensors` its tensors, whole."""

    def __init__(
        self, forward: Forward, mesh: Mesh, *, step: Step, tensors: Mapping[str, torch.Tensor], held: HeldKeys
    ) -> None:
        self._forward, self._tensors, self._held = forward, tensors, held
        self._options: Sequence[Mapping] = step.calls
        self._told = step.pipeline
        self._stage = stage = Stage(forward, mesh)
        batch_groups, self._pieces = step.batch_groups, step.batch_groups[mesh.batch_group]
        self._sequences = {piece: stage.sequence(self._whole(piece)) for piece in self._pieces}
        self._passes = max(
            sum(self._num_chunks(piece, mesh) for piece in batch_groups[batch_group])
            for batch_group in mesh.replica_groups
        )
        chunks = sum(len(self._chunks(piece)) for piece in self._pieces)
        self._outbox = Outbox(mesh.next_stage, depth=max(1, chunks))
        self._inbox = Inbox(
            mesh.previous_stage, expected=self._messages(), may_post=lambda _: True, device=forward.device
        )

    def run(self) -> None:
        """All pieces, one after another; returns when what was sent has been received."""
        weights, idle = self._forward.weights, self._passes
        weights.begin(self._passes)
        for piece in self._pieces:
            idle -= len(self._chunks(piece))
            self._run_piece(piece)
        for _ in range(idle):
            weights.join_gathers(self._forward.beat)
        self._outbox.drain()

    def _run_piece(self, piece: BatchSlice) -> None:
        stage, side = self._stage, self._side(piece)
        modulations: dict[str, Modulation] = {}
        for chunk in self._chunks(piece):
            there = side.chunks[chunk]
            if stage.first:
                tokens = stage.embed(there.inputs["img"], there.condition)
            else:
                tokens = self._forward.adapter.received(self._inbox.take(), there.condition)
            stage.run_blocks(tokens, side, chunk, self._options[piece.call], modulations=modulations)
            if stage.last:
                self._write(piece, chunk, self._forward.head(tokens))
            else:
                self._outbox.send(tokens.x)
                stage.end_pass()
            self._inbox.worked_on()

    def _side(self, piece: BatchSlice) -> CondState:
        """A piece's inputs by chunk; its keys and values new, or of the call before it."""
        told, sequence = self._told[piece.call], self._sequences[piece]
        self._held.enter(told.epoch)
        with self._forward.timer.region("hand_over"):
            inputs = self._forward.inputs(self._source(piece), PartRows(sequence, self._stage.part), self._whole(piece))
        with self._forward.timer.region("embed"), self._forward.weights.block("") as w:
            condition = self._forward.adapter.condition(w, inputs, text=self._stage.first)
        if told.slot is None:
            return self._stage.side(sequence, inputs, condition)
        place = (told.slot, piece)
        if not told.warm and place not in self._held.slots:
            raise RuntimeError(f"there are no keys in slot {told.slot} of epoch {told.epoch}")
        side = self._stage.side(sequence, inputs, condition, held=self._held.slots.get(place))
        self._held.slots[place] = side.held
        return side

    def _write(self, piece: BatchSlice, chunk: range, velocity: torch.Tensor) -> None:
        """This rank's rows of a chunk's velocity (B, rows, C) to the result. Waits for the device."""
        sequence, out = self._sequences[piece], self._tensors[f"{piece.call}.out"]
        shards = [sequence.shard(self._stage.part, patch) for patch in chunk]
        with self._forward.timer.region("gather"):
            runs = velocity.split([shard.image.stop - shard.image.start for shard in shards], 1)
            for shard, rows in zip(shards, runs, strict=True):
                to_host(shard.take(out[piece.start : piece.stop], stream="image", dim=1), rows)

    def _source(self, piece: BatchSlice) -> BatchSlice:
        """The rows that a piece is computed of: its own or, with option `first_row`, a negative control, the first."""
        return BatchSlice(piece.call, 0, 1) if self._options[piece.call].get("first_row") else piece

    def _whole(self, piece: BatchSlice) -> dict[str, torch.Tensor]:
        """All inputs of a piece's call; with option `first_row` those of the first call."""
        return call_tensors(self._tensors, 0 if self._options[piece.call].get("first_row") else piece.call)

    def _chunks(self, piece: BatchSlice) -> list[range]:
        return self._sequences[piece].chunks(warm=self._told[piece.call].warm)

    def _num_chunks(self, piece: BatchSlice, mesh: Mesh) -> int:
        return 1 if self._told[piece.call].warm else mesh.plan.num_patches

    def _messages(self) -> Iterator[Expected]:
        """What this stage receives: nothing at the first, else a chunk's hidden states."""
        number = 0
        for piece in self._pieces if not self._stage.first else ():
            sequence, source = self._sequences[piece], self._source(piece)
            for chunk in self._chunks(piece):
                shape = self._stage.hidden_shape(sequence, chunk, images=source.stop - source.start)
                yield Expected(piece.call, shape, self._forward.weights.dtype, after=number)
                number += 1
