"""Sequence."""

from collections.abc import Callable, Mapping
from typing import Any

from colofunc_plugins.sequence import ring as _ring

import colofunc as cf


@cf.hookimpl
def colofunc_strategies() -> Mapping[str, Callable[..., Any]]:
    return {"colofunc.attention": _ring.strategies, "colofunc.attention_backward": _ring.strategies}
