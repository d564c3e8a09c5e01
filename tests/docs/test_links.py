"""Local links, and files and tests that pages cite, exist."""

from __future__ import annotations

import re
from pathlib import Path

from support.docs import ROOT, pages, without_blocks

LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
CITED = re.compile(r"`((?:tests|benchmarks|src|recipes|examples|docs)/[\w./-]*)(?:::(\w+))?`")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_every_local_link_leads_to_a_file_and_a_heading() -> None:
    broken, num_links = [], 0
    for page in pages():
        for target, anchor in LINK.findall(without_blocks(page)):
            path = page.parent / target if target else page
            num_links += 1
            if not path.exists() or (anchor and anchor not in anchors(path)):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert not broken
    assert num_links > 100


def test_every_cited_file_and_test_exists() -> None:
    missing, num_cited = [], 0
    for page in pages():
        for path, name in CITED.findall(without_blocks(page)):
            file = ROOT / path
            num_cited += 1
            if not file.exists() or (name and f"def {name}(" not in file.read_text(encoding="utf-8")):
                missing.append(f"{page.relative_to(ROOT)}: {path} {name}")
    assert not missing
    assert num_cited > 100


def test_the_index_names_every_page_and_every_recipe() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    wanted = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    wanted |= {f"stories/{page.name}" for page in (ROOT / "docs" / "stories").glob("*.md")} | {"../examples/configs/"}
    recipes = {f"../recipes/{folder.name}/" for folder in (ROOT / "recipes").iterdir() if any(folder.glob("*.*"))}
    assert {name for name in wanted | recipes if f"]({name}" not in index} == set()
