"""A ComfyUI on the CPU, loaded once as main.py does, without a server and without the pack; scripts run in forks of it.

`python loaded_comfyui.py COMFYUI` reads lines of JSON, [script, arguments], the script a file's path or Python itself;
runs each in a process that is forked from this one, and answers a line of JSON: [exit code, its output, its errors].
Owns what is loaded. To load it takes seconds, to fork it milliseconds.
"""

import asyncio
import importlib
import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path

HOST = Path(__file__).resolve().parents[1] / "host"  # scripts import one another there


def load(comfyui: str) -> None:
    """What main.py does before packs are loaded."""
    sys.path[:0] = [comfyui, str(HOST)]
    sys.argv = ["main.py", "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    importlib.import_module("utils.extra_config")  # as main.py does, before nodes puts comfy/utils.py first
    import execution
    import nodes  # noqa: F401
    import server

    made = server.PromptServer(asyncio.new_event_loop())
    made.prompt_queue = execution.PromptQueue(made)


def run(script: str, arguments: list[str]) -> None:
    """Run a script in this process as the interpreter would."""
    sys.argv = [script, *arguments]
    if (measuring := sys.modules.get("measured_process")) is not None:
        measuring.follow()  # of `make coverage`
    if script.endswith(".py"):
        runpy.run_path(script, run_name="__main__")
    else:
        exec(compile(script, "script", "exec"), {"__name__": "__main__"})  # noqa: S102  of a test


def run_in_fork(script: str, arguments: list[str]) -> tuple[int, str, str]:
    """The exit code of the script, what it printed, and its errors."""
    files = (tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+"), tempfile.TemporaryDirectory())
    with files[0] as printed, files[1] as errors, files[2] as folder:
        pid = os.fork()
        if pid == 0:
            os.dup2(printed.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            tempfile.tempdir = os.environ["TMPDIR"] = folder  # a script does not tidy up: it ends by `_exit`
            status = 1
            try:
                run(script, arguments)
                status = 0
            except BaseException:  # noqa: BLE001  whatever it is, it is told
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for file in (printed, errors):
            file.seek(0)
        return status, printed.read(), errors.read()


def main() -> None:
    """Load, then run what is asked for until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ComfyUI prints is no answer
    load(sys.argv[1])
    for line in sys.stdin:
        answers.write(json.dumps(run_in_fork(*json.loads(line))) + "\n")
        answers.flush()
    os._exit(0)  # what would be tidied up at exit takes seconds


if __name__ == "__main__":
    main()
