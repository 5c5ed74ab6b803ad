"""Lion and LAMB: against the papers' formulas in float64, alone, over meshes and with the kernel; and as classes by themselves."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from colofunc_plugins import zero
from pretended import Machine
from quantize_matrix import MODES, Net, tokens
from test_host_updates import ALL_THERE
from test_update_narrow import U, after, assert_within, casts_on_host, laid, mode, training  # noqa: F401  mode: a fixture
from torch import Tensor, nn

import colofunc as cf
from colofunc.errors import InputError
from colofunc.ops import native
from colofunc.ops.squares import ROW
from colofunc.ops.update_lamb import lamb_direction, lamb_direction_, lamb_host_
from colofunc.ops.update_lion import lion, lion_, lion_host_
from colofunc.ops.update_narrow import BLOCK

D = torch.float64
Named = dict[str, Tensor]


@attrs.define
class Formula:
    """What the papers say, on whole tensors. states: key -> by name."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    eps: float | None = None  # None: Lion
    states: dict[str, Named] = attrs.field(factory=dict)
    count: int = 0

    def step(self, params: Named, grads: Named) -> Named:
        self.count += 1
        return {n: (self._lion if self.eps is None else self._lamb)(n, p, grads[n]) for n, p in params.items()}

    def _state(self, key: str, n: str, like: Tensor) -> Tensor:
        return self.states.setdefault(key, {}).setdefault(n, torch.zeros_like(like))

    def _lion(self, n: str, p: Tensor, g: Tensor) -> Tensor:
        m = self._state("exp_avg", n, p)
        update = torch.sign(self.betas[0] * m + (1 - self.betas[0]) * g)
        self.states["exp_avg"][n] = self.betas[1] * m + (1 - self.betas[1]) * g
        return p - self.lr * (update + self.weight_decay * p)

    def _lamb(self, n: str, p: Tensor, g: Tensor) -> Tensor:
        m = self.states["exp_avg"][n] = self.betas[0] * self._state("exp_avg", n, p) + (1 - self.betas[0]) * g
        v = self.states["exp_avg_sq"][n] = self.betas[1] * self._state("exp_avg_sq", n, p) + (1 - self.betas[1]) * g**2
        r = (m / (1 - self.betas[0] ** self.count)) / ((v / (1 - self.betas[1] ** self.count)).sqrt() + self.eps)
        u = r + self.weight_decay * p
        ratio = float(p.norm() / u.norm()) if p.norm() > 0 and u.norm() > 0 else 1.0
        return p - self.lr * ratio * u


CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Lion": (cf.Lion, dict(lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)),
    "LAMB": (cf.LAMB, dict(lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1, eps=1e-6)),
}
OTHERS = [("Lion", dict(lr=0.1, betas=(0.5, 0.0), weight_decay=0.0)), ("LAMB", dict(lr=0.1, betas=(0.0, 0.9), weight_decay=0.0, eps=1e-3))]
EVERY = [*((name, options) for name, (_, options) in CLASSES.items()), *OTHERS]


def close(found: Named, want: Named, tol: float = 1e-12) -> None:
    assert found.keys() == want.keys()
    for n in want:
        value = found[n].full() if isinstance(found[n], cf.DTensor) else found[n]
        torch.testing.assert_close(value.detach(), want[n], rtol=tol, atol=tol, msg=lambda m, n=n: f"{n}: {m}")


def kept(state: Any) -> dict[str, Named]:
    return {key: part for key, part in state.items() if key != "step"}


# ---- alone ----


