"""Optimizers as functions: `cf.adapt(torch.optim.AdamW, lr=3e-4)` has `init` and a pure `update`.

Problem: `torch.optim` classes hold state in attributes and change parameters in place. Idea: state is a plain tree,

    {"step": 0-dim, "exp_avg": {name: tensor}, "exp_avg_sq": {name: tensor}}

and `update(grads, state, params)` returns new params and new state. Parameters are a dict of names, as `model.params` is, or any tree
of tensors: `{"encoder": encoder.params, "temperature": t}` is named by its paths, `encoder.0.weight`.

Elementwise classes are one operator per parameter (`colofunc.ops.update`, `update_rules`); Muon, which looks at whole
matrices, runs torch's own code on copies (`colofunc.functional.torch_optim`). Lion and LAMB, which torch does not
have, are classes of `colofunc.functional.lion_lamb`.

`groups` maps globs over parameter names to options that differ there, or to another optimizer for what they match;
later entries win. `state_bits=8` keeps moments of Adam and AdamW as bytes and scales
(`colofunc.functional.packed_moments`). `lr` is a number, a function of the number of updates already done (a 0-dim
tensor, so write it with torch operators: `torch.cos`, not `math.cos`), or a torch scheduler (`cf.schedule`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc.dtensor.roles import give_role
from colofunc.errors import InputError, near
from colofunc.functional import packed_moments, torch_optim
from colofunc.functional.lion_lamb import OWN, Given
from colofunc.functional.packed_moments import MOMENTS, SCALES
from colofunc.ops import policy
from colofunc.ops import update as ops
from colofunc.ops.quantized import Quantized
from colofunc.ops.update_packed import Blocks, adamw8, block_of
from colofunc.ops.update_rules import KINDS, options_of, update
from colofunc.program.lazy import zeros_like
from colofunc.program.tracing.meta import phase
from colofunc.program.tracing.roles import mark
from colofunc.program.tracing.tree import Tree, flatten, join, unflatten, walk

Schedule = Callable[[Tensor], Any]
Tensors = dict[str, Tensor]
State = dict[str, Any]
OPERATORS = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adamw", torch.optim.SGD: "sgd"}
OF_COMPLEX = (torch.optim.SGD, torch.optim.ASGD)
"""Classes whose updates are linear in the gradient, so that complex parameters have torch's numbers."""


