"""The import order is the architecture: this file parses every import and holds it.

Problem: a lower layer that reaches up once makes everything depend on everything.
Idea: `LAYERS` below is the whole rule, lowest first; a module may import its own layer and the ones above it in the
list. The checks are functions of (module name, source), so that each is tried on a line it must refuse.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from colofunc.plugins.registry import FORMATS, HINTS

ROOT = Path(__file__).resolve().parents[1]

# Lowest first. A module is where its own name stands, else where its nearest package does (`p.*`: only below p).
LAYERS: list[tuple[str, list[str]]] = [
    ("errors", ["colofunc.errors", "colofunc.version"]),
    ("compat", ["colofunc.compat"]),
    ("env", ["colofunc.env", "colofunc.cache", "colofunc.owned", "colofunc.progress", "colofunc.untrusted"]),
    ("mesh", ["colofunc.mesh"]),
    ("ops", ["colofunc.ops"]),
    ("spec", ["colofunc.spec"]),
    ("program", ["colofunc.program"]),
    ("plugins", ["colofunc.plugins"]),
    ("planner", ["colofunc.planner"]),
    ("executors", ["colofunc.executors"]),
    ("DTensor", ["colofunc.dtensor"]),
    ("compiler", ["colofunc.compiler"]),
    ("transforms", ["colofunc.transforms"]),
    ("pictures", ["colofunc.pictures"]),
    ("functional", ["colofunc.functional"]),
    ("config", ["colofunc.config"]),
    ("ext", ["colofunc.ext"]),
    ("integrations", ["colofunc.integrations"]),
    ("testing", ["colofunc.testing"]),
    ("command line", ["colofunc.command", "colofunc.cli", "colofunc.__main__"]),
    ("public", ["colofunc"]),  # colofunc/__init__.py
]

# Not dependencies of the core: imported inside the function that needs them, and only there.
OPTIONAL_EXTRAS = {
    "transformers", "timm", "torchvision", "PIL", "matplotlib", "peft", "diffusers", "hypothesis", "pytest",
    "yaml", "lightning", "accelerate",
}  # fmt: skip

# What takes half a second to import and few programs need (parts of torch, scipy's solvers, pretty tables), and what needs
# Triton or matplotlib: these, and modules of ours that are nothing without them. Layers hold for them as for all others.
SLOW_TO_IMPORT = (
    "rich.table", "scipy.optimize", "scipy.sparse",
    "torch.distributed.tensor", "torch.distributed.device_mesh", "colofunc.spec.placements",
    "torch.distributed.checkpoint", "colofunc.functional.checkpoint.dcp_planner",
    "colofunc.ops.random_triton", "colofunc.ops.fp8_triton", "colofunc.ops.experts_triton", "torch.nn.attention.flex_attention",
    "colofunc.pictures",
)  # fmt: skip

# Libraries that models come from, or that train them or keep their weights: only integrations speak to them.
MODEL_LIBRARIES = (
    "transformers", "peft", "diffusers", "timm", "bitsandbytes", "torchao", "compressed_tensors", "accelerate", "lightning",
)  # fmt: skip

OURS = ("colofunc", "colofunc_plugins")
OWN_NAMES = ("__name__", "__package__", "__spec__")

# Calls that import, or look for, the module whose name is their first argument.
IMPORTING_CALLS = ("import_module", "__import__", "find_spec")

# Private torch names that may stand outside compat.py: a stable tree library, and operators named in traced graphs.
ALLOWED_PRIVATE = ("torch.utils._pytree", "torch.ops.", "torch.distributed._functional_collectives")


# ---- reading the tree ----


@cache
def parsed(source: str) -> ast.Module:
    """The tree of a module, which every check looks at."""
    return ast.parse(source)


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    parts[0] = {"plugins": "colofunc_plugins"}.get(parts[0], parts[0])
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources(folder: str) -> dict[str, str]:
    return {module_name(path): path.read_text() for path in sorted((ROOT / folder).rglob("*.py"))}


@cache
def packages() -> frozenset[str]:
    return frozenset(module_name(p) for f in ("colofunc", "plugins") for p in (ROOT / f).rglob("__init__.py"))


def imports(module: str, source: str) -> Iterator[tuple[int, str, str]]:
    """(line, imported module, name taken from it or "") with relative imports made absolute."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + (module in packages())]
                base = ".".join([*parts, *([base] if base else [])])
            yield from ((node.lineno, base, alias.name) for alias in node.names)
        elif name := named_by_call(node):
            yield node.lineno, name, ""


