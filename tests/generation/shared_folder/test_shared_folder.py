"""Laws of `--cluster files`: any number of processes leave what one command leaves."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from halation.errors import InputError
from halation.generation.command import run
from halation.generation.config import GenerateConfig
from halation.generation.image_requests import ImageRequest
from halation.generation.ledger import ImageOutcome
from halation.generation.shared_folder.leases import BatchRanges, Leases
from halation.generation.shared_folder.shared_ledger import ProcessIdentity, SharedLedger
from halation.generation.shared_folder.shared_session import num_local_slurm_tasks, select_slurm_gpus
from halation.generation.workers.image_runner import EncodedImage, ImageStore
from halation.runs import run_folder as runs
from halation.sample_specs import SampleSpec
from halation.work_division import plan_batches
from support.commands import Started, finish, fired, halation, started, until

pytestmark = pytest.mark.ranks

NUM_ROWS = 30


def prompts(folder: Path) -> Path:
    path = folder.parent / "prompts.csv"
    if not path.exists():
        rows = [f'{number:06d},"a cat, number {number}",{48 if number % 5 == 3 else 32}' for number in range(NUM_ROWS)]
        path.write_text("image_id,prompt,width\n" + "\n".join(rows) + "\n")
    return path


def words(
    folder: Path, seconds: float = 0.0, lease_s: float = 1.0, cluster: str = "files", **flags: object
) -> list[str]:
    """A command for thirty small images of two shapes on eleven batches; `seconds` is what a batch takes."""
    settings: dict[str, object] = {
        "prompts": prompts(folder), "model_path": f"testcard:{seconds}", "output_dir": folder, "height": 32,
        "batch_size": 3,
        "num_inference_steps": 2, "nproc": 1, "cluster": cluster, "lease_s": lease_s, "progress": "none",
    }  # fmt: skip
    settings |= flags
    return halation(["generate", *(word for name, value in settings.items() for word in (f"--{name}", str(value)))])


def call(folder: Path, **flags: Any) -> int:
    """The same within this process."""
    settings: dict[str, Any] = {
        "prompts_csv": str(prompts(folder)), "model_path": "testcard", "output_dir": folder, "height": 32,
        "batch_size": 3,
        "num_inference_steps": 2, "nproc": 1, "cluster": "files", "lease_s": 1.0, "progress": "none",
    }  # fmt: skip
    return run(GenerateConfig(**(settings | flags)))


def left(folder: Path) -> dict[str, bytes]:
    """The bytes of every image and of the metadata."""
    return {path.name: path.read_bytes() for path in [*folder.glob("*.png"), folder / "metadata.jsonl"]}


def outcomes(folder: Path) -> list[dict[str, object]]:
    """Every whole line of every process."""
    lines = [
        line for path in (folder / "ledger").glob("*.jsonl") for line in path.read_bytes().splitlines(keepends=True)
    ]
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def leases(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "ledger" / "leases").glob("*.json"))


def logged(folder: Path) -> str:
    return "".join(path.read_text() for path in (folder / "logs").glob("*/generate.log"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one command without others leaves."""
    folder = tmp_path_factory.mktemp("alone") / "out"
    assert finish(words(folder, cluster="local"), folder.parent / "log") == 0
    files = left(folder)
    assert len(files) == NUM_ROWS + 1
    return files


