"""The calls of a whole sampling run that one of ComfyUI's own models makes on one rank.

Letters: `B` images of this rank's batch group, `N` numbers of an image's latent.

ComfyUI's `apply_model` is what a call runs: it adds channels to the latent, makes the model's timesteps,
takes joint latents apart and casts. Its model sampling alone has another in its place: what it would say at each sigma
came with the run, asked in ComfyUI's process of the MODEL that is sampled. A rank gets the whole output of the model
(models/hosted/hooks.py), so each has the whole latent, and one of those that share its tokens writes results.

Owns one call. Does not own the loop over calls (worker_loop.py), the update of the latent (latent.py), nor how
ranks share a call (hosted.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..models.hosted.calls import from_tree
from ..models.hosted.first_block import Residuals, total_over
from ..parallel.attention import SequenceParallelAttention
from ..sampler_recurrence import RecurrenceStep, SamplerRecurrence
from ..stock_caches import SkipDecision
from ..wire.requests import GroupWork, Sample
from .host_copies import HostCopies
from .hosted import HostedForward
from .inputs import call_tensors, to_device
from .latent import LatentRows
from .mesh import Mesh
from .worker_loop import Calls

SETTLED = 4  # steps: the first shows what one takes, the next ones keep what they gather


class CallSampling(torch.nn.Module):
    """Stands for ComfyUI's model sampling in the call that `state` goes into.

    The latent comes scaled already, and the model's output leaves as it is: `LatentRows` does both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = RecurrenceStep()

    def calculate_input(self, sigma: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """What the model is given of a latent."""
        return noise

    def timestep(self, sigma: torch.Tensor) -> torch.Tensor:
        """What the model is told of sigma (B,)."""
        if self.state.timestep is None:
            raise ValueError("a state without timestep goes into no call; the recurrence is not whole")
        return torch.full_like(sigma, self.state.timestep)

    def calculate_denoised(
        self, sigma: torch.Tensor, model_output: torch.Tensor, model_input: torch.Tensor
    ) -> torch.Tensor:
        """The output in fp32."""
        return model_output


class AppliedModel:
    """ComfyUI's `apply_model` in the calls of a run, for the images of `share`.

    `tensors` are the request's, whole; `options` those of the conditionings.
    """

    def __init__(
        self,
        forward: HostedForward,
        recurrence: SamplerRecurrence,
        share: GroupWork,
        tensors: Mapping[str, torch.Tensor],
        options: Sequence[Mapping[str, Any]],
    ) -> None:
        self._forward, self._recurrence, self._share = forward, recurrence, share
        self._tensors, self._options = tensors, options
        self._inputs: dict[int, list[torch.Tensor]] = {}
        self._sampling = CallSampling()

    def take_in(self) -> None:
        """Have on the device what every call needs; before the first."""
        self._forward.model.weights.whole.model_sampling = self._sampling
        with self._forward.timer.region("hand_over"):
            self._inputs = {cond: self._taken(cond) for cond in self._share.conds}

    def outputs(self, cond: int, call: int, x: torch.Tensor, **how: Any) -> list[torch.Tensor]:  # noqa: ANN401
        """What the model says of a latent (B, 1, N) for one conditioning, or for both, of the same shape, in fp32.

        `how` is given to `HostedForward.apply`. Modules may write to what they are given, so it is a copy.
        """
        options, self._sampling.state = self._options[cond], self._recurrence.states[call]
        given: Any = from_tree(options["call"], [tensor.clone() for tensor in self._inputs[cond]])
        sigma = torch.full((x.shape[0],), self._sampling.state.sigma or 0.0, device=x.device)
        given["kwargs"]["transformer_options"]["sigmas"] = sigma
        sides = options["sides"]
        latent = torch.cat([x.reshape(x.shape[0], *options["latent"])] * len(sides))
        out = self._forward.apply(latent, sigma.repeat(len(sides)), given["kwargs"], options=options, **how)
        by_side = dict(zip(sides, out.split(x.shape[0]), strict=True))
        return [by_side[side].reshape(x.shape) for side in sorted(by_side)]

    def _taken(self, cond: int) -> list[torch.Tensor]:
        """A conditioning's tensors on this rank's device; of those with a row an image, the rows of its images."""
        options, sent = self._options[cond], call_tensors(self._tensors, cond)
        start, stop, device = self._share.start, self._share.stop, self._forward.timer.device
        found = []
        for number in range(options["tensors"]):
            tensor = sent[f"t{number}"]
            if number in options["batched"]:
                tensor = tensor.unflatten(0, (len(options["sides"]), -1))[:, start:stop].flatten(0, 1)
            found.append(to_device(tensor, device))
        return found


class HostedCalls(Calls):
    """Calls of ComfyUI's own model that run whole. `tensors` are the request's, whole.

    Each rank has the whole latent, as one row of numbers. One answer on all ranks that share it says which calls a
    cache of ComfyUI's stands for.
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
        batch_groups, options = request.batch_groups, request.calls
        self._share = batch_groups[mesh.batch_group]
        self._rows = LatentRows(
            request.recurrence,
            self._share,
            tensors,
            timer=forward.timer,
            copies=copies,
            cfg=request.cfg,
            cfg_axis=mesh.axes["cfg"],
            first=forward.sequence.index == 0,
            cache=request.cache,
            sides=sorted(side for cond in self._share.conds for side in options[cond]["sides"]),
        )
        if request.cache is not None:
            total = total_over([mesh.attention, SequenceParallelAttention(ulysses=mesh.axes["cfg"])])
            self.skipping = SkipDecision(request.cache, lambda sums: total(sums.to(forward.timer.device)))
        self._shown = forward.work_to_run(mesh, batch_groups)
        self._model = AppliedModel(forward, request.recurrence, self._shown, tensors, options)
        cached = [cond for cond in self._shown.conds if options[cond].get("step_cache")]
        self._residuals = {cond: Residuals() for cond in cached}
        # where ComfyUI has both sides in one call, they decide together here as well
        together = self._share.shares_cfg and all(each.get("one_call") for each in options)
        self._over = mesh.axes["cfg"] if together else None
        self._forward, self._asked = forward, (request, tensors)

    def prepare(self) -> None:
        self._rows.take_in()
        self._model.take_in()

    def run(self, call: int) -> None:
        x = self._rows.enter(call)
        cached = self._rows.cached
        if self.skipping is not None and cached is not None and self.skipping.skips(call, cached, self._rows.seen):
            self._rows.skip(call)
        else:
            self._compute(call, x)
        self._rows.preview(call)

    def enter_step(self, step: int) -> None:
        if 0 < step <= SETTLED:
            self._forward.end_step()
        if step < SETTLED:  # later ones do not wait for each other
            self._forward.begin_step(*self._asked)

    def finish(self) -> None:
        self._forward.end_step()
        self._rows.finish()

    def _compute(self, call: int, x: torch.Tensor) -> None:
        if self._shown is not self._share:
            x = x.new_zeros((self._shown.stop - self._shown.start, *x.shape[1:]))
        outputs = [
            output
            for cond in self._shown.conds
            for output in self._model.outputs(cond, call, x, residuals=self._residuals.get(cond), over=self._over)
        ]
        self._rows.finish_call(call, outputs if self._share.conds else [])
