"""State of Adam and AdamW in few bits: what `cf.adapt(torch.optim.AdamW, state_bits=8, rounding="stochastic")` means.

    {"step": 0-dim, "exp_avg": {name: int8}, "exp_avg_scale": {name: float32}, "exp_avg_sq": {name: uint8},
    "exp_avg_sq_scale": ...}

Codes have their parameter's shape and the name that its moment has in any optimizer, so that plans mean them. Small
parameters have moments as wide as they are and no scales. The code and the blocks: `colofunc.ops.update_packed`.
Parameters in bfloat16 that are rounded stochastically have no masters, and moments in bfloat16 or 8 bits:
`colofunc.ops.update_rounded`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from colofunc.dtensor.roles import give_role
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import InputError
from colofunc.ops.update_packed import Blocks, block_of, code_dtype, packed_moment, widened_moment
from colofunc.ops.update_rounded import ROUNDED
from colofunc.program.lazy import zeros_like
from colofunc.program.tracing.tree import flatten

MOMENTS = ("exp_avg", "exp_avg_sq")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
"""Of moments in 8 bits, for those parameters whose moments are."""
OWN_OPTIONS = ("state_bits", "rounding")
"""Options of `cf.adapt` that torch's classes do not have."""
NEAREST, STOCHASTIC = "nearest", "stochastic"
ADAMS = (torch.optim.AdamW, torch.optim.Adam)

Params = Mapping[str, tuple[Tensor, Blocks | None]]  # name -> (parameter, how its moments are cut; None: kept wide)


def check_moments(cls: type[torch.optim.Optimizer], bits: Any, options: Mapping[str, Any], where: str = "") -> None:
    """Raises InputError where a class with these options cannot keep its state in `bits`. where: what the error begins
    with.
    """
    if bits not in (8, 32) or isinstance(bits, bool):
        raise InputError(f"{where}state_bits={bits!r}: moments are kept in 32 bits, or in 8. Try: state_bits=8")
    if bits == 32:
        return
    if cls not in ADAMS:
        raise InputError(
            f"{where}state_bits=8: {cls.__name__} has no state in 8 bits. Try: torch.optim.AdamW or torch.optim.Adam"
        )
    if options.get("amsgrad"):
        raise InputError(
            f"{where}state_bits=8: the maxima of amsgrad are kept in 32 bits only. Try: amsgrad=False, or state_bits=32"
        )


def check_rounding(
    cls: type[torch.optim.Optimizer], rounding: Any, options: Mapping[str, Any], where: str = ""
) -> None:
    """Raises InputError where updates of a class with these options cannot be rounded so. where: what the error begins
    with.
    """
    if rounding not in (NEAREST, STOCHASTIC):
        raise InputError(
            f"{where}rounding={rounding!r}: numbers are rounded to the nearest, or by a draw. Try: "
            f"rounding={STOCHASTIC!r}"
        )
    if rounding == NEAREST:
        return
    if cls not in ADAMS:
        raise InputError(
            f"{where}rounding={rounding!r}: {cls.__name__} rounds to the nearest. Try: torch.optim.AdamW or "
            "torch.optim.Adam"
        )
    if options.get("amsgrad"):
        raise InputError(
            f"{where}rounding={rounding!r}: the maxima of amsgrad are rounded to the nearest. Try: amsgrad=False"
        )


def is_rounded(param: Tensor, options: Mapping[str, Any]) -> bool:
    """Whether what is written of this parameter is rounded by a draw: what is wider than bfloat16 needs none."""
    return options.get("rounding") == STOCHASTIC and param.dtype in ROUNDED


def moment_blocks(param: Tensor, options: Mapping[str, Any]) -> Blocks | None:
    """How the moments of a parameter are cut; None where they are kept wide."""
    return block_of(tuple(param.shape)) if options.get("state_bits") == 8 else None


def site_of(name: str) -> int:
    """Which draws are those of a parameter of this name."""
    return crc32(name.encode())


def options_of_torch(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those options that the class itself has, but for its rate."""
    return {key: value for key, value in options.items() if key not in ("lr", *OWN_OPTIONS)}


def zeros(params: Params) -> dict[str, dict[str, Tensor]]:
    """Moments before the first update, and scales of those in 8 bits; lazy where the parameters are or are large."""
    found: dict[str, dict[str, Tensor]] = {key: {} for key in (*MOMENTS, *SCALES)}
    for name, (param, blocks) in params.items():
        for key, scale in zip(MOMENTS, SCALES, strict=True):
            found[key][name] = zeros_like(param, None if blocks is None else code_dtype(key == MOMENTS[0]))
            if blocks is not None:
                shape = blocks.scales(tuple(param.shape))
                found[scale][name] = zeros_like(param.new_empty(shape, dtype=torch.float32))
    return {key: made for key, made in found.items() if made or key in MOMENTS}


def check_pair(cls: type[torch.optim.Optimizer], opt_state: Mapping[str, Any]) -> None:
    """Raises InputError where a state has not just the two moments."""
    odd = sorted(opt_state.keys() - {"step", *MOMENTS, *SCALES})
    if cls not in ADAMS or odd or not opt_state.keys() >= {"step", *MOMENTS}:
        raise InputError(
            f"converted: a state with {', '.join(sorted(opt_state))} for {cls.__name__}; it is for the two moments of "
            "Adam and AdamW. Try: the state that init(params) of such an optimizer made, without amsgrad"
        )


def converted(opt_state: Mapping[str, Any], params: Params) -> dict[str, Any]:
    """The state with moments in 8 bits or wide as `params` say."""
    state: dict[str, Any] = {"step": opt_state["step"], **{key: {} for key in (*MOMENTS, *SCALES)}}
    for key, scale in zip(MOMENTS, SCALES, strict=True):
        signed = key == MOMENTS[0]
        for name, (param, blocks) in params.items():
            moment, unit = opt_state[key][name], opt_state.get(scale, {}).get(name)
            if (unit is None) == (blocks is None):
                state[key][name] = moment
                if unit is not None:
                    state[scale][name] = unit
            elif blocks is None:
                state[key][name] = widened_moment(_whole(moment), _whole(unit), signed).to(param.dtype)
            else:
                state[key][name], state[scale][name] = packed_moment(_whole(moment), blocks, signed)
    state = {key: made for key, made in state.items() if key not in SCALES or made}
    give_role("state", flatten(state)[0])
    return state


def _whole(x: Tensor) -> Tensor:
    return x.full() if isinstance(x, DTensor) else x
