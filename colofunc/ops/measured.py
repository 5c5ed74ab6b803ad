"""What was measured of weights' inputs, looked up by the weights' names, for schemes that are calibrated.

    measured = WeightMeasures("cf.gptq", "moments", "cf.input_moments", {"0.weight": (i, i), ...})
    measured.of("params.0.weight", columns=i)          # (i, i)

Problem: what is measured in one step is used in another, whose state may hold the same weights behind further words.
Idea: a name stands for the one measured name that it ends in, or that ends in it.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import Tensor

from colofunc.errors import InputError, near


def same_weight(name: str, other: str) -> bool:
    """Whether two names may be of one weight: one of them has further words in front."""
    return f".{name}".endswith(f".{other}") or f".{other}".endswith(f".{name}")


@attrs.frozen(eq=False)
class WeightMeasures:
    """One tensor for each weight, whose last dim counts the weight's columns.

    `scheme`, `what`, `maker`: what errors call the scheme, the values, and the function that measures them.
    """

    scheme: str
    what: str
    maker: str
    values: Mapping[str, Tensor] = attrs.field(repr=lambda values: f"of {len(values)} weights")

    def has(self, name: str) -> bool:
        """Whether something was measured of a weight."""
        return any(same_weight(name, known) for known in self.values)

    def known(self, name: str) -> str:
        """The name under which a weight was measured.

        Raises InputError where there is none, or where several could be meant.
        """
        fitting = [known for known in self.values if same_weight(name, known)]
        if name in fitting:
            return name
        if len(fitting) > 1:
            several = " and of ".join(repr(known) for known in fitting)
            raise InputError(
                f"{self.scheme}: there are {self.what} of {several}, and each may be meant for {name!r}. Try: "
                f"{self.what} by the names that weights have in the step"
            )
        if not fitting:
            hint = near(name, self.values) or "."
            raise InputError(
                f"{self.scheme}: there are no {self.what} of {name!r}{hint} Try: {self.maker} with the where= of the "
                "step; where= that leaves it out, as what no linear layer reads"
            )
        return fitting[0]

    def of(self, name: str, columns: int) -> Tensor:
        """What was measured of a weight. Raises InputError where it is of a weight with other columns."""
        value = self.values[self.known(name)]
        if value.shape[-1] != columns:
            has = f"{name!r} has {columns} columns, and its {self.what} are {tuple(value.shape)}"
            raise InputError(f"{self.scheme}: {has}. Try: {self.what} of this model")
        return value
