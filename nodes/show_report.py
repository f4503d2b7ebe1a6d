"""Show Timing Report: what was measured, on the node, as a JSON file and as a chart in ComfyUI's output folder."""

import json
import time
from pathlib import Path

from comfy_api.latest import io

from ..parallel_runtime.report.chart import NoChartError, draw
from ..parallel_runtime.report.schema import validate
from ..parallel_runtime.report.text import describe
from .host.contract.comfyui import folder_paths
from .host.contract.version import refuse_off
from .host.panel.progress import prompt_id
from .sockets import CATEGORY, TimingSocket

MORE = ("timing_2", "timing_3", "timing_4")


class ShowTimingReport(io.ComfyNode):
    """Shows reports and writes them to files.

    Never served from ComfyUI's cache, so that it can say which of its reports are.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        """New inputs are only ever appended."""
        return io.Schema(
            node_id="ShowTimingReport",
            display_name="Show Timing Report",
            category=CATEGORY,
            description="Shows timing reports and writes them to the output folder, as JSON and as a chart.",
            inputs=[
                TimingSocket.Input("timing", tooltip="A report of one of this pack's nodes."),
                *(TimingSocket.Input(name, optional=True, tooltip="Another one, shown beside it.") for name in MORE),
                io.String.Input(
                    "filename_prefix",
                    default="timing/report",
                    optional=True,
                    tooltip="Where in the output folder; a number is added.",
                ),
                io.Boolean.Input("chart", default=True, optional=True, tooltip="Draw a PNG too; needs matplotlib."),
            ],
            outputs=[],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: object) -> str:
        """Another one each time: a cached node would show an old run as if it were this one."""
        return f"asked at {time.monotonic_ns()}"

    @classmethod
    def execute(
        cls, timing: dict, filename_prefix: str = "timing/report", chart: bool = True, **more: dict
    ) -> io.NodeOutput:
        """Raises `ReportError` for a TIMING that is no report of schema 1."""
        reports = [as_of_now(report) for report in (timing, *(more[name] for name in MORE if name in more))]
        text = "\n\n".join(describe(report) for report in reports)
        folder, stem, subfolder = _target(filename_prefix)
        shown: dict = {"parallel_dit": reports, "files": [_item(f"{stem}.json", subfolder)]}
        (folder / f"{stem}.json").write_text(json.dumps(reports, indent=2, allow_nan=False), encoding="utf-8")
        if chart:
            try:
                draw(reports, folder / f"{stem}.png")
                shown["images"] = [_item(f"{stem}.png", subfolder)]
            except NoChartError as error:
                text += f"\n\nno chart: {error}"
        return io.NodeOutput(ui=shown | {"text": [text]})


def as_of_now(report: dict) -> dict:
    """The report, saying whether the prompt that shows it is the one that measured it."""
    validate(report)
    return report | {"from_cache": report.get("prompt_id") != prompt_id()}


def _target(prefix: str) -> tuple[Path, str, str]:
    """Folder, name without its ending, and subfolder as clients are told, of the next free number."""
    refuse_off("files")
    folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(prefix, folder_paths.get_output_directory())
    return Path(folder), f"{name}_{counter:05}_", subfolder


def _item(filename: str, subfolder: str) -> dict[str, str]:
    return {"filename": filename, "subfolder": subfolder, "type": "output"}
