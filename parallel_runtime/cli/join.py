"""`join`: offer this machine's devices to a ComfyUI on another machine, until it is told to stop.

Owns what the command line says and when to connect again. The connection and the processes are machines/joined.py's.
"""

import argparse
import os
import select
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from .. import VERSION, installed_version
from ..devices import missing_system, parse_devices
from ..machines.connection import TokenRefusedError, read_token, split_address
from ..machines.joined import ConnectionLostError, Joining, RefusedError, Told, adopt_orphans, serve
from ..machines.messages import MAX_NAME_CHARS, Introduction, Versions
from ..planner.comfyui_process import find_comfyui, version_of
from ..wire.protocol import ProtocolError
from . import gpu_facts
from .terminal import write

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 15.0


def run(arguments: argparse.Namespace) -> NoReturn:
    """Join, and join again whenever the connection ends. Raises ValueError where that cannot help."""
    if (missing := missing_system()) is not None:
        raise ValueError(missing)
    joining = _joining(arguments)
    from ..machines import files  # noqa: F401  imports torch, which later would keep `join` from answering for seconds

    told = Told()
    adopt_orphans()
    said, wait_s = "", FIRST_WAIT_S
    _say(f"{joining.introduction.name} offers {', '.join(joining.introduction.device_names)} to {arguments.address}")
    while True:
        began_s = time.monotonic()
        try:
            serve(joining, _say, told)
        except (RefusedError, TokenRefusedError) as error:
            raise ValueError(f"ComfyUI at {arguments.address} refuses this machine: {error}") from error
        except (ConnectionLostError, ProtocolError) as error:
            if time.monotonic() - began_s > LONGEST_WAIT_S:
                said, wait_s = "", FIRST_WAIT_S
            line = f"{arguments.address}: {error.args[-1]}; trying again until it is there"
            if line != said:
                _say(line)
            said = line
        if select.select([told], [], [], wait_s)[0]:
            told.end()
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def _joining(arguments: argparse.Namespace) -> Joining:
    host, port = split_address(arguments.address)
    token = read_token(arguments.token_file)
    comfyui = _comfyui(arguments.comfyui)
    models = [str(Path(os.path.expanduser(folder)).absolute()) for folder in arguments.models or ()]
    if not models and not comfyui:
        raise ValueError("no model folder is named; give --models FOLDER, or --comfyui PATH for its models folder")
    for folder in models:
        if not os.path.isdir(folder):
            raise ValueError(f"--models {folder} is no folder; name the folder that holds this machine's models")
    facts = gpu_facts.look()
    if not facts.torch:
        raise ValueError(f"torch cannot be imported with {sys.executable}: {facts.error}; use ComfyUI's Python")
    devices = parse_devices(arguments.devices, num_cuda=len(facts.gpus))
    for warning in devices.warnings:
        _say(warning)
    names = {f"cuda:{gpu.index}": gpu.name for gpu in facts.gpus}
    introduction = Introduction(
        name=(arguments.name or socket.gethostname())[:MAX_NAME_CHARS],
        devices=tuple(map(str, devices.devices)),
        device_names=tuple(names.get(str(device), "CPU") for device in devices.devices),
        versions=Versions(
            pack=VERSION,
            torch=facts.torch,
            comfyui="" if not comfyui else version_of(find_comfyui(comfyui)),
            nccl=facts.nccl,
        ),
        pid=os.getpid(),
    )
    default = (str(Path(comfyui) / "models"),) if comfyui else ()

    return Joining(
        host=host,
        port=port,
        token=token,
        introduction=introduction,
        models=(*models, *default),
        comfyui=comfyui,
        outdated=partial(_outdated, introduction.versions, comfyui),
    )


def _outdated(began: Versions, comfyui: str) -> str:
    """What lies in these folders now in another version than it `began` with: workers import it anew."""
    try:
        now = "" if not comfyui else version_of(find_comfyui(comfyui))
    except (OSError, ValueError) as error:
        return f"{error}; start `join` again there"
    for title, before, after in (("this pack", began.pack, installed_version()), ("ComfyUI", began.comfyui, now)):
        if before != after:
            return f"{title} is {after or 'unknown'} there now and was {before} when `join` began; start `join` again"
    return ""


def _comfyui(told: str | None) -> str:
    """ComfyUI's folder: the one told, else the one that this pack lies in, "" where it lies in none."""
    try:
        return find_comfyui(told).path
    except ValueError:
        if told is not None:
            raise
        return ""


def _say(line: str) -> None:
    """A line where it can be written: what runs here does not depend on it."""
    with suppress(OSError):  # a full disk
        write(sys.stdout, f"join {time.strftime('%H:%M:%S')}: {line}\n")
