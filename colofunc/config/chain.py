"""A chain of transforms from a file.

    # run.yaml                               chain = cf.configure("run.yaml")
    mesh: {dp: 2, tp: 2}                     step = chain.apply(step_fn)
    parallel:                                state = step.init(state, batch)
      "*.fc1.weight": "(tp o) i"             state, metrics = step(state, batch)

Problem: a configuration that lists what exists is behind with every new transform and plugin. Idea: a key is the name of
a transform (`cf.<name>`, or one of a plugin) or of a plan that a plugin registered, and its options are the ones of that
function's signature. Only `mesh`, `parallel`, `shard`, `clip` and `executor` mean something here.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import attrs

from colofunc.config.options import bind, parameters
from colofunc.config.source import Node, read
from colofunc.dtensor.spec import bind as bind_spec
from colofunc.dtensor.spec import parse
from colofunc.errors import ColofuncError, InputError, near
from colofunc.functional.modules import Model
from colofunc.functional.optimizers import Optimizer
from colofunc.functional.train import train_step
from colofunc.mesh import Mesh
from colofunc.planner.wishes import NamedPlan
from colofunc.plugins import Registry, build_registry
from colofunc.transforms.shard import shard
from colofunc.transforms.staged import EXECUTORS, Staged

OWN_KEYS = ("mesh", "parallel", "shard", "clip", "executor")
# What other frameworks call the same thing.
ALIASES = {
    "zero_optimization": "zero", "tensor_parallel": "tensor", "gradient_clipping": "clip", "max_grad_norm": "clip",
    "gradient_clip_val": "clip", "gradient_accumulation_steps": "accumulate", "mixed_precision": "precision",
    "activation_checkpointing": "checkpoint", "activation_checkpoint": "checkpoint",
}  # fmt: skip
# Modes that have a name before they have an implementation: a better word than "unknown" where one is not installed.
NAMED_MODES = (
    "precision", "accumulate", "offload", "checkpoint", "quantize", "pipeline", "zero", "tensor", "ulysses", "ring",
    "experts", "gemini",
)  # fmt: skip


@attrs.frozen(eq=False)
class Part:
    """One transform or plan of the chain: a function of the step (or of nothing) with its options."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    options: Mapping[str, Any]
    node: Node

    def call(self, *first: Any) -> Any:
        """The function with its options; what it refuses is a ConfigError with the line."""
        try:
            return self.fn(*first, *self.args, **self.options)
        except (ColofuncError, TypeError, ValueError) as error:
            raise _at_fault(self.node, str(error)).error(f"{self.name}: {error}") from error

    def text(self) -> str:
        given = [*map(repr, self.args), *(f"{key}={value!r}" for key, value in self.options.items())]
        return f"{self.name}({', '.join(given)})"


def _at_fault(node: Node, message: str) -> Node:
    """The one option of a mapping that a message speaks of, else the mapping."""
    named = []
    for key, child in node.value.items() if isinstance(node.value, dict) else ():
        said = child.text() if isinstance(child.value, str) else f"{key}={child.text()}"
        named += [child] if said in message else []
    return named[0] if len(named) == 1 else node


