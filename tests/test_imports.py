"""`import colofunc`: what is loaded then, and what when it is first used."""

import subprocess
import sys

import pytest

import colofunc as cf

HEAVY = (
    "scipy sympy transformers timm matplotlib yaml rich "
    "torch.distributed.tensor torch.distributed.checkpoint torch._dynamo torch._inductor"
)
CODE = f"""
import sys, torch
old = set(sys.modules)
import colofunc as cf

along = [name for name in {HEAVY.split()} if name in set(sys.modules) - old]
assert not along, along

rare = ["testing", "ext", "config", "functional.load", "functional.save", "functional.batches", "transforms.quantize"]
dear = ["transforms.shard", "transforms.offload", "compiler", "planner"]
assert not [name for name in (*rare, *dear) if "colofunc." + name in sys.modules], "loaded before anybody asked"
missing = [name for name in cf.__all__ if name not in dir(cf)]
assert not missing, missing
assert callable(cf.load) and cf.load is cf.load and "colofunc.functional.load" in sys.modules
assert cf.testing.check and cf.ext.Editor
from colofunc import batches, quantize
assert callable(batches) and callable(quantize) and callable(cf.functional)
"""


def test_an_import_is_light_and_names_that_are_seldom_used_are_loaded_when_they_are(subprocess_env: dict[str, str]) -> None:
    """`import colofunc` takes a fraction of the time of `import torch`: nothing of `HEAVY` comes along."""
    done = subprocess.run([sys.executable, "-c", CODE], env=subprocess_env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there_and_no_other() -> None:
    assert all(getattr(cf, name) is not None for name in cf.__all__)
    for name in cf._WHEN_USED:
        assert name in cf.__all__ and getattr(cf, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        cf.quantise  # noqa: B018
