"""cf.quantize(step, "auto"): what is measured against its definition, choices against all choices, and what it says to mistakes."""

import itertools
import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from colofunc_plugins import tensor, zero
from quantize_matrix import WHERE, step_of, tokens
from torch import nn

import colofunc as cf
from colofunc.compiler import scheme_decision
from colofunc.executors.launch import launch
from colofunc.ops.quantized import Quantized
from colofunc.ops.quantizers import BUILT_IN
from colofunc.planner.scheme_search import choice_of
from colofunc.planner.schemes import SchemeChoice, SchemeErrors
from colofunc.planner.weight_seconds import weight_seconds
from colofunc.program.cost import node_s
from colofunc.program.lazy import lazy_tensor

FEW = ("int8", "mxfp8", "nf4")


def loss_of(kind: str = "arguments") -> tuple[Callable[..., Any], Any]:
    forward, params, _ = step_of("arguments")
    return lambda params, batch: forward(params, batch).square().mean(), params


@cache
def measured() -> Mapping[str, Any]:
    loss, params = loss_of()
    return cf.sensitivities(loss, where=WHERE)(params, tokens())


@cache
def errors(schemes: tuple[str, ...] = ("int8", "fp8", "mxfp8", "nvfp4", "int4-g128", "nf4")) -> SchemeErrors:
    return cf.scheme_errors(loss_of()[1], measured(), schemes)


# ---- what is measured ----


def test_sensitivities_are_sums_over_rows_of_inputs_and_of_the_outputs_gradients() -> None:
    """Of hooks around the module's layers, one of which runs twice."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh()).double()
    model = cf.functional(net)
    x = torch.randn(3, 4, 6, dtype=torch.float64)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        first = model.apply(params, {}, x)[0]
        return nn.functional.linear(first, params["2.weight"]).square().mean()

    found = cf.sensitivities(loss)(model.params, x)
    w0, w2 = model.params["0.weight"], model.params["2.weight"]
    rows = x.reshape(12, 6)
    outputs, inputs = {}, {}
    inputs["0.weight"] = [rows]
    y0 = (rows @ w0.T + model.params["0.bias"]).detach().requires_grad_()
    y2 = torch.tanh(y0) @ w2.T + model.params["2.bias"]
    y4 = torch.tanh(y2) @ w2.T
    inputs["2.weight"] = [torch.tanh(y0), torch.tanh(y2)]
    grads = torch.autograd.grad(y4.square().mean(), (y0, y2, y4))
    outputs = {"0.weight": grads[:1], "2.weight": grads[1:]}
    for name in ("0.weight", "2.weight"):
        torch.testing.assert_close(found["inputs"][name], sum(x.T @ x for x in inputs[name]).detach())
        torch.testing.assert_close(found["outputs"][name], sum(g.square().sum(0) for g in outputs[name]))


class Tied(nn.Module):
    """A table that is looked up in, and read as a product."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 64)
        self.head = nn.Linear(64, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.table(ids)))


def test_tables_are_measured_number_by_number_and_tied_ones_as_both() -> None:
    torch.manual_seed(0)
    model = cf.functional(Tied())
    ids = torch.tensor([[3, 5, 3], [7, 3, 0]])

    def loss(params: Any, ids: torch.Tensor) -> torch.Tensor:
        return model.apply(params, {}, ids)[0].square().mean()

    found = cf.sensitivities(loss)(model.params, ids)
    table = model.params["table.weight"]
    rows = table[ids].detach().requires_grad_()
    (g,) = torch.autograd.grad((torch.tanh(rows) @ table.T).square().mean(), rows)
    wanted = torch.zeros_like(table).index_add(0, ids.flatten(), 6 * g.square().flatten(0, 1))
    torch.testing.assert_close(found["lookups"]["table.weight"], wanted)
    option = cf.scheme_errors(model.params, found, ["nvfp4"]).weights[0].options[1]
    off = BUILT_IN["nvfp4"].pack(table).dequantize() - table
    of_rows = float((wanted * off.square()).sum()) / 2
    product = ((off @ found["inputs"]["table.weight"]) * off).sum(1) * found["outputs"]["table.weight"]
    assert option.error == pytest.approx(of_rows + float(product.sum()) / 2, rel=1e-5)
    with cf.testing.float64():
        for plan in ({"table.weight": "(tp v) i"}, zero(3, "dp")):
            cf.testing.check(cf.shard(cf.sensitivities(loss), cf.Mesh(dp=2, tp=2), plan), model.params, ids, steps=1)


def test_tables_are_chosen_for_but_not_calibrated() -> None:
    loss, params = loss_of()
    found = cf.sensitivities(loss)(params, tokens())
    table = cf.scheme_errors(params, found, ["int8", cf.gptq(found["inputs"])])
    assert [[option.name for option in weight.options] for weight in table.weights] == [
        ["as it is", "int8"], ["as it is", "int8", "gptq"], ["as it is", "int8", "gptq"],
    ]  # fmt: skip
    choice = table.within(38_000)
    assert choice.schemes["table.weight"] == "int8"
    step = cf.quantize(cf.shard(step_of("arguments")[0], cf.Mesh(dp=2)), choice)
    assert {name for name, leaf in step.init(params, tokens()).items() if isinstance(leaf, Quantized)} == {"table.weight", *WHERE}


