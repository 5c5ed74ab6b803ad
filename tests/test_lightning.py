"""Lightning's loop on a staged step: the numbers of the plain single-device Trainer, on simulated meshes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import colofunc as cf

pl = pytest.importorskip("lightning.pytorch", reason="needs Lightning")
from colofunc.integrations.lightning import ColofuncStrategy  # noqa: E402
from colofunc.integrations.loop import TrainingLoop  # noqa: E402

# Communication is free, so that tiny models are split at all.
DP, DP_TP = cf.Mesh(dp=2, topology="ideal"), cf.Mesh(dp=2, tp=2, topology="ideal")
MESHES = [DP, DP_TP]


class Tiny(pl.LightningModule):
    """What people write: it knows nothing of colofunc."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> None:
        super().__init__()
        # No bias before a normalisation: its gradient is rounding noise, which Adam blows up.
        self.net = nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).double()
        self.choice = optimizer, {"lr": 1e-2, **options}
        self.seen: list[float] = []
        self.validated: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self(x)
        loss = nn.functional.cross_entropy(out, y) * (1 + self.current_epoch * 0.1)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"scale": out.abs().max(), "index": batch_idx * 1.0})
        return {"loss": loss, "rows": out.sum(1)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += [float(outputs["loss"]), float(self.trainer.callback_metrics["train_loss_step"])]
        assert outputs["rows"].shape == (len(batch[0]),)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.validated.append(float(loss))
        self.log("val_loss", loss)

    def configure_optimizers(self) -> Any:
        cls, options = self.choice
        decayed = {"params": [self.net[0].weight, self.net[3].weight], "weight_decay": 0.1}
        rest = {"params": [*self.net[1].parameters(), self.net[3].bias], "lr": 2e-2}
        optimizer = cls([decayed, rest], **options)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def rows(n: int = 22) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(n, 6, generator=generator, dtype=torch.float64), torch.randint(0, 3, (n,), generator=generator))
    return DataLoader(data, batch_size=4)


def fit(module: pl.LightningModule, strategy: Any, path: Path, ckpt: Any = None, data: Any = None, **options: Any) -> pl.Trainer:
    """data: by default the last batch is smaller than the others, for which a step is planned once more."""
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, default_root_dir=path, **{"max_epochs": 2, **quiet, **options})
    trainer.fit(module, data or rows(), rows(8), ckpt_path=ckpt)
    return trainer


def pair(make: Any, mesh: cf.Mesh, path: Path, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    mine, theirs = make(), make()
    mine.load_state_dict(theirs.state_dict())
    a = fit(mine, ColofuncStrategy(mesh=mesh), path, **options)
    b = fit(theirs, "auto", path, **options)
    assert mine.seen == pytest.approx(theirs.seen, rel=1e-10)
    assert mine.validated == pytest.approx(theirs.validated, rel=1e-10)
    assert a.callback_metrics.keys() == b.callback_metrics.keys()
    for name, value in b.callback_metrics.items():
        assert float(a.callback_metrics[name]) == pytest.approx(float(value), rel=1e-6), name  # Lightning keeps float32
    assert a.global_step == b.global_step
    specs = {str(p.spec) for p in a.strategy.loop.state["params"].values()}
    assert all(any(axis in spec for spec in specs) for axis in mesh.axis_names), specs
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-10, atol=1e-10)
    return a, b


@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_losses_logs_and_weights_are_the_plain_trainers(mesh: cf.Mesh, tmp_path: Path) -> None:
    pair(Tiny, mesh, tmp_path, gradient_clip_val=0.5)


def test_plans_place_what_they_name(tmp_path: Path) -> None:
    trainer = fit(Tiny(), ColofuncStrategy(mesh=MESHES[1], plans={"3.weight": "o (tp i)"}), tmp_path, max_steps=1)
    assert "tp" in str(trainer.strategy.loop.state["params"]["net.3.weight"].spec).split(" ", 1)[1]


def test_accumulated_gradients(tmp_path: Path) -> None:
    """22 rows in batches of 4, three at a time: the last group of an epoch is not full."""
    pair(Tiny, DP, tmp_path, accumulate_grad_batches=4, gradient_clip_val=0.01, gradient_clip_algorithm="value")


def test_sgd_with_momentum(tmp_path: Path) -> None:
    pair(lambda: Tiny(torch.optim.SGD, momentum=0.9), DP, tmp_path, data=rows(16), max_epochs=1)


