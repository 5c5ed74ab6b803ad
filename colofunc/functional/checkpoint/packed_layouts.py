"""Quantized weights as other libraries save them: which tensors of a file are one weight, and in which of our formats.

    packed_entries(folder)["model.layers.0.mlp.up_proj.weight"].packed     # a weight in "nf4_g64", from six tensors of bitsandbytes

Problem: libraries that quantize save a weight as several tensors, under names and in an order of bits of their own.
Idea: a table. A layout says by which names its weights are known, how its tensors are read as the parts of a format,
and how the parts are written. What comes out is an entry like any other, for the weight as it would be unquantized:
names are converted, shapes compared and parts of ranks read as of plain weights. A lazy weight keeps what it was made
of (`PackedSource`), so that `cf.quantize` takes the numbers as they are.

    layout             tensors of the layer "x"                                                  format
    bitsandbytes-nf4   x.weight and x.weight.{absmax, quant_map, quant_state..., nested_...}    nf4_g64
    bitsandbytes-int8  x.weight, x.SCB, x.weight_format                                         int8
    gptq               x.{qweight, qzeros, scales, g_idx}                                       int4
    awq                x.{qweight, qzeros, scales}                                              int4
    pack-quantized     x.{weight_packed, weight_scale, weight_shape, weight_zero_point}         int4
    finegrained-fp8    x.weight, x.weight_scale_inv                                             fp8_g128
    int-quantized      x.weight, x.weight_scale                                                 int8
    float-quantized    x.weight, x.weight_scale                                                 fp8
    torchao-int8       x._weight_qdata, x._weight_scale, x._weight_zero_point                   int8
    torchao-float8     x._weight_qdata, x._weight_scale                                         fp8
    torchao-int4       x._weight_qdata, x._weight_scale, x._weight_zero_point                   int4
    torchao-mxfp8      x._weight_qdata, x._weight_scale                                         mxfp8
    torchao-nvfp4      x._weight_qdata, x._weight_scale, x._weight_per_tensor_scale             nvfp4

The layouts themselves are in `integrations/formats`, and come by the hook `colofunc_packed_layouts`, by which plugins
give more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc import untrusted
from colofunc.errors import CheckpointError, PluginError
from colofunc.functional.checkpoint import plainfile
from colofunc.functional.checkpoint.files import dtype_name, shifted
from colofunc.functional.checkpoint.libraries import whole_stems
from colofunc.functional.checkpoint.packed_tensors import PackedLayout, Tensors
from colofunc.functional.checkpoint.place import Entry
from colofunc.ops.quantized import FORMATS
from colofunc.plugins.registry import formats_registry, own_formats
from colofunc.program.lazy import LazyTensor
from colofunc.program.lazy_packed import PackedSource
from colofunc.spec.regions import Region, extent, take


def layouts() -> dict[str, PackedLayout]:
    """Name -> layout.

    This project's stand first, which are asked first whose a weight is, then those of installed plugins.
    """
    found: dict[str, PackedLayout] = {}
    for name, layout in formats_registry().packed_layouts.items():
        if layout.name != name or layout.form not in FORMATS:
            raise PluginError(
                f"colofunc_packed_layouts: {name!r} is a layout of the name {layout.name!r} and the form "
                f"{layout.form!r}; give it its own name, and one of the forms {', '.join(FORMATS)}"
            )
        unknown = [form for form in layout.forms if form not in FORMATS]
        if unknown:
            raise PluginError(
                f"colofunc_packed_layouts: {name!r} has forms={layout.forms!r} to be written, and there is no form "
                f"{unknown[0]!r}; give a tuple of some of {', '.join(FORMATS)}"
            )
        found[name] = layout
    return found


def _no_name(name: str) -> bool:
    return False


def packed_entries(folder: Path, has: Callable[[str], bool] = _no_name) -> dict[str, Entry]:
    """Name -> tensor of a folder of plain safetensors; tensors that are one quantized weight are one entry.

    has: whether the model that is loaded has a tensor of its own under this name. A layer whose marks it has is its
    own, whatever their dtypes, and a layer that only has names in common with quantized ones stays as it is too. Raises
    CheckpointError that names key and file where tensors of a quantized weight are missing or do not fit, or are in no
    layout of the table.
    """
    found, known = plainfile.entries(folder, whole_stems()), layouts().values()
    layers = _layers(found, known, has)
    if not layers:
        return found
    config = _quantization_config(folder)
    keys = dict.fromkeys(key for layout in known for key in layout.keys)
    for layer, kin in layers.items():
        of_layer = {key: found[f"{layer}.{key}"] for key in keys if f"{layer}.{key}" in found}
        tensors = Tensors(folder, layer, of_layer, config)
        layout = _claiming(kin, tensors)
        if layout is None:
            _check_plain(tensors)
            continue
        entry = _entry(layout, tensors)
        for suffix in layout.keys:
            found.pop(f"{layer}.{suffix}", None)
        found[entry.name] = entry
    return found


def _layers(
    found: Mapping[str, Entry], known: Collection[PackedLayout], has: Callable[[str], bool]
) -> dict[str, list[PackedLayout]]:
    """Layers with a tensor that only quantized weights have, and that is none of the model's own -> the layouts that
    know it.
    """
    layers: dict[str, list[PackedLayout]] = {}
    for name in found:
        for layout in known:
            for mark in layout.marks:
                if name.endswith(f".{mark}") and not has(name):
                    kin = layers.setdefault(name.removesuffix(f".{mark}"), [])
                    kin += [layout] if layout not in kin else []
    return layers


def _claiming(kin: Sequence[PackedLayout], tensors: Tensors) -> PackedLayout | None:
    """The layout that the tensors of a layer are in, of those that know it; None where it is in none.

    This project's are asked first. They tell their weights apart whatever their order, so that a layer that two of them
    claim is damaged: CheckpointError. Raises PluginError where two layouts of plugins claim it.
    """
    own = own_formats().packed_layouts
    ours = [layout for layout in kin if layout.name in own and layout.claims(tensors)]
    if len(ours) > 1:
        one, other = ours[:2]
        beside = f"{tensors.layer}.{_mark_in(tensors, other)}"
        raise tensors.wrong(
            _mark_in(tensors, one), f"is of the layout {one.name!r}, and beside it is {beside!r} of {other.name!r}"
        )
    if ours:
        return ours[0]
    theirs = [layout for layout in kin if layout.name not in own and layout.claims(tensors)]
    if len(theirs) > 1:
        raise PluginError(
            f"colofunc_packed_layouts: {theirs[0].name!r} and {theirs[1].name!r} both claim the tensors of "
            f"{tensors.layer!r} in {tensors.file}, and a weight is in one layout. Try: claims= in one of them that "
            "leaves them out, or only one of their plugins installed"
        )
    return theirs[0] if theirs else None


def _mark_in(tensors: Tensors, layout: PackedLayout) -> str:
    """The first of the marks of a layout that tensors have."""
    return next(mark for mark in layout.marks if mark in tensors.entries)


NUMBERS = ("weight", "weight_packed", "qweight", "_weight_qdata")
"""The tensors that hold packed numbers, in any layout."""


def _check_plain(tensors: Tensors) -> None:
    """Raises CheckpointError where tensors that no layout claims hold packed numbers all the same."""
    weight = tensors.dtype("weight")
    if weight is not None and weight.is_floating_point and weight.itemsize >= 2:
        return
    for key in NUMBERS:
        dtype = tensors.dtype(key)
        if dtype is not None and _packs(dtype):
            others = ", ".join(repr(f"{tensors.layer}.{other}") for other in tensors.entries if other != key)
            raise tensors.wrong(
                key,
                f"is {dtype_name(dtype)} beside {others}, which is no layout of quantized weights that is known; "
                f"known are {', '.join(layouts())}",
                "the folder that it was made of, with its weights unquantized",
            )


def _packs(dtype: torch.dtype) -> bool:
    """Whether numbers of fewer bits are kept in such tensors."""
    return dtype is torch.int32 or (dtype.itemsize == 1 and dtype is not torch.bool)


def _quantization_config(folder: Path) -> Mapping[str, Any]:
    """What the folder's configuration says about quantization; nothing where it has none."""
    path = (folder.parent if folder.is_file() else folder) / "config.json"
    if not path.exists():
        return {}
    try:
        said = untrusted.read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Try: a copy of the folder that is whole") from error
    config = said.get("quantization_config") if isinstance(said, dict) else None
    return config if isinstance(config, dict) else {}


