"""Results of the commands are unchanged: digests, exit codes, runs of an older commit."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import frozen


def as_parameter(case: frozen.Case) -> Any:
    marks = [] if case.fast else [pytest.mark.slow]
    marks += [pytest.mark.ranks] if case.num_ranks > 1 else []
    return pytest.param(case, id=case.name, marks=marks)


def given(folder: Path, begun: str) -> dict[str, tuple[int, bytes]]:
    """Inode and bytes of every file of a stopped run, in a copy of it."""
    names = [path.relative_to(frozen.RUNS / begun) for path in (frozen.RUNS / begun).rglob("*") if path.is_file()]
    return {str(name): ((folder / name).stat().st_ino, (folder / name).read_bytes()) for name in names}


# -- results


@pytest.mark.parametrize("case", [as_parameter(case) for case in frozen.CASES.values()])
def test_the_files_and_exit_codes_of_a_case_are_those_that_were_recorded(case: frozen.Case, tmp_path: Path) -> None:
    known = frozen.record_of(case)
    if known is None:
        pytest.skip(
            f"nothing is recorded for {case.platform}; on a commit that is known to be right, record it with "
            f"`python tests/support/frozen.py record {case.name}`, "
            "or compare this tree with a worktree of that commit: "
            f"`python tests/support/frozen.py compare WORKTREE {case.name}`"
        )
    try:
        found = frozen.results(case, tmp_path / "place")
    finally:
        shutil.rmtree(tmp_path / "place", ignore_errors=True)
    assert frozen.difference(known, found) == []


def test_every_record_belongs_to_a_case() -> None:
    for platform, cases in frozen.recorded().items():
        names = {case.name for case in frozen.CASES.values() if case.portable == platform.startswith("any CPU")}
        assert cases.keys() == names, platform


# -- runs that an older commit began


@pytest.mark.parametrize("name", ["training", pytest.param("distillation", marks=pytest.mark.slow)])
def test_a_session_that_an_older_commit_stopped_goes_on_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    frozen.lay_out(tmp_path, name)
    before = given(tmp_path, name)
    rows = before["run/metrics.jsonl"][1]
    assert [json.loads(line)["step"] for line in rows.splitlines()][-1] == 2
    ended = frozen.run(frozen.going_on(frozen.BEGUN[name].words, tmp_path), tmp_path)
    assert ended.code == 0, ended.errors
    after = given(tmp_path, name)
    kept = [file for file in before if file.startswith(("run/checkpoints/step_", "run/cache/", "run/samples/teacher/"))]
    assert len(kept) >= 6
    assert {file: after[file] for file in kept} == {file: before[file] for file in kept}
    now = (tmp_path / "run/metrics.jsonl").read_bytes()
    assert now.startswith(rows), "steps that were trained before are not trained again"
    assert [json.loads(line)["step"] for line in now.splitlines()][-1] == 4
    assert json.loads((tmp_path / "run/checkpoints/step_0000004/COMMIT.json").read_bytes())["step"] == 4
    assert (tmp_path / "run/export/model.safetensors").is_file()


def test_a_generation_that_an_older_commit_stopped_draws_only_what_is_missing(tmp_path: Path) -> None:
    frozen.lay_out(tmp_path, "generation")
    before = given(tmp_path, "generation")
    done = [name for name in before if name.endswith(".png")]
    assert 0 < len(done) < len(frozen.PROMPTS)
    ended = frozen.run(frozen.BEGUN["generation"].words, tmp_path)
    assert ended.code == 0, ended.errors
    after = given(tmp_path, "generation")
    assert {name: after[name] for name in done} == {name: before[name] for name in done}
    assert json.loads((tmp_path / "cards/summary.json").read_bytes())["drawn_now"] == len(frozen.PROMPTS) - len(done)
    ledger = sqlite3.connect(tmp_path / "cards/ledger.sqlite")
    states = ledger.execute("SELECT state, attempts FROM pictures ORDER BY picture").fetchall()
    ledger.close()
    assert states == [(1, 1)] * len(frozen.PROMPTS)


@pytest.mark.slow
def test_an_evaluation_that_an_older_commit_stopped_uses_the_features_it_kept(tmp_path: Path) -> None:
    origin = json.loads(frozen.ORIGIN.read_bytes())
    others = [f"{name} {was}" for name, was in origin["versions"].items() if frozen.version(name) != was]
    if others:
        pytest.skip(f"features are kept by library versions, and these were made by {', '.join(others)}")
    frozen.lay_out(tmp_path, "evaluation")
    before = given(tmp_path, "evaluation")
    kept = [name for name in before if name.startswith("features/")]
    assert len(kept) == 2
    ended = frozen.run(frozen.BEGUN["evaluation"].words, tmp_path)
    assert ended.code == 0, ended.errors
    after = given(tmp_path, "evaluation")
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    chunks = {path.name for path in (tmp_path / kept[0]).parent.iterdir()}
    assert chunks == {f"chunk_{number:07d}.safetensors" for number in range(4)}, "two more beside those that were kept"


@pytest.mark.slow
@pytest.mark.parametrize("begun", frozen.BEGUN.values(), ids=frozen.BEGUN.keys())
def test_a_stopped_run_ends_with_the_results_of_one_that_never_stopped(begun: frozen.Begun, tmp_path: Path) -> None:
    origin = json.loads(frozen.ORIGIN.read_bytes())["platform"]
    if not begun.portable and frozen.platform() != origin:
        pytest.skip(f"the first half was computed on another platform, {origin}, which rounds differently")
    frozen.lay_out(tmp_path / "never")
    for command in filter(None, (begun.before, begun.words)):
        assert frozen.run(command, tmp_path / "never").code == 0
    frozen.lay_out(tmp_path / "stopped", begun.name)
    words = frozen.going_on(begun.words, tmp_path / "stopped")
    assert frozen.run(words, tmp_path / "stopped").code == 0
    lines = frozen.difference(frozen.digests(tmp_path / "never"), frozen.digests(tmp_path / "stopped"))
    # The loss beside samples and the counts of a summary are those of one call. The older commit finished a folder of
    # images without the file that marks its kind of ledger, did not sample at step 0, and its record has no settings
    # that came later.
    by_call = ("samples.json", "summary.json", "missing: cards/ledger.kind", "run/samples/step_0000000/")
    by_call += ("changed: cards/config.json",)
    assert [line for line in lines if not any(name in line for name in by_call)] == []


# -- the check itself


@pytest.fixture(scope="module")
def cards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated folder, its page and a line of metrics."""
    place = tmp_path_factory.mktemp("frozen_cards")
    frozen.results(frozen.CASES["cards"], place)
    (place / "metrics.jsonl").write_text(
        '{"step": 1, "time_s": 0.5, "loss": 1.25}\n{"step": 2, "time_s": 0.7, "loss": 1.0}\n'
    )
    return place


