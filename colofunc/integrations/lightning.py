"""Lightning: `Trainer(strategy=ColofuncStrategy(mesh=cf.Mesh(dp=2, tp=2)))` trains an unmodified LightningModule.

Problem: Lightning calls forward, backward and the optimizer one by one. Idea: `training_step` is traced as a function
of parameters and batch, and the whole update happens where Lightning asks for the loss; the calls after it find nothing
to do. Values go back to the module when Lightning reads it (validation, checkpoints, the end). What `self.log` is given
inside `training_step` comes out of the step as values and is logged then. `self.current_epoch`, `self.global_step` and
`batch_idx` are tensors there, for Python runs only once.

Validation, test and prediction steps are traced likewise and run on the same state, which does not move. Where that
cannot be (Python that looks at values, lists that are filled, metrics that keep state), they run on the plain module,
and one line says why.

`import colofunc.integrations.lightning` makes `Trainer(strategy="colofunc")` known, with one axis `dp` over all ranks.

Every process reads the same batches: a batch is the global one, and the plan splits it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colofunc import env
from colofunc.errors import InputError, TraceError, near
from colofunc.integrations.loop import Clip, Evaluation, TrainingLoop, staging
from colofunc.integrations.module_changes import Snapshot
from colofunc.mesh import Mesh


def _import_lightning() -> Any:
    """`lightning.pytorch`, or `pytorch_lightning` where that is what the program uses (they are different classes)."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        names.reverse()
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ImportError(
        "colofunc.integrations.lightning needs Lightning, which is not installed. Try: pip install lightning"
    )


pl = _import_lightning()

# Hooks between the gradients and the update, which are one program here.
HOOKS = (
    "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "on_before_zero_grad",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step",
)  # fmt: skip
# Callbacks that read or write weights between steps.
CALLBACKS = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging", "ModelPruning", "BaseFinetuning")
# Hooks in which a user's code may read weights while a validation runs.
READING_WHEN = ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end", "model_eval", "model_train")
READING = (*(f"on_validation_{when}" for when in READING_WHEN), *(f"on_test_{when}" for when in READING_WHEN))
PACKAGES = ("lightning", "pytorch_lightning")
PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")
EVALUATE = ("auto", "traced", "plain")
# What of a trainer differs from call to call, and what it gives instead while a step is traced.
COUNTERS = ("current_epoch", "global_step")
VARIES = (
    "callback_metrics", "logged_metrics", "progress_bar_metrics", "is_last_batch", "fit_loop", "optimizers", "strategy",
    "lr_scheduler_configs", "should_stop", "model", "loggers", "logger",
)  # fmt: skip


class TracedTrainer:
    """What `self.trainer` is while `training_step` is traced: the counters are tensors, what varies is refused."""

    def __init__(self, trainer: Any, numbers: Mapping[str, Any]) -> None:
        self._trainer, self._numbers = trainer, numbers

    def __getattr__(self, name: str) -> Any:
        if name in COUNTERS:
            return self._numbers[name]
        if name in VARIES:
            raise InputError(
                f"training_step reads trainer.{name}, which changes from call to call, but Python runs only once. Try: "
                "do that in on_train_batch_end"
            )
        return getattr(self._trainer, name)


