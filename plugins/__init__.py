"""The plugins that ship with colofunc, imported as `colofunc_plugins`.

    from colofunc_plugins import zero, tensor, experts, ring

Each enters by the same door as a third party's plugin, uses public names of colofunc only, and knows no other plugin.
This module is what the entry point names; `cf.configure(..., plugins=[colofunc_plugins])` where nothing is installed.
"""

from collections.abc import Callable, Mapping
from typing import Any

from colofunc_plugins.gemini import colofunc_memory_policies, elixir, gemini
from colofunc_plugins.moe import experts
from colofunc_plugins.sequence import gather_kv, ring, ulysses
from colofunc_plugins.tp2d_25d_3d import tensor
from colofunc_plugins.zero import zero

import colofunc as cf

__all__ = ["colofunc_memory_policies", "elixir", "experts", "gather_kv", "gemini", "ring", "tensor", "ulysses", "zero"]


@cf.hookimpl
def colofunc_plans() -> Mapping[str, Callable[..., Any]]:
    return {"experts": experts, "gather_kv": gather_kv, "ring": ring, "tensor": tensor, "ulysses": ulysses, "zero": zero}
