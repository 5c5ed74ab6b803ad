"""Writes the pages of docs/ that are derived from docstrings: `python tools/docs.py`.

The hook specifications are the plugin manual and the error classes are the errors page; a test holds that the pages in
docs/ are what this makes of them.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import colofunc as cf  # noqa: E402
from colofunc import errors  # noqa: E402
from colofunc.planner.wishes import product_pairs  # noqa: E402
from colofunc.plugins import hookspecs, operators  # noqa: E402

NOTE = "<!-- Written by tools/docs.py from {}; do not edit. -->\n"
READ = frozenset(
    {"colofunc_rules", "colofunc_strategies", "colofunc_plans", "colofunc_passes", "colofunc_topologies", "colofunc_transforms"}
)
EXAMPLE = ROOT / "examples" / "scan_plugin"


def _code(text: str, language: str = "py") -> str:
    """Indented passages of a docstring as fenced code; `py` is an excerpt, which no test can run by itself."""
    out: list[str] = []
    inside = False
    for line in text.splitlines():
        indented = line.startswith("    ")
        if indented and not inside:
            out += [f"```{language}"]
        elif inside and line and not indented:
            while not out[-1]:
                out.pop()
            out += ["```", ""]
        inside = indented or (inside and not line)
        out.append(line[4:] if indented else line)
    return "\n".join([*out, "```"] if inside else out)


def hooks_page() -> str:
    """docs/plugins.md"""
    words = inspect.getdoc(hookspecs) or ""
    parts = [NOTE.format("colofunc/plugins/hookspecs.py") + "# Plugins\n", _code(words) + "\n", "## Hooks\n"]
    for name in hookspecs.HOOKS:
        hook = getattr(hookspecs, name)
        returns = str(inspect.signature(hook).return_annotation)
        note = "" if name in READ else "\n\n*Collected and checked; nothing in this version reads it yet.*"
        parts.append(f"### {name}\n\n`-> {returns}`\n\n{inspect.getdoc(hook)}{note}\n")
    parts += [
        "## Operators of your own\n",
        _code(inspect.getdoc(operators) or "", "python") + "\n",
        f"`cf.operator{_signature(operators.operator)}`\n\n{inspect.getdoc(operators.operator)}\n",
        *(part for title, thing, names in PIECES for part in _pieces(title, thing, names)),
        "## A whole plugin\n",
        "`examples/scan_plugin` is a package of its own: `pip install examples/scan_plugin`, and every `cf.shard` finds it.\n",
        f"```toml\n{(EXAMPLE / 'pyproject.toml').read_text()}```\n",
        f"```py\n{(EXAMPLE / 'colofunc_scan.py').read_text()}```\n",
    ]
    return "\n".join(parts)


PIECES = (
    ("Reading a step: `cf.reading`", cf.reading, "cf.reading"),
    ("Products: `cf.products`", cf.products, "cf.products"),
    ("Pairs of products: `cf.product_pairs`", product_pairs, "cf"),
    ("Attention: `cf.AttentionCall`", inspect.getmodule(cf.AttentionCall), "cf"),
    ("Patterns of attention: `cf.AttentionPattern`", inspect.getmodule(cf.AttentionPattern), "cf"),
    ("Tokens: `cf.tokens`", cf.tokens, "cf.tokens"),
    ("Local code: `cf.local`", cf.local, "cf.local"),
)


def _pieces(title: str, module: object, place: str) -> list[str]:
    """A module of pieces for plugins: what it is for, and what is in it."""
    parts = [f"## {title}\n", _code(inspect.getdoc(module) or "") + "\n"]
    rows = []
    for name in module.__all__:  # type: ignore[attr-defined]
        thing = getattr(module, name)
        if callable(thing):
            words = "" if isinstance(thing, type) else _signature(thing)
            rows.append(f"- `{place}.{name}{words}`: {_line(thing)}")
        for what, member in vars(thing).items() if isinstance(thing, type) else ():
            member = getattr(thing, what) if isinstance(member, classmethod | staticmethod) else member
            if not what.startswith("_") and isinstance(member, property):
                rows.append(f"    - `.{what}`" + (f": {_line(member)}" if member.__doc__ else ""))
            elif not what.startswith("_") and (inspect.isfunction(member) or inspect.ismethod(member)):
                rows.append(f"    - `.{what}{_signature(member).replace('(self, ', '(').replace('(self)', '()')}`: {_line(member)}")
    return [*parts, "\n".join(rows) + "\n"]


def _line(thing: object) -> str:
    return " ".join((inspect.getdoc(thing) or "").split())


def _signature(fn: object) -> str:
    """The arguments of a function, without the types that its documentation says."""
    given = inspect.signature(fn).parameters.values()  # type: ignore[arg-type]
    words = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in given]
    return f"({', '.join(words)})"


def errors_page() -> str:
    """docs/errors.md"""
    parts = [
        NOTE.format("colofunc/errors.py") + "# Errors\n",
        "All derive from `cf.ColofuncError` and from the builtin named beside them. A message says what, on which value, "
        "and one thing to try; notes below it add the spec, the shape, the mesh and your line.\n",
    ]
    for name, cls in vars(errors).items():
        if isinstance(cls, type) and issubclass(cls, errors.ColofuncError):
            builtin = cls.__bases__[-1].__name__
            parts.append(f"## {name}\n\n`{builtin}`\n\n{inspect.getdoc(cls)}\n")
    return "\n".join(parts)


def main() -> None:
    (ROOT / "docs" / "plugins.md").write_text(hooks_page())
    (ROOT / "docs" / "errors.md").write_text(errors_page())


if __name__ == "__main__":
    main()
