"""A chain of transforms from a file.

    # run.yaml                               chain = cf.configure("run.yaml")
    mesh: {dp: 2, tp: 2}                     step = chain.apply(step_fn)
    parallel:                                state = step.init(state, batch)
      "*.fc1.weight": "(tp o) i"             state, metrics = step(state, batch)

Problem: a configuration that lists what exists is behind with every new transform and plugin. Idea: a key is the name
of a transform (`cf.<name>`, or one of a plugin) or of a plan that a plugin registered, and its options are the ones of
that function's signature. Only `mesh`, `parallel`, `shard`, `clip` and `executor` mean something here.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs

from colofunc import transforms as built_in
from colofunc.compiler.staged import EXECUTORS, Staged
from colofunc.config.options import alternatives, bind, parameters
from colofunc.config.part import ConfigPart, checked
from colofunc.config.source import SourceNode, read_source
from colofunc.errors import ColofuncError, InputError, near
from colofunc.functional.modules import Model
from colofunc.functional.optimizers import Optimizer
from colofunc.functional.train import train_step
from colofunc.mesh import Mesh
from colofunc.planner.offload.policies import MemoryPolicy
from colofunc.planner.recompute.policies import RecomputePolicy, every, save_only
from colofunc.planner.wishes.wish import NamedPlan
from colofunc.plugins import Registry, build_registry, given_plugins
from colofunc.spec.spec import bind as bind_spec
from colofunc.spec.spec import parse
from colofunc.transforms.shard import shard

# ---- plans and policies of memory ----
#     parallel: {tensor: {mode: 2.5d, depth: 1, size: 4}, ring: {axis: cp, size: 2}, "*.norm.weight": "(tp o)"}
#
# Problem: which modes there are is for plugins to say, and their axes should not have to be counted twice, in `mesh`
# and in the plan. Idea: a name is that of an installed plan, its options are the ones of its signature, and `size` is
# how many ranks its axes have, so that `mesh` need not name them. A plan that takes `size` itself gets it, too, and may
# say how it divides (`SizedPlan`): a grid of 4 ranks is 2 by 2. A constructor that a plugin gives under several names is
# one plan, which has the name of the function.


@runtime_checkable
class SizedPlan(Protocol):
    """A plan that knows how many ranks each of its axes has; `sizes` is None where nobody has said."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...] | None


@attrs.frozen(eq=False)
class PlanEntry:
    """A plan, or globs with specs. `sizes`: axis -> ranks, as far as they were said."""

    plan: Any
    text: str
    node: SourceNode
    globs: Mapping[str, SourceNode] = attrs.field(factory=dict)
    sizes: Mapping[str, int] = attrs.field(factory=dict)

    def check(self, registry: Registry, mesh: Mesh) -> PlanEntry:
        """With specs in place of nodes. Raises ConfigError where the mesh is another than this one asks for."""
        if self.globs:
            specs = {glob: _spec(glob, node, registry, mesh) for glob, node in self.globs.items()}
            return attrs.evolve(self, plan=specs, text=", ".join(f"{glob}: {spec}" for glob, spec in specs.items()))
        if isinstance(self.plan, NamedPlan):
            checked(self.node, self.text.split("(")[0], mesh.atoms, self.plan.axes)  # raises on unknown axes
        for axis, size in self.sizes.items():
            if axis in mesh and size not in (-1, mesh.axis_size(axis)):
                at = self.node.entries["size"]
                raise at.error(f"{self.text} wants {size} ranks on {axis!r}, and {mesh!r} has {mesh.axis_size(axis)}")
        return self


def read_plans(node: SourceNode, registry: Registry, transforms: Collection[str]) -> Iterator[PlanEntry]:
    """The plans under `parallel`, in order: a list, or one mapping. transforms: names that are keys beside it."""
    items = node.items if node.value is not None else []
    for item in items:
        if isinstance(item.value, str):
            item = attrs.evolve(item, value={item.value: attrs.evolve(item, value=None)})
        globs = {}
        for key, child in item.entries.items():
            if child.value is False:
                continue
            if own_name(key, registry) in registry.plans:
                yield read_plan(key, child, registry)
            elif own_name(key, registry) in transforms:
                raise child.error(
                    f"parallel: {key!r} is a key of its own, not a plan; write it beside `parallel`, not under it "
                    f"(parameters of that name are '*{key}')"
                )
            elif policy_of(key, registry):
                raise child.error(f"parallel: {policy_of(key, registry)} (parameters of that name are '*{key}')")
            else:
                globs[key] = child
        if globs:
            yield PlanEntry(None, "", item, globs)


