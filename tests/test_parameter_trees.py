"""Parameters that are a tree and no dict of names: two models and a scalar under one optimizer, alone, on meshes, saved and loaded."""

from typing import Any

import pytest
import torch
from colofunc_plugins import zero
from torch import Tensor, nn

import colofunc as cf
from colofunc.program.tracing.tree import walk
from colofunc.testing import check

D = torch.float64
OTHERS = cf.adapt(torch.optim.AdamW, lr=0.1)
GROUPS = {"*.bias": OTHERS, "right.1": OTHERS, "left.0.weight": dict(weight_decay=0.5)}


def net(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def two_towers(opt: Any) -> tuple[Any, dict[str, Any], tuple[Tensor, Tensor]]:
    """(step function, state, batch) of two models, one in a tuple, whose outputs are to be alike, and a scalar without a module."""
    torch.manual_seed(0)
    left, right = cf.functional(net(3)), cf.functional(net(4))
    params = {"left": left.params, "right": (right.params, torch.ones((), dtype=D)), "none": None}

    def step_fn(state: Any, batch: tuple[Tensor, Tensor]) -> Any:
        def loss_fn(params: Any) -> Tensor:
            of_right, temperature = params["right"]
            apart = left.apply(params["left"], left.buffers, batch[0])[0] - right.apply(of_right, right.buffers, batch[1])[0]
            return apart.square().mean() * temperature.exp()

        loss, grads = cf.value_and_grad(loss_fn)(state["params"])
        grads, _ = cf.clip_by_global_norm(grads, 0.5)
        params, held = opt.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": held}, loss

    batch = torch.randn(8, 3, dtype=D), torch.randn(8, 4, dtype=D)
    return step_fn, {"params": params, "opt": opt.init(params)}, batch


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Muon, cf.LAMB], ids=lambda cls: cls.__name__)
def test_a_tree_is_updated_as_a_dict_of_its_paths_is(cls: Any) -> None:
    opt = cf.adapt(cls, lr=0.1, groups=GROUPS)
    _, state, _ = two_towers(opt)
    params = state["params"]
    flat = {name: leaf for name, leaf in walk(params) if leaf is not None}
    grads = cf.value_and_grad(lambda tree: sum(leaf.square().sum() for _, leaf in walk(tree) if leaf is not None))(params)[1]
    found, held = opt.update(grads, state["opt"], params)
    wanted, of_flat = opt.update({name: 2 * p for name, p in flat.items()}, opt.init(flat), flat)
    assert list(found) == ["left", "right", "none"] and type(found["right"]) is tuple and found["none"] is None
    assert dict(walk(held)).keys() == dict(walk(of_flat)).keys()
    for name, tensor in [*walk(wanted), *walk(of_flat)]:
        assert torch.equal(dict([*walk(found), *walk(held)])[name], tensor)


STAGED = {
    "zero": lambda step: cf.shard(step, cf.Mesh(dp=2), zero(3, "dp")),
    "accumulate": lambda step: cf.accumulate(cf.shard(step, cf.Mesh(dp=2, tp=2)), 2),
    "wishes": lambda step: cf.shard(step, cf.Mesh(tp=2), {"left.0.weight": "(tp o) i"}),
    "pipeline": lambda step: cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=2),
}


@pytest.mark.parametrize("cls", [torch.optim.AdamW, cf.LAMB], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("name", STAGED)
def test_a_step_over_a_tree_has_the_numbers_of_one_device(name: str, cls: Any) -> None:
    step, state, batch = two_towers(cf.adapt(cls, lr=0.1, groups={"left.*": dict(weight_decay=0.5)}))
    with cf.testing.float64():
        check(STAGED[name](step), state, batch)


def test_a_tree_is_saved_and_loaded_onto_another_mesh(tmp_path: Any) -> None:
    step, state, batch = two_towers(OTHERS)
    two, four = cf.shard(step, cf.Mesh(dp=2), zero(3, "dp")), cf.shard(step, cf.Mesh(tp=4))
    trained, _ = two(two.init(state, batch), batch)
    cf.save(tmp_path / "saved", trained)
    loaded = cf.load(tmp_path / "saved", like=four.init(state, batch))
    wanted = dict(walk(trained))
    assert all(leaf is wanted[name] or torch.equal(leaf.full(), wanted[name].full()) for name, leaf in walk(loaded))
