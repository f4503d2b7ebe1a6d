"""One stage of a pipeline: this rank's blocks for one patch after another, a whole sampling run long.

Letters: `B` images of this rank's lane, `S` this rank's tokens of a chunk, `C` hidden size, `N` stages, `M` patches.

                      call 1                      call 2
    stage 0 | whole         | p0 | p1 | p2 | p0 | p1 | p2 | p0 ..      the first `warmup_steps` steps go through whole,
    stage 1 |       | whole      | p0 | p1 | p2 | p0 | p1 | p2 ..      one stage after another

Source: PipeFusion (arXiv 2405.14430, section 4). The last stage owns the latent's rows and sends each patch's next X to
the first stage as soon as it has it, so patches of the next call start while others of this one are under way, and no
stage waits between steps. Ranks with the same place inside their stages talk to each other.

Every rank makes a call's messages only when the call's step has leave to start, which all ranks see alike: so a
cancelled run leaves nothing in flight. Owns the schedule. What attention sees is strategies/displaced.py's.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ..adapters.flux import Block, Condition, Tokens
from ..program import Program
from ..strategies.kernels import additive_mask, attention
from ..strategies.links import Expected, Inbox, Outbox
from ..strategies.pipefusion import PatchedSequence
from .forward import Forward
from .latent import LatentRows, Share, call_tensors
from .mesh import Mesh
from .prepared import Prepared, prepare
from .resident import Gate, step_starts
from .stages import stage_blocks


@dataclass(frozen=True)
class PartRows:
    """This rank's rows of all patches, as `Forward.inputs` asks for them."""

    sequence: PatchedSequence
    part: int

    def take(self, tensor: torch.Tensor, *, stream: str, dim: int) -> torch.Tensor:
        """As `PatchedSequence.take`."""
        return self.sequence.take(tensor, part=self.part, stream=stream, dim=dim)


@dataclass
class ChunkInputs:
    """What a chunk's pass needs of one conditioning: views of what is there for the whole."""

    inputs: dict[str, torch.Tensor]
    condition: Condition  # with vec (E, B, ..., C)
    mask: torch.Tensor | None


@dataclass
class Side:
    """One conditioning on this stage."""

    sequence: PatchedSequence
    ready: Prepared
    chunks: dict[range, ChunkInputs]
    held: dict[str, torch.Tensor] = field(default_factory=dict)  # keys and values by block prefix