@attrs.frozen(eq=False)
class Optimizer:
    """A class of `torch.optim`, or in its style, as two functions. Build it with `adapt`."""

    cls: type[torch.optim.Optimizer]
    lr: float | Schedule
    options: Mapping[str, Any]  # the class's defaults and what was given
    groups: Mapping[str, Mapping[str, Any] | Optimizer]

    def init(self, params: Any) -> State:
        """The state before the first update of a tree of tensors; zeros of large, lazy or abstract ones are made on their shards, later."""
        params = named("init", params)
        self._check(params)
        state: State = {"step": torch.zeros((), dtype=torch.float32, device=_memory_of(params))}
        for part, names in self._parts(params):
            for key, made in part._init({n: params[n] for n in names}).items():
                state.setdefault(key, {}).update(made)
        give_role("state", flatten(state)[0])
        return state

    def update(
        self,
        grads: Any,
        opt_state: State,
        params: Any,
        lr: float | Tensor | None = None,
    ) -> tuple[Any, State]:
        """(params, state) after one update; gradients are a tree like the parameters, None counts as zeros, so weight decay still acts.

        `lr` stands in for the optimizer's own rate in this update (not for those of groups).
        """
        tree = params
        params = named("update", tree)
        grads = _gradients_by_name(grads, params)
        self._check_names(grads, params)
        self._check_real(params)
        self._check_state(opt_state, params)
        self._warn_without_masters(params)
        mark("param", params.values())
        mark("state", flatten(opt_state)[0])
        with phase("update"), torch.no_grad():
            step = opt_state["step"] + 1
            mixed = policy.active()
            finite = None if mixed is None else mixed.all_finite()
            new: Tensors = {}
            state: dict[str, Tensors] = {key: {} for key in opt_state if key != "step"}
            for part, names in self._parts(params):
                mine = {n: params[n] for n in names}
                full = {n: torch.zeros_like(p) if (g := grads[n]) is None else g for n, p in mine.items()}
                rates = part._rates(mine, step, lr if part is self else None)
                held = {k: {n: v[n] for n in names if n in v} for k, v in opt_state.items() if k != "step"}
                moved, kept = part._update(full, held, mine, step, rates, finite)
                if mixed is not None and finite is not None and part.cls.__name__ != "Muon":
                    for before, after in ((mine, moved), *((held[key], values) for key, values in kept.items())):
                        for n, value in after.items():
                            mixed.keeps(value, before[n], finite)
                new |= moved
                for key, values in kept.items():
                    state[key] |= values
            ordered = {key: {n: state[key][n] for n in values} for key, values in opt_state.items() if key != "step"}
            updated = unflatten(flatten(tree)[1], [new[n] for n in params])
            return updated, {key: step if key == "step" else ordered[key] for key in opt_state}

    def converted(self, opt_state: State, params: Any) -> State:
        """The state of the same class with other `state_bits`, as this optimizer keeps it; what is kept alike is not copied.

        For a checkpoint of moments in 32 bits that goes on in 8, or the other way round. Tensors on ranks are made whole.
        """
        packed_moments.check_pair(self.cls, opt_state)
        return packed_moments.converted(opt_state, {n: (p, self._blocks(n, p)) for n, p in named("converted", params).items()})

    def of(self, name: str) -> dict[str, Any]:
        """The options of one parameter."""
        found = dict(self.options)
        for glob, changed in self.groups.items():
            if fnmatchcase(name, glob) and not isinstance(changed, Optimizer):
                found |= changed
        return found

    def _parts(self, params: Mapping[str, Tensor]) -> list[tuple[Optimizer, list[str]]]:
        """Who updates which parameters: this optimizer, and those that groups name."""
        found: dict[int, tuple[Optimizer, list[str]]] = {id(self): (self, [])}
        for n in params:
            named = [g for glob, g in self.groups.items() if isinstance(g, Optimizer) and fnmatchcase(n, glob)]
            owner = named[-1] if named else self
            found.setdefault(id(owner), (owner, []))[1].append(n)
        return [(part, names) for part, names in found.values() if names]

    def _init(self, params: Tensors) -> dict[str, Tensors]:
        """{key: {name: tensor}} without the step count."""
        kind = OPERATORS.get(self.cls)
        if kind == "adamw":
            zeros = packed_moments.zeros({n: (p, self._blocks(n, p)) for n, p in params.items()})
            largest = {n: zeros_like(p) for n, p in params.items() if self.of(n)["amsgrad"]}
            return zeros | ({"max_exp_avg_sq": largest} if largest else {})
        if kind == "sgd":
            buffers = {n: zeros_like(p) for n, p in params.items() if self.of(n)["momentum"] != 0}
            return {"momentum_buffer": buffers} if buffers else {}
        if self.cls in OWN:
            return {key: {n: zeros_like(p) for n, p in params.items()} for key in OWN[self.cls].states}
        return torch_optim.init(self.cls, self._grouped(params), params)

    def _blocks(self, name: str, param: Tensor) -> Blocks | None:
        """How the moments of a parameter are cut; None where they are kept wide."""
        return block_of(tuple(param.shape)) if self.of(name).get("state_bits") == 8 else None

    def _update(
        self, grads: Tensors, state: dict[str, Tensors], params: Tensors, step: Tensor, rates: Tensors, finite: Tensor | None
    ) -> tuple[Tensors, dict[str, Tensors]]:
        kind = OPERATORS.get(self.cls)
        if kind == "adamw":
            return self._adamw(grads, state, params, step, rates, finite)
        if kind == "sgd":
            return self._sgd(grads, state, params, step, rates, finite)
        if self.cls in OWN:
            options = {n: self.of(n) for n in params}
            return OWN[self.cls].update(Given(params, grads, state, step, rates, options, finite))
        if self.cls.__name__ in KINDS:
            return self._elementwise(grads, state, params, step, rates, finite)
        return torch_optim.update(self.cls, self._grouped(params), rates, grads, state, params)

    def _warn_without_masters(self, params: Mapping[str, Tensor]) -> None:
        narrow = next((n for n, p in params.items() if p.is_floating_point() and p.dtype.itemsize < 4), None)
        if narrow is not None and self.cls is not torch.optim.SGD:
            warnings.warn(
                f"{self.cls.__name__} updates parameters in {params[narrow].dtype} ({narrow!r} and others) without float32 masters, so "
                'small updates are lost; write cf.precision(step, "bf16"), which keeps masters and moments in float32',
                stacklevel=3,
            )

    # ---- one operator per parameter ----

    def _elementwise(
        self, grads: Tensors, state: dict[str, Tensors], params: Tensors, step: Tensor, rates: Tensors, finite: Tensor | None
    ) -> tuple[Tensors, dict[str, Tensors]]:
        name = self.cls.__name__
        new: Tensors = {}
        kept: dict[str, Tensors] = {key: {} for key in state}
        for n, p in params.items():
            held = [state[key].get(n) if key in state else None for key in KINDS[name].states]
            held += [None] * (3 - len(held))
            new[n], *found = update(name, p, grads[n], *held, step, rates[n], options_of(name, self.of(n)), finite)
            for key, before, after in zip(KINDS[name].states, held, found, strict=False):
                if before is not None:
                    kept[key][n] = after
        return new, kept

    def _adamw(
        self, grads: Tensors, state: dict[str, Tensors], params: Tensors, step: Tensor, rates: Tensors, finite: Tensor | None
    ) -> tuple[Tensors, dict[str, Tensors]]:
        new: Tensors = {}
        first: Tensors = {}
        second: Tensors = {}
        largest: Tensors = {}
        scales: dict[str, Tensors] = {key: {} for key in SCALES}
        for n, p in params.items():
            o = self.of(n)
            decoupled = self.cls is torch.optim.AdamW or bool(o.get("decoupled_weight_decay", False))
            if self._blocks(n, p) is not None:
                new[n], first[n], scales[SCALES[0]][n], second[n], scales[SCALES[1]][n] = adamw8(
                    p, grads[n], state["exp_avg"][n], state[SCALES[0]][n], state["exp_avg_sq"][n], state[SCALES[1]][n], step, rates[n],
                    *map(float, o["betas"]), o["eps"], o["weight_decay"], decoupled, o["maximize"], finite,
                )  # fmt: skip
                continue
            top = state["max_exp_avg_sq"][n] if o["amsgrad"] else None
            new[n], first[n], second[n], maximum = ops.adamw(
                p, grads[n], state["exp_avg"][n], state["exp_avg_sq"][n], step, rates[n], *map(float, o["betas"]),
                o["eps"],
                o["weight_decay"], decoupled, o["amsgrad"], top, o["maximize"], finite,
            )  # fmt: skip
            if top is not None:
                largest[n] = maximum
        kept = {"exp_avg": first, "exp_avg_sq": second} | {key: made for key, made in scales.items() if made}
        return new, kept | ({"max_exp_avg_sq": largest} if largest else {})

    def _sgd(
        self, grads: Tensors, state: dict[str, Tensors], params: Tensors, step: Tensor, rates: Tensors, finite: Tensor | None
    ) -> tuple[Tensors, dict[str, Tensors]]:
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
                finite,
            )
            if buffer is not None:
                buffers[n] = kept
        return new, {"momentum_buffer": buffers} if buffers else {}

    # ---- options ----

    def _rates(self, params: Mapping[str, Tensor], step: Tensor, lr: float | Tensor | None = None) -> Tensors:
        """Name -> learning rate, a 0-dim float64 tensor; equal rates are one tensor."""
        made: dict[Any, Tensor] = {}

        def rate(lr: float | Schedule | Tensor) -> Tensor:
            if lr not in made:
                value = lr((step - 1).to(torch.float64)) if callable(lr) else lr
                made[lr] = (
                    value.to(torch.float64)
                    if isinstance(value, Tensor)
                    else torch.full((), float(value), dtype=torch.float64)
                )
            return made[lr]

        own = self.lr if lr is None else lr
        return {n: rate(self.of(n).get("lr", own)) for n in params}

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
        self._check_real(params)
        for glob in self.groups:
            if not any(fnmatchcase(n, glob) for n in params):
                raise InputError(f"groups: {glob!r} matches no parameter{near(glob, params)}")
        for part, names in self._parts(params):
            flat = next((n for n in names if params[n].dim() != 2), None)
            if part.cls.__name__ == "Muon" and flat is not None:
                raise InputError(
                    f"Muon updates matrices only, and {flat!r} has shape {tuple(params[flat].shape)}. Try: another optimizer for such "
                    f"parameters, adapt(torch.optim.Muon, groups={{{flat!r}: adapt(torch.optim.AdamW)}}), by globs over their names"
                )

    def _check_real(self, params: Mapping[str, Tensor]) -> None:
        """Raises InputError where elements are complex, of which the rules here would square or compare real and imaginary parts as one."""
        for part, names in self._parts(params):
            found = next((n for n in names if params[n].is_complex()), None)
            if found is not None and part.cls not in OF_COMPLEX:
                shape = (*params[found].shape, 2)
                raise InputError(
                    f"{part.cls.__name__} has no update of complex parameters, and {found!r} is one. Try: a real parameter of shape "
                    f"{shape}, which the step reads as torch.view_as_complex(p); torch.optim.SGD"
                )

    def _needs(self, name: str, param: Tensor) -> list[str]:
        """The keys of the state that the update of one parameter reads."""
        o, kind = self.of(name), self.cls.__name__
        if kind in ("Adam", "AdamW"):
            scales = SCALES if self._blocks(name, param) is not None else ()
            return [*MOMENTS, *scales, *(["max_exp_avg_sq"] if o["amsgrad"] else [])]
        if kind in ("SGD", "Muon"):
            return ["momentum_buffer"] if kind == "Muon" or o["momentum"] != 0 else []
        if self.cls in OWN:
            return list(OWN[self.cls].states)
        unused = [k for k, on in (("momentum_buffer", o.get("momentum")), ("grad_avg", o.get("centered"))) if not on]
        return [key for key in KINDS[kind].states if kind != "RMSprop" or key not in unused]

    def _check_state(self, opt_state: State, params: Mapping[str, Tensor]) -> None:
        wanted = {"step"} | {join(key, n) for part, names in self._parts(params) for n in names for key in part._needs(n, params[n])}
        found = {join(key, n) for key, v in opt_state.items() if isinstance(v, Mapping) for n in v}
        found |= {key for key, v in opt_state.items() if not isinstance(v, Mapping)}
        if wanted != found:
            other = ""
            if any(name.startswith(SCALES) for name in wanted ^ found):
                other = "; opt.converted(state, params) of one with other state_bits"
            raise InputError(
                f"update: the state is not that of {self.cls.__name__} over these parameters: missing {sorted(wanted - found)[:4]}, "
                f"unknown {sorted(found - wanted)[:4]}. Try: the state that init(params) of this optimizer made{other}"
            )
        for key in SHAPED:
            _check_shapes(key, opt_state.get(key, {}), params)

    def _check_names(self, grads: Mapping[str, Tensor | None], params: Mapping[str, Tensor]) -> None:
        missing = [n for n in params if n not in grads]
        extra = [n for n in grads if n not in params]
        if missing or extra:
            raise InputError(
                f"update: no gradient for {missing[:4]}, no parameter for {extra[:4]}. Try: gradients "
                f"with the names of the parameters"
            )
        _check_shapes("grads", {n: g for n, g in grads.items() if g is not None}, params)


