"""Strategies whose operands hold an axis on different factors: what plugins with local code of their own start from.

Problem: ring attention holds an axis on the rows of queries and on the columns of keys, SUMMA holds it on inputs here
and on outputs there. No placement of an axis on one factor says that, and yet batch and heads may lie over every other
axis as the operator's rule allows. Idea: the plugin says what is its own, per operand; the rule says the rest.

    # attention   b (g r) s [e], b g [t] [e], b g [t] [f] -> b (g r) s [f], b (g r) s
    rows, keys = {"s": "cp s"}, {"t": "cp t"}
    for way in cf.ext.ways(call, mesh, ins=[rows, keys, keys], outs=[rows, rows]):
        yield way.with_pattern([("cp", "ring")], local, extra_s=..., peak_bytes=...)

The text of a factor is the inside of an einops group: `cp s` are contiguous blocks, `s cp` stripes. `cp _` and `_ cp`
say the same on every mesh, also where an axis is called as the factor is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

from colofunc.errors import RuleError
from colofunc.mesh import Mesh
from colofunc.plugins import build_registry
from colofunc.spec.layout import Atom, Dim, Layout, make_layout
from colofunc.spec.rule import Call, Operand, Rule, Strategy, TensorType
from colofunc.spec.spec import NAMELESS
from colofunc.spec.strategies import build, cost_of, place, placements

OwnAxes = Mapping[str, str]


def ways(
    call: Call,
    mesh: Mesh,
    ins: Sequence[OwnAxes],
    outs: Sequence[OwnAxes | None],
    *,
    open: Collection[str] | None = None,
    rule: Rule | None = None,
) -> Iterator[Strategy]:
    """One strategy, without local code, for each way to place the other axes by the operator's rule.

    `ins`, `outs`: per tensor operand and per result, factor -> how your axes lie in it ("cp s"); {} where they do not.
    `open`: the axes to place beside them; None: all of the mesh that you do not name. `rule`: the operator's, which
    strategies are given that take a third argument, `strategies(call, mesh, rule)`; None: that of colofunc or of an
    installed plugin, so that rules of `plugins=[...]` have to be said. Where one factor has both, the other axes are
    major. Flops are shared among all axes; communication is yours to add to the cost. Nothing is yielded where a size
    does not divide, or where the operator has no rule for this call.
    """
    if rule is None:
        rule = build_registry(()).rule(call)
    if rule is None:
        return
    if len(ins) != len(rule.ins) or len(outs) != len(rule.outs):
        raise RuleError(
            f"{call.target} has {len(rule.ins)} tensor operands and {len(rule.outs)} results ({rule.text()}), you "
            f"speak of {len(ins)} and {len(outs)}; give one dict for each"
        )
    mine = _axes((*ins, *(own for own in outs if own)), rule, mesh)
    others = tuple(
        a for a in mesh.axis_names if a not in mine and mesh.axis_size(a) > 1 and (open is None or a in open)
    )
    seen: set[tuple[object, ...]] = set()
    for placement, passing in placements(rule, mesh, others, orders=False):
        base = build(call, rule, placement, passing)
        try:
            operands = zip(base.ins, rule.ins, call.ins, ins, strict=True)
            into = tuple(_with(layout, operand, typ, own, rule, mesh) for layout, operand, typ, own in operands)
            out = _results(base.outs, rule, call, outs, mesh)
        except _DoesNotDivide:
            continue
        if (into, out) in seen:
            continue
        seen.add((into, out))
        every = (*((axis, "") for axis in mine), *base.axes)
        yield Strategy(base.name, into, out, cost_of(call, rule, into, out, every), None, base.axes)


def _results(
    layouts: Sequence[Layout | None], rule: Rule, call: Call, owns: Sequence[OwnAxes | None], mesh: Mesh
) -> tuple[Layout | None, ...]:
    """`_with` of each result; None where it is no tensor, or nothing is said of it."""
    found: list[Layout | None] = []
    for layout, operand, typ, own in zip(layouts, rule.outs, call.outs, owns, strict=True):
        if layout is None or operand is None or typ is None or own is None:
            found.append(None)
        else:
            found.append(_with(layout, operand, typ, own, rule, mesh))
    return tuple(found)


def local_word(factor: str, text: str) -> str:
    """The word for the local part of a factor in its text: `_`, or else its own name."""
    return NAMELESS if NAMELESS in text.split() else factor


class _DoesNotDivide(Exception):
    pass


def _axes(owns: Sequence[OwnAxes], rule: Rule, mesh: Mesh) -> tuple[str, ...]:
    """The axes that the texts name; checks their words."""
    found: dict[str, None] = {}
    for own in owns:
        for factor, text in own.items():
            if factor not in rule.sizes:
                raise RuleError(f"no factor {factor!r} in the rule {rule.text()}; it has {', '.join(rule.sizes)}")
            for word in text.split():
                if word != local_word(factor, text) and not word.isdigit():
                    mesh.axis_size(word)  # raises on unknown axes, with near names
                    found[word] = None
    return tuple(found)


def _with(layout: Layout, operand: Operand, typ: TensorType, own: OwnAxes, rule: Rule, mesh: Mesh) -> Layout:
    """The layout with the plugin's axes in the local part of its factors."""
    if not own:
        return layout
    has = place(operand, rule, layout.with_pending(())) or {}
    dims = []
    for factors in operand:
        atoms: list[Atom] = []
        for factor in factors:
            dim = has.get(factor) or ((rule.sizes[factor], None),)
            atoms.extend(_inside(dim, factor, own[factor], mesh) if factor in own else dim)
        dims.append(tuple(atoms))
    return make_layout(tuple(dims), typ.shape, layout.pending)


def _inside(dim: Dim, factor: str, text: str, mesh: Mesh) -> Dim:
    """The local rest of a factor, cut as the text says: `cp s` of (dp, 8) is (dp, cp, 4)."""
    outer, (size, owner) = dim[:-1], dim[-1]
    if owner is not None:  # the other axes take all of it
        outer, size = dim, 1
    words, local = text.split(), local_word(factor, text)
    sizes = {word: int(word) if word.isdigit() else mesh.axis_size(word) for word in words if word != local}
    known = prod(sizes[word] for word in words if word != local)
    if words.count(local) != 1:
        raise RuleError(
            f"{text!r} must have {factor!r} itself once, where the local part stands, as in 'axis {factor}'"
        )
    if size % known:
        raise _DoesNotDivide
    atoms: list[Atom] = []
    for word in words:
        if word == local:
            atoms.append((size // known, None))
        elif word.isdigit():
            atoms.append((sizes[word], None))
        else:
            atoms.append((sizes[word], word))
    return (*outer, *(atom for atom in atoms if atom[0] > 1))
