"""The plugins that ship with colofunc, imported as `colofunc_plugins`; each enters by the same door as a third party's and uses public names only."""
