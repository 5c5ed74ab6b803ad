"""What hooks of transforms and passes of plugins may not give: each an error that says who gave it, what, and what to write instead."""

import pkgutil
import re
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import colofunc as cf
from colofunc import ext
from colofunc import transforms as built_in
from colofunc.compiler.hooks import CHANGES
from colofunc.compiler.transform import BUILT_IN, HOOKS

MESH = cf.Mesh(dp=2, topology="ideal")
Hook = Callable[[ext.Build], ext.Build]


def step_fn(s: dict[str, Tensor], x: Tensor) -> Any:
    return {"a": s["a"] + x.sum(), "b": s["b"] * 2}, x.sum(), x.square().sum()


def arguments() -> tuple[dict[str, Tensor], Tensor]:
    return {"a": torch.zeros(4), "b": torch.ones(4)}, torch.ones(8, 4)


def lowered(budget: int | None = None, plugins: Any = (), **hooks: Any) -> Any:
    base = cf.shard(step_fn, MESH, plugins=plugins, in_specs=(None, "(dp b) d"))
    step = base if budget is None else cf.checkpoint(base, budget=budget)
    return ext.stage(step, ext.Transform("mine", **hooks)).lower(*arguments())


# ---- fields of a build ----

# Of each field, something else than what is there; of what is not there yet, something.
OTHERS: dict[str, Any] = {
    "transforms": (), "mesh": cf.Mesh(dp=4), "fn": abs, "state": {}, "others": (7,), "program": 1, "traced": 1, "registry": 1,
    "budget_bytes": 7, "constraints": 1, "alternatives": 1, "searches": 1, "moves": 1, "way": "another", "cuts_of": 1,
}  # fmt: skip
NOT_THEIRS = [(hook, field) for hook in HOOKS for field in OTHERS if field not in CHANGES[hook]]


def test_all_fields_and_hooks_are_tried() -> None:
    assert set(OTHERS) == set(attrs.fields_dict(ext.Build)) and set(CHANGES) == set(HOOKS)
    assert {field for fields in CHANGES.values() for field in fields} <= set(OTHERS)


@pytest.mark.parametrize(("hook", "field"), NOT_THEIRS)
def test_a_hook_that_changes_what_is_not_its_own_is_told_which_hook_does(hook: str, field: str) -> None:
    says = rf"transform 'mine': its hook {hook} changed {field}, and may change {', '.join(CHANGES[hook])} only\. Try: "
    owners = " or ".join(owner for owner in HOOKS if field in CHANGES[owner])
    with pytest.raises(cf.PlanError, match=says + (f"the hook {owners} for that" if owners else f"leave {field} as it is")):
        lowered(**{hook: lambda build: build.evolve(**{field: OTHERS[field]})})


@pytest.mark.parametrize("hook", HOOKS)
def test_a_field_that_no_build_has_is_told_by_a_near_name(hook: str) -> None:
    says = rf"transform 'mine': its hook {hook} changes what no build has: 'programm' is no field of a build.*program"
    with pytest.raises(cf.PlanError, match=says):
        lowered(**{hook: lambda build: build.evolve(programm=None)})


@pytest.mark.parametrize(
    ("hook", "field"), [(hook, field) for hook, fields in CHANGES.items() for field in fields if field not in ("cuts_of", "constraints")]
)
def test_a_field_that_is_none_is_told_with_what_it_should_be(hook: str, field: str) -> None:
    with pytest.raises(cf.PlanError, match=rf"transform 'mine': its hook {hook} gave None as {field}\. Try: "):
        lowered(**{hook: lambda build: build.evolve(**{field: None})})


RUBBISH: dict[str, tuple[str, Any]] = {
    "constraints": ("constrain", {}),
    "cuts_of": ("candidates", 3),
    "alternatives": ("candidates", ((),)),
    "searches": ("candidates", ("look",)),
    "moves": ("candidates", (None,)),
    "fn": ("wrap", 3),
    "program": ("rewrite_local", "a program"),
}


@pytest.mark.parametrize("field", RUBBISH)
def test_rubbish_is_told_with_what_it_should_be(field: str) -> None:
    hook, value = RUBBISH[field]
    with pytest.raises(cf.PlanError, match=rf"transform 'mine': its hook {hook} gave .* as {field}\. Try: "):
        lowered(**{hook: lambda build: build.evolve(**{field: value})})


# ---- functions that candidates add ----


def adding(field: str, function: Any) -> Hook:
    return lambda build: build.evolve(**{field: (*getattr(build, field), function)})


FUNCTIONS: dict[str, tuple[str, Any, str]] = {
    "alternative": ("alternatives", [lambda program, mesh: None], "return the program it has written"),
    "search": ("searches", lambda *given: None, r"return \(what fits or None, the leanest\)"),
    "search of programs": ("searches", lambda program, *given: (program, program), r"return \(what fits or None, the leanest\)"),
    "search without a leanest": ("searches", lambda *given: (None, None), r"return \(what fits or None, the leanest\)"),
    "move": ("moves", lambda *given, like=None: None, r"return cf\.ext\.Offloaded\(program, \.\.\.\)"),
}


@pytest.mark.parametrize("budget", [None, 20_000])
@pytest.mark.parametrize("what", FUNCTIONS)
def test_functions_of_candidates_that_give_rubbish_are_named(what: str, budget: int | None) -> None:
    field, function, instead = FUNCTIONS[what]
    says = rf"transform 'mine': its hook candidates added an? {what.split()[0]} that gave .*\. Try: {instead}"
    with pytest.raises(cf.PluginError, match=says):
        lowered(budget, candidates=adding(field, function))


