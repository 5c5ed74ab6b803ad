"""Chains from YAML, JSON and dicts: what they build, and that every mistake has its line."""

import math
import re
import sys
import types
from pathlib import Path
from typing import Any, Literal

import attrs
import colofunc_plugins
import pytest
import torch

import colofunc as cf


@attrs.frozen
class Lines:
    """A named plan, which says its axes."""

    axes: tuple[str, ...]

    def wishes(self, program: Any, mesh: cf.Mesh) -> list[Any]:
        raise NotImplementedError


@attrs.frozen
class Grid:
    """A named plan that knows how many ranks its axes have."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...] | None

    def wishes(self, program: Any, mesh: cf.Mesh) -> list[Any]:
        raise NotImplementedError


def rows(axis: str, where: str = "*.weight", level: Literal[1, 2] = 1) -> Any:
    if where == "":
        raise ValueError("rows: where is empty. Try: a glob")
    return {where: f"({axis} o) ..."}


@attrs.frozen
class Recipe:
    scale: float
    names: tuple[str, ...] = ()


def scaled(step: Any, by: float | Recipe = 2.0) -> Any:
    calls.append(by)
    return step


calls: list[Any] = []
PLANS = {"rows": rows, "lines": Lines}


@pytest.fixture
def plugin() -> Any:
    module = types.ModuleType("rows_plugin")
    module.colofunc_plans = cf.hookimpl(specname="colofunc_plans")(lambda: PLANS)
    module.colofunc_transforms = cf.hookimpl(specname="colofunc_transforms")(lambda: {"scaled": scaled})
    return module


def step_fn(state: dict[str, Any], batch: torch.Tensor) -> Any:
    loss, grads = cf.value_and_grad(lambda p: ((batch @ p["fc.weight"].T) ** 2).mean())(state)
    return {"fc.weight": state["fc.weight"] - 0.1 * grads["fc.weight"]}, loss


def example() -> tuple[dict[str, Any], torch.Tensor]:
    return {"fc.weight": torch.randn(4, 6, dtype=torch.float64)}, torch.randn(8, 6, dtype=torch.float64)


# ---- what it builds ----


def written(tmp_path: Path, text: str, name: str = "run.yaml") -> Path:
    if name.endswith("yaml"):
        pytest.importorskip("yaml", reason="needs PyYAML")
    path = tmp_path / name
    path.write_text(text)
    return path


YAML = """
# comments are fine
mesh:
  dp: 2
  tp: 2
  topology: ideal
parallel:
  - fc.weight: "(tp o) i"
