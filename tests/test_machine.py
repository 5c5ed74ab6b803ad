"""A mesh without a topology: measured on real ranks, once; never where all ranks are in one process; a complaint where it matters."""

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from colofunc_plugins import zero

import colofunc as cf
from colofunc.cache import Cache
from colofunc.compiler import machine
from colofunc.executors.launch import launch
from colofunc.executors.watch import Watch
from colofunc.mesh.topology import KINDS, Measured
from colofunc.planner.sharding.flows import Conversions
from colofunc.spec.conversions.pattern import pattern_s
from colofunc.spec.layout import make_layout, replicated


def grow(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return w - 0.1 * x.t() @ (x @ w), (x @ w).sum()


def args(rows: int = 4, width: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(width, width), torch.ones(rows, width)


def test_whether_a_topology_was_named_is_known_and_decides_no_equality() -> None:
    mesh = cf.Mesh(dp=2)
    assert mesh.assumed and pickle.loads(pickle.dumps(mesh)).assumed
    named = mesh.with_topology("gloo-cpu")
    assert not named.assumed and not pickle.loads(pickle.dumps(named)).assumed
    assert mesh == named and mesh.fingerprint == named.fingerprint


def test_ranks_in_one_process_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOFUNC_MEASURE", "")
    monkeypatch.setattr(machine, "profile_mesh", None)  # whoever calls it falls
    low = cf.shard(grow, cf.Mesh(dp=2)).lower(*args())
    assert low.priced is low.mesh and "(gloo-cpu)" in str(low.plan)


def on_a_rank(path: str) -> dict[str, Any]:
    """The same step planned for figures that are measured, remembered, and read from the file."""
    # Set here: ranks may come from a server that has the environment of an earlier test.
    os.environ.update(COLOFUNC_MEASURE="", COLOFUNC_CACHE=path)
    machine.SECONDS = 0.5
    mesh, told = cf.Mesh(dp=2), []
    step = cf.shard(grow, mesh)
    low = step.lower(*args())
    out, _ = step(*args())
    cache, key, measured = Cache(Path(path)), machine.key_of_machine(mesh, "gloo"), low.priced.topology
    torch.distributed.barrier()
    kept = machine.kept_figures(cache, key, told.append)
    assert kept is not None, (told, sorted(os.listdir(path)))
    assert machine.cautious(kept) == measured, (kept.to_dict(), measured.to_dict())
    assert machine.as_measured(mesh, out._backend.watch, told.append).topology is low.priced.topology
    torch.distributed.barrier()
    if mesh.is_main:
        cache.write(key, {**measured.to_dict(), "name": "kept"})
    machine._FOUND.clear()
    again = cf.shard(grow, mesh).lower(*args())
    named = cf.shard(grow, cf.Mesh(dp=2, topology="gloo-cpu")).lower(*args())
    kinds = {m.kind for m in measured.measured if m.axis == "dp" and m.alpha_s + m.beta_s_per_byte > 0}
    return {
        "plans": [str(low.plan), str(again.plan), str(named.plan)], "kinds": len(kinds), "told": told,
        "figures": measured.to_dict(), "mesh": out.mesh == mesh, "right": out.full().equal(grow(*args())[0]),
    }  # fmt: skip


@pytest.mark.dist
def test_real_ranks_plan_for_what_they_were_measured_at(tmp_path: Path) -> None:
    first, second = launch(on_a_rank, 2, str(tmp_path))
    assert first["figures"] == second["figures"] and first["plans"] == second["plans"]
    measured, kept, named = first["plans"]
    assert "(gloo-cpu (measured))" in measured and "(kept)" in kept and "(gloo-cpu)" in named
    assert first["kinds"] == 5 and first["told"] == [] and first["mesh"] and first["right"]


@pytest.mark.parametrize("many", [4, 12, 31])
@pytest.mark.parametrize(("start_s", "fewer_wins"), [(1e-3, True), (3e-4, True), (1e-6, False)])
def test_of_plans_that_take_the_same_time_the_one_of_fewer_collectives_wins(many: int, start_s: float, fewer_wins: bool) -> None:
    few, nbytes, beta_s = 2, 1 << 16, 1e-9
    # The few move more bytes, so that by what was measured they take 2 % longer than the many.
    more_bytes = int((1.02 * many * (start_s + beta_s * nbytes) / few - start_s) / beta_s)
    measured = tuple(Measured("dp", 2, kind, start_s, beta_s) for kind in KINDS)
    mesh = cf.Mesh(dp=2).with_topology(attrs.evolve(cf.Mesh().topology, measured=measured))
    priced = mesh.with_topology(machine.cautious(mesh.topology))

    def fewer_is_faster(on: cf.Mesh) -> bool:
        return few * on.collective_s("all_reduce", more_bytes, ("dp",)) < many * on.collective_s("all_reduce", nbytes, ("dp",))

    assert not fewer_is_faster(mesh)
    assert fewer_is_faster(priced) == fewer_wins  # what is all bytes is not in doubt


def test_what_names_a_topology_or_may_not_be_measured_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    watch: Any = Watch.__new__(Watch)
    monkeypatch.setenv("COLOFUNC_MEASURE", "off")
    for mesh, tie in ((cf.Mesh(dp=2), watch), (cf.Mesh(dp=2, topology="gloo-cpu"), watch), (cf.Mesh(dp=2), None)):
        assert machine.as_measured(mesh, tie, print) is mesh


@pytest.mark.parametrize("entry", [None, [], {"colofunc_topology": 99}, {"colofunc_topology": 1, "name": 3}])
def test_figures_that_cannot_be_read_are_dropped_with_a_line(tmp_path: Path, entry: Any) -> None:
    cache, key, told = Cache(tmp_path), "0" * 40, list[str]()
    assert machine.kept_figures(cache, key, told.append) is None and told == []
    cache.write(key, entry)
    if entry is None:
        cache.path(key).write_text("{")
    assert machine.kept_figures(cache, key, told.append) is None and "measuring again" in told[0]
    assert not cache.path(key).exists()


def test_figures_are_kept_or_a_line_says_why_not(tmp_path: Path) -> None:
    topology, told = cf.Mesh().topology, list[str]()
    cache = Cache(tmp_path / "a")
    machine.keep_figures(cache, "0" * 40, topology, told.append)
    assert machine.kept_figures(cache, "0" * 40, told.append) == topology and told == []
    (tmp_path / "file").write_text("")
    machine.keep_figures(Cache(tmp_path / "file"), "0" * 40, topology, told.append)
    assert len(told) == 1 and "could not be kept" in told[0]


@pytest.mark.parametrize("axes", [{}, {"dp": 8}, {"dp": 2, "tp": 4}])
def test_the_mesh_that_is_proposed_can_be_made(axes: dict[str, int]) -> None:
    step = cf.shard(grow, cf.Mesh(**axes))
    with pytest.warns(UserWarning, match="names no topology") as found:
        step.lower(cf.abstract((1 << 16, 1 << 16)), cf.abstract((64, 1 << 16)))
    warned = next(w for w in found if "names no topology" in str(w.message))
    assert warned.filename == __file__, "the line that is named is the user's"
    proposed = str(warned.message).split("Try: ")[1].split(", or the file")[0]
    assert eval(proposed, {"cf": cf}) == cf.Mesh(**axes, topology="8xa100-80g")


@pytest.mark.parametrize(("width", "topology", "complains"), [(1 << 16, None, True), (1 << 16, "8xa100-80g", False), (64, None, False)])
def test_a_large_plan_for_an_unknown_machine_says_so(width: int, topology: str | None, complains: bool) -> None:
    step = cf.shard(grow, cf.Mesh(dp=8, topology=topology))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step.lower(cf.abstract((width, width)), cf.abstract((64, width)))
    said = [str(w.message) for w in found if "names no topology" in str(w.message)]
    assert bool(said) == complains
    assert not complains or ("GiB a rank" in said[0] and 'cf.Mesh(dp=8, topology="8xa100-80g")' in said[0] and "cf.profile_mesh" in said[0])


def perceptron(width: int, depth: int) -> torch.nn.Module:
    return torch.nn.Sequential(*(layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())))


def figures(start_s: float, axis: str = "dp", ranks: int = 2) -> cf.Topology:
    """A small CPU box as it might have been measured, where a collective starts in so many seconds."""
    base = cf.Mesh().topology
    rates = tuple(attrs.evolve(rate, flops_per_s=1e11) for rate in base.device.rates)
    device = attrs.evolve(base.device, rates=rates, memory_bytes_per_s=1.5e10, launch_s=5e-6)
    return attrs.evolve(base, device=device, measured=tuple(Measured(axis, ranks, kind, start_s, 1e-9) for kind in KINDS))


def trained(module: torch.nn.Module, x: torch.Tensor, topology: cf.Topology, *plans: Any) -> Any:
    """A training step, planned."""
    step_fn, state = cf.train_step(cf.functional(module), cf.adapt(torch.optim.AdamW, lr=1e-4), loss=lambda out: out.square().mean())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that every rank computes everything
        return cf.shard(step_fn, cf.Mesh(dp=2, topology=topology), *plans).lower(state, x)


@pytest.mark.parametrize("start_s", [1e-5, 3e-4, 2e-3])
@pytest.mark.parametrize(("depth", "rows"), [(2, 64), (4, 512), (8, 1024)])
def test_what_is_found_is_no_slower_than_a_named_plan_and_starts_no_more_collectives(depth: int, rows: int, start_s: float) -> None:
    """Many small gradients are one collective in the end, and the search has to know it: else it shares nothing out."""
    module, x, topology = perceptron(256, depth), torch.ones(rows, 256), figures(start_s)
    found = trained(module, x, topology)
    named = min((trained(module, x, topology, zero(stage, "dp")) for stage in (1, 2, 3)), key=lambda low: low.lanes().end_s)
    assert found.lanes().end_s <= named.lanes().end_s
    assert sum(found.cost().calls.values()) <= sum(named.cost().calls.values())


def test_gradients_share_a_start_and_what_layers_wait_for_does_not() -> None:
    topology = figures(1e-3)
    low = trained(perceptron(256, 4), torch.ones(512, 256), topology)
    assert str(low.plan).startswith("dp: data parallel (found)") and dict(low.cost().calls) == {("all_reduce", "dp"): 1}
    mesh = cf.Mesh(dp=2, topology=topology)
    known, usual = Conversions(pattern_s, mesh), Conversions(pattern_s, cf.Mesh(dp=2, topology=attrs.evolve(topology, measured=())))
    whole = replicated((256,))
    pending = make_layout(whole.dims, whole.shape, (("dp", "sum"),))
    alone_s, shared_s = known.second(pending, whole, 4), known.second(pending, whole, 4, together=50)
    assert alone_s > 1e-3 > 20 * shared_s > 20 * 1e-3 / 50  # its part of the start, and the copies
    assert known.second(whole, whole, 4, together=50) == 0
    assert usual.second(pending, whole, 4, together=50) < usual.second(pending, whole, 4)  # on a machine that was not measured, too


@pytest.mark.parametrize("start_s", [3e-4, 1e-2])
def test_a_start_that_all_gradients_share_counts_once(start_s: float) -> None:
    """A step that takes less than a start is not shared out."""
    low = trained(perceptron(64, 4), torch.ones(64, 64), figures(start_s))
    assert not low.cost().calls, str(low.plan)


def test_a_kind_that_seems_to_start_in_no_time_was_lucky() -> None:
    starts = dict(zip(KINDS, (3e-4, 0.0, 5e-4, 2e-4, 4e-4), strict=True))
    found = attrs.evolve(cf.Mesh().topology, measured=tuple(Measured("dp", 2, kind, s, 1e-9) for kind, s in starts.items()))
    planned = {one.kind: one.alpha_s / machine.CAUTION for one in machine.cautious(found).measured}
    assert planned == pytest.approx({kind: max(s, 3e-4) for kind, s in starts.items()})


def tokens_first(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """(b, s, d): tokens go before rows and both become one dim, which a split batch lies in the middle of; tokens are read whole."""
    b, s, d = x.shape
    rows = torch.tanh(x.transpose(0, 1).reshape(s * b, d) @ w)
    return rows.view(s, b, d).transpose(0, 1).softmax(1)


def many_times(weights: list[torch.Tensor], x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    out = x
    for w in weights:
        out = tokens_first(out, w)
    loss = out.square().mean()
    return [w - 0.1 * g for w, g in zip(weights, torch.autograd.grad(loss, weights), strict=True)], loss


@pytest.mark.parametrize("start_s", [3e-4, 2e-3])
def test_rows_may_lie_in_the_middle_of_a_dim(start_s: float) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(128, 128, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    x = torch.randn(32, 64, 128, dtype=torch.float64)
    step = cf.shard(many_times, cf.Mesh(dp=2, topology=figures(start_s)))
    low = step.lower(weights, x)
    assert dict(low.cost().calls) == {("all_reduce", "dp"): 1}, low.plan.table()
    assert low.coverage().efficiency > 0.9
    want, loss = many_times(weights, x)
    found, same_loss = step(weights, x)
    assert torch.allclose(same_loss.full(), loss.detach(), rtol=1e-12)
    assert all(torch.allclose(a.full(), b.detach(), rtol=1e-10) for a, b in zip(found, want, strict=True))


def test_attention_with_tokens_first_is_found_data_parallel() -> None:
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
    low = trained(layer, torch.ones(32, 64, 64), figures(3e-4))
    named = trained(layer, torch.ones(32, 64, 64), figures(3e-4), zero(1, "dp"))
    assert dict(low.cost().calls) == {("all_reduce", "dp"): 1} and low.lanes().end_s < named.lanes().end_s