def _entry(layout: PackedLayout, tensors: Tensors) -> Entry:
    """The weight as an entry of float32 values."""
    missing = [key for key in layout.needs if key not in tensors.entries]
    if missing:
        raise tensors.wrong(missing[0], f"is missing, without which {layout.name} weights cannot be read")
    packed = layout.read(tensors)
    stored = PackedSource(packed, f"{tensors.layer!r} in {tensors.file}, as {layout.name} keeps it,")
    whole = Region.whole(packed.shape)
    return Entry(f"{tensors.layer}.weight", packed.shape, packed.dtype, ((whole, stored),), _read, packed=stored)


def _read(stored: PackedSource, picks: Any) -> Tensor:
    """The widened weight at some rows and columns."""
    (first, end), (left, right) = extent(picks[0]), extent(picks[1])
    box = stored.read((slice(first, end), slice(left, right)))
    assert box is not None
    return take(box, [shifted(picks[0], first), shifted(picks[1], left)])


def lazily(entry: Entry) -> LazyTensor:
    """The weight as a lazy tensor in the entry's dtype, which knows that it is stored packed."""
    assert entry.packed is not None
    weight = attrs.evolve(entry.packed.weight, dtype=entry.dtype)
    return LazyTensor(
        attrs.evolve(entry.packed, weight=weight), torch.empty(entry.shape, dtype=entry.dtype, device="meta")
    )
