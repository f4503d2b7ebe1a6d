"""What PipeFusion computes, in one process: the unmodified diffusers model, one patch after another.

Only the attention is replaced: it keeps each block's keys and values of the whole sequence, writes those of the patch
that comes through, and attends to all, so a patch sees later ones as they were in the call before. Shares no code with
the engine: which tokens a patch has is counted here once more.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import apply_rotary_emb

from parallel_runtime.models.flux.reference import ReferenceModel


class StaleAttention:
    """An attention processor of diffusers for all blocks. `places` are the patch's tokens in the whole sequence."""

    def __init__(self) -> None:
        self.places = torch.empty(0, dtype=torch.long)
        self.num_tokens = 0
        self.held: dict[int, list[torch.Tensor]] = {}  # keys and values, by attention module

    def __call__(
        self,
        attn: torch.nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of a patch; text tokens, where there are any, come first."""

        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(-1, (-1, attn.head_dim))

        q = attn.norm_q(heads(attn.to_q(hidden_states)))
        k = attn.norm_k(heads(attn.to_k(hidden_states)))
        v = heads(attn.to_v(hidden_states))
        num_text = 0
        if encoder_hidden_states is not None:
            num_text = encoder_hidden_states.shape[1]
            q = torch.cat((attn.norm_added_q(heads(attn.add_q_proj(encoder_hidden_states))), q), 1)
            k = torch.cat((attn.norm_added_k(heads(attn.add_k_proj(encoder_hidden_states))), k), 1)
            v = torch.cat((heads(attn.add_v_proj(encoder_hidden_states)), v), 1)
        q, k = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (q, k))
        if id(attn) not in self.held:
            whole = (k.shape[0], self.num_tokens, *k.shape[2:])
            self.held[id(attn)] = [torch.full(whole, torch.nan), torch.full(whole, torch.nan)]
        keys, values = self.held[id(attn)]
        keys[:, self.places], values[:, self.places] = k, v
        q, k, v = (x.transpose(1, 2) for x in (q, keys, values))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask).transpose(1, 2).flatten(2)
        if encoder_hidden_states is None:
            return out
        return attn.to_out[0](out[:, num_text:]), attn.to_add_out(out[:, :num_text])


def in_mid_run(
    path: str, call: Mapping[str, torch.Tensor], *, patches: int, warm_calls: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The velocity of a call with keys of the step before, and as it is without: in the middle of a run of 20 steps.

    `warm_calls` Euler steps lead to it, found backwards along its own velocity.
    """
    exact, stale = (
        ReferenceModel(path, dtype=torch.float32)(call),
        StaleModel(path, patches=patches, warm_calls=warm_calls),
    )
    for before in [number / 20 for number in range(warm_calls, 0, -1)]:
        img = call["img"].clone()
        img[..., : exact.shape[2]] += before * exact
        stale({**call, "img": img, "timesteps": call["timesteps"] + before})
    return stale(call), exact


class StaleModel:
    """The model of a file, called for `sides` conditionings in turn, the first `warm_calls` calls of each whole.

    Patches are of one length, patch 0 with the text, or with `longest_text` where sides share their patches.
    """

    def __init__(
        self, path: str, *, patches: int, warm_calls: int, sides: int = 1, longest_text: int | None = None
    ) -> None:
        self.reference_model = ReferenceModel(path, dtype=torch.float32)
        self.longest_text = longest_text
        self.patches, self.warm_calls, self.sides = patches, warm_calls, sides
        self.attention = [StaleAttention() for _ in range(sides)]
        self.count = 0

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The velocity (B, image tokens, channels) of the next call."""
        call, side = divmod(self.count, self.sides)
        self.count += 1
        attention = self.attention[side]
        self.reference_model.model.set_attn_processor(attention)
        num_text, num_image = tensors["txt"].shape[1], tensors["img"].shape[1]
        attention.num_tokens = num_text + num_image
        patches = (torch.arange(num_image),) if call < self.warm_calls else self._patches(num_text, num_image)
        return torch.cat([self._patch(attention, tensors, rows, text=not n) for n, rows in enumerate(patches)], 1)

    def _patches(self, num_text: int, num_image: int) -> tuple[torch.Tensor, ...]:
        """The image's tokens by patch."""
        text = num_text if self.longest_text is None else self.longest_text
        even = torch.arange(text + num_image).tensor_split(self.patches)[0]
        first = max(1, len(even) - text)
        others = torch.arange(first, num_image).tensor_split(self.patches - 1)
        return torch.arange(first), *others

    def _patch(
        self, attention: StaleAttention, tensors: Mapping[str, torch.Tensor], rows: torch.Tensor, *, text: bool
    ) -> torch.Tensor:
        num_text = tensors["txt"].shape[1]
        here = num_text if text else 0
        attention.places = torch.cat((torch.arange(here), num_text + rows))
        of_patch = {
            **tensors,
            "img": tensors["img"][:, rows],
            "img_ids": tensors["img_ids"][rows],
            "txt": tensors["txt"][:, :here],
            "txt_ids": tensors["txt_ids"][:here],
        }
        if "mask" in tensors:
            of_patch["mask"] = tensors["mask"][:, attention.places]
        return self.reference_model(of_patch)
