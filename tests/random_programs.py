"""Random programs: source lines of operators, views and in-place writes, drawn from a seed.

Problem: hand-written cases hold what their author thought of. Idea: lines are drawn one at a time and run at once on real
tensors, so a line that torch itself refuses is dropped, and shapes are known to who draws the next. A program is text:
what a failure prints runs as it stands.

>>> print(draw(7).source)          # the same lines for the same seed
v3 = v0.transpose(0, 1)
v4 = v3.clone()
v4[1:].mul_(0.5)
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Line = Callable[["Drawing"], str | None]

SPACE: Mapping[str, Any] = {"torch": torch, "F": F}
SIZES = (1, 2, 3, 4, 4, 6)
MOST_ELEMENTS = 600


@attrs.frozen
class RandomProgram:
    """`source` reads the tensors v0, v1, ... of `inputs`; `results` are the names that a function of it returns."""

    seed: int
    source: str
    inputs: tuple[Tensor, ...]
    results: tuple[str, ...]

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        env = dict(SPACE) | {f"v{i}": x for i, x in enumerate(inputs)}
        exec(compile(self.source, f"random_program_{self.seed}.py", "exec"), env)
        return {name: env[name] for name in self.results}

    def on_positions(self, *inputs: Tensor) -> dict[str, Tensor]:
        return self(*inputs)

    def __str__(self) -> str:
        shapes = "".join(f"# v{i}: {x.dtype} {tuple(x.shape)} {x.stride()}\n" for i, x in enumerate(self.inputs))
        return f"# seed {self.seed}\n{shapes}{self.source}# returns {', '.join(self.results)}"


def in_other_memory(x: Tensor, how: int) -> Tensor:
    """The same values as a caller may have them: as they are, transposed in memory, with gaps, or in memory that others share."""
    if how == 1 and x.dim() > 1:
        return x.mT.contiguous().mT
    if how == 2:
        return torch.stack([x, x + 1], -1)[..., 0]
    return torch.cat([x.flatten(), x.flatten()])[x.numel() :].view(x.shape) if how == 3 else x.clone()


class Drawing:
    """The program so far, and the tensors that it made."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.env: dict[str, Tensor] = {}
        self.lines: list[str] = []
        self.given: list[str] = []
        self.fixed: set[int] = set()  # storages that no line may write to: the inputs'
        self.count = 0

    def add_input(self, x: Tensor) -> None:
        name = self.name()
        self.given.append(name)
        self.env[name] = x
        self.fixed.add(storage_of(x))

    def name(self) -> str:
        self.count += 1
        return f"v{self.count - 1}"

    def one_in(self, n: int) -> bool:
        return self.rng.randrange(n) == 0

    def pick(self, where: Callable[[Tensor], bool] = lambda x: True) -> str | None:
        """A tensor, one of the youngest rather than an old one."""
        names = [name for name, x in self.env.items() if where(x)]
        if not names:
            return None
        young = names[-4:] if self.rng.random() < 0.6 else names
        return self.rng.choice(young)

    def float_like(self, shape: torch.Size) -> str | None:
        """A float tensor that can be broadcast to `shape`."""

        return self.pick(lambda x: x.dtype == torch.float64 and broadcasts(x.shape, shape))

    def target(self) -> str | None:
        """A float tensor that may be written to: none of the inputs, each element in a place of its own."""
        return self.pick(lambda x: x.dtype == torch.float64 and storage_of(x) not in self.fixed and not overlaps_itself(x))

    def dim(self, x: Tensor) -> int:
        return self.rng.randrange(-x.dim(), x.dim())

    def try_line(self, line: str) -> bool:
        """Run a line; whether torch took it."""
        self.lines.append(line)
        if self.run(line):
            return True
        self.lines.pop()
        # The line may have written something before it failed.
        self.env = {name: self.env[name] for name in self.given}
        for earlier in self.lines:
            self.run(earlier)
        return False

    def run(self, line: str) -> bool:
        env: dict[str, Any] = dict(SPACE) | self.env
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                exec(line, env)
            known = {storage_of(x) for x in self.env.values()}
            self.env = {name: x for name, x in env.items() if name[0] == "v" and isinstance(x, Tensor)}
            fresh = [x for x in self.env.values() if storage_of(x) not in known]
            # A loss keeps its terms' memory, where a view could read what nobody wrote.
            if any(x.untyped_storage().nbytes() > x.numel() * x.itemsize for x in fresh):
                return False
            return all(x.numel() <= MOST_ELEMENTS and bool(torch.isfinite(x).all()) for x in self.env.values())
        except Exception:
            return False


