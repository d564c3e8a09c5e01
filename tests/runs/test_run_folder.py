"""A run folder: atomic files, one command at a time, changed settings refused with a diff."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from halation import fault_injection
from halation.errors import HalationError, InputError
from halation.fault_injection import InjectedFault
from halation.runs import lock
from halation.runs import run_folder as runs

POINTS = ("open", "write", "fsync", "rename", "renamed")


@pytest.fixture(autouse=True)
def fresh_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fault_injection._counts.clear()
    monkeypatch.setenv("HALATION_FAULT_LOG", str(tmp_path / "fired"))


def fired(tmp_path: Path) -> list[str]:
    return (tmp_path / "fired").read_text().splitlines()


# -- digests


def test_no_flipped_bit_of_a_json_object_with_a_digest_changes_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    value = {"step": 20, "prompt": "a street, é", "metrics": {"fd": 31.25, "few": None}, "rows": [1, 2, {"x": "y"}]}
    runs.write_json_with_digest(path, value)
    assert runs.read_json_with_digest(path) == value
    data = path.read_bytes()
    num_noticed = 0
    for position in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        path.write_bytes(flipped)
        try:
            read = runs.read_json_with_digest(path)
        except InputError:
            num_noticed += 1
            continue
        assert {key: read[key] for key in value} == value
    assert num_noticed > 4 * len(data)


def test_a_json_object_of_an_earlier_version_has_no_digest_and_is_read(tmp_path: Path) -> None:
    runs.write_json_atomic(tmp_path / "a.json", {"step": 20})
    assert runs.read_json_with_digest(tmp_path / "a.json") == {"step": 20}


def test_a_changed_record_of_a_run_is_refused_by_name_and_stays_as_it_is(tmp_path: Path) -> None:
    run = runs.RunFolder(tmp_path)
    (run.checkpoints / "step_0000010").mkdir(parents=True)
    assert runs.create_or_resume_run(run, "train", {"lr": 0.5}, {"seed": 1}, accept_changes=False)
    changed = run.config.read_bytes().replace(b"0.5", b"0.4")
    run.config.write_bytes(changed)
    with pytest.raises(InputError, match=r"(?s)config\.json is damaged: .*remove its line 'digest'"):
        runs.create_or_resume_run(run, "train", {"lr": 0.5}, {"seed": 1}, accept_changes=False)
    assert run.config.read_bytes() == changed


# -- publishing


@pytest.mark.faults
@pytest.mark.parametrize("action", ["raise", "ENOSPC", "EIO"])
@pytest.mark.parametrize("point", POINTS)
def test_a_failed_publication_leaves_the_old_or_the_new_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, action: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    runs.write_atomic(folder / "a.json", b"old")
    monkeypatch.setenv("HALATION_FAULT", f"publish.{point}:1:{action}")
    with pytest.raises(InjectedFault if action == "raise" else OSError):
        runs.write_atomic(folder / "a.json", b"new" * 1000)
    assert fired(tmp_path) == [f"publish.{point}:1:{action}:0"]
    assert (folder / "a.json").read_bytes() == (b"new" * 1000 if point == "renamed" else b"old")
    assert os.listdir(folder) == ["a.json"]


@pytest.mark.faults
@pytest.mark.parametrize("existed", [True, False])
def test_a_kill_while_publishing_leaves_the_old_or_the_new_and_what_it_left_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existed: bool
) -> None:
    for number, point in enumerate(POINTS, 1):
        folder = tmp_path / point / "deeper"
        folder.mkdir(parents=True)
        if existed:
            runs.write_atomic(folder / "a.json", b"old")
        monkeypatch.setenv("HALATION_FAULT", f"publish.{point}:1:kill")
        child = os.fork()
        if child == 0:
            fault_injection._counts.clear()
            runs.write_atomic(folder / "a.json", b"new" * 1000)
            os._exit(0)
        monkeypatch.delenv("HALATION_FAULT")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert len(fired(tmp_path)) == number
        expected = b"new" * 1000 if point == "renamed" else b"old"
        if existed or point == "renamed":
            assert (folder / "a.json").read_bytes() == expected
        else:
            assert not (folder / "a.json").exists()
        runs.remove_temporaries(tmp_path / point)
        assert os.listdir(folder) == (["a.json"] if existed or point == "renamed" else [])


def write_folder(folder: Path, content: bytes) -> Path:
    (folder / "deeper").mkdir(parents=True)
    (folder / "deeper" / "file").write_bytes(content)
    return folder


def test_a_published_folder_replaces_an_older_one_or_a_link(tmp_path: Path) -> None:
    runs.publish_folder(write_folder(tmp_path / "new", b"1"), tmp_path / "out", "folder")
    runs.publish_folder(write_folder(tmp_path / "new", b"2"), tmp_path / "out", "folder")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    runs.publish_folder(write_folder(tmp_path / "new", b"3"), tmp_path / "link", "folder")
    assert [(tmp_path / name / "deeper" / "file").read_bytes() for name in ("out", "link")] == [b"2", b"3"]
    assert sorted(os.listdir(tmp_path)) == ["link", "out"]


@pytest.mark.faults
@pytest.mark.parametrize("action", ["raise", "EIO"])
def test_a_folder_that_cannot_be_published_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    folder = write_folder(tmp_path / "run" / "out", b"old")
    monkeypatch.setenv("HALATION_FAULT", f"folder.rename:1:{action}")
    with pytest.raises(InjectedFault if action == "raise" else OSError):
        runs.publish_folder(write_folder(tmp_path / "run" / ".out.tmp", b"new"), folder, "folder")
    assert fired(tmp_path) == [f"folder.rename:1:{action}:0"]
    assert (folder / "deeper" / "file").read_bytes() == b"old"
    runs.remove_temporaries(tmp_path / "run")
    assert os.listdir(tmp_path / "run") == ["out"]


def test_a_file_is_not_removed_for_a_folder_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"mine")
    with pytest.raises(NotADirectoryError):
        runs.publish_folder(write_folder(tmp_path / "new", b"1"), tmp_path / "out", "folder")
    assert (tmp_path / "out").read_bytes() == b"mine"


def test_a_refused_write_names_the_file(tmp_path: Path) -> None:
    """write() on a full disk knows no name; the person needs one. A limit on file size refuses as a full disk does."""
    code = (
        "import resource, pathlib, sys; from halation.runs import run_folder as runs; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100));"
        "runs.write_atomic(pathlib.Path(sys.argv[1]), b'x' * 5000)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.json")], capture_output=True, text=True)
    assert f"File too large: '{tmp_path / 'a.json'}'" in done.stderr
    assert os.listdir(tmp_path) == []


def test_temporaries_are_swept_and_nothing_else(tmp_path: Path) -> None:
    keep = [tmp_path / name for name in ("a.tmp", ".hidden", "tmp", ".a.tmp.json")]
    for path in [*keep, tmp_path / ".a.json.12.tmp", tmp_path / "x" / ".b.tmp"]:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    runs.remove_temporaries(tmp_path)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(keep)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write to .*file/run: Not a directory") as error:
        runs.make_folder(tmp_path / "file" / "run")
    assert "--output_dir" in error.value.action
    runs.make_folder(tmp_path / "new" / "run")
    assert os.listdir(tmp_path / "new" / "run") == []


# -- holding


@contextmanager
def other_command(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder until it is ended."""
    code = (
        "import pathlib, sys, time; from halation.runs import lock as holds\n"
        "with holds.lock_folder(pathlib.Path(sys.argv[1]), 'train'):\n    print('held', flush=True)\n    time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_command_is_refused_at_once_and_told_who_holds_the_folder(tmp_path: Path) -> None:
    with other_command(tmp_path) as owner:
        began = time.monotonic()
        with pytest.raises(InputError) as error, lock.lock_folder(tmp_path, "sample"):
            pass
        assert time.monotonic() - began < 10, "the owner holds it for a minute"
        assert f"{tmp_path} is in use by `halation train`, process {owner.pid} on " in error.value.found
        assert "--output_dir" in error.value.action
    assert (tmp_path / ".owner.json").exists(), "the owner was killed and could not tidy up"


def test_the_hold_of_a_killed_owner_is_taken_over(tmp_path: Path) -> None:
    with other_command(tmp_path) as owner:
        owner.send_signal(signal.SIGKILL)
        assert owner.wait(10) == -signal.SIGKILL
        assert json.loads((tmp_path / ".owner.json").read_text())["pid"] == owner.pid
        with lock.lock_folder(tmp_path, "sample"):
            assert json.loads((tmp_path / ".owner.json").read_text())["pid"] == os.getpid()
    assert os.listdir(tmp_path) == []


def test_a_hold_is_given_back_after_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(KeyError), lock.lock_folder(tmp_path, "train"):
        raise KeyError
    assert os.listdir(tmp_path) == []
    with lock.lock_folder(tmp_path, "train"):
        pass


def test_two_never_hold_one_folder_however_they_race(tmp_path: Path) -> None:
    """Releasing removes the lock file; a process that opened it just before must not hold a removed lock."""
    folder = tmp_path / "run"
    folder.mkdir()
    code = f"""
import os, pathlib, sys, time
from halation import errors
from halation.runs import lock as holds
folder, taken = pathlib.Path({str(folder)!r}), 0
while taken < 25:
    try:
        with holds.lock_folder(folder, "train"):
            descriptor = os.open(folder / "alone", os.O_CREAT | os.O_EXCL)
            time.sleep(0.001)
            os.close(descriptor)
            os.unlink(folder / "alone")
            taken += 1
    except errors.InputError:
        pass
"""
    racers = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) for _ in range(3)]
    for racer in racers:
        _, said = racer.communicate(timeout=60)
        assert racer.returncode == 0, said.decode()
    assert os.listdir(folder) == []


