"""Digests of every result file of the commands, by case and platform.

Modules may move and be renamed; flags, exit codes, file formats and result bytes may not change. A case runs commands
of a source tree in an empty folder. `digests` reduces the folder to one SHA-256 a file, without times, rates, versions
and paths.

    python tests/support/frozen.py record [CASE ...]           write the digests of this platform to hashes.json
    python tests/support/frozen.py check [CASE ...]            run the cases and compare them with what was recorded
    python tests/support/frozen.py compare TREE [CASE ...]     run the cases with this tree and another one, on any CPU
    python tests/support/frozen.py begin                       make the run folders in tests/frozen/runs anew

The cases use the command line in child processes, so that they do not depend on module names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

TREE = Path(__file__).parents[2]
FROZEN = Path(__file__).parents[1] / "frozen"
HASHES = FROZEN / "hashes.json"
MODEL = FROZEN / "model"
RUNS = FROZEN / "runs"
ORIGIN = RUNS / "origin.json"
"""The commit, the platform and the library versions that the stopped runs were begun with."""
PORTABLE = f"any CPU, zlib {zlib.ZLIB_RUNTIME_VERSION}"
"""The platform of cases whose results are integers, text and PNG: equal on every CPU, for one version of zlib."""
TIMEOUT_S = 200

# -- commands

NOT_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HALATION_DEVICE", "HALATION_RENDEZVOUS")
FIXED_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "COLUMNS": "200",
    "NO_COLOR": "1",
}


def environment(place: Path, tree: Path = TREE) -> dict[str, str]:
    """The variables of a child process that runs the code of `tree` on a CPU and keeps its cache in `place`."""
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    own = {"PYTHONPATH": str(tree / "src"), "HALATION_CACHE": str(place / "cache")}
    return inherited | FIXED_ENVIRONMENT | own


def start(words: Sequence[str], place: Path, tree: Path = TREE, fault: str = "") -> subprocess.Popen[str]:
    """`halation WORDS` of a source tree as a child process in the folder `place`."""
    variables = environment(place, tree) | ({"HALATION_FAULT": fault} if fault else {})
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "halation.cli", *words],
        cwd=place,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that ended: its exit code and what it printed."""

    code: int
    out: str
    errors: str


def run(words: Sequence[str], place: Path, tree: Path = TREE) -> Ended:
    """`halation WORDS` to its end."""
    process = start(words, place, tree)
    try:
        out, errors = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return Ended(code=process.returncode, out=out, errors=errors)


# -- digests

