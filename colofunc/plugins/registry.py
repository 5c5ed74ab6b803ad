"""Registry: everything that plugins added, merged once and frozen.

`build_registry(plugins)` asks the installed plugins (entry-point group `colofunc`) and those given by hand; the
built-in rules and strategies enter as a plugin like any other, first. Nothing here runs at import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from inspect import signature
from types import MappingProxyType
from typing import Any

import attrs
import pluggy

from colofunc.errors import ColofuncError, PlanError, PluginError, near, plugin_error
from colofunc.mesh import Mesh, Topology, resolve_topology
from colofunc.ops.kernels import Kernel, Table, table_of
from colofunc.ops.quantizers import BUILT_IN, Quantizer
from colofunc.plugins import hookspecs
from colofunc.plugins import kernels as own_kernels
from colofunc.plugins.hints import LibraryHint
from colofunc.program.pipeline_schedule import Schedule
from colofunc.spec.rule import Call, Rule, Strategy
from colofunc.spec.rules import REGISTERED, RULES, STRATEGIES, base_of, rule_for

ENTRY_POINTS = "colofunc"
FORMATS = "colofunc.integrations.formats"
"""The plugin of this project that knows other libraries' files. It is named, as an entry point names one, because it
lies above this layer, and only what reads and writes such files has it loaded."""
HINTS = "colofunc.integrations.hints"
"""The one that knows what users of other libraries can write, loaded where an error asks for it."""

StrategyHook = Callable[..., Any]
"""(call, mesh), and the rule of the call where it takes an argument of the name `rule`."""


def _frozen(table: Mapping[Any, Any]) -> Mapping[Any, Any]:
    return MappingProxyType(dict(table))


@attrs.frozen
class Registry:
    """What is known: one table per hook, and the names of the plugins asked."""

    rules: Mapping[str, Callable[[Call], Rule | None]]
    strategies: Mapping[str, tuple[StrategyHook, ...]]
    plans: Mapping[str, Callable[..., Any]]
    candidate_plans: Mapping[str, Callable[..., Any]]
    memory_policies: Mapping[str, Any]
    schedules: Mapping[str, Schedule]
    kernels: Table
    passes: Mapping[str, Callable[..., Any]]
    transforms: Mapping[str, Any]
    quantizers: Mapping[str, Quantizer]
    packed_layouts: Mapping[str, Any]
    model_libraries: Mapping[str, Any]
    hints: Mapping[str, Sequence[LibraryHint]]
    topologies: Mapping[str, Any]
    plugins: tuple[str, ...] = ()

    def rule(self, call: Call) -> Rule | None:
        """The rule of a call: a plugin's, else the built-in one; None where there is none."""
        fn = self.rules.get(call.target) or self.rules.get(f"{call.target}.default")
        if fn is None:
            return rule_for(call)
        what = f"colofunc_rules: the rule of {call.target} from {name_of(fn)}"
        remedy = "cf.ext.pattern(...), which is such a function; None for a call that it does not know"
        try:
            found: Any = fn(call)
        except ColofuncError:
            raise
        except Exception as error:
            raise plugin_error(what, remedy, error) from error
        if found is not None and not isinstance(found, Rule):
            raise PluginError(f"{what} gave {found!r}, which is no cf.ext.Rule. Try: {remedy}")
        rule: Rule | None = found
        return rule

    def extra_strategies(self, call: Call, mesh: Mesh) -> tuple[Strategy, ...]:
        """Strategies with local code of their own, beyond the rule's."""
        found: list[Strategy] = []
        # Built-in ones stand under the operator's name without its overload.
        keys = dict.fromkeys((base_of(call.target), call.target, f"{call.target}.default"))
        for fn in [fn for key in keys for fn in self.strategies.get(key, ())]:
            for strategy in _given(fn, call, mesh, self.rule):
                if not isinstance(strategy, Strategy):
                    raise PluginError(
                        f"strategies of {call.target} from {name_of(fn)} gave {strategy!r}; yield cf.Strategy records"
                    )
                found.append(strategy)
        return tuple(found)


