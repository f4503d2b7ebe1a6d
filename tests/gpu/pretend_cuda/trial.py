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

DTYPES = ("float32", "bfloat16", "float16")


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
    limit = reference.limit(trial.dtype)
    return "" if error <= limit else f"differs by {error:.1e}, more than {limit:.1e}"


def write_model(folder: Path) -> ModelSpec:
    """A model that up to three stages can split, whose heads of 16 the fused kernels take."""
    return spec_of(write_tiny(folder / "model.safetensors", dim=192, num_layers=3))