VOLATILE_KEYS = {
    *("time", "time_s", "seconds", "seconds_painting", "data_s", "started", "changed", "since", "left_s"),  # times
    *("pictures_per_s", "per_s", "rate", "busy_share", "mfu", "memory_gb"),  # rates and memory
    *("host", "pid", "start", "token"),  # machines and processes
    "versions",  # of libraries
    *("digest", "outcome_check"),  # of other fields, including times
    *("lines", "v"),  # of a page: the lines of a log, and the version of an image by the time of its file
}
"""Keys of JSON objects, and columns of a ledger, whose values differ from run to run."""
EMBEDDED = re.compile(r'(<script type="application/json" id="embedded">)(.*?)(</script>)', re.DOTALL)
SOURCE = re.compile(r"(.*/|)features/[0-9a-f]{24}/")
LEDGER_DIGEST = "ledger.sha256"
"""Of a file that holds times; it counts by its name alone."""
ONLY_NAMED = "logs"
"""Files in a folder of this name, and logs elsewhere, count by their names alone: their lines begin with a time."""
UNORDERED_KEYS = {"sha256", "bytes"}
"""Objects of a checkpoint's COMMIT.json that list files in the order in which the ranks were done."""


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 by path of every file below a folder, of JSON, pages and ledgers without what differs from run to run."""
    words = {str(folder.resolve()): "<place>"}
    found = {
        path.relative_to(folder).as_posix(): hashlib.sha256(_content(path, folder, words)).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return _with_sources_named(found)


def _with_sources_named(found: Mapping[str, str]) -> dict[str, str]:
    """The same with folders of cached features named by what is in them: a key of files holds their paths and times."""
    contents: dict[str, list[str]] = {}
    for name, digest in found.items():
        if source := SOURCE.match(name):
            contents.setdefault(source[0], []).append(f"{name.removeprefix(source[0])} {digest}")
    words = {
        source: f"{source[:-25]}<{hashlib.sha256(_as_bytes(sorted(entries))).hexdigest()[:12]}>/"
        for source, entries in contents.items()
    }
    return {SOURCE.sub(lambda match: words[match[0]], name): digest for name, digest in found.items()}


def _content(path: Path, folder: Path, words: Mapping[str, str]) -> bytes:
    """The bytes of a file that may not change."""
    if ONLY_NAMED in path.relative_to(folder).parts[:-1] or path.suffix == ".log" or path.name == LEDGER_DIGEST:
        return b""
    match path.suffix:
        case ".json":
            return _as_bytes(normalised(json.loads(path.read_bytes()), words))
        case ".jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            return _as_bytes([normalised(row, words) for row in rows])
        case ".sqlite":
            return _as_bytes(normalised(_rows(path), words))
        case ".safetensors":
            return _tensors(path.read_bytes())
        case ".pth":
            return _as_bytes(_members(path))
        case ".html":
            return _page(path.read_text(), words).encode()
        case _:
            return path.read_bytes()


def normalised(value: Any, words: Mapping[str, str]) -> Any:
    """A JSON value without volatile keys, in whose texts each key of `words` is replaced by its value."""
    if isinstance(value, dict):
        return {
            normalised(key, words): normalised(
                dict(sorted(entry.items())) if key in UNORDERED_KEYS and isinstance(entry, dict) else entry, words
            )
            for key, entry in value.items()
            if not is_volatile(key, entry)
        }
    if isinstance(value, list):
        return [normalised(entry, words) for entry in value]
    if isinstance(value, str):
        for text, word in words.items():
            value = value.replace(text, word)
    return value


def is_volatile(key: str, value: Any) -> bool:
    """Whether a key of a JSON object may have another value in the next run: times, rates, hosts, versions."""
    # A format has a number as its version, a library a text.
    return key in VOLATILE_KEYS or key.endswith(" version") or (key == "version" and isinstance(value, str))


def _as_bytes(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=1).encode()


def _rows(path: Path) -> dict[str, Any]:
    """The tables of a ledger: their SQL and their rows by column."""
    with tempfile.TemporaryDirectory() as folder:  # to read a ledger leaves files beside it
        for file in path.parent.glob(f"{path.name}*"):
            shutil.copy(file, folder)
        connection = sqlite3.connect(Path(folder) / path.name)
        connection.row_factory = sqlite3.Row
        schema = connection.execute("SELECT name, type, sql FROM sqlite_master ORDER BY name").fetchall()
        tables = [row["name"] for row in schema if row["type"] == "table"]
        rows = {name: [dict(row) for row in connection.execute(f"SELECT * FROM {name} ORDER BY 1")] for name in tables}
        connection.close()
    return {"schema": [row["sql"] for row in schema], **rows}


def _tensors(data: bytes) -> bytes:
    """The bytes of a safetensors file with the entries of its metadata in order: the library's own is a random one."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if len(header.get("__metadata__", ())) < 2:
        return data
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    return _as_bytes(header) + data[8 + length :]


def _members(path: Path) -> dict[str, str]:
    """Digests of the files in an archive of torch.save, whose names begin with that of the temporary file it was."""
    with zipfile.ZipFile(path) as archive:
        names = {name.partition("/")[2]: name for name in archive.namelist()}
        kept = sorted(names.keys() - {".data/serialization_id"})  # a hash of the names
        return {name: hashlib.sha256(archive.read(names[name])).hexdigest() for name in kept}


def _page(text: str, words: Mapping[str, str]) -> str:
    """An exported page with its data normalised; runs are numbered, as ids depend on paths."""
    found = EMBEDDED.search(text)
    assert found is not None, "an exported page holds its data as JSON"
    data = json.loads(found[2])
    answers = data["responses"]
    told = [*answers["/api/runs"]["runs"], *answers["/api/scores"]["scores"], *answers["/api/scores"]["reports"]]
    ids = [entry[name] for entry in told for name in ("id", "run") if entry.get(name)]
    words = {**words, **{id_: f"<run {number}>" for number, id_ in enumerate(dict.fromkeys(ids))}}
    kept = json.dumps(normalised(data, words), ensure_ascii=False, indent=1)
    return text[: found.start(2)] + kept + text[found.end(2) :]


# -- cases


