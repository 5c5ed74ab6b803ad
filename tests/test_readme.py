"""The README is run as it is printed: its Python blocks in order in one module, its commands as the Makefile's."""

import contextlib
import inspect
import io
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import attrs
import pytest

import colofunc as cf
from colofunc.plugins import hookspecs
from tools.docs import constants_page, environment_page, errors_page, hooks_page, members, public_names, reference_page

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted((ROOT / "docs").glob("*.md"))


def blocks(text: str, language: str) -> list[str]:
    return [code for kind, code in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M) if kind == language]


def not_printed(shown: str, printed: str) -> list[str]:
    """The lines of a block that what was printed does not have in this order.

    `...` stands for anything; line breaks and runs of spaces do not count, for a terminal wraps lines at its own width.
    """
    rest = " ".join(printed.split())
    missing = []
    for line in shown.splitlines():
        parts = [re.escape(" ".join(part.split())) for part in line.split("...")]
        match = re.search(" ?.*? ?".join(parts), rest)
        if match is None:
            missing.append(line)
        else:
            rest = rest[match.end() :]
    return missing


def run(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.ModuleType:
    """All Python blocks of a page as one module; a `text` block is what the Python block above it prints."""
    module = types.ModuleType(f"blocks_of_{path.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    text = path.read_text()
    printed = io.StringIO()
    for kind, block in re.findall(r"^```(python|text)\n(.*?)^```$", text, re.S | re.M):
        if kind == "text":  # what the code above it prints
            assert not not_printed(block, printed.getvalue()), printed.getvalue()
            continue
        above = text[: text.index(block)].count("\n")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * above + block, str(path), "exec"), module.__dict__)
        print(printed.getvalue())
    return module


def test_the_readme_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = run(ROOT / "README.md", monkeypatch, tmp_path)
    out = capsys.readouterr().out
    assert re.search(r"^loss \d\.\d{4}  \(.*tp.*\) b  dp: .* · tp: ", out, re.M)
    assert "{tp: i} instead of" in out
    assert "{tp: scan}: " in out
    step, low, plan = module.step, module.low, cf.Plan.load(tmp_path / "plan.json")
    assert plan == low.plan
    assert step.fn is module.step_fn


def test_a_line_that_is_not_printed_is_found() -> None:
    printed = "first 1.0 ms\nsecond\nthird\n"
    assert not not_printed("first ... ms\nthird", printed)
    assert not_printed("first 2.0 ms\nsecond", printed) == ["first 2.0 ms"]
    assert not_printed("third\nsecond", printed) == ["second"]  # in this order


@pytest.mark.sweep
def test_the_demo_prints_what_the_readme_shows(subprocess_env: dict[str, str], tmp_path: Path) -> None:
    wide = {**os.environ, **subprocess_env, "COLUMNS": "250", "COLOFUNC_CACHE": "off"}
    command = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, env=wide, capture_output=True, text=True, check=True)
    assert not not_printed(blocks(README, "console")[0], done.stdout)


def test_figures_of_the_readme_are_recorded() -> None:
    results = (ROOT / "bench" / "RESULTS.md").read_text()
    assert "357 of 357 combinations" in README and "357 tried, 357 equal" in results
    times = re.search(r"(\d\.\d\d) times as fast as FSDP2", README)[1]
    assert f"| tokens/s, ours / better FSDP2 | {times} " in results


def test_the_example_has_twenty_lines() -> None:
    lines = [line for line in blocks(README, "python")[0].splitlines() if line.strip()]
    assert len(lines) == 20


def test_commands_are_the_makefiles() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for text in (README, (ROOT / "CONTRIBUTING.md").read_text(), *(page.read_text() for page in PAGES)):
        for words in re.findall(r"^make ([a-z -]+?)(?: +#.*| ARGS.*| PY.*)?$", text, re.M):
            assert set(words.split()) <= targets, words
    assert [line.split("#")[0].strip() for line in blocks(README, "bash")[0].splitlines()] == ["make demo", "make test"]


