"""The plugins that ship with colofunc, imported as `colofunc_plugins`.

Each enters by the same door as a third party's plugin, uses public names of colofunc only, and knows no other plugin.
"""