@dataclass(frozen=True, kw_only=True)
class Case:
    """Commands that run one after the other in an empty folder, and how their results are compared."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    portable: bool = False
    """Whether the results are equal on every CPU."""
    printed: bool = False
    """Whether the flags that the commands print belong to the results."""
    refused: bool = False
    """Whether commands are meant to be refused."""
    num_ranks: int = 1
    fast: bool = False
    """Whether it belongs to the fast tests; it then takes a few seconds."""
    begun: str = ""
    """Name of a stopped run that the command goes on with."""

    @property
    def platform(self) -> str:
        return PORTABLE if self.portable else platform()


PROMPTS = ("a red car in a city", "a rainy street at night", "three trees", "a highway with two cars", "a parking lot")
INPUTS = {
    "prompts.txt": "".join(f"{prompt}\n" for prompt in PROMPTS[:3]),
    "prompts.csv": "image_id,caption\n" + "".join(f"{10 + number},{text}\n" for number, text in enumerate(PROMPTS)),
    "student.json": json.dumps({"width": 4, "heads": 1, "depth": 1}),
}
SESSION = (
    *("--batch_size", "2", "--ckpt_every", "2", "--keep_last", "0", "--log_every", "1", "--sample_steps", "2"),
    *("--sample_prompts", *PROMPTS[:2], "--report_to", "none", "--progress", "none", "--max_restarts", "0"),
)
TRAIN = ("train", "--data", "streets", "--image_size", "32", "--patch_size", "8", "--validation_images", "4", *SESSION)
DISTILL = (
    *("distill", "--teacher_path", "model", "--data_path", "prompts.txt", "--teacher_steps", "4"),
    *("--teacher_states", "2", *SESSION),
)
GENERATE = ("generate", "--prompts_csv", "prompts.csv", "--batch_size", "2", "--nproc", "1", "--progress", "none")
CARDS = (*GENERATE, "--model_path", "testcard", "--height", "64", "--width", "64", "--png", "zlib")
EVALUATE = (
    *("evaluate", "--reference", "streets", "--num_reference", "16", "--allow_few", "--kid_subsets", "4"),
    *("--kid_subset_size", "4", "--batch_size", "4", "--nproc", "1", "--decode_workers", "0"),
    *("--cache_dir", "features", "--output", "report.json", "--progress", "none"),
)
COMMANDS = ("train", "distill", "sample", "generate", "evaluate", "watch", "ctl", "gallery", "demo", "doctor")


def _trained(engine: str, num_ranks: int) -> Case:
    words = (*TRAIN, "--model", "model", "--n_steps", "3", "--engine", engine, "--nproc", str(num_ranks))
    return Case(
        name=f"train_{engine}_{num_ranks}",
        commands=((*words, "--output_dir", "run"),),
        num_ranks=num_ranks,
    )


def _distilled(objective: str, *words: str, num_ranks: int = 1) -> Case:
    flags = (*DISTILL, "--objective", objective, "--n_steps", "4", "--nproc", str(num_ranks), *words)
    return Case(
        name=f"distill_{objective}",
        commands=((*flags, "--output_dir", "run"),),
        num_ranks=num_ranks,
    )


# -- runs that were begun by an older commit


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A command that was stopped midway; the folder it left is test data, and the same command goes on with it."""

    name: str
    words: tuple[str, ...]
    fault: str
    """Where the command sleeps while it is sent SIGTERM; see HALATION_FAULT."""
    until: str
    """Files by which it is known that the command has come so far."""
    before: tuple[str, ...] = ()
    """A command that runs to its end first."""
    portable: bool = False
    """Whether the results are equal on every CPU."""


BEGUN = {
    begun.name: begun
    for begun in (
        Begun(
            name="training",
            words=(*TRAIN, "--model", "model", "--n_steps", "4", "--output_dir", "run"),
            fault="train.step:2:sleep=4",
            until="run/metrics.jsonl",
        ),
        Begun(
            name="generation",
            words=(*CARDS, "--output_dir", "cards"),
            fault="paint:2:sleep=4",
            until="cards/*.png",
            portable=True,
        ),
        Begun(
            name="evaluation",
            before=(*CARDS, "--output_dir", "cards"),
            words=(*EVALUATE, "--generated", "cards"),
            fault="features:2:sleep=4",
            until="features/*/*/*.safetensors",
        ),
        Begun(
            name="distillation",
            words=(*DISTILL, "--student_config", "student.json", "--n_steps", "4", "--output_dir", "run"),
            fault="train.step:2:sleep=4",
            until="run/metrics.jsonl",
        ),
    )
}

