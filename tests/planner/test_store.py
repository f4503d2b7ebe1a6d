"""The cache of calibrations: it gives back what it was given, and a damaged file is an empty one."""

import fcntl
import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from parallel_runtime import user_files
from parallel_runtime.models.specs.found import FoundSpecs
from parallel_runtime.planner.kept_counts import KeptCounts
from parallel_runtime.planner.kept_plans import KeptPlans
from parallel_runtime.planner.known import known_calibration
from parallel_runtime.planner.store import CalibrationStore
from parallel_runtime.proof import ProofStore
from parallel_runtime.user_files import Store

MEASURED = replace(known_calibration("A100"), source="measured")


def test_fewer_devices_have_the_constants_of_the_smallest_larger_set_and_the_source_says_so(tmp_path) -> None:
    store = CalibrationStore(tmp_path / "calibration.json")
    for name in ("2 x A100, torch 2.6", "8 x A100, torch 2.6", "4 x A100, torch 2.7", "4 x A10 + A100, torch 2.6"):
        store.save(name, replace(MEASURED, source=name))
    store.save("6 x A100, torch 2.6", replace(MEASURED, rates=replace(MEASURED.rates, matmul_flops=-1.0)))  # not usable
    kind = "A100, torch 2.6"
    assert store.load_for(kind, 2) == replace(MEASURED, source="2 x A100, torch 2.6")
    assert store.load_for(kind, 1).source == "measured on 2 of these devices by doctor, 1 are offered"
    assert store.load_for(kind, 3).source == "measured on 8 of these devices by doctor, 3 are offered"
    assert CalibrationStore(tmp_path / "none.json").load_for(kind, 1) is None
    store.save("9 x A10, torch 2.6", MEASURED)
    assert store.load_for("A10, torch 2.6", 8) is None, "no pool has nine"
    assert store.load_for("A100, torch 2.7", 8) is None  # a smaller set says nothing of exchanges among more


def test_an_entry_of_an_older_version_is_read_without_what_is_no_longer_used(tmp_path) -> None:
    store = CalibrationStore(tmp_path / "calibration.json")
    store.save("2 x A100", MEASURED)
    content = json.loads(store.path.read_text())
    assert content["version"] == 1 and "machines" not in content["devices"]["2 x A100"]
    content["devices"]["2 x A100"] |= {"network": None, "node_ranks": 8}
    content["devices"]["2 x A100"]["software"] |= {
        "ring_overlap": 0.0,
        "passes": 93.5,
        "block_s": 1e-3,
        "swap_calls": 2,
    }
    del content["devices"]["2 x A100"]["rates"]["host_bandwidth"]  # it has a default
    store.path.write_text(json.dumps(content))
    assert store.load("2 x A100") == MEASURED
    del content["devices"]["2 x A100"]["rates"]["matmul_flops"]
    store.path.write_text(json.dumps(content))
    assert store.load("2 x A100") is None


def test_the_rates_of_each_kind_are_kept_where_several_were_measured(tmp_path) -> None:
    store = CalibrationStore(tmp_path / "calibration.json")
    slow = replace(MEASURED.rates, matmul_flops=1e12)
    several = replace(MEASURED, kinds=(("A100", MEASURED.rates), ("L4", slow)))
    store.save("2 x A100 + L4", several)
    assert store.load("2 x A100 + L4") == several
    store.save("2 x A100", MEASURED)
    content = json.loads(store.path.read_text())
    assert "kinds" not in content["devices"]["2 x A100"]
    content["devices"]["2 x A100 + L4"]["kinds"][1][1]["matmul_flops"] = "fast"
    store.path.write_text(json.dumps(content))
    assert store.load("2 x A100 + L4") is None


@pytest.mark.parametrize("entry", ["null", '{"rates": {}}', '{"rates": []}'])
def test_a_damaged_entry_is_none_and_the_next_write_mends_it(tmp_path, entry) -> None:
    """Damaged files are tests/test_proof.py's: all stores keep their entries alike (user_files.py)."""
    store = CalibrationStore(tmp_path / "calibration.json")
    store.path.write_text(f'{{"version": 1, "devices": {{"2 x A100": {entry}}}}}')
    assert store.load("2 x A100") is None
    store.save("2 x A100", MEASURED)
    assert store.load("2 x A100") == MEASURED


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("rates", "matmul_flops", 0),
        ("rates", "matmul_flops", -1.0),
        ("rates", "matmul_flops", "fast"),
        ("rates", "matmul_flops", True),
        ("rates", "asynchronous", 1),
        ("link", "bandwidth", float("nan")),
        ("link", "bandwidth", float("inf")),
        ("link", "latency_s", None),
        ("software", "operation_s", -1e-3),
        ("software", "surprise", 1.0),
    ],
)
def test_an_entry_with_a_value_that_is_no_rate_is_not_used(tmp_path, part, name, value) -> None:
    store = CalibrationStore(tmp_path / "calibration.json")
    store.save("good", MEASURED)
    store.save("bad", MEASURED)
    content = json.loads(store.path.read_text())
    content["devices"]["bad"][part][name] = value
    store.path.write_text(json.dumps(content))
    assert store.load("bad") is None
    assert store.load("good") == MEASURED


def test_what_another_puts_while_one_writes_is_not_lost(tmp_path, monkeypatch) -> None:
    """The other is let loose between reading and writing of the first, and held up until that is done."""
    path, threads, held_up = tmp_path / "calibration.json", list[threading.Thread](), threading.Event()
    write, lock = user_files.replace_json, fcntl.flock

    def locked(folder: int, kind: int) -> None:
        try:
            lock(folder, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            held_up.set()
            lock(folder, kind)

    def slowly(*given: object) -> None:
        if not threads:
            threads.append(threading.Thread(target=CalibrationStore(path).save, args=("second", MEASURED)))
            threads[0].start()
            while threads[0].is_alive() and not held_up.wait(0.01):
                pass
        write(*given)

    monkeypatch.setattr(user_files, "replace_json", slowly)
    monkeypatch.setattr(fcntl, "flock", locked)
    CalibrationStore(path).save("first", MEASURED)
    threads[0].join()
    assert CalibrationStore(path).load("first") == CalibrationStore(path).load("second") == MEASURED


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path) -> None:
    store = CalibrationStore(tmp_path / "calibration.json")
    store.save("2 x A100", MEASURED)
    with pytest.raises(ValueError, match="JSON"):
        store.save("2 x A100", replace(MEASURED, link=replace(MEASURED.link, bandwidth=float("nan"))))
    assert store.load("2 x A100") == MEASURED
    assert os.listdir(tmp_path) == ["calibration.json"]


@pytest.mark.parametrize(
    ("store", "name"),
    [
        (CalibrationStore, "calibration"),
        (ProofStore, "proofs"),
        (KeptCounts, "counts"),
        (KeptPlans, "plans"),
        (FoundSpecs, "found_plans"),
    ],
)
def test_the_file_lies_where_the_user_wants_caches(
    monkeypatch: pytest.MonkeyPatch, store: type[Store], name: str
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert store.of_user().path == Path(f"/cache/parallel-dit/{name}.json")
    for cache in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        assert store.of_user().path == Path(f"/home/someone/.cache/parallel-dit/{name}.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.of_user().path == Path(f"/home/someone/.cache/parallel-dit/{name}.json")
