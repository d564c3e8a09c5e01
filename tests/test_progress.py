"""Progress displays show the right numbers in the room there is, and never stop the work."""

from __future__ import annotations

import errno
import fcntl
import io
import itertools
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from typing import Any

import pytest
from rich.console import Console

from halation.distributed.stop_signals import StopSignals
from halation.progress import (
    GenerationProgress,
    StepProgress,
    WatchProgress,
    delayed_progress,
    escape_control_characters,
    format_clock,
    format_duration,
    format_speed,
)
from support.commands import Terminal

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def on_a_terminal(
    width: int, height: int, num_workers: int, seconds: float, job: str = "", **environment: str
) -> tuple[str, int]:
    """The output of this file, run as a script, on a pseudo terminal of this size, and its exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    plain = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    }
    process = subprocess.Popen(
        [sys.executable, __file__, "auto", str(num_workers), str(seconds), *job.split()],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**plain, "TERM": "xterm-256color", **environment},
    )
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError as error:
            if error.errno != errno.EIO:  # which is how Linux says that the other side has hung up
                raise
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    return b"".join(parts).decode(), process.wait(20)


def lines_of(written: str) -> list[str]:
    return [ESCAPE.sub("", line).rstrip("\r") for line in re.split(r"[\r\n]+", written)]


# -- numbers


def test_the_whole_counts_what_was_there_before_but_its_rate_is_this_calls() -> None:
    clock = Clock()
    progress = GenerationProgress("none", ["GPU 0", "GPU 1"], num_planned=100, num_done=40, num_failed=2, clock=clock)
    clock.now += 60  # loading says nothing of the rate
    assert progress.overall().per_s(clock()) is None
    assert progress.overall().remaining_s(clock()) is None
    progress.set_step("GPU 0", 1, 20)
    clock.now += 10
    progress.add_images("GPU 0", 12, 1)
    progress.add_images("GPU 1", 6, 1)
    whole = progress.overall()
    assert (whole.num_succeeded, whole.num_failed, whole.num_finished - whole.num_before) == (58, 4, 20)
    assert progress.overall().per_s(clock()) == pytest.approx(2.0)
    assert progress.overall().remaining_s(clock()) == pytest.approx((100 - 62) / 2.0)


def test_a_takeover_lengthens_the_bar_and_a_finished_worker_stops_its_clock() -> None:
    """A worker that takes over gets a longer bar; the clock of a finished worker stops."""
    clock = Clock()
    progress = GenerationProgress("none", ["GPU 0"], num_planned=100, num_done=0, clock=clock)
    progress.set_assigned("GPU 0", 50)
    progress.set_step("GPU 0", 1, 20)
    clock.now += 10
    progress.add_images("GPU 0", 50, 0)
    lane = progress.workers["GPU 0"]
    assert lane.remaining_s(clock()) == 0.0
    progress.set_assigned("GPU 0", 75)
    assert lane.remaining_s(clock()) == pytest.approx(5.0)
    progress.set_state("GPU 0", "finished")
    clock.now += 1000
    assert lane.per_s(clock()) == pytest.approx(5.0)
    assert lane.remaining_s(clock()) == 0.0


def test_a_worker_that_still_loads_does_not_claim_to_be_done_soon() -> None:
    progress = GenerationProgress("none", ["GPU 0"], num_planned=8, num_done=0, clock=Clock())
    progress.set_state("GPU 0", "loading")
    assert progress.workers["GPU 0"].remaining_s(1000.0) is None
    progress.set_assigned("GPU 0", 8)
    progress.set_state("GPU 0", "finished")
    assert progress.workers["GPU 0"].remaining_s(1000.0) == 0.0


def test_at_the_end_nobody_draws_any_more() -> None:
    progress = GenerationProgress("none", ["GPU 0", "GPU 1", "GPU 2"], num_planned=4, num_done=0)
    for worker in ("GPU 0", "GPU 1"):
        progress.set_assigned(worker, 2)
        progress.add_images(worker, 1, 0)
        progress.set_step(worker, 14, 20)
    progress.add_images("GPU 0", 0, 1)
    progress.set_state("GPU 2", "given up")
    progress.finish()
    assert [lane.state for lane in progress.workers.values()] == ["finished", "stopped", "given up"]


def test_a_worker_that_joins_later_has_its_lane() -> None:
    progress = GenerationProgress("none", [], num_planned=3, num_done=0)
    progress.add_images("GPU 7", 1, 0)
    assert list(progress.workers) == ["GPU 7"]


@pytest.mark.parametrize(
    ("seconds", "face", "words"),
    [
        (0, "00:00", "0 s"),
        (1800, "30:00", "30 min"),
        (9000, "2:30:00", "2.5 h"),
        (359_999, "99:59:59", "100.0 h"),
        (400_000, "4d15:06", "4.6 days"),
        (None, "-:--", None),
    ],
)
def test_times_are_written_for_people(seconds: float | None, face: str, words: str | None) -> None:
    assert format_clock(seconds) == face
    assert seconds is None or format_duration(seconds) == words


def test_slow_speeds_are_told_by_the_minute_or_the_hour() -> None:
    assert [format_speed(rate) for rate in (1234.5, 3.14, 0.05, 0.001)] == ["1234/s", "3.1/s", "3.0/min", "3.6/h"]


def test_control_characters_are_spelled_out() -> None:
    assert (
        escape_control_characters("a\x1b[2J\x07\x9b\u202eb\nstra\u00dfe \U0001f600")
        == "a\\x1b[2J\\x07\\x9b\\u202eb\nstra\u00dfe \U0001f600"
    )


# -- bars


def drawn(progress: GenerationProgress | StepProgress, width: int, height: int, **options: bool) -> list[str]:
    screen: dict[str, Any] = {"width": width, "height": height, "force_terminal": True, **options}
    console = Console(file=io.StringIO(), **screen)
    console.print(progress.render(width, height))
    return console.file.getvalue().split("\n")[:-1]  # type: ignore[attr-defined]


def busy(num_workers: int, planned: int = 5000) -> tuple[GenerationProgress, Clock]:
    clock = Clock()
    progress = GenerationProgress(
        "none", [f"GPU {n}" for n in range(num_workers)], num_planned=planned, num_done=1000, num_failed=3, clock=clock
    )
    for number in range(num_workers):
        progress.set_assigned(f"GPU {number}", 250)
        progress.set_step(f"GPU {number}", 4, 20)
    clock.now += 100
    for number in range(num_workers):
        progress.add_images(f"GPU {number}", 100 + number, number % 2)
    return progress, clock


def test_a_line_has_label_count_times_success_failed_speed_and_state() -> None:
    progress, _ = busy(2)
    first, second, whole = (ESCAPE.sub("", line).split() for line in drawn(progress, 120, 30))
    assert [first[0], first[1], *first[3:]] == [
        *["GPU", "0", "100/250", "01:40<02:30", "success:", "100", "failed:", "0"],
        *["1.0/s", "drawing", "4", "of", "20", "steps"],
    ]
    assert second[3:9] == ["102/250", "01:40<02:25", "success:", "101", "failed:", "1"]
    assert whole[0] == "all"
    assert whole[2:] == ["1205/5000", "01:40<31:18", "success:", "1201", "failed:", "4", "2.0/s"]


def test_failed_is_red_only_where_something_failed_and_colours_can_be_refused() -> None:
    progress, _ = busy(2)
    first, second, _ = drawn(progress, 120, 30)
    assert not re.search(r"\x1b\[1;31m *failed", first)
    assert re.search(r"\x1b\[1;31m *failed: 1", second)
    assert not any(re.search(r"\x1b\[[0-9;]*3[0-9]m", line) for line in drawn(progress, 120, 30, no_color=True))


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_every_line_has_its_count(width: int) -> None:
    progress, _ = busy(4, planned=1_000_000)
    for line in drawn(progress, width, 30):
        assert len(ESCAPE.sub("", line)) <= width
    if width >= 60:
        assert all("failed:" in line for line in drawn(progress, width, 30))
    if width >= 80:
        assert all("success:" in line for line in drawn(progress, width, 30))


def test_columns_stay_where_they_are_while_the_numbers_grow() -> None:
    clock = Clock()
    progress = GenerationProgress("none", ["GPU 0"], num_planned=5000, num_done=0, clock=clock)
    progress.set_assigned("GPU 0", 5000)
    for width in (60, 90, 120):
        ends = set()
        for num in (0, 9, 90, 900):
            progress.add_images("GPU 0", num, 0)
            clock.now += 4000
            ends.add(ESCAPE.sub("", drawn(progress, width, 30)[0]).index("/5000"))
        assert len(ends) == 1


@pytest.mark.parametrize(
    ("num_workers", "height", "num_shown"),
    [(16, 30, 16), (16, 18, 16), (16, 17, 14), (16, 11, 8), (4, 3, 0), (1, 1, 0)],
)
def test_workers_that_do_not_fit_are_told_in_one_line(num_workers: int, height: int, num_shown: int) -> None:
    progress, _ = busy(num_workers)
    lines = [ESCAPE.sub("", line).strip() for line in drawn(progress, 100, height)]
    assert sum(line.startswith("GPU") for line in lines) == num_shown
    assert lines[-1].startswith("all ")
    if num_shown < num_workers:
        assert lines[-2].startswith(f"and {num_workers - num_shown} more: ")
        total = sum(100 + number + number % 2 for number in range(num_shown, num_workers))
        assert f"{total}/{250 * (num_workers - num_shown)}" in lines[-2]
        assert len(lines) <= max(height, 2)


def test_in_a_narrow_terminal_a_worker_that_does_not_draw_says_why() -> None:
    progress, _ = busy(2)
    progress.set_state("GPU 1", "compiling")
    first, second, _ = (ESCAPE.sub("", line) for line in drawn(progress, 60, 30))
    assert "compiling" not in first
    assert second.split() == ["GPU", "1", "102/250", "compiling"]


@pytest.mark.parametrize("total", [8, 20_000, 1_000_000])
@pytest.mark.parametrize("width", range(40, 140))
def test_a_step_bar_has_step_total_and_time_left_from_40_columns_on(width: int, total: int) -> None:
    """At every width: step, total and time left; with room for more first the rate, then the rest."""
    progress, clock = StepProgress("none", total, 0), Clock()
    progress.clock, progress.start_time, progress.bar.rate_start = clock, clock.now, clock.now
    clock.now += 36_000
    progress.update(total // 2, "mean loss 0.1234", {}, images_per_s=59.3)
    line = ESCAPE.sub("", drawn(progress, width, 24)[0])
    assert len(line) <= width
    assert re.match(rf"training\b.* {total // 2}/{total} ", line)
    assert "10:00:00" in line, "ten hours are left"
    shown = [name for name in ("59.3 img/s", "mean loss 0.1234", "10:00:00<10:00:00") if name in line]
    assert shown[:1] in ([], ["59.3 img/s"])
    assert len(shown) == 3 or width < 100


@pytest.mark.parametrize("width", range(40, 140))
def test_bars_of_workers_have_count_and_time_left_from_40_columns_on(width: int) -> None:
    progress, _ = busy(2)
    for line in (ESCAPE.sub("", line) for line in drawn(progress, width, 24)):
        assert len(line) <= width
        assert re.search(r" (\d+/250 .*\b02:[23]\d|1205/5000 .*\b31:18)\b", line)
        assert re.search(r"\b[12]\.0/s", line)
        assert ("success: " in line and "failed: " in line) or width < 60


def test_long_times_are_not_cut() -> None:
    progress, clock = busy(1)
    clock.now += 40 * 3600
    assert all(re.search(r" 40:01:40<\S+ ", ESCAPE.sub("", line)) for line in drawn(progress, 140, 24))


@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.parametrize("width", [40, 60, 120])
def test_ctrl_c_leaves_no_copy_of_a_step_bar(width: int, presses: int) -> None:
    """The terminal writes `^C` where the cursor is; the bar must not be drawn beside what that leaves."""
    with Terminal([sys.executable, __file__, "auto", "0", "0", "stop"], width) as terminal:
        terminal.read_until(lambda text: re.search(r"training .*[1-9]\d*/600", text))
        for _ in range(presses):
            terminal.press(b"\x03")
            terminal.read_until(lambda text: "stopping" in text)
        code = terminal.finish(60)
    lines = [line for line in terminal.screen.lines() if line != "stopping"]
    assert terminal.screen.is_cursor_visible
    if presses == 1:
        bar, last = lines
        assert re.fullmatch(r"training .* \d+/600 .*", bar)
        assert bar.count("00:00") == 0
        assert "-:--" in bar
        assert (last, code) == ("stopped", 0)
    else:
        message = "halation: stopped immediately; the same command resumes from what it has saved"
        assert "".join(lines).replace(" ", "") == message.replace(" ", "")
        assert code == 130


@pytest.mark.parametrize("width", [40, 60, 120])
def test_ctrl_c_leaves_no_copy_of_the_bars_of_workers(width: int) -> None:
    with Terminal([sys.executable, __file__, "auto", "3", "0", "stop"], width) as terminal:
        terminal.read_until(lambda text: re.search(r"all .*[1-9]\d*/1750", text))
        terminal.press(b"\x03\x03\x03\x03")
        assert terminal.finish(60) == 0
    lines = [line for line in terminal.screen.lines() if line != "stopping"]
    assert [line.split()[0] for line in lines] == ["GPU", "GPU", "GPU", "all", "stopped"]
    assert not any("00:00" in line.partition("<")[2] for line in lines)
    assert all("-:--" in line or "stopped" in line for line in lines)
    assert terminal.screen.is_cursor_visible


@pytest.mark.parametrize("width", [60, 120])
def test_on_a_terminal_the_bars_are_drawn_in_place_and_messages_stay_above_them(width: int) -> None:
    written, code = on_a_terminal(width, 24, 4, 2.0)
    assert code == 0
    lines = lines_of(written)
    assert max(map(len, lines)) <= width
    frames = sum(line.startswith("all ") for line in lines)
    assert 5 <= frames <= 2.0 * 10 + 6, "at most ten redraws a second, and one at each message"
    assert lines.count("GPU 1: gone, started again (1)") == lines.count("GPU 2: gone, started again (1)") == 1
    assert "\x1b[2J" not in written, "a prompt does not clear the screen"
    last = [line for line in lines if line][-5:]
    assert [line[:5] for line in last] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3", "all  "]
    planned = [re.findall(r"(\d+)/", line)[0] for line in last]
    assert planned == ["210", "150", "150", "213", "1723"]
    assert written.endswith("\x1b[?25h"), "the cursor is shown again"


@pytest.mark.parametrize("width", [40, 60, 100])
def test_a_step_bar_stays_in_its_line_and_shows_what_fits(width: int) -> None:
    written, code = on_a_terminal(width, 24, 0, 0.6, "step")
    assert code == 0
    lines = lines_of(written)
    assert max(map(len, lines)) <= width
    assert lines.count("checkpoint of step 300\\x1b[2J") == 1
    last = [line for line in lines if line][-1]
    assert re.match(r"training (\S+ +)?600/600", last)
    assert bool(re.search(r" \d\d:\d\d<00:00", last)) == (width >= 100)
    assert "00:00" in last
    assert "600 img/s" in last
    assert ("mean loss 0.0017" in last) == (width >= 60)


def test_a_watch_on_a_terminal_leaves_its_events_alone() -> None:
    written, code = on_a_terminal(80, 24, 0, 0.6, "watch")
    assert code == 0
    lines = [line.strip() for line in lines_of(written)]
    assert any(re.match(r"\S step 200: drawing  \d of 10 images", line) for line in lines)
    assert lines.count("step 200: fd 3.2\\x1b[2J") == lines.count("step 400: fd 3.2\\x1b[2J") == 1
    assert written.rstrip("\r\n").endswith(("\x1b[2K", "\x1b[?25h")), "the live line is erased"


def test_no_color_is_respected_on_a_terminal() -> None:
    coloured, _ = on_a_terminal(120, 24, 2, 0.4)
    bare, _ = on_a_terminal(120, 24, 2, 0.4, NO_COLOR="1")
    colour = re.compile(r"\x1b\[[0-9;]*(3[0-9]|38;5;[0-9]+)m")
    assert colour.search(coloured)
    assert not colour.search(bare)


def test_a_dumb_terminal_gets_plain_lines() -> None:
    written, code = on_a_terminal(80, 24, 1, 0.2, TERM="dumb")
    assert code == 0
    assert "\x1b[" not in written
    assert "990 of 1250 images done" in written


def test_many_threads_may_tell_at_once_while_the_bars_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich draws into a string as on a terminal
    stream = io.StringIO()
    with GenerationProgress(
        "rich", [f"GPU {number}" for number in range(4)], num_planned=8000, num_done=0, stream=stream
    ) as progress:

        def tell(worker: str) -> None:
            for number in range(2000):
                progress.set_step(worker, number % 20, 20)
                progress.add_images(worker, 1, 0)
                if number % 500 == 0:
                    progress.print_line(f"{worker} at {number}")
                    progress.set_state(worker, "gone, started again (1)")

        threads = [threading.Thread(target=tell, args=(worker,)) for worker in progress.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    assert progress.overall().num_succeeded == 8000
    written = lines_of(stream.getvalue())
    assert "GPU 3 at 1500" in written
    assert written.count("GPU 0: gone, started again (1)") == 4
    assert sum(line.startswith("all ") for line in written) > 16


@pytest.mark.parametrize("kind", ["json", "plain"])
def test_workers_may_join_while_other_threads_write_lines(kind: str) -> None:
    stream, errors = io.StringIO(), []
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns in the middle of a line
    with GenerationProgress(kind, [], num_planned=400, num_done=0, stream=stream) as progress:

        def join_and_tell(part: int) -> None:
            try:
                for number in range(100):
                    progress.add_images(f"GPU {part}-{number}", 1, 0)
                    progress.print_line("one more")
            except RuntimeError as error:
                errors.append(error)

        threads = [threading.Thread(target=join_and_tell, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    sys.setswitchinterval(interval_s)
    assert not errors
    assert sum("one more" in line for line in stream.getvalue().splitlines()) == 400


def test_telling_a_step_is_cheap() -> None:
    progress = GenerationProgress("none", ["GPU 0"], num_planned=10, num_done=0)
    began = time.process_time()
    for step in range(20_000):
        progress.set_step("GPU 0", step, 20_000)
    assert (time.process_time() - began) / 20_000 < 50e-6


# -- lines


def test_plain_lines_come_at_start_events_and_end_and_not_at_every_step() -> None:
    """Plain lines come at the start, at events and at the end, and not at every step."""
    stream, clock = io.StringIO(), Clock()
    with GenerationProgress(
        "auto", ["GPU 0", "GPU 1"], num_planned=10, num_done=3, num_failed=1, stream=stream, clock=clock
    ) as progress:
        assert progress.kind == "plain"
        progress.set_state("GPU 0", "loading")
        progress.set_state("GPU 0", "loading")
        for step in range(20):
            progress.set_step("GPU 0", step, 20)
            progress.set_state("GPU 0", f"drawing {step} of 20 steps")
        clock.now += 2
        progress.add_images("GPU 0", 3, 1)
        progress.print_line("a warning\x1b[31m")
    progress.finish()
    assert stream.getvalue().split("\n") == [
        "3 of 10 images done, 1 failed before; generating on GPU 0, GPU 1",
        "GPU 0: loading",
        "a warning\\x1b[31m",
        "6 of 10 images, 2 failed, 2.0/s, in 2 s (GPU 0: 4, GPU 1: 0)",
        "",
    ]


def test_plain_lines_come_every_half_minute_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halation.progress.PLAIN_EVERY_S", 0.05)
    stream, clock = io.StringIO(), Clock()
    with GenerationProgress(
        "plain", ["GPU 0", "GPU 1"], num_planned=5000, num_done=0, stream=stream, clock=clock
    ) as progress:
        progress.set_step("GPU 0", 1, 20)
        clock.now += 100
        progress.add_images("GPU 0", 205, 2)
        progress.add_images("GPU 1", 103, 0)
        time.sleep(0.3)
    lines = stream.getvalue().splitlines()
    assert "308 of 5000 images, 2 failed, 3.1/s, 25 min left (GPU 0: 207, GPU 1: 103)" in lines
    assert 3 <= len(lines) <= 9


def test_plain_lines_of_steps_have_single_blanks_and_the_last_one_comes_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with StepProgress("plain", 4, 4, "caching") as progress:
        for _ in range(2):
            progress.update(4, "images", {})
    with StepProgress("plain", 2, 0) as progress:
        progress.update(2, "mean loss 0.5000", {}, images_per_s=0.3)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["caching 4/4 images", "step 2/2 mean loss 0.5000, 0.3 images/s, 0:00:00 left"]


def test_long_work_gets_a_bar_on_rank_0_and_every_rank_sends_heartbeats(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    beats = []
    for delay_s, rank in ((0.0, 0), (0.0, 1), (60.0, 0)):
        monkeypatch.setattr("halation.progress.DELAY_S", delay_s)
        with delayed_progress("plain", "caching", "images", lambda: beats.append(1), (rank, 2)) as update:
            time.sleep(0.01)
            update(1, 2)
    assert len(beats) == 3
    assert capsys.readouterr().err == "caching 1/2 images, rank 0 of 2\n"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            "plain",
            ["looking", "3 wait", "step 2: bad", "step 4: fd 3.2", "waiting"],
        ),
        (
            "json",
            [
                {"event": "doing", "text": "looking"},
                {"event": "message", "text": "3 wait"},
                {"event": "warning", "text": "step 2: bad"},
                {"event": "scored", "text": "step 4: fd 3.2", "step": 4, "metrics": {"fd": 3.2}},
                {"event": "doing", "text": "waiting"},
            ],
        ),
        ("none", ["step 2: bad"]),
    ],
)
def test_a_watch_writes_events_and_each_status_once(
    kind: str, expected: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    with WatchProgress(kind) as progress:
        progress.show_status("looking")
        progress.show_status("looking", "at 3 of 4")
        progress.show_event("message", "3 wait")
        progress.show_event("warning", "step 2: bad")
        progress.show_event("scored", "step 4: fd 3.2", step=4, metrics={"fd": 3.2})
        progress.show_status("waiting")
    lines = capsys.readouterr().err.splitlines()
    assert ([json.loads(line) for line in lines] if kind == "json" else lines) == expected


# -- JSON


def test_json_lines_of_steps_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with StepProgress("json", 3, 0) as progress:
        for step in (1, 2, 3):
            progress.update(step, "words", {"loss": 0.5})
        progress.print_line("a checkpoint")
    assert [json.loads(line) for line in capsys.readouterr().err.splitlines()] == [
        {"step": 1, "total": 3, "loss": 0.5},
        {"step": 3, "total": 3, "loss": 0.5},
        {"event": "a checkpoint"},
    ]


def test_json_lines_say_the_same_to_machines_on_standard_output() -> None:
    done = subprocess.run([sys.executable, __file__, "json", "4", "2.5"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[0]["event"] == "start"
    assert [event["event"] for event in events].count("end") == 1
    assert {event["event"] for event in events} == {"start", "worker", "message", "progress", "end"}
    for event in events:
        assert {"time_s", "planned", "done", "failed", "per_s", "left_s", "workers"} < event.keys()
        assert event["planned"] == 2000
    moments = [event["time_s"] for event in events if event["event"] == "progress"]
    assert moments
    assert all(later - earlier >= 0.99 for earlier, later in itertools.pairwise(moments))
    last = events[-1]
    assert (last["event"], last["done"], last["failed"]) == ("end", 990 + 720, 10 + 3)
    assert last["workers"]["GPU 3"] == {"success": 210, "failed": 3, "share": 250, "state": "finished"}
    gone = [event["worker"] for event in events if event["event"] == "worker" and event["text"].startswith("gone")]
    assert gone == ["GPU 1", "GPU 2"]


@pytest.mark.parametrize("job", ["", "step", "watch"])
@pytest.mark.parametrize("kind", ["json", "plain", "rich"])
def test_a_reader_that_goes_away_does_not_stop_the_work(kind: str, job: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, __file__, kind, "2", "0.4", *job.split()],
        stdout=writer,
        stderr=subprocess.PIPE if kind == "json" and not job else writer,
        timeout=60,
    )
    os.close(writer)
    assert done.returncode == 0
    assert not done.stderr


def test_none_writes_nothing() -> None:
    done = subprocess.run([sys.executable, __file__, "none", "2", "0.1"], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_progress_does_not_import_torch_nor_rich_before_it_draws_bars() -> None:
    modules = "halation.progress, halation.generation.metadata_and_summary"
    code = f"import sys, {modules}; print(*{{'torch', 'rich'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "")


# As a script: `test_progress.py KIND NUM_WORKERS SECONDS [step | watch | stop]` shows a generation, a training, a watch or a stop.


def play_generation(kind: str, num_workers: int, seconds: float) -> None:
    workers = [f"GPU {number}" for number in range(num_workers)]
    with GenerationProgress(
        kind, workers, num_planned=1000 + 250 * num_workers, num_done=990, num_failed=10
    ) as progress:
        for worker in workers:
            progress.set_assigned(worker, 250)
            progress.set_state(worker, "loading")
        for tick in range(40):
            time.sleep(seconds / 40)
            for number, worker in enumerate(workers):
                if number in (1, 2) and tick == 15:
                    progress.set_state(worker, "gone, started again (1)")
                    progress.print_line(
                        f"{worker} died of signal 9; its batch with the prompt '\x1b[2J\x07 a street' is drawn again"
                    )
                elif tick >= 5 and not (number in (1, 2) and 15 <= tick < 25):
                    progress.set_step(worker, tick % 20 + 1, 20)
                    progress.add_images(worker, 6, int(number == 3 and tick % 10 == 0))
        for worker in workers:
            progress.set_state(worker, "finished")


def play_training(kind: str, seconds: float) -> None:
    with StepProgress(kind, 600, 100) as progress:
        for step in range(101, 601):
            time.sleep(seconds / 500)
            progress.update(step, f"mean loss {1 / step:.4f}", {"loss": 1 / step}, images_per_s=step)
            if step % 100 == 0:
                progress.print_line(f"checkpoint of step {step}\x1b[2J")


def play_watch(kind: str, seconds: float) -> None:
    with WatchProgress(kind) as progress:
        for step in (200, 400):
            for number in range(10):
                progress.show_status(f"step {step}: drawing", f"{number} of 10 images")
                time.sleep(seconds / 20)
            progress.show_event("scored", f"step {step}: fd 3.2\x1b[2J", step=step, metrics={"fd": 3.2})
        progress.show_event("warning", "step_0000600 was removed before it was scored; skipping it")


def play_stop(kind: str, num_workers: int) -> None:
    """A training, or with workers a generation, until the first signal and a second longer."""
    workers = [f"GPU {number}" for number in range(num_workers)]
    generation = GenerationProgress(kind, workers, num_planned=1000 + 250 * num_workers, num_done=1000)
    with (
        StopSignals(exit_on_second=not workers) as signals,
        generation if workers else StepProgress(kind, 600, 0) as progress,
    ):
        end = float("inf")
        for step in range(1, 600):
            if time.monotonic() > end:
                break
            if signals.number and end == float("inf"):
                progress.print_line("stopping")
                end = time.monotonic() + 1.0
            time.sleep(0.02)
            if isinstance(progress, StepProgress):
                progress.update(step, f"mean loss {1 / step:.4f}", {}, images_per_s=step)
            for worker in workers:
                generation.set_assigned(worker, 250)
                generation.set_step(worker, step % 20 + 1, 20)
                generation.add_images(worker, int(step % 20 == 0), 0)
    sys.stdout.write("stopped\n")


if __name__ == "__main__":
    kind, num_workers, seconds, *job = sys.argv[1:]
    if job == ["step"]:
        play_training(kind, float(seconds))
    elif job == ["stop"]:
        play_stop(kind, int(num_workers))
    elif job == ["watch"]:
        play_watch(kind, float(seconds))
    else:
        play_generation(kind, int(num_workers), float(seconds))
