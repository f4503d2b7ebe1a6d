"""What a thread of ComfyUI's brings along besides its arguments, for a thread that does a part of its work.

Owns torch's settings of a thread (inference and grad mode, autocast, CUDA's device and stream) and its global random
numbers. Context variables are the business of whoever starts the thread.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

AUTOCAST = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class ThreadState:
    """The settings of one thread, to have them in another."""

    inference: bool
    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    stream: torch.cuda.Stream | None

    @classmethod
    def here(cls) -> "ThreadState":
        """Those of this thread. A CUDA that nobody has used yet stays untouched."""
        return cls(
            inference=torch.is_inference_mode_enabled(),
            grad=torch.is_grad_enabled(),
            autocast=tuple((k, torch.get_autocast_dtype(k)) for k in AUTOCAST if torch.is_autocast_enabled(k)),
            stream=torch.cuda.current_stream() if torch.cuda.is_initialized() else None,
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have them in the thread of the block; a new thread has torch's defaults."""
        with ExitStack() as stack:
            if self.stream is not None:
                stack.enter_context(torch.cuda.stream(self.stream))  # and its device
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            yield


class RandomNumbers:
    """torch's global generators as `cooperative_tasks.Kept`: the CPU's and, where CUDA is in use, that of its current
    device."""

    def get(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Their states."""
        return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def put(self, version: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        """Continue from these states."""
        cpu, cuda = version
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