def parameters_and_gradients(dtype: torch.dtype = D) -> tuple[Named, list[Named]]:
    """Parameters, one of them zeros, and gradients of five steps, the first of which are zeros for one parameter."""
    shapes = {"w": (5, 7), "b": (5,), "zeros": (3, 2), "still": (4,), "number": ()}
    params = {n: torch.randn(shape, dtype=dtype) for n, shape in shapes.items()}
    params["zeros"].zero_()
    grads = [{n: torch.randn(shape, dtype=dtype) for n, shape in shapes.items()} for _ in range(5)]
    grads[0]["still"].zero_()
    return params, grads


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(("name", "options"), EVERY, ids=lambda v: v if isinstance(v, str) else "")
def test_updates_are_the_papers(name: str, options: dict[str, Any], maximize: bool) -> None:
    params, grads = parameters_and_gradients()
    opt, formula = cf.adapt(CLASSES[name][0], **options, maximize=maximize), Formula(**options)
    state, want = opt.init(params), params
    for g in grads:
        before = copy.deepcopy((g, state, params))
        new, after_ = opt.update(g, state, params)
        torch.testing.assert_close((g, state, params), before, rtol=0, atol=0)
        params, state = new, after_
        want = formula.step(want, {n: -x if maximize else x for n, x in g.items()})
        close(params, want)
    assert kept(state).keys() == formula.states.keys() == ({"exp_avg"} if name == "Lion" else {"exp_avg", "exp_avg_sq"})
    for key, part in kept(state).items():
        close(part, formula.states[key])
    assert state["step"] == 5


@pytest.mark.filterwarnings("ignore:.*without float32 masters")
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_class_by_itself_does_what_its_functions_do(name: str, dtype: torch.dtype) -> None:
    cls, options = CLASSES[name]
    params, grads = parameters_and_gradients(dtype)
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    theirs, opt = cls(leaves.values(), **options), cf.adapt(cls, **options)
    state = opt.init(params)
    for number, g in enumerate(grads):
        for n, leaf in leaves.items():
            leaf.grad = g[n]
        if number == 2:  # it goes on from what was saved
            saved = copy.deepcopy(theirs.state_dict())
            theirs = cls(leaves.values(), lr=3.0)
            theirs.load_state_dict(saved)
        assert theirs.step(lambda: 7.0) == 7.0
        params, state = opt.update(g, state, params)
        for n, p in params.items():
            torch.testing.assert_close(leaves[n].detach(), p, rtol=0, atol=0)
    leaves["w"].grad = None
    before = leaves["w"].detach().clone()
    theirs.step()
    assert torch.equal(leaves["w"].detach(), before) and theirs.state[leaves["w"]]["step"] == 5


def test_groups_take_options_rates_and_other_optimizers() -> None:
    params, grads = parameters_and_gradients()
    adam = dict(lr=1e-3, weight_decay=0.0)
    plain = dict(lr=5e-2, betas=(0.9, 0.999), weight_decay=0.0, eps=1e-6)
    groups = {"w": dict(lr=5e-2, weight_decay=0.0), "b": cf.adapt(torch.optim.AdamW, **adam), "s*": cf.adapt(cf.Lion, lr=1e-3)}
    cls, options = CLASSES["LAMB"]
    opt = cf.adapt(cls, **{**options, "lr": lambda n: 1e-2 / (1 + n)}, groups=groups)
    state, formulas = opt.init(params), {"w": Formula(**plain), "b": None, "still": Formula(1e-3, (0.9, 0.99), 0.0)}
    leaf = params["b"].clone().requires_grad_()
    torchs = torch.optim.AdamW([leaf], **adam)
    want = dict(params)
    rest = Formula(**options)
    for number, g in enumerate(grads):
        params, state = opt.update(g, state, params)
        rest.lr = 1e-2 / (1 + number)
        want |= rest.step({n: want[n] for n in ("zeros", "number")}, g)
        for n, formula in formulas.items():
            if formula is not None:
                want |= formula.step({n: want[n]}, g)
        leaf.grad = g["b"]
        torchs.step()
        want["b"] = leaf.detach()
        close(params, want)
    assert set(state["exp_avg_sq"]) == {"w", "b", "zeros", "number"} and set(state["exp_avg"]) == set(params)