CASES = {
    case.name: case
    for case in (
        Case(
            name="flags",
            commands=tuple((name, "--help_all") for name in COMMANDS),
            portable=True,
            printed=True,
            fast=True,
        ),
        Case(
            name="refusals",
            refused=True,
            commands=(
                ("paint",),
                ("train", "--no_such_flag", "1"),
                ("train", "--data", "nowhere", "--output_dir", "run"),
                ("generate", "--prompts_csv", "missing.csv", "--model_path", "testcard", "--output_dir", "run"),
                ("evaluate", "--generated", "missing", "--reference", "streets"),
                (*CARDS, "--num_samples", "1", "--output_dir", "cards"),
                (*CARDS, "--num_samples", "1", "--seed_start", "7", "--output_dir", "cards"),
            ),
            portable=True,
            fast=True,
        ),
        Case(
            name="cards",
            commands=((*CARDS, "--output_dir", "cards"), ("gallery", "cards", "--export", "page.html")),
            portable=True,
            fast=True,
        ),
        Case(
            name="train_tiny",
            commands=(
                (*TRAIN, "--model", "tiny", "--n_steps", "3", "--output_dir", "run"),
                ("gallery", "run", "--export", "page.html"),
            ),
            fast=True,
        ),
        *(_trained(engine, num_ranks) for engine in ("ddp", "fsdp") for num_ranks in (1, 2, 3)),
        Case(
            name="train_evaluated",
            commands=(
                (
                    *(*TRAIN, "--model", "model", "--n_steps", "2", "--nproc", "2", "--eval_every", "1"),
                    *("--eval_images", "16", "--eval_reference", "16", "--eval_steps", "2", "--output_dir", "run"),
                ),
            ),
            num_ranks=2,
        ),
        Case(
            name="generate_export",
            commands=(
                (*GENERATE, "--model_path", "model", "--num_inference_steps", "2", "--output_dir", "drawn"),
                (
                    *("sample", "--checkpoint", "model", "--prompts", *PROMPTS[:3], "--output_dir", "samples"),
                    *("--progress", "none"),
                ),
            ),
        ),
        Case(
            name="generate_scored",
            commands=(
                (*GENERATE, "--model_path", "streets-64-fast", "--output_dir", "drawn"),
                (*EVALUATE, "--generated", "drawn", "--save_statistics", "statistics.safetensors"),
                ("gallery", "drawn", "--export", "page.html"),
            ),
        ),
        Case(
            name="watched",
            commands=(
                (*TRAIN, "--model", "model", "--n_steps", "2", "--output_dir", "run"),
                (
                    *("watch", "run", "--once", "--prompts", "prompts.csv", "--reference", "streets"),
                    *("--num_reference", "16", "--metrics", "fd", "--allow_few", "--num_inference_steps", "2"),
                    *("--nproc", "1"),
                ),
                ("gallery", "run", "--export", "page.html"),
            ),
        ),
        _distilled("velocity", "--student_config", "student.json"),
        _distilled("trajectory", "--student_steps", "2"),
        _distilled("dmd", "--student_steps", "2", "--fake_updates", "1", num_ranks=2),
        *(
            Case(
                name=f"resumed_{begun.name}",
                commands=(begun.words,),
                begun=begun.name,
                portable=begun.portable,
                fast=begun.portable,
            )
            for begun in BEGUN.values()
        ),
    )
}


def lay_out(place: Path, begun: str = "") -> None:
    """The files that the commands of cases read, and the folder of a stopped run."""
    if begun:
        shutil.copytree(RUNS / begun, place, dirs_exist_ok=True)
    place.mkdir(parents=True, exist_ok=True)
    for name, text in INPUTS.items():
        (place / name).write_text(text)
    if MODEL.exists():
        shutil.copytree(MODEL, place / "model", dirs_exist_ok=True)


def other_versions(place: Path) -> list[str]:
    """Libraries whose versions are not those that a stopped run recorded, which it refuses to go on with."""
    fixed: dict[str, Any] = {}
    for path in place.glob("*/config.json"):
        fixed |= json.loads(path.read_bytes()).get("fixed", {})
    names = [key.removesuffix(" version") for key in fixed if key.endswith(" version")]
    return [name for name in names if version(name) != fixed[f"{name} version"]]


