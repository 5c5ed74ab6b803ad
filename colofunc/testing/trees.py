"""Trees of tensors as tests need them: copies, plain values, and a comparison that names the leaf.

>>> compare({"w": torch.ones(2)}, {"w": torch.ones(2)})
0.0
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from colofunc.compiler.differing import judged
from colofunc.compiler.tolerance import HALVES
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import CheckError
from colofunc.program.closeness import TOLERANCE, scaled_difference
from colofunc.program.tracing.tree import map_tensors, walk, walk_keys

AllowedDifference = (
    float | torch.Tensor | None
)  # as a share of max(1, max|leaf|), or for every element; None: not known
NARROW = (*HALVES, torch.float32, torch.complex64)
HINT = "\nTry: step.lower(...).text(), which shows how each of them is computed and moved"
HINT_ROUNDED = "\nTry: the check inside `with cf.testing.float64():`, where rounding hides no mistake and is none"


def plain_copy(tree: Any) -> Any:
    """Copies of all tensors, on CPU and whole: what a check may use up. Collective where leaves are DTensors."""
    return map_tensors(_plain_copy, tree)


def _plain_copy(x: torch.Tensor) -> torch.Tensor:
    whole = x.full() if isinstance(x, DTensor) else x.detach()
    # .clone() keeps what the leaf was differentiated for: the step may read requires_grad.
    return whole.cpu().clone().requires_grad_(x.requires_grad and x.is_leaf)


class LeafTolerances(Protocol):
    """What is known of how far leaves may be off."""

    def of(self, position: int, expected: torch.Tensor) -> float | torch.Tensor | None:
        """Of the tensor at that place among the tensors of the tree, None where nothing is known."""
        ...

    def name(self, position: int) -> str | None:
        """What the plan calls that tensor."""
        ...


def compare(
    got: Any, expected: Any, where: str = "", tolerance: float | None = None, bounds: LeafTolerances | None = None
) -> float:
    """The largest scaled difference of two trees. Raises CheckError that lists the leaves beyond their tolerance.

    bounds: in place of those of the leaves' dtypes, of half precisions and where those do not hold: a leaf may have
    come through a dtype narrower than its own.
    """
    a, b = list(walk(got, where)), list(walk(expected, where))
    if [keys for keys, _ in walk_keys(got)] != [keys for keys, _ in walk_keys(expected)]:
        there, wanted = [path for path, _ in a], [path for path, _ in b]
        odd = [p for p in there if p not in wanted][:4], [p for p in wanted if p not in there][:4]
        raise CheckError(
            f"{where or 'compare'}: the trees differ, unexpected {odd[0]}, missing {odd[1]}, or in another order"
        )
    worst, failed = 0.0, []
    position = -1  # among tensors
    rounded = False
    for (path, x), (_, y) in zip(a, b, strict=True):
        name, derived = path, None
        if isinstance(y, torch.Tensor):
            position += 1
            if bounds is not None:
                derived = partial(bounds.of, position)
                name = bounds.name(position) or path
        try:
            worst = max(worst, compare_leaf(x, y, name, tolerance, derived))
        except CheckError as error:
            failed.append(str(error))
            rounded |= isinstance(y, torch.Tensor) and y.dtype in NARROW
    if failed:
        more = f"\nand {len(failed) - 8} more of {len(b)} leaves" if len(failed) > 8 else ""
        raise CheckError("\n".join(failed[:8]) + more + (HINT_ROUNDED if rounded else "") + HINT)
    return worst


def compare_leaf(
    x: Any,
    y: Any,
    name: str,
    tolerance: float | None = None,
    derived: Callable[[torch.Tensor], AllowedDifference] | None = None,
) -> float:
    """Scaled difference of two leaves. Raises CheckError beyond the tolerance of the reference's dtype."""
    if not isinstance(y, torch.Tensor):
        if x is not y and x != y:
            raise CheckError(f"{name}: {x!r} against {y!r}")
        return 0.0
    if not isinstance(x, torch.Tensor):
        raise CheckError(f"{name}: {x!r} against a tensor of shape {tuple(y.shape)}")
    label = f"{name} [{x.sharding.text()}]" if isinstance(x, DTensor) else name
    whole = (x.full() if isinstance(x, DTensor) else x.detach()).cpu()
    y = (y.full() if isinstance(y, DTensor) else y.detach()).cpu()
    if (whole.shape, whole.dtype) != (y.shape, y.dtype):
        raise CheckError(f"{label}: {tuple(whole.shape)} {whole.dtype} against {tuple(y.shape)} {y.dtype}")
    if not (y.dtype.is_floating_point or y.dtype.is_complex):
        if torch.equal(whole, y):
            return 0.0
        # Whole numbers are exact, but for codes of rounded values (a moment in 8 bits), which have bounds element by
        # element.
        known = derived(y) if tolerance is None and derived is not None else None
        if isinstance(known, torch.Tensor) and judged(whole, y, known)[1]:
            return 0.0
        raise CheckError(f"{label}: {int((whole != y).sum())} of {y.numel()} values differ")
    worst = scaled_difference(whole, y)
    by_dtype = tolerance if tolerance is not None else TOLERANCE.get(y.dtype, 1e-1)
    bound: float | torch.Tensor = by_dtype
    # What is derived for float32 and float64 is no less than their bounds, so it is asked for only where those do not
    # hold.
    if tolerance is None and derived is not None and (y.dtype in HALVES or not worst <= by_dtype):
        known = derived(y)
        bound = by_dtype if known is None else known
    _, fine = judged(whole, y, bound)
    if not fine:
        most = float(bound.max()) if isinstance(bound, torch.Tensor) else bound
        what = "in some element, by its own bound" if isinstance(bound, torch.Tensor) else "of the largest value"
        raise CheckError(f"{label}: differs by {worst:.3g} {what}, allowed {most:.0e}")
    return worst
