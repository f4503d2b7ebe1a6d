"""Timed VAE Decode: VAE Decode, and how long the decode alone took; with SP Config, by tiles over the workers."""

from comfy_api.latest import io

from .choice import ParallelChoice
from .host.panel.report_history import published
from .host.vae.decoding import decode
from .report import decode_report
from .sockets import CATEGORY, SpConfigSocket, TimingSocket


class TimedVAEDecode(io.ComfyNode):
    """Decodes a latent and times it, apart from sampling, so that neither hides in the other."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Names of VAE Decode; new inputs are only ever appended."""
        return io.Schema(
            node_id="TimedVAEDecode",
            display_name="Timed VAE Decode",
            category=CATEGORY,
            description="VAE Decode with a report of its time, the device waited for, nothing else counted.",
            inputs=[
                io.Latent.Input("samples", tooltip="What a sampler made."),
                io.Vae.Input("vae", tooltip="Loaded before the clock starts."),
                SpConfigSocket.Input(
                    "sp_config",
                    optional=True,
                    tooltip="Its devices decode tiles at once, as VAE Decode (Tiled): nearly the same picture. "
                    "Not connected: VAE Decode.",
                ),
            ],
            outputs=[io.Image.Output(display_name="image"), TimingSocket.Output(display_name="timing")],
        )

    @classmethod
    def execute(cls, samples: dict, vae: io.Vae.Type, sp_config: ParallelChoice | None = None) -> io.NodeOutput:
        """The report is also the node's `ui`, where headless clients find it in /history."""
        image, record = decode(vae, samples, () if sp_config is None else sp_config.selection.devices)
        report = decode_report(record)
        return io.NodeOutput(image, report, ui=published(report))