@contextlib.contextmanager
def together(commands: Sequence[Sequence[str]], folder: Path, fault: str = "") -> Iterator[list[Started]]:
    """Several commands at one instant."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(started(command, folder.parent / f"log{number}", fault))
            for number, command in enumerate(commands)
        ]


def codes(running: Sequence[Started]) -> list[int]:
    return [one.process.wait(60) for one in running]


# -- whoever is there


@pytest.mark.parametrize("num_processes", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3])
def test_any_number_of_processes_leaves_the_same_bytes_and_draws_every_image_once(
    tmp_path: Path, alone: dict[str, bytes], num_processes: int
) -> None:
    folder = tmp_path / "out"
    with together([words(folder, 0.05, lease_s=20)] * num_processes, folder) as running:
        assert codes(running) == [0] * num_processes, [one.said() for one in running]
    assert left(folder) == alone
    assert sorted(row["index"] for row in outcomes(folder)) == list(range(NUM_ROWS))  # type: ignore[type-var]
    assert leases(folder) == []
    assert not [*folder.glob(".*"), *(folder / "ledger").rglob(".*")]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["done"], summary["open"]) == (NUM_ROWS, 0)


@pytest.mark.slow
def test_two_processes_share_the_work_and_both_count_the_whole(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with together([words(folder, 0.2, lease_s=20, progress="json")] * 2, folder) as running:
        assert codes(running) == [0, 0]
        ends = [json.loads(one.said().splitlines()[-1]) for one in running]
    assert [end["event"] for end in ends] == ["end", "end"], [one.said() for one in running]
    assert [end["done"] for end in ends] == [NUM_ROWS, NUM_ROWS]
    drawn = [worker["success"] for end in ends for worker in end["workers"].values()]
    assert sum(drawn) == NUM_ROWS
    assert min(drawn) > 0
    assert json.loads((folder / "summary.json").read_text())["drawn_now"] == NUM_ROWS


def test_a_longer_plan_draws_what_is_new_and_the_same_one_nothing(tmp_path: Path, alone: dict[str, bytes]) -> None:
    folder = tmp_path / "out"
    assert call(folder, num_samples=7) == 0
    assert len(outcomes(folder)) == 7
    assert call(folder) == 0
    assert len(outcomes(folder)) == NUM_ROWS
    assert left(folder) == alone
    assert call(folder) == 0
    assert len(outcomes(folder)) == NUM_ROWS
    assert left(folder) == alone
    with pytest.raises(InputError, match="fewer prompts than before: the folder holds a plan of 30"):
        call(folder, num_samples=7)


# -- whatever becomes of them


@pytest.mark.faults
def test_what_a_killed_process_held_is_drawn_by_the_others_after_its_lease(
    tmp_path: Path, alone: dict[str, bytes]
) -> None:
    folder = tmp_path / "out"
    with together([words(folder, 0.3)] * 2, folder) as (first, second):
        until(lambda: len(outcomes(folder)) >= 6 and len(leases(folder)) >= 4, command=first)
        first.process.kill()
        first.until_gone(5)
        assert second.process.wait(60) == 0, second.said()
    assert left(folder) == alone
    assert leases(folder) == []
    assert "no heartbeat of their owner for" in logged(folder)


@pytest.mark.faults
def test_leases_of_a_stopped_process_are_taken_over_and_late_results_ignored(
    tmp_path: Path, alone: dict[str, bytes]
) -> None:
    """Leases of a stopped process are taken over, and its late results change nothing."""
    folder = tmp_path / "out"
    with together([words(folder, 0.3, progress="json")], folder) as (sleeper,):
        until(lambda: outcomes(folder) and leases(folder), command=sleeper)
        os.kill(sleeper.process.pid, signal.SIGSTOP)
        assert finish(words(folder, 0.05), tmp_path / "log") == 0
        assert left(folder) == alone
        before = outcomes(folder)
        os.kill(sleeper.process.pid, signal.SIGCONT)
        assert sleeper.process.wait(60) == 0, sleeper.said()
    reports = [json.loads(line) for line in sleeper.said().splitlines() if line.startswith("{")]
    assert max(report.get("done", 0) for report in reports) == NUM_ROWS, "an image that two drew counts once"
    assert len(outcomes(folder)) > len(before)
    assert left(folder) == alone
    assert leases(folder) == []


@pytest.mark.faults
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_one_that_is_asked_to_stop_lets_go_of_its_leases_so_that_nobody_waits(
    tmp_path: Path, alone: dict[str, bytes], number: signal.Signals, code: int
) -> None:
    folder = tmp_path / "out"
    with together([words(folder, 0.3, lease_s=600)], folder) as (stopped,):
        until(lambda: outcomes(folder), command=stopped)
        os.kill(stopped.process.pid, number)
        assert stopped.process.wait(30) == code
    assert 0 < len(outcomes(folder)) < NUM_ROWS
    assert leases(folder) == []
    assert finish(words(folder, lease_s=600), tmp_path / "log", timeout_s=60) == 0
    assert left(folder) == alone


@pytest.mark.faults
@pytest.mark.parametrize(
    "point",
    [
        pytest.param("lease.link", marks=pytest.mark.slow),
        pytest.param("lease.linked", marks=pytest.mark.slow),
        "lease.unlink",
        pytest.param("shared.append", marks=pytest.mark.slow),
        "shared.fsync",
        pytest.param("shared.appended", marks=pytest.mark.slow),
        "metadata.rename",
    ],
)
def test_a_kill_at_any_step_costs_the_others_a_lease_and_nothing_more(
    tmp_path: Path, alone: dict[str, bytes], point: str
) -> None:
    folder = tmp_path / "out"
    fault = f"{point}:{1 if 'metadata' in point else 2}:kill:once"
    with together([words(folder, lease_s=0.5)] * 2, folder, fault) as running:
        ended = sorted(codes(running))
    assert ended == [-signal.SIGKILL, 0], ended
    assert len(fired(tmp_path / "log")) == 1
    assert left(folder) == alone
    assert leases(folder) == []


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("point", ["lease.rename", "lease.renamed"])
def test_a_kill_in_the_middle_of_taking_over_is_taken_over_too(
    tmp_path: Path, alone: dict[str, bytes], point: str
) -> None:
    folder = tmp_path / "out"
    assert finish(words(folder, lease_s=0.5), tmp_path / "log", "lease.linked:3:kill:once") == -signal.SIGKILL
    assert leases(folder)
    assert finish(words(folder, lease_s=0.5), tmp_path / "log", f"{point}:1:kill:once") == -signal.SIGKILL
    assert finish(words(folder, lease_s=0.5), tmp_path / "log") == 0
    assert len(fired(tmp_path / "log")) == 2
    assert left(folder) == alone
    time.sleep(0.6)
    assert finish(words(folder, lease_s=0.5), tmp_path / "log") == 0
    assert not [*folder.glob(".*"), *(folder / "ledger").rglob(".*")]


@pytest.mark.slow
@pytest.mark.faults
def test_a_process_that_slept_during_a_takeover_returns_a_lease_taken_since(
    tmp_path: Path, alone: dict[str, bytes]
) -> None:
    """A process that slept during a takeover gives back what another process took over since."""
    folder = tmp_path / "out"
    assert finish(words(folder, lease_s=0.5), tmp_path / "log", "lease.linked:1:kill") == -signal.SIGKILL
    (lease,) = (folder / "ledger" / "leases").glob("*.json")
    dead = lease.read_bytes()
    with contextlib.ExitStack() as stack:
        # Leases that outlive any pause of a busy machine: only the sleep may make work be done twice here.
        patient = words(folder, 0.3, lease_s=60.0)
        sleeper = stack.enter_context(started(patient, tmp_path / "log", "lease.rename:1:stop"))
        until(lambda: len(fired(tmp_path / "log")) == 2, command=sleeper)
        other = stack.enter_context(started(patient, tmp_path / "log2"))
        until(lambda: lease.exists() and lease.read_bytes() != dead, command=other)
        os.kill(sleeper.process.pid, signal.SIGCONT)
        assert codes([sleeper, other]) == [0, 0]
    assert left(folder) == alone
    assert sorted(row["index"] for row in outcomes(folder)) == list(range(NUM_ROWS))  # type: ignore[type-var]


@pytest.mark.faults
def test_a_disk_that_refuses_an_outcome_once_is_asked_again(tmp_path: Path, alone: dict[str, bytes]) -> None:
    folder = tmp_path / "out"
    assert finish(words(folder, lease_s=60), tmp_path / "log", "shared.fsync:2:ENOSPC") == 0
    assert fired(tmp_path / "log") == ["shared.fsync:2:ENOSPC:0"]
    assert sorted(row["index"] for row in outcomes(folder)) == list(range(NUM_ROWS))  # type: ignore[type-var]
    assert left(folder) == alone


@pytest.mark.slow
@pytest.mark.faults
def test_a_image_that_fails_is_set_aside_by_all_and_tried_again_by_a_later_command(
    tmp_path: Path, alone: dict[str, bytes]
) -> None:
    folder = tmp_path / "out"
    # A lease that no pause outlives: else both try the image, and both list it.
    with together([words(folder, 0.05, lease_s=60)] * 2, folder, "paint.000013:1+:raise") as running:
        assert codes(running) == [1, 1], [one.said() for one in running]
    failed = [row for row in outcomes(folder) if row["state"] == "failed"]
    assert {row["index"] for row in failed} == {13}
    (listed,) = folder.glob("failed_prompts_gpu*.txt")
    assert "000013" in listed.read_text()
    assert len(left(folder)) == NUM_ROWS
    assert finish(words(folder), tmp_path / "log") == 0
    assert left(folder) == alone
    (listed,) = folder.glob("failed_prompts_gpu*.txt")
    assert "000013" not in listed.read_text()


@pytest.mark.slow
def test_files_that_are_gone_or_damaged_are_drawn_again(tmp_path: Path, alone: dict[str, bytes]) -> None:
    folder = tmp_path / "out"
    assert call(folder) == 0
    (folder / "000004_seed46.png").unlink()
    with together([words(folder)] * 2, folder) as running:
        assert codes(running) == [0, 0]
    assert left(folder) == alone
    (folder / "000005_seed47.png").write_bytes(b"no image")
    assert call(folder) == 0
    assert (folder / "000005_seed47.png").read_bytes() == b"no image", "only --verify reads the images"
    assert call(folder, verify=True) == 0
    assert left(folder) == alone


@pytest.mark.slow
@pytest.mark.faults
def test_ten_kills_at_random_instants_with_restarts_end_in_the_fault_free_folder(
    tmp_path: Path, alone: dict[str, bytes]
) -> None:
    folder = tmp_path / "out"
    chance = random.Random(7)
    with contextlib.ExitStack() as stack:

        def start(number: int) -> Started:
            return stack.enter_context(started(words(folder, 0.5), tmp_path / f"log{number}"))

        running = [start(0), start(1)]
        for number in range(10):
            time.sleep(chance.uniform(0.1, 1.5))
            victim = running.pop(chance.randrange(len(running)))
            victim.process.kill()
            running.append(start(number + 2))
        assert codes(running) == [0, 0], [one.said() for one in running]
    assert left(folder) == alone
    assert leases(folder) == []


# -- what is refused


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun") / "out"
    assert call(folder, png="isal") == 0
    return folder


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"num_inference_steps": 3}, "num_inference_steps: 2 -> 3"),
        ({"png": "zlib"}, 'png coder: "isal" -> "zlib"'),
        ({"seed_start": 7}, "seed_start: 42 -> 7"),
        ({"accept_changes": True}, "--accept_changes with --cluster files"),
        ({"cluster": "local"}, "was started with --cluster files"),
    ],
)
def test_other_settings_are_refused_with_a_diff(begun: Path, flags: dict[str, object], said: str) -> None:
    before = left(begun)
    with pytest.raises(InputError, match=said):
        call(begun, **flags)
    assert left(begun) == before


def test_other_prompts_are_refused_by_their_rows(begun: Path, tmp_path: Path) -> None:
    changed = tmp_path / "prompts.csv"
    changed.write_text(prompts(begun).read_text().replace("number 17", "without number"))
    with pytest.raises(InputError, match="1 prompt changed since this folder was started") as refusal:
        call(begun, prompts_csv=str(changed))
    assert "row 18: now 'a cat, without number' with seed 59" in str(refusal.value)


def test_folders_of_other_commands_are_refused_and_left_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert call(folder, cluster="local", num_samples=3) == 0
    with pytest.raises(InputError, match="omit --cluster files to continue there"):
        call(folder)
    assert not (folder / "ledger").exists()
    training = tmp_path / "training"
    runs.make_folder(training)
    runs.create_or_resume_run(runs.RunFolder(training), "train", {}, {}, accept_changes=False)
    with pytest.raises(InputError, match="holds a `train` run"):
        call(training)
    assert not (training / "ledger").exists()


def test_two_that_begin_at_once_with_other_settings_do_not_mix(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with together([words(folder), words(folder, num_inference_steps=3)], folder) as running:
        assert sorted(codes(running)) == [0, 2]
    steps = {json.loads(line)["steps"] for line in (folder / "metadata.jsonl").read_text().splitlines()}
    assert len(steps) == 1


def test_a_file_system_without_hard_links_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no hard links"):
        runs.link_once(tmp_path, tmp_path / "name")  # a folder cannot be linked on any


# -- leases by themselves


def ledger(folder: Path, num_rows: int = 12) -> SharedLedger:
    folder.mkdir(exist_ok=True)
    shared = SharedLedger(folder, ProcessIdentity())
    specs = [
        SampleSpec(
            index=index, id=str(index), prompt="a cat", seed=index, height=8, width=8, steps=1, guidance_scale=1.0
        )
        for index in range(num_rows)
    ]
    shared.add_plan([ImageRequest(spec=spec, name=spec.id) for spec in specs], {})
    shared.agree_on_plan()
    shared.refresh()
    return shared


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Leases, Leases]]:
    """Two processes' leases on six batches of two rows."""
    with contextlib.ExitStack() as stack:
        ledgers = [stack.enter_context(contextlib.closing(ledger(tmp_path / "ledger"))) for _ in range(2)]
        one, two = (
            Leases(each, BatchRanges(plan_batches(each.groups(), 2)), lease_s=30, num_batches_wanted=2)
            for each in ledgers
        )
        yield one, two


