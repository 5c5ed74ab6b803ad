"""Modules and functions of TorchScript in a step: they train like the Python modules that they were made of, or say why not."""

from typing import Any

import pytest
import torch
from colofunc_plugins import zero
from torch import nn

import colofunc as cf

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SEQUENCES = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Branching(nn.Module):
    """Loops and branches over numbers, and statistics that it changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for k in range(2):
            if k % 2 == 0:
                x = torch.tanh(x)
            else:
                x = x * 2
        return self.last(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


def made(kind: Any, seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return kind().double()


def traced(module: nn.Module, x: torch.Tensor = X) -> Any:
    # Torch calls the module to trace it, which moves its statistics.
    state = {name: value.clone() for name, value in module.state_dict().items()}
    compiled = torch.jit.trace(module, x, check_trace=False)
    compiled.load_state_dict(state)
    return compiled


def warm(module: nn.Module) -> Any:
    """TorchScript rewrites its graph, and differentiates it itself, after a few calls."""
    state = {name: value.clone() for name, value in module.state_dict().items()}
    compiled = torch.jit.script(module)
    for _ in range(4):
        compiled(X).sum().backward()
    compiled.load_state_dict(state)
    return compiled


def training(model: cf.Model) -> Any:
    def step(params: Any, buffers: Any, x: torch.Tensor) -> Any:
        def loss_of(params: Any) -> Any:
            out, changed = model.apply(params, buffers, x)
            return out.square().mean(), changed

        return cf.value_and_grad(loss_of, has_aux=True)(params)

    return step


def equal_to_python(module: nn.Module, reference: nn.Module, x: torch.Tensor = X, plans: Any = ()) -> None:
    """Loss, statistics and gradients, of other parameters than those that lie in the module."""
    model, python = cf.functional(module), cf.functional(reference)
    params = {name: p + 0.1 for name, p in model.params.items()}
    step = cf.shard(training(model), cf.Mesh(dp=2), *plans)
    cf.testing.compare(step(params, model.buffers, x), training(python)(params, python.buffers, x))


COMPILED = {
    "script": torch.jit.script,
    "trace": traced,
    "warm": warm,
    "submodule": lambda module: nn.Sequential(torch.jit.script(module), nn.Linear(2, 2).double()),
    "traced submodule": lambda module: nn.Sequential(traced(module), nn.Linear(2, 2).double()),
}


@pytest.mark.parametrize("plans", [(), (zero(3, "dp"),)], ids=["", "zero(3)"])
@pytest.mark.parametrize("how", COMPILED)
def test_a_compiled_module_trains_like_its_python_module(how, plans):
    compiled = COMPILED[how](made(Branching))
    reference = made(Branching)
    if "submodule" in how:
        reference = nn.Sequential(reference, nn.Linear(2, 2).double())
        reference.load_state_dict(compiled.state_dict())
    equal_to_python(compiled, reference, plans=plans)


def test_a_traced_recurrent_layer_trains():
    equal_to_python(traced(made(Recurrent), SEQUENCES), made(Recurrent), SEQUENCES)


@torch.jit.script
def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w) * 2


def test_a_compiled_function_is_differentiated():
    def step(w, x):
        return cf.value_and_grad(lambda w: scaled(x, w).square().mean())(w)

    w = torch.randn(3, 2, dtype=torch.float64)
    for _ in range(3):
        cf.testing.compare(cf.shard(step, cf.Mesh(dp=2))(w, X), step(w, X))


def test_gradients_of_gradients_go_through_a_compiled_module():
    model = cf.functional(torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()))

    def penalty(params, x):
        def loss_of(params):
            energy, forces = cf.value_and_grad(lambda x: model.apply(params, model.buffers, x)[0].sum())(x)
            return energy + forces.square().mean()

        return cf.value_and_grad(loss_of)(params)

    cf.testing.compare(cf.shard(penalty, cf.Mesh(dp=2))(model.params, X), penalty(model.params, X))


def dropped(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(x, 0.5, True)


def branched(x: torch.Tensor) -> torch.Tensor:
    if bool(x.sum() > 0):
        return x
    return -x


@pytest.mark.parametrize(("inside", "why"), [(dropped, "random operator aten.bernoulli_"), (branched, "data-dependent control flow")])
def test_what_cannot_run_says_why_and_what_to_do(inside, why):
    compiled = torch.jit.script(inside)
    with pytest.raises(cf.TraceError, match=rf"{why}.* at test_torchscript.py:\d+ .*called by TorchScript. Try: the Python module"):
        cf.shard(lambda x: compiled(x), cf.Mesh(dp=2))(X)


def test_an_operator_that_refuses_its_operands_keeps_its_words():
    compiled = torch.jit.script(scaled)
    with pytest.raises(RuntimeError, match="same reduction dim") as caught:
        cf.shard(lambda x: compiled(x, x), cf.Mesh(dp=1))(X)
    assert any("called by TorchScript" in note for note in caught.value.__notes__)


def test_copies_that_torchscript_keeps_of_its_parameters_are_refused():
    module = torch.jit.script(made(Recurrent))  # its forward reads a list of weights
    with pytest.raises(cf.TraceError, match=r"reads 'layer\.weight_ih_l0' of a module by another way.*the Python module that it"):
        equal_to_python(module, made(Recurrent), SEQUENCES)


@pytest.mark.parametrize("how", ["script", "trace", "submodule"])
def test_a_compiled_module_is_filled_with_other_values(how):
    module = COMPILED[how](made(Branching))
    model = cf.functional(module)
    params = {name: p + 1 for name, p in model.params.items()}
    again = model.to_module(params)
    cf.testing.compare({name: p.detach() for name, p in again.named_parameters()}, params)
    cf.testing.compare({name: p.detach() for name, p in module.named_parameters()}, model.params)
    again(X).sum().backward()
    assert all(p.grad is not None for p in again.parameters())


def test_a_frozen_compiled_module_is_a_fixed_part_of_a_model():
    frozen = torch.jit.freeze(torch.jit.script(made(Branching).eval()))
    model = cf.functional(nn.Sequential(frozen, nn.Linear(2, 2)).double())
    python = cf.functional(nn.Sequential(made(Branching).eval(), nn.Linear(2, 2)).double(), trainable="1.*")
    got = cf.shard(training(model), cf.Mesh(dp=2))(model.params, model.buffers, X)
    want = training(python)({f"1.{n}": model.params[f"1.{n}"] for n in ("weight", "bias")}, python.buffers, X)
    cf.testing.compare((got[0][0], got[1]), (want[0][0], want[1]))


def test_adapters_are_refused():
    with pytest.raises(cf.InputError, match="matches no linear layer; 'first' is a RecursiveScriptModule"):
        cf.lora(cf.functional(torch.jit.script(made(Branching))), "first")


class Listed(nn.Module):
    """Reads its weights and its table from containers. `changing`: it writes to the table."""

    def __init__(self, reads_weight: bool, changing: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
        self.register_buffer("table", torch.randn(3, dtype=torch.float64))
        self.weights, self.tables = [self.weight], {"table": self.table}
        self.reads_weight, self.changing = reads_weight, changing

    def forward(self, x):
        if self.changing:
            self.table.add_(1.0)
        return x @ (self.weights[0] if self.reads_weight else self.weight) + self.tables["table"]


@pytest.mark.parametrize(("reads_weight", "changing", "name"), [(True, False, "weight"), (False, True, "table")])
def test_a_weight_in_a_plain_list_is_refused_and_so_is_a_buffer_that_changes(reads_weight, changing, name):
    with pytest.raises(cf.TraceError, match=f"reads '{name}' of a module by another way than the attribute of that name"):
        equal_to_python(Listed(reads_weight, changing), nn.Identity())


def test_a_buffer_that_stands_still_may_lie_in_a_container():
    torch.manual_seed(0)
    module = Listed(False, False)
    model = cf.functional(module)
    got = cf.shard(training(model), cf.Mesh(dp=2))(model.params, model.buffers, X)
    module(X).square().mean().backward()
    cf.testing.compare(got[1], {"weight": module.weight.grad})
