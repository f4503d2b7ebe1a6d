"""Which calls find on the ranks what the call before them left there, and which go through whole.

A call that may says so in its option `place`: {"run": the sampling run it belongs to, "key": its place in a step of it,
for example the conditioning and the number of the call in the step}. What a call leaves is the ranks' to say: in a
pipeline keys and values, with a step cache what blocks added, of some classes what the module itself keeps.

The first `warmup_steps` calls of a key go through a pipeline whole; later ones use what the one before left. Keys are
those of the runs of one request, and stay while each request is of these runs or some of them: with another run, model
or plan, nothing is known, and everything is warm-up. A call of another shape, number or batch group is warm-up too. One
without the option is warm-up and leaves nothing.

Owns the book. The parent keeps it, so that all ranks do the same; ranks keep the tensors (worker/held_state.py).
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from ..plan import BatchSlice, ParallelPlan
from ..wire.requests import CallSlot
from .calls import ModelCall, shape_of


class CallTracker:
    """What the ranks of one generation hold."""

    def __init__(self) -> None:
        self._place: Hashable = None
        self._runs: frozenset[str] = frozenset()
        self._epoch = 0  # what ranks hold of another epoch they drop
        self._slots: dict[Hashable, int] = {}
        self._calls: Counter[int] = Counter()
        self._under_way = False

    def done(self) -> None:
        """The ranks have done what was entered last."""
        self._under_way = False

    def forget(self) -> None:
        """Nothing is held any more, or may not be used."""
        self._place = None

    def enter(
        self, calls: Sequence[ModelCall], batch_groups: Sequence[Sequence[BatchSlice]], plan: ParallelPlan, model: int
    ) -> tuple[CallSlot, ...]:
        """What ranks are told of each call: the epoch, the slot for its keys (None: keep none), whether it is warm-up.

        Say `done` when the ranks have done them; else nothing is known of what they hold. Raises `ValueError` for an
        option that is not as it should be.
        """
        if self._under_way:
            self.forget()
        self._under_way = True
        runs = frozenset(run for call in calls if (run := _run_of(call)) is not None)
        if runs and ((plan, model) != self._place or not runs <= self._runs):
            self._place, self._runs, self._epoch = (plan, model), runs, self._epoch + 1
            self._slots, self._calls = {}, Counter()
        return tuple(
            self._entered(call, [[p for p in batch_group if p.call == n] for batch_group in batch_groups], plan)
            for n, call in enumerate(calls)
        )

    def _entered(self, call: ModelCall, pieces: Sequence[Sequence[BatchSlice]], plan: ParallelPlan) -> CallSlot:
        asked = _asked_of(call)
        if asked is None:
            return CallSlot(epoch=self._epoch, slot=None, warm=True)
        where = tuple(
            (batch_group, piece.call, piece.start, piece.stop)
            for batch_group, own in enumerate(pieces)
            for piece in own
        )
        slot = self._slots.setdefault((asked["run"], asked["key"], shape_of([call]), where), len(self._slots))
        self._calls[slot] += 1
        return CallSlot(epoch=self._epoch, slot=slot, warm=self._calls[slot] <= plan.warmup_steps)


def _run_of(call: ModelCall) -> str | None:
    """The sampling run that a call is of, None for one that leaves nothing."""
    asked = _asked_of(call)
    return None if asked is None else str(asked["run"])


def _asked_of(call: ModelCall) -> Mapping[str, object] | None:
    """What the option `place` of a call says, None where it has none. Raises `ValueError` for another form."""
    asked = call.options.get("place")
    if asked is not None and (not isinstance(asked, dict) or set(asked) != {"run", "key"}):
        raise ValueError(f'option place is {asked!r}; give {{"run": .., "key": ..}}, two strings')
    return asked