def expire(claims: Leases) -> None:
    """As if its process had been silent for a minute."""
    past = time.time() - 60
    os.utime(claims.folder / f".{claims.process.name}.card", (past, past))


def draw(claims: Leases, batches: Sequence[int], state: str = "done") -> None:
    rows = [row for batch in batches for row in (2 * batch, 2 * batch + 1)]
    claims.ledger.record([ImageOutcome(index=row, state=state) for row in rows])  # type: ignore[arg-type]


def claim(claims: Leases) -> list[int]:
    claims._next_poll_at = 0.0  # tests need not wait for the next look
    return list(claims.next_batches() or ())


def test_no_batch_is_claimed_by_two_and_none_is_left_out(pair: tuple[Leases, Leases]) -> None:
    one, two = pair
    claimed = [claim(one), claim(two), claim(one)]
    assert [len(batches) for batches in claimed] == [2, 2, 2]
    assert sorted(batch for batches in claimed for batch in batches) == [0, 1, 2, 3, 4, 5]
    assert (claim(one), claim(two)) == ([], [])


def test_a_finished_range_is_free_and_nobody_draws_it_again(pair: tuple[Leases, Leases]) -> None:
    one, two = pair
    mine, others = claim(one) + claim(one), claim(two)
    draw(one, mine)
    assert claim(two) == []
    assert two.next_batches() == ()
    draw(two, others)
    two._next_poll_at = 0.0
    assert (one.next_batches(), two.next_batches()) == (None, None)
    assert not list(one.folder.glob("*.json"))


