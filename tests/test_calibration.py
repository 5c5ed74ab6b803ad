"""Schemes for single weights (`by_name`), their scales of inputs, and what calibration says to values that do not fit."""

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from quantize_matrix import WHERE, step_of, tokens
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import colofunc as cf
from colofunc.compiler.quantized_weights import packed
from colofunc.ops.quantizers import BUILT_IN
from colofunc.program.lazy import lazy_tensor, make

INT8 = partial(cf.ext.Quantizer, form="int8", quantize=BUILT_IN["int8"].quantize)


# ---- a model of mixtures of experts ----


@pytest.mark.parametrize("maker", [cf.input_moments, cf.input_maxima, cf.sensitivities])
def test_a_double_mixtral_is_measured_by_itself_as_in_a_step(maker: Callable[..., Any]) -> None:
    """Its experts are grouped products, which torch refuses in float64, and dropout draws the numbers of a step."""
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        num_experts_per_tok=2, vocab_size=64, max_position_embeddings=32, use_cache=False, attention_dropout=0.5,
    )  # fmt: skip
    module = MixtralForCausalLM(config).double().train()
    module.set_experts_implementation("grouped_mm")
    model = cf.functional(module)
    ids = torch.randint(0, 64, (2, 8))

    def loss(params: Any, ids: torch.Tensor) -> torch.Tensor:
        return model.apply(params, model.buffers, input_ids=ids)[0].logits.square().mean()

    step = cf.shard(maker(loss), cf.Mesh())
    found = []
    for measuring in (maker(loss), step.eager, step):
        with cf.random(3):  # of attention's dropout
            found.append(torch.utils._pytree.tree_leaves(measuring(model.params, ids)))
    alone, eager, staged = found
    assert len(alone) == len(eager) == len(staged) >= 11
    for value, same, wanted in zip(alone, eager, staged, strict=True):
        torch.testing.assert_close(value, wanted.full(), rtol=1e-10, atol=1e-12)
        assert torch.equal(value, same)


# ---- schemes by the name of a weight ----


def test_a_weight_of_its_own_outliers_has_its_inputs_rounded_so() -> None:
    own = {"up.weight": 6.0, "down.weight": None}
    step_fn, params, _ = step_of("arguments")
    _, adapters, _ = step_of("adapters")
    trains = step_of("adapters")[0]
    for outer in (None, 2.0):
        scheme = INT8("own", outliers=outer, by_name=lambda name: INT8("own", outliers=own[name]))
        for step, state in ((step_fn, params), (trains, adapters)):
            program = cf.quantize(step, scheme, where=WHERE).lower(state, tokens()).global_program
            assert [node.args[1] for node in program.nodes if node.target == "colofunc.row_size"] == [6.0]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            BUILT_IN["int8"].quantize,
            "returned a function. Try: by_name= that returns the scheme for a weight, Quantizer('mine', form='int8', quantize=...)",
        ),
        (
            INT8("other"),
            "returned the scheme 'other' in the format 'int8', and all weights of a scheme have its name and format. "
            "Try: Quantizer('mine', form='int8', quantize=...)",
        ),
        (
            cf.ext.Quantizer("mine", form="fp8", quantize=BUILT_IN["fp8"].quantize),
            "returned the scheme 'mine' in the format 'fp8', and all weights of a scheme have its name and format. "
            "Try: Quantizer('mine', form='int8', quantize=...)",
        ),
    ],
)
def test_what_by_name_returns_is_looked_at(given: Any, says: str) -> None:
    step_fn, params, _ = step_of("arguments")
    with pytest.raises(cf.InputError) as caught:
        cf.quantize(step_fn, INT8("mine", by_name=lambda name: given), where="up.weight").lower(params, tokens())
    assert str(caught.value) == f"Quantizer 'mine': by_name('up.weight') {says}"


@pytest.mark.parametrize("make_scheme", [cf.awq, cf.gptq, lambda moments: cf.smoothquant({"w": moments["w"].diagonal()})])
def test_a_scheme_can_be_pickled(make_scheme: Callable[..., Any]) -> None:
    w = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    scheme = make_scheme({"w": torch.diag(torch.linspace(1.0, 9.0, 128))}).named("w")
    again = pickle.loads(pickle.dumps(scheme))
    assert all(map(torch.equal, again.pack(w).tensors, scheme.pack(w).tensors))


# ---- scales of inputs ----

