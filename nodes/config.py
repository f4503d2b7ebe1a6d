"""SP Config: the node, its inputs, and what is refused before anything is queued.

Does not own what the inputs mean (choice.py).
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from comfy_api.latest import io

from ..parallel_runtime.devices import parse_devices
from ..parallel_runtime.exchange_formats import EXCHANGES
from ..parallel_runtime.machines.server import Offer
from ..parallel_runtime.parallel.named_kernels import CHOICES
from ..parallel_runtime.plan import MAX_RANKS, WEIGHTS
from ..parallel_runtime.shares import MEASURED
from .choice import COMPILED, LOOPS, LORA_MODES, PLANS, TRIES, choice_of
from .host.contract.queued_prompt import running_values, validated_inputs
from .host.panel.machines import MACHINES
from .host.panel.progress import NodeText
from .sockets import CATEGORY, SpConfigSocket

log = logging.getLogger(__name__)


class SPConfig(io.ComfyNode):
    """Which devices, and how a model is split over them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs in the order they are drawn; new ones are only ever appended."""
        return io.Schema(
            node_id="SPConfig",
            display_name="SP Config",
            category=CATEGORY,
            description="Which devices run the model and how it is split over them.",
            inputs=[
                io.Combo.Input(
                    "mode",
                    options=["auto", "manual"],
                    default="auto",
                    tooltip="auto takes the plan predicted to be quickest and says why; manual takes those below.",
                ),
                io.String.Input(
                    "devices",
                    default="all",
                    tooltip="all, a count (2), names (cuda:0,cuda:2), or ranks on the CPU (cpu:2 is two).",
                ),
                _degree(
                    "ulysses",
                    "Manual only: GPUs that share the attention heads. Fastest, best where it divides them.",
                ),
                _degree("ring", "Manual only: GPUs that pass keys and values on in a ring. Works with any number."),
                _choice_input(
                    "lora",
                    LORA_MODES,
                    "merged costs nothing a step; side branch costs a little and changes strength for free.",
                ),
                _degree("data", "Manual only: replicas, each with images of its own (a batch or a list).", added=True),
                _degree("cfg", "Manual only: 2 runs prompt and negative at once, for a cfg scale above 1.", added=True),
                _choice_input(
                    "weights",
                    WEIGHTS,
                    "replicated: all on every device; auto changes it if it does not fit. sharded: a part on each. "
                    "offloaded: in host memory.",
                ),
                *_pipeline_inputs(),
                _choice_input(
                    "compiled",
                    COMPILED,
                    "blocks: torch's compiler makes graphs of them in the first step. May be faster or slower; measure "
                    "first.",
                ),
                io.Float.Input(
                    "step_cache",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    optional=True,
                    advanced=True,
                    tooltip="Skips blocks while the first one's output changes less than this; not the same picture. "
                    "0: off.",
                ),
                *_later_inputs(),
            ],
            outputs=[SpConfigSocket.Output(display_name="sp_config")],
        )

    @classmethod
    def fingerprint_inputs(cls, machines: str | None = "", **_: object) -> str:
        """Run again when a further machine has come or gone. None is what another node gives, not known yet."""
        close_unasked()
        if machines is None:
            return MACHINES.fingerprint(None)
        offer = Offer.parse(machines)
        return "" if offer is None else MACHINES.fingerprint(offer)

    @classmethod
    def validate_inputs(cls, devices: str | None = None) -> bool | str:
        """Refuse before anything is queued what `execute` would refuse, and degrees that do not fit the chosen file.

        Values that other nodes give are not known here; then it is `execute` that refuses.
        """
        return why_refused(devices) or True

    @classmethod
    def execute(cls, mode: str, devices: str, ulysses: int, ring: int, **added: str | float) -> io.NodeOutput:
        """Check the devices and the degrees here, so that the error is drawn on this node."""
        close_unasked()
        choice = choice_of(mode, devices, ulysses=ulysses, ring=ring, **added)
        for warning in choice.selection.warnings:
            log.warning("SP Config: %s", warning)
        lines = choice.describe()
        for line in lines:
            if line.endswith(" sleeps"):
                log.info("SP Config: %s", line)
        NodeText().say("\n".join(lines))
        return io.NodeOutput(choice, ui={"parallel_dit": [{"kind": "plan", "text": lines}]})


def close_unasked() -> None:
    """Close the addresses of further machines that no SP Config of the running prompt names.

    Both fingerprint and run ask: ComfyUI asks for the one only where it caches, for the other only where it has not.
    """
    MACHINES.keep(running_values("SPConfig", "machines", absent=""))


def why_refused(devices: str | None) -> str:
    """Why the SP Config that ComfyUI validates now cannot be used; "" where it can, or where that is not known yet."""
    inputs = validated_inputs()
    known = {name: value for name, value in inputs.items() if not isinstance(value, list)}
    try:
        if not known or len(known) < len(inputs):
            if devices is not None:
                parse_devices(devices)
            return ""
        if Offer.parse(str(known.get("machines", ""))) is not None:  # which machines will be there is not known yet
            known |= {"mode": "auto", "machines": "", "weights": WEIGHTS[0], "shares": MEASURED}
        choice_of(**typed(known)).describe()
    except ValueError as error:
        return str(error)
    return ""


def typed(values: Mapping[str, object]) -> dict[str, Any]:
    """All inputs of SP Config: what is missing has its default, what is unknown is ignored.

    Raises `ValueError` for a number that is none.
    """
    given = {}
    for each in SPConfig.define_schema().inputs:
        value = values.get(each.id, each.default)
        try:
            if isinstance(each, io.Int.Input):
                value = int(value)  # type: ignore[call-overload]  # what is none is refused
            elif isinstance(each, io.Float.Input):
                value = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            kind = "whole number; use 1 or more" if isinstance(each, io.Int.Input) else "number; use for example 0.1"
            raise ValueError(f"{each.id}={value!r} is not a {kind}") from error
        given[each.id] = value
    return given


def _degree(name: str, tooltip: str, *, added: bool = False) -> io.Input:
    """A degree's input; `added` ones came after the first release, and saved workflows lack them."""
    return io.Int.Input(name, default=1, min=1, max=MAX_RANKS, optional=added, tooltip=tooltip)


