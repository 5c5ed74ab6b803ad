"""Names the packages, which pyproject.toml alone cannot: the folder plugins/ is imported as colofunc_plugins, and the sources of
kernels in ext/cuda/ are data of colofunc."""

from setuptools import find_packages, setup

core = find_packages(include=["colofunc", "colofunc.*"])
plugins = ["colofunc_" + name for name in find_packages(include=["plugins", "plugins.*"])]

sources = ["colofunc.native_sources", "colofunc.native_sources.cpu", "colofunc.native_sources.cuda"]

setup(
    packages=core + plugins + sources,
    package_dir={"colofunc_plugins": "plugins", "colofunc.native_sources": "ext/cuda"},
)
