"""`python -m parallel_runtime doctor | plan | verify | bench | join`: parses, calls, prints, makes an exit code.

0: well, or within tolerance. 1: it ran and the answer is no. 2: it could not be run as asked; one line says why.
130: interrupted by Ctrl-C.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout

from .errors import PoolError

EXIT_OK, EXIT_NO, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "doctor":
            return _doctor(arguments)
        if arguments.command == "plan":
            return _plan(arguments)
        if arguments.command == "verify":
            return _verify(arguments)
        if arguments.command == "bench":
            return _bench(arguments)
        return _join(arguments)
    except (ValueError, PoolError) as error:
        if vars(arguments).get("json"):
            _print(json.dumps({"error": str(error).splitlines()[0], "detail": str(error)}))
        else:
            sys.stderr.write(f"{arguments.command}: {error}\n")
        return EXIT_USAGE if isinstance(error, ValueError) else EXIT_NO
    except KeyboardInterrupt:  # the pool has ended its ranks on the way here
        sys.stderr.write(f"{arguments.command}: interrupted\n")
        return EXIT_INTERRUPTED


def _run_aside(run: Callable[[argparse.Namespace], dict], arguments: argparse.Namespace) -> dict:
    """The report of `run`. What libraries print meanwhile goes to stderr: stdout is for the report alone.

    transformers prints, for one, where docstrings are stripped (-OO).
    """
    with redirect_stdout(sys.stderr):
        return run(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from .cli import doctor

    report = _run_aside(doctor.run, arguments)
    _print(_json(report) if arguments.json else doctor.describe(report))
    return EXIT_OK if report["can_run"] else EXIT_NO


def _plan(arguments: argparse.Namespace) -> int:
    from .cli import plan

    report = _run_aside(plan.run, arguments)
    _print(_json(report) if arguments.json else plan.describe(report))
    return EXIT_OK if report["chosen"] else EXIT_NO


def _verify(arguments: argparse.Namespace) -> int:
    from .cli import verify

    report = _run_aside(verify.run, arguments)
    _print(_json(report) if arguments.json else verify.describe(report))
    return EXIT_OK if report["within_tolerance"] else EXIT_NO


def _bench(arguments: argparse.Namespace) -> int:
    from .cli import bench
    from .report.text import describe

    report = _run_aside(bench.run, arguments)
    _print(_json(report) if arguments.json else describe(report))
    return EXIT_OK


def _join(arguments: argparse.Namespace) -> int:
    from .cli import join

    join.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m parallel_runtime",
        description="Try, check and time parallel plans of one model.",  # not __doc__, which -OO takes away
    )
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what will and will not work here, and what to do")
    doctor.add_argument(
        "--devices", help="test these: all, a count, cuda:0,cuda:1 or cpu:2 (default: all CUDA devices)"
    )
    doctor.add_argument("--calibrate", action="store_true", help="measure the devices and keep it for plan")
    doctor.add_argument("--model", metavar="FILE", help="say what this file is and which plans it takes here, too")
    doctor.add_argument("--comfyui", metavar="PATH", help="ComfyUI's folder (default: where the pack lies)")
    doctor.add_argument("--json", action="store_true")
    _add_plan(commands.add_parser("plan", help="which plan is best here, how long it takes, and why"))
    verify = commands.add_parser("verify", help="is a plan equal to one process of unmodified diffusers or ComfyUI?")
    _add_workload(verify)
    verify.add_argument("--weights", help="replicated (default), sharded, or offloaded to host memory")
    verify.add_argument("--steps", type=int, default=1, help="Euler steps (default 1: one call of the model)")
    verify.add_argument("--warmup", type=int, help="steps that go through the stages of a pipeline whole (default 1)")
    verify.add_argument("--patches", type=int, help="patches of a pipeline (default: as many as stages)")
    verify.add_argument("--negative-control", action="store_true", help="make the plan wrong: must fail")
    bench = commands.add_parser("bench", help="how fast is a plan, beside one rank and one process?")
    _add_workload(bench, plans="append")
    bench.add_argument("--warmup", type=int, default=5)
    bench.add_argument("--runs", type=int, default=7)
    bench.add_argument("--chart", metavar="FILE.png", help="draw the report too; needs matplotlib")
    bench.add_argument("--trace", metavar="FOLDER", help="write each rank's Chrome trace of one more run there")
    _add_join(commands.add_parser("join", help="offer this machine's devices to a ComfyUI on another machine"))
    return parser


def _add_join(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="HOST:PORT", help="where that ComfyUI's SP Config lets machines join")
    parser.add_argument(
        "--token-file", required=True, metavar="FILE", help="the same secret on all machines, mode 0600"
    )
    parser.add_argument("--devices", default="all", help="all, a count, cuda:0,cuda:1 or cpu:2 (default: all)")
    parser.add_argument("--models", nargs="+", metavar="FOLDER", help="where this machine's models lie, searched below")
    parser.add_argument(
        "--comfyui", metavar="PATH", help="this machine's ComfyUI folder (default: where the pack lies)"
    )
    parser.add_argument("--name", help="of this machine in messages (default: its host name)")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="a .safetensors file of a diffusion model (default: the shape of the usual one)"
    )
    parser.add_argument("--width", type=int, default=1024, help="pixels")
    parser.add_argument("--height", type=int, default=1024, help="pixels")
    parser.add_argument("--frames", type=int, help="of a video (default: a few)")
    parser.add_argument("--text-tokens", type=int, default=512)
    parser.add_argument(
        "--comfyui",
        metavar="PATH",
        help="ComfyUI's folder, for models of its modules, which are counted there (default: where the pack lies)",
    )
    parser.add_argument("--cfg", type=float, default=1.0, help="cfg scale; above 1 every step runs the model twice")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="of activations"
    )
    parser.add_argument("--devices", help="all, a count, cuda:0,cuda:1 or cpu:2; with --kind a count")
    parser.add_argument("--kind", help="plan for devices that are not here: H100, H100 PCIe, RTX 4090, cpu ...")
    parser.add_argument("--link", help="nvlink4, nvlink3, pcie4, pcie3 ... (default: as measured or usual)")
    parser.add_argument("--bandwidth-gbs", type=float, help="the link, GB/s of one rank one way")
    parser.add_argument("--latency-us", type=float, help="the link, microseconds a collective")
    parser.add_argument("--free-gib", type=float, help="free memory of each device (default: as found)")
    parser.add_argument(
        "--compiled", action="store_true", help="constants of compiled blocks, from the table; not on a CPU"
    )
    parser.add_argument("--stale", action="store_true", help="also PipeFusion, whose result differs from one process's")
    parser.add_argument("--json", action="store_true")


def _add_workload(parser: argparse.ArgumentParser, *, plans: str = "store") -> None:
    parser.add_argument("--model", required=True, metavar="FILE", help="a .safetensors file of a diffusion model")
    several = "; give it again for each further plan" if plans == "append" else ""
    parser.add_argument("--plan", required=True, action=plans, help=f"ulysses=2,ring=2 or cfg=2,data=2{several}")
    parser.add_argument("--width", type=int, default=1024, help="pixels")
    parser.add_argument("--height", type=int, default=1024, help="pixels")
    parser.add_argument("--text-tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--frames", type=int, help="of a video (default: a few)")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs")
    parser.add_argument(
        "--comfyui",
        metavar="PATH",
        help="ComfyUI's folder, for models of its modules (default: where the pack lies)",
    )
    parser.add_argument(
        "--devices", help="all, a count, cuda:0,cuda:1 or cpu:4 (default: as many as the plan has ranks)"
    )
    parser.add_argument("--dtype", default="default", help="float32, bfloat16, float16 (default: the file's)")
    parser.add_argument("--threads-per-rank", type=int, default=1, help="CPU threads of each rank (default 1)")
    beside = "time every plan with compiled blocks too" if plans == "append" else "compile the blocks"
    parser.add_argument("--compile", action="store_true", help=f"{beside}; needs g++, or Triton for GPUs")
    parser.add_argument("--json", action="store_true")


def _json(report: dict) -> str:
    return json.dumps(_plain(report), indent=2, allow_nan=False)


def _plain(value: object) -> object:
    """Strict JSON: NaN and infinity, which JSON has no words for, become null wherever they stand."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
