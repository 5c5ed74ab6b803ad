"""Results written over dying operands: the same numbers, and refused wherever something still reads the operand."""

import pytest
import torch
from test_executors import MESH, per_rank, program
from test_memory import agree

import colofunc as cf
from colofunc.executors.kernels import callable_of
from colofunc.executors.simulated import SimulatedProgram
from colofunc.ops import fused
from colofunc.ops.targets import resolve
from colofunc.program.facts import makes_memory
from colofunc.program.ir import Ref
from colofunc.program.passes.inplace import in_place
from colofunc.testing.check import check

R = Ref
NEG = ("aten.neg.default", (R(0),), (1,))


def same_numbers(p, inputs):
    """In place against functional, on inputs that must stay as they are."""
    before = [[x.clone() for x in shards] for shards in inputs]
    want, got = SimulatedProgram(p, MESH)(inputs), SimulatedProgram(in_place(p), MESH)(inputs)
    for a, b in zip([*want, *before], [*got, *inputs]):
        for s, t in zip(a, b):
            torch.testing.assert_close(s, t, rtol=0, atol=0)


def targets(p):
    return [n.target for n in in_place(p).nodes]


@pytest.mark.parametrize("reader", [
    ("aten.exp.default", (R(1),), (3,)),  # read again
    ("aten.view.default", (R(1), (6,)), (3,)),  # a view of it is an output
    ("aten.select.int", (R(1), 0, 0), (3,)),
])  # fmt: skip
def test_not_while_something_reads_it(reader):
    shape = {"aten.exp.default": (2, 3), "aten.view.default": (6,), "aten.select.int": (3,)}[reader[0]]
    p = program([0], [NEG, reader, ("aten.tanh.default", (R(1),), (2,))], [2, 3], [(2, 3)] * 3 + [shape])
    q = program([0], [NEG, ("aten.tanh.default", (R(1),), (2,)), reader], [2, 3], [(2, 3)] * 3 + [shape])
    assert "aten.tanh.out" not in targets(q)
    for one in (p, q):
        same_numbers(one, [per_rank(2, 3)])


@pytest.mark.parametrize("view, shape", [
    (("aten.expand.default", (R(1), (4, 3)), (2,)), (4, 3)),
    (("aten.slice.Tensor", (R(1), 1, 0, 2), (2,)), (1, 2)),
])  # fmt: skip
def test_not_over_parts_or_repeated_elements(view, shape):
    p = program([0], [NEG, view, ("aten.tanh.default", (R(2),), (3,))], [3], [(1, 3), (1, 3), shape, shape])
    assert targets(p)[-1] == "aten.tanh.default"
    same_numbers(p, [per_rank(1, 3)])


def test_not_over_inputs_nor_beside_a_view_of_it():
    p = program([0], [("aten.tanh.default", (R(0),), (1,))], [1], [(2, 2)] * 2)
    assert targets(p) == ["aten.tanh.default"]
    nodes = [NEG, ("aten.t.default", (R(1),), (2,)), ("aten.mul.Tensor", (R(1), R(2)), (3,))]
    q = program([0], nodes, [3], [(2, 2)] * 4)
    assert targets(q)[-1] == "aten.mul.Tensor"
    same_numbers(q, [per_rank(2, 2)])


def test_chain_lives_in_one_tensor():
    nodes = [
        NEG,
        ("aten.view.default", (R(1), (6,)), (2,)),
        ("aten.pow.Tensor_Scalar", (R(2), 3.0), (3,)),
        ("aten.mul.Tensor", (R(3), R(3)), (4,)),
        ("aten.sub.Tensor", (R(5), R(4)), (6,)),
    ]
    p = program([0, 5], nodes, [6], [(2, 3), (2, 3), (6,), (6,), (6,), (6,), (6,)])
    assert targets(p)[2:] == ["aten.pow.Tensor_Scalar_out", "aten.mul.out", "aten.sub.out"]
    same_numbers(p, [per_rank(2, 3), per_rank(6)])
    inputs = [per_rank(2, 3), per_rank(6)]
    assert agree(in_place(p), inputs).peak_bytes["device"] == 3 * 48


def test_lanes_that_share_an_operand_do_not_write_into_it():
    nodes = [NEG, ("aten.mul.Tensor", (R(1), R(2)), (3,))]
    p = program([0, 2], nodes, [3], [(3,), (3,), (3,), (3,)])
    shared = [torch.randn(3, dtype=torch.float64)] * 4
    same_numbers(p, [shared, per_rank(3)])
    agree(in_place(p), [shared, per_rank(3)])


