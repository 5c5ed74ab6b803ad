"""The plugin door: found by entry point or by hand, merged, proven; every mistake names the plugin."""

import importlib.util
import json
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import ring, tensor

import colofunc as cf
from colofunc.integrations import formats
from colofunc.planner.wishes import propagation
from colofunc.planner.wishes.wish import wishes_of
from colofunc.plugins import build_registry
from colofunc.plugins.hookspecs import HOOKS
from colofunc.program.tracing.trace import trace
from colofunc.testing import check_strategies, sample

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "scan_plugin"
MESH = cf.Mesh(tp=4, topology="4xa100-80g")
LONG = 1 << 22


def accumulate(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).cumsum(0).exp()


def chosen(step: Any) -> str:
    low = step.lower(cf.abstract((LONG,)))
    return str(low.plan.find("aten.cumsum.default")[0].strategy)


@pytest.fixture(scope="module")
def scan() -> Iterator[Any]:
    """The example's module, as `plugins=[module]` takes it."""
    spec = importlib.util.spec_from_file_location("colofunc_scan", EXAMPLE / "colofunc_scan.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


# ---- the example ----

PROGRAM = """
import json
import torch
import colofunc as cf
from colofunc.plugins import build_registry

step = cf.shard(lambda x: (x * 2).cumsum(0).exp(), cf.Mesh(tp=4, topology="4xa100-80g"))
x = -torch.rand(64, dtype=torch.float64)
low = step.lower(cf.abstract(({n},)))
worst = float((step(x).full() - (x * 2).cumsum(0).exp()).abs().max())
print(json.dumps([build_registry().plugins, low.plan.find("aten.cumsum.default")[0].strategy, worst]))
"""


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip")
@pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="needs setuptools")
def test_the_example_is_installed_and_found(tmp_path: Path, subprocess_env: dict[str, str]) -> None:
    """Built from a copy, without network, into a directory of its own."""
    source, target = tmp_path / "scan_plugin", tmp_path / "site"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run([*pip, "--target", str(target), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    env = {**subprocess_env, "PYTHONPATH": f"{subprocess_env['PYTHONPATH']}:{target}"}
    done = subprocess.run([sys.executable, "-c", PROGRAM.replace("{n}", str(LONG))], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    plugins, strategy, worst = json.loads(done.stdout.splitlines()[-1])
    assert {"scan", "decayed"} <= set(plugins) and strategy == "{tp: scan}"  # without it: the next test
    assert worst < 1e-12


def test_a_module_by_hand_changes_what_is_chosen(scan: Any) -> None:
    assert chosen(cf.shard(accumulate, MESH)) != "{tp: scan}"
    step = cf.shard(accumulate, MESH, plugins=[scan])
    assert chosen(step) == "{tp: scan}"
    x = -torch.rand(64, dtype=torch.float64)
    wish = cf.shard(accumulate, MESH, in_specs="(tp b)", out_specs="(tp b)", plugins=[scan])
    low = wish.lower(x)
    assert low.plan.find("aten.cumsum.default")[0].strategy == "{tp: scan}"
    assert low.cost().calls["all_gather", "tp"] == 1
    torch.testing.assert_close(wish(x).full(), accumulate(x), rtol=1e-13, atol=0)


def test_the_example_is_proven(scan: Any) -> None:
    proved = check_strategies(scan, "aten.cumsum.default")
    assert {(p.mesh, p.strategy) for p in proved} >= {("a=3", "{a: scan}"), ("a=2 b=2", "{b: scan}")}
    assert max(p.worst for p in proved) < 1e-12
    check_strategies(scan, torch.ops.aten.cumsum.default, sample(torch.randn(2, 12, 5), 1))


@contextmanager
def on_path(folder: Path, module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of this folder as a plugin, on the path with an entry point as pip writes it."""
    about = folder / f"{module}-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text(f"[colofunc]\n{name} = {module}\n")
    monkeypatch.syspath_prepend(folder)
    build_registry.cache_clear()
    assert name in build_registry().plugins
    try:
        yield sys.modules[module]
    finally:
        build_registry.cache_clear()
        del sys.modules[module]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's module, installed."""
    shutil.copy(EXAMPLE / "colofunc_scan.py", tmp_path)
    with on_path(tmp_path, "colofunc_scan", "scan", monkeypatch) as module:
        yield module


def test_an_installed_plugin_is_proven_as_one_by_hand(installed: Any) -> None:
    proved = check_strategies(installed, "aten.cumsum.default")
    assert {p.strategy for p in proved} == {"{a: scan}", "{b: scan}"}
    idle = plugin("other", colofunc_strategies=lambda: {"aten.cumsum.default": lambda call, mesh: ()})
    with pytest.raises(cf.CheckError, match="other gives no strategy of aten"):
        check_strategies(idle, "aten.cumsum.default")


def test_a_broken_strategy_is_caught(scan: Any) -> None:
    def forgets(call: Any, mesh: cf.Mesh) -> Any:
        for right in scan.scan(call, mesh):
            wrong = lambda shard, *, mesh: shard.cumsum(call.arg(1, "dim"))  # noqa: E731
            yield cf.Strategy(right.name, right.ins, right.outs, right.cost, wrong)

    with pytest.raises(cf.CheckError, match=r"aten.cumsum.default \{a: scan\} on a=2"):
        check_strategies(plugin("broken", colofunc_strategies=lambda: {"aten.cumsum.default": forgets}), "aten.cumsum.default")


# ---- other hooks ----


def plugin(name: str, **hooks: Any) -> Any:
    """A module with these functions as hooks."""
    module = types.ModuleType(name)
    for hook, fn in hooks.items():
        setattr(module, hook, cf.hookimpl(fn))
    return module


def test_a_rule_for_an_operator_of_ones_own() -> None:
    @torch.library.custom_op("testplugin::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @double.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    rules = plugin("doubles", colofunc_rules=lambda: {"testplugin.double": cf.ext.pattern("b d -> b d")})
    fn, x = (lambda x: double(x) + 1), torch.randn(8, 4)
    mesh = cf.Mesh(dp=2, tp=2)
    without, given = (cf.shard(fn, mesh, in_specs="(dp b) (tp d)", plugins=p) for p in ((), [rules]))
    assert without.lower(x).coverage().fallbacks == ("testplugin.double",)
    low = given.lower(x)
    assert low.coverage().fallbacks == ()
    assert sum(low.cost().calls.values()) == 0
    assert torch.equal(given(x).full(), fn(x))
    assert torch.equal(without(x).full(), fn(x))


@torch.library.custom_op("testplugin::bend", mutates_args=())
def bend(x: torch.Tensor) -> torch.Tensor:
    return x.relu()


@bend.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("testplugin::row_max", mutates_args=())
def row_max(x: torch.Tensor) -> torch.Tensor:
    return x.amax(-1)


@row_max.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[:-1])


@pytest.mark.parametrize("key", ["testplugin.row_max", "testplugin.row_max.default"])
def test_a_rule_is_that_of_the_plugin_that_is_asked(key: str) -> None:
    """Of two that were tried one after the other, as an author does; by either name of the operator."""
    right, wrong = (
        plugin(how, colofunc_rules=lambda how=how: {key: cf.ext.pattern("b i -> b", reduce={"i": how})}) for how in ("max", "sum")
    )
    x = torch.randn(6, 6, dtype=torch.float64)
    for _ in range(2):
        assert "{a: i}" in {p.strategy for p in check_strategies(right, key, sample(x))}
        with pytest.raises(cf.CheckError, match=r"row_max \{a: i\} on a=2, result 0 .* differs"):
            check_strategies(wrong, key, sample(x))
    step = cf.shard(row_max, cf.Mesh(dp=2), in_specs="b (dp i)", plugins=[right])
    low = step.lower(x)
    assert low.coverage().fallbacks == () and torch.equal(step(x).full(), x.amax(-1))


def test_strategies_that_fail_name_their_function() -> None:
    def unfinished(call: Any, mesh: cf.Mesh) -> Any:
        return call.nothing

    for gives, words in ((unfinished, "unfinished failed: AttributeError"), (lambda call, mesh: None, "failed: TypeError")):
        fails = plugin("fails", colofunc_strategies=lambda gives=gives: {"testplugin.row_max": gives})
        with pytest.raises(cf.PluginError, match=rf"strategies of testplugin.row_max from .*{words}.*; yield cf.Strategy records"):
            cf.shard(row_max, cf.Mesh(dp=2), plugins=[fails]).lower(torch.ones(4, 4))
    with pytest.raises(cf.PluginError, match="'b i' of a rule has no two sides; write operands -> results"):
        check_strategies(plugin("half", colofunc_rules=lambda: {"testplugin.row_max": cf.ext.pattern("b i")}), "testplugin.row_max")


def test_named_plans_see_the_rules_of_plugins_by_hand() -> None:
    def step(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return F.linear(bend(F.linear(x, p["a"])), p["b"])

    rules = plugin("bends", colofunc_rules=lambda: {"testplugin.bend": cf.ext.pattern("b d -> b d")})
    params, x = {"a": torch.randn(8, 4), "b": torch.randn(4, 8)}, torch.randn(4, 4)
    specs = {}
    for given in ((), (rules,)):
        staged = cf.shard(step, cf.Mesh(tp=2), tensor("1d", "tp"), plugins=given)
        specs[given] = [staged.lower(params, x).plan.leaf(f"p.{name}").spec for name in "ab"]
        torch.testing.assert_close(staged(params, x).full(), step(params, x))
    assert specs[rules,] == ["(tp a) b", "a (tp b)"]  # a column and row pair
    assert specs[()] != specs[rules,]  # what nobody knows ends a pair


def maxima(call: Any, mesh: cf.Mesh, rule: Any) -> Any:
    """The largest of a row whose columns lie on `tp`, by an all-reduce: a way to work that `row_max` has by hand."""
    if "tp" not in mesh:
        return

    def local(x: torch.Tensor, *, mesh: cf.Mesh) -> torch.Tensor:
        return cf.collectives.all_reduce(x.amax(-1), "tp", mesh, "max")

    for way in cf.ext.ways(call, mesh, ins=[{"i": "tp i"}], outs=[{}], rule=rule):
        yield way.with_pattern([("tp", "mine")], local)


ROW_MAX_BY_HAND = plugin(
    "rows_by_hand",
    colofunc_rules=lambda: {"testplugin.row_max": cf.ext.pattern("b [i] -> b")},
    colofunc_strategies=lambda: {"testplugin.row_max": maxima},
)


def test_strategies_are_given_the_rule_of_a_plugin_by_hand_for_ways() -> None:
    """The rule says where the other axis may lie: rows are on `dp` beside the pattern."""
    wish = cf.ext.Wish("*", "{tp: mine, dp: b}", targets=("testplugin.row_max",))
    step = cf.shard(row_max, cf.Mesh(dp=2, tp=2), wish, plugins=[ROW_MAX_BY_HAND])
    x = torch.randn(8, 8, dtype=torch.float64)
    assert step.lower(x).plan.find("testplugin.row_max")[0].strategy == "{tp: mine, dp: b}"
    assert torch.equal(step(x).full(), x.amax(-1))


def test_layouts_are_followed_through_strategies_of_a_plugin_by_hand() -> None:
    mesh = cf.Mesh(dp=2, tp=2)
    program = trace(lambda x: row_max(x) * 2, (torch.ones(8, 8),)).program
    seeds = {program.inputs[0]: "(dp b) (tp i)"}
    known = cf.ext.Rules(program, mesh, build_registry((ROW_MAX_BY_HAND,)))
    assert cf.ext.follow(program, mesh, seeds, known).strategies[0].name == "{tp: mine, dp: b}"
    assert not cf.ext.follow(program, mesh, seeds).strategies


@attrs.frozen
class BringsItsRule:
    """A named plan that is a plugin too: it has the rule of the operator that it looks at."""

    axes: tuple[str, ...] = ("tp",)
    name: str = "brings"

    @cf.hookimpl
    def colofunc_rules(self) -> Any:
        return {"testplugin.bend": cf.ext.pattern("b d -> b d")}

    def wishes(self, program: Any, mesh: cf.Mesh, rules: cf.ext.Rules) -> list[cf.ext.Wish]:
        (node,) = (node for node in program.nodes if node.target.startswith("testplugin.bend"))
        assert rules.rule(node) is not None, "its own"
        return [cf.ext.Wish("*", "{tp: d}", targets=(node.target,))]


def test_a_plan_that_brings_rules_is_told_them() -> None:
    step = cf.shard(bend, cf.Mesh(tp=2), BringsItsRule())
    low = step.lower(torch.ones(4, 4))
    assert low.coverage().fallbacks == () and low.plan.find("testplugin.bend")[0].strategy == "{tp: d}"


BENDS = """
import colofunc as cf

@cf.hookimpl
def colofunc_rules():
    return {"testplugin.bend": cf.ext.pattern("b d -> b d")}
"""


def test_eager_operators_go_by_the_rules_of_installed_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, x = cf.Mesh(dp=2, tp=2), torch.randn(10, 6)
    whole = bend(cf.distribute(x.T.contiguous(), "(dp d) (tp b)", mesh))
    (tmp_path / "bends.py").write_text(BENDS)
    with on_path(tmp_path, "bends", "bends", monkeypatch):
        split = bend(cf.distribute(x, "(dp b) (tp d)", mesh))
    assert torch.equal(split.full(), x.relu()) and torch.equal(whole.full(), x.T.relu())
    assert (str(split.spec), str(whole.spec)) == ("(dp a) (tp b)", "a b")


HINTS = """
import colofunc as cf

@cf.hookimpl
def colofunc_hints():
    here = cf.ext.LibraryHint("values", "Layer(checked=False)", __file__)
    return {"layers": [here], "transformers": [cf.ext.LibraryHint("values", "of every one", "no such file")]}

def checked(x):
    return x if x.min() > 0 else -x
"""


def test_errors_have_the_hints_of_libraries_whose_code_was_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "layers.py").write_text(HINTS)
    with on_path(tmp_path, "layers", "layers", monkeypatch) as layers:
        with pytest.raises(cf.TraceError) as inside:
            cf.shard(layers.checked, cf.Mesh()).lower(torch.ones(3))
        with pytest.raises(cf.TraceError) as outside:
            cf.shard(lambda x: x if x.min() > 0 else -x, cf.Mesh()).lower(torch.ones(3))
    assert inside.value.__notes__ == ["layers: Layer(checked=False)"]
    assert not hasattr(outside.value, "__notes__")


def test_errors_have_the_hints_of_plugins_that_a_step_is_given() -> None:
    hints = plugin("hints", colofunc_hints=lambda: {"layers": [cf.ext.LibraryHint("values", "Layer(checked=False)")]})
    with pytest.raises(cf.TraceError) as found:
        cf.shard(lambda x: x if x.min() > 0 else -x, cf.Mesh(), plugins=[hints]).lower(torch.ones(3))
    assert found.value.__notes__ == ["layers: Layer(checked=False)"]


ASKING = [tensor("1d", "tp"), tensor("2d", ("dp", "tp")), tensor("auto", "tp"), ring("tp")]


@pytest.mark.parametrize("plan", ASKING, ids=lambda plan: plan.name)
def test_named_plans_ask_the_rules_that_they_are_given(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = cf.Mesh(dp=2, tp=2)
    step = cf.testing.programs.attention_block(batch=4)
    program = trace(step[0], step[1:]).program
    rules = cf.ext.Rules(program, mesh)
    monkeypatch.setattr(propagation, "build_registry", lambda plugins: pytest.fail("a plan made rules of its own"))
    assert wishes_of(plan, program, mesh=mesh, rules=rules)


def test_every_hook_is_merged() -> None:
    tables: dict[str, Any] = {hook: {f"{hook}.mine": len} for hook in HOOKS}
    kernel = cf.ext.Kernel("aten.mm.default", "cuda", len, len, len, len)
    tables["colofunc_kernels"] = [kernel]
    schedule = cf.ext.Schedule("mine", len)  # type: ignore[arg-type]
    tables["colofunc_schedules"] = {"mine": schedule}
    tables["colofunc_quantizers"] = {"mine": cf.ext.Quantizer("mine", form="int8", quantize=len)}
    tables["colofunc_topologies"] = {"mine": cf.topology("ideal")}
    layout, library = formats.AWQ, formats.PEFT
    tables["colofunc_packed_layouts"] = {"mine": layout}
    tables["colofunc_model_libraries"] = {"mine": library}
    tables["colofunc_hints"] = {"mine": [cf.ext.LibraryHint("experts", "more of them")]}
    registry = build_registry((plugin("all", **{h: (lambda t=t: t) for h, t in tables.items()}),))
    assert registry.kernels["aten.mm.default", "cuda"] == (kernel,)
    assert registry.kernels["colofunc.attention", "cuda"] == build_registry().kernels["colofunc.attention", "cuda"]
    assert registry.plans["colofunc_plans.mine"] is len
    assert registry.schedules["mine"] is schedule
    assert registry.packed_layouts["mine"] is layout
    assert registry.model_libraries["mine"] is library
    assert registry.hints["mine"] == tables["colofunc_hints"]["mine"]
    assert registry.topologies["mine"] is tables["colofunc_topologies"]["mine"]
    assert registry.quantizers["mine"].form == "int8" and "nf4" in registry.quantizers
    assert registry.strategies["colofunc_strategies.mine"] == (len,)
    assert "all" in registry.plugins
    with pytest.raises(TypeError):
        registry.plans["x"] = len  # type: ignore[index]


def test_strategies_of_two_plugins_add_up(scan: Any) -> None:
    again = plugin("again", colofunc_strategies=lambda: {"aten.cumsum.default": scan.scan})
    registry = build_registry((scan, again))
    assert registry.strategies["aten.cumsum.default"] == (scan.scan, scan.scan)


# ---- mistakes ----


def refuses(message: str, *plugins: Any) -> None:
    with pytest.raises(cf.PluginError) as error:
        cf.shard(accumulate, MESH, plugins=plugins)(torch.randn(8))
    assert str(error.value) == message


def test_misspelt_hook() -> None:
    refuses(
        "plugin 'typo' implements 'colofunc_strategys', which is no hook; "
        "did you mean 'colofunc_strategies' or 'colofunc_rules' or 'colofunc_transforms'?",
        plugin("typo", colofunc_strategys=nothing),
    )


def test_clashes() -> None:
    a, b = (plugin(name, colofunc_plans=lambda: {"mine": len}) for name in ("first", "second"))
    refuses("colofunc_plans: 'mine' comes from both 'first' and 'second'; rename it in one of them", a, b)
    rule = plugin("late", colofunc_rules=lambda: {"aten.mm.default": cf.ext.pattern("m k, k n -> m n")})
    refuses("colofunc_rules: 'aten.mm.default' comes from both 'colofunc' and 'late'; rename it in one of them", rule)


def test_wrong_types() -> None:
    refuses("colofunc_rules of plugin 'lists' returned list; return a dict", plugin("lists", colofunc_rules=no_dict))
    refuses(
        "colofunc_strategies of plugin 'texts': the value of 'aten.cumsum.default' is '{tp: d}', which cannot be called",
        plugin("texts", colofunc_strategies=lambda: {"aten.cumsum.default": "{tp: d}"}),
    )
    refuses(
        "colofunc_kernels of plugin 'keys' gave 'aten.mm.default'; give cf.ext.Kernel records",
        plugin("keys", colofunc_kernels=lambda: {"aten.mm.default": len}),
    )
    refuses(
        "colofunc_rules of plugin 'keys' has key ('aten.mm.default', 'cuda'); see the hook's documentation for its form",
        plugin("keys", colofunc_rules=lambda: {("aten.mm.default", "cuda"): len}),
    )
    refuses(
        "colofunc_schedules of plugin 'loose': the value of 'mine' is <built-in function len>; give a cf.ext.Schedule",
        plugin("loose", colofunc_schedules=lambda: {"mine": len}),
    )
    refuses(
        "colofunc_transforms of plugin 'sixteen': the value of 't16' is 16, which cannot be called",
        plugin("sixteen", colofunc_transforms=lambda: {"t16": 16}),
    )
    refuses(
        "colofunc_memory_policies of plugin 'five': the value of 'mine' is 5; give a cf.ext.MemoryPolicy or a constructor of one",
        plugin("five", colofunc_memory_policies=lambda: {"mine": 5}),
    )
    refuses("plugin 'empty' implements no hook; give a module (or object) with functions marked @cf.hookimpl", plugin("empty"))


@pytest.mark.parametrize("hook", HOOKS)
def test_a_value_of_the_wrong_type_names_the_plugin_whatever_the_hook(hook: str) -> None:
    with pytest.raises(cf.PluginError, match=f"{hook} of plugin 'five'"):
        build_registry((plugin("five", **{hook: lambda: {"mine": 5}}),))


def nothing() -> Any:
    return {}


def no_dict() -> Any:
    return []


def fails() -> Any:
    raise KeyError("x")


def words(call: Any, mesh: cf.Mesh) -> list[str]:
    return ["{tp: d}"]


def test_failures_inside_a_plugin_name_it() -> None:
    refuses("colofunc_rules of plugin 'bad' failed: KeyError: 'x'", plugin("bad", colofunc_rules=fails))
    refuses(
        f"strategies of aten.cumsum.default from {__name__}.words gave '{{tp: d}}'; yield cf.Strategy records",
        plugin("wordy", colofunc_strategies=lambda: {"aten.cumsum.default": words}),
    )


def test_a_plan_is_called_alike_in_every_process() -> None:
    """Strategies are asked in the order of these names, and kept plans are found by them."""

    @attrs.frozen
    class Mine:
        axes: tuple[str, ...]

        @cf.hookimpl
        def colofunc_strategies(self) -> Any:
            return {}

    assert repr(Mine(("a",))) in build_registry((Mine(("a",)),)).plugins


# ---- what code of a plugin raises, or gives ----


def breaks(*args: Any, **options: Any) -> Any:
    raise ZeroDivisionError("of mine")


def plugin_with(hook: str, value: Any) -> Any:
    """An object of a plain class with one hook."""
    return type("Mine", (), {hook: cf.hookimpl(lambda self: value)})()


def sums(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.test_plugins.sums(x)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def operator_of_others() -> Iterator[None]:
    """An operator for which nobody has a rule."""
    library = torch.library.Library("test_plugins", "DEF")
    library.define("sums(Tensor x) -> Tensor")
    library.impl("sums", lambda x: x.cumsum(-1), "CompositeExplicitAutograd")
    torch.library.register_fake("test_plugins::sums", torch.empty_like, lib=library)
    yield
    library._destroy()


KERNEL = {"guard": lambda call: True, "cost_s": lambda call, rates: 1e-9, "workspace_bytes": lambda call: 0, "fn": sums}
RULE, ON_CPU = r"the rule of test_plugins\.sums from ", r"of the kernel for test_plugins\.sums on cpu from "


def kernels(**broken: Any) -> list[cf.ext.Kernel]:
    return [cf.ext.Kernel("test_plugins.sums", "cpu", **{**KERNEL, **broken})]


@pytest.mark.parametrize(
    ("hook", "value", "said"),
    [
        ("rules", {"test_plugins.sums.default": breaks}, rf"{RULE}.*breaks failed: ZeroDivisionError: of mine\. Try: "),
        ("rules", {"test_plugins.sums.default": lambda call: "b"}, rf"{RULE}.* gave 'b', which is no cf.ext.Rule\. Try: "),
        ("kernels", kernels(guard=breaks), f"guard {ON_CPU}.* failed.* Try: "),
        ("kernels", kernels(cost_s=breaks), f"cost_s {ON_CPU}.* failed.* Try: "),
        ("passes", {"mine": breaks}, r"the pass 'mine' from .*breaks failed: ZeroDivisionError: of mine\. Try: "),
        ("passes", {"mine": lambda program, mesh: None}, r"the pass 'mine' from .* gave None, which is no program\. Try: "),
        ("passes", {"in_place": lambda program, mesh: program}, "the pass 'in_place' from .* has the name .* Try: 'my_in_place'"),
    ],
)
def test_a_fault_of_a_plugin_names_it_and_its_hook(hook: str, value: Any, said: str, operator_of_others: None) -> None:
    step = cf.shard(sums, cf.Mesh(dp=2), plugins=[plugin_with(f"colofunc_{hook}", value)])
    with pytest.raises(cf.PluginError, match=f"colofunc_{hook}: {said}"):
        step(torch.ones(4, 4))


@pytest.mark.parametrize("value", [breaks, lambda: 3])
def test_a_fault_of_a_memory_policy_names_it(value: Any) -> None:
    plugin = plugin_with("colofunc_memory_policies", {"mine": value})
    with pytest.raises(cf.PluginError, match=r"colofunc_memory_policies: the policy 'mine' from .* (failed|gave 3).* Try: a constructor"):
        cf.offload(cf.shard(lambda x: x * 2, cf.Mesh(dp=2), plugins=[plugin]), policy="mine")(torch.ones(4))


@pytest.mark.parametrize(
    ("quantize", "said"),
    [
        (breaks, "failed: ZeroDivisionError"),
        (lambda w: {"data": w}, "gave 'data'"),
        (lambda w: {"data": w, "scale": 1}, "which are no tensors"),
    ],
)
def test_a_fault_of_a_quantizer_names_it(quantize: Any, said: str) -> None:
    mine = cf.ext.Quantizer("mine", form="int8", quantize=quantize)
    step = cf.quantize(lambda w, x: F.linear(x, w["a.weight"]), "mine", plugins=[plugin_with("colofunc_quantizers", {"mine": mine})])
    wanted = "a dict of the parts of 'int8': 'data', 'scale'"
    with pytest.raises(cf.PluginError, match=f"quantize of Quantizer 'mine' .*{said}.* Try: {wanted}"):
        step({"a.weight": torch.ones(4, 4)}, torch.ones(2, 4))


@pytest.mark.parametrize(
    ("wishes", "said"), [(breaks, "failed: ZeroDivisionError"), (lambda *_: None, "failed: TypeError"), (lambda *_: ["a"], "gave 'a'")]
)
def test_a_fault_of_a_plan_names_it(wishes: Any, said: str) -> None:
    plan = type("Mine", (), {"axes": ("dp",), "name": "mine", "wishes": wishes})()
    with pytest.raises(cf.PluginError, match=f"mine: wishes of the plan Mine {said}.* Try: a list of cf.ext.Wish records"):
        cf.shard(lambda x: x * 2, cf.Mesh(dp=2), plan)(torch.ones(4))


def test_a_fault_of_a_schedule_names_it() -> None:
    mine = attrs.evolve(cf.ext.schedule_named("1f1b"), name="mine", make=breaks)
    with pytest.raises(cf.PluginError, match=r"colofunc_schedules: the table of the schedule 'mine' failed: ZeroDivisionError.* Try: "):
        mine.table(2, 4)


def test_errors_of_this_project_pass_through_a_plugin() -> None:
    def refuses(program: Any, mesh: cf.Mesh) -> Any:
        raise cf.PlanError("mine cannot do this")

    with pytest.raises(cf.PlanError, match="mine cannot do this"):
        cf.shard(lambda x: x * 2, cf.Mesh(dp=2), plugins=[plugin_with("colofunc_passes", {"mine": refuses})])(torch.ones(4))


@pytest.mark.parametrize("plugin", [types.SimpleNamespace(), attrs.make_class("Mine", ["x"])(1), {}])
def test_a_plugin_that_cannot_be_hashed_is_an_error(plugin: Any) -> None:
    said = f"a plugin of type {type(plugin).__name__} cannot be hashed.* Try: a module; an object of a plain class"
    with pytest.raises(cf.PluginError, match=f"cf.shard: {said}"):
        cf.shard(lambda x: x, cf.Mesh(), plugins=[plugin])
    with pytest.raises(cf.PluginError, match=f"cf.quantize: {said}"):
        cf.quantize(lambda x: x, "int8", plugins=[plugin])
    with pytest.raises(cf.PluginError, match=f"cf.configure: {said}"):
        cf.configure({}, plugins=[plugin])
    with pytest.raises(cf.PluginError, match=f"cf.topology: {said}"):
        cf.topology("ideal", plugins=(plugin,))


def test_one_plugin_in_place_of_a_list_is_an_error() -> None:
    with pytest.raises(cf.PluginError, match=r"cf.shard: plugins=<.*> is no list of plugins\. Try: plugins=\[\.\.\.\]"):
        cf.shard(lambda x: x, cf.Mesh(), plugins=plugin_with("colofunc_passes", {}))  # type: ignore[arg-type]


def test_an_object_without_a_text_of_its_own_goes_by_its_type() -> None:
    with pytest.raises(cf.PluginError, match=r"colofunc_rules of plugin '[\w.]*Mine': the value of 'a.b' is 3"):
        build_registry((plugin_with("colofunc_rules", {"a.b": 3}),))
    assert any(name.endswith(".Mine") for name in build_registry((plugin_with("colofunc_rules", {}),)).plugins)
