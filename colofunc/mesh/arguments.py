"""The arguments of a mesh: names that specs can use, sizes that ranks can fill, views that name real axes.

Problem: a wrong mesh fails far from where it was written. Idea: every mistake is found, with its name and one thing to
try, before the mesh exists.

>>> infer_sizes({"dp": -1, "tp": 2})          # under torchrun --nproc-per-node 8
{'dp': 4, 'tp': 2}
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Iterable, Mapping

import torch.distributed as dist

from colofunc import env
from colofunc.errors import MeshError, near

RESERVED = frozenset({"views", "topology", "device", "max", "min", "host", "disk"})
"""Words of specs (`max:tp`, `@host`) and arguments of Mesh, which no axis and no view may be called."""


def sizes_text(sizes: Mapping[str, int]) -> str:
    """`dp=2, tp=4`."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def check_name(name: object, what: str) -> None:
    """Raise MeshError unless an axis or view can be called that."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name == "_":
        raise MeshError(f"{what} name {name!r} is not an identifier; use letters, digits and _ such as 'dp'")
    if name in RESERVED:
        raise MeshError(f"{what} name {name!r} is reserved ({', '.join(sorted(RESERVED))}); choose another name")


def infer_sizes(axes: Mapping[str, int]) -> dict[str, int]:
    """Checked sizes, with a -1 replaced by what the number of launched ranks leaves for it."""
    for name, size in axes.items():
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise MeshError(f"axis {name!r} has size {size!r}; give a whole number, 1 or more (-1 under torchrun)")
    open_axes = [name for name, size in axes.items() if size == -1]
    if not open_axes:
        return dict(axes)
    if len(open_axes) > 1:
        raise MeshError(f"axes {open_axes} are all -1; only one can be inferred, give the sizes of the others")
    launch = env.launched()
    if dist.is_available() and dist.is_initialized():
        world = dist.get_world_size()
    elif launch is not None:
        world = launch.world_size
    else:
        raise MeshError(f"axis {open_axes[0]!r} is -1, but no launcher tells the rank count; use torchrun or a size")
    known = math.prod(size for size in axes.values() if size != -1)
    if world % known:
        raise MeshError(
            f"axis {open_axes[0]!r} cannot be inferred: {world} launched ranks are no multiple of {known} "
            f"({sizes_text(axes)}); change a size or --nproc-per-node"
        )
    return {name: world // known if size == -1 else size for name, size in axes.items()}


def check_views(
    sizes: Mapping[str, int], views: Mapping[str, Iterable[str]]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Views as (name, atomic axes) pairs; raises MeshError on clashes, unknown and repeated axes."""
    out = []
    for name, members in views.items():
        check_name(name, "view")
        if name in sizes:
            raise MeshError(f"view {name!r} is also an axis; choose another name")
        members = (members,) if isinstance(members, str) else tuple(members)
        for member in members:
            if member not in sizes:
                hint = "; a view's axes must be atomic" if member in views else near(str(member), sizes, "axes")
                raise MeshError(f"view {name!r} names {member!r}, which is no axis of the mesh{hint}")
        if len(set(members)) != len(members) or not members:
            raise MeshError(f"view {name!r} is {members}; name at least one axis, each once")
        out.append((name, members))
    return tuple(out)