def argument_of_call(node: ast.AST) -> ast.expr | None:
    """What a call such as `importlib.import_module(...)` is to import; None for anything else."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    called = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
    return node.args[0] if called in IMPORTING_CALLS else None


def named_by_call(node: ast.AST) -> str:
    """The module that a call imports, where it is written there; of `f"a.b.{name}"` the package a.b; else ""."""
    argument = argument_of_call(node)
    if isinstance(argument, ast.JoinedStr) and argument.values:
        begin = argument.values[0]
        written = begin.value if isinstance(begin, ast.Constant) else ""
        return str(written).rpartition(".")[0]
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return argument.value
    return ""


def targets(module: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, module) for each colofunc module imported: `from a import b` is a.b where that is a module."""
    known = sources("colofunc") | sources("plugins")
    for line, base, name in imports(module, source):
        if base.split(".")[0] in OURS:
            yield line, f"{base}.{name}" if f"{base}.{name}" in known else base


def layer_of(module: str) -> int | None:
    """Position in LAYERS: the module's own entry, else its nearest package's; None if there is none."""
    entries = {name: position for position, (_, names) in enumerate(LAYERS) for name in names}
    parts = module.split(".")
    for length in range(len(parts), 1, -1):
        name = ".".join(parts[:length])
        below = f"{name}.*" if length < len(parts) and f"{name}.*" in entries else name
        if below in entries:
            return entries[below]
    return entries["colofunc"] if module == "colofunc" else None


# ---- the checks: (module, source) -> messages ----


def check_order(module: str, source: str) -> list[str]:
    mine = layer_of(module)
    if mine is None:
        return [f"{module} is in no layer. Try: a package that has one, or name it in LAYERS of tests/test_layers.py"]
    found = []
    for line, target in dict.fromkeys(targets(module, source)):
        theirs = layer_of(target)
        if target.startswith("colofunc_plugins"):
            found.append(f"{module}:{line} imports {target}: the core knows no plugin")
        elif theirs is not None and theirs > mine:
            why = "import the module that defines the name" if target == "colofunc" else "move what is needed down"
            places = f"{module}:{line} ({LAYERS[mine][0]}) imports {target} ({LAYERS[theirs][0]})"
            found.append(f"{places}, which is higher. Try: {why}")
    return found


def check_transform(module: str, source: str) -> list[str]:
    """A transform imports no other transform; what all of them share is in colofunc/compiler/."""
    parts = module.split(".")
    if parts[:2] != ["colofunc", "transforms"] or len(parts) < 3:
        return []
    return [
        f"{module}:{line} imports another transform, {target}. Try: compiler/, or a pass"
        for line, target in targets(module, source)
        if target.startswith("colofunc.transforms") and target.split(".")[2] != parts[2]
    ]