class Tied(Tiny):
    """A layer under two names, a LightningModule inside, a parameter that nothing uses, one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Tiny()
        self.alias, self.unused = self.net[3], nn.Parameter(torch.ones(3).double())
        self.inner.net[0].weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) + self.inner(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.RMSprop([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def test_modules_as_they_come(tmp_path: Path) -> None:
    pair(Tied, DP, tmp_path, data=rows(16), max_epochs=1)


MAKE = {"adamw": Tiny, "sgd": lambda: Tiny(torch.optim.SGD, momentum=0.9, dampening=0.2), "lamb": lambda: Tiny(cf.LAMB)}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_checkpoint_resumes_here_and_in_the_plain_trainer(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole, first, again, plain = (make() for _ in range(4))
    for module in (first, again, plain):
        module.load_state_dict(whole.state_dict())
    fit(whole, "auto", tmp_path, max_epochs=2)
    fit(first, ColofuncStrategy(mesh=DP), tmp_path, max_epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    fit(again, ColofuncStrategy(mesh=DP_TP), tmp_path, ckpt=tmp_path / "one.ckpt", max_epochs=2)
    fit(plain, "auto", tmp_path, ckpt=tmp_path / "one.ckpt", max_epochs=2)
    for module in (again, plain):
        assert first.seen + module.seen == pytest.approx(whole.seen, rel=1e-10)


# ---- evaluation on the same state ----


class Evaluated(Tiny):
    """Steps that return what others may look at."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(out, batch[1]))
        self.log("val_index", batch_idx * 1.0, on_step=True)
        return {"classes": out.argmax(1), "n": len(out)}

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).double().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


class Collect(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *more: Any) -> None:
        self.seen.append((outputs["classes"].tolist(), outputs["n"], float(pl_module.net[3].bias.sum())))


def test_evaluation_runs_on_the_same_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values go to the module once, at the end: training, validating, training moves nothing."""
    written: list[int] = []
    write = TrainingLoop.write
    monkeypatch.setattr(TrainingLoop, "write", lambda loop: written.append(1) or write(loop))
    strategy = ColofuncStrategy(mesh=DP_TP, evaluate="traced")
    torch.manual_seed(0)
    mine, theirs = Evaluated(), Evaluated()
    mine.load_state_dict(theirs.state_dict())
    a, b = fit(mine, strategy, tmp_path), fit(theirs, "auto", tmp_path)
    assert len(written) == 1 and mine.seen == pytest.approx(theirs.seen, rel=1e-10)
    assert a.callback_metrics.keys() == b.callback_metrics.keys()
    for name, value in b.callback_metrics.items():
        assert float(a.callback_metrics[name]) == pytest.approx(float(value), rel=1e-6), name
    state, evaluation = strategy.loop.state, strategy._evaluations["validation"]
    params, buffers = ({f"module.{n}": x for n, x in state[key].items()} for key in ("params", "buffers"))
    plan = evaluation.step.lower((params, buffers), next(iter(rows(8))), {"args": [0.0], "current_epoch": 0.0, "global_step": 0.0}).plan
    for name, x in state["params"].items():
        assert plan.leaf(f"state.0.module.{name}").spec == x.sharding.text(), name


def test_hooks_see_the_current_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    mine, theirs, seen = Evaluated(), Evaluated(), [Collect(), Collect()]
    mine.load_state_dict(theirs.state_dict())
    fit(mine, ColofuncStrategy(mesh=DP, evaluate="traced"), tmp_path, max_epochs=1, callbacks=[seen[0]])
    fit(theirs, "auto", tmp_path, max_epochs=1, callbacks=[seen[1]])
    assert len(seen[0].seen) == 4
    for (classes, n, bias), (want, m, other) in zip(seen[0].seen, seen[1].seen, strict=True):
        assert classes == want and n == m == 4 and bias == pytest.approx(other, rel=1e-10)


def test_testing_and_predicting_without_training(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, found = Evaluated(), []
    for strategy in (ColofuncStrategy(mesh=DP_TP, evaluate="traced"), "auto"):
        quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, default_root_dir=tmp_path, **quiet)
        found.append((trainer.test(module, rows(), verbose=False)[0]["accuracy"], torch.cat(trainer.predict(module, rows()))))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-10, atol=1e-10)


class Filling(Evaluated):
    """A list that a step fills, a counter that it moves: what a traced step would do once."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []
        self.count = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.count += 1
        self.losses.append(nn.functional.cross_entropy(self(batch[0]), batch[1]))


