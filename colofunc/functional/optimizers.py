"""Optimizers as functions: `cf.adapt(torch.optim.AdamW, lr=3e-4)` has `init` and a pure `update`.

Problem: `torch.optim` classes hold state in attributes and change parameters in place. Idea: state is a plain tree,

    {"step": 0-dim, "exp_avg": {name: tensor}, "exp_avg_sq": {name: tensor}}

and `update(grads, state, params)` returns new params and new state. Parameters are a dict of names, as `model.params`
is, or any tree of tensors: `{"encoder": encoder.params, "temperature": t}` is named by its paths, `encoder.0.weight`.

Elementwise classes are one operator per parameter (`colofunc.ops.update`, `update_rules`); Muon, which looks at whole
matrices, runs torch's own code on copies (`colofunc.functional.torch_optim`). Lion and LAMB, which torch does not
have, are classes of `colofunc.functional.lion_lamb`.

`groups` maps globs over parameter names to options that differ there, or to another optimizer for what they match;
later entries win. `state_bits=8` keeps moments of Adam and AdamW as bytes and scales
(`colofunc.functional.packed_moments`), `rounding="stochastic"` updates parameters in bfloat16 without masters. `lr` is
a number, a function of the number of updates already done (a 0-dim tensor, so write it with torch operators:
`torch.cos`, not `math.cos`), or a torch scheduler (`cf.schedule`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc.dtensor.roles import give_role
from colofunc.errors import InputError, near
from colofunc.functional import operator_updates, packed_moments, torch_optim
from colofunc.functional.lion_lamb import OWN, UpdateInputs
from colofunc.functional.packed_moments import MOMENTS, SCALES
from colofunc.functional.parameter_tree import check_shapes, named_gradients, named_parameters
from colofunc.ops import policy
from colofunc.ops.update_packed import Blocks
from colofunc.ops.update_rules import KINDS
from colofunc.program.lazy import zeros_like
from colofunc.program.tracing.meta import phase
from colofunc.program.tracing.roles import mark_role
from colofunc.program.tracing.tree import flatten, join, unflatten

RateSchedule = Callable[[Tensor], Any]
NamedTensors = dict[str, Tensor]
OptimizerState = dict[str, Any]
OPERATORS = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adamw", torch.optim.SGD: "sgd"}
OF_COMPLEX = (torch.optim.SGD, torch.optim.ASGD)
"""Classes whose updates are linear in the gradient, so that complex parameters have torch's numbers."""


