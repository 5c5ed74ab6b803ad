"""DTensor: values equal plain torch's whatever the layout, and what cannot be right is refused."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import colofunc as cf
from colofunc.ops.canonical import single_device

MESH = cf.Mesh(dp=2, tp=2)
X = torch.arange(32.0, dtype=torch.float64).view(8, 4).sin()
W = torch.arange(24.0, dtype=torch.float64).view(4, 6).cos()
V = torch.arange(4.0, dtype=torch.float64)
I = torch.tensor([1, 3, 6])
SPECS = ("(dp b) d", "b (tp d)", "(dp b) (tp d)", "(tp dp b) d", "(b tp) d", "(2 dp c) d", "b d")


def d(x: torch.Tensor, spec: str) -> cf.DTensor:
    return cf.distribute(x, spec, MESH)


def same(got: Any, expected: Any) -> None:
    got, expected = ([t] if isinstance(t, torch.Tensor) else list(t) for t in (got, expected))
    for a, b in zip(got, expected, strict=True):
        assert isinstance(a, cf.DTensor)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        torch.testing.assert_close(a.full(), b, rtol=1e-12, atol=1e-12)


# ---- what it is ----


def test_shards_are_what_einops_says() -> None:
    x = d(X, "(dp b) (tp d)")
    assert [s.shape for s in x.shards] == [(4, 2)] * 4
    assert torch.equal(x.shards[2], X[4:, :2])
    assert torch.equal(x.local, X[:4, :2])
    assert torch.equal(x.full(), X)
    assert str(x.spec) == "(dp a) (tp b)"


def test_repr_and_format() -> None:
    assert repr(d(X, "(dp b) d")) == "DTensor((8, 4), '(dp a) b', Mesh(dp=2, tp=2), torch.float64)"
    assert repr(d(torch.tensor(2.5), "")) == "DTensor((), '', Mesh(dp=2, tp=2), torch.float32, value=2.5)"
    total = d(torch.ones(8), "(dp b)").sum()
    assert f"{total:.2f}" == "8.00"
    assert (float(total), int(total), bool(total > 3), total.item()) == (8.0, 8, True, 8.0)


def test_lists_arrays_copies() -> None:
    x = d(X, "(dp b) d")
    assert x.tolist() == X.tolist()
    assert (x.numpy() == X.numpy()).all()
    twin = copy.deepcopy(x)
    twin.zero_()
    assert torch.equal(x.full(), X)
    with pytest.raises(cf.InputError, match=r"cannot be pickled; save x.full\(\)"):
        pickle.dumps(x)


@pytest.mark.parametrize("target", SPECS)
def test_redistribute(target: str) -> None:
    for source in SPECS:
        moved = d(X, source).redistribute(target)
        assert torch.equal(moved.full(), X)
        assert moved.sharding is d(X, target).sharding


def test_pending_sums() -> None:
    terms = cf.from_local([X, 2 * X, X, 2 * X], "b d +tp", MESH)
    assert torch.equal(terms.full(), 3 * X)
    assert torch.equal(terms.redistribute("(tp b) d").full(), 3 * X)
    same(terms.exp(), (3 * X).exp())  # not linear: reduced before
    doubled = terms * 2
    assert str(doubled.spec) == "a b +tp"  # linear: the sum stays pending
    same(doubled, 6 * X)


def test_padded() -> None:
    ragged = torch.arange(7.0)
    x = d(ragged, "(dp tp a~)")
    assert [s.numel() for s in x.shards] == [2] * 4
    assert torch.equal(x.full(), ragged)
    same(x + 1, ragged + 1)
    same(x.max(), ragged.max())
    same((x - 10).max(), (ragged - 10).max())
    same(x.softmax(0), ragged.softmax(0))
    assert torch.equal(x.add_(1).full(), ragged + 1)


def test_from_local() -> None:
    x = cf.from_local([X[:4], X[:4], X[4:], X[4:]], "(dp b) d", MESH)
    assert torch.equal(x.full(), X)
    ragged = cf.from_local([torch.tensor([0.0, 1.0])] * 2 + [torch.tensor([2.0, 0.0])] * 2, "(dp a~)", MESH, shape=(3,))
    assert ragged.full().tolist() == [0, 1, 2]
    with pytest.raises(cf.SpecError, match=r"a part of shape \(4, 4\) does not fit"):
        cf.from_local(X[:4], "(dp b) d", MESH, shape=(16, 4))
    with pytest.raises(cf.InputError, match=r"3 parts were given for the 4 ranks"):
        cf.from_local([X, X, X], "b d", MESH)
    with pytest.raises(cf.InputError, match=r"differ in dtype or device"):
        cf.from_local([X, X, X, X.float()], "b d", MESH)
    with pytest.raises(cf.InputError, match=r"as a plain torch.Tensor, not DTensor"):
        cf.from_local(d(X, "b d"), "b d", MESH)


def test_the_callers_tensor_is_its_own() -> None:
    mine = X.clone()
    x = d(mine, "b d")
    x.add_(1)
    assert torch.equal(mine, X)
    mine.zero_()
    assert torch.equal(x.full(), X + 1)


# ---- eager operators ----

OPERATORS: dict[str, Callable[..., Any]] = {
    "matmul": lambda x, w, v: x @ w,
    "linear": lambda x, w, v: F.linear(x, w.t()),
    "einsum": lambda x, w, v: torch.einsum("bi,io->ob", x, w),
    "matrix times vector": lambda x, w, v: x @ v,
    "broadcast": lambda x, w, v: x + v,
    "scalars": lambda x, w, v: 1 - 2 * x**2 / 3,
    "plain scalar tensor": lambda x, w, v: x * torch.tensor(3.0, dtype=torch.float64),
    "softmax": lambda x, w, v: x.softmax(-1),
    "softmax of dim 0": lambda x, w, v: x.softmax(0),
    "sum": lambda x, w, v: x.sum(),
    "sum of dim 0": lambda x, w, v: x.sum(0),
    "mean": lambda x, w, v: x.mean(1, keepdim=True),
    "max": lambda x, w, v: x.max(0),
    "var": lambda x, w, v: x.var(0),
    "norm": lambda x, w, v: x.norm(),
    "ratio of pending sums": lambda x, w, v: x.sum(0) / x.sum(),
    "layer norm": lambda x, w, v: F.layer_norm(x, (4,), v, v),
    "cross entropy": lambda x, w, v: F.cross_entropy(x, torch.zeros_like(x[:, 0], dtype=torch.long)),
    "row": lambda x, w, v: x[5],
    "slice": lambda x, w, v: x[1:7:2, 1:],
    "mask": lambda x, w, v: torch.where(x > 0, x, -x),
    "view": lambda x, w, v: x.view(2, 4, 2, 2),
    "flatten": lambda x, w, v: x.flatten(),
    "transpose": lambda x, w, v: x.t().contiguous().view(8, 4),
    "cat": lambda x, w, v: torch.cat([x, x + 1], 1),
    "split": lambda x, w, v: x.split(3),
    "cumsum": lambda x, w, v: x.cumsum(0),
    "sort": lambda x, w, v: x.sort(0),
    "cast": lambda x, w, v: x.float().double(),
    "like": lambda x, w, v: torch.ones_like(x) + torch.zeros_like(x),
    "in place": lambda x, w, v: x.clone().mul_(2).add_(v).relu_(),
    "write a row": lambda x, w, v: _write(x.clone(), 5),
    "write a slice": lambda x, w, v: _write(x.clone(), slice(2, 6)),
    "write by index": lambda x, w, v: _write(x.clone(), (slice(None), 1)),
    "write through views": lambda x, w, v: _write_through(x.clone()),
}


def _write(x: torch.Tensor, where: Any) -> torch.Tensor:
    x[where] = 7
    return x


def _write_through(x: torch.Tensor) -> torch.Tensor:
    x.t()[1].add_(1)
    x.view(2, 4, 4).permute(2, 0, 1).unsqueeze(0)[0, 2].mul_(3)
    return x


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_equal_torch(name: str) -> None:
    expected = OPERATORS[name](X, W, V)
    for x_spec, w_spec in zip(SPECS, ("i o", "i (tp o)", "(tp i) o", "(dp i) (tp o)", "i (dp o)", "i o", "(tp i) o"), strict=True):
        same(OPERATORS[name](d(X, x_spec), d(W, w_spec), d(V, "d")), expected)


def test_results_stay_where_the_operands_lie() -> None:
    x = d(X, "(dp b) d")
    for result in (x * 2, x.softmax(1), x + d(V, "d"), x @ d(W, "i o"), torch.zeros_like(x)):
        assert result.spec == d(torch.empty(result.shape), "(dp b) d").spec
    assert str((x @ d(W, "i (tp o)")).spec) == "(dp a) (tp b)"
    assert str((d(X, "b (tp i)") @ d(W, "(tp i) o")).spec) == "a b +tp"
    assert str((x + d(X, "b (tp d)")).spec) == "(dp a) (tp b)"  # cutting further costs nothing


def test_indexing_with_tensors() -> None:
    for spec in SPECS:
        x = d(X, spec)
        same(x[d(I, "a")], X[I])
        same(x.index_select(0, d(I, "a")), X.index_select(0, I))


# Common functions of torch, each on a matrix (8, 4): the answer is plain torch's.
COMMON: dict[str, Callable[[torch.Tensor], Any]] = {
    "x[[0, -1]]": lambda x: x[[0, -1]],
    "x[:, [0, 3]]": lambda x: x[:, [0, 3]],
    "x[[0, 1], [1, 2]]": lambda x: x[[0, 1], [1, 2]],
    "x[tensor]": lambda x: x[torch.tensor([0, 2])],
    "x[array]": lambda x: x[I.numpy()],
    "x[-1, -2]": lambda x: x[-1, -2],
    "x[..., None]": lambda x: x[..., None],
    "x[list] = 7": lambda x: _write(x.clone(), [0, -1]),
    "x[mask] = 7": lambda x: _write(x.clone(), x > 0),
    "index_select": lambda x: x.index_select(0, I),
    "index_fill": lambda x: x.index_fill(0, I, 2.0),
    "take": lambda x: x.take(I),
    "gather": lambda x: x.gather(0, I[:, None]),
    "take_along_dim": lambda x: torch.take_along_dim(x, I[:, None], 0),
    "scatter": lambda x: x.scatter(1, x.argmin(1, keepdim=True), 9.0),
    "embedding": lambda x: F.embedding(I, x),
    "embedding with a sparse gradient": lambda x: F.embedding(I, x, sparse=True),
    "one_hot": lambda x: F.one_hot((x[:, 0] > 0).long(), 2),
    "trace": lambda x: x[:4].trace(),
    "quantile": lambda x: x.quantile(0.3),
    "quantiles of dim 0": lambda x: x.quantile(torch.tensor([0.25, 0.75], dtype=x.dtype), dim=0),
    "nanquantile": lambda x: x.nanquantile(0.5, dim=1),
    "median": lambda x: x.median(),
    "median of dim 0": lambda x: x.median(0),
    "mode": lambda x: (x > 0).int().mode(0),
    "kthvalue": lambda x: x.kthvalue(2, 0),
    "std": lambda x: x.std(),
    "var_mean": lambda x: torch.var_mean(x, 0),
    "logsumexp": lambda x: x.logsumexp(1),
    "prod": lambda x: x.prod(1),
    "cumprod": lambda x: x.cumprod(0),
    "argmax": lambda x: x.argmax(1),
    "topk": lambda x: x.topk(2, 1),
    "any": lambda x: (x > 0).any(0),
    "aminmax": lambda x: torch.aminmax(x),
    "count_nonzero": lambda x: x.count_nonzero(0),
    "outer": lambda x: torch.outer(x[:, 0], x[0]),
    "bmm": lambda x: torch.bmm(x.view(2, 4, 4), x.view(2, 4, 4)),
    "kron": lambda x: torch.kron(x, x),
    "diag": lambda x: x[:4].diag(),
    "triu": lambda x: x.triu(1),
    "roll": lambda x: x.roll(1, 0),
    "flip": lambda x: x.flip(0),
    "repeat": lambda x: x.repeat(2, 1),
    "stack": lambda x: torch.stack([x, x]),
    "unbind": lambda x: x.unbind(1),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "pad": lambda x: F.pad(x, (1, 1)),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij"),
    "unsqueeze_": lambda x: x.clone().unsqueeze_(0),
    "t_ of a view": lambda x: x.clone()[1:5].t_().mul_(2),
    "det": lambda x: torch.linalg.det(x[:4]),
    "solve": lambda x: torch.linalg.solve(x[:4], x[4:]),
    "qr": lambda x: torch.linalg.qr(x).R.abs(),
    "cdist": lambda x: torch.cdist(x, x),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(0)),
    "normalize": lambda x: F.normalize(x),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 2, 4, 4)] * 3, is_causal=True),
    "conv1d": lambda x: F.conv1d(x.view(2, 4, 4), x.view(2, 4, 4)[:, :, :3]),
    "interpolate": lambda x: F.interpolate(x.view(2, 4, 4), scale_factor=2.0),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "cov": lambda x: torch.cov(x),
    "diff": lambda x: x.diff(dim=0),
    "searchsorted": lambda x: torch.searchsorted(x.sort(1).values, x),
    "fft": lambda x: torch.fft.fft(x),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "vmap": lambda x: torch.vmap(torch.sum)(x),
}
REGULAR = torch.arange(32.0, dtype=torch.float64).view(8, 4).pow(2).sin()  # of full rank, unlike X


@pytest.mark.parametrize("name", COMMON)
def test_common_functions_equal_torch(name: str) -> None:
    expected = COMMON[name](REGULAR)
    for spec in ("(dp b) (tp d)", "b (tp d)"):
        same(COMMON[name](d(REGULAR, spec)), expected)


def test_answers_that_are_no_tensors() -> None:
    x = d(X, "(dp b) (tp d)")
    assert torch.equal(x, d(X, "b d")) and not torch.equal(x, x + 1)
    assert torch.allclose(x, x + 1e-12) and not x.allclose(x + 1)
    assert list(range(x.argmax())) == list(range(int(X.argmax())))
    assert type(x.new_tensor([1.0])) is torch.Tensor  # it has nothing of x but the dtype


def test_gradients_pass_through_indices() -> None:
    x, dx = REGULAR.clone().requires_grad_(), d(REGULAR, "(dp b) (tp d)").requires_grad_()
    for leaf in (x, dx):
        (leaf[[0, 0, -1]].pow(2).sum() + leaf.index_select(1, torch.tensor([2])).exp().sum() + leaf.quantile(0.3)).backward()
    torch.testing.assert_close(dx.grad.full(), x.grad, rtol=1e-12, atol=1e-12)


# ---- random numbers ----

RANDOM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "a layer": lambda x: torch.nn.Dropout(0.3)(x),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
    "two at once": lambda x: F.dropout(F.dropout(x, 0.2, training=False), 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "dropout1d": lambda x: F.dropout1d(x.view(2, 4, 4), 0.5),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 2, 4, 4)] * 3, dropout_p=0.5),
    "rand_like": lambda x: torch.rand_like(x),
    "randint_like": lambda x: torch.randint_like(x, 5),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: x.softmax(1).multinomial(2),
    "normal_": lambda x: x.clone().normal_(),
    "kaiming": lambda x: torch.nn.init.kaiming_uniform_(x.clone()),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_the_single_devices(name: str) -> None:
    torch.manual_seed(3)
    with single_device():
        expected = RANDOM[name](X)
    for spec in SPECS:
        torch.manual_seed(3)
        same(RANDOM[name](d(X, spec)), expected)


def test_dropout_draws_anew_and_its_gradient_has_the_same_mask() -> None:
    x = d(torch.ones(8, 4), "(dp b) (tp d)").requires_grad_()
    torch.manual_seed(0)
    first, second = F.dropout(x, 0.5), F.dropout(x, 0.5)
    assert not torch.equal(first, second)
    assert first.sharding is x.sharding
    first.sum().backward()
    assert torch.equal(x.grad, first.detach())  # ones: both are the mask over 1 - p
    with cf.random(5):
        kept = F.dropout(x, 0.5)
    with cf.random(5):
        assert torch.equal(kept, F.dropout(x, 0.5))
    assert torch.rand_like(x).sharding is x.sharding


def test_in_place_keeps_the_layout() -> None:
    x = d(X, "(dp b) d")
    before = x.sharding
    x += d(X, "b (tp d)")
    assert x.sharding is before
    assert torch.equal(x.full(), 2 * X)
    with pytest.raises(cf.InputError, match=r"would change the shape from \(8, 1\) to \(8, 4\)"):
        d(X[:, :1], "(dp b) d").add_(d(X, "(dp b) d"))
    with pytest.raises(cf.InputError, match=r"would put torch.float32 into a DTensor of torch.int64"):
        d(I, "a").add_(0.5)


def test_a_view_of_what_was_written_is_refused() -> None:
    x = d(X, "(dp b) d")
    row, alias = x[1], x.detach()
    x.add_(1)
    with pytest.raises(cf.ConsumedError, match=r"is a view .* written in place since; take the view again"):
        row.full()
    assert torch.equal(alias.full(), X + 1)
    assert torch.equal(x[1].full(), X[1] + 1)
    with pytest.raises(cf.InputError, match=r"cannot be carried back to its base"):
        x.split(4)[0].add_(1)


def test_refused_mixtures() -> None:
    x = d(X, "(dp b) d")
    with pytest.raises(cf.SpecError, match=r'mixes a DTensor with a plain tensor of shape \(8, 4\).*cf.distribute\(tensor, "...", mesh\)'):
        x + X
    said = r"mixes DTensors of two meshes, Mesh\(dp=2, tp=2\) and Mesh\(dp=4\). Try: cf.distribute\(x, spec, mesh\)"
    with pytest.raises(cf.MeshError, match=said):
        x + cf.distribute(X, "(dp b) d", cf.Mesh(dp=4))
    with pytest.raises(cf.InputError, match=r"writes a DTensor into a plain tensor of shape"):
        X.clone().copy_(x)
    with pytest.raises(cf.InputError, match=r"writes to 'self', .*foreach=False"):
        torch._foreach_add_([x, x.clone()], 1.0)


REFUSED: dict[str, tuple[Callable[[cf.DTensor], Any], type[Exception], str]] = {
    "a mask": (lambda x: x[x > 0], cf.InputError, "takes or wants as many elements as the mask has, .* torch.where"),
    "a plain mask": (lambda x: x[X > 0], cf.InputError, "takes or wants as many elements as the mask has, .* torch.where"),
    "a list of bools": (lambda x: x[[True] * 8], cf.InputError, "takes or wants as many elements as the mask has"),
    "a row to a mask": (lambda x: x.clone().__setitem__(x > 0, x[0]), cf.InputError, "takes or wants as many elements"),
    "nonzero": (lambda x: x.nonzero(), cf.InputError, r"aten.nonzero.default .* depends on data; ask it of x.full\(\)"),
    "unique": (lambda x: x.unique(), cf.InputError, "aten._unique2.default .* depends on data"),
    "no shape function": (lambda x: torch.histogram(x, 4), cf.InputError, "torch cannot say what aten.histogram.bin_ct returns"),
    "plain values": (lambda x: x.clone().__setitem__([0, 2], X[:2]), cf.SpecError, r"__setitem__ mixes .* of shape \(2, 4\)"),
    "a plain weight": (lambda x: F.linear(x, W.t()), cf.SpecError, r"torch.nn.functional.linear mixes .* of shape \(6, 4\)"),
    "an index of floats": (lambda x: x[V], RuntimeError, "tensors used as indices must be long"),
    "out=": (lambda x: torch.add(x, x, out=X.clone()), cf.InputError, r"torch.add writes a DTensor into a plain tensor of shape \(8, 4\)"),
    "memory": (lambda x: x.data_ptr(), cf.InputError, r"data_ptr wants the memory of one tensor, .* use x.local"),
    "a function per element": (lambda x: x.clone().apply_(abs), cf.InputError, "apply_ wants the memory of one tensor"),
    "no keyed form": (lambda x: torch.poisson(x.abs()), cf.RuleError, "poisson.default draws random numbers and has no"),
    "a generator": (lambda x: torch.rand_like(x, generator=torch.Generator()), cf.TraceError, "own torch.Generator"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call(d(X, "(dp b) (tp d)"))


# ---- autograd ----


def loss_of(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x @ w).relu().softmax(-1) * 3 + x.sum(0)[:2].sum()).pow(2).mean()


@pytest.mark.parametrize("spec", SPECS)
def test_gradients_equal_torchs_and_lie_as_the_leaf(spec: str) -> None:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    loss_of(x, w).backward()
    dx, dw = d(X, spec).requires_grad_(), d(W, "i (tp o)").requires_grad_()
    loss_of(dx, dw).backward()
    loss_of(dx, dw).backward()  # accumulates
    for leaf, plain in ((dx, x), (dw, w)):
        assert isinstance(leaf.grad, cf.DTensor)
        assert leaf.grad.sharding is leaf.sharding
        torch.testing.assert_close(leaf.grad.full(), 2 * plain.grad)


def test_gradients_pass_distribute_redistribute_full() -> None:
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(d(x, "(dp b) d").redistribute("b (tp d)").pow(2).redistribute("(tp b) d").full().sum(), x)
    torch.testing.assert_close(grad, 2 * X)
    assert type(grad) is torch.Tensor


def test_second_derivatives() -> None:
    x = d(X, "(dp b) d").requires_grad_()
    (first,) = torch.autograd.grad((x.redistribute("b (tp d)") ** 3).full().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second.full(), 6 * X)


def test_torch_optimizers_write_in_place() -> None:
    x = X.clone().requires_grad_()
    dx = d(X, "(dp b) d").requires_grad_()
    for leaf in (x, dx):
        opt = torch.optim.SGD([leaf], lr=0.1, momentum=0.9, foreach=False)
        for _ in range(2):
            opt.zero_grad()
            leaf.pow(2).sum().backward()
            opt.step()
    torch.testing.assert_close(dx.detach().full(), x.detach())


# ---- memory that a step takes over ----


def test_what_a_step_consumed_is_refused_and_copies_live_on() -> None:
    step = cf.shard(lambda w, x: (w + x.sum(), x.sum()), MESH)
    w = step.init(X, X)
    twin, view, copied = w.detach(), w.t(), w.redistribute(w.spec)
    plain = w.full()
    step(w, X)
    for lost in (w, twin, view):
        with pytest.raises(cf.ConsumedError, match=r"was donated to <lambda> at .* and its memory reused; .*use that call's output"):
            lost.full()
    assert w.is_consumed
    assert "consumed by <lambda>" in repr(w)
    assert torch.equal(plain, X)
    assert torch.equal(copied.full(), X)


# ---- to and from torch ----


@pytest.fixture
def one_process(tmp_path: Any) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_round_trip_through_torchs_dtensor(one_process: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = cf.Mesh(dp=1, tp=1)
    theirs = cf.distribute(X, "(dp b) (tp d)", mesh).to_torch()
    assert theirs.device_mesh.mesh_dim_names == ("dp", "tp")
    assert torch.equal(theirs.full_tensor(), X)
    back = cf.DTensor.from_torch(theirs)
    assert back.mesh.axes == mesh.axes
    assert torch.equal(back.full(), X)
    given = distribute_tensor(X, init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b")), [Shard(1), Replicate()])
    ours = cf.DTensor.from_torch(given)
    assert ours.mesh.axis_names == ("a", "b")
    same(ours @ cf.distribute(W, "i o", ours.mesh), X @ W)
    with pytest.raises(cf.InputError, match=r"to_torch needs a process group of the size of"):
        d(X, "b d").to_torch()
    with pytest.raises(cf.InputError, match=r"from_torch wants a torch.distributed.tensor.DTensor, not Tensor"):
        cf.DTensor.from_torch(X)


# ---- on real ranks ----


def on_a_rank() -> tuple[Any, ...]:
    """What test_real_ranks compares; runs in a process of its own, one per rank."""
    mesh = cf.Mesh(tp=2)
    x = cf.distribute(X, "b (tp i)", mesh).requires_grad_()
    w = cf.distribute(W, "(tp i) o", mesh)
    loss = (x @ w).softmax(-1).pow(2).sum()
    loss.backward()
    row = x.detach().clone()
    row[2] = 1
    assert isinstance(x.grad, cf.DTensor) and x.grad.sharding is x.sharding
    kept = torch.nn.functional.dropout(x.detach(), 0.5).full()  # by rank 0's seed
    return float(loss), x.grad.full(), x.redistribute("(tp b) d").local.detach(), row.full(), tuple(x.local.shape), kept


@pytest.mark.dist
def test_real_ranks() -> None:
    x = X.clone().requires_grad_()
    loss = (x @ W).softmax(-1).pow(2).sum()
    loss.backward()
    found = cf.launch(on_a_rank, 2, timeout_s=120)
    assert torch.equal(found[0][-1], found[1][-1])
    assert 0 < found[0][-1].count_nonzero() < 32
    for rank, (value, grad, rows, written, shape, _) in enumerate(found):
        assert value == pytest.approx(loss.item(), abs=1e-12)
        torch.testing.assert_close(grad, x.grad)
        assert torch.equal(rows, X[4 * rank : 4 * rank + 4])
        assert torch.equal(written, _write_row(X.clone()))
        assert shape == (8, 2)


def _write_row(x: torch.Tensor) -> torch.Tensor:
    x[2] = 1
    return x


def test_gradients_through_one_of_several_pieces() -> None:
    w = cf.distribute(torch.randn(4, 8), "a (tp b)", cf.Mesh(dp=2, tp=2)).requires_grad_()
    w.chunk(2, 0)[0].sum().backward()
    expected = torch.cat([torch.ones(2, 8), torch.zeros(2, 8)])
    torch.testing.assert_close(w.grad.full(), expected)


def test_a_number_is_read_without_the_dispatcher_and_errors_are_torch_s() -> None:
    mesh = cf.Mesh(dp=2)
    x = cf.distribute(torch.tensor([2.5]), "a", mesh).requires_grad_()
    assert (float(x), int(x), bool(x), x.item(), f"{x[0]:.1f}") == (2.5, 2, True, 2.5, "2.5")
    assert float(cf.distribute(torch.arange(4.0), "(dp a)", mesh).sum()) == 6.0
    for read in (float, int, bool, torch.Tensor.item):
        with pytest.raises(RuntimeError, match=r"ambiguous|cannot be converted"):
            read(cf.distribute(torch.ones(2), "a", mesh))
