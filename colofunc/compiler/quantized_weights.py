"""Which weights of a step are quantized, and what they are packed to.

    weights = WeightPacking(scheme, ("*.weight",), registry.quantizers)
    weights.meant("up.weight", tensor)            # a glob matches it, and it can be a weight
    weights.packed("up.weight", tensor)           # a `Quantized`; the same one for as long as nobody writes to the tensor

Problem: steps that train and evaluate one model would each pack its frozen weights, and a step would do so again for
each signature. Idea: what a tensor was packed to is remembered beside it, for as long as somebody uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from weakref import WeakValueDictionary

import attrs
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from colofunc import compat
from colofunc.dtensor.roles import give_role, role_of
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import InputError
from colofunc.ops.quantized import Quantized
from colofunc.ops.quantizers import Quantizer, misfit
from colofunc.planner.plan import matches
from colofunc.planner.schemes import SchemeChoice
from colofunc.program.lazy import LazyTensor
from colofunc.program.lazy_packed import packed_lazily

AUTO = "auto"
Schemes = Quantizer | SchemeChoice

# Weight -> {(quantizer, how often the weight had been written to): what it was packed to}. Steps that train and
# evaluate one model share it; it lives as long as one of their transforms.
_SHARED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@attrs.frozen(eq=False)
class WeightPacking:
    """What one transform quantizes. `known`: tensor -> (how often it had been written to, what it was packed to).

    `sketches`: of a search among schemes, whose steps are counted and never run: a tensor is packed without values.
    What lies on ranks is packed all the same, as the layouts of its parts count, and kept here for the next step of the
    search; None: it is no search. `registered`: name -> scheme of all that the plugins of the transform bring, by which
    a weight that comes quantized may lie.
    """

    quantizer: Schemes
    globs: tuple[str, ...]
    registered: Mapping[str, Quantizer]
    sketches: list[Quantized] | None = None
    known: WeakTensorKeyDictionary = attrs.field(factory=WeakTensorKeyDictionary)

    @property
    def name(self) -> str:
        """What the scheme is called."""
        return AUTO if isinstance(self.quantizer, SchemeChoice) else self.quantizer.name

    def matched(self, name: str) -> bool:
        """Whether a glob matches."""
        return any(matches(name, glob) for glob in self.globs)

    def meant(self, name: str, weight: Tensor) -> bool:
        """Whether a glob matches a tensor that can be a weight, neither a vector nor a buffer or state, and that was
        not chosen to stay.

        An argument that is a tensor itself has no name, and may be a batch."""
        if not name or not weight.is_floating_point() or weight.dim() < 2 or role_of(weight) in ("state", "buffer"):
            return False
        return self.matched(name) and self.scheme(name) is not None

    def stays(self, name: str) -> bool:
        """Whether a glob matches a weight that was chosen to stay as it is."""
        if not isinstance(self.quantizer, SchemeChoice) or not self.matched(name):
            return False
        chosen = self.quantizer.known(name)
        return chosen is not None and chosen.option.scheme is None

    def scheme(self, name: str) -> Quantizer | None:
        """The scheme of all weights, or that which was chosen for this one; None: it stays as it is."""
        return self.quantizer.scheme(name) if isinstance(self.quantizer, SchemeChoice) else self.quantizer

    def packed(self, name: str, weight: Tensor) -> Quantized:
        """The weight in the scheme. Raises InputError where it cannot be taken."""
        quantizer = self.scheme(name)
        assert quantizer is not None, "it is meant"
        why = quantizer.refuses(tuple(weight.shape))
        if why:
            raise InputError(
                f"cf.quantize: {name!r} has shape {tuple(weight.shape)}: {why}. Try: globs in where= that leave it "
                "out, or scheme 'int8'"
            )
        version = compat.version(weight)
        known = self.known.get(weight)
        if known is None or known[0] != version:
            if self.sketches is not None and not isinstance(weight, (DTensor, LazyTensor)):
                # Frozen weights are packed while the step is traced, and this is no tensor of that trace.
                with compat.disable_modes(), compat.no_function_modes():
                    without_values = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
                known = self.known[weight] = version, packed(quantizer.named(name), without_values, name)
                return known[1]
            shared = _SHARED.setdefault(weight, WeakValueDictionary())
            result = shared.get((quantizer, version))
            if result is None:
                result = shared[quantizer, version] = packed(quantizer.named(name), weight, name)
            if self.sketches is not None:
                self.sketches.append(result)
            known = self.known[weight] = version, result
        found: Quantized = known[1]
        return found

    def checked(self, name: str, weight: Quantized) -> Quantized:
        """A weight that comes quantized.

        Raises InputError where its numbers are not the scheme's, or its parts do not fit.
        """
        scheme = self.scheme(name) if self.matched(name) else None
        asked = "it to stay as it is" if scheme is None else repr(scheme.name)
        if self.matched(name) and (scheme is None or not has_numbers_of(weight, scheme, self.registered)):
            raise InputError(
                f"cf.quantize: {name!r} is quantized already, as {weight.scheme!r}, and the step asks for {asked}. "
                "Try: the scheme that it has, or the weight that it was quantized from"
            )
        wrong = misfit(weight)
        if wrong:
            raise InputError(
                f"cf.quantize: {name!r} is no weight of shape {weight.shape} in {weight.scheme!r}: {wrong}. Try: a "
                "checkpoint as cf.save writes it, or the weight that it was quantized from"
            )
        return weight

    def rounding(self, name: str) -> Quantizer | None:
        """The scheme that rounds the inputs of a weight's layers; None: they stay as they are."""
        if self.matched(name):
            chosen = self.scheme(name)
            scheme = None if chosen is None else chosen.named(name)
        else:
            scheme = None if isinstance(self.quantizer, SchemeChoice) else self.quantizer
        return scheme if scheme is not None and scheme.rounds_inputs else None

    @property
    def leaves_inputs(self) -> bool:
        """Whether no scheme rounds inputs or divides them by a scale."""
        if isinstance(self.quantizer, SchemeChoice):
            return False  # asked of each weight
        scheme = self.quantizer
        return not scheme.rounds_inputs and scheme.input_scale is None and scheme.by_name is None

    def unmatched(self, names: Iterable[str]) -> str | None:
        """A glob that matches none of these names."""
        names = list(names)
        for glob in self.globs:
            if not any(matches(name, glob) for name in names):
                return glob
        return None


