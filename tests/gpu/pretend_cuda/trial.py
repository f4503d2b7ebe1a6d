"""One run of a plan on pretend devices against CPU ranks, in the dtype and on the hardware that it says.

Owns what is right. Which trials there are is the callers'.
"""

from dataclasses import dataclass
from pathlib import Path

from gpu.cases import Case, Reference
from gpu.pretend_cuda.pool import PretendPool
from host.tiny_hosted import spec_of, write_tiny
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.errors import PoolError

# Against CPU ranks in fp32: sums in another order, and in halves four calls of a model rounded to 8 and to 11 bits.
# In halves twice what one CPU rank differs by in any of the runs (1.6e-2, 2.0e-3); without exchange it is 0.3.
TOLERANCES = {"float32": 1e-5, "bfloat16": 3.2e-2, "float16": 4e-3}


@dataclass(frozen=True, kw_only=True)
class Trial(Case):
    """A case and the device it runs on. `shared`: all ranks on one device, which exchange through the host."""

    dtype: str = "float32"
    capability: tuple[int, int] = (8, 6)
    lazy: bool = False
    launches_wait: bool = False
    shared: bool = False

    def settings(self) -> dict[str, object]:
        """The device it runs on."""
        nccl = {"lazy": self.lazy, "deadline_s": 10.0}
        return {"capability": self.capability, "launches_wait": self.launches_wait, "nccl": nccl}


def wrong(pool: PretendPool, reference: Reference, trial: Trial, **settings: object) -> str:
    """What is wrong with a trial's result, nothing when it is right. A failure is its error's first line."""
    pool.tell({**trial.settings(), **settings})
    try:
        error = reference.error(pool, trial, {}, dtype=trial.dtype)
    except PoolError as failure:
        return str(failure).splitlines()[0]
    return "" if error <= TOLERANCES[trial.dtype] else f"differs by {error:.1e}, more than {TOLERANCES[trial.dtype]:g}"


def write_model(folder: Path) -> ModelSpec:
    """A model that up to three stages can split, whose heads of 16 the fused kernels take."""
    return spec_of(write_tiny(folder / "model.safetensors", dim=192, num_layers=3))
