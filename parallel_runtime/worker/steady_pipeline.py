"""A whole sampling run of one of ComfyUI's own models on one stage of a pipeline that stays full between steps.

Letters: `B` images of this rank's batch group, `N` numbers of an image's latent.

                      call 1                      call 2
    stage 0 | whole         | p0 | p1 | p2 | p0 | p1 | p2 | p0 ..      the first `warmup_steps` steps go through whole,
    stage 1 |       | whole      | p0 | p1 | p2 | p0 | p1 | p2 ..      one stage after another

Source: PipeFusion (arXiv 2405.14430, section 4). The last stage has the latent, in parts: the numbers that each patch
alone reads and writes (models/hosted/owners.py). It updates a part as soon as its patch has left a call and sends it to
the first stage, so patches of the next call start while others of this one are under way. What each pass computes is
what it would with a pipeline that is empty between steps: its keys are of the same calls (hosted_pipeline.py).

Where patches share numbers the latent is one part, which all stages get, and the pipeline is empty between steps.

A rank that may start a step makes all of it, as all ranks do; the latent of the next step is sent before that may
start. So a cancelled run has no message under way but that, which the other end takes.

When the first stage posts the receive of a part: a launch may keep the host of the last stage until all parts that it
has sent are received, and the host of the first stage until its passes are (links.py). Before the second stage receives
pass `m`, the last one may have sent the part that comes of pass `m + 1 - stages`. So this is posted once pass `m` is
sent. Earlier would be right too, but a receive keeps places of the device while it waits. A stage that waits for its
permit posts all that will be sent: the preview of a step may be such a launch. Owns the schedule.
Does not own a pass (hosted_pipeline.py), the latent's numbers (latent.py), nor the loop over steps (worker_loop.py).
"""

from collections import deque
from collections.abc import Mapping, Sequence

import torch

from ..models.hosted.owners import MixedPatchesError, find_owners
from ..models.hosted.pass_call import PassEndsError
from ..parallel.attention import SequenceParallelAttention
from ..parallel.kept_keys import HeldRows
from ..parallel.links import PendingReceive
from ..wire.replies import StageTimeline
from ..wire.requests import Sample
from .host_copies import HostCopies
from .hosted import HostedForward, NewCall
from .hosted_pipeline import Passes
from .hosted_sampling import AppliedModel
from .mesh import Mesh
from .parted_latent import PartedLatent
from .timeline import Timeline
from .worker_loop import Calls

OTHER_PATCHES = "the prompts' patches are of other parts of the latent"


