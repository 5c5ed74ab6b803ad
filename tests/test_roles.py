"""Roles of input leaves: given by who knows, observed in the program, whatever the order of arguments and the words in paths."""

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import tensor, ulysses, zero
from torch import Tensor, nn

import colofunc as cf
from colofunc.program.tracing.trace import trace
from colofunc.testing import models

D = torch.float64


def roles(fn: Callable[..., Any], *args: Any) -> dict[str, str]:
    program = trace(fn, args).program
    return {program.values[i].name: program.values[i].role for i in program.inputs if i not in program.constants}


def network() -> Any:
    torch.manual_seed(0)
    return cf.functional(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)).double())


def rows() -> Tensor:
    return torch.randn(4, 8, dtype=D, generator=torch.Generator().manual_seed(1))


# ---- given ----


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_the_order_of_arguments_and_their_names_decide_nothing(order: tuple[int, ...]) -> None:
    model, opt = network(), cf.adapt(torch.optim.AdamW, lr=1e-2)

    def step(*given: Any) -> Any:
        weights, statistics, moments, x = (given[order.index(k)] for k in range(4))

        def loss(p: Any) -> Any:
            out, new = model.apply(p, statistics["params"], x["buffers"])
            return (out**2).mean(), new

        (value, new), grads = cf.value_and_grad(loss, has_aux=True)(weights)
        return value, new, *opt.update(grads, moments["batch"], weights)

    # Words that say something else: nobody listens to them.
    parts = [model.params, {"params": model.buffers}, {"batch": opt.init(model.params)}, {"buffers": rows()}]
    found = roles(step, *(parts[k] for k in order))
    of = {f"given.{place}": ("param", "buffer", "state", "batch")[k] for place, k in enumerate(order)}
    assert found and all(role == of[name[: len("given.0")]] for name, role in found.items())


@pytest.mark.parametrize("nested", [False, True])
def test_a_forward_only_step_knows_its_weights(nested: bool) -> None:
    model = network()
    model.eval()
    state = {"params": model.params, "buffers": model.buffers, "opt": {"exp_avg": dict(model.params)}}

    def evaluate(x: Tensor, state: Any) -> Tensor:
        state = state["of"]["mine"] if nested else state
        return model.apply(state["params"], state["buffers"], x)[0]

    found = roles(evaluate, rows(), {"of": {"mine": state}} if nested else state)
    kinds = {"params": "param", "buffers": "buffer", "opt": "state"}
    assert found == {name: next((kinds[w] for w in name.split(".") if w in kinds), "batch") for name in found}


def test_a_gradient_with_respect_to_the_batch_leaves_it_the_batch() -> None:
    model = cf.functional(models.Mlp(8, 16).double())

    def forces(params: Any, x: Tensor) -> Any:
        return cf.value_and_grad(lambda x: model.apply(params, {}, x)[0].sum())(x)[1]

    found = roles(forces, model.params, rows())
    assert found.pop("x") == "batch" and set(found.values()) == {"param"}


# ---- carried ----


def carried(fn: Callable[..., Any], *args: Any) -> dict[str, str]:
    return {leaf.name: leaf.role for leaf in cf.shard(fn, cf.Mesh()).lower(*args).plan.inputs}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_what_functional_made_is_known_in_any_place_of_a_step_that_marks_nothing(order: tuple[int, ...]) -> None:
    model = network()
    model.eval()

    def out(*given: Any) -> Any:
        w, (statistics,), x = (given[order.index(k)] for k in range(3))
        return torch.func.functional_call(model.module, {**w["batch"], **statistics}, (x,))

    parts = [{"batch": model.params}, [model.buffers], rows()]
    found = carried(out, *(parts[k] for k in order))
    of = {f"given.{place}": ("param", "buffer", "batch")[k] for place, k in enumerate(order)}
    assert found and all(role == of[name[: len("given.0")]] for name, role in found.items())


