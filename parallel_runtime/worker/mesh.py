"""The axes of a plan as process groups. Owns one rank's groups and hands out each axis by name.

A mesh is a handle inside one set of workers: another plan makes other groups, never other processes. Ranks beyond the
plan's product are in no group and sleep. Replicas exchange nothing, so the data axis has a size and a place, and no
group; the two sides of cfg meet in whole sampling runs.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
import torch.distributed as dist

from ..choices import card_choice
from ..exchange_groups import (
    ACTIVATIONS,
    GROUPED_AXES,
    LINK,
    WEIGHTS,
    ExchangeGroup,
    has_sequence_group,
    links_of,
    runs_along,
    weight_groups,
)
from ..parallel.attention import SequenceParallelAttention
from ..parallel.collectives import Axis, Traffic
from ..parallel.links import P2PChannel
from ..parallel.overlap import OverlapRates, choose_chunks
from ..parallel.pattern import count_wrong_bytes, count_wrong_bytes_of_links
from ..plan import TOKEN_AXES, ParallelPlan
from ..timing import wait_for_all
from ..wire.replies import ProbeReply
from .probe import probe
from .start import BACKEND_TIMEOUT


class Groups:
    """The process groups of this rank, each made once: plans share them, and each costs threads or a communicator.

    Weights travel in groups of their own, so that no exchange of activations waits behind a gather that is in flight.
    """

    def __init__(self) -> None:
        self._made: dict[ExchangeGroup, dist.ProcessGroup | None] = {}

    def join(self, purpose: str, runs: list[tuple[int, ...]]) -> dist.ProcessGroup | None:
        """Make a group of each run of ranks; the one that this rank is in, if any.

        Collective: every rank of the world must ask for the same, in the same order.
        """
        mine = None
        for ranks in runs:
            key = ExchangeGroup(purpose=purpose, ranks=ranks)
            if key not in self._made:
                whole = purpose == ACTIVATIONS and len(ranks) == dist.get_world_size()
                self._made[key] = dist.group.WORLD if whole else dist.new_group(list(ranks), timeout=BACKEND_TIMEOUT)
            if dist.get_rank() in ranks:
                mine = self._made[key]
        return mine

    def free(self, groups: Sequence[ExchangeGroup], device: torch.device) -> None:
        """Destroy groups that no mesh and no weights use any more, one after another, once nothing is in flight.

        Collective: every rank of the world must free the same, in the same order. NCCL ends a communicator when all of
        its ranks do (torch's ProcessGroupNCCL calls ncclCommFinalize), so ranks that begin with different ones wait for
        each other in a circle.
        """
        wait_for_all(device)
        for key in groups:
            group = self._made.pop(key)
            if dist.get_rank() in key.ranks:
                dist.destroy_process_group(group)


class Mesh:
    """One plan's axes as this rank sees them. Making one is collective: every rank of the world must.

    `shard_axis` is over the ranks that hold sharded weights together, of size one when each rank holds all of them.
    The pipefusion axis has no group: a stage has a link from the stage before it and one to the stage after it, the
    last stage's next being the first.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        *,
        device: torch.device,
        groups: Groups,
        show_waiting: Callable[[bool], None],
        overlap: OverlapRates | None = None,
    ) -> None:
        """`show_waiting` is told when this rank begins and ends to wait for others. `overlap`: by what heads are sent
        in chunks; without it all at once."""
        self.plan = plan
        self._chunks = None if overlap is None else partial(choose_chunks, rates=overlap)
        self.traffic = Traffic(show_waiting=show_waiting)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.member = rank < plan.ranks
        # An axis of one needs no group; gloo has no collectives for device memory.
        self._staged = dist.is_initialized() and dist.get_backend() == "gloo" and device.type != "cpu"
        head_start = 0 if self._staged else card_choice(device).head_start_cycles
        self.axes = {
            axis: Axis(axis, getattr(plan, axis), index, None, self.traffic, self._staged, head_start)
            for axis, index in plan.coordinates(rank if self.member else 0).items()
        }
        cfg = self.axes["cfg"]
        first = self.axes["data"].index * cfg.size
        self.replica_groups = range(first, first + cfg.size)  # the batch groups of this rank's replica
        self.batch_group = first + cfg.index  # this rank's
        for axis in GROUPED_AXES:
            if self.axes[axis].size > 1:
                self.axes[axis].group = groups.join(ACTIVATIONS, runs_along(plan, axis))
        self._sequence_axis = self._join_sequence(groups)
        self._previous, self._next = self._join_stages(groups)
        shards = plan.layout.shards
        sharing = [group.ranks for group in weight_groups(plan.layout)]
        index = next((ranks.index(rank) for ranks in sharing if rank in ranks), 0)
        weights = Traffic(region="weights", show_waiting=show_waiting)
        self.shard_axis = Axis("shards", shards, index, None, weights, self._staged)
        if shards > 1:
            self.shard_axis.group = groups.join(WEIGHTS, sharing)

    @property
    def previous_stage(self) -> P2PChannel:
        """The link that messages of the stage before come over."""
        return _link_of_stages(self._previous)

    @property
    def next_stage(self) -> P2PChannel:
        """The link to the stage after, from the last stage to the first."""
        return _link_of_stages(self._next)

    def _join_stages(self, groups: Groups) -> tuple[P2PChannel | None, P2PChannel | None]:
        """This rank's links from the stage before and to the stage after. A group each: (sender, receiver)."""
        previous = following = None
        made = partial(P2PChannel, traffic=self.traffic, depth=4 * self.plan.num_patches, staged=self._staged)
        for sender, receiver in links_of(self.plan):
            group = groups.join(LINK, [(sender, receiver)])
            if group is not None and dist.get_rank() == sender:
                following = made(peer=receiver, group=group)
            elif group is not None:
                previous = made(peer=sender, group=group)
        return previous, following

    def _join_sequence(self, groups: Groups) -> Axis | None:
        """All ranks that share a sequence as one axis, where they need a group."""
        if not has_sequence_group(self.plan):
            return None
        group = groups.join(ACTIVATIONS, runs_along(self.plan, *TOKEN_AXES))
        index = 0
        for axis in map(self.axes.__getitem__, TOKEN_AXES):
            index = index * axis.size + axis.index
        return Axis("sequence", self.plan.parts, index, group, self.traffic, self._staged)

    @cached_property
    def attention(self) -> SequenceParallelAttention:
        """The attention of this plan over a sequence that its ring and ulysses ranks share.

        Raises `ValueError` for a plan with an axis that neither rows, stages nor attention use: its ranks would each
        compute all tokens, and no result would show it.
        """
        ring, ulysses = self.axes["ring"], self.axes["ulysses"]
        attention = SequenceParallelAttention(
            ring=ring,
            ulysses=ulysses,
            whole=self._sequence_axis,
            chunks=self._chunks,
            shares=self.plan.shares_within(self.batch_group),
        )
        used = self.plan.batch_groups * self.plan.pipefusion * attention.parts
        if used != self.plan.ranks:
            raise ValueError(
                f"{self.plan.describe()} has {self.plan.ranks} ranks, and {used} share the work; the others would "
                "compute the same again: give Mesh.attention the axis that it lacks"
            )
        return attention

    def probe(self, device: torch.device) -> ProbeReply:
        """Measure this rank's device and its ulysses axis; ranks in no group measure nothing and wait for none."""
        return probe(self.axes["ulysses"], device) if self.member else ProbeReply()

    def wrong_bytes(self, device: torch.device, beat: Callable[[], None] = lambda: None) -> int:
        """Exchange a known pattern over every group; how many bytes of what this rank received are not as sent.

        `beat` as in `count_wrong_bytes`.
        """
        axes = (*self.axes.values(), self._sequence_axis, self.shard_axis)
        used = [axis for axis in axes if axis is not None and axis.group is not None]
        wrong = sum(count_wrong_bytes(axis, device, beat) for axis in used)
        if self._previous is not None and self._next is not None:
            wrong += count_wrong_bytes_of_links(self._previous, self._next, device)
        return wrong


def _link_of_stages(link: P2PChannel | None) -> P2PChannel:
    if link is None:
        raise ValueError("a plan without stages has no links between them; use a plan with pipefusion of 2 or more")
    return link