def test_a_second_alternative_that_gives_rubbish_is_no_way_that_is_passed_over() -> None:
    ways = [lambda program, mesh: program, lambda program, mesh: None]
    with pytest.raises(cf.PluginError, match="added an alternative that gave None"):
        lowered(1, candidates=adding("alternatives", ways))


# ---- what goes in and comes out of a program ----

Rewrite = Callable[[ext.Program], ext.Program]


def outputs(choose: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Rewrite:
    return lambda program: attrs.evolve(program, outputs=choose(program.outputs))


def other_dtype(program: ext.Program) -> ext.Program:
    edit = ext.Editor(program)
    wide = edit.new(program.values[program.outputs[-1]], dtype=torch.float64)
    node = ext.Node("aten._to_copy.default", (ext.Ref(program.outputs[-1]),), (("dtype", torch.float64),), (wide,))
    edit.insert(len(program.nodes), node)
    return edit.done(outputs=(*program.outputs[:-1], wide))


BREAKS: dict[str, tuple[Rewrite, str]] = {
    "fewer": (outputs(lambda out: out[:-1]), "gives the program other outputs: 3 where there were 4"),
    "more": (outputs(lambda out: (*out, out[-1])), "gives the program other outputs: 5 where there were 4"),
    "swapped": (outputs(lambda out: (*out[:2], out[3], out[2])), "gives as output 2 of the program what was output 3"),
    "turned": (outputs(lambda out: (*out[:2], out[3], out[2])[::-1]), "gives the program other outputs"),
    "dtype": (other_dtype, "gives the program other outputs"),
    "inputs": (
        lambda program: attrs.evolve(program, inputs=(program.inputs[1], program.inputs[0], *program.inputs[2:])),
        "renames inputs of the program; keep their value ids",
    ),
    "aliases": (lambda program: attrs.evolve(program, aliases=((0, 1),)), "writes output 0 in place of input 1, which the step keeps"),
    "none": (lambda program: None, "gave None as program|gave None"),  # type: ignore[arg-type,return-value]
}


class Breaks:
    def __init__(self, rewrite: Rewrite) -> None:
        self.rewrite = rewrite

    @cf.hookimpl
    def colofunc_passes(self) -> Any:
        return {"bad": self.by_pass}

    def by_pass(self, program: ext.Program, mesh: cf.Mesh) -> ext.Program:
        return self.rewrite(program)


@pytest.mark.parametrize("how", BREAKS)
def test_a_hook_that_changes_what_goes_in_or_comes_out_is_named(how: str) -> None:
    rewrite, says = BREAKS[how]
    with pytest.raises(cf.PlanError, match=rf"mine.*rewrite_local ({says})"):
        lowered(rewrite_local=lambda build: build.evolve(program=rewrite(build.program)))


@pytest.mark.parametrize("how", BREAKS)
def test_a_pass_of_a_plugin_that_changes_what_goes_in_or_comes_out_is_named(how: str) -> None:
    rewrite, says = BREAKS[how]
    with pytest.raises(cf.PluginError, match=rf"the pass 'bad' from test_hook_mistakes\.Breaks\.by_pass ({says})"):
        lowered(plugins=(Breaks(rewrite),))


@pytest.mark.parametrize("how", BREAKS)
def test_an_alternative_that_changes_what_goes_in_or_comes_out_is_named(how: str) -> None:
    rewrite, says = BREAKS[how]
    with pytest.raises(cf.PluginError, match=rf"'mine': its hook candidates added an alternative that ({says})"):
        lowered(candidates=adding("alternatives", [lambda program, mesh: rewrite(program)]))


def test_outputs_that_are_one_value_and_aliases_that_are_gone_are_no_mistake() -> None:
    def one_value(build: ext.Build) -> ext.Build:
        program = build.program
        return build.evolve(program=attrs.evolve(program, outputs=(*program.outputs[:3], program.outputs[2]), aliases=()))

    step = ext.stage(cf.shard(step_fn, MESH, in_specs=(None, "(dp b) d")), ext.Transform("mine", rewrite_local=one_value))
    _, once, again = step(*arguments())
    assert float(once) == float(again) == 32


# ---- applied twice ----


def test_a_transform_that_is_applied_twice_is_called_as_it_is_called() -> None:
    mine = ext.Transform("mine")
    twice = "mine is applied twice to step_fn. Try: one of them, with the options of both"
    with pytest.raises(cf.PlanError, match=f"^{re.escape(twice)}$"):
        ext.stage(ext.stage(step_fn, mine), mine)
    with pytest.raises(cf.PlanError, match=r"^mine wants a step function, not int$"):
        ext.stage(3, mine)  # type: ignore[arg-type]
    with pytest.raises(cf.PlanError, match=r"give all its plans in one call: cf\.shard\(fn, \.\.\.\)$"):
        cf.shard(cf.shard(step_fn, MESH), MESH)
    with pytest.raises(cf.PlanError, match=r"^cf\.precision wants a step function, not int$"):
        cf.precision(3, "bf16")  # type: ignore[call-overload]


def test_all_built_in_transforms_are_known_by_name() -> None:
    assert {module.name for module in pkgutil.iter_modules(built_in.__path__)} == BUILT_IN
    assert all(hasattr(cf, name) for name in BUILT_IN)
