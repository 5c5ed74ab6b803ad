"""The plugin manual: every hook a plugin can implement.

A plugin is a module (or object) with functions marked `@cf.hookimpl` whose names are those below. It is found through
the entry-point group `colofunc`, or given by hand: `cf.shard(step, mesh, plugins=[my_module])`.

    # my_plugin.py
    import colofunc as cf

    @cf.hookimpl
    def colofunc_strategies():
        return {"aten.mm.default": my_strategies}

    def my_strategies(call, mesh):          # called while planning, once per distinct operator call
        yield cf.Strategy("{tp: k, mine}", ins=(...), outs=(...), local=my_local_code, cost=cf.Cost(flops=...))

Hooks take no arguments, return data, and are called once, when a registry is built (never at import). What they return
is merged to one frozen `Registry`. Two plugins that give the same key, a hook that does not exist and a value of the
wrong type are `PluginError`s that name the plugin. Plugins import public names only (`import colofunc as cf`), never
each other. `cf.testing.check_strategies(plugin, op)` proves strategies right on small meshes.

Hooks speak of operators by name: those of torch, of any library, and those that you register with `cf.operator`
(below).

What plugins are made of, all of it used by those in this repository: `cf.ext.ways` gives strategies to build on, and
`way.with_pattern(words, local, extra_s=...)` makes one of yours of each; `cf.ext.Rules` and `cf.ext.follow` say what
operators can do and where a layout goes. `cf.ext.reading`, `cf.ext.products`, `cf.ext.product_pairs`,
`cf.ext.AttentionCall`, `cf.ext.AttentionPattern`, `cf.ext.tokens` and `cf.ext.local` stand below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pluggy

from colofunc.ops.kernels import Kernel
from colofunc.plugins.hints import LibraryHint
from colofunc.program.pipeline_schedule import Schedule

hookspec = pluggy.HookspecMarker("colofunc")
hookimpl = pluggy.HookimplMarker("colofunc")


@hookspec
def colofunc_rules() -> Mapping[str, Callable[..., Any]]:
    """Operator name ("aten.mm.default", "mylib.op") -> `rule(call) -> cf.ext.Rule | None`.

    A rule is an einops pattern bound to one call; build it with
    `cf.ext.pattern("m k, k n -> m n", reduce={"k": "sum"})`, which is such a function, or from the call's shapes. None:
    this call runs replicated. A rule for an operator that has one already is a clash: add strategies to that operator
    instead.
    """
    raise NotImplementedError


@hookspec
def colofunc_strategies() -> Mapping[str, Callable[..., Any]]:
    """Operator name -> `strategies(call, mesh) -> iterable of cf.Strategy`, added to those of the operator's rule.

    `strategies(call, mesh, rule)` is given that rule (`cf.ext.Rule`, None where it has none), which `cf.ext.ways` needs
    where the rule is of a plugin that is given by hand, and not installed.

    A strategy with `local=` carries its own local code, written with torch and `cf.collectives`. Several plugins may
    add strategies to the same operator: they are alternatives, and cost decides.
    """
    raise NotImplementedError


@hookspec
def colofunc_plans() -> Mapping[str, Callable[..., Any]]:
    """Plan name ("zero", "tensor", ...) -> constructor. The plan is what `cf.shard(step, mesh, plan)` takes.

    `cf.configure` calls it by name, with the options that its signature says. A constructor under several names, such
    as what other frameworks call the same, is one plan, which goes by the name of the function.
    """
    raise NotImplementedError


@hookspec
def colofunc_candidate_plans() -> Mapping[str, Callable[..., Any]]:
    """Name -> `make(axes)`, a plan that speaks for just these mesh axes, or None where it cannot.

    Of axes that no plan of the user names, these are counted beside what the search finds, and the fastest that fits is
    taken: so automatic is never slower than one of them, or than one on the first axes with a later one of the table on
    the others. Those that the search takes to be much slower are not counted, and of programs of more than 1,000
    operators only what the search finds is.
    """
    raise NotImplementedError


@hookspec
def colofunc_memory_policies() -> Mapping[str, Any]:
    """Policy name -> `cf.ext.MemoryPolicy`, or a constructor of one, for `cf.offload(step, policy=name)`.

    A constructor is called without options for a name alone; `cf.configure` gives it options,
    `policy: {name: {option: 2}}`, as its signature says.
    """
    raise NotImplementedError


@hookspec
def colofunc_schedules() -> Mapping[str, Schedule]:
    """Schedule name ("1f1b", "zb-h1", ...) -> `cf.ext.Schedule`, for `cf.pipeline(step, schedule=name)`.

    A schedule is a function that gives a table of actions, `cf.ext.ActionTable`, and says how many stages a rank has
    and which. The table is checked each time that it is made.
    """
    raise NotImplementedError


@hookspec
def colofunc_kernels() -> Iterable[Kernel]:
    """`cf.ext.Kernel(operator name, device type, guard, cost_s, workspace_bytes, fn)`: quicker ways to compute an
    operator on a device.

    A call gets the cheapest kernel whose `guard(call)` agrees, else the operator's own implementation. `call["name"]`
    is an argument, a tensor as its shape and dtype: a guard sees no values, because a device would have to be waited
    for. The plan counts `cost_s(call, rates)` seconds and `workspace_bytes(call)` of device memory where it is made for
    such a device, and `fn` takes the operator's arguments, all of them by position. Several plugins may give kernels
    for the same operator.
    """
    raise NotImplementedError


@hookspec
def colofunc_passes() -> Mapping[str, Callable[..., Any]]:
    """Pass name -> `pass(program, mesh) -> Program`, run on the local program in the order of their names.

    For every step. What a step asks for is a transform.
    """
    raise NotImplementedError


@hookspec
def colofunc_transforms() -> Mapping[str, Any]:
    """Transform name -> a whole transform: `transform(step=None, **options)`, which `cf.configure` calls by name.

    It gives `cf.ext.stage(step, cf.ext.Transform(name, options, ...))`: a record with some of six hooks, each from a
    `cf.ext.Build` to a `cf.ext.Build`.
    """
    raise NotImplementedError


@hookspec
def colofunc_quantizers() -> Mapping[str, Any]:
    """Scheme name -> `cf.ext.Quantizer(name, form=..., quantize=...)`, for `cf.quantize(step, name)`.

    `form` is how a weight is kept and multiplied with: "int8", "fp8", "fp8_e5m2", "fp8_g128", "int4", "nf4", "nf4_g64",
    "mxfp8" or "nvfp4"; `quantize(weight)` chooses the numbers of a matrix (o, i), and gives the parts of that format by
    name (`{"data": ..., "scale": ...}`). A row's result may depend on this row only, and with `by_largest=True` on max
    |w| of the whole weight, which is its second argument then.

    `outliers=6.0` rounds inputs of linear layers to int8 too, row by row, but for those of this size and more;
    `math.inf` rounds all of them, None (the default) none. `float8_inputs=True` rounds them to float8 (e4m3) and
    multiplies in float8, of the formats "fp8" and "fp8_g128" only: with a scale of each row, or of each 128 columns of
    it.

    `input_scale(blocks)` is for schemes that scale columns before they are rounded: it is given all rows of a weight in
    blocks (some, i), float32 or float64, and returns (i,) float32, finite and above 0. Columns are multiplied by it in
    front of `quantize`, and layers divide their inputs by it.

    `by_name(name)` is for schemes that have measured something of each weight: it returns the `cf.ext.Quantizer` for
    the weight of this name, of the same name and form, whose `quantize`, `outliers`, `float8_inputs` and `input_scale`
    count for this weight.
    """
    raise NotImplementedError


@hookspec
def colofunc_packed_layouts() -> Mapping[str, Any]:
    """Layout name -> `cf.ext.packed_tensors.PackedLayout`: how another library saves quantized weights.

    For `cf.load` and `cf.save_pretrained`. Plugins that are installed are asked; the layouts of this project come
    first, and by the same hook. What a layout says of itself is written at `PackedLayout`: by which names its tensors
    are known (`marks`, `needs`, `keys`), whether some tensors are such a weight (`claims`), the weight that they are in
    one of the formats of `colofunc_quantizers` (`read`), and back (`write`, `config`). `tensors.matrix(key, dtypes)`
    checks a stored tensor, `packed_tensors.part(shape, dtype, read)` is a part of the weight that is read by boxes, and
    `packed_tensors.boxed(entry, box)` reads one. Two layouts of plugins that claim one weight are a PluginError.
    """
    raise NotImplementedError


@hookspec
def colofunc_model_libraries() -> Mapping[str, Any]:
    """Library name -> `cf.ext.libraries.Library`: how a library that models come from stores them.

    For `cf.load(folder, model=...)` and `cf.save_pretrained`. The record says by which modules it is known (`owns`,
    which `cf.ext.libraries.has_base("library.module", "Class")` makes without importing the library), and what differs
    from a plain module: names in files (`has_name`, `entries`, `reported`), what is written (`groups`, `to_stored`,
    `stem`), the configuration (`save_config`), and the files of adapters alone (`adapters`, a
    `cf.ext.libraries.AdapterFormat`). This project's libraries come by the same hook, and are asked
    which modules are theirs after those of plugins, whose models may be subclasses of models of these. Two libraries of
    plugins that own one module are a PluginError, and so are two formats of adapters that are known by one file. `cf.lora`
    asks which layers are linear ones whose weight is (in, out) (`has_transposed_weight`).
    """
    raise NotImplementedError


@hookspec
def colofunc_hints() -> Mapping[str, Sequence[LibraryHint]]:
    """Library name -> `cf.ext.LibraryHint` records: what users of a library can write where a step cannot go on.

    Errors say what they are about, and hints are for the errors of one subject: "experts" (a step has none that are
    known), "attention" (likewise), "tokens" (as many as do not divide), "values" (Python asks for values that a step
    does not have), "checkpoint" (torch's reentrant one). Hints with a `file`, the end of a path, hold only where code
    of that file was running. They stand below the error, as notes.
    """
    raise NotImplementedError


@hookspec
def colofunc_topologies() -> Mapping[str, Any]:
    """Topology name -> `cf.Topology`, for `cf.Mesh(topology=cf.topology(name))`."""
    raise NotImplementedError


HOOKS = (
    "colofunc_rules colofunc_strategies colofunc_plans colofunc_candidate_plans colofunc_memory_policies colofunc_schedules "
    "colofunc_kernels colofunc_passes colofunc_transforms colofunc_quantizers colofunc_packed_layouts colofunc_model_libraries "
    "colofunc_hints colofunc_topologies"
).split()
