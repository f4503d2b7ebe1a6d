"""The commands of `python -m parallel_runtime`, their options and examples. Owns the words; calls nothing."""

import argparse
from collections.abc import Sequence

IMAGE, VIDEO = "image_model.safetensors", "video_model.safetensors"
EXAMPLES: dict[str, Sequence[tuple[str, str]]] = {
    "doctor": (
        ("", "can these GPUs work together?"),
        (f"--model {IMAGE}", "which plans does this file take here, and how much memory?"),
        ("--calibrate", "measure the devices, so that plans are predicted from what they do"),
    ),
    "plan": (
        ("", "the best plan on the GPUs of this machine"),
        ("--kind RTX3090 --file-dtype fp8", "on two RTX 3090, with an fp8 file"),
        ("--kind H100 --devices 4 --width 2048 --height 2048 --cfg 4", "a large image with a negative prompt"),
        (f"--model {VIDEO} --frames 33 --comfyui ../..", "a video model"),
    ),
    "verify": (
        (f"--model {IMAGE} --plan ulysses=2", "does a plan compute what one process does?"),
        (f"--model {IMAGE} --plan ring=2 --negative-control", "does this check notice a wrong plan? It must fail"),
        (f"--model {VIDEO} --plan ulysses=2 --frames 33 --comfyui ../..", "a video model"),
        (f"--model {IMAGE} --plan ulysses=2 --against diffusers", "Flux.1 beside unmodified diffusers"),
        (f"--model {VIDEO} --plan ulysses=2 --steps 6 --step-cache 0.1", "with a first-block cache, beside one rank's"),
    ),
    "find-plan": (
        (f"{IMAGE} --comfyui ../..", "how could ranks share the tokens of a model that the pack has no plan for?"),
    ),
    "tune": (
        (IMAGE, "measure the plans that are predicted to be near, and keep the quickest for ComfyUI's next run"),
        (f"{IMAGE} --width 1536 --cfg 4 --seconds 120", "for wider images with a negative prompt, in two minutes"),
        (f"{VIDEO} --frames 33 --devices cuda:0,cuda:1 --comfyui ../..", "a video model on two GPUs"),
    ),
    "join": (
        ("10.0.0.1:29400 --token-file token.txt", "offer all GPUs of this machine to the ComfyUI at 10.0.0.1"),
        ("10.0.0.1:29400 --token-file token.txt --devices cuda:1 --models /data/models", "one GPU, models elsewhere"),
    ),
}
# `COMPUTE_DTYPES` and `FP8` of checkpoint.py, which imports torch
DTYPES = ("default", "float32", "bfloat16", "float16", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2")
GONE = {
    "bench": "bench is gone; the node Parallel Benchmark times plans beside one device, verify checks what they compute"
}
HELP = {
    "doctor": "what will and will not work on this machine, and what to do about it",
    "plan": "which plan is best for a model and an image, how long it takes, and why; starts nothing",
    "verify": "does a plan compute what one process of unmodified diffusers or ComfyUI computes?",
    "find-plan": "find by looking at its calls how ranks can share the tokens of a model, and prove it",
    "tune": "try plans of a model on these devices and keep the quickest for such work; calibrate first",
    "join": "offer this machine's devices to a ComfyUI on another machine",
}


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m parallel_runtime",
        description="Try, check and time parallel plans of one model.",  # not __doc__, which -OO takes away
        epilog="examples:\n"
        + "\n".join(f"  python -m parallel_runtime {name} {of[0][0]}".rstrip() for name, of in EXAMPLES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, help="what to do; each has a --help of its own")
    made = {}
    for name, text in HELP.items():
        lines = [
            f"  python -m parallel_runtime {name} {given}".rstrip() + f"\n      {what}"
            for given, what in EXAMPLES[name]
        ]
        made[name] = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.".replace("?.", "?"),
            epilog="examples:\n" + "\n".join(lines),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    _add_doctor(made["doctor"])
    _add_plan(made["plan"])
    _add_verify(made["verify"])
    _add_find_plan(made["find-plan"])
    _add_tune(made["tune"])
    _add_join(made.pop("join"))
    for each in made.values():
        each.add_argument("--json", action="store_true", help="print the whole report as JSON, for programs")
    return parser


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices", help="test these: all, a count, cuda:0,cuda:1 or cpu:2 (default: all CUDA devices)"
    )
    parser.add_argument("--calibrate", action="store_true", help="measure the devices and keep it for plan")
    parser.add_argument(
        "--machines",
        metavar="HOST:PORT",
        default="",
        help="with --calibrate: measure with a machine that joins here, or with N of them: HOST:PORT,N",
    )
    parser.add_argument("--token-file", metavar="FILE", help="the secret of machines that join, mode 0600")
    parser.add_argument("--model", metavar="FILE", help="say what this file is and which plans it takes here, too")
    parser.add_argument("--comfyui", metavar="PATH", help="ComfyUI's folder (default: where the pack lies)")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="a .safetensors file of a diffusion model (default: the shape of the usual one)"
    )
    _add_size(parser)
    parser.add_argument("--cfg", type=float, default=1.0, help="cfg scale; above 1 every step runs the model twice")
    parser.add_argument("--steps", type=int, default=20, help="steps of a run (default 20)")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float16", "float32"),
        help="what is computed in, and the weights' dtype where no file is named (default bfloat16)",
    )
    parser.add_argument(
        "--file-dtype",
        choices=("fp8", "bfloat16", "float16", "float32"),
        help="dtype of the weights, where no --model says it: fp8 takes half the memory of bfloat16 (default: --dtype)",
    )
    parser.add_argument("--devices", help="all, a count, cuda:0,cuda:1 or cpu:2; with --kind a count (default 2)")
    parser.add_argument("--kind", help="plan for devices that are not here: H100, H100 PCIe, RTX 4090, cpu ...")
    parser.add_argument(
        "--link", help="nvlink5, nvlink4, nvlink3, nvlink-bridge, pcie4, pcie3 ... (default: as measured or usual)"
    )
    parser.add_argument("--bandwidth-gbs", type=float, help="bandwidth of the link, GB/s of one rank one way")
    parser.add_argument("--latency-us", type=float, help="latency of the link, microseconds a collective")
    parser.add_argument("--free-gib", type=float, help="free memory of each device, GiB (default: as found)")
    parser.add_argument(
        "--beside", type=int, default=0, help="how many more models of this size a prompt has; of Wan 2.2 1 (default 0)"
    )
    parser.add_argument(
        "--compiled", action="store_true", help="changes nothing: what compiled blocks take is not known"
    )
    parser.add_argument("--stale", action="store_true", help="also PipeFusion, whose result differs from one process's")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="FILE", help="a .safetensors file of a diffusion model")
    parser.add_argument("--plan", required=True, help="ulysses=2,ring=2 or cfg=2,data=2")
    _add_size(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs (default 0)")
    parser.add_argument(
        "--devices", help="all, a count, cuda:0,cuda:1 or cpu:4 (default: as many as the plan has ranks)"
    )
    parser.add_argument(
        "--dtype", default="default", choices=DTYPES, help="as weight_dtype of the loader (default: the file's)"
    )
    parser.add_argument("--threads-per-rank", type=int, default=1, help="CPU threads of each rank (default 1)")
    parser.add_argument(
        "--step-cache",
        type=float,
        metavar="THRESHOLD",
        help="first-block cache, as SP Config's step_cache, above 0: run the steps with one too",
    )
    parser.add_argument("--compile", action="store_true", help="compile the blocks; needs g++, or Triton for GPUs")
    parser.add_argument(
        "--against",
        choices=("comfyui", "diffusers"),
        default="comfyui",
        help="what one process computes with: ComfyUI's own module (default), or unmodified diffusers, for Flux.1",
    )
    parser.add_argument("--weights", help="replicated (default), sharded, or offloaded to host memory")
    parser.add_argument("--steps", type=int, default=1, help="Euler steps (default 1: one call of the model)")
    parser.add_argument("--warmup", type=int, help="steps that go through the stages of a pipeline whole (default 1)")
    parser.add_argument("--patches", type=int, help="patches of a pipeline (default: as many as stages)")
    parser.add_argument("--negative-control", action="store_true", help="make the plan wrong: must fail")


def _add_find_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a .safetensors file of a diffusion model")
    parser.add_argument("--comfyui", metavar="PATH", help="ComfyUI's folder (default: where the pack lies)")


def _add_tune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a .safetensors file of a diffusion model")
    parser.add_argument(
        "--devices", default="all", help="as in SP Config: all, a count, cuda:0,cuda:1 or cpu:2 (default: all)"
    )
    _add_size(parser)
    parser.add_argument("--cfg", type=float, default=1.0, help="cfg scale; above 1 every step runs the model twice")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="for copies of a step, once the model is loaded (default 60)"
    )
    parser.add_argument(
        "--dtype", default="default", choices=DTYPES, help="as weight_dtype of the loader (default: the file's)"
    )
    parser.add_argument(
        "--weights", default="replicated", help="as in SP Config: replicated (default), sharded, offloaded"
    )
    parser.add_argument(
        "--comfyui-options",
        metavar="TEXT",
        default="",
        help="what you start ComfyUI with, as in --comfyui-options='--fast --fp16-unet': what is kept holds for the "
        "options that change how it computes",
    )


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


def _add_size(parser: argparse.ArgumentParser) -> None:
    """The size of a call."""
    parser.add_argument("--width", type=int, default=1024, help="pixels (default 1024)")
    parser.add_argument("--height", type=int, default=1024, help="pixels (default 1024)")
    parser.add_argument("--frames", type=int, help="frames of a video (default: 9, for `plan` and `tune` 81)")
    parser.add_argument("--text-tokens", type=int, default=512, help="tokens of the prompt (default 512)")
    parser.add_argument("--batch", type=int, default=1, help="images at once (default 1)")
    parser.add_argument(
        "--comfyui",
        metavar="PATH",
        help="ComfyUI's folder (default: where the pack lies)",
    )
