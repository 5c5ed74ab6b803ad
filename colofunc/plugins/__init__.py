"""The plugin door: hook specifications (the manual), and the registry they are merged into."""

from colofunc.plugins.hookspecs import hookimpl
from colofunc.plugins.operators import operator
from colofunc.plugins.registry import Registry, bringing, build_registry, given_plugins, name_of, topology

__all__ = ["Registry", "bringing", "build_registry", "given_plugins", "hookimpl", "name_of", "operator", "topology"]