class Graph(nn.Module):
    """A graph convolution: the adjacency is multiplied with rows of the batch from the left."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, dtype=D), nn.Linear(8, 4, dtype=D)

    def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
        return adjacency @ self.second(torch.relu(self.first(adjacency @ x)))


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_rows_beside_weights_that_carry_their_role_are_no_weights(order: tuple[int, ...]) -> None:
    model = cf.functional(Graph())

    def forward(*given: Any) -> Tensor:
        weights, adjacency, x = (given[order.index(k)] for k in range(3))
        return torch.func.functional_call(model.module, weights, (adjacency, x))

    def step(*given: Any) -> Any:
        at = order.index(0)
        return cf.value_and_grad(lambda w: forward(*given[:at], w, *given[at + 1 :]).sum())(given[at])

    parts = [model.params, torch.rand(4, 4, dtype=D), rows()]
    args = tuple(parts[k] for k in order)
    low = cf.shard(forward, cf.Mesh(dp=2), zero(3, "dp")).lower(*args)
    found = {leaf.name: leaf.role for leaf in low.plan.inputs}
    of = {f"given.{place}": ("param", "batch", "batch")[k] for place, k in enumerate(order)}
    assert found and all(role == of[name[: len("given.0")]] for name, role in found.items())
    # Rows that an evaluation has placed are not taken for weights by the step that trains.
    if order[0] == 2:
        evaluation, training = (cf.shard(fn, cf.Mesh(dp=2)) for fn in (forward, step))
        placed = evaluation.init(*args)
        assert placed.role == ""
        assert {leaf.role for leaf in training.lower(placed, *args[1:]).plan.inputs if leaf.name == "given.0"} == {"batch"}


def test_a_gradient_of_the_batch_by_hand_leaves_it_the_batch() -> None:
    model = cf.functional(models.Mlp(8, 16).double())
    def forces(x: Tensor, w: Any) -> Any:
        return cf.value_and_grad(lambda x: torch.func.functional_call(model.module, w, (x,)).sum())(x)

    found = carried(forces, rows(), model.params)
    assert found.pop("x") == "batch" and set(found.values()) == {"param"}


def test_state_carries_what_the_step_that_placed_it_knew() -> None:
    def train(state: Any, x: Tensor) -> Any:
        loss, grad = cf.value_and_grad(lambda w: (torch.tanh(x * w) ** 2).mean())(state["w"])
        momentum = 0.9 * state["m"] + grad
        return {"w": state["w"] - 0.1 * momentum, "m": momentum}, loss

    step = cf.shard(train, cf.Mesh(dp=2), zero(3, "dp"))
    state = step.init({"w": torch.randn(8, dtype=D), "m": torch.zeros(8, dtype=D)}, rows())
    use = cf.shard(lambda x, m, w: (x * w + m).sum(), cf.Mesh(dp=2))  # nothing here says what is a weight
    for given in (state, step(state, rows())[0]):
        assert (given["w"].role, given["m"].role) == ("param", "state")
        found = {leaf.name: leaf.role for leaf in use.lower(rows(), given["m"], given["w"]).plan.inputs}
        assert found == {"x": "batch", "m": "state", "w": "param"}


def test_weights_of_an_average_are_weights_where_operators_read_them_so() -> None:
    opt = cf.adapt(torch.optim.AdamW, lr=1e-2)
    average = opt.init({"w": torch.randn(8, 8)})["exp_avg"]  # carries "state"
    found = carried(lambda x, average: F.linear(x, average["w"]), torch.randn(4, 8), average)
    assert found == {"x": "batch", "average.w": "param"}


# ---- observed ----


def by_cf(f: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda x: cf.value_and_grad(f)(x)[1]


def by_autograd(f: Callable[..., Tensor], inside: bool = False) -> Callable[..., Any]:
    return lambda x: torch.autograd.grad(f(x.requires_grad_()), x, create_graph=inside)[0]


inside_by_autograd = partial(by_autograd, inside=True)


@pytest.mark.parametrize("order", list(permutations(range(2))))
@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (by_cf, by_cf),
        (by_cf, inside_by_autograd),
        (by_cf, torch.func.grad),
        (torch.func.grad, torch.func.grad),
        (by_autograd, inside_by_autograd),
    ],
)
def test_the_outermost_gradient_is_that_of_the_weights(outer: Any, inner: Any, order: tuple[int, ...]) -> None:
    def penalty(*given: Tensor) -> Any:
        x = given[order.index(1)]
        return outer(lambda w: inner(lambda x: torch.tanh(x @ w).sum())(x).square().sum())(given[order.index(0)])

    arguments = [torch.randn(8, 8), torch.randn(4, 8)]
    found = roles(penalty, *(arguments[k] for k in order))
    assert [found[f"given.{order.index(k)}"] for k in range(2)] == ["param", "batch"]


def test_a_weight_differentiated_inside_of_another_weights_gradient_stays_a_weight() -> None:
    def tuned(state: Any, x: Tensor) -> Any:
        def after(rate: Tensor) -> Tensor:
            grad = cf.value_and_grad(lambda w: (x @ w).square().mean())(state["w"])[1]
            return (x @ (state["w"] - rate * grad)).square().mean()

        return cf.value_and_grad(after)(state["rate"])

    found = roles(tuned, {"w": torch.randn(8, 8), "rate": torch.ones(())}, torch.randn(4, 8))
    assert found == {"state.w": "param", "state.rate": "param", "x": "batch"}


def test_zero_splits_the_rows_of_a_gradient_penalty() -> None:
    def penalty(w: Tensor, x: Tensor) -> Any:
        def loss(w: Tensor) -> Tensor:
            energy, force = cf.value_and_grad(lambda x: torch.tanh(x @ w).sum())(x)
            return energy + force.square().sum()

        return cf.value_and_grad(loss)(w)

    w, x = torch.randn(8, 8, dtype=D), rows()
    step = cf.shard(penalty, cf.Mesh(dp=2), zero(1, "dp"))
    assert {leaf.name: leaf.spec for leaf in step.lower(w, x).plan.inputs}["x"] == "(dp a) b"
    torch.testing.assert_close(step(w, x)[1].full(), penalty(w, x)[1], rtol=0, atol=1e-10)


def test_weights_of_code_that_marks_nothing_stand_where_operators_have_weights() -> None:
    params = {"buffers": {"w": torch.randn(16, 8), "b": torch.randn(16)}, "table": torch.randn(10, 8)}

    def logits(ids: Tensor, params: Any) -> Tensor:
        return F.linear(F.embedding(ids, params["table"]), params["buffers"]["w"], params["buffers"]["b"])

    found = roles(logits, torch.zeros(4, 3, dtype=torch.int64), params)
    assert found.pop("ids") == "batch" and set(found.values()) == {"param"}


def through_experts(x: Tensor, gate_up: Tensor, down: Tensor, up_bias: Tensor, down_bias: Tensor) -> Tensor:
    index, share = torch.zeros(4, 2, dtype=torch.int64), torch.full((4, 2), 0.5, dtype=D)
    biases = dict(gate_up_bias=up_bias, down_bias=down_bias)
    return cf.moe.experts(x, index, share, gate_up, down, **biases)


def through_lstm(x: Tensor, w_ih: Tensor, w_hh: Tensor) -> Tensor:
    zeros = torch.zeros(1, 8, dtype=D)
    return torch.lstm(x[:, None], (zeros[None], zeros[None]), (w_ih, w_hh), False, 1, 0.0, False, False, False)[0]


def through_groups(x: Tensor, w: Tensor) -> Tensor:
    return F.grouped_mm(x, w.transpose(1, 2), offs=torch.tensor([1, 4], dtype=torch.int32))


def through_packed(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.colofunc.int8_linear(x, data, scale, bias)


WEIGHTS: dict[Callable[..., Tensor], list[tuple[int, ...]]] = {
    through_experts: [(3, 32, 8), (3, 8, 16), (3, 32), (3, 8)],
    through_lstm: [(32, 8), (32, 8)],
    through_groups: [(2, 16, 8)],
    through_packed: [(16, 8), (16,), (16,)],
}


@pytest.mark.parametrize("turned", [0, 1, 2])
@pytest.mark.parametrize("layer", WEIGHTS)
def test_weights_of_layers_that_are_one_operator_are_parameters_in_any_order(layer: Any, turned: int) -> None:
    parts = [rows(), *(torch.randn(*shape, dtype=D) for shape in WEIGHTS[layer])]
    if layer is through_packed:
        parts[1] = torch.ones(16, 8, dtype=torch.int8)
    order = deque(range(len(parts)))
    order.rotate(turned)

    def step(*given: Tensor) -> Tensor:
        return layer(*(given[order.index(part)] for part in range(len(parts))))

    found = roles(step, *(parts[part] for part in order))
    assert list(found.values()) == ["batch" if part == 0 else "param" for part in order]


def by_matmul(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def by_linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def by_bias(x: Tensor, w: Tensor) -> Tensor:
    return torch.addmm(x[0], x, w)


def by_expanded(x: Tensor, w: Tensor) -> Tensor:
    return torch.bmm(x[None], w.t().expand(1, -1, -1))[0]


PRODUCTS = [by_matmul, by_linear, by_bias, by_expanded]


@pytest.mark.parametrize("order", list(permutations(range(2))))
@pytest.mark.parametrize("times", PRODUCTS)
def test_the_second_operand_of_a_product_is_the_weight(times: Any, order: tuple[int, ...]) -> None:
    def network(*given: Any) -> Tensor:
        x, w = (given[order.index(k)] for k in range(2))
        return times(torch.relu(times(x, w[0])), w[1])

    arguments = [torch.randn(4, 8), [torch.randn(8, 8), torch.randn(8, 8)]]
    found = roles(network, *(arguments[k] for k in order))
    rows, weights = (f"given.{order.index(k)}" for k in range(2))
    assert found == {rows: "batch", f"{weights}.0": "param", f"{weights}.1": "param"}


@pytest.mark.parametrize("times", PRODUCTS)
def test_a_batch_that_comes_back_beside_weights_is_the_batch(times: Any) -> None:
    def denoise(batch: Any, w: Any) -> Any:
        return {"x": batch["x"] - 0.1 * times(0.1 * batch["x"], w["a"])}

    batch, w = {"x": torch.randn(4, 8)}, {"a": torch.randn(8, 8)}
    assert roles(denoise, batch, w) == {"batch.x": "batch", "w.a": "param"}
    step = cf.shard(denoise, cf.Mesh())
    placed = step.init(batch, w)
    step(placed, w)
    # It is no state, so nothing of it is consumed, unless somebody says so.
    torch.testing.assert_close(placed["x"].full(), batch["x"])
    assert cf.shard(denoise, cf.Mesh(), donate=(0,)).lower(batch, w).donated == (0,)


def test_rows_that_are_multiplied_with_themselves_are_no_weight() -> None:
    def attend(w: Tensor, x: Tensor) -> Tensor:
        return torch.softmax((x @ w) @ x.T, -1) @ x

    found = roles(attend, torch.randn(8, 8), torch.randn(4, 8))
    assert found == {"w": "param", "x": "batch"}


def test_momentum_and_statistics_by_hand() -> None:
    def step(state: Any, x: Tensor) -> Any:
        loss, grad = cf.value_and_grad(lambda w: ((x @ w * state["fixed"] - state["mean"]) ** 2).mean())(state["w"])
        momentum = 0.9 * state["m"] + grad
        mean = 0.9 * state["mean"] + 0.1 * x.mean()
        return {"w": state["w"] - 0.1 * momentum, "m": momentum, "mean": mean, "fixed": state["fixed"], "never": state["never"]}, loss

    state = {"w": torch.randn(8, 8), "m": torch.zeros(8, 8), "mean": torch.zeros(()), "fixed": torch.ones(8), "never": torch.ones(8)}
    found = {name.removeprefix("state."): role for name, role in roles(step, state, torch.randn(4, 8)).items()}
    assert found == {"w": "param", "m": "state", "mean": "buffer", "fixed": "frozen", "never": "state", "x": "batch"}


@pytest.mark.parametrize("order", list(permutations(range(2))))
def test_what_comes_back_beside_weights_is_known_wherever_it_stands(order: tuple[int, ...]) -> None:
    def step(*given: Any) -> Any:
        state, x = (given[order.index(k)] for k in range(2))
        loss, grad = cf.value_and_grad(lambda w: ((x @ w * state["fixed"] - state["mean"]) ** 2).mean())(state["w"])
        new = {"w": state["w"] - 0.1 * grad, "mean": 0.9 * state["mean"] + 0.1 * x.mean(), "fixed": state["fixed"]}
        return tuple((new, loss)[k] for k in order)

    arguments = [{"w": torch.randn(8, 8), "mean": torch.zeros(()), "fixed": torch.ones(8)}, torch.randn(4, 8)]
    state, x = (f"given.{order.index(k)}" for k in range(2))
    found = roles(step, *(arguments[k] for k in order))
    assert found == {f"{state}.w": "param", f"{state}.mean": "buffer", f"{state}.fixed": "frozen", x: "batch"}


def test_a_dict_that_comes_back_where_no_weights_are_known_is_the_batch() -> None:
    def centred(mean: Tensor, batch: Any) -> Any:
        return {"x": batch["x"] - mean, "y": batch["y"] * 2}

    assert set(roles(centred, torch.randn(8), {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}).values()) == {"batch"}


def test_both_networks_of_a_step_are_weights() -> None:
    def losses(g: Any, d: Any, z: Tensor) -> tuple[Any, Any]:
        down = torch.func.grad(lambda g: -(torch.relu(z @ g["w"]) @ d["w"]).mean())(g)
        up = torch.func.grad(lambda d: (torch.relu(z @ g["w"]) @ d["w"]).mean())(d)
        return {"w": g["w"] - down["w"]}, {"w": d["w"] - up["w"]}

    found = roles(losses, {"w": torch.randn(4, 8)}, {"w": torch.randn(8, 2)}, torch.randn(6, 4))
    assert found == {"g.w": "param", "d.w": "param", "z": "batch"}


@pytest.mark.parametrize("carries", [False, True])
def test_a_batch_that_a_gradient_moves_stays_the_batch(carries: bool) -> None:
    model = cf.functional(models.Mlp(8, 16).double())

    def energy(params: Any, x: Tensor) -> Tensor:
        if carries:
            return torch.func.functional_call(model.module, params, (x,)).sum()
        return model.apply(params, {}, x)[0].sum()

    def attack(params: Any, x: Tensor) -> Tensor:
        return x + 0.1 * cf.value_and_grad(lambda x: energy(params, x))(x)[1].sign()

    def moved(params: Any, at: Any) -> Any:
        speed = at["speed"] - cf.value_and_grad(lambda x: energy(params, x))(at["x"])[1]
        return {"x": at["x"] + 0.1 * speed, "speed": speed}

    of = carried if carries else roles
    found = of(attack, model.params, rows())
    assert found.pop("x") == "batch" and set(found.values()) == {"param"}
    found = of(moved, model.params, {"x": rows(), "speed": rows()})
    assert {found.pop("at.x"), found.pop("at.speed")} == {"batch"} and set(found.values()) == {"param"}
    step = cf.shard(attack, cf.Mesh(dp=2), zero(3, "dp"))
    torch.testing.assert_close(step(model.params, rows()).full(), attack(model.params, rows()))


def test_adapters_beside_marked_weights_are_weights() -> None:
    model = cf.functional(models.Mlp(8, 16).double())

    def step(params: Any, prompt: Any, x: Tensor) -> Any:
        loss, grad = cf.value_and_grad(lambda p: model.apply(params, {}, x + p["shift"])[0].square().mean())(prompt)
        return loss, {"shift": prompt["shift"] - 0.1 * grad["shift"]}

    found = roles(step, model.params, {"shift": torch.randn(8, dtype=D)}, rows())
    assert (found.pop("prompt.shift"), found.pop("x")) == ("param", "batch") and set(found.values()) == {"param"}


def test_layers_in_one_stack_are_weights() -> None:
    def network(stack: Any, x: Tensor) -> Tensor:
        for up, down in zip(stack["up"], stack["down"], strict=True):
            x = x + torch.tanh(x @ up) @ down
        return x

    stack = {"up": torch.randn(3, 8, 16), "down": torch.randn(3, 16, 8)}
    assert roles(network, stack, torch.randn(4, 8)) == {"stack.up": "param", "stack.down": "param", "x": "batch"}


def test_gradients_of_the_batch_that_have_its_tree_are_not_its_next_value() -> None:
    model = cf.functional(models.Mlp(8, 16).double())

    def forces(params: Any, batch: Any) -> Any:
        grads = cf.value_and_grad(lambda batch: model.apply(params, {}, batch["x"])[0].sum())(batch)[1]
        return {"x": -grads["x"]}

    found = roles(forces, model.params, {"x": rows()})
    assert found.pop("batch.x") == "batch" and set(found.values()) == {"param"}


def test_of_one_argument_what_is_no_weight_is_the_batch() -> None:
    found = roles(lambda every: F.linear(every["x"], every["w"]), {"x": torch.randn(4, 8), "w": torch.randn(2, 8)})
    assert found == {"every.x": "batch", "every.w": "param"}


# ---- what plans make of it ----


def language() -> Any:
    torch.manual_seed(0)
    return cf.functional(models.Language().double())


PLANS = {
    "1d": (cf.Mesh(tp=2), lambda: tensor("1d", "tp")),
    "2d": (cf.Mesh(x=2, y=2), lambda: tensor("2d", ("x", "y"))),
    "ulysses": (cf.Mesh(cp=2), lambda: ulysses("cp")),
    "zero3": (cf.Mesh(dp=2), lambda: zero(3, "dp")),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("by_hand", [False, True])
def test_plans_split_the_weights_of_a_forward_pass(name: str, by_hand: bool) -> None:
    mesh, plan = PLANS[name]
    model = language()
    ids = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(0))

    def logits(ids: Tensor, weights: Any) -> Tensor:
        if by_hand:
            found: Tensor = torch.func.functional_call(model.module, weights, (ids,))
            return found
        return model.apply(weights, {}, ids)[0]

    step = cf.shard(logits, mesh, plan())
    out = step(ids, model.params)
    torch.testing.assert_close(out.full(), logits(ids, model.params), rtol=0, atol=1e-10)
    work = cf.shard(logits, cf.Mesh()).lower(ids, model.params).cost().flops
    assert step.lower(ids, model.params).cost().flops < 0.8 * work


def mixed(x: Tensor, w: Tensor) -> Tensor:
    return (x[:, :, None] * w).sum(1)


@pytest.mark.parametrize("order", list(permutations(range(2))))
def test_parameters_are_weights_where_nothing_else_says_so(order: tuple[int, ...]) -> None:
    """Scales and attention heads that an einsum multiplies: no operator reads them as weights."""
    heads, scale = nn.Parameter(torch.randn(2, 8, 4, dtype=D)), nn.Parameter(torch.randn(8, dtype=D), requires_grad=False)

    def forward(*given: Any) -> Tensor:
        w, x = (given[order.index(k)] for k in range(2))
        return torch.einsum("bd,hde->bhe", x * w["scale"], w["heads"])

    parts: list[Any] = [{"heads": heads, "scale": scale}, rows()]
    given = [parts[k] for k in order]
    step = cf.shard(forward, cf.Mesh(dp=2), zero(3, "dp"))
    lies = {leaf.name.rsplit(".", 1)[-1]: (leaf.role, leaf.spec) for leaf in step.lower(*given).plan.inputs}
    assert lies.pop("heads") == ("param", "dp a b") and lies.pop("scale") == ("param", "(dp a)")
    assert [role for role, _ in lies.values()] == ["batch"]
    torch.testing.assert_close(step(*given).full(), forward(*given).detach(), rtol=0, atol=1e-12)


def test_gradients_and_marks_say_more_than_the_type_of_a_leaf() -> None:
    """Adapters beside a module's parameters, an image that is moved, latents: all of them may be nn.Parameters."""
    def tune(lora: Any, base: Any, x: Tensor) -> Any:
        return cf.value_and_grad(lambda lora: (x @ (base["w"] + lora["b"] @ lora["a"])).pow(2).sum())(lora)

    base, lora = {"w": nn.Parameter(torch.randn(8, 8))}, {"a": torch.randn(2, 8), "b": torch.randn(8, 2)}
    found = roles(tune, lora, base, torch.randn(4, 8))
    assert {found["lora.a"], found["lora.b"], found["base.w"]} == {"param", "batch"} and found["x"] == "batch"
    assert found == roles(tune, lora, {"w": base["w"].detach()}, torch.randn(4, 8))

    model = network()
    def moved(params: Any, image: Tensor) -> Any:
        return cf.value_and_grad(lambda image: model.apply(params, model.buffers, image)[0].sum())(image)

    assert roles(moved, model.params, nn.Parameter(rows()))["image"] == "batch"
    average = roles(lambda old, new: {k: 0.9 * old[k] + 0.1 * new[k] for k in old}, base, dict(base))
    assert set(average.values()) == {"batch"}


