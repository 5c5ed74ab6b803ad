"""cf.quantize(activations=): what backward reads is kept in 8 bits; outputs stay the same, gradients within a bound, on any mesh."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import tensor, zero
from test_memory_agrees import agree
from torch import nn

import colofunc as cf
from colofunc.ops.saved_activations import NUMBERS, PACK, WIDEN, ScaleGroups, group_of, pack_saved, widen_saved
from colofunc.program.facts import is_copy
from colofunc.program.passes.saved_activations import bytes_kept

FORMS = tuple(NUMBERS)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def kept(x: torch.Tensor, form: str) -> torch.Tensor:
    """What backward reads of a value."""
    groups = group_of(tuple(x.shape))
    assert groups is not None
    return widen_saved(*pack_saved(x, groups.dim, groups.width, NUMBERS[form]), NUMBERS[form], x.dtype)


def bound(x: torch.Tensor, form: str) -> torch.Tensor:
    """How far each number may be off, as the operators' module says, and half a unit of the dtype."""
    groups = group_of(tuple(x.shape))
    assert groups is not None
    cut = x.double().unflatten(groups.dim, (-1, groups.width)).flatten(groups.dim + 1)
    scale = cut.abs().amax(-1, keepdim=True) / (127 if form == "int8" else 448)
    allowed = (scale / 2).expand_as(cut) if form == "int8" else cut.abs() / 16 + scale / 1024
    return allowed.reshape(x.shape) * (1 + 1e-6) + x.double().abs() * torch.finfo(x.dtype).eps


