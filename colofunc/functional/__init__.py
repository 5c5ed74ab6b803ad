"""What a training script needs around the step: modules, gradients and optimizers as functions of trees."""

from colofunc.functional.batches import Batches, batches
from colofunc.functional.calibration import gptq, input_moments
from colofunc.functional.gradients import clip_by_global_norm, value_and_grad
from colofunc.functional.lazy import lazy
from colofunc.functional.load import load
from colofunc.functional.lora import lora
from colofunc.functional.modules import Model, abstract, functional
from colofunc.functional.optimizers import Optimizer, adapt
from colofunc.functional.padding import pad
from colofunc.functional.pretrained import save_pretrained
from colofunc.functional.save import Saving, save
from colofunc.functional.schedule import Table, schedule
from colofunc.functional.train import train_step

__all__ = [
    "Batches",
    "Model",
    "Optimizer",
    "Saving",
    "Table",
    "abstract",
    "adapt",
    "batches",
    "clip_by_global_norm",
    "functional",
    "gptq",
    "input_moments",
    "lazy",
    "load",
    "lora",
    "pad",
    "save",
    "save_pretrained",
    "schedule",
    "train_step",
    "value_and_grad",
]
