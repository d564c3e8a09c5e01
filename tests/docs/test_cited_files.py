"""What pages cite is there: files by their paths, tests by their names; and what the citation file says is so."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path

import pytest
import yaml

import halation

ROOT = Path(__file__).parents[2]
FOLDERS = "tests|benchmarks|src|recipes|examples|docs"
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    + [page for name in ("docs", "recipes", "examples") for page in (ROOT / name).rglob("*.md")]
)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CITED = re.compile(rf"`((?:{FOLDERS})/[\w./-]*)(?:::(\w+))?`")


def cited(page: Path) -> list[tuple[str, str]]:
    """(path, name of a test or nothing) of everything in backticks that lies in one of our folders."""
    return CITED.findall(FENCED.sub("", page.read_text()))


TESTS = sorted({(path, name) for page in PAGES for path, name in cited(page) if name})


def test_every_file_that_a_page_cites_exists() -> None:
    missing = {
        f"{page.relative_to(ROOT)}: {path}"
        for page in PAGES
        for path, _name in cited(page)
        if not (ROOT / path).exists()
    }
    assert not missing
    assert {"reliability.md", "security.md", "determinism.md"} <= {page.name for page in PAGES if cited(page)}


@pytest.mark.parametrize("path", sorted({path for path, _name in TESTS}))
def test_every_test_that_a_page_cites_can_be_collected(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run of the whole suite pytest has imported these files already, under their own names."""
    monkeypatch.syspath_prepend(str((ROOT / path).parent))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries that this process would otherwise not have loaded
        module = importlib.import_module(Path(path).stem)
    assert Path(str(module.__file__)) == ROOT / path
    wanted = {name for cited_path, name in TESTS if cited_path == path}
    assert {name for name in wanted if name.startswith("test_") and callable(getattr(module, name, None))} == wanted


def test_every_link_of_the_pages_at_the_top_leads_somewhere() -> None:
    """Those below docs and recipes are followed by test_commands.py, with their headings."""
    links = {
        (page.name, target)
        for page in ROOT.glob("*.md")
        for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", FENCED.sub("", page.read_text()))
    }
    assert ("CONTRIBUTING.md", "SECURITY.md") in links
    assert not {link for link in links if not (ROOT / link[1]).exists()}


def test_a_citation_says_what_the_package_says() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation.keys() >= {"message", "title", "authors"}, "what the format asks for"
    assert citation["version"] == halation.__version__
    assert citation["license"] == "Apache-2.0"
    assert citation["authors"] == [{"name": "Halation contributors"}]
