"""Sums of squares in one pass: the operator with its kernel and without, its rule, and the pass that writes it."""

import pytest
import torch
from colofunc_plugins import zero
from rule_oracle import check_op
from test_update_narrow import U, mode  # noqa: F401  mode: a fixture
from torch import Tensor, nn

import colofunc as cf
from colofunc.errors import InputError
from colofunc.ops import native
from colofunc.ops.squares import ROW, in_float64, squares_host_, sum_of_squares
from colofunc.program.passes import squares
from colofunc.program.passes.squares import squares_in_one_pass

D = torch.float64
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


# ---- the operator ----


@pytest.mark.parametrize("dtype", [D, *DTYPES])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (ROW - 1,), (7, ROW + 13)])
def test_a_sum_is_within_its_bound_of_float64(shape: tuple[int, ...], dtype: torch.dtype, mode: str) -> None:  # noqa: F811
    x = torch.randn(shape, dtype=D).to(dtype)
    found, want = sum_of_squares(x), x.double().square().sum()
    assert found.shape == () and found.dtype == torch.promote_types(dtype, torch.float32)
    assert float((in_float64(x) - want).abs()) <= ROW * U * float(want)
    torch.testing.assert_close(found.double(), want, rtol=(ROW + 1) * U, atol=0.0)


def test_a_sum_of_many_is_exact(mode: str) -> None:  # noqa: F811
    """A running sum of as many ones in float32 stops at 2^24."""
    numel = (1 << 24) + 4 * ROW
    assert float(in_float64(torch.ones(numel))) == numel


@pytest.mark.parametrize("lies", ["transposed", "gaps"])
def test_what_lies_apart_is_summed_too(lies: str, mode: str) -> None:  # noqa: F811
    x = torch.randn(40, 60)
    x = x.t() if lies == "transposed" else x[:, ::2]
    torch.testing.assert_close(sum_of_squares(x).double(), x.double().square().sum(), rtol=ROW * U, atol=0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_sum_that_is_no_number_or_too_large_is_seen(value: float, mode: str) -> None:  # noqa: F811
    x = torch.randn(3 * ROW)
    x[ROW + 5] = value
    found = float(sum_of_squares(x))
    assert found != found if value != value else found == float("inf")


def test_squares_of_small_elements_lose_digits_and_then_are_zero(mode: str) -> None:  # noqa: F811
    for value, most in ((1.1e-19, ROW * U), (2e-20, 1e-4), (1e-22, 0.1), (2.7e-23, 1.0)):
        x = torch.full((2 * ROW,), value)
        want = float(x.double().square().sum())
        assert abs(float(in_float64(x)) - want) <= most * want
    assert float(in_float64(torch.full((2 * ROW,), 2.6e-23))) == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_and_thread_gives_the_same_bits(dtype: torch.dtype, required: pytest.MonkeyPatch) -> None:
    for numel in (0, 1, 63, 64, ROW + 65, 200 * ROW + 29):
        x = torch.randn(numel).to(dtype)
        found = set()
        for level, threads in ((0, 1), (1, 1), (2, 2)):
            native.limit_level(level)
            torch.set_num_threads(threads)
            try:
                found.add(float(in_float64(x)))
            finally:
                torch.set_num_threads(1)
        assert len(found) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_that_begin_anywhere_have_the_same_bits(dtype: torch.dtype, mode: str) -> None:  # noqa: F811
    """Of which no vector instruction finds an aligned address."""
    x = torch.randn(3 * ROW + 65).to(dtype)
    assert len({float(in_float64(torch.cat([x[:begin], x])[begin:])) for begin in (0, 1, 3)}) == 1


def test_the_operators_are_what_they_say(mode: str) -> None:  # noqa: F811
    for dtype in (torch.float32, torch.bfloat16):
        torch.library.opcheck(sum_of_squares.op, (torch.randn(5, 7).to(dtype),))
        torch.library.opcheck(squares_host_.op, (torch.empty((), dtype=D), torch.randn(5, 7).to(dtype)))


def test_its_gradient_is_twice_the_tensor() -> None:
    x = torch.randn(3, 5, dtype=D, requires_grad=True)
    assert torch.autograd.gradcheck(sum_of_squares.op, x)
    (by_function,) = torch.autograd.grad(3.0 * sum_of_squares.apply(x), x)
    torch.testing.assert_close(by_function, 6.0 * x.detach())


def test_parts_on_ranks_are_added_up() -> None:
    assert {"d0", "d1"} <= check_op("colofunc.sum_of_squares", torch.randn(4, 6, dtype=D))


@pytest.mark.parametrize("x", [torch.randn(4, 6, dtype=D), torch.randn(4, 6).t()])
def test_a_bad_operand_is_named(x: Tensor) -> None:
    with pytest.raises(InputError, match=f"squares_host_: {x.dtype}, or not contiguous. Try: colofunc.sum_of_squares, which takes any"):
        squares_host_.kernel(torch.empty((), dtype=D), x)


def test_a_bad_operand_is_named_by_the_kernel(required: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="squares_host_: not contiguous"):
        squares_host_(torch.empty((), dtype=D), torch.randn(4, 6).t())
    with pytest.raises(RuntimeError, match="squares_host_: the sum is one float64"):
        squares_host_(torch.empty(()), torch.randn(4, 6))
    with pytest.raises(RuntimeError, match="squares_host_: a gradient is float32, bfloat16 or float16"):
        squares_host_(torch.empty((), dtype=D), torch.randn(4, 6, dtype=D))


# ---- the pass ----


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squares, "LARGE", 1)


