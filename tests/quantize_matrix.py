"""Quantized weights under every mode, in both orders, against the quantized function on one device.

    SCHEMES x MODES x {weights as arguments, frozen weights beside adapters} x {quantize first, quantize last}

A cell is *equal* when in float64 the outputs of the staged step (of two training steps where there are adapters) are those of the quantized
function on one device, when the packed tensors on the mesh are bit for bit what one device packs and lie as the mode says, when products
read them packed, and when the rows of scales lie where the rows of numbers do. Schemes that need a calibration
("auto" is a choice of one for each weight) have it on one device, and leave out experts, which no linear layer reads.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import attrs
import torch
from colofunc_plugins import experts, tensor, zero
from colofunc_plugins.pipeline import stages
from torch import nn

import colofunc as cf
from colofunc.compiler.quantized_weights import packed
from colofunc.dtensor.placed import SHELF
from colofunc.ops.quantized_frozen import sources
from colofunc.planner.schemes import SchemeChoice
from colofunc.plugins import build_registry

CALIBRATED = ("gptq", "awq", "smoothquant")
MEASURED = (*CALIBRATED, "auto")
SCHEMES = (
    "int8", "fp8", "fp8-e5m2", "fp8-g128", "int4-g128", "nf4", "nf4-g64", "mxfp8", "nvfp4", "int8-dynamic", "fp8-dynamic",
    "fp8-g128-dynamic", *MEASURED,
)  # fmt: skip
WHERE = ("up.weight", "down.weight")
AUTO_BYTES = 60_000
"""What "auto" may take: enough for int8 of one weight and 4 bits of the other."""
EXPERTS = ("experts_in", "experts_out")
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


class Mixture(Net):
    """The same, and four experts of which a token goes to two."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(128, 4, bias=False)
        self.experts_in = nn.Parameter(torch.randn(4, 64, 128) / 8)  # (experts, 2f, d)
        self.experts_out = nn.Parameter(torch.randn(4, 128, 32) / 4)  # (experts, d, f)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = super().forward(tokens)
        index, weight, _ = cf.moe.route(self.router(rows), 2)
        return rows + cf.moe.experts(rows, index, weight, self.experts_in, self.experts_out)


@attrs.frozen
class Mode:
    """How a step is staged beside `cf.quantize`.

    `lies`: quantized weight -> how its numbers lie then. `training`: it says something of a training step only. `net`: what is staged,
    `where`: its quantized weights.
    """

    place: Callable[[Any], Any]
    lies: Mapping[str, str] = attrs.field(factory=dict)
    training: bool = False
    net: Callable[[], nn.Module] = Net
    where: tuple[str, ...] = WHERE


def sharded(*plans: Any, **sizes: int) -> Callable[[Any], Any]:
    return lambda step: cf.shard(step, cf.Mesh(**sizes), *plans, in_specs=None)


