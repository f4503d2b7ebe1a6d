"""A calibration of another number of the same GPUs: when it stands for those at hand, and what it does not tell.

Owns that rule. What one device computes is the same among two and among eight. An exchange between two was measured
in every set of two and more; how much slower it is among more ranks than the set had is the table's figure, as are all
exchanges where one device was calibrated alone. Not for ranks on a CPU: more of them have fewer cores each.
"""

from collections.abc import Mapping
from dataclasses import replace

from .hardware import Calibration
from .known import COMPILED, EAGER, SHARED_ABOVE, known_link, usual_link

ANY_LINK = "pcie4"  # between devices that are not in the table


def nearest(measured: Mapping[int, Calibration], name: str, devices: int, *, present: int) -> Calibration | None:
    """The constants for `devices` GPUs called `name`, from calibrations by their number of devices; None without.

    The same number, else the smallest larger set, else the largest smaller one; `source` says which. `present`: how
    many GPUs the machine has, which decides the table's link.
    """
    if devices in measured:
        return measured[devices]
    larger, smaller = [n for n in measured if n > devices], [n for n in measured if n < devices]
    if larger:
        return _told(measured[min(larger)], min(larger), devices)
    if not smaller:
        return None
    taken = max(smaller)
    return _widened(measured[taken], taken, name, devices, present=max(present, devices))


def as_told(calibration: Calibration, *, link: str | None, compiled: bool) -> Calibration:
    """Measured constants with a link that the user names, and with compiled blocks, of which only the table knows.

    On ranks of a CPU nothing is known of compiled blocks, and `compiled` changes nothing. Raises `ValueError` for a
    link that is not in the table.
    """
    if link is not None:
        source = f"{calibration.source}; the link is the table's {link}, as told"
        calibration = replace(calibration, link=known_link(link), source=source)
    if compiled and calibration.rates.asynchronous:
        software = replace(COMPILED, swap_calls=calibration.software.swap_calls)
        source = f"{calibration.source}; compiled blocks are the table's"
        calibration = replace(calibration, software=software, source=source)
    return calibration


def _told(calibration: Calibration, measured: int, devices: int, more: str = "") -> Calibration:
    source = f"measured on {measured} of these devices by doctor, {devices} are offered{more}"
    return replace(calibration, source=source)


def _widened(calibration: Calibration, measured: int, name: str, devices: int, *, present: int) -> Calibration | None:
    try:
        usual = usual_link(name, present)
    except ValueError:  # not in the table
        if measured == 1:
            return None
        usual = known_link(ANY_LINK if present <= SHARED_ABOVE else f"{ANY_LINK}-shared")
    if measured == 1:
        software = replace(calibration.software, exchange_s=EAGER.exchange_s, hop_s=EAGER.hop_s)
        more = f"; exchanges are the table's ({usual.name}), not measured here"
        return _told(replace(calibration, link=usual, software=software), measured, devices, more)
    link = replace(calibration.link, contention=max(calibration.link.contention, usual.contention))
    more = f"; that exchanges among {devices} are slower is the table's ({usual.name}), not measured here"
    if link == calibration.link:
        more = ""
    return _told(replace(calibration, link=link), measured, devices, more)
