"""Parallel Flux Sampler (List): many images over the replicas of a plan. Owns how lists become sampling runs."""

from collections.abc import Mapping, Sequence

from comfy_api.latest import io

from .host.panel.report_history import published
from .host.sampling.applied import applied_to
from .host.tasks.list_sampling import sample_list
from .report import list_report
from .sampler import sampler_inputs
from .sockets import CATEGORY, TimingSocket


class ParallelFluxListSampler(io.ComfyNode):
    """Samples lists of images. Every input is a ComfyUI list; one of length 1 goes for all images."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The inputs of Parallel Sampler; new ones are only ever appended."""
        return io.Schema(
            node_id="ParallelFluxListSampler",
            display_name="Parallel Flux Sampler (List)",
            category=CATEGORY,
            description="Lists of prompts, seeds and latents; with data=N in SP Config, N images are made at once.",
            is_input_list=True,
            inputs=sampler_inputs(),
            outputs=[
                io.Latent.Output(display_name="latent", is_output_list=True),
                TimingSocket.Output(display_name="timing"),
            ],
        )

    @classmethod
    def execute(cls, model: list[io.Model.Type], **lists: list) -> io.NodeOutput:
        """Raises `ValueError` for lists that do not go together, before anything is sampled."""
        if len(model) != 1:
            raise ValueError(f"model is a list of {len(model)}; connect one MODEL")
        runs = sampling_runs(lists)
        latents, record = sample_list(model[0], runs)
        report = list_report(record, latents, runs, applied_to(model[0], runs[0]))
        return io.NodeOutput(latents, report, ui=published(report))


def sampling_runs(lists: Mapping[str, Sequence]) -> list[dict]:
    """The settings of each run. Raises `ValueError` for an empty list, and for lengths that differ and are not 1."""
    empty = [name for name, values in lists.items() if len(values) == 0]
    if empty:
        raise ValueError(f"{' and '.join(empty)}: the list is empty; connect at least one")
    lengths = {name: len(values) for name, values in lists.items() if len(values) > 1}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ValueError(f"lists of different lengths: {found}; make them equal, or give one for all images")
    count = max(lengths.values(), default=1)
    runs = [{name: values[number % len(values)] for name, values in lists.items()} for number in range(count)]
    return [{"latent": run.pop("latent_image"), **run} for run in runs]
