"""Gradients are summed over the mesh in bfloat16: half the bytes on the wire, for an error that is known.

    step = narrow_gradients(cf.shard(step_fn, mesh, zero(1, "dp")))        # or in any other order with other transforms

A transform is a record with some of six hooks, each from a build to a build; this one changes the program of one rank.
In front of every sum of gradients over the mesh it puts a cast, and behind it the cast back.

It shows how such a transform is written in forty lines. `cf.quantize(step, wire="int8")` sends a quarter of the bytes,
sums in float32 and can keep what it did not send (`error_feedback=True`).

The error: a term is rounded once, and so is each of the n - 1 sums of n terms, each time by at most a half of
bfloat16's last bit. So every element is off by at most `bound(n)` times the sum of its terms' magnitudes (Higham,
"Accuracy and Stability of Numerical Algorithms", 2002, section 4.2). Numbers are not those of one device, which is why
nobody gets this transform without asking.
"""

import attrs
import torch

import colofunc as cf

UNIT = 2.0**-8
"""Half of the last of bfloat16's 8 bits."""
SUMS = ("colofunc.all_reduce", "colofunc.reduce_scatter")


@cf.hookimpl
def colofunc_transforms():
    return {"narrow_gradients": narrow_gradients}


def narrow_gradients(step_fn=None):
    """The step with gradients summed over the mesh in bfloat16. Also a decorator."""
    return cf.ext.stage(step_fn, cf.ext.Transform("narrow_gradients", rewrite_local=narrowed, behind=("precision",)))


def bound(ranks):
    """What a sum over so many ranks is off by at most, relative to the sum of the magnitudes of its terms."""
    return (1 + UNIT) ** ranks - 1


def narrowed(build):
    """Every sum of gradients in bfloat16."""
    program = build.program
    edit = cf.ext.Editor(program)
    for index, node in enumerate(program.nodes):
        if not sums_gradients(node, program):
            continue
        (term,), (total,) = node.refs, node.results
        narrow_term = edit.new(program.values[term], dtype=torch.bfloat16)
        narrow_total = edit.new(program.values[total], dtype=torch.bfloat16)
        reduced = attrs.evolve(node, args=(cf.ext.Ref(narrow_term), *node.args[1:]), outs=(narrow_total,))
        there, back = (
            cast(node, term, narrow_term, torch.bfloat16),
            cast(node, narrow_total, total, program.values[total].dtype),
        )
        edit.replace(index, there, reduced, back)
    return build.evolve(program=edit.done())


def sums_gradients(node, program):
    """Whether a node sums terms of a gradient that are wider than bfloat16."""
    if node.target not in SUMS or node.args[-1] != "sum":
        return False
    value = program.values[node.results[0]]
    return value.role == "grad" and value.dtype in (torch.float32, torch.float64)


def cast(like, operand, result, dtype):
    """The node that casts a value, from the same line and phase as another node."""
    return attrs.evolve(
        like, target="aten._to_copy.default", args=(cf.ext.Ref(operand),), kwargs=(("dtype", dtype),), outs=(result,)
    )
