"""Whether ranks are what this ComfyUI is: which options of its command line they have, and the same packages.

Owns the words for what differs. Which options ranks do not get on purpose is models/hosted/options.py's list.
"""

import functools
import logging
from collections.abc import Iterable, Sequence

from ....parallel_runtime.devices import Device
from ....parallel_runtime.models.hosted.options import Options, read_options
from ....parallel_runtime.packages import differences
from ....parallel_runtime.wire.replies import LoadReply
from .comfyui import comfy

log = logging.getLogger(__name__)


def options_now() -> Options:
    """The options of this ComfyUI that are not the defaults, as code may have changed them since it started."""
    return read_options(comfy.cli_args.parser, comfy.cli_args.args)


def options_for_ranks() -> tuple[str, ...]:
    """Those that ranks get, as `apply_options` takes them. What cannot travel is named in the log, once."""
    options = options_now()
    if options.untold:
        _warn(f"workers run without {_listed(options.untold)} of ComfyUI's command line: a value that cannot be sent")
    return options.told


def options_part() -> dict[str, list[str]]:
    """Names of options that workers have, and of those that ComfyUI alone has."""
    options = options_now()
    told = [option.partition("=")[0] for option in options.told]
    return {"workers": told, "comfyui_alone": [*options.kept, *options.untold]}


def unlike_host(devices: Sequence[Device], replies: Iterable[LoadReply]) -> list[str]:
    """Warnings about packages of ranks that are not those of this process. Options they left out are logged, once."""
    left_out: dict[str, list[Device]] = {}
    unlike: dict[str, list[Device]] = {}
    for device, reply in zip(devices, replies, strict=False):
        if reply.imported is None:
            continue
        for name in reply.imported.left_out:
            left_out.setdefault(name, []).append(device)
        for text in differences(reply.imported.packages, elsewhere=bool(device.machine)):
            unlike.setdefault(text, []).append(device)
    for name, where in left_out.items():
        _warn(f"{_listed(where)}: workers run without {name}: their ComfyUI knows no such option, or no such value")
    warnings = [f"{_listed(where)}: {text}" for text, where in unlike.items()]
    for text in warnings:
        _warn(text)
    return warnings


@functools.cache
def _warn(text: str) -> None:
    """Say it in the log, once."""
    log.warning("%s", text)


def _listed(each: Iterable[object]) -> str:
    return ", ".join(map(str, each))