SHOULD = "Try: input_scale= that returns float32 (128,), finite and above 0"
BAD_SCALES: dict[str, tuple[Any, str]] = {
    "zeros": (torch.ones(128).index_fill(0, torch.tensor([3]), 0.0), "numbers that are not above 0"),
    "negative": (-torch.ones(128), "numbers that are not above 0"),
    "short": (torch.ones(64), "float32 (64,)"),
    "a matrix": (torch.ones(1, 128), "float32 (1, 128)"),
    "a number": (2.0, "a float"),
    "double": (torch.ones(128, dtype=torch.float64), "float64 (128,)"),
    "NaN": (torch.full((128,), float("nan")), "NaN or infinite numbers"),
    "infinite": (torch.full((128,), float("inf")), "NaN or infinite numbers"),
}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(("scale", "says"), BAD_SCALES.values(), ids=BAD_SCALES)
def test_a_scale_that_cannot_be_one_is_named(scale: Any, says: str, lazy: bool) -> None:
    scheme = INT8("mine", input_scale=lambda blocks: scale)
    w: torch.Tensor = torch.ones(4, 128)
    if lazy:
        w = lazy_tensor(w.shape, w.dtype, partial(torch.ones, 4, 128))
    with pytest.raises(cf.InputError) as caught:
        make(packed(scheme, w).data)
    assert str(caught.value) == f"Quantizer 'mine': input_scale= returned {says}. {SHOULD}"


@pytest.mark.parametrize("lazy", [False, True])
def test_of_a_weight_that_is_not_finite_the_weight_is_named(lazy: bool) -> None:
    scheme = INT8("mine", input_scale=lambda blocks: torch.cat(list(blocks)).abs().amax(0))
    w = torch.full((4, 128), float("inf"))
    given = lazy_tensor(w.shape, w.dtype, w.clone) if lazy else w
    with pytest.raises(cf.InputError, match=r"^cf\.quantize: 'weight' has rows with NaN or infinite numbers"):
        make(packed(scheme, given).data)


# ---- what was measured ----


def test_of_no_rows_the_largest_is_zero() -> None:
    """As moments are."""
    model = cf.functional(torch.nn.Linear(128, 8))
    for measure in (cf.input_maxima, cf.input_moments):
        step = cf.shard(measure(lambda params, x: model.apply(params, {}, x)[0], where="weight"), cf.Mesh())
        assert not step(model.params, torch.ones(0, 3, 128))["weight"].full().any()


GOOD, FIVE = torch.ones(4), torch.ones(5)
NOTHING = "there are no moments. Try: those that a step of cf.input_moments returns, or a list of them"
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "two models": (
        lambda: cf.smoothquant([{"w": GOOD}, {"w": FIVE}]),
        "cf.smoothquant: maxima of 'w' are (4,) in one batch and (5,) in another. Try: maxima of one model",
    ),
    "numbers": (
        lambda: cf.smoothquant({"w": [1.0, 2.0]}),  # type: ignore[dict-item]
        "cf.smoothquant: maxima of 'w' are a list. Try: tensors, as a step of cf.input_maxima returns them",
    ),
    "None": (lambda: cf.awq(None), f"cf.awq: {NOTHING}"),  # type: ignore[arg-type]
    "a number": (lambda: cf.gptq(5), f"cf.gptq: {NOTHING}"),  # type: ignore[arg-type]
    "alpha": (
        lambda: cf.smoothquant({"w": GOOD}, alpha="x"),  # type: ignore[arg-type]
        "cf.smoothquant(alpha='x'): a part of what is moved, from 0 to 1. Try: alpha=0.5",
    ),
    "damping": (
        lambda: cf.gptq({"w": torch.eye(4)}, damping="x"),  # type: ignore[arg-type]
        "cf.gptq(damping='x'): moments of few rows have no inverse. Try: damping=0.01",
    ),
    "negative": (
        lambda: cf.smoothquant({"w": -GOOD}),
        "cf.smoothquant: the maxima of 'w' have negative numbers, and are of |x|. Try: cf.input_maxima, or their abs()",
    ),
    "two names": (
        lambda: cf.smoothquant({"a.w": GOOD, "b.w": GOOD}).named("w"),
        "cf.smoothquant: there are maxima of 'a.w' and of 'b.w', and each may be meant for 'w'. Try: maxima by the names that weights have "
        "in the step",
    ),
}


@pytest.mark.parametrize(("mistake", "says"), MISTAKES.values(), ids=MISTAKES)
def test_measures_that_do_not_fit_are_named(mistake: Callable[[], Any], says: str) -> None:
    with pytest.raises(cf.InputError) as caught:
        mistake()
    assert str(caught.value) == says


def test_weights_are_found_in_any_argument() -> None:
    torch.manual_seed(0)
    model, x = cf.functional(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))), torch.randn(16, 8)
    teacher = {name: value + 1 for name, value in model.params.items()}

    def forward(params, x):
        return model.apply(params, {}, x)[0]

    for maker in (cf.input_moments, cf.input_maxima):
        want = maker(forward)(model.params, x)
        got = cf.shard(maker(lambda x, params, other: (forward(other, x), forward(params, x))), cf.Mesh())(x, model.params, teacher)
        assert want.keys() == got.keys() == {"0.weight", "2.weight"}
        assert all(torch.equal(want[name], got[name].full()) for name in want)
    by_name = cf.sensitivities(lambda x, params: forward(params, x).square().mean())(x, params=model.params)
    assert by_name["inputs"].keys() == {"0.weight", "2.weight"}