def name_of(fn: Any) -> str:
    """A function as a plugin has it: module and name."""
    written = getattr(fn, "func", fn)  # of a functools.partial
    if not hasattr(written, "__qualname__"):  # a record that can be called
        written = type(written)
    return f"{written.__module__}.{written.__qualname__}"


def _takes_rule(fn: StrategyHook) -> bool:
    """Whether a function of strategies wants the rule of the call: a parameter that nobody has given yet."""
    try:
        parameter = signature(fn).parameters.get("rule")
    except ValueError:  # written in C
        return False
    return parameter is not None and parameter.default is parameter.empty


def _given(fn: StrategyHook, call: Call, mesh: Mesh, rule_of: Callable[[Call], Rule | None]) -> list[Any]:
    """What a function of strategies yields for a call. Raises PluginError where it fails."""
    told = {"rule": rule_of(call)} if _takes_rule(fn) else {}
    try:
        return list(fn(call, mesh, **told))
    except ColofuncError:
        raise
    except Exception as error:
        what = f"strategies of {call.target} from {name_of(fn)} failed"
        raise PluginError(f"{what}: {type(error).__name__}: {error}; yield cf.Strategy records, or none") from error


@lru_cache(maxsize=64)
def build_registry(plugins: tuple[Any, ...] = (), installed: bool = True) -> Registry:
    """Ask those in `plugins` (modules or objects) and all that are `installed`.

    Raises PluginError naming the plugin.
    """
    manager = pluggy.PluginManager("colofunc")
    manager.add_hookspecs(hookspecs)
    if installed:
        manager.load_setuptools_entrypoints(ENTRY_POINTS)
    for plugin in plugins:
        if not manager.is_registered(plugin):
            manager.register(plugin)
    _check_names(manager)
    for plugin in plugins:
        if not any(manager.parse_hookimpl_opts(plugin, name) is not None for name in dir(plugin)):
            raise PluginError(
                f"plugin {_name(manager, plugin)!r} implements no hook; give a module (or object) with functions "
                "marked @cf.hookimpl"
            )
    tables = {hook: _merge(manager, hook) for hook in hookspecs.HOOKS if hook != "colofunc_kernels"}
    strategies = {op: (fn,) for op, fn in STRATEGIES.items()}
    for op, fns in tables.pop("colofunc_strategies").items():
        strategies[op] = strategies.get(op, ()) + tuple(fns)
    names = tuple(sorted(_installed(manager, plugin) for plugin in manager.get_plugins()))
    fields = {hook.removeprefix("colofunc_"): _frozen(table) for hook, table in tables.items()}
    manager.register(own_kernels)
    return Registry(
        strategies=_frozen(strategies), plugins=names, kernels=_frozen(table_of(_kernels(manager))), **fields
    )


def _formats() -> tuple[Any, ...]:
    return (import_module(FORMATS),)


def formats_registry() -> Registry:
    """With the formats of other libraries that this project knows, and those of installed plugins behind them."""
    return build_registry(_formats())


def own_formats() -> Registry:
    """With the formats of other libraries that this project knows, and no installed plugin's."""
    return build_registry(_formats(), installed=False)


def hints_registry(plugins: tuple[Any, ...]) -> Registry:
    """With this project's hints for users of other libraries, and those of plugins that are given or installed."""
    return build_registry((import_module(HINTS), *plugins))


def given_plugins(plugins: Any, where: str) -> tuple[Any, ...]:
    """What is given as plugins= of `where`. Raises PluginError for what is no list, or cannot be looked up by hash."""
    if not isinstance(plugins, (list, tuple)):
        raise PluginError(f"{where}: plugins={plugins!r} is no list of plugins. Try: plugins=[...]")
    for plugin in plugins:
        _check_hashable(plugin, where)
    return tuple(plugins)


