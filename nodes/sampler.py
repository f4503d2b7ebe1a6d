"""Parallel Sampler: KSampler's inputs and results, and a report of what each rank took."""

from collections.abc import Mapping

from comfy_api.latest import io

from .choice import LOOPS
from .host.panel.report_history import published
from .host.sampling.applied import applied_to
from .host.sampling.stock import advice_of, sample, sampler_names, scheduler_names
from .report import denoise_report
from .sockets import CATEGORY, TimingSocket

MODULATIONS = ("keep", "release")  # of versions up to 0.2, where release freed weights that fitted anyway


class ParallelSampler(io.ComfyNode):
    """KSampler with its loop in the workers where that can be; progress, preview and Cancel are KSampler's."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """New inputs are only ever appended."""
        return io.Schema(
            node_id="ParallelSampler",
            display_name="Parallel Sampler",
            category=CATEGORY,
            description="KSampler with a report: time per step on each rank, and memory per rank.",
            inputs=[*sampler_inputs(), loop_input()],
            outputs=sampler_outputs(),
        )

    @classmethod
    def execute(
        cls, model: io.Model.Type, latent_image: dict, loop: str = LOOPS[0], **settings: object
    ) -> io.NodeOutput:
        """The report is also the node's `ui`, where headless clients find it in /history."""
        return sampled_and_told(model, latent_image, loop, settings)


class ParallelFluxSampler(io.ComfyNode):
    """Parallel Sampler with the inputs that it had in versions up to 0.2, so that saved workflows open."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """New inputs are only ever appended."""
        return io.Schema(
            node_id="ParallelFluxSampler",
            display_name="Parallel Flux Sampler",
            category=CATEGORY,
            description="The earlier name of Parallel Sampler.",
            inputs=[
                *sampler_inputs(),
                loop_input(),
                io.Combo.Input(
                    "modulations",
                    options=list(MODULATIONS),
                    default=MODULATIONS[0],
                    optional=True,
                    tooltip="No longer used; kept so that saved workflows open.",
                ),
            ],
            outputs=sampler_outputs(),
            is_deprecated=True,
        )

    @classmethod
    def execute(
        cls,
        model: io.Model.Type,
        latent_image: dict,
        loop: str = LOOPS[0],
        modulations: str = MODULATIONS[0],
        **settings: object,
    ) -> io.NodeOutput:
        return sampled_and_told(model, latent_image, loop, settings)


def sampled_and_told(
    model: io.Model.Type, latent_image: dict, loop: str, settings: Mapping[str, object]
) -> io.NodeOutput:
    """One sampling run with KSampler's `settings`: the latent, and the report, which is the node's `ui` too."""
    asked = {"latent": latent_image, **settings}
    latent, record = sample(model, asked, worker_loop=uses_worker_loop(loop))
    report = denoise_report(record, settings, applied_to(model, settings))
    return io.NodeOutput(latent, report, ui=published(report, advice_of(model, asked)))


def sampler_outputs() -> list[io.Output]:
    """The latent, and the report of how it was made."""
    return [io.Latent.Output(display_name="latent"), TimingSocket.Output(display_name="timing")]


def loop_input() -> io.Input:
    """Where the sampler's loop runs."""
    return io.Combo.Input(
        "loop",
        options=list(LOOPS),
        default=LOOPS[0],
        optional=True,
        tooltip="auto runs all steps inside the workers where model and graph allow it; host goes step by step.",
    )


def uses_worker_loop(loop: str) -> bool:
    """Whether the workers run the loop where they can. Raises `ValueError` for a value that `loop` has not."""
    if loop not in LOOPS:
        raise ValueError(f"loop={loop!r} is unknown; use one of {', '.join(LOOPS)}")
    return loop == LOOPS[0]


def sampler_inputs() -> list[io.Input]:
    """Names, limits and defaults of KSampler where it has them, in the order they are drawn."""
    return [
        io.Model.Input(
            "model",
            tooltip="Connect Parallel Model Loader or Parallelize Model; any other MODEL is sampled and timed too.",
        ),
        io.Int.Input(
            "seed", default=0, min=0, max=2**64 - 1, control_after_generate=True, tooltip="Seed of the noise."
        ),
        io.Int.Input(
            "steps", default=20, min=1, max=10000, tooltip="As for KSampler: 20 to 50, or 4 to 8 for distilled models."
        ),
        io.Float.Input(
            "cfg",
            default=1.0,
            min=0.0,
            max=100.0,
            step=0.1,
            round=0.01,
            tooltip="Above 1 the negative prompt counts; 1 for distilled models and those with guidance in the prompt.",
        ),
        io.Combo.Input("sampler_name", options=sampler_names(), default="euler", tooltip="As KSampler has them."),
        io.Combo.Input("scheduler", options=scheduler_names(), default="simple", tooltip="As KSampler has them."),
        io.Conditioning.Input("positive", tooltip="What the image or video shall show."),
        io.Conditioning.Input("negative", tooltip="Used where cfg is above 1; never at 1."),
        io.Latent.Input(
            "latent_image", tooltip="Its size is that of the image or video; its content counts below denoise 1."
        ),
        io.Float.Input("denoise", default=1.0, min=0.0, max=1.0, step=0.01, tooltip="1 makes all of it anew."),
    ]
