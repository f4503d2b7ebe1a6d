"""The communicators whose memory the planner counts are those that ranks make; torch's fake backend stands for NCCL."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel_runtime.exchange_groups import groups_of
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.planner.counting import usual_counted
from parallel_runtime.planner.known import known_calibration
from parallel_runtime.planner.memory import (
    COMMUNICATOR_BYTES,
    CONNECTION_BYTES,
    NCCL_BYTES,
    communicators,
    kept_groups_bytes,
    memory_of,
)
from parallel_runtime.planner.work import Work
from parallel_runtime.worker import mesh
from parallel_runtime.worker.mesh import Groups, Mesh

PLANS = (
    "ulysses=1",
    "ulysses=4",
    "ring=2,ulysses=2",
    "cfg=2,ulysses=2",
    "cfg=2,ring=2,ulysses=2",
    "data=2,ulysses=2",
    "data=2,cfg=2",
    "pipefusion=2",
    "pipefusion=3",
    "pipefusion=2,ulysses=2,ring=2",
    "ulysses=4,weights=sharded",
    "cfg=2,ring=2,ulysses=2,weights=sharded",
    "pipefusion=2,ulysses=2,weights=sharded",
    "ulysses=2,weights=offloaded",
    "weights=offloaded",
)


def process_groups() -> dict:
    """All that torch has in this process."""
    return dist.distributed_c10d._world.pg_map


@pytest.fixture
def world() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("name", PLANS)
def test_the_planner_counts_the_communicators_that_every_rank_is_in(name: str, world: None) -> None:
    plan = ParallelPlan.parse(name)
    for rank in range(plan.ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.ranks)
        groups = Groups()
        Mesh(plan, device=torch.device("cpu"), groups=groups, show_waiting=lambda _: None)
        mine = {id(group): len(key.ranks) for key, group in groups._made.items() if rank in key.ranks}
        others = [key for key, group in groups._made.items() if group is not dist.group.WORLD]
        assert others == list(groups_of(plan, plan.ranks)), "all that ranks make is what the parent has in its book"
        assert all(len(key.ranks) > 1 for key in others), "a group costs threads and descriptors; of one rank is none"
        mine[id(dist.group.WORLD)] = plan.ranks  # made when a rank joins, whether a plan uses it or not
        dist.destroy_process_group()
        found = sorted(size for size in mine.values() if size > 1)
        assert found == sorted(communicators(plan, plan.ranks)), f"rank {rank}"


@pytest.mark.parametrize("name", PLANS)
def test_ranks_that_sleep_make_the_same_groups_and_free_them_once_nothing_is_in_flight(
    name: str, world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, waited = ParallelPlan.parse(name), []
    monkeypatch.setattr(mesh, "wait_for_all", lambda device: waited.append((device, len(process_groups()))))
    for rank in (0, 7):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        groups = Groups()
        Mesh(plan, device=torch.device("cpu"), groups=groups, show_waiting=lambda _: None)
        made = {key: group for key, group in groups._made.items() if group is not dist.group.WORLD}
        assert list(made) == list(groups_of(plan, 8))
        there = len(process_groups())
        groups.free(groups_of(plan, 8), torch.device("cpu"))
        assert waited.pop() == (torch.device("cpu"), there), "before the first is destroyed"
        assert len(process_groups()) == 1, "the one of all ranks is left"
        dist.destroy_process_group()


def test_the_planner_counts_a_pool_of_more_ranks_than_the_plan_has() -> None:
    work, rates = Work(image_tokens=4096, text_tokens=512), known_calibration("A100").rates
    runtime = [
        memory_of(usual_counted().model, work, ParallelPlan(), rates, num_ranks=ranks).runtime for ranks in (1, 2, 4, 8)
    ]
    assert runtime[1] - runtime[0] > NCCL_BYTES + COMMUNICATOR_BYTES + CONNECTION_BYTES + kept_groups_bytes(2) - 1
    assert runtime == sorted(runtime)


class WithAnAxisMore(ParallelPlan):
    """A plan with an axis of two that nobody has taught to share anything."""

    @property
    def ranks(self) -> int:
        return 2 * self.data * self.cfg * self.pipefusion * self.ring * self.ulysses


def test_a_plan_with_ranks_that_share_nothing_is_refused_not_computed_twice() -> None:
    def mesh(plan: ParallelPlan) -> Mesh:
        return Mesh(plan, device=torch.device("cpu"), groups=Groups(), show_waiting=lambda _: None)

    assert mesh(ParallelPlan()).attention.parts == 1
    with pytest.raises(ValueError, match=r"has 2 ranks, and 1 share the work; .* give Mesh.attention the axis"):
        _ = mesh(WithAnAxisMore()).attention
