"""What an axis is called decides nothing: axes called as factors of rules and patterns are."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from colofunc_plugins import experts, gather_kv, ring, tensor, ulysses, zero
from torch import Tensor, nn

import colofunc as cf
from colofunc.testing import models

AXES: dict[str, tuple[tuple[int, ...], Callable[..., list[Any]]]] = {
    "zero(1)": ((2,), lambda a: [zero(1, a)]),
    "zero(3)": ((2,), lambda a: [zero(3, a)]),
    "zero(3) padded": ((3,), lambda a: [zero(3, a)]),
    "1d": ((2,), lambda a: [tensor("1d", a)]),
    "1d sequence": ((2,), lambda a: [tensor("1d", a, sequence=True)]),
    "2d": ((2, 2), lambda a, b: [tensor("2d", (a, b))]),
    "3d": ((2, 2, 2), lambda a, b, c: [tensor("3d", (a, b, c))]),
    "auto": ((2, 2), lambda a, b: [tensor("auto", (a, b))]),
    "ulysses": ((2,), lambda a: [ulysses(a)]),
    "ring": ((2,), lambda a: [ring(a)]),
    "ring and heads": ((2, 2), lambda a, b: [ring(a, heads=b)]),
    "gather_kv": ((2,), lambda a: [gather_kv(a)]),
    "experts": ((2,), lambda a: [experts(a)]),
    "zero and 1d": ((2, 2), lambda a, b: [zero(3, a), tensor("1d", b)]),
}


class Mixture(nn.Module):
    """One layer of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.gate_up, self.down = nn.Parameter(torch.randn(4, 32, 8)), nn.Parameter(torch.randn(4, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.router(x).softmax(-1).topk(2)
        found: Tensor = cf.moe.experts(x, index, weight, self.gate_up, self.down)
        return found


def step_of(plan: str, trains: bool) -> tuple[Any, Any, Tensor]:
    """(step, state, batch) that the plan is about."""
    torch.manual_seed(0)
    module: nn.Module = Mixture() if plan == "experts" else models.Language(32, 16)
    rows = 12 if "padded" in plan else 8
    batch = torch.randn(rows, 8, dtype=torch.float64) if plan == "experts" else torch.randint(0, 32, (rows, 8))
    model = cf.functional(module.double())
    if not trains:
        return lambda params, batch: model.apply(params, {}, batch)[0], model.params, batch
    opt = cf.adapt(torch.optim.AdamW, lr=1e-2)
    loss = lambda out, batch: (out**2).mean()  # noqa: E731
    return *cf.train_step(model, opt, loss=loss, inputs=lambda batch: ((batch,), {})), batch


def factors(plan: str) -> list[str]:
    """What rules call the factors of the operators of a step."""
    step, state, batch = step_of(plan, trains=True)
    program = cf.shard(step, cf.Mesh(), auto=False).lower(state, batch).global_program
    rules = [cf.ext.Rules(program, cf.Mesh()).rule(node) for node in program.nodes]
    return sorted({name for rule in rules if rule is not None for name in rule.sizes})


def planned(plan: str, names: Sequence[str], trains: bool) -> tuple[Any, ...]:
    """What a plan makes of a step on axes of these names, without the names."""
    sizes, make = AXES[plan]
    step, state, batch = step_of(plan, trains)
    axes = dict(zip(names, sizes, strict=False))
    low = cf.shard(step, cf.Mesh(**axes), *make(*axes)).lower(state, batch)
    calls = Counter({kind: 0 for kind, _ in low.cost().calls})
    for (kind, _), count in low.cost().calls.items():
        calls[kind] += count
    return len(low.program.nodes), calls, low.cost().seconds, low.memory().peak_bytes["device"]


@pytest.mark.parametrize("plan", AXES)
def test_a_plan_is_the_same_on_axes_called_as_factors_are(plan: str) -> None:
    first = list(AXES).index(plan)
    letters = [*"bsoiedvgthnmk"]
    names = [letters[(first + k) % len(letters)] for k in range(3)]
    assert planned(plan, names, trains=False) == planned(plan, ["one", "two", "three"], trains=False)


@pytest.mark.sweep
@pytest.mark.parametrize("plan", AXES)
def test_any_factor_is_a_good_name_for_an_axis(plan: str) -> None:
    want = planned(plan, ["one", "two", "three"], trains=True)
    names = sorted({*factors(plan), *"abcdefghijklmnopqrstuvwxyz", "heads", "whole", "rows", "time"})
    for k in range(len(names)):
        assert planned(plan, [names[(k + n) % len(names)] for n in range(3)], trains=True) == want, names[k]


def test_the_nameless_factor() -> None:
    mesh = cf.Mesh(b=2, d=3)
    assert cf.Spec("(b _) _ (d _)").bind(mesh, (4, 5, 6)) is cf.Spec("(b x) y (d z)").bind(mesh, (4, 5, 6))
    assert cf.Spec("(d _~)").bind(mesh, (4,)).padded_shape == (6,)
    with pytest.raises(cf.SpecError, match=r"mesh axis 'b' is used 2 times.*write _ for a factor that is no axis"):
        cf.Spec("(b b) s").bind(mesh, (4, 5))
    with pytest.raises(cf.SpecError, match="2 factors of unknown size"):
        cf.Spec("(_ b _)").bind(mesh, (4,))
    with pytest.raises(cf.SpecError, match="size _=2 belongs to no factor"):
        cf.Spec("(_ b)", _=2)
    with pytest.raises(cf.MeshError, match="'_' is not an identifier"):
        cf.Mesh(_=2)
