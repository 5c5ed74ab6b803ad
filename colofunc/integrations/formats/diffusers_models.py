"""Models of diffusers: their files have a name of their own, and they write their configuration themselves."""

from __future__ import annotations

from colofunc.functional.checkpoint.libraries import Library, has_base

STEM = "diffusion_pytorch_model"  # how the names of its weight files begin
DIFFUSERS = Library("diffusers", owns=has_base("diffusers.models.modeling_utils", "ModelMixin"), stem=STEM)
