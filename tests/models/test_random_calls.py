"""What random calls are made of, exactly: shapes of latents, widths that a class says, what of a call is noted."""

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_runtime.models.hosted import random_calls
from parallel_runtime.models.hosted.other_calls import apply_call, method_call
from parallel_runtime.models.hosted.random_calls import MORE_LATENTS, SAID_WIDTHS, Size, flat, latent_shapes, recording

CPU, META = torch.device("cpu"), torch.device("meta")


def model(name: str, dims: int = 3, **transformer: Any) -> Any:
    """As ComfyUI's BaseModel of a class: 8 pixels and 4 frames of a video make a latent's number."""
    form = SimpleNamespace(latent_dimensions=dims, spacial_downscale_ratio=8, temporal_downscale_ratio=4)
    form.latent_channels = 16
    return type(name, (), {"latent_format": form, "diffusion_model": SimpleNamespace(**transformer)})()


def size(frames: int | None = None, **other: int) -> Size:
    """Of two calls of 12 by 6 latents."""
    return Size(**{"width": 103, "height": 48, "text_tokens": 5, "batch": 2, "seed": 0, "frames": frames} | other)


@pytest.mark.parametrize(
    ("name", "dims", "frames", "shapes"),
    [
        ("Flux", 2, None, [(2, 16, 6, 12)]),
        ("QwenImage", 3, None, [(2, 16, 1, 6, 12)]),
        ("WAN21", 3, None, [(2, 16, 3, 6, 12)]),
        ("WAN21", 3, 1, [(2, 16, 1, 6, 12)]),
        ("WAN21", 3, 4, [(2, 16, 1, 6, 12)]),
        ("WAN21", 3, 5, [(2, 16, 2, 6, 12)]),
        ("LTXAV", 3, 5, [(2, 16, 2, 6, 12), (2, 8, 5, 16)]),
        ("MiniMaxH3", 3, 1, [(2, 24, 2, 6, 12), (2, 32, 2, 8)]),
        ("MiniMaxH3", 3, 5, [(2, 24, 2, 6, 12), (2, 32, 2, 8)]),
        ("MiniMaxH3", 3, 6, [(2, 24, 7, 6, 12), (2, 32, 2, 37)]),
        ("MiniMaxH3", 3, 22, [(2, 24, 7, 6, 12), (2, 32, 2, 37)]),
        ("MiniMaxH3", 3, 23, [(2, 24, 12, 6, 12), (2, 32, 2, 65)]),
    ],
)
def test_latents_have_these_shapes(name: str, dims: int, frames: int | None, shapes: list[tuple[int, ...]]) -> None:
    made = model(name, dims, audio_in_channels=128)
    assert latent_shapes(made, size(frames)) == shapes
    assert latent_shapes(model("WAN21"), size(), usual_frames=81) == [(2, 16, 21, 6, 12)]
    assert MORE_LATENTS["LTXAV"](made, (2, 16, 1, 6, 12), 0)[1] == (2, 8, 1, 16), "sound of one frame at least"


@pytest.mark.parametrize(
    ("name", "dims", "given", "said"),
    [
        ("Mesh", 1, size(), "Mesh makes neither images nor videos; only those are called with random inputs"),
        ("Flux", 2, size(3), "--frames=3: Flux makes images; leave --frames out"),
        ("Krea2", 3, size(1), "--frames=1: Krea2 makes images; leave --frames out"),
        ("Flux", 2, size(width=7), "--width=7 --height=48: Flux needs at least 8 pixels a side"),
    ],
)
def test_sizes_that_a_model_cannot_have_are_refused(name: str, dims: int, given: Size, said: str) -> None:
    with pytest.raises(ValueError) as error:
        latent_shapes(model(name, dims), given)
    assert str(error.value) == said
    assert latent_shapes(model("Flux", 2), size(width=8, height=8)) == [(2, 16, 1, 1)]


NORMS = [SimpleNamespace(weight=torch.zeros(width)) for width in (3, 4)]
LTX = {"caption_channels": 40, "cross_attention_dim": 7, "audio_cross_attention_dim": 5}
LTX |= {f"{half}_embeddings_connector": SimpleNamespace(inner_dim=9) for half in ("video", "audio")}
BEFORE = {"caption_proj_before_connector": True, "caption_projection_first_linear": True}
AFTER = {"caption_proj_before_connector": False, "caption_projection_first_linear": True}


@pytest.mark.parametrize(
    ("name", "transformer", "device", "width"),
    [
        ("Krea2", {"txtlayers": 3, "txtdim": 5}, CPU, 15),
        ("Lens", {"multi_layer_encoder_feature": True, "txt_norm": NORMS}, CPU, 7),
        ("Lens", {"multi_layer_encoder_feature": False, "txt_norm": NORMS[1]}, CPU, 4),
        ("LTXAV", LTX | AFTER, META, 80),
        ("LTXAV", LTX | BEFORE, META, 12),
        ("LTXAV", LTX | BEFORE, CPU, 40),
        ("LTXAV", LTX | BEFORE | {"caption_projection_first_linear": False}, CPU, 9),
        ("LTXAV", LTX | AFTER, CPU, 9),
        ("LTXAV", LTX | AFTER | {"audio_embeddings_connector": SimpleNamespace(inner_dim=4)}, CPU, 13),
    ],
)
def test_text_is_as_wide_as_its_class_says(
    name: str, transformer: dict[str, Any], device: torch.device, width: int
) -> None:
    assert SAID_WIDTHS[name](SimpleNamespace(**transformer), device) == width