def test_links_and_folders_exist() -> None:
    for page in (ROOT / "README.md", ROOT / "CHANGELOG.md", *PAGES):
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
    tree = next(block for block in blocks(README, "") if block.startswith("colofunc/"))
    for line in tree.splitlines():
        name = line.split()[0]
        assert (ROOT / ("colofunc" if line.startswith("  ") else "") / name).exists(), line


def test_every_page_is_in_the_navigation_and_on_the_first_page() -> None:
    names = [page.name for page in PAGES]
    assert sorted(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)) == names
    linked = re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "index.md").read_text())
    assert sorted(linked) == [name for name in names if name != "index.md"]


def test_anchors_exist() -> None:
    for page in (ROOT / "README.md", *PAGES):
        for target, anchor in re.findall(r"\]\(([^)#: ]*)#([^) ]+)\)", page.read_text()):
            heads = re.findall(r"^#+ (.*)$", ((page.parent / target) if target else page).read_text(), re.M)
            assert anchor in [re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads], f"{page.name}: {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(page, monkeypatch, tmp_path)


def test_the_rebuild_uses_nothing_of_colofunc_and_stays_short() -> None:
    text = (ROOT / "docs" / "rebuild.md").read_text()
    assert len(text.splitlines()) <= 650
    assert not any(re.search(r"^\s*(import|from) colofunc", block, re.M) for block in blocks(text, "python"))


def test_every_hook_is_read() -> None:
    """A hook is read where code asks a registry for its table."""
    sources = [path.read_text() for path in (ROOT / "colofunc").rglob("*.py")]
    asked = {f"colofunc_{name}" for source in sources for name in re.findall(r"registry(?:\(.*\))?\.([a-z_]+)\b", source)}
    assert asked >= set(hookspecs.HOOKS)


def test_every_field_of_a_transform_is_on_its_page() -> None:
    page = (ROOT / "docs" / "writing_a_transform.md").read_text()
    fields = [field.name for field in attrs.fields(cf.ext.Transform) if field.name not in ("name", "options")]
    assert not [name for name in fields if f"`{name}" not in page]


def test_generated_pages_are_up_to_date() -> None:
    """`python tools/docs.py` writes them."""
    assert (ROOT / "docs" / "plugins.md").read_text() == hooks_page()
    assert (ROOT / "docs" / "errors.md").read_text() == errors_page()
    assert (ROOT / "docs" / "reference.md").read_text() == reference_page()
    assert (ROOT / "docs" / "environment.md").read_text() == environment_page()
    assert (ROOT / "docs" / "constants.md").read_text() == constants_page()
    assert "|  |" not in constants_page()  # each says what it is for
    for hook in hookspecs.HOOKS:
        assert inspect.getdoc(getattr(hookspecs, hook)) in hooks_page().replace("\n    ", "\n")
    for name in dir(cf):
        thing = getattr(cf, name)
        if isinstance(thing, type) and issubclass(thing, cf.ColofuncError):
            assert f"## {name}\n" in errors_page()


def test_every_constant_of_planning_says_what_it_is() -> None:
    rows = [row for row in constants_page().splitlines() if row.startswith("| `")]
    assert len(rows) > 150 and not [row for row in rows if row.endswith("|  |")]


def test_every_public_name_is_in_the_reference_and_has_a_docstring() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    assert not [name for name in {*cf.__all__} & {*cf.ext.__all__} if getattr(cf.ext, name) is not getattr(cf, name)]
    users = {f"cf.{name}": getattr(cf, name) for name in cf.__all__ if name != "ext"}
    authors = {f"cf.ext.{name}": getattr(cf.ext, name) for name in cf.ext.__all__ if name not in cf.__all__}
    for name, thing in {**users, **authors}.items():
        assert f"### {name}\n" in page or f"- `{name}`: " in page, name
        assert inspect.getdoc(thing), f"{name} has no docstring"
        if inspect.isclass(thing):
            assert not [what for what, member in members(thing).items() if not inspect.getdoc(member)], name
        if inspect.ismodule(thing):
            inner = [what for what in public_names(thing) if callable(getattr(thing, what))]
            assert inner and not [what for what in inner if not inspect.getdoc(getattr(thing, what))], name
            assert not [what for what in inner if f"- `{name}.{what}" not in page], name