class Counting(Evaluated):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += len(batch[0])
        return super().validation_step(batch, batch_idx)


CHANGES = "it changes self.count"


@pytest.mark.parametrize(("make", "says"), [(Filling, CHANGES), (Counting, CHANGES), (Tiny, "data-dependent")])
def test_evaluation_that_cannot_be_traced_runs_on_the_module(make: Any, says: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    mine, theirs = make(), make()
    mine.load_state_dict(theirs.state_dict())
    with pytest.warns(UserWarning, match=f"validation_step runs on the plain module.*{says}") as caught:
        fit(mine, ColofuncStrategy(mesh=DP), tmp_path, max_epochs=1)
    assert sum("plain module" in str(w.message) for w in caught) == 1
    fit(theirs, "auto", tmp_path, max_epochs=1)
    assert mine.validated == pytest.approx(theirs.validated, rel=1e-10)
    if make is Filling:
        assert mine.count == theirs.count == 4 and [float(x) for x in mine.losses] == pytest.approx([float(x) for x in theirs.losses])
    if make is Counting:
        assert mine.count == theirs.count == 16
    with pytest.raises(cf.ColofuncError):
        fit(make(), ColofuncStrategy(mesh=DP, evaluate="traced"), tmp_path, max_epochs=1)


# ---- precision ----


class Narrow(Evaluated):
    """In float32, as modules come."""

    def __init__(self) -> None:
        super().__init__()
        self.net.float()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch[0].to(self.net[0].weight.dtype), batch[1]), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return super().validation_step((batch[0].to(self.net[0].weight.dtype), batch[1]), batch_idx)


