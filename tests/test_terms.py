"""Terms of the clock: they add up to what the lanes are busy, what is hidden runs beside work, and `why` names the first."""

import pytest
import torch
from colofunc_plugins import tensor, zero

import colofunc as cf
from colofunc.compiler.lowered import Lowered
from colofunc.compiler.terms import Term, terms_text


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
    assert found["work"].seconds + found["launches"].seconds == pytest.approx(busy["compute"])
    wires = [term for what, term in found.items() if what not in ("work", "launches")]
    assert sum(term.seconds for term in wires) == pytest.approx(busy["collectives"])
    assert {"all_gather dp", "reduce_scatter dp", "all_reduce tp"} <= found.keys()


def test_what_is_exposed_is_what_the_step_takes_beside_work() -> None:
    low = lowered(dp=2)
    assert sum(term.exposed_s for term in low.terms()) == pytest.approx(low.lanes().end_s)
    assert any(term.hidden_s > 0 for term in low.terms())


def test_nothing_is_hidden_where_collectives_hold_the_device_up() -> None:
    assert all(term.hidden_s == pytest.approx(0.0, abs=1e-15) for term in lowered("simulated", dp=2, tp=2).terms())


def test_a_glob_takes_modules_and_operators() -> None:
    low = lowered(dp=2)
    whole, linear = ({term.what: term for term in low.terms(glob)} for glob in ("*", "colofunc.linear"))
    assert {"work", "launches", "all_gather dp"} <= {term.what for term in low.terms("0")}
    assert set(linear) == {"work", "launches"} and 0 < linear["work"].seconds < whole["work"].seconds
    assert low.terms("nowhere") == ()


def test_why_says_which_term_decides() -> None:
    low = lowered(dp=2, tp=2)
    said = low.why("0", most=1)
    assert said.startswith(low.plan.why("0", 1)) and f" {low.terms('0')[0].what} decides: " in said
    with pytest.raises(cf.PlanError, match="'nowhere' matches no operator, module or leaf of the plan"):
        low.why("nowhere")


def test_terms_in_words() -> None:
    found = Term("all_gather tp", 3.1e-3, 1.2e-3, 48), Term("work", 1e-3, 0.0, 12)
    assert terms_text(found, 10e-3).splitlines() == [
        "in a step of 10 ms, all_gather tp decides: 1.9 ms that nothing hides, 19% of the step",
        "  all_gather tp            3.1 ms, 1.2 ms of it hidden  (48 calls)",
        "  work                     1 ms  (12 calls)",
    ]
    assert terms_text((), 10e-3) == ""
