"""Some rows of the latent on the rank that updates them, from the first state of a run to its result.

Letters: `B` images of this rank's batch group, `S` rows of the latent, `C` channels of a token.

A sampler's update works token by token, so a rank that holds rows needs no others; only the two sides of cfg, where
batch groups share them, are exchanged. Owns the order of operations around the model, which is ComfyUI's: noise mask,
output to denoised, cfg, noise mask. Does not own the recurrence (sampler_recurrence.py) nor the model.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from ..parallel.collectives import Axis
from ..sampler_recurrence import NUM_SIDES, PREVIEW_SLOTS, CallReading, SamplerRecurrence, Trajectory
from ..stock_caches import LOOKED_AT, CachedRows, StockCache
from ..timing import RegionTimer
from ..wire.requests import GroupWork
from .host_copies import HostCopies
from .inputs import to_device, to_host

INPAINT = ("mask", "noise", "latent")


class LatentRows:
    """Rows of a batch group's `share`. `tensors` are the request's, whole; results are written to them.

    `take` finds them in a tensor (B, S, C): by default all; it must make a view where results are written here.
    `first`: whether this rank writes them, where several have the same rows. `cache`: what may stand for the model in
    some calls, which makes outputs of these `sides` of cfg here.
    """

    def __init__(
        self,
        recurrence: SamplerRecurrence,
        share: GroupWork,
        tensors: Mapping[str, torch.Tensor],
        *,
        take: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        timer: RegionTimer,
        copies: HostCopies,
        cfg: float,
        cfg_axis: Axis,
        first: bool = True,
        cache: StockCache | None = None,
        sides: Sequence[int] = (),
    ) -> None:
        self._copies, self._first = copies, first
        self._recurrence, self._share, self._tensors, self._take = recurrence, share, tensors, take
        self._timer, self._cfg, self._cfg_axis = timer, cfg, cfg_axis
        self._trajectory = Trajectory(recurrence)
        self._inpaint: dict[str, torch.Tensor] = {}
        self._preview_of = {end: f"preview.{step % PREVIEW_SLOTS}" for step, end in enumerate(recurrence.step_ends)}
        self._x = self._seen = self._denoised = torch.empty(0)
        self.cached = None if cache is None else self._cached(cache, sides)

    def take_in(self) -> None:
        """Have on the device what every call needs of the request, and memory for previews; before the first."""
        if self._writes:
            self._copies.reserve(self._mine(self._tensors["out"]).shape)
        for name in INPAINT:
            if f"inpaint.{name}" in self._tensors:
                with self._timer.region("hand_over"):
                    self._inpaint[name] = self._on_device(f"inpaint.{name}")

    def enter(self, call: int) -> torch.Tensor:
        """What the model is to see of these rows in a call, (B, S, C) fp32; not to be written to."""
        x = self._trajectory.enter(call, self._given(call))
        if self._inpaint:
            reading, (mask, noise, latent) = self._reading(call), (self._inpaint[name] for name in INPAINT)
            x = x * mask + (noise * reading.kept_noise + latent * reading.kept_latent) * (1.0 - mask)
        self._x = x
        scale = self._reading(call).scale
        self._seen = x if scale == 1.0 else x * scale
        return self._seen

    @property
    def entered(self) -> torch.Tensor:
        """What `enter` returned last."""
        return self._seen

    @property
    def seen(self) -> torch.Tensor:
        """What the cache compares in the call that was entered, (B, S, C) fp32."""
        return self._seen if self.cached is not None and self.cached.cache.easy else self._x

    def finish_call(self, call: int, outputs: Sequence[torch.Tensor]) -> None:
        """Take the model's outputs (B, S, C) for this batch group's conditionings, in fp32.

        Collective over the cfg axis where its batch groups share the sides.
        """
        out = self._guided(call, outputs)
        if self.cached is not None:
            self.cached.note(call, self.seen, outputs if self.cached.cache.easy else [out])
        self._end(call, out)

    def skip(self, call: int) -> None:
        """Take what the cache has in place of what the model would say; collective as `finish_call`, of EasyCache."""
        if self.cached is None:
            raise RuntimeError("a run without a cache skips no call")
        again = self.cached.again(self.seen)
        self._end(
            call,
            self._guided(call, again, overwritten=self.cached.cache.overwrites) if self.cached.cache.easy else again[0],
        )

    def _guided(self, call: int, outputs: Sequence[torch.Tensor], *, overwritten: bool = False) -> torch.Tensor:
        """The denoised latent. `overwritten`: each side's output stands in its latent's place too."""
        if self._share.shares_cfg:
            outputs = self._exchanged(outputs)
        if not outputs:
            return self._x  # of a batch group without work, which keeps in step with the others
        reading = self._reading(call)
        kept = [
            each if reading.skip == 1.0 else each * reading.skip for each in (outputs if overwritten else [self._x])
        ]
        sides = [
            torch.add(kept[number % len(kept)], output, alpha=reading.weight) for number, output in enumerate(outputs)
        ]
        return sides[0] if len(sides) == 1 else sides[1] + (sides[0] - sides[1]) * self._cfg

    def _end(self, call: int, out: torch.Tensor) -> None:
        if self._inpaint and self._share.conds:
            out = out * self._inpaint["mask"] + self._inpaint["latent"] * (1.0 - self._inpaint["mask"])
        self._trajectory.finish_call(call, out)
        self._denoised = out

    def preview(self, call: int) -> None:
        """Begin to write the preview of a step that ends with `call`, which was left; waits for nothing."""
        if self._writes and call in self._preview_of:
            with self._timer.region("gather"):
                self._copies.start(self._mine(self._tensors[self._preview_of[call]]), self._denoised)

    def finish(self) -> None:
        """Write the result. Waits for the device."""
        rows = self.result()
        if self._writes:
            with self._timer.region("gather"):
                to_host(self._mine(self._tensors["out"]), rows)

    def result(self) -> torch.Tensor:
        """The last state, after the last call; (B, S, C) fp32."""
        last = self._recurrence.num_calls
        return self._trajectory.enter(last, self._given(last))

    @property
    def denoised(self) -> torch.Tensor:
        """The denoised latent of the call that was left last, (B, S, C) fp32."""
        return self._denoised

    def _cached(self, cache: StockCache, sides: Sequence[int]) -> CachedRows:
        looked_at = self._take(self._tensors[LOOKED_AT])[0].to(self._timer.device)
        counts = self._first
        if not cache.easy:  # both sides of cfg have the denoised latent
            counts, sides = (
                counts and bool(self._share.conds) and not (self._share.shares_cfg and self._cfg_axis.index),
                (0,),
            )
        return CachedRows(cache, looked_at, sides=sides, counts=counts)

    @property
    def _writes(self) -> bool:
        """Whether these rows of results are written here: of batch groups that have the same ones, the first does."""
        return self._first and bool(self._share.conds) and not (self._share.shares_cfg and self._cfg_axis.index)

    def _mine(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of a whole tensor (images, latent rows, C): this batch group's images, these rows."""
        return self._take(tensor[self._share.start : self._share.stop])

    def _given(self, number: int) -> torch.Tensor | None:
        if not self._recurrence.states[number].given:
            return None
        with self._timer.region("hand_over"):
            return self._on_device(f"given.{number}")

    def _on_device(self, name: str) -> torch.Tensor:
        return to_device(self._mine(self._tensors[name]), self._timer.device)

    def _reading(self, call: int) -> CallReading:
        return self._recurrence.states[call].reading

    def _exchanged(self, mine: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs for both conditionings, of which this batch group has made one, or, beyond the first two,
        none."""
        axis, shape = self._cfg_axis, self._x.shape
        lengths = tuple(shape[0] * shape[1] if index < NUM_SIDES else 0 for index in range(axis.size))
        nothing = (0,) * axis.size
        if not mine:
            axis.all_to_all(self._x.new_empty((0, shape[2])), send_lengths=nothing, receive_lengths=nothing)
            return []
        rows = mine[0].flatten(0, 1)
        both = axis.all_to_all(rows.repeat(NUM_SIDES, 1), send_lengths=lengths, receive_lengths=lengths)
        return list(both.unflatten(0, (NUM_SIDES, *shape[:2])).unbind(0))