class SteadyCalls(Calls):
    """The calls of a run on one stage. `tensors` are the request's, whole.

    A batch group that runs another's work, so that its part of the weights is gathered, writes nothing.
    """

    def __init__(
        self,
        forward: HostedForward,
        request: Sample,
        tensors: Mapping[str, torch.Tensor],
        *,
        mesh: Mesh,
        copies: HostCopies,
    ) -> None:
        self._share, self._options = forward.work_to_run(mesh, request.batch_groups), request.calls
        self._model = AppliedModel(forward, request.recurrence, self._share, tensors, request.calls)
        self._forward, self._recurrence = forward, request.recurrence
        self._mesh = mesh
        self._latent = PartedLatent(
            request,
            self._share,
            tensors,
            timer=forward.timer,
            copies=copies,
            cfg_axis=mesh.axes["cfg"],
            first=forward.sequence.index == 0 and self._share is request.batch_groups[mesh.batch_group],
        )
        self._timeline = Timeline(forward.timer.device, on=request.timeline)
        self._passes = Passes(forward.model, mesh, now=self._timeline.now)
        self._patches, self._warmup_steps = mesh.plan.num_patches, mesh.plan.warmup_steps
        self._held = {cond: HeldRows() for cond in self._share.conds}
        self._x = torch.empty(0)  # (B, 1, N): what the first stage has of the latent, of this call or the one before
        self._places: list[torch.Tensor] = []  # of each part
        self._gets = False  # whether parts come to this stage
        self._landings: list[torch.Tensor] = []  # of each, where it comes before it is in `_x`
        self._expected: deque[range] = deque()  # parts to be posted, by the pass that they come of
        self._posted: deque[PendingReceive] = deque()  # and not taken
        self._ran = 0

    def prepare(self) -> None:
        """As `Calls.prepare`; the last stage finds the parts of the latent, and the stages hear of them."""
        self._latent.take_in()
        self._model.take_in()
        if not self._share.conds:
            return
        shape = self._latent.shape
        self._x = torch.zeros(shape, device=self._forward.timer.device)
        if self._passes.last:
            owners = self._owners()
            self._passes.next.send(owners)
        else:
            owners = self._passes.receive_one(shape[-1:], torch.int32)
            self._pass_on(owners)
        parts = range(self._patches) if int(owners.min()) >= 0 else [-1]
        self._places = [(owners == part).nonzero()[:, 0] for part in parts]
        whole = range(len(self._places))
        if self._passes.last:
            self._latent.part(self._places)
            self._enter(0, whole)
        elif self._passes.first or len(whole) == 1:  # to others the shape of the latent is enough, before the blocks
            self._gets = True
            self._landings = [self._x.new_empty((*shape[:2], len(places))) for places in self._places]
            self._expect(whole)

    def run(self, call: int) -> None:
        """As `Calls.run`."""
        if not self._share.conds:
            return
        whole, warm = range(len(self._places)), self._warm(call)
        steady = len(whole) > 1 and not warm
        if not steady:
            self._take(whole)
        patches = 1 if warm else self._patches
        for patch in range(patches):
            parts = whole[patch : patch + 1] if steady else whole if patch + 1 == patches else range(0)
            if steady:
                self._take(parts)
            outputs: list[torch.Tensor] = []
            for cond in self._share.conds:
                outputs += self._passed(cond, call, None if warm else patch, only_last=not steady)
                goes_on = cond == self._share.conds[-1] and call + 1 < self._recurrence.num_calls
                self._expect(parts if goes_on else range(0))
            if self._passes.last:
                self._emit(call, parts, outputs)
        self._ran = call + 1
        if self._passes.last:
            self._latent.preview(call)

    def finish(self) -> None:
        """As `Calls.finish`."""
        if self._passes.last and self._share.conds:
            self._latent.finish()

    def timeline(self) -> StageTimeline | None:
        """As `Calls.timeline`."""
        return self._timeline.report(self._passes.stage)

    def while_waiting(self) -> None:
        """As `Calls.while_waiting`."""
        while self._passes.first and self._expected:  # to others it is passed on once a step may start
            self._post()

    def close(self) -> None:
        """As `Calls.close`: what was sent has been received, the latent of a call that no stage makes included."""
        if self._share.conds and self._ran < self._recurrence.num_calls:
            self._take(range(len(self._places)))
        self._passes.next.drain()
        self._passes.end()

    def _warm(self, call: int) -> bool:
        """Whether a call is one of a step that goes through whole."""
        return sum(end < call for end in self._recurrence.step_ends) < self._warmup_steps

    def _expect(self, parts: range) -> None:
        """A pass has been sent on; these parts of the next call's latent come of it."""
        if self._gets:
            self._expected.append(parts)
            if len(self._expected) == self._mesh.plan.pipefusion:
                self._post()

    def _post(self) -> None:
        """Post the receives of the parts that are expected first. The one before of each was taken."""
        for part in self._expected.popleft():
            self._posted.append(self._passes.previous.post(self._landings[part]))

    def _take(self, parts: range) -> None:
        """Have these parts of the next call's latent, where they come to this stage or are its own."""
        if self._passes.last and len(self._places) == 1:
            self._x = self._latent.parts[0].entered
        for part in parts if self._gets else ():
            while not self._posted:
                self._post()
            came = self._posted.popleft().wait()
            self._x[..., self._places[part]] = came
            if len(self._places) == 1:
                self._pass_on(came.clone())  # where it landed the next one may, while this is still on its way

    def _pass_on(self, tensor: torch.Tensor) -> None:
        """To the next stage, unless that is the last one, which it came from."""
        if self._passes.stage + 2 < self._mesh.plan.pipefusion:
            self._passes.next.send(tensor)

    def _passed(self, cond: int, call: int, patch: int | None, *, only_last: bool) -> list[torch.Tensor]:
        """A pass of a conditioning, or of both; what the model says of the whole latent where it is known.

        `only_last`: the last patch's pass alone says anything.
        """
        held, began_s = self._held[cond], self._timeline.now()
        chunk = range(self._patches) if patch is None else range(patch, patch + 1)
        outputs: list[torch.Tensor] = []
        group = self._forward.sequence_of(self._options[cond])
        new_call = self._passes.begin(group, held, patch, only_last=only_last)
        try:
            outputs = self._model.outputs(cond, call, self._x, sequence=group, new_call=new_call)
        except PassEndsError:
            self._forward.beat()
        asked_s, began_s = began_s, self._passes.arrived_s or began_s
        self._timeline.add(call, chunk, cond, asked_s=asked_s, began_s=began_s, ended_s=self._timeline.now())
        return outputs

    def _emit(self, call: int, parts: range, outputs: Sequence[torch.Tensor]) -> None:
        """Update these parts of the latent, and have them on their way into the next call."""
        for part in parts:
            self._latent.parts[part].finish_call(call, [out[..., self._places[part]] for out in outputs])
        if call + 1 < self._recurrence.num_calls:
            self._enter(call + 1, parts)

    def _enter(self, call: int, parts: range) -> None:
        for part in parts:
            self._passes.next.send(self._latent.parts[part].enter(call))

    def _owners(self) -> torch.Tensor:
        """The patch of each number of the latent, (N,) int32; -1 where patches cannot be told apart."""
        found: list[torch.Tensor] = []
        with self._forward.model.without_blocks():
            for cond in self._share.conds:
                try:
                    found.append(self._owners_of(cond))
                except MixedPatchesError as error:
                    self.drained = str(error)
                    found.append(torch.full(self._x.shape[-1:], -1, dtype=torch.int32, device=self._x.device))
        if self._share.shares_cfg:
            found += self._others(found[0])
        first, *others = found
        if any(not torch.equal(each, first) for each in others):
            self.drained = self.drained or OTHER_PATCHES
            first = torch.full_like(first, -1)
        return first

    def _owners_of(self, cond: int) -> torch.Tensor:
        """The same of one conditioning. Raises `MixedPatchesError`."""
        plan, staged = self._mesh.plan, self._forward.model.staged

        def outputs(x: torch.Tensor, alone: SequenceParallelAttention, new_call: NewCall) -> list[torch.Tensor]:
            return self._model.outputs(cond, 0, x, sequence=alone, new_call=new_call)

        return find_owners(outputs, staged, torch.ones_like(self._x), patches=plan.num_patches, parts=plan.parts)

    def _others(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """What the other batch group found, which updates the same latent."""
        axis = self._mesh.axes["cfg"]
        over = SequenceParallelAttention(ulysses=axis)
        return list(over.gather(mine[None], dim=0, lengths=[1] * axis.size).unbind(0))
