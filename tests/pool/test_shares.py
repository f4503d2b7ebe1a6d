"""A run inside the workers as its parent sees it: which batch group does what, and when a step is done."""

import torch

from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import Steps, work_of_groups
from parallel_runtime.wire.replies import Progress
from parallel_runtime.wire.requests import GroupWork


def share(start: int, stop: int, *conds: int, shares_cfg: bool = False) -> GroupWork:
    return GroupWork(start=start, stop=stop, conds=conds, shares_cfg=shares_cfg)


def test_each_side_goes_to_a_batch_group_of_its_own_and_images_to_the_replicas() -> None:
    four = ParallelPlan(data=2, cfg=2)
    assert work_of_groups(four, images=3, num_conds=2) == (
        share(0, 2, 0, shares_cfg=True),
        share(0, 2, 1, shares_cfg=True),
        share(2, 3, 0, shares_cfg=True),
        share(2, 3, 1, shares_cfg=True),
    )
    one_image = work_of_groups(four, images=1, num_conds=2)
    assert one_image[2:] == (share(1, 1), share(1, 1)), "a replica without an image does nothing"
    assert work_of_groups(four, images=3, num_conds=1) == (share(0, 1, 0), share(1, 2, 0), share(2, 3, 0), share(3, 3))
    assert work_of_groups(ParallelPlan(data=2), images=2, num_conds=2) == (share(0, 1, 0, 1), share(1, 2, 0, 1))


def test_a_step_is_told_once_every_writer_has_done_it_in_order() -> None:
    granted, told = [], []
    steps = Steps(
        writers=[0, 2],
        preview=lambda slot: torch.tensor(slot),
        grant=granted.append,
        on_step=lambda step, preview: told.append((step, int(preview))),
    )
    (ahead,) = granted
    assert ahead == 2, "as many steps as there are previews"
    one, two, three, four = (Progress(done=count, total=4) for count in range(1, 5))
    steps.take({0: one})
    steps.take({0: four, 1: four})
    assert told == [], "rank 2 writes too"
    steps.take({0: two, 2: one})
    assert told == [(0, 0)]
    steps.take({0: three, 2: three})
    assert told == [(0, 0), (1, 1), (2, 0)]
    assert granted == [2, 3, 4, 5]