# -- beginning and changing


@pytest.fixture
def run(tmp_path: Path) -> runs.RunFolder:
    """A folder in which something was saved, so that its settings count."""
    (tmp_path / "checkpoints" / "step_0000001").mkdir(parents=True)
    return runs.RunFolder(tmp_path)


def begin(run: runs.RunFolder, accept_changes: bool = False, **fixed: object) -> bool:
    return runs.create_or_resume_run(run, "train", {"n_steps": 5, **fixed}, fixed, accept_changes)


def test_a_run_is_begun_once_and_goes_on_with_equal_settings(run: runs.RunFolder) -> None:
    assert begin(run, lr=1.0, data="streets")
    assert not begin(run, lr=1.0, data="streets")
    assert json.loads(run.config.read_text())["changes"] == []


def test_a_run_that_never_saved_binds_nobody(tmp_path: Path) -> None:
    run = runs.RunFolder(tmp_path)
    assert begin(run, lr=1.0)
    assert begin(run, lr=2.0)
    assert json.loads(run.config.read_text())["fixed"] == {"lr": 2.0}


def test_changed_settings_are_refused_with_a_diff_that_names_old_and_new(run: runs.RunFolder) -> None:
    begin(run, lr=1.0, data="streets", seed=0)
    before = run.config.read_bytes()
    with pytest.raises(InputError) as error:
        begin(run, lr=2.0, data="streets", extra=[1])
    assert error.value.found.splitlines()[1:] == ["  lr: 1.0 -> 2.0", "  extra: null -> [1]"]
    assert "--accept_changes" in error.value.action
    assert error.value.exit_code == 2
    assert run.config.read_bytes() == before