def own_name(key: str, registry: Registry) -> str:
    """What a key is called here, where other frameworks call it otherwise: a transform, or a plan under several names."""
    name = ALIASES.get(key, key)
    plan = registry.plans.get(name)
    own = getattr(plan, "__name__", name)
    return own if plan is not None and registry.plans.get(own) is plan else name


def read_plan(key: str, node: SourceNode, registry: Registry) -> PlanEntry:
    """A plan from a plugin's constructor, and how many ranks it wants."""
    name = own_name(key, registry)
    fn, given = registry.plans[name], node
    allowed = parameters(fn)
    size = given.value.get("size") if isinstance(given.value, dict) else None
    if size is not None and (isinstance(size.value, dict | list) or "size" not in allowed):
        given = attrs.evolve(given, value=_without("size", given.value))
    part = ConfigPart(name, fn, *bind(given, name, allowed), given)
    plan = part.call()
    return PlanEntry(plan, part.text(), node, sizes={} if size is None else _sizes(name, plan, size))


def _without(key: str, options: Mapping[str, SourceNode]) -> dict[str, SourceNode]:
    return {name: node for name, node in options.items() if name != key}


def _sizes(name: str, plan: Any, node: SourceNode) -> dict[str, int]:
    """Axis -> ranks, as `size` says: one number, one per axis in order, or by name."""
    if not isinstance(plan, NamedPlan):
        raise node.error(
            f"{name}: this plan does not say its axes, so `size` has none to speak of; give the sizes under `mesh`"
        )
    said = node.plain()
    if not isinstance(said, dict | list) and isinstance(plan, SizedPlan) and plan.sizes is not None:
        return dict(zip(plan.axes, plan.sizes, strict=True))
    if isinstance(said, dict):
        named, count = said, len(said)
    else:
        sizes = said if isinstance(said, list) else [said]
        named, count = dict(zip(plan.axes, sizes)), len(sizes)
    if set(named) != set(plan.axes) or count != len(plan.axes):
        axes, example = ", ".join(map(repr, plan.axes)), ", ".join(f"{axis}: ..." for axis in plan.axes)
        raise node.error(f"{name}: size is {said!r}, and the plan has the axes {axes}; write size: {{{example}}}")
    for size in named.values():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise node.error(
                f"{name}: size is {size!r}; allowed: a whole number of ranks, at least 1 (-1 under torchrun: what is "
                "left)"
            )
    return named


# ---- specs ----


def _spec(glob: str, node: SourceNode, registry: Registry, mesh: Mesh) -> str:
    """The spec or strategy that a glob is given; `{tp: o}` may stand without quotes."""
    value = node.plain()
    if isinstance(value, dict) and value and all(isinstance(factor, str) for factor in value.values()):
        value = "{" + ", ".join(f"{axis}: {factor}" for axis, factor in value.items()) + "}"
    if isinstance(value, str):
        what = f"parallel: {glob!r}"
        if value.lstrip().startswith("{"):
            checked(node, what, mesh.atoms, tuple(re.findall(r"(\w+)\s*:", value)))
        else:
            checked(node, what, fits_mesh, value, mesh)
        return value
    raise node.error(
        f"parallel: {glob!r} is no plan that is installed{near(glob, _own_plans(registry), 'plans')}; parameters "
        f"of that name take a spec such as '(tp o) i', not {value!r}"
    )


def _own_plans(registry: Registry) -> list[str]:
    """The names of plans without those that other frameworks give them."""
    return [name for name in registry.plans if own_name(name, registry) == name]


def fits_mesh(text: str, mesh: Mesh) -> None:
    """Raises SpecError where a spec names axes that the mesh has not: bound to a tensor that its groups divide."""
    shape: list[int] = []
    for dim in parse(text).dims:
        if dim is None:  # `...`
            continue
        size = 1
        for factor in dim:
            if factor.size:
                size *= factor.size
            elif factor.name in mesh:
                size *= mesh.axis_size(factor.name)
        shape.append(size)
    bind_spec(text, mesh, shape)


def check_specs(node: SourceNode, name: str, mesh: Mesh) -> None:
    """A tree of specs, as `in_specs` and `out_specs` are."""
    if isinstance(node.value, dict | list):
        children = node.value.values() if isinstance(node.value, dict) else node.value
        for child in children:
            check_specs(child, name, mesh)
    elif isinstance(node.value, str):
        checked(node, name, fits_mesh, node.value, mesh)
    elif node.value is not None:
        raise node.error(
            f"{name}: {node.text()} is no spec; allowed: '(dp b) ...' and its like, null for automatic, lists and "
            "mappings"
        )


