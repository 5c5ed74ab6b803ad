"""Policies of memory by name, with options.

    offload:
      budget: 6GiB
      policy: {gemini: {placement: auto, warmup: 2}}        # as `policy: gemini`, with options of its constructor
    checkpoint:
      policy: {save_only: ["*.attn", "*.mlp"]}              # cf.save_only("*.attn", "*.mlp"); {every: 2} is cf.every(2)

Problem: a policy is a record with a function in it, which no file can say. Idea: as with plans, the name is that of a
constructor, of a plugin or of ours, and its options are the ones of the constructor's signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import attrs

from colofunc.config.options import alternatives, bind, parameters
from colofunc.config.part import Part
from colofunc.config.source import Node
from colofunc.planner.offload.policies import MemoryPolicy
from colofunc.planner.recompute.policies import Policy, every, save_only
from colofunc.plugins import Registry


def with_policies(node: Node, allowed: Mapping[str, inspect.Parameter], registry: Registry) -> Node:
    """The options of a transform, with the policies in them made. Raises ConfigError with the line of what is refused."""
    if not isinstance(node.value, dict):
        return node
    known: dict[type, Mapping[str, Any]] = {
        MemoryPolicy: registry.memory_policies,
        Policy: {"save_only": save_only, "every": every},
    }
    options = dict(node.value)
    for key, child in node.value.items():
        for kind, constructors in known.items():
            if key in allowed and kind in alternatives(allowed[key].annotation):
                options[key] = _made(child, constructors)
    return attrs.evolve(node, value=options)


def _made(node: Node, constructors: Mapping[str, Any]) -> Node:
    """The node of a policy with its options as one of the policy itself; any other as it is."""
    if not isinstance(node.value, dict) or len(node.value) != 1:
        return node
    name, options = next(iter(node.value.items()))
    constructor = constructors.get(name)
    if constructor is None:
        return node
    if isinstance(constructor, MemoryPolicy):
        raise options.error(f"policy {name!r} takes no options; write policy: {name}")
    args, named = bind(options, name, parameters(constructor))
    return attrs.evolve(node, value=Part(name, constructor, args, named, options).call())
