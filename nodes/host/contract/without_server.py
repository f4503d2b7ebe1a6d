"""ComfyUI in a process without a server: its modules are found, and told the options of its command line.

Owns the order: nothing of ComfyUI's may be imported before. For the commands that run as ComfyUI would
(nodes/without_server.py).
"""

import importlib
import sys
from collections.abc import Sequence


def begin(path: str, options: Sequence[str], *, on_cpu: bool) -> None:
    """Have ComfyUI of a folder here, with these options as its main.py would have them; on the CPU alone if asked.

    Raises `ValueError` for options that its command line refuses.
    """
    sys.path.insert(0, path)  # as main.py has it, which runs there
    cli = importlib.import_module("comfy.cli_args")
    given = [*options, *(["--cpu"] if on_cpu and "--cpu" not in options else [])]
    try:
        parsed = cli.parser.parse_args(given)
    except SystemExit as error:
        raise ValueError(
            f"--comfyui-options: this ComfyUI does not take {' '.join(options)}; see its --help"
        ) from error
    vars(cli.args).update(vars(parsed))