class PipelinedCalls:
    """The calls of a run on one stage of `mesh`'s plan. `tensors` are the request's, whole."""

    def __init__(
        self,
        forward: Forward,
        program: Program,
        share: Share,
        tensors: Mapping[str, torch.Tensor],
        *,
        mesh: Mesh,
        gate: Gate,
        options: Sequence[Mapping],
        cfg: float,
        passes_a_chunk: int,
    ) -> None:
        """`options` of the conditionings; `passes_a_chunk`: those of the busiest lane that shares our weights."""
        self._forward, self._program, self._share, self._tensors = forward, program, share, tensors
        self._options, self._gate, self._passes_a_chunk = options, gate, passes_a_chunk
        self._plan, self._attention = mesh.plan, mesh.displaced()
        self._part, self._starts = self._attention.index, step_starts(program)
        stages, stage = mesh.plan.pipefusion, mesh["pipefusion"].index
        self._blocks = stage_blocks(forward.adapter, stages=stages, stage=stage)
        self._first, self._last = stage == 0, stage == stages - 1
        self._sequences = {cond: self._sequence(cond) for cond in share.conds}
        self._sides: dict[int, Side] = {}
        self._image = self._sequence(0)
        self._patches = [self._image.shard(self._part, patch) for patch in self._image.whole]
        self._latent_rows = [len(shard.take(tensors["given.0"][0], stream="image", dim=0)) for shard in self._patches]
        self._outbox = Outbox(
            mesh.back_axis if self._last else mesh["pipefusion"],
            to=(stage + 1) % stages,
            depth=self._image.num_patches * max(1, len(share.conds)),
        )
        self._inbox = Inbox(
            mesh.back_axis if self._first else mesh["pipefusion"],
            source=(stage - 1) % stages,
            expected=self._messages(),
            may_post=self._sure,
            device=forward.device,
        )
        self._rows = [
            LatentRows(program, share, tensors, shard, device=forward.device, cfg=cfg, cfg_axis=mesh["cfg"])
            for shard in (self._patches if self._last else ())
        ]
        self._waiting: deque[tuple[int, torch.Tensor]] = deque()  # X that the first stage may not need any more

    @property
    def passes(self) -> int:
        """How often the run goes through the stage's weights."""
        return 1 + self._passes_a_chunk * sum(len(self._chunks(call)) for call in range(self._program.num_calls))

    def prepare(self) -> None:
        """As `Calls.prepare`."""
        ready = prepare(
            self._forward,
            self._program,
            self._share,
            self._tensors,
            rows={cond: PartRows(sequence, self._part) for cond, sequence in self._sequences.items()},
            blocks=self._blocks,
            text=self._first,
        )
        for cond, sequence in self._sequences.items():
            self._sides[cond] = self._side(sequence, ready[cond])
        if self._share.conds:
            self._end_pass()

    def run(self, call: int) -> None:
        """As `Calls.run`."""
        if self._last and call == 0:
            self._enter(0, self._image.whole)
        self._send_back()
        for chunk in self._chunks(call):
            self._run_chunk(call, chunk)

    def finish(self) -> None:
        """As `Calls.finish`."""
        for rows in self._rows:
            rows.finish()

    def close(self) -> None:
        """As `Calls.close`: what was sent has been received."""
        self._outbox.drain()

    def _run_chunk(self, call: int, chunk: range) -> None:
        """A chunk of all of this lane's conditionings through this stage's blocks."""
        velocities = []
        x = self._inbox.take() if self._first and self._share.conds else None
        for cond in self._share.conds:
            side = self._sides[cond]
            there = side.chunks[chunk]
            condition = replace(there.condition, vec=there.condition.vec[call])
            if x is None:
                tokens = self._forward.adapter.received(self._inbox.take(), condition)
            else:
                tokens = self._embedded(x, there.inputs["img"], condition)
            self._through(tokens, call=call, chunk=chunk, cond=cond)
            if self._last:
                velocities.append(self._forward.head(tokens))
            else:
                self._outbox.send(tokens.x)
                self._end_pass()
        for _ in range(self._passes_a_chunk - len(self._share.conds)):
            self._forward.weights.idle_pass(self._forward.beat)
        if self._last:
            self._leave(call, chunk, velocities)

    def _end_pass(self) -> None:
        """Weights are gone through in the order of the file's blocks, with those outside before and after each pass."""
        with self._forward.weights.block(""):
            pass

    def _embedded(self, x: torch.Tensor, img: torch.Tensor, condition: Condition) -> Tokens:
        """The first block's tokens: the latent's rows x (B, rows, C) come before all others of the image."""
        rows, width = x.shape[1:]
        img[:, :rows, :width] = x
        with self._forward.timer.region("embed"), self._forward.weights.block("") as w:
            return self._forward.adapter.embed(w, img, condition)

    def _through(self, tokens: Tokens, *, call: int, chunk: range, cond: int) -> None:
        side, local = self._sides[cond], self._options[cond].get("local_attention")
        there = side.chunks[chunk]

        def begin(block: Block, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
            if local:
                return partial(attention, q, k, v)
            held, sequence = side.held[block.prefix], side.sequence
            return partial(
                self._attention.begin_displaced(q, k, v, held=held, sequence=sequence, chunk=chunk), there.mask
            )

        modulations = side.ready.modulations_of(call)
        self._forward.through(
            self._blocks, tokens, there.inputs, self._options[cond], begin=begin, modulations=modulations
        )

    def _leave(self, call: int, chunk: range, velocities: Sequence[torch.Tensor]) -> None:
        """Update the latent's rows of a chunk, and have those of the next call on their way."""
        before = self._image.image_rows(self._part, chunk).start
        for patch in chunk:
            start = self._image.image_rows(self._part, range(patch, patch + 1)).start - before
            mine = [rows[:, start : start + self._latent_rows[patch]].float() for rows in velocities]
            self._rows[patch].leave(call, mine)
        if call + 1 < self._program.num_calls:
            self._enter(call + 1, chunk)
        self._send_back()

    def _enter(self, call: int, done: range) -> None:
        """X of a call, for those of its chunks whose patches are all done with the call before."""
        for chunk in self._chunks(call):
            if done.start <= chunk.start and chunk.stop <= done.stop:
                x = torch.cat([self._rows[patch].enter(call) for patch in chunk], 1)
                self._waiting.append((call, x))

    def _send_back(self) -> None:
        """Send what the first stage is sure to need. The rest waits for its step's leave to start."""
        while self._waiting and self._sure(self._waiting[0][0]):
            _, x = self._waiting.popleft()
            if self._share.conds:
                self._outbox.send(x)

    def _sure(self, call: int) -> bool:
        """Whether every rank will run the call, as far as is known now; asked of this call and the next."""
        return call not in self._starts or self._gate.open(self._starts[call])

    def _chunks(self, call: int) -> list[range]:
        """What of the image goes through the stages at once in a call: all of it in a step of the warm-up."""
        step = sum(end < call for end in self._program.step_ends)
        whole = self._image.whole
        return [whole] if step < self._plan.warmup_steps else [range(patch, patch + 1) for patch in whole]

    def _messages(self) -> Iterator[Expected]:
        """What this stage receives: X of a chunk at the first, else a chunk of a conditioning's hidden states."""
        images, channels = self._share.stop - self._share.start, self._tensors["given.0"].shape[2]
        for call in range(self._program.num_calls):
            for chunk in self._chunks(call):
                if self._first:
                    rows = sum(self._latent_rows[chunk.start : chunk.stop])
                    yield Expected(call, (images, rows, channels), torch.float32)
                    continue
                for cond in self._share.conds:
                    rows = self._sequences[cond].lengths(chunk)[self._part]
                    hidden = self._forward.adapter.config.hidden_size
                    yield Expected(call, (images, rows, hidden), self._forward.weights.dtype)

    def _sequence(self, cond: int) -> PatchedSequence:
        whole = call_tensors(self._tensors, cond)
        return PatchedSequence(
            whole["txt"].shape[1], whole["img"].shape[1], self._plan.num_patches, self._attention.parts
        )

    def _side(self, sequence: PatchedSequence, ready: Prepared) -> Side:
        """A conditioning's views by chunk, and the memory for its keys and values."""
        config, weights = self._forward.adapter.config, self._forward.weights
        like = torch.empty(config.head_dim, dtype=weights.dtype, device=self._forward.device)
        mask = ready.inputs.get("mask")
        mask = None if mask is None else additive_mask(mask, weights.dtype)
        chunks = {
            chunk: ChunkInputs(
                self._image_views(ready.inputs, sequence.image_rows(self._part, chunk)),
                _chunk_condition(ready.condition, sequence, self._part, chunk),
                None if mask is None else self._attention.mask_rows(sequence, chunk, mask),
            )
            for chunk in (sequence.whole, *(range(patch, patch + 1) for patch in sequence.whole))
        }
        batch = self._share.stop - self._share.start
        held = {
            block.prefix: self._attention.new_buffer(sequence, like=like, batch=batch, heads=config.num_heads)
            for block in self._blocks
        }
        return Side(sequence, ready, chunks, held)

    def _image_views(self, inputs: Mapping[str, torch.Tensor], rows: slice) -> dict[str, torch.Tensor]:
        """Of each input with a row for each image token these rows, as far as it has them."""
        found = {}
        for name, tensor in inputs.items():
            split = self._forward.adapter.split_plan.get(name.partition(".")[0])
            if split is not None and split.stream == "image":
                start, stop = (min(end, tensor.shape[split.dim]) for end in (rows.start, rows.stop))
                found[name] = tensor.narrow(split.dim, start, stop - start)
        return found


def _chunk_condition(condition: Condition, sequence: PatchedSequence, part: int, chunk: range) -> Condition:
    """What of a conditioning a chunk needs: its rows of what has a row for each token."""
    rows, num_text = sequence.rows(part, chunk), sequence.num_rows(part, chunk, stream="text")
    still = None if condition.still is None else condition.still[rows]
    return Condition(condition.txt[:, :num_text], condition.vec, condition.rope[:, rows], still)
