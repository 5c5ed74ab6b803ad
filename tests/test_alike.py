"""Values that ranks compute alike: checksums of their copies, and what becomes of a kernel that rounds otherwise on one rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from colofunc_plugins import zero
from pretended import Machine

import colofunc as cf
from colofunc.compiler import replica_check
from colofunc.compiler.replica_check import COLUMNS, ReplicaLeaves, bits_sum
from colofunc.errors import CollectiveError, InputError
from colofunc.executors.disk.tensors import ChunkRoom
from colofunc.mesh import Mesh
from colofunc.spec.spec import bind

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.complex128, torch.int64,
    torch.int32, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes."""
    return (torch.view_as_real(x) if x.is_complex() else x).view(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 7, COLUMNS, 2 * COLUMNS + 3])
def test_one_bit_in_any_place_changes_the_sum(dtype: torch.dtype, n: int) -> None:
    x = (torch.rand(n, generator=torch.Generator().manual_seed(n)) * 100).to(dtype)
    before = int(bits_sum(x))
    assert int(bits_sum(x.clone())) == before
    for place in {0, n // 2, n - 1}:
        y = x.clone()
        bits_of(y)[place * x.itemsize] ^= 1
        assert int(bits_sum(y)) != before


def test_elements_that_change_places_and_signs_of_zero_change_the_sum() -> None:
    x = torch.arange(3000.0)
    assert int(bits_sum(x)) != int(bits_sum(x.flip(0))) and int(bits_sum(torch.zeros(5))) != int(bits_sum(-torch.zeros(5)))
    assert int(bits_sum(x.view(50, 60).t())) == int(bits_sum(x.view(50, 60).t().contiguous()))
    assert int(bits_sum(torch.empty(0, 3))) == 0


def test_the_sum_on_a_gpu_is_the_hosts_and_nobody_waits_for_it() -> None:
    x = torch.randn(2500)
    with Machine() as machine:
        card = machine.to_card(x)
        machine.forget_counts()
        on_card = bits_sum(card)
        assert not machine.waits and on_card.is_cuda
        assert int(on_card) == int(bits_sum(x))


class NoPeers:
    """A watch of which only the `with` is asked."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def checked(monkeypatch: pytest.MonkeyPatch, specs: dict[str, str], changes: dict[str, int], every: int = 100) -> None:
    """Compare parts of four ranks; `changes`: leaf -> a rank whose part is another."""
    mesh = Mesh(dp=2, tp=2)
    layouts = [bind(spec, mesh, (5, 6) if "~" in spec else (4, 6)) for spec in specs.values()]
    look = ReplicaLeaves(list(specs), layouts, mesh)
    names = [list(specs)[k] for k in look._which]

    def sums(lanes: Any, ranks: int) -> list[torch.Tensor]:
        return [lanes[0] + torch.tensor([changes.get(name) == rank for name in names]) for rank in range(ranks)]

    monkeypatch.setattr(replica_check, "everyones", sums)
    outs = [[torch.ones(layout.local_shape)] for layout in layouts]
    look.check(outs, NoPeers(), "train at train.py:20", every)  # type: ignore[arg-type]


SPECS = {"a": "r c", "b": "(dp r) c", "c": "r (tp c)", "split": "(dp r) (tp c)", "pending": "r c +dp", "disk": "r c @disk",
         "padded": "(dp r~) c"}  # fmt: skip


@pytest.mark.parametrize(
    ("leaf", "rank", "told"),
    [
        ("a", 2, r"'a' \(4, 6\) 'a b'.* ranks \[2\] differ from \[0\], after train at train.py:20"),
        ("b", 3, r"'b' .* ranks \[3\] differ from \[2\]"), ("b", 0, r"'b' .* ranks \[1\] differ from \[0\]"),
        ("c", 3, r"'c' .* ranks \[3\] differ from \[1\]"), ("pending", 1, r"'pending' .* ranks \[1\] differ from \[0\]"),
        ("disk", 1, r"'disk' .* ranks \[1\] differ from \[0\]"), ("padded", 3, r"'padded' .* ranks \[3\] differ from \[2\]"),
    ],
)  # fmt: skip
def test_the_leaf_and_the_ranks_that_hold_other_copies_are_named(
    leaf: str, rank: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CollectiveError, match=told):
        checked(monkeypatch, SPECS, {leaf: rank})


def test_parts_that_nobody_else_holds_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    checked(monkeypatch, SPECS, {"split": 2})
    checked(monkeypatch, {"split": "(dp r) (tp c)"}, {"split": 2})
    with pytest.raises(CollectiveError, match=r"'a' .* and 1 more leaves should be the same .* last 7 steps cannot be trusted"):
        checked(monkeypatch, SPECS, {"a": 1, "b": 1}, every=7)


@pytest.mark.parametrize(("spec", "rank", "padding"), [("(dp r~) c", 2, [2]), ("(r~ dp) c", 2, [2]), ("(2 dp r~) c", 0, [3])])
def test_padding_counts_for_nothing_and_what_lies_on_disk_is_read(spec: str, rank: int, padding: list[int], tmp_path: Path) -> None:
    mesh = Mesh(dp=2, tp=2)
    layout = bind(spec, mesh, (5, 6))
    part = torch.randn(layout.local_shape)
    kept = [row for row in range(layout.local_shape[0]) if row not in padding]

    def sum_of(x: torch.Tensor) -> int:
        with mock.patch.object(Mesh, "rank", rank):
            return int(ReplicaLeaves(["w"], [layout], mesh)._sum(0, x))

    assert sum_of(part) == int(bits_sum(part[kept]))
    with Machine() as machine:
        there = machine.to_card(part)
        machine.forget_counts()
        with mock.patch.object(Mesh, "rank", rank):
            found = ReplicaLeaves(["w"], [layout], mesh)._sum(0, there)
        assert not machine.waits and int(found) == int(bits_sum(part[kept]))
    other = part.clone()
    other[padding] = torch.nan
    assert sum_of(other) == sum_of(ChunkRoom(tmp_path, [part.nbytes]).keep(part)) == sum_of(part)
    other[kept[-1], 0] += 1
    assert sum_of(other) != sum_of(part)


# ---- real ranks, one of which rounds otherwise ----


def step_with_noise() -> Any:
    """A step whose update has last bits of its own on each rank, as a kernel that adds in another order each time."""

    @cf.operator("alike.noisy")  # without a rule: on every rank
    def noisy(grad: torch.Tensor) -> torch.Tensor:
        bits = random.Random(dist.get_rank() if dist.is_initialized() else 0)
        return grad * torch.tensor([1 + 1e-13 * bits.randrange(4) for _ in range(grad.numel())], dtype=grad.dtype)

    def train(state: Any, x: torch.Tensor) -> Any:
        grad = noisy((state["w"] - x.sum(0)) * 0.1)
        return {"w": state["w"] - grad, "exact": state["exact"] * 0.5}

    return train


def drifting() -> Any:
    mesh, train = cf.Mesh(dp=2, topology="ideal"), step_with_noise()
    start = {"w": torch.linspace(0.1, 3.0, 64).double(), "exact": torch.ones(3).double()}
    x = torch.linspace(0, 1, 128).double().reshape(2, 64)
    whole = {"w": "a", "exact": "a"}

    def run(every: int, steps: int, specs: Any = whole, rows: str = "r a", auto: bool = False) -> Any:
        step = cf.shard(train, mesh, in_specs=(specs, rows), out_specs=specs, auto=auto, agree_every=every)
        state = step.init(start, x)
        for n in range(1, steps + 1):
            try:
                state = step(state, x)
            except CollectiveError as error:
                return n, str(error)
        return steps, state["w"].local

    return [run(0, 6), run(1, 6), run(4, 6), run(1, 6, {"w": "(dp a)", "exact": "a"}), run(1, 6, rows="(dp r) a", auto=True)]


@pytest.mark.dist
def test_a_kernel_that_rounds_otherwise_on_each_rank_is_found() -> None:
    never, each, fourth, split, gathered = zip(*cf.launch(drifting, 2, timeout_s=120))
    assert not torch.equal(never[0][1], never[1][1])  # without looking, two weights that should be one
    torch.testing.assert_close(never[0][1], never[1][1], atol=1e-11, rtol=0)
    for found, at in ((each, 1), (fourth, 4)):
        for n, text in found:
            assert n == at
            assert text.startswith("'state.w' (64,) 'a' should be the same on ranks that hold copies, and is not: ")
            assert "ranks [1] differ from [0], after train at" in text
            assert f"of the last {at} steps" in text and "deterministic_algorithms" in text
    assert all(n == 6 and isinstance(w, torch.Tensor) for n, w in split)  # what one rank computes has no copies
    assert torch.equal(gathered[0][1], gathered[1][1])  # the update is split and its result sent


def trained_alike() -> list[int]:
    """Plans under which weights, or their states, are copies: all ranks agree after every step."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 16)).double()
    done = []
    plain, cut = {"*": "..."}, {"*0.weight": "v d", "*2.weight": "(tp o) i"}
    for axes, plans in (({"dp": 2}, (plain,)), ({"dp": 2}, (zero(1, "dp"),)), ({"tp": 2}, (cut,))):
        model = cf.functional(net)

        def loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(out.flatten(0, 1), batch["y"].flatten())

        step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-2), loss=loss, clip=1.0, inputs=lambda b: b["x"])
        step = cf.shard(step_fn, cf.Mesh(**axes, topology="ideal"), *plans, agree_every=1)
        batch = {"x": torch.randint(0, 16, (4, 6)), "y": torch.randint(0, 16, (4, 6))}
        state = step.init(state, batch)
        for _ in range(3):
            state, _ = step(state, batch)
        done.append(3)
    return done


@pytest.mark.dist
def test_steps_of_kernels_that_round_alike_agree() -> None:
    assert cf.launch(trained_alike, 2, timeout_s=120) == [[3, 3, 3]] * 2


def test_a_leaf_is_called_what_the_state_calls_it() -> None:
    inputs = ("state.params.w", "state.step", "batch.x", "batch.params.w")
    outs = ("out.0.params.w", "out.0.step", "out.1.loss", "out.params.w", "out")
    assert replica_check.state_names(outs, inputs) == ["state.params.w", "state.step", "out.1.loss", "state.params.w", "out"]


def test_how_often_is_a_number_of_steps() -> None:
    for wrong in (-1, 0.5, True, None):
        with pytest.raises(InputError, match=r"agree_every=.*: a number of steps, 0 for never; write agree_every=100"):
            cf.shard(torch.sin, cf.Mesh(dp=2), agree_every=wrong)  # type: ignore[arg-type]


def test_in_one_process_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(*args: object) -> None:
        raise AssertionError("ranks in one process share what they compute alike")

    monkeypatch.setattr(ReplicaLeaves, "check", look)
    assert isinstance(cf.shard(torch.sin, cf.Mesh(dp=2), agree_every=1)(torch.ones(4)), torch.Tensor)
