"""The plugin door: hook specifications (the manual), and the registry they are merged into."""

from colofunc.plugins.hookspecs import hookimpl
from colofunc.plugins.operators import operator
from colofunc.plugins.registry import Registry, bringing, build_registry, topology

__all__ = ["Registry", "bringing", "build_registry", "hookimpl", "operator", "topology"]
