"""Replies of ranks that never ran, for tests of what is made of them."""

from typing import Any

from parallel_runtime.wire.replies import Memory, RankRun, RankStep, SampleReply, StepReply

WORK = {"batch_group": 0, "pieces": (), "collectives": 0, "sent_bytes": 0, "weight_collectives": 0, "weight_bytes": 0}
MEMORY = Memory(resident_bytes=1000)
BEYOND = StepReply(memory=MEMORY, ran=None)  # a rank that the plan leaves out
BEYOND_RUN = SampleReply(memory=MEMORY, ran=None)


def step_reply(*, memory: Memory = MEMORY, **fields: Any) -> StepReply:
    """A rank's reply to a request of calls, which took 1 s unless `fields` of `RankStep` say otherwise."""
    return StepReply(memory=memory, ran=RankStep(**{**WORK, "began_s": 0.0, "step_s": 1.0, **fields}))


def run_reply(**fields: Any) -> SampleReply:
    """A rank's reply to a whole run, with `fields` of `RankRun`."""
    around = {"prepare_s": 0.0, "finish_s": 0.0}
    return SampleReply(memory=MEMORY, ran=RankRun(**{**WORK, **around, **fields}))
