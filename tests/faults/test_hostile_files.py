"""Foreign files run no code and exhaust no resources; damage is named; secrets stay out."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import halation as halation_package
from support import commands, run_readers
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
    assert run_readers.checkpoint_problem(folder) is None
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
def test_a_run_with_only_damaged_checkpoints_is_refused_without_start_over(tmp_path: Path) -> None:
    """A run with only damaged checkpoints is refused until it is told to start over."""
    checkpoints = tmp_path / "run" / "checkpoints"
    words = train(tmp_path / "run", nproc=1, n_steps=2, ckpt_every=1)
    assert finish(halation(words), tmp_path / "log") == 0, (tmp_path / "log").read_text()
    wanted = run_readers.checkpoint_digests(checkpoints / "step_0000002")
    for state in checkpoints.glob("step_*/state.json"):
        state.write_text("{}")
    before = {path: path.stat().st_mtime_ns for path in checkpoints.rglob("*")}
    for log in ("second", "third"):
        assert finish(halation(words), tmp_path / log) == 2
        said = (tmp_path / log).read_text()
        assert "is valid; damaged: step_0000002, step_0000001" in said
        assert "--restart" in said
        assert "Traceback" not in said
    assert {path: path.stat().st_mtime_ns for path in checkpoints.rglob("*")} == before
    assert commands.last_step(tmp_path / "run") == 2, "what was learned is still told"
    assert finish(halation([*words, "--restart"]), tmp_path / "fourth") == 0, (tmp_path / "fourth").read_text()
    assert "starting over at step 0" in (tmp_path / "run" / "logs" / "train.log").read_text()
    assert run_readers.checkpoint_digests(checkpoints / "step_0000002") == wanted
    assert len(list(checkpoints.glob("damaged_step_*"))) == 2
    assert finish(halation([*words, "--restart"]), tmp_path / "fifth") == 0
    assert (tmp_path / "run" / "logs" / "train.log").read_text().count("starting over at step 0") == 1


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_used(
    tmp_path: Path,
) -> None:
    """A damaged newest checkpoint is reported, and the run resumes from the one before."""
    words = train(tmp_path / "run", nproc=1, n_steps=4, ckpt_every=1)
    assert finish(halation(words), tmp_path / "log") == 0, (tmp_path / "log").read_text()
    wanted = run_readers.checkpoint_digests(tmp_path / "run" / "checkpoints" / "step_0000004")
    victim = tmp_path / "run" / "checkpoints" / "step_0000004" / "optimizer.safetensors"
    data = bytearray(victim.read_bytes())
    data[-100] ^= 1
    victim.write_bytes(data)
    assert finish(halation(words), tmp_path / "second") == 0
    said = (tmp_path / "second").read_text()
    assert "step_0000004 is damaged: optimizer.safetensors does not have the SHA-256 it was saved with" in said
    assert "damaged checkpoint renamed to" in said
    assert run_readers.checkpoint_digests(tmp_path / "run" / "checkpoints" / "step_0000004") == wanted
    assert len(list((tmp_path / "run" / "checkpoints").glob("damaged_step_0000004_*"))) == 1
    assert "resuming from step 3" in (tmp_path / "run" / "logs" / "train.log").read_text()
    assert commands.last_step(tmp_path / "run") == 4


MAX_BYTES = 2 << 30
MAX_S = 30.0
DEADLINE_S = 90.0
"""The law is 30 s of processor time; a busy machine may take longer by the clock."""
BUNDLED = Path(halation_package.__file__).parent / "models" / "bundled" / "streets-64"


class Ended(NamedTuple):
    """How a command ended that was watched: `peak` and `cpu_s` are of the largest and of all its processes."""

    code: int
    said: str
    peak: int
    cpu_s: float


def watched(words: list[str], folder: Path) -> Ended:
    """A command as a process, killed beyond the memory limit or the deadline to protect the machine."""
    log = folder / "said"
    usage = folder / "usage"
    script = (
        "import resource, subprocess, sys\n"
        "code = subprocess.run(sys.argv[2:]).returncode\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "open(sys.argv[1], 'w').write(f'{code} {used.ru_maxrss * 1024} {used.ru_utime + used.ru_stime}')\n"
    )
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(usage), *halation(words)],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    end = time.monotonic() + DEADLINE_S
    try:
        while process.poll() is None:
            assert time.monotonic() < end, f"no end after {DEADLINE_S} s: {log.read_text()[-2000:]}"
            size = group_memory(process.pid)
            assert size < MAX_BYTES + (1 << 30), f"{size >> 20} MiB and growing: {log.read_text()[-2000:]}"
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    code, peak, cpu_s = usage.read_text().split()
    return Ended(int(code), log.read_text(errors="replace"), int(peak), float(cpu_s))


def group_memory(group: int) -> int:
    """The resident memory of the largest process of a session."""
    sizes = [0]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == group:
                sizes.append(int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))
    return max(sizes)


def refused(words: list[str], folder: Path, *parts: str) -> Ended:
    """One error with exit code 2, all `parts` in it, within the limits on memory and time."""
    ended = watched(words, folder)
    assert ended.code == 2, f"exit code {ended.code}: {ended.said[-3000:]}"
    assert "Traceback" not in ended.said
    assert "expected:" in ended.said
    assert len(ended.said) < 4000, "messages are short"
    for part in parts:
        assert part in ended.said, ended.said
    assert ended.peak < MAX_BYTES, f"{ended.peak >> 20} MiB"
    assert ended.cpu_s < MAX_S, f"{ended.cpu_s} s"
    return ended


def generate(prompts: Path | str, folder: Path, **settings: object) -> list[str]:
    flags = {"prompts": prompts, "model_path": "testcard", "height": 32, "width": 32, "nproc": 1, "progress": "none"}
    flags |= {"output_dir": folder / "out"} | settings
    return ["generate", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]


def evaluate(images: Path, folder: Path, *words: str) -> list[str]:
    reference = [] if "--reference" in words else ["--reference", "streets", "--num_reference", "20"]
    flags = ["--metrics", "fd", "--allow_few", "--nproc", "1", "--cache_dir", str(folder / "cache")]
    return ["evaluate", "--generated", str(images), *reference, *flags, *words]


def images_in(folder: Path, num: int = 12) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(num):
        pixels = np.random.default_rng(index).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:02}.png")
    return folder


@contextlib.contextmanager
def special_file(path: Path, kind: str) -> Iterator[None]:
    """A file of this name that no reader comes to the end of."""
    with contextlib.ExitStack() as stack:
        match kind:
            case "pipe":
                os.mkfifo(path)
            case "device":
                path.symlink_to("/dev/zero")
            case "socket":
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(str(path))
        yield


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("pipe", "a named pipe"),
        pytest.param("device", "a device", marks=pytest.mark.slow),
        pytest.param("socket", "a socket", marks=pytest.mark.slow),
    ],
)
def test_evaluate_refuses_what_is_no_regular_file_among_the_images(tmp_path: Path, kind: str, words: str) -> None:
    images = images_in(tmp_path / "images")
    with special_file(images / "x.png", kind):
        refused(evaluate(images, tmp_path), tmp_path, "x.png", words)


def labeled(folder: Path, kind: str) -> Path:
    """Images with captions in a table, or in class folders."""
    images_in(folder / ("" if kind == "table" else "cars"))
    if kind == "table":
        names = [*(f"{index:02}.png" for index in range(12)), "x.png"]
        (folder / "metadata.csv").write_text("file_name,text\n" + "".join(f"{name},a car\n" for name in names))
        return folder
    return folder / "cars"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("layout", ["table", "classes"])
def test_train_refuses_what_is_no_regular_file_among_the_images(tmp_path: Path, kind: str, layout: str) -> None:
    place = labeled(tmp_path / "data", layout)
    with special_file(place / "x.png", kind):
        words = train(tmp_path / "run", nproc=1, data=tmp_path / "data")
        refused(words, tmp_path, "x.png", "a named pipe" if kind == "pipe" else "a device")


@pytest.mark.slow
def test_links_among_images_stay_in_the_folder_unless_they_are_allowed_to_leave(tmp_path: Path) -> None:
    images, beside = images_in(tmp_path / "images"), images_in(tmp_path / "beside", 1)
    (images / "inside.png").symlink_to("00.png")
    (images / "x.png").symlink_to(beside / "00.png")
    (tmp_path / "typed").symlink_to(images)
    ended = refused(evaluate(tmp_path / "typed", tmp_path), tmp_path, "x.png: it is a link that leads out of")
    assert "inside.png" not in ended.said
    ended = watched(evaluate(tmp_path / "typed", tmp_path, "--follow_links"), tmp_path)
    assert ended.code == 0, ended.said
    assert "14 images" in ended.said


@pytest.mark.slow
def test_evaluate_says_which_images_it_leaves_out(tmp_path: Path) -> None:
    images = images_in(tmp_path / "images")
    for name in ("x.gif", "y.bmp"):
        Image.new("RGB", (64, 64)).save(images / name)
    ended = watched(evaluate(images, tmp_path), tmp_path)
    assert ended.code == 0, ended.said
    assert "2 images are left out" in ended.said
    assert "x.gif and 1 more" in ended.said
    assert "12 images of" in ended.said
    assert "2 images of other formats ignored" in ended.said


def model(folder: Path, change: Callable[[dict[str, Any]], object] = lambda config: None) -> Path:
    shutil.copytree(BUNDLED, folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def one_prompt(folder: Path) -> Path:
    (folder / "prompts.txt").write_text("a street\n")
    return folder / "prompts.txt"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_config_of_a_model_that_is_no_regular_file_is_refused(tmp_path: Path, kind: str) -> None:
    folder = model(tmp_path / "model")
    (folder / "config.json").unlink()
    with special_file(folder / "config.json", kind):
        words = generate(one_prompt(tmp_path), tmp_path, model_path=folder)
        refused(words, tmp_path, "config.json", "a named pipe" if kind == "pipe" else "a device")


ABSURD: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a height that is text": (lambda config: config["sampling"].update(height="x"), 'height is "x"'),
    "no heads": (lambda config: config["config"].update(heads=0), "heads is 0"),
    "20000 blocks": (lambda config: config["config"].update(depth=20_000), "depth is 20000"),
    "500 blocks that are not there": (lambda config: config["config"].update(depth=500), "does not fit the model"),
    "a width that its weights have not": (lambda config: config["config"].update(hidden=15_360), "does not fit"),
    "prompts of 10**9 tokens": (lambda config: config["config"].update(max_tokens=10**9), "max_tokens is 1000000000"),
    "a tokenizer of 10**9 tokens": (
        lambda config: config["tokenizer"].update(max_tokens=10**9), "max_tokens is 1000000000",
    ),
    "an image of 2**40 pixels": (
        lambda config: config["config"].update(height=2**20, width=2**20), "height is 1048576",
    ),
    "a guidance that is none": (
        lambda config: config["sampling"].update(guidance_scale=None), "guidance_scale is null"
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ABSURD)
def test_absurd_numbers_in_a_models_config_are_refused_before_a_worker_is_started(tmp_path: Path, name: str) -> None:
    change, found = ABSURD[name]
    folder = model(tmp_path / "model", change)
    words = generate(one_prompt(tmp_path), tmp_path, model_path=folder, height=64, width=64)
    refused(words, tmp_path, found)
    assert not (tmp_path / "out" / "logs").exists(), "no worker was started"


def test_a_folder_of_pickles_is_refused_by_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("pytorch_model.bin", "model.pth", "last.ckpt"):
        (folder / name).write_bytes(pickle.dumps({}))
    (folder / "config.json").write_text("{}")
    words = generate(one_prompt(tmp_path), tmp_path, model_path=folder)
    refused(words, tmp_path, "last.ckpt, model.pth, pytorch_model.bin", "convert it to safetensors")


def test_a_record_of_a_run_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("[" * 100_000)
    refused(train(tmp_path / "run", nproc=1), tmp_path, "config.json", "nested deeper")


def npy_header(*shape: int) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return stream.getvalue()


@pytest.mark.slow
def test_statistics_that_unpack_to_gigabytes_are_refused(tmp_path: Path) -> None:
    num = 20_480
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr("mu.npy", npy_header(num) + bytes(8 * num))
        with file.open("sigma.npy", "w", force_zip64=True) as member:
            member.write(npy_header(num, num))
            for _ in range(num // 512):
                member.write(bytes(8 * num * 512))
    words = evaluate(images_in(tmp_path / "images"), tmp_path, "--reference", str(tmp_path / "bomb.npz"))
    refused([*words, "--extractor", "streets"], tmp_path, "bomb.npz", "an array sigma of shape (20480, 20480)")


@pytest.mark.slow
def test_statistics_whose_header_is_a_lie_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "lie.npz", "w") as file:
        file.writestr("mu.npy", npy_header(10**12) + bytes(512))
        file.writestr("sigma.npy", npy_header(64, 64) + bytes(64 * 64 * 8))
    words = evaluate(images_in(tmp_path / "images"), tmp_path, "--reference", str(tmp_path / "lie.npz"))
    refused([*words, "--extractor", "streets"], tmp_path, "lie.npz", "an array mu of shape (1000000000000,)")


@pytest.mark.slow
def test_parquet_files_that_unpack_to_gigabytes_are_refused(tmp_path: Path) -> None:
    text = "x" * 10**6
    pq.write_table(pa.table({"prompt": pa.array([text] * 2000)}), tmp_path / "dictionary.parquet", compression="zstd")
    refused(generate(tmp_path / "dictionary.parquet", tmp_path), tmp_path, "dictionary.parquet, line 537: more than")
    schema = pa.schema([("prompt", pa.string())])
    with pq.ParquetWriter(tmp_path / "rows.parquet", schema, compression="zstd", use_dictionary=False) as writer:
        for index in range(100):
            writer.write_table(pa.table({"prompt": [f"{index} {text}"] * 10}))
    refused(generate(tmp_path / "rows.parquet", tmp_path), tmp_path, "rows.parquet", "unpack to more than 512 MiB")


def test_long_prompts_and_wide_tables_are_refused_by_their_line(tmp_path: Path) -> None:
    columns = 100_000
    (tmp_path / "wide.csv").write_text("prompt" + ",c" * columns + "\n" + "x" + ",x" * columns + "\n")
    refused(generate(tmp_path / "wide.csv", tmp_path), tmp_path, "wide.csv, line 1: 100001 columns")
    (tmp_path / "long.txt").write_text("a\n" + "x" * 10**7 + "\n")
    refused(generate(tmp_path / "long.txt", tmp_path), tmp_path, "long.txt, line 2: 'prompt' has 10000000 characters")
    (tmp_path / "long.csv").write_text("prompt\na\n" + "x" * 10**7 + "\n")
    refused(generate(tmp_path / "long.csv", tmp_path), tmp_path, "long.csv, line 3: 'prompt' has 10000000 characters")
    (tmp_path / "long.jsonl").write_text('{"prompt": "a"}\n' + json.dumps({"prompt": "x" * 10**7}) + "\n")
    refused(generate(tmp_path / "long.jsonl", tmp_path), tmp_path, "long.jsonl, line 2: 'prompt' has 10000000")


@pytest.mark.slow
def test_limits_are_raised_by_one_flag_that_is_no_part_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("a street\n" + "x" * (3 << 20) + "\n")
    words = generate(tmp_path / "long.txt", tmp_path, num_samples=1)
    assert watched([*words, "--input_limits", "4"], tmp_path).code == 0
    assert "input_limits" not in (tmp_path / "out" / "config.json").read_text()
    words[words.index("--num_samples") + 1] = "2"
    refused(words, tmp_path, "long.txt, line 2")
    ended = watched([*words, "--input_limits=8"], tmp_path)
    assert ended.code == 0, ended.said
    refused([*words, "--input_limits", "many"], tmp_path, "--input_limits many")


def test_a_device_that_is_typed_as_the_prompt_list_is_refused_at_once(tmp_path: Path) -> None:
    words = generate("/dev/zero", tmp_path, prompts_format="txt")
    refused(words, tmp_path, "/dev/zero is not read: it is a device, not a regular file")


@pytest.mark.slow
def test_standard_input_without_an_end_is_refused(tmp_path: Path) -> None:
    words = generate("-", tmp_path)
    script = "import sys\nfrom halation.cli import main\nsys.stdin = open('/dev/zero')\nsys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2, done.stderr
    assert "standard input is not read: it has more than 512 MiB" in done.stderr


def test_messages_about_tables_are_short_and_name_the_encoding(tmp_path: Path) -> None:
    (tmp_path / "name.csv").write_text("x" * 5_000_000 + ",y\n1,2\n")
    refused(generate(tmp_path / "name.csv", tmp_path), tmp_path, "name.csv, line 1", "no prompt column")
    (tmp_path / "wide.txt").write_bytes("a street\n".encode("utf-32"))
    refused(generate(tmp_path / "wide.txt", tmp_path), tmp_path, "UTF-32 text")
    (tmp_path / "marks.csv").write_bytes(b"\xef\xbb\xbf\xef\xbb\xbfprompt\na\n")
    ended = refused(generate(tmp_path / "marks.csv", tmp_path), tmp_path, "two byte order marks")
    assert "\ufeff" not in ended.said
