"""Stages of a pipeline exchange messages in groups with which a GPU cannot wait for itself."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from parallel_runtime.parallel.pattern import RUN_BYTES
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.worker.mesh import Groups, Mesh
from parallel_runtime.worker.start import BACKEND_TIMEOUT

from .gloo_group import GlooGroup
from .ranks import in_ranks

CPU = torch.device("cpu")


@in_ranks(3)
def test_each_direction_has_a_group_of_its_own_and_a_circle_whose_first_sends_wait_for_their_receives_ends(
    group: GlooGroup,
) -> None:
    """NCCL connects two ranks with their first message, for which both hosts wait; gloo's sends return at once."""
    send, connected = dist.isend, set[str]()

    def connecting(tensor: torch.Tensor, peer: int, group: Any) -> Any:
        work = send(tensor, peer, group=group)
        if group.group_name in connected:
            return work
        connected.add(group.group_name)
        work.wait()
        return SimpleNamespace(wait=lambda: True)  # gloo is done with a message when it was asked for

    for stages in (2, 3):
        plan = ParallelPlan(pipefusion=stages)
        mesh = Mesh(plan, device=CPU, groups=Groups(), show_waiting=lambda _: None)
        with mock.patch.object(dist, "isend", connecting):
            assert mesh.wrong_bytes(CPU) == 0
        with mock.patch.object(dist, "isend", lambda run, *to, **by: send(run + (group.index == 0), *to, **by)):
            assert mesh.wrong_bytes(CPU) == (RUN_BYTES if group.index == 1 else 0)
        if group.index < stages:
            links = {"from": mesh.previous_stage, "to": mesh.next_stage}
            for step, each in zip((-1, 1), links.values(), strict=True):
                assert each.peer == (group.index + step) % stages
                assert sorted(dist.get_process_group_ranks(each.group)) == sorted((group.index, each.peer))
            assert links["from"].group.group_name != links["to"].group.group_name


@in_ranks(2)
def test_each_group_waits_as_long_as_the_default_one_whatever_torch_gives_a_group_by_itself(group: GlooGroup) -> None:
    """Which is half an hour, and ten minutes over NCCL: a run that is paused for longer would end."""
    groups = Groups()
    for plan in ("pipefusion=2", "ulysses=2,weights=sharded"):
        Mesh(ParallelPlan.parse(plan), device=CPU, groups=groups, show_waiting=lambda _: None)
    made = [each for each in groups._made.values() if each is not dist.group.WORLD]
    assert len(made) == 3, "a link each way, and one of the weights"
    assert {each._get_backend(CPU).options._timeout for each in made} == {BACKEND_TIMEOUT}


@in_ranks(2)
def test_what_a_link_sends_is_counted_once_and_what_is_empty_is_not_sent(group: GlooGroup) -> None:
    mesh = Mesh(ParallelPlan(pipefusion=2), device=CPU, groups=Groups(), show_waiting=lambda _: None)
    link, traffic = (mesh.next_stage if group.index == 0 else mesh.previous_stage), mesh.traffic
    before = traffic.calls, traffic.num_bytes
    if group.index == 0:
        for tensor in (torch.ones(3, 5), torch.ones(0, 5), torch.ones(2)):
            link.send(tensor)
        link.drain()
    else:
        got = [link.post(torch.empty(shape)).wait() for shape in ((3, 5), (0, 5), (2,))]
        assert [each.sum().item() for each in got] == [15.0, 0.0, 2.0]
    sent = traffic.calls - before[0], traffic.num_bytes - before[1]
    assert sent == ((2, 4 * 17) if group.index == 0 else (0, 0))