class ColofuncStrategy(pl.strategies.Strategy):  # type: ignore[name-defined]
    """Lightning's loop on a staged step.

    mesh, plans: as for `cf.shard`; or chain: a `cf.configure` chain, or what `cf.configure` takes. evaluate: how
    validation, test and prediction steps run: "traced" on the sharded state, "plain" on the module on the CPU, "auto":
    traced where that is possible. Refused with a reason: manual optimization, hooks and callbacks that want gradients
    or change weights, fp16, several optimizers.
    """

    strategy_name = "colofunc"

    def __init__(
        self, mesh: Mesh | None = None, plans: Any = (), chain: Any = None, evaluate: str = "auto", **kwargs: Any
    ) -> None:
        staging(mesh, plans, chain, Clip(), "ColofuncStrategy")  # wrong arguments are told here
        if evaluate not in EVALUATE:
            raise InputError(f"ColofuncStrategy: evaluate={evaluate!r}{near(str(evaluate), EVALUATE, 'ways')}")
        super().__init__(**kwargs)
        self._evaluate = evaluate
        self._evaluations: dict[str, Evaluation | None] = {}  # by step; None: on the plain module
        self._given = (mesh, plans, chain)
        self._loop: TrainingLoop | None = None
        self.local_rank = 0
        self.world_size = 1  # to Lightning this is one process: nothing is to be split or averaged

    # ---- what Lightning asks every strategy ----

    @property
    def mesh(self) -> Mesh:
        return staging(*self._given, Clip(), "ColofuncStrategy")[0]

    @property
    def global_rank(self) -> int:
        return self.mesh.rank

    @property
    def is_global_zero(self) -> bool:
        return self.mesh.is_main

    @property
    def root_device(self) -> torch.device:
        """Where the module and the batches are; the state is where the mesh is."""
        return torch.device("cpu")

    def setup_environment(self) -> None:
        """Nothing: whatever the accelerator, its device is not where the module is."""

    def model_to_device(self) -> None:
        assert self.model is not None, "Lightning connects the module before it sets up"
        self.model.to(self.root_device)

    def barrier(self, name: str | None = None) -> None:
        if dist.is_available() and dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not (dist.is_available() and dist.is_initialized()):
            return obj
        carried = [obj]
        dist.broadcast_object_list(carried, src=src)
        return carried[0]

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Values are global already."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return tensor

    # ---- training ----

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        self._loop = None
        self._evaluations.clear()
        if trainer.state.fn != pl.trainer.states.TrainerFn.FITTING:
            return
        module = self.lightning_module
        _refuse(module, trainer)
        if len(self.optimizers) != 1:
            raise InputError(
                f"configure_optimizers gives {len(self.optimizers)} optimizers; a step has one. Try: parameter groups"
            )
        clip = _clip(trainer)
        _, stage, clip = staging(*self._given, clip, "ColofuncStrategy")
        self._loop = TrainingLoop(module, self.optimizers[0], self._run, stage, clip, self.mesh)

    @property
    def loop(self) -> TrainingLoop:
        if self._loop is None:
            raise InputError("there is nothing that trains. Try: trainer.fit(module)")
        return self._loop

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One batch: the loss, and with it (unless Lightning accumulates) the update."""
        module = self.lightning_module
        batch = args[0]
        # Floats are tensors of a step and as exact as the numbers that they stand for; ints would mean a new trace
        # each.
        rest = [float(arg) if isinstance(arg, int) else arg for arg in args[1:]]
        trainer = module.trainer
        numbers = {"args": rest, **self._counters(trainer)}
        update = not trainer.fit_loop._should_accumulate()
        result = self.loop.step(batch, numbers, divisor=trainer.accumulate_grad_batches, update=update)
        for name, value, options in result["seen"]["logs"]:
            module.log(name, value, **options)
        out = result["seen"]["out"]
        return {**out, "loss": result["loss"]} if isinstance(out, Mapping) else result["loss"]

    # ---- evaluation ----

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated("validation", super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated("test", super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated("predict", super().predict_step, args, kwargs)

    def _evaluated(self, stage: str, on_module: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One batch of an evaluation: the traced step on the state, or the plain one on the module."""
        evaluation = None
        if self._evaluate != "plain" and not kwargs:
            evaluation = self._evaluation_of(stage)
        if evaluation is None:
            self.sync()
            return on_module(*args, **kwargs)
        before = Snapshot(self.lightning_module)
        try:
            return self._traced_evaluation(evaluation, args, before)
        except (TraceError, InputError) as error:
            if self._evaluate == "traced":
                raise
            before.restore()
            self._evaluations[stage] = None
            warnings.warn(
                f"{stage}_step runs on the plain module, on the CPU of each process, because it cannot be traced: "
                f"{error}. Try: return tensors from it and use them in on_{stage}_batch_end; "
                "ColofuncStrategy(evaluate='plain') does not try",
                stacklevel=2,
            )
        self.sync()
        return on_module(*args, **kwargs)

    def _evaluation_of(self, stage: str) -> Evaluation | None:
        """The traced step of a stage; None where it could not be traced before."""
        if stage not in self._evaluations:
            self._evaluations[stage] = Evaluation(
                self.lightning_module, self.mesh, partial(self._run_evaluation, stage), self._loop
            )
        return self._evaluations[stage]

    def _traced_evaluation(self, evaluation: Any, args: Any, before: Snapshot) -> Any:
        module = self.lightning_module
        # The index of the batch is a tensor, as in training; that of the loader, of which there are few, a number.
        numbers = {"args": [float(args[1]), *args[2:]] if len(args) > 1 else [], **self._counters(module.trainer)}
        result = evaluation(args[0], numbers)
        changed = before.changed()
        if changed is not None:
            raise TraceError(f"it changes {changed}, and Python of a traced step runs only once")
        for name, value, options in result["logs"]:
            module.log(name, value, **options)
        return result["out"]

    def _run_evaluation(self, stage: str, module: nn.Module, batch: Any, numbers: Mapping[str, Any]) -> Any:
        context = "val_step_context" if stage == "validation" else f"{stage}_step_context"
        with _traced(module, numbers) as logs, getattr(self.precision_plugin, context)():
            out = getattr(module, f"{stage}_step")(batch, *numbers["args"])
        return {"out": out, "logs": logs}

    def _counters(self, trainer: Any) -> dict[str, float]:
        return {name: float(getattr(trainer, name)) for name in COUNTERS}

    def _run(self, module: nn.Module, batch: Any, numbers: Mapping[str, Any]) -> tuple[Tensor, Any]:
        """`training_step` as it is traced: (loss, {"out": the rest of what it returns, "logs": what it logs})."""
        with _traced(module, numbers) as logs, self.precision_plugin.train_step_context():
            out = module.training_step(batch, *numbers["args"])  # type: ignore[operator]
        loss = out.get("loss") if isinstance(out, Mapping) else out
        if not isinstance(loss, Tensor):
            raise InputError(
                f"training_step returns {type(out).__name__} without a loss. Try: a 0-dim tensor, or a dict with 'loss'"
            )
        rest = {name: value for name, value in out.items() if name != "loss"} if isinstance(out, Mapping) else None
        return loss, {"out": rest, "logs": logs}

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Nothing: the step has done it."""
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """The closure runs the step; the optimizer finds no gradients, and its schedulers see that it was called."""
        result = closure()
        optimizer.step()
        return result

    # ---- where Lightning reads the module ----

    def sync(self) -> None:
        """The module holds the current values. Collective."""
        if self._loop is not None:
            self._loop.write()

    def on_validation_start(self) -> None:
        if _reads_weights(self.lightning_module):
            self.sync()

    def on_train_end(self) -> None:
        self.sync()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.sync()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if self._loop is not None:
            self._loop.write_optimizer()
        state: dict[str, Any] = super().optimizer_state(optimizer)
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict=strict)
        self._forget()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._forget()

    def _forget(self) -> None:
        if self._loop is not None:
            self._loop.forget()
        for evaluation in self._evaluations.values():
            if evaluation is not None:
                evaluation.forget()


def _reads_weights(module: Any) -> bool:
    """Whether hooks of the user run during a validation, in which the module should hold the current values."""
    owners = [module]
    for callback in module.trainer.callbacks:
        if type(callback).__module__.split(".")[0] not in PACKAGES:
            owners.append(callback)
    for hook in READING:
        defaults = [getattr(base, hook, None) for base in (pl.LightningModule, pl.Callback)]
        if any(getattr(type(owner), hook, None) not in defaults for owner in owners):
            return True
    return False


def _clip(trainer: Any) -> Clip:
    if not trainer.gradient_clip_val:
        return Clip()
    return Clip(
        str(getattr(trainer.gradient_clip_algorithm, "value", None) or "norm"), float(trainer.gradient_clip_val)
    )


def _refuse(module: Any, trainer: Any) -> None:
    """Raise InputError for what one program per step cannot do, naming it."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise InputError(
            f"{name} sets automatic_optimization=False; its step cannot be traced as a whole. Try: automatic "
            "optimization"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise InputError(
            f"{name}.training_step takes dataloader_iter; a traced step takes its batch. Try: training_step(self, "
            "batch)"
        )
    _refuse_overrides(name, module, pl.LightningModule)
    for callback in trainer.callbacks:
        if not isinstance(callback, pl.callbacks.LambdaCallback):
            _refuse_overrides(type(callback).__name__, callback, pl.Callback)
    _refuse_precision(trainer.precision_plugin.precision)