def test_a_failure_of_another_process_is_final_in_this_call_only(
    pair: tuple[Leases, Leases],
) -> None:
    """A failure of another process is final in this call; one of an earlier call is retried."""
    one, two = pair
    draw(one, [0, 1, 2, 3, 4])
    draw(one, [5], state="failed")
    assert two.next_batches() is None
    with contextlib.closing(ledger(two.ledger.folder)) as later:
        assert later.unfinished_indices().tolist() == [10, 11]


def test_an_expired_lease_is_taken_over_by_one_and_its_owner_learns_of_it(pair: tuple[Leases, Leases]) -> None:
    one, two = pair
    lost = claim(one)
    expire(one)
    two.num_batches_wanted = 6
    assert sorted(claim(two)) == [0, 1, 2, 3, 4, 5]
    assert two.num_taken_over == 2
    one._touched_at = -1e9
    one.heartbeat()
    assert one.held_ranges == set()
    one.release()
    assert len(list(two.folder.glob("*.json"))) == 6, f"{lost} are the other's"


def test_a_lease_lasts_as_long_as_its_owner_said_it_would(pair: tuple[Leases, Leases]) -> None:
    one, two = pair
    one.lease_s = 600.0
    one._write_owner_file()
    claim(one)
    expire(one)
    two.num_batches_wanted = 6
    assert len(claim(two)) == 4
    assert two.num_taken_over == 0


