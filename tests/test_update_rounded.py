"""Adam and AdamW of parameters in bfloat16 whose writes are rounded by a draw."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from colofunc_plugins import zero
from torch import Tensor, nn

import colofunc as cf
from colofunc.ops import native
from colofunc.ops.indices import Index, index_of
from colofunc.ops.rounding import key_of, rounded, words_by
from colofunc.ops.update_rounded import adamw_rounded, adamw_rounded_, adamw_rounded_host_

BF16 = torch.bfloat16
ADAMW = torch.optim.AdamW


def words_of(index: Index, first: int, end: int, seed: int, site: int = 3) -> Tensor:
    return words_by(index, first, end, key_of(torch.tensor(seed), site), torch.device("cpu"))


def drawn(x: Tensor, seed: int, site: int = 3) -> Tensor:
    """x in bfloat16, by the first draw."""
    index = index_of(x.shape, (), (), None, x.device)
    return rounded(x.flatten(), words_of(index, 0, x.numel(), seed, site), 0).view(x.shape)


# ---- rounding ----


def test_a_number_becomes_one_of_its_neighbours_and_is_right_in_the_mean() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 4096)
    below, above = (x.view(torch.int32) & -(1 << 16)).view(torch.float32), x.bfloat16().float()
    times = 400
    total = torch.zeros(4096, dtype=torch.float64)
    for seed in range(times):
        y = drawn(x, seed).float()
        # Towards zero, or the next one away from it.
        assert bool(((y == below) | ((y - below).abs() <= below.abs() * 2.0**-7)).all())
        total += y.double()
    place = x.double().abs() * 2.0**-7
    off = (total / times - x.double()) / place
    # A draw's standard deviation is at most half a place.
    assert float(off.abs().max()) < 5 * 0.5 / times**0.5
    assert float(off.mean().abs()) < 5 * 0.5 / (times * 4096) ** 0.5
    assert float(((above.double() - x.double()) / place).abs().mean()) > 0.1, "which is what the nearest is off by"


def test_what_bfloat16_has_stays() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -3.0, 2.0**-133, float("inf"), float("-inf"), float("nan")])
    for seed in range(20):
        y = drawn(x, seed)
        assert torch.equal(y[:-1].float(), x[:-1]) and bool(y[-1].isnan())
        assert torch.equal(y[:2].signbit(), x[:2].signbit())


def test_a_part_is_rounded_as_the_whole() -> None:
    x = torch.randn(6, 8)
    index = index_of((6, 4), (6, 4), (8, 1), torch.tensor(4), x.device)
    words = words_of(index, 0, 24, 7)
    assert torch.equal(rounded(x[:, 4:].flatten(), words, 0).view(6, 4), drawn(x, 7)[:, 4:])
    assert torch.equal(words_of(index, 5, 11, 7), words[5:11])


# ---- the update ----


def operands() -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(40, 30, generator=draw).to(BF16) for _ in range(3)]
    square = torch.rand(40, 30, generator=draw).to(BF16)
    return [*tensors, square, torch.tensor(3.0), torch.tensor(0.01, dtype=torch.float64)]


NUMBERS = (0.9, 0.999, 1e-8, 0.01)


@pytest.mark.parametrize("decoupled", [True, False])
def test_it_is_adam_in_float32_to_one_place(decoupled: bool) -> None:
    p, g, m, v, step, lr = operands()
    wide = [x.float() for x in (p, m, v)]
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    weight = nn.Parameter(wide[0].clone())
    reference = cls([weight], lr=0.01, weight_decay=0.01)
    reference.state[weight] = {"step": torch.tensor(2.0), "exp_avg": wide[1].clone(), "exp_avg_sq": wide[2].clone()}
    weight.grad = g.float()
    reference.step()
    kept = reference.state[weight]
    found = adamw_rounded(p, g, m, v, step, lr, *NUMBERS, decoupled, False, None, 5)
    for got, wanted in zip(found, (weight.detach(), kept["exp_avg"], kept["exp_avg_sq"]), strict=True):
        assert bool(((got.float() - wanted).abs() <= wanted.abs() * 2.0**-7 + 1e-6).all())
        assert not torch.equal(got, wanted.to(BF16)), "some are rounded the other way"


def test_operators_are_registered_right() -> None:
    for op in (adamw_rounded, adamw_rounded_):
        torch.library.opcheck(op.op, (*operands(), *NUMBERS, True, False, None, 5), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("case", ["tiles", "transposed in memory"])
def test_numbers_do_not_depend_on_how_memory_is_walked(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = (*NUMBERS, True, False, None, 5)
    wanted = adamw_rounded(*operands(), *rest)
    given = operands()
    if case == "tiles":
        monkeypatch.setattr("colofunc.ops.update_rounded.HOST_TILE", 70)
    else:
        given[:4] = [x.T.contiguous().T for x in given[:4]]
    adamw_rounded_(*given, *rest)
    assert all(torch.equal(a, b) for a, b in zip((given[0], *given[2:4]), wanted, strict=True))


def bits(x: Tensor) -> Tensor:
    """As whole numbers; of NaN there is one."""
    return torch.where(x.isnan(), torch.full_like(x, float("nan")), x).view(torch.int16)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize(
    ("numel", "count", "stride"),
    [(70_001, 70_001, 1), (70_000, 7, 1001), (0, 7, 1001), (1, 1, 1)],
    ids=["whole", "columns", "empty", "one"],
)
def test_the_kernel_has_the_bits_of_the_reference_at_every_instruction_set(
    numel: int, count: int, stride: int, dtype: torch.dtype, required: None
) -> None:
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(numel, generator=draw).to(BF16) for _ in range(3)]
    start[2].abs_()
    grad = torch.randn(numel, generator=draw).to(dtype)
    for x, odd in zip((*start, grad), (float("inf"), 0.0, float("nan"), float("-inf")), strict=True):
        x[11:14] = odd
    start[0][20:22] = torch.finfo(BF16).max
    rows = torch.arange(numel // count) * 3 + 5
    for decay, decoupled, maximize in ((0.0, True, False), (0.1, True, True), (0.1, False, False)):
        options = (1e-2, 0.3, 0.99, 0.9, 0.999, 1e-8, decay, decoupled, maximize, -(2**61) + 12345, rows, count, stride)
        options = tuple(float(torch.tensor(x)) if isinstance(x, float) and k < 3 else x for k, x in enumerate(options))
        wanted = [x.clone() for x in start]
        adamw_rounded_host_.kernel(wanted[0], grad, *wanted[1:], *options)
        for level, threads in ((0, 1), (1, 1), (2, 2)):
            native.limit_level(level)
            torch.set_num_threads(threads)
            got = [x.clone() for x in start]
            try:
                adamw_rounded_host_(got[0], grad, *got[1:], *options)
            finally:
                torch.set_num_threads(1)
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, wanted, strict=True))


def test_operands_that_the_kernel_cannot_take_are_named(required: None) -> None:
    p, g, rows = torch.zeros(6, dtype=BF16), torch.zeros(6), torch.arange(2)
    rest = (0.1, 0.1, 1.0, *NUMBERS, True, False, 5)
    with pytest.raises(RuntimeError, match="adamw_rounded_host_: rows and columns are not the places of all elements"):
        adamw_rounded_host_(p, g, p.clone(), p.clone(), *rest, rows, 2, 1)
    with pytest.raises(RuntimeError, match="adamw_rounded_host_: neither parameter nor states may be other than bfloat16"):
        adamw_rounded_host_(p, g, p.float(), p.clone(), *rest, rows, 3, 1)


def test_an_update_that_is_skipped_leaves_all_as_it_was() -> None:
    given, before = operands(), operands()
    adamw_rounded_(*given, *NUMBERS, True, False, torch.tensor(False), 5)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


@pytest.mark.parametrize("bits", [32, 8])
def test_updates_below_half_a_place_are_right_in_the_mean(bits: int) -> None:
    """From 1, 100 updates of a thousandth downward: to the nearest nothing moves, as the next number is 1/256 away."""
    ends = {}
    for rounding in ("nearest", "stochastic"):
        opt = cf.adapt(ADAMW, lr=1e-3, weight_decay=0.0, state_bits=bits, rounding=rounding)
        params = {"w": torch.ones(64, 128, dtype=BF16)}
        state = opt.init(params)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(100):
                params, state = opt.update({"w": torch.ones(64, 128, dtype=BF16)}, state, params)
        ends[rounding] = float(params["w"].double().mean())
    assert ends["nearest"] == 1.0
    assert abs(ends["stochastic"] - 0.9) < 2e-3


# ---- on a mesh ----


def summing(bits: int) -> tuple[Any, Any, Tensor]:
    """A step whose gradients are sums of few whole numbers, which bfloat16 has exactly in any order."""
    torch.manual_seed(0)
    params = {"up": torch.randn(64, 128).to(BF16), "down": torch.randn(32, 64).to(BF16), "bias": torch.randn(32).to(BF16)}
    opt = cf.adapt(ADAMW, lr=1e-3, state_bits=bits, rounding="stochastic")

    def loss(params: Any, x: Tensor) -> Tensor:
        whole = x[:, :64] @ params["down"].T + params["bias"]
        return (x @ params["up"].T).float().sum() + whole.float().sum()

    def step(state: Any, x: Tensor) -> tuple[Any, Tensor]:
        grads, value = torch.func.grad_and_value(loss)(state["params"], x)
        params, opt_state = opt.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt_state}, value

    return step, {"params": params, "opt": opt.init(params)}, torch.randint(-1, 2, (16, 128)).to(BF16)


CHAINS: dict[str, Any] = {
    **{f"dp=2, zero {level}": (cf.Mesh(dp=2), level) for level in (1, 2, 3)},
    **{f"dp=2 tp=2, zero {level}": (cf.Mesh(dp=2, tp=2), level) for level in (1, 2, 3)},
}


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("chain", CHAINS)
def test_every_mesh_rounds_as_one_device_does(chain: str, bits: int) -> None:
    """Bit for bit, after two steps."""
    mesh, level = CHAINS[chain]
    step_fn, state, batch = summing(bits)
    wanted = state
    for _ in range(2):
        wanted, _ = step_fn(wanted, batch)
    step = cf.shard(step_fn, mesh, zero(level, "dp"))
    placed = step.init(state, batch)
    for _ in range(2):
        placed, _ = step(placed, batch)
    for name, x in wanted["params"].items():
        assert torch.equal(placed["params"][name].full(), x), name
        assert not torch.equal(x, state["params"][name])
    for key in wanted["opt"].keys() - {"step"}:
        for name, x in wanted["opt"][key].items():
            assert torch.equal(placed["opt"][key][name].full(), x), f"{key}.{name}"


def test_it_is_done_in_place_and_under_offload() -> None:
    step_fn, state, batch = summing(32)
    step = cf.offload(cf.shard(step_fn, cf.Mesh(dp=2), zero(1, "dp")), budget="60KB")
    low = step.lower(state, batch)
    assert [node.target for node in low.program.nodes].count("colofunc.adamw_rounded_") == 3
    wanted, _ = step_fn(state, batch)
    placed, _ = step(step.init(state, batch), batch)
    assert all(torch.equal(placed["params"][name].full(), x) for name, x in wanted["params"].items())


# ---- what it says to mistakes ----


@pytest.mark.parametrize(
    ("cls", "options", "says"),
    [
        (ADAMW, {"rounding": "random"}, "rounding='random': numbers are rounded to the nearest, or by a draw. Try: rounding='stochastic'"),
        (
            torch.optim.SGD,
            {"rounding": "stochastic"},
            "rounding='stochastic': SGD rounds to the nearest. Try: torch.optim.AdamW or torch.optim.Adam",
        ),
        (
            ADAMW,
            {"groups": {"w": {"rounding": "stochastic", "amsgrad": True}}},
            "groups['w']: rounding='stochastic': the maxima of amsgrad are rounded to the nearest. Try: amsgrad=False",
        ),
    ],
)
def test_a_mistake_is_named(cls: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(cf.InputError) as caught:
        cf.adapt(cls, lr=1e-2, **options)
    assert str(caught.value) == says


def test_groups_differ_and_other_dtypes_are_updated_as_ever() -> None:
    opt = cf.adapt(ADAMW, lr=1e-2, rounding="stochastic", groups={"near": {"rounding": "nearest"}})
    plain = cf.adapt(ADAMW, lr=1e-2)
    params = {"near": torch.randn(40, 30).to(BF16), "drawn": torch.randn(40, 30).to(BF16), "wide": torch.randn(40, 30)}
    grads = {name: torch.randn_like(x) for name, x in params.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, _ = opt.update(grads, opt.init(params), params)
        wanted, _ = plain.update(grads, plain.init(params), params)
    same = {name: torch.equal(found[name], wanted[name]) for name in params}
    assert same == {"near": True, "drawn": False, "wide": True}


@pytest.mark.parametrize("level", [1, 3])
def test_parameters_that_ranks_do_not_divide_are_rounded_alike(level: int) -> None:
    opt = cf.adapt(ADAMW, lr=1e-3, rounding="stochastic")
    torch.manual_seed(0)
    params = {"w": torch.randn(67, 63).to(BF16), "bias": torch.randn(67).to(BF16)}

    def step(state: Any, x: Tensor) -> tuple[Any, Tensor]:
        grads, value = torch.func.grad_and_value(lambda p: (x @ p["w"].T + p["bias"]).float().sum())(state["params"])
        params, opt_state = opt.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt_state}, value

    state, x = {"params": params, "opt": opt.init(params)}, torch.randint(-1, 2, (16, 63)).to(BF16)
    wanted, _ = step(state, x)
    made = cf.shard(step, cf.Mesh(dp=2), zero(level, "dp"))
    placed, _ = made(made.init(state, x), x)
    for name, p in wanted["params"].items():
        assert torch.equal(placed["params"][name].full(), p), name
