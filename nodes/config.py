"""SP Config: what the user asks for, and the plan it becomes once a model's heads are known."""

import logging
from dataclasses import dataclass

from comfy_api.latest import io

from ..parallel_runtime.devices import STOCK_NODES, DeviceSelection, missing_system, parse_devices
from ..parallel_runtime.plan import MAX_RANKS, ParallelPlan, auto_plan, heads_error
from .sockets import CATEGORY, SpConfigSocket

log = logging.getLogger(__name__)
LORA_MODES = ("merged", "side branch")


@dataclass(frozen=True, kw_only=True)
class ParallelChoice:
    """What the user said: the devices as written and as found, and a plan, or None for an automatic one."""

    devices_text: str
    selection: DeviceSelection
    plan: ParallelPlan | None = None
    side_branch: bool = False  # LoRAs beside the weights instead of merged into them

    def plan_for(self, num_heads: int) -> ParallelPlan:
        """The plan to run a model of `num_heads` heads with.

        Raises `ValueError` when the degrees fit neither the devices nor the heads.
        """
        num_ranks = len(self.selection.devices)
        if self.plan is None:
            return auto_plan(num_ranks, num_heads)
        if self.plan.ranks > num_ranks and self._may_shrink():
            plan = auto_plan(num_ranks, num_heads)
            log.warning(
                "%s needs %d ranks, %d found; running %s", self.plan.describe(), self.plan.ranks, num_ranks, plan.name
            )
            return plan
        if self.plan.ranks != num_ranks:
            raise ValueError(
                f"{self.plan.describe()} makes {self.plan.ranks} rank(s), devices={self.devices_text!r} names "
                f"{num_ranks}; make the product of the degrees {num_ranks}, or name {self.plan.ranks} device(s)"
            )
        error = heads_error(self.plan.ulysses, num_heads)
        if error is not None:
            raise ValueError(error)
        return self.plan

    def _may_shrink(self) -> bool:
        """`all`, and a count that had to shrink: a workflow saved for eight devices runs on one."""
        return self.devices_text.strip().lower() == "all" or bool(self.selection.warnings)


class SPConfig(io.ComfyNode):
    """Which devices, and how a model is split over them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs in the order they are drawn; new ones are only ever appended."""
        degree = {"default": 1, "min": 1, "max": MAX_RANKS}
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
                    tooltip="auto picks the degrees for the devices and the model; manual takes those below.",
                ),
                io.String.Input(
                    "devices",
                    default="all",
                    tooltip="all, a count (2), names (cuda:0,cuda:2), or ranks on the CPU (cpu:2 is two).",
                ),
                io.Int.Input("ulysses", **degree, tooltip="Manual only: ranks that split the heads."),
                io.Int.Input("ring", **degree, tooltip="Manual only: ranks that pass keys and values on in a ring."),
                io.Combo.Input(
                    "lora",
                    options=list(LORA_MODES),
                    default=LORA_MODES[0],
                    optional=True,
                    tooltip="merged costs nothing a step; side branch costs a little and changes strength for free.",
                ),
            ],
            outputs=[SpConfigSocket.Output(display_name="sp_config")],
        )

    @classmethod
    def execute(cls, mode: str, devices: str, ulysses: int, ring: int, lora: str = LORA_MODES[0]) -> io.NodeOutput:
        """Check the devices and the degrees here, so that the error is drawn on this node."""
        if (missing := missing_system()) is not None:
            raise ValueError(f"{missing}; {STOCK_NODES}")
        plan = ParallelPlan(ulysses=ulysses, ring=ring) if mode == "manual" else None
        selection = parse_devices(devices)
        for warning in selection.warnings:
            log.warning("SP Config: %s", warning)
        choice = ParallelChoice(devices_text=devices, selection=selection, plan=plan, side_branch=lora == LORA_MODES[1])
        return io.NodeOutput(choice)
