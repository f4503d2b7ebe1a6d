"""What was measured of the devices, held against each other. Owns the limits beyond which a user should know."""

from collections.abc import Sequence

SLOWER = 0.10  # a step takes as long as its slowest rank
LESS_MEMORY = 0.25  # every rank keeps the same, whatever its device has room for


def unequal(measured: Sequence[dict]) -> list[str]:
    """Warnings about devices that are much slower, or have much less memory free, than the best; [] when all are alike.

    `measured` is `Pool.measure_devices` of the ranks of a plan. Ranks on the CPU share one processor and one memory:
    what differs between them is chance.
    """
    devices = [each for each in measured if not each["device"].startswith("cpu")]
    if len(devices) < 2:
        return []
    warnings = []
    fastest, slowest = (choose(devices, key=lambda each: each["gflops"]) for choose in (max, min))
    if slowest["gflops"] < (1 - SLOWER) * fastest["gflops"]:
        warnings.append(
            f"{_named(slowest)} is {1 - slowest['gflops'] / fastest['gflops']:.0%} slower than {_named(fastest)}, and "
            "the others wait for it; leave it out of devices in SP Config, or let it do less of other things"
        )
    roomiest, fullest = (choose(devices, key=lambda each: each["free_bytes"]) for choose in (max, min))
    if fullest["free_bytes"] < (1 - LESS_MEMORY) * roomiest["free_bytes"]:
        warnings.append(
            f"{_named(fullest)} has {fullest['free_bytes'] / 1e9:.1f} GB free, {_named(roomiest)} "
            f"{roomiest['free_bytes'] / 1e9:.1f} GB; every rank needs as much as another"
        )
    return warnings


def _named(device: dict) -> str:
    return f"{device['device']} ({device['name']})"
