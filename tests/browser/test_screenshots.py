"""Take the screenshots of the documentation, of runs in `HALATION_RUNS`.

They are written to `HALATION_SCREENSHOTS`. Without a folder of real runs the test makes some and writes to a
temporary folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from benchmarks.big_folders import generation_folder, training_folder

from halation.images.png_codec import read_png
from support.gallery import RunningGallery, run_gallery

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.slow]
WIDE = {"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"}
PHONE = {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "device_scale_factor": 2}
LOADED = """() => [...document.images].every((image) => {
  const { top, bottom, right } = image.getBoundingClientRect();
  const inSight = image.checkVisibility() && image.src && bottom > 0 && right > 0 && top < innerHeight;
  return !inSight || (image.complete && image.naturalWidth > 0);
})"""
CELL = "#matrix .matrix-row[data-step]:not(.matrix-teacher) button.cell"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.environ.get("HALATION_RUNS"):
        return Path(os.environ["HALATION_RUNS"]).resolve()
    folder = tmp_path_factory.mktemp("runs")
    training_folder(folder / "streets", 30, 8, size=32, raw=True)
    generation_folder(folder / "images", 400, size=32)
    return folder


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("HALATION_SCREENSHOTS") or tmp_path_factory.mktemp("album"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def longest_training(page: Page, address: str) -> dict[str, Any]:
    found = page.request.get(f"{address}/api/runs").json()["runs"]
    trained: list[dict[str, Any]] = [run for run in found if run["kind"] == "train"]
    return max(trained, key=lambda run: run["done"])


def take(page: Page, path: Path) -> None:
    """An image of what is in sight once all of it is there; one colour would mean an empty page."""
    page.wait_for_function(LOADED)
    page.wait_for_function("() => document.querySelector('.toast') === null")
    page.wait_for_timeout(300)
    page.screenshot(path=path)
    pixels = read_png(path)[0]
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 200


def test_each_page_has_its_image(runs: Path, album: Path, tmp_path: Path, new_page: Callable[..., Page]) -> None:
    with run_gallery(runs, scratch=tmp_path) as gallery:
        screen, phone = new_page(**WIDE), new_page(**PHONE)
        wide(gallery, screen, runs, album)
        gallery.enter(phone)
        phone.goto(f"{gallery.address}/#/run/{longest_training(phone, gallery.address)['id']}")
        phone.locator(CELL).first.wait_for()
        take(phone, album / "gallery_phone.png")
        for page in (screen, phone):
            page.goto("about:blank")  # one that is open would complain when the gallery ends


def wide(gallery: RunningGallery, page: Page, runs: Path, album: Path) -> None:
    gallery.enter(page)
    page.locator("a.run").first.wait_for()
    take(page, album / "gallery_runs.png")
    training = f"{gallery.address}/#/run/{longest_training(page, gallery.address)['id']}"
    page.goto(training)
    page.locator(CELL).first.wait_for()
    take(page, album / "gallery_training.png")
    page.locator(CELL).nth(2).click()
    page.keyboard.press("Home")
    page.keyboard.press("c")
    page.keyboard.press("End")
    page.keyboard.press("c")
    page.locator("#compare-handle").wait_for()
    take(page, album / "gallery_compare.png")
    page.goto(f"{training}/curves")
    page.locator(".figure[data-metric='loss'] svg").hover(position={"x": 400, "y": 80})
    page.locator("#strip img").first.wait_for()
    take(page, album / "gallery_curves.png")
    gallery.show(page, runs / "images")
    page.locator("#grid [data-index='0'] img").wait_for()
    take(page, album / "gallery_generation.png")
    page.goto(f"{gallery.address}/#/scores")
    page.locator("main").get_by_text(re.compile("Over checkpoints|No scores yet")).first.wait_for()
    if page.locator("#scores").count():
        take(page, album / "gallery_scores.png")
