"""Writes the pages of docs/ that are derived from docstrings: `python tools/docs.py`.

The hook specifications are the plugin manual and the error classes are the errors page; a test holds that the pages in
docs/ are what this makes of them.
"""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import colofunc_plugins  # noqa: E402

import colofunc as cf  # noqa: E402
from colofunc import cache, env, errors  # noqa: E402
from colofunc.planner.wishes import product_pairs  # noqa: E402
from colofunc.plugins import hookspecs, operators  # noqa: E402

NOTE = "<!-- Written by tools/docs.py from {}; do not edit. -->\n"
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
        parts.append(f"### {name}\n\n`-> {returns}`\n\n{inspect.getdoc(hook)}\n")
    parts += [
        "## Operators of your own\n",
        _code(inspect.getdoc(operators) or "", "python") + "\n",
        f"`cf.operator{_signature(operators.operator)}`\n\n{inspect.getdoc(operators.operator)}\n",
        *(part for title, thing, names in PIECES for part in _pieces(title, thing, names)),
        "## A whole plugin\n",
        "`examples/scan_plugin` is a package of its own: `pip install examples/scan_plugin`, and every `cf.shard` "
        "finds it.\n",
        f"```toml\n{(EXAMPLE / 'pyproject.toml').read_text()}```\n",
        f"```py\n{(EXAMPLE / 'colofunc_scan.py').read_text()}```\n",
        "Beside it lies an operator of its own with a kernel for GPUs, by `cf.operator` and `colofunc_kernels`: a call on "
        "a GPU gets the kernel where its guard agrees, and the plan counts its seconds and its memory.\n",
        f"```py\n{(EXAMPLE / 'colofunc_decayed.py').read_text()}```\n",
        "A transform as a package is `examples/narrow_gradients`; [Writing a transform](writing_a_transform.md) says "
        "how.\n",
    ]
    return "\n".join(parts)


