"""2D, 2.5D and 3D tensor parallelism: bytes of every product against closed forms, buffers, and what a whole step adds.

Products of (bs, h) and (h, e) with bs = 4096, h = 1024, e = 4096 in float16, on abstract tensors: nothing is run, bytes are those
of the program of one rank as `low.cost()` counts them (ring algorithms, received). A whole step: a llama of 2 layers.

    SUMMA   [bs h (y-1) + h e (x-1)] / (x y)                         2.5D: rows of bs / depth, the same grid of weights
    3D      [bs h (y-1) + bs e (x-1) + h e (z-1)] / (x y z)          h on x, e on y, bs on z
"""

from __future__ import annotations

from typing import Any

import torch
from colofunc_plugins import tensor
from transformers import LlamaConfig, LlamaForCausalLM

import colofunc as cf
from bench import Row, Section

BS, H, E = 4096, 1024, 4096
X, W, Y = (BS, H), (E, H), (BS, E)
TOPOLOGY = "8xa100-80g"
HALF = torch.float16
OPS = torch.ops.colofunc
# Products of a linear layer and its gradients, then those of a layer that stores its weight (inputs, outputs).
PRODUCTS = {
    "forward": (OPS.linear, "x w y"), "dX": (OPS.linear_dx, "y w x"), "dW": (OPS.linear_dw, "y x w"),
    "addmm": (torch.addmm, "b x v y"), "mm, forward": (torch.mm, "x v y"), "mm, dX": (torch.mm, "y w x"), "mm, dW": (torch.mm, "t y v"),
}  # fmt: skip
SHAPES = {"x": X, "w": W, "y": Y, "v": (H, E), "b": (E,), "t": (H, BS)}


def lower(fn: Any, plan: Any, mesh: cf.Mesh, words: str, lies: dict[str, str], names: str) -> Any:
    """One operator on operands that lie as its pattern wants them."""
    *ins, out = names.split()
    where = dict(in_specs=tuple(lies[n] for n in ins), out_specs=lies[out])
    step = cf.shard(lambda *args: fn(*args), mesh, {"*": words}, plugins=[plan], **where, donate=())
    return step.lower(*(cf.abstract(SHAPES[n], HALF) for n in ins))


def turned(spec: str) -> str:
    one, two = (part.strip("() ") for part in spec.split(") ("))
    return f"({two}) ({one})"


def places(x: str, w: str, y: str, bias: str) -> dict[str, str]:
    return {"x": x, "w": w, "y": y, "b": bias, "v": turned(w), "t": turned(x)}


