"""Latency and idle cost of `halation gallery`.

The goals: 1,000 steps x 8 prompts open in one second, 100,000 images in two, and 50 idle runs use less than 1 % of a
core. Ours is the time from the first request of a new server to the responses that its page needs (and, if Chromium and
playwright are installed, to the first visible image in a browser). The peer is a page without an index, which lists the
folder and reads the metadata of every image on each request.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import inputs, measure, shipped
from benchmarks.big_folders import generation_folder, training_folder
from halation.gallery.run_catalog import make_run_id
from halation.images.png_codec import read_png

LINK = re.compile(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)")
GOAL_CPU = 0.01
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One size of the benchmark."""

    num_steps: int
    num_images: int
    num_runs: int
    idle_s: float
    rounds: int


FULL = Setting(num_steps=1000, num_images=100_000, num_runs=50, idle_s=30.0, rounds=3)
SMALL = Setting(num_steps=50, num_images=2_000, num_runs=5, idle_s=4.0, rounds=1)


class Visitor:
    """A client that opened the link; each request is a separate connection."""

    def __init__(self, process: psutil.Process, port: int, token: str) -> None:
        self.process = process
        self.port = port
        self.link = f"http://127.0.0.1:{port}/?token={token}"
        self.cookie = ""
        self.cookie = self._ask(f"/?token={token}").getheader("set-cookie", "").partition(";")[0]

    def _ask(self, path: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path, headers={"cookie": self.cookie})
        return connection.getresponse()

    def get(self, path: str) -> object:
        response = self._ask(path)
        body = response.read()
        if response.status != 200:
            raise SystemExit(f"{path} returned {response.status}: {body[:200]!r}")
        return json.loads(body) if path.startswith("/api") else body


@contextlib.contextmanager
def serving(folder: Path, cache: Path) -> Iterator[Visitor]:
    """Start `halation gallery FOLDER` with an empty cache."""
    shutil.rmtree(cache, ignore_errors=True)
    command = [sys.executable, "-m", "halation.cli", "gallery", str(folder)]
    environment = shipped.environment({"HALATION_CACHE": str(cache), "PYTHONUNBUFFERED": "1"})
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        assert process.stdout is not None
        found = next(filter(None, map(LINK.search, process.stdout)))
        yield Visitor(psutil.Process(process.pid), int(found[1]), found[2])
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)


def opened(run: Path, cache: Path, paths: tuple[str, ...]) -> float:
    """Return the seconds of the first requests of a run's page."""
    with serving(run, cache) as visitor:
        began = time.perf_counter()
        for path in paths:
            visitor.get(f"/api/runs/{make_run_id(run)}{path}")
        return time.perf_counter() - began


def seen(run: Path, cache: Path) -> float | None:
    """Return seconds until a browser shows the first image of a run; None without a browser."""
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if executable is None:
        return None
    there = "() => [...document.querySelectorAll('main img')].some((image) => image.complete && image.naturalWidth > 0)"
    with serving(run.parent, cache) as visitor, sync_playwright() as playwright:
        # Chromium creates a socket there, and the path of a socket has at most 107 bytes.
        short: dict[str, str | float | bool] = {**os.environ, "TMPDIR": "/tmp"}
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS, env=short)
        page = browser.new_page()
        page.goto(visitor.link)
        page.wait_for_function("() => document.querySelector('main').dataset.view === 'runs'")
        began = time.perf_counter()
        page.evaluate(f"() => {{ location.hash = '#/run/{make_run_id(run)}'; }}")
        page.wait_for_function(f"() => document.querySelector('main').dataset.view !== 'runs' && ({there})()")
        took = time.perf_counter() - began
        browser.close()
        return took


def scanned(folder: Path) -> tuple[float, int]:
    """Do the work of a page without an index: list the files and read every image's metadata."""
    began = time.perf_counter()
    num = 0
    for place, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".png") and ".distinct" not in place:
                read_png(Path(place) / name)
                num += 1
    return time.perf_counter() - began, num


def idle_share(root: Path, cache: Path, idle_s: float) -> float:
    """Return the share of a core that is used while a page is open and nothing changes."""
    with serving(root, cache) as visitor:
        stream = visitor._ask("/api/events")
        time.sleep(5)  # until all runs are scanned
        before = sum(visitor.process.cpu_times()[:2])
        time.sleep(idle_s)
        used = sum(visitor.process.cpu_times()[:2]) - before
        stream.close()
        return used / idle_s


def benchmark(setting: Setting, work: Path) -> measure.Report:
    cache = work / "cache"
    training = training_folder(work / "training" / "run", setting.num_steps, 8, size=64)
    generation = generation_folder(work / "generation" / "run", setting.num_images, size=64)
    cases = [
        (f"{setting.num_steps} steps x 8 prompts", training, ("", "/metrics?after=0"), 1.0),
        (f"{setting.num_images} images", generation, ("", "/rows?offset=0&limit=200"), 2.0),
    ]
    rows = []
    for case, run, paths, goal_s in cases:
        ours = measure.medians({"ours": [opened(run, cache, paths) for _ in range(setting.rounds)]})["ours"]
        peer, num = scanned(run)
        shown = seen(run, cache)
        browser = "no browser here" if shown is None else f"first image in a browser after {shown:.2f} s"
        note = f"{browser}; goal {goal_s:g} s{'' if max(ours, shown or 0) <= goal_s else ': MISSED'}"
        rows.append(
            measure.Row(
                case=case, ours=ours, peer=peer, unit="s", limit=None, check=f"{num} images", equality="E0", note=note
            )
        )  # fmt: skip
        measure.say(f"{case}: {ours:.3f} s, a scan {peer:.1f} s; {note}")
    quiet = work / "quiet"
    for number in range(setting.num_runs):
        training_folder(quiet / f"run_{number:02d}", 20, 4, size=32)
    share = idle_share(quiet, cache, setting.idle_s)
    note = f"{share:.2%} of a core{'' if share <= GOAL_CPU else ': MISSED'}"
    rows.append(
        measure.Row(
            case=f"{setting.num_runs} quiet runs", ours=max(share, 1e-4), peer=GOAL_CPU, unit="of a core", limit=None,
            check="nothing changes", equality="E0", note=note,
        )
    )  # fmt: skip
    return measure.Report(name="gallery", rows=tuple(rows), facts=measure.machine())


def main(arguments: list[str] | None = None) -> measure.Report:
    asked = measure.parser(__doc__ or "").parse_args(arguments)
    with inputs.workplace(asked.work) as work:
        report = benchmark(FULL if asked.size == "full" else SMALL, work)
    measure.finish(report, asked.output)
    return report


if __name__ == "__main__":
    main()
