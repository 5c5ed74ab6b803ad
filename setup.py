"""Names the packages, which pyproject.toml alone cannot: the folder plugins/ is imported as colofunc_plugins, and the sources of
kernels in ext/cuda/ are data of colofunc. Kernels that `make wheel NATIVE="cpu cuda"` has compiled go into a wheel for this kind of
machine; any Python and any supported torch may load them, so the tag names neither."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel

core = find_packages(include=["colofunc", "colofunc.*"])
plugins = ["colofunc_" + name for name in find_packages(include=["plugins", "plugins.*"])]

sources = ["colofunc.native_sources", "colofunc.native_sources.cpu", "colofunc.native_sources.cuda"]
compiled = ["colofunc.native_sources.compiled"] if list(Path("ext/cuda/compiled").glob("*.so")) else []


class Wheel(bdist_wheel):
    """For one kind of machine where there are compiled kernels in it."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = not compiled

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(
    packages=core + plugins + sources + compiled,
    package_dir={"colofunc_plugins": "plugins", "colofunc.native_sources": "ext/cuda"},
    cmdclass={"bdist_wheel": Wheel},
)