def named(what: str, params: Any) -> Tensors:
    """The tensors of a tree by the paths that lead to them: `{"a": {"w": t}}` has the parameter `a.w`. None is no parameter.

    Raises InputError for a leaf that is no tensor, for a quantized weight, and where two paths are one name.
    """
    packed = next((node.name for node in _nodes(flatten(params)[1]) if node.type is Quantized), None)
    leaves = [(name, leaf) for name, leaf in walk(params) if leaf is not None]
    odd = next(((name, type(leaf).__name__) for name, leaf in leaves if not isinstance(leaf, Tensor) or not name), None)
    odd = odd if packed is None else (packed, "Quantized")
    if odd is not None:
        where = f"{odd[0]!r} is a" if odd[0] else "there is a"
        raise InputError(f"{what}: parameters are tensors in a dict or another container, and {where} {odd[1]}. Try: model.params")
    found = dict(leaves)
    if len(found) < len(leaves):
        names = [name for name, _ in leaves]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{what}: two parameters are called {twice!r}. Try: keys without dots")
    return found


def _nodes(tree: Tree) -> Iterator[Tree]:
    yield tree
    for child in tree.children:
        yield from _nodes(child)


def _gradients_by_name(grads: Any, params: Tensors) -> dict[str, Tensor | None]:
    found = {name: g for name, g in walk(grads) if g is not None or name in params}
    odd = next((name for name, g in found.items() if not (g is None or isinstance(g, Tensor)) or not name), None)
    if odd is not None:
        gradients = f"gradient of {odd!r} is" if odd else "gradients are"
        raise InputError(
            f"update: the {gradients} a {type(found[odd]).__name__}. Try: a tree like that of the parameters, as cf.value_and_grad "
            "returns it"
        )
    return found


