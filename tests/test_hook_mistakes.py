"""What hooks of transforms and passes of plugins may not give: each an error that says who gave it, what, and what to write instead."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import colofunc as cf
from colofunc import ext

MESH = cf.Mesh(dp=2, topology="ideal")


def step_fn(s: dict[str, Tensor], x: Tensor) -> Any:
    return {"a": s["a"] + x.sum(), "b": s["b"] * 2}, x.sum(), x.square().sum()


def arguments() -> tuple[dict[str, Tensor], Tensor]:
    return {"a": torch.zeros(4), "b": torch.ones(4)}, torch.ones(8, 4)


def lowered(budget: int | None = None, plugins: Any = (), **hooks: Any) -> Any:
    base = cf.shard(step_fn, MESH, plugins=plugins, in_specs=(None, "(dp b) d"))
    step = base if budget is None else cf.checkpoint(base, budget=budget)
    return ext.stage(step, ext.Transform("mine", **hooks)).lower(*arguments())


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
    with pytest.raises(cf.PluginError, match=rf"pass 'bad' of a plugin \(test_hook_mistakes\.Breaks\.by_pass\) ({says})"):
        lowered(plugins=(Breaks(rewrite),))


def test_outputs_that_are_one_value_and_aliases_that_are_gone_are_no_mistake() -> None:
    def one_value(build: ext.Build) -> ext.Build:
        program = build.program
        return build.evolve(program=attrs.evolve(program, outputs=(*program.outputs[:3], program.outputs[2]), aliases=()))

    step = ext.stage(cf.shard(step_fn, MESH, in_specs=(None, "(dp b) d")), ext.Transform("mine", rewrite_local=one_value))
    _, once, again = step(*arguments())
    assert float(once) == float(again) == 32
