"""The host runs ahead of a card: nothing within a step makes it wait, and what it does not wait for is in order."""

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from colofunc_plugins import experts as expert_parallel
from pretended import Machine, OnCard, on_card
from pretended.kernels import EMULATED

import colofunc as cf
from colofunc.executors.kernels import HostCount, first_rows, with_zeros, without_rest
from colofunc.ops import experts_device
from colofunc.ops.define import KERNELS

D = torch.float64
SEEDS = range(1)  # of orders in which streams run; where a fault of order may be, more are tried
FORMS = [("random", True, False, False), ("greedy", True, True, True), ("nobody", False, True, False), ("starving", False, False, True)]
ROUTES = {"random": lambda n, k, e: torch.randint(-1, e, (n, k)), "greedy": lambda n, k, e: torch.full((n, k), e - 1),
          "nobody": lambda n, k, e: torch.full((n, k), -1), "starving": lambda n, k, e: torch.randint(0, 2, (n, k))}  # fmt: skip


def on_both(name: str, *args: Any) -> None:
    """A kernel computes on the card what it does on the host, and the host does not wait."""
    want = KERNELS[name](*args)
    with Machine(seed=0) as machine:
        there = on_card(machine, args)
        machine.forget_counts()
        found = KERNELS[name](*there)
        assert not machine.waits, machine.places
        for got, one in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (found, want)), strict=True):
            assert isinstance(got, OnCard) and got.dtype == one.dtype and got.shape == one.shape
            assert (got.cpu() - one).abs().max() <= tolerance(one) if one.numel() else not got.numel()


def tolerance(x: torch.Tensor) -> float:
    """Sums of a few dozen terms, taken in another order."""
    eps = torch.finfo(x.dtype).eps if x.dtype.is_floating_point else 0.0
    return 32 * eps * max(1.0, float(x.abs().max()))


def operands(route: str, gated: bool, transposed: bool, bias: bool, dtype: torch.dtype = D, n: int = 40, e: int = 5) -> tuple[Any, ...]:
    torch.manual_seed(0)
    k, f, d = 2, 8, 16
    up, down = torch.randn(e, (1 + gated) * f, d, dtype=dtype), torch.randn(e, d, f, dtype=dtype)
    if transposed:
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    biases = (torch.randn(e, (1 + gated) * f, dtype=dtype), torch.randn(e, d, dtype=dtype)) if bias else (None, None)
    x, weight = torch.randn(n, d, dtype=dtype), torch.rand(n, k, dtype=dtype)
    return x, ROUTES[route](n, k, e), weight, up, down, *biases, "silu", gated, transposed


# ---- kernels ----


@pytest.mark.parametrize(("route", "gated", "transposed", "bias"), FORMS)
def test_experts_on_a_card_are_those_of_the_host(route: str, gated: bool, transposed: bool, bias: bool) -> None:
    args = operands(route, gated, transposed, bias)
    grad = torch.randn(40, 16, dtype=D)
    on_both("colofunc.experts", *args)
    on_both("colofunc.experts_backward", grad, *args, False)
    with mock.patch.object(experts_device, "at_once", lambda *sizes: 50):  # of 80 choices
        on_both("colofunc.experts_backward", grad, *args, True)
        in_two_calls(grad, args)