@pytest.mark.parametrize("plan", ["zero3", "columns", "auto"])
def test_sensitivities_on_a_mesh_are_those_of_one_device(plan: str) -> None:
    loss, params = loss_of()
    plans = {"zero3": [zero(3, "dp")], "columns": [tensor("1d", "tp")], "auto": []}[plan]
    step = cf.shard(cf.sensitivities(loss, where=WHERE), cf.Mesh(dp=2, tp=2), *plans)
    with cf.testing.float64():
        cf.testing.check(step, params, tokens(), steps=1)
    assert cf.scheme_errors(params, step(params, tokens())).within(60_000).schemes == errors().within(60_000).schemes


def test_frozen_weights_beside_adapters_are_measured() -> None:
    _, state, model = step_of("adapters")

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return model.apply(params, model.buffers, x)[0].square().mean()

    found = cf.sensitivities(loss, where=WHERE)(state["params"], tokens())
    assert found["inputs"].keys() == found["outputs"].keys() == set(WHERE)
    table = cf.scheme_errors({**model.params, **model.frozen}, found, FEW, where=WHERE)
    assert [weight.name for weight in table.weights] == list(WHERE)


def test_the_rise_is_half_of_the_second_order_form() -> None:
    """Number by number, of the mean of two batches."""
    table = cf.scheme_errors(loss_of()[1], [measured(), measured()], FEW)
    for weight in table.weights[1:]:
        moments = measured()["inputs"][weight.name].double()
        squares = measured()["outputs"][weight.name].double()
        w = loss_of()[1][weight.name]
        for option in weight.options[1:]:
            assert option.scheme is not None
            found = option.scheme.pack(w)
            off = found.dequantize(torch.float64) - w.double()
            rise = sum(float(squares[r] * (off[r] @ moments @ off[r])) for r in range(len(w))) / 2
            assert option.error == pytest.approx(rise, rel=1e-9) and option.nbytes == found.nbytes


def test_the_estimate_is_the_rise_of_a_loss_whose_second_order_form_it_is() -> None:
    """Of outputs with independent gradients, the mean over labels of a step's own distribution: a linear classifier of many rows."""
    torch.manual_seed(0)
    w, x = torch.randn(8, 64) / 8, torch.randn(4000, 64)
    labels = torch.distributions.Categorical(logits=x @ w.T).sample()

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(nn.functional.linear(x, params["weight"]), labels)

    table = cf.scheme_errors({"weight": w}, cf.sensitivities(loss, where="weight")({"weight": w}, x), ("nf4", "nvfp4"), where="weight")
    for option in table.weights[0].options[1:]:
        assert option.scheme is not None
        # Labels are drawn, so the gradient is not 0: its part, which is odd in the change, cancels between the change and its opposite.
        off = option.scheme.pack(w).dequantize() - w
        both = loss({"weight": w + off}, x) + loss({"weight": w - off}, x)
        rise = float(both / 2 - loss({"weight": w}, x))
        assert option.error == pytest.approx(rise, rel=0.25)


def test_lazy_weights_and_those_on_ranks_have_the_errors_of_plain_ones() -> None:
    params = loss_of()[1]
    lazy = {name: lazy_tensor(w.shape, w.dtype, w.clone) for name, w in params.items()}
    placed = {name: cf.distribute(w, "(a o)" if w.dim() == 1 else "(a o) i", cf.Mesh(a=2)) for name, w in params.items()}
    for weights in (lazy, placed):
        assert cf.scheme_errors(weights, measured(), FEW).weights == errors(FEW).weights


# ---- what is chosen ----


def by_search(table: SchemeErrors, budget: int, keep: tuple[str, ...] = (), limit_s: float = math.inf) -> float:
    """The least error of all choices within a budget."""
    best = math.inf
    for options in itertools.product(*[weight.options[:1] if weight.name in keep else weight.options for weight in table.weights]):
        fits = sum(option.nbytes for option in options) <= budget and sum(option.seconds or 0.0 for option in options) <= limit_s
        best = min(best, sum(option.error for option in options)) if fits else best
    return best


@pytest.mark.parametrize("budget", [43_264, 44_000, 50_000, 60_000, 80_000, 150_000, 300_000])
def test_a_choice_has_the_least_error_within_its_bytes(budget: int) -> None:
    choice = errors().within(budget)
    assert choice.nbytes <= budget
    assert choice.error == pytest.approx(by_search(errors(), budget), rel=1e-12)
    assert choice.bound == pytest.approx(choice.error, rel=1e-6)
    assert "the least possible" in str(choice)


def test_what_is_kept_stays_and_counts() -> None:
    choice = errors().within(174_000, keep=("up.weight", "table.*"))
    assert choice.schemes["up.weight"] == "as it is" and choice.error == pytest.approx(by_search(errors(), 174_000, ("up.weight",)))
    assert choice.nbytes <= 174_000 and choice.schemes["down.weight"] == "int8"


