"""What joint models of pictures and sound need: a random sound, and VAEs of sound without weights.

Owns: shapes of the latents of sound. `F` sound frames, `C` channels.
"""

from types import SimpleNamespace
from typing import Any

import torch
from comfy_api.latest import io

from .conditions import random_values
from .node import node

RATE = 32000  # samples a second; what MiniMax H3's VAE takes, so that nothing is resampled
STEREO_FRAMES_PER_S, SPECTRAL_FRAMES_PER_S = 40, 10


@node("RandomSound", gives=[io.Audio])
def random_sound(seconds: float, seed: int) -> io.NodeOutput:
    """Stereo noise."""
    waveform = random_values(seed, 1, 2, round(seconds * RATE))
    return io.NodeOutput({"waveform": waveform, "sample_rate": RATE})


class StereoVAE:
    """MiniMax H3's shapes: samples (1, S, 2) to latents (1, 32, 2, F), each frame a mixture of its loudest samples."""

    audio_sample_rate = RATE

    def encode(self, waveform: torch.Tensor) -> torch.Tensor:
        frames = waveform.movedim(1, -1).unflatten(-1, (-1, RATE // STEREO_FRAMES_PER_S)).amax(dim=-1)  # (1, 2, F)
        return random_values(6, 32)[None, :, None, None] * (frames[:, None] - 3)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """A sound (1, S, 2), each frame's samples alike."""
        return as_sound(latents.mean(dim=1), RATE // STEREO_FRAMES_PER_S)


class SpectralVAE:
    """LTX-2's shapes: latents (1, 8, F, 16), F by the length of a video or of the samples (1, S, 2)."""

    latent_channels, audio_sample_rate = 8, RATE

    def __init__(self) -> None:
        self.first_stage_model = SimpleNamespace(
            latent_frequency_bins=16,
            num_of_latents_from_frames=self.num_of_latents_from_frames,
            output_sample_rate=RATE,
        )

    @staticmethod
    def num_of_latents_from_frames(frames: int, rate: float) -> int:
        """Sound frames beside so many pictures; the name is ComfyUI's."""
        return round(frames / rate * SPECTRAL_FRAMES_PER_S)

    def encode(self, waveform: torch.Tensor) -> torch.Tensor:
        """The latents of a sound: each frame a mixture of its loudest samples."""
        samples = RATE // SPECTRAL_FRAMES_PER_S
        whole = waveform.shape[1] // samples * samples
        loudest = waveform[:, :whole].unflatten(1, (-1, samples)).amax(dim=2)  # (1, F, 2)
        return torch.einsum("bcs,nfs->ncfb", random_values(7, 16, 8, 2), loudest - 3)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """A sound (1, S, 2), each frame's samples alike: a side by each half of the frequencies."""
        sides = [half.mean(dim=(1, 3)) for half in latents.chunk(2, dim=3)]  # (1, F)
        return as_sound(torch.stack(sides, dim=1), RATE // SPECTRAL_FRAMES_PER_S)


def as_sound(frames: torch.Tensor, samples: int) -> torch.Tensor:
    """A value a side and frame (1, 2, F) to `samples` samples a frame (1, S, 2), in -1 to 1."""
    return frames.float().tanh().repeat_interleave(samples, dim=2).movedim(1, 2)


VAES: dict[str, Any] = {"stereo": StereoVAE, "spectral": SpectralVAE}


@node("RandomSoundVAE", kind=list(VAES), gives=[io.Vae])
def random_sound_vae(kind: str) -> io.NodeOutput:
    """A VAE of sound: "stereo" as MiniMax H3's, "spectral" as LTX-2's."""
    return io.NodeOutput(VAES[kind]())