# ---- the operators ----


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(8, 16, 256), (16, 16, 8, 8), (40, 192)], ids=str)
def test_numbers_are_within_the_bound(form: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = numbers(*shape, dtype=dtype)
    x[1] = 0
    x[2] *= 1e-30
    y = kept(x, form)
    assert y.dtype is dtype and not y[1].any()
    assert bool(((y.double() - x.double()).abs() <= bound(x, form)).all())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_group_with_a_number_that_is_not_finite_is_not(form: str, odd: float) -> None:
    x = numbers(8, 4, 256)
    x[0, 0, 3] = odd
    finite = kept(x, form).isfinite()
    assert not finite[0, 0, :128].any() and finite[0, 0, 128:].all() and finite[1:].all()


@pytest.mark.parametrize("form", FORMS)
def test_parts_between_groups_are_packed_as_the_whole(form: str) -> None:
    x = numbers(8, 16, 512)
    whole = pack_saved(x, 2, 128, NUMBERS[form])
    for rows, columns in itertools.product((0, 1), (0, 1)):
        part = x[rows::2, :, columns * 256 : columns * 256 + 256]
        codes, scale = pack_saved(part, 2, 128, NUMBERS[form])
        assert torch.equal(codes, whole[0][rows::2, :, columns * 256 : columns * 256 + 256])
        assert torch.equal(scale, whole[1][rows::2, :, columns * 2 : columns * 2 + 2])


def test_groups_depend_on_the_shape_and_never_reach_over_the_batch() -> None:
    assert group_of((2, 8, 768)) == ScaleGroups(2, 128) and group_of((2, 8, 320)) == ScaleGroups(2, 80)
    assert group_of((64, 8, 16)) == ScaleGroups(1, 8) and group_of((4, 64, 7, 7)) == ScaleGroups(1, 2)
    assert group_of((8192,)) is None and group_of((4096, 8)) is None, "rows too short for a scale"
    assert group_of((4, 997)) is None and group_of((4096, 997)) is None, "a prime number of columns"
    assert group_of((8, 128)) is None, "small"


# ---- a step ----


class Block(nn.Module):
    """A block of a transformer, which reads its input twice."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)), 0.1)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    """Two blocks between a table and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(48, 64)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(64, 48)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def net_step() -> tuple[Any, Any, Any]:
    """(step, state, batch)."""
    torch.manual_seed(0)
    step_fn, state = cf.train_step(cf.functional(Net()), cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda loss: loss)
    return step_fn, state, {"tokens": torch.randint(48, (8, 16)), "labels": torch.randint(48, (8, 16))}


def by_hand(params: Any, x: torch.Tensor, form: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of `two_layers` with what is kept written out: inputs of the second product, and of its activation."""
    before = F.linear(x, params["up"])
    hidden = F.gelu(before)
    out = F.linear(hidden, params["down"])
    d_out = 2 * out / out.numel()
    d_hidden = torch.autograd.functional.vjp(F.gelu, kept(before, form), d_out @ params["down"])[1]
    d_down = d_out.flatten(0, 1).T @ kept(hidden, form).flatten(0, 1)
    return out.square().mean(), {"up": d_hidden.flatten(0, 1).T @ x.flatten(0, 1), "down": d_down}


def two_layers(params: Any, x: torch.Tensor) -> Any:
    def loss(params: Any) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, params["up"])), params["down"]).square().mean()

    return cf.value_and_grad(loss)(params)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_what_is_kept_and_the_loss_is_the_same(form: str) -> None:
    params, x = {"up": numbers(256, 64).double() / 8, "down": numbers(64, 256).double() / 16}, numbers(4, 16, 64).double()
    loss, grads = cf.quantize(cf.shard(two_layers, cf.Mesh(dp=2)), activations=form)(params, x)
    wanted, expected = by_hand(params, x, form)
    _, exact = two_layers(params, x)
    assert torch.equal(loss.full(), cf.shard(two_layers, cf.Mesh(dp=2))(params, x)[0].full())
    torch.testing.assert_close(loss.full(), wanted, rtol=1e-12, atol=0)
    for name, gradient in grads.items():
        torch.testing.assert_close(gradient.full(), expected[name], rtol=1e-10, atol=1e-14)
        assert not torch.equal(gradient.full(), exact[name])
    # The error of a linear layer's gradient is that of its inputs, times the gradients of its outputs.
    hidden = F.gelu(F.linear(x, params["up"]))
    out = F.linear(hidden, params["down"])
    allowed = (2 * out / out.numel()).abs().flatten(0, 1).T @ bound(hidden, form).flatten(0, 1)
    assert bool(((grads["down"].full() - exact["down"]).abs() <= allowed).all())
    assert float((grads["down"].full() - exact["down"]).norm() / exact["down"].norm()) < (0.01 if form == "int8" else 0.03)


def test_what_a_step_returns_is_equal_to_the_bit_and_less_is_held() -> None:
    step_fn, state, batch = net_step()
    plain, packed = cf.shard(step_fn, cf.Mesh(dp=2)), cf.quantize(cf.shard(step_fn, cf.Mesh(dp=2)), activations="int8")
    torch.manual_seed(3)
    wanted = plain(state, batch)[1]["loss"].full()
    torch.manual_seed(3)
    assert torch.equal(packed(state, batch)[1]["loss"].full(), wanted)
    low = packed.lower(state, batch)
    count, packed_bytes, wide_bytes = bytes_kept(low.global_program)
    assert count == 17 and 0.25 < packed_bytes / wide_bytes < 0.28
    assert low.memory().peak_bytes["device"] < 0.75 * plain.lower(state, batch).memory().peak_bytes["device"]
    assert any(line.startswith("activations for backward in int8: 17 values") for line in low.plan.notes), low.plan.notes


def test_what_stays_as_it_is() -> None:
    step_fn, state, batch = net_step()
    low = cf.quantize(cf.precision(step_fn, "bf16"), activations="int8").lower(state, batch)
    program = low.global_program
    sources = [node.refs[0] for node in program.nodes if node.target == PACK]
    made = {id: program.makers[id] for id in sources}
    assert all(program.values[id].dtype.is_floating_point and node.phase == "forward" for id, node in made.items())
    assert not any(node.target == "aten._log_softmax.default" for node in made.values()), "read before anything is freed"
    assert not any(node.target == "aten._to_copy.default" and program.values[node.refs[0]].role == "param" for node in made.values())
    attention = [node for node in made.values() if node.target == "colofunc.attention"]
    assert len(attention) == 2 and all(node.results[0] in sources and node.results[1] not in sources for node in attention)
    for id in sources:
        phases = {program.nodes[k].phase for k in program.readers[id]}
        assert phases == {"forward"}, "backward reads what was kept of it"
    widened = [node for node in program.nodes if node.target == WIDEN]
    assert len(widened) >= len(sources) and all(node.phase == "backward" for node in widened)


def test_a_value_is_widened_anew_for_a_reader_far_behind() -> None:
    def step(params: Any, x: torch.Tensor) -> Any:
        def loss(params: Any) -> torch.Tensor:
            shared = torch.tanh(F.linear(x, params[0]))
            y = shared
            for weight in params[1:]:
                y = torch.tanh(F.linear(y, weight))
            return (y + F.linear(shared, params[1])).square().mean()

        return cf.value_and_grad(loss)(params)

    params, x = [numbers(64, 64) / 8 for _ in range(12)], numbers(8, 16, 64)
    low = cf.quantize(step, activations="int8").lower(params, x)
    program = low.global_program
    most = max(sum(node.target == WIDEN and node.refs[0] == codes for node in program.nodes)
               for codes in (node.results[0] for node in program.nodes if node.target == PACK))  # fmt: skip
    assert most > 1
    with cf.testing.float64():
        cf.testing.check(cf.quantize(cf.shard(step, cf.Mesh(dp=2)), activations="int8"), params, x)


# ---- under every mode ----

DP, TP = cf.Mesh(dp=2), cf.Mesh(dp=2, tp=2)
MODES = {
    "alone": lambda step: cf.shard(step, cf.Mesh()),
    "auto": lambda step: cf.shard(step, TP),
    "zero1": lambda step: cf.shard(step, DP, zero(1, "dp")),
    "zero3": lambda step: cf.shard(step, DP, zero(3, "dp")),
    "tensor": lambda step: cf.shard(step, TP, tensor("1d", "tp")),
    "sequence": lambda step: cf.shard(step, cf.Mesh(tp=4), tensor("1d", "tp", sequence=True)),
    "checkpoint": lambda step: cf.checkpoint(cf.shard(step, DP), policy="nothing"),
    "checkpoint by cost": lambda step: cf.checkpoint(cf.shard(step, DP, zero(1, "dp")), budget="1.7MiB"),
    "offload": lambda step: cf.offload(cf.shard(step, DP), policy="host"),
    "offload by cost": lambda step: cf.offload(cf.shard(step, DP, zero(1, "dp")), budget="900KiB"),
    "accumulate": lambda step: cf.accumulate(cf.shard(step, DP), microbatches=2),
    "accumulate, offload": lambda step: cf.accumulate(cf.offload(cf.shard(step, DP), policy="host"), microbatches=4),
    "pipeline": lambda step: cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4),
    "pipeline, zero bubble": lambda step: cf.pipeline(cf.shard(step, cf.Mesh(pp=2, dp=2)), microbatches=4, schedule="zb-h1"),
    "pipeline, checkpoint": lambda step: cf.checkpoint(cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4), policy="nothing"),
    "bf16": lambda step: cf.precision(cf.shard(step, DP), "bf16"),
    "fp8": lambda step: cf.fp8(cf.shard(step, DP), where="*.up.weight"),
}
ORDERS = ("first", "last")
SAMPLE = [("zero3", "fp8", "last"), ("tensor", "int8", "first"), ("checkpoint", "int8", "last"), ("offload by cost", "fp8", "first"),
          ("accumulate", "int8", "last"), ("pipeline, zero bubble", "int8", "first"), ("bf16", "int8", "last")]  # fmt: skip


def run(mode: str, form: str, order: str) -> None:
    """Two steps are those of the same step on one device."""
    step_fn, state, batch = net_step()
    place = MODES[mode]
    step = place(cf.quantize(step_fn, activations=form)) if order == "first" else cf.quantize(place(step_fn), activations=form)
    if mode == "bf16":
        checked = cf.testing.check(step, state, batch)
    else:
        with cf.testing.float64():
            checked = cf.testing.check(step, state, batch)
            assert checked.worst <= 1e-10
    assert PACK in _targets(checked.low.program)


def _targets(program: Any) -> set[str]:
    return {node.target for each in program.with_bodies() for node in each.nodes}


@pytest.mark.filterwarnings("ignore:the plan uses")
@pytest.mark.parametrize("mode, form, order", SAMPLE)
def test_combination(mode: str, form: str, order: str) -> None:
    run(mode, form, order)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:the plan uses")
@pytest.mark.parametrize("mode", MODES)
def test_combinations(mode: str) -> None:
    for form, order in itertools.product(FORMS, ORDERS):
        run(mode, form, order)


def test_what_is_counted_is_what_is_held() -> None:
    step_fn, state, batch = net_step()
    agree(cf.quantize(cf.shard(step_fn, DP, zero(1, "dp")), activations="int8"), state, batch)


def test_within_one_budget_less_is_copied() -> None:
    step_fn, state, batch = net_step()

    def copied_bytes(transform: Any) -> int:
        low = transform(cf.offload(cf.shard(step_fn, cf.Mesh()), budget="1.4MiB")).lower(state, batch)
        values = low.program.values
        return sum(values[node.refs[0]].nbytes for node in low.program.nodes if is_copy(node) and node.results)

    plain = copied_bytes(lambda step: step)
    assert plain and copied_bytes(lambda step: cf.quantize(step, activations="int8")) < 0.6 * plain


def test_with_packed_weights() -> None:
    """Adapters beside frozen weights in 8 bits, and what is kept for them in 8 bits."""
    torch.manual_seed(0)
    model = cf.lora(cf.functional(Net()), where="*.up", rank=4)
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda loss: loss)
    batch = net_step()[2]
    step = cf.quantize(cf.shard(step_fn, DP), "int8", where="*.down.weight", activations="int8")
    with cf.testing.float64():
        checked = cf.testing.check(step, state, batch)
    assert {PACK, "colofunc.int8_linear"} <= _targets(checked.low.program)


@pytest.mark.sweep
def test_on_compiled() -> None:
    params, x = {"up": numbers(256, 64) / 8, "down": numbers(64, 256) / 16}, numbers(4, 16, 64)
    step = cf.quantize(cf.shard(two_layers, cf.Mesh()).on("compiled"), activations="int8")
    cf.testing.check(step, params, x, steps=1)


# ---- mistakes ----


def test_a_form_that_there_is_not_is_refused() -> None:
    with pytest.raises(cf.InputError, match=r"cf.quantize\(activations='int4'\): what backward reads is kept in 'int8' or 'fp8'"):
        cf.quantize(lambda x: x, activations="int4")
    with pytest.raises(cf.InputError, match=r"cf.quantize\(activations=8\)"):
        cf.quantize(lambda x: x, activations=8)  # type: ignore[arg-type]
    with pytest.raises(cf.InputError, match="rise is for scheme 'auto'"):
        cf.quantize(lambda x: x, activations="int8", rise=1.0)


def test_where_nothing_is_kept_the_plan_says_so() -> None:
    low = cf.quantize(lambda x: x * 2, activations="fp8").lower(torch.ones(64, 128))
    assert "activations for backward in fp8: none" in low.plan.notes[0]
