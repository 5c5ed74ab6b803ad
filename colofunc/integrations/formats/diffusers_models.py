"""Models of diffusers: their files have a name of their own, and they write their configuration themselves."""

from __future__ import annotations

from colofunc.functional.checkpoint.libraries import Library, has_base
from colofunc.functional.checkpoint.plainfile import DIFFUSERS as STEM

DIFFUSERS = Library("diffusers", owns=has_base("diffusers.models.modeling_utils", "ModelMixin"), stem=STEM)
