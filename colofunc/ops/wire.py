"""Numbers as they travel: groups of them in 8 or 4 bits, each group with a scale, in one message of bytes.

    packed = wire_pack(x, "int8-g256", 4)             # (4, bytes) uint8: row i is for member i
    wire_open(packed, x.shape, torch.float32, ...)    # x again, within `bound`
    wire_sum(packed, (m,), torch.float32, ...)        # the rows widened and added up: what a member makes of what all sent it

Problem: a sum of numbers in 8 bits overflows, and rounds again with each term. Idea: what is sent is packed once, and
summed by who it is for, in the dtype that it had. A row is `numel / n` numbers (the last one filled with zeros), cut
into groups of its own, so that no group is in two messages:

    data of the row's groups, one behind the other | scales in float32, as bytes

    scheme     a number                           |x - x'| for the largest number A of its group
    int8       -127 to 127                        <= A / 254
    int4       -7 to 7, two in a byte             <= A / 14
    fp8        float8 e4m3, A being 448           <= max(|x| / 16, A / 458752)

The scale is A / 127 (7, 448) rounded to float32, and x is divided by that one; a relative 2^-22 of A covers its
rounding. Numbers of a group whose scale is below float32's least are sent as 0. A group with a number that is not
finite arrives as NaN, all of it, so that who looks for such numbers finds them.

Sources: Wang et al. 2023, ZeRO++ (2306.10209), section 3.3: gradients by all-to-all and a sum behind it; Karimireddy et
al. 2019, "Error feedback fixes SignSGD" (1901.09847), algorithm 2: what was not sent is added to what comes next.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

import attrs
import torch
from torch import Tensor

from colofunc import compat
from colofunc.errors import CollectiveError, InputError, near
from colofunc.ops.define import define
from colofunc.ops.facts import Facts
from colofunc.ops.quantized import packed_nibbles as two_in_a_byte
from colofunc.ops.quantized import unpacked
from colofunc.ops.small_floats import e4m3_bits, e4m3_values

SCALE_BYTES = 4
LEAST_GROUP, LARGEST_GROUP = 8, 1 << 16
"""Groups are multiples of 8, so that the scales behind the data begin at a multiple of their size."""


@attrs.frozen
class WireForm:
    """How a number is sent. largest: what the largest of a group becomes. group: numbers that share a scale, if nobody
    says.
    """

    name: str
    bits: int
    largest: float
    group: int


FORMS = {
    form.name: form
    for form in (WireForm("int8", 8, 127.0, 256), WireForm("int4", 4, 7.0, 64), WireForm("fp8", 8, 448.0, 256))
}
_GROUPED = re.compile(r"(?P<form>\w+?)-g(?P<group>\d+)")


@attrs.frozen
class Scheme:
    """A form, and how many numbers share a scale."""

    form: WireForm
    group: int

    @property
    def name(self) -> str:
        return f"{self.form.name}-g{self.group}"

    @property
    def bytes_a_number(self) -> float:
        """Bytes on the wire, scales included."""
        return self.form.bits / 8 + SCALE_BYTES / self.group

    def row_bytes(self, count: int) -> int:
        """Bytes of a row of so many numbers."""
        groups = -(-count // self.group)
        return groups * (self.group * self.form.bits // 8 + SCALE_BYTES)

    def bound(self, x: Tensor) -> Tensor:
        """What each number of a message, x: (m,), is off by at most when it arrives.

        Infinity in a group that is not finite.
        """
        groups = _in_groups(x.reshape(1, -1), self.group)
        largest = groups.abs().amax(2, keepdim=True)
        if self.form.name == "fp8":
            off = torch.maximum(groups.abs() / 16, largest / (448.0 * 1024))
        else:
            off = (largest / (2 * self.form.largest)).expand_as(groups)
        # The scale is rounded to float32, whose least number bounds what is lost below it.
        off = off + largest * 2.0**-22 + self.form.largest * 2.0**-149
        return torch.where(largest.isfinite(), off, torch.inf).flatten()[: x.numel()].reshape(x.shape)


def scheme_of(name: object) -> Scheme:
    """The scheme of a name, such as "int8" or "int8-g128". Raises InputError for any other."""
    if isinstance(name, str):
        found = _GROUPED.fullmatch(name)
        form = FORMS.get(name if found is None else found["form"])
        group = 0 if found is None else int(found["group"])
        if form is not None and found is None:
            return Scheme(form, form.group)
        if form is not None and group % LEAST_GROUP == 0 and LEAST_GROUP <= group <= LARGEST_GROUP:
            return Scheme(form, group)
        if form is not None:
            raise InputError(
                f"cf.quantize(wire={name!r}): {group} numbers cannot share a scale. Try: a multiple of {LEAST_GROUP} "
                f"up to {LARGEST_GROUP}, such as {form.name}-g{form.group}"
            )
    raise InputError(
        f"cf.quantize(wire={name!r}): there is no way to send gradients of that "
        f"name{near(str(name), FORMS, 'schemes')}, with the numbers that share a scale behind it if you like: "
        "'int8-g128'"
    )


# ---- packing ----


def _in_groups(rows: Tensor, group: int) -> Tensor:
    """(n, m) -> (n, groups, group), the last group filled with zeros."""
    n, count = rows.shape
    missing = -count % group
    if missing:
        rows = torch.cat((rows, rows.new_zeros(n, missing)), 1)
    return rows.reshape(n, (count + missing) // group, group)


def _rows(x: Tensor, n: int) -> Tensor:
    """(n, m): all numbers of x in rows of one length, the last one filled with zeros."""
    flat = x.reshape(-1)
    missing = -flat.numel() % n
    if missing:
        flat = torch.cat((flat, flat.new_zeros(missing)))
    return flat.reshape(n, flat.numel() // n)


def _pack(x: Tensor, scheme: str, n: int) -> Tensor:
    how = scheme_of(scheme)
    form = how.form
    groups = _in_groups(_rows(x, n), how.group)
    largest = groups.abs().amax(2)
    # By a tensor: divided by a number, a card multiplies by its rounded inverse, and would give other bits than the
    # host.
    with compat.no_function_modes():  # `cf.testing.float64` would make another dtype of it
        scale = (largest / torch.full_like(largest, form.largest)).to(torch.float32)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    steps = scale.to(groups.dtype).unsqueeze(2)
    relative = (groups / torch.where(steps == 0, torch.ones_like(steps), steps)).clamp(-form.largest, form.largest)
    if form.name == "fp8":
        data = e4m3_bits(relative)
    else:
        whole = relative.round().nan_to_num(0.0)
        data = whole.to(torch.int8).view(torch.uint8) if form.bits == 8 else two_in_a_byte((whole + 7).flatten(1))
    return torch.cat((data.reshape(n, -1), scale.contiguous().view(torch.uint8).reshape(n, -1)), 1)


def _pack_fake(x: Tensor, scheme: str, n: int) -> Tensor:
    return x.new_empty((n, scheme_of(scheme).row_bytes(-(-x.numel() // n))), dtype=torch.uint8)


def _scales(packed: Tensor) -> Tensor:
    """(n, 4 * groups) of bytes -> (n, groups) in float32, which is what is sent whatever dtype is asked for."""
    with compat.no_function_modes():
        return packed.view(torch.float32)


def _widened(packed: Tensor, dtype: torch.dtype, how: Scheme) -> Tensor:
    """(n, numbers of a row with its filling) in `dtype`."""
    n, form = packed.shape[0], how.form
    groups = packed.shape[1] // (how.group * form.bits // 8 + SCALE_BYTES)
    data_bytes = groups * how.group * form.bits // 8
    data, scale = packed[:, :data_bytes], packed[:, data_bytes:]
    if form.name == "fp8":
        numbers = e4m3_values(data.contiguous(), dtype)
    elif form.bits == 8:
        numbers = data.contiguous().view(torch.int8).to(dtype)
    else:
        numbers = unpacked(data.contiguous()).to(dtype) - 7
    steps = _scales(scale.contiguous()).to(dtype)
    return (numbers.reshape(n, groups, how.group) * steps.unsqueeze(2)).reshape(n, groups * how.group)


def _open(packed: Tensor, shape: Sequence[int], dtype: torch.dtype, scheme: str) -> Tensor:
    numel, n = prod(shape), packed.shape[0]
    rows = _widened(packed, dtype, scheme_of(scheme))[:, : -(-numel // n)]
    return rows.reshape(-1)[:numel].reshape(tuple(shape)).clone()


def _sum(packed: Tensor, shape: Sequence[int], dtype: torch.dtype, scheme: str) -> Tensor:
    rows = _widened(packed, torch.promote_types(dtype, torch.float32), scheme_of(scheme))[:, : prod(shape)]
    return rows.sum(0).reshape(tuple(shape)).to(dtype)


def _open_fake(packed: Tensor, shape: Sequence[int], dtype: torch.dtype, scheme: str) -> Tensor:
    if packed.shape[1] != scheme_of(scheme).row_bytes(-(-prod(shape) // packed.shape[0])):
        raise CollectiveError(
            f"colofunc.wire_open: a message of shape {tuple(packed.shape)} is no {tuple(shape)} in {scheme}"
        )
    return packed.new_empty(tuple(shape), dtype=dtype)


def _sum_fake(packed: Tensor, shape: Sequence[int], dtype: torch.dtype, scheme: str) -> Tensor:
    if packed.shape[1] != scheme_of(scheme).row_bytes(prod(shape)):
        raise CollectiveError(
            f"colofunc.wire_sum: rows of shape {tuple(packed.shape)} are no {tuple(shape)} in {scheme}"
        )
    return packed.new_empty(tuple(shape), dtype=dtype)


def _left(
    x: Tensor, packed: Tensor, scheme: str, total: Tensor | None, sent: Tensor | None, index: Tensor | None
) -> Tensor:
    """x without what arrives of it. total: (m,) the sum that this member sends to all, sent: (1, bytes) as it is
    packed, index: which row it is. What arrives as NaN leaves nothing behind, or no later step would be finite.
    """
    left = x - _open(packed, x.shape, x.dtype, scheme)
    if total is not None:
        assert sent is not None and index is not None, "given together"
        rows = _rows(left, packed.shape[0])
        missed = total - _open(sent, total.shape, total.dtype, scheme)
        mine = torch.arange(rows.shape[0], device=rows.device) == index.to(rows.device)
        rows = rows + torch.where(mine.unsqueeze(1), missed, torch.zeros_like(missed))
        left = rows.reshape(-1)[: x.numel()].reshape(x.shape)
    return torch.where(left.isfinite(), left, torch.zeros_like(left))


def _left_fake(
    x: Tensor, packed: Tensor, scheme: str, total: Tensor | None, sent: Tensor | None, index: Tensor | None
) -> Tensor:
    return x.new_empty(x.shape)


wire_pack = define(
    "wire_pack(Tensor x, str scheme, int n) -> Tensor",
    _pack,
    _pack_fake,
    for_compilers=_pack,
    facts=Facts(own_memory=True),
)
wire_open = define(
    "wire_open(Tensor packed, int[] shape, ScalarType dtype, str scheme) -> Tensor",
    _open,
    _open_fake,
    for_compilers=_open,
    facts=Facts(own_memory=True),
)
wire_sum = define(
    "wire_sum(Tensor packed, int[] shape, ScalarType dtype, str scheme) -> Tensor",
    _sum,
    _sum_fake,
    for_compilers=_sum,
    facts=Facts(own_memory=True),
)
define(
    "wire_left(Tensor x, Tensor packed, str scheme, Tensor? total, Tensor? sent, Tensor? index) -> Tensor",
    _left, _left_fake, for_compilers=_left, facts=Facts(own_memory=True),
)  # fmt: skip


# ---- error feedback ----


def _carry(g: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    return g + r, torch.zeros_like(r)


def _carry_fake(g: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(g), torch.empty_like(r)


def _residual(r: Tensor, of: str) -> Tensor:
    return r.clone()


def _residual_fake(r: Tensor, of: str) -> Tensor:
    return torch.empty_like(r)


carry = define(
    "carry(Tensor g, Tensor r) -> (Tensor, Tensor)",
    _carry,
    _carry_fake,
    for_compilers=_carry,
    facts=Facts(own_memory=True),
)
"""What is sent of a gradient and what was left before; and what is left then, which is nothing on one device."""
residual = define(
    "residual(Tensor r, str of) -> Tensor",
    _residual,
    _residual_fake,
    for_compilers=_residual,
    facts=Facts(own_memory=True),
)
"""Where a trace returns what is left of the gradient of a leaf, before `passes.wire` knows what that is."""
CARRY, RESIDUAL = carry.name, residual.name
