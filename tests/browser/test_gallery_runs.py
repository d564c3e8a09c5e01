"""Several runs in a real browser: a watch, a comparison and a run that goes away."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from benchmarks.big_folders import generation_folder, training_folder

from halation.gallery.run_catalog import make_run_id
from support.gallery import BrowserErrors, RunningGallery, run_gallery

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed; `make test` installs it"
).expect

pytestmark = pytest.mark.browser
CHECKPOINTS = (200, 400)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    training_folder(root / "first", 8, 2, size=16)
    training_folder(root / "second", 4, 2, size=16)
    training_folder(root / "doomed", 2, 2, size=16)
    newest = root / "second/samples/step_0000400/samples.json"
    index = json.loads(newest.read_text())
    index["samples"][0] |= {"state": "failed", "reason": "CUDA out of memory"}
    newest.write_text(json.dumps(index))
    watch = root / "first" / "watch"
    for step in CHECKPOINTS:
        folder = generation_folder(watch / f"step_{step:07d}" / "pictures", 4, size=16)
        numbers = {"value": 1000.0 / step, "std": None, "name": "FD-streets", "better": "lowest", "few": True}
        report = {
            "step": step,
            "checkpoint": folder.parent.name,
            "generated": {"kind": "run", "path": str(folder), "num": 4},
            "reference": {"kind": "streets", "path": "streets", "num": 4},
            "metrics": {"fd": numbers},
            "versions": {},
        }
        (folder.parent / "evaluation.json").write_text(json.dumps(report))
    (watch / "config.json").write_text(json.dumps({"job": "watch", "settings": {"run": "first"}, "fixed": {}}))
    return root


@pytest.fixture(scope="module")
def served(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGallery]:
    with run_gallery(folders, scratch=tmp_path_factory.mktemp("scratch")) as gallery:
        yield gallery


def test_a_watch_stands_under_its_training_with_its_images_folded(
    served: RunningGallery, folders: Path, page: Page
) -> None:
    served.enter(page)
    watch = make_run_id(folders / "first" / "watch")
    fold = page.locator(f".run-fold[data-fold='{watch}']")
    fold.wait_for()
    names = page.locator("a.run .run-name").all_inner_texts()
    assert names.index("first/watch") == names.index("first") + 1
    assert not any("pictures" in name for name in names)
    expect(page.locator("#runs-count")).to_contain_text("4 runs", use_inner_text=True)
    expect(fold).to_contain_text("2 generations", use_inner_text=True)
    fold.click()
    expect(page.locator("a.run")).to_have_count(6)
    lefts = page.locator("a.run .run-state").evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().left)")
    assert max(lefts) - min(lefts) < 1, "columns line up"
    page.reload()
    page.locator("a.run").nth(5).wait_for()


def test_arrow_keys_move_through_the_runs_before_anything_has_the_focus(served: RunningGallery, page: Page) -> None:
    served.enter(page)
    page.locator("a.run").nth(2).wait_for()
    page.keyboard.press("ArrowDown")
    focused = "(at) => document.querySelectorAll('a.run, button.run-fold')[at] === document.activeElement"
    page.wait_for_function(focused, arg=0)
    page.keyboard.press("ArrowDown")
    page.wait_for_function(focused, arg=1)


def test_a_failed_sample_is_told_in_words_and_takes_nothing_of_the_bar_of_steps(
    served: RunningGallery, folders: Path, page: Page
) -> None:
    served.enter(page)
    row = page.locator(f"a.run[data-run='{make_run_id(folders / 'second')}']")
    expect(row.locator(".run-numbers")).to_contain_text("1 sample failed")
    expect(row.locator(".bar-failed")).to_have_count(0)
    row.click()
    expect(page.locator(".run-line")).to_contain_text("1 sample failed")


def test_images_of_one_prompt_and_seed_stand_beside_each_other_from_two_generations(
    served: RunningGallery, folders: Path, page: Page
) -> None:
    first, second = (folders / "first/watch" / f"step_{step:07d}" / "pictures" for step in CHECKPOINTS)
    served.show(page, first)
    page.locator("#grid [data-index='2'] img").wait_for()
    page.locator("#grid [data-index='2']").click()
    page.locator("#picture-compare").wait_for()
    page.keyboard.press("c")
    page.locator("#compare-handle").wait_for()
    page.wait_for_function(
        "() => [...document.querySelectorAll('#compare-frame img')].every((image) => image.naturalWidth > 0)"
    )
    sources = page.locator("#compare-frame img").evaluate_all("(all) => all.map((image) => image.src)")
    for run, source in zip((first, second), sources, strict=True):
        assert f"/pictures/{make_run_id(run)}/g2?" in source
    expect(page.locator("#compare .compare-label").last).to_have_text("first/watch/step_0000400/pictures")
    page.keyboard.press("Escape")
    expect(page.locator("#compare")).to_have_count(0)
    expect(page.locator("#picture")).to_be_visible()


def test_another_run_is_laid_over_the_curves_and_the_address_keeps_it(
    served: RunningGallery, folders: Path, page: Page
) -> None:
    served.show(page, folders / "first", "/curves")
    page.locator(".figure[data-metric='fd'] circle").nth(1).wait_for()
    lines = page.locator(".figure[data-metric='loss'] .plot-series:not(.plot-faint)")
    expect(lines).to_have_count(1)
    page.locator("#overlay").click()
    page.locator(f".overlay-list input[value='{make_run_id(folders / 'second')}']").check()
    page.wait_for_function(
        "() => document.querySelectorAll("
        "\".figure[data-metric='loss'] .plot-dashed polyline[points*=',']\").length === 1"
    )
    assert make_run_id(folders / "second") in page.url
    page.keyboard.press("Escape")
    page.locator(".figure[data-metric='loss'] svg").hover(position={"x": 300, "y": 60})
    expect(page.locator(".figure[data-metric='loss'] .plot-tip")).to_contain_text("second", use_inner_text=True)
    page.reload()
    page.locator("#overlay-legend").get_by_text("second").wait_for()
    page.locator("#tab-config").click()
    page.locator("#config-with").select_option(make_run_id(folders / "second"))
    assert page.locator("tr[data-differs='n_steps']").inner_text().split() == ["n_steps", "800", "400"]
    expect(page.locator("tr[data-differs='lr']")).to_have_count(0)


def test_a_run_that_goes_away_while_one_looks_says_so_and_leads_back(
    served: RunningGallery, folders: Path, page: Page, browser_errors: BrowserErrors
) -> None:
    served.enter(page)
    page.locator("#runs-filter").fill("doomed")
    page.locator("#runs-filter").press("Enter")
    page.wait_for_function("() => document.activeElement.matches('button.cell')")
    browser_errors.expect("404")
    shutil.rmtree(folders / "doomed")
    page.get_by_text("Not here any more").wait_for()
    page.locator("#all-runs").click()
    page.locator("#runs-filter").fill("")
    page.locator("a.run").first.wait_for()
    expect(page.locator("#runs")).not_to_contain_text("doomed", use_inner_text=True)
