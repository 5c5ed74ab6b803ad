"""Where the tokens that attention reads come from, when no leaf of the batch has them: patches of an image, frames of a sound.

    x (b, c, h, w)  ->  conv (b, d, h', w')  ->  view (b, d, s)  ->  ...  ->  q (b, heads, s, e)

Walked backwards from q: whoever can give its result split as its reader wants it passes the wish on to what it reads. Where that ends
tokens arise, and are split.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import colofunc as cf


def origins(program: Any, rules: cf.Rules, wanted: Mapping[int, cf.Layout]) -> dict[int, cf.Layout]:
    """Value -> how it lies, of the first values that have the tokens that are wanted split (value -> layout)."""
    made, todo = program.producers(), list(wanted.items())
    found: dict[int, cf.Layout] = {}
    seen: set[int] = set()
    while todo:
        id, layout = todo.pop()
        if id in seen:
            continue
        seen.add(id)
        node = made.get(id)
        if program.values[id].role in ("param", "frozen") or (node is not None and not node.refs):
            continue  # a table of positions: it is taken as its reader wants it
        way = None if node is None else rules.give(node, node.outs.index(id), layout)
        before = [] if way is None else [(r, lies) for r, lies in zip(node.refs, way.ins, strict=True) if not lies.is_replicated]
        tokens = [r for r, _ in before if program.values[r].role not in ("param", "frozen")]
        todo += before
        if not tokens:
            found[id] = layout
    return found
