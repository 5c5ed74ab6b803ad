"""What a training script needs around the step: modules, gradients and optimizers as functions of trees.

Files, batches and adapters are modules of their own, which `colofunc` imports when they are used.
"""

from colofunc.functional.gradients import clip_by_global_norm, value_and_grad
from colofunc.functional.lazy import lazy
from colofunc.functional.lion_lamb import LAMB, Lion
from colofunc.functional.modules import Model, abstract, functional
from colofunc.functional.optimizers import Optimizer, adapt
from colofunc.functional.schedule import Table, schedule
from colofunc.functional.train import train_step

__all__ = [
    "LAMB",
    "Lion",
    "Model",
    "Optimizer",
    "Table",
    "abstract",
    "adapt",
    "clip_by_global_norm",
    "functional",
    "lazy",
    "schedule",
    "train_step",
    "value_and_grad",
]
