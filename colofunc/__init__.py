"""colofunc: write a training step for one device, run it on many.

    import colofunc as cf

    mesh = cf.Mesh(dp=2, tp=2)                 # named axes; simulated in this process, or real ranks under torchrun
    step = cf.shard(step_fn, mesh)             # the same numbers, split as costs say
    state = step.init(state, batch)
    state, metrics = step(state, batch)
"""

from colofunc import ext, testing
from colofunc.compiler.staged import Staged
from colofunc.config import configure
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
from colofunc.functional import Batches as Batches
from colofunc.functional import Model as Model
from colofunc.functional import Optimizer as Optimizer
from colofunc.functional import abstract, adapt, clip_by_global_norm, functional, train_step, value_and_grad
from colofunc.functional import batches as batches
from colofunc.functional import gptq as gptq
from colofunc.functional import input_moments as input_moments
from colofunc.functional import lazy as lazy
from colofunc.functional import load as load
from colofunc.functional import lora as lora
from colofunc.functional import pad as pad
from colofunc.functional import save as save
from colofunc.functional import save_pretrained as save_pretrained
from colofunc.functional import schedule as schedule
from colofunc.mesh import Mesh, Topology
from colofunc.mesh.profile import profile_mesh
from colofunc.ops import collectives, debug
from colofunc.ops import moe as moe
from colofunc.ops.dtypes import Policy
from colofunc.ops.seeds import random, random_state, set_random_state
from colofunc.planner.plan import Plan
from colofunc.planner.recompute.policies import every, save_only
from colofunc.plugins import hookimpl, operator, topology
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Cost, Strategy
from colofunc.spec.spec import Spec
from colofunc.transforms.accumulate import accumulate
from colofunc.transforms.checkpoint import checkpoint
from colofunc.transforms.expert_capacity import expert_capacity
from colofunc.transforms.local_stats import local_stats
from colofunc.transforms.offload import offload
from colofunc.transforms.pipeline import pipeline
from colofunc.transforms.precision import precision
from colofunc.transforms.quantize import quantize
from colofunc.transforms.shard import shard
from colofunc.version import __version__ as __version__

__all__ = [
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
    "from_local",
    "functional",
    "gptq",
    "hookimpl",
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
    "set_random_state",
    "shard",
    "testing",
    "topology",
    "train_step",
    "value_and_grad",
]
