"""Hugging Face: `ColofuncTrainer(model, args, ..., mesh=cf.Mesh(dp=2, tp=2))` is a `transformers.Trainer` on a staged
step.

Problem: the Trainer calls forward, backward, clip and the optimizer one by one. Idea: `compute_loss` (the Trainer's,
yours, or the model's own) is traced as a function of parameters and batch; the whole update happens in `training_step`
of the last batch of an accumulation, and the calls after it find nothing to do. Evaluation runs `prediction_step` on
the same sharded parameters. Values go back to the model to be saved and at the end.

`per_device_train_batch_size` is the size of the global batch: the plan splits it, not the loader. Under torchrun every
process walks the same batches and, once the plan is there, reads its own rows of them (see `own_rows`); rank 0 writes
and logs (see `one_process`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colofunc.compiler.staged import Staged
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import InputError, near
from colofunc.functional.modules import Model
from colofunc.integrations.loop import Clip, TrainingLoop, batch_layouts, model_of, staging, whole_tree
from colofunc.integrations.own_rows import OwnRows, PlacedLoader
from colofunc.mesh import Mesh
from colofunc.spec.layout import Layout
from colofunc.transforms.shard import shard

try:
    import accelerate  # noqa: F401
    import transformers
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError as error:
    raise ImportError(
        "colofunc.integrations.transformers needs transformers and accelerate. Try: pip install transformers accelerate"
    ) from error

from colofunc.integrations.one_process import barrier, one_accelerator, one_process, real_ranks

if not hasattr(Trainer, "_clip_grad_norm"):
    raise ImportError(
        f"ColofuncTrainer needs transformers 5 or newer, not {transformers.__version__}. Try: pip install -U "
        "transformers"
    )


READ = ("own", "all")
# losses of transformers that leave out labels of -100
PER_TOKEN = ("ForCausalLM", "ForMaskedLM", "ForTokenClassification")
CAUSAL = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
# what they take, which all can be padded
TOKENS = {"input_ids", "attention_mask", "token_type_ids", "position_ids", "labels"}
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_OPTIONS = list(inspect.signature(Trainer.__init__).parameters)[3:]  # behind self, model, args


class ColofuncTrainer(Trainer):
    """The Trainer's loop on a staged step.

    mesh, plans: as for `cf.shard`; or chain: a `cf.configure` chain, or what `cf.configure` takes. read: what a process
    of several reads of a map-style data set, "own" rows or "all". Everything else is the Trainer's. Refused with a
    reason: DeepSpeed, FSDP, fp16, callbacks that want gradients.
    """

    def __init__(
        self, *args: Any, mesh: Mesh | None = None, plans: Any = (), chain: Any = None, read: str = "own", **kwargs: Any
    ) -> None:
        given = kwargs.pop("args", args[1] if len(args) > 1 else None)
        given = given or TrainingArguments("tmp_trainer")  # as the Trainer's own
        _refuse(given)
        self._mesh = staging(mesh, plans, chain, Clip(), "ColofuncTrainer")[0]
        given = one_process(given, self._mesh)
        if read not in READ:
            raise InputError(f"ColofuncTrainer: read={read!r}{near(read, READ, 'ways')}")
        self._own = OwnRows(self._mesh) if read == "own" and real_ranks() > 1 else None
        self._staging = (mesh, plans, chain)
        self._loop: TrainingLoop | None = None
        self._norm: Tensor | None = None
        self._evaluation: dict[Any, tuple[Model, Staged]] = {}
        super().__init__(*args[:1], args=given, **dict(zip(_OPTIONS, args[2:])), **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if real_ranks() > 1:
            one_accelerator(self.accelerator, self._own)

    # ---- reading ----

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        if self._own is not None:
            epoch_iterator = map(self._own.placed, epoch_iterator)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        found = super()._get_num_items_in_batch(batch_samples, device)
        return found.full() if isinstance(found, DTensor) else found

    def _read_own(self, layouts: Sequence[Layout], batch: Mapping[str, Any]) -> None:
        """A plan has placed this batch: the next ones are read so, where that can be."""
        processing: Any = self.processing_class
        # rows of other lengths meet at their ends
        if self._own is None or getattr(processing, "padding_side", "right") != "right":
            return
        pad_id = getattr(processing, "pad_token_id", None)
        self._own.found(layouts, batch, self._pads(batch), {} if pad_id is None else {"input_ids": pad_id})

    def _pads(self, batch: Mapping[str, Any]) -> bool:
        """Whether a row without labels counts for nothing: certain of the Trainer's and the models' own losses per
        token only.
        """
        model: Any = self.model
        ours = (
            type(self).compute_loss is Trainer.compute_loss
            and self.compute_loss_func is None
            and self.label_smoother is None
        )
        model_name, loss = type(model).__name__, getattr(model, "loss_type", None)
        known = (loss in PER_TOKEN or (loss is None and model_name in CAUSAL)) and not hasattr(model, "_loss_function")
        mixes = any(isinstance(m, BATCH_NORMS) for m in model.modules())
        # a loss of all tokens, with labels or not
        routes = getattr(getattr(model, "config", None), "output_router_logits", False)
        return ours and known and not mixes and not routes and "labels" in batch and set(batch) <= TOKENS

    # ---- training ----

    def training_step(self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """One batch: the loss, and with the last batch of an accumulation the update."""
        model.train()
        loop = self._loop if self._loop is not None else self._started()
        numbers = {} if num_items_in_batch is None else {"num_items": torch.as_tensor(num_items_in_batch)}
        divisor = 1 if self._is_scaled(num_items_in_batch) else self.current_gradient_accumulation_steps
        planned = bool(loop.layouts)
        found = loop.step(dict(inputs), numbers, divisor=divisor, update=self.accelerator.sync_gradients)
        if not planned:
            self._read_own(loop.layouts, inputs)
        self._norm = found.get("norm")
        loss: Tensor = found["loss"] / divisor
        return loss.to(self.args.device)

    def _started(self) -> TrainingLoop:
        most = self.args.max_grad_norm
        clip = Clip("norm", most) if most is not None and most > 0 else Clip()
        chain = self._staging[2]
        if chain is not None and _clips(chain):
            clip = Clip()
        _, stage, clip = staging(*self._staging, clip, "ColofuncTrainer")
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        self._loop = TrainingLoop(self.model, optimizer, self._run, stage, clip, self._mesh)
        return self._loop

    def _run(self, module: nn.Module, inputs: Mapping[str, Any], numbers: Mapping[str, Any]) -> tuple[Tensor, None]:
        """`compute_loss` as it is traced."""
        with self.compute_loss_context_manager():
            loss = self.compute_loss(module, dict(inputs), num_items_in_batch=numbers.get("num_items"))
        return loss, None

    def _is_scaled(self, num_items: Any) -> bool:
        """Whether the loss is a part of a mean over the whole accumulation already (the Trainer's own rule)."""
        said = getattr(self, "loss_is_scaled_for_ga", None)
        if said is not None:
            return bool(said)
        return bool(self.model_accepts_loss_kwargs and num_items is not None) or self.compute_loss_func is not None

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """The norm that the step has clipped."""
        return self._norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._norm if grad_norm is None else grad_norm

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        for callback in self.callback_handler.callbacks:
            if type(callback).on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step:
                raise InputError(
                    f"callback {type(callback).__name__} overrides on_pre_optimizer_step, which runs between the "
                    "gradients and the update; here both are one program. Try: on_step_end"
                )
        self._stopped()
        self._evaluation.clear()
        result = super()._inner_training_loop(*args, **kwargs)
        self.sync()
        return result

    def _stopped(self) -> None:
        """Values go back; the next step reads model and optimizer again."""
        if self._loop is not None:
            self._loop.write()
            self._loop.write_optimizer()
        self._loop = None

    def sync(self) -> None:
        """The model holds the current values."""
        if self._loop is not None:
            self._loop.write()

    # ---- evaluation ----

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        if self._own is not None:
            dataloader = PlacedLoader(dataloader, self._own)
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """The Trainer's own `prediction_step`, traced, on the parameters where they lie."""
        state = self._loop.state if self._loop is not None and self.is_in_train else None
        key = (prediction_loss_only, tuple(ignore_keys or ()), state is None)
        if key not in self._evaluation:
            self._evaluation[key] = self._evaluator(prediction_loss_only, ignore_keys, state)
        parts, step = self._evaluation[key]
        if state is None:
            found = whole_tree(step((parts.params, parts.buffers), dict(inputs)))
            if self._own is not None and self._own.rows is None:
                self._read_own(batch_layouts(step, (parts.params, parts.buffers), dict(inputs)), inputs)
            return found
        params = {f"module.{name}": value for name, value in state["params"].items()}
        buffers = {f"module.{name}": value for name, value in state["buffers"].items()}
        return whole_tree(step((params, buffers), dict(inputs)))

    def _evaluator(self, loss_only: bool, ignore_keys: list[str] | None, state: Any) -> tuple[Model, Staged]:
        model = model_of(self.model, None if state is None else set(state["params"]))
        predict: Callable[..., Any] = super().prediction_step

        def run(module: nn.Module, inputs: Mapping[str, Any], numbers: Mapping[str, Any]) -> Any:
            return predict(module, dict(inputs), loss_only, ignore_keys)

        def prediction_step(state: Any, inputs: Mapping[str, Any]) -> Any:
            return model.apply(*state, run, inputs, {})[0]

        staged: Staged = shard(prediction_step, self._mesh)
        return model, staged

    # ---- where the Trainer reads or writes the model ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self.sync()
        super().save_model(output_dir, _internal_call)
        if not _internal_call:
            barrier()

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        barrier()  # whoever reads it next, reads all of it

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # that of all ranks, which walk the same loop
            super()._save_rng_state(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._loop is not None:
            self._loop.write_optimizer()
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._loop = None

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self._loop = None

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self._loop is not None:
            self._loop.forget()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: the model keeps the values for reading and writing, the state is where the mesh is."""

    def _prepare_input(self, data: Any) -> Any:
        """A batch goes to the mesh with the step; what is there already, and wanted for metrics, comes back whole."""
        return data.full() if isinstance(data, DTensor) else data


def _clips(chain: Any) -> bool:
    return staging(None, (), chain, Clip(), "ColofuncTrainer")[2].how != "none"


def _refuse(args: TrainingArguments) -> None:
    """Raise InputError for options of the Trainer that clash with a mesh, naming them."""
    clashes = {
        "deepspeed": (args.deepspeed, "the mesh and its plans place the parameters. Try: drop it, and plans=zero(...)"),
        "fsdp": (args.fsdp, "the mesh and its plans place the parameters. Try: drop it, and plans=zero(...)"),
        "parallelism_config": (getattr(args, "parallelism_config", None), "the mesh says this. Try: drop it"),
        "fp16": (
            args.fp16,
            "its loss scale lies outside of the step. Try: bf16=True, or chain={'precision': 'fp16', ...}",
        ),
        "torch_compile": (
            args.torch_compile,
            "the step is a program already. Try: chain={'executor': 'compiled', ...}",
        ),
        "neftune_noise_alpha": (args.neftune_noise_alpha, "its hook draws noise outside of the step. Try: drop it"),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "the plan knows the memory that it takes. Try: low.memory()",
        ),
    }
    for name, (value, why) in clashes.items():
        if value:
            raise InputError(f"TrainingArguments({name}={value!r}) clashes with ColofuncTrainer: {why}")