def test_one_whose_card_was_swept_goes_on_with_a_new_one(pair: tuple[Leases, Leases]) -> None:
    one, two = pair
    claim(one)
    (one.folder / f".{one.process.name}.card").unlink()
    one._touched_at = -1e9
    one.heartbeat()
    assert one.held_ranges == set()
    assert claim(one)
    assert sorted({*claim(one), *claim(one)} & set(claim(two))) == []


def test_leases_whose_folder_was_removed_are_made_again_for_the_same_batches(pair: tuple[Leases, Leases]) -> None:
    one, two = pair
    held = {*claim(one), *claim(one)}
    before = set(one.held_ranges)
    shutil.rmtree(one.folder)
    one._touched_at = -1e9
    one.heartbeat()
    assert one.held_ranges == before
    shutil.rmtree(one.folder)
    more = claim(one)
    assert one.held_ranges > before
    assert not {*held, *more} & set(claim(two))


def test_leases_are_not_made_again_in_a_ledger_that_is_gone(pair: tuple[Leases, Leases]) -> None:
    one, _ = pair
    os.rename(one.ledger.folder, one.ledger.folder.with_name("moved"))
    one._touched_at = -1e9
    with pytest.raises(FileNotFoundError):
        one.heartbeat()
    assert not one.ledger.folder.exists()


