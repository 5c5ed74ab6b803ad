"""cf.quantize(step, "auto") among schemes that round inputs too: errors against layers that are run so, choices against all choices."""

import itertools
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import tensor, zero
from quantize_matrix import WHERE, step_of, tokens
from test_scheme_choice import by_trying, finished, is_best, loss_of
from torch import nn

import colofunc as cf
from colofunc.ops import int8_products
from colofunc.ops.quantizers import BUILT_IN
from colofunc.ops.rounded_inputs import rounded_inputs
from colofunc.planner.scheme_search import CountedSchemes, Picks, search
from colofunc.planner.schemes import Option, SchemeChoice, SchemeErrors, WeightOptions
from colofunc.planner.weight_seconds import weight_seconds
from colofunc.program.cost import node_s

ROUNDING = ("int8-dynamic", "fp8-dynamic", "fp8-g128-dynamic")


@cache
def measured() -> Mapping[str, Any]:
    return cf.sensitivities(loss_of()[0], where=WHERE, schemes=ROUNDING)(loss_of()[1], tokens())


# ---- what is measured ----


@pytest.mark.parametrize("name", ROUNDING)
def test_the_error_is_that_of_outputs_of_layers_that_are_run_in_the_scheme(name: str) -> None:
    """Two layers read one weight; of each, the output in the scheme less the output as it is, under the gradients of a loss in float64."""
    torch.manual_seed(0)
    w, batch = torch.randn(6, 256, dtype=torch.float64), torch.randn(2, 5, 3, 256, dtype=torch.float64)
    batch[..., 7] *= 20  # outliers, which int8-dynamic leaves as they are

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (F.linear(x[0], params["weight"]).sin() + F.linear(x[1], params["weight"])).mean()

    outputs = [F.linear(x, w).detach().requires_grad_() for x in batch]
    grads = torch.autograd.grad((outputs[0].sin() + outputs[1]).mean(), outputs)
    quantized = cf.quantize(lambda params, x: F.linear(x, params["weight"]), name, where="weight")
    off = [quantized.eager({"weight": w}, x) - F.linear(x, w) for x in batch]
    assert max(float(x.abs().max()) for x in off) > 0
    wanted = (sum(g.square().sum((0, 1)) for g in grads) * sum(x.square().sum((0, 1)) for x in off)).sum() / 2
    found = cf.sensitivities(loss, where="weight", schemes=name)({"weight": w}, batch)
    table = cf.scheme_errors({"weight": w}, found, name, where="weight")
    assert table.weights[0].options[1].error == pytest.approx(float(wanted), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUNDING)
def test_rounded_inputs_are_what_products_multiply(name: str, dtype: torch.dtype) -> None:
    """By the identity: a layer whose weight it is has its inputs as its outputs, up to the rounding of its scale and of results."""
    torch.manual_seed(0)
    x = (torch.randn(3, 4, 256) * 3).to(dtype)
    step = cf.quantize(lambda params, x: F.linear(x, params["weight"]), name, where="weight")
    wanted = step.eager({"weight": torch.eye(256, dtype=dtype)}, x)
    assert not torch.equal(wanted, x)
    torch.testing.assert_close(rounded_inputs(BUILT_IN[name], x).to(dtype), wanted, rtol=2 * torch.finfo(dtype).eps, atol=0.0)


@pytest.mark.parametrize("plan", ["zero3", "columns"])
def test_roundings_on_a_mesh_are_those_of_one_device(plan: str) -> None:
    plans = {"zero3": zero(3, "dp"), "columns": tensor("1d", "tp")}
    step = cf.shard(cf.sensitivities(loss_of()[0], where=WHERE, schemes=ROUNDING), cf.Mesh(dp=2, tp=2), plans[plan])
    with cf.testing.float64():
        cf.testing.check(step, loss_of()[1], tokens(), steps=1)


def test_what_was_measured_is_chosen_among_unless_schemes_are_named() -> None:
    params = loss_of()[1]
    names = [option.name for option in cf.scheme_errors(params, measured()).weights[1].options]
    assert names[-3:] == list(ROUNDING) and "nvfp4" in names
    one = cf.scheme_errors(params, measured(), "fp8-dynamic")
    assert [option.name for option in one.weights[1].options] == ["as it is", "fp8-dynamic"]
    twice = cf.scheme_errors(params, [measured(), measured()], "fp8-dynamic")
    assert twice.weights[1].options[1].error == pytest.approx(one.weights[1].options[1].error, rel=1e-12)


