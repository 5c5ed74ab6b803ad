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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from colofunc.compiler.staged import EXECUTORS, Staged
from colofunc.config import parallel
from colofunc.config.options import bind, parameters
from colofunc.config.parallel import Wanted, check_specs, not_installed, plan_name, read_plan, read_plans, with_policies
from colofunc.config.part import Part
from colofunc.config.source import Node, read
from colofunc.errors import ColofuncError, InputError, near
from colofunc.functional.modules import Model
from colofunc.functional.optimizers import Optimizer
from colofunc.functional.train import train_step
from colofunc.mesh import Mesh
from colofunc.plugins import Registry, build_registry
from colofunc.transforms.shard import shard

OWN_KEYS = ("mesh", "parallel", "shard", "clip", "executor")
# What other frameworks call the same thing.
ALIASES = parallel.ALIASES | {
    "gradient_clipping": "clip", "max_grad_norm": "clip", "gradient_clip_val": "clip", "gradient_accumulation_steps": "accumulate",
    "mixed_precision": "precision", "activation_checkpointing": "checkpoint", "activation_checkpoint": "checkpoint",
}  # fmt: skip


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
    wanted = list(read_plans(entries["parallel"], registry)) if "parallel" in entries else []
    transforms: list[Part] = []
    for key, node in entries.items():
        if key in OWN_KEYS or node.value is False:
            continue
        if key in known:
            allowed = parameters(known[key], skip=1)
            args, options = bind(with_policies(node, allowed, registry), key, allowed)
            transforms.append(Part(key, known[key], args, options, node))
        elif plan_name(key, node, registry) is not None:
            wanted.append(read_plan(key, node, registry))
        else:
            raise _unknown(key, node, (*OWN_KEYS, *known, *registry.plans))
    mesh = _mesh(entries, wanted)
    wanted = [one.check(registry, mesh) for one in wanted]
    plans, texts = tuple(one.plan for one in wanted), tuple(one.text for one in wanted)
    sharding = _sharding(entries.get("shard"), root, tuple(plugins), mesh)
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
    if key in parallel.NAMED:
        return not_installed(key, node)
    close = near(key, (*names, *parallel.NAMED, *ALIASES))
    return node.error(f"unknown key {key!r}{close if close.startswith('; did') else near(key, names, 'keys')}")


def _mesh(entries: Mapping[str, Node], wanted: Sequence[Wanted]) -> Mesh:
    """The mesh that the file describes, with the axes that plans have sizes for and it does not name."""
    node = entries.get("mesh")
    given = dict(node.entries) if node is not None else {}
    inner = given.pop("axes", None)
    for axis, size in inner.entries.items() if inner is not None else ():
        if axis in given:
            raise size.error(f"mesh: {axis!r} was given before, at {given[axis].where}; keep one of them")
        given[axis] = size
    views = given["views"].entries if "views" in given else {}
    for one in wanted:
        for axis, ranks in one.sizes.items():
            if axis not in views:
                given.setdefault(axis, attrs.evolve(one.node.entries["size"], value=ranks))
    if not given:
        return Mesh()
    made = attrs.evolve(node, value=given) if node is not None else Node(given, next(iter(given.values())).where)
    args, options = bind(made, "mesh", parameters(Mesh))
    mesh: Mesh = Part("mesh", Mesh, args, options, made).call()
    return mesh


def _sharding(node: Node | None, root: Node, plugins: tuple[Any, ...], mesh: Mesh) -> Part:
    allowed = parameters(shard, skip=1, without=("mesh", "plans", "plugins"))
    options: dict[str, Any] = {}
    if node is not None and node.value is not False:
        options = bind(node, "shard", allowed)[1]
        for name in {"in_specs", "out_specs"} & options.keys():
            check_specs(node.entries[name], f"shard: {name}", mesh)
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
