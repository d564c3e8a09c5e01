"""Foreign checkpoints cannot run code or pass for good ones, damaged ones are named aloud, and no secret reaches a file."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support import checker, commands
from support.commands import finish, halation, train

CANARY = "canary-5b1f"
MANY = """
import json, sys
from halation.cli import main
codes = []
for number, words in enumerate(json.loads(sys.argv[1])):
    sys.stderr.write(f"== {number}\\n")
    codes.append(main(words))
print(json.dumps(codes))
"""


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (os.system, (f"touch {self.path}",))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training on one rank that had secrets in its environment."""
    folder = tmp_path_factory.mktemp("hostile")
    secrets = {name: f"{CANARY}-{name}" for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY")}
    words = halation(
        train(folder / "run", nproc=1, n_steps=2, sample=True, sample_prompts="a car", report_to="tensorboard")
    )
    assert finish(words, folder / "log", environment=secrets) == 0, (folder / "log").read_text()
    return folder / "run"


def files_with(folder: Path, word: str) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and word.encode() in path.read_bytes()]


def test_secrets_of_the_environment_are_in_no_file_of_the_run(run: Path) -> None:
    assert any("tfevents" in path.name for path in run.rglob("*"))
    assert files_with(run, "streets"), "the search finds what is there"
    assert files_with(run.parent, CANARY) == []


@pytest.mark.slow
def test_wandb_keeps_the_key_out_of_its_files_too(tmp_path: Path) -> None:
    secrets = {
        "WANDB_API_KEY": f"{CANARY}{'0' * 40}",
        "HF_TOKEN": CANARY,
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
    }
    words = halation(train(tmp_path / "run", nproc=1, n_steps=2, report_to="wandb"))
    assert finish(words, tmp_path / "log", environment=secrets) == 0, (tmp_path / "log").read_text()
    assert list(tmp_path.rglob("*.wandb")), "wandb wrote something"
    assert files_with(tmp_path, CANARY) == []


def committed(folder: Path) -> Path:
    """A commit file that is right about whatever lies in the folder: hashes keep out damage, not malice."""
    names = sorted(path.name for path in folder.iterdir() if path.name != "COMMIT.json")
    commit = {
        "step": 2,
        "kind": "kept",
        "world_size": 1,
        "sharded": False,
        "sha256": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names},
        "bytes": {name: (folder / name).stat().st_size for name in names},
    }
    commit["seal"] = hashlib.sha256(json.dumps(commit, sort_keys=True).encode()).hexdigest()
    (folder / "COMMIT.json").write_text(json.dumps(commit))
    assert checker.problem(folder) is None
    return folder


def hostile_folders(run: Path, place: Path) -> dict[str, Path]:
    """Folders that ask for trouble, by what they try."""
    trigger = place / "the-canary"
    pickled = pickle.dumps(Payload(trigger))
    huge = struct.pack("<Q", 2**63) + b"{}"
    checkpoint = run / "checkpoints" / "step_0000002"
    folders = {}

    def folder(name: str, source: Path | None = None) -> Path:
        folders[name] = place / name
        if source:
            shutil.copytree(source, folders[name])
        else:
            folders[name].mkdir(parents=True)
        return folders[name]

    (folder("only a pickle") / "model.pt").write_bytes(pickled)
    (folders["only a pickle"] / ".metadata").write_bytes(pickled)
    export = folder("a pickle that is called safetensors", run / "export")
    (export / "model.safetensors").write_bytes(pickled)
    export = folder("a header of 2^63 bytes", run / "export")
    (export / "model.safetensors").write_bytes(huge)
    export = folder("remote code", run / "export")
    remote = {"auto_map": {"AutoModel": "evil.Model"}, "trust_remote_code": True, "_class_name": "evil"}
    (export / "config.json").write_text(json.dumps(remote))
    (export / "evil.py").write_text(f"open({str(trigger)!r}, 'w')")
    export = folder("a config that is no JSON", run / "export")
    (export / "config.json").write_text("{" * 10)
    export = folder("a config that is a list", run / "export")
    (export / "config.json").write_text("[]")
    copy = folder("a committed pickle", checkpoint)
    (copy / "ema.safetensors").write_bytes(pickled)
    committed(copy)
    copy = folder("a committed header of 2^63 bytes", checkpoint)
    (copy / "ema.safetensors").write_bytes(huge)
    committed(copy)
    copy = folder("a committed state that is none", checkpoint)
    (copy / "state.json").write_text('{"denoiser": 3, "sampling": {"prompts": ["a"]}}')
    committed(copy)
    copy = folder("a damaged checkpoint", checkpoint)
    (copy / "ema.safetensors").write_bytes((copy / "ema.safetensors").read_bytes()[:-1] + b"\x00\x01")
    return folders


def test_hostile_and_damaged_folders_are_refused_and_nothing_of_theirs_runs(run: Path, tmp_path: Path) -> None:
    folders = hostile_folders(run, tmp_path / "hostile")
    sample = [
        [
            "sample",
            "--checkpoint",
            str(folder),
            "--prompts",
            "a car",
            "--output_dir",
            str(tmp_path / "out"),
            "--nproc",
            "1",
        ]
        for folder in folders.values()
    ]
    begin = [
        train(tmp_path / f"new_{number}", nproc=1, model=folder) for number, folder in enumerate(folders.values())
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", MANY, json.dumps(sample + begin)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = done.stderr.split("== ")[1:]
    wrong = {
        f"{'sample' if number < len(folders) else 'train'} {list(folders)[number % len(folders)]}": (code, said[number])
        for number, code in enumerate(json.loads(done.stdout.splitlines()[-1]))
        if code != 2 or "Traceback" in said[number] or "expected:" not in said[number]
    }
    assert not wrong, "\n".join(f"{name}: exit code {code}\n{words}" for name, (code, words) in wrong.items())
    assert not (tmp_path / "hostile" / "the-canary").exists()
    pickle.loads(pickle.dumps(Payload(tmp_path / "hostile" / "the-canary")))
    assert (tmp_path / "hostile" / "the-canary").exists(), "the payload would have worked"


@pytest.mark.slow
def test_a_run_whose_newest_checkpoint_is_damaged_says_so_and_goes_on_from_the_one_before(
    tmp_path: Path,
) -> None:
    words = train(tmp_path / "run", nproc=1, n_steps=4, ckpt_every=1)
    assert finish(halation(words), tmp_path / "log") == 0, (tmp_path / "log").read_text()
    wanted = checker.bits(tmp_path / "run" / "checkpoints" / "step_0000004")
    victim = tmp_path / "run" / "checkpoints" / "step_0000004" / "optimizer.safetensors"
    data = bytearray(victim.read_bytes())
    data[-100] ^= 1
    victim.write_bytes(data)
    assert finish(halation(words), tmp_path / "second") == 0
    said = (tmp_path / "second").read_text()
    assert "step_0000004 is damaged: optimizer.safetensors does not have the SHA-256 it was saved with" in said
    assert "set aside as" in said
    assert checker.bits(tmp_path / "run" / "checkpoints" / "step_0000004") == wanted
    assert len(list((tmp_path / "run" / "checkpoints").glob("damaged_step_0000004_*"))) == 1
    assert "going on from step 3" in (tmp_path / "run" / "logs" / "train.log").read_text()
    assert commands.last_step(tmp_path / "run") == 4
