"""Quantized weights under every mode, in both orders, against the quantized function on one device.

    {int8, fp8, int4-g128, nf4} x MODES x {weights as arguments, frozen weights beside adapters} x {quantize first, quantize last}

A cell is *equal* when in float64 the outputs of the staged step (of two training steps where there are adapters) are those of the quantized
function on one device, when the packed tensors on the mesh are bit for bit what one device packs, when products read them packed, and
when the rows of scales lie where the rows of numbers do.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from colofunc_plugins import tensor, zero
from colofunc_plugins.pipeline import stages
from torch import nn

import colofunc as cf
from colofunc.dtensor.placed import SHELF
from colofunc.ops.quantized_frozen import sources
from colofunc.plugins import build_registry
from colofunc.transforms.quantize import packed

SCHEMES = ("int8", "fp8", "int4-g128", "nf4")
WHERE = ("up.weight", "down.weight")
KINDS = ("arguments", "adapters")
ORDERS = ("first", "last")


class Net(nn.Module):
    """A table, a norm, and a pair of products."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 128)
        self.norm = nn.LayerNorm(128)
        self.up = nn.Linear(128, 256)
        self.down = nn.Linear(256, 128)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.table(tokens)
        return rows + self.down(torch.tanh(self.up(self.norm(rows))))


@attrs.frozen
class Mode:
    """How a step is staged beside `cf.quantize`. `training`: it says something of a training step only."""

    place: Callable[[Any], Any]
    training: bool = False


def sharded(*plans: Any, **sizes: int) -> Callable[[Any], Any]:
    return lambda step: cf.shard(step, cf.Mesh(**sizes), *plans, in_specs=None)


