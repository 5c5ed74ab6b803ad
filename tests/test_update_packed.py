"""Moments in 8 bits: the code against its definition, the update against one written out, every mode against one device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from colofunc_plugins import zero
from quantize_matrix import MODES, Net, tokens
from torch import nn

import colofunc as cf
from colofunc.functional.packed_moments import MOMENTS, SCALES
from colofunc.ops import native
from colofunc.ops.update_packed import (
    BLOCK,
    LEAST_BLOCK,
    _shares,
    adamw8,
    adamw8_,
    adamw8_host_,
    block_of,
    dither,
    host_tables,
    pack_blocks,
    packed_moment,
    widen,
    widened_moment,
)

SHAPES = {
    (1024, 768): 128, (64, 64, 3, 3): 72, (4, 64, 128): 128, (4096,): 128, (96, 100): 100, (256, 8, 8): 128, (1000, 10): 100,
    (40, 2, 64): 128,
}  # fmt: skip
WIDE = [(768,), (32, 127), (131, 131), (4099,), (0, 4096), ()]
ADAMS = [(torch.optim.AdamW, {}), (torch.optim.Adam, dict(weight_decay=0.1)), (torch.optim.AdamW, dict(maximize=True, betas=(0.8, 0.9)))]


# ---- the code ----


@pytest.mark.parametrize(("shape", "size"), SHAPES.items(), ids=str)
def test_a_block_is_a_run_within_one_dim(shape: tuple[int, ...], size: int) -> None:
    blocks = block_of(shape)
    assert blocks is not None and blocks.size == size and LEAST_BLOCK <= size <= BLOCK
    assert torch.Size(blocks.scales(shape)).numel() * size == torch.Size(shape).numel()
    behind = torch.Size(shape[blocks.dim + 1 :]).numel()
    assert size % behind == 0 and shape[blocks.dim] % (size // behind) == 0


@pytest.mark.parametrize("shape", WIDE, ids=str)
def test_small_or_oddly_cut_parameters_keep_wide_moments(shape: tuple[int, ...]) -> None:
    assert block_of(shape) is None


def levels(signed: bool) -> torch.Tensor:
    """All shares of a code, straight from the sentences that define them."""
    zero = torch.zeros(1, dtype=torch.float64)
    if not signed:
        return torch.cat((zero, torch.logspace(-7, 0, 255, dtype=torch.float64)))
    found = [zero]
    for decade in range(7):
        found.append(torch.linspace(0.1, 1.0, 2**decade + 1, dtype=torch.float64)[1:] * 10.0 ** (decade - 6))
    shares = torch.cat(found)
    return torch.cat((shares, -shares[1:]))


@pytest.mark.parametrize("signed", [True, False])
def test_an_element_is_the_nearest_level_of_its_block(signed: bool) -> None:
    x = torch.randn(32, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 5
    x = x if signed else x.abs()
    x[3, :128], x[:, 7] = 0.0, 0.0
    blocks = block_of(x.shape)
    assert blocks is not None
    codes, scale = packed_moment(x, blocks, signed)
    wide = widened_moment(codes, scale, signed).double()
    unit = scale.double().repeat_interleave(blocks.size, 1)
    nearest = levels(signed)[(x.unsqueeze(-1) - unit.unsqueeze(-1) * levels(signed)).abs().argmin(-1)] * unit
    kept = torch.ones_like(x, dtype=torch.bool) if signed else nearest != 0  # positive ones are never 0
    torch.testing.assert_close(wide[kept], nearest[kept], rtol=1e-6, atol=0.0)
    assert bool(((wide == 0) == (x == 0))[~kept].all()) and not wide[x == 0].any()
    assert torch.equal(wide.unflatten(1, (2, 128)).abs().amax(2), scale.double())
    large = x.abs() > unit / 10
    assert bool(((wide - x).abs() <= (0.0071 * unit if signed else 0.033 * x))[large].all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("upward", [0.01, 0.5, 0.9])
def test_codes_change_just_where_they_are_said_to(signed: bool, dtype: torch.dtype, upward: float) -> None:
    """Beside the level and the part of the way behind it, found by tables of leading bits, expected by a search."""
    shares = torch.tensor(_shares(signed), dtype=torch.float64).to(dtype)
    ends = shares[:-1] + upward * shares.diff()
    near = 1e-4 if dtype is torch.float32 else 1e-12
    x = torch.cat((ends * (1 - near), ends * (1 + near), shares))
    codes, scale = pack_blocks(x.unsqueeze(0), signed, dtype, upward)
    wanted = torch.bucketize(x, ends)
    if not signed:
        wanted[x > 0] = wanted[x > 0].clamp(min=1)
    assert float(scale) == 1.0 and torch.equal(codes[0].long(), wanted)
    if signed:
        assert torch.equal(pack_blocks(-x.unsqueeze(0), signed, dtype, upward)[0], -codes)


def test_what_moves_by_less_than_a_level_moves_in_the_mean() -> None:
    """Note [Dither]: a square's moment that decays by a thousandth at a step, kept in 8 bits, is right after 2,000 steps."""
    x = torch.rand(1, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.01
    x[0, 0] = 1.5
    kept = {"dithered": x, "nearest": x}
    for step in range(1, 2001):
        for how, value in kept.items():
            value = value * 0.999
            value[0, 0] = 1.5  # the scale stays
            upward = dither(torch.tensor(float(step)), 128, x.dtype) if how == "dithered" else 0.5
            kept[how] = widen(*pack_blocks(value, False, x.dtype, upward), False, x.dtype)
    wanted = x * 0.999**2000
    off = {how: float((value / wanted)[0, 1:].log().abs().mean()) for how, value in kept.items()}
    assert off["dithered"] < 0.1 < 1.0 < off["nearest"], off


def test_every_place_of_a_block_is_rounded_up_as_often_as_any_other() -> None:
    parts = torch.stack([dither(torch.tensor(float(step)), 128, torch.float64) for step in range(1000)])
    assert float((parts.mean(0) - 0.5).abs().max()) < 0.01 and float((parts.mean(1) - 0.5).abs().max()) < 0.05


# ---- the update ----


def stored(x: torch.Tensor, signed: bool, step: int | None = None) -> torch.Tensor:
    """What is left of a moment that was kept, at a step or to the nearest level."""
    blocks = block_of(x.shape)
    assert blocks is not None
    upward = 0.5 if step is None else dither(torch.tensor(float(step)), blocks.size, x.dtype)
    codes, scale = pack_blocks(x.view(-1, blocks.size), signed, torch.float32, upward)
    return widen(codes, scale, signed, x.dtype).view(x.shape)


@pytest.mark.parametrize(("cls", "options"), ADAMS, ids=str)
def test_an_update_is_adams_with_moments_that_were_kept(cls: Any, options: dict[str, Any]) -> None:
    """Five updates: torch's own class, whose moments go through the code after each."""
    draw = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(64, 96, dtype=torch.float64, generator=draw), "b": torch.randn(64, dtype=torch.float64, generator=draw)}
    mine = {n: p.clone().requires_grad_() for n, p in params.items()}
    reference = cls(mine.values(), lr=1e-2, **options)
    opt = cf.adapt(cls, lr=1e-2, state_bits=8, **options)
    state = opt.init(params)
    for step in range(1, 6):
        grads = {n: torch.randn(p.shape, dtype=p.dtype, generator=draw) for n, p in params.items()}
        for n, p in mine.items():
            p.grad = grads[n]
        reference.step()
        kept = reference.state[mine["w"]]
        kept["exp_avg"], kept["exp_avg_sq"] = stored(kept["exp_avg"], True), stored(kept["exp_avg_sq"], False, step)
        params, state = opt.update(grads, state, params)
        for n, p in mine.items():
            torch.testing.assert_close(params[n], p.detach(), rtol=1e-12, atol=1e-12)
    assert state["exp_avg"]["w"].dtype is torch.int8 and state["exp_avg"]["b"].dtype is torch.float64
    assert state["exp_avg_sq_scale"].keys() == {"w"}


