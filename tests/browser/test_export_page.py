"""An exported page works in a real browser without a server and runs no foreign script."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from benchmarks.big_folders import generation_folder, training_folder

from halation.gallery import command as gallery
from halation.gallery.config import GalleryConfig
from halation.gallery.run_catalog import make_run_id

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed; `make test` installs it"
).expect

pytestmark = pytest.mark.browser
PAYLOAD = "</script><script>window.harmed = true</script><img src=x onerror='window.harmed = true'>"
LOADED = "() => [...document.querySelectorAll('main img')].some((image) => image.complete && image.naturalWidth > 0)"
FULL_WIDTH = """async () => {
  const image = new Image();
  image.src = Object.values(JSON.parse(document.getElementById("embedded").textContent).links)[0];
  await image.decode();
  return image.naturalWidth;
}"""


def export(run: Path, path: Path, num_images: int = 400) -> str:
    assert gallery.run(GalleryConfig(dirs=(run,), export=path, export_images=num_images)) == 0
    return path.as_uri()


def test_a_training_opens_from_disk_with_its_samples_curves_config_and_full_images(tmp_path: Path, page: Page) -> None:
    run = training_folder(tmp_path / "runs" / "a #1 run?", 6, 3, size=300, prompts=(PAYLOAD,))
    page.goto(export(run, tmp_path / "mail.html"))
    page.wait_for_function(LOADED)
    expect(page.locator("main")).to_have_attribute("data-view", "training")
    assert page.get_by_text("window.harmed").count() >= 1
    assert page.evaluate("window.harmed") is None
    expect(page.locator("#connection")).to_contain_text("exported", use_inner_text=True)
    expect(page.locator("#left-out")).to_be_visible()
    assert page.evaluate(FULL_WIDTH) == 300
    for tab, word in (("curves", "loss"), ("config", "n_steps"), ("log", "[rank 0] trained")):
        page.evaluate(f"location.hash = '#/run/{make_run_id(run)}/{tab}'")
        page.locator("main").get_by_text(word).first.wait_for()
    page.evaluate("location.hash = '#/scores'")
    page.get_by_text("No scores yet").wait_for()


def test_a_generation_opens_from_disk_where_its_full_images_are_gone(tmp_path: Path, page: Page) -> None:
    run = generation_folder(tmp_path / "drawn", 40, failed_every=10, size=64, prompts=(PAYLOAD,))
    address = export(run, tmp_path / "page.html", 12)
    shutil.rmtree(run)
    page.goto(address)
    page.wait_for_function(LOADED)
    expect(page.locator("main")).to_have_attribute("data-view", "generation")
    expect(page.locator("#left-out")).to_contain_text("12 of 36 images", use_inner_text=True)
    assert page.evaluate("window.harmed") is None
