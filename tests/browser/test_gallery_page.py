"""The gallery page in a real browser: mouse, keys, live updates and harmful texts."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from benchmarks.big_folders import generation_folder, images, prompt_of, settle, spec_of, training_folder

from halation.gallery.run_catalog import make_run_id
from halation.generation.image_requests import ImageRequest
from halation.generation.ledger import LEDGER_FILE, Ledger
from support.commands import HALATION, started, train, until
from support.gallery import PAYLOADS, BrowserErrors, RunningGallery, run_gallery

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

expect = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed; `make test` installs it"
).expect

pytestmark = pytest.mark.browser
NUM_STEPS, EVERY, NUM_PROMPTS = 120, 100, 8
NUM_ROWS = 10_000
CELL = "#matrix .matrix-row[data-step]:not(.matrix-teacher) button.cell"
OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
UNNAMED = """() => [
  ...document.querySelectorAll("button, a, input, select, [role=slider], img, dialog[open]")
].filter((element) => {
  if (!element.checkVisibility()) return false;
  const label = element.labels?.[0]?.textContent || element.getAttribute("aria-label")
    || element.getAttribute("alt") || element.title;
  const labelled = element.getAttribute("aria-labelledby");
  const named = label || (labelled && document.getElementById(labelled)?.textContent) || element.textContent.trim();
  const decorates = element.tagName === "IMG" && element.alt === "";
  return !named && !(decorates && element.closest("button, a, [aria-label], [aria-labelledby], [aria-hidden=true]"));
}).map((element) => element.outerHTML.slice(0, 160))"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    training_folder(root / "long", NUM_STEPS, NUM_PROMPTS, every=EVERY, size=32, raw=True)
    generation_folder(root / "many", NUM_ROWS, failed_every=97, size=32)
    harmful(root / "harmful")
    return root


def harmful(root: Path) -> None:
    """Sixty scripts as prompts and as ids, in a training, in a generation and in scores."""
    training_folder(root / "train", 2, len(PAYLOADS), size=16, prompts=PAYLOADS)
    folder = generation_folder(root / "generate", 0, size=16)
    requests = [
        ImageRequest(spec=dataclasses.replace(spec_of(index, 16, prompt), id=prompt), name=f"{index:06d}")
        for index, prompt in enumerate(PAYLOADS)
    ]
    with Ledger(folder / LEDGER_FILE) as ledger:
        ledger.add_plan(requests, {"prompts": "0" * 64})
        settle(folder, ledger, requests, 20, PAYLOADS[:2], images(16))
    numbers = {"value": 1.0, "std": None, "name": PAYLOADS[0], "better": "lower", "few": True, "note": PAYLOADS[1]}
    report = {
        "generated": {"kind": "run", "path": str(folder), "num": len(PAYLOADS)},
        "reference": {"kind": "folder", "path": PAYLOADS[2], "num": 1},
        "metrics": {"fd": numbers | {"extractor": PAYLOADS[3]}},
        "versions": {"torch": PAYLOADS[4]},
        "extremes": {
            "nearest": [{"index": 0, "name": "000000.png", "caption": PAYLOADS[5], "distance": 0.0}],
            "farthest": [],
        },
    }
    (root / "scores.json").write_text(json.dumps(report))


@pytest.fixture(scope="module")
def served(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGallery]:
    with run_gallery(folders, scratch=tmp_path_factory.mktemp("scratch")) as gallery:
        yield gallery


def text_of(page: Page, selector: str) -> str:
    return page.locator(selector).inner_text()


# -- opening


def test_the_link_opens_the_runs_and_enter_opens_one(served: RunningGallery, page: Page) -> None:
    served.enter(page)
    assert "token" not in page.url
    page.locator("a.run").nth(3).wait_for()
    served.images(page, 3)
    page.locator("#runs-filter").fill("long")
    expect(page.locator("a.run:visible")).to_have_count(1)
    page.locator("#runs-filter").press("Tab")
    page.locator("a.run:visible").focus()
    page.keyboard.press("Enter")
    page.locator("#matrix .matrix-row[data-step]:not(.matrix-teacher)").first.wait_for()
    expect(page.locator("main")).to_have_attribute("data-view", "training")


