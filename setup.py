"""Names the packages, which pyproject.toml alone cannot: the folder plugins/ is imported as colofunc_plugins."""

from setuptools import find_packages, setup

core = find_packages(include=["colofunc", "colofunc.*"])
plugins = ["colofunc_" + name for name in find_packages(include=["plugins", "plugins.*"])]

setup(packages=core + plugins, package_dir={"colofunc_plugins": "plugins"})
