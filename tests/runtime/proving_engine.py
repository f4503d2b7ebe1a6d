"""An engine whose plans can be wrong on purpose: what a proof must find out.

A call's option `wrong` names what is wrong. Owns what runs in the ranks; `test_proving.py` says what must be found. A
rank finds this module through `python_path`.
"""

from dataclasses import replace

import torch

from parallel_runtime.models.specs import spec_of
from parallel_runtime.worker import hosted
from parallel_runtime.worker.engine import Engine


def local_attention(plan):
    """The plan with blocks that attend to this rank's tokens alone."""
    return replace(plan, attention={"blocks": {"self_attn": "local", "cross_attn": "local"}})


class Reversed(hosted.SequenceParallelAttention):
    """Puts the parts together in the order of the last rank to the first."""

    def gather(self, tensor, *, dim, lengths):
        parts = super().gather(tensor, dim=dim, lengths=lengths).split(list(lengths), dim)
        return torch.cat(parts[::-1], dim)


class RoundsByShape(hosted.SequenceParallelAttention):
    """Rounds otherwise than a whole call, as TF32 does, while cuDNN may take that."""

    def gather(self, tensor, *, dim, lengths):
        coarse = 2e-5 if torch.backends.cudnn.allow_tf32 else 0.0
        return super().gather(tensor, dim=dim, lengths=lengths) * (1 + coarse)


class ShapesError(Exception):
    """A type of the class's own."""


def fail(wrong, call, numbers):
    """End the call as `wrong` says; `numbers` is how many come out of it."""
    if wrong == "raises" and not call.get("whole"):
        raise TypeError("forward() got an unexpected keyword argument 'rope'\nand more lines")
    if wrong == "corner" and numbers < 16 * 3 * 40 * 40:
        raise ShapesError("no layer is made for this")


class ProvingEngine(Engine):
    """The engine, with a wrong attention or gather, or an error, for calls that ask for it."""

    def _step(self, request, specs, **told):
        wrong, model = request.calls[0].get("wrong"), self.models.get(request.model)
        numbers = next(spec.shape[1] for spec in specs if spec.name == "0.out")
        fail(wrong, request.calls[0], numbers)
        if model is not None and model.shared is not None:  # another plan may come: the hooks are put anew
            model.shared.remove()
            model.shared = None
        local = wrong == "attention" or (wrong == "other size" and numbers != 16 * 3 * 10 * 14)
        hosted.spec_of = lambda kind: local_attention(spec_of(kind)) if local else spec_of(kind)
        return super()._step(request, specs, **told)

    def _forward(self, model, mesh, request, **told):
        forward = super()._forward(model, mesh, request, **told)
        kind = {"gather": Reversed, "tf32": RoundsByShape}.get(request.calls[0].get("wrong"))
        if kind is not None:
            right = forward.sequence
            forward.sequence = kind(ring=right.ring, ulysses=right.ulysses, whole=right.whole)
        return forward
