"""Seconds that mean something: a device is waited for before the clock is read."""

import time

import torch


def synchronized_s(device: torch.device) -> float:
    """Seconds on a monotonic clock, once `device` has finished what it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter()
