"""The plugins that ship with colofunc, imported as `colofunc_plugins`.

    from colofunc_plugins import zero, tensor

Each enters by the same door as a third party's plugin, uses public names of colofunc only, and knows no other plugin.
"""

from colofunc_plugins.tp2d_25d_3d import tensor
from colofunc_plugins.zero import zero

__all__ = ["tensor", "zero"]