def test_a_gradient_that_is_no_number_is_seen_in_the_parameter() -> None:
    """torch's sign of NaN is 0, with which the parameter would stand still and nobody would know."""
    for cls in (cf.Lion, cf.LAMB):
        for dtype in (torch.float32, D):
            params = {"w": torch.ones(4, dtype=dtype)}
            opt = cf.adapt(cls, lr=1e-2)
            new, _ = opt.update({"w": torch.tensor([1.0, float("nan"), -1.0, 0.0], dtype=dtype)}, opt.init(params), params)
            assert new["w"].isnan()[1] and (cls is cf.LAMB or new["w"].tolist()[::2] == pytest.approx([0.99, 1.01]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cf.adapt(cf.Lion, lr=-1.0), r"Lion refuses its options: lr=-1.0 would move parameters up the gradient. Try: lr=1e-4"),
        (lambda: cf.adapt(cf.LAMB, lr=float("nan")), r"LAMB refuses its options: lr=nan .*Try: lr=1e-3"),
        (lambda: cf.adapt(cf.Lion, betas=(0.9, 1.0)), r"betas\[1\]=1.0 is not from 0 to below 1.*Try: betas\[1\]=0.9"),
        (lambda: cf.adapt(cf.LAMB, betas=(-0.1, 0.9)), r"betas\[0\]=-0.1 is not from 0"),
        (lambda: cf.adapt(cf.LAMB, betas=0.9), r"betas=0.9 is no pair of numbers. Try: betas=\(0.9, 0.999\)"),
        (lambda: cf.adapt(cf.Lion, weight_decay=-0.1), r"weight_decay=-0.1 would let weights grow. Try: weight_decay=0.0"),
        (lambda: cf.adapt(cf.LAMB, eps=-1e-6), r"eps=-1e-06 is negative. Try: eps=1e-6"),
        (lambda: cf.adapt(cf.LAMB, eps=None), r"eps=None is no number. Try: eps=1e-6"),
        (lambda: cf.adapt(cf.Lion, lr="a"), r"Lion refuses its options: lr='a' is no number. Try: lr=1e-4"),
        (lambda: cf.adapt(cf.Lion, betas=("a", 0.9)), r"betas\[0\]='a' is no number. Try: betas\[0\]=0.9"),
        (lambda: cf.adapt(cf.LAMB, weight_decay="a"), r"weight_decay='a' is no number. Try: weight_decay=0.0"),
        (lambda: cf.adapt(cf.Lion, eps=1e-8), r"Lion has no option 'eps'"),
        (lambda: cf.adapt(cf.Lion, groups={"*.bias": dict(betas=(2.0, 0.9))}), r"groups\['\*.bias'\]: Lion refuses .*betas\[0\]=2.0"),
        (lambda: cf.adapt(cf.LAMB, state_bits=8), r"LAMB has no state in 8 bits. Try: torch.optim.AdamW"),
        (lambda: cf.adapt(torch.optim.LBFGS), r"LBFGS cannot be adapted.*or cf.Lion, cf.LAMB"),
        (lambda: cf.Lion([torch.ones(2)], lr=-2.0), r"lr=-2.0 would move"),
    ],
)
def test_a_mistake_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_a_sparse_gradient_is_named() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    for cls in (cf.Lion, cf.LAMB):
        said = rf"{cls.__name__}: the gradient of a parameter of shape \(4, 2\) is sparse. Try: sparse=False"
        with pytest.raises(InputError, match=said):
            cls(table.parameters()).step()


def test_a_complex_parameter_is_named() -> None:
    leaf = torch.ones(4, 3, dtype=torch.complex64, requires_grad=True)
    leaf.grad = torch.ones_like(leaf)
    for cls in (cf.Lion, cf.LAMB):
        with pytest.raises(InputError) as caught:
            cls([leaf]).step()
        assert str(caught.value) == (
            f"{cls.__name__}: a parameter of shape (4, 3) is complex. Try: a real one of shape (4, 3, 2), read as "
            "torch.view_as_complex(parameter)"
        )


