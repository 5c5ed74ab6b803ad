"""What a wish for operators means: mesh axes on factors of their rules.

    Wish("*.mlp.fc", "{tp: o}")              forward operators of mlp.fc: tp on the rule's factor o
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from colofunc.errors import PlanError
from colofunc.mesh import Mesh
from colofunc.planner.plan import parse_axes
from colofunc.planner.sharding.constraints import Constraint
from colofunc.planner.wishes.propagation import Rules
from colofunc.planner.wishes.ranks import Places
from colofunc.planner.wishes.wish import Wish
from colofunc.program.ir import Node, Program
from colofunc.spec.rule import Rule, Strategy


def on_operators(wish: Wish, program: Program, mesh: Mesh, rules: Rules) -> Iterator[tuple[int, Places, Constraint]]:
    """(item, what the wish says of each axis there, its constraint) for each operator that has such factors.

    Raises PlanError where it is about some, and none has.
    """
    wants = list(_factors_wished(wish, mesh))
    met = list(_operators_met(wish, program))
    able = []
    for index, node in met:
        known = _words(rules.rule(node), rules.extra(node))
        if any(known.issuperset(want.values()) for want in wants):
            able.append((index, node))
    if met and not able:
        raise PlanError(_lacks_factors(wish, mesh, [node for _, node in met], rules))

    said: Places = dict(wants[0]) if wants else {}
    if len(wants) > 1:
        said = {}
        for want in wants:
            for axis in want:
                said[axis] = frozenset(other.get(axis, "whole") for other in wants)
    key = ("node", *(tuple(want.items()) for want in wants))
    for index, node in able:
        rule = rules.rule(node)
        says = f"{wish} (rule {rule.text()})" if rule else str(wish)
        constraint = Constraint(
            key, _test_of(wants), says, (), tuple(said), len(said) > 1, lambda axes: _test_of(wants, axes)
        )
        yield len(program.inputs) + index, dict(said), constraint


def _factors_wished(wish: Wish, mesh: Mesh) -> Iterator[dict[str, str]]:
    """For each strategy that a wish names, axis -> factor of the rule, of axes that split anything.

    Raises PlanError where it is none.
    """
    for want in wish.wants:
        pairs = parse_axes(str(want))
        if not pairs:
            raise PlanError(f"{wish}: write a strategy as '{{tp: o, dp: b0}}', each mesh axis on a factor of the rule")
        # The size of an axis that the mesh has not is an error with near names.
        yield {axis: factor for axis, factor in pairs if mesh.axis_size(axis) > 1}


def _operators_met(wish: Wish, program: Program) -> Iterator[tuple[int, Node]]:
    """The operators that a wish is about, with their positions."""
    for index, node in enumerate(program.nodes):
        if node.phase not in wish.phases or not wish.meets(node.path):
            continue
        if wish.targets and node.target not in wish.targets:
            continue
        if not wish.values or any(out in wish.values for out in node.outs):
            yield index, node


def _lacks_factors(wish: Wish, mesh: Mesh, nodes: Sequence[Node], rules: Rules) -> str:
    """What to say where no operator that a wish is about has the factors that it names."""
    texts = set[str]()
    for node in nodes:
        rule = rules.rule(node)
        texts.add(f"{node.target}: {'no rule' if rule is None else rule.text()}")
    line = f" (first at {nodes[0].line})" if nodes[0].line else ""
    return (
        f"{wish} cannot be done on {mesh}: no operator there{line} has these factors ({'; '.join(sorted(texts)[:6])}); "
        "name factors of a rule"
    )


def _words(rule: Rule | None, extra: Iterable[Strategy]) -> set[str]:
    """What an axis can be placed on: factors of the rule, and the patterns of strategies with local code of their own.
    """
    words = set[str]()
    for strategy in extra:
        words.update(word for _, word in strategy.axes)
    if rule is not None:
        words.update(("whole", *rule.sizes))
    return words


def _test_of(wants: Sequence[Mapping[str, str]], axes: tuple[str, ...] | None = None) -> Callable[[Strategy], bool]:
    """The test of a strategy's factors; `axes`: of these alone."""
    tests = []
    for want in wants:
        tests.append([(axis, factor) for axis, factor in want.items() if axes is None or axis in axes])

    def accepts(strategy: Strategy) -> bool:
        factor_of = dict(strategy.axes)

        def is_met(test: Sequence[tuple[str, str]]) -> bool:
            return all(factor_of.get(axis, "whole") == factor for axis, factor in test)

        return any(map(is_met, tests))

    return accepts