def on(place: Callable[[Any], Any], transform: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda step: transform(place(step))


def pair(up: str, down: str) -> dict[str, str]:
    """How the two products' weights lie."""
    return {"up.weight": up, "down.weight": down}


def piped(step: Any) -> Any:
    return cf.pipeline(step, axis="pp", microbatches=2, stages={"up.*": 0, "table.*": 0, "norm.*": 0, "*": 1})


DP = sharded(dp=2)
EVERYWHERE = pair("a b", "a b")
STAGES = pair("a b @pp=0", "a b @pp=1")
OVER_EP = {"experts_in": "(ep a) b", "experts_out": "(ep a) b"}
OVER_BOTH = {"experts_in": "(ep dp) a", "experts_out": "(ep dp) a"}
ALL = (*WHERE, *EXPERTS)
MODES = {
    "alone": Mode(lambda step: step, EVERYWHERE),
    "auto": Mode(sharded(dp=2, tp=2)),
    "zero1": Mode(sharded(zero(1, "dp"), dp=2), EVERYWHERE),
    "zero2": Mode(sharded(zero(2, "dp"), dp=2), EVERYWHERE),
    "zero3": Mode(sharded(zero(3, "dp"), dp=4), pair("(dp a) b", "(dp a) b")),
    "tensor": Mode(sharded(tensor("1d", "tp"), tp=2), pair("(tp a) b", "a (tp b)")),
    "zero3+tensor": Mode(sharded(zero(3, "dp"), tensor("1d", "tp"), dp=2, tp=2), pair("(tp dp a) b", "(dp a) (tp b)")),
    "offload": Mode(
        on(sharded(zero(3, "dp"), dp=2), lambda step: cf.offload(step, policy="host")), pair("(dp a) b @host", "(dp a) b @host")
    ),
    "checkpoint": Mode(on(DP, lambda step: cf.checkpoint(step, policy="nothing")), training=True),
    "checkpoint+zero3": Mode(
        on(sharded(zero(3, "dp"), dp=2), lambda step: cf.checkpoint(step, policy="nothing")), pair("(dp a) b", "(dp a) b"), training=True
    ),
    "stages": Mode(sharded(stages("pp", {"up.*": 0, "*": 1}), pp=2), STAGES),
    "pipeline": Mode(on(sharded(pp=2), piped), STAGES, training=True),
    "pipeline+zero1": Mode(on(sharded(zero(1, "dp"), pp=2, dp=2), piped), STAGES, training=True),
    "pipeline+tensor": Mode(
        on(sharded(tensor("1d", "tp"), pp=2, tp=2), piped), pair("(tp a) b @pp=0", "a (tp b) @pp=1"), training=True
    ),
    "experts": Mode(sharded(experts("ep"), ep=2), OVER_EP, net=Mixture, where=ALL),
    "experts+zero3": Mode(sharded(experts("ep"), zero(3, "dp"), ep=2, dp=2), OVER_BOTH, net=Mixture, where=ALL),
    "experts+tensor": Mode(
        sharded(experts("ep"), tensor("1d", "tp"), ep=2, tp=2), pair("(tp a) b", "a (tp b)"), net=Mixture, where=ALL
    ),
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


def step_of(kind: str, net: Callable[[], nn.Module] = Net) -> tuple[Callable[..., Any], Any, cf.Model]:
    """(step, its argument 0, the model)."""
    torch.manual_seed(0)
    model = cf.functional(net())
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


@cache
def scheme_of(name: str) -> cf.ext.Quantizer | SchemeChoice:
    """The scheme of this name, calibrated where it is one that is; of "auto" a choice of one for each weight."""
    forward, params, _ = step_of("arguments")
    if name == "auto":
        sensitivities = cf.sensitivities(lambda params, batch: forward(params, batch).square().mean(), where=WHERE)(params, tokens())
        return cf.scheme_errors(params, sensitivities).within(AUTO_BYTES)
    if name == "gptq":
        return cf.gptq(cf.input_moments(forward, where=WHERE)(params, tokens()))
    if name == "awq":
        return cf.awq(cf.input_moments(forward, where=WHERE)(params, tokens()))
    if name == "smoothquant":
        return cf.smoothquant(cf.input_maxima(forward, where=WHERE)(params, tokens()))
    return build_registry().quantizers[name]


def scheme_for(name: str, weight: str) -> cf.ext.Quantizer:
    """What a weight is quantized with."""
    scheme = scheme_of(name)
    found = scheme.scheme(weight) if isinstance(scheme, SchemeChoice) else scheme
    assert found is not None
    return found.named(weight)


def where_of(cell: Cell) -> tuple[str, ...]:
    """The weights that a cell quantizes."""
    return WHERE if cell.scheme in MEASURED else MODES[cell.mode].where


def staged(cell: Cell, step_fn: Callable[..., Any]) -> cf.Staged:
    mode, scheme, where = MODES[cell.mode], scheme_of(cell.scheme), where_of(cell)
    if cell.order == "first":
        return mode.place(cf.quantize(step_fn, scheme, where=where))
    return cf.quantize(mode.place(step_fn), scheme, where=where)


def run(cell: Cell) -> float:
    """The largest difference from one device. Raises where the cell is not equal."""
    step_fn, state, model = step_of(cell.kind, MODES[cell.mode].net)
    step = staged(cell, step_fn)
    check_packed(cell, step, state, model)
    if cell.mode == "bf16":
        return cf.testing.check(step, state, tokens(), steps=2 if cell.kind == "adapters" else 1).worst
    with cf.testing.float64():
        worst = cf.testing.check(step, state, tokens(), steps=2 if cell.kind == "adapters" else 1).worst
    assert worst <= 1e-10, worst
    return worst


def targets(program: cf.ext.Program) -> Iterator[str]:
    """Of all nodes, those of loops' trips too."""
    for node in program.nodes:
        yield node.target
        if node.loop is not None:
            yield from targets(node.loop.body)


def product_of(scheme: cf.ext.Quantizer, form: str) -> str:
    """The operator by which a linear layer reads a weight in a format."""
    if scheme.float8_inputs:
        return {"fp8": "colofunc.scaled_linear", "fp8_g128": "colofunc.scaled_groups_linear"}[form]
    return f"colofunc.{form}_rows_linear" if scheme.outliers is not None else f"colofunc.{form}_linear"


def check_packed(cell: Cell, step: cf.Staged, state: Any, model: cf.Model) -> None:
    """Products read packed tensors, which are those of one device, and scales lie as numbers do."""
    low = step.lower(state, tokens())
    schemes = {name: scheme_for(cell.scheme, name) for name in where_of(cell)}
    forms = {scheme.form for scheme in schemes.values()}
    assert len(forms) == 1 + (cell.scheme == "auto")
    products = [target for target in targets(low.program) if target.startswith(tuple(f"colofunc.{form}_" for form in forms))]
    scheme = next(iter(schemes.values()))
    wanted_products = {product_of(scheme, form) for form in forms}
    assert wanted_products <= set(targets(low.program)), products
    if scheme.rounds_inputs:
        assert not {f"colofunc.{form}_linear" for form in forms} & set(products), products
    made = set(targets(step.lower(state, tokens()).global_program))
    assert (scheme.outliers is not None) == ("colofunc.int8_rows" in made), "inputs"
    assert scheme.float8_inputs == ("colofunc.fp8_cast" in made), "inputs"
    assert "colofunc.rounded_rows" not in made, "of a weight in int8 products are of whole numbers"
    assert not any(target.endswith("dequantize") for target in products) or MODES[cell.mode].net is Mixture, products
    placed = parts_on_mesh(cell, step, low, state)
    weights = model.params if cell.kind == "arguments" else model.frozen
    for name in where_of(cell):
        wanted = sources({name: packed(schemes[name], weights[name].clone())})
        rows = {}
        for part, tensor_of_one in wanted.items():
            got, layout = placed[part]
            assert torch.equal(got, tensor_of_one), part
            if not part.endswith("input_scale"):  # which has no rows
                rows[part] = [axis for _, axis in layout.dims[0] if axis is not None]
        lies = placed[name][1].text()
        assert lies == MODES[cell.mode].lies.get(name, lies), f"{name} lies as {lies}"
        assert all(axes == rows[name] or not rows[name] for axes in rows.values()), rows


def parts_on_mesh(cell: Cell, step: cf.Staged, low: Any, state: Any) -> dict[str, tuple[torch.Tensor, cf.Layout]]:
    """Name of a packed tensor -> (its whole value, how it lies)."""
    if cell.kind == "arguments":
        placed = step.init(state, tokens())
        found = {}
        for name in where_of(cell):
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


def tried(
    cells: Iterable[Any],
    run: Callable[[Any], float],
    to_refuse: Collection[Any] = (),
    refused: Callable[[Any, Exception], bool] | None = None,
) -> None:
    """Fails once, with every cell that is not equal. to_refuse: the cells that raise an error instead, which `refused` knows."""
    count, errors, broken = 0, 0, []
    for cell in cells:
        count += 1
        try:
            print(f"{cell}: {run(cell):.1e}", flush=True)
            if cell in to_refuse:
                broken.append(f"{cell}: no error, and there should be one")
        except (AssertionError, cf.ColofuncError) as error:
            if cell in to_refuse and refused is not None and refused(cell, error):
                errors += 1
            else:
                broken.append(f"{cell}: {type(error).__name__}: {str(error)[:600]}")
    print(f"\n{count} combinations tried, {count - errors - len(broken)} equal, {errors} refused as they should be")
    assert not broken, "\n\n".join(broken)