def test_nobody_comes_in_without_the_token_or_with_another_one(
    served: RunningGallery, page: Page, browser_errors: BrowserErrors
) -> None:
    browser_errors.expect("403")
    for path in ("/", "/?token=wrong", "/api/runs"):
        response = page.goto(served.address + path)
        assert response is not None
        assert response.status == 403
    assert page.context.cookies() == []
    expect(page.locator("body") or page.locator("body").inner_text()).to_contain_text(
        "halation gallery", use_inner_text=True
    )


# -- a training


def test_rows_are_steps_and_columns_prompts_and_only_those_in_sight_are_there(
    served: RunningGallery, folders: Path, page: Page
) -> None:
    served.show(page, folders / "long")
    rows = page.locator("#matrix .matrix-row[data-step]:not(.matrix-teacher)")
    rows.first.wait_for()
    served.images(page, 16)
    expect(rows.first).to_have_attribute("data-step", str(NUM_STEPS * EVERY))
    expect(page.locator(".matrix-prompt")).to_have_count(NUM_PROMPTS)
    assert rows.count() < NUM_STEPS / 2
    page.locator(CELL).first.focus()
    page.keyboard.press("Control+End")
    page.locator(f"#matrix .matrix-row[data-step='{EVERY}']").wait_for()
    head = page.locator(".matrix-prompt").first.bounding_box()
    assert head is not None
    assert 0 <= head["y"] < 400, "the prompts stay in sight"


def test_the_viewer_moves_by_slider_and_keys_and_gives_the_focus_back(
    served: RunningGallery, folders: Path, page: Page
) -> None:
    served.show(page, folders / "long")
    cell = page.locator(CELL).nth(2)
    cell.click()
    viewer = page.locator("#viewer")
    viewer.wait_for()
    expect(page.locator("#viewer-title")).to_contain_text("12,000", use_inner_text=True)
    first = page.locator("#viewer-stage").get_attribute("data-url") or ""
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#viewer-title")).to_contain_text("11,900")
    expect(page.locator("#viewer-stage")).not_to_have_attribute("data-url", first)
    prompt = text_of(page, "#viewer-caption")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#viewer-caption")).not_to_have_text(prompt)
    page.keyboard.press("Home")
    expect(page.locator("#viewer-title")).to_contain_text("100")
    page.locator("#viewer-slider").fill("49")
    expect(page.locator("#viewer-title")).to_contain_text("5,000")
    page.wait_for_function("() => document.querySelector('#viewer-stage img')?.naturalWidth > 0")
    page.keyboard.press("Escape")
    viewer.wait_for(state="hidden")
    assert page.evaluate("() => document.activeElement.matches('button.cell')")