def check_plugin(module: str, source: str, public: frozenset[str]) -> list[str]:
    """A plugin takes public names of colofunc (`cf.X`, `cf.ext.X`, imports of both) and nothing of another plugin."""
    found, aliases = [], set()
    mine = module.split(".")[:2]
    for line, base, name in imports(module, source):
        if base == "colofunc.ext" and f"ext.{name}" in public:
            continue
        if base.startswith("colofunc."):
            found.append(f"{module}:{line} imports {base}. Try: a public name, `from colofunc import {name or '...'}`")
        elif base == "colofunc" and name and name not in public:
            found.append(f"{module}:{line} takes colofunc.{name}, which is not public. Try: make it public")
    for line, target in targets(module, source):
        if target.startswith("colofunc_plugins") and target.split(".")[:2] != mine and len(mine) > 1:
            found.append(f"{module}:{line} imports another plugin, {target}. Try: a public name of colofunc")
    tree = parsed(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name == "colofunc"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            if node.attr not in public:
                found.append(f"{module}:{node.lineno} uses colofunc.{node.attr}, which is not public")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "ext":
            root = node.value.value
            if isinstance(root, ast.Name) and root.id in aliases and f"ext.{node.attr}" not in public:
                found.append(f"{module}:{node.lineno} uses colofunc.ext.{node.attr}, which is not public")
    return found


def check_private_torch(module: str, source: str) -> list[str]:
    """torch names with a leading underscore stand in compat.py only, where each has a fallback and a test."""
    if module == "colofunc.compat" or module.startswith("colofunc.compat."):
        return []
    tree, alias, used = parsed(source), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                used.append((node.lineno, name.name))
                alias[name.asname or name.name.split(".")[0]] = name.name if name.asname else name.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for name in node.names:
                used.append((node.lineno, f"{node.module}.{name.name}"))
                alias[name.asname or name.name] = f"{node.module}.{name.name}"
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            alias.setdefault(node.targets[0].id, dotted(node.value, alias))  # aten = torch.ops.aten
    used += [(node.lineno, dotted(node, alias)) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    bad = dict(sorted((line, name) for line, name in used if name.startswith("torch.") and is_private(name)))
    return [f"{module}:{line} uses {name}. Try: colofunc/compat.py, with a fallback" for line, name in bad.items()]


def dotted(node: ast.expr, alias: dict[str, str]) -> str:
    """`F.linear` -> torch.nn.functional.linear; "" for what is not a dotted name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts, node = [node.attr, *parts], node.value
    return ".".join([alias.get(node.id, node.id), *parts]) if isinstance(node, ast.Name) else ""


def is_private(name: str) -> bool:
    for allowed in ALLOWED_PRIVATE:
        if name.startswith(allowed):
            name = "" if allowed.endswith(".") else name.removeprefix(allowed)
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def check_environment(module: str, source: str) -> list[str]:
    if module == "colofunc.env":
        return []
    names = {"environ", "getenv", "putenv", "unsetenv", "environb"}
    found = []
    for node in ast.walk(parsed(source)):
        attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
        taken = isinstance(node, ast.ImportFrom) and node.module == "os" and any(a.name in names for a in node.names)
        if taken or (attribute and node.attr in names):
            found.append(f"{module}:{node.lineno} reads the environment. Try: a function of colofunc/env.py")
    return found


def check_habits(module: str, source: str) -> list[str]:
    """No `global`, no star imports, no imports inside functions but of optional extras, and those nowhere else; no
    import whose name hides which module it is."""
    tree, found = parsed(source), []
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.append(f"{module}:{node.lineno} has a global statement. Try: pass the value, or a frozen record")
        argument = argument_of_call(node)
        if argument is not None:
            own_name = any(isinstance(part, ast.Name) and part.id in OWN_NAMES for part in ast.walk(argument))
            # What is written in full may be written as an import; f"colofunc.transforms.{name}" may not.
            in_full = isinstance(argument, ast.Constant) and named_by_call(node).split(".")[0] in OURS
            if own_name or in_full:
                found.append(f"{module}:{node.lineno} imports by {ast.unparse(node)}. Try: an import statement")
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        origin = [] if isinstance(node, ast.Import) else ["." * node.level + (node.module or "")]
        names = origin or [alias.name for alias in node.names]
        optional = all(name.split(".")[0] in OPTIONAL_EXTRAS or name in SLOW_TO_IMPORT for name in names)
        if any(alias.name == "*" for alias in node.names):
            found.append(f"{module}:{node.lineno} imports *. Try: the names")
        if id(node) in inside and not optional:
            found.append(f"{module}:{node.lineno} imports {names[0]} inside a function. Try: the top of the file")
        if id(node) not in inside and optional and not guarded(tree, node):
            found.append(f"{module}:{node.lineno} needs the extra {names[0]}. Try: inside the function that uses it")
    return found


def check_libraries(module: str, source: str) -> list[str]:
    """Outside integrations no import of a library of models, and no text with the name of one: classes are recognised by
    such names, and an error that gives one speaks to users of this library only. Docstrings may."""
    if module.startswith("colofunc.integrations"):
        return []
    named = [(line, name.split(".")[0]) for line, name, _ in imports(module, source)]
    tree = parsed(source)
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    docstrings = {id(statement.value) for statement in statements if isinstance(statement.value, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            named += [(node.lineno, word) for word in re.findall(r"\w+", node.value)]
    bad = dict(sorted((line, name) for line, name in named if name in MODEL_LIBRARIES))
    where = "colofunc/integrations/formats, by the hook colofunc_model_libraries, or names that the registry gives"
    return [f"{module}:{line} speaks of {name}. Try: {where}" for line, name in bad.items()]


def guarded(tree: ast.Module, node: ast.stmt) -> bool:
    """Under `if TYPE_CHECKING:` or in a `try:` whose failure is handled."""
    blocks = [block for block in ast.walk(tree) if isinstance(block, ast.Try) or for_types_only(block)]
    return any(node in ast.walk(block) for block in blocks)


def for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """One import cycle, as the modules on it, or nothing."""
    state: dict[str, int] = {}
    path: list[str] = []

    def visit(module: str) -> list[str]:
        state[module] = 1
        path.append(module)
        for target in sorted(graph.get(module, ())):
            if state.get(target) == 1:
                return [*path[path.index(target) :], target]
            if target not in state and (cycle := visit(target)):
                return cycle
        path.pop()
        state[module] = 2
        return []

    return next((cycle for module in sorted(graph) if module not in state and (cycle := visit(module))), [])


def runtime_graph(files: dict[str, str]) -> dict[str, set[str]]:
    """Who runs whom when first imported: importing a.b.c also runs the __init__ of a.b, unless one is inside a.b."""
    graph: dict[str, set[str]] = {}
    for module, source in files.items():
        if "TYPE_CHECKING" in source:  # what only the type checker sees does not run
            tree = parsed(source)
            for node in ast.walk(tree):
                if isinstance(node, ast.If) and for_types_only(node):
                    node.body = [ast.Pass()]
            source = ast.unparse(ast.fix_missing_locations(tree))
        edges = set()
        for _, target in targets(module, source):
            parents = [target.rsplit(".", k)[0] for k in range(target.count("."))]
            edges |= {p for p in parents if p in files and not (module + ".").startswith(p + ".")}
        graph[module] = edges - {"colofunc", module}
    return graph


@cache
def public_names() -> frozenset[str]:
    """What colofunc/__init__.py binds, and with "ext." in front what colofunc/ext does: a plugin may use this and no more."""
    users, authors = _bound("colofunc"), _bound("colofunc.ext")
    return frozenset({"__version__", *users, *(f"ext.{name}" for name in authors)})


def _bound(package: str) -> set[str]:
    """The names that a package's `__init__` binds, but private ones."""
    names: set[str] = set()
    for node in ast.parse(sources("colofunc").get(package, "")).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
            if any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
                names |= {n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)}
    return {name for name in names if not name.startswith("_")}


# ---- the tree as it is ----

CORE_CHECKS = [check_order, check_transform, check_private_torch, check_environment, check_habits, check_libraries]


@pytest.mark.parametrize("check", CORE_CHECKS, ids=lambda check: check.__name__)
def test_core(check) -> None:
    found = [message for module, source in sources("colofunc").items() for message in check(module, source)]
    assert not found, "\n" + "\n".join(found)


def test_plugins() -> None:
    found: list[str] = []
    for module, source in sources("plugins").items():
        found += check_plugin(module, source, public_names())
        found += check_private_torch(module, source) + check_environment(module, source) + check_habits(module, source)
        found += check_libraries(module, source)
    assert not found, "\n" + "\n".join(found)


def test_what_is_loaded_by_name_is_an_integration() -> None:
    """The registry names modules of a layer above its own, as an entry point would."""
    for named in (FORMATS, HINTS):
        assert named in sources("colofunc") and layer_of(named) == layer_of("colofunc.integrations.loop")
    by_name = []
    for module, source in sources("colofunc").items():
        arguments = [argument_of_call(node) for node in ast.walk(parsed(source))]
        by_name += [module for argument in arguments if isinstance(argument, ast.Name) and argument.id.isupper()]
    assert by_name == ["colofunc.plugins.registry"] * 2


def test_no_import_cycles() -> None:
    cycle = find_cycle(runtime_graph(sources("colofunc")))
    hint = "Try: keep a package's __init__.py free of what its own lower modules are imported by"
    assert not cycle, f"{' -> '.join(cycle)}. {hint}"


def names_of_types(statements: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Public classes, each a type of its own, and names that stand for a type, with its text."""
    for node in statements:
        if isinstance(node, ast.ClassDef):
            yield node.name, f"class {node.name}, line {node.lineno}"
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name[0].isupper() and not name.isupper():
                yield name, ast.unparse(node.value)


def test_a_name_of_a_type_means_one_type() -> None:
    """In the core and in its plugins: a class has its name for itself, and an alias is one type wherever it is written."""
    types: dict[str, dict[str, str]] = {}
    for module, source in {**sources("colofunc"), **sources("plugins")}.items():
        for name, text in names_of_types(parsed(source).body):
            if not name.startswith("_"):
                types.setdefault(name, {})[module] = f"{text} of {module}" if text.startswith("class ") else text
    several = {name: said for name, said in types.items() if len(set(said.values())) > 1}
    assert len(types) > 800 and not several


@pytest.mark.parametrize("package", ["program", "program.passes", "executors", "dtensor", "compiler", "transforms"])
def test_packages_say_what_lives_in_them(package: str) -> None:
    """The docstring of a package names each of its files and folders."""
    said = ast.get_docstring(parsed(sources("colofunc")[f"colofunc.{package}"])) or ""
    named = set(re.findall(r"\w+", said))
    within = f"colofunc.{package}."
    inside = {name.removeprefix(within).partition(".")[0] for name in sources("colofunc") if name.startswith(within)}
    assert inside <= named, f"colofunc/{package}/__init__.py does not say what is in {sorted(inside - named)}"


def test_what_a_package_names_is_in_it() -> None:
    """A lower-case name in backticks in the docstring of a package is a module of it, or defined in one."""
    files = sources("colofunc")
    checked = 0
    for package in packages() & set(files):
        said = ast.get_docstring(parsed(files[package])) or ""
        names = set(re.findall(r"`([a-z_][a-z_0-9]*)/?`", said)) - {"cf"}
        inside: set[str] = set()
        for module, source in files.items():
            if names and module.startswith(package + "."):
                inside.update(module.removeprefix(package + ".").split("."))
                inside.update(defined_by(source))
        assert names <= inside, f"{package} names {sorted(names - inside)}, which is not in it"
        checked += len(names)
    assert checked > 40


def defined_by(source: str) -> Iterator[str]:
    """Functions and classes at the top of a module."""
    for node in parsed(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


# ---- each check refuses what it is for ----

REFUSED = [
    (check_order, "colofunc.mesh.mesh", "from colofunc.program import Program"),
    (check_order, "colofunc.mesh.mesh", "from ..planner.plan import Plan"),
    (check_order, "colofunc.spec.spec", "import colofunc.program.check"),
    (check_order, "colofunc.spec.rules.matmul", "from colofunc.dtensor.tensor import DTensor"),
    (check_order, "colofunc.planner.sharding.search", "import colofunc as cf"),
    (check_order, "colofunc.executors.simulated", "from colofunc_plugins import zero"),
    (check_order, "colofunc.mesh.mesh", "import importlib\ndef f():\n    importlib.import_module('colofunc.program.ir')"),
    (check_order, "colofunc.mesh.mesh", "from importlib import import_module\nimport_module('colofunc')"),
    (check_order, "colofunc.mesh.mesh", "from importlib.util import find_spec\nfind_spec('colofunc.planner.plan')"),
    (check_order, "colofunc.mesh.mesh", "import importlib\ndef f(name):\n    importlib.import_module(f'colofunc.ops.{name}')"),
    (check_order, "colofunc.mesh.mesh", "__import__('colofunc_plugins.zero')"),
    (check_order, "colofunc.helpers", "x = 1"),
    (check_transform, "colofunc.transforms.shard", "from colofunc.transforms.offload import offload"),
    (check_transform, "colofunc.transforms.shard", "from .offload import offload"),
    (check_private_torch, "colofunc.mesh.mesh", "from torch._subclasses import FakeTensorMode"),
    (check_private_torch, "colofunc.mesh.mesh", "import torch\nx = torch._C.foo"),
    (check_private_torch, "colofunc.mesh.mesh", "from torch import fx\nfx._symbolic_trace"),
    (check_private_torch, "colofunc.mesh.mesh", "from torch.utils import _pytree as tree\ntree._private"),
    (check_environment, "colofunc.mesh.mesh", "import os\nos.environ['RANK']"),
    (check_environment, "colofunc.mesh.mesh", "from os import getenv"),
    (check_habits, "colofunc.mesh.mesh", "def f():\n    global x\n    x = 1"),
    (check_habits, "colofunc.mesh.mesh", "def f():\n    import scipy"),
    (check_habits, "colofunc.mesh.mesh", "import scipy.optimize"),
    (check_habits, "colofunc.mesh.mesh", "import importlib\nimportlib.import_module('colofunc.errors')"),
    (check_habits, "colofunc.mesh.mesh", "import importlib\nimportlib.import_module(__name__.split('.')[0])"),
    (check_habits, "colofunc.mesh.mesh", "import transformers"),
    (check_habits, "colofunc.mesh.mesh", "from torch import *"),
    (check_libraries, "colofunc.functional.load", "def f():\n    from transformers import AutoModel"),
    (check_libraries, "colofunc.functional.load", "def f():\n    import peft.tuners"),
    (check_libraries, "colofunc.functional.load", "import importlib\nimportlib.import_module('torchao.quantization')"),
    (check_libraries, "colofunc.functional.load", "from importlib.util import find_spec\nfind_spec('diffusers')"),
    (check_libraries, "colofunc.functional.load", "def f(cls):\n    return cls.__module__ == 'transformers.modeling_utils'"),
    (check_libraries, "colofunc.functional.load", "import sys\nsys.modules.get('bitsandbytes')"),
    (check_libraries, "colofunc.functional.load", "raise ValueError('load: model= fills a model from a folder of transformers')"),
    (check_libraries, "colofunc.functional.load", "def f(it):\n    return f\"{it} is merged. Try: adapters='peft', or layout=None\""),
]

ALLOWED = [
    (check_order, "colofunc.planner.sharding.search", "from colofunc.spec.spec import Spec\nfrom colofunc import errors"),
    (check_order, "colofunc.dtensor.tensor", "from colofunc.program.tracing.trace import trace\nfrom .spec import Spec"),
    (check_order, "colofunc", "from colofunc.testing import check"),
    (check_order, "colofunc.config.chain", "import importlib\nimportlib.import_module(f'colofunc.transforms.{name}')"),
    (check_transform, "colofunc.transforms.shard", "from colofunc.compiler.staged import Staged"),
    (check_private_torch, "colofunc.compat", "import torch._C"),
    (check_private_torch, "colofunc.ops.linear", "import torch\naten = torch.ops.aten\naten._softmax.default"),
    (check_private_torch, "colofunc.ops.linear", "import torch.utils._pytree as pytree\npytree.tree_map"),
    (check_private_torch, "colofunc.ops.linear", "import torch\ntorch.__version__"),
    (check_environment, "colofunc.env", "import os\nos.environ['RANK']"),
    (check_habits, "colofunc.integrations.formats", "def f():\n    from transformers import AutoModel"),
    (check_libraries, "colofunc.integrations.formats", "def f():\n    from transformers import AutoModel"),
    (check_libraries, "colofunc.functional.load", "'Of transformers.'\ndef f():\n    'Of peft.'\n\nX = 1\n'Of diffusers.'"),
    (check_habits, "colofunc.functional.modules", "import importlib\ndef f(name):\n    importlib.import_module(name)"),
]


@pytest.mark.parametrize(("check", "module", "source"), REFUSED)
def test_refused(check, module: str, source: str) -> None:
    assert len(check(module, source)) == 1


@pytest.mark.parametrize(("check", "module", "source"), ALLOWED)
def test_allowed(check, module: str, source: str) -> None:
    assert check(module, source) == []


@pytest.mark.parametrize(
    "source",
    [
        "from colofunc.planner.sharding import search",
        "from colofunc import planner",
        "import colofunc as cf\ncf.planner",
        "from colofunc_plugins.gemini import chunks",
        "from colofunc_plugins import gemini",
        "from colofunc.ext import hidden",
        "import colofunc as cf\ncf.ext.hidden",
    ],
)
def test_plugin_refused(source: str) -> None:
    assert check_plugin("colofunc_plugins.zero.plan", source, frozenset({"Spec"}))


def test_plugin_allowed() -> None:
    ours = "import colofunc as cf\nfrom colofunc import Spec\nfrom colofunc_plugins.zero import states\ncf.Spec\n"
    authors = "from colofunc.ext import Wish\ncf.ext.Wish"
    assert check_plugin("colofunc_plugins.zero.plan", ours + authors, frozenset({"Spec", "ext", "ext.Wish"})) == []


def test_cycle_is_found() -> None:
    chain = {"a.b": {"a.b.high"}, "a.b.high": {"a.c"}}
    assert find_cycle(chain | {"a.c": {"a.b"}}) == ["a.b", "a.b.high", "a.c", "a.b"]
    assert find_cycle(chain) == []


def test_importing_a_module_runs_its_package_too() -> None:
    files = {"colofunc.mesh": "", "colofunc.mesh.topology": "", "colofunc.ops": "import colofunc.mesh.topology"}
    assert "colofunc.mesh" in runtime_graph(files)["colofunc.ops"]
