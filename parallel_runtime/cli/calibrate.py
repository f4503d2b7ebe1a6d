"""`doctor --calibrate`: starts ranks, has them calibrated, and keeps the result where plans look.

Owns what is kept and how it is said. Does not own what is measured (trials/calibrate.py).
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from ..devices import Device
from ..machines.machine import Machine
from ..planner.machine import device_set
from ..planner.store import CalibrationStore
from ..pool.pool import Pool
from ..pool.ranks import deadline_from
from ..redact_paths import with_short_home
from ..trials.calibrate import calibrate


def keep_calibration(devices: tuple[Device, ...], machines: Sequence[Machine] = ()) -> dict[str, object]:
    """Start ranks on the devices and on those of further machines, calibrate, and keep the result for `plan` and
    automatic plans.

    Returns what was measured, how long it took and where it is kept. Raises `ValueError` where that cannot be written.
    """
    store = CalibrationStore.of_user()
    began = time.perf_counter()
    devices += tuple(Device.of_machine(text, machine.name) for machine in machines for text in machine.devices)
    further = (lambda _: machines) if machines else None
    with Pool(devices, deadline_s=deadline_from(os.environ), threads_per_rank=1, machines=further) as pool:
        found = calibrate(pool)
    try:
        store.save(device_set(devices), found)
    except OSError as error:
        remedy = "set XDG_CACHE_HOME to a folder that can be written"
        raise ValueError(f"{store.path} cannot be written ({error.strerror}); {remedy}") from error
    return {
        "devices": device_set(devices),
        "file": with_short_home(str(store.path)),
        "wall_s": time.perf_counter() - began,
        "constants": asdict(found),
    }


def describe_calibration(kept: Mapping) -> str:
    """What was measured, in two lines for people."""
    constants = kept["constants"]
    rates, link, software = constants["rates"], constants["link"], constants["software"]
    between = ""
    if constants["between"] is not None:
        rate, latency = constants["between"]["bandwidth"], constants["between"]["latency_s"]
        between = f"between machines {rate * 8 / 1e9:.3g} Gbit/s and {latency * 1e6:.0f} us, "
    return (
        f"calibrated {kept['devices']} in {kept['wall_s']:.1f} s: matrices {rates['matmul_flops'] / 1e12:.3g} TFLOP/s, "
        f"attention {rates['attention_flops'] / 1e12:.3g} TFLOP/s, memory {rates['memory_bandwidth'] / 1e9:.3g} GB/s, "
        f"link {link['bandwidth'] / 1e9:.3g} GB/s and {link['latency_s'] * 1e6:.0f} us, "
        f"{between}operation {software['operation_s'] * 1e6:.1f} us\nkept in {kept['file']}; plan uses it from now on"
    )