def replace_text(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        text = (place / name).read_text()
        assert old in text
        (place / name).write_text(text.replace(old, new, 1))

    return change


def flip_a_byte(place: Path) -> None:
    path = place / "cards/10_seed42.png"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def execute(sql: str) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        ledger = sqlite3.connect(place / "cards/ledger.sqlite")
        with ledger:
            assert ledger.execute(sql).rowcount == 1
        ledger.close()

    return change


def change_log(place: Path) -> None:
    (place / "cards/logs/generate.log").write_text("another time\n")


def remove_log(place: Path) -> None:
    (place / "cards/logs/generate.log").unlink()


@pytest.mark.parametrize(
    ("change", "file"),
    [
        (flip_a_byte, "cards/10_seed42.png"),
        (replace_text("cards/config.json", '"seed_start": 42', '"seed_start": 43'), "cards/config.json"),
        (replace_text("cards/summary.json", '"retries": 0', '"retries": 1'), "cards/summary.json"),
        (replace_text("cards/metadata.jsonl", "a red car", "a red bus"), "cards/metadata.jsonl"),
        (replace_text("metrics.jsonl", "1.25", "1.2500001"), "metrics.jsonl"),
        (replace_text("page.html", "a red car", "a red bus"), "page.html"),
        (replace_text("page.html", "<style>", "<style>\n"), "page.html"),
        (execute("UPDATE pictures SET attempts = 2 WHERE picture = 0"), "cards/ledger.sqlite"),
        (remove_log, "cards/logs/generate.log"),
    ],
)
def test_a_changed_result_has_another_digest(
    cards: Path, tmp_path: Path, change: Callable[[Path], None], file: str
) -> None:
    place = shutil.copytree(cards, tmp_path / "place")
    before = frozen.digests(place)
    change(place)
    lines = frozen.difference(before, frozen.digests(place))
    assert [line.split()[1] for line in lines] == [file]


@pytest.mark.parametrize(
    "change",
    [
        replace_text("cards/ended.json", '"time": "2', '"time": "3'),
        replace_text("cards/summary.json", '"seconds": ', '"seconds": 1'),
        replace_text("metrics.jsonl", '"time_s": 0.5', '"time_s": 0.9'),
        replace_text("page.html", '"changed":', '"changed":1'),
        execute("UPDATE pictures SET seconds = seconds + 1 WHERE picture = 0"),
        change_log,
    ],
)
def test_another_time_has_the_same_digest(cards: Path, tmp_path: Path, change: Callable[[Path], None]) -> None:
    place = shutil.copytree(cards, tmp_path / "place")
    before = frozen.digests(place)
    change(place)
    assert frozen.digests(place) == before


def test_the_place_of_a_folder_is_no_part_of_its_digests(tmp_path: Path) -> None:
    found = []
    for name in ("a", "another place"):
        place = tmp_path / name
        place.mkdir()
        (place / "config.json").write_text(json.dumps({"teacher_path": str(place / "model"), "seed": 1}))
        found.append(frozen.digests(place))
    assert found[0] == found[1]


def test_a_tree_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no source tree"):
        frozen.main(["compare", str(tmp_path), "cards"])


def test_the_frozen_runs_are_small_and_name_no_machine() -> None:
    files = [path for path in frozen.FROZEN.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_500_000
    assert not [path for path in files if path.name in (".lock", ".owner.json") or os.path.islink(path)]