def test_seconds_of_a_weight_are_those_of_what_rounds_its_inputs_too() -> None:
    """With split columns a maximum travels between ranks; a cast that two products read is paid by both."""
    forward, params, _ = step_of("arguments")
    for name in ROUNDING:
        staged = cf.shard(forward, cf.Mesh(tp=2, topology="8xh100-80g"), tensor("1d", "tp"))
        low = cf.quantize(staged, name, where=WHERE).lower(params, tokens())
        seconds = [node_s(node, low.program.values, low.priced, low.registry.rule) for node in low.program.nodes]
        targets = [node.target.removeprefix("colofunc.") for node in low.program.nodes]
        up, down = [at for at, target in enumerate(targets) if target.endswith("_linear")]
        norm, tanh = (next(at for at, target in enumerate(targets) if word in target) for word in ("layer_norm", "tanh"))
        found = weight_seconds(low.program, low.priced, low.registry.rule, WHERE)
        assert found["up.weight"] == pytest.approx(sum(seconds[norm + 1 : up + 1]), rel=1e-9)
        biases = [at for at in range(tanh, down) if targets[at] == "keep_first"]
        assert found["down.weight"] == pytest.approx(sum(seconds[tanh + 1 : down + 1]) - sum(seconds[at] for at in biases), rel=1e-9)

    def pair(params: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, params["a"]) + F.linear(x, params["b"])

    weights = {"a": torch.randn(128, 128), "b": torch.randn(128, 128)}
    low = cf.quantize(cf.shard(pair, cf.Mesh()), "int8-dynamic", where=("a", "b")).lower(weights, torch.randn(64, 128))
    found = weight_seconds(low.program, low.priced, low.registry.rule, ("a", "b"))
    of_add = [node_s(n, low.program.values, low.priced, low.registry.rule) for n in low.program.nodes if n.target.startswith("aten.add")]
    assert found["a"] == pytest.approx(found["b"]) and found["a"] + found["b"] == pytest.approx(low.cost().seconds - sum(of_add))


# ---- what is chosen ----


def wide_layers(*schemes: str) -> tuple[Callable[..., Any], Any, Any, SchemeErrors]:
    """(forward, its parameters, a batch without numbers, errors): so many rows that a card's products in 8 bits are faster."""
    torch.manual_seed(0)
    model = cf.functional(nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)))

    def forward(params: Any, x: torch.Tensor) -> torch.Tensor:
        return model.apply(params, {}, x)[0]

    rounding = [name for name in schemes if BUILT_IN[name].rounds_inputs]
    loss = cf.sensitivities(lambda params, x: forward(params, x).square().mean(), schemes=rounding)
    table = cf.scheme_errors(model.params, loss(model.params, torch.randn(32, 256)), schemes)
    return forward, model.params, cf.abstract((65536, 256), torch.float32), table


@cache
def all_with_copies() -> tuple[Any, int, SchemeErrors, Any, list[tuple[float, float, str]]]:
    """(step, budget, errors, arguments, all schemes): weights as they are do not fit without copies."""
    forward, params, x, table = wide_layers("int8", "int8-dynamic", "fp8-g128-dynamic")
    sharded = cf.shard(forward, cf.Mesh(dp=2, topology="8xh100-80g"))
    budget = int(0.999 * sharded.lower(params, x).memory().peak_bytes["device"])
    chains = {"auto": lambda choice: cf.offload(cf.quantize(sharded, choice), budget=budget)}
    return sharded, budget, table, (params, x), by_trying(table, chains, (params, x))


@pytest.mark.parametrize("limit", ["any rise", "a rise", "seconds"])
def test_they_are_decided_with_the_whole_step_for_their_seconds(limit: str) -> None:
    sharded, budget, table, args, tried = all_with_copies()
    rise, limit_s = None, math.inf
    if limit == "seconds":
        limit_s = (min(one[1] for one in tried) + max(one[1] for one in tried)) / 2
        step = cf.quantize(cf.offload(sharded, budget=budget), "auto", errors=table, limit_s=limit_s)
    else:
        # Both weights in the fastest scheme would be too much for the second one.
        rise = 1.0 if limit == "any rise" else 0.9 * table.uniform("fp8-g128-dynamic").error
        step = cf.quantize(cf.offload(sharded, budget=budget), "auto", errors=table, rise=rise)
    choice = is_best(step, args, tried, rise, limit_s)
    assert any(BUILT_IN[name].rounds_inputs for name in choice.schemes.values() if name in BUILT_IN)
    assert step.lower(*args).memory().peak_bytes["device"] <= budget