def _check_hashable(plugin: Any, where: str) -> None:
    try:
        hash(plugin)
    except TypeError:
        raise PluginError(
            f"{where}: a plugin of type {type(plugin).__name__} cannot be hashed, and registries are kept by their "
            "plugins. Try: a module; an object of a plain class, or of a frozen one such as @attrs.frozen"
        ) from None


def bringing(plans: Sequence[Any]) -> tuple[Any, ...]:
    """The plans that are plugins themselves: with hooks as methods, for what only their own axes need."""
    found: dict[Any, None] = {}
    for given in plans:
        for plan in given if isinstance(given, (list, tuple)) else (given,):
            if any(callable(getattr(type(plan), hook, None)) for hook in hookspecs.HOOKS):
                _check_hashable(plan, "a plan that is a plugin")
                found[plan] = None
    return tuple(found)


def topology(name: str, plugins: tuple[Any, ...] = ()) -> Topology:
    """A topology by name: a preset, a file, or one that a plugin brings. Raises TopologyError with near names."""
    return resolve_topology(name, build_registry(given_plugins(plugins, "cf.topology")).topologies)


def schedule_named(name: str, registry: Registry | None = None) -> Schedule:
    """A pipeline schedule by name, of the plugins that are installed or those of a registry.

    Raises PlanError with near names.
    """
    registry = build_registry() if registry is None else registry
    known = registry.schedules
    if name not in known:
        raise PlanError(f"there is no pipeline schedule {name!r}{near(name, known, 'schedules')}")
    return known[name]


def _name(manager: pluggy.PluginManager, plugin: Any) -> str:
    """Of a module its own, of a record what it prints, of another object its type's: the same in every process, which
    pluggy's name of an object is not.
    """
    own, kind = getattr(plugin, "__name__", None), type(plugin)
    if own is not None:
        return str(own)
    given = manager.get_name(plugin)
    if vars(kind).get("__repr__") is not None:
        return repr(plugin)
    return given if given is not None and given != str(id(plugin)) else f"{kind.__module__}.{kind.__qualname__}"


def _installed(manager: pluggy.PluginManager, plugin: Any) -> str:
    """The name that it was installed under; pluggy gives an address to an object that has none."""
    given = manager.get_name(plugin)
    return given if given is not None and given != str(id(plugin)) else _name(manager, plugin)


def _check_names(manager: pluggy.PluginManager) -> None:
    """Every function marked @hookimpl must be a hook we know."""
    for plugin in manager.get_plugins():
        for attribute in dir(plugin):
            marked = manager.parse_hookimpl_opts(plugin, attribute) is not None
            if marked and attribute not in hookspecs.HOOKS:
                raise PluginError(
                    f"plugin {_name(manager, plugin)!r} implements {attribute!r}, which is no hook"
                    f"{near(attribute, hookspecs.HOOKS, 'hooks')}"
                )


def _merge(manager: pluggy.PluginManager, hook: str) -> dict[Any, Any]:
    """One table from all plugins; clashes name both plugins. Strategies of an operator and hints of a library add up."""
    merged: dict[Any, Any] = {}
    owner: dict[Any, str] = {}
    if hook == "colofunc_rules":
        owner = {**dict.fromkeys(RULES, "colofunc"), **dict.fromkeys(REGISTERED, "cf.operator")}
    if hook == "colofunc_quantizers":
        merged |= BUILT_IN
        owner = dict.fromkeys(BUILT_IN, "colofunc")
    impls: Sequence[Any] = getattr(manager.hook, hook).get_hookimpls()
    # This project's own formats are asked first whose a file is.
    for impl in sorted(impls, key=lambda i: (_name(manager, i.plugin) != FORMATS, _name(manager, i.plugin))):
        who = _name(manager, impl.plugin)
        try:
            table = impl.function()
        except Exception as error:
            raise PluginError(f"{hook} of plugin {who!r} failed: {type(error).__name__}: {error}") from error
        if not isinstance(table, Mapping):
            raise PluginError(f"{hook} of plugin {who!r} returned {type(table).__name__}; return a dict")
        for key, value in table.items():
            _check_entry(hook, who, key, value)
            if hook == "colofunc_strategies":
                merged.setdefault(key, []).append(value)
                continue
            if hook == "colofunc_hints":
                merged.setdefault(key, []).extend(value)
                continue
            if key in owner:
                raise PluginError(
                    f"{hook}: {key!r} comes from both {owner[key]!r} and {who!r}; rename it in one of them"
                )
            owner[key] = who
            merged[key] = value
    return merged