def on(place: Callable[[Any], Any], transform: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda step: transform(place(step))


DP = sharded(dp=2)
MODES = {
    "alone": Mode(lambda step: step),
    "auto": Mode(sharded(dp=2, tp=2)),
    "zero1": Mode(sharded(zero(1, "dp"), dp=2)),
    "zero2": Mode(sharded(zero(2, "dp"), dp=2)),
    "zero3": Mode(sharded(zero(3, "dp"), dp=4)),
    "tensor": Mode(sharded(tensor("1d", "tp"), tp=2)),
    "zero3+tensor": Mode(sharded(zero(3, "dp"), tensor("1d", "tp"), dp=2, tp=2)),
    "offload": Mode(on(sharded(zero(3, "dp"), dp=2), lambda step: cf.offload(step, policy="host"))),
    "checkpoint": Mode(on(DP, lambda step: cf.checkpoint(step, policy="nothing")), training=True),
    "stages": Mode(sharded(stages("pp", {"up.*": 0, "*": 1}), pp=2)),
    "accumulate": Mode(on(DP, lambda step: cf.accumulate(step, microbatches=2)), training=True),
    "bf16": Mode(on(DP, lambda step: cf.precision(step, "bf16"))),
}


@attrs.frozen
class Cell:
    """One combination."""

    scheme: str
    mode: str
    kind: str
    order: str

    def __str__(self) -> str:
        return f"{self.scheme}-{self.mode}-{self.kind}-{self.order}"


def every() -> Iterator[Cell]:
    """All cells that mean something."""
    for scheme, mode, kind, order in itertools.product(SCHEMES, MODES, KINDS, ORDERS):
        alone = mode == "alone" and order == "last"
        if not alone and not (MODES[mode].training and kind == "arguments"):
            yield Cell(scheme, mode, kind, order)


def sample() -> list[Cell]:
    """A few cells in which every scheme, mode, kind and order stands."""
    cells = [cell for cell in every() if cell.kind == ("adapters" if MODES[cell.mode].training else cell.kind)]
    chosen: list[Cell] = []
    for number, mode in enumerate(MODES):
        kind = "adapters" if MODES[mode].training else KINDS[number % 2]
        order = "first" if mode == "alone" else ORDERS[number // 2 % 2]
        chosen.append(Cell(SCHEMES[number % len(SCHEMES)], mode, kind, order))
    assert set(chosen) <= set(cells)
    return chosen


def step_of(kind: str) -> tuple[Callable[..., Any], Any, cf.Model]:
    """(step, its argument 0, the model)."""
    torch.manual_seed(0)
    model = cf.functional(Net())
    if kind == "arguments":

        def forward(params: Any, tokens: torch.Tensor) -> torch.Tensor:
            return model.apply(params, model.buffers, tokens)[0]

        return forward, model.params, model
    adapted = cf.lora(model, where=("up", "down"), rank=4)
    step_fn, state = cf.train_step(adapted, cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda out: out.square().mean())
    draw = torch.Generator().manual_seed(1)
    state["params"] = {name: torch.randn(p.shape, generator=draw) * 0.1 for name, p in state["params"].items()}
    return step_fn, state, adapted


def tokens() -> torch.Tensor:
    return torch.randint(0, 16, (8, 4), generator=torch.Generator().manual_seed(2))


def staged(cell: Cell, step_fn: Callable[..., Any]) -> cf.Staged:
    place = MODES[cell.mode].place
    if cell.order == "first":
        return place(cf.quantize(step_fn, cell.scheme, where=WHERE))
    return cf.quantize(place(step_fn), cell.scheme, where=WHERE)


def run(cell: Cell) -> float:
    """The largest difference from one device. Raises where the cell is not equal."""
    step_fn, state, model = step_of(cell.kind)
    step = staged(cell, step_fn)
    check_packed(cell, step, state, model)
    if cell.mode == "bf16":
        return cf.testing.check(step, state, tokens(), steps=2 if cell.kind == "adapters" else 1).worst
    with cf.testing.float64():
        worst = cf.testing.check(step, state, tokens(), steps=2 if cell.kind == "adapters" else 1).worst
    assert worst <= 1e-10, worst
    return worst


def check_packed(cell: Cell, step: cf.Staged, state: Any, model: cf.Model) -> None:
    """Products read packed tensors, which are those of one device, and scales lie as numbers do."""
    low = step.lower(state, tokens())
    form = build_registry().quantizers[cell.scheme].form
    products = [node.target for node in low.program.nodes if node.target.startswith(f"colofunc.{form}")]
    assert f"colofunc.{form}_linear" in products or cell.mode == "accumulate", products
    assert not any(target.endswith("dequantize") for target in products), products
    placed = parts_on_mesh(cell, step, low, state)
    weights = model.params if cell.kind == "arguments" else model.frozen
    for name in WHERE:
        quantizer = build_registry().quantizers[cell.scheme]
        wanted = sources({name: packed(quantizer, weights[name].clone())})
        rows = {}
        for part, tensor_of_one in wanted.items():
            got, layout = placed[part]
            assert torch.equal(got, tensor_of_one), part
            rows[part] = [axis for _, axis in layout.dims[0] if axis is not None]
        assert all(axes == rows[name] or not rows[name] for axes in rows.values()), rows


def parts_on_mesh(cell: Cell, step: cf.Staged, low: Any, state: Any) -> dict[str, tuple[torch.Tensor, cf.Layout]]:
    """Name of a packed tensor -> (its whole value, how it lies)."""
    if cell.kind == "arguments":
        placed = step.init(state, tokens())
        found = {}
        for name in WHERE:
            for part, x in sources({name: placed[name]}).items():
                found[part] = x.full(), x.sharding
        return found
    step(step.init(state, tokens()), tokens())  # places what the step captures
    found = {}
    for id, x in zip(low.hidden_ids, low.hidden, strict=True):
        value = low.program.values[id]
        layout = SHELF.layout(x, low.mesh)
        whole = cf.distribute(x, layout.text().split("@")[0].strip() if layout.axes else "...", low.mesh).full()
        found[value.name.removeprefix("frozen.")] = whole, layout
    return found
