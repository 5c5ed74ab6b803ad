"""Makes plugins/ importable as `colofunc_plugins` without an install.

With this folder on the path (`PYTHONPATH=.:tools/inplace`; pytest does it by itself) this file takes the place of the
package that an install would make, and hands over to plugins/__init__.py. It is not part of a wheel.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_folder = Path(__file__).resolve().parents[2] / "plugins"
_spec = spec_from_file_location(__name__, _folder / "__init__.py", submodule_search_locations=[str(_folder)])
assert _spec is not None and _spec.loader is not None
_package = module_from_spec(_spec)
sys.modules[__name__] = _package  # the import system returns what it finds here
_spec.loader.exec_module(_package)
