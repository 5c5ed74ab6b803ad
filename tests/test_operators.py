"""cf.operator: one node in a trace, differentiable, proven, the same eagerly, on simulated and on real ranks, and saved."""

import re
import types
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import tensor

import colofunc as cf
from colofunc.program.facts import backward_of, facts_of, is_lookup, reads_rows, sums_rows
from colofunc.program.tracing.trace import trace
from colofunc.program.work_kinds import work_kind
from colofunc.testing import check, check_strategies, sample

MESH = cf.Mesh(dp=2, tp=2)


@cf.operator("opstest.gated", rule="b* d, b* d -> b* d")
def gated(x: torch.Tensor, gate: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return x * torch.sigmoid(scale * gate)


def tripled_backward(inputs: Any, output: Any, grad: Any) -> Any:
    x, w = inputs
    return 3 * grad * w, (3 * grad * x).flatten(0, -2).sum(0)


@cf.operator("opstest.scaled", rule="b* d, d -> b* d", linear=[{0}, {1}], backward=tripled_backward)
def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w


@cf.operator("opstest.best", rule="b [d] -> b, b")
def best(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = x.max(-1)
    return found.values, found.indices


@cf.operator("opstest.projected", rule="b i, o i -> b o", reduce={"i": "sum"}, linear=[{0}, {1}], mults=True)
def projected(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


@cf.operator("opstest.headed", rule="b (h d), h -> b (h d)", linear=[{0}, {1}])
def headed(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.unflatten(1, (len(scale), -1)) * scale[:, None]).flatten(1)


@cf.operator("opstest.bare")
def bare(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.cumsum(0) if bias is None else x.cumsum(0) + bias




def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def train(p: Any, x: torch.Tensor) -> Any:
    def loss(p: Any) -> torch.Tensor:
        values, _ = best(projected(gated(x @ p["a"], x @ p["b"], scale=0.7), p["w"]))
        return values.pow(2).mean()

    value, grads = cf.value_and_grad(loss)(p)
    return {k: v - 0.1 * grads[k] for k, v in p.items()}, value


def train_plain(p: Any, x: torch.Tensor) -> Any:
    def loss(p: Any) -> torch.Tensor:
        h = (x @ p["a"]) * torch.sigmoid(0.7 * (x @ p["b"]))
        return F.linear(h, p["w"]).max(-1).values.pow(2).mean()

    grads = torch.func.grad(loss)(p)
    return {k: v - 0.1 * grads[k] for k, v in p.items()}, loss(p)


STATE = {"a": randn(6, 8), "b": randn(6, 8) * 2, "w": randn(4, 8)}


@cf.operator("opstest.gain", rule="b* d, d -> b* d", linear=[{0}, {1}], weights=["gain"], work="normalisation")
def gain(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=-1, keepdim=True) * gain


@cf.operator("opstest.looked_up", rule="[v] d, b [n] -> b d", linear=[{0}], weights=["table"], rows="summed", work="gather")
def looked_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table[index].sum(1)


@cf.operator(
    "opstest.dense", rule="b i, o i -> b o", reduce={"i": "sum"}, linear=[{0}, {1}], mults=True, weights=["w"],
    backward_products=["aten.mm.default"],
)  # fmt: skip
def dense(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


@cf.operator("opstest.projection", as_product="b i, i o, o -> b o", weights=["w", "bias"], row_order="any")
def projection(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, w.T, bias)


@cf.operator("opstest.copy")
def summed_from_above(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(0)


# ---- facts ----


def test_a_name_like_torchs_says_nothing_of_how_it_is_split() -> None:
    """Rows of it depend on one another, though `aten.copy` works on each element."""
    x = randn(4, 6)
    step = cf.shard(summed_from_above, MESH, in_specs="(dp b) d")
    assert step.lower(x).coverage().fallbacks == ("opstest.copy",)
    assert torch.equal(step(x).full(), x.cumsum(0))


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_weights_of_an_operator_are_parameters_wherever_they_stand(order: tuple[int, ...]) -> None:
    parts = [torch.randint(0, 9, (4, 2)), randn(9, 6), randn(6), randn(5, 6)]

    def forward(*given: torch.Tensor) -> torch.Tensor:
        index, table, scale, w = (given[order.index(part)] for part in range(4))
        return dense(gain(looked_up(table, index), scale), w)

    program = trace(forward, [parts[part] for part in order]).program
    roles = [program.values[id].role for id in program.inputs]
    assert roles == ["batch" if part == 0 else "param" for part in order]


def test_facts_of_an_operator_are_known_by_its_name() -> None:
    assert sums_rows(looked_up.name) and is_lookup(looked_up.name) and not is_lookup(gain.name)
    assert [work_kind(op.name) for op in (gain, looked_up, dense, gated)] == ["normalisation", "gather", "product", "elementwise"]
    assert backward_of(dense.name) == ("aten.mm.default",)


def test_row_order_is_of_the_definition() -> None:
    assert [facts_of(op.name).row_order for op in (projection, dense)] == ["any", ""]
    assert [facts_of(f"aten.{name}.default").row_order for name in ("_softmax_backward_data", "cumsum")] == ["any", ""]
    assert [facts_of(f"colofunc.{name}").row_order for name in ("experts_backward", "attention")] == ["dealt", ""]


def test_reading_rows_of_what_may_be_an_activation_is_no_lookup() -> None:
    @cf.operator("opstest.taken", rule="[v] d, n -> n d", linear=[{0}], rows="indexed", work="gather")
    def taken(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x[index]

    assert reads_rows(taken.name) and not is_lookup(taken.name) and not sums_rows(taken.name)
    x, index = randn(6, 4), torch.tensor([5, 0, 3, 3])
    step = cf.shard(taken, MESH, in_specs=("v (tp d)", "(dp n)"))
    torch.testing.assert_close(step(x, index).full(), x[index])


# ---- as a product of matrices ----


@pytest.mark.parametrize("mode, ways", [
    ("2d", ["{dp: summa rows, tp: summa columns}"] * 3),
    ("auto", ["{dp: o, tp: o}", "{dp: i, tp: i}", "{dp: o, tp: o}"]),
])  # fmt: skip
def test_a_product_of_ones_own_is_split_as_a_linear_layer(mode: str, ways: list[str]) -> None:
    """Plans with patterns of their own for products use them, and the numbers are one device's."""

    def train_two(p: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        def loss(p: dict[str, torch.Tensor]) -> torch.Tensor:
            h = projection(x, p["up"], p["up_bias"]).tanh()
            return projection(projection(h, p["down"], p["down_bias"]), p["last"]).pow(2).mean()

        grads, value = torch.func.grad_and_value(loss)(p)
        return {k: v - 0.1 * grads[k] for k, v in p.items()}, value

    p = {"up": randn(8, 16), "up_bias": randn(16), "down": randn(16, 8), "down_bias": randn(8), "last": randn(8, 4)}
    x = randn(8, 4, 8)
    step = cf.shard(train_two, MESH, tensor(mode, ("dp", "tp")))
    assert [str(d.strategy) for d in step.lower(p, x).plan.find("opstest.projection")] == ways
    state, loss = step(p, x)
    expected, expected_loss = train_two(p, x)
    torch.testing.assert_close(float(loss), float(expected_loss), rtol=1e-12, atol=0)
    for k, v in expected.items():
        torch.testing.assert_close(state[k].full(), v, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "words, named",
    [
        ({"as_product": "b i, o j -> b o"}, "no linear layer"),
        ({"as_product": ("b i, o i -> b o",)}, "no linear layer"),
        ({"as_product": "b i, o i -> b o", "rule": "b* i, o i -> b* o"}, "without rule"),
        ({"as_product": "b i, o i -> b o", "reduce": {"i": "sum"}}, "without rule, reduce and linear"),
        ({"row_order": "sorted"}, "any, dealt"),
    ],
)
def test_what_is_no_linear_layer_or_order_is_refused(words: dict[str, Any], named: str) -> None:
    with pytest.raises(cf.errors.PluginError, match=named):
        cf.operator("opstest.misfit", **words)


def plain_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


def with_number(x: torch.Tensor, w: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
    return F.linear(x, w) * scale


def with_bias(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, w, bias)


@pytest.mark.parametrize("function", [with_number, with_bias])
def test_what_takes_more_than_a_products_tensors_is_none(function: Any) -> None:
    with pytest.raises(cf.errors.PluginError, match="is of 2 tensors and gives one, and nothing else"):
        cf.operator("opstest.more", as_product="b i, o i -> b o")(function)


def test_a_product_is_known_to_plans_that_were_used_before() -> None:
    """As in a notebook, where a plan has been at work when the operator is defined; spaces in its text mean nothing."""
    x, w, plan = randn(8, 8), randn(8, 8), tensor("2d", ("dp", "tp"))
    cf.shard(lambda x, w: F.linear(x, w), MESH, plan).lower(x, w)
    late = cf.operator("opstest.late", as_product="b i,o  i->b o", weights=["w"])(plain_product)
    step = cf.shard(lambda x, w: late(x, w), MESH, tensor("2d", ("dp", "tp")))
    assert [d.strategy for d in step.lower(x, w).plan.find("opstest.late")] == ["{dp: summa rows, tp: summa columns}"]
    torch.testing.assert_close(step(x, w).full(), F.linear(x, w), rtol=1e-12, atol=0)


@cf.operator("opstest.casting", as_product="b i, o i -> b o", weights=["w"])
def casting(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w.to(x.dtype))


def test_a_product_that_casts_keeps_its_own_code() -> None:
    x, w = randn(8, 8), randn(8, 8).float()
    step = cf.shard(lambda x, w: casting(x, w), MESH, tensor("auto", ("dp", "tp")))
    torch.testing.assert_close(step(x, w).full(), casting(x, w), rtol=1e-12, atol=1e-12)


# ---- in a step ----


def test_a_step_keeps_it_whole_and_has_the_references_numbers() -> None:
    step, x = cf.shard(train, MESH), randn(4, 6)
    low = step.lower(STATE, x)
    whole = [n.target for n in low.program.nodes if n.target.startswith("opstest.")]
    assert whole == ["opstest.gated", "opstest.projected", "opstest.best"]
    assert low.coverage().fallbacks == ()
    check(step, STATE, x)
    state, loss = step(STATE, x)
    expected, expected_loss = train_plain(STATE, x)
    torch.testing.assert_close(float(loss), float(expected_loss), rtol=1e-12, atol=0)
    for k, v in expected.items():
        torch.testing.assert_close(state[k].full(), v, rtol=1e-12, atol=1e-12)


def test_a_given_backward_is_the_gradient() -> None:
    x, w = randn(8, 4), randn(4)
    grad_of = torch.func.grad(lambda x, w: scaled(x, w).sum(), argnums=(0, 1))
    dx, dw = cf.shard(lambda x, w: grad_of(x, w), MESH, in_specs=("(dp b) (tp d)", "(tp d)"))(x, w)
    torch.testing.assert_close(dx.full(), (3 * w).expand(8, 4))  # three times the reference's: it is ours that is called
    torch.testing.assert_close(dw.full(), 3 * x.sum(0))


def test_a_rule_that_forgets_a_factor_is_reported_and_refused_by_the_kit() -> None:
    @cf.operator("opstest.forgetful", rule="b d -> b")
    def forgetful(x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1)

    low = cf.shard(forgetful, MESH, in_specs="(dp b) d").lower(randn(8, 4))
    assert low.coverage().undecided == ("opstest.forgetful: d",) and low.coverage().fallbacks == ()
    with pytest.raises(cf.CheckError, match=r"opstest.forgetful: the rule b d -> b says nothing of d, .*reduce=\{'d': 'sum'\}, or \[d\]"):
        check_strategies(None, forgetful, sample(randn(12, 12)))
    assert cf.shard(best, MESH, in_specs="(dp b) d").lower(randn(8, 4)).coverage().undecided == ()


def test_a_dim_may_be_of_two_factors() -> None:
    """Of heads and what each has, where an operand says how many heads there are."""
    x, scale = randn(4, 12), randn(4)
    low = cf.shard(headed, MESH, in_specs=("(dp b) (tp e)", "(tp h)"), auto=False).lower(x, scale)
    assert low.coverage().fallbacks == () and low.program.values[low.program.outputs[0]].shape == (2, 6)
    check(cf.shard(headed, MESH, in_specs=("(dp b) (tp e)", "(tp h)")), x, scale)
    check_strategies(None, headed, sample(x, scale))


NO_PATTERNS = {
    "b (h d) -> b (h d)": "nothing says how large h and d are in '(h d)'; write the dim as one factor",
    "b [d -> b d": "unbalanced brackets: '[' is not closed behind one factor",
    "b d] -> b d": "unbalanced brackets: ']' without '['",
    "b (h d, h -> b h": "unbalanced parentheses: '(' is never closed; write a dim of two factors as '(a b)'",
    "b ((h d)) -> b": "a group inside a group",
    "b (h* d) -> b": "'*' inside a group",
    "... d -> ... d": "'...' is no factor; write a name, '[d]', '(h d)', 'b*' or 1",
}


@pytest.mark.parametrize("text", NO_PATTERNS)
def test_text_that_is_no_pattern_is_an_error_and_not_an_operator_without_a_rule(text: str) -> None:
    with pytest.raises(cf.SpecError, match=re.escape(NO_PATTERNS[text])) as caught:
        cf.ext.pattern(text)
    assert caught.value.__notes__ == [f"in the pattern {text!r} of a rule"]


def test_without_a_rule_it_is_replicated_and_reported() -> None:
    x, bias = randn(8, 4), randn(4)
    step = cf.shard(lambda x, bias: bare(x) + bare(x, bias), MESH, in_specs=("(dp b) (tp d)", None))
    assert step.lower(x, bias).coverage().fallbacks == ("opstest.bare",)
    torch.testing.assert_close(step(x, bias).full(), 2 * x.cumsum(0) + bias)


def test_hooks_speak_of_it() -> None:
    def blocks(call: Any, mesh: cf.Mesh) -> Any:
        for axis in mesh.axis_names:
            words = [f"d{i}" for i in range(len(call.ins[0].shape))]
            words[1] = f"({axis} d1)"
            layout = cf.Spec(" ".join(words)).bind(mesh, call.ins[0].shape)
            yield cf.Strategy(f"{{{axis}: columns}}", (layout,), (layout,), cf.Cost(nbytes=1.0))

    module = types.ModuleType("columns")
    module.colofunc_strategies = cf.hookimpl(lambda: {"opstest.bare": blocks})  # type: ignore[attr-defined]
    assert {p.strategy for p in check_strategies(module, bare, sample(randn(8, 12)))} == {"{a: columns}", "{b: columns}"}
    step = cf.shard(lambda x: bare(x), cf.Mesh(tp=2), in_specs="b (tp d)", out_specs="b (tp d)", plugins=[module])
    assert step.lower(randn(8, 4)).plan.find("opstest.bare")[0].strategy == "{tp: columns}"
    rules = types.ModuleType("rules")
    rules.colofunc_rules = cf.hookimpl(lambda: {"opstest.gated": cf.ext.pattern("b d, b d -> b d")})  # type: ignore[attr-defined]
    with pytest.raises(cf.PluginError, match=r"'opstest.gated' comes from both 'cf.operator' and 'rules'"):
        cf.shard(lambda x: gated(x, x), MESH, plugins=[rules])(randn(8, 4))


def test_rules_are_proven() -> None:
    assert max(p.worst for p in check_strategies(None, gated)) < 1e-12
    check_strategies(None, projected, sample(randn(12, 6), randn(4, 6)))
    check_strategies(None, best, sample(randn(12, 6)))

    @cf.operator("opstest.wrong", rule="b d -> b", reduce={"d": "sum"})
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)

    with pytest.raises(cf.CheckError, match=r"opstest.wrong \{a: d\} on a=2, result 0 .* differs"):
        check_strategies(None, wrong)


# ---- lists and keywords ----


@cf.operator("opstest.mixed", rule="b* d, d -> b* d", linear=[{0}])
def mixed(xs: list[torch.Tensor], w: torch.Tensor, powers: list[int], *, scale: float = 1.0) -> torch.Tensor:
    return scale * w * sum(x * p for x, p in zip(xs, powers, strict=True))


def mixed_backward(inputs: Any, output: Any, grad: Any) -> Any:
    _, w, powers = inputs
    return [5 * grad * w * p for p in powers], None


@cf.operator("opstest.mixed5", rule="b* d, d -> b* d", backward=mixed_backward)
def mixed5(xs: list[torch.Tensor], w: torch.Tensor, powers: list[int]) -> torch.Tensor:
    return w * sum(x * p for x, p in zip(xs, powers, strict=True))


def test_lists_of_tensors_are_split_like_arguments() -> None:
    xs, w = [randn(8, 4), randn(8, 4) * 2, randn(8, 4) - 1], randn(4)

    def step(xs: Any, w: torch.Tensor) -> Any:
        value = mixed(xs, w, [1, 2, 3], scale=0.5)
        return value, torch.func.grad(lambda xs, w: mixed(xs, w, [1, 2, 3], scale=0.5).pow(2).sum(), argnums=(0, 1))(xs, w)

    staged = cf.shard(step, MESH, in_specs=("(dp b) (tp d)", "(tp d)"))
    low = staged.lower(xs, w)
    assert [n.target for n in low.program.nodes].count("opstest.mixed") >= 1 and low.coverage().fallbacks == ()
    value, (dxs, dw) = staged(xs, w)
    plain = 0.5 * w * (xs[0] + 2 * xs[1] + 3 * xs[2])
    torch.testing.assert_close(value.full(), plain, rtol=1e-12, atol=1e-12)
    for power, dx in zip((1, 2, 3), dxs, strict=True):
        torch.testing.assert_close(dx.full(), 2 * plain * 0.5 * w * power, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dw.full(), (2 * plain * plain / w).sum(0), rtol=1e-12, atol=1e-12)
    check(staged, xs, w)
    assert max(p.worst for p in check_strategies(None, mixed, sample([randn(12, 6), randn(12, 6)], randn(6), [1, 2], 0.5))) < 1e-12


def test_a_given_backward_has_a_list_for_a_list() -> None:
    xs, w = [randn(8, 4), randn(8, 4)], randn(4)
    dxs = cf.shard(lambda xs, w: torch.func.grad(lambda xs: mixed5(xs, w, [1, 2]).sum())(xs), MESH)(xs, w)
    torch.testing.assert_close([dx.full() for dx in dxs], [(5 * w * p).expand(8, 4) for p in (1, 2)])
    wrong = cf.operator("opstest.mixed6", backward=lambda inputs, output, grad: (grad, None, None))(mixed5.reference)
    with pytest.raises(cf.PluginError, match="gave 3 gradients for 2 tensor arguments"):
        wrong([x.requires_grad_() for x in xs], w, [1, 2]).sum().backward()
    alone = cf.operator("opstest.mixed7", backward=lambda inputs, output, grad: (grad, None))(mixed5.reference)
    with pytest.raises(cf.PluginError, match="gave no list of 2 gradients for a list of 2 tensors"):
        alone(xs, w, [1, 2]).sum().backward()


def test_lists_eagerly_and_by_the_dispatcher() -> None:
    xs, w = [randn(2, 4).requires_grad_(), randn(2, 4).add(1).requires_grad_()], randn(4).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b, w: mixed([a, b], w, [1, 3]), (*xs, w))
    assert torch.autograd.gradcheck(lambda a, b, w: torch.ops.opstest.mixed([a, b], w, [1, 3], scale=2.0), (*xs, w))
    torch.library.opcheck(torch.ops.opstest.mixed.default, ([x.detach() for x in xs], w.detach(), [1, 3], 1.0))
    placed = [cf.distribute(x.detach(), "(dp b) (tp d)", MESH) for x in xs]
    out = mixed(placed, cf.distribute(w.detach(), "(tp d)", MESH), [1, 3])
    torch.testing.assert_close(out.full(), (w * (xs[0] + 3 * xs[1])).detach())
    assert out.sharding is placed[0].sharding


def powers_back(inputs: Any, outputs: Any, grads: Any) -> Any:
    assert isinstance(outputs, list) and isinstance(grads, list)
    x, _ = inputs
    return sum(g * k * x ** (k - 1) for k, g in enumerate(grads, 1))


@cf.operator("opstest.powers", rule="b d -> b d")
def powers(x: torch.Tensor, n: int) -> list[torch.Tensor]:
    return [x**k for k in range(1, n + 1)]


@cf.operator("opstest.powers2", rule="b d -> b d", backward=powers_back)
def powers2(x: torch.Tensor, n: int) -> list[torch.Tensor]:
    return [x**k for k in range(1, n + 1)]


@cf.operator("opstest.swapped", rule="b d -> b d")
def swapped(xs: list[torch.Tensor], by: float) -> list[torch.Tensor]:
    return [x * by for x in xs[::-1]]


@pytest.mark.parametrize("op", [powers, powers2])
def test_a_list_of_results(op: Any) -> None:
    x = randn(8, 4)

    def step(x: torch.Tensor) -> Any:
        found = op(x, 3)
        assert isinstance(found, list) and len(found) == 3
        return found, torch.func.grad(lambda x: sum(p.sum() for p in op(x, 3)))(x)

    staged = cf.shard(step, MESH, in_specs="(dp b) (tp d)")
    low = staged.lower(x)
    assert low.coverage().fallbacks == () and low.plan.find(op.name)
    out, grad = staged(x)
    for k, p in enumerate(out, 1):
        torch.testing.assert_close(p.full(), x**k, rtol=1e-12, atol=1e-12)
        assert str(p.spec) == "(dp a) (tp b)"
    torch.testing.assert_close(grad.full(), 1 + 2 * x + 3 * x**2, rtol=1e-12, atol=1e-12)
    check(staged, x)
    assert max(p.worst for p in check_strategies(None, op, sample(randn(12, 6), 2))) < 1e-12
    leaf = randn(2, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: tuple(op(x, 3)), leaf)
    assert torch.autograd.gradcheck(lambda x: tuple(op.defined(x, 3)), leaf)  # by the dispatcher
    placed = op(cf.distribute(x, "(dp b) d", MESH), 2)
    torch.testing.assert_close([p.full() for p in placed], [x, x**2])


def test_lists_of_arguments_and_results() -> None:
    xs = [randn(8, 4), randn(8, 4)]
    staged = cf.shard(lambda xs: swapped(xs, 2.0), MESH, in_specs="(dp b) d")
    torch.testing.assert_close([y.full() for y in staged(xs)], [2 * xs[1], 2 * xs[0]])
    assert staged.lower(xs).coverage().fallbacks == ()
    assert max(p.worst for p in check_strategies(None, swapped, sample([randn(12, 6), randn(12, 6)], 2.0))) < 1e-12


# ---- defined again ----

CELL = """
import torch
import colofunc as cf

@cf.operator("opstest.cell", rule={rule!r})
def cell(x: torch.Tensor{more}) -> torch.Tensor:
    return x * {by}
"""


def test_a_cell_that_is_run_again_replaces_its_operator() -> None:
    notebook: dict[str, Any] = {"__name__": "notebook"}
    exec(CELL.format(rule="b d -> b d", by=2, more=""), notebook)
    first = notebook["cell"]
    exec("step = lambda x: cell(x)", notebook)
    step, x = cf.shard(notebook["step"], MESH, in_specs="(dp b) d"), randn(4, 4)
    torch.testing.assert_close(step(x).full(), 2 * x)
    placed = cf.distribute(x, "(dp b) d", MESH)
    torch.testing.assert_close(first(placed).full(), 2 * x)
    exec(CELL.format(rule=None, by=3, more=""), notebook)
    torch.testing.assert_close(notebook["cell"](placed).full(), 3 * x)
    torch.testing.assert_close(step(x).full(), 3 * x)  # not what was traced before
    assert step.lower(x).coverage().fallbacks == ("opstest.cell",)
    torch.testing.assert_close(torch.ops.opstest.cell(x), 3 * x)
    with pytest.raises(cf.PluginError, match=r"'opstest.cell' has been defined again since; call the function that this definition gave"):
        first(x)
    with pytest.raises(cf.PluginError, match=r"'opstest.cell' is registered already in this process by notebook.cell. Try: another name"):
        exec(CELL.format(rule=None, by=2, more=""), {"__name__": "another"})


def test_a_cell_with_other_arguments_replaces_it_too() -> None:
    notebook: dict[str, Any] = {"__name__": "notebook2"}
    cell = CELL.replace("opstest.cell", "opstest.cell2")
    exec(cell.format(rule="b d -> b d", by=2, more=""), notebook)
    first = notebook["cell"]
    exec("step = lambda x: torch.func.grad(lambda x: cell(x).sum())(x) + cell(x)", notebook)
    step, x = cf.shard(notebook["step"], MESH, in_specs="(dp b) d"), randn(4, 4)
    torch.testing.assert_close(step(x).full(), 2 * x + 2)
    exec(cell.format(rule="b d -> b d", by="n", more=", n: int = 3"), notebook)
    torch.testing.assert_close(step(x).full(), 3 * x + 3)
    assert step.lower(x).coverage().fallbacks == () and len(step.lower(x).plan.find("opstest.cell2")) == 1
    torch.testing.assert_close(notebook["cell"](cf.distribute(x, "(dp b) d", MESH), n=5).full(), 5 * x)
    torch.testing.assert_close(torch.ops.opstest.cell2(x, 4), 4 * x)
    leaf = x.clone().requires_grad_()
    torch.ops.opstest.cell2(leaf, 4).sum().backward()
    torch.testing.assert_close(leaf.grad, torch.full((4, 4), 4.0, dtype=x.dtype))
    with pytest.raises(cf.PluginError, match=r"'opstest.cell2' has been defined again since"):
        first(x)


def test_functions_of_one_maker_are_not_one_operator() -> None:
    def make(scale: float) -> Any:
        @cf.operator("opstest.made")
        def made(x: torch.Tensor) -> torch.Tensor:
            return x * scale

        return made

    make(1.0)
    with pytest.raises(cf.PluginError, match=r"'opstest.made' is registered already"):
        make(2.0)


# ---- elsewhere ----


def test_eagerly_on_a_dtensor() -> None:
    x, g = randn(8, 4), randn(8, 4) + 1
    a, b = x.clone().requires_grad_(), cf.distribute(x, "(dp b) (tp d)", MESH).requires_grad_()
    (gated.reference(a, g) ** 2).sum().backward()
    out = gated(b, cf.distribute(g, "(dp b) (tp d)", MESH))
    assert out.sharding is b.sharding
    (out**2).sum().backward()
    torch.testing.assert_close(b.grad.full(), a.grad, rtol=1e-12, atol=1e-12)


def test_on_plain_tensors_with_second_derivatives() -> None:
    x, g = randn(3, 4).requires_grad_(), randn(3, 4).requires_grad_()
    assert torch.autograd.gradcheck(gated, (x, g))
    assert torch.autograd.gradgradcheck(gated, (x, g))
    torch.library.opcheck(torch.ops.opstest.gated.default, (x, g, 0.5))


def test_results_have_memory_of_their_own() -> None:
    @cf.operator("opstest.same", rule="b d -> b d")
    def same(x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape)

    x = randn(4, 4)
    same(x).zero_()
    assert torch.equal(x, randn(4, 4))


def on_a_rank() -> Any:
    state, loss = cf.shard(train, cf.Mesh(tp=2))(STATE, randn(4, 6))
    return float(loss), {k: v.full() for k, v in state.items()}


@pytest.mark.dist
def test_on_real_ranks() -> None:
    expected, expected_loss = train_plain(STATE, randn(4, 6))
    for loss, state in cf.launch(on_a_rank, 2, timeout_s=120):
        assert loss == pytest.approx(float(expected_loss), rel=1e-12)
        for k, v in expected.items():
            torch.testing.assert_close(state[k], v, rtol=1e-12, atol=1e-12)


# ---- mistakes ----


def one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def gaps(x: list[torch.Tensor | None]) -> torch.Tensor:
    return x[0].clone()  # type: ignore[union-attr]


def every(*x: torch.Tensor) -> torch.Tensor:
    return x[0].clone()


def unordered(x: torch.Tensor, n: int = 1, *, k: int) -> torch.Tensor:
    return x * n * k


def counted(x: torch.Tensor) -> int:
    return x.numel()


def unsaid(x):  # type: ignore[no-untyped-def]
    return x


def random(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5)


def writing(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1) * 2


def weighted(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, y: torch.Tensor | None = None) -> torch.Tensor:
    return x * w


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (dict(weights=["weight"]), "weights names 'weight'. Try: one of x, w, b, y"),
        (dict(weights=["w", "b"]), "the weight 'b' is a list, or stands beside tensors that a call may leave out"),
        (dict(work="sums"), "work is 'sums'. Try: one of elementwise, transcendental, "),
        (dict(rows="some"), "rows is 'some'. Try: one of read, indexed, summed, written"),
        (dict(backward_products=["opstest.dx"]), "Try: mults=True"),
        (dict(backward_products=["opstest.dx"], mults=True), "names 'opstest.dx'. Try: an operator that is defined"),
        (dict(backward_products="aten.mm.default", mults=True), "Try: backward_products=('aten.mm.default',)"),
        (dict(weights="w"), "Try: weights=('w',)"),
    ],
)
def test_facts_that_do_not_fit_are_refused(more: Any, message: str) -> None:
    with pytest.raises(cf.errors.PluginError, match=re.escape(message)):
        cf.operator("opstest.weighted", **more)(weighted)
    with pytest.raises(cf.errors.PluginError, match=re.escape("Try: (table: Tensor, index: Tensor, ...)")):
        cf.operator("opstest.rows", rows="read")(one)


@pytest.mark.parametrize(
    ("reference", "name", "rule", "message"),
    [
        (one, "one", None, "'one' is no name for an operator. Try: \"mylib.gated\""),
        (one, "aten.one", None, "'aten.one' is no name for an operator"),
        (one, "opstest.gated", None, "'opstest.gated' is registered already in this process by test_operators.gated"),
        (one, "opstest.m1", "b d, b d -> b d", "the rule 'b d, b d -> b d' has 2 operands, the function has 1"),
        (one, "opstest.m2", "b d -> b, d", "the rule 'b d -> b, d' has 2 results, the function has 1"),
        (one, "opstest.m3", "b d", "the rule 'b d' has no `->`"),
        (gaps, "opstest.m8", None, "a list of tensors has all of them"),
        (counted, "opstest.m5", None, "returns something else than tensors: SymInt"),
        (unsaid, "opstest.m6", None, "no types in the signature"),
        (every, "opstest.m7", None, "argument 'x' is variadic positional. Try: a plain one"),
        (unordered, "opstest.m9", None, "an argument without a default follows one that has one"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(reference: Any, name: str, rule: str | None, message: str) -> None:
    with pytest.raises(cf.PluginError, match=re.escape(message)):
        cf.operator(name, rule=rule)(reference)
    assert not hasattr(torch.ops.opstest, name.partition(".")[2]) or name == "opstest.gated"


def test_references_that_are_no_functions_of_their_arguments() -> None:
    draws, writes = cf.operator("opstest.draws")(random), cf.operator("opstest.writes")(writing)
    for run in (cf.shard(lambda x: draws(x), MESH), lambda x: draws(cf.distribute(x, "(dp b) d", MESH))):
        with pytest.raises(cf.PluginError, match=r"operator 'opstest.draws' draws random numbers \(aten\.\w+\.\w+\)"):
            run(randn(4, 4))
    with pytest.raises(cf.PluginError, match=r"operator 'opstest.writes' writes to an argument \(aten.add_.Tensor\)"):
        cf.shard(lambda x: writes(x), MESH)(randn(4, 4))


def test_a_backward_of_the_wrong_length() -> None:
    short = cf.operator("opstest.short", backward=lambda inputs, output, grad: grad)(lambda_of_two)
    with pytest.raises(cf.PluginError, match=r"gave 1 gradients for 2 tensor arguments"):
        short(randn(2).requires_grad_(), randn(2)).sum().backward()


def lambda_of_two(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y