def test_the_card_of_a_process_killed_without_leases_is_removed_at_the_end(
    pair: tuple[Leases, Leases],
) -> None:
    """The card of a process that was killed while it held no lease is removed at the end."""
    one, two = pair
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    dead = one.folder / f".{one.process.host}-{int(ended.stdout)}-00000000.card"
    dead.write_text(
        json.dumps({"host": one.process.host, "pid": int(ended.stdout), "token": "00000000", "lease_s": 30})
    )
    while batches := claim(one):
        draw(one, batches)
    assert one.next_batches() is None
    assert not dead.exists()
    assert (two.folder / f".{two.process.name}.card").exists(), "this one lives"


def test_a_torn_last_line_is_no_line_until_it_is_whole(tmp_path: Path) -> None:
    with contextlib.closing(ledger(tmp_path / "ledger")) as shared:
        other = shared.folder / "other-1-abc.jsonl"
        line = json.dumps({"index": 3, "state": "done", "sha256": "ab"}).encode() + b"\n"
        other.write_bytes(line + line.replace(b"3", b"4")[:9])
        assert shared.refresh()
        assert shared.counts()["done"] == 1
        assert not shared.refresh()
        other.write_bytes(line + line.replace(b"3", b"4") + b"\0\0\n" + line.replace(b"3", b"99"))
        assert shared.refresh()
        assert shared.counts()["done"] == 2
        assert sorted(set(range(12)) - set(shared.unfinished_indices().tolist())) == [3, 4]


