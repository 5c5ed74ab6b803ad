"""What authors of plugins need beside `cf`: transforms, programs, rules, wishes, kernels, and ways to read a step.

    import colofunc as cf

    @cf.hookimpl
    def colofunc_passes():
        return {"my_pass": shorter}

    def shorter(program: cf.ext.Program, mesh: cf.Mesh) -> cf.ext.Program: ...

What people type who train a model is in `cf` itself.
"""

from colofunc.compiler.step_compiler import stage
from colofunc.compiler.transform import Build, InputTiers, OpenChoices, Sharding, Transform, Variant
from colofunc.functional.checkpoint import libraries, packed_tensors
from colofunc.ops import collectives
from colofunc.ops.kernels import Kernel
from colofunc.ops.quantized import Quantized
from colofunc.ops.quantizers import Quantizer
from colofunc.planner.candidate import FinishedProgram
from colofunc.planner.offload.fastest import Offloaded
from colofunc.planner.offload.policies import MemoryPolicy, Room, State
from colofunc.planner.sharding.constraints import Constraint, Constraints
from colofunc.planner.stages import cuts
from colofunc.planner.stages.placements import placed
from colofunc.planner.stages.simulate import Simulated, Span, bytes_of, chrome_events, simulate
from colofunc.planner.wishes import products, reading, tokens
from colofunc.planner.wishes.attention_pattern import AttentionExchange, AttentionPattern
from colofunc.planner.wishes.factor_strategies import ways
from colofunc.planner.wishes.product_pairs import product_pairs
from colofunc.planner.wishes.propagation import Rules, follow
from colofunc.planner.wishes.wish import NamedPlan, Wish
from colofunc.plugins import hookimpl, operator
from colofunc.plugins.hints import LibraryHint
from colofunc.plugins.registry import schedule_named
from colofunc.program.actions import Action, ActionTable, check_table, linear_order
from colofunc.program.check import check_program
from colofunc.program.editor import Editor
from colofunc.program.ir import Loop, Node, Program, Ref, Value
from colofunc.program.pipeline_schedule import Schedule, StageCosts
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Call, Cost, Rule, Strategy
from colofunc.spec.rules import local
from colofunc.spec.rules.attention_call import AttentionCall
from colofunc.spec.rules.pattern import pattern

__all__ = [
    "Action",
    "ActionTable",
    "AttentionCall",
    "AttentionExchange",
    "AttentionPattern",
    "Build",
    "Call",
    "Constraint",
    "Constraints",
    "Cost",
    "Editor",
    "FinishedProgram",
    "InputTiers",
    "Kernel",
    "Layout",
    "LibraryHint",
    "Loop",
    "MemoryPolicy",
    "NamedPlan",
    "Node",
    "Offloaded",
    "OpenChoices",
    "Program",
    "Quantized",
    "Quantizer",
    "Ref",
    "Room",
    "Rule",
    "Rules",
    "Schedule",
    "Sharding",
    "Simulated",
    "Span",
    "StageCosts",
    "State",
    "Strategy",
    "Transform",
    "Value",
    "Variant",
    "Wish",
    "bytes_of",
    "check_program",
    "check_table",
    "chrome_events",
    "collectives",
    "cuts",
    "follow",
    "hookimpl",
    "libraries",
    "linear_order",
    "local",
    "operator",
    "packed_tensors",
    "pattern",
    "placed",
    "product_pairs",
    "products",
    "reading",
    "schedule_named",
    "simulate",
    "stage",
    "tokens",
    "ways",
]