@pytest.mark.parametrize("step", [mixed, lambda x, w: (x.cumsum(0) + w * w).tanh()])
def test_an_error_where_no_weights_are_known_names_what_says_them(step: Any) -> None:
    with pytest.raises(cf.PlanError) as found:
        cf.shard(step, cf.Mesh(tp=2), tensor("1d", "tp")).lower(torch.randn(8, 8), torch.randn(8, 8))
    assert "model = cf.functional(module)" in found.value.__notes__[0]


@pytest.mark.parametrize("order", list(permutations(range(2))))
def test_what_nothing_says_is_the_batch_wherever_it_stands(order: tuple[int, ...]) -> None:
    given = (torch.randn(8, 8), torch.randn(8, 8))
    found = roles(lambda *args: mixed(args[order[0]], args[order[1]]), *given)
    assert set(found.values()) == {"batch"}


def test_an_error_where_roles_are_known_does_not_name_it() -> None:
    with pytest.raises(cf.PlanError, match="finds no two products") as found:
        cf.shard(lambda w, x: x @ w, cf.Mesh(tp=2), tensor("1d", "tp", vocabulary=False)).lower(torch.randn(8, 7), torch.randn(4, 8))
    assert not hasattr(found.value, "__notes__")


def test_weights_that_a_step_takes_from_outside_are_split_too() -> None:
    model, ids = language(), torch.zeros(4, 8, dtype=torch.int64)
    step = cf.shard(lambda ids: model.apply(model.params, {}, ids)[0], cf.Mesh(tp=2), tensor("1d", "tp"))
    lies = {leaf.name: leaf.spec for leaf in step.lower(ids).plan.inputs}
    assert lies["frozen.embed.weight"] == "(tp a) b" and lies["frozen.block.up.weight"] == "(tp a) b"
    torch.testing.assert_close(step(ids).full(), model.apply(model.params, {}, ids)[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("trainable", ["*", ()])
@pytest.mark.parametrize("stage", [1, 3])
def test_an_evaluation_is_called_by_how_its_weights_lie(stage: int, trainable: Any) -> None:
    torch.manual_seed(0)
    model = cf.functional(models.Language().double(), trainable=trainable)
    evaluate = cf.shard(lambda params, ids: model.apply(params, {}, ids)[0].sum(), cf.Mesh(dp=2), zero(stage, "dp"))
    low = evaluate.lower(model.params, torch.zeros(4, 8, dtype=torch.int64))
    assert ("dp: ZeRO-3" in str(low.plan)) == (stage == 3) and "ZeRO-1" not in str(low.plan)