def test_a_state_of_another_optimizer_is_named() -> None:
    params, grads = parameters_and_gradients()
    other = cf.adapt(torch.optim.AdamW, lr=0.1)
    with pytest.raises(InputError, match=r"not that of Lion.*unknown \['exp_avg_sq"):
        cf.adapt(cf.Lion).update(grads[0], other.init(params), params)
    with pytest.raises(InputError, match=r"not that of LAMB.*missing \['exp_avg_sq"):
        cf.adapt(cf.LAMB).update(grads[0], cf.adapt(cf.Lion).init(params), params)


# ---- on meshes ----


def staged(name: str, net: Callable[[], nn.Module] = Net, dtype: torch.dtype = D) -> tuple[Any, Any]:
    torch.manual_seed(0)
    cls, options = CLASSES[name]
    return cf.train_step(cf.functional(net().to(dtype)), cf.adapt(cls, **options), loss=lambda out: out.square().mean())


DEFAULT = ("auto", "zero1", "zero3+tensor", "offload", "pipeline+tensor", "accumulate")
ON_MESHES = [m if m in DEFAULT else pytest.param(m, marks=pytest.mark.sweep) for m in MODES if m not in ("alone", "bf16")]


@pytest.mark.filterwarnings("ignore:the plan uses")
@pytest.mark.parametrize("how", ON_MESHES)
@pytest.mark.parametrize("name", CLASSES)
def test_three_steps_are_those_of_one_device(name: str, how: str) -> None:
    """Gradients by autograd, updates by the formula."""
    step_fn, state = staged(name, MODES[how].net)
    torch.manual_seed(0)
    net, formula = MODES[how].net().to(D), Formula(**CLASSES[name][1])
    step = MODES[how].place(step_fn)
    placed = step.init(state, tokens())
    for _ in range(3):
        placed, _ = step(placed, tokens())
        named = dict(net.named_parameters())
        grads = torch.autograd.grad(net(tokens()).square().mean(), list(named.values()))
        new = formula.step({n: p.detach() for n, p in named.items()}, dict(zip(named, grads, strict=True)))
        net.load_state_dict(new)
    close(placed["params"], new, 1e-10)
    for key, part in kept(placed["opt"]).items():
        close(part, formula.states[key], 1e-10)


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("name", CLASSES)
def test_masters_and_moments_are_wide_in_mixed_precision(name: str, policy: str) -> None:
    step_fn, state = staged(name, dtype=torch.float32)
    step = cf.precision(cf.shard(step_fn, cf.Mesh(dp=2), zero(2, "dp")), policy)
    cf.testing.check(step, state, tokens(), steps=2)
    placed, _ = step(step.init(state, tokens()), tokens())
    assert {x.dtype for part in (placed["params"], *kept(placed["opt"]).values()) for x in part.values()} == {torch.float32}


def test_state_is_split_and_written_in_place() -> None:
    for name, target in (("Lion", "colofunc.lion_"), ("LAMB", "colofunc.lamb_direction_")):
        step_fn, state = staged(name)
        step = cf.shard(step_fn, cf.Mesh(dp=4), zero(3, "dp"))
        low = step.lower(state, tokens())
        targets = [node.target for node in low.program.nodes]
        assert targets.count(target) == len(state["params"]) and target.removesuffix("_") not in targets
        placed = step.init(state, tokens())
        assert {str(part["up.weight"].spec) for part in kept(placed["opt"]).values()} == {"(dp a) b"}


def test_all_norms_go_with_the_message_of_the_loss() -> None:
    """However many parameters there are: two numbers for each of them, in an all-reduce that there is anyway."""

    def moved(cls: Any, layers: int) -> tuple[int, float]:
        net = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(64, 64, bias=False), nn.Tanh())))
        step, state = cf.train_step(cf.functional(net.double()), cf.adapt(cls, lr=1e-2), loss=lambda out: out.square().mean())
        cost = cf.shard(step, cf.Mesh(dp=2), zero(3, "dp")).lower(state, torch.randn(8, 64, dtype=D)).cost()
        return sum(cost.calls.values()), sum(cost.bytes.values())

    for layers in (2, 6):
        adam, lamb = moved(torch.optim.AdamW, layers), moved(cf.LAMB, layers)
        assert lamb[0] == adam[0] and 0 < lamb[1] - adam[1] <= 2 * 16 * layers


