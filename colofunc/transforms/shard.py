"""shard: run a step function on a mesh.

    step = cf.shard(step_fn, mesh)                                     # everything found by cost
    step = cf.shard(step_fn, mesh, {"*.fc1.weight": "(tp o) i"})       # a wish; the rest is found
    @cf.shard(mesh=mesh)                                               # as a decorator
    def step(state, batch): ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from colofunc.mesh import Mesh
from colofunc.transforms.compile import StepCompiler
from colofunc.transforms.staged import Intent, Staged, stage


def shard(
    step_fn: Callable[..., Any] | None = None,
    mesh: Mesh | None = None,
    *plans: Any,
    in_specs: Any = None,
    out_specs: Any = None,
    donate: Any = "auto",
    auto: bool = True,
    plugins: Sequence[Any] = (),
) -> Any:
    """The step function on `mesh`, with the same numbers.

    plans: dicts of name globs -> spec, functions `(name, shape) -> spec or None`, or named plans; they pin what they
    name and leave the rest open. in_specs, out_specs: trees of specs (strings, `cf.Spec`, None for automatic), prefixes
    allowed. donate: "auto" consumes argument 0 where output 0 can take its memory. auto: whether axes that no plan
    names are searched (False: replicated). plugins: modules asked beside the installed ones.
    """
    options = dict(mesh=mesh, plans=plans, in_specs=in_specs, out_specs=out_specs, donate=donate, auto=auto, plugins=tuple(plugins))
    intent = Intent("shard", options)
    if step_fn is None:
        return lambda fn: stage(fn, intent, StepCompiler)
    staged: Staged = stage(step_fn, intent, StepCompiler)
    return staged
