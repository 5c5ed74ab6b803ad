"""A leaf has one name, `state.opt.exp_avg.0.weight`, in all that names it; where there is no step, what stands behind `state`."""

import json
import re
from typing import Any

import pytest
import torch
from colofunc_plugins import zero
from torch import nn
from typer.testing import CliRunner

import colofunc as cf
from colofunc import cli

LEAF = "opt.exp_avg.0.weight"
OTHER_FORMS = re.compile(r"\['(opt|exp_avg|params|0\.weight|x)'\]|\[0\]\[")
MODEL = cf.functional(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8)).double())
OPT = cf.adapt(torch.optim.AdamW, lr=1e-3)
BATCH = {"x": torch.randn(8, 64, dtype=torch.float64), "y": torch.randn(8, 8, dtype=torch.float64)}


def step_fn(state: Any, batch: Any) -> Any:
    def loss_of(params: Any) -> torch.Tensor:
        return (MODEL.apply(params, MODEL.buffers, batch["x"])[0] - batch["y"]).square().mean()

    loss, grads = cf.value_and_grad(loss_of)(state["params"])
    params, opt = OPT.update(grads, state["opt"], state["params"])
    return {"params": params, "opt": opt}, {"loss": loss}


def state() -> dict[str, Any]:
    return {"params": MODEL.params, "opt": OPT.init(MODEL.params)}


def with_leaf(value: Any) -> dict[str, Any]:
    new = state()
    new["opt"] = {**new["opt"], "exp_avg": {**new["opt"]["exp_avg"], "0.weight": value}}
    return new


def staged() -> cf.Staged:
    return cf.shard(step_fn, cf.Mesh(dp=2), zero(2, "dp"))


def raised(call: Any) -> str:
    with pytest.raises(cf.ColofuncError) as caught:
        call()
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def of_spec(spec: str, **more: Any) -> dict[str, Any]:
    names = dict.fromkeys(("0.bias", "2.weight", "2.bias"))
    return {"params": None, "opt": {"step": None, "exp_avg_sq": None, "exp_avg": {"0.weight": spec, **names, **more}}}


def wrong_values() -> str:
    got, want = staged()(state(), BATCH), step_fn(state(), BATCH)
    want[0]["opt"]["exp_avg"]["0.weight"] = want[0]["opt"]["exp_avg"]["0.weight"] + 1
    return raised(lambda: cf.testing.compare(got, want, "out"))


def writes(state: Any, batch: Any) -> Any:
    state["opt"]["exp_avg"]["0.weight"].add_(1)
    return state


def donated() -> str:
    step = staged()
    placed = step.init(state(), BATCH)
    step(placed, BATCH)
    return raised(lambda: placed["opt"]["exp_avg"]["0.weight"].full())


def of_the_command(words: tuple[str, ...] = ()) -> str:
    done = CliRunner().invoke(cli.app, ["plan", f"{__name__}:for_the_command", "--device", "h100", *words])
    assert done.exit_code == 0, done.output
    return done.output


def for_the_command() -> Any:
    return step_fn, state(), BATCH


TEXTS = {
    "program": lambda: staged().lower(state(), BATCH).text(),
    "plan": lambda: json.dumps(staged().lower(state(), BATCH).plan.to_dict()),
    "why": lambda: staged().lower(state(), BATCH).plan.why(LEAF),
    "memory": lambda: str(staged().lower(state(), BATCH).memory()),
    "memory on the host": lambda: str(cf.offload(staged(), policy="host").lower(state(), BATCH).memory()),
    "in_specs": lambda: raised(
        lambda: cf.shard(step_fn, cf.Mesh(dp=2), in_specs=(of_spec("(dp a) b c"), None)).lower(state(), BATCH)
    ),
    "in_specs of the step": lambda: str(
        cf.shard(step_fn, cf.Mesh(dp=2), in_specs=(of_spec("(dp a) b"), None)).lower(state(), BATCH).plan.why(LEAF)
    ),
    "no value": lambda: raised(lambda: staged()(with_leaf(cf.abstract((128, 64), torch.float64)), BATCH)),
    "command": of_the_command,
    "command, on a mesh": lambda: of_the_command(("--mesh", "dp=2")),
    "in place": lambda: raised(lambda: cf.shard(writes, cf.Mesh(dp=2)).lower(state(), BATCH)),
    "donated": donated,
}