shard: {auto: false, in_specs: [null, "(dp b) i"]}
"""
JSON = """{"mesh": {"axes": {"dp": 2, "tp": 2}, "topology": "ideal"},
  "parallel": {"fc.weight": "(tp o) i"},
  "shard": {"auto": false, "in_specs": [null, "(dp b) i"]}}"""


@pytest.mark.parametrize(("name", "text"), [("run.yaml", YAML), ("run.json", JSON), ("also_yaml.yaml", JSON)])
def test_a_file_is_a_chain(tmp_path: Path, name: str, text: str) -> None:
    chain = cf.configure(written(tmp_path, text, name))
    assert chain.mesh == cf.Mesh(dp=2, tp=2, topology="ideal")
    step, (state, batch) = chain.apply(step_fn), example()
    plan = step.lower(state, batch).plan
    assert "tp" in plan.leaf("state.fc.weight").spec.split(")")[0] and plan.leaf("batch").spec == "(dp a) b"
    cf.testing.check(step, state, batch)
    assert chain.text().splitlines()[1] == "parallel  fc.weight: (tp o) i"


def test_a_dict_is_a_chain_and_a_mesh_of_one_is_the_default() -> None:
    chain = cf.configure({"executor": "compiled"})
    assert chain.mesh.size == 1
    assert chain.apply(step_fn).executor == "compiled"


def test_plans_of_plugins_are_called_by_name(plugin: Any) -> None:
    state, batch = example()
    for parallel in ("rows: tp", {"rows": {"axis": "tp", "where": "fc.weight"}}, [{"rows": ["tp", "fc.weight"]}]):
        source = {"rows": "tp"} if isinstance(parallel, str) else {"parallel": parallel}
        chain = cf.configure({"mesh": {"tp": 2}, **source}, plugins=[plugin])
        assert chain.apply(step_fn).lower(state, batch).plan.leaf("state.fc.weight").spec == "(tp a) b"
        assert "rows(" in chain.text()


def grid(mode: Literal["square", "line"] = "square", axis: str = "g", *, size: int | None = None) -> Any:
    if mode == "line":
        return Lines((axis,))
    side = None if size is None else math.isqrt(size)
    if side is not None and side * side != size:
        raise ValueError(f"grid: {size} ranks are no square. Try: leave out size=")
    return Grid(("x", "y"), None if side is None else (side, side))


SIZED = {**PLANS, "grid": grid}


@pytest.fixture
def sized() -> Any:
    module = types.ModuleType("sized_plugin")
    module.colofunc_plans = cf.hookimpl(specname="colofunc_plans")(lambda: SIZED)
    return module


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("grid: {size: 4}", {"x": 2, "y": 2}),
        ("grid: {mode: line, size: 4}", {"g": 4}),
        ("grid: {size: {x: 1, y: 3}}", {"x": 1, "y": 3}),
        ("lines: {axes: [a, b], size: [2, 3]}", {"a": 2, "b": 3}),
        ("mesh: {dp: 2}\nparallel:\n  lines: {axes: [cp], size: 3}\n  grid: {size: 4}", {"dp": 2, "cp": 3, "x": 2, "y": 2}),
        ("mesh: {dp: 2, x: 2}\nparallel: [{grid: {size: 4}}]", {"dp": 2, "x": 2, "y": 2}),
        ("mesh: {views: {all: [x, y]}}\nparallel: [{grid: {size: 4}}, {lines: {axes: [all], size: 4}}]", {"x": 2, "y": 2}),
        ("sequence: {axis: cp, size: 2}", {"cp": 2}),
        ("mesh: {cp: 2}\nsequence: [cp]", {"cp": 2}),
        ("sequence_parallel: {mode: ring, axis: r, heads: u, size: [2, 3]}", {"r": 2, "u": 3}),
        ("context_parallel: {mode: ulysses, axis: u, size: 3}", {"u": 3}),
        ("parallel: {sequence: {mode: ulysses, axis: u, size: 2}, ring: {axis: r, size: 2}}", {"u": 2, "r": 2}),
    ],
)
def test_sizes_of_plans_make_the_mesh(tmp_path: Path, sized: Any, text: str, sizes: dict[str, int]) -> None:
    assert cf.configure(written(tmp_path, text), plugins=[sized, colofunc_plugins]).mesh.shape == sizes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mesh: {dp: 2, x: 3}\nparallel:\n  grid:\n    size: 4", "run.yaml:4: grid(size=4) wants 2 ranks on 'x', and Mesh(dp=2, x=3, y=2)"),
        ("grid:\n  mode: square\n  size: 5", "run.yaml:3: grid: grid: 5 ranks are no square"),
        ("grid:\n  size: two", "run.yaml:2: grid: size is 'two'; allowed: a whole number"),
        ("grid:\n  size: [2]", "run.yaml:2: grid: size is [2], and the plan has the axes 'x', 'y'; write size: {x: ..., y: ...}"),
        ("grid:\n  size: {x: 2}", "run.yaml:2: grid: size is {'x': 2}, and the plan has the axes"),
        ("grid:\n  size: {x: 2, y: 0}", "run.yaml:2: grid: size is 0; allowed: a whole number of ranks, at least 1"),
        ("lines:\n  axes: [a]\n  size: 1.5", "run.yaml:3: lines: size is 1.5; allowed: a whole number"),
        ("rows:\n  axis: tp\n  size: 2", "run.yaml:3: rows: this plan does not say its axes"),
        ("sequence:\n  mode: rings\n  axis: cp", "run.yaml:2: sequence: mode is 'rings'; allowed: 'ring', 'ulysses', 'gather_kv'"),
        ("sequence:\n  axis: cp\n  head: 2", "run.yaml:3: sequence has no option 'head'; did you mean 'heads'?"),
        ("mesh: {cp: 2, u: 2}\nsequence: {mode: ulysses, axis: cp, heads: u}", "run.yaml:2: sequence: sequence(mode='ulysses') has no h"),
        ("mesh: {cp: 2}\nsequence: {mode: ulysses, axis: cp, balance: null}", "run.yaml:2: sequence: sequence(mode='ulysses') has no b"),
        ("mesh: {dp: 2}\nzero: 1\nzero_optimization: 3", "run.yaml:3: 'zero_optimization' says the same as what is at run.yaml:2"),
        ("mesh: {dp: 2}\nring: {axis: cp}", "run.yaml:2: ring: no axis 'cp'"),
    ],
)
def test_wrong_sizes_have_their_line(tmp_path: Path, sized: Any, text: str, says: str) -> None:
    with pytest.raises(cf.ConfigError) as caught:
        cf.configure(written(tmp_path, text), plugins=[sized, colofunc_plugins])
    assert str(caught.value).removeprefix(f"{tmp_path}/").startswith(says)


def test_transforms_of_plugins_take_their_options(plugin: Any) -> None:
    for given, want in ((3, 3), ({"by": 0.5}, 0.5), (None, 2.0), (True, 2.0)):
        cf.configure({"scaled": given}, plugins=[plugin])
        assert calls[-1] == want
    cf.configure({"scaled": {"scale": 1, "names": ["a", "b"]}}, plugins=[plugin])
    assert calls[-1] == Recipe(1, ("a", "b"))
    calls.clear()
    cf.configure({"scaled": False}, plugins=[plugin])
    assert calls == []


def kept(share: float = 0.5, role: Literal["state", "param"] = "state") -> cf.ext.MemoryPolicy:
    if not 0 <= share <= 1:
        raise ValueError(f"kept: share={share} is no part. Try: 0.5")
    return cf.ext.MemoryPolicy(f"kept {role} {share}")


@pytest.fixture
def policies() -> Any:
    module = types.ModuleType("policies_plugin")
    made = {"kept": kept, "fixed": cf.ext.MemoryPolicy("fixed")}
    module.colofunc_memory_policies = cf.hookimpl(specname="colofunc_memory_policies")(lambda: made)
    return module


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        ("kept", "kept"),
        ({"kept": {"share": 0.25}}, "kept state 0.25"),
        ({"kept": [0.5, "param"]}, "kept param 0.5"),
        ({"kept": 1}, "kept state 1"),
        ({"name": "own", "update": "host"}, "own"),
    ],
)
def test_policies_of_memory_take_their_options(policies: Any, policy: Any, name: str) -> None:
    chain = cf.configure({"offload": {"budget": "1GiB", "policy": policy}}, plugins=[policies])
    found = chain.apply(step_fn).transform("offload").options["policy"]
    assert (found if isinstance(found, str) else found.name) == name
    state, batch = example()
    assert chain.apply(step_fn).lower(state, batch).plan.peak_bytes < 1 << 30


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        ("dots", "dots"),
        ({"every": 2}, "every(2)"),
        ({"every": {"n": 3}}, "every(3)"),
        ({"save_only": "fc"}, "save_only(fc)"),
        ({"save_only": ["fc", "*.fc"]}, "save_only(fc, *.fc)"),
    ],
)
def test_policies_of_recomputation_take_their_options(policy: Any, name: str) -> None:
    chain = cf.configure({"checkpoint": {"policy": policy}})
    assert chain.apply(step_fn).transform("checkpoint").options["policy"].name == name


@pytest.mark.parametrize("policy", [{"every": 0}, {"every": "two"}, {"save_only": 3}, {"evry": 2}])
def test_wrong_policies_of_recomputation_are_refused(policy: Any) -> None:
    with pytest.raises(cf.ConfigError, match=r"config: checkpoint\.policy\.\w+: .*(0|two|3|evry)"):
        cf.configure({"checkpoint": {"policy": policy}})


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("{kept: {shar: 1}}", "run.yaml:3: kept has no option 'shar'; did you mean 'share'?"),
        ("{kept: {share: 3}}", "run.yaml:3: kept: kept: share=3 is no part. Try: 0.5"),
        ("{kept: {role: grad}}", "run.yaml:3: kept: role is 'grad'; allowed: 'state', 'param'"),
        ("{fixed: {share: 1}}", "run.yaml:3: policy 'fixed' takes no options; write policy: fixed"),
        ("{kepd: {share: 1}}", "run.yaml:3: offload: policy has no option 'kepd'"),
    ],
)
def test_wrong_options_of_policies_have_their_line(tmp_path: Path, policies: Any, policy: str, says: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"offload:\n  budget: 1GiB\n  policy: {policy}\n")
    with pytest.raises(cf.ConfigError, match=re.escape(says)):
        cf.configure(path, plugins=[policies])


def test_clip_is_done_or_refused() -> None:
    torch.manual_seed(0)
    chain = cf.configure({"mesh": {"dp": 2}, "gradient_clipping": 1e-3})
    model = cf.functional(torch.nn.Linear(6, 4).double())
    step, state = chain.train_step(model, cf.adapt(torch.optim.SGD, lr=1.0), loss=lambda out: out.square().sum())
    batch = torch.randn(8, 6, dtype=torch.float64)
    placed, metrics = step(step.init(state, batch), batch)
    moved = sum(float((placed["params"][n].full() - state["params"][n]).square().sum()) for n in state["params"]) ** 0.5
    assert float(metrics["grad_norm"]) > 1 and moved == pytest.approx(1e-3, rel=1e-4)
    with pytest.raises(cf.InputError, match=r"config: gradient_clipping: clip: 0.001 happens inside a step"):
        chain.apply(step_fn)


# ---- mistakes ----

MISTAKES = [
    ("mesh: {dp: 2}\nzerro: 3", "run.yaml:2: unknown key 'zerro'; did you mean 'zero'?"),
    ("mesh: {dp: 2}\n\nxyzzy: 3", "run.yaml:3: unknown key 'xyzzy'; keys: '"),
    ("gemini: 1", "run.yaml:1: 'gemini' is a policy of `offload`; write offload: {policy: gemini}"),
    ("mesh: {dp: 2}\nevery: 2", "run.yaml:2: 'every' is a policy of `checkpoint`; write checkpoint: {policy: every}"),
    ("mesh:\n  dp: two", "run.yaml:2: mesh: dp is 'two'; allowed: a whole number"),
    ("mesh:\n  dp: 2\n  topology: 8xa100-8g", "run.yaml:3: mesh: no topology '8xa100-8g'; did you mean '8xa100-80g'"),
    ("mesh: {dp: 2}\nmesh: {tp: 2}", "run.yaml:2: key 'mesh' was given before, at run.yaml:1"),
    ("mesh:\n  dp: 2\n   tp: 2", "run.yaml:3: is not YAML: mapping values are not allowed here. Try: the same indentation"),
    ("mesh:\n\tdp: 2", "run.yaml:2: is not YAML: found character '\\t' that cannot start any token. Try: spaces"),
    ("mesh:\n  <<: {dp: 2}", "run.yaml:2: merge keys (<<) are not read"),
    ("mesh: {dp:2}", "run.yaml:1: 'dp:2' is one word to YAML; write a space after the colon"),
    ("parallel:\n  *.weight: (dp o) i", "run.yaml:2: is not YAML: expected alphabetic or numeric character, but found '.'. Try: quotes"),
    ("mesh: {dp: 2}\nparallel:\n  '*.w': (tp o) i", "run.yaml:3: parallel: '*.w': (tp o) has 2 factors of unknown size, 'tp', 'o'"),
    ("mesh: {dp: 2}\nparallel:\n  '*.w': (dp o) (dp i)", "run.yaml:3: parallel: '*.w': mesh axis 'dp' is used 2 times"),
    ("mesh: {dp: 2}\nparallel:\n  fc: {tq: o}", "run.yaml:3: parallel: 'fc': no axis 'tq'"),
    ("mesh: {dp: 2}\naccumulate:\n  batch: 1\n  microbatches: 0", "run.yaml:4: accumulate: microbatches=0"),
    ("mesh: 4", "run.yaml:1: wants keys with values, not 4"),
    ("clip: 0", "run.yaml:1: clip is 0; allowed: a number above 0"),
    ("clip: 1\nmax_grad_norm: 2", "run.yaml:2: 'max_grad_norm' says the same as what is at run.yaml:1"),
    ("shard:\n  aut: false", "run.yaml:2: shard has no option 'aut'; did you mean 'auto'?"),
    ("shard:\n  auto: maybe", "run.yaml:2: shard: auto is 'maybe'; allowed: true or false"),
    ("shard:\n  donate: maybe", "run.yaml:2: shard: donate is 'maybe'; allowed: 'auto' or true or false or a list or nothing (null)"),
    ("shard:\n  auto: true\n  donate: [-1]", "run.yaml:3: shard: donate=(-1,): give positions of arguments, each once"),
    ("mesh: {dp: 2}\nshard:\n  in_specs:\n    - null\n    - '(dq b)'", "run.yaml:5: shard: in_specs: (dq b) has 2 factors of unknown size"),
    ("shard:\n  out_specs: [null, 3]", "run.yaml:2: shard: out_specs: 3 is no spec; allowed: '(dp b) ...'"),
    ("precision:\n  compute: bf16\n  reduce: 3", "run.yaml:3: precision: policy: precision=3 is no dtype"),
    ("precision:\n  params: fp32\n  compute: bf17", "run.yaml:3: precision: policy: precision='bf17' is no precision"),
    ("accumulate:\n  microbatches: 2\n  mixing: maybe", "run.yaml:3: accumulate: unknown mixing 'maybe'"),
    ("mesh:\n  dp: 2\n  device: tpu", "run.yaml:3: mesh: device 'tpu' is not 'cpu', 'cuda' or None"),
    ("executor: compield", "run.yaml:1: unknown executor 'compield'; did you mean 'compiled'?"),
    ("parallel:\n  - '*.w': '(tp'", "run.yaml:2: parallel: '*.w': unbalanced parentheses"),
    ("parallel:\n  rows: [tp, a, 1, b]", "run.yaml:2: rows takes 3 options by position (axis, where, level)"),
    ("parallel:\n  rows: {axis: tp,\n    wher: a}", "run.yaml:3: rows has no option 'wher'; did you mean 'where'?"),
    ("parallel:\n  rows: {axis: tp, level: 3}", "run.yaml:2: rows: level is 3; allowed: 1, 2"),
    ("parallel:\n  rows:", "run.yaml:2: rows needs 'axis'"),
    ("parallel:\n  rows: [tp, '']", "run.yaml:2: rows: rows: where is empty. Try: a glob"),
    ("parallel:\n  row: 3", "run.yaml:2: parallel: 'row' is no plan that is installed; did you mean 'rows'"),
    ("mesh: {dp: 2}\nparallel:\n  lines: [[dq]]", "run.yaml:3: lines: no axis 'dq'"),
    ("parallel: [xyzzy]", "run.yaml:1: parallel: 'xyzzy' is no plan that is installed; plans: '"),
    ("mesh: {pp: 2}\nparallel:\n  pipeline: {microbatches: 2}", "run.yaml:3: parallel: 'pipeline' is a key of its own, not a plan"),
    ("parallel: {precision: bf16}", "run.yaml:1: parallel: 'precision' is a key of its own, not a plan; write it beside `parallel`"),
    ("parallel: {mixed_precision: bf16}", "run.yaml:1: parallel: 'mixed_precision' is a key of its own, not a plan"),
    ("parallel: [checkpoint]", "run.yaml:1: parallel: 'checkpoint' is a key of its own, not a plan"),
    ("parallel: {scaled: 2}", "run.yaml:1: parallel: 'scaled' is a key of its own, not a plan"),
    ("parallel: [gemini]", "run.yaml:1: parallel: 'gemini' is a policy of `offload`"),
    ("a: !!python/object/apply:os.system [ls]", "run.yaml:1: tag 'tag:yaml.org,2002:python/object/apply:os.system' is refused"),
    ("a: [1, 2", "run.yaml:1: is not YAML: "),
    ("a: &x [*x]", "run.yaml: "),
    ("- a\n- b", "run.yaml:1: the configuration is ['a', 'b']; write keys with values"),
    ("# nothing", "run.yaml: holds nothing but comments"),
    ("", "run.yaml: is empty"),
]


def test_a_plan_that_a_plugin_gives_under_several_names_is_one_plan() -> None:
    plugin = types.ModuleType("rows_by_two_names")
    plugin.colofunc_plans = cf.hookimpl(specname="colofunc_plans")(lambda: {"rows": rows, "row_parallel": rows})
    chain = cf.configure({"mesh": {"tp": 2}, "row_parallel": {"axis": "tp"}}, plugins=[plugin])
    assert chain.plan_texts == ("rows(axis='tp')",)
    with pytest.raises(cf.ConfigError, match="'row_parallel' says the same as what is at config: rows"):
        cf.configure({"mesh": {"tp": 2}, "rows": "tp", "row_parallel": "tp"}, plugins=[plugin])


def test_a_parameter_with_the_name_of_a_transform_has_its_spec(plugin: Any) -> None:
    chain = cf.configure({"mesh": {"dp": 2}, "parallel": {"*scaled": "(dp o)"}}, plugins=[plugin])
    state = {"scaled": torch.ones(4)}
    plan = chain.apply(lambda state: {"scaled": state["scaled"] * 2}).lower(state).plan
    assert plan.leaf("state.scaled").spec.startswith("(dp")


@pytest.mark.parametrize(("text", "says"), MISTAKES)
def test_mistakes_have_their_line(tmp_path: Path, plugin: Any, text: str, says: str) -> None:
    with pytest.raises(cf.ConfigError) as caught:
        cf.configure(written(tmp_path, text), plugins=[plugin])
    assert str(caught.value).removeprefix(f"{tmp_path}/").startswith(says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"mesh": {"dp": 2},\n "zerro": 3}', "run.json:2: unknown key 'zerro'"),
        ('{"clip": 1,\n\n "clip": 2}', "run.json:3: key 'clip' was given before, at run.json:1"),
        ('{"clip": 1,\n}', "run.json:2: is not JSON: "),
        ('{"clip": [1,\n 2}', "run.json:2: is not JSON: no ',' or ']' here"),
        ('{"clip"\n 1}', "run.json:2: is not JSON: no ':' after key 'clip'"),
        ("{1: 2}", "run.json:1: is not JSON: a key is a string"),
        ("{} x", "run.json:1: is not JSON: something follows"),
        ("[" * 5000, "run.json: is nested too deeply"),
    ],
)
def test_json_needs_no_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(cf.ConfigError) as caught:
        cf.configure(written(tmp_path, text, "run.json"))
    assert str(caught.value).removeprefix(f"{tmp_path}/").startswith(says)


def test_yaml_without_pyyaml_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "clip: 1")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(cf.ConfigError, match=r"pip install pyyaml, or write JSON"):
        cf.configure(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    for name, says in (("none.yaml", "no such file"), ("bytes.json", "cannot be read as text"), ("run.toml", "or a dict")):
        with pytest.raises(cf.ConfigError, match=says):
            cf.configure(tmp_path / name)


def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]" for k in range(1, 9)]
    with pytest.raises(cf.ConfigError, match="more than 20000 values"):
        cf.configure(written(tmp_path, "\n".join(lines)))


def test_numbers_as_people_write_them(tmp_path: Path) -> None:
    assert cf.configure(written(tmp_path, "clip: 1e-3")).clip == 0.001


# ---- the plans that come along ----

MODES = [
    ("{zero: {stage: 3, size: 2}, tensor: {mode: 1d, size: 2}}", {"dp": 2, "tp": 2}, "(tp dp a) b"),
    ("{tensor: {mode: 2d, size: 4}}", {"x": 2, "y": 2}, "(y a) (x b)"),
    ("{tensor: {mode: 2.5d, depth: 1, size: 4}}", {"x": 2, "y": 2, "z": 1}, "(y a) (x b)"),
    ("{zero: {stage: 1, size: 2}, tensor: {mode: 2.5d, depth: 1, size: 4}}", {"dp": 2, "x": 2, "y": 2, "z": 1}, "(y a) (x b)"),
]


@pytest.mark.parametrize(("parallel", "mesh", "spec"), MODES)
def test_modes_by_name(tmp_path: Path, parallel: str, mesh: dict[str, int], spec: str) -> None:
    plugins = pytest.importorskip("colofunc_plugins")
    chain = cf.configure(written(tmp_path, f"mesh: {{topology: 8xa100-80g}}\nparallel: {parallel}"), plugins=[plugins])
    assert chain.mesh.shape == mesh
    torch.manual_seed(0)
    step, state = chain.train_step(cf.functional(Mlp().double()), cf.adapt(torch.optim.AdamW, lr=1e-2))
    batch = torch.randn(8, 16, dtype=torch.float64)
    assert step.lower(state, batch).plan.leaf("state.params.fc1.weight").spec == spec
    cf.testing.check(step, state, batch, steps=2)


class Attending(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.reshape(*x.shape[:2], 2, 8).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape)).square().mean()


@pytest.mark.parametrize(
    ("parallel", "mesh", "tokens"),
    [
        ("{sequence: {mode: ring, axis: cp, size: 2}}", {"cp": 2}, "b (s cp) ..."),
        ("{zero: {stage: 3, size: 2}, context_parallel: {mode: ulysses, axis: cp, size: 2}}", {"dp": 2, "cp": 2}, "(dp b) (cp s) ..."),
        ("{gather_kv: {axis: cp, size: 2}, zero: {stage: 1, size: 2}}", {"cp": 2, "dp": 2}, "(dp b) (s cp) ..."),
        ("{ulysses: {axis: cp, size: 2}, tensor: {mode: 1d, size: 2}}", {"cp": 2, "tp": 2}, "b (cp s) ..."),
    ],
)
def test_sequence_modes_by_name(tmp_path: Path, parallel: str, mesh: dict[str, int], tokens: str) -> None:
    plugins = pytest.importorskip("colofunc_plugins")
    chain = cf.configure(written(tmp_path, f"mesh: {{topology: 8xa100-80g}}\nparallel: {parallel}"), plugins=[plugins])
    assert chain.mesh.shape == mesh
    torch.manual_seed(0)
    step, state = chain.train_step(cf.functional(Attending().double()), cf.adapt(torch.optim.AdamW, lr=1e-2))
    batch = torch.randn(4, 8, 16, dtype=torch.float64)
    spec = step.lower(state, batch).plan.leaf("batch").spec
    assert cf.Spec(spec).bind(chain.mesh, batch.shape) == cf.Spec(tokens).bind(chain.mesh, batch.shape)
    cf.testing.check(step, state, batch, steps=2)


def test_experts_by_name(tmp_path: Path) -> None:
    plugins = pytest.importorskip("colofunc_plugins")
    for parallel, mesh in (
        ("{zero: {stage: 3, size: 2}, experts: {size: 2}}", {"dp": 2, "ep": 2}),
        ("{expert_parallel: {axis: [epo, epi], size: [2, 3]}}", {"epo": 2, "epi": 3}),
    ):
        chain = cf.configure(written(tmp_path, f"parallel: {parallel}"), plugins=[plugins])
        assert chain.mesh.shape == mesh and chain.plans[-1].axes == tuple(mesh)[-len(chain.plans[-1].axes) :]
    with pytest.raises(cf.ConfigError, match=r"run.yaml:3: experts: capacity_factor=0 leaves no place"):
        cf.configure(written(tmp_path, "parallel:\n  experts:\n    capacity_factor: 0\n    size: 2"), plugins=[plugins])


# ---- the page ----


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x).relu()).square().mean()


def test_the_pages_file_trains(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "configuration.md").read_text()
    text, printed = page.split("```yaml\n")[1].split("```")[0], page.split("```console\n")[1].split("```")[0]
    chain = cf.configure(written(tmp_path, text))
    assert str(chain) == printed.strip()
    model, opt, batch = cf.functional(Mlp()), cf.adapt(torch.optim.AdamW, lr=1e-2), torch.randn(8, 16)
    step, state = chain.train_step(model, opt)
    plan = step.lower(state, batch).plan
    assert plan.leaf("state.params.fc1.weight").spec.split(")")[0].startswith("(") and "tp" in plan.leaf("state.params.fc1.weight").spec
    assert step.executor == "simulated"
    placed, losses = step.init(state, batch), []
    for _ in range(5):
        placed, metrics = step(placed, batch)
        losses.append(float(metrics["loss"]))
    plain_fn, plain = cf.train_step(model, opt, clip=1.0)
    want = []
    for _ in range(5):
        plain, metrics = plain_fn(plain, batch)
        want.append(float(metrics["loss"]))
    assert losses == pytest.approx(want, rel=0.02) and losses[-1] < losses[0]  # bf16 has eight bits
