"""`halation gallery` as a process: link, port, Ctrl+C, refusals, and no leaked secret."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.big_folders import generation_folder, training_folder

from halation import cli
from halation.config import as_json
from halation.errors import InputError
from halation.gallery import command as gallery
from halation.gallery.config import GalleryConfig
from halation.gallery.server import open_listener
from halation.runs import run_folder as runs
from halation.training import command as train
from halation.training.config import TrainConfig

pytestmark = pytest.mark.ranks  # the command itself, in processes of its own
HALATION = str(Path(sys.executable).with_name("halation"))
CANARY = "canary-5f1c9e-secret"
LINK = re.compile(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{43})")
# Ends itself once it serves, and says what it had imported by then.
WATCHED = """
import os, signal, sys, threading, time
from halation import cli
def end():
    while signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # until the server answers signals
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=end, daemon=True).start()
code = cli.main(["gallery", *sys.argv[1:]])
print("code", code, "heavy", sorted({"torch", "diffusers", "transformers"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("job")
    training_folder(place / "train", 2, 2, size=16)
    generation_folder(place / "generate", 5, size=16)
    return place


@contextlib.contextmanager
def started(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str, int, str]]:
    """A gallery that has printed its link: the process, what it said, its port and its token."""
    command = [HALATION, "gallery", str(folder), *words]
    environment = {**os.environ, "HALATION_CACHE": str(folder / ".cache"), "WANDB_API_KEY": CANARY}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            said = ""
            assert process.stdout is not None
            while "to end" not in said:
                line = process.stdout.readline()
                assert line, process.communicate()
                said += line
            match = LINK.search(said)
            assert match is not None, said
            yield process, said, int(match[1]), match[2]
        finally:
            if process.poll() is None:
                process.kill()


def ask(port: int, path: str, cookie: str = "") -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"cookie": cookie})
        response = connection.getresponse()
        return response, response.read()


def cookie_of(port: int, token: str) -> str:
    response, _ = ask(port, f"/?token={token}")
    return str(response.headers["set-cookie"]).partition(";")[0]


def test_the_command_prints_its_link_and_ctrl_c_ends_it_with_open_pages(
    folder: Path,
) -> None:
    """The command prints its link and how to reach it; Ctrl+C ends it although pages listen."""
    with started(folder, "--port", "0") as (process, said, port, token):
        assert f"halation gallery: 2 runs below {folder}" in said
        assert f"ssh -N -L {port}:127.0.0.1:{port} " in said
        assert "Ctrl+C" in said
        cookie = cookie_of(port, token)
        assert ask(port, "/", cookie)[0].status == 200
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        with contextlib.closing(connection):
            connection.request("GET", "/api/events", headers={"cookie": cookie})
            assert connection.getresponse().status == 200
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, complaints = process.communicate(timeout=20)
            assert time.monotonic() - began < 10, "it waits for no page"
        assert (process.returncode, complaints) == (130, "")


def test_two_galleries_take_two_ports_and_share_and_print_no_secret(
    folder: Path,
) -> None:
    """A second gallery takes the next port, shares nothing, and prints no secret anywhere."""
    with started(folder, "--port", "0") as (first, _, port, token):
        with started(folder, "--port", str(port)) as (second, said, other_port, other_token):
            assert f"port {port} is in use, using port {other_port}" in said
            assert token != other_token
            cookie, other = cookie_of(port, token), cookie_of(other_port, other_token)
            assert ask(other_port, f"/?token={token}")[0].status == 403
            both = f"{cookie}; {other}"  # a browser sends to every port what any port of a host has set
            assert ask(port, "/api/runs", both)[0].status == ask(other_port, "/api/runs", both)[0].status == 200
            bodies = [ask(port, path, cookie)[1] for path in ("/", "/api/state", "/api/runs", "/api/scores")]
            ids = set(re.findall(rb'"id":"([0-9a-f]{10})"', bodies[2]))
            assert len(ids) == 2
            rests = ("", "/log", "/config", "/metrics", "/rows", "/spec/g0")
            bodies += [ask(port, f"/api/runs/{id.decode()}{rest}", cookie)[1] for id in ids for rest in rests]
            for secret in (CANARY, token, cookie.partition("=")[2]):
                assert not any(secret.encode() in body for body in bodies)
            second.send_signal(signal.SIGTERM)
            rest, complaints = second.communicate(timeout=20)
            assert second.returncode == 143
            assert other_token not in rest + complaints
        first.send_signal(signal.SIGTERM)
        rest, complaints = first.communicate(timeout=20)
        assert (rest.strip(), complaints) == ("", "")
    left = [path for path in folder.rglob("*") if path.is_file() and ".cache" not in path.parts]
    assert not any(CANARY.encode() in path.read_bytes() or token.encode() in path.read_bytes() for path in left)