@attrs.frozen(eq=False)
class Optimizer:
    """A class of `torch.optim`, or in its style, as two functions. Build it with `adapt`."""

    cls: type[torch.optim.Optimizer]
    lr: float | RateSchedule
    options: Mapping[str, Any]  # the class's defaults and what was given
    groups: Mapping[str, Mapping[str, Any] | Optimizer]

    def init(self, params: Any) -> OptimizerState:
        """The state before the first update of a tree of tensors.

        Zeros of large, lazy or abstract ones are made on their shards, later.
        """
        params = named_parameters("init", params)
        self._check(params)
        state: OptimizerState = {"step": torch.zeros((), dtype=torch.float32, device=_memory_of(params))}
        for part, names in self._parts(params):
            own_params = {name: params[name] for name in names}
            for key, tensors in part._init(own_params).items():
                state.setdefault(key, {}).update(tensors)
        give_role("state", flatten(state)[0])
        return state

    def update(
        self,
        grads: Any,
        opt_state: OptimizerState,
        params: Any,
        lr: float | Tensor | None = None,
    ) -> tuple[Any, OptimizerState]:
        """(params, state) after one update.

        Gradients are a tree like the parameters; None counts as zeros, so weight decay still acts.

        `lr` stands in for the optimizer's own rate in this update (not for those of groups).
        """
        tree = params
        params = named_parameters("update", tree)
        grads = named_gradients(grads, params)
        self._check_real(params)
        self._check_state(opt_state, params)
        self._warn_without_masters(params)
        mark_role("param", params.values())
        mark_role("state", flatten(opt_state)[0])
        with phase("update"), torch.no_grad():
            step = opt_state["step"] + 1
            moments = {key: tensors for key, tensors in opt_state.items() if key != "step"}
            new_params: NamedTensors = {}
            new_moments: dict[str, NamedTensors] = {key: {} for key in moments}
            for part, names in self._parts(params):
                moved, kept = self._update_part(part, names, grads, moments, params, step, lr)
                new_params |= moved
                for key, tensors in kept.items():
                    new_moments[key] |= tensors
        # Trees come back in the order in which they were given, whichever optimizer of a group updated what.
        new_state: OptimizerState = {}
        for key, before in opt_state.items():
            if key == "step":
                new_state[key] = step
            else:
                new_state[key] = {name: new_moments[key][name] for name in before}
        return unflatten(flatten(tree)[1], [new_params[name] for name in params]), new_state

    def _update_part(
        self,
        part: Optimizer,
        names: list[str],
        grads: Mapping[str, Tensor | None],
        moments: dict[str, NamedTensors],
        params: NamedTensors,
        step: Tensor,
        lr: float | Tensor | None,
    ) -> tuple[NamedTensors, dict[str, NamedTensors]]:
        """(parameters, moments) of `names` after `part`, this optimizer or that of a group, has updated them."""
        own_params = {name: params[name] for name in names}
        own_moments: dict[str, NamedTensors] = {}
        for key, tensors in moments.items():
            own_moments[key] = {name: tensors[name] for name in names if name in tensors}
        own_grads: NamedTensors = {}
        for name, param in own_params.items():
            grad = grads[name]
            own_grads[name] = torch.zeros_like(param) if grad is None else grad
        rates = part._rates(own_params, step, lr if part is self else None)
        mixed = policy.active_policy()
        finite = None if mixed is None else mixed.all_finite()
        moved, kept = part._update(own_grads, own_moments, own_params, step, rates, finite)
        # The kernels of the other classes leave all as it was where a gradient is not finite; Muon is torch's own code.
        if mixed is not None and finite is not None and part.cls.__name__ != "Muon":
            for name, tensor in moved.items():
                mixed.keeps(tensor, own_params[name], finite)
            for key, tensors in kept.items():
                for name, tensor in tensors.items():
                    mixed.keeps(tensor, own_moments[key][name], finite)
        return moved, kept

    def converted(self, opt_state: OptimizerState, params: Any) -> OptimizerState:
        """The state of the same class with other `state_bits`, as this optimizer keeps it.

        For a checkpoint of moments in 32 bits that goes on in 8, or the other way round. What is kept alike is not
        copied. Tensors on ranks are made whole.
        """
        packed_moments.check_pair(self.cls, opt_state)
        return packed_moments.converted(opt_state, self._with_blocks(named_parameters("converted", params)))

    def of(self, name: str) -> dict[str, Any]:
        """The options of one parameter."""
        options = dict(self.options)
        for glob, changed in self.groups.items():
            if fnmatchcase(name, glob) and not isinstance(changed, Optimizer):
                options |= changed
        return options

    def _parts(self, params: Mapping[str, Tensor]) -> list[tuple[Optimizer, list[str]]]:
        """Who updates which parameters: this optimizer, and those that groups name."""
        parts: dict[int, tuple[Optimizer, list[str]]] = {id(self): (self, [])}
        for name in params:
            owner = self
            for glob, group in self.groups.items():
                if isinstance(group, Optimizer) and fnmatchcase(name, glob):
                    owner = group
            parts.setdefault(id(owner), (owner, []))[1].append(name)
        return [(part, names) for part, names in parts.values() if names]

    def _init(self, params: NamedTensors) -> dict[str, NamedTensors]:
        """{key: {name: tensor}} without the step count."""
        kind = OPERATORS.get(self.cls)
        if kind == "adamw":
            moments = packed_moments.zeros(self._with_blocks(params))
            largest = {name: zeros_like(param) for name, param in params.items() if self.of(name)["amsgrad"]}
            if largest:
                moments["max_exp_avg_sq"] = largest
            return moments
        if kind == "sgd":
            buffers = {name: zeros_like(param) for name, param in params.items() if self.of(name)["momentum"] != 0}
            return {"momentum_buffer": buffers} if buffers else {}
        if self.cls in OWN:
            state: dict[str, NamedTensors] = {}
            for key in OWN[self.cls].states:
                state[key] = {name: zeros_like(param) for name, param in params.items()}
            return state
        return torch_optim.init(self.cls, self._grouped(params), params)

    def _with_blocks(self, params: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Blocks | None]]:
        """Each parameter with how its moments are cut; None where they are kept wide."""
        return {name: (param, packed_moments.moment_blocks(param, self.of(name))) for name, param in params.items()}

    def _update(
        self,
        grads: NamedTensors,
        state: dict[str, NamedTensors],
        params: NamedTensors,
        step: Tensor,
        rates: NamedTensors,
        finite: Tensor | None,
    ) -> tuple[NamedTensors, dict[str, NamedTensors]]:
        options = {name: self.of(name) for name in params}
        given = UpdateInputs(params, grads, state, step, rates, options, finite)
        kind = OPERATORS.get(self.cls)
        if kind == "adamw":
            return operator_updates.adamw(self.cls, given)
        if kind == "sgd":
            return operator_updates.sgd(given)
        if self.cls in OWN:
            return OWN[self.cls].update(given)
        if self.cls.__name__ in KINDS:
            return operator_updates.elementwise(self.cls, given)
        return torch_optim.update(self.cls, self._grouped(params), rates, grads, state, params)

    def _warn_without_masters(self, params: Mapping[str, Tensor]) -> None:
        if self.cls is torch.optim.SGD:
            return
        for name, param in params.items():
            if packed_moments.is_rounded(param, self.of(name)):
                continue
            if param.is_floating_point() and param.dtype.itemsize < 4:
                warnings.warn(
                    f"{self.cls.__name__} updates parameters in {param.dtype} ({name!r} and others) without float32 "
                    'masters, so small updates are lost; write cf.precision(step, "bf16"), which keeps masters and '
                    "moments in float32; Adam and AdamW train bfloat16 without masters by "
                    'cf.adapt(..., rounding="stochastic")',
                    stacklevel=3,
                )
                return

    # ---- options ----

    def _rates(self, params: Mapping[str, Tensor], step: Tensor, lr: float | Tensor | None = None) -> NamedTensors:
        """Name -> learning rate, a 0-dim float64 tensor; equal rates are one tensor."""
        tensors: dict[Any, Tensor] = {}

        def tensor_of(rate: float | RateSchedule | Tensor) -> Tensor:
            if rate not in tensors:
                value = rate((step - 1).to(torch.float64)) if callable(rate) else rate
                if isinstance(value, Tensor):
                    tensors[rate] = value.to(torch.float64)
                else:
                    tensors[rate] = torch.full((), float(value), dtype=torch.float64)
            return tensors[rate]

        default = self.lr if lr is None else lr
        return {name: tensor_of(self.of(name).get("lr", default)) for name in params}

    def _grouped(self, params: Mapping[str, Tensor]) -> list[tuple[list[str], dict[str, Any]]]:
        """Parameters with equal options together: (names, options)."""
        groups: list[tuple[list[str], dict[str, Any]]] = []
        for name in params:
            options = {"lr": self.lr, **self.of(name)}
            for names, known in groups:
                if known == options:
                    names.append(name)
                    break
            else:
                groups.append(([name], options))
        return groups

    def _check(self, params: Mapping[str, Tensor]) -> None:
        self._check_real(params)
        for glob in self.groups:
            if not any(fnmatchcase(name, glob) for name in params):
                raise InputError(f"groups: {glob!r} matches no parameter{near(glob, params)}")
        for part, names in self._parts(params):
            if part.cls.__name__ != "Muon":
                continue
            for name in names:
                if params[name].dim() != 2:
                    raise InputError(
                        f"Muon updates matrices only, and {name!r} has shape {tuple(params[name].shape)}. Try: another "
                        f"optimizer for such parameters, adapt(torch.optim.Muon, groups={{{name!r}: "
                        "adapt(torch.optim.AdamW)}), by globs over their names"
                    )

    def _check_real(self, params: Mapping[str, Tensor]) -> None:
        """Raises InputError where elements are complex.

        The rules here would square or compare real and imaginary parts as one.
        """
        for part, names in self._parts(params):
            if part.cls in OF_COMPLEX:
                continue
            for name in names:
                if params[name].is_complex():
                    raise InputError(
                        f"{part.cls.__name__} has no update of complex parameters, and {name!r} is one. Try: a real "
                        f"parameter of shape {(*params[name].shape, 2)}, which the step reads as torch.view_as_complex(p); torch.optim.SGD"
                    )

    def _needs(self, name: str, param: Tensor) -> list[str]:
        """The keys of the state that the update of one parameter reads."""
        options, cls = self.of(name), self.cls.__name__
        if cls in ("Adam", "AdamW"):
            scales = () if packed_moments.moment_blocks(param, options) is None else SCALES
            largest = ("max_exp_avg_sq",) if options["amsgrad"] else ()
            return [*MOMENTS, *scales, *largest]
        if cls == "Muon" or (cls == "SGD" and options["momentum"] != 0):
            return ["momentum_buffer"]
        if cls == "SGD":
            return []
        if self.cls in OWN:
            return list(OWN[self.cls].states)
        keys = list(KINDS[cls].states)
        if cls == "RMSprop" and not options.get("momentum"):
            keys.remove("momentum_buffer")
        if cls == "RMSprop" and not options.get("centered"):
            keys.remove("grad_avg")
        return keys

    def _check_state(self, opt_state: OptimizerState, params: Mapping[str, Tensor]) -> None:
        wanted = {"step"}
        for part, names in self._parts(params):
            for name in names:
                wanted |= {join(key, name) for key in part._needs(name, params[name])}
        given = set[str]()
        for key, tensors in opt_state.items():
            if isinstance(tensors, Mapping):
                given |= {join(key, name) for name in tensors}
            else:
                given.add(key)
        if wanted != given:
            other = ""
            if any(name.startswith(SCALES) for name in wanted ^ given):
                other = "; opt.converted(state, params) of one with other state_bits"
            raise InputError(
                f"update: the state is not that of {self.cls.__name__} over these parameters: missing "
                f"{sorted(wanted - given)[:4]}, unknown {sorted(given - wanted)[:4]}. Try: the state that init(params) "
                f"of this optimizer made{other}"
            )
        for key in SHAPED:
            check_shapes(key, opt_state.get(key, {}), params)