def operands(dtype: torch.dtype = torch.float32) -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    blocks = block_of((64, 96))
    assert blocks is not None
    param, grad, mean = (torch.randn(64, 96, generator=draw) for _ in range(3))
    moments = (*packed_moment(mean, blocks, True), *packed_moment(mean.square(), blocks, False))
    return [param.to(dtype), grad.to(dtype), *moments, torch.tensor(3.0), torch.tensor(0.01, dtype=torch.float64)]


NUMBERS = (0.9, 0.999, 1e-8, 0.01, True)


def test_operators_are_registered_right() -> None:
    for op in (adamw8, adamw8_):
        torch.library.opcheck(op.op, (*operands(), *NUMBERS), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("case", ["blocks at a time", "transposed in memory"])
def test_numbers_do_not_depend_on_how_memory_is_walked(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = adamw8(*operands(), *NUMBERS)
    given = operands()
    if case == "blocks at a time":
        monkeypatch.setattr("colofunc.ops.update_packed.WIDENED_ELEMENTS", 5 * 96)
    else:
        given[:6] = [x.T.contiguous().T for x in given[:6]]
    adamw8_(*given, *NUMBERS)
    assert all(torch.equal(a, b) for a, b in zip((given[0], *given[2:6]), wanted, strict=True))


def bits(x: torch.Tensor) -> torch.Tensor:
    """As whole numbers; of NaN there is one."""
    return torch.where(x.isnan(), torch.full_like(x, float("nan")), x).view(torch.int16 if x.element_size() == 2 else torch.int32)


CASES = [
    (torch.float32, torch.bfloat16, None, 128), (torch.float32, torch.float16, None, 33), (torch.bfloat16, torch.float32, None, 96),
    (torch.bfloat16, torch.bfloat16, 77, 128), (torch.bfloat16, torch.float32, -(2**61), 40),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "grad_dtype", "key", "size"), CASES)
def test_the_kernel_has_the_bits_of_the_reference_at_every_instruction_set(
    dtype: torch.dtype, grad_dtype: torch.dtype, key: int | None, size: int, required: None
) -> None:
    draw, count = torch.Generator().manual_seed(0), 301
    param, grad, mean = (torch.randn(count, size, generator=draw) * torch.logspace(-20, 10, count).unsqueeze(1) for _ in range(3))
    grad[5], mean[5], mean[6, 3] = 0.0, 0.0, 0.0
    param, grad = param.to(dtype), grad.to(grad_dtype)
    param[0, 0], grad[1, 3], grad[2] = float("inf"), float("nan"), 0.0
    moments = (*pack_blocks(mean, True, torch.float32), *pack_blocks(mean.square(), False, torch.float32))
    start = [param, *(x.view(count, -1) for x in moments)]
    for decay, decoupled, maximize in ((0.0, True, False), (0.125, True, True), (0.125, False, False)):
        rest = (host_tables(True), host_tables(False), 0.25, 0.5, 0.75, 0.9, 0.999, 1e-8, decay, decoupled, maximize, key)
        last = (dither(torch.tensor(3.0), size, torch.float32), *rest, torch.arange(count) * 1000 + 7, size, 3)
        wanted = [x.clone() for x in start]
        adamw8_host_.kernel(wanted[0], grad, *wanted[1:], *last)
        for level, threads in ((0, 1), (1, 1), (2, 2)):
            native.limit_level(level)
            torch.set_num_threads(threads)
            got = [x.clone() for x in start]
            try:
                adamw8_host_(got[0], grad, *got[1:], *last)
            finally:
                torch.set_num_threads(1)
            for part in (0, 2, 4):  # parameter and scales
                assert torch.equal(bits(got[part]), bits(wanted[part]))
            # Codes of a block whose scale is no number say nothing.
            known = (got[2].isfinite() & got[4].isfinite()).view(-1)
            assert not known.all()
            for codes in (1, 3):
                assert torch.equal(got[codes][known], wanted[codes][known])


def test_the_kernel_takes_no_blocks(required: None) -> None:
    rest = (host_tables(True), host_tables(False), 0.25, 0.5, 0.75, 0.9, 0.999, 1e-8, 0.1, True, False, None)
    last = (torch.full((96,), 0.5), *rest, torch.arange(0), 96, 1)
    codes, scale = torch.empty(0, 96, dtype=torch.int8), torch.empty(0, 1)
    start = [torch.empty(0, 96), codes, scale, codes.to(torch.uint8), scale]
    for call in (adamw8_host_, adamw8_host_.kernel):
        given = [x.clone() for x in start]
        call(given[0], torch.empty(0, 96), *given[1:], *last)
        assert all(x.shape == y.shape for x, y in zip(given, start, strict=True))


def test_operands_that_the_kernel_cannot_take_are_named(required: None) -> None:
    given, tables = operands()[:6], (host_tables(True), host_tables(False))
    numbers = (0.1, 0.1, 1.0, 0.9, 0.999, 1e-8, 0.0, True, False)
    rows, upward = torch.arange(64), torch.full((96,), 0.5)
    given = [x.reshape(64, -1) for x in given]
    with pytest.raises(RuntimeError, match="adamw8_host_: only a parameter in bfloat16 is rounded by draws"):
        adamw8_host_(*given, upward, *tables, *numbers, 5, rows, 96, 1)
    with pytest.raises(RuntimeError, match="adamw8_host_: a block has at most 128 elements, all of one size"):
        adamw8_host_(*given, upward[:50], *tables, *numbers, None, rows, 96, 1)
    with pytest.raises(RuntimeError, match="adamw8_host_: these are not the tables of the code"):
        adamw8_host_(*given, upward, *reversed(tables), *numbers, None, rows, 96, 1)
    given[2] = given[2].to(torch.uint8)
    with pytest.raises(RuntimeError, match="adamw8_host_: an operand is not contiguous, of another size or dtype"):
        adamw8_host_(*given, upward, *tables, *numbers, None, rows, 96, 1)


def test_an_update_that_is_skipped_leaves_all_as_it_was() -> None:
    given = operands(torch.float16)
    kept = [x.clone() for x in given]
    adamw8_(*given, *NUMBERS, False, torch.tensor(False))
    assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))
    adamw8_(*given, *NUMBERS, False, torch.tensor(True))
    assert not torch.equal(given[0], kept[0]) and not torch.equal(given[2], kept[2])


