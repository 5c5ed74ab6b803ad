"""Several processes that are one to the Hugging Face Trainer.

Problem: under torchrun the Trainer and accelerate cut every batch into one part per process, wrap the model in DDP, and
gather what processes found; a mesh does all of that by itself. Idea: on real ranks the Trainer gets arguments and an
accelerator that count one process, so every rank reads the same global batches and walks the same loop; which rank
writes files and logs is the mesh's to say. Both are instances of their own: what accelerate knows of the process is
left alone.

    args = one_process(args, mesh)              # args.world_size == 1, args.should_save on rank 0 only
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from colofunc.errors import InputError
from colofunc.functional.reading import can_rebuild
from colofunc.integrations.own_rows import OwnRows
from colofunc.mesh import Mesh

try:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderShard
    from accelerate.utils import DistributedType, recursively_apply
    from transformers.training_args import ParallelMode, TrainingArguments
except ImportError as error:
    raise ImportError(
        "colofunc.integrations.one_process needs transformers and accelerate. Try: pip install transformers accelerate"
    ) from error


# How a loader works, whatever it reads.
_LOADER = (
    "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor",
    "persistent_workers", "in_order",
)  # fmt: skip


def real_ranks() -> int:
    """How many processes there are, as far as they know of one another."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def barrier() -> None:
    if real_ranks() > 1:
        dist.barrier()


class _Arguments:
    """What a `TrainingArguments` says of processes."""

    _mesh_rank: int

    @property
    def world_size(self) -> int:
        return 1

    @property
    def parallel_mode(self) -> Any:
        return ParallelMode.NOT_PARALLEL

    @property
    def process_index(self) -> int:
        return self._mesh_rank

    @property
    def local_process_index(self) -> int:
        state = self.__dict__["distributed_state"]  # of the launcher, where there is one
        return int(state.local_process_index) if state.num_processes > 1 else self._mesh_rank

    def __reduce__(self) -> Any:
        """Saved as what it was made from: `training_args.bin` is read without us."""
        base = type(self).__mro__[2]
        return object.__new__, (base,), {k: v for k, v in self.__dict__.items() if k != "_mesh_rank"}


class _Accelerator(Accelerator):
    """Splits nothing, wraps nothing, gathers nothing. Loaders over map-style data sets read what `own` says."""

    own: OwnRows | None = None
    distributed_type = property(lambda self: DistributedType.NO)
    use_distributed = property(lambda self: False)
    num_processes = property(lambda self: 1)
    process_index = property(lambda self: 0)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Accelerate's own, reading own rows."""
        made = super().prepare_data_loader(data_loader, *args, **kwargs)
        if self.own is None or not isinstance(made, DataLoaderShard) or not can_rebuild(made.base_dataloader):
            return made
        base = made.base_dataloader
        same = {name: value for name in _LOADER if (value := getattr(base, name, None)) is not None}
        return DataLoaderShard(
            self.own.data(base.dataset), made.device, made.rng_types, made.synchronized_generator, _drop_last=made._drop_last,
            _non_blocking=made._non_blocking, batch_sampler=self.own.sampler(base.batch_sampler),
            collate_fn=self.own.collate(base.collate_fn), **same,
        )  # fmt: skip

    def gather(self, tensor: Any) -> Any:
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Accelerate's own, which cuts what the Trainer counts too many in a short last batch; objects are not sent."""
        try:
            recursively_apply(lambda x: x, input_data, error_on_other_type=True)
        except TypeError:
            short = self.gradient_state.end_of_dataloader and self.gradient_state.remainder > 0
            return input_data[: self.gradient_state.remainder] if short else input_data
        return super().gather_for_metrics(input_data)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    def join_uneven_inputs(self, *args: Any, **kwargs: Any) -> Any:
        return nullcontext()


def one_process(args: TrainingArguments, mesh: Mesh) -> TrainingArguments:
    """The arguments for a Trainer whose processes are one.

    Raises InputError where the mesh is another than they are.
    """
    ranks = max(real_ranks(), args.world_size)
    if ranks == 1:
        return args
    if mesh.size != ranks:
        raise InputError(
            f"ColofuncTrainer: {mesh!r} has {mesh.size} ranks, and {ranks} processes were started; make both the same"
        )
    made = copy.copy(args)
    made.__class__ = type(type(args).__name__, (_Arguments, type(args)), {})
    made.__dict__["_mesh_rank"] = mesh.rank
    return made


def one_accelerator(accelerator: Accelerator, own: OwnRows | None = None) -> None:
    """Have this accelerator split, wrap and gather nothing, and its loaders read what `own` says."""
    accelerator.__class__ = _Accelerator
    accelerator.own = own
