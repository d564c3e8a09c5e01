"""Laws of an export: one bounded file that lists what it lacks, with all text escaped."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import re
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
from benchmarks.big_folders import generation_folder, training_folder

from halation import cli
from halation.errors import InputError
from halation.gallery import html_export
from halation.gallery.command import build_catalog
from halation.gallery.evaluation_reports import ScoreIndex
from halation.gallery.html_export import ExportResult, select_runs
from halation.gallery.run_file_reader import select_evenly
from halation.runs import run_folder as runs

PAYLOAD = "</script><script>alert(1)</script><!-- & \u2028 <img src=x onerror=alert(2)>"


def exported(root: Path, path: Path, num_images: int = 400) -> ExportResult:
    catalog = build_catalog([root])
    scores = ScoreIndex(catalog)
    catalog.refresh()
    scores.refresh()
    return html_export.export(select_runs(catalog), catalog, scores, path, num_images)


def embedded(path: Path) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="embedded">(.*?)</script>', path.read_text(), re.DOTALL)
    assert match is not None
    value: dict[str, Any] = json.loads(match[1])
    return value


def test_a_page_holds_the_answers_small_images_and_the_way_to_the_full_ones(tmp_path: Path) -> None:
    run = training_folder(tmp_path / "runs" / "a run", 3, 2, size=32, raw=True)
    made = exported(run, tmp_path / "mail.html")
    assert made.path.stat().st_size == made.num_bytes
    assert (made.num_images, made.left_out) == (12, ())
    page = embedded(made.path)
    (summary,) = page["responses"]["/api/runs"]["runs"]
    about = f"/api/runs/{summary['id']}"
    assert page["responses"].keys() == {
        *("/api/state", "/api/runs", "/api/scores", about, f"{about}/log", f"{about}/config", f"{about}/metrics")
    }
    assert page["responses"][f"{about}/config"]["settings"]["model"] == "tiny"
    assert [step["step"] for step in page["responses"][about]["steps"]] == [300, 200, 100] or [
        step["step"] for step in page["responses"][about]["steps"]
    ] == [100, 200, 300]
    assert page["pictures"].keys() == page["links"].keys()
    for name, data in page["pictures"].items():
        assert base64.b64decode(data.removeprefix("data:image/webp;base64,"))[8:12] == b"WEBP"
        full = (tmp_path / urllib.parse.unquote(page["links"][name])).resolve()
        assert full.is_relative_to(run)
        assert full.is_file()


def test_a_run_whose_name_is_no_text_is_exported(tmp_path: Path) -> None:
    run = training_folder(tmp_path / "run", 1, 1, size=8).rename(tmp_path / os.fsdecode(b"caf\xe9"))
    made = exported(run, tmp_path / "page.html")
    assert "<title>caf\ufffd" in made.path.read_text()
    assert made.num_images == 1


def test_few_images_are_whole_steps_spread_evenly_with_the_first_and_the_last(tmp_path: Path) -> None:
    run = training_folder(tmp_path / "run", 21, 4, size=32)
    made = exported(run, tmp_path / "page.html", 20)
    page = embedded(made.path)
    detail = next(value for key, value in page["responses"].items() if re.fullmatch(r"/api/runs/\w+", key))
    assert sorted(step["step"] for step in detail["steps"]) == [100, 600, 1100, 1600, 2100]
    assert made.num_images == len(page["pictures"]) == 20
    assert made.left_out == ("samples of 5 of 21 steps are on this page",)
    assert "Samples of 5 of 21 steps are on this page" in made.path.read_text()


def test_images_are_fewer_where_they_would_be_too_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = training_folder(tmp_path / "run", 10, 2, size=32)
    whole = exported(run, tmp_path / "page.html")
    monkeypatch.setattr(html_export, "MAX_IMAGE_BYTES", 5_000)
    part = exported(run, tmp_path / "page.html")
    assert 0 < part.num_images < whole.num_images == 20
    data = [base64.b64decode(uri.split(",")[1]) for uri in embedded(part.path)["pictures"].values()]
    assert sum(map(len, data)) <= 5_000


def test_a_generation_shows_some_images_with_their_specs_and_everything_that_failed(tmp_path: Path) -> None:
    run = generation_folder(tmp_path / "drawn", 60, failed_every=10, size=32)
    made = exported(run, run / "page.html", 9)
    page = embedded(made.path)
    rows = next(value for key, value in page["responses"].items() if key.endswith("/rows"))
    assert rows["total"] == len(rows["rows"]) == 9 + 6
    done = [row["index"] for row in rows["rows"] if row["state"] == "done"]
    assert (done[0], done[-1], len(done), made.num_images) == (0, 58, 9, 9)
    assert sum(row["state"] == "failed" for row in rows["rows"]) == 6
    specs = [value for key, value in page["responses"].items() if "/spec/" in key]
    assert len(specs) == 15
    assert all("halation generate" in spec["command"] for spec in specs)
    assert made.left_out == ("9 of 54 images are on this page",)
    assert set(page["links"].values()) <= {path.name for path in run.glob("*.png")}


def test_images_of_a_long_generation_are_from_all_of_it(tmp_path: Path) -> None:
    run = generation_folder(tmp_path / "drawn", 2_400, failed_every=2, size=8)
    made = exported(run, tmp_path / "page.html", 40)
    rows = next(value for key, value in embedded(made.path)["responses"].items() if key.endswith("/rows"))["rows"]
    done = [row["index"] for row in rows if row["state"] == "done"]
    assert len(done) == made.num_images == 40
    assert max(after - before for before, after in itertools.pairwise(done)) < 80
    assert sum(row["state"] == "failed" for row in rows) == 1_000


def test_scores_come_with_their_nearest_and_farthest_within_the_number_of_images(tmp_path: Path) -> None:
    run = generation_folder(tmp_path / "drawn", 60, failed_every=0, size=32)
    names = sorted(path.name for path in run.glob("*.png"))
    rows = [{"index": n, "name": name, "caption": None, "distance": 1.0 + n} for n, name in enumerate(names[:24])]
    found = {"fd": {"name": "FD-streets", "value": 3.5, "better": "lower"}}
    extremes = {"nearest": rows, "farthest": rows[::-1]}
    value = {"generated": {"path": str(run)}, "metrics": found, "versions": {}, "extremes": extremes}
    runs.write_json_atomic(run / "scores.json", value)
    made = exported(run, tmp_path / "page.html", 40)
    page = embedded(made.path)
    assert [score["value"] for score in page["responses"]["/api/scores"]["scores"]] == [3.5]
    (report,) = page["responses"]["/api/scores"]["reports"]
    shown = [row["picture"]["key"] for row in report["nearest"][:10]]
    assert all(f"{report['run']}/{key}" in page["pictures"] for key in shown)
    assert made.num_images == len(page["pictures"]) == 40
    assert "10 of 48 nearest and farthest images are on this page" in made.left_out


def test_nothing_a_run_says_can_become_markup_or_script(tmp_path: Path) -> None:
    run = training_folder(tmp_path / "run", 1, 2, size=32, prompts=(PAYLOAD, "plain"))
    (run / "logs" / "train.log").write_text(PAYLOAD + "\n")
    text = exported(run, tmp_path / "page.html").path.read_text()
    assert "alert(1)" in text
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert "\u2028" not in text
    detail = next(
        v for k, v in embedded(tmp_path / "page.html")["responses"].items() if re.fullmatch(r"/api/runs/\w+", k)
    )
    assert detail["prompts"][0]["prompt"] == PAYLOAD
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert "unsafe" not in policy[1]
    scripts = re.findall(r"<script(?: type=\"module\")?>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 1
    for kind, body in (("script", scripts[0]), ("style", re.findall(r"<style>(.*?)</style>", text, re.DOTALL)[0])):
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy[1]


def test_numbers_that_are_none_become_null_and_the_machine_is_not_named(tmp_path: Path) -> None:
    run = training_folder(tmp_path / "run", 1, 1, size=32)
    with open(run / runs.METRICS_FILE, "a") as file:
        file.write('{"step": 101, "loss": NaN}\n')
    page = embedded(exported(run, tmp_path / "page.html").path)
    config = [value for key, value in page["responses"].items() if key.endswith("/config")]
    others = {key: value for key, value in page["responses"].items() if not key.endswith("/config")}
    assert str(tmp_path) in json.dumps(config), "the settings are what config.json holds"
    assert str(tmp_path) not in json.dumps([others, page["links"]])


@pytest.mark.parametrize(
    ("num", "most", "expected"),
    [(5, 9, [0, 1, 2, 3, 4]), (5, 2, [0, 4]), (9, 3, [0, 4, 8]), (9, 1, [8]), (9, 0, []), (0, 4, [])],
)
def test_evenly_has_the_first_and_the_last(num: int, most: int, expected: list[int]) -> None:
    assert select_evenly(range(num), most) == expected


# -- refused


def test_no_run_and_several_runs_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gallery", str(tmp_path), "--export", str(tmp_path / "page.html")]
    assert cli.main(words) == 2
    assert "no run below" in capsys.readouterr().err
    for name in ("one", "two"):
        training_folder(tmp_path / name, 1, 1, size=32)
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert str(tmp_path / "one") in said
    assert str(tmp_path / "two") in said
    assert not (tmp_path / "page.html").exists()
    assert cli.main(["gallery", str(tmp_path / "one"), "--export", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").stat().st_size > 50_000


def test_several_folders_are_exported_to_one_page_and_share_its_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several folders are exported to one page with their list and share its limit of images."""
    training = training_folder(tmp_path / "training", 3, 2, size=32)
    images = generation_folder(tmp_path / "pictures", 12, size=32)
    page = tmp_path / "both.html"
    words = ["gallery", str(training), str(images), str(training), "--export", str(page), "--export_images", "8"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "training: samples of 2 of 3 steps" in said
    assert "pictures: 4 of 12 images" in said
    held = embedded(page)
    runs = held["responses"]["/api/runs"]["runs"]
    assert sorted(run["name"] for run in runs) == ["pictures", "training"]
    for run in runs:
        assert f"/api/runs/{run['id']}" in held["responses"]
        assert sum(name.startswith(f"{run['id']}/") for name in held["pictures"]) == 4
    assert "<title>training, pictures · Halation</title>" in page.read_text()
    assert ">training: samples of 2 of 3 steps are on this page. pictures: 4 of 12 images" in page.read_text()
    assert cli.main(["gallery", str(training), str(tmp_path), "--export", str(page)]) == 2, (
        "two runs are below the second"
    )
    assert "give one of these folders, or all" in capsys.readouterr().err


def test_what_lies_inside_a_run_belongs_to_it(tmp_path: Path) -> None:
    run = training_folder(tmp_path / "run", 1, 1, size=32)
    generation_folder(run / "drawn", 2, size=32)
    catalog = build_catalog([tmp_path])
    catalog.refresh()
    assert len(catalog.entries()) == 2
    assert [entry.folder for entry in select_runs(catalog)] == [run]


def test_a_target_that_cannot_be_a_file_is_refused(tmp_path: Path) -> None:
    for path, pattern in (
        (tmp_path, "is a folder"),
        (tmp_path / "gone" / "page.html", "there is no folder"),
        (Path("/proc/page.html"), "page.html cannot be written: "),
    ):
        with pytest.raises(InputError, match=pattern):
            html_export.check_export_path(path)


def test_only_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    run = training_folder(tmp_path / "run", 1, 1, size=32)
    page = tmp_path / "page.html"
    exported(run, page)
    exported(run, page)
    page.write_text("<!doctype html>\n<title>mine · Halation</title>\n" + " " * 4_000 + html_export.EXPORT_MARKER)
    before = page.read_bytes()
    with pytest.raises(InputError, match="is not an export of this command"):
        exported(run, page)
    assert page.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


def test_a_disk_that_refuses_the_page_is_told_in_words_and_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = training_folder(tmp_path / "run", 1, 1, size=32)
    page = tmp_path / "page.html"
    exported(run, page)
    before = page.read_bytes()
    monkeypatch.setenv("HALATION_FAULT_LOG", str(tmp_path / "run/faults.log"))
    monkeypatch.setenv("HALATION_FAULT", "publish.write:2+:ENOSPC")
    with pytest.raises(InputError, match="cannot be written: No space left"):
        exported(run, page)
    assert "publish.write" in (tmp_path / "run/faults.log").read_text(), "the probe passed, the page did not"
    assert page.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]