def test_accepted_changes_are_recorded_and_are_the_rule_from_then_on(run: runs.RunFolder) -> None:
    begin(run, lr=1.0)
    assert not begin(run, accept_changes=True, lr=2.0)
    record = json.loads(run.config.read_text())
    assert record["fixed"] == {"lr": 2.0}
    assert record["changes"][0]["changed"] == ["lr: 1.0 -> 2.0"]
    assert not begin(run, lr=2.0)
    with pytest.raises(InputError, match=r"lr: 2\.0 -> 1\.0"):
        begin(run, lr=1.0)


def test_a_folder_of_another_job_is_refused(run: runs.RunFolder) -> None:
    runs.create_or_resume_run(run, "generate", {}, {}, False)
    with pytest.raises(InputError, match="holds a `generate` run"):
        begin(run)


def test_a_folder_with_the_samples_of_another_trainer_is_refused(run: runs.RunFolder) -> None:
    runs.create_or_resume_run(run, "train", {"trainer": runs.EXTERNAL_TRAINER}, {}, False)
    before = run.config.read_bytes()
    with pytest.raises(InputError, match="holds the samples of another trainer"):
        begin(run)
    assert run.config.read_bytes() == before


@pytest.mark.parametrize("text", ["", "{", '{"job": "train"', "\udcff", "null", "[]", '"train"', '{"job": "train"}'])
def test_a_record_that_cannot_be_read_is_refused_by_name(run: runs.RunFolder, text: str) -> None:
    run.config.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=r"config\.json is not"):
        begin(run, lr=1.0)