def in_two_calls(grad: torch.Tensor, args: tuple[Any, ...]) -> None:
    """The same backward with gradients of weights in a call of their own."""
    on_both("colofunc.experts_input_gradients", grad, *args)
    *_, dh, a = KERNELS["colofunc.experts_input_gradients"](grad, *args)
    on_both("colofunc.experts_weight_gradients", dh, a, grad, *args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_experts_of_other_dtypes_and_without_tokens(dtype: torch.dtype) -> None:
    args = operands("random", True, False, True, dtype)
    on_both("colofunc.experts", *args)
    on_both("colofunc.experts_backward", torch.randn(40, 16).to(dtype), *args, True)
    empty = (args[0][:0], args[1][:0], args[2][:0], *args[3:])
    on_both("colofunc.experts", *empty)
    on_both("colofunc.experts_backward", args[0][:0], *empty, True)
    in_two_calls(torch.randn(40, 16).to(dtype), args)
    in_two_calls(args[0][:0], empty)


@pytest.mark.parametrize("act", ["relu", "gelu_tanh", "interleaved_swiglu:1.702:1.0"])
def test_other_activations_on_a_card(act: str) -> None:
    args = operands("random", True, False, False)
    on_both("colofunc.experts_backward", torch.randn(40, 16, dtype=D), *args[:7], act, *args[8:], True)


def test_places_in_queues_are_found_without_waiting() -> None:
    on_both("colofunc.expert_position", torch.randint(-1, 5, (30, 2)), 5)
    on_both("colofunc.expert_position", torch.randint(-1, 5, (0, 2)), 5)


def leaves_the_rest(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, *args: Any) -> torch.Tensor:
    """Torch's kernel on a card: what is of no group is not written."""
    ends = [0, *offs.tolist()]
    of_groups = w.dim() == 2
    out = torch.full((len(ends) - 1, x.shape[0], w.shape[1]) if of_groups else (x.shape[0], w.shape[2]), torch.nan, dtype=x.dtype)
    for group, (start, end) in enumerate(pairwise(ends)):
        if of_groups and end > start:
            out[group] = x[:, start:end] @ w[start:end]
        elif not of_groups:
            out[start:end] = x[start:end] @ w[group]
    return out


@pytest.mark.parametrize("offsets", [(3, 3, 7), (0, 0, 0), (2, 9, 40)])
@pytest.mark.parametrize(("dtype", "width"), [(D, 12), (torch.float16, 16), (torch.bfloat16, 16), (torch.bfloat16, 12)])
def test_grouped_products_on_a_card(offsets: tuple[int, ...], dtype: torch.dtype, width: int) -> None:
    """Rows behind the last offset and groups without rows are zeros, by torch's kernel (aligned bfloat16) and by tiles."""
    torch.manual_seed(0)
    x, w, offs = torch.randn(40, 8).to(dtype), torch.randn(3, 8, width).to(dtype), torch.tensor(offsets, dtype=torch.int32)
    g = torch.randn(40, width).to(dtype)
    with mock.patch.dict(EMULATED, {torch.ops.aten._grouped_mm.default: leaves_the_rest}):
        on_both("colofunc.grouped_mm", x, w, offs)
        on_both("colofunc.grouped_mm", g, w.transpose(1, 2), offs)
        on_both("colofunc.grouped_mm_dw", x, g, offs)
        with Machine() as machine:
            KERNELS["colofunc.grouped_mm"](*on_card(machine, (x, w, offs)))
            assert bool(machine.launches["aten._grouped_mm.default"]) == (dtype == torch.bfloat16 and width % 8 == 0)


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_cards_for_which_torch_would_read_the_offsets_take_tiles(capability: tuple[int, int]) -> None:
    x, w = torch.randn(40, 8).bfloat16(), torch.randn(3, 8, 16).bfloat16()
    with Machine() as machine, mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: capability):
        found = KERNELS["colofunc.grouped_mm"](*on_card(machine, (x, w, torch.tensor([3, 3, 7]))))
        taken = bool(machine.launches["aten._grouped_mm.default"])
        assert taken == (capability[0] == 10 and torch.__version__ >= (2, 13)) and not machine.waits
        assert found.shape == (40, 16)


# ---- steps ----


def moe_step(dtype: torch.dtype = D, capacity: float | None = None) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    e, d, f = 4, 6, 8
    shapes = {"router": (e, d), "up": (e, 2 * f, d), "down": (e, d, f)}
    params = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        logits = x @ p["router"].T
        index, weight, scores = cf.moe.route(logits, 2)
        y = cf.moe.experts(x, index, weight, p["up"], p["down"], capacity_factor=capacity)
        return (x + y).square().mean() + 0.01 * cf.moe.balance_loss(scores, index) + 1e-3 * cf.moe.z_loss(logits)

    def step(p: Any, x: torch.Tensor) -> Any:
        grads, value = torch.func.grad_and_value(loss)(p, x)
        return {name: p[name] - 0.1 * grads[name] for name in p}, value

    return step, params, torch.randn(16, d, dtype=dtype)


