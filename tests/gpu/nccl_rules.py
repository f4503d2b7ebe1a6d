"""NCCL's documented rules for ranks on pretend devices: a process group whose messages travel over gloo.

    host thread      issue(A) issue(B) ..                 A.wait()                    B.wait()
    communicator     |  A waits for its peers, moves  |  B waits for its peers, moves  | ..

Sources: NCCL's user guide (Communicators, Point-to-point, "Using multiple NCCL communicators concurrently") and torch's
ProcessGroupNCCL. What holds here:

- Operations of a communicator run one after another, in the order in which this rank issued them. Ranks bind their
  device, so single sends and receives share the group's communicator with everything else.
- An operation runs once every peer's matching operation is at the head of its own queue. A batch is one operation.
- Ranks agree on what an operation is, on its bytes and on its dtype. No message is empty.
- NCCL connects ranks when they first need it: a sender and a receiver with their first message, all ranks of a group
  with their first gather (NCCL_RUNTIME_CONNECT, which is on). That blocks the hosts of both ends until both are there
  (NVIDIA/nccl issues 415 and 1346, `ncclTransportP2pSetup`). A batch connects all that it needs.
- Destroying a group blocks the host until all of its ranks destroy it, and nothing may be in flight on it. So ranks
  that destroy groups in other orders may wait in a circle (pytorch pull request 190431).
- An operation that a graph holds (tape.py) meets those of graphs alone: ranks capture and replay alike. It connects
  nobody, so what it does was done before. A graph holds one communicator's operations, and goes before that does.
- Tensors are contiguous. Everything issued is waited for before a request ends. Who uses an operation's tensors before
  has a race with its stream (pretend_cuda/device.py).

A host that blocks in `wait`, where a GPU's stream would, leaves the order of operations as it is: what is issued after
a wait depends on it either way. Owns the rules. Does not own which requests they are put to (pretend_cuda/).
"""

import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.utils._python_dispatch import _disable_current_modes

BACKEND = "nccl_rules"
HEADER_BYTES = 512
LOOK_S = 0.05  # how often a host that waits looks whether anything can still move
OTHERS_NOTICE_S = 0.3


class NcclRuleError(RuntimeError):
    """A rule was broken, or nothing moves any more."""


@dataclass(frozen=True)
class Message:
    """Bytes to or from one rank of a group, as they were or where they land, of tensors of that dtype."""

    peer: int
    outgoing: bool
    data: Tensor
    dtype: torch.dtype


