"""shard: run a step function on a mesh.

    step = cf.shard(step_fn, mesh)                                     # everything found by cost
    step = cf.shard(step_fn, mesh, {"*.fc1.weight": "(tp o) i"})       # a wish; the rest is found
    @cf.shard(mesh=mesh)                                               # as a decorator
    def step(state, batch): ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from colofunc.compiler.replica_check import EVERY
from colofunc.compiler.step_compiler import stage
from colofunc.compiler.transform import Sharding, Transform
from colofunc.errors import InputError
from colofunc.mesh import Mesh
from colofunc.plugins import given_plugins

Donate = Literal["auto"] | bool | tuple[int, ...] | None


def shard(
    step_fn: Callable[..., Any] | None = None,
    mesh: Mesh | None = None,
    *plans: Any,
    in_specs: Any = None,
    out_specs: Any = None,
    donate: Donate = "auto",
    auto: bool = True,
    plugins: Sequence[Any] = (),
    agree_every: int = EVERY,
) -> Any:
    """The step function on `mesh`, with the same numbers.

    plans: dicts of name globs -> spec, functions `(name, shape) -> spec or None`, or named plans; they pin what they
    name and leave the rest open. in_specs, out_specs: trees of specs (strings, `cf.Spec`, None for automatic), prefixes
    allowed. donate: "auto" consumes argument 0, unless a batch, where output 0 can take its memory; (k, ...), positions
    of arguments: each for an output of its tree, shapes and dtypes, and an error where there is none; True is (0,);
    False, None or (): nothing is consumed. auto: whether axes that no plan names are searched (False: replicated).
    plugins: modules asked beside the installed ones. agree_every: after so many steps real ranks compare checksums of
    the results that they hold as copies, which each has computed; where a kernel rounds otherwise on one of them, it is
    an error that names the leaf. 0: never.
    """
    if not isinstance(agree_every, int) or isinstance(agree_every, bool) or agree_every < 0:
        raise InputError(f"agree_every={agree_every!r}: a number of steps, 0 for never; write agree_every={EVERY}")
    asked = given_plugins(plugins, "cf.shard")
    sharding = Sharding(mesh, plans, in_specs, out_specs, _consumes(donate), auto, asked, agree_every)  # type: ignore[arg-type]
    return stage(step_fn, Transform("shard", sharding=sharding))


def _consumes(donate: Donate) -> str | tuple[int, ...]:
    """"auto", or the positions of arguments."""
    if donate == "auto":
        return "auto"
    if donate is True or donate is False or donate is None:
        return (0,) if donate else ()
    given = tuple(donate) if isinstance(donate, tuple | list) else (None,)
    are_positions = all(isinstance(k, int) and not isinstance(k, bool) and k >= 0 for k in given)
    if not are_positions or len(set(given)) < len(given):
        raise InputError(
            f'donate={donate!r}: give positions of arguments, each once; write donate="auto", (0,), (0, 1) or ()'
        )
    return tuple(donate)