def test_two_steps_are_compared_with_a_divider_that_moves_by_mouse_and_by_key(
    served: RunningGallery, folders: Path, page: Page
) -> None:
    served.show(page, folders / "long")
    page.locator(CELL).first.click()
    page.keyboard.press("c")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("c")
    handle = page.locator("#compare-handle")
    handle.wait_for()
    assert handle.get_attribute("aria-valuenow") == "50"
    handle.focus()
    page.keyboard.press("ArrowRight")
    after_key = int(handle.get_attribute("aria-valuenow") or 0)
    assert after_key > 50
    box = page.locator("#compare-frame").bounding_box()
    at = handle.bounding_box()
    assert box is not None
    assert at is not None
    page.mouse.move(at["x"] + at["width"] / 2, at["y"] + at["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + box["height"] / 2, steps=5)
    page.mouse.up()
    assert abs(int(handle.get_attribute("aria-valuenow") or 0) - 20) <= 2
    page.locator("#compare select[data-side]").first.select_option("raw")
    page.wait_for_function(
        "() => [...document.querySelectorAll('#compare-frame img')].every((image) => image.naturalWidth > 0)"
    )


def test_curves_show_every_number_and_the_samples_where_the_pointer_is(
    served: RunningGallery, folders: Path, page: Page
) -> None:
    served.show(page, folders / "long", "/curves")
    for metric in ("loss", "lr", "pictures_per_s", "mfu"):
        page.locator(f".figure[data-metric='{metric}'] svg").wait_for()
    page.locator(".figure[data-metric='loss'] svg").hover(position={"x": 200, "y": 60})
    page.locator("#strip img").first.wait_for()
    page.locator("#tab-config").click()
    page.locator("#config-search").fill("n_steps")
    assert str(NUM_STEPS * EVERY) in text_of(page, "tr[data-setting='n_steps']").replace(",", "")
    page.locator("#tab-log").click()
    page.locator("#log").get_by_text("[rank 0] trained").wait_for()


def test_a_search_typed_before_the_settings_have_come_is_applied_to_them(
    served: RunningGallery, folders: Path, page: Page
) -> None:
    held: list[Route] = []
    page.route(re.compile("/api/runs/[^/]+/config$"), lambda route: held.append(route))
    served.show(page, folders / "long", "/config")
    page.locator("#config-search").fill("n_steps")
    while not held:
        page.wait_for_timeout(20)
    page.unroute_all()  # lets what was held go on
    page.locator("tr[data-setting='n_steps']").wait_for()
    expect(page.locator("tr[data-setting]")).to_have_count(1)


def test_the_losses_of_a_step_have_names(served: RunningGallery, folders: Path, page: Page) -> None:
    served.show(page, folders / "long")
    expect(page.locator(".run-line")).to_contain_text("last loss ")
    expect(page.locator("#matrix .matrix-row[data-step] .matrix-step").last).to_contain_text("mean 0.")
    page.locator(CELL).first.click()
    expect(page.locator("#viewer .viewer-extra")).to_contain_text("mean loss 0.")
    page.keyboard.press("Escape")
    page.locator("#tab-curves").click()
    expect(page.locator(".figure[data-metric='loss'] .figure-value")).to_contain_text("smoothed ")
    expect(page.locator(".figure[data-metric='lr'] .figure-value")).to_contain_text("last ")
    expect(page.locator("#strip .strip-head")).to_contain_text("mean loss 0.")


def test_a_step_shows_the_samples_drawn_up_to_it_and_none_from_later(
    served: RunningGallery, folders: Path, page: Page
) -> None:
    """The last row of metrics is nine steps before the last samples."""
    served.show(page, folders / "long", "/curves")
    plot = page.locator(".figure[data-metric='loss'] svg")
    plot.focus()
    plot.press("End")
    expect(page.locator(".figure[data-metric='loss'] .plot-tip")).to_contain_text("11,991")
    expect(page.locator("#strip strong")).to_have_text("step 11,900")
    plot.press("Home")
    expect(page.locator("#strip strong")).to_have_text("no samples yet")
    expect(page.locator("#strip img").first).to_be_hidden()


def test_two_steps_back_at_once_close_two_dialogs(served: RunningGallery, folders: Path, page: Page) -> None:
    served.show(page, folders / "long")
    page.locator(CELL).first.click()
    page.locator("#viewer").wait_for()
    page.locator("#viewer button[data-action='compare']").click()
    page.locator("#compare").wait_for()
    page.evaluate("() => history.go(-2)")
    expect(page.locator("dialog[open]")).to_have_count(0)
    assert make_run_id(folders / "long") in page.url
    page.locator(CELL).first.click()
    page.locator("#viewer").wait_for()
    page.go_back()
    expect(page.locator("dialog[open]")).to_have_count(0)
    assert make_run_id(folders / "long") in page.url


def test_the_message_of_a_pin_leaves_the_caption_free(served: RunningGallery, folders: Path, page: Page) -> None:
    served.show(page, folders / "long")
    page.locator(CELL).first.click()
    page.locator("#viewer").wait_for()
    page.keyboard.press("c")
    toast = page.locator(".toast", has_text="Pinned").bounding_box()
    caption = page.locator("#viewer-caption").bounding_box()
    assert toast is not None
    assert caption is not None
    assert toast["y"] + toast["height"] < caption["y"]


def test_a_phone_shows_times_and_no_keys_and_strips_fade_where_they_go_on(
    served: RunningGallery, folders: Path, new_page: Callable[..., Page]
) -> None:
    page = new_page(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    served.enter(page)
    expect(page.locator("a.run .run-changed time").first).to_be_visible()
    expect(page.locator("#runs-filter")).to_have_attribute("placeholder", "Filter runs")
    expect(page.locator("#help-button")).to_be_hidden()
    served.show(page, folders / "long", "/curves")
    strip = page.locator(".strip-pictures")
    expect(strip).to_have_attribute("data-more", "after")
    strip.evaluate("(box) => box.scrollTo({ left: 40, behavior: 'instant' })")
    expect(strip).to_have_attribute("data-more", "before after")
    strip.evaluate("(box) => box.scrollTo({ left: box.scrollWidth, behavior: 'instant' })")
    expect(strip).to_have_attribute("data-more", "before")
    page.goto("about:blank")


@pytest.mark.slow
@pytest.mark.ranks
def test_samples_of_a_running_training_appear_and_more_can_be_requested(tmp_path: Path, page: Page) -> None:
    """Samples of a running training appear without a reload, and the page can request more."""
    run = tmp_path / "runs" / "live"
    run.parent.mkdir()
    words = train(run, nproc=1, n_steps=100_000, ckpt_every=25, keep_last=1, sample=True, validation_images=0)
    with (
        run_gallery(run.parent, scratch=tmp_path, flags=("--allow_control",)) as gallery,
        started([HALATION, *words], tmp_path / "train.log") as training,
    ):
        gallery.enter(page)
        page.locator("a.run[data-state='running']").click(timeout=60_000)
        page.locator(".matrix-row[data-step='25']").wait_for(timeout=60_000)
        gallery.images(page)
        waits = []
        for step in (100, 150):
            row = f".matrix-row[data-step='{step}']"
            index = run / "samples" / f"step_{step:07d}" / "grid.png"
            until(index.exists, command=training)
            page.locator(row).wait_for(state="attached", timeout=30_000)
            waits.append(time.time() - index.stat().st_mtime)
        assert min(waits) < 5, "the promise is two seconds; this machine may be busy"
        page.locator("[data-control='sample']").click()
        answers = run / "controls.jsonl"
        until(lambda: answers.exists() and answers.read_text().endswith("\n"), command=training)
        (answer,) = map(json.loads, answers.read_text().splitlines())
        assert answer["action"] == "sample"
        until((run / "samples" / f"step_{answer['step']:07d}" / "grid.png").exists, command=training)
        page.locator("[data-control='stop']").click()
        page.locator("#confirm [data-action='yes']").click()
        until(lambda: training.process.poll() is not None)
        assert training.process.returncode == 130
        page.locator("main").get_by_text("stopped").first.wait_for(timeout=30_000)
        page.goto("about:blank")  # one that is open would complain when the gallery ends


# -- a generation


def test_ten_thousand_images_scroll_with_few_of_them_in_the_page(
    served: RunningGallery, folders: Path, page: Page
) -> None:
    served.show(page, folders / "many")
    page.locator("#grid [data-index='0'] img").wait_for()
    served.images(page, 8)
    count = "() => document.querySelectorAll('#grid [data-index]').length"
    for share in (0.3, 0.7, 0.5, 1.0):
        page.evaluate(f"() => window.scrollTo(0, document.documentElement.scrollHeight * {share})")
        page.wait_for_timeout(60)
        assert page.evaluate(count) < 300
    page.locator(f"#grid [data-index='{NUM_ROWS - 1}'] img").wait_for()
    page.wait_for_function(
        f"() => document.querySelector(\"#grid [data-index='{NUM_ROWS - 1}'] img\")?.naturalWidth > 0"
    )


def test_words_states_and_seeds_find_images_and_the_address_finds_them_again(
    served: RunningGallery, folders: Path, page: Page
) -> None:
    served.show(page, folders / "many")
    page.locator("#grid [data-index='0']").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("LIGHTHOUSE number4006")
    page.wait_for_function("() => document.getElementById('filter-count').textContent.startsWith('1 ')")
    page.locator("#grid [data-index='0']").click()
    page.locator("#picture").wait_for()
    expect(page.locator("#picture-prompt")).to_contain_text("number4006", use_inner_text=True)
    expect(page.locator("#picture-command")).to_contain_text("halation generate", use_inner_text=True)
    page.locator("#picture-spec").get_by_text("4048", exact=True).wait_for()  # the seed
    page.keyboard.press("Escape")
    address = page.url
    page.goto("about:blank")
    page.goto(address, wait_until="commit")  # the page replaces its own address while it loads
    page.wait_for_function("() => document.getElementById('filter-count')?.textContent.startsWith('1 ')")
    page.locator("#filter-clear").click()
    failed = NUM_ROWS // 97
    page.get_by_role("button", name="Failed", exact=True).or_(
        page.get_by_role("radio", name="Failed", exact=True)
    ).first.click()
    page.wait_for_function(f"() => document.getElementById('filter-count').textContent.startsWith('{failed} ')")
    page.locator("#grid [data-index='0']").click()
    page.locator("#picture-reason").get_by_text("CUDA out of memory").wait_for()
    before = text_of(page, "#picture-position")
    page.keyboard.press("ArrowRight")
    page.wait_for_function(f"() => document.getElementById('picture-position').textContent !== {json.dumps(before)}")


def test_a_generation_says_what_failed_in_words_with_prompts_and_ids(
    served: RunningGallery, folders: Path, page: Page
) -> None:
    served.show(page, folders / "many")
    failed = NUM_ROWS // 97
    expect(page.locator(".run-heading .chip")).to_have_text(f"finished, {failed} failed")
    expect(page.locator("#workers thead th")).to_have_text(["Worker", "Share", "Done", "Failed"])
    expect(page.locator("#workers thead")).to_be_in_viewport()
    page.locator("#tab-failures").click()
    first = page.locator(".failed-rows tbody tr").first
    expect(first.locator("th")).to_have_text("000097")
    expect(first.locator("td")).to_have_text([prompt_of(96), "138"])
    rows = page.locator(".reasons li").first.locator(".failed-rows tbody tr")
    expect(rows).to_have_count(10)
    page.locator(".failed-more").first.click()
    page.wait_for_function("() => /^5[0-9] of /.test(document.getElementById('filter-count')?.textContent)")


def test_a_command_is_wrapped_at_its_spaces(
    served: RunningGallery, folders: Path, new_page: Callable[..., Page]
) -> None:
    page = new_page(viewport={"width": 420, "height": 800})
    served.show(page, folders / "many")
    page.locator("#grid [data-index='0']").click()
    command = page.locator("#picture-command code")
    expect(command).to_contain_text("--output_dir outputs/again")
    broken = """(code) => [...code.querySelectorAll(".whole")].filter((word) => {
      const line = parseFloat(getComputedStyle(word).lineHeight);
      return word.getBoundingClientRect().height > 1.5 * line;
    }).map((word) => word.textContent)"""
    assert command.evaluate(broken) == []
    page.goto("about:blank")


def test_the_environment_of_a_run_repeats_none_of_its_settings(
    served: RunningGallery, folders: Path, page: Page
) -> None:
    served.show(page, folders / "many", "/config")
    facts = page.locator("[data-part='fixed'] tr")
    expect(facts.get_by_text("png coder")).to_be_visible()
    names = page.locator("[data-part='fixed'] tr th").all_inner_texts()
    settings = page.locator("[data-part='settings'] tr th, [data-part='differs'] tr th").all_inner_texts()
    assert len(settings) > 20
    assert not set(names) & set(settings)


# -- for everybody


def test_prompts_ids_and_scores_are_text_whatever_they_say(served: RunningGallery, folders: Path, page: Page) -> None:
    root = folders / "harmful"
    served.show(page, root / "train")
    page.locator(".matrix-prompt").first.wait_for()
    page.locator(CELL).first.click()
    assert text_of(page, "#viewer-caption").strip() == PAYLOADS[0].strip()
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    served.show(page, root / "generate")
    page.locator("#grid [data-index='0']").click()
    page.locator("#picture-prompt").wait_for()
    for _ in range(len(PAYLOADS) - 1):
        page.keyboard.press("ArrowRight")
    page.wait_for_function(
        f"() => document.getElementById('picture-prompt').textContent.trim() === {json.dumps(PAYLOADS[-1].strip())}"
    )
    page.goto(f"{served.address}/#/scores")
    page.locator("#scores").wait_for()
    served.enter(page)
    page.locator("a.run").first.wait_for()
    ran = "() => Object.keys(window).filter((name) => /harm|pwn|xss|canary/i.test(name))"
    assert page.evaluate(ran) == []
    expect(page.locator("main script, main iframe, main object, main style")).to_have_count(0)


@pytest.mark.parametrize("scheme", [pytest.param("dark", marks=pytest.mark.slow), "light"])
def test_everything_fits_a_phone_and_has_a_name(
    served: RunningGallery, folders: Path, new_page: Callable[..., Page], scheme: str
) -> None:
    page = new_page(viewport={"width": 390, "height": 844}, color_scheme=scheme)
    served.enter(page)
    page.locator("a.run").first.wait_for()
    assert page.evaluate(OVERFLOW) <= 0
    assert page.evaluate(UNNAMED) == []
    views = [
        (folders / "long", "", "#matrix .matrix-row[data-step]:not(.matrix-teacher)"),
        (folders / "long", "/curves", ".figure svg"),
        (folders / "many", "", "#grid [data-index='0']"),
    ]
    for run, rest, there in views:
        page.goto("about:blank")
        served.show(page, run, rest)
        page.locator(there).first.wait_for()
        assert page.evaluate(OVERFLOW) <= 0, (run.name, rest)
        assert page.evaluate(UNNAMED) == [], (run.name, rest)
    page.goto("about:blank")
    page.goto(f"{served.address}/#/scores")
    page.locator("#scores").wait_for()
    assert page.evaluate(OVERFLOW) <= 0
    assert page.evaluate(UNNAMED) == []


def test_the_way_back_closes_what_is_open_before_it_leaves_the_run(
    served: RunningGallery, folders: Path, page: Page
) -> None:
    served.enter(page)
    page.locator("a.run").first.wait_for()
    page.evaluate(f"() => {{ location.hash = '#/run/{make_run_id(folders / 'long')}'; }}")
    page.locator(CELL).first.click()
    page.keyboard.press("c")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("c")
    page.locator("#compare").wait_for()
    page.go_back()
    page.locator("#compare").wait_for(state="detached")  # its close event has been handled, not only queued
    if page.locator("#viewer").count():
        page.go_back()
    page.locator("#viewer").wait_for(state="hidden")
    expect(page.locator("main")).to_have_attribute("data-view", "training")
    page.locator(CELL).first.click()
    page.keyboard.press("Escape")
    page.locator("#viewer").wait_for(state="hidden")
    page.wait_for_function("() => !history.state?.dialog")  # its own step back takes a moment, and two at once are one
    page.go_back()
    page.locator("main[data-view='runs']").wait_for()


@pytest.mark.slow
def test_a_gallery_that_was_started_anew_says_that_its_link_is_another(
    folders: Path, tmp_path: Path, page: Page, browser_errors: BrowserErrors
) -> None:
    browser_errors.expect("403|ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED_ENCODING")
    with run_gallery(folders / "harmful" / "train", scratch=tmp_path) as first:
        first.enter(page)
        page.locator("#connection[data-status='live']").wait_for()
        port = first.address.rpartition(":")[2]
    (tmp_path / "again").mkdir()
    with run_gallery(folders / "harmful" / "train", scratch=tmp_path / "again", flags=("--port", port)) as second:
        assert second.token != first.token
        page.locator("#connection[data-status='locked']").wait_for()
        page.goto(second.link)
        page.locator("#connection[data-status='live']").wait_for()
        page.goto("about:blank")
