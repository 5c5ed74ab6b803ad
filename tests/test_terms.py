"""Terms of the clock: they add up to what the lanes are busy, hidden ones run beside work, and `why` says them of all that is asked for."""

from pathlib import Path

import attrs
import pytest
import torch
from colofunc_plugins import tensor, zero

import colofunc as cf
from colofunc.compiler.lowered import Lowered
from colofunc.planner.plan_terms import Term, TermSeconds, about, collectives_text, names_row, summed, terms_text

OF_DEVICE = {"compute", "memory", "launches"}


def lowered(executor: str = "distributed", **axes: int) -> Lowered:
    layers = [torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256), torch.nn.LayerNorm(256)]
    model, opt = cf.functional(torch.nn.Sequential(*layers)), cf.adapt(torch.optim.AdamW, lr=1e-3)
    step_fn, state = cf.train_step(model, opt, loss=lambda out: out.square().mean())
    plans = [zero(3, "dp")] + ([tensor("1d", "tp")] if "tp" in axes else [])
    step = cf.shard(step_fn, cf.Mesh(**axes, topology="8xh100"), *plans)
    return step.on(executor).lower(state, cf.abstract((4096, 256), torch.float32))


def test_terms_add_up_to_what_the_lanes_are_busy() -> None:
    low = lowered(dp=2, tp=2)
    found, busy = {term.what: term for term in low.terms()}, low.lanes().busy_s()
    assert sum(found[what].seconds for what in OF_DEVICE) == pytest.approx(busy["compute"])
    wires = [term for what, term in found.items() if what not in OF_DEVICE]
    assert sum(term.seconds for term in wires) == pytest.approx(busy["collectives"])
    assert {"all_gather dp", "reduce_scatter dp", "all_reduce tp"} <= found.keys()


def test_what_a_plan_keeps_is_what_the_clock_says() -> None:
    """Of the order that plans are searched in, which may differ by small updates that stand side by side."""
    low = lowered(dp=2, tp=2)
    kept, played = ({term.what: term for term in terms} for terms in (summed(low.plan.spent), low.terms()))
    assert kept.keys() == played.keys()
    assert all(kept[what].seconds == pytest.approx(played[what].seconds) for what in kept)
    assert sum(term.exposed_s for term in kept.values()) == pytest.approx(low.plan.cost_s)


def test_what_is_exposed_is_what_the_step_takes_beside_work() -> None:
    low = lowered(dp=2)
    assert sum(term.exposed_s for term in low.terms()) == pytest.approx(low.lanes().end_s)
    assert any(term.hidden_s > 0 for term in low.terms())


def test_nothing_is_hidden_where_collectives_hold_the_device_up() -> None:
    assert all(term.hidden_s == pytest.approx(0.0, abs=1e-15) for term in lowered("simulated", dp=2, tp=2).terms())


def test_products_are_computing_and_norms_are_memory() -> None:
    low = lowered(dp=2)
    linear, norm = ({term.what for term in low.terms(glob)} for glob in ("colofunc.linear", "aten.native_layer_norm.default"))
    assert linear == {"compute", "launches"} and norm == {"memory", "launches"}


def test_a_glob_takes_modules_and_operators() -> None:
    low = lowered(dp=2)
    whole, linear = ({term.what: term for term in low.terms(glob)} for glob in ("*", "colofunc.linear"))
    assert {"compute", "launches", "all_gather dp"} <= {term.what for term in low.terms("0")}
    assert set(linear) == {"compute", "launches"} and 0 < linear["compute"].seconds < whole["compute"].seconds
    assert low.terms("nowhere") == ()


@pytest.mark.parametrize("asked", ["0", "0.weight", "colofunc.linear", "aten.gelu.default"])
def test_why_says_which_term_decides_of_an_operator_an_activation_and_a_parameter(asked: str) -> None:
    plan = lowered(dp=2, tp=2).plan
    terms = summed(row for row in plan.spent if about(row, asked))
    said = plan.why(asked, most=1)
    assert terms and said.endswith(terms_text(terms, plan.cost_s))
    assert f" {terms[0].what} decides: " in said or "the device's work hides all of it" in said


def test_why_says_of_a_parameter_what_gathers_it_and_what_brings_its_gradient() -> None:
    plan = lowered(dp=2).plan
    sorts = {row.what for row in plan.spent if "state.params.0.weight" in row.leaves}
    assert {"all_gather dp", "reduce_scatter dp"} <= sorts
    assert "  all_gather dp " in plan.why("0.weight") and "  reduce_scatter dp " in plan.why("0.weight")


def test_why_of_a_collective_says_its_seconds_and_whose_they_are() -> None:
    plan = lowered(dp=2, tp=2).plan
    (gathers,) = summed(row for row in plan.spent if row.what == "all_gather dp")
    first, *rows = plan.why("all_gather").splitlines()
    assert first == str(gathers) == plan.why("all_gather dp").splitlines()[0]
    assert rows and all(row.startswith("  ") for row in rows)
    assert any(row.startswith("  0 [forward]: ") for row in rows)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(torch.nn.functional.gelu(self.fc1(x)))