def storage_of(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def places(x: Tensor) -> list[int]:
    """Where in its storage each element lies."""
    offsets = [x.storage_offset()]
    for size, stride in zip(x.shape, x.stride(), strict=True):
        offsets = [o + i * stride for o in offsets for i in range(size)]
    return offsets


def overlaps_itself(x: Tensor) -> bool:
    return len(set(places(x))) < x.numel()


def reads_what_it_writes(into: Tensor, x: Tensor) -> bool:
    """Whether two tensors share memory without being the same elements in the same order: torch does not say what is written then."""
    if storage_of(into) != storage_of(x):
        return False
    return places(into) != places(x) and bool(set(places(into)) & set(places(x)))


def broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(shape, to) == to
    except RuntimeError:
        return False


# ---- views ----


def view(d: Drawing) -> str | None:
    name = d.pick()
    if name is None:
        return None
    x = d.env[name]
    kinds = [
        f".view({shape_of(d, x.numel())})", f".reshape({shape_of(d, x.numel())})", ".unsqueeze(0)", ".detach()",
        f".view_as({name})",
    ]  # fmt: skip
    if x.dim():
        dim, size = d.dim(x), max(x.shape[d.dim(x)], 1)
        start, end, step = d.rng.randrange(size), d.rng.randrange(size + 1), d.rng.choice((1, 1, 2))
        order = d.rng.sample(range(x.dim()), x.dim())
        kinds += [
            f".transpose({dim}, {d.dim(x)})", f".permute({order})", f".select({dim}, {d.rng.randrange(size)})",
            f".narrow({dim}, {start}, {d.rng.randrange(1, size + 1)})", f"[{start}:{end}:{step}]", f"[..., {start}:]",
            f"[..., ::{step}]", f".unfold({dim}, {d.rng.randrange(1, size + 1)}, {step})", f".unbind({dim})[-1]",
            f".chunk(2, {dim})[0]", f".unsafe_chunk(2, {dim})[-1]", f".split({d.rng.randrange(1, size + 1)}, {dim})[-1]",
            f".squeeze({dim})",
            ".squeeze()",
            f".unsqueeze({dim})", f".expand({expanded(d, x)})", ".flatten()", f".movedim({dim}, {d.dim(x)})", ".t()",
            ".mT",
            f".unflatten({dim}, (-1, {d.rng.choice((1, 2, 3))}))", ".T", f".expand_as(v{d.rng.randrange(d.count)})",
        ]  # fmt: skip
    if x.dim() > 1:
        kinds += [".diagonal()", f".diagonal({d.rng.choice((-1, 1))}, -2, -1)"]
    if x.dtype == torch.float64:
        kinds += [".view(torch.int64)", ".view(torch.float64)"]
    kinds += [strided(d, x)] * 2
    return f"{d.name()} = {name}{d.rng.choice(kinds)}"


def shape_of(d: Drawing, numel: int) -> str:
    """Sizes with that product, one of them perhaps -1."""
    sizes: list[int] = []
    if numel == 0:
        return f"{d.rng.choice(([0], [0, 3], [2, 0], [3, 0, 2]))}"
    while numel > 1 and len(sizes) < 3:
        divisor = d.rng.choice([k for k in range(1, numel + 1) if numel % k == 0])
        sizes.append(divisor)
        numel //= divisor
    sizes.append(numel)
    if d.one_in(3):
        sizes[d.rng.randrange(len(sizes))] = -1
    return f"{sizes}"


def expanded(d: Drawing, x: Tensor) -> str:
    sizes = [d.rng.choice((2, 3, -1)) if n == 1 else n for n in x.shape]
    return f"{[2, *sizes] if d.one_in(3) else sizes}"


def strided(d: Drawing, x: Tensor) -> str:
    """Sizes and strides within the storage, or a permutation of the tensor's own."""
    if d.one_in(2) and x.dim():
        order = d.rng.sample(range(x.dim()), x.dim())
        return f".as_strided({[x.shape[i] for i in order]}, {[x.stride(i) for i in order]})"
    room = x.untyped_storage().nbytes() // x.itemsize
    sizes = [d.rng.choice(SIZES) for _ in range(d.rng.randrange(3))]
    strides = [d.rng.choice((0, 1, 1, 2, 3, 4)) for _ in sizes]
    reach = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    return f".as_strided({sizes}, {strides}, {d.rng.randrange(max(room - reach, 1))})"


# ---- new tensors ----


def copy(d: Drawing) -> str | None:
    name = d.pick()
    if name is None:
        return None
    kinds = [
        ".clone()", ".clone(memory_format=torch.contiguous_format)", ".contiguous()", " * 1", ".flip(0)", ".roll(1, 0)",
        ".to(torch.float64)", ".tile(2)", ".repeat_interleave(2, 0)", ".clone().detach()", ".fliplr()", ".rot90()",
        ".ravel()",
    ]  # fmt: skip
    if d.env[name].dim() == 4:
        kinds += [f".{how}(memory_format=torch.channels_last)" for how in ("contiguous", "to", "clone")]
    return f"{d.name()} = {name}{d.rng.choice(kinds)}"


def join(d: Drawing) -> str | None:
    name = d.pick(lambda x: x.dim() > 0)
    if name is None:
        return None
    shape = d.env[name].shape
    other = d.pick(lambda x: x.shape == shape)
    return f"{d.name()} = torch.{d.rng.choice(('cat', 'stack', 'hstack'))}([{name}, {other}])"


def empty(d: Drawing) -> str | None:
    name = d.pick(lambda x: x.dtype == torch.float64)
    if name is None:
        return None
    kinds = [
        f"torch.zeros_like({name})", f"{name}.new_zeros({name}.shape)", f"torch.full_like({name}, 0.5)",
        f"torch.ones({name}.shape, dtype=torch.float64)",
    ]  # fmt: skip
    return f"{d.name()} = {d.rng.choice(kinds)}"


def one_operand(d: Drawing) -> str | None:
    name = d.pick(lambda x: x.dtype == torch.float64)
    if name is None:
        return None
    dim = d.dim(d.env[name]) if d.env[name].dim() else 0
    kinds = [
        "sin()", "tanh()", "sigmoid()", "abs()", "neg()", "relu()", "clamp(-1, 1)", f"softmax({dim})", f"sum({dim})",
        "sum()", "mean()",
        f"cumsum({dim})", f"amax({dim})", f"sum({dim}, keepdim=True)", "tril()", f"sort({dim}).values",
        f"logsumexp({dim})",
        f"index_select({dim}, torch.tensor([0, 0]))", f"max({dim})[0]", "square()", f"norm(dim={dim})",
        f"var({dim}, correction=0)", f"log_softmax({dim})", f"cumprod({dim})", f"prod({dim})", f"topk(1, {dim}).values", f"diff(dim={dim})",
        f"logcumsumexp({dim})", "triu()", f"std({dim}, correction=0)", f"argmax({dim})", f"median({dim}).values",
        f"gather({dim}, torch.zeros({list(d.env[name].shape)}, dtype=torch.int64))", "exp()",
    ]  # fmt: skip
    return f"{d.name()} = {name}.{d.rng.choice(kinds)}"


def layer(d: Drawing) -> str | None:
    """A function of `torch.nn.functional`, of a tensor with the dims that it wants."""
    name = d.pick(lambda x: x.dtype == torch.float64 and x.dim() > 1)
    if name is None:
        return None
    shape = d.env[name].shape
    half = "dtype=torch.float64) * 0.5"
    # Its results lie as the kernel of the device and the version of torch gives them.
    attention = "F.scaled_dot_product_attention({0}, {0}, {0}).contiguous()"
    kinds = [
        "F.gelu({0})", "F.silu({0})", "F.softplus({0})", "F.layer_norm({0}, {0}.shape[-1:])", "F.pad({0}, (1, 1))",
        "F.pad({0}, (0, 1, 1, 0))",
        "F.normalize({0} + 2, dim=-1)", attention, "F.glu({0}, -1)",
        attention.replace("{0})", "{0}, is_causal=True)"), "F.mse_loss({0}, {0} * 0.5)", "torch.fft.fft({0}).real",
        "F.rms_norm({0}, {0}.shape[-1:])", "torch.kron({0}, {0})", f"F.linear({{0}}, torch.ones(3, {shape[-1]}, {half})",
    ]  # fmt: skip
    if len(shape) == 2:
        rows = f"torch.zeros({shape[0]}, dtype=torch.int64)"
        kinds += [
            "F.embedding(torch.tensor([[0, 1, 0]]), {0})", f"F.cross_entropy({{0}}, {rows})", f"F.nll_loss({{0}}.log_softmax(1), {rows})",
            "torch.outer({0}[0], {0}[:, 0])", "F.batch_norm({0}, None, None, training=True)", "torch.addmm({0}[0], {0}, {0}.mT @ {0})",
        ]  # fmt: skip
    if len(shape) == 3:
        kinds += [
            f"F.conv1d({{0}}, torch.ones(2, {shape[1]}, 2, {half})", "F.avg_pool1d({0}, 2)", "F.max_pool1d({0}, 2)",
            "torch.bmm({0}, {0}.mT)",
            "F.interpolate({0}, scale_factor=2)", "F.group_norm({0}, 1)",
            f"F.conv1d({{0}}, torch.ones(2, {shape[1]}, 1, {half}, padding=1)",
        ]  # fmt: skip
    if len(shape) == 4:
        kinds += [
            f"F.conv2d({{0}}, torch.ones(2, {shape[1]}, 1, 2, {half})", "F.avg_pool2d({0}, (1, 2))", "F.max_pool2d({0}, (2, 1))",
            "F.unfold({0}, (1, 2))", "F.group_norm({0}, 1)", "F.pixel_shuffle({0}, 2)", "F.adaptive_avg_pool2d({0}, 1)",
        ]  # fmt: skip
    return f"{d.name()} = {d.rng.choice(kinds).format(name)}"


def random_numbers(d: Drawing) -> str | None:
    """A function that draws: the same numbers on one device and on a mesh, others than torch itself draws."""
    name = d.pick(lambda x: x.dtype == torch.float64)
    if name is None:
        return None
    forms = ["F.dropout({0}, 0.5)", "torch.rand_like({0})", "{0} + torch.randn({0}.shape, dtype=torch.float64)"]
    return f"{d.name()} = {d.rng.choice(forms).format(name)}"


def two_operands(d: Drawing) -> str | None:
    name = d.pick(lambda x: x.dtype == torch.float64)
    other = None if name is None else d.float_like(d.env[name].shape)
    if other is None:
        return None
    forms = [
        "{0} + {1}", "{0} * {1}", "{0} - {1}", "torch.where({0} > 0, {0}, {1})", "torch.maximum({0}, {1})",
        "{0} @ {1}", "{0} @ {1}.mT",
    ]  # fmt: skip
    forms += [
        "torch.lerp({0}, {1}, 0.25)", "torch.einsum('...i,...i->...', {0}, {1})", "F.linear({0}, {1})",
        "torch.add({0}, {1}, alpha=2)",
    ]  # fmt: skip
    return f"{d.name()} = {d.rng.choice(forms).format(name, other)}"


def write(d: Drawing) -> str | None:
    """A write in place to a whole tensor."""
    into = d.target()
    if into is None:
        return None
    other = d.float_like(d.env[into].shape)
    if other is None or reads_what_it_writes(d.env[into], d.env[other]):
        other = "0.5"
    some = "[{0} > 0.5] = 0.25" if d.env[into].dim() else "[...] = 0.25"  # torch asks for the value of a mask without dims
    forms = [
        "{0}.add_({1})", "{0}.mul_({1})", "{0}.copy_(torch.as_tensor({1}))", "{0} += {1}", "{0} -= {1}",
        "{0}[...] = {1}", "{0}.fill_(0.25)",
        "{0}.zero_()", "{0}.neg_()", "{0}.clamp_(min=0)", "{0}.sin_()", "{0}.masked_fill_({0} > 0, 0.5)", "{0}" + some,
        "{0}.relu_()", "{0}.tril_()", "{0}.fill_diagonal_(0.5)",
        "{0}.lerp_(torch.as_tensor({1}).double().expand({0}.shape), 0.5)",
        "{0}.addcmul_({0}, {0}, value=0.5)", "{0}.cumsum_(0)", "torch._foreach_add_([{0}], 1.0)",
        "torch.mul({0}, {1}, out={0})",
        "torch.sin({0}, out={0})", "{0}.data.mul_({1})", "F.relu({0}, inplace=True)", "{0}.detach().add_({1})",
        "{0}.sub_({1}, alpha=2)",
        "{0}.t_().mul_({1})", "{0}.index_fill_(0, torch.tensor([0]), 0.5)", "{0}.floor_()", "{0}.copy_({0}.flip(0))",
    ]  # fmt: skip
    return d.rng.choice(forms).format(into, other)


def write_part(d: Drawing) -> str | None:
    """A write in place to some elements of a tensor."""
    into = d.target()
    if into is None or not d.env[into].dim():
        return None
    x = d.env[into]
    size = max(x.shape[0], 1)
    rows = d.rng.sample(range(size), d.rng.randrange(1, size + 1))
    forms = [
        f"{into}[{rows}] = 0.5", f"{into}[{rows}] *= 2", f"{into}[1:] += 1", f"{into}[..., 0] = 0.25",
        f"{into}[::2].mul_(0.5)",
        f"{into}.select(-1, 0).neg_()", f"{into}.unfold(0, 1, 1).add_(1)", f"{into}.diagonal().zero_()",
        f"{into}.mT[0] = 1.0",
        f"{into}.index_add_(0, torch.tensor({rows}), {into}[{rows}].clone(), alpha=0.5)",
        f"{into}.view(-1)[1:].sub_(1)",
        f"{into}.index_copy_(0, torch.tensor({rows}), {into}[{rows}].sin())", f"{into}.flatten()[0] = 0.5",
        f"{into}.unsqueeze(0).add_(0.5)",
        f"{into}.scatter_(0, torch.zeros({[1, *x.shape[1:]]}, dtype=torch.int64), 0.5)",
        f"torch.sin({into}[:1], out={into}[-1:])",
        f"{into}.index_put_((torch.tensor({rows}),), torch.tensor(0.5, dtype=torch.float64), accumulate=True)",
        f"{into}.chunk(2)[0].add_(1)", f"{into}.transpose(0, -1).select(0, 0).fill_(0.5)",
        f"{into}[None, :, ...].mul_(2)",
        f"{into}.as_strided({[x.shape[0]]}, {[x.stride(0)]}).add_(1)", f"{into}.view(torch.int64)[..., :1].zero_()",
        f"{into}.reshape(-1)[:1] += 1", f"{into}.squeeze().add_(0.25)", f"{into}.movedim(0, -1)[..., 0] *= 0.5",
    ]  # fmt: skip
    return d.rng.choice(forms)


def shape_in_place(d: Drawing) -> str | None:
    """The tensor stays, its shape changes."""
    into = d.target()
    if into is None:
        return None
    x = d.env[into]
    forms = ["unsqueeze_(0)", "squeeze_()", "t_()"]
    if x.dim():
        forms += [
            f"transpose_(0, {d.dim(x)})", f"swapdims_({d.dim(x)}, 0)",
            strided(d, x)[1:].replace("as_strided", "as_strided_"),
        ]  # fmt: skip
    return f"{into}.{d.rng.choice(forms)}"


def storage_in_place(d: Drawing) -> str | None:
    """The tensor stays, it gets other memory."""
    into = d.target()
    other = d.pick(lambda x: x.dtype == torch.float64)
    if into is None or other is None:
        return None
    smaller = list(d.env[into].shape[:-1])
    return f"{into}" + d.rng.choice([f".data = {other}.clone()", f".data = {other} * 2", f".resize_({smaller})", f".set_({other}.clone())"])


LINES: tuple[tuple[int, Line], ...] = (
    (9, view), (3, copy), (1, join), (1, empty), (2, one_operand), (3, two_operands), (5, write), (5, write_part),
    (1, shape_in_place), (2, layer),
)  # fmt: skip
# Where a result jumps or its gradient does: what rounding moves past such a place differs by all that lies between.
JUMPS = re.compile(r"> 0|floor|relu|clamp|abs\(|sort|max|median|topk|norm\(dim|std\(|prod\(|fft|dropout|rand|view\(torch")
# What draws random numbers, which only the canonical operators draw alike.
RANDOM: tuple[tuple[int, Line], ...] = ((1, random_numbers),)
# What gives a tensor other memory.
MEMORY: tuple[tuple[int, Line], ...] = ((1, storage_in_place),)


def draw(
    seed: int,
    n_lines: int = 10,
    lines: tuple[tuple[int, Line], ...] = LINES,
    inputs: int = 2,
    differentiated: bool = False,
    smooth: bool = False,
) -> RandomProgram:
    """The program of a seed. differentiated: its first input requires a gradient, so that no line is one that autograd refuses.

    smooth: without operators that jump, for precisions that round.
    """
    d = Drawing(seed)
    generator = torch.Generator().manual_seed(seed)
    given = []
    for _ in range(inputs):
        shape = [d.rng.choice(SIZES) for _ in range(d.rng.choice((1, 2, 2, 3, 4)))]
        if d.one_in(20) and given:
            shape[-1] = 0
        x = torch.randn(shape, dtype=torch.float64, generator=generator)
        given.append(x)
        d.add_input(x.clone().requires_grad_() if differentiated and not d.given else x)
    weights, makers = zip(*lines, strict=True)
    for _ in range(20 * n_lines):
        if len(d.lines) == n_lines:
            break
        (make,) = d.rng.choices(makers, weights)
        line = make(d)
        if line is not None and not (smooth and JUMPS.search(line)):
            d.try_line(line)
    source = "".join(f"{line}\n" for line in d.lines)
    return RandomProgram(seed, source, tuple(given), tuple(d.env))