def test_a_choice_prints_what_was_chosen_and_why() -> None:
    table = SchemeErrors(tuple(attrs.evolve(weight, options=tuple(map(rounded, weight.options))) for weight in errors().weights))
    assert str(table.within("60KB", keep="table.weight")) == (
        "58.25 KiB of 264 KiB within 58.59 KiB; the loss rises by 5.00e-06 by the estimate, the least possible\n"
        "weight        scheme      bytes    error  why\n"
        "table.weight  as it is    8,192  0.0e+00  keep='table.weight'\n"
        "up.weight     int8       33,792  0.0e+00  nothing has less error\n"
        "down.weight   int4-g128  17,664  5.0e-06  int8 takes 15.25 KiB more for 5.0e-06 less; 352 B are free"
    )


def test_a_choice_that_was_not_looked_for_claims_no_least_error() -> None:
    table = SchemeErrors(tuple(attrs.evolve(weight, options=tuple(map(rounded, weight.options))) for weight in errors().weights))
    assert str(table.uniform("nf4")) == (
        "42.5 KiB of 264 KiB within 42.5 KiB; the loss rises by 2.10e-05 by the estimate\n"
        "weight        scheme     bytes    error  why\n"
        "table.weight  as it is   8,192  0.0e+00  nothing was measured of it\n"
        "up.weight     nf4       17,920  1.1e-05  int4-g128 has less error in no more bytes\n"
        "down.weight   nf4       17,408  1.0e-05  int4-g128 takes 256 B more for 5.0e-06 less; 0 B are free"
    )


def test_a_choice_of_a_step_says_where_less_error_takes_no_more_bytes() -> None:
    """As the fastest may: it has no limit of its own, of which something is free."""
    choice = attrs.evolve(errors().uniform("nf4"), budget_bytes=None)
    _, up, down = (one.why(choice) for one in choice.weights)
    assert up == "int4-g128 has less error in no more bytes"
    assert down.startswith("int4-g128 takes 256 B more for ") and down.endswith("e-06 less")


def rounded(option: Any) -> Any:
    """Errors to millionths, so that a text does not depend on last places; seconds are not asked for."""
    return attrs.evolve(option, error=math.ceil(option.error * 1e6 - 0.1) * 1e-6)


# ---- a step with it ----


def test_each_weight_has_its_scheme() -> None:
    forward, params, _ = step_of("arguments")
    step = cf.quantize(cf.shard(forward, cf.Mesh(dp=2), zero(3, "dp")), errors().within("60KB"))
    placed = step.init(params, tokens())
    schemes = {name: leaf.scheme for name, leaf in placed.items() if isinstance(leaf, Quantized)}
    assert schemes == {"up.weight": "int8", "down.weight": "int4-g128"}
    for name, scheme in (("up.weight", "int8"), ("down.weight", "int4-g128")):
        for mine, whole in zip(placed[name].parts, BUILT_IN[scheme].pack(params[name]).parts, strict=True):
            assert torch.equal(mine.full(), whole)
    targets = {node.target for node in step.lower(params, tokens()).program.nodes}
    assert {"colofunc.int8_linear", "colofunc.int4_linear"} <= targets
    torch.testing.assert_close(step(placed, tokens()).full(), step.eager(params, tokens()))


def test_a_budget_for_all_leaves_all_as_they_are() -> None:
    forward, params, _ = step_of("arguments")
    step = cf.quantize(forward, errors().within("1GB"))
    assert all(isinstance(leaf, torch.Tensor) for leaf in step.init(params, tokens()).values())
    torch.testing.assert_close(step(params, tokens()).full(), forward(params, tokens()))


def test_one_scheme_need_not_be_in_a_list() -> None:
    for schemes in ("int8", BUILT_IN["int8"]):
        assert cf.scheme_errors(loss_of()[1], measured(), schemes).weights == errors(("int8",)).weights


def test_calibrated_schemes_are_chosen_too() -> None:
    forward, params, _ = step_of("arguments")
    choice = cf.scheme_errors(params, measured(), [cf.awq(measured()["inputs"]), "nvfp4"]).within(50_000)
    assert choice.schemes == {"table.weight": "as it is", "up.weight": "awq", "down.weight": "awq"}
    step = cf.quantize(cf.shard(forward, cf.Mesh(tp=2), tensor("1d", "tp")), choice)
    assert step.init(params, tokens())["up.weight"].input_scale is not None
    with cf.testing.float64():
        assert cf.testing.check(step, params, tokens(), steps=1).worst <= 1e-10


# ---- seconds, and a whole step ----


def test_seconds_of_a_weight_are_those_of_its_products_and_gathers() -> None:
    """By hand: products on one device; on two, a half of the gather of all int8 numbers and, by bytes, of that of small tensors."""
    forward, params, _ = step_of("arguments")
    low = cf.quantize(cf.shard(forward, cf.Mesh()), "int8", where=WHERE).lower(params, tokens())
    found = weight_seconds(low.program, low.priced, low.registry.rule, WHERE)
    products = [node_s(node, low.program.values, low.priced, low.registry.rule) for node in low.program.nodes if "int8" in node.target]
    assert list(found.values()) == pytest.approx(products) and min(products) > 0
    timed = cf.scheme_errors(params, measured(), ["int8"], step=forward, args=(params, tokens()))
    assert [weight.options[-1].seconds for weight in timed.weights[1:]] == pytest.approx(products)
    low = cf.quantize(cf.shard(forward, cf.Mesh(dp=2, topology="8xa100-80g"), zero(3, "dp")), "int8", where=WHERE).lower(params, tokens())
    buckets = {torch.float32: 0.0, torch.int8: 0.0}
    products = []
    for node in low.program.nodes:
        seconds = node_s(node, low.program.values, low.priced, low.registry.rule)
        if node.target in ("colofunc.pack", "colofunc.all_gather_start"):
            buckets[low.program.values[node.results[0]].dtype] += seconds
        elif node.target == "colofunc.int8_linear":
            products.append(seconds)
    assert min(buckets.values()) > 0
    found = weight_seconds(low.program, low.priced, low.registry.rule, WHERE)
    for name, scales, product in (("up.weight", 128, products[0]), ("down.weight", 64, products[1])):
        in_bucket = scales / 1536  # a rank's part of the bucket of float32 tensors has so many elements
        wanted = product + in_bucket * buckets[torch.float32] + buckets[torch.int8] / 2
        views = found[name] - wanted  # the copies out of the buckets
        assert 0 <= views <= 0.5 * wanted