def going_on(words: Sequence[str], place: Path) -> list[str]:
    """The words of a stopped command, with the consent that it needs where library versions have changed."""
    return [*words, *(["--accept_changes"] if other_versions(place) else [])]


def results(case: Case, place: Path, tree: Path = TREE) -> dict[str, str]:
    """Run a case in an empty folder: its digests by file, and the exit code of each command."""
    lay_out(place)
    given = set(digests(place))
    if case.begun:
        lay_out(place, case.begun)
    found = {}
    for number, words in enumerate(case.commands):
        ended = run(going_on(words, place) if case.begun else words, place, tree)
        label = f"command {number} ({words[0]})"
        found[f"{label}: exit code"] = str(ended.code)
        if case.printed:
            flags = sorted(set(re.findall(r"--[a-z][a-z0-9_]*", ended.out)))
            found[f"{label}: flags"] = hashlib.sha256("\n".join(flags).encode()).hexdigest()
        elif ended.code and not case.refused:
            sys.stderr.write(f"{case.name}: {label} ended with {ended.code}:\n{ended.errors}\n")
    return found | {name: digest for name, digest in digests(place).items() if name not in given}


def platform() -> str:
    """What the bits of numeric results depend on: versions of torch and numpy, and the CPU with its kernels."""
    import torch

    fields = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    cpu = f"{fields.get('model name', 'unknown CPU')} ({fields.get('cpu family', '?')}/{fields.get('model', '?')})"
    kernels = torch.backends.cpu.get_cpu_capability()
    return f"torch {version('torch')}, numpy {version('numpy')}, {cpu}, {kernels}"


# -- how the model and the runs were made

SMALL_MODEL = (
    (
        *("train", "--data", "streets", "--model", "tiny", "--image_size", "32", "--patch_size", "8"),
        *("--batch_size", "8", "--n_steps", "60", "--lr", "1e-3", "--ckpt_every", "0", "--no_sample"),
        *("--report_to", "none", "--progress", "none", "--output_dir", "large"),
    ),
    (
        *("distill", "--teacher_path", "large", "--data_path", "streets", "--max_images", "64"),
        *("--student_config", "shape.json", "--batch_size", "8", "--n_steps", "200", "--lr", "1e-2"),
        *("--ema_decay", "0.9", "--teacher_states", "2", "--ckpt_every", "0", "--no_sample"),
        *("--report_to", "none", "--progress", "none", "--output_dir", "small"),
    ),
)
"""How the smallest model that the commands can make came about: 13,000 weights, which all reach the pixels."""
SMALL_SHAPE = {"width": 8, "heads": 1, "depth": 1, "text_width": 8}


def begin() -> int:
    """Make the model of the cases where it is missing, and the stopped runs anew."""
    if not MODEL.exists():
        _make_model()
    shutil.rmtree(RUNS, ignore_errors=True)
    for begun in BEGUN.values():
        with tempfile.TemporaryDirectory(prefix="halation_begun_") as name:
            place = Path(name)
            lay_out(place)
            given = {path.name for path in place.iterdir()} | {"cache"}
            code = stop_midway(begun, place)
            for path in place.iterdir():
                if path.name not in given:
                    shutil.copytree(path, RUNS / begun.name / path.name)
        _say(f"{begun.name}: ended with {code}")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=TREE, capture_output=True, text=True, check=True
    ).stdout.strip()
    versions = {name: version(name) for name in ("torch", "transformers", "numpy", "pillow", "safetensors")}
    origin = {"commit": commit, "platform": platform(), "versions": versions}
    ORIGIN.write_text(json.dumps(origin, indent=1) + "\n")
    return 0


def _make_model() -> None:
    with tempfile.TemporaryDirectory(prefix="halation_model_") as name:
        place = Path(name)
        (place / "shape.json").write_text(json.dumps(SMALL_SHAPE))
        for words in SMALL_MODEL:
            ended = run(words, place)
            assert ended.code == 0, ended.errors
        MODEL.mkdir(parents=True)
        for file in ("config.json", "model.safetensors"):
            (MODEL / file).write_bytes((place / "small" / "export" / file).read_bytes())


