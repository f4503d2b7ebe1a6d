"""An engine whose steps break one of NCCL's rules each, and note what the simulation says of it.

A rank finds this module through `python_path`; `test_nccl_rules.py` says what must be found.
"""

import torch
import torch.distributed as dist
from nccl_rules import NcclRuleError, Settings, join_world
from noted import note

from parallel_runtime.wire.protocol import Op
from parallel_runtime.wire.replies import EmptyReply, LoadReply, Memory, StepReply


class Breaking:
    """Answers LOAD and MESH so far as the pool needs it; a step is one breach, by two ranks in a group of their own."""

    def __init__(self, *, rank, device, segments):
        self.rank = rank
        self.simulation = join_world()

    def handle(self, message, *, progress, cancelled, beat):
        if message.op is Op.LOAD:
            return LoadReply(dtype="float32", memory=Memory(resident_bytes=0))
        if message.op is Op.MESH:
            return EmptyReply()
        self.simulation.begin(Settings(lazy=message.body.calls[0].get("lazy", False), deadline_s=1.0))
        said = ""
        with torch.inference_mode():
            try:
                said = BREACHES[message.body.calls[0]["breach"]](self.rank, dist.new_group([0, 1])) or said
                self.simulation.end()
            except NcclRuleError as error:
                said = str(error)
        self.simulation.pending.clear()  # what it left in flight stays in its own group
        note(message.body.calls[0], self.rank, said)
        return StepReply(ran=None, memory=Memory(resident_bytes=0))


def exchange(group, source, target, *, lengths=(2, 2)):
    return group.alltoall_base(target, source, list(lengths), list(lengths))


def sound(rank, group):
    """Every kind of operation once, all waited for: what arrived."""
    ours, theirs = torch.full((4, 3), float(rank)), torch.empty(4, 3)
    works = [exchange(group, ours, theirs)]
    whole, message = torch.empty(6, dtype=torch.uint8), torch.empty(5, dtype=torch.bfloat16)
    part = torch.full((3,), rank + 1, dtype=torch.uint8)
    works.append(group.all_gather_single(whole, part))
    sent = torch.full((5,), 7.0, dtype=torch.bfloat16)
    works.append(dist.isend(sent, 1, group=group) if rank == 0 else dist.irecv(message, 0, group=group))
    ring, came = torch.tensor([rank]), torch.tensor([9])
    pair = [dist.P2POp(dist.isend, ring, 1 - rank, group), dist.P2POp(dist.irecv, came, 1 - rank, group)]
    works += dist.batch_isend_irecv(pair)
    poisoned = [bool(theirs.isnan().all()), whole.tolist() == [255] * 6, came.tolist() == [-1]]
    for work in works:
        work.wait()
    return f"{poisoned} {theirs[:, 0].tolist()} {whole.tolist()} {message.tolist() if rank else ''} {came.tolist()}"


def each_sends_first(rank, group):
    works = [dist.isend(torch.ones(3), 1 - rank, group=group), dist.irecv(torch.ones(3), 1 - rank, group=group)]
    works[1].wait()


def nobody_connects(rank, group):
    if rank == 0:
        dist.irecv(torch.ones(3), 1, group=group)


def nobody_comes(rank, group):
    exchange(group, torch.ones(4, 3), torch.empty(4, 3)).wait()  # connects them
    if rank == 0:
        dist.irecv(torch.ones(3), 1, group=group).wait()


def a_circle_of_first_messages(rank, group):
    """Each direction in a group of its own, as links have; without connecting, both sends would be in flight."""
    links = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    sent = dist.isend(torch.ones(3), 1 - rank, group=links[rank])
    dist.irecv(torch.ones(3), 1 - rank, group=links[1 - rank]).wait()
    sent.wait()


def strided(rank, group):
    exchange(group, torch.ones(3, 4).t(), torch.empty(4, 3))


def source_written(rank, group):
    source = torch.ones(4, 3)
    work = exchange(group, source, torch.empty(4, 3))
    source.zero_()
    work.wait()


def target_written(rank, group):
    target = torch.empty(4, 3)
    work = exchange(group, torch.ones(4, 3), target)
    target[0] = 1
    work.wait()


def never_waited(rank, group):
    exchange(group, torch.ones(4, 3), torch.empty(4, 3))


def destroyed_in_flight(rank, group):
    exchange(group, torch.ones(4, 3), torch.empty(4, 3))
    dist.destroy_process_group(group)


def other_order(rank, group):
    exchange(group, torch.ones(4, 3), torch.empty(4, 3)).wait()
    group.all_gather_single(torch.empty(4, 3), torch.ones(2, 3)).wait()
    first = exchange if rank else (lambda group, source, target: group.all_gather_single(target, source[:2]))
    first(group, torch.ones(4, 3), torch.empty(4, 3)).wait()


def unequal(rank, group):
    tensor = torch.ones(3 + rank)
    (dist.irecv(tensor, 0, group=group) if rank else dist.isend(tensor, 1, group=group)).wait()


def other_dtype(rank, group):
    tensor = torch.ones(4, dtype=torch.float16 if rank else torch.bfloat16)
    (dist.irecv(tensor, 0, group=group) if rank else dist.isend(tensor, 1, group=group)).wait()


def without_elements(rank, group):
    dist.isend(torch.empty(0), 1 - rank, group=group)


def uneven_sums(rank, group):
    exchange(group, torch.ones(4, 3), torch.empty(4, 3), lengths=(2, 1))


def uneven_gather(rank, group):
    group.all_gather_single(torch.empty(5), torch.ones(3))


def unknown_dtype(rank, group):
    exchange(group, torch.ones(4, 3, dtype=torch.int16), torch.empty(4, 3, dtype=torch.int16))


BREACHES = {
    breach.__name__: breach
    for breach in (
        *(sound, strided, source_written, target_written, never_waited, other_order, unequal, other_dtype),
        *(
            each_sends_first,
            nobody_connects,
            nobody_comes,
            a_circle_of_first_messages,
            without_elements,
            destroyed_in_flight,
            uneven_sums,
            uneven_gather,
            unknown_dtype,
        ),
    )
}
