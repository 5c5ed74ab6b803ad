"""Meshes of ranks, the machines under them, and what things cost there."""

from colofunc.mesh.cost import wire_bytes
from colofunc.mesh.mesh import Mesh
from colofunc.mesh.parts import axis_part
from colofunc.mesh.presets import PRESETS, resolve_topology
from colofunc.mesh.topology import KINDS, TIERS, Device, Level, Link, Measured, Rate, Tier, Topology

__all__ = [
    "KINDS",
    "PRESETS",
    "TIERS",
    "Device",
    "Level",
    "Link",
    "Measured",
    "Mesh",
    "Rate",
    "Tier",
    "Topology",
    "axis_part",
    "resolve_topology",
    "wire_bytes",
]
