"""`cf.lazy(build)`: a module whose parameters and buffers are made later, one by one, bit for bit what `build()` makes.

Problem: a 175B model cannot be built before it is sharded, yet its initial values are drawn one after another from one
generator. Idea: run the constructor on tensors without data and write down every operator in order, with the state of
the generator where it draws. A value is what replaying the operators that wrote to its memory gives (see `tape`).

    torch.manual_seed(0)
    model = functional(lazy(lambda: GPT2LMHeadModel(config)))     # seconds, no memory
    state = step.init({"params": model.params, ...}, batch)       # made tensor by tensor, each straight into its shards

Anything that fills a tensor otherwise (from a file) gives it another source: see `colofunc.program.lazy`, where
`make(t) -> Tensor`, `make_parts(t, layout, mesh, ranks)` and `lazy_tensor(shape, dtype, make, read)` are.

Afterwards torch's generator stands where eager construction leaves it. That takes drawing the numbers and throwing them
away; a model with more than `DRAWS` of them (or a quarter in one tensor) is not worth it, so its numbers are drawn when
the first of its tensors is made, and the generator goes on from a seed that it drew itself: the model's values are the
same either way. That sweep costs what drawing costs (some 1e8 numbers a second and core) on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from colofunc.errors import InputError
from colofunc.functional.tape import Recording, Tape

M = TypeVar("M", bound=nn.Module)
# At most this many random numbers are drawn while a lazy module is built: some seconds, at most 1 GiB of float32 at a
# time.
DRAWS = 1 << 30


def lazy(build: Callable[[], M], draw: bool | None = None) -> M:
    """The module that `build()` returns, with tensors that are made when they are needed.

    draw: whether the generator is moved on now, so that code after this draws the numbers that it would draw after
    eager construction. None: if the model draws at most `DRAWS` numbers, and at most a quarter of that for one tensor.
    """
    if isinstance(build, nn.Module) or not callable(build):
        raise InputError(
            f"lazy wants a function that builds the module, not a {type(build).__name__}. Try: cf.lazy(lambda: "
            "Model(config))"
        )
    tape = Tape(limit={None: DRAWS, True: None, False: 0}[draw])
    with Recording(tape):
        module = build()
    tape.close()
    if not isinstance(module, nn.Module):
        raise InputError(
            f"lazy: build() returned {type(module).__name__}, not an nn.Module. Try: cf.lazy(lambda: Model(config))"
        )
    return module


__all__ = ["lazy"]