# ---- training ----


def training(dtype: torch.dtype = torch.float32, net: Any = Net, bits: int = 8) -> tuple[Any, Any]:
    torch.manual_seed(0)
    opt = cf.adapt(torch.optim.AdamW, lr=1e-2, state_bits=bits)
    return cf.train_step(cf.functional(net().to(dtype)), opt, loss=lambda out: out.square().mean())


STAGED = [mode for mode in MODES if mode not in ("alone", "bf16")]  # in bf16 gradients themselves differ in last places
FEW = ("zero3", "pipeline+zero1", "experts+tensor", "offload")


@pytest.mark.filterwarnings("ignore:the plan uses")
@pytest.mark.parametrize("mode", [name if name in FEW else pytest.param(name, marks=pytest.mark.sweep) for name in STAGED])
def test_codes_and_scales_are_those_of_one_device(mode: str) -> None:
    """Bit for bit after three steps; parameters as exactly as ever. In float64, where no rounding of a sum reaches a code."""
    net = MODES[mode].net
    step_fn, state = training(torch.float64, net)
    step = MODES[mode].place(step_fn)
    expected = state
    placed = step.init(state, tokens())
    for _ in range(3):
        placed, _ = step(placed, tokens())
        expected, _ = step.reference(expected, tokens())
    names = set(expected["opt"][SCALES[0]])
    assert {"up.weight", "down.weight"} <= names
    for key in (*MOMENTS, *SCALES):
        for name in names:
            got, wanted = placed["opt"][key][name].full(), expected["opt"][key][name]
            assert torch.equal(got, wanted), f"{key}.{name}: {int((got != wanted).sum())} differ"
    for name, p in expected["params"].items():
        torch.testing.assert_close(placed["params"][name].full(), p, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_is_checked_in_every_precision(dtype: torch.dtype) -> None:
    step_fn, state = training(dtype)
    cf.testing.check(cf.shard(step_fn, cf.Mesh(dp=2, tp=2), zero(2, "dp")), state, tokens(), steps=3)


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_masters_have_moments_in_8_bits(policy: str) -> None:
    step_fn, state = training()
    step = cf.precision(cf.shard(step_fn, cf.Mesh(dp=2), zero(2, "dp")), policy)
    cf.testing.check(step, state, tokens())
    placed, _ = step(step.init(state, tokens()), tokens())
    assert placed["opt"]["exp_avg"]["up.weight"].dtype is torch.int8


def test_codes_and_scales_lie_alike_and_are_written_in_place() -> None:
    step_fn, state = training()
    step = cf.shard(step_fn, cf.Mesh(dp=4), zero(3, "dp"))
    low = step.lower(state, tokens())
    assert "colofunc.adamw8_" in {node.target for node in low.program.nodes}
    placed = step.init(state, tokens())
    for key in (*MOMENTS, *SCALES):
        assert str(placed["opt"][key]["up.weight"].spec) in ("(dp a) b", "(dp a) 1")
    # A row of 128 columns is a block: of each moment 129 floats and codes in the place of 512 bytes.
    wide = cf.shard(training(bits=32)[0], cf.Mesh(dp=4), zero(3, "dp")).lower(training(bits=32)[1], tokens())
    less = wide.memory().kinds()["optimizer state"] - low.memory().kinds()["optimizer state"]
    assert less == 2 * 2 * 256 * 128 // 4 * 3 - 2 * (256 + 256) // 4 * 4


def test_a_state_is_saved_and_goes_on_on_another_mesh(tmp_path: Path) -> None:
    step_fn, state = training(torch.float64)
    step = cf.shard(step_fn, cf.Mesh(dp=2), zero(1, "dp"))
    placed, _ = step(step.init(state, tokens()), tokens())
    cf.save(tmp_path / "state", placed)
    other = cf.shard(step_fn, cf.Mesh(tp=4))
    loaded = cf.load(tmp_path / "state", like=other.init(state, tokens()))
    for key in (*MOMENTS, *SCALES):
        assert torch.equal(loaded["opt"][key]["up.weight"].full(), placed["opt"][key]["up.weight"].full())
    (after, a), (wanted, b) = other(loaded, tokens()), step(placed, tokens())
    assert torch.equal(after["opt"]["exp_avg"]["up.weight"].full(), wanted["opt"]["exp_avg"]["up.weight"].full())
    torch.testing.assert_close(a["loss"].full(), b["loss"].full())


def test_state_is_made_where_it_lies() -> None:
    """Of a lazy model: nothing is made before it is placed."""
    model = cf.functional(cf.lazy(lambda: nn.Linear(256, 512)))
    opt = cf.adapt(torch.optim.AdamW, lr=1e-2, state_bits=8)
    step_fn, state = cf.train_step(model, opt, loss=lambda out: out.square().mean())
    assert all(type(state["opt"][key]["weight"]).__name__ == "LazyTensor" for key in (*MOMENTS, *SCALES))
    placed = cf.shard(step_fn, cf.Mesh(dp=2), zero(1, "dp")).init(state, torch.ones(4, 256))
    assert placed["opt"]["exp_avg"]["weight"].local.dtype is torch.int8 and not placed["opt"]["exp_avg_scale"]["weight"].full().any()


def test_groups_differ_in_it_and_a_state_is_converted_both_ways() -> None:
    params = {"table": torch.randn(64, 128), "w": torch.randn(64, 128)}
    grads = {n: torch.randn_like(p) for n, p in params.items()}
    narrow = cf.adapt(torch.optim.AdamW, lr=1e-2, state_bits=8, groups={"table": dict(state_bits=32)})
    wide = cf.adapt(torch.optim.AdamW, lr=1e-2)
    _, state = wide.update(grads, wide.init(params), params)
    small = narrow.converted(state, params)
    assert small["exp_avg"]["w"].dtype is torch.int8 and small["exp_avg"]["table"] is state["exp_avg"]["table"]
    assert small["exp_avg_scale"].keys() == {"w"}
    back = wide.converted(small, params)
    assert back.keys() == state.keys()
    torch.testing.assert_close(back["exp_avg"]["w"], stored(state["exp_avg"]["w"], True))
    again = narrow.converted(back, params)
    assert torch.equal(again["exp_avg"]["w"], small["exp_avg"]["w"]) and torch.equal(again["exp_avg_sq"]["w"], small["exp_avg_sq"]["w"])
    narrow.update(grads, small, params)


def test_training_is_within_half_a_percent_of_adamws() -> None:
    """Next tokens of a random text in which three are likely behind each, all matrices in 8 bits, 60 updates."""
    draw = torch.Generator().manual_seed(3)
    likely = torch.randint(0, 64, (64, 3), generator=draw)
    text = torch.zeros(8, 600, dtype=torch.int64)
    for k in range(1, 600):
        text[:, k] = likely[text[:, k - 1], torch.randint(0, 3, (8,), generator=draw)]

    class Next(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.up, self.head = nn.Embedding(64, 64), nn.Linear(128, 128), nn.Linear(128, 64)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.table(ids)
            logits = self.head(torch.tanh(self.up(torch.cat((x[:, 1:-1], x[:, :-2]), -1))))
            return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten())

    losses = {}
    for bits in (32, 8):
        torch.manual_seed(0)
        step, state = cf.train_step(cf.functional(Next()), cf.adapt(torch.optim.AdamW, lr=3e-3, state_bits=bits))
        for number in range(60):
            state, metrics = step(state, text[:, 9 * number : 9 * number + 34])
        losses[bits] = float(metrics["loss"])
    assert losses[32] < 2.0, "the model has learned something"
    assert abs(losses[8] / losses[32] - 1) <= 0.005, losses


# ---- what it says to mistakes ----

MISTAKES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "bits": (torch.optim.AdamW, dict(state_bits=4), "state_bits=4: moments are kept in 32 bits, or in 8. Try: state_bits=8"),
    "class": (
        torch.optim.SGD,
        dict(state_bits=8),
        "state_bits=8: SGD has no state in 8 bits. Try: torch.optim.AdamW or torch.optim.Adam",
    ),
    "amsgrad": (
        torch.optim.Adam,
        dict(state_bits=8, amsgrad=True),
        "state_bits=8: the maxima of amsgrad are kept in 32 bits only. Try: amsgrad=False, or state_bits=32",
    ),
    "group": (
        torch.optim.AdamW,
        dict(groups={"w": dict(state_bits=16)}),
        "groups['w']: state_bits=16: moments are kept in 32 bits, or in 8. Try: state_bits=8",
    ),
}


@pytest.mark.parametrize(("cls", "options", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named(cls: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(cf.InputError) as caught:
        cf.adapt(cls, lr=1e-2, **options)
    assert str(caught.value) == says


def test_a_state_of_other_bits_is_named() -> None:
    params = {"w": torch.ones(64, 64)}
    state = cf.adapt(torch.optim.AdamW, lr=1e-2).init(params)
    opt = cf.adapt(torch.optim.AdamW, lr=1e-2, state_bits=8)
    said = r"update: the state is not that of AdamW over these parameters: missing \['exp_avg_scale\.w', 'exp_avg_sq_scale\.w'\].*converted"
    with pytest.raises(cf.InputError, match=said):
        opt.update(params, state, params)
    said = r"converted: a state with .* max_exp_avg_sq, step for AdamW; it is for the two moments of Adam and AdamW"
    with pytest.raises(cf.InputError, match=said):
        opt.converted({**state, "max_exp_avg_sq": {}}, params)