def stop_midway(begun: Begun, place: Path) -> int:
    """Run a command in `place` until it has come so far, and stop it by SIGTERM; its exit code."""
    if begun.before:
        assert run(begun.before, place).code == 0
    process = start(begun.words, place, fault=begun.fault)
    deadline = time.monotonic() + TIMEOUT_S
    while not any(path.stat().st_size for path in place.glob(begun.until)):
        assert process.poll() is None, f"{begun.name} ended before it could be stopped"
        assert time.monotonic() < deadline, f"{begun.name} did not come so far"
        time.sleep(0.02)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + signal.SIGTERM, errors
    return process.returncode


# -- records


def recorded() -> dict[str, dict[str, dict[str, str]]]:
    """What is recorded: digests by platform, case and file."""
    return dict(json.loads(HASHES.read_text())) if HASHES.exists() else {}


def record_of(case: Case) -> dict[str, str] | None:
    """The recorded digests of a case for this platform, or None."""
    return recorded().get(case.platform, {}).get(case.name)


def write_record(case: Case, found: Mapping[str, str]) -> None:
    """Add a case to the recorded ones; other cases and platforms stay."""
    known = recorded()
    known.setdefault(case.platform, {})[case.name] = dict(found)
    HASHES.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def difference(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """One line for each file that is not what it was."""
    lines = [f"missing: {name}" for name in sorted(before.keys() - after.keys())]
    lines += [f"new:     {name}" for name in sorted(after.keys() - before.keys())]
    changed = [name for name in sorted(before.keys() & after.keys()) if before[name] != after[name]]
    return lines + [f"changed: {name} ({before[name][:12]} -> {after[name][:12]})" for name in changed]


# -- command line


def _in_folders(cases: Iterable[Case], tree: Path) -> Iterator[tuple[Case, dict[str, str], float]]:
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="halation_frozen_") as place:
            began = time.monotonic()
            found = results(case, Path(place), tree)
            yield case, found, time.monotonic() - began


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _record(cases: Sequence[Case]) -> int:
    for case, found, seconds in _in_folders(cases, TREE):
        if not case.refused and any(name.endswith("exit code") and code != "0" for name, code in found.items()):
            raise SystemExit(f"{case.name} failed, and is not recorded")
        write_record(case, found)
        _say(f"{case.name}: {len(found)} entries recorded for {case.platform} ({seconds:.1f} s)")
    return 0


def _check(cases: Sequence[Case]) -> int:
    failures = 0
    for case, found, seconds in _in_folders(cases, TREE):
        known = record_of(case)
        lines = difference(known, found) if known is not None else [f"nothing is recorded for {case.platform}"]
        failures += bool(lines)
        _say("\n  ".join([f"{case.name}: {'differs' if lines else 'equal'} ({seconds:.1f} s)", *lines]))
    return 1 if failures else 0


def _compare(other: Path, cases: Sequence[Case]) -> int:
    if not (other / "src" / "halation").is_dir():
        raise SystemExit(f"{other} is no source tree of Halation: it has no src/halation")
    failures = 0
    for case, found, seconds in _in_folders(cases, TREE):
        (_, theirs, their_seconds) = next(_in_folders([case], other.resolve()))
        lines = difference(theirs, found)
        failures += bool(lines)
        head = f"{case.name}: {'differs' if lines else 'equal'} ({their_seconds:.1f} s and {seconds:.1f} s)"
        _say("\n  ".join([head, *lines]))
    return 1 if failures else 0


def main(words: Sequence[str] | None = None) -> int:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="frozen.py", description="Freeze what the commands leave behind.")
    actions = parser.add_subparsers(dest="action", required=True)
    for name in ("record", "check", "compare"):
        action = actions.add_parser(name)
        if name == "compare":
            action.add_argument("tree", type=Path)
        action.add_argument("cases", nargs="*", metavar="CASE", help=f"by default all: {', '.join(CASES)}")
    actions.add_parser("begin")
    given = parser.parse_args(words)
    if given.action == "begin":
        return begin()
    unknown = [name for name in given.cases if name not in CASES]
    if unknown:
        parser.error(f"there is no case {', '.join(unknown)}; known: {', '.join(CASES)}")
    cases = [CASES[name] for name in given.cases or CASES]
    if given.action == "compare":
        return _compare(given.tree, cases)
    return _record(cases) if given.action == "record" else _check(cases)


if __name__ == "__main__":
    sys.exit(main())