def has_numbers_of(weight: Quantized, scheme: Quantizer, registered: Mapping[str, Quantizer]) -> bool:
    """Whether a weight's numbers are those that the scheme would have given it, as of schemes that differ in what they
    do to inputs. registered: name -> scheme, of those that are known.
    """
    if weight.scheme == scheme.name:
        return True
    of_rows = scheme.by_name is None and not scheme.asks_all_rows and weight.input_scale is None
    own = registered.get(weight.scheme)
    if own is None or own.by_name is not None:
        return False
    return of_rows and (own.form, own.quantize) == (scheme.form, scheme.quantize) and weight.form == scheme.form


def packed(quantizer: Quantizer, weight: Tensor, name: str = "weight") -> Quantized:
    """A weight in a scheme. Of one that is lazy the parts are lazy too: each is made of the rows that are asked for.

    Raises InputError where the weight has NaN or infinite numbers, a lazy one when it is made, or the quantizer breaks
    its format.
    """
    if isinstance(weight, DTensor) and (quantizer.by_name is not None or quantizer.input_scale is not None):
        # columns one after the other, or something of all rows: not where they lie on several ranks
        weight = weight.full()
    with compat.disable_modes(), compat.no_function_modes(), torch.no_grad():
        if isinstance(weight, LazyTensor):
            found = packed_lazily(quantizer, weight, partial(_finite, name))
        else:
            found = _finite(name, quantizer.pack(weight))
    wrong = misfit(found)
    if wrong:
        raise InputError(
            f"cf.quantize: the quantizer {quantizer.name!r} gives {name!r} of shape {tuple(weight.shape)} wrong parts: "
            f"{wrong}. Try: quantize= that returns them so"
        )
    give_role("frozen", found.tensors)
    return found


def _finite(name: str, weight: Quantized) -> Quantized:
    """The weight. Raises InputError where a scale is not finite, as of rows with NaN or infinite numbers."""
    for part in weight.tensors:
        for shard in part.parts if isinstance(part, DTensor) else (part,):
            known = not shard.is_meta and not isinstance(shard, compat.FakeTensor)
            if known and not _all_finite(shard, weight.format.nan if part is weight.scale else None):
                raise InputError(
                    f"cf.quantize: {name!r} has rows with NaN or infinite numbers, of which no scale can be made. Try: "
                    "the weights of an earlier checkpoint; globs in where= that leave it out"
                )
    return weight


def _all_finite(part: Tensor, nan: int | None) -> bool:
    """Whether all numbers of a part are. nan: what stands for one that is not, where they are kept as bits."""
    if nan is not None:
        return not bool((part == nan).any())
    return not part.is_floating_point() or bool(part.isfinite().all())
