"""Trees of parameters by name: what an optimizer updates, whatever containers it lies in.

Problem: JAX-style steps keep parameters in any tree; globs, state and files want names. Idea: a parameter is called by
the path to it.

    {"encoder": {"0.weight": w}, "temperature": t}    encoder.0.weight, temperature
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from colofunc.errors import InputError
from colofunc.ops.quantized import Quantized
from colofunc.program.tracing.tree import Tree, flatten, join, walk


def named_parameters(what: str, params: Any) -> dict[str, Tensor]:
    """The tensors of a tree by name; None is no parameter. what: the function that was given them.

    Raises InputError for a leaf that is no tensor, for a quantized weight, and where two parameters have one name.
    """
    for node in _nodes(flatten(params)[1]):
        if node.type is Quantized:
            raise _no_parameter(what, node.name, "Quantized")
    named: dict[str, Tensor] = {}
    for name, leaf in walk(params):
        if leaf is None:
            continue
        if not isinstance(leaf, Tensor) or not name:
            raise _no_parameter(what, name, type(leaf).__name__)
        if name in named:
            raise InputError(f"{what}: two parameters are called {name!r}. Try: keys without dots")
        named[name] = leaf
    return named


def _no_parameter(what: str, name: str, kind: str) -> InputError:
    where = f"{name!r} is a {kind}" if name else f"there is a {kind}"
    return InputError(f"{what}: parameters are tensors in a dict or another container, and {where}. Try: model.params")


def _nodes(tree: Tree) -> Iterator[Tree]:
    yield tree
    for child in tree.children:
        yield from _nodes(child)


def named_gradients(grads: Any, params: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """The gradients of `params` by name, None where there is none.

    Raises InputError where names or shapes are not those of the parameters.
    """
    named: dict[str, Tensor | None] = {}
    for name, leaf in walk(grads):
        if leaf is None and name not in params:
            continue
        if not (leaf is None or isinstance(leaf, Tensor)) or not name:
            which = f"gradient of {name!r} is" if name else "gradients are"
            raise InputError(
                f"update: the {which} a {type(leaf).__name__}. Try: a tree like that of the parameters, as "
                "cf.value_and_grad returns it"
            )
        named[name] = leaf
    missing = [name for name in params if name not in named]
    unknown = [name for name in named if name not in params]
    if missing or unknown:
        raise InputError(
            f"update: no gradient for {missing[:4]}, no parameter for {unknown[:4]}. Try: gradients with the names of "
            "the parameters"
        )
    check_shapes("grads", {name: grad for name, grad in named.items() if grad is not None}, params)
    return named


def check_shapes(key: str, tensors: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
    """Raises InputError where a tensor has another shape than the parameter of its name.

    key: what holds the tensors.
    """
    for name, tensor in tensors.items():
        if tensor.shape != params[name].shape:
            raise InputError(
                f"update: {join(key, name)!r} has shape {tuple(tensor.shape)}, and the parameter {name!r} "
                f"{tuple(params[name].shape)}. Try: the state that init(params) of this optimizer made"
            )
