"""Plausible mistakes in what only a GPU runs, each with the trial that must find it.

As `mutants/` in spirit: `old` stands exactly once in the product's file and becomes `new`. Tried in a scratch copy.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from gpu.cases import Reference
from gpu.pretend_cuda.pool import PretendPool
from gpu.pretend_cuda.trial import Trial, wrong

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = "parallel_runtime"


@dataclass(frozen=True)
class Mutant:
    """name: what is wrong now. file: the product's only file of that name."""

    name: str
    file: str
    old: str
    new: str
    trial: Trial


@dataclass
class Scratch:
    """A copy of the product that may be spoilt."""

    folder: Path
    files: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shutil.copytree(ROOT / PRODUCT, self.folder / PRODUCT, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (self.folder / PRODUCT).rglob("*.py"):
            self.files[path.name] = path

    def wrong(self, reference: Reference, trial: Trial) -> str:
        """What is wrong with a trial as the copy is now."""
        ranks, folder = trial.parallel_plan.ranks, self.folder.parent
        with PretendPool(ranks, folder, shared=trial.shared, copy=self.folder) as pool:
            return wrong(pool, reference, trial)

    def found(self, reference: Reference, mutant: Mutant) -> str:
        """What the trial says of the mutant, nothing when it survives. `ValueError` for a text not found once."""
        path = self.files[mutant.file]
        text = path.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            raise ValueError(f"{mutant.name}: its old text stands {text.count(mutant.old)} times in {mutant.file}")
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        try:
            return self.wrong(reference, mutant.trial)
        finally:
            path.write_text(text, encoding="utf-8")


OFFLOADED = Trial(plan="ulysses=1", weights="offloaded")
SHARDED = Trial(plan="ulysses=2", weights="sharded")
ULYSSES, RING = Trial(plan="ulysses=2"), Trial(plan="ring=2")
STAGES = Trial(plan="pipefusion=2")
SHARED = Trial(plan="ulysses=2", shared=True)

MUTANTS = (
    Mutant(
        "computing does not wait for the copies of weights",
        "unit_feed.py",
        "            torch.cuda.current_stream(self.device).wait_stream(self._stream)",
        "            pass",
        OFFLOADED,
    ),
    Mutant(
        "copies of weights do not wait for computing",
        "unit_feed.py",
        "        self._stream.wait_stream(torch.cuda.current_stream(self.device))\n",
        "",
        OFFLOADED,
    ),
    Mutant(
        "one buffer of weights: filled while it is computed with",
        "unit_feed.py",
        "self._buffers[position % 2]",
        "self._buffers[0]",
        OFFLOADED,
    ),
    Mutant(
        "a gather of weights is not waited for",
        "unit_feed.py",
        "            gather.wait()",
        "            pass",
        SHARDED,
    ),
    Mutant(
        "buffers of weights on the first device",
        "unit_feed.py",
        "torch.empty(shard_bytes * size, dtype=torch.uint8, device=self.device)",
        'torch.empty(shard_bytes * size, dtype=torch.uint8, device="cuda:0")',
        SHARDED,
    ),
    Mutant(
        "a preview's copy does not wait for the step",
        "pinned.py",
        "        self._stream.wait_stream(torch.cuda.current_stream(self._device))\n",
        "",
        Trial(plan="ulysses=2", run="a mask, an odd length"),
    ),
    Mutant(
        "a preview is read before it has arrived",
        "host_copies.py",
        "if isinstance(first, _Pending) and not first.arrival.query():",
        "if False:",
        ULYSSES,
    ),
    Mutant(
        "the last previews are not waited for",
        "host_copies.py",
        "                first.arrival.synchronize()",
        "                pass",
        ULYSSES,
    ),
    Mutant(
        "a preview's event is recorded on the stream that computes",
        "pinned.py",
        "            arrival.record(self._stream)",
        "            arrival.record(torch.cuda.default_stream(self._device))",
        ULYSSES,
    ),
    Mutant(
        "an exchange of heads is not waited for",
        "collectives.py",
        "                self.work.wait()",
        "                pass",
        ULYSSES,
    ),
    Mutant(
        "a hop around the ring is not waited for",
        "ring.py",
        "                shift.wait()",
        "                pass",
        RING,
    ),
    Mutant(
        "a gather's second half is not waited for",
        "collectives.py",
        "                work.wait()  # once: gloo would take a second wait for a second message",
        "                pass",
        SHARDED,
    ),
    Mutant(
        "keys on the way around the ring are not contiguous",
        "ring.py",
        "held = torch.stack((k, v)).contiguous()",
        "held = torch.stack((k, v), -1).movedim(-1, 0)",
        RING,
    ),
    Mutant(
        "keys are written to while they travel",
        "ring.py",
        "                self.under_way = self._start_hop(hop)",
        "                self.under_way = self._start_hop(hop); self.held.mul_(1.5)",
        Trial(plan="ring=3"),
    ),
    Mutant(
        "what a stage receives is not waited for",
        "links.py",
        "        with link.traffic.waiting():\n            work.wait()\n    return tensor",
        "        pass\n    return tensor",
        STAGES,
    ),
    Mutant(
        "what a stage sends is left in flight",
        "links.py",
        "        while self._in_flight:\n            self._finish_oldest()",
        "        pass",
        STAGES,
    ),
    Mutant(
        "a stage receives on the first device",
        "links.py",
        'device="cpu" if link.staged else device)',
        'device="cpu" if link.staged else torch.device("cuda", 0))',
        STAGES,
    ),
    Mutant(
        "the memory-efficient kernel's padding is taken for a log-sum-exp",
        "kernels.py",
        "return out, lse[:, :, : q.shape[2]]",
        "return out, lse",
        RING,
    ),
    Mutant(
        "inputs on the first device",
        "latent.py",
        "to_device(self._mine(self._tensors[name]), self._timer.device)",
        'to_device(self._mine(self._tensors[name]), torch.device("cuda:0"))',
        ULYSSES,
    ),
    Mutant(
        "ranks that share a device exchange its memory",
        "mesh.py",
        'dist.get_backend() == "gloo" and device.type != "cpu"',
        "False",
        SHARED,
    ),
    Mutant(
        "what came through the host stays there",
        "collectives.py",
        "return self.received.to(self.device)",
        "return self.received",
        SHARED,
    ),
    Mutant(
        "what a ring received through the host is not copied to the device",
        "collectives.py",
        "                self.receive.copy_(self.target)",
        "                pass",
        Trial(plan="ring=2", shared=True),
    ),
)