def _refuse_overrides(name: str, owner: Any, base: Any) -> None:
    """base: Lightning's class of the module or callback, whose own hooks do nothing."""
    for hook in HOOKS:
        default = getattr(base, hook, None)
        if default is not None and getattr(type(owner), hook) is not default:
            raise InputError(
                f"{name} overrides {hook}, which runs between the gradients and the update; here both are one program. "
                "Try: on_train_batch_end, or a step function of your own with cf.shard"
            )
    if {cls.__name__ for cls in type(owner).__mro__} & set(CALLBACKS):
        raise InputError(
            f"callback {name} reads or writes weights between steps, where a sharded state is not in the module. Try: "
            "drop it, or a step function of your own with cf.shard"
        )


def _refuse_precision(precision: Any) -> None:
    if precision in PRECISIONS:
        return
    why = {
        "16-mixed": "scales gradients outside of the step",
        "16-true": "keeps weights and moments in float16, which has no digits for their updates",
    }.get(str(precision), "replaces layers by others while the module is set up")
    raise InputError(
        f"precision={precision!r} {why}; allowed: {', '.join(PRECISIONS)}. Try: chain={{'precision': 'fp16', ...}} of "
        "the strategy, which keeps float32 masters and the loss scale in the state"
    )


@contextmanager
def _traced(module: Any, numbers: Mapping[str, Any]) -> Iterator[list[Any]]:
    """While the block runs, `log` of the module and of modules inside it writes to the list.

    `trainer` is guarded.
    """
    logs: list[Any] = []
    parameters = inspect.signature(pl.LightningModule.log)

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(value, Tensor | float | int):
            raise InputError(
                f"training_step logs {name!r} as {type(value).__name__}, which keeps state of its own. Try: log a "
                "tensor, or update the metric in on_train_batch_end from what training_step returns"
            )
        options = dict(parameters.bind(module, name, value, *args, **kwargs).arguments)
        for own in ("self", "name", "value"):
            options.pop(own, None)
        logs.append((name, value, options))

    inner = [m for m in module.modules() if isinstance(m, pl.LightningModule)]
    trainer = module.trainer
    try:
        module.trainer = TracedTrainer(trainer, numbers)
        for m in inner:
            m.log = log
        yield logs
    finally:
        module.trainer = trainer
        for m in inner:
            m.__dict__.pop("log", None)


def _over_all_ranks() -> ColofuncStrategy:
    """What `Trainer(strategy="colofunc")` runs on: the batch over all ranks of the launcher; one device without one."""
    launched = dist.is_initialized() or env.launched() is not None
    return ColofuncStrategy(mesh=Mesh(dp=-1 if launched else 1))


pl.strategies.StrategyRegistry.register(
    ColofuncStrategy.strategy_name,
    _over_all_ranks,
    description="One planned step over all launched ranks; ColofuncStrategy(mesh=...) chooses axes and plans",
    override=True,  # a module that is loaded again registers again
)