def test_done_wins_over_failed_whoever_says_it_last(tmp_path: Path) -> None:
    with contextlib.closing(ledger(tmp_path / "ledger")) as shared:
        for number, state in enumerate(["failed", "done", "failed"]):
            (shared.folder / f"other-{number}.jsonl").write_text(
                json.dumps({"index": 5, "state": state, "reason": state}) + "\n"
            )
            shared.refresh()
        assert shared.counts() == {"planned": 12, "open": 11, "done": 1, "failed": 0}


def test_of_many_that_create_a_file_at_once_the_first_wins(tmp_path: Path) -> None:
    told = {runs.create_once(tmp_path / "fact.json", str(number).encode()) for number in range(5)}
    assert told == {b"0"}
    assert [path.name for path in tmp_path.iterdir()] == ["fact.json"]


def test_a_video_that_is_there_is_not_removed_to_be_written_again(tmp_path: Path) -> None:
    files = (("clip/frame_0000.png", b"one"), ("clip/frame_0001.png", b"two"), ("clip.mp4", b"video"))
    ImageStore(tmp_path)(EncodedImage(files=files, sha256=""))
    before = (tmp_path / "clip").stat().st_ino
    ImageStore(tmp_path)(EncodedImage(files=files, sha256=""))
    assert (tmp_path / "clip").stat().st_ino == before
    (tmp_path / "clip" / "frame_0001.png").write_bytes(b"damaged")
    ImageStore(tmp_path)(EncodedImage(files=files, sha256=""))
    assert (tmp_path / "clip" / "frame_0001.png").read_bytes() == b"two"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clip", "clip.mp4"]


# -- under SLURM


def test_tasks_of_one_machine_that_see_all_its_gpus_take_their_share() -> None:
    def share(num_gpus: int = 8, **environment: str) -> tuple[int, ...]:
        return select_slurm_gpus(num_gpus, environment)

    assert share() == ()
    assert share(SLURM_LOCALID="0", SLURM_STEP_TASKS_PER_NODE="1(x4)", SLURM_NODEID="2") == ()
    assert share(SLURM_LOCALID="3", SLURM_STEP_TASKS_PER_NODE="8(x2)", SLURM_NODEID="1") == (3,)
    assert share(SLURM_LOCALID="1", SLURM_STEP_TASKS_PER_NODE="2") == (1, 3, 5, 7)
    assert share(SLURM_LOCALID="1", SLURM_STEP_TASKS_PER_NODE="2", SLURM_GPU_BIND="none") == (1, 3, 5, 7)
    assert share(SLURM_LOCALID="1", SLURM_STEP_TASKS_PER_NODE="2", SLURM_GPUS_PER_TASK="4") == ()
    assert share(1, SLURM_LOCALID="1", SLURM_STEP_TASKS_PER_NODE="2") == ()
    with pytest.raises(InputError, match="task 8 of 9 on a machine with 8 GPUs"):
        share(SLURM_LOCALID="8", SLURM_STEP_TASKS_PER_NODE="9")


def test_lists_of_tasks_are_read_as_slurm_writes_them() -> None:
    nodes = [
        num_local_slurm_tasks({"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": str(node)})
        for node in range(4)
    ]
    assert nodes == [4, 4, 3, 1]


# -- images of others, and damage


