"""Optimizers as functions: `cf.adapt(torch.optim.AdamW, lr=3e-4)` has `init` and a pure `update`.

Problem: `torch.optim` classes hold state in attributes and change parameters in place. Idea: state is a plain tree,

    {"step": 0-dim, "exp_avg": {name: tensor}, "exp_avg_sq": {name: tensor}}

and `update(grads, state, params)` returns new params and new state. Adam, AdamW and SGD are one operator per
parameter (`colofunc.ops.update`); other classes run torch's own code on copies (`colofunc.functional.torch_optim`).

`groups` maps globs over parameter names to options that differ there; later entries win. `lr` is a number or a function
of the number of updates already done, a 0-dim tensor (so write it with torch operators: `torch.cos`, not `math.cos`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc.errors import InputError, near
from colofunc.functional import torch_optim
from colofunc.ops import update as ops
from colofunc.program.trace_meta import phase

Schedule = Callable[[Tensor], Any]
Tensors = dict[str, Tensor]
State = dict[str, Any]
OPERATORS = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adamw", torch.optim.SGD: "sgd"}


@attrs.frozen(eq=False)
class Optimizer:
    """A `torch.optim` class as two functions. Build it with `adapt`."""

    cls: type[torch.optim.Optimizer]
    lr: float | Schedule
    options: Mapping[str, Any]  # the class's defaults and what was given
    groups: Mapping[str, Mapping[str, Any]]

    def init(self, params: Mapping[str, Tensor]) -> State:
        """The state before the first update; made where and as the parameters are."""
        self._check(params)
        kind = OPERATORS.get(self.cls)
        state: State = {"step": torch.zeros((), dtype=torch.float32)}
        if kind == "adamw":
            state["exp_avg"] = {n: torch.zeros_like(p) for n, p in params.items()}
            state["exp_avg_sq"] = {n: torch.zeros_like(p) for n, p in params.items()}
            largest = {n: torch.zeros_like(p) for n, p in params.items() if self.of(n)["amsgrad"]}
            return state | ({"max_exp_avg_sq": largest} if largest else {})
        if kind == "sgd":
            buffers = {n: torch.zeros_like(p) for n, p in params.items() if self.of(n)["momentum"] != 0}
            return state | ({"momentum_buffer": buffers} if buffers else {})
        return state | torch_optim.init(self.cls, self._grouped(params), params)

    def update(
        self, grads: Mapping[str, Tensor | None], opt_state: State, params: Mapping[str, Tensor]
    ) -> tuple[Tensors, State]:
        """(params, state) after one update. A gradient of None counts as zeros, so weight decay still acts."""
        self._check_names(grads, params)
        with phase("update"), torch.no_grad():
            step = opt_state["step"] + 1
            full = {n: torch.zeros_like(p) if (g := grads[n]) is None else g for n, p in params.items()}
            kind = OPERATORS.get(self.cls)
            if kind is None:
                grouped = self._grouped(params)
                new, rest = torch_optim.update(self.cls, grouped, self._rates(params, step), full, opt_state, params)
                return new, {"step": step, **rest}
            run = self._adamw if kind == "adamw" else self._sgd
            return run(full, opt_state, params, step, self._rates(params, step))

    def of(self, name: str) -> dict[str, Any]:
        """The options of one parameter."""
        found = dict(self.options)
        for glob, changed in self.groups.items():
            if fnmatchcase(name, glob):
                found |= changed
        return found

    # ---- one operator per parameter ----

    def _adamw(
        self, grads: Tensors, state: State, params: Mapping[str, Tensor], step: Tensor, rates: Tensors
    ) -> tuple[Tensors, State]:
        new: Tensors = {}
        first: Tensors = {}
        second: Tensors = {}
        largest: Tensors = {}
        for n, p in params.items():
            o = self.of(n)
            decoupled = self.cls is torch.optim.AdamW or bool(o.get("decoupled_weight_decay", False))
            top = state["max_exp_avg_sq"][n] if o["amsgrad"] else None
            new[n], first[n], second[n], maximum = ops.adamw(
                p, grads[n], state["exp_avg"][n], state["exp_avg_sq"][n], step, rates[n], *map(float, o["betas"]),
                o["eps"],
                o["weight_decay"], decoupled, o["amsgrad"], top, o["maximize"],
            )  # fmt: skip
            if top is not None:
                largest[n] = maximum
        return new, {"step": step, "exp_avg": first, "exp_avg_sq": second} | (
            {"max_exp_avg_sq": largest} if largest else {}
        )

    def _sgd(
        self, grads: Tensors, state: State, params: Mapping[str, Tensor], step: Tensor, rates: Tensors
    ) -> tuple[Tensors, State]:
        new: Tensors = {}
        buffers: Tensors = {}
        for n, p in params.items():
            o = self.of(n)
            buffer = state["momentum_buffer"][n] if o["momentum"] != 0 else None
            new[n], kept = ops.sgd(
                p,
                grads[n],
                buffer,
                step,
                rates[n],
                o["momentum"],
                o["dampening"],
                o["weight_decay"],
                o["nesterov"],
                o["maximize"],
            )
            if buffer is not None:
                buffers[n] = kept
        return new, {"step": step} | ({"momentum_buffer": buffers} if buffers else {})

    # ---- options ----

    def _rates(self, params: Mapping[str, Tensor], step: Tensor) -> Tensors:
        """Name -> learning rate, a 0-dim float64 tensor; equal rates are one tensor."""
        made: dict[Any, Tensor] = {}

        def rate(lr: float | Schedule) -> Tensor:
            if lr not in made:
                value = lr((step - 1).to(torch.float64)) if callable(lr) else lr
                made[lr] = (
                    value.to(torch.float64)
                    if isinstance(value, Tensor)
                    else torch.full((), float(value), dtype=torch.float64)
                )
            return made[lr]

        return {n: rate(self.of(n).get("lr", self.lr)) for n in params}

    def _grouped(self, params: Mapping[str, Tensor]) -> list[tuple[list[str], dict[str, Any]]]:
        """Parameters with equal options together: (names, options)."""
        found: list[tuple[list[str], dict[str, Any]]] = []
        for n in params:
            options = {"lr": self.lr, **self.of(n)}
            for names, known in found:
                if known == options:
                    names.append(n)
                    break
            else:
                found.append(([n], options))
        return found

    def _check(self, params: Mapping[str, Tensor]) -> None:
        for glob in self.groups:
            if not any(fnmatchcase(n, glob) for n in params):
                raise InputError(f"groups: {glob!r} matches no parameter{near(glob, params)}")

    def _check_names(self, grads: Mapping[str, Tensor | None], params: Mapping[str, Tensor]) -> None:
        missing = [n for n in params if n not in grads]
        extra = [n for n in grads if n not in params]
        if missing or extra:
            raise InputError(
                f"update: no gradient for {missing[:4]}, no parameter for {extra[:4]}. Try: gradients "
                f"with the names of the parameters"
            )


def adapt(
    cls: type[torch.optim.Optimizer],
    lr: float | Schedule | None = None,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> Optimizer:
    """The functional form of a `torch.optim` class.

    Raises InputError for a class that cannot be traced, an option the class does not have, or a value it refuses.
    """
    if cls not in OPERATORS:
        torch_optim.check(cls)
    defaults = torch_optim.defaults(cls, lr, options)
    rate = defaults.pop("lr") if lr is None else lr
    chosen = {glob: dict(changed) for glob, changed in (groups or {}).items()}
    for glob, changed in chosen.items():
        unknown = [k for k in changed if k != "lr" and k not in defaults]
        if unknown:
            raise InputError(
                f"groups[{glob!r}]: {cls.__name__} has no option {unknown[0]!r}{near(unknown[0], defaults)}"
            )
    defaults.pop("lr", None)
    return Optimizer(cls, rate, defaults, chosen)
