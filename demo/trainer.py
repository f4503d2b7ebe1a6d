"""The loop that trains one network: random numbers by step, learning rate, state on disk to go on from, the curve.

Owns: what of a training run is resumed, and how. Does not own: what is learnt (train.py). The state is safetensors.
A step's random numbers depend on seed, name and step alone, so a run that was cut and resumed ends as one that was not.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

SHOWN_EVERY = 50  # steps; the curve has a point for each


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How one network is trained; a state resumes only under the settings that it was written with."""

    steps: int
    batch: int
    lr: float
    seed: int
    data: str = ""  # what else makes the batches what they are


def show(text: str) -> None:
    """Prints a line at once."""
    print(text, flush=True)  # noqa: T201


def numbers(name: str, seed: int, step: int, device: torch.device) -> torch.Generator:
    """The random numbers of one step."""
    return torch.Generator(device).manual_seed(zlib.crc32(f"{name}:{seed}:{step}".encode()))


class Trainer:
    """One network, its optimizer, and how far it is."""

    def __init__(self, name: str, network: nn.Module, settings: Settings, state: Path, device: torch.device) -> None:
        self.name, self.network, self.settings, self.device = name, network, settings, device
        self.path = state / f"{name}.state.safetensors"
        self.optimizer = torch.optim.AdamW(
            network.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=device.type == "cuda"
        )
        self.step, self.curve, self.cpu_s = 0, list[float](), 0.0
        if self.path.exists():
            self._resume()

    def lr_at(self, step: int) -> float:
        """A warm-up of up to 200 steps, then a straight line to a fiftieth."""
        warmup = min(200, max(self.settings.steps // 10, 1))
        left = 1 - step / self.settings.steps
        return self.settings.lr * min((step + 1) / warmup, 0.02 + 0.98 * left)

    def run(
        self, loss_of: Callable[[torch.Generator], Tensor], *, save_every: int, on_save: Callable[[], object]
    ) -> None:
        """Trains to the last step, in bf16 autocast; every `save_every` steps and at the end it calls `on_save`."""
        settings, parameters = self.settings, list(self.network.parameters())
        if self.step >= settings.steps:  # a finished state, and files that may be wanted elsewhere
            self.network.eval()
            on_save()
        self.network.train()
        total, started, cpu_started = torch.zeros((), device=self.device), time.monotonic(), time.process_time()
        while self.step < settings.steps:
            self.step += 1
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr_at(self.step - 1)
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = loss_of(numbers(self.name, settings.seed, self.step, self.device))
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            self.optimizer.step()
            total += loss.detach()
            if self.step % SHOWN_EVERY == 0:
                self.curve.append(float(total) / SHOWN_EVERY)
                total.zero_()
            if self.step % save_every == 0 or self.step == settings.steps:
                self.cpu_s, cpu_started = self.cpu_s + time.process_time() - cpu_started, time.process_time()
                last = f"{self.curve[-1]:.4f}" if self.curve else f"{float(loss.detach()):.4f}"
                wall_s = time.monotonic() - started
                show(f"{self.name}: step {self.step} of {settings.steps}, loss {last}, {wall_s:.0f} s")
                self._save()
                self.network.eval()
                on_save()
                self.network.train()
        self.network.eval()

    def _save(self) -> None:
        tensors = {f"network.{name}": value for name, value in self.network.state_dict().items()}
        for index, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in moments.items()}
        stored = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        told = {"step": self.step, "curve": self.curve, "cpu_s": self.cpu_s, "settings": asdict(self.settings)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".unfinished")
        save_file(stored, unfinished, {"training": json.dumps(told)})
        unfinished.replace(self.path)

    def _resume(self) -> None:
        with safe_open(self.path, "pt") as file:
            told = json.loads(file.metadata()["training"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if told["settings"] != asdict(self.settings):
            raise ValueError(
                f"{self.path} was written with {told['settings']}, this run has {asdict(self.settings)}; "
                "use the same options, or another --state"
            )
        network = {name.removeprefix("network."): each for name, each in tensors.items() if name.startswith("network.")}
        self.network.load_state_dict(network)
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                _, index, kind = name.split(".")
                moments.setdefault(int(index), {})[kind] = value
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})
        self.step, self.curve, self.cpu_s = told["step"], told["curve"], told["cpu_s"]
        show(f"{self.name}: goes on after step {self.step}")