@pytest.mark.parametrize("name", CLASSES)
def test_what_ranks_do_not_divide_is_updated_where_it_lies(name: str) -> None:
    step_fn, state = staged(name, lambda: nn.Sequential(nn.Linear(71, 67), nn.Tanh(), nn.Linear(67, 71)))
    step, x = cf.shard(step_fn, cf.Mesh(dp=4), zero(3, "dp")), torch.randn(8, 71, dtype=D)
    cf.testing.check(step, state, x, steps=3)
    low = step.lower(state, x)
    updates = [node for node in low.program.nodes if node.target in ("colofunc.lion_", "colofunc.lamb_direction_")]
    lie = {low.program.values[node.refs[0]].layout.text() for node in updates if len(low.program.values[node.refs[0]].shape) == 2}
    assert lie == {"(dp a~) b", "a (dp b~)"}


@pytest.mark.parametrize("name", CLASSES)
def test_a_state_is_saved_and_goes_on_on_another_mesh(name: str, tmp_path: Path) -> None:
    step_fn, state = staged(name)
    step = cf.shard(step_fn, cf.Mesh(dp=2), zero(1, "dp"))
    placed, _ = step(step.init(state, tokens()), tokens())
    cf.save(tmp_path / "state", placed)
    other = cf.shard(step_fn, cf.Mesh(tp=4))
    loaded = cf.load(tmp_path / "state", like=other.init(state, tokens()))
    went_on, _ = other(loaded, tokens())
    want, _ = step(placed, tokens())
    close(went_on["params"], {n: p.full() for n, p in want["params"].items()}, 1e-10)


# ---- on the host: with the kernel and without ----


