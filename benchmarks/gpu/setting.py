"""What an experiment is given, and what it hands back. Owns the two, the refusals, and where models lie."""

import gc
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.share import cases
from benchmarks.share.rank import OneRank
from parallel_runtime.checkpoint import ComfyUI
from parallel_runtime.models.hosted.comfyui import import_comfyui
from parallel_runtime.models.hosted.random_calls import Size
from parallel_runtime.planner.comfyui_process import find_comfyui, version_of

GIB = 2**30
NEEDED_GIB = 20  # free on the GPU: two blocks of the widest model, their activations at 33k tokens, and torch's own
SMALL_MODEL = "wan 2.1 t2v"  # of tests/families, for a CPU
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where experiments run. `small`: on a CPU and quickly, to see that they run; no figure of that says anything."""

    device: torch.device
    comfyui: ComfyUI
    models: Path
    small: bool = False

    @property
    def capability(self) -> tuple[int, int] | None:
        """The GPU's compute capability."""
        return torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None

    @property
    def dtype(self) -> str:
        """What models compute in."""
        return "bfloat16" if self.device.type == "cuda" else "float32"

    @property
    def steps(self) -> int:
        """Of a median."""
        return 1 if self.small else 5

    def key(self) -> dict[str, str]:
        """What a figure holds for: it is measured again where any of this is another."""
        cuda = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.device) if cuda else f"{platform.machine()} CPU",
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "none",
            "comfyui": version_of(self.comfyui),
            "size": "small" if self.small else "full",
        }

    def model_names(self) -> list[str]:
        """The models that are measured."""
        return [SMALL_MODEL] if self.small else list(cases.CASES)

    def file(self, name: str) -> Path:
        """The file of a model, written where it is not there yet."""
        self.models.mkdir(parents=True, exist_ok=True)
        return cases.write(name, self.models, "bfloat16" if name in cases.CASES else self.dtype)

    def size(self, name: str) -> Size:
        """The usual call of a model."""
        case = cases.CASES.get(name)
        if case is None:
            return Size(width=128, height=128, text_tokens=16, batch=1, seed=7)
        return Size(
            width=case.width, height=case.height, frames=case.frames, text_tokens=case.text_tokens, batch=1, seed=7
        )

    def rank(self, name: str) -> OneRank:
        """A model in this process. Imports ComfyUI."""
        import_comfyui(self.comfyui, self.device)
        return OneRank(str(self.file(name)), dtype=self.dtype, comfyui=self.comfyui, device=self.device)

    def each_model(self, measure: Callable[[str, OneRank], None]) -> dict[str, str]:
        """Have every model measured; what those that failed said. Raises what the last one raised where all did.

        In small form a failure is raised at once.
        """
        failed: dict[str, str] = {}
        for name in self.model_names():
            try:
                measure(name, self.rank(name))
            except (RuntimeError, ValueError) as error:
                failed[name] = str(error).partition("\n")[0]
                if self.small or len(failed) == len(self.model_names()):
                    raise
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return failed


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of one experiment: a table of lines, a sentence with what it decides, choices and the planner's constants.

    `failed`: what could not be measured, and why. With such the page has it, it decides nothing, and it is tried again.
    """

    table: list[str]
    decided: str
    failed: dict[str, str] = field(default_factory=dict)
    choices: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)

    def kept(self) -> dict[str, Any]:
        """As the state file has it."""
        return asdict(self)


def find_setting(*, small: bool, comfyui: str | None, models: Path, device: str | None = None) -> Setting:
    """Where experiments run. Raises `ValueError` for a machine on which they cannot."""
    found = find_comfyui(comfyui or cases.comfyui_of_tests())
    if small:
        return Setting(device=torch.device("cpu"), comfyui=found, models=models, small=True)
    count = torch.cuda.device_count()
    if not count:
        raise ValueError(
            f"torch {torch.__version__} sees 0 GPUs, and these experiments need 1; look at nvidia-smi, or use --small, "
            "which runs each in small form on the CPU"
        )
    where = torch.device(device or "cuda:0")
    free, total = torch.cuda.mem_get_info(where)
    refuse_little_memory(free, total, str(where))
    return Setting(device=where, comfyui=found, models=models)


def refuse_little_memory(free: int, total: int, where: str) -> None:
    """Raise `ValueError` where a model of published width would not fit."""
    if free < NEEDED_GIB * GIB:
        raise ValueError(
            f"{where} has {free / GIB:.1f} of {total / GIB:.1f} GiB free and the experiments need {NEEDED_GIB} GiB; "
            "close what else uses it (nvidia-smi names it)"
        )