# ---- policies of memory ----
#     offload:
#       budget: 6GiB
#       policy: {gemini: {placement: auto, warmup: 2}}        # as `policy: gemini`, with options of its constructor
#     checkpoint:
#       policy: {save_only: ["*.attn", "*.mlp"]}              # cf.save_only("*.attn", "*.mlp"); {every: 2} is cf.every(2)
#
# Problem: a policy is a record with a function in it, which no file can say. Idea: as with plans, the name is that of a
# constructor, of a plugin or of ours, and its options are the ones of the constructor's signature.


RECOMPUTE_POLICIES: Mapping[str, Any] = {"save_only": save_only, "every": every}


def policy_of(name: str, registry: Registry) -> str:
    """Says which transform takes a policy of this name; "" where none does."""
    for transform, policies in (("offload", registry.memory_policies), ("checkpoint", RECOMPUTE_POLICIES)):
        if name in policies:
            return f"{name!r} is a policy of `{transform}`; write {transform}: {{policy: {name}}}"
    return ""


def with_policies(node: SourceNode, allowed: Mapping[str, inspect.Parameter], registry: Registry) -> SourceNode:
    """The options of a transform, with the policies in them made.

    Raises ConfigError with the line of what is refused.
    """
    if not isinstance(node.value, dict):
        return node
    known: dict[type, Mapping[str, Any]] = {
        MemoryPolicy: registry.memory_policies,
        RecomputePolicy: RECOMPUTE_POLICIES,
    }
    options = dict(node.value)
    for key, child in node.value.items():
        for kind, constructors in known.items():
            if key in allowed and kind in alternatives(allowed[key].annotation):
                options[key] = _made(child, constructors)
    return attrs.evolve(node, value=options)


def _made(node: SourceNode, constructors: Mapping[str, Any]) -> SourceNode:
    """The node of a policy with its options as one of the policy itself; any other as it is."""
    if not isinstance(node.value, dict) or len(node.value) != 1:
        return node
    name, options = next(iter(node.value.items()))
    constructor = constructors.get(name)
    if constructor is None:
        return node
    if isinstance(constructor, MemoryPolicy):
        raise options.error(f"policy {name!r} takes no options; write policy: {name}")
    args, named = bind(options, name, parameters(constructor))
    return attrs.evolve(node, value=ConfigPart(name, constructor, args, named, options).call())


