"""Scheme "auto": which scheme each weight gets, decided with the whole step.

The chain is finished with one choice after the other (`planner/scheme_search.py`), and of those that fit its budgets
the best is taken. What was taken stands in the plan, so that the same plan asks for no search.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from colofunc.compiler.packed_caches import with_caches
from colofunc.compiler.quantized_weights import AUTO, has_numbers_of
from colofunc.compiler.saved_activations import with_saved
from colofunc.compiler.transform import OpenChoices, Transform
from colofunc.compiler.weight_quantization import QUANTIZE, found_in, transform_of
from colofunc.errors import InputError, PlanError
from colofunc.mesh.sizes import MemoryLimit, parse_room
from colofunc.ops.measured import same_weight
from colofunc.ops.quantized import Quantized
from colofunc.ops.quantizers import Quantizer
from colofunc.planner.plan import matches
from colofunc.planner.scheme_search import CountedSchemes, Picks, choice_of, search
from colofunc.planner.schemes import AS_IT_IS, SchemeErrors, Tried, WeightOptions
from colofunc.planner.weight_seconds import weight_seconds


@attrs.frozen(eq=False)
class SchemeDecision:
    """What "auto" is asked for. `registered`: as in `WeightPacking`."""

    globs: tuple[str, ...]
    weights: tuple[WeightOptions, ...]
    room: MemoryLimit | None
    rise: float | None
    limit_s: float | None
    registered: Mapping[str, Quantizer]
    activations: str | None = None
    caches: tuple[str, ...] = ()

    @staticmethod
    def of(
        globs: tuple[str, ...],
        registered: Mapping[str, Quantizer],
        errors: Any,
        keep: Any,
        budget: Any,
        rise: Any,
        limit_s: Any,
    ) -> SchemeDecision:
        """Raises InputError where something is missing, or is no limit."""
        if not isinstance(errors, SchemeErrors):
            raise InputError(
                f"cf.quantize(scheme='auto', errors={reprlib.repr(errors)}): a choice is made by what was measured. "
                "Try: errors=cf.scheme_errors(weights, cf.sensitivities(loss_fn)(params, batch))"
            )
        for name, limit in (("rise", rise), ("limit_s", limit_s)):
            is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
            if limit is not None and not (is_number and limit >= 0):
                raise InputError(
                    f"cf.quantize(scheme='auto', {name}={limit!r}): give a number, 0 or more. Try: {name}=1e-3"
                )
        room = None if budget is None else parse_room(budget, "cf.quantize(budget=)")
        weights = []
        for weight in errors.kept(keep):
            matched = any(matches(weight.name, glob) for glob in globs)
            stays = weight.stays or f"where={globs!r} leaves it out"
            weights.append(weight if matched else attrs.evolve(weight, options=weight.options[:1], stays=stays))
        return SchemeDecision(globs, tuple(weights), room, rise, limit_s, registered)

    def transform(self) -> Transform:
        asked = {"rise": self.rise, "limit_s": self.limit_s, "activations": self.activations, "caches": self.caches}
        return Transform(QUANTIZE, {"scheme": AUTO, "where": self.globs, **asked}, budget=self.room, open=self.open)

    def open(self, args: tuple[Any, ...]) -> OpenChoices:
        """A state that is quantized already is taken as it is."""
        weights = self.weights
        kept: dict[str, Quantized] = {}
        for argument in args:
            kept |= {name: leaf for name, leaf in found_in(argument) if isinstance(leaf, Quantized)}
        if kept:
            weights = tuple(_as_kept(weight, kept, self.registered) for weight in weights)
        tried: list[Tried] = []
        sketches: list[Quantized] = []
        return OpenChoices(
            partial(self.closed, weights, tried, None),
            partial(self.search, weights, tried),
            partial(self.closed, weights, tried, sketches),
            partial(self.recalled, weights),
        )

    def closed(
        self, weights: tuple[WeightOptions, ...], tried: Sequence[Tried], sketches: list[Quantized] | None, picks: Picks
    ) -> Transform:
        """The transform with these options. tried: what is known so far of others. sketches: as in `WeightPacking`."""
        choice = choice_of(weights, picks, tried)
        notes = (f"schemes of weights: {choice.sentence()}",)
        taken = tuple(choice.schemes.items())
        found = transform_of(
            choice, self.globs, self.registered, sketches, budget=self.room, decided=choice, taken=taken, notes=notes
        )
        return with_saved(with_caches(found, self.caches), self.activations)

    def recalled(self, weights: tuple[WeightOptions, ...], taken: Mapping[str, str]) -> Picks:
        """The choice that a plan says. Raises PlanError where it may not be chosen here."""
        remedy = (
            "Try: errors=, keep= and where= that the plan was made with; the step without a plan, which chooses anew"
        )
        names = [weight.name for weight in weights]
        for name in taken:
            if name not in names:
                raise PlanError(
                    f"cf.quantize(scheme='auto'): the plan has {name!r}, of which nothing was measured here. {remedy}"
                )
        picks = []
        for weight in weights:
            options = [option.name for option in weight.options]
            scheme = taken.get(weight.name)
            if scheme not in options:
                has = "no scheme" if scheme is None else repr(scheme)
                raise PlanError(
                    f"cf.quantize(scheme='auto'): the plan has {has} for {weight.name!r}, and here it may be: "
                    f"{', '.join(options)}. {remedy}"
                )
            picks.append(options.index(scheme))
        error = choice_of(weights, tuple(picks)).error
        if self.rise is not None and error > self.rise:
            raise PlanError(
                f"cf.quantize(scheme='auto', rise={self.rise}): with the schemes of the plan the loss rises by "
                f"{error:.1e}. {remedy}"
            )
        return tuple(picks)

    def search(self, weights: tuple[WeightOptions, ...], tried: list[Tried], lower: Callable[[Any], Any]) -> Picks:
        names = [weight.name for weight in weights]

        def finish(picks: Picks) -> CountedSchemes:
            low = lower(picks)
            choice = choice_of(weights, picks)
            if isinstance(low, str):
                tried.append(Tried(choice.nbytes, choice.error, None, None, low))
                return CountedSchemes(why=low)
            peak_bytes, seconds = low.memory().peak_bytes["device"], low.lanes().end_s
            tried.append(Tried(choice.nbytes, choice.error, peak_bytes, seconds))
            return CountedSchemes(
                peak_bytes, seconds, weight_seconds(low.program, low.priced, low.registry.rule, names)
            )

        return search(weights, finish, self.rise, self.limit_s)


def _as_kept(
    weight: WeightOptions, kept: Mapping[str, Quantized], registered: Mapping[str, Quantizer]
) -> WeightOptions:
    """A weight of a state that is quantized: as it lies there."""
    leaf = next((leaf for name, leaf in kept.items() if same_weight(name, weight.name)), None)
    option = weight.option(AS_IT_IS if leaf is None else leaf.scheme)
    if option is None and leaf is not None:
        # In a scheme that was not measured, beside one of the same numbers that was: of int8, int8-dynamic.
        for one in weight.options:
            if one.scheme is not None and has_numbers_of(leaf, one.scheme, registered):
                option = one
                break
    if option is None:
        return weight  # in a scheme that was not measured; the step says what is wrong
    return attrs.evolve(weight, options=(option,), stays="it lies so in the state")
