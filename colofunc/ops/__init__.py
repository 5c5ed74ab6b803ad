"""Canonical operators: what stays whole in a trace, with its kernels, gradients and in-place twins.

Import from the modules: `define`, `linear`, `attention`, `random`, `update`, `canonical`, `collectives`.
"""