def _pipeline_inputs() -> list[io.Input]:
    """PipeFusion's, all added since the first release."""
    return [
        _degree(
            "pipefusion",
            "Manual only: stages that each hold some blocks. Very little traffic, but the picture changes slightly.",
            added=True,
        ),
        io.Int.Input(
            "patches",
            default=0,
            min=0,
            max=64,
            optional=True,
            tooltip="PipeFusion only: parts of the image in the pipeline; 0 makes as many as stages.",
        ),
        io.Int.Input(
            "warmup_steps",
            default=1,
            min=1,
            max=10000,
            optional=True,
            tooltip="PipeFusion only: first steps, which are exact; with more the picture is closer to it.",
        ),
    ]


def _choice_input(name: str, options: Iterable[str], tooltip: str) -> io.Input:
    """An advanced input of some words, the first by default; added since the first release."""
    first, *others = options
    return io.Combo.Input(name, options=[first, *others], default=first, optional=True, advanced=True, tooltip=tooltip)


def _text_input(name: str, default: str, tooltip: str) -> io.Input:
    """An advanced input of text; added since the first release."""
    return io.String.Input(name, default=default, optional=True, advanced=True, tooltip=tooltip)


def _later_inputs() -> list[io.Input]:
    """In the order in which they came."""
    return [
        _text_input(
            "machines",
            "",
            "HOST:PORT, an address of this machine where others may join; a comma and how many to wait for.",
        ),
        _choice_input(
            "loop",
            LOOPS,
            "auto runs all steps of KSampler and of custom samplers inside the workers, where nothing has to see each "
            "step; host goes step by step.",
        ),
        _choice_input(
            "attention",
            CHOICES,
            "auto: ComfyUI's attention function; else a kernel of a package. SageAttention rounds: not the same "
            "picture.",
        ),
        _choice_input(
            "tries",
            TRIES,
            "mode auto only: the first run of 16 steps or more tries the plans predicted best on copies of its first "
            "step and keeps the quickest. off: the prediction decides.",
        ),
        _text_input(
            "shares",
            MEASURED,
            "How much each device computes: measured (unequal GPUs by their speed), equal, or a number for each, as "
            "2, 1.",
        ),
        _choice_input(
            "plans",
            PLANS,
            "How ranks share a model that nobody wrote a plan for. written and found: the first load looks for a plan, "
            "up to 30 s, and proves it. written: they do not.",
        ),
        _choice_input(
            "exchange",
            EXCHANGES,
            "fp8: GPUs send each other attention's heads in 8 bits, for cards without NVLink. It rounds: not the same "
            "picture.",
        ),
    ]
