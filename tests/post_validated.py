"""Steps that are validated in the next one: chains, batches, and what one device makes of them."""

from typing import Any

import torch
from colofunc_plugins import tensor, zero
from torch import nn

import colofunc as cf
from colofunc.executors.backend import backend_for

MESH = cf.Mesh(pp=4)
CALM = None
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Layers(nn.Module):
    """Four layers, one a stage. Each has a parameter whose gradient is as large as the batch says, and which nobody before it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.extra = nn.ParameterList(nn.Parameter(torch.zeros(8)) for _ in range(4))

    def forward(self, x: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) + size[:, k : k + 1] * self.extra[k]
        return x


STAGES = {f"{what}.{k}*": k for k in range(4) for what in ("layers", "extra")}


def staged(
    schedule: str, validate: str, fp16: bool = False, clip: float | None = 0.9, mesh: cf.Mesh = MESH, plans: Any = (), **more: Any
) -> Any:
    """(chain, state): momentum, so that a step that is done twice shows. more: for `cf.shard`."""
    torch.manual_seed(0)
    net = Layers() if fp16 else Layers().double()
    step, state = cf.train_step(
        cf.functional(net), cf.adapt(torch.optim.SGD, lr=1e-3, momentum=0.9), lambda out, b: (out.to(b[2].dtype) - b[2]).pow(2).mean(),
        inputs=lambda b: ((b[0], b[1]), {}), clip=clip,
    )  # fmt: skip
    stages = None if schedule == "zb-v" else STAGES if mesh.axis_size("pp") == 4 else HALVES
    chain = cf.pipeline(cf.shard(step, mesh, *plans, **more), microbatches=8, schedule=schedule, stages=stages, validate=validate)
    return (cf.precision(chain, "fp16") if fp16 else chain), state


def batches(wild: list[int | None], size: float, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """A batch per entry: of a stage whose gradient is large, or calm."""
    torch.manual_seed(1)
    found = []
    for stage in wild:
        sizes = torch.ones(16, 4, dtype=dtype)
        if stage is not CALM:
            sizes[3, stage] = size
        found.append((torch.randn(16, 8, dtype=dtype), sizes, torch.randn(16, 8, dtype=dtype)))
    return found


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, x in tree.items():
        found |= flat(x, f"{path}{name}.") if isinstance(x, dict) else {path + name: x}
    return found


def whole(tree: Any) -> dict[str, torch.Tensor]:
    return {name: x.full().clone() for name, x in flat(tree).items()}


def unsettled(mesh: cf.Mesh = MESH) -> Any:
    """The step that waits for its validation."""
    return backend_for(mesh).unsettled


def trained(chain: Any, state: Any, given: list[Batch], calm: int = 4) -> tuple[dict[str, torch.Tensor], list[float], int]:
    """(state, losses, how many updates were done again behind some calm steps), where nobody reads anything before the end."""
    placed = chain.init(state, given[0])
    losses = []
    run, before = None, 0
    for count, batch in enumerate(given, 1):
        placed, metrics = chain(placed, batch)
        losses.append(metrics["loss"])
        if count == calm and unsettled() is not None:
            run = unsettled().run
            before = run.redone
    found = whole(placed)
    assert unsettled() is None
    return found, [float(loss) for loss in losses], 0 if run is None else run.redone - before


def alone(chain: Any, state: Any, given: list[Batch]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """(state, losses) of one device."""
    losses = []
    for batch in given:
        state, metrics = chain.reference(state, batch)
        losses.append(float(metrics["loss"]))
    return flat(state), losses


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    """Whether they are equal bit for bit, NaN where NaN is."""
    nan = all(torch.equal(x.isnan(), others[name].isnan()) for name, x in some.items())
    return nan and all(torch.equal(x.nan_to_num(), others[name].nan_to_num()) for name, x in some.items())


HALVES = {glob: stage // 2 for glob, stage in STAGES.items()}


def beside(kind: str) -> dict[str, Any]:
    """Mesh and plans of a pipeline of two stages beside another way to be parallel."""
    if kind == "tensor":
        return {"mesh": cf.Mesh(pp=2, tp=2), "plans": (tensor("1d", "tp"),)}
    if kind == "both":
        return {"mesh": cf.Mesh(pp=2, dp=2, tp=2), "plans": (zero(2, "dp"), tensor("1d", "tp"))}
    return {"mesh": cf.Mesh(pp=2, dp=2), "plans": (zero(int(kind), "dp"),)}


# ---- real ranks ----


class Told:
    """What a watch is told of errors inside it."""

    def __init__(self) -> None:
        self.errors: list[BaseException | None] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.errors.append(error)
