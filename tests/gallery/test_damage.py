"""Damaged run files leave the other runs visible, and no file outside a run is read."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import big_folders
from halation.gallery.command import build_catalog
from halation.gallery.evaluation_reports import ScoreIndex
from halation.gallery.generation_runs import RowQuery
from halation.gallery.run_catalog import RunCatalog
from halation.gallery.run_file_reader import JsonlTailReader, encode_json, read_json_object, read_last_lines
from halation.runs import lock
from halation.runs import run_folder as runs
from support.gallery import serving

SECRET = "nobody outside should read this"
HUGE = 10**400
WILD = {
    **{"settings": {"n_steps": HUGE, "image_size": [HUGE, None], "prompts": 7, "width": [], "seed": {}}, "changes": 3},
    **{"fixed": {"model name": [[]], "prompts": {}, "height": HUGE}, "pid": 10**20, "since": [], "host": "here"},
    **{"state": ["done"], "reason": {"a": 1}, "step": [], "loss": HUGE, "metric": "fd", "value": HUGE, "std": [1]},
    **{"num_generated": {}, "time_s": HUGE, "index": HUGE, "epoch": HUGE, "kind": [], "better": {}, "command": 5},
    "samples": [
        *(7, None, {"prompt": 5, "seed": HUGE}, {"prompt": "a", "seed": HUGE, "state": "done", "file": "x.png"}),
        {"prompt": "a", "seed": 1, "state": "done", "file": "a\0b", "teacher": "\ud800\0"},
        {"prompt": "b", "seed": 2, "state": [], "file": "x" * 5_000},
    ],
    "generated": {"path": "x" * 300 + "/" + "y" * 300, "num": HUGE},
    "metrics": {"fd": {"value": 1, "better": [], "interval": [[], 2]}, "kid": {"value": HUGE}, "is": 5},
    "versions": [[]],
    "extremes": {"nearest": [{"name": "a\0.png", "distance": 1}, {"name": "z" * 400 + ".png", "distance": HUGE}]},
}


def wild(path: Path) -> None:
    """Every key that anybody looks for, of a kind that nobody expects; the job stays, so that it is still a run."""
    job = read_json_object(path).get("job", "train")
    line = json.dumps(WILD | {"job": job, "host": socket.gethostname()}) + "\n"
    strange = json.dumps({"job": job, "settings": "x", "fixed": "y", "step": 1, "metric": "m", "value": float("nan")})
    path.write_text(line if path.suffix != ".jsonl" else line + strange + "\n" + '{"step": 7, "loss": 1e999}\n')


def write(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": write(b""),
    "half": write(b'{"job": "tra'),
    "not utf-8": write(b"\xff\xfe\x00" * 9 + b"\n"),
    "deep": write(b"[" * 200_000 + b"\n"),
    "deep but whole": write(b'{"job":"train","a":' * 900 + b"1" + b"}" * 900 + b"\n"),
    "wild": wild,
    "sparse": sparse,
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "link to itself": lambda path: path.symlink_to(path.name),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "gone": lambda path: None,
}
FILES = {
    "training": (
        *("config.json", "metrics.jsonl", ".owner.json", "ended.json", "logs/train.log", "checkpoints", "samples"),
        *("samples/step_0000020/samples.json", "checkpoints/step_0000020/COMMIT.json", "evaluation/step_9.json"),
    ),
    "generation": ("config.json", "ledger.sqlite", "ledger.sqlite-wal", "logs/generate.log", "ended.json"),
    "shared": ("config.json", "ledger", "ledger/a.jsonl", "metadata.jsonl", "ledger/leases/a.card"),
    "watch": ("config.json", "metrics.jsonl", "best", "failed.json", "step_0000020/grid.png"),
    "sample": ("config.json", "samples.json", "logs/sample.log"),
}


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whole run of each kind."""
    top = tmp_path_factory.mktemp("wholes")
    training = big_folders.training_folder(top / "training", 2, 2, every=10, size=8)
    (training / "checkpoints/step_0000020").mkdir(parents=True)
    big_folders.generation_folder(top / "generation", 4, size=8)
    for name, job in (("shared", "generate"), ("watch", "watch"), ("sample", "sample")):
        (top / name).mkdir()
        runs.create_or_resume_run(runs.RunFolder(top / name), job, {}, {"prompts": ["a"], "seed": 1}, False)
    runs.write_json_atomic(top / "sample/samples.json", {"samples": [{"prompt": "a", "seed": 1, "state": "failed"}]})
    (top / "shared/ledger/leases").mkdir(parents=True)
    (top / "shared/ledger/plan-1.digests").write_bytes(bytes(8 * 3))
    (top / "shared/ledger/a.jsonl").write_text('{"index": 0, "state": "failed", "reason": "no"}\n')
    (top / "watch/metrics.jsonl").write_text('{"step": 20, "metric": "fd", "value": 1.5}\n')
    return top