def images(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.png")}


def test_images_it_does_not_know_are_not_written_over(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "000001_seed43.png").write_text("precious")
    with pytest.raises(InputError, match=r"holds 000001_seed43\.png but no ledger"):
        call(folder)
    assert (folder / "000001_seed43.png").read_text() == "precious"


def test_images_of_a_run_whose_ledger_is_lost_are_not_written_over(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert call(folder) == 0
    drawn = images(folder)
    shutil.rmtree(folder / "ledger")
    for height in (32, 48):
        with pytest.raises(InputError, match="but no ledger of"):
            call(folder, height=height)
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match="but no ledger of"):
        call(folder, height=48)
    (folder / "ledger" / "leases").mkdir(parents=True)  # as after a backup that kept folders and lost files
    with pytest.raises(InputError, match="emptied or replaced"):
        call(folder, height=48)
    assert images(folder) == drawn


NUM_FLIPS = 20


def flip_bit(path: Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes())
    place, bit = rng.randrange(len(data)), rng.randrange(8)
    data[place] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {place} of {path.name}"


def refusal(folder: Path, **flags: Any) -> str:
    """What a command is refused with; empty where it draws all that is missing."""
    try:
        assert call(folder, model_path="testcard:0.1", **flags) == 0
    except InputError as error:
        return str(error)
    return ""


def assert_flips_are_harmless(
    intact: Path, scratch: Path, pattern: str, num_flips: int, expected: dict[str, bytes]
) -> None:
    """After a flipped bit the command names the file or ends with the files of an undamaged run."""
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    for number in range(num_flips):
        folder = scratch / f"{number}" / "out"
        shutil.copytree(intact, folder)
        path = rng.choice(sorted(path for path in folder.glob(pattern) if path.stat().st_size))
        flip = f"seed {seed}: {flip_bit(path, rng)}"
        words = refusal(folder, prompts_csv=str(prompts(intact)))
        if words:  # a changed setting is shown as a difference
            assert path.name in words or path.name == "config.json", f"{flip}: {words}"
            assert images(folder) == images(intact), flip
        else:
            assert left(folder) == expected, flip
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "out"
    assert call(folder, model_path="testcard:0.1") == 0
    return folder


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a killed process leaves, with its leases."""
    folder = tmp_path_factory.mktemp("interrupted") / "out"
    with started(words(folder, 0.1), folder.parent / "log") as command:
        until(lambda: folder.exists() and len(outcomes(folder)) >= 9, command=command)
        command.kill_all()
    assert len(outcomes(folder)) < NUM_ROWS
    return folder


def test_a_flipped_bit_in_an_outcome_is_found(finished: Path, alone: dict[str, bytes], tmp_path: Path) -> None:
    assert_flips_are_harmless(finished, tmp_path, "ledger/*.jsonl", 2, alone)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["ledger/*.jsonl", "ledger/*.digests", "ledger/*.json", "config.json"])
@pytest.mark.parametrize("state", ["finished", "interrupted"])
def test_no_flipped_bit_in_a_shared_ledger_changes_the_metadata(
    state: str, pattern: str, request: pytest.FixtureRequest, alone: dict[str, bytes], tmp_path: Path
) -> None:
    intact: Path = request.getfixturevalue(state)
    assert_flips_are_harmless(intact, tmp_path, pattern, NUM_FLIPS, alone)


def test_a_damaged_plan_or_fact_is_refused_by_name(finished: Path, tmp_path: Path) -> None:
    for number, name in enumerate((f"plan-{NUM_ROWS:09d}.digests", "micro_batch.json", "painter.json")):
        folder = tmp_path / f"{number}" / "out"
        shutil.copytree(finished, folder)
        path = folder / "ledger" / name
        data = bytearray(path.read_bytes())
        data[0] ^= 1
        path.write_bytes(data)
        with pytest.raises(InputError, match=f"{name} is damaged"):
            call(folder, model_path="testcard:0.1", prompts_csv=str(prompts(finished)))


def test_plans_and_facts_of_earlier_versions_are_read(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(finished, folder)
    for path in [*(folder / "ledger").glob("plan-*"), *(folder / "ledger").glob("*[a-z].json")]:
        data = path.read_bytes()
        if path.suffix == ".digests":
            path.write_bytes(data[:-4])
        elif b"\ncrc32" in data:
            path.write_bytes(data.partition(b"\ncrc32")[0] + b"\n")
    assert call(folder, model_path="testcard:0.1", prompts_csv=str(prompts(finished))) == 0
    assert left(folder) == left(finished)