def summa(x: int, y: int, depth: int = 1) -> list[Row]:
    """Every product on a grid; of the gradient of weights, the sum over depth is a conversion of its own and listed."""
    sizes = dict(x=x, y=y) if depth == 1 else dict(z=depth, x=x, y=y)
    mesh = cf.Mesh(topology=TOPOLOGY, **sizes)
    rows = "z x" if depth > 1 else "x"
    lies = places(f"({rows} b) (y i)", "(y o) (x i)", f"({rows} b) (y o)", "(y o)")
    plan = tensor("2d") if depth == 1 else tensor("2.5d")
    words = "{x: summa rows, y: summa columns" + (", z: summa depth}" if depth > 1 else "}")
    form = 2 * (BS // depth * H * (y - 1) + H * E * (x - 1)) // (x * y)
    name = "SUMMA" if depth == 1 else "2.5D"
    found = []
    for what, (fn, names) in PRODUCTS.items():
        moved = lower(fn, plan, mesh, words, lies, names).cost().bytes
        over = {key: n for key, n in moved.items() if "z" in key[1].split(",")}
        text = f"{name}, {' x '.join(str(n) for n in (x, y, depth)[: 2 + (depth > 1)])}, {what}"
        found.append(exact(text, sum(moved.values()) - sum(over.values()), form, sum(over.values()), "sum over depth"))
    return found


def cube(z: int, x: int, y: int) -> list[Row]:
    mesh = cf.Mesh(topology=TOPOLOGY, z=z, x=x, y=y)
    lies = places("(z y b) (x i)", "(y o) (x z i)", "(z x b) (y o)", "(y o)")
    form = 2 * (BS * H * (y - 1) + BS * E * (x - 1) + H * E * (z - 1)) // (x * y * z)
    words = "{x: 3d inputs, y: 3d outputs, z: 3d rows}"
    plan = tensor("3d", ("z", "x", "y"))
    return [
        exact(f"3D, {x} x {y} x {z}, {what}", lower(fn, plan, mesh, words, lies, names).cost().wire_bytes, form)
        for what, (fn, names) in PRODUCTS.items()
    ]


def exact(what: str, found: int, form: int, rest: int = 0, of: str = "") -> Row:
    more = f", and {rest:,} for the {of}" if rest else ""
    return Row(f"{what} (form {form:,} B)", f"{found:,} B, ratio {found / form:.3f}{more}", "1.000", found == form)


def two_products() -> list[Row]:
    """(bs, h) (h, e) (e, h) forward, as published for 1D, 2D (weights stay) and 3D."""

    def step(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return OPS.linear(OPS.linear(x, w), v)

    abstract = [cf.abstract(s, HALF) for s in (X, (E, H), (H, E))]
    cases = {
        "1D on 8": (cf.Mesh(tp=8, topology=TOPOLOGY), [], ("b i", "(tp o) i", "o (tp i)"), "b o", 2 * 7 * BS * H // 8),
        "2D, 2 x 4": (
            cf.Mesh(z=1, x=2, y=4, topology=TOPOLOGY), layers(depth=False), ("(y b) (x i)", "(y o) (x i)", "(x o) (y i)"), "(y b) (x o)",
            2 * BS * (E * 1 + H * 3) // 8,
        ),
        "3D, 2 x 2 x 2": (
            cf.Mesh(z=2, x=2, y=2, topology=TOPOLOGY), layers(depth=True),
            ("(z y b) (x i)", "(y o) (x z i)", "(x o) (y z i)"), "(z y b) (x o)",
            2 * (BS * E + BS * H + H * E) // 8,
        ),
    }  # fmt: skip
    found = []
    for what, (mesh, wishes, ins, out, elements) in cases.items():
        staged = cf.shard(step, mesh, *wishes, plugins=[tensor("3d", ("z", "x", "y"))], in_specs=ins, out_specs=out, donate=())
        low = staged.lower(*abstract)
        found.append(exact(f"two products forward, {what}", low.cost().wire_bytes, 2 * elements))
    return found


def layers(depth: bool) -> list[cf.ext.Wish]:
    """Two products over a cube, or over one layer of it, directions in turn."""
    rows = ", z: 3d rows" if depth else ""
    first, other = (f"{{{i}: 3d inputs, {o}: 3d outputs{rows}}}" for i, o in ("xy", "yx"))
    return [cf.ext.Wish("*", (first, other), source="bench")]


def buffers() -> list[Row]:
    """What a product needs beside its operands: gathered whole, and in panels."""
    mesh = cf.Mesh(x=4, y=4, topology=TOPOLOGY)
    lies = places("(x b) (y i)", "(y o) (x i)", "(x b) (y o)", "(y o)")
    stored, result = 2 * (BS * H + H * E) // 16, 2 * BS * E // 16
    low = lower(OPS.linear, tensor("2d"), mesh, "{x: summa rows, y: summa columns}", lies, "x w y")
    extra, whole = low.memory().peak_bytes["device"] - stored - result, 2 * (BS * H + H * E) // 4
    text = f"{extra:,} B beside operands and result, {extra / (whole // 4):.2f} panels"
    what = f"SUMMA, 4 x 4, buffers (operands whole: {whole:,} B, in 4 panels of {whole // 4:,} B)"
    return [Row(what, text, "at most 2 panels and the slice that a rank sends", extra <= whole // 2 + BS * H * 2 // 64)]


def whole_steps() -> list[Row]:
    """A llama's training step: what products move by their closed form, and the rest."""
    b, s, d, f, v, layers_, item = 8, 128, 256, 512, 1024, 2, 4
    config = LlamaConfig(
        vocab_size=v, hidden_size=d, intermediate_size=f, num_hidden_layers=layers_, num_attention_heads=8, num_key_value_heads=8,
        max_position_embeddings=s,
    )  # fmt: skip
    step, state = cf.train_step(cf.functional(LlamaForCausalLM(config)), cf.adapt(torch.optim.AdamW, lr=1e-3))
    batch = {"input_ids": torch.zeros((b, s), dtype=torch.int64), "labels": torch.zeros((b, s), dtype=torch.int64)}
    shapes = [(d, d)] * 4 * layers_ + [(d, f)] * 2 * layers_ + [(f, d)] * layers_ + [(d, v)]
    summa = [(b * s * i * 1 + i * o * 1) // 4 for i, o in shapes]
    cubes = [(b * s * i + b * s * o + i * o) // 8 for i, o in shapes]
    found = []
    for what, mesh, plan, forms in (
        ("2D, 2 x 2", cf.Mesh(x=2, y=2, topology=TOPOLOGY), tensor("2d"), summa),
        ("3D, 2 x 2 x 2", cf.Mesh(z=2, x=2, y=2, topology=TOPOLOGY), tensor("3d", ("z", "x", "y")), cubes),
    ):
        cost = cf.shard(step, mesh, plan).lower(state, batch).cost()
        products, total = 3 * item * sum(forms), cost.wire_bytes
        kinds = " · ".join(f"{kind} {axes} {n:,}" for (kind, axes), n in sorted(cost.bytes.items()))
        text = f"{total:,} B: products {products:,} (closed forms), the rest {total - products:,} ({100 * (1 - products / total):.0f} %)"
        found.append(Row(f"llama, {b * s} tokens, width {d}, {layers_} layers, a training step, {what}", text))
        found.append(Row(f"the same, all collectives, {what}", kinds))
    return found


def bench() -> Section:
    rows = [*summa(2, 2), *summa(2, 4), *summa(2, 2, depth=2), *cube(2, 2, 2), *cube(2, 4, 1), *two_products(), *buffers(), *whole_steps()]
    setting = f"bs = {BS}, h = {H}, e = {E}, float16; topology {TOPOLOGY}; bytes that a rank receives; torch {torch.__version__}"
    return Section("2D, 2.5D and 3D tensor parallelism", setting, rows)