def _memory_of(params: Mapping[str, Tensor]) -> torch.device:
    """Where the step count lies: beside parameters that are on a GPU, else on the host, from where a step places it."""
    return next((p.device for p in params.values() if p.is_cuda), torch.device("cpu"))


# Parts of the state that have the shapes of the parameters. Kernels walk all of them as one.
SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


def _check_shapes(key: str, tensors: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.shape != params[name].shape:
            raise InputError(
                f"update: {join(key, name)!r} has shape {tuple(tensor.shape)}, and the parameter {name!r} {tuple(params[name].shape)}. "
                "Try: the state that init(params) of this optimizer made"
            )


def adapt(
    cls: type[torch.optim.Optimizer],
    lr: float | Schedule | None = None,
    groups: Mapping[str, Mapping[str, Any] | Optimizer] | None = None,
    state_bits: int = 32,
    **options: Any,
) -> Optimizer:
    """The functional form of a `torch.optim` class, or of `cf.Lion` and `cf.LAMB`.

    `groups`: glob over parameter names -> options that differ there, or another adapted optimizer. `state_bits`: 8 keeps the moments of
    Adam and AdamW as codes of a byte with a float32 scale for each block of at most 128 elements, 8.25 bits an element, of parameters with
    4096 elements and more; 32 keeps them in the parameter's dtype. Groups may differ in it. Raises InputError for a class that cannot be
    traced, an option the class does not have, or a value it refuses.
    """
    if cls not in OPERATORS and cls not in OWN:
        torch_optim.check(cls)
    defaults = torch_optim.defaults(cls, lr, options)
    packed_moments.check(cls, state_bits, defaults)
    if state_bits == 8:
        defaults["state_bits"] = 8
    rate = defaults.pop("lr") if lr is None else lr
    if not isinstance(groups or {}, Mapping) or not all(isinstance(g, Mapping | Optimizer) for g in (groups or {}).values()):
        raise InputError(f"groups={groups!r:.80} is no mapping to options. Try: groups={{'*.bias': dict(weight_decay=0.0)}}")
    chosen = {g: changed if isinstance(changed, Optimizer) else dict(changed) for g, changed in (groups or {}).items()}
    for glob, changed in chosen.items():
        if isinstance(changed, Optimizer):
            continue
        packed_moments.check(cls, changed.get("state_bits", 32), {**defaults, **changed}, f"groups[{glob!r}]: ")
        unknown = [k for k in changed if k not in ("lr", "state_bits") and k not in defaults]
        if unknown:
            raise InputError(
                f"groups[{glob!r}]: {cls.__name__} has no option {unknown[0]!r}{near(unknown[0], defaults)}"
            )
        try:
            torch_optim.defaults(cls, changed.get("lr", lr), {**options, **packed_moments.options_of_torch(changed)})
        except InputError as error:
            raise InputError(f"groups[{glob!r}]: {error}") from error
    defaults.pop("lr", None)
    return Optimizer(cls, rate, defaults, chosen)
