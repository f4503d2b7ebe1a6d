"""What of a sampling run is known before its first call, computed once: projected text, rotations, modulations.

Letters: `B` images of this rank's batch group, `E` calls, `C` hidden size. Source of the idea that a schedule can be
computed ahead: PipeFusion (arXiv 2405.14430) keeps its loop in the workers for the same reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..models.base import Block, Condition, Modulation
from ..plan import BatchSlice
from ..sampler_recurrence import SamplerRecurrence
from ..wire.requests import GroupWork
from .forward import Forward, Rows
from .inputs import call_tensors


@dataclass(frozen=True)
class Prepared:
    """One conditioning, made ready for all calls."""

    inputs: dict[str, torch.Tensor]  # each call writes the latent into the first rows and columns of "img"
    condition: Condition  # with vec (E, B, ..., C)
    modulations: dict[str, Modulation] = field(default_factory=dict)  # by block prefix, each (E, B, ...)

    def modulations_of(self, call: int) -> dict[str, Modulation]:
        """Those of one call, by block prefix."""
        return {prefix: tuple(part[call] for part in parts) for prefix, parts in self.modulations.items()}


def prepare(
    forward: Forward,
    recurrence: SamplerRecurrence,
    share: GroupWork,
    tensors: Mapping[str, torch.Tensor],
    *,
    rows: Mapping[int, Rows],
    blocks: Sequence[Block],
    most_bytes: int,
    text: bool = True,
) -> dict[int, Prepared]:
    """One pass over the weights. `tensors` are the request's, whole; `rows` says by conditioning which are this rank's.

    `blocks` are those this rank runs; `text`: whether it runs the first one. Modulations that would take more than
    `most_bytes` are left to each call.
    """
    adapter, weights, timer = forward.adapter, forward.weights, forward.timer
    if not share.conds:
        weights.join_gathers(forward.beat)
        return {}
    times = torch.tensor([state.timestep for state in recurrence.states[:-1]], device=forward.device)
    taken: dict[int, dict[str, torch.Tensor]] = {}
    with timer.region("hand_over"):
        for cond in share.conds:
            inputs = forward.inputs(BatchSlice(cond, share.start, share.stop), rows[cond], call_tensors(tensors, cond))
            inputs["img"] = inputs["img"].clone()  # on the CPU it is a view of what the parent sent
            taken[cond] = inputs | {"timesteps": times[:, None].expand(-1, share.stop - share.start)}
    with timer.region("embed"), weights.block("") as w:
        ready = {cond: Prepared(inputs, adapter.condition(w, inputs, text=text)) for cond, inputs in taken.items()}
    vecs = [side.condition.vec for side in ready.values()]
    needed = sum(adapter.modulation_numbers(block, vec) * vec.element_size() for block in blocks for vec in vecs)
    ahead = list(ready.values()) if needed <= most_bytes else []
    for block in blocks:
        with timer.region("modulation"), weights.block(block.prefix) as w:
            for side in ahead:
                side.modulations[block.prefix] = adapter.modulation_rows(block, w, side.condition.vec)
        forward.beat()
    return ready