def _kernels(manager: pluggy.PluginManager) -> list[Kernel]:
    """Of all plugins, the project's own first: of kernels that cost the same the first is taken."""
    kernels: list[Kernel] = []
    impls = manager.hook.colofunc_kernels.get_hookimpls()
    for impl in sorted(impls, key=lambda i: (i.plugin is not own_kernels, _name(manager, i.plugin))):
        who = _name(manager, impl.plugin)
        try:
            answer: Any = impl.function()
            given = list(answer)
        except Exception as error:
            raise PluginError(f"colofunc_kernels of plugin {who!r} failed: {type(error).__name__}: {error}") from error
        for kernel in given:
            if not isinstance(kernel, Kernel):
                raise PluginError(f"colofunc_kernels of plugin {who!r} gave {kernel!r}; give cf.ext.Kernel records")
        kernels += given
    return kernels


_CALLABLE = frozenset({
    "colofunc_rules", "colofunc_strategies", "colofunc_plans", "colofunc_candidate_plans", "colofunc_passes",
    "colofunc_transforms",
})  # fmt: skip

_RECORDS: Mapping[str, tuple[str, str]] = {
    "colofunc_schedules": ("colofunc.program.pipeline_schedule.Schedule", "a cf.ext.Schedule"),
    "colofunc_quantizers": ("colofunc.ops.quantizers.Quantizer", "a cf.ext.Quantizer"),
    "colofunc_topologies": ("colofunc.mesh.topology.Topology", "a cf.Topology"),
    "colofunc_memory_policies": (
        "colofunc.planner.offload.policies.MemoryPolicy",
        "a cf.ext.MemoryPolicy or a constructor of one",
    ),
    "colofunc_packed_layouts": (
        "colofunc.functional.checkpoint.packed_tensors.PackedLayout",
        "a cf.ext.packed_tensors.PackedLayout",
    ),
    "colofunc_model_libraries": (
        "colofunc.functional.checkpoint.libraries.Library",
        "a cf.ext.libraries.Library",
    ),
}
"""Hook -> (class of its values, what to give). Classes are named, because some lie in layers above this one."""
_CONSTRUCTORS_TOO = frozenset({"colofunc_memory_policies"})
"""Hooks whose values may be functions that make such a record."""


def _check_entry(hook: str, who: str, key: Any, value: Any) -> None:
    if not isinstance(key, str):
        raise PluginError(f"{hook} of plugin {who!r} has key {key!r}; see the hook's documentation for its form")
    if hook in _CALLABLE and not callable(value):
        raise PluginError(f"{hook} of plugin {who!r}: the value of {key!r} is {value!r}, which cannot be called")
    if hook == "colofunc_hints" and not _are_hints(value):
        raise PluginError(
            f"{hook} of plugin {who!r}: the value of {key!r} is {value!r}; give a list of cf.ext.LibraryHint records"
        )
    if hook in _RECORDS:
        record, wanted = _RECORDS[hook]
        is_constructor = hook in _CONSTRUCTORS_TOO and callable(value)
        if not is_constructor and not _is_a(value, record):
            raise PluginError(f"{hook} of plugin {who!r}: the value of {key!r} is {value!r}; give {wanted}")


def _are_hints(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(one, LibraryHint) for one in value)


def _is_a(value: Any, record: str) -> bool:
    """Whether a class of this name is among those of a value."""
    return any(f"{cls.__module__}.{cls.__qualname__}" == record for cls in type(value).__mro__)