def clipped(dtype: torch.dtype = torch.float32) -> tuple[object, object, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)).to(dtype)
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda out: out.square().mean(), clip=1e-2)
    return step, state, torch.randn(4, 8, dtype=dtype)


MESHES = {"one": ((), ()), "zero": ((("dp", 2),), (zero(1, "dp"),)), "zero3": ((("dp", 4),), (zero(3, "dp"),))}


@pytest.mark.parametrize("on", MESHES)
def test_a_step_that_clips_sums_squares_in_one_pass(on: str, small: None, mode: str) -> None:  # noqa: F811
    axes, plugins = MESHES[on]
    fn, state, x = clipped()
    step = cf.shard(fn, cf.Mesh(**dict(axes)), *plugins)
    targets = [node.target for node in step.lower(state, x).program.nodes]
    assert targets.count("colofunc.sum_of_squares") == 4
    cf.testing.check(step, state, x, steps=3)


NARROW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_gradients_are_summed_as_they_are(dtype: torch.dtype, small: None, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    fn, state, x = clipped(dtype)
    low = cf.shard(fn, cf.Mesh()).lower(state, x)
    sums = [node for node in low.program.nodes if node.target == "colofunc.sum_of_squares"]
    assert len(sums) == 4 and all(low.program.values[node.refs[0]].dtype == dtype for node in sums)
    monkeypatch.setattr(squares, "GRADS", ())
    with_casts = cf.shard(fn, cf.Mesh()).lower(state, x)
    read = [with_casts.program.values[n.refs[0]].dtype for n in with_casts.program.nodes if n.target == "colofunc.sum_of_squares"]
    assert read == [torch.float32] * 4
    assert len(with_casts.program.nodes) == len(low.program.nodes) + 4


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("numel", [0, 5, ROW, 5 * ROW + 77])
def test_a_sum_of_narrow_numbers_has_the_bits_of_the_sum_of_the_cast(numel: int, dtype: torch.dtype, mode: str) -> None:  # noqa: F811
    x = torch.randn(numel).to(dtype)
    assert torch.equal(sum_of_squares(x), sum_of_squares(x.float()))


def test_a_narrow_tensor_of_which_more_is_read_or_that_is_written_over_is_cast(small: None) -> None:
    def read(x: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.float()
        return (wide * wide).sum(), wide.exp()

    def written(x: Tensor) -> tuple[Tensor, Tensor]:
        made = x.exp()
        wide = made.float()
        made.zero_()
        return (wide * wide).sum(), made

    x = torch.randn(40, 60).bfloat16()
    for fn in (read, written):
        step = cf.shard(fn, cf.Mesh())
        found, want = step(x.clone()), fn(x.clone())
        torch.testing.assert_close([y.full() for y in found], list(want), rtol=1e-5, atol=0.0)
    program = cf.shard(read, cf.Mesh()).lower(x).program
    (node,) = [node for node in program.nodes if node.target == "colofunc.sum_of_squares"]
    assert program.values[node.refs[0]].dtype == torch.float32


@pytest.mark.parametrize("how", ["left out", "a GPU", "float64", "small"])
def test_where_it_gains_nothing_a_program_stays(how: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if how != "small":
        request.getfixturevalue("small")
    if how == "left out":
        monkeypatch.setenv("COLOFUNC_PASSES", "-squares")
    fn, state, x = clipped(D if how == "float64" else torch.float32)
    mesh = cf.Mesh(topology="8xh100") if how == "a GPU" else cf.Mesh()
    low = cf.shard(fn, mesh).lower(state, x)
    assert "colofunc.sum_of_squares" not in {node.target for node in low.program.nodes}


def test_a_square_that_others_read_and_a_product_of_two_stay(small: None) -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        product = x * x
        return product.sum(), product

    def other(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum() + (x * x).sum(0).sum()

    x = torch.randn(3, 4)
    for fn, given in ((both, (x,)), (other, (x, x + 1))):
        program = cf.shard(fn, cf.Mesh()).lower(*given).program
        assert "colofunc.sum_of_squares" not in {node.target for node in program.nodes}
        assert squares_in_one_pass(program, cf.Mesh()) is program


def test_the_peak_is_lower_without_the_square(monkeypatch: pytest.MonkeyPatch) -> None:
    def norm(x: Tensor) -> Tensor:
        return (x * x).sum().sqrt()

    x = torch.randn(600, 600)
    low = cf.shard(norm, cf.Mesh()).lower(x)
    monkeypatch.setenv("COLOFUNC_PASSES", "-squares")
    before = cf.shard(norm, cf.Mesh()).lower(x)
    assert before.memory().peak_bytes["device"] - low.memory().peak_bytes["device"] >= x.nbytes - 8