def damaged(wholes: Path, top: Path, damage: str) -> dict[str, Path]:
    """Copies of the runs, one for each of their files, which alone is damaged."""
    found = {}
    for kind, names in FILES.items():
        for number, name in enumerate(names):
            folder = shutil.copytree(wholes / kind, top / f"{kind}_{number}")
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            before = path.read_bytes() if path.is_file() else b""
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            if damage == "wild":
                path.write_bytes(before)
            DAMAGES[damage](path)
            found[f"{kind}_{number}"] = path
    return found


def shown(catalog: RunCatalog, scores: ScoreIndex) -> dict[str, Any]:
    """All that a page asks for, of every run, as it goes over the wire."""
    told = {}
    for entry in catalog.entries():
        told[entry.name] = json.loads(encode_json(entry.detail()))
        assert json.loads(encode_json(entry.summary())).keys() == told[entry.name]["summary"].keys()
        encode_json([entry.config(), entry.log(300)])
        for key in ("s20.0", "s20.1", "t.0", "g0"):
            entry.image(key)
        for name, words in (("metrics", (0,)), ("search", (RowQuery(text="a"),)), ("spec", ("g0",))):
            encode_json(getattr(entry, name, lambda *_: None)(*words))
    encode_json(scores.build_response())
    return told


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_damaged_file_costs_no_other_run_anything(wholes: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(wholes / "training", tmp_path / "good")
    paths = damaged(wholes, tmp_path, damage)
    catalog = build_catalog([tmp_path])
    scores = ScoreIndex(catalog)
    told: dict[str, Any] = {}

    def look() -> None:
        for now in (0.0, 10.0):
            catalog.refresh(now)
            scores.refresh()
        told.update(shown(catalog, scores))

    thread = threading.Thread(target=look, daemon=True)  # a pipe that is waited for would hold the suite up
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it hangs"
    assert (told["good"]["summary"]["done"], len(told["good"]["steps"])) == (20, 2)
    lost = {name for name, path in paths.items() if name not in told and path.name != "config.json"}
    assert lost == set()
    if damage in ("half", "not utf-8", "deep", "sparse", "pipe", "folder", "device"):
        assert told["training_0"]["summary"]["reason"].startswith("cannot be read: config.json")
        assert told["training_0"]["summary"]["done"] == 20, "what can be read is shown"


def test_the_page_goes_on_while_a_run_is_damaged(tmp_path: Path) -> None:
    top = tmp_path / "runs"
    good = big_folders.training_folder(top / "good", 1, 1, size=8)
    bad = big_folders.generation_folder(top / "bad", 2, size=8)
    with lock.lock_folder(good, "train"), serving(top, cache=tmp_path / "cache") as client:
        ids = client.ids()
        with client.listening() as stream:
            (bad / "config.json").write_bytes(b'{"job": "generate", "settings": "x", "fixed": [')
            os.truncate(bad / "ledger.sqlite", 5_000)
            runs.MetricsFile(good / "metrics.jsonl").append({"step": 2, "loss": 0.5})
            assert any(ids["good"].encode() in line for line in stream)
        assert client.ask("/api/runs").status == 200
        assert client.ask("/api/scores").status == 200
        assert client.ask(f"/api/runs/{ids['bad']}").json["summary"]["name"] == "bad"


# -- links


@pytest.mark.parametrize(
    "name", ["logs/train.log", "config.json", "metrics.jsonl", "samples/step_0000020/samples.json"]
)
@pytest.mark.parametrize("whole_folder", [False, True])
def test_links_that_leave_a_run_are_not_read(wholes: Path, tmp_path: Path, name: str, whole_folder: bool) -> None:
    folder = shutil.copytree(wholes / "training", tmp_path / "runs/run")
    secret = tmp_path / "secret" / Path(name).name
    secret.parent.mkdir()
    row = {"job": "train", "settings": {"model": SECRET}, "step": 20, "loss": 1.0, SECRET: 1.0}
    samples = [{"prompt": SECRET, "seed": 1, "state": "failed", "reason": SECRET}]
    secret.write_text(json.dumps(row | {"samples": samples}) + "\n")
    path = folder / name
    if whole_folder and path.parent != folder:
        shutil.rmtree(path.parent)
        path.parent.symlink_to(secret.parent)
    else:
        path.unlink(missing_ok=True)
        path.symlink_to(secret)
    catalog = build_catalog([tmp_path / "runs"])
    catalog.refresh()
    entries: list[Any] = list(catalog.entries())
    told = [json.dumps([each.detail(), each.log(9), each.config(), each.metrics(0)]) for each in entries]
    assert len(told) == 1
    assert SECRET not in told[0]


def test_a_link_inside_a_run_is_read(tmp_path: Path) -> None:
    (tmp_path / "today.log").write_text("one\ntwo\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/train.log").symlink_to("../today.log")
    assert read_last_lines(tmp_path / "logs/train.log", 1, tmp_path) == ["two"]
    assert read_last_lines(tmp_path / "logs/train.log", 1) == []
    (tmp_path / "link").symlink_to(tmp_path)
    assert read_last_lines(tmp_path / "link/today.log", 1) == ["two"], "the folder itself may be reached by one"
    assert JsonlTailReader(tmp_path / "today.log").read_new() == (False, [])
