"""What users of other libraries can write where a step cannot go on: a plugin, given by the hook that other plugins use.

No library is imported for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from colofunc.plugins.hints import LibraryHint
from colofunc.plugins.hookspecs import hookimpl

EXPERTS = 'experts_implementation="grouped_mm" (or "batched_mm"), where the model is loaded or configured'
# Where transformers chooses how experts are computed; a loop that it leads to is its "eager" implementation.
EXPERTS_LOOP = os.path.join("transformers", "integrations", "moe.py")

HINTS: Mapping[str, Sequence[LibraryHint]] = {
    "transformers": (
        LibraryHint("experts", EXPERTS),
        LibraryHint(
            "values", f"these experts run in a Python loop over those that have tokens. {EXPERTS}", EXPERTS_LOOP
        ),
        LibraryHint("attention", "attn_implementation='sdpa'"),
        LibraryHint(
            "checkpoint", "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"
        ),
    ),
    "timm": (LibraryHint("tokens", "class_token=False, global_pool='avg'"),),
}


@hookimpl
def colofunc_hints() -> Mapping[str, Sequence[LibraryHint]]:
    return HINTS