@attrs.frozen(eq=False)
class Chain:
    """What a configuration means: a mesh, and the transforms that `apply` puts around a step function.

    `clip` is a maximal gradient norm, which only code inside the step can apply: `chain.train_step` does, or the step
    function itself.
    """

    mesh: Mesh
    plans: tuple[Any, ...]
    sharding: Part
    transforms: tuple[Part, ...]
    clip: float | None = None
    executor: str | None = None
    plan_texts: tuple[str, ...] = ()
    clip_node: Node | None = None

    def apply(self, step_fn: Callable[..., Any], *, clips: bool = False) -> Staged:
        """The staged step. `clips`: the function clips gradients to `chain.clip` itself.

        Raises ConfigError with the line where a transform refuses its options or another one, InputError where the
        configuration says `clip` and nobody would do it.
        """
        if self.clip_node is not None and not clips:
            raise InputError(
                f"{self.clip_node.where}: clip: {self.clip} happens inside a step. Try: chain.train_step(model, opt), or "
                "cf.clip_by_global_norm(grads, chain.clip) in the function and chain.apply(step_fn, clips=True)"
            )
        step = self.sharding.call(step_fn, self.mesh, *self.plans)
        for part in self.transforms:
            step = part.call(step)
        return step.on(self.executor) if self.executor is not None else step

    def train_step(self, model: Model, opt: Optimizer, **options: Any) -> tuple[Staged, dict[str, Any]]:
        """(staged step, state) of `cf.train_step(model, opt, clip=chain.clip, **options)`."""
        step_fn, state = train_step(model, opt, clip=self.clip, **options)
        return self.apply(step_fn, clips=True), state

    def text(self) -> str:
        """What the chain does, one line per transform."""
        lines = [("mesh", f"{self.mesh!r}, {self.mesh.size} rank{'s' if self.mesh.size > 1 else ''}")]
        lines += [("parallel", text) for text in self.plan_texts]
        if self.sharding.options.keys() - {"plugins"}:
            options = ((k, v) for k, v in self.sharding.options.items() if k != "plugins")
            lines.append(("shard", ", ".join(f"{k}={v!r}" for k, v in options)))
        lines += [(part.name, part.text()) for part in self.transforms]
        lines += [("clip", f"global norm at most {self.clip}")] if self.clip is not None else []
        lines += [("executor", self.executor)] if self.executor is not None else []
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:{width}}  {what}" for name, what in lines)

    __str__ = text


def configure(source: str | os.PathLike[str] | Mapping[str, Any], plugins: Sequence[Any] = ()) -> Chain:
    """A chain from a .yaml, .yml or .json file or a dict. plugins: modules asked beside the installed ones.

    Everything is checked here, before there is a step: keys, options and values, and that the transforms go together.
    Raises ConfigError, whose message begins with the file and line.
    """
    root = read(source)
    registry = build_registry(tuple(plugins))
    known = _transforms(registry)
    entries = _without_aliases(root)
    mesh = _mesh(entries)
    plans, texts = _plans(entries["parallel"], registry, mesh) if "parallel" in entries else ((), ())
    transforms: list[Part] = []
    for key, node in entries.items():
        if key in OWN_KEYS or node.value is False:
            continue
        if key in known:
            args, options = bind(node, key, parameters(known[key], skip=1))
            transforms.append(Part(key, known[key], args, options, node))
        elif key in registry.plans:
            plan, text = _named(key, node, registry, mesh)
            plans, texts = (*plans, plan), (*texts, text)
        else:
            raise _unknown(key, node, (*OWN_KEYS, *known, *registry.plans))
    sharding = _sharding(entries.get("shard"), root, tuple(plugins))
    clip, clip_node = _clip(entries.get("clip"))
    chain = Chain(mesh, plans, sharding, tuple(transforms), clip, _executor(entries), texts, clip_node)
    chain.apply(_nothing, clips=True)  # transforms only record what they are told, so this costs nothing
    return chain


def _nothing(state: Any, batch: Any) -> Any:
    """A step for asking transforms whether they accept their options."""
    return state, batch


def _transforms(registry: Registry) -> dict[str, Callable[..., Any]]:
    """Name -> transform: the public functions that are defined in colofunc.transforms, and those of plugins."""
    public = importlib.import_module(__name__.split(".")[0])
    found = {name: getattr(public, name) for name in public.__all__}
    ours = {n: f for n, f in found.items() if inspect.isfunction(f) and ".transforms." in f.__module__ and n != "shard"}
    return ours | {name: fn for name, fn in registry.transforms.items() if callable(fn)}


def _without_aliases(root: Node) -> dict[str, Node]:
    """The root's entries under our own names."""
    found: dict[str, Node] = {}
    for key, node in root.entries.items():
        name = ALIASES.get(key, key)
        if name in found:
            raise node.error(f"{key!r} says the same as what is at {found[name].where}; keep one of them")
        found[name] = node
    return found


def _unknown(key: str, node: Node, names: Sequence[str]) -> ColofuncError:
    if key in NAMED_MODES:
        return node.error(f"{key!r} is not installed: neither colofunc nor a plugin brings it. Try: a plugin that does, or drop the key")
    close = near(key, (*names, *NAMED_MODES, *ALIASES))
    return node.error(f"unknown key {key!r}{close if close.startswith('; did') else near(key, names, 'keys')}")


