"""The latent of a run in parts that are updated one after another, on the last stage of a pipeline.

Letters: `B` images of this rank's batch group, `N` numbers of an image's latent.

Owns which part has which numbers, and that previews and the result are written whole. Does not own how a part is
updated (latent.py) nor when (steady_pipeline.py).
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from ..parallel.collectives import Axis
from ..sampler_recurrence import PREVIEW_SLOTS
from ..timing import RegionTimer
from ..wire.requests import GroupWork, Sample
from .host_copies import HostCopies
from .inputs import to_host
from .latent import LatentRows


class PartedLatent:
    """A batch group's latent (B, 1, N). `tensors` are the request's, whole.

    `first`: whether this rank writes results, where several have the same latent.
    """

    def __init__(
        self,
        request: Sample,
        share: GroupWork,
        tensors: Mapping[str, torch.Tensor],
        *,
        timer: RegionTimer,
        copies: HostCopies,
        cfg_axis: Axis,
        first: bool,
    ) -> None:
        self._request, self._share, self._tensors = request, share, tensors
        self._timer, self._copies, self._cfg_axis = timer, copies, cfg_axis
        self._writes = first and bool(share.conds) and not (share.shares_cfg and cfg_axis.index)
        self._preview_of = {end: step % PREVIEW_SLOTS for step, end in enumerate(request.recurrence.step_ends)}
        self._places: Sequence[torch.Tensor] = ()
        self.parts: list[LatentRows] = []

    @property
    def shape(self) -> torch.Size:
        """(B, 1, N)."""
        return self._mine("out").shape

    def take_in(self) -> None:
        """Have memory for previews; before the first call."""
        if self._writes:
            self._copies.reserve(self.shape)

    def part(self, places: Sequence[torch.Tensor]) -> None:
        """Have a part of the numbers at each of these places, which together are all of them."""
        self._places = places
        for each in places:
            rows = LatentRows(
                self._request.recurrence,
                self._share,
                self._tensors,
                take=partial(_at, each.cpu()),
                timer=self._timer,
                copies=self._copies,
                cfg=self._request.cfg,
                cfg_axis=self._cfg_axis,
                first=False,
            )
            rows.take_in()
            self.parts.append(rows)

    def preview(self, call: int) -> None:
        """Begin to write the preview of a step that ends with `call`, which all parts have left; waits for nothing."""
        if self._writes and call in self._preview_of:
            with self._timer.region("gather"):
                whole = self._whole([part.denoised for part in self.parts])
                self._copies.start(self._mine(f"preview.{self._preview_of[call]}"), whole)

    def finish(self) -> None:
        """Write the result. Waits for the device."""
        whole = self._whole([part.result() for part in self.parts])
        if self._writes:
            with self._timer.region("gather"):
                to_host(self._mine("out"), whole)

    def _whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parts, each (B, 1, its numbers), as one latent (B, 1, N)."""
        whole = torch.empty(self.shape, device=self._timer.device)
        for places, part in zip(self._places, parts, strict=True):
            whole[..., places] = part
        return whole

    def _mine(self, name: str) -> torch.Tensor:
        """A tensor of the request's, this batch group's images."""
        return self._tensors[name][self._share.start : self._share.stop]


def _at(places: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the numbers of a tensor (B, 1, N) at some places."""
    return tensor[..., places]
