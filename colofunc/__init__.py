"""colofunc: write a training step for one device, run it on many.

    import colofunc as cf

    mesh = cf.Mesh(dp=2, tp=2)                 # named axes; simulated in this process, or real ranks under torchrun
    step = cf.shard(step_fn, mesh)             # the same numbers, split as costs say
    state = step.init(state, batch)
    state, metrics = step(state, batch)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from colofunc.dtensor.tensor import DTensor, distribute, from_local
from colofunc.errors import (
    CapacityError,
    CheckError,
    CheckpointError,
    CollectiveError,
    ColofuncError,
    ConfigError,
    ConsumedError,
    InputError,
    MeshError,
    PlanError,
    PluginError,
    PrecisionError,
    ProgramError,
    RuleError,
    SpecError,
    TopologyError,
    TraceError,
)
from colofunc.executors.backend import join
from colofunc.executors.launch import launch
from colofunc.functional.gradients import clip_by_global_norm, value_and_grad
from colofunc.functional.lazy import lazy as lazy
from colofunc.functional.lion_lamb import LAMB, Lion
from colofunc.functional.modules import Model, abstract, functional
from colofunc.functional.optimizers import Optimizer, adapt
from colofunc.functional.schedule import schedule as schedule
from colofunc.functional.train import train_step
from colofunc.mesh import Mesh, Topology
from colofunc.ops import collectives, debug
from colofunc.ops import moe as moe
from colofunc.ops.dtypes import Policy
from colofunc.ops.seeds import random, random_state, set_random_state
from colofunc.plugins import hookimpl, operator, topology
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Cost, Strategy
from colofunc.spec.spec import Spec
from colofunc.version import __version__ as __version__

if TYPE_CHECKING:
    from colofunc import ext, testing
    from colofunc.compiler.staged import Staged
    from colofunc.config import configure
    from colofunc.functional.batches import Batches, batches
    from colofunc.functional.calibration import awq, gptq, input_maxima, input_moments, smoothquant
    from colofunc.functional.load import load
    from colofunc.functional.lora import lora
    from colofunc.functional.padding import pad
    from colofunc.functional.save import save
    from colofunc.functional.save_pretrained import save_pretrained
    from colofunc.functional.scheme_errors import scheme_choice, scheme_errors
    from colofunc.functional.sensitivities import sensitivities
    from colofunc.mesh.profile import profile_mesh
    from colofunc.planner.plan import Plan
    from colofunc.planner.recompute.policies import every, save_only
    from colofunc.transforms.accumulate import accumulate
    from colofunc.transforms.checkpoint import checkpoint
    from colofunc.transforms.expert_capacity import expert_capacity
    from colofunc.transforms.fp8 import fp8
    from colofunc.transforms.local_stats import local_stats
    from colofunc.transforms.offload import offload
    from colofunc.transforms.pipeline import pipeline
    from colofunc.transforms.precision import precision
    from colofunc.transforms.quantize import quantize
    from colofunc.transforms.shard import shard

__all__ = [
    "LAMB",
    "Batches",
    "CapacityError",
    "CheckError",
    "CheckpointError",
    "CollectiveError",
    "ColofuncError",
    "ConfigError",
    "ConsumedError",
    "Cost",
    "DTensor",
    "InputError",
    "Layout",
    "Lion",
    "Mesh",
    "MeshError",
    "Model",
    "Optimizer",
    "Plan",
    "PlanError",
    "PluginError",
    "Policy",
    "PrecisionError",
    "ProgramError",
    "RuleError",
    "Spec",
    "SpecError",
    "Staged",
    "Strategy",
    "Topology",
    "TopologyError",
    "TraceError",
    "abstract",
    "accumulate",
    "adapt",
    "awq",
    "batches",
    "checkpoint",
    "clip_by_global_norm",
    "collectives",
    "configure",
    "debug",
    "distribute",
    "every",
    "expert_capacity",
    "ext",
    "fp8",
    "from_local",
    "functional",
    "gptq",
    "hookimpl",
    "input_maxima",
    "input_moments",
    "join",
    "launch",
    "lazy",
    "load",
    "local_stats",
    "lora",
    "moe",
    "offload",
    "operator",
    "pad",
    "pipeline",
    "precision",
    "profile_mesh",
    "quantize",
    "random",
    "random_state",
    "save",
    "save_only",
    "save_pretrained",
    "schedule",
    "scheme_choice",
    "scheme_errors",
    "sensitivities",
    "set_random_state",
    "shard",
    "smoothquant",
    "testing",
    "topology",
    "train_step",
    "value_and_grad",
]

# Names and their modules that are imported when one is first asked for: the transforms, which bring compiler and
# planner along, and what many steps do without.
_WHEN_USED = {
    "accumulate": "transforms.accumulate",
    "awq": "functional.calibration",
    "Batches": "functional.batches",
    "batches": "functional.batches",
    "checkpoint": "transforms.checkpoint",
    "configure": "config",
    "every": "planner.recompute.policies",
    "expert_capacity": "transforms.expert_capacity",
    "fp8": "transforms.fp8",
    "gptq": "functional.calibration",
    "input_maxima": "functional.calibration",
    "input_moments": "functional.calibration",
    "load": "functional.load",
    "local_stats": "transforms.local_stats",
    "lora": "functional.lora",
    "offload": "transforms.offload",
    "pad": "functional.padding",
    "Plan": "planner.plan",
    "pipeline": "transforms.pipeline",
    "precision": "transforms.precision",
    "profile_mesh": "mesh.profile",
    "quantize": "transforms.quantize",
    "save": "functional.save",
    "save_only": "planner.recompute.policies",
    "save_pretrained": "functional.save_pretrained",
    "scheme_choice": "functional.scheme_errors",
    "scheme_errors": "functional.scheme_errors",
    "sensitivities": "functional.sensitivities",
    "shard": "transforms.shard",
    "smoothquant": "functional.calibration",
    "Staged": "compiler.staged",
}
_MODULES_WHEN_USED = ("ext", "testing")


def __getattr__(name: str) -> Any:
    if name in _MODULES_WHEN_USED:
        return import_module(f"colofunc.{name}")  # which is an attribute from then on
    if name not in _WHEN_USED:
        raise AttributeError(f"module 'colofunc' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"colofunc.{_WHEN_USED[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