def test_a_limit_of_seconds_is_kept() -> None:
    forward, params, _ = step_of("arguments")
    timed = cf.scheme_errors(params, measured(), FEW, step=cf.shard(forward, cf.Mesh(dp=2), zero(3, "dp")), args=(params, tokens()))
    fastest = sum(min(option.seconds or 0.0 for option in weight.options) for weight in timed.weights)
    free = timed.within(60_000)
    assert free.seconds is not None and free.seconds > fastest
    for share in (0.3, 0.7):
        limit_s = fastest + share * (free.seconds - fastest)
        for budget in (60_000, 200_000):
            wanted = by_search(timed, budget, limit_s=limit_s)
            if math.isinf(wanted):
                with pytest.raises(cf.PlanError, match=r"no choice within .*,000 bytes takes .* or less; the fastest of any size takes"):
                    timed.within(budget, limit_s=limit_s)
                continue
            choice = timed.within(budget, limit_s=limit_s)
            assert choice.error == pytest.approx(wanted, rel=1e-12)
            assert choice.seconds is not None and choice.seconds <= limit_s


def finished(step: Any, *args: Any) -> Any:
    """What a step is lowered to; None where it is within no budget, without a search for the least one."""
    try:
        return step.compiler.lower(step, step.arguments(args), says_least=False)
    except cf.PlanError:
        return None


def by_trying(table: SchemeErrors, chains: Mapping[str, Callable[[SchemeChoice], Any]], args: Any) -> list[tuple[float, float, str]]:
    """(error, seconds, chain) of all schemes in all chains that fit."""
    found = []
    for picks in itertools.product(*[range(len(weight.options)) for weight in table.weights]):
        choice = choice_of(table.weights, picks)
        for name, staged in chains.items():
            low = finished(staged(choice), *args)
            if low is not None:
                found.append((choice.error, low.lanes().end_s, name))
    return found


def layers(
    count: int, size: int, rows: int, *schemes: str | cf.ext.Quantizer
) -> tuple[Callable[..., Any], Any, torch.Tensor, SchemeErrors]:
    """(forward, its parameters, a batch, errors) of a few products."""
    torch.manual_seed(0)
    model = cf.functional(nn.Sequential(*[layer for _ in range(count) for layer in (nn.Linear(size, size), nn.GELU())]))
    x = torch.randn(rows, size)

    def forward(params: Any, x: torch.Tensor) -> torch.Tensor:
        return model.apply(params, {}, x)[0]

    sensitivities = cf.sensitivities(lambda params, x: forward(params, x).square().mean())(model.params, x)
    return forward, model.params, x, cf.scheme_errors(model.params, sensitivities, schemes)


def is_best(step: Any, args: Any, tried: list[tuple[float, float, str]], rise: float | None, limit_s: float = math.inf) -> SchemeChoice:
    """What a step has chosen, which is the best of all that were tried."""
    choice, seconds = cf.scheme_choice(step, *args), step.lower(*args).lanes().end_s
    allowed = [one[:2] for one in tried if (rise is None or one[0] <= rise) and one[1] <= limit_s]
    error, least_s = min(allowed) if rise is None else min(allowed, key=lambda one: one[1])
    assert choice.error <= (math.inf if rise is None else rise) and seconds <= limit_s
    if rise is None:
        assert choice.error == pytest.approx(error, rel=1e-9)
    if limit_s == math.inf:
        assert seconds == pytest.approx(least_s, rel=1e-9)
    return choice


@pytest.mark.parametrize("rise", [1e-6, None])
def test_schemes_and_residency_are_decided_together(rise: float | None) -> None:
    """Against all schemes with all policies. Schemes decided first are none, where copies make it fit: that takes longer; or the
    smallest, where nothing is to be copied: these have more error."""
    forward, params, x, table = layers(2, 256, 16, "int8", "nf4")
    sharded = cf.shard(forward, cf.Mesh())
    chains: dict[str, Callable[[SchemeChoice], Any]] = {
        policy: lambda choice, policy=policy: cf.offload(cf.quantize(sharded, choice), budget="450KiB", policy=policy)
        for policy in ("auto", "host")
    }
    step = cf.quantize(cf.offload(sharded, budget="450KiB"), "auto", errors=table, rise=rise)
    choice = is_best(step, (params, x), by_trying(table, chains, (params, x)), rise)
    assert step.lower(params, x).memory().peak_bytes["device"] <= 450 << 10
    if rise is not None:
        copied = finished(chains["auto"](table.within("1GB")), params, x)
        assert step.lower(params, x).lanes().end_s < copied.lanes().end_s and choice.error < table.uniform("nf4").error
    torch.testing.assert_close(step(params, x).full(), step.eager(params, x))


