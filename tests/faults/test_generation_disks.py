"""Disks that refuse, fill up or corrupt bytes: retried, reported, found and repaired."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support import run_readers
from support.commands import (
    PROMPTS,
    assert_generated,
    assert_resumed,
    fired,
    generate_log,
    run_generate,
    undisturbed_generation,
)

STRERROR = {
    "ENOSPC": "No space left on device",
    "EIO": "Input/output error",
    "EROFS": "Read-only file system",
    "EMFILE": "Too many open files",
}
IMAGE_POINTS = ("open", "write", "fsync", "rename", "renamed")


def assert_refused_in_a_sentence(folder: Path, fault: str, error: str, **settings: object) -> None:
    """It ends in ten seconds with what the system said; what was good stays good, and the same command completes it."""
    before = run_readers.image_digests(folder / "out") if (folder / "out").exists() else {}
    began = time.monotonic()
    code = run_generate(folder, fault, **settings)
    assert time.monotonic() - began < 10
    assert fired(folder / "log"), "the fault fired"
    assert code == 1, generate_log(folder)
    assert STRERROR[error] in generate_log(folder)
    assert "run the same command again" in generate_log(folder)
    assert "Traceback" not in generate_log(folder)
    assert list(run_readers.damaged_images(folder / "out")) == []
    now = run_readers.image_digests(folder / "out")
    wanted = undisturbed_generation()[0]
    assert now.items() <= wanted.items()
    assert before.items() <= now.items()
    assert run_readers.temporary_files(folder / "out") == []
    (folder / "fired").unlink()
    assert_resumed(folder)


@pytest.mark.parametrize("shift", range(4))
def test_refusals_that_pass_are_asked_again_and_cost_nothing(tmp_path: Path, shift: int) -> None:
    errors = list(STRERROR)
    faults = [
        f"picture.{point}:{2 * number + 1}:{errors[(number + shift) % 4]}" for number, point in enumerate(IMAGE_POINTS)
    ]
    faults.append(f"ledger.record:2:{errors[shift]}")
    faults.append(f"ledger.record.commit:3:{errors[shift]}")
    assert run_generate(tmp_path, ";".join(faults), nproc=1) == 0, generate_log(tmp_path)
    assert sorted(line.rpartition(":")[0] for line in fired(tmp_path / "log")) == sorted(faults)
    assert_generated(tmp_path)


@pytest.mark.parametrize(("point", "error"), [("write", "ENOSPC")])
def test_a_disk_that_takes_no_more_images_ends_the_run_and_keeps_the_good_ones(
    tmp_path: Path, point: str, error: str
) -> None:
    assert_refused_in_a_sentence(tmp_path, f"picture.{point}:6+:{error}", error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "error"),
    [("open", "EMFILE"), ("write", "EIO"), ("fsync", "ENOSPC"), ("rename", "EROFS"), ("renamed", "EIO")],
)
def test_refusals_at_every_step_of_publishing_end_well(tmp_path: Path, point: str, error: str) -> None:
    assert_refused_in_a_sentence(tmp_path, f"picture.{point}:3+:{error}", error, nproc=1)


@pytest.mark.parametrize(
    ("point", "error"),
    [
        ("ledger.plan", "ENOSPC"),
        ("ledger.record.commit", "EIO"),
        ("metadata.write", "ENOSPC"),
        ("failures.fsync", "EROFS"),
        ("publish.write", "ENOSPC"),
    ],
)
def test_a_disk_that_takes_no_ledger_or_results_ends_the_run_in_a_sentence(
    tmp_path: Path, point: str, error: str
) -> None:
    number = 5 if point == "publish.write" else 1  # the fifth file of the run itself is its summary
    assert_refused_in_a_sentence(tmp_path, f"{point}:{number}+:{error}", error, nproc=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "error"),
    [
        ("ledger.plan.commit:1", "EROFS"),
        ("ledger.record:2", "EMFILE"),
        ("ledger.record.committed:1", "ENOSPC"),
        ("metadata.open:1", "EMFILE"),
        ("metadata.rename:1", "EIO"),
        ("failures.open:1", "EROFS"),
        ("failures.rename:1", "ENOSPC"),
        ("publish.open:2", "EMFILE"),
        ("publish.fsync:3", "EIO"),
        ("publish.rename:4", "EROFS"),
    ],
)
def test_refusals_around_the_images_end_well(tmp_path: Path, point: str, error: str) -> None:
    assert_refused_in_a_sentence(tmp_path, f"{point}+:{error}", error, nproc=1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of two megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def filled(place: Path, leave_bytes: int) -> Path:
    """A file that takes all space but so much."""
    stuffing = place / "stuffing"
    status = os.statvfs(place)
    with open(stuffing, "wb") as file:
        file.write(b"\0" * max(0, status.f_bavail * status.f_frsize - leave_bytes))
    return stuffing


@pytest.mark.parametrize(
    "leave_bytes", [4096, *(pytest.param(size, marks=pytest.mark.slow) for size in (0, 40_000, 150_000, 210_000))]
)
def test_a_full_file_system_gives_one_message_and_space_lets_it_go_on(
    tmp_path: Path, small_disk: Path, leave_bytes: int
) -> None:
    """A file system that is really full gives one message; with free space the run goes on."""
    (tmp_path / "out").symlink_to(small_disk / "out")
    (small_disk / "out").mkdir()
    stuffing = filled(small_disk, leave_bytes)
    began = time.monotonic()
    code = run_generate(tmp_path, nproc=1)
    assert time.monotonic() - began < 10
    assert code in (1, 2), generate_log(tmp_path)
    assert "Traceback" not in generate_log(tmp_path)
    assert "space" in generate_log(tmp_path)
    assert list(run_readers.damaged_images(tmp_path / "out")) == []
    stuffing.unlink()
    assert_resumed(tmp_path)


def test_a_file_system_without_room_for_the_plan_is_told_in_a_sentence(tmp_path: Path, small_disk: Path) -> None:
    (tmp_path / "out").symlink_to(small_disk / "out")
    (small_disk / "out").mkdir()
    many = "".join(f"prompt number {number} with a few words more {'x' * 60}\n" for number in range(20_000))
    assert run_generate(tmp_path, prompts=many, nproc=1) == 1
    assert "full" in generate_log(tmp_path)
    assert "run the same command again" in generate_log(tmp_path)
    assert "Traceback" not in generate_log(tmp_path)
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    assert_resumed(tmp_path)


def cut(number: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:-number]


def flipped(data: bytes) -> bytes:
    place = len(data) * 2 // 3
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


DAMAGES: dict[int, Callable[[bytes], bytes]] = {
    0: cut(1),
    3: cut(12),
    6: cut(20),
    9: lambda data: data[: len(data) // 2],
    12: flipped,
    15: lambda data: b"",
    18: lambda data: data + b"\0",
    23: lambda data: b"\0" * len(data),
}


def test_damaged_files_are_found_by_verify_reported_and_drawn_again(tmp_path: Path) -> None:
    assert run_generate(tmp_path) == 0
    names = list(undisturbed_generation()[0])
    for index, damage in DAMAGES.items():
        path = tmp_path / "out" / names[index]
        path.write_bytes(damage(path.read_bytes()))
    (tmp_path / "out" / names[20]).write_bytes((tmp_path / "out" / names[21]).read_bytes())  # another image's bytes
    assert run_generate(tmp_path) == 0
    assert "is damaged" not in generate_log(tmp_path), "without --verify nobody looks into files"
    assert run_generate(tmp_path, verify=True) == 0, generate_log(tmp_path)
    assert set(re.findall(r"(\S+) is damaged", generate_log(tmp_path))) == {names[index] for index in (*DAMAGES, 20)}
    assert "9 generated now" in generate_log(tmp_path)
    assert_generated(tmp_path)
    assert run_generate(tmp_path, verify=True) == 0
    assert "is damaged" not in generate_log(tmp_path)


def test_deleted_files_are_drawn_again_without_being_asked_for(tmp_path: Path) -> None:
    assert run_generate(tmp_path) == 0
    for name in list(undisturbed_generation()[0])[3:20:4]:
        (tmp_path / "out" / name).unlink()
    assert run_generate(tmp_path) == 0
    assert "5 images done, but without a file: generating again" in generate_log(tmp_path)
    assert "5 generated now" in generate_log(tmp_path)
    assert_generated(tmp_path)


def test_a_deleted_file_is_noticed_though_a_foreign_image_makes_up_the_number(tmp_path: Path) -> None:
    assert run_generate(tmp_path) == 0
    name = next(iter(undisturbed_generation()[0]))
    os.rename(tmp_path / "out" / name, tmp_path / "out" / "holiday.png")
    assert run_generate(tmp_path) == 0
    (tmp_path / "out" / "holiday.png").unlink()
    assert_generated(tmp_path)


def test_a_folder_instead_of_a_image_is_told_and_nothing_is_lost(tmp_path: Path) -> None:
    """Nobody asked us to delete it."""
    assert run_generate(tmp_path, num_samples=4) == 0
    folder = tmp_path / "out" / "000006_seed47.png"
    folder.mkdir()
    assert run_generate(tmp_path) == 1
    assert [row["picture"] for row in run_readers.ledger_rows(tmp_path / "out") if row["state"] == "failed"] == [5]
    assert len(run_readers.metadata_rows(tmp_path / "out")) == PROMPTS.count("\n") - 1
    folder.rmdir()
    assert_resumed(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "noise", "empty"])
def test_a_damaged_ledger_is_refused_by_name_and_no_image_is_touched(tmp_path: Path, damage: str) -> None:
    assert run_generate(tmp_path) == 0
    path = tmp_path / "out" / "ledger.sqlite"
    data = path.read_bytes()
    path.write_bytes({"cut": data[:5000], "noise": b"noise" * 1000, "empty": data[:100] + b"\xff" * 4000}[damage])
    code = run_generate(tmp_path)
    assert code == 2, generate_log(tmp_path)
    assert "ledger.sqlite is damaged" in generate_log(tmp_path)
    assert "Traceback" not in generate_log(tmp_path)
    assert run_readers.image_digests(tmp_path / "out") == undisturbed_generation()[0]
    path.write_bytes(data)
    assert_resumed(tmp_path)