@pytest.mark.parametrize(("plan", "capacity"), [((), 1.0), ((expert_parallel("ep"),), None)], ids=["capacity", "ep"])
def test_the_host_does_not_wait_in_a_step_of_experts(plan: tuple[Any, ...], capacity: float | None) -> None:
    step, params, x = moe_step(capacity=capacity)
    want = params
    for _ in range(2):
        want, loss = step(want, x)
    for seed in SEEDS:
        with Machine(seed=seed) as machine:
            mesh = cf.Mesh(ep=2, device="cuda") if plan else cf.Mesh(device="cuda")
            sharded = cf.shard(step, mesh, *plan)
            placed = on_card(machine, params)
            batch = on_card(machine, x)
            placed, _ = sharded(placed, batch)
            machine.forget_counts()
            placed, value = sharded(placed, batch)
            assert not machine.waits, machine.places
            assert float(value.full()) == pytest.approx(float(loss), rel=1e-10)


def test_how_many_rows_travel_is_told_by_a_copy_that_is_waited_for_once() -> None:
    for seed in range(5):
        with Machine(seed=seed) as machine:
            x = machine.to_card(torch.arange(4))
            count = HostCount(x.max().expand(3) + 4)
            before = machine.engine.ran
            later = x * 2
            assert machine.engine.ran == before and not machine.waits  # the host went on
            assert count.value() == count.value() == 7 and machine.waits == {"event": 1}
            assert later.cpu().tolist() == [0, 2, 4, 6]


def test_the_host_learns_one_number_a_round_of_a_layer() -> None:
    """However many exchanges a round has, forward and backward."""
    step, params, x = moe_step()
    program = cf.shard(step, cf.Mesh(ep=2), expert_parallel("ep")).lower(params, x).program
    limits = [node.args[3].id for node in program.nodes if node.target.startswith("colofunc.all_to_all") and len(node.args) > 3]
    rounds = next((*node.args, 1)[3] for node in program.nodes if node.target == "moe.slots")
    assert len(limits) >= 8 and len(set(limits)) <= 2 * rounds


@pytest.mark.parametrize("rows", [0, 2, 5])
def test_rows_that_did_not_travel_are_zeros_without_a_look_at_their_number(rows: int) -> None:
    x = torch.randn(3, 5, 2)
    want = with_zeros(first_rows(x, rows), x)
    with Machine() as machine:
        there, number = on_card(machine, (x, torch.full((5,), rows)))
        found = without_rest(there.clone(), number)
        assert not machine.waits and torch.equal(found.cpu(), want)


# ---- batches ----


def rows_of(n: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [{"x": torch.randn(6, dtype=D), "label": torch.tensor(k)} for k in range(n)]


@pytest.mark.parametrize("options", [{"short": "drop"}, {"short": "keep", "prefetch": 2}, {"weights": "weight"}])
def test_batches_go_to_a_card_without_a_wait(options: dict[str, Any]) -> None:
    """And arrive: each is used while those before it may still be computed on."""
    data = rows_of(10)
    loader = torch.utils.data.DataLoader(data, batch_size=4)  # type: ignore[arg-type]
    want = [batch["x"].full().square().sum() for batch in cf.batches(loader, cf.Mesh(dp=2, device="cpu"), **options)]
    for seed in range(5):
        with Machine(seed=seed) as machine:
            mesh = cf.Mesh(dp=2, device="cuda")
            found = []
            for batch in cf.batches(loader, mesh, **options):
                found.append([shard.square().sum() for shard in batch["x"].shards])
                del batch
            assert not machine.waits, machine.places
            assert [float(sum(s.cpu() for s in parts)) for parts in found] == pytest.approx([float(w) for w in want], rel=1e-12)


def test_checksums_are_of_what_the_host_holds() -> None:
    """Ranks compare batches before they are sent."""
    data = rows_of(8)
    loader = torch.utils.data.DataLoader(data, batch_size=4)  # type: ignore[arg-type]
    with Machine() as machine:
        batches = cf.batches(loader, cf.Mesh(dp=2, device="cuda"), read="all")
        said = []
        with mock.patch.object(type(batches._together), "meet", lambda self, mine, *where: said.append(mine) or [mine]):
            batches._together = type(batches._together)(mock.Mock())
            batches._together.watch.exchange.side_effect = lambda what, text, *rest: [text]
            assert len(list(batches)) == 2
        assert not machine.waits, machine.places
    assert all(checksum for one in said[:-1] for *_, checksum in one.leaves)