def test_schemes_and_recomputation_are_decided_together() -> None:
    """Weights stay as they are where what backward reads can be made again, and become small where that takes too long."""
    forward, params, x, table = layers(3, 128, 192, "int8")

    def gradient(params: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(forward(params, x).square().mean(), x)[0]

    sharded, budget = cf.shard(gradient, cf.Mesh()), 700_000
    chains: dict[str, Callable[[SchemeChoice], Any]] = {
        policy: lambda choice, policy=policy: cf.checkpoint(cf.quantize(sharded, choice), budget=budget, policy=policy)
        for policy in ("auto", "everything", "nothing")
    }
    tried = by_trying(table, chains, (params, x))
    assert finished(chains["everything"](table.within("1GB")), params, x) is None
    auto = cf.checkpoint(cf.quantize(sharded, "auto", errors=table, budget=budget))
    choice = is_best(auto, (params, x), tried, None)
    assert choice.error == 0  # with schemes decided first, so that all values can be kept, it would not be
    again_s = auto.lower(params, x).lanes().end_s
    quick = cf.checkpoint(cf.quantize(sharded, "auto", errors=table, budget=budget, limit_s=0.95 * again_s))
    choice = is_best(quick, (params, x), tried, None, 0.95 * again_s)
    assert choice.error > 0
    assert "tried with the whole step:" in str(choice) and "schemes of weights: " in quick.lower(params, x).plan.notes[-1]
    is_best(cf.checkpoint(cf.quantize(sharded, "auto", errors=table, budget=budget, rise=1e-6)), (params, x), tried, 1e-6)


@pytest.mark.filterwarnings("ignore:the plan uses")
def test_schemes_of_frozen_weights_are_chosen_with_the_step_that_trains_adapters() -> None:
    """They are packed without values while the step is traced, in each choice that is tried."""
    step_fn, state, model = step_of("adapters")
    table = cf.scheme_errors(model.frozen, measured(), ("int8", "nf4"), where=WHERE)
    sharded = cf.shard(step_fn, cf.Mesh(dp=2), zero(1, "dp"))
    wide_bytes = sharded.lower(state, tokens()).memory().peak_bytes["device"]
    step = cf.quantize(sharded, "auto", where=WHERE, errors=table, budget=int(wide_bytes * 0.8))
    choice = cf.scheme_choice(step, state, tokens())
    assert {weight.option.name for weight in choice.weights} & {"int8", "nf4"}
    assert step.lower(state, tokens()).memory().peak_bytes["device"] <= wide_bytes * 0.8
    with cf.testing.float64():
        cf.testing.check(cf.quantize(sharded, choice, where=WHERE), state, tokens(), steps=1)


@pytest.mark.sweep
@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_schemes_residency_and_recomputation_are_decided_together(share: float) -> None:
    """QLoRA under ZeRO-1, against all schemes with all policies."""
    step_fn, state, model = step_of("adapters")
    table = cf.scheme_errors(model.frozen, measured(), ("int8", "nf4"), where=WHERE)
    sharded = cf.shard(step_fn, cf.Mesh(dp=2), zero(1, "dp"))
    budget = int(sharded.lower(state, tokens()).memory().peak_bytes["device"] * share)

    def checkpointed(policy: str) -> Callable[[SchemeChoice], Any]:
        return lambda choice: cf.checkpoint(cf.quantize(sharded, choice, where=WHERE), budget=budget, policy=policy)

    chains = {policy: checkpointed(policy) for policy in ("everything", "nothing", "auto")}
    chains["offload"] = lambda choice: cf.offload(cf.quantize(sharded, choice, where=WHERE), budget=budget)
    chains["both"] = lambda choice: cf.offload(chains["auto"](choice), budget=budget)
    tried = by_trying(table, chains, (state, tokens()))
    for rise in (None, 1e-9, 1e-5, 1e-2):
        auto = cf.quantize(sharded, "auto", where=WHERE, errors=table, rise=rise)
        is_best(cf.checkpoint(cf.offload(auto, budget=budget)), (state, tokens()), tried, rise)


def test_what_was_chosen_stands_and_is_shared() -> None:
    """For other batches, in either order of the chain, for another step on the same state, and for a state that has it already."""
    forward, params, x, table = layers(2, 256, 16, "int8", "nf4")
    options: dict[str, Any] = {"errors": table, "rise": 1e-6, "budget": "250KiB"}
    sharded = cf.shard(forward, cf.Mesh(dp=2), zero(3, "dp"))
    first, last = cf.quantize(sharded, "auto", **options), cf.shard(cf.quantize(forward, "auto", **options), cf.Mesh(dp=2), zero(3, "dp"))
    choice = cf.scheme_choice(first, params, x)
    assert choice.schemes == cf.scheme_choice(last, params, x).schemes
    placed = first.init(params, x)
    assert any(isinstance(leaf, Quantized) for leaf in placed.values())
    schemes = {name: leaf.scheme for name, leaf in placed.items() if isinstance(leaf, Quantized)}
    assert schemes.items() <= dict(choice.schemes).items()
    wanted = first(placed, x).full()
    assert first(placed, x[:8]).full().shape == (8, 256)
    assert torch.equal(cf.quantize(sharded, choice)(placed, x).full(), wanted)
    tight = cf.quantize(sharded, "auto", errors=table, keep="*")
    assert cf.scheme_choice(tight, params, x).error == 0
    loose = cf.quantize(sharded, "auto", errors=table)  # which would leave all as they are
    assert cf.scheme_choice(loose, placed, x).schemes == choice.schemes
    with cf.testing.float64():
        cf.testing.check(first, params, x, steps=1)


def test_a_plan_has_the_schemes_and_a_step_that_follows_it_or_runs_elsewhere_searches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, params, x, table = layers(2, 256, 16, "int8", "nf4")

    def auto(**options: Any) -> Any:
        sharded = cf.shard(forward, cf.Mesh(dp=2), zero(3, "dp"))
        return cf.quantize(sharded, "auto", **{"errors": table, "rise": 1e-6, "budget": "250KiB", **options})

    step = auto()
    wanted, chosen = step(params, x).full(), cf.scheme_choice(step, params, x).schemes
    plan = step.lower(params, x).plan
    plan.save(tmp_path / "plan.json")
    loaded = cf.Plan.load(tmp_path / "plan.json")
    assert dict(loaded.taken) == chosen and "nf4" in chosen.values()
    plain = auto(keep="*", budget=None).lower(params, x).plan
    name = next(name for name, scheme in chosen.items() if scheme == "nf4")
    assert f"{name}: as it is -> nf4" in plain.diff(plan)

    def no_search(*args: Any) -> Any:
        raise AssertionError("it was decided before")

    monkeypatch.setattr(scheme_decision, "search", no_search)
    for again in (auto().with_plan(loaded), step.with_plan(attrs.evolve(plan, taken=())), step.on("simulated"), step.on("compiled")):
        assert cf.scheme_choice(again, params, x).schemes == chosen
    assert torch.equal(auto().with_plan(loaded)(params, x).full(), wanted)
    with pytest.raises(AssertionError, match="decided before"):
        auto().lower(params, x)
    refusals = {
        "the plan has 'nf4' for": lambda: auto(keep=name).with_plan(loaded),
        "the plan has no scheme for": lambda: auto().with_plan(attrs.evolve(plan, taken=plan.taken[:1])),
        "the plan has 'other.weight', of which nothing": lambda: auto().with_plan(attrs.evolve(plan, taken=(("other.weight", "int8"),))),
        "rise=1e-12): with the schemes of the plan the loss rises by": lambda: auto(rise=1e-12).with_plan(loaded),
    }
    for says, make in refusals.items():
        with pytest.raises(cf.PlanError) as caught:
            make().lower(params, x)
        assert says in str(caught.value) and "the step without a plan, which chooses anew" in str(caught.value)


def test_a_search_packs_nothing() -> None:
    """All schemes of all weights together would take more than the weights; only what was chosen is packed, once."""
    made: list[int] = []

    def counted(rows: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if not rows.is_meta:
            made.append(rows.shape[0])
        return BUILT_IN["int8"].quantize(rows)

    forward, params, x, table = layers(2, 256, 16, "nf4", cf.ext.Quantizer("counted", form="int8", quantize=counted))
    made.clear()
    step = cf.quantize(cf.shard(forward, cf.Mesh(dp=2)), "auto", errors=table, rise=1e-6)
    choice = cf.scheme_choice(step, params, x)
    assert len(choice.tried) > 2 and not made
    step(params, x)
    step(params, x[:8])
    assert made == [256] * list(choice.schemes.values()).count("counted")


def on_ranks() -> Any:
    forward, params, x, table = layers(2, 256, 16, "int8", "nf4")
    sharded = cf.shard(forward, cf.Mesh(dp=2), zero(3, "dp"))
    step = cf.quantize(sharded, "auto", errors=table, rise=1e-6, budget="250KiB")
    refused = ""
    try:
        cf.quantize(sharded, "auto", errors=table, budget="50KiB").lower(params, x)
    except cf.PlanError as error:
        refused = str(error)
    out = step(step.init(params, x), x).full()
    return dict(cf.scheme_choice(step, params, x).schemes), torch.equal(out, step(step.init(params, x), x).full()), refused, mistakes()


def mistakes() -> list[str]:
    """What ranks say of a function that fails on both, and of one that fails on rank 1."""
    _, params, x, table = layers(2, 256, 16, "int8")
    mesh, said = cf.Mesh(dp=2), []
    for alone in (False, True):

        def wrong(params: Any, x: torch.Tensor, alone: bool = alone) -> torch.Tensor:
            if alone and mesh.is_main:
                return x * 2
            raise ZeroDivisionError("a mistake in the step")

        try:
            cf.quantize(cf.shard(wrong, mesh), "auto", errors=table).lower(params, x)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.dist
def test_real_ranks_take_what_rank_0_has_chosen() -> None:
    forward, params, x, table = layers(2, 256, 16, "int8", "nf4")
    simulated = cf.quantize(cf.shard(forward, cf.Mesh(dp=2), zero(3, "dp")), "auto", errors=table, rise=1e-6, budget="250KiB")
    results = launch(on_ranks, 2, timeout_s=200)
    assert results[0][:3] == results[1][:3]
    assert results[0][0] == cf.scheme_choice(simulated, params, x).schemes and results[0][1]
    assert "with weights of 69,632 bytes, the least possible, the step is not within its budget" in results[0][2]
    own = "ZeroDivisionError: a mistake in the step"
    assert results[1][3] == [own, own] and results[0][3][0] == own
    assert results[0][3][1].startswith("CollectiveError: the traced program failed on rank 1: " + own)


# ---- what it says to mistakes ----


def auto(**options: Any) -> Any:
    forward, _, _ = step_of("arguments")
    return cf.quantize(forward, "auto", **options)


def nan_batch() -> Any:
    loss, params = loss_of()
    params = {**params, "up.bias": torch.full_like(params["up.bias"], math.nan)}
    return cf.scheme_errors(params, cf.sensitivities(loss, where=WHERE)(params, tokens()))


def infinite_loss() -> Any:
    loss, params = loss_of()
    return cf.scheme_errors(params, cf.sensitivities(lambda p, x: loss(p, x) * math.inf, where=WHERE)(params, tokens()))


def unmeasured_step() -> Any:
    forward, params, _ = step_of("arguments")
    choice = cf.scheme_errors({"up.weight": params["up.weight"]}, measured(), FEW).within("40KB")
    return cf.quantize(forward, choice).lower(params, tokens())


def quantized_otherwise() -> Any:
    forward, params, _ = step_of("arguments")
    placed = cf.quantize(forward, "nf4", where=WHERE).init(params, tokens())
    return cf.quantize(forward, errors().within("60KB")).lower(placed, tokens())


MISTAKES: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "NaN": (
        cf.InputError,
        "cf.scheme_errors: the moments of 'down.weight' have NaN or infinite numbers, so its inputs had. Try: a calibration batch without",
        nan_batch,
    ),
    "infinite": (
        cf.InputError,
        "cf.scheme_errors: the squares of gradients of 'up.weight' have NaN or infinite numbers, so the loss or its gradients had",
        infinite_loss,
    ),
    "too little": (
        cf.PlanError,
        "these weights take 43,264 bytes at least, each in the smallest of the schemes, and the budget is 43,263. Try: budget=43264",
        lambda: errors().within(43_263),
    ),
    "keep": (
        cf.InputError,
        "keep='upp.weight' matches none of the weights that were measured; did you mean 'up.weight'",
        lambda: auto(budget="1MB", keep="upp.weight", errors=errors()),
    ),
    "no errors": (
        cf.InputError,
        "cf.quantize(scheme='auto', errors=None): a choice is made by what was measured. Try: errors=cf.scheme_errors(weights, ",
        lambda: auto(budget="1MB"),
    ),
    "no rise": (
        cf.InputError,
        "cf.quantize(scheme='auto', rise='1e-3'): give a number, 0 or more. Try: rise=1e-3",
        lambda: auto(rise="1e-3", errors=errors()),
    ),
    "a budget of nothing": (cf.InputError, "cf.quantize(budget=): '0GB' is no size", lambda: auto(budget="0GB", errors=errors())),
    "too small a budget": (
        cf.PlanError,
        "cf.quantize(scheme='auto'): with weights of 43,264 bytes, the least possible, the step is not within its budget: the leanest plan "
        "that was tried has a peak of ",
        lambda: auto(budget=40_000, errors=errors()).lower(loss_of()[1], tokens()),
    ),
    "too little time": (
        cf.PlanError,
        "cf.quantize(scheme='auto', limit_s=0.0): the fastest step that was found takes ",
        lambda: auto(limit_s=0.0, errors=errors(FEW)).lower(loss_of()[1], tokens()),
    ),
    "a state that is quantized too much": (
        cf.PlanError,
        "cf.quantize(scheme='auto', rise=1e-12): weights that are quantized already let the loss rise by ",
        lambda: auto(rise=1e-12, errors=errors(FEW)).lower(cf.quantize(len, "nf4").init(loss_of()[1]), tokens()),
    ),
    "no open schemes": (
        cf.InputError,
        "cf.scheme_choice: the step chooses no schemes. Try: step = cf.quantize(step, 'auto', errors=cf.scheme_errors(...))",
        lambda: cf.scheme_choice(cf.quantize(step_of("arguments")[0], "int8"), loss_of()[1], tokens()),
    ),
    "budget of another": (
        cf.InputError,
        "cf.quantize(scheme='int8'): budget is for scheme 'auto'. Try: where= for which weights",
        lambda: cf.quantize(len, "int8", budget="1MB"),
    ),
    "scheme": (
        cf.InputError,
        "cf.scheme_errors: there is no scheme 'int7'; did you mean 'int8'",
        lambda: cf.scheme_errors(loss_of()[1], measured(), ["int7"]),
    ),
    "no schemes": (
        cf.InputError,
        "cf.scheme_errors(schemes=()): there is nothing to choose from. Try: schemes=('int8', 'fp8')",
        lambda: cf.scheme_errors(loss_of()[1], measured(), ()),
    ),
    "no name of a scheme": (
        cf.InputError,
        "cf.scheme_errors: 3 in schemes= is of type int. Try: names of schemes (int8, fp8, fp8-g128, mxfp8, nvfp4, int4-g128, nf4), "
        "cf.gptq(moments)",
        lambda: cf.scheme_errors(loss_of()[1], measured(), (3,)),
    ),
    "a model": (
        cf.InputError,
        "cf.scheme_errors: weights are of type Tied. Try: a dict of them by name, such as model.params",
        lambda: cf.scheme_errors(Tied(), measured()),
    ),
    "other rows": (
        cf.InputError,
        "cf.scheme_errors: 'up.weight' has 64 rows, and its squares of gradients are (256,). Try: sensitivities of this model",
        lambda: cf.scheme_errors({"up.weight": torch.ones(64, 128)}, measured()),
    ),
    "other rows of a table": (
        cf.InputError,
        "cf.scheme_errors: 'table.weight' has 8 rows, and its squares of gradients of rows are (16, 128). Try: sensitivities of this model",
        lambda: cf.scheme_errors({"table.weight": torch.ones(8, 128)}, cf.sensitivities(loss_of()[0])(loss_of()[1], tokens())),
    ),
    "a choice and a budget": (
        cf.InputError,
        "cf.quantize(scheme=a choice for 3 weights): budget is for scheme 'auto'. Try: where= for which weights",
        lambda: cf.quantize(len, errors().within("60KB"), budget="60KB"),
    ),
    "a scheme of one's own and a budget": (
        cf.InputError,
        "cf.quantize(scheme=the scheme 'gptq'): budget is for scheme 'auto'. Try: where= for which weights",
        lambda: cf.quantize(len, cf.gptq(measured()["inputs"]), budget="60KB"),
    ),
    "inputs in float8": (
        cf.InputError,
        "cf.scheme_errors: 'fp8-dynamic' rounds inputs of layers too, and what that does to them was not measured. Try: ",
        lambda: cf.scheme_errors(loss_of()[1], measured(), ["fp8-dynamic"]),
    ),
    "inputs": (
        cf.InputError,
        "cf.scheme_errors: 'int8-dynamic' rounds inputs of layers too, and what that does to them was not measured. Try: ",
        lambda: cf.scheme_errors(loss_of()[1], measured(), ["int8-dynamic"]),
    ),
    "moments only": (
        cf.InputError,
        "cf.scheme_errors: there are no sensitivities. Try: what a step of cf.sensitivities returns, or a list of such",
        lambda: cf.scheme_errors(loss_of()[1], measured()["inputs"]),
    ),
    "where": (
        cf.InputError,
        "cf.scheme_errors: where='*.wait' matches no weight of two dims and more",
        lambda: cf.scheme_errors(loss_of()[1], measured(), where="*.wait"),
    ),
    "where of the measuring": (
        cf.InputError,
        "cf.sensitivities: where='norm.weight' matches no weight that a linear layer or a lookup reads",
        lambda: cf.sensitivities(loss_of()[0], where="norm.weight")(loss_of()[1], tokens()),
    ),
    "no loss": (
        cf.InputError,
        "cf.sensitivities: the function returned a tensor of shape (8, 4, 128), and is to return a loss of shape (). Try: loss.mean()",
        lambda: cf.sensitivities(step_of("arguments")[0], where=WHERE)(loss_of()[1], tokens()),
    ),
    "no values": (
        cf.InputError,
        "cf.scheme_errors: 'up.weight' has no values. Try: the model's own weights, or lazy ones that can be made",
        lambda: cf.scheme_errors({"up.weight": torch.empty(256, 128, device="meta")}, measured()),
    ),
    "seconds": (
        cf.InputError,
        "limit_s: these errors have no seconds. Try: cf.scheme_errors(..., step=step, args=(state, batch))",
        lambda: errors().within("1MB", limit_s=1.0),
    ),
    "uniform": (cf.InputError, "there are no errors of the scheme 'awq'; schemes: 'as it is'", lambda: errors().uniform("awq")),
    "unmeasured": (cf.InputError, "cf.quantize: no scheme was chosen for 'table.weight'", unmeasured_step),
    "quantized": (
        cf.InputError,
        "cf.quantize: 'up.weight' is quantized already, as 'nf4', and the step asks for 'int8'. Try: the scheme that it has",
        quantized_otherwise,
    ),
    "quantized already": (
        cf.InputError,
        "cf.scheme_errors: 'up.weight' is quantized already, as 'int8'. Try: the weight that it was made of",
        lambda: cf.scheme_errors({"up.weight": BUILT_IN["int8"].pack(torch.ones(256, 128))}, measured()),
    ),
}


@pytest.mark.parametrize(("kind", "says", "mistake"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named(kind: type[Exception], says: str, mistake: Callable[[], Any]) -> None:
    with pytest.raises(kind) as caught:
        mistake()
    assert says in str(caught.value)


def test_nothing_to_keep_is_as_good_as_unsaid() -> None:
    for keep in ((), [], set[str]()):
        assert cf.quantize(len, "int8", keep=keep).transform("quantize") is not None
    with pytest.raises(cf.InputError, match="keep is for scheme 'auto'"):
        cf.quantize(len, "int8", keep=["*.head"])
