"""A whole sampling run on one stage of a pipeline: which patch of which call comes when.

Letters: `B` images of this rank's batch group.

                      call 1                      call 2
    stage 0 | whole         | p0 | p1 | p2 | p0 | p1 | p2 | p0 ..      the first `warmup_steps` steps go through whole,
    stage 1 |       | whole      | p0 | p1 | p2 | p0 | p1 | p2 ..      one stage after another

Source: PipeFusion (arXiv 2405.14430, section 4). The last stage owns the latent's rows and sends each patch's next X to
the first stage as soon as it has it, so patches of the next call start while others of this one are under way, and no
stage waits between steps. Ranks with the same place inside their stages talk to each other.

X travels whether or not the next step has leave to start: ranks see leave come at different moments, and of a send that
waits for a receive, or the other way round, neither may depend on that (parallel/links.py). Hidden states travel in
steps that have leave, which all ranks make alike. So a cancelled run has no message but X under way, which both ends
take in. Where a cache of ComfyUI's may skip a call, the last stage says so ahead of X, once it has all of it, and each
stage tells the next: stages then wait between steps. Owns the schedule. What a stage does with a chunk is stage.py's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ..models.base import Tokens
from ..parallel.links import Expected, Inbox, Outbox
from ..sampler_recurrence import SamplerRecurrence
from ..stock_caches import COMPUTE, StockCache
from ..wire.replies import StageTimeline
from ..wire.requests import GroupWork
from .forward import Forward
from .host_copies import HostCopies
from .in_worker_sampling import Gate, step_starts
from .inputs import call_tensors
from .latent import LatentRows
from .mesh import Mesh
from .prepared import Prepared, prepare
from .stage import ChunkInputs, CondState, PartRows, Stage
from .stock_cache import SkippedCalls
from .timeline import Timeline

SKIPS_AHEAD = 2  # messages in flight that say of a call whether it is skipped


class PipelinedCalls:
    """The calls of a run on one stage of `mesh`'s plan. `tensors` are the request's, whole."""

    drained: str | None = None

    def __init__(
        self,
        forward: Forward,
        recurrence: SamplerRecurrence,
        share: GroupWork,
        tensors: Mapping[str, torch.Tensor],
        *,
        mesh: Mesh,
        gate: Gate,
        copies: HostCopies,
        options: Sequence[Mapping],
        cfg: float,
        passes_a_chunk: int,
        modulation_bytes: int,
        timeline: bool = False,
        cache: StockCache | None = None,
    ) -> None:
        """`options` of the conditionings; `passes_a_chunk`: those of the busiest batch group that shares our weights.

        `modulation_bytes`: as `prepare`'s `most_bytes`. `timeline`: whether to note when which chunk came and went.
        `cache`: what may stand for the model in some calls.
        """
        self._modulation_bytes = modulation_bytes
        self._forward, self._recurrence, self._share, self._tensors = forward, recurrence, share, tensors
        self._options, self._gate, self._passes_a_chunk = options, gate, passes_a_chunk
        self._stage = stage = Stage(forward, mesh)
        self._warmup_steps, self._starts = mesh.plan.warmup_steps, step_starts(recurrence)
        sides = [call_tensors(tensors, cond) for cond in range(len(options))]
        longest = max(side["txt"].shape[1] for side in sides)  # sides share the latent, so its patches are the same
        self._sequences = {cond: stage.sequence(sides[cond], longest_text=longest) for cond in share.conds}
        self._ready: dict[int, Prepared] = {}
        self._sides: dict[int, CondState] = {}
        self._image = stage.sequence(sides[0], longest_text=longest)  # of its text nothing is used
        patches = [self._image.shard(stage.part, patch) for patch in self._image.whole]
        self._latent_rows = [len(shard.take(tensors["given.0"][0], stream="image", dim=0)) for shard in patches]
        self._cache, self._skips, self._ran = cache, dict[int, bool](), 0
        self._outbox = Outbox(mesh.next_stage, depth=self._image.num_patches * max(1, len(share.conds)) + SKIPS_AHEAD)
        self._inbox = Inbox(mesh.previous_stage, expected=self._messages(), may_post=self._sure, device=forward.device)
        self._rows = [
            LatentRows(
                recurrence,
                share,
                tensors,
                shard,
                timer=forward.timer,
                copies=copies,
                cfg=cfg,
                cfg_axis=mesh.axes["cfg"],
                cache=cache,
                sides=share.conds,
            )
            for shard in (patches if stage.last else ())
        ]
        self.skipped: SkippedCalls | None = None
        if cache is not None and stage.last:
            self.skipped = SkippedCalls(cache, self._rows, mesh=mesh, device=forward.device)
        self._timeline = Timeline(forward.device, on=timeline)

    @property
    def passes(self) -> int:
        """How often the run goes through the stage's weights."""
        return 1 + self._passes_a_chunk * sum(len(self._chunks(call)) for call in range(self._recurrence.num_calls))

    def prepare(self) -> None:
        for patch in self._rows:
            patch.take_in()
        rows = {cond: PartRows(sequence, self._stage.part) for cond, sequence in self._sequences.items()}
        self._ready = prepare(
            self._forward,
            self._recurrence,
            self._share,
            self._tensors,
            rows=rows,
            blocks=self._stage.blocks,
            most_bytes=self._modulation_bytes,
            text=self._stage.first,
        )
        for cond, ready in self._ready.items():
            self._sides[cond] = self._stage.side(self._sequences[cond], ready.inputs, ready.condition)
        if self._share.conds:
            self._stage.end_pass()

    def run(self, call: int) -> None:
        if self._stage.last and call == 0:
            self._enter(0, self._image.whole)
        self._ran = call + 1
        if self._asks(call) and self._told(call):
            if self._stage.last:
                for rows in self._rows:
                    rows.skip(call)
                self._go_on(call, self._image.whole)
            return
        for chunk in self._chunks(call):
            self._run_chunk(call, chunk)

    def finish(self) -> None:
        for rows in self._rows:
            rows.finish()

    def timeline(self) -> StageTimeline | None:
        return self._timeline.report(self._stage.index)

    def close(self) -> None:
        """As `Calls.close`: what was sent has been received, X of a call that nobody makes included."""
        if self._stage.first and self._ran < self._recurrence.num_calls and self._asks(self._ran):
            self._hear(self._ran)  # X comes with it
        self._inbox.drain()
        self._outbox.drain()
        del self._inbox  # it refers back to this: a circle keeps all keys and values until Python collects it

    def _run_chunk(self, call: int, chunk: range) -> None:
        """A chunk of all of this batch group's conditionings through this stage's blocks."""
        stage, velocities = self._stage, []
        came = None  # X of the chunk is the same for all conditionings; hidden states are each one's own
        for cond in self._share.conds:
            asked_s = self._timeline.now()
            if came is None:
                came = self._inbox.take()
            elif not stage.first:
                self._inbox.worked_on()
                came = self._inbox.take()
            began_s = self._timeline.now()
            tokens = self._tokens(self._sides[cond].chunks[chunk], came, call)
            modulations = self._ready[cond].modulations_of(call)
            stage.run_blocks(tokens, self._sides[cond], chunk, self._options[cond], modulations=modulations)
            if stage.last:
                velocities.append(self._forward.head(tokens))
            else:
                self._outbox.send(tokens.x)
                stage.end_pass()
            ended_s = self._timeline.now()
            self._timeline.add(call, chunk, cond, asked_s=asked_s, began_s=began_s, ended_s=ended_s)
        for _ in range(self._passes_a_chunk - len(self._share.conds)):
            self._forward.weights.join_gathers(self._forward.beat)
        if stage.last:
            self._leave(call, chunk, velocities)
        if self._share.conds:
            self._inbox.worked_on()

    def _tokens(self, there: ChunkInputs, came: torch.Tensor, call: int) -> Tokens:
        """What came, X or hidden states, as the stage's first block takes it."""
        condition = replace(there.condition, vec=there.condition.vec[call])
        if not self._stage.first:
            return self._forward.adapter.received(came, condition)
        img = there.inputs["img"]
        img[:, : came.shape[1], : came.shape[2]] = came  # the latent's rows come before all others of the image
        return self._stage.embed(img, condition)

    def _leave(self, call: int, chunk: range, velocities: Sequence[torch.Tensor]) -> None:
        """Update the latent's rows of a chunk, and have those of the next call on their way."""
        before = self._image.image_rows(self._stage.part, chunk).start
        for patch in chunk:
            start = self._image.image_rows(self._stage.part, range(patch, patch + 1)).start - before
            mine = [rows[:, start : start + self._latent_rows[patch]].float() for rows in velocities]
            self._rows[patch].leave(call, mine)
        self._go_on(call, chunk)

    def _go_on(self, call: int, chunk: range) -> None:
        """From a chunk whose rows have left a call to the next call."""
        if call + 1 < self._recurrence.num_calls:
            self._enter(call + 1, chunk)
        for patch in chunk:  # last: other ranks wait for what is sent
            self._rows[patch].preview(call)

    def _enter(self, call: int, done: range) -> None:
        """Send X of a call, for those of its chunks whose patches are all done with the call before."""
        waits = self._waits(call)
        if waits:
            if done.stop < self._image.num_patches:
                return
            done = self._image.whole
            if self._decided(call):
                return
        elif self.skipped is not None:
            self.skipped.skips(call)  # none; but what is kept for later calls
        for chunk in self._chunks(call):
            if done.start <= chunk.start and chunk.stop <= done.stop:
                rows = [self._rows[patch] for patch in chunk]
                x = torch.cat([each.entered if waits else each.enter(call) for each in rows], 1)
                if self._share.conds:
                    self._outbox.send(x)

    def _decided(self, call: int) -> bool:
        """On the last stage, whether a call is skipped, which the first is told."""
        if self.skipped is None:
            raise RuntimeError("only the last stage of a run with a cache decides")
        for rows in self._rows:
            rows.enter(call)
        skips = self.skipped.skips(call)
        if self._asks(call):
            self._skips[call] = skips
            self._tell(call)
        return skips

    def _told(self, call: int) -> bool:
        """Whether a call is skipped, as the last stage decided; the stage after is told."""
        if not self._stage.last:
            self._hear(call)
            if self._stage.index + 2 < self._stage.size:
                self._tell(call)
        return self._skips[call]

    def _tell(self, call: int) -> None:
        self._outbox.send(torch.full((1,), float(self._skips[call]), device=self._forward.device))

    def _hear(self, call: int) -> None:
        self._skips[call] = bool(self._inbox.take())
        self._inbox.worked_on()

    def _asks(self, call: int) -> bool:
        return self._cache is not None and self._cache.asks(call)

    def _waits(self, call: int) -> bool:
        """Whether all of the call before must be done before anything of a call begins."""
        return self._cache is not None and self._cache.calls[call] != COMPUTE

    def _sure(self, call: int) -> bool:
        """Whether what this stage receives in a call is sure to be sent; asked of this call and the next.

        X is, with the call before; where that is skipped, once it has leave. Hidden states are when every rank will run
        the call, as far as is known now.
        """
        if self._stage.first and not self._skips.get(call - 1):
            return True
        run = call - 1 if self._stage.first else call
        return run not in self._starts or self._gate.open(self._starts[run])

    def _chunks(self, call: int) -> list[range]:
        """What of the image goes through the stages at once in a call: all of it in a step of the warm-up."""
        step = sum(end < call for end in self._recurrence.step_ends)
        step -= sum(skips for skipped, skips in self._skips.items() if skipped < call and skipped in self._starts)
        return self._image.chunks(warm=step < self._warmup_steps)

    def _messages(self) -> Iterator[Expected | None]:
        """What this stage receives: X of a chunk at the first, else a chunk of a conditioning's hidden states."""
        if self._stage.first:
            yield from self._latents()
            return
        images, number = self._share.stop - self._share.start, 0
        for call in range(self._recurrence.num_calls):
            if self._asks(call):
                if not self._stage.last:
                    yield Expected(call, (1,), torch.float32, after=number)
                    number += 1
                while call not in self._skips:
                    yield None
                if self._skips[call]:
                    continue
            for chunk in self._chunks(call):
                for cond in self._share.conds:
                    shape = self._stage.hidden_shape(self._sequences[cond], chunk, images=images)
                    yield Expected(call, shape, self._forward.weights.dtype, after=number)
                    number += 1

    def _latents(self) -> Iterator[Expected | None]:
        """X of each chunk, which the last stage makes once the same rows are through the stages in the call before.

        All of those that depend on nothing but chunks queued here are received ahead: the last stage's send, too, is
        in flight until it is received.
        """
        images, channels = self._share.stop - self._share.start, self._tensors["given.0"].shape[2]
        before: list[tuple[range, int]] = []  # chunks of the call before, and how many chunks are queued with each
        number = 0
        for call in range(self._recurrence.num_calls):
            if self._asks(call):
                yield Expected(call, (1,), torch.float32, after=number)
                number += 1
                while call not in self._skips:
                    yield None
            if self._waits(call):
                before = [(self._image.whole, number)]
            if self._skips.get(call) or not self._share.conds:
                continue
            chunks = self._chunks(call)
            for chunk in chunks:
                rows = sum(self._latent_rows[chunk.start : chunk.stop])
                after = max((queued for done, queued in before if done.start < chunk.stop), default=0)
                yield Expected(call, (images, rows, channels), torch.float32, after=after)
            before = [(chunk, number + 1 + index) for index, chunk in enumerate(chunks)]
            number += len(chunks)
