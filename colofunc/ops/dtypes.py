"""Policy: which dtypes a step keeps, computes and reduces in.

Problem: mixed precision is several choices that hang together (masters, compute, reductions, exceptions, a loss scale).
Idea: one frozen record says them all, checked where it is written; `colofunc.ops.policy` runs a step under it.

>>> Policy(compute="fp16", overrides={"lm_head": "fp32"}).override("lm_head.weight")
torch.float32
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import Any

import attrs
import torch

from colofunc.errors import InputError, near

NAMES = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16,
    "fp32": torch.float32, "float32": torch.float32, "fp64": torch.float64, "float64": torch.float64,
}  # fmt: skip


# Whether the code runs inside `cf.testing.float64()`.
DOUBLED: ContextVar[bool] = ContextVar("colofunc_doubled", default=False)


def doubled_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Inside `cf.testing.float64()` the tensors with float32 as float64, else the tensors."""
    if not DOUBLED.get():
        return dict(tensors)
    return {name: t.double() if t.dtype is torch.float32 else t for name, t in tensors.items()}


def floating(value: Any, what: str = "precision") -> torch.dtype:
    """A floating dtype from itself or its name. Raises InputError naming near names, or where integers belong."""
    if isinstance(value, str):
        if value not in NAMES:
            raise InputError(f"{what}={value!r} is no precision{near(value, NAMES)}")
        return NAMES[value]
    if not isinstance(value, torch.dtype):
        raise InputError(f"{what}={value!r} is no dtype; write a name such as 'bf16', or torch.bfloat16")
    if value not in NAMES.values():
        raise InputError(
            f"{what}={value}: a step computes in a floating dtype of 2, 4 or 8 bytes, such as torch.bfloat16"
        )
    return value


def _pairs(value: Any) -> tuple[tuple[str, torch.dtype], ...]:
    items = value.items() if isinstance(value, Mapping) else value
    return tuple((str(glob), floating(dtype, f"overrides[{glob!r}]")) for glob, dtype in items)


def _scale(value: Any) -> Any:
    if value in (None, "auto", "dynamic") or (
        isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    ):
        return value
    raise InputError(f"loss_scale={value!r}; write 'dynamic', a positive number that stays, None, or leave it out")


@attrs.frozen
class Policy:
    """Dtypes of a step. Each may be given as a `torch.dtype` or by name ("bf16", "fp16", "fp32").

    params: what the state keeps at least; narrower leaves are widened, so that a model loaded in bf16 has fp32 masters.
    compute: what differentiated leaves and the weights of `Model.apply` are cast to. reduce: the least dtype in which
    gradients are summed over the mesh. overrides: glob over module paths and parameter names -> dtype there; the last
    that matches wins. loss_scale: "dynamic", a number that stays, None; by default dynamic where compute is fp16.
    """

    params: torch.dtype = attrs.field(default=torch.float32, converter=floating)
    compute: torch.dtype = attrs.field(default=torch.bfloat16, converter=floating)
    reduce: torch.dtype = attrs.field(default=torch.float32, converter=floating)
    overrides: tuple[tuple[str, torch.dtype], ...] = attrs.field(default=(), converter=_pairs)
    loss_scale: str | float | None = attrs.field(default="auto", converter=_scale)

    @property
    def scales(self) -> str | float | None:
        """What `loss_scale` means: "dynamic", a number, or None."""
        dynamic = "dynamic" if self.compute is torch.float16 else None
        return dynamic if self.loss_scale == "auto" else self.loss_scale

    def override(self, name: str) -> torch.dtype | None:
        """What the overrides say of a module or parameter: of itself, or of a module that holds it."""
        found = [d for glob, d in self.overrides if speaks_of(glob, name)]
        return found[-1] if found else None


def speaks_of(glob: str, name: str) -> bool:
    """Whether a glob matches a dotted name or a module that holds it."""
    parts = name.split(".")
    paths = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    return any(fnmatchcase(p, glob) or fnmatchcase(p, f"*.{glob}") for p in paths)
