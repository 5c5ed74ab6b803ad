"""Transforms of anybody: the six hooks, their order, and a package of its own that composes with every built-in one."""

import importlib.util
import re
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from colofunc_plugins import zero
from torch import nn

import colofunc as cf
from colofunc import transforms as built_in
from colofunc.command.machine import step_on_machine
from colofunc.compiler.transform import in_order
from colofunc.testing import check

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "narrow_gradients" / "colofunc_narrow_gradients.py"
MESH = cf.Mesh(dp=2, topology="8xa100-80g")
STAGED = cf.Mesh(pp=2, dp=2, topology="8xa100-80g")
LR = 0.5

Chain = Callable[[Any], Any]
BUILT_IN: dict[str, Chain] = {
    "shard": lambda step: cf.shard(step, MESH, zero(3, "dp")),
    "precision": lambda step: cf.precision(step, "bf16"),
    "accumulate": lambda step: cf.accumulate(step, microbatches=2),
    "checkpoint": lambda step: cf.checkpoint(step, policy="nothing"),
    "offload": lambda step: cf.offload(step, policy="host"),
    "local_stats": lambda step: cf.local_stats(step, axes="dp"),
    "expert_capacity": lambda step: cf.expert_capacity(step, 1.25),
    "fp8": cf.fp8,
    "quantize": lambda step: cf.quantize(step, "int8", where="0.weight", activations="int8"),
    "pipeline": lambda step: cf.pipeline(step, axis="pp", microbatches=2),
}


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("colofunc_narrow_gradients", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def training(dtype: torch.dtype = torch.float32, norm: bool = False, frozen: str = "") -> tuple[Any, Any, Any]:
    """A step of SGD, so that what becomes of the parameters says what the gradients were. frozen: a weight that is not
    trained."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16)] if norm else [nn.Linear(8, 16), nn.Tanh()]
    module = nn.Sequential(*layers, nn.Linear(16, 4)).to(dtype)
    if frozen:
        module.get_parameter(frozen).requires_grad_(False)
    model = cf.functional(module)
    optimizer = cf.adapt(torch.optim.SGD, lr=LR)
    step, state = cf.train_step(model, optimizer, lambda out, b: (out - b[1]).pow(2).mean(), inputs=lambda b: ((b[0],), {}))
    return step, state, (torch.randn(8, 8, dtype=dtype), torch.randn(8, 4, dtype=dtype))


def experts() -> tuple[Any, Any, Any]:
    """A step with an expert layer, which `expert_capacity` asks for."""
    torch.manual_seed(0)
    weights = {"up": torch.randn(4, 32, 8), "down": torch.randn(4, 8, 16), "router": torch.randn(4, 8)}

    def step(state: Any, x: torch.Tensor) -> Any:
        def loss(params: Any) -> torch.Tensor:
            chosen, scale = (x @ params["router"].T).softmax(-1).max(-1)[::-1]
            made = cf.moe.experts(x, chosen[:, None], scale[:, None], params["up"], params["down"])
            return made.pow(2).mean()

        value, grads = cf.value_and_grad(loss)(state)
        return {name: p - LR * grads[name] for name, p in state.items()}, value

    return step, weights, torch.randn(8, 8)


# ---- a package of its own ----


def wires(program: Any) -> list[torch.dtype]:
    """The dtypes in which gradients are summed over the mesh."""
    found = []
    for node in program.nodes:
        if node.target in ("colofunc.all_reduce", "colofunc.reduce_scatter") and program.values[node.refs[0]].shape:
            found.append(program.values[node.refs[0]].dtype)
    return found


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_package_composes_with_every_built_in_transform_in_both_orders(name: str, example: Any) -> None:
    if name == "expert_capacity":
        step, state, batch = experts()
    else:
        step, state, batch = training(norm=name == "local_stats", frozen="0.weight" if name == "quantize" else "")
    base = step
    if name == "pipeline":
        base = cf.shard(step, STAGED, zero(1, "dp"))
    elif name != "shard":
        base = BUILT_IN["shard"](step)
    one, other = example.narrow_gradients(BUILT_IN[name](base)), BUILT_IN[name](example.narrow_gradients(base))
    lows = one.lower(state, batch), other.lower(state, batch)
    assert lows[0].text() == lows[1].text()
    plain = BUILT_IN[name](base)
    assert torch.bfloat16 in wires(lows[0].after("narrow_gradients.rewrite_local").program)
    assert torch.bfloat16 not in wires(plain.lower(state, batch).after("alternatives").program)
    results = [step(step.init(state, batch), batch) for step in (one, other, plain)]
    for a, b, c in zip(*(map(whole, torch.utils._pytree.tree_leaves(result)) for result in results), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=0.02, atol=0.02)


def test_every_built_in_transform_is_tried_beside_a_package() -> None:
    files = {file.stem for file in Path(built_in.__path__[0]).glob("*.py")}
    assert files - {"__init__"} == set(BUILT_IN)


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full() if isinstance(x, cf.DTensor) else x


def test_the_error_of_narrow_gradients_is_within_its_bound_and_their_bytes_are_half(example: Any) -> None:
    step, state, batch = training(torch.float64)
    sharded = cf.shard(step, MESH, zero(1, "dp"))
    narrow = example.narrow_gradients(sharded)
    (new, _), (exact, _) = narrow(state, batch), step(state, batch)
    halves = [step(state, tuple(x[rows] for x in batch))[0]["params"] for rows in (slice(0, 4), slice(4, 8))]
    for name, before in state["params"].items():
        terms = [((before - half[name]) / LR / 2).abs() for half in halves]  # each half's mean counts half
        error = (new["params"][name].full() - exact["params"][name]).abs() / LR
        assert error.max() > 0, "something was rounded"
        assert (error <= example.bound(2) * (terms[0] + terms[1]) * (1 + 1e-9)).all()
    bytes_of = [s.lower(state, batch).after("pack").cost().bytes["reduce_scatter", "dp"] for s in (sharded, narrow)]
    assert bytes_of[1] == bytes_of[0] / 4  # of float64


# ---- the six hooks ----


def doubled_loss(build: cf.ext.Build) -> cf.ext.Build:
    """The last output, twice."""
    program = build.program
    edit, out = cf.ext.Editor(program), program.outputs[-1]
    twice = edit.new(program.values[out])
    edit.insert(len(program.nodes), cf.ext.Node("aten.mul.Tensor", (cf.ext.Ref(out), 2.0), (), (twice,)))
    return build.evolve(program=edit.done(outputs=(*program.outputs[:-1], twice)))


@pytest.mark.parametrize("hook", ["rewrite_global", "rewrite_local"])
def test_programs_are_rewritten_by_a_hook(hook: str) -> None:
    step, state, batch = training()
    doubled = cf.ext.Transform("doubled", **{hook: doubled_loss})
    loss = float(step(state, batch)[1]["loss"])
    for chain in (lambda s: cf.shard(cf.ext.stage(s, doubled), MESH), lambda s: cf.ext.stage(cf.shard(s, MESH), doubled)):
        twice = chain(step)
        assert float(twice(state, batch)[1]["loss"]) == pytest.approx(2 * loss, rel=1e-6)
        low = twice.lower(state, batch)
        assert f"doubled.{hook}" in low.passes.names and "mul" in low.passes.diff(f"doubled.{hook}")


def test_several_transforms_use_one_hook_in_an_order_that_the_chain_does_not_give() -> None:
    def scaled(by: float, plus: float) -> Any:
        def wrap(build: cf.ext.Build) -> cf.ext.Build:
            fn = build.fn
            return build.evolve(fn=lambda x: fn(x) * by + plus)

        return wrap

    first = cf.ext.Transform("a", wrap=scaled(2.0, 0.0))
    second = cf.ext.Transform("b", wrap=scaled(1.0, 3.0))
    before = cf.ext.Transform("c", wrap=scaled(1.0, 3.0))
    behind = cf.ext.Transform("a", wrap=scaled(2.0, 0.0), behind=("c",))
    x = torch.ones(4)
    for chain, wanted in (((first, second), 2 * 1 + 3), ((behind, before), 2 * (1 + 3))):
        for order in permutations(chain):
            step: Any = lambda x: x  # noqa: E731
            for transform in order:
                step = cf.ext.stage(step, transform)
            step = cf.shard(step, cf.Mesh(dp=2, topology="ideal"))
            assert torch.equal(step(x).full(), torch.full((4,), float(wanted)))
            check(step, x)


def test_all_alternatives_are_counted_and_the_fastest_that_fits_is_taken() -> None:
    """Each of two transforms offers two ways; what takes longer is there, in case the other one does not fit."""
    step, state, batch = training()
    written: list[tuple[str, ...]] = []

    def offered(name: str) -> Any:
        def candidates(build: cf.ext.Build) -> cf.ext.Build:
            def way(which: str) -> Any:
                def write(program: cf.ext.Program, mesh: cf.Mesh) -> cf.ext.Program:
                    written.append((name, which))
                    return program

                return write

            return build.evolve(alternatives=(*build.alternatives, (way("fast"), way("lean"))))

        return candidates

    for name in ("x", "y"):
        step = cf.ext.stage(step, cf.ext.Transform(name, candidates=offered(name)))
    least = cf.shard(step, MESH, zero(3, "dp")).lower(state, batch).memory().peak_bytes["device"]
    assert set(written) == {("x", "fast"), ("y", "fast")}, "without a budget the first of each"
    written.clear()
    with pytest.raises(cf.PlanError):
        cf.checkpoint(cf.shard(step, MESH, zero(3, "dp")), budget=least // 2, policy="everything").lower(state, batch)
    assert set(written) == {(name, which) for name in ("x", "y") for which in ("fast", "lean")}


def test_searches_and_moves_stand_beside_those_of_built_in_transforms() -> None:
    step, state, batch = training()
    seen: list[str] = []

    def search(program: Any, node_s: Any, finish: Any, budget_bytes: Any, /) -> Any:
        seen.append("search")
        return (finish(program),) * 2

    def move(program: Any, mesh: Any, node_s: Any, budget_bytes: Any, lies: Any, /, *, like: Any = None) -> Any:
        seen.append("move")
        assert "host" in lies.tiers.values() or not lies.tiers
        return cf.ext.Offloaded(program, 0.0, ("and nothing more",))

    looks = cf.ext.Transform(
        "looks", candidates=lambda build: build.evolve(searches=(*build.searches, search), moves=(*build.moves, move))
    )
    base = cf.offload(cf.checkpoint(cf.shard(step, MESH, zero(3, "dp")), policy="nothing"), policy="host")
    both = cf.ext.stage(base, looks)
    operators = [re.findall(r"= (\w+)", chain.lower(state, batch).text()) for chain in (both, base)]
    assert operators[0] == operators[1] and set(seen) == {"search", "move"}
    assert "and nothing more" in both.lower(state, batch).plan.memory


def test_constraints_of_a_hook_bind_the_planner() -> None:
    step, state, batch = training()

    def never(strategy: Any) -> bool:
        return False

    def constrain(build: cf.ext.Build) -> cf.ext.Build:
        first = build.program.inputs[0]
        assert build.program.values[first].name == build.traced.names[0]
        says = cf.ext.Constraint(("never",), never, "nobody may have it")
        return build.evolve(constraints=build.constraints | cf.ext.Constraints({0: (says,)}))

    with pytest.raises(cf.PlanError, match="nobody may have it"):
        cf.ext.stage(cf.shard(step, MESH), cf.ext.Transform("strict", constrain=constrain)).lower(state, batch)


# ---- what one of a chain may say ----


def test_two_transforms_that_say_how_a_step_lies_are_an_error_in_both_orders() -> None:
    on_four = cf.ext.Transform("on_four", sharding=cf.ext.Sharding(cf.Mesh(dp=4)))
    says = "both say how the step lies on a mesh"
    with pytest.raises(cf.PlanError, match=rf"shard and on_four {says} .*Mesh\(dp=4\)\), and one of a chain may"):
        cf.ext.stage(cf.shard(torch.sin, MESH), on_four)
    with pytest.raises(cf.PlanError, match=f"on_four and shard {says}"):
        cf.shard(cf.ext.stage(torch.sin, on_four), MESH)
    assert cf.ext.stage(torch.sin, on_four).mesh == cf.Mesh(dp=4)


def test_two_transforms_that_place_an_input_otherwise_are_an_error() -> None:
    def at(index: int) -> cf.ext.Transform:
        placed = cf.ext.Constraints(at={0: ("dp", (index,))})
        return cf.ext.Transform(f"at_{index}", constrain=lambda build: build.evolve(constraints=build.constraints | placed))

    def lowered(*places: cf.ext.Transform) -> str:
        step = cf.shard(torch.sin, cf.Mesh(dp=2))
        for place in places:
            step = cf.ext.stage(step, place)
        return str(step.lower(torch.ones(4)).input_layouts[0].text())

    assert "@dp=1" in lowered(at(1))
    with pytest.raises(cf.PlanError, match=r"input 0 of a step is to exist at dp = \(0,\) and at dp = \(1,\)"):
        lowered(at(0), at(1))


def test_the_command_plans_for_the_mesh_of_whichever_transform_says_it() -> None:
    on_four = cf.ext.Transform("on_four", sharding=cf.ext.Sharding(cf.Mesh(dp=4)))
    planned = step_on_machine(cf.ext.stage(torch.sin, on_four), {}, lambda mesh: mesh, [])
    assert planned.mesh == cf.Mesh(dp=4) and [each.name for each in planned.transforms] == ["on_four"]


def test_two_transforms_that_name_a_disk_are_an_error(tmp_path: Path) -> None:
    spills = cf.ext.Transform("spills", disk=str(tmp_path / "a"))
    with pytest.raises(cf.PlanError, match="offload and spills both name a directory for what is kept on disk"):
        cf.ext.stage(cf.offload(torch.sin, disk=str(tmp_path / "b")), spills)
    assert cf.ext.stage(cf.offload(torch.sin), spills).disk == str(tmp_path / "a")


def in_two_ways(name: str, is_open: bool = True) -> cf.ext.Transform:
    """A transform that says in one of two ways what it does, which is nothing."""
    said = cf.ext.Transform(name)
    ways = [cf.ext.Variant(said, f"{name} in way {number}", lambda: 0.0) for number in (1, 2)]
    return cf.ext.Transform(name, variants=lambda build: ways if is_open else ())


def test_two_transforms_that_leave_open_how_they_are_written_are_an_error() -> None:
    x = torch.ones(4)
    step = cf.ext.stage(cf.shard(torch.sin, MESH), in_two_ways("b"))
    says = re.escape("a and b both leave open how they are written ('a in way 1' is a way of the one, 'b in way 1' of the other)")
    with pytest.raises(cf.PlanError, match=says):
        cf.ext.stage(step, in_two_ways("a")).lower(x)
    assert cf.ext.stage(step, in_two_ways("a", is_open=False)).lower(x).plan.way.startswith("b in way")


def cutting(name: str) -> cf.ext.Transform:
    """A transform that says of the cuts of a pipeline what there is to say: nothing."""
    return cf.ext.Transform(name, candidates=lambda build: build.evolve(cuts_of=lambda table: None))


def test_two_transforms_that_say_what_the_cuts_of_a_pipeline_are_are_an_error() -> None:
    x = torch.ones(4)
    step = cf.ext.stage(cf.shard(torch.sin, MESH), cutting("b"))
    assert torch.equal(step(x).full(), torch.sin(x))
    with pytest.raises(cf.PlanError, match=r"a and b both say what a pipeline's cuts are .*, and one of a chain may\. Try: "):
        cf.ext.stage(step, cutting("a")).lower(x)


# ---- mistakes ----


def test_mistakes_of_hooks_are_named() -> None:
    step, state, batch = training()
    lost = cf.ext.Transform("lost", rewrite_local=lambda build: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(cf.PlanError, match="transform 'lost': its hook rewrite_local gave NoneType, not a build"):
        cf.ext.stage(cf.shard(step, MESH), lost).lower(state, batch)

    def fewer(build: cf.ext.Build) -> cf.ext.Build:
        return build.evolve(program=cf.ext.Editor(build.program).done(outputs=build.program.outputs[1:], aliases=()))

    with pytest.raises(cf.PlanError, match=r"fewer\.rewrite_global gives the program other outputs"):
        cf.ext.stage(cf.shard(step, MESH), cf.ext.Transform("fewer", rewrite_global=fewer)).lower(state, batch)
    with pytest.raises(cf.PlanError, match=r"behind one another: .*drop one of them"):
        in_order([cf.ext.Transform("a", behind=("b",)), cf.ext.Transform("b", behind=("a",))])
    with pytest.raises(cf.PlanError, match="lost is applied twice"):
        cf.ext.stage(cf.ext.stage(step, lost), lost)
    with pytest.raises(cf.PlanError, match="wants a step function, not int"):
        cf.ext.stage(3, lost)  # type: ignore[arg-type]


def repeated(name: str = "repeated") -> Any:
    """Leaves open how often the function runs; what fits its own number of operators and does most is taken."""

    def closed(times: int) -> Any:
        def wrap(build: Any) -> Any:
            def run(x: torch.Tensor) -> torch.Tensor:
                for _ in range(times):
                    x = build.fn(x)
                return x

            return build.evolve(fn=run)

        return cf.ext.Transform(name, {"times": times}, wrap=wrap, decided=times, notes=(f"{times} times",))

    def search(finish: Callable[[int], Any]) -> int:
        return max(times for times in (1, 2, 3) if len(finish(times).program.nodes) <= 2)

    return cf.ext.Transform(name, open=lambda args: cf.ext.OpenChoices(closed, search))


def test_a_transform_of_anybody_may_leave_open_what_the_trace_depends_on() -> None:
    x = torch.linspace(0, 1, 8)
    step = cf.shard(cf.ext.stage(torch.sin, repeated()), cf.Mesh())
    settled = step.settled(x)
    assert settled.transform("repeated").decided == 2 and settled is step.settled(x) and settled.settled(x) is settled
    torch.testing.assert_close(step(x).full(), x.sin().sin())
    assert step.lower(x).plan.notes[-1] == "2 times"
    with pytest.raises(cf.PlanError, match="repeated and again both leave open what the state depends on, and one of a chain may"):
        cf.ext.stage(step, repeated("again"))