def test_it_starts_without_what_takes_seconds_to_import(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(folder), "--port", "0", "--allow_control"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1] == "code 143 heavy []", done
    assert "can make trainings sample, save or stop" in done.stdout


def test_on_the_network_it_warns_and_gives_a_link_from_outside(folder: Path) -> None:
    # Only this machine can reach this address, but by its form it is not one of the loopback: nothing is opened to a
    # network.
    host = "::ffff:127.0.0.1"
    try:
        open_listener(host, 0).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(folder), "--port", "0", "--host", host],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"warning: with --host {host} others on the network can reach this page" in done.stderr
    assert re.search(r"from outside +http://\[::ffff:127\.0\.0\.1\]:\d+/\?token=", done.stdout)
    assert "ssh -N" not in done.stdout


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["file"], "file is not a folder"),
        ([".", "--port", "70000"], "--port 70000"),
        ([".", "--port", "-1"], "--port -1"),
        ([".", "--host", "203.0.113.9"], "--host 203.0.113.9 is not an address of this machine"),
        ([".", "--host", "no such host"], "--host no such host is not an address of this machine"),
        ([".", "--export", "page.html"], "no run below"),
        ([".", "--export", "page.html", "--export_images", "-1"], "--export_images -1"),
    ],
)
def test_what_cannot_be_is_refused_in_three_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], found: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert cli.main(["gallery", *words]) == 2
    said = capsys.readouterr().err
    assert found in said
    assert "expected: " in said
    assert "to do: " in said


def test_what_a_command_settled_by_itself_is_not_said_to_be_chosen(tmp_path: Path) -> None:
    for name, config in (("plain", TrainConfig()), ("chosen", TrainConfig(lr=0.5, time_shift=3.0, image_size=(32,)))):
        (tmp_path / name).mkdir()
        settings = as_json(train.resolve_config(dataclasses.replace(config, output_dir=tmp_path / name)))
        runs.create_or_resume_run(runs.RunFolder(tmp_path / name), "train", settings, {}, False)
    catalog = gallery.build_catalog([tmp_path])
    catalog.refresh()
    assert {entry.name: sorted(entry.config()["differs"]) for entry in catalog.entries()} == {
        "plain": ["output_dir"],
        "chosen": ["image_size", "lr", "output_dir", "time_shift"],
    }


def test_a_folder_that_one_may_not_read_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:  # of its owner alone, in a folder of all
        os.chmod(folder, 0)
        user = os.geteuid()
        try:
            if user == 0:  # who may read everything
                os.seteuid(65534)
            with pytest.raises(InputError, match=f"{folder} cannot be read: Permission denied"):
                gallery.run(GalleryConfig(dirs=(Path(folder),)))
        finally:
            os.seteuid(user)
            os.chmod(folder, 0o700)


def test_without_the_extra_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec

    def without(name: str, package: Any = None) -> Any:
        return None if name == "uvicorn" else find_spec(name, package)

    monkeypatch.setattr("importlib.util.find_spec", without)
    assert cli.main(["gallery", str(tmp_path)]) == 2
    assert """pip install "starlette>=""" in capsys.readouterr().err


def test_one_run_is_written_as_a_page_of_its_own(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "run.html"
    assert cli.main(["gallery", str(folder / "train"), "--export", str(page), "--export_images", "3"]) == 0
    assert f"{page} (" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")
