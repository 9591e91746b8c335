"""The Python of README.md and docs/ runs, and what the pages say about the package is so."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from textwrap import dedent

import pytest

import rootfree

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^([ \t]*)```(\w*)[^\n]*\n(.*?)^\1```[ \t]*$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of a language: the line on which each starts, and its text."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, found.start(3)), dedent(found[3]))
        for found in FENCED.finditer(text)
        if found[2] == language
    ]


def test_blocks_are_found():
    assert {"README.md", "index.md", "quickstart.md"} <= {page.name for page in PAGES}
    assert len(blocks(ROOT / "README.md", "python")) >= 2
    assert len(blocks(ROOT / "docs" / "quickstart.md", "python")) >= 8
    # no fence is left over: every block opens and closes
    for page in PAGES:
        fences = len(re.findall(r"^[ \t]*```", page.read_text(encoding="utf-8"), re.MULTILINE))
        assert fences == 2 * len(FENCED.findall(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_of_a_page_runs(page, tmp_path, monkeypatch):
    """All blocks of a page in one namespace, top to bottom; an error names the page's line."""
    monkeypatch.chdir(tmp_path)  # where a page writes a checkpoint
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for line, source in blocks(page, "python"):
        exec(compile("\n" * line + source, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_code_are_public(page):
    used = {
        name
        for _, source in blocks(page, "python")
        for name in re.findall(r"rootfree\.(\w+)", source)
    }
    assert used <= {*rootfree.__all__, "__version__"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_exist(page):
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    words = [re.sub(r"[^\w\s-]", "", h) for h in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[-\s]+", "-", each.strip().lower()) for each in words}


@pytest.mark.parametrize(
    ("name", "count"),
    [("quickstart.md", 2), ("troubleshooting.md", 1), ("mixed_precision.md", 1)],
)
def test_the_summaries_shown_are_those_printed(name, count, tmp_path, monkeypatch, capsys):
    page = ROOT / "docs" / name
    test_code_of_a_page_runs(page, tmp_path, monkeypatch)
    texts = [text for _, text in blocks(page, "text")]
    shown = [text for text in texts if "preconditioner" in text or "bytes a parameter" in text]
    printed = capsys.readouterr().out
    assert len(shown) == count
    assert all(text in printed for text in shown)


def test_messages_in_comments_are_those_that_are_printed(tmp_path, monkeypatch, capsys):
    """`print(error)  # message`: the comment is the message, or its beginning before dots."""
    for page in PAGES:
        test_code_of_a_page_runs(page, tmp_path, monkeypatch)
        printed = capsys.readouterr().out
        for _, source in blocks(page, "python"):
            for message in re.findall(r"print\(error\)  # (.*)", source):
                assert message.removesuffix(" ...") in printed


def test_every_page_is_in_the_navigation_and_the_index():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in PAGES[1:]:
        assert re.search(rf"- (?:Home: )?{re.escape(page.name)}$", nav, re.MULTILINE), page.name
        assert page.name == "index.md" or f"]({page.name})" in index, page.name


def test_pages_that_docstrings_and_the_changelog_name_are_there():
    titles = {page.read_text(encoding="utf-8").partition("\n")[0][2:] for page in PAGES}
    files = [ROOT / "CHANGELOG.md", *(ROOT / "src" / "rootfree").rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    named = set(re.findall(r"\bpage \*(.+?)\*", text))
    assert named
    assert named <= titles


def test_the_reference_has_every_public_name_once_and_optimizers_first():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = re.findall(r"^::: rootfree\.(\w+)$", page, re.MULTILINE)
    assert sorted(names) == sorted(rootfree.__all__)
    optimizers = [name for name in names if name.startswith(("RF", "IF"))]
    assert names[: len(optimizers)] == optimizers


def test_readme_names_the_public_optimizers():
    """Every optimizer of the library has a row in the table of methods."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    optimizers = [n for n in rootfree.__all__ if n.startswith(("RF", "IF"))]
    assert optimizers
    for name in optimizers:
        assert f"| `{name}` |" in readme
    assert len(readme.splitlines()) < 120


def test_figures_of_the_readme_are_those_of_the_measurements():
    """Each is on a line about its optimizer in the pages that the comparison refers to."""
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Beside others\n\n")[2]
    header, _, *rows = [
        [cell.strip(" `*") for cell in line.split("|")[1:-1]]
        for line in table.partition("\n\n")[0].splitlines()
    ]
    pages = [ROOT / "docs" / name for name in ("performance.md", "choosing.md", "evidence.md")]
    lines = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    figures = [
        (name, cell)
        for row in rows
        for name, cell in zip(header[1:], row[1:], strict=True)
        if re.fullmatch(r"[\d.]+", cell)
    ]
    assert len(figures) > 20
    for name, figure in figures:
        exactly = re.compile(rf"(?<![\d.]){re.escape(figure)}(?![\d.])")
        assert any(name in line and exactly.search(line) for line in lines), (name, figure)


def test_figures_of_the_advice_are_those_of_the_first_try():
    """Which optimizer for what: each figure is in the table that the first try wrote."""
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    measured, small = {}, page.partition("<!-- full size: begin -->")[0]
    for table in re.findall(r"\| task \| AdamW: loss .*?\n\n", small, re.DOTALL):
        header, _, *rows = [line.split(" | ") for line in table.strip().splitlines()]
        for row in rows:
            for name, cell in zip(header[2:], row[2:], strict=True):
                measured[row[0].strip("| "), name.strip("| ")] = cell.strip("| ")
    advice = page.partition("| for | start with |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(advice) >= 6
    for line in advice:
        _, method, figures = (cell.strip(" `") for cell in line.strip("|").split("|"))
        for task, figure in (each.split() for each in figures.split(", ")):
            assert measured[task, method] == figure, (task, method)


ARGUMENTS = re.compile(r"Args:\n(.*?)(?:\n\n|\Z)", re.DOTALL)
DOCUMENTED = {
    name: found[1]
    for name in rootfree.__all__
    if (found := ARGUMENTS.search(inspect.getdoc(getattr(rootfree, name)) or ""))
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_arguments_are_those_of_the_signature(name):
    """The API reference is built from them, and refuses others."""
    given = re.findall(r"^ {4}(\S[^:]*):", DOCUMENTED[name], re.MULTILINE)
    known = list(inspect.signature(getattr(rootfree, name)).parameters)
    assert given == [n for n in known if n in given] != []