def test_a_reference_is_smaller_and_of_one_frame_and_a_mask_leaves_the_first_half() -> None:
    assert random_calls._reference((2, 16, 3, 10, 6)) == (1, 16, 1, 6, 4)
    assert random_calls._reference((2, 16, 2, 21)) == (1, 16, 2, 14)
    frames, rows = torch.ones(1, 2, 5, 3, 4), torch.ones(1, 2, 1, 5, 4)
    frames[:, :, :2], rows[:, :, :, :2] = 0, 0
    assert torch.equal(random_calls._half(torch.full((1, 2, 5, 3, 4), 7.0)), frames)
    assert torch.equal(random_calls._half(rows + 7), rows)
    assert torch.equal(random_calls._half(rows[:, :, 0]), rows[:, :, 0])


@pytest.mark.parametrize(("device", "made_on"), [(META, CPU), (CPU, CPU), (torch.device("cuda", 1), None)])
def test_what_reads_values_is_made_where_there_are_values(
    device: torch.device, made_on: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def side(*given: Any) -> Any:
        asked.append(given[-1])
        return SimpleNamespace(arguments=lambda: ((), {"context": 3}))

    class Transformer(nn.Module):
        def forward(self, **given: Any) -> Any:
            return given

    monkeypatch.setattr(random_calls, "_SampledSide", side)
    called = model("WAN21")
    called.diffusion_model = Transformer()
    call = random_calls.call_of(called, size(), [(1, 2)], {}, device)
    assert call(sample_sigmas=5) == {"context": 3, "transformer_options": {"sample_sigmas": 5}}
    random_calls.find_widths(called, size(), device)
    assert asked == [made_on or device] * 3


def test_widths_are_what_the_layer_called_last_wants_less_what_goes_beside() -> None:
    probes = {"cross_attn": 4099, "pooled_output": 7919}
    for last, found in (
        ([], None),
        ([(64, 4099)], {"cross_attn": 64}),
        ([(64, 4100)], None),
        ([(9, 99), (300, 7919 + 256)], {"pooled_output": 44}),
        ([(256, 7919 + 256)], None),
        ([(4097, 7919 + 4095)], {"pooled_output": 2}),
        ([(9000, 7919 + 4096)], None),
        ([(64, 4098)], None),
    ):
        widths: dict[str, int | None] = dict(probes)
        assert random_calls._mend(widths, last) == (found is not None)
        assert widths == probes | (found or {})
    known: dict[str, int | None] = {"cross_attn": 4099, "pooled_output": None}
    assert not random_calls._mend(known, [(64, 7919)])


def test_the_layer_called_last_is_one_with_a_matrix_or_a_vector() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Conv1d(5, 5, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner[0](x)

    layers, seen = Layers(), []
    with random_calls._last_layer(layers) as last:
        for layer, width in ((layers, 3), (layers, 4), (layers.inner[1], 5)):
            with suppress(RuntimeError):
                layer(torch.ones(2, width))
            seen.append(last[-1])
        layers.inner[2](torch.ones(2, 5, 1))
        assert last == [(5, 5)]
    assert seen == [(3, 3), (3, 4), (5, 5)]
    last.clear()
    layers(torch.ones(2, 3))
    assert not last, "nothing is noted any more"


def test_calls_are_noted_with_their_outputs_as_they_were() -> None:
    class Transformer(nn.Module):
        def forward(self, x: Tensor, times: int = 1) -> Tensor:
            return x.mul_(2 * times)

    made, transformer = model("Flux", 2), Transformer()
    made.diffusion_model = transformer
    with recording(made) as recorded:
        transformer(torch.ones(3, 16, 2, 5), times=2)
    transformer(torch.ones(3, 16, 2, 5))
    (noted,) = recorded
    assert noted.out.shape == (3, 160) and noted.out.unique().tolist() == [4.0]
    assert noted.call.out_shape == (3, 160) and noted.call.shapes == ((3, 16, 2, 5),)
    assert [each.unique().tolist() for each in noted.call.tensors.values()] == [[1.0]], "before the call wrote to it"
    both = flat([torch.ones(2, 3, 4, dtype=torch.half), torch.zeros(4, 5)], 2)
    assert both.dtype == torch.float32 and both.tolist() == [[1.0] * 12 + [0.0] * 10] * 2


def test_a_call_of_comfyuis_own_function_travels_with_the_rows_of_each_image() -> None:
    text, one = torch.ones(4, 7), torch.ones(1, 9)
    given = {"c_crossattn": text, "other": one, "transformer_options": {"a": 1, "uuids": 2}}
    call = apply_call("Flux", torch.Size((2, 16, 3, 5)), (0, 1), given)
    assert (call.out_shape, call.shapes) == ((2, 240), ((2, 16, 3, 5),))
    assert list(call.tensors) == ["t0", "t1"] and call.tensors["t0"] is text and call.tensors["t1"] is one
    tree = {"c_crossattn": {"t": 0}, "other": {"t": 1}, "transformer_options": {"d": {"a": 1}}}
    assert call.options == {
        "call": {"d": {"args": {"l": []}, "kwargs": {"d": tree}}},
        "tensors": 2,
        "batched": [0],
        "residuals": [],
        "method": None,
        "latent": [16, 3, 5],
        "sides": [0, 1],
    }
    method = method_call("LTX", "preprocess_text_embeds", [one], {"unprocessed": True}, torch.Size((1, 5, 3)))
    assert (method.out_shape, method.shapes, method.options["method"]) == (
        (1, 15),
        ((1, 5, 3),),
        "preprocess_text_embeds",
    )
    assert method.options["call"] == {"d": {"args": {"l": [{"t": 0}]}, "kwargs": {"d": {"unprocessed": True}}}}
