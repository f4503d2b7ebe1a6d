"""All cases of shared models, from the files that hold them."""

from __future__ import annotations

from . import (
    cases_audio,
    cases_flux,
    cases_images,
    cases_lightricks,
    cases_more_images,
    cases_pixels,
    cases_qwen21,
    cases_shapes,
    cases_videos,
    cases_wan,
)
from .tiny import CASES

__all__ = [
    "CASES",
    "cases_audio",
    "cases_flux",
    "cases_images",
    "cases_lightricks",
    "cases_more_images",
    "cases_pixels",
    "cases_qwen21",
    "cases_shapes",
    "cases_videos",
    "cases_wan",
]