def test_a_write_after_a_read_by_a_view_elsewhere_waits():
    nodes = [
        NEG,
        ("aten.t.default", (R(1),), (2,)),
        ("aten.exp.default", (R(1),), (3,)),
        ("aten.mul.Tensor", (R(2), R(3)), (4,)),
    ]
    p = program([0], nodes, [4], [(2, 2)] * 5)
    assert targets(p)[2] == "aten.exp.default"
    same_numbers(p, [per_rank(2, 2)])


# ---- losses and embeddings ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape, dim", [((5, 4099), 1), ((3, 7), -1), ((4, 3), 0), ((0, 3), 1)])
def test_log_softmax_over_itself_is_exact(dtype, shape, dim):
    x = torch.randn(shape).to(dtype) * 5
    want = torch.log_softmax(x, dim)
    fused.log_softmax_(x, dim)
    torch.testing.assert_close(x, want, rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("ignored", [0, 2, 6])
def test_cross_entropy_gradient(reduction, ignored):
    x = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    t = torch.randint(0, 11, (6,))
    t[:ignored] = -100
    log_p = torch.log_softmax(x, 1)
    loss = torch.nn.functional.nll_loss(log_p, t, reduction=reduction)
    seed = torch.randn_like(loss)
    (want,) = torch.autograd.grad(loss, x, seed)
    got = log_p.detach().clone()
    total = torch.tensor(float(6 - ignored), dtype=torch.float64)
    fused.cross_entropy_dx_(got, seed, t, {"none": 0, "mean": 1, "sum": 2}[reduction], -100, total)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("padding", [-1, 2])
def test_embedding_gradient_is_added(padding):
    total, g = torch.randn(5, 3, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
    indices = torch.randint(0, 5, (2, 4))
    want = total + torch.ops.aten.embedding_dense_backward(g, indices, 5, padding, False)
    fused.embedding_add_(total, g, indices, padding)
    torch.testing.assert_close(total, want)


@pytest.mark.parametrize("target, args", [
    ("aten.mm.default", (torch.randn(4, 3).t(), torch.randn(4, 5))),
    ("colofunc.linear_dw", (torch.randn(2, 4, 3), torch.randn(2, 4, 5))),
    ("aten.embedding_dense_backward.default", (torch.randn(2, 4, 5), torch.randint(0, 3, (2, 4)), 3, 1, False)),
])  # fmt: skip
def test_a_gradient_is_added_to_a_sum_as_it_is_made(target, args):
    assert fused.has_adder(target, args) and set(fused.ADDERS) >= {target}
    total = torch.randn(3, 5)
    want = total + callable_of(target)(*args)
    found = fused.ADDERS[target](total, *args)
    assert found is total
    torch.testing.assert_close(total, want)


def test_a_gradient_that_is_scaled_by_counts_is_made_first():
    assert not fused.has_adder("aten.embedding_dense_backward.default", (R(0), R(1), 3, -1, True))


def test_tied_language_model_makes_one_tensor_of_logits():
    def step(params, batch):
        def loss_fn(params):
            h = torch.nn.functional.embedding(batch["x"], params["w"])
            return torch.nn.functional.cross_entropy(h.tanh() @ params["w"].t(), batch["y"])

        loss, grads = cf.value_and_grad(loss_fn)(params)
        return {"w": params["w"] - 0.1 * grads["w"]}, loss

    batch = {"x": torch.randint(0, 50, (6,)), "y": torch.randint(0, 50, (6,))}
    params = {"w": torch.randn(50, 4, dtype=torch.float64)}
    low = cf.shard(step, cf.Mesh()).lower(params, batch)
    names = [n.target for n in low.program.nodes]
    assert {"colofunc.log_softmax_", "colofunc.cross_entropy_dx_", "colofunc.embedding_add_"} <= set(names)
    assert not any("embedding_dense" in n or "nll_loss_backward" in n for n in names)
    check(cf.shard(step, cf.Mesh()), params, batch, steps=2)


def test_a_sum_of_products_is_not_written_over_what_it_multiplies() -> None:
    """Muon's polynomial is `addmm(gram, gram, gram)`: its first operand dies there, and is read until the end."""
    gram = torch.randn(6, 6, dtype=torch.float64)

    def fn(x: torch.Tensor) -> torch.Tensor:
        squared = x @ x.T
        return torch.addmm(squared, squared, squared, beta=2.0, alpha=3.0) + 1

    staged = cf.shard(fn, cf.Mesh())
    assert torch.equal(staged(gram).full(), fn(gram))
    onto = cf.shard(lambda x, y: torch.addmm(x + 1, x, y), cf.Mesh())
    assert "addmm_(" in onto.lower(gram, gram).text() and torch.equal(onto(gram, gram).full(), torch.addmm(gram + 1, gram, gram))


# ---- whose results are memory of their own ----


IMAGE = torch.randn(2, 4, 6, 6)
STATISTICS = torch.zeros(4), torch.ones(4)
# Arguments with which an operator might hand back what it was given, too: no scaling, a window of one, nothing padded.
OF_IMAGES = {
    "native_group_norm.default": [(IMAGE, None, None, 2, 4, 36, 2, 1e-5)],
    "_native_batch_norm_legit_no_training.default": [(IMAGE, None, None, *STATISTICS, 0.1, 0.0)],
    "_native_batch_norm_legit.no_stats": [(IMAGE, None, None, True, 0.1, 1e-5)],
    "upsample_nearest2d.default": [(IMAGE, [6, 6]), (IMAGE, [12, 12])],
    "upsample_nearest2d.vec": [(IMAGE, [6, 6], None), (IMAGE, None, [2.0, 2.0])],
    "upsample_bilinear2d.default": [(IMAGE, [6, 6], False), (IMAGE, [6, 6], True), (IMAGE, [12, 12], False)],
    "upsample_bilinear2d.vec": [(IMAGE, [6, 6], False, None), (IMAGE, None, False, [2.0, 2.0])],
    "avg_pool2d.default": [(IMAGE, [1, 1]), (IMAGE, [2, 2])],
    "_adaptive_avg_pool2d.default": [(IMAGE, [6, 6]), (IMAGE, [1, 1]), (IMAGE, [2, 3])],
    "max_pool2d_with_indices.default": [(IMAGE, [1, 1]), (IMAGE, [2, 2])],
    "constant_pad_nd.default": [(IMAGE, [0, 0]), (IMAGE, [-1, 0, 0, -2]), (IMAGE, [1, 1, 2, 0])],
}


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "a part", "transposed"])
@pytest.mark.parametrize("name", OF_IMAGES)
def test_results_of_operators_on_images_are_memory_of_their_own(name, layout):
    assert makes_memory(f"aten.{name}")
    image = {
        "contiguous": IMAGE, "channels last": IMAGE.contiguous(memory_format=torch.channels_last),
        "a part": torch.randn(2, 8, 12, 6)[:, ::2, ::2], "transposed": IMAGE.transpose(2, 3),
    }[layout]  # fmt: skip
    for _, *rest in OF_IMAGES[name]:
        if name.startswith("native_group_norm"):
            image = image.contiguous()  # as executors hand it over
        results = resolve(f"aten.{name}")(image, *rest)
        storages = [image.untyped_storage().data_ptr()]
        for result in results if isinstance(results, tuple) else (results,):
            if result.numel() == 0:
                continue
            storages.append(result.untyped_storage().data_ptr())
            places = torch.zeros(result.untyped_storage().nbytes() // result.itemsize, dtype=torch.int64)
            places.as_strided(result.shape, result.stride(), result.storage_offset()).add_(1)
            assert int(places.sum()) == result.numel(), "each element lies apart"
        assert len(set(storages)) == len(storages)


def test_what_follows_a_norm_of_images_is_written_over_it():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.GroupNorm(2, 4), torch.nn.SiLU(), torch.nn.Upsample(scale_factor=2), torch.nn.ReLU(),
        torch.nn.BatchNorm2d(4), torch.nn.SiLU(),
    ).eval()  # fmt: skip
    model = cf.functional(layers)
    step = cf.shard(lambda p, x: model.apply(p, model.buffers, x)[0], cf.Mesh())
    names = [node.target for node in step.lower(model.params, IMAGE).program.nodes]
    assert [name for name in names if "silu" in name or "relu" in name] == ["aten.silu.out", "aten.relu_.default", "aten.silu.out"]
    with torch.no_grad():
        torch.testing.assert_close(step(model.params, IMAGE).full(), layers(IMAGE), rtol=0, atol=0)


def test_the_loss_of_an_image_whose_logits_lie_with_channels_last() -> None:
    """Logarithms are written over what the convolution made, and torch's gradient of the loss refuses that order of memory."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Conv2d(4, 5, 3), torch.nn.Upsample(scale_factor=2, mode="bilinear")).double()
    model = cf.functional(layers.to(memory_format=torch.channels_last))
    image = torch.randn(2, 4, 8, 8, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 5, (2, 12, 12))

    def step(params, image, labels):
        return cf.value_and_grad(lambda p: torch.nn.functional.cross_entropy(model.apply(p, model.buffers, image)[0], labels))(params)

    for mesh in (cf.Mesh(), cf.Mesh(dp=2)):
        sharded = cf.shard(step, mesh)
        assert "log_softmax_(" in sharded.lower(model.params, image, labels).text()
        loss, grads = sharded(model.params, image, labels)
        want, want_grads = step(model.params, image, labels)
        cf.testing.compare((loss, grads), (want, want_grads))
