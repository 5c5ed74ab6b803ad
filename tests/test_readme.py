"""The README is run as it is printed: its Python blocks in order in one module, its commands as the Makefile's."""

import inspect
import re
import sys
import types
from pathlib import Path

import pytest

import colofunc as cf
from colofunc.plugins import hookspecs
from tools.docs import errors_page, hooks_page

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted((ROOT / "docs").glob("*.md"))


def blocks(text: str, language: str) -> list[str]:
    return [code for kind, code in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M) if kind == language]


def run(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.ModuleType:
    """All Python blocks of a page as one module."""
    module = types.ModuleType(f"blocks_of_{path.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    text = path.read_text()
    for block in blocks(text, "python"):
        above = text[: text.index(block)].count("\n")
        exec(compile("\n" * above + block, str(path), "exec"), module.__dict__)
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


def test_the_example_has_twenty_lines() -> None:
    lines = [line for line in blocks(README, "python")[0].splitlines() if line.strip()]
    assert len(lines) == 20


def test_commands_are_the_makefiles() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for text in (README, (ROOT / "CONTRIBUTING.md").read_text(), *(page.read_text() for page in PAGES)):
        for words in re.findall(r"^make ([a-z ]+?)(?: +#.*| ARGS.*| PY.*)?$", text, re.M):
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


def test_generated_pages_are_up_to_date() -> None:
    """`python tools/docs.py` writes them."""
    assert (ROOT / "docs" / "plugins.md").read_text() == hooks_page()
    assert (ROOT / "docs" / "errors.md").read_text() == errors_page()
    for hook in hookspecs.HOOKS:
        assert inspect.getdoc(getattr(hookspecs, hook)) in hooks_page().replace("\n    ", "\n")
    for name in dir(cf):
        thing = getattr(cf, name)
        if isinstance(thing, type) and issubclass(thing, cf.ColofuncError):
            assert f"## {name}\n" in errors_page()
