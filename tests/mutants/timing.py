"""Mistakes in what is timed, where, and on whose clock."""

from __future__ import annotations

from .mutant import Mutant

REGION = "test_timing.py::test_a_region_of_a_device_is_what_its_work_took_and_not_the_hosts_time_to_queue_it"
MARKS = "test_timing.py::test_marks_on_a_device_are_on_the_hosts_clock_however_its_own_runs"

RUNS = "test_timing.py::test_every_rank_of_a_run_looks_at_the_clock_after_preparing_and_where_each_step_ends"

MUTANTS = (
    Mutant(
        "a device's regions are timed by the host's clock",
        'cuda = self.device.type == "cuda"\n            region',
        "cuda = False\n            region",
        (REGION,),
    ),
    Mutant(
        "milliseconds of a device count as seconds",
        "for began, ended in self._pairs) / 1000",
        "for began, ended in self._pairs)",
        (REGION,),
    ),
    Mutant(
        "the last event of a region is not waited for",
        "            self._pairs[-1][1].synchronize()\n",
        "            self._pairs[0][0].synchronize()\n",
        (REGION,),
    ),
    Mutant(
        "every mark waits for the device",
        "        if len(self._events) == 1:\n            self._events[0].synchronize()",
        "        self._events[-1].synchronize()\n        if len(self._events) == 1:",
        (MARKS,),
    ),
    Mutant(
        "a device's clock is taken for the machine's",
        "rate = passed_s / sum(apart_s)",
        "rate = 1.0",
        (MARKS,),
    ),
    Mutant(
        "each mark is counted from the first one",
        "accumulate(apart_s[:-1], initial=0.0)",
        "(0.0, *apart_s[:-1])",
        (MARKS,),
    ),
    Mutant(
        "a lap keeps the regions of the one before",
        "        self._laps.append(self.regions)\n        self.regions = {}\n",
        "        self._laps.append(self.regions)\n",
        ("test_timing.py::test_laps_have_the_seconds_of_their_own_work",),
    ),
    Mutant(
        "a timer that is off measures all the same",
        "        if not self.on:\n            return NOTHING\n",
        "",
        ("test_timing.py::test_a_timer_that_is_off_measures_nothing",),
    ),
    Mutant(
        "a region's entries do not add up",
        "        self.total_s += time.perf_counter() - self.began_s\n",
        "        self.total_s = time.perf_counter() - self.began_s\n",
        ("test_timing.py::test_a_regions_entries_add_up",),
    ),
    Mutant(
        "what is prepared counts to the first step",
        "        self._timer.mark()\n        self._timer.lap()\n        try:",
        "        self._timer.mark()\n        try:",
        (f"{RUNS}[True-ulysses=2]",),
    ),
)