@pytest.mark.sweep
def test_they_are_decided_with_recomputation() -> None:
    """Of a step that goes backward: against all schemes under all policies."""
    forward, params, x, table = wide_layers("fp8-g128-dynamic")

    def gradient(params: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(forward(params, x).square().mean(), x)[0]

    sharded = cf.shard(gradient, cf.Mesh(dp=2, topology="8xh100-80g"))
    budget = int(0.85 * sharded.lower(params, x).memory().peak_bytes["device"])
    chains: dict[str, Callable[[SchemeChoice], Any]] = {
        policy: lambda choice, policy=policy: cf.checkpoint(cf.quantize(sharded, choice), budget=budget, policy=policy)
        for policy in ("auto", "everything", "nothing")
    }
    tried = by_trying(table, chains, (params, x))
    assert finished(chains["everything"](table.within("1GB")), params, x) is None
    rise = 0.9 * table.uniform("fp8-g128-dynamic").error
    choice = is_best(cf.checkpoint(cf.quantize(sharded, "auto", errors=table, budget=budget, rise=rise)), (params, x), tried, rise)
    assert "fp8-g128-dynamic" in choice.schemes.values()


@pytest.mark.parametrize("plan", ["auto", "zero3", "columns"])
def test_a_step_with_a_choice_of_them_equals_one_device(plan: str) -> None:
    forward, params, _ = step_of("arguments")
    table = cf.scheme_errors(params, measured(), ("int8-dynamic", "fp8-g128-dynamic", "nf4"))
    options = dict(zip(("up.weight", "down.weight"), ("int8-dynamic", "fp8-g128-dynamic"), strict=True))
    chosen = [(w, next((o for o in w.options if o.name == options.get(w.name)), w.options[0])) for w in table.weights]
    choice = SchemeChoice(tuple(itertools.starmap(type(table.uniform("nf4").weights[0]), chosen)), None)
    plans: Any = {"auto": [], "zero3": [zero(3, "dp")], "columns": [tensor("1d", "tp")]}[plan]
    step = cf.quantize(cf.shard(forward, cf.Mesh(dp=2, tp=2), *plans), choice)
    targets = {node.target for node in step.lower(params, tokens()).program.nodes}
    assert {int8_products.PRODUCT, "colofunc.scaled_groups_linear"} <= targets
    with cf.testing.float64():
        assert cf.testing.check(step, params, tokens(), steps=1).worst <= 1e-10


def test_a_state_that_is_quantized_already_is_read_with_its_inputs_rounded() -> None:
    """Where the scheme that has its numbers was not measured, and one that rounds inputs was."""
    forward, params, _ = step_of("arguments")
    table = cf.scheme_errors(params, measured(), ("int8-dynamic", "fp8-dynamic"))
    placed = cf.quantize(forward, "int8", where=WHERE).init(params, tokens())
    step = cf.quantize(forward, "auto", errors=table)
    assert cf.scheme_choice(step, placed, tokens()).schemes == {"table.weight": "as it is", **dict.fromkeys(WHERE, "int8-dynamic")}
    torch.testing.assert_close(step(placed, tokens()).full(), cf.quantize(forward, "int8-dynamic", where=WHERE)(params, tokens()).full())


# ---- the search by itself ----


def by_numbers(
    beside: Mapping[str, int], budget: int, rise: float | None, factors: Mapping[str, float], limit_s: float | None = None
) -> tuple[Picks, list[Picks]]:
    """(what is chosen, all that is allowed, the best first) of four weights, where a scheme takes memory beside its weight."""
    names = ("int8", "int8-dynamic")
    weights = []
    for number in range(4):
        error = 1e-6 * (number + 1)
        schemes = [Option(BUILT_IN[name], 1_000, error * (3 if BUILT_IN[name].rounds_inputs else 1)) for name in names]
        weights.append(WeightOptions(f"{number}.weight", (10, 100), (Option(None, 4_000, 0.0), *schemes)))

    def seconds_of(number: int, pick: int) -> float:
        option = weights[number].options[pick]
        return (number + 2) * 1e-4 * factors[option.name] * (1 + 0.1 * number)

    def finish(picks: Picks) -> CountedSchemes:
        options = [weight.options[pick] for weight, pick in zip(weights, picks, strict=True)]
        peak_bytes = sum(option.nbytes + beside.get(option.name, 0) for option in options)
        if peak_bytes > budget:
            return CountedSchemes(why="it is too large")
        seconds = {weight.name: seconds_of(number, pick) for number, (weight, pick) in enumerate(zip(weights, picks, strict=True))}
        return CountedSchemes(peak_bytes, sum(seconds.values()), seconds)

    allowed = []
    for picks in itertools.product(range(3), repeat=4):
        error = sum(weight.options[pick].error for weight, pick in zip(weights, picks, strict=True))
        done = finish(picks)
        if not done.why and (rise is None or error <= rise) and (limit_s is None or (done.seconds or 0.0) <= limit_s):
            allowed.append(((error, done.seconds) if rise is None else (done.seconds, error), picks))
    return search(weights, finish, rise, limit_s), [picks for _, picks in sorted(allowed)]


FACTORS = {"as it is": 1.0, "int8": 0.9, "int8-dynamic": 0.6}


@pytest.mark.parametrize("rise", [5e-6, 12e-6, 20e-6, 29e-6])
def test_some_weights_are_taken_where_all_would_be_too_much(rise: float) -> None:
    chosen, allowed = by_numbers({}, 100_000, rise, FACTORS)
    assert chosen == allowed[0] and 2 in chosen


def test_what_needs_memory_beside_its_weight_says_nothing_of_what_does_not() -> None:
    """In int8-dynamic alone it is too large, in int8 of the same bytes it is not; and the other way."""
    for beside in ({"int8-dynamic": 1_500}, {"int8": 1_500}):
        chosen, allowed = by_numbers(beside, 5_000, None, FACTORS)
        assert chosen == allowed[0]
    chosen, allowed = by_numbers({"int8-dynamic": 1_500}, 8_000, 1.0, FACTORS)
    assert chosen == allowed[0] and 2 in chosen and 1 in chosen


# ---- what it says to mistakes ----

MISTAKES: dict[str, tuple[str, Callable[[], Any]]] = {
    "a scheme of weights": (
        "cf.sensitivities: 'int8' leaves inputs of layers as they are, and needs nothing measured but what always is. Try: schemes= of ",
        lambda: cf.sensitivities(loss_of()[0], schemes="int8"),
    ),
    "a scheme with scales": (
        "cf.sensitivities: 'smoothquant' divides inputs by a scale that each weight has, before it rounds them, which is not measured",
        lambda: cf.sensitivities(loss_of()[0], schemes=cf.smoothquant({"up.weight": torch.ones(128)})),
    ),
    "a scheme with scales, unmeasured": (
        "cf.scheme_errors: 'smoothquant' rounds inputs of layers too, and what that does to them was not measured. Try: schemes= of int8",
        lambda: cf.scheme_errors(loss_of()[1], measured(), cf.smoothquant({"up.weight": torch.ones(128)})),
    ),
    "no scheme": (
        "cf.sensitivities: there is no scheme 'int8-dynamc'; did you mean 'int8-dynamic'",
        lambda: cf.sensitivities(loss_of()[0], schemes=("int8-dynamc",)),
    ),
    "a number": (
        "cf.sensitivities: 3 in schemes= is of type int. Try: schemes= of int8-dynamic, fp8-dynamic, fp8-g128-dynamic",
        lambda: cf.sensitivities(loss_of()[0], schemes=(3,)),  # type: ignore[arg-type]
    ),
    "some batches": (
        "cf.scheme_errors: what 'int8-dynamic' does to inputs was measured of some of these batches only. Try: cf.sensitivities(loss_fn, ",
        lambda: cf.scheme_errors(
            loss_of()[1], [measured(), cf.sensitivities(loss_of()[0], where=WHERE, schemes="fp8-dynamic")(loss_of()[1], tokens())]
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("says", "mistake"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named(says: str, mistake: Callable[[], Any]) -> None:
    with pytest.raises(cf.InputError) as caught:
        mistake()
    assert says in str(caught.value)