def _memory_of(params: Mapping[str, Tensor]) -> torch.device:
    """Where the step count lies: beside parameters that are on a GPU, else on the host, from where a step places it."""
    for param in params.values():
        if param.is_cuda:
            return param.device
    return torch.device("cpu")


# Parts of the state that have the shapes of the parameters. Kernels walk all of them as one.
SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


def adapt(
    cls: type[torch.optim.Optimizer],
    lr: float | RateSchedule | None = None,
    groups: Mapping[str, Mapping[str, Any] | Optimizer] | None = None,
    state_bits: int = 32,
    rounding: str = packed_moments.NEAREST,
    **options: Any,
) -> Optimizer:
    """The functional form of a `torch.optim` class, or of `cf.Lion` and `cf.LAMB`.

    `groups`: glob over parameter names -> options that differ there, or another adapted optimizer. `state_bits`: 8
    keeps the moments of Adam and AdamW as codes of a byte with a float32 scale for each block of at most 128 elements,
    8.25 bits an element, of parameters with 4096 elements and more; 32 keeps them in the parameter's dtype. `rounding`:
    "stochastic" computes updates of Adam and AdamW in float32, and rounds what they write in bfloat16 (parameters,
    their moments) up or down by a draw, so that small updates are right in the mean without masters. The draw is one by
    the update's number, the parameter's name and the element's index in it, the same on every mesh. Parameters in other
    dtypes are updated as ever. Groups may differ in both. Raises InputError for a class that cannot be traced, an
    option the class does not have, or a value it refuses.
    """
    if cls not in OPERATORS and cls not in OWN:
        torch_optim.check_optimizer(cls)
    defaults = torch_optim.defaults(cls, lr, options)
    packed_moments.check_moments(cls, state_bits, defaults)
    packed_moments.check_rounding(cls, rounding, defaults)
    if state_bits == 8:
        defaults["state_bits"] = 8
    if rounding != packed_moments.NEAREST:
        defaults["rounding"] = rounding
    rate = defaults.pop("lr") if lr is None else lr
    chosen: dict[str, Mapping[str, Any] | Optimizer] = {}
    for glob, changed in _items(groups):
        if isinstance(changed, Optimizer):
            chosen[glob] = changed
            continue
        chosen[glob] = own = dict(changed)
        where = f"groups[{glob!r}]: "
        packed_moments.check_moments(cls, own.get("state_bits", 32), {**defaults, **own}, where)
        packed_moments.check_rounding(cls, own.get("rounding", rounding), {**defaults, **own}, where)
        for name in own:
            if name not in ("lr", *packed_moments.OWN_OPTIONS) and name not in defaults:
                raise InputError(f"{where}{cls.__name__} has no option {name!r}{near(name, defaults)}")
        try:
            torch_optim.defaults(cls, own.get("lr", lr), {**options, **packed_moments.options_of_torch(own)})
        except InputError as error:
            raise InputError(f"{where}{error}") from error
    defaults.pop("lr", None)
    return Optimizer(cls, rate, defaults, chosen)


def _items(groups: Any) -> list[tuple[str, Mapping[str, Any] | Optimizer]]:
    """What `groups` of `adapt` maps; InputError where it is no mapping of options."""
    if groups is None:
        return []
    if not isinstance(groups, Mapping) or not all(isinstance(each, Mapping | Optimizer) for each in groups.values()):
        raise InputError(
            f"groups={groups!r:.80} is no mapping to options. Try: groups={{'*.bias': dict(weight_decay=0.0)}}"
        )
    return list(groups.items())