@pytest.mark.parametrize(
    ("precision", "dtype", "tolerance"),
    [
        ("32-true", torch.float32, 1e-4), ("64-true", torch.float64, 1e-10), ("bf16-true", torch.bfloat16, 4e-2),
        ("bf16-mixed", torch.float32, 4e-2),
    ],
)
def test_lightnings_precisions(precision: str, dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    """What the plain Trainer does under the same precision; sums of bfloat16 in another order differ by its 8 bits."""
    torch.manual_seed(0)
    mine, theirs = Narrow(), Narrow()
    mine.load_state_dict(theirs.state_dict())
    a = fit(mine, ColofuncStrategy(mesh=DP), tmp_path, data=rows(16), precision=precision, max_epochs=1)
    b = fit(theirs, "auto", tmp_path, data=rows(16), precision=precision, max_epochs=1)
    assert {p.dtype for p in a.strategy.loop.state["params"].values()} == {dtype}
    assert mine.seen == pytest.approx(theirs.seen, rel=tolerance)
    assert float(a.callback_metrics["val_loss"]) == pytest.approx(float(b.callback_metrics["val_loss"]), rel=tolerance)


# ---- what is refused, and what numbers stand for ----


class Manual(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Hooked(Tiny):
    def on_after_backward(self) -> None:
        pass


class Iterating(Tiny):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


class Branching(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx % 2 == 0 else None


class Reading(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.trainer.callback_metrics["val_loss"]


class Cycling(Tiny):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Metric(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.mean = pytest.importorskip("torchmetrics").MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("accuracy", self.mean)


class Frozen(pl.Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pass


REFUSED = [
    (Manual, {}, cf.InputError, "Manual sets automatic_optimization=False"),
    (Hooked, {}, cf.InputError, "Hooked overrides on_after_backward, which runs between the gradients and the update"),
    (Iterating, {}, cf.InputError, "Iterating.training_step takes dataloader_iter"),
    (Branching, {}, cf.TraceError, "test_lightning.py"),
    (Reading, {}, cf.InputError, "training_step reads trainer.callback_metrics, which changes from call to call"),
    (Cycling, {}, cf.InputError, r"option 'betas' of parameter group 0 changed .*cycle_momentum=False"),
    (Metric, {}, cf.InputError, "training_step logs 'accuracy' as MeanMetric"),
    (Tiny, {"callbacks": [Frozen()]}, cf.InputError, "Frozen overrides on_before_optimizer_step"),
    (Tiny, {"callbacks": [pl.callbacks.StochasticWeightAveraging(0.1)]}, cf.InputError, "StochasticWeightAveraging reads or writes"),
    (Tiny, {"precision": "16-true"}, cf.InputError, "precision='16-true' keeps weights and moments in float16.*fp16"),
    (lambda: Tiny(torch.optim.LBFGS), {}, cf.InputError, "optimizer LBFGS cannot be adapted"),
]


@pytest.mark.parametrize(("make", "options", "error", "says"), REFUSED)
def test_refused(make: Any, options: Any, error: type[Exception], says: str, tmp_path: Path) -> None:
    module = make()
    if module.choice[0] is torch.optim.LBFGS:
        module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())
    with pytest.raises(error, match=says) as caught:
        fit(module, ColofuncStrategy(mesh=DP), tmp_path, num_sanity_val_steps=0, **options)
    assert "Try: " in str(caught.value) or error is cf.TraceError


def test_lightning_knows_the_strategy_by_name(tmp_path: Path) -> None:
    module = Tiny()
    trainer = fit(module, "colofunc", tmp_path, max_epochs=1)
    assert type(trainer.strategy) is ColofuncStrategy and trainer.strategy.mesh.axes == (("dp", 1),)
    assert module.seen and "colofunc" in pl.strategies.StrategyRegistry.available_strategies()


def test_by_name_all_launched_ranks_share_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    strategy = pl.strategies.StrategyRegistry.get("colofunc")
    assert strategy.mesh.axis_names == ("dp",) and strategy.mesh.size == 4


def test_arguments_are_told_at_once() -> None:
    with pytest.raises(cf.InputError, match=r"wants mesh=cf\.Mesh"):
        ColofuncStrategy()
    with pytest.raises(cf.InputError, match="evaluate='tracd'; did you mean 'traced'"):
        ColofuncStrategy(mesh=DP, evaluate="tracd")
    with pytest.raises(cf.InputError, match="drop mesh= and plans="):
        ColofuncStrategy(mesh=DP, chain={"mesh": {"dp": 2, "topology": "ideal"}})


def test_a_configured_chain(tmp_path: Path) -> None:
    """Its clipping is the step's; clipping in both places is a clash."""
    torch.manual_seed(0)
    mine, theirs = Tiny(), Tiny()
    mine.load_state_dict(theirs.state_dict())
    fit(mine, ColofuncStrategy(chain={"mesh": {"dp": 2, "topology": "ideal"}, "clip": 0.3}), tmp_path, max_epochs=1)
    fit(theirs, "auto", tmp_path, max_epochs=1, gradient_clip_val=0.3)
    assert mine.seen == pytest.approx(theirs.seen, rel=1e-10)
    with pytest.raises(cf.InputError, match=r"the chain clips to 0\.3"):
        fit(Tiny(), ColofuncStrategy(chain={"mesh": {"dp": 2, "topology": "ideal"}, "clip": 0.3}), tmp_path, gradient_clip_val=1.0)


def on_a_rank(path: str) -> Any:
    module = Evaluated()
    module.load_state_dict(torch.load(f"{path}/start.pt"))
    trainer = fit(module, ColofuncStrategy(mesh=DP, evaluate="traced"), Path(path), max_epochs=1)
    trainer.save_checkpoint(f"{path}/end.ckpt")
    assert len(trainer.strategy.loop.state["params"]["net.3.bias"].parts) == 1  # this rank's only
    return module.seen, float(trainer.callback_metrics["val_loss"])


@pytest.mark.dist
def test_on_real_ranks(tmp_path: Path) -> None:
    start = Evaluated()
    torch.save(start.state_dict(), tmp_path / "start.pt")
    ranks = cf.launch(on_a_rank, 2, str(tmp_path))
    trainer = fit(start, "auto", tmp_path, max_epochs=1)
    assert ranks[0] == ranks[1]
    assert ranks[0][0] == pytest.approx(start.seen, rel=1e-10)
    assert ranks[0][1] == pytest.approx(float(trainer.callback_metrics["val_loss"]), rel=1e-6)
    saved = torch.load(tmp_path / "end.ckpt", weights_only=False)["state_dict"]
    for name, value in start.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-10, atol=1e-10)


def test_the_pages_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "integrations.md").read_text()
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(page.split("```py\n")[1].split("```")[0], names)
    assert float(names["trainer"].callback_metrics["loss"]) < 5
