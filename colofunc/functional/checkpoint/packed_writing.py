"""Quantized weights of a state as they are written: widened, or in the layout of another library.

    unopened(quantized)                                     # a lazy tensor of its values, which knows what it is made of
    Packing.of("gptq", module, values, names, merges)       # which weights are written so; it says what cannot be
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from colofunc import untrusted
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import InputError, near
from colofunc.functional.adapters import global_value
from colofunc.functional.checkpoint.libraries import adapter_formats
from colofunc.functional.checkpoint.packed_layouts import layouts
from colofunc.functional.checkpoint.packed_tensors import PackedLayout
from colofunc.mesh import Mesh
from colofunc.ops.quantized import Quantized
from colofunc.program.lazy import LazyTensor, lazy_tensor, make
from colofunc.program.lazy_packed import PackedSource, stored_in

QUANTIZATION = "quantization_config"
Rename = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def unopened(value: Tensor | Quantized) -> Tensor:
    """A quantized weight as a lazy tensor of its values; other tensors as they are.

    To make it is collective where it is sharded.
    """
    if not isinstance(value, Quantized):
        return value
    weight = _parts_by(value, lambda part: lazy_tensor(part.shape, part.dtype, partial(global_value, part)))
    return LazyTensor(PackedSource(weight, "the state"), torch.empty(value.shape, dtype=value.dtype, device="meta"))


def _parts_by(weight: Quantized, change: Callable[[Tensor], Tensor]) -> Quantized:
    """The weight with other tensors for its parts."""
    parts: dict[str, Any] = {name: change(part) for name, part in zip(weight.format.parts, weight.parts, strict=True)}
    if weight.input_scale is not None:
        parts["input_scale"] = change(weight.input_scale)
    return attrs.evolve(weight, **parts)


def meshes_of_values(values: Iterable[Tensor | Quantized]) -> set[Mesh]:
    """The meshes on which values lie."""
    found = set()
    for value in values:
        tensors = value.tensors if isinstance(value, Quantized) else (value,)
        found |= {x.mesh for x in tensors if isinstance(x, DTensor)}
    return found


@attrs.frozen(eq=False)
class Packing:
    """What is written in a layout: weights by name, without data yet.

    `skipped`: linear layers that stay as they are.
    """

    layout: PackedLayout | None
    weights: Mapping[str, Quantized]
    skipped: tuple[str, ...]

    @staticmethod
    def of(
        layout: str | None, module: nn.Module, values: Mapping[str, Tensor], names: Sequence[str], merges: Iterable[str]
    ) -> Packing:
        """Raises InputError where there is no such layout, or it cannot hold a weight."""
        if layout is None:
            return Packing(None, {}, ())
        known = layouts()
        if layout not in known:
            raise InputError(f"save_pretrained: there is no layout {layout!r}{near(layout, known, 'layouts')}")
        chosen = known[layout]
        layers = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
        weights = {}
        for name in names:
            stored = stored_in(values[name])
            if stored is None:
                continue
            why = _refusal(chosen, name, stored.weight, layers, set(merges))
            if why:
                raise InputError(f"save_pretrained: {name!r} cannot be written in the layout {layout!r}: {why}")
            weights[name] = stored.weight
        if not weights:
            attempt = "the state of a step under cf.quantize, or layout=None"
            raise InputError(f"save_pretrained: layout={layout!r}, and no weight is quantized. Try: {attempt}")
        return Packing(chosen, weights, tuple(name for name in layers if f"{name}.weight" not in weights))

    def gathered(self, name: str, dtype: torch.dtype | None) -> Quantized:
        """A weight with data, on the host. Collective where it is sharded."""
        weight = _parts_by(self.weights[name], lambda part: make(part).cpu())
        return weight if dtype is None else attrs.evolve(weight, dtype=dtype)

    def to_stored(self, group: Sequence[str], weight: Quantized, rename: Rename) -> dict[str, Tensor]:
        """The tensors of a weight under the names in the file. rename: what plain weights are renamed by."""
        assert self.layout is not None and self.layout.write is not None
        name = group[0]
        stored = rename({name: torch.empty(weight.shape, device="meta")}) if len(group) == 1 else {}
        shapes = [tuple(x.shape) for x in stored.values()]
        if shapes != [weight.shape]:
            raise InputError(
                f"{name!r} is not one tensor in the library's own files, and {self.layout.name!r} has a layout for "
                "single weights only. Try: globs in where= of cf.quantize that leave it out, or layout=None"
            )
        (key,) = stored
        layer = key.removesuffix(".weight")
        return {f"{layer}.{suffix}": x for suffix, x in self.layout.write(name, weight).items()}

    def header(self, stored: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, str]:
        """What the header of a file with these tensors says in the layout."""
        return {} if self.layout is None else self.layout.header(stored, dtype or torch.float32)

    def save_config(self, folder: Path, dtype: torch.dtype | None) -> None:
        """Have the configuration say how weights are kept, where there is one.

        Also that they are no longer quantized.
        """
        path = folder / "config.json"
        if not path.exists():
            return
        said = untrusted.read_json(path)
        before = said.pop(QUANTIZATION, None)
        if self.layout is not None:
            said[QUANTIZATION] = self.layout.config(self.skipped, dtype or torch.float32)
        if said.get(QUANTIZATION) != before:
            path.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")


def _refusal(
    layout: PackedLayout, name: str, weight: Quantized, layers: Mapping[str, nn.Linear], merges: set[str]
) -> str:
    """Why a layout cannot hold a weight, and what to try; "" where it can."""
    if weight.form not in layout.forms or layout.write is None:
        fitting = [repr(one.name) for one in layouts().values() if weight.form in one.forms]
        others = f"layout={' or '.join(fitting)}, or " if fitting else ""
        return f"it is in the format {weight.form!r}. Try: {others}layout=None, which widens it"
    if weight.input_scale is not None:
        return "it has a scale for its inputs, which other libraries fold into other layers. Try: layout=None, which widens it"
    if name in merges:
        apart = " or ".join(repr(known) for known in adapter_formats())
        return f"an adapter is merged into it, so that it would be rounded anew. Try: adapters={apart}, or layout=None"
    if name.removesuffix(".weight") not in layers:
        return "it is not the weight of a linear layer. Try: globs in where= of cf.quantize that leave it out, or layout=None"
    return ""