PIECES = (
    ("Reading a step: `cf.ext.reading`", cf.ext.reading, "cf.ext.reading"),
    ("Products: `cf.ext.products`", cf.ext.products, "cf.ext.products"),
    ("Pairs of products: `cf.ext.product_pairs`", product_pairs, "cf.ext"),
    ("Attention: `cf.ext.AttentionCall`", inspect.getmodule(cf.ext.AttentionCall), "cf.ext"),
    ("Patterns of attention: `cf.ext.AttentionPattern`", inspect.getmodule(cf.ext.AttentionPattern), "cf.ext"),
    ("Tokens: `cf.ext.tokens`", cf.ext.tokens, "cf.ext.tokens"),
    ("Local code: `cf.ext.local`", cf.ext.local, "cf.ext.local"),
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
                rows.append(
                    f"    - `.{what}{_signature(member).replace('(self, ', '(').replace('(self)', '()')}`: "
                    f"{_line(member)}"
                )
    return [*parts, "\n".join(rows) + "\n"]


def _line(thing: object) -> str:
    """A docstring in one line; what would be a link in Markdown is none."""
    return " ".join((inspect.getdoc(thing) or "").split()).replace("](", "] (")


def _signature(fn: object) -> str:
    """The arguments of a function, without the types that its documentation says."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    words = []
    for given in inspect.signature(fn).parameters.values():  # type: ignore[arg-type]
        name = stars.get(given.kind, "") + given.name
        words.append(name if given.default is given.empty else f"{name}={_default(given.default)}")
    return f"({', '.join(words)})"


def _default(value: object) -> str:
    """A default as one writes it; a function by its name."""
    if not inspect.isfunction(value):
        return repr(value)
    return "..." if value.__name__ == "<lambda>" else value.__name__


def errors_page() -> str:
    """docs/errors.md"""
    parts = [
        NOTE.format("colofunc/errors.py") + "# Errors\n",
        "All derive from `cf.ColofuncError` and from the builtin named beside them. A message says what, on which "
        "value, "
        "and one thing to try; notes below it add the spec, the shape, the mesh and your line.\n",
    ]
    for name, cls in vars(errors).items():
        if isinstance(cls, type) and issubclass(cls, errors.ColofuncError):
            builtin = cls.__bases__[-1].__name__
            parts.append(f"## {name}\n\n`{builtin}`\n\n{inspect.getdoc(cls)}\n")
    return "\n".join(parts)


# What people look for, in the order in which they meet it. Names that stand nowhere here are for authors of plugins.
SECTIONS = {
    "Meshes and tensors": (
        "Mesh", "Topology", "topology", "profile_mesh", "DTensor", "Spec", "Layout", "distribute", "from_local", "launch", "join",
    ),
    "Models, optimizers, gradients": (
        "functional", "Model", "lazy", "abstract", "lora", "adapt", "Optimizer", "Lion", "LAMB", "schedule", "train_step",
        "value_and_grad", "clip_by_global_norm",
    ),
    "Transforms": (
        "shard", "offload", "checkpoint", "precision", "Policy", "fp8", "quantize", "accumulate", "pipeline", "local_stats",
        "expert_capacity", "every", "save_only", "Staged", "configure",
    ),
    "Quantized weights": (
        "awq", "gptq", "smoothquant", "input_moments", "input_maxima", "sensitivities", "scheme_errors", "scheme_choice",
    ),
    "Plans": ("Plan",),
    "Data, saving, randomness": (
        "batches", "Batches", "pad", "save", "load", "save_pretrained", "random", "random_state", "set_random_state",
    ),
    "Inside a step": ("collectives", "moe", "debug"),
    "Testing": ("testing",),
}  # fmt: skip


def reference_page() -> str:
    """docs/reference.md: every public name with its signature and its docstring."""
    parts = [
        NOTE.format("the docstrings of all public names") + "# Reference\n",
        "`import colofunc as cf`. Named plans (`zero`, `tensor`, ...) are in `colofunc_plugins`; errors have "
        "[a page of their own](errors.md), and hooks of plugins [another](plugins.md).\n",
    ]
    listed = {name for names in SECTIONS.values() for name in names}
    errors_too = [name for name in cf.__all__ if _is_error(getattr(cf, name))]
    rest = tuple(name for name in cf.__all__ if name not in listed and name not in errors_too and name != "ext")
    for title, names in {**SECTIONS, "Plugins": rest}.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts += _entry(f"cf.{name}", getattr(cf, name))
    parts.append("## For authors of plugins: `cf.ext`\n")
    for name in cf.ext.__all__:
        if name not in cf.__all__:
            parts += _entry(f"cf.ext.{name}", getattr(cf.ext, name))
    parts.append("## Errors\n")
    parts += [f"- `cf.{name}`: {_line(getattr(cf, name)).split('. ')[0].rstrip('.')}" for name in errors_too]
    parts.append("\n## Named plans: `colofunc_plugins`\n")
    for name in public_names(colofunc_plugins):
        parts += _entry(f"colofunc_plugins.{name}", getattr(colofunc_plugins, name))
    return "\n".join(parts)


def _is_error(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, errors.ColofuncError)


def public_names(module: Any) -> list[str]:
    """What a module offers: its `__all__`, else the functions and classes that it defines."""
    said = getattr(module, "__all__", None)
    if said is not None:
        return list(said)
    made_here = (
        name
        for name, thing in vars(module).items()
        if callable(thing) and getattr(thing, "__module__", "").startswith(module.__name__) and not name.startswith("_")
    )
    return sorted(made_here)


def members(cls: type) -> dict[str, Any]:
    """Name -> function of the public methods and properties that a class defines itself."""
    found: dict[str, Any] = {}
    for name, member in vars(cls).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            found[name] = member.fget
        elif isinstance(member, classmethod | staticmethod):
            found[name] = member.__func__
        elif inspect.isfunction(member):
            found[name] = member
    return found


def _entry(name: str, thing: Any) -> list[str]:
    """One public name: signature, docstring, and what is in it."""
    words = _code(inspect.getdoc(thing) or "") + "\n"
    if inspect.ismodule(thing):
        inner = [
            f"- `{name}.{what}{_call(getattr(thing, what))}`: {_line(getattr(thing, what))}"
            for what in public_names(thing)
        ]
        return [f"### {name}\n", words, *inner, ""]
    lines = [f"### {name}\n", f"`{name}{_call(thing)}`\n", words]
    if inspect.isclass(thing):
        for what, member in members(thing).items():
            is_property = isinstance(vars(thing)[what], property)
            given = (
                ""
                if is_property
                else _signature(member).replace("(self, ", "(").replace("(self)", "()").replace("(cls, ", "(")
            )
            lines.append(f"- `.{what}{given}`: {_line(member)}")
    return [*lines, ""]


def _call(thing: Any) -> str:
    """The signature of what can be called, "" for other values."""
    if not callable(thing):
        return ""
    try:
        return _signature(thing)
    except ValueError:
        return "(...)"


def environment_page() -> str:
    """docs/environment.md"""
    rows = [f"| `{name}` | {words} |" for name, words in env.SWITCHES.items()]
    return "\n".join([
        NOTE.format("colofunc/env.py") + "# Environment variables and the cache folder\n",
        "Nothing else is read from the environment: `colofunc/env.py` is the only module that looks.\n",
        "| variable | what it does |", "|---|---|", *rows, "",
        "Set by a launcher, such as `torchrun`: `RANK` and `WORLD_SIZE` (a process of several if both are there), "
        "`LOCAL_RANK`, "
        "`LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, `TORCHELASTIC_USE_AGENT_STORE`, "
        "`TORCHELASTIC_RESTART_COUNT`. "
        "By whoever builds: `CXX`, the C++ compiler for kernels, and `CUDA_HOME`, the toolkit whose nvcc compiles "
        "those for GPUs.\n",
        "## The cache folder\n",
        _code(inspect.getdoc(cache) or "") + "\n",
        "It is `~/.cache/colofunc`, or `colofunc` in `XDG_CACHE_HOME`, or what `COLOFUNC_CACHE` names; "
        "`COLOFUNC_CACHE=off` keeps nothing. "
        f"Its entries take at most {env.CACHE_MIB} MiB, or `COLOFUNC_CACHE_MIB`. It may be deleted at any time.\n",
    ])  # fmt: skip


# ---- constants ----

CONSTANTS_OF = ("colofunc/planner", "colofunc/compiler", "colofunc/program", "colofunc/spec", "colofunc/transforms", "plugins")
"""Folders whose modules decide by numbers."""


def constants_of(source: str) -> list[tuple[str, str, str]]:
    """(name, value as it is written, words) of the numbers that a module keeps under names in capitals.

    Words are the string below, else the comment behind it, else the comment above.
    """
    lines, body, found = source.splitlines(), ast.parse(source).body, []
    for node, below in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.Assign) or not _is_number(node.value):
            continue
        name = ast.unparse(node.targets[0]).strip("()")
        if not name.isupper() or name.startswith("_"):
            continue
        words = ""
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            words = str(below.value.value)
        elif "  # " in lines[node.lineno - 1]:
            words = lines[node.lineno - 1].partition("  # ")[2]
        else:
            first = node.lineno - 1
            while lines[first - 1].startswith("# "):
                first -= 1
            words = " ".join(line.removeprefix("# ") for line in lines[first : node.lineno - 1])
        found.append((name, ast.unparse(node.value).strip("()"), " ".join(words.split())))
    return found


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    return isinstance(node, ast.Tuple) and bool(node.elts) and all(map(_is_number, node.elts))


def constants_page() -> str:
    """docs/constants.md"""
    parts = [
        NOTE.format(", ".join(CONSTANTS_OF)) + "# Constants\n",
        "The numbers that the planner, the compiler, passes, conversions, transforms and plugins decide by, or are limited "
        "by. Those of machines stand in `colofunc/mesh`. What switching off a search costs, and what other values of its "
        "limits change, is in [the architecture](architecture.md#why-a-heuristic-is-there).\n",
    ]
    for folder in CONSTANTS_OF:
        for path in sorted((ROOT / folder).rglob("*.py")):
            rows = constants_of(path.read_text())
            if rows:
                parts += [f"## {path.relative_to(ROOT).as_posix()}\n", "| constant | value | what it is |", "|---|---|---|"]
                parts += [f"| `{name}` | `{value}` | {words.replace('|', chr(92) + '|')} |" for name, value, words in rows]
                parts.append("")
    return "\n".join(parts)


def main() -> None:
    (ROOT / "docs" / "constants.md").write_text(constants_page())
    (ROOT / "docs" / "environment.md").write_text(environment_page())
    (ROOT / "docs" / "reference.md").write_text(reference_page())
    (ROOT / "docs" / "plugins.md").write_text(hooks_page())
    (ROOT / "docs" / "errors.md").write_text(errors_page())


if __name__ == "__main__":
    main()