def _mesh(entries: Mapping[str, Node]) -> Mesh:
    node = entries.get("mesh")
    if node is None:
        return Mesh()
    given = dict(node.entries)
    inner = given.pop("axes", None)
    for axis, size in inner.entries.items() if inner is not None else ():
        if axis in given:
            raise size.error(f"mesh: {axis!r} was given before, at {given[axis].where}; keep one of them")
        given[axis] = size
    args, options = bind(attrs.evolve(node, value=given), "mesh", parameters(Mesh))
    mesh: Mesh = Part("mesh", Mesh, args, options, node).call()
    return mesh


def _plans(node: Node, registry: Registry, mesh: Mesh) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """The plans under `parallel`: names, names with options, and globs with specs, in order."""
    plans: list[Any] = []
    texts: list[str] = []
    for item in node.items if node.value is not None else []:
        if isinstance(item.value, str):
            item = attrs.evolve(item, value={item.value: attrs.evolve(item, value=None)})
        globs: dict[str, str] = {}
        for key, child in item.entries.items():
            name = ALIASES.get(key, key)
            if name in registry.plans and child.value is not False:
                plan, text = _named(name, child, registry, mesh)
                plans.append(plan)
                texts.append(text)
            elif name in NAMED_MODES and child.value is not False:
                raise _unknown(name, child, ())
            elif child.value is not False:
                globs[key] = _spec(key, child, registry, mesh)
        if globs:
            plans.append(globs)
            texts.append(", ".join(f"{glob}: {spec}" for glob, spec in globs.items()))
    return tuple(plans), tuple(texts)


def _named(name: str, node: Node, registry: Registry, mesh: Mesh) -> tuple[Any, str]:
    """(plan, text) from a plugin's constructor."""
    fn = registry.plans[name]
    part = Part(name, fn, *bind(node, name, parameters(fn)), node)
    plan = part.call()
    if isinstance(plan, NamedPlan):
        Part(name, mesh.atoms, (plan.axes,), {}, node).call()  # raises on unknown axes
    return plan, part.text()


def _spec(glob: str, node: Node, registry: Registry, mesh: Mesh) -> str:
    """The spec or strategy that a glob is given; `{tp: o}` may stand without quotes."""
    value = node.plain()
    if isinstance(value, dict) and value and all(isinstance(v, str) for v in value.values()):
        value = "{" + ", ".join(f"{axis}: {factor}" for axis, factor in value.items()) + "}"
    if isinstance(value, str):
        axes = re.findall(r"(\w+)\s*:", value) if value.lstrip().startswith("{") else None
        check, args = (_fits_mesh, (value, mesh)) if axes is None else (mesh.atoms, (tuple(axes),))
        Part(f"parallel: {glob!r}", check, args, {}, node).call()
        return value
    raise node.error(
        f"parallel: {glob!r} is no plan that is installed{near(glob, (*registry.plans, *NAMED_MODES), 'plans')}; parameters of "
        f"that name take a spec such as '(tp o) i', not {value!r}"
    )


def _fits_mesh(text: str, mesh: Mesh) -> None:
    """Raises SpecError where a spec names axes that the mesh has not: bound to a tensor that its groups divide."""
    groups = [dim for dim in parse(text).dims if dim is not None]
    bind_spec(text, mesh, [prod(f.size or (mesh.axis_size(f.name) if f.name in mesh else 1) for f in dim) for dim in groups])


def _sharding(node: Node | None, root: Node, plugins: tuple[Any, ...]) -> Part:
    allowed = parameters(shard, skip=1, without=("mesh", "plans", "plugins"))
    options = bind(node, "shard", allowed)[1] if node is not None and node.value is not False else {}
    return Part("shard", shard, (), {**options, "plugins": plugins}, node or root)


def _clip(node: Node | None) -> tuple[float | None, Node | None]:
    if node is None or node.value is None or node.value is False:
        return None, None
    value = node.plain()
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise node.error(f"clip is {value!r}; allowed: a number above 0, the maximal global norm of the gradients")
    return float(value), node


def _executor(entries: Mapping[str, Node]) -> str | None:
    node = entries.get("executor")
    if node is None or node.value is None:
        return None
    if node.value not in EXECUTORS:
        raise node.error(f"unknown executor {node.value!r}{near(str(node.value), EXECUTORS, 'executors')}")
    return str(node.value)
