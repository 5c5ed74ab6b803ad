"""cf.testing.check_plan: what holds passes with a table, and each kind of mistake is caught by name."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import tensor, zero

import colofunc as cf
from colofunc.testing import check_plan

TP2 = cf.Mesh(tp=2, topology="8xa100-80g")


@attrs.frozen
class Plan:
    """A plan of given wishes, or that does something else when it is asked for them."""

    want: Any = ()
    name: str = "mine"
    axes: tuple[str, ...] = ("tp",)

    def wishes(self, program: Any, mesh: cf.Mesh) -> Any:
        return self.want(program, mesh) if isinstance(self.want, Callable) else self.want


def plugin(target: str, word: str, ins: list[dict[str, str]], outs: list[dict[str, str]], local: Any) -> ModuleType:
    """A plugin with one strategy of one operator."""

    def strategies(call: Any, mesh: cf.Mesh) -> Any:
        placed = [*ins, *({} for _ in call.ins[len(ins) :])]
        for way in cf.ext.ways(call, mesh, ins=placed, outs=outs) if "tp" in mesh.axis_names else ():
            body = lambda *shards, mesh: local(call, mesh, *shards)  # noqa: E731
            yield attrs.evolve(way, name=f"{{tp: {word}}}", local=body, axes=(("tp", word), *way.axes))

    made = ModuleType(word)
    made.colofunc_strategies = cf.hookimpl(lambda: {target: strategies})  # type: ignore[attr-defined]
    return made


def wish(target: str, word: str) -> Plan:
    return Plan([cf.ext.Wish("*", f"{{tp: {word}}}", targets=(target,))], word)


def raises(error: Exception) -> Plan:
    def wishes(program: Any, mesh: cf.Mesh) -> Any:
        raise error

    return Plan(wishes)


# ---- what holds ----


def test_zero_holds_on_every_mesh() -> None:
    table = check_plan(zero(3, "dp"), steps=["mlp"])
    assert [row.mesh for row in table.equal] == ["dp=1", "dp=2", "dp=4", "rows=2 dp=2"]
    assert all(row.worst <= 1e-10 for row in table.equal)
    assert [row.mesh for row in table.refused] == ["dp=3"] and "8 rows" in table.refused[0].reason
    assert str(table).splitlines()[0] == "zero(3, dp): 4 equal, 1 refused"


def test_tensor_parallelism_splits_the_work_of_attention() -> None:
    table = check_plan(tensor, steps=["padded_attention"])  # a constructor is called
    assert table.plan == "tensor(1d, tp)"
    assert {row.mesh: round(row.share, 1) for row in table.equal} == {"tp=1": 1.0, "tp=2": 0.5, "tp=4": 0.3, "rows=2 tp=2": 0.3}


@attrs.frozen
class Idle:
    """Everything whole on its axis."""

    axes: tuple[str, ...] = ("tp",)
    name: str = "idle"

    def wishes(self, program: Any, mesh: cf.Mesh) -> list[cf.ext.Wish]:
        leaves = [program.values[i] for i in program.inputs if program.values[i].role in ("param", "state", "batch")]
        return [cf.ext.Wish(leaf.name, "...", self.axes, (leaf.role,), self.name) for leaf in leaves]


def test_what_does_next_to_nothing_for_a_step_is_said() -> None:
    with pytest.raises(cf.CheckError, match=r"idle: conv_net on tp=2: a rank does 1.00 of all work, at most 0.75"):
        check_plan(Idle(), TP2, steps=["conv_net"])
    with pytest.raises(cf.CheckError, match=r"tensor\(1d, tp\) splits 0 % of the work with weights; these stay whole: aten.convolution"):
        check_plan(tensor("1d", "tp"), TP2, steps=["conv_net"])


def test_steps_of_ones_own() -> None:
    def wide(batch: int) -> Any:
        x = torch.randn(batch, 16, dtype=torch.float64)
        return cf.testing.programs.training(torch.nn.Linear(16, 16).double(), {"x": x}, lambda out, b: F.mse_loss(out, b["x"]))

    assert [row.step for row in check_plan(zero(1, "dp"), cf.Mesh(dp=2), steps={"wide": wide}).equal] == ["wide"]


# ---- what does not ----


def forgetful(call: Any, mesh: cf.Mesh, *shards: Any) -> Any:
    return cf.ext.local.rerun(call, shards, {})  # x (b, i/tp), w (o, i/tp): a term of the sum, given out as the sum


def test_a_forgotten_reduction_is_caught() -> None:
    halves = plugin("colofunc.linear", "forgetful", [{"i": "tp i"}, {"i": "tp i"}], [{}], forgetful)
    with pytest.raises(cf.CheckError, match=r"forgetful: mlp on tp=2: .*differ"):
        check_plan(wish("colofunc.linear", "forgetful"), TP2, steps=["mlp"], plugins=[halves])


def blind(call: Any, mesh: cf.Mesh, *shards: Any) -> Any:
    return cf.ext.local.rerun(call, shards, {(3, "bias"): None, (5, "causal"): False})


@pytest.mark.parametrize("step", ["attention_block", "padded_attention"])
def test_a_dropped_mask_is_caught(step: str) -> None:
    heads = {"g": "tp g"}
    deaf = plugin("colofunc.attention", "blind", [heads] * 3, [heads] * 2, blind)
    with pytest.raises(cf.CheckError, match=rf"blind: {step} on tp=2: .*differ"):
        check_plan(wish("colofunc.attention", "blind"), TP2, steps=[step], plugins=[deaf])


def test_a_plan_without_effect_is_caught() -> None:
    with pytest.raises(cf.CheckError, match=r"mine: mlp on tp=2: a rank does 1.00 of all work.*an axis holds copies"):
        check_plan(Plan(), TP2, steps=["mlp"])


def test_an_error_that_is_no_refusal_is_caught() -> None:
    with pytest.raises(cf.CheckError, match=r"mine: mlp on tp=2 fails with KeyError: 'x'; a refusal is a ColofuncError"):
        check_plan(raises(KeyError("x")), TP2, steps=["mlp"])


def test_a_refusal_that_names_nothing_is_caught() -> None:
    with pytest.raises(cf.CheckError, match="is refused without naming a value: 'this cannot be done'"):
        check_plan(raises(cf.PlanError("this cannot be done")), TP2, steps=["mlp"])


def test_a_plan_that_refuses_all_is_caught() -> None:
    with pytest.raises(cf.CheckError, match="refuses every step on every mesh of more than one rank"):
        check_plan(raises(cf.PlanError("no experts on axis 'tp'")), TP2, steps=["mlp"])


def test_a_plan_that_bears_no_other_axis_is_caught() -> None:
    def alone(program: Any, mesh: cf.Mesh) -> Any:
        if len(mesh.axis_names) > 1:
            raise cf.PlanError(f"only tp, not {mesh.axis_names}")
        return tensor("1d", "tp").wishes(program, mesh)

    meshes = [TP2, cf.Mesh(rows=2, tp=2, topology="8xa100-80g")]
    with pytest.raises(cf.CheckError, match=r"mine: mlp runs on tp=2 and not on rows=2 tp=2: only tp"):
        check_plan(Plan(alone), meshes, steps=["mlp"])


def test_a_plan_that_bears_no_single_rank_is_caught() -> None:
    def several(program: Any, mesh: cf.Mesh) -> Any:
        if mesh.axis_size("tp") == 1:
            raise cf.PlanError("tp=1 is too few")
        return tensor("1d", "tp").wishes(program, mesh)

    with pytest.raises(cf.CheckError, match=r"mine: mlp runs on tp=2 and not on tp=1: tp=1 is too few. Try: no wishes for an axis of one"):
        check_plan(Plan(several), [cf.Mesh(tp=1, topology="8xa100-80g"), TP2], steps=["mlp"])


def test_what_is_no_plan_is_an_error() -> None:
    with pytest.raises(cf.InputError, match=r"wants a plan with axes and wishes"):
        check_plan({"*": "(tp o) i"})
    with pytest.raises(cf.InputError, match=r"check_plan has no step 'mpl'; did you mean 'mlp'"):
        check_plan(zero(), steps=["mpl"])