def test_layers_that_are_alike_share_rows() -> None:
    model, opt = cf.functional(torch.nn.Sequential(*(Block() for _ in range(12)))), cf.adapt(torch.optim.SGD, lr=1e-3)
    step_fn, state = cf.train_step(model, opt, loss=lambda out: out.square().mean())
    low = cf.shard(step_fn, cf.Mesh(dp=2, topology="8xh100"), zero(3, "dp")).lower(state, cf.abstract((4096, 64), torch.float32))
    alike = [row for row in low.plan.spent if row.target == "colofunc.linear" and row.what != "launches" and row.path.endswith("fc1")]
    assert max(row.calls for row in alike) > 1 and sum(row.calls for row in alike) == 12
    shared = next(row for row in alike if row.calls > 1)
    assert shared.path == "*.fc1" and about(shared, "5.fc1") and not about(shared, "5.fc2")
    # Fewer rows than calls, whatever is asked for; and a parameter of such a layer has its own.
    assert len(low.plan.spent) < len(low.program.nodes)
    assert any(about(row, "5.fc1.weight") for row in low.plan.spent if row.what == "reduce_scatter dp")


def test_a_plan_from_a_file_says_the_same(tmp_path: Path) -> None:
    plan = lowered(dp=2).plan
    plan.save(tmp_path / "plan.json")
    again = cf.Plan.load(tmp_path / "plan.json")
    assert again == plan and again.why("all_gather") == plan.why("all_gather") and again.why("0") == plan.why("0")
    without = attrs.evolve(plan, spent=())  # as an older file
    assert plan.why("0").startswith(without.why("0"))
    with pytest.raises(cf.PlanError, match="'all_gather' matches no operator, module, leaf or collective of the plan"):
        without.why("all_gather")


def test_what_matches_nothing_is_an_error_with_a_near_name() -> None:
    low = lowered(dp=2)
    with pytest.raises(cf.PlanError, match="'nowhere' matches no operator, module, leaf or collective of the plan"):
        low.why("nowhere")
    with pytest.raises(cf.PlanError, match="did you mean 'all_gather dp'"):
        low.plan.why("all_gather dq")


ROWS = (
    TermSeconds("h.*.attn", "colofunc.all_gather_start", "forward", "all_gather tp", 2e-3, 1e-3, 12),
    TermSeconds("", "colofunc.all_gather_start", "backward", "all_gather tp", 1.1e-3, 0.2e-3, 36, ("h.*.attn.weight", "h.*.attn.bias")),
    TermSeconds("h.*.attn", "colofunc.linear", "forward", "compute", 1e-3, 0.0, 12),
)


def test_a_collective_in_words() -> None:
    assert collectives_text(ROWS[:2], 4) == [
        "all_gather tp            3.1 ms, 1.2 ms of it hidden  (48 calls)",
        "  h.*.attn [forward]: 2 ms, 1 ms of it hidden  (12 calls)",
        "  h.*.attn.weight and 1 more [backward]: 1.1 ms, 200 µs of it hidden  (36 calls)",
    ]
    assert collectives_text(ROWS[:2], 1)[1:] == ["  h.*.attn [forward]: 2 ms, 1 ms of it hidden  (12 calls)", "  and 1 more: 1.1 ms"]


def test_which_rows_a_name_is_about() -> None:
    assert [names_row(row, "all_gather") for row in ROWS] == [names_row(row, "all_gather tp") for row in ROWS] == [True, True, False]
    assert [about(row, "h.3.attn") for row in ROWS] == [True, False, True]
    assert [about(row, "*.attn.weight") for row in ROWS] == [False, True, False]
    assert not any(about(row, "h.3.mlp") or names_row(row, "all_reduce") for row in ROWS)


def test_terms_in_words() -> None:
    found = Term("all_gather tp", 3.1e-3, 1.2e-3, 48), Term("compute", 1e-3, 0.0, 12)
    for summed_up, expected in zip(summed(ROWS), found, strict=True):
        assert attrs.astuple(summed_up) == pytest.approx(attrs.astuple(expected))
    assert terms_text(found, 10e-3).splitlines() == [
        "in a step of 10 ms, all_gather tp decides: 1.9 ms that nothing hides, 19% of the step",
        "  all_gather tp            3.1 ms, 1.2 ms of it hidden  (48 calls)",
        "  compute                  1 ms  (12 calls)",
    ]
    assert terms_text((), 10e-3) == ""
    hidden = (Term("all_gather dp", 1e-3, 1e-3, 12),)
    assert terms_text(hidden, 10e-3).splitlines() == [
        "in a step of 10 ms, the device's work hides all of it", "  all_gather dp            1 ms, 1 ms of it hidden  (12 calls)",
    ]