def operands(numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Parameter, gradient, momentum; among them zeros of both signs, infinity and NaN."""
    p, g, m = torch.randn(numel), torch.randn(numel).to(dtype), torch.randn(numel) / 3
    if numel > 12:
        p[:4], g[:4], m[:4] = torch.tensor([0.0, -0.0, 0.0, -0.0]), 0.0, torch.tensor([0.0, 0.0, -0.0, -0.0])
        p[4], g[5], m[6], p[7], g[8], m[9] = float("inf"), float("inf"), -float("inf"), float("nan"), float("nan"), float("nan")
    return p, g, m


def bits(x: Tensor) -> Tensor:
    """As whole numbers; of NaN there is one."""
    return torch.where(x.isnan(), torch.full_like(x, float("nan")), x).view(torch.int32)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_has_the_bits_of_the_reference_at_every_instruction_set(dtype: torch.dtype, required: pytest.MonkeyPatch) -> None:
    for numel in (0, 1, 70_001, BLOCK + 17):
        start = operands(numel, dtype)
        for maximize, decay in ((False, 0.0), (True, 0.1)):
            p, g, m = (x.clone() for x in start)
            lion_host_.kernel(p, g, m, 1e-3, 0.9, 0.99, decay, maximize)
            for level, threads in ((0, 1), (1, 1), (2, 2)):
                native.limit_level(level)
                torch.set_num_threads(threads)
                q, n = start[0].clone(), start[2].clone()
                try:
                    lion_host_(q, g, n, 1e-3, 0.9, 0.99, decay, maximize)
                finally:
                    torch.set_num_threads(1)
                assert torch.equal(bits(p), bits(q)) and torch.equal(bits(m), bits(n))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_update_is_within_its_bound_of_float64(dtype: torch.dtype, mode: str) -> None:  # noqa: F811
    p, g, m = torch.randn(3001), torch.randn(3001).to(dtype), torch.randn(3001) / 3
    p0, g0, m0 = (x.double() for x in (p, g, m))
    lion_.kernel(p, g, m, torch.tensor(1e-2, dtype=D), 0.9, 0.99, 0.1)
    assert_within(m, 0.99 * m0 + 0.01 * g0, 4 * U * (0.99 * m0.abs() + 0.01 * g0.abs()))
    toward = 0.9 * m0 + 0.1 * g0
    sure = toward.abs() > 4 * U * (0.9 * m0.abs() + 0.1 * g0.abs())
    assert sure.sum() > 2990
    want = p0 - 1e-2 * (toward.sign() + 0.1 * p0)
    assert_within(p[sure], want[sure], (4 * U * (p0.abs() + 1e-2))[sure])


def lamb_at(level: int, threads: int, start: tuple[Tensor, ...], decay: float, maximize: bool) -> list[Tensor]:
    """Direction, squares and moments by the kernel."""
    native.limit_level(level)
    torch.set_num_threads(threads)
    p, g, m, v = (x.clone() for x in start)
    direction, squares = torch.empty_like(p), torch.empty(2, dtype=D)
    try:
        lamb_host_(direction, squares, p, g, m, v, 3.0, 0.9, 0.999, 1e-6, decay, maximize)
    finally:
        torch.set_num_threads(1)
    return [bits(direction), squares.nan_to_num(-1.0, -2.0), bits(m), bits(v)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_lamb_has_the_same_bits_at_every_instruction_set(dtype: torch.dtype, required: pytest.MonkeyPatch) -> None:
    """And by as many threads."""
    for numel in (0, 1, ROW - 1, 70 * ROW + 29):
        start = (*operands(numel, dtype), torch.rand(numel))
        for maximize, decay in ((False, 0.0), (True, 0.1)):
            want = lamb_at(0, 1, start, decay, maximize)
            for level, threads in ((1, 1), (2, 2)):
                assert all(map(torch.equal, lamb_at(level, threads, start, decay, maximize), want))


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_that_begin_anywhere_have_the_same_bits(dtype: torch.dtype, mode: str) -> None:  # noqa: F811
    """Of which no vector instruction finds an aligned address."""
    start, found = (*operands(ROW + 1003, dtype), torch.rand(ROW + 1003)), []
    for begin in (0, 1, 3):
        p, g, m, v = (torch.cat([x[:begin], x])[begin:] for x in start)
        lion_.kernel(p, g, m, torch.tensor(1e-3, dtype=D), 0.9, 0.99, 0.1)
        direction, squares = lamb_direction_.kernel(p, g, m, v, torch.tensor(4.0), 0.9, 0.999, 1e-6, 0.1)
        found.append([*map(bits, (p, direction, m, v)), squares.nan_to_num(-1.0, -2.0)])
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lamb_is_within_its_bound_of_float64(dtype: torch.dtype, size: float, mode: str) -> None:  # noqa: F811
    """Moments and first term: as of AdamW. A row's sum of squares in float32 is off by at most as many roundings as it has terms."""
    n = 5 * ROW + 77
    p, g, m, v = torch.randn(n), (size * torch.randn(n)).to(dtype), size * torch.randn(n) / 3, (size * torch.rand(n)).square()
    p0, g0, m0, v0 = (x.double() for x in (p, g, m, v))
    decay, eps = 0.1, 1e-6
    direction, squares = lamb_direction_.kernel(p, g, m, v, torch.tensor(4.0), 0.9, 0.999, eps, decay)
    assert torch.equal(p, p0.float())
    first, second = m0 + (g0 - m0) * (1 - 0.9), v0 * 0.999 + (1 - 0.999) * g0.square()
    first_bound, second_bound = 8 * U * (m0.abs() + g0.abs()), 8 * U * second
    assert_within(m, first, first_bound)
    assert_within(v, second, second_bound)
    denominator = (second / (1 - 0.999**4)).sqrt() + eps
    term = first / (1 - 0.9**4) / denominator
    bound = (8 * U + 4 * U) * term.abs() + first_bound / (1 - 0.9**4) / denominator + 4 * U * (term.abs() + decay * p0.abs())
    assert_within(direction, term + decay * p0, bound)
    want = torch.stack([p0.square().sum(), direction.double().square().sum()])
    assert_within(squares, want, ROW * U * want)


def test_a_sum_of_many_squares_in_float32_is_exact(required: pytest.MonkeyPatch) -> None:
    """A running sum of as many ones in float32 stops at 2^24."""
    numel = (1 << 24) + 4 * ROW
    zeros = torch.zeros(numel)
    _, squares = lamb_direction_.kernel(torch.ones(numel), zeros, zeros.clone(), zeros.clone(), torch.tensor(1.0), 0.9, 0.999, 1e-6, 1.0)
    assert squares.tolist() == [numel, numel]


@pytest.mark.parametrize("lies", ["transposed", "gaps"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_that_lie_apart_meet_element_by_element(lies: str, dtype: torch.dtype, mode: str) -> None:  # noqa: F811
    p, g, m = (x.view(5, 7) for x in operands(35, dtype))
    want = [x.clone() for x in (p, m)]
    lr = torch.tensor(1e-2, dtype=D)
    lion_.kernel(want[0], g, want[1], lr, 0.9, 0.99, 0.1)
    for of_param, of_grad in ((lies, "plain"), ("plain", lies), (lies, lies)):
        made = [laid(x.clone(), of_param) for x in (p, m)]
        lion_.kernel(made[0], laid(g, of_grad), made[1], lr, 0.9, 0.99, 0.1)
        assert all(torch.equal(bits(x.contiguous()), bits(y)) for x, y in zip(made, want, strict=True))


def test_a_step_that_is_not_finite_changes_nothing(mode: str) -> None:  # noqa: F811
    lr, count, no = torch.tensor(1e-2, dtype=D), torch.tensor(3.0), torch.tensor(False)
    for dtype in (torch.float32, D):
        p, g, m, v = torch.randn(40).to(dtype), torch.randn(40).to(dtype), torch.randn(40).to(dtype), torch.rand(40).to(dtype)
        before = [x.clone() for x in (p, m, v)]
        lion_.kernel(p, g, m, lr, 0.9, 0.99, 0.1, finite=no)
        lamb_direction_.kernel(p, g, m, v, count, 0.9, 0.999, 1e-6, 0.1, finite=no)
        assert all(map(torch.equal, (p, m, v), before))
        lion_.kernel(p, g, m, lr, 0.9, 0.99, 0.1, finite=~no)
        assert not torch.equal(p, before[0]) and not torch.equal(m, before[1])


def test_the_operators_are_what_they_say(mode: str) -> None:  # noqa: F811
    p, g, m, v = torch.randn(40), torch.randn(40).bfloat16(), torch.randn(40), torch.rand(40)
    lr, count = torch.tensor(1e-2, dtype=D), torch.tensor(3.0)
    torch.library.opcheck(lion_host_.op, (p, g, m, 1e-2, 0.9, 0.99, 0.1, False))
    made = torch.empty(40), torch.empty(2, dtype=D)
    torch.library.opcheck(lamb_host_.op, (*made, p, g, m, v, 3.0, 0.9, 0.999, 1e-6, 0.1, False))
    for one in (lion, lion_):
        torch.library.opcheck(one.op, (p, g, m, lr, 0.9, 0.99, 0.1))
    for one in (lamb_direction, lamb_direction_):
        torch.library.opcheck(one.op, (p, g, m, v, count, 0.9, 0.999, 1e-6, 0.1))


APART = "not contiguous, or not of the parameter's size"
BAD: dict[str, tuple[Callable[..., list[Tensor]], str]] = {
    "sizes": (lambda p, g, m: [p, g[1:], m], APART),
    "gaps": (lambda p, g, m: [p[::2], g[::2], m[::2]], APART),
    "states": (lambda p, g, m: [p, g, m.double()], "neither parameter nor states may be other than float32"),
    "param": (lambda p, g, m: [p.half(), g, m], "neither parameter nor states may be other than float32"),
    "gradient": (lambda p, g, m: [p, g.double(), m], "a gradient is float32"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_operands_are_named(what: str, mode: str) -> None:  # noqa: F811
    spoil, said = BAD[what]
    update, error = (lion_host_, RuntimeError) if mode == "require" else (lion_host_.kernel, InputError)
    with pytest.raises(error, match=f"lion_host_: {said}"):
        update(*spoil(*operands(40, torch.bfloat16)), 1e-2, 0.9, 0.99, 0.1, False)


def test_operands_that_lie_apart_are_left_to_the_operator_that_takes_any() -> None:
    p, g, m = (x[::2] for x in operands(40, torch.float32))
    with pytest.raises(InputError) as caught:
        lion_host_.kernel(p, g, m, 1e-2, 0.9, 0.99, 0.1, False)
    said = "lion_host_: not contiguous, or not of the parameter's size. Try: colofunc.lion_, which takes any"
    assert str(caught.value) == said


@pytest.mark.parametrize("size", [1e-18, 1e16])
def test_norms_have_the_range_that_is_stated(size: float) -> None:
    p = torch.full((ROW + 3,), size)
    zeros = torch.zeros(ROW + 3)
    _, squares, _, _ = lamb_direction.kernel(p, zeros, zeros, zeros, torch.tensor(1.0), 0.0, 0.0, 1e-6, 1.0)
    torch.testing.assert_close(squares / size**2, torch.full((2,), ROW + 3.0, dtype=D), rtol=1e-6, atol=0)


@pytest.mark.parametrize("numel", [0, 1, ROW, (1 << 24) + 17])
def test_squared_norms_are_of_all_elements_and_exact(numel: int) -> None:
    """A running sum in float32 would be off by 1e-3 in the last case."""
    p, nothing, v = torch.randn(numel), torch.zeros(numel), torch.ones(numel)
    _, squares, _, _ = lamb_direction.kernel(p, nothing, nothing, v, torch.tensor(1.0), 0.0, 0.0, 1e-6, 0.5)
    of_param = p.double().square().sum()
    torch.testing.assert_close(squares, torch.stack([of_param, of_param / 4]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("cls", [cf.Lion, cf.LAMB])
def test_a_step_with_updates_on_the_host_reads_narrow_gradients(cls: Any, mode: str) -> None:  # noqa: F811
    """Lion's bits are those of an update of a gradient that was cast, with the kernel and without; LAMB's as AdamW's."""
    step, state, batch = training(cls)
    away = cf.offload(step, policy=ALL_THERE)
    assert casts_on_host(away.lower(state, batch)) == 0
    exact = cls is cf.Lion or mode == "off"
    found, want = (after(each, *training(cls)[1:], 3 if exact else 1) for each in (away, step))
    for n in want:
        torch.testing.assert_close(found[n], want[n], rtol=0 if exact else 16 * U, atol=0 if exact else 16 * U * 1e-2)


@pytest.mark.parametrize("cls", [cf.Lion, cf.LAMB])
@pytest.mark.parametrize("away", [True, False])
def test_beside_a_card_the_bits_are_those_of_the_host_alone(cls: Any, away: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a pretended one, whose streams run in any order."""
    if cls is cf.LAMB and not away:  # a card sums squares by torch, as the host does without its kernel in C++ (`ops/squares.py`)
        monkeypatch.setenv("COLOFUNC_NATIVE", "off")

    def placed(step: Any) -> Any:
        return cf.offload(step, policy=ALL_THERE) if away else step

    want = after(placed(training(cls)[0]), *training(cls)[1:])
    with Machine(seed=1):
        step, state, batch = training(cls, device="cuda")
        found = after(placed(step), placed(step).init(state, batch), batch)
    assert all(torch.equal(found[name], want[name]) for name in want)