@pytest.mark.parametrize("where", TEXTS)
def test_a_leaf_of_a_step_has_one_name(where):
    text = str(TEXTS[where]())
    assert f"state.{LEAF}" in text
    assert not OTHER_FORMS.search(text), OTHER_FORMS.search(text)


def test_a_profile_names_modules_as_leaves_and_decisions_do(tmp_path):
    step = staged()
    found = step.profile(tmp_path / "trace.json", state(), BATCH, steps=1)
    plan = step.lower(state(), BATCH).plan
    modules = {path for (path,) in found.by("path")} - {""}
    assert modules == {"0", "1", "2"} == {decision.path for decision in plan.decisions} - {""}
    leaves = {leaf.name for leaf in plan.inputs}
    assert f"state.{LEAF}" in leaves and {f"state.params.{path}.weight" for path in ("0", "2")} <= leaves
    trace = (tmp_path / "trace.json").read_text()
    assert modules <= set(re.findall(r'"module": "([^"]*)"', trace)) and not OTHER_FORMS.search(trace + found.table())


def test_results_are_named_alike():
    text = wrong_values()
    assert text.startswith(f"out.0.{LEAF} [(dp a) b]: differs by") and not OTHER_FORMS.search(text)
    trees = raised(lambda: cf.testing.compare(step_fn(state(), BATCH), {"a": 1}))
    assert "'0.params.0.weight'" in trees and not OTHER_FORMS.search(trees)


def test_trees_whose_names_are_equal_still_differ():
    one = torch.ones(1)
    for got, want in (({"a.b": one}, {"a": {"b": one}}), ([one], {"0": one})):
        assert "the trees differ" in raised(lambda got=got, want=want: cf.testing.compare(got, want))


def test_a_saved_state_is_named_as_it_stands_in_itself(tmp_path):
    cf.save(tmp_path / "saved", state())
    manifest = (tmp_path / "saved" / "colofunc.json").read_text()
    assert f'"{LEAF}"' in manifest
    text = raised(lambda: cf.load(tmp_path / "saved", like=with_leaf(torch.zeros(3, 3, dtype=torch.float64))))
    assert f"{LEAF} is (128, 64) float64 in the folder and (3, 3)" in text and not OTHER_FORMS.search(text)


def test_a_state_of_another_shape_is_refused_before_a_kernel_reads_it():
    text = raised(lambda: staged()(with_leaf(torch.zeros(3, 3, dtype=torch.float64)), BATCH))
    assert "'exp_avg.0.weight' has shape (3, 3), and the parameter '0.weight' (128, 64)" in text
    text = raised(lambda: OPT.update({**MODEL.params, "0.weight": torch.zeros(3)}, state()["opt"], MODEL.params))
    assert "'grads.0.weight' has shape (3,)" in text
    missing = state()["opt"]
    del missing["exp_avg"]["0.weight"]
    assert "missing ['exp_avg.0.weight']" in raised(lambda: OPT.update(MODEL.params, missing, MODEL.params))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_kernels_are_not_given_operands_of_other_shapes(optimizer):
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    opt = cf.adapt(optimizer, lr=0.1, **options)
    params = {"w": torch.ones(128, 64)}
    states = opt.init({"w": torch.ones(3, 3)})
    assert "has shape (3, 3)" in raised(lambda: opt.update({"w": torch.ones(128, 64)}, states, params))


def test_a_new_shape_and_a_missing_argument_are_told_by_name(capsys):
    step = cf.shard(lambda state, batch=None: state["opt"]["exp_avg"]["0.weight"].sum(), cf.Mesh(dp=1))
    step(state(), BATCH)
    step(with_leaf(torch.zeros(3, 3, dtype=torch.float64)), BATCH)
    step(state())  # fewer arguments than before
    said = capsys.readouterr()
    text = said.out + said.err
    assert f"state.{LEAF}: (128, 64) -> (3, 3)" in text and "'batch.x' is gone" in text