def test_facts_are_recorded_once_and_checked_ever_after(run: runs.RunFolder) -> None:
    begin(run, lr=1.0)
    runs.record_facts(run, {"data fingerprint": {"files": 3}}, False)
    assert runs.record_facts(run, {"data fingerprint": {"files": 3}}, False)["fixed"]["data fingerprint"] == {
        "files": 3
    }
    with pytest.raises(InputError, match=r'data fingerprint: \{"files": 3\} -> \{"files": 4\}'):
        runs.record_facts(run, {"data fingerprint": {"files": 4}}, False)
    assert not begin(run, lr=1.0), "facts are no settings"
    assert runs.record_facts(run, {"data fingerprint": {"files": 4}}, True)["changes"]
    assert json.loads(run.config.read_text())["fixed"]["data fingerprint"] == {"files": 4}


def test_a_long_value_is_shortened_in_a_diff() -> None:
    [line] = runs.diff_settings({"prompts": "a" * 500}, {"prompts": "b" * 500})
    assert len(line) < 230


# -- metrics


def test_rewinding_forgets_what_lies_behind_the_step_and_half_a_line(tmp_path: Path) -> None:
    metrics = runs.MetricsFile(tmp_path / "metrics.jsonl")
    assert metrics.read_rows() == []
    for step in (1, 2, 3):
        metrics.append({"step": step, "loss": 0.5, "text": "Straße"})
    with open(metrics.path, "ab") as file:
        file.write(b'{"step": 4, "lo')
    assert [row["step"] for row in metrics.read_rows()] == [1, 2, 3]
    metrics.truncate_after(2)
    assert (
        metrics.path.read_text()
        == '{"step": 1, "loss": 0.5, "text": "Straße"}\n{"step": 2, "loss": 0.5, "text": "Straße"}\n'
    )
    metrics.append({"step": 3})
    assert [row["step"] for row in metrics.read_rows()] == [1, 2, 3]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_line_cut_anywhere_is_no_line(tmp_path: Path, cut: int) -> None:
    metrics = runs.MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append({"step": 1})
    metrics.append({"step": 20})
    metrics.path.write_bytes(metrics.path.read_bytes()[:-cut])
    metrics.truncate_after(30)
    assert [row["step"] for row in metrics.read_rows()] == ([1, 20] if cut == 1 else [1])
    assert metrics.path.read_bytes().endswith(b"}\n")


def test_a_disk_that_takes_no_more_numbers_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALATION_FAULT", "metrics.append:1:ENOSPC")
    with pytest.raises(HalationError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
        runs.MetricsFile(tmp_path / "metrics.jsonl").append({"step": 1})
    assert fired(tmp_path) == ["metrics.append:1:ENOSPC:0"]


def test_only_scratch_folders_of_killed_commands_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with runs.scratch_folder("halation_report_") as left:
        (tmp_path / "halation_report_killed").mkdir()
        for path in left.iterdir():
            (tmp_path / "halation_report_killed" / path.name).touch()
        (tmp_path / "halation_report_final").mkdir()
        (tmp_path / "halation_report_final" / "thesis.txt").write_text("precious")
        with runs.scratch_folder("halation_report_"):
            assert left.exists(), "one that is in use stays"
    assert [path.name for path in tmp_path.iterdir()] == ["halation_report_final"]


def test_a_pipe_in_the_place_of_the_numbers_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    metrics = runs.MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(InputError, match="a named pipe"):
        metrics.truncate_after(3)
    with pytest.raises(HalationError, match="cannot write"):
        metrics.append({"step": 1})


def test_a_pipe_in_the_place_of_the_record_is_refused_where_changes_are_accepted(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with (
        pytest.raises(InputError, match="a named pipe"),
        runs.restore_record_on_failure(runs.RunFolder(tmp_path), accept_changes=True),
    ):
        pass


def test_a_setting_that_an_earlier_version_did_not_have_is_no_change_at_none() -> None:
    assert runs.diff_settings({"seed": 1}, {"seed": 1, "revision": None}) == []
    assert runs.diff_settings({"seed": 1}, {"seed": 1, "revision": "v1"}) == ['  revision: "(not there)" -> "v1"']