@dataclass
class Simulation:
    """This rank's end of the wire, what is in flight on it, and how the present request is run."""

    wire: ProcessGroupGloo
    store: dist.Store
    rank: int
    device: Any  # what queues operations on a device's streams (pretend_cuda/device.py)
    deadline_s: float = 20.0  # what nothing moves for so long is a deadlock
    pending: list["SimulatedWork"] = field(default_factory=list)
    connected: set[tuple[int, ...]] = field(default_factory=set)
    in_graph: bool = False
    graphs: weakref.WeakSet = field(default_factory=weakref.WeakSet)  # that live
    ever_connected: set[tuple[int, ...]] = field(default_factory=set)

    def keep(self, graph: Any) -> None:
        """Know a graph while it lives. Raises `NcclRuleError` for one that holds exchanges of several groups."""
        if len({id(group) for group in graph.groups}) > 1:
            raise NcclRuleError("a graph holds exchanges of several communicators, which NCCL may deadlock on")
        self.graphs.add(graph)

    @contextmanager
    def marking(self) -> Iterator[None]:
        """Around what a graph does."""
        self.in_graph = True
        try:
            yield
        finally:
            self.in_graph = False

    def begin(self, deadline_s: float) -> None:
        """A request begins; connections are made anew."""
        self.deadline_s = deadline_s
        self.connected.clear()

    def end(self) -> None:
        """Raise `NcclRuleError` when anything was issued and not waited for."""
        if self.pending:
            raise NcclRuleError(f"{self.pending[0].text} was never waited for; {len(self.pending)} are in flight")

    def idle(self) -> None:
        """Return when all that was issued has moved, as a device does before it loads a kernel."""
        for work in tuple(self.pending):
            work.finish()

    def new_group(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> "SimulatedGroup":
        """What `init_process_group` and `new_group` call on every member."""
        store.set(f"member {rank}", str(self.rank))
        if rank == 0:
            store.set("number", str(self.store.add("communicators", 1)))
        members = [int(store.get(f"member {index}")) for index in range(size)]
        return SimulatedGroup(self, rank, members, number=int(store.get("number")))


class SimulatedWork(dist.Work):
    """An operation from when it is issued to when it was waited for."""

    def __init__(self, simulation: Simulation, kind: str, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        super().__init__()
        self.kind = self.text = f"{kind} in a graph" if simulation.in_graph else kind
        self.error: BaseException | None = None
        self.line: Line  # once it is issued
        self.queued: Any = None  # what stands for its end on the device
        self._simulation, self.done, self._waited = simulation, threading.Event(), False
        for tensor in (*sources, *targets):
            if not tensor.is_contiguous():
                raise NcclRuleError(f"{kind} of {tuple(tensor.shape)} with strides {tensor.stride()}; NCCL takes none")
        with _disable_current_modes():
            self.sources = [(tensor, as_bytes(tensor).cpu().clone()) for tensor in sources]
            self.targets = [(tensor, torch.empty_like(as_bytes(tensor), device="cpu")) for tensor in targets]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when sources may be written to and targets read."""
        if self._waited:
            return True
        self._waited = True
        self._simulation.pending.remove(self)
        self.finish()
        self.queued.wait()
        with _disable_current_modes():
            for tensor, landed in self.targets:
                as_bytes(tensor).copy_(landed)
        return True

    def finish(self) -> None:
        """Return when it has moved. Raises what went wrong with it."""
        while not self.done.wait(LOOK_S):
            self.line.refuse_standstill()
        if self.error is not None:
            raise self.error


class Line:
    """Operations among some ranks of the world that run one after another."""

    def __init__(self, simulation: Simulation, members: Sequence[int], tag: int) -> None:
        self._simulation, self._members, self._tag = simulation, members, tag
        self._queue: queue.Queue[tuple[SimulatedWork, str, Sequence[int], list[Message]] | None] = queue.Queue()
        self._head: tuple[str, float] | None = None  # what it is at, and since when
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, work: SimulatedWork, kind: str, peers: Sequence[int], messages: list[Message]) -> SimulatedWork:
        """Put an operation behind those before it; it begins when `peers` are at one of that kind."""
        work.line = self
        self._queue.put((work, kind, peers, messages))
        return work

    def end(self) -> None:
        """End it, once all that was put has ended."""
        self._queue.put(None)

    def refuse_standstill(self) -> None:
        """Raise `NcclRuleError` when what is at the head of the line has waited for its peers for too long."""
        head, deadline_s = self._head, self._simulation.deadline_s
        if head is None or time.monotonic() - head[1] < deadline_s:
            return
        behind = [queued[0].text for queued in tuple(self._queue.queue) if queued is not None]
        store, rank = self._simulation.store, self._simulation.rank
        store.set(f"stuck {rank}", f"rank {rank} waits in {', before '.join((head[0], *behind))}")
        time.sleep(OTHERS_NOTICE_S)
        names = [f"stuck {other}" for other in range(self._simulation.wire.size())]
        said = [store.get(name).decode() for name in names if store.check([name])]
        raise NcclRuleError(f"deadlock for {deadline_s:g} s: {'; '.join(said)}")

    @torch.inference_mode()
    def _run(self) -> None:
        error: BaseException | None = None  # nothing that is or comes behind what went wrong moves
        while (queued := self._queue.get()) is not None:
            work, kind, peers, messages = queued
            self._head = work.text, time.monotonic()
            if error is None:
                try:
                    self._meet(kind, peers, messages, work.text)
                    self._move(messages)
                except RuntimeError as raised:
                    error = raised
            self._head = None
            work.error = error
            work.done.set()  # it has moved, or cannot
            del queued, work, messages  # or what they sent stays until the next operation

    def _move(self, messages: list[Message]) -> None:
        moving = []
        for message in messages:
            if message.data.numel():
                move = self._simulation.wire.send if message.outgoing else self._simulation.wire.recv
                moving.append(move([message.data], self._members[message.peer], self._tag))
        for move in moving:
            move.wait()

    def _meet(self, kind: str, peers: Sequence[int], messages: list[Message], text: str) -> None:
        """Wait until each peer is at an operation, and see that it is the same one."""
        wire, members, tag, sent, came = self._simulation.wire, self._members, self._tag, [], {}
        towards = {peer: [message for message in messages if message.peer == peer] for peer in peers}
        for peer, own in towards.items():
            header = torch.tensor(list(_header(kind, own).ljust(HEADER_BYTES).encode()), dtype=torch.uint8)
            sent.append(wire.send([header], members[peer], tag))
            theirs = torch.empty_like(header)
            came[peer] = wire.recv([theirs], members[peer], tag), theirs
        for peer, (coming, theirs) in came.items():
            coming.wait()
            said, expected = bytes(theirs.tolist()).decode().rstrip(), _header(kind, towards[peer], other_end=True)
            if said != expected:
                raise NcclRuleError(f"{text}: rank {members[peer]} is at {said}; ranks must agree, here on {expected}")
        for message in sent:
            message.wait()


class SimulatedGroup(dist.ProcessGroup):
    """A process group of this rank and others, with one communicator."""

    def __init__(self, simulation: Simulation, rank: int, members: list[int], *, number: int) -> None:
        super().__init__(rank, len(members))
        self._simulation, self._members, self._number = simulation, members, number
        self._others = [peer for peer in range(len(members)) if peer != rank]
        # what the communicator moves, and what hosts wait for each other in
        self._operations, self._hosts = (Line(simulation, members, 2 * number + host) for host in (0, 1))

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        """As torch asks for it."""
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        """As torch names it. torch's own keeps the name in its backends, of which this has none."""
        self._name = name

    @property
    def group_name(self) -> str:
        """As torch asks for it when it forgets the group."""
        return self._name

    def shutdown(self) -> None:
        """As torch calls it to destroy the group."""
        left = next((work for work in self._simulation.pending if work.line is self._operations), None)
        if left is not None:
            raise NcclRuleError(f"{left.text}: its group is destroyed before it was waited for")
        if any(group is self for graph in self._simulation.graphs for group in graph.groups):
            raise NcclRuleError(f"the group of ranks {tuple(self._members)} ends while a graph holds its exchanges")
        self._by_host("destroy", self._others, [], "ending the communicator of")
        for line in (self._operations, self._hosts):
            line.end()

    def alltoall_base(
        self, target: Tensor, source: Tensor, target_lengths: list[int], source_lengths: list[int], _: object = None
    ) -> SimulatedWork:
        """Runs of rows of everybody to everybody."""
        if not (target_lengths or source_lengths):  # equal runs
            target_lengths, source_lengths = (
                [tensor.shape[0] // len(self._members)] * len(self._members) for tensor in (target, source)
            )
        work = SimulatedWork(self._simulation, "all_to_all", [source], [target])
        row_bytes = [data.numel() // max(1, tensor.shape[0]) for tensor, data in (*work.sources, *work.targets)]
        outgoing = work.sources[0][1].split([rows * row_bytes[0] for rows in source_lengths])
        incoming = work.targets[0][1].split([rows * row_bytes[1] for rows in target_lengths])
        return self._everybody(work, outgoing, incoming)

    def all_gather_single(self, target: Tensor, source: Tensor, _: object = None) -> SimulatedWork:
        """Everybody's tensor to everybody."""
        work = SimulatedWork(self._simulation, "all_gather", [source], [target])
        outgoing = [work.sources[0][1]] * len(self._members)
        return self._everybody(work, outgoing, work.targets[0][1].chunk(len(self._members)))

    _allgather_base = all_gather_single  # its name before torch 2.13

    def send(self, tensors: list[Tensor], peer: int, _: int = 0) -> SimulatedWork:
        """One tensor to one rank of the group."""
        return self._some("isend", [(tensors[0], peer)], [])

    def recv(self, tensors: list[Tensor], peer: int, _: int = 0) -> SimulatedWork:
        """One tensor from one rank of the group."""
        return self._some("irecv", [], [(tensors[0], peer)])

    def batch(self, operations: Sequence[dist.P2POp]) -> SimulatedWork:
        """Sends and receives as one operation, as between ncclGroupStart and ncclGroupEnd."""
        sends, receives = (
            [(each.tensor, each.group_peer) for each in operations if (each.op is dist.isend) is outgoing]
            for outgoing in (True, False)
        )
        return self._some("batch", sends, receives)

    def _everybody(self, work: SimulatedWork, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> SimulatedWork:
        me, others, dtype = self.rank(), self._others, work.sources[0][0].dtype
        incoming[me].copy_(outgoing[me])
        messages = [Message(peer, True, outgoing[peer], dtype) for peer in others]
        messages += [Message(peer, False, incoming[peer], dtype) for peer in others]
        self._connect(messages, gather=work.kind.startswith("all_gather"))
        return self._issue(work, work.kind, others, messages)

    def _some(self, kind: str, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> SimulatedWork:
        work = SimulatedWork(self._simulation, kind, *([tensor for tensor, _ in run] for run in (sends, receives)))
        messages = [
            Message(peer, outgoing, data, tensor.dtype)
            for outgoing, run, held in ((True, sends, work.sources), (False, receives, work.targets))
            for (tensor, peer), (_, data) in zip(run, held, strict=True)
        ]
        self._connect(messages, gather=False)
        work.kind += self._towards(messages)
        if not all(message.data.numel() for message in messages):
            raise NcclRuleError(f"{work.kind}: a message without elements; leave it out on both sides")
        return self._issue(work, "point to point", _peers(messages), messages)

    def _issue(self, work: SimulatedWork, kind: str, peers: list[int], messages: list[Message]) -> SimulatedWork:
        """Put an operation behind those before it."""
        work.text = f"{work.kind} among ranks {tuple(self._members)}"
        tensors = ([tensor for tensor, _ in run] for run in (work.sources, work.targets))
        work.queued = self._simulation.device.issue(work.text, self, *tensors)
        self._simulation.pending.append(work)
        return self._operations.put(work, kind, peers, messages)

    def _connect(self, messages: Sequence[Message], *, gather: bool) -> None:
        """Make the connections that these messages need and that are not there: the host waits for the other ends."""
        simulation, new = self._simulation, []
        known = simulation.ever_connected if simulation.in_graph else simulation.connected
        for message in messages:
            ends = (self.rank(), message.peer) if message.outgoing else (message.peer, self.rank())
            link = (self._number, gather, *ends)
            if not message.data.numel() or link in known:
                continue
            if simulation.in_graph:
                raise NcclRuleError(f"connecting{self._towards([message])} in a graph; do the same once before it")
            simulation.ever_connected.add(link)
            simulation.connected.add(link)
            new.append(replace(message, data=torch.zeros(1, dtype=torch.uint8), dtype=torch.uint8))
        if new:
            self._by_host("connect", _peers(new), new, f"connecting{self._towards(new)} among")

    def _towards(self, messages: Sequence[Message]) -> str:
        return ",".join(f" {'to' if each.outgoing else 'from'} rank {self._members[each.peer]}" for each in messages)

    def _by_host(self, kind: str, peers: Sequence[int], messages: list[Message], text: str) -> None:
        """Have the host wait until `peers` do the same."""
        work = SimulatedWork(self._simulation, kind, [], [])
        work.text = f"{text} ranks {tuple(self._members)}"
        self._hosts.put(work, kind, peers, messages).finish()


def join_world(device: Any) -> Simulation:
    """Put a world with NCCL's rules in the place of the gloo world that this rank has joined."""
    rank, size, store = dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store()
    store.add("left the gloo world", 1)
    while store.add("left the gloo world", 0) < size:  # or who leaves first breaks off the connecting of the others
        time.sleep(0.002)
    dist.destroy_process_group()
    patience = timedelta(days=1)
    wire = ProcessGroupGloo(dist.PrefixStore("wire", store), rank, size, patience)
    simulation = Simulation(wire, dist.PrefixStore("simulation", store), rank, device)
    dist.Backend.register_backend(BACKEND, simulation.new_group, devices=["cuda"])
    dist.init_process_group(
        BACKEND, store=dist.PrefixStore("world", store), rank=rank, world_size=size, timeout=patience
    )
    # torch batches for groups of its own kind alone.
    dist.batch_isend_irecv = dist.distributed_c10d.batch_isend_irecv = _batch
    return simulation


def _batch(operations: Sequence[dist.P2POp]) -> list[SimulatedWork]:
    return [(operations[0].group or dist.group.WORLD).batch(operations)]


def launches(func: torch._ops.OpOverload) -> bool:
    """Whether an operator runs a kernel: it is no view and does more than to allocate."""
    is_view = any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)
    return not is_view and "empty" not in func._schema.name


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes, (n,)."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _peers(messages: Sequence[Message]) -> list[int]:
    return sorted({message.peer for message in messages})


def _header(kind: str, messages: Sequence[Message], *, other_end: bool = False) -> str:
    """What a rank says to one peer of an operation before its bytes, or what it is to hear from the `other_end`."""
    sends, receives = (
        ", ".join(f"{each.data.numel()} bytes of {each.dtype}" for each in messages if each.outgoing is outgoing)
        for outgoing in (not other_end, other_end)
    )
    return f"{kind}, sends {sends or 'nothing'}, receives {receives or 'nothing'}"