OWN_KEYS = ("mesh", "parallel", "shard", "clip", "executor")
# What other frameworks call the same thing.
ALIASES = {
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
    sharding: ConfigPart
    transforms: tuple[ConfigPart, ...]
    clip: float | None = None
    executor: str | None = None
    plan_texts: tuple[str, ...] = ()
    clip_node: SourceNode | None = None

    def apply(self, step_fn: Callable[..., Any], *, clips: bool = False) -> Staged:
        """The staged step. `clips`: the function clips gradients to `chain.clip` itself.

        Raises ConfigError with the line where a transform refuses its options or another one, InputError where the
        configuration says `clip` and nobody would do it.
        """
        if self.clip_node is not None and not clips:
            raise InputError(
                f"{self.clip_node.where}: clip: {self.clip} happens inside a step. Try: chain.train_step(model, opt), "
                "or cf.clip_by_global_norm(grads, chain.clip) in the function and chain.apply(step_fn, clips=True)"
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
        ranks = f"{self.mesh.size} ranks" if self.mesh.size > 1 else f"{self.mesh.size} rank"
        lines = [("mesh", f"{self.mesh!r}, {ranks}")]
        lines += [("parallel", text) for text in self.plan_texts]
        if self.sharding.options.keys() - {"plugins"}:
            options = [f"{name}={value!r}" for name, value in self.sharding.options.items() if name != "plugins"]
            lines.append(("shard", ", ".join(options)))
        lines += [(part.name, part.text()) for part in self.transforms]
        if self.clip is not None:
            lines.append(("clip", f"global norm at most {self.clip}"))
        if self.executor is not None:
            lines.append(("executor", self.executor))
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:{width}}  {what}" for name, what in lines)

    __str__ = text


def configure(source: str | os.PathLike[str] | Mapping[str, Any], plugins: Sequence[Any] = ()) -> Chain:
    """A chain from a .yaml, .yml or .json file or a dict. plugins: modules asked beside the installed ones.

    Everything is checked here, before there is a step: keys, options and values, and that the transforms go together.
    Raises ConfigError, whose message begins with the file and line.
    """
    root = read_source(source)
    plugins = given_plugins(plugins, "cf.configure")
    registry = build_registry(plugins)
    known = _transforms(registry)
    entries = _without_aliases(root, registry)
    wanted = list(read_plans(entries["parallel"], registry, (*known, *OWN_KEYS))) if "parallel" in entries else []
    transforms: list[ConfigPart] = []
    for key, node in entries.items():
        if key in OWN_KEYS or node.value is False:
            continue
        if key in known:
            allowed = parameters(known[key], skip=1)
            args, options = bind(with_policies(node, allowed, registry), key, allowed)
            transforms.append(ConfigPart(key, known[key], args, options, node))
        elif key in registry.plans:
            wanted.append(read_plan(key, node, registry))
        else:
            raise _unknown(key, node, (*OWN_KEYS, *known, *registry.plans), registry)
    mesh = _mesh(entries, wanted)
    wanted = [one.check(registry, mesh) for one in wanted]
    plans, texts = tuple(one.plan for one in wanted), tuple(one.text for one in wanted)
    sharding = _sharding(entries.get("shard"), root, plugins, mesh)
    clip, clip_node = _clip(entries.get("clip"))
    chain = Chain(mesh, plans, sharding, tuple(transforms), clip, _executor(entries), texts, clip_node)
    chain.apply(_nothing, clips=True)  # transforms only record what they are told, so this costs nothing
    return chain


def _nothing(state: Any, batch: Any) -> Any:
    """A step for asking transforms whether they accept their options."""
    return state, batch


def _transforms(registry: Registry) -> dict[str, Callable[..., Any]]:
    """Name -> transform: those of colofunc.transforms, each in the file of its name, and those of plugins."""
    transforms: dict[str, Callable[..., Any]] = {}
    for file in pkgutil.iter_modules(built_in.__path__):
        # The chain shards by itself, with the mesh and the plans of the file.
        if file.name != "shard":
            module = importlib.import_module(f"colofunc.transforms.{file.name}")
            transforms[file.name] = getattr(module, file.name)
    transforms.update(registry.transforms)
    return transforms


def _without_aliases(root: SourceNode, registry: Registry) -> dict[str, SourceNode]:
    """The root's entries under our own names."""
    found: dict[str, SourceNode] = {}
    for key, node in root.entries.items():
        name = own_name(key, registry)
        if name in found:
            raise node.error(f"{key!r} says the same as what is at {found[name].where}; keep one of them")
        found[name] = node
    return found


def _unknown(key: str, node: SourceNode, names: Sequence[str], registry: Registry) -> ColofuncError:
    policy = policy_of(key, registry)
    if policy:
        return node.error(policy)
    close = near(key, (*names, *ALIASES))
    if not close.startswith("; did"):
        close = near(key, names, "keys")
    return node.error(f"unknown key {key!r}{close}")


def _mesh(entries: Mapping[str, SourceNode], wanted: Sequence[PlanEntry]) -> Mesh:
    """The mesh that the file describes, with the axes that plans have sizes for and it does not name."""
    node = entries.get("mesh")
    given = dict(node.entries) if node is not None else {}
    inner = given.pop("axes", None)
    if inner is not None:
        for axis, size in inner.entries.items():
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
    made = attrs.evolve(node, value=given) if node is not None else SourceNode(given, next(iter(given.values())).where)
    args, options = bind(made, "mesh", parameters(Mesh))
    mesh: Mesh = ConfigPart("mesh", Mesh, args, options, made).call()
    return mesh


def _sharding(node: SourceNode | None, root: SourceNode, plugins: tuple[Any, ...], mesh: Mesh) -> ConfigPart:
    allowed = parameters(shard, skip=1, without=("mesh", "plans", "plugins"))
    options: dict[str, Any] = {}
    if node is not None and node.value is not False:
        options = bind(node, "shard", allowed)[1]
        for name in {"in_specs", "out_specs"} & options.keys():
            check_specs(node.entries[name], f"shard: {name}", mesh)
    return ConfigPart("shard", shard, (), {**options, "plugins": plugins}, node or root)


def _clip(node: SourceNode | None) -> tuple[float | None, SourceNode | None]:
    if node is None or node.value is None or node.value is False:
        return None, None
    value = node.plain()
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise node.error(f"clip is {value!r}; allowed: a number above 0, the maximal global norm of the gradients")
    return float(value), node


def _executor(entries: Mapping[str, SourceNode]) -> str | None:
    node = entries.get("executor")
    if node is None or node.value is None:
        return None
    if node.value not in EXECUTORS:
        raise node.error(f"unknown executor {node.value!r}{near(str(node.value), EXECUTORS, 'executors')}")
    return str(node.value)
