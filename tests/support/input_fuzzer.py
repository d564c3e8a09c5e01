"""Feeds damaged and invented files to every reader of user files, and keeps findings.

`python tests/support/input_fuzzer.py --minutes 60 --seed 7` runs it for an hour. A reader may accept a file or refuse
it with one of its documented errors. Any other error, 30 s, or 2 GiB more memory is a finding, which is written to
`tests/faults/corpus` under the name of its reader. `tests/faults/test_fuzz_inputs.py` replays that folder, and runs the
fuzzer for two minutes in the slow suite.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import hashlib
import io
import json
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from halation.config import load_settings
from halation.data import decode
from halation.data.image_annotations import read_folder
from halation.data.row_cache import RowFolder
from halation.distributed.checkpoint.writer import commit_sha256, find_damage, list_committed
from halation.errors import HalationError
from halation.evaluation.metrics.moments import Moments
from halation.evaluation.saved_statistics import read_statistics, write_statistics
from halation.gallery import run_file_reader
from halation.generation.config import GenerateConfig
from halation.generation.image_requests import ImageRequest
from halation.generation.ledger import ImageOutcome, Ledger
from halation.images.png_codec import encode_png, read_png
from halation.models.checkpoint_loading import check_model, find_checkpoint, load_export
from halation.prompt_files import PromptFile
from halation.runs import run_folder as runs
from halation.sample_specs import SampleSpec

CORPUS = Path(__file__).resolve().parents[1] / "faults" / "corpus"
MAX_SECONDS = 30
_STATE = b'{"denoiser": {"family": "dit"}}'
MAX_GROWTH_BYTES = 2 << 30
EXAMPLES_PER_ROUND = 200
Bytes = st.SearchStrategy[bytes]


class TooSlow(BaseException):
    """Not an Exception: no reader may swallow it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reader:
    """One kind of file: how it is called, what good ones hold, and who reads it."""

    file_name: str
    seeds: Callable[[], Sequence[bytes]]
    read: Callable[[Path], object]
    errors: tuple[type[Exception], ...] = (HalationError,)
    invented: Bytes | None = None
    """Contents that are made up rather than damaged."""


# -- what good files hold


def _tables() -> list[bytes]:
    return [
        b'image_id,prompt,seed\n1,a street,5\n2,"two, quoted\nlines",7\n',
        "prompt\té\nx\ty\n".encode(),
        b"prompt,height,width,num_inference_steps,guidance_scale\na,64,64,3,7.5\n",
        b"prompt\r\na\r\nb\r\n",
    ]


def _parquets() -> list[bytes]:
    found = []
    table = pa.table({"image_id": ["1", "2", "3"], "prompt": ["a", "b" * 300, "é"], "seed": [1, 2, 3]})
    for options in ({"compression": "zstd"}, {"compression": "none", "use_dictionary": False}, {"version": "1.0"}):
        buffer = io.BytesIO()
        pq.write_table(table, buffer, **options)
        found.append(buffer.getvalue())
    return found


def _images() -> list[bytes]:
    pixels = (np.arange(48 * 32 * 3) % 251).astype(np.uint8).reshape(32, 48, 3)
    found = [encode_png(pixels, {"halation": '{"prompt": "a"}', "parameters": "x" * 100})]
    for format, mode in (
        ("JPEG", "RGB"),
        ("WEBP", "RGB"),
        ("PNG", "P"),
        ("PNG", "RGBA"),
        ("PNG", "I;16"),
        ("JPEG", "CMYK"),
    ):
        buffer = io.BytesIO()
        image = Image.fromarray(pixels)
        (Image.fromarray(pixels[..., 0].astype(np.uint16)) if mode == "I;16" else image.convert(mode)).save(
            buffer, format
        )
        found.append(buffer.getvalue())
    return found


def _npzs() -> list[bytes]:
    found = []
    for savez in (np.savez, np.savez_compressed):
        buffer = io.BytesIO()
        savez(buffer, mu=np.zeros(8), sigma=np.eye(8))
        found.append(buffer.getvalue())
    return found


def _statistics() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        moments = Moments(num=9, mean=np.zeros(4), scatter=np.eye(4))
        write_statistics(path, moments, np.zeros((9, 4), np.float32), {"extractor": "streets"})
        return [path.read_bytes(), save({"x": np.zeros((2, 3), np.float32)})]


@functools.cache
def _ledger_bytes() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        with Ledger(path) as ledger:
            ledger.add_plan(
                (
                    ImageRequest(
                        spec=SampleSpec(
                            index=index, id=str(index), prompt=f"prompt {index}", seed=index, height=16,
                            width=16, steps=2,
                            guidance_scale=1.0,
                        ),
                        name=f"{index}_seed{index}",
                    )
                    for index in range(30)
                ),
                {"plan": {"limit": 0}},
            )  # fmt: skip
            ledger.record(
                ImageOutcome(index=index, state="done", sha256=f"{index:064x}", num_bytes=9) for index in range(20)
            )
        return path.read_bytes()


@functools.cache
def _model_folder() -> Path:
    from support import rank_functions

    return rank_functions.tiny_teacher()


def _model_file(name: str) -> list[bytes]:
    return [(_model_folder() / name).read_bytes()]


# -- who reads them


def _read_prompts(path: Path) -> None:
    for _ in PromptFile.open(str(path)).rows():
        pass


def _read_annotations(path: Path) -> None:
    (path.parent / "a.png").write_bytes(_images()[0])
    read_folder(path.parent)


def _read_image(path: Path) -> None:
    with contextlib.suppress(decode.BrokenImageError):
        decode.verify_image(path, 32, 32)
    decode.decode(path, 32, 32)


def _read_statistics(path: Path) -> None:
    read_statistics([path], {"num_features": 8 if path.suffix == ".npz" else 4, "extractor": "streets"})


def _read_ledger(path: Path) -> None:
    with Ledger(path) as ledger:
        if not ledger.find_damage():
            for row in ledger.rows():
                assert row.request.spec.prompt == f"prompt {row.request.spec.index}", (
                    "a damaged row passed for a good one"
                )


def _read_record(path: Path) -> None:
    run_file_reader.read_record(path.parent)
    run_file_reader.find_read_error(path)
    runs.read_record(runs.RunFolder(path.parent))


def _read_metrics(path: Path) -> None:
    runs.MetricsFile(path).read_rows()


def _read_settings(path: Path) -> None:
    load_settings(GenerateConfig, path)


def _read_model(path: Path) -> None:
    """The file in the place of the one of that name in a good model."""
    for other in _model_folder().iterdir():
        if other.name != path.name:
            shutil.copy(other, path.parent)
    check_model(path.parent, raw=False)
    load_export(path.parent)


def _commits() -> list[bytes]:
    """Of a checkpoint with one part, which `_read_checkpoint` puts beside it."""
    sums = {"state.json": hashlib.sha256(_STATE).hexdigest()}
    commit = {"step": 20, "kind": "train", "sha256": sums, "world_size": 1}
    return [json.dumps(commit | {"seal": commit_sha256(commit)}).encode()]


def _read_checkpoint(path: Path) -> None:
    (path.parent / "state.json").write_bytes(_STATE)
    find_damage(path.parent)
    list_committed(path.parent.parent)
    find_checkpoint(path.parent)


def _read_cache(path: Path) -> None:
    RowFolder(path.parent, "texts", 1).check_fingerprint({"model": "a"})


HOSTILE_VALUES = st.sampled_from(
    [
        0,
        -1,
        1,
        3,
        2**31,
        2**63,
        10**9,
        10**400,
        1e308,
        -0.5,
        "x",
        "",
        None,
        True,
        [],
        {},
        [[]],
        "1" * 5000,
        "../../x",
        "NaN",
    ]
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | HOSTILE_VALUES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def _changed_json(draw: st.DrawFn, source: Callable[[], Sequence[bytes]]) -> bytes:
    """A good JSON object with some of its values, wherever they are, replaced by hostile ones."""
    value = json.loads(draw(st.sampled_from(source())))
    for _ in range(draw(st.integers(1, 3))):
        place = value
        while isinstance(place, dict | list) and place:
            key = draw(st.sampled_from(sorted(place)) if isinstance(place, dict) else st.integers(0, len(place) - 1))
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or draw(st.booleans()):
                place[key] = copy.deepcopy(draw(HOSTILE_VALUES | JSON_VALUES))  # it may be changed further down
                break
            place = inner
    if draw(st.booleans()) and isinstance(value, dict) and "digest" in value:
        value["digest"] = runs.json_digest(value)  # a file made on purpose
    return json.dumps(value).encode()


CELLS = st.text(max_size=12) | st.sampled_from(
    [
        '"',
        '""',
        '"a',
        "\n",
        "\r",
        "\t",
        ",",
        "\ufeff",
        "\0",
        "1e999",
        "-1",
        "nan",
        "9" * 40,
        "../x",
        "x" * 3000,
        "\u202e",
        "=1+1",
    ]
)
COLUMN_NAMES = (
    st.sampled_from(["prompt", "image_id", "seed", "height", "width", "guidance_scale", "file_name", "text"]) | CELLS
)


@st.composite
def _invented_table(draw: st.DrawFn) -> bytes:
    rows = [
        draw(st.lists(COLUMN_NAMES, min_size=1, max_size=5)),
        *draw(st.lists(st.lists(CELLS, max_size=6), max_size=8)),
    ]
    separator, end = draw(st.sampled_from([",", "\t", ";"])), draw(st.sampled_from(["\n", "\r\n", "\r"]))
    text = end.join(separator.join(row) for row in rows)
    return text.encode(draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"])), "surrogatepass")


@st.composite
def _invented_lines(draw: st.DrawFn) -> bytes:
    keys = st.sampled_from(
        ["prompt", "seed", "image_id", "file_name", "text", "height", "step", "metric", "value", "loss"]
    )
    rows = draw(st.lists(st.dictionaries(keys, JSON_VALUES, max_size=4) | JSON_VALUES, max_size=6))
    return "\n".join(json.dumps(row) for row in rows).encode()


def _yaml_bomb() -> bytes:
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{number}: &a{number} [{','.join([f'*a{number - 1}'] * 9)}]" for number in range(1, 9)]
    return ("\n".join(lines) + "\nheight: *a8\n").encode()


def _config() -> list[bytes]:
    record = {"job": "generate", "settings": {"height": 64}, "fixed": {"seed": 1}, "changes": []}
    return [runs.json_with_digest(record), json.dumps(record).encode()]


def readers() -> dict[str, Reader]:
    settings_texts = [b"height: 64\nbatch_size: 2\nprompts_csv: a.csv\n", b"x: 1e-4\n", _yaml_bomb()]
    manifest = {"format": 1, "fingerprint": {"model": "a"}}
    lines = [b'{"prompt": "a", "seed": 1}\n{"prompt": "b"}\n', b'{"file_name": "a.png", "text": "a"}\n']
    return {
        "prompts_csv": Reader(file_name="a.csv", seeds=_tables, read=_read_prompts, invented=_invented_table()),
        "prompts_tsv": Reader(file_name="a.tsv", seeds=_tables, read=_read_prompts, invented=_invented_table()),
        "prompts_txt": Reader(
            file_name="a.txt", seeds=lambda: [b"a street\nb\n"], read=_read_prompts, invented=_invented_table()
        ),
        "prompts_jsonl": Reader(
            file_name="a.jsonl", seeds=lambda: lines, read=_read_prompts, invented=_invented_lines()
        ),
        "prompts_parquet": Reader(file_name="a.parquet", seeds=_parquets, read=_read_prompts),
        "annotations_csv": Reader(
            file_name="metadata.csv", seeds=lambda: [b"file_name,text\na.png,a street\n"], read=_read_annotations,
            invented=_invented_table(),
        ),
        "annotations_jsonl": Reader(
            file_name="metadata.jsonl", seeds=lambda: lines, read=_read_annotations, invented=_invented_lines()
        ),
        "image": Reader(file_name="a.png", seeds=_images, read=_read_image, errors=(decode.BrokenImageError,)),
        "own_png": Reader(file_name="a.png", seeds=lambda: _images()[:1], read=read_png),
        "statistics_npz": Reader(file_name="a.npz", seeds=_npzs, read=_read_statistics),
        "statistics": Reader(file_name="a.safetensors", seeds=_statistics, read=_read_statistics),
        "ledger": Reader(file_name="ledger.sqlite", seeds=lambda: [_ledger_bytes()], read=_read_ledger),
        "record": Reader(file_name="config.json", seeds=_config, read=_read_record, invented=_changed_json(_config)),
        "metrics": Reader(
            file_name="metrics.jsonl", seeds=lambda: lines, read=_read_metrics, invented=_invented_lines()
        ),
        "settings_yaml": Reader(file_name="a.yaml", seeds=lambda: settings_texts, read=_read_settings),
        "settings_toml": Reader(
            file_name="a.toml", seeds=lambda: [b"height = 64\n[x]\na = [1]\n"], read=_read_settings
        ),
        "settings_json": Reader(
            file_name="a.json", seeds=_config, read=_read_settings, invented=_changed_json(_config)
        ),
        "checkpoint": Reader(
            file_name="COMMIT.json", seeds=_commits, read=_read_checkpoint, invented=_changed_json(_commits)
        ),
        "model_config": Reader(
            file_name="config.json", seeds=lambda: _model_file("config.json"), read=_read_model,
            invented=_changed_json(lambda: _model_file("config.json")),
        ),
        "model_weights": Reader(
            file_name="model.safetensors", seeds=lambda: _model_file("model.safetensors"), read=_read_model
        ),
        "cache_manifest": Reader(
            file_name="texts.json", seeds=lambda: [runs.json_with_digest(manifest)], read=_read_cache,
            invented=_changed_json(lambda: [runs.json_with_digest(manifest)]),
        ),
    }  # fmt: skip


# -- damage


TOKENS = st.sampled_from(
    [b"", b"\0", b"\xff" * 8, b"[" * 200, b"{" * 200, b'"', b",", b"\n", b"\xef\xbb\xbf", b"1e999", b"-1",
    b"null", b"NaN",
     b"\x00\x00\x00\x00\xff\xff\xff\x7f", b"9" * 30, "\u202e".encode(), b"PK\x03\x04", b"IDAT", b"prompt"]
)  # fmt: skip


@st.composite
def _damaged(draw: st.DrawFn, contents: Sequence[bytes]) -> bytes:
    data = bytearray(draw(st.sampled_from(list(contents))))
    for _ in range(draw(st.integers(1, 6))):
        position = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "byte", "cut", "insert", "repeat", "drop", "number"])):
            case "flip" if data:
                data[position] ^= 1 << draw(st.integers(0, 7))
            case "byte" if data:
                data[position] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
            case "cut":
                del data[position:]
            case "insert":
                data[position:position] = draw(TOKENS)
            case "repeat":
                data[position:position] = data[position : position + 40] * draw(st.sampled_from([1, 3, 200]))
            case "drop":
                del data[position : position + draw(st.integers(1, 16))]
            case "number" if len(data) >= 8:
                place = min(position, len(data) - 8)
                data[place : place + 8] = draw(st.sampled_from([2**63 - 1, 2**31, 0, 2**20])).to_bytes(8, "little")
    return bytes(data)


def contents_of(reader: Reader) -> Bytes:
    damaged = _damaged(reader.seeds())
    return damaged | reader.invented if reader.invented is not None else damaged


# -- running


def find_problem(reader: Reader, data: bytes) -> str:
    """What a reader did with this content that it may not do; empty where it behaved."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
        path = Path(folder) / reader.file_name
        path.write_bytes(data)
        problem = ""
        try:
            with _deadline():
                reader.read(path)
        except reader.errors:
            pass
        except TooSlow:
            problem = f"more than {MAX_SECONDS} s"
        except MemoryError:
            problem = "MemoryError"
        except Exception:  # noqa: BLE001
            problem = traceback.format_exc(limit=-6)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return problem or (f"{growth >> 20} MiB more memory" if growth > MAX_GROWTH_BYTES else "")


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    def stop(_number: int, _frame: object) -> None:
        raise TooSlow

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(MAX_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def fuzz(seconds: float, first_seed: int, keep: Path, names: Sequence[str] = ()) -> tuple[Counter[str], list[str]]:
    """Readers in turn, with new seeds, until the time is over; how many files each has read, and what was found."""
    known = readers()
    counts: Counter[str] = Counter()
    problems: dict[str, str] = {}
    end = time.monotonic() + seconds
    number = first_seed
    while time.monotonic() < end:
        for name in names or known:
            _fuzz_reader(name, known[name], number, end, counts, problems, keep)
            if time.monotonic() >= end:
                break
        number += 1
    return counts, list(problems.values())


def _fuzz_reader(
    name: str, reader: Reader, number: int, end: float, counts: Counter[str], problems: dict[str, str], keep: Path
) -> None:
    @seed(number)
    @settings(
        max_examples=EXAMPLES_PER_ROUND, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(contents_of(reader))
    def run(data: bytes) -> None:
        if time.monotonic() >= end:
            return
        current = keep / f".running_{name}"
        current.write_bytes(data)  # stays if the reader kills this process
        problem = find_problem(reader, data)
        current.unlink()
        counts[name] += 1
        where = problem.strip().splitlines()[-3:] if problem else []
        if problem and (key := f"{name} {where}") not in problems:
            path = keep / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
            path.write_bytes(data)
            problems[key] = f"{path.name}: {problem}"

    run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=())
    arguments = parser.parse_args()
    CORPUS.mkdir(exist_ok=True)
    counts, problems = fuzz(60 * arguments.minutes, arguments.seed, CORPUS, arguments.only)
    for name, num in sorted(counts.items()):
        sys.stdout.write(f"{num:8d} {name}\n")
    sys.stdout.write(f"{sum(counts.values())} files, {len(problems)} findings\n")
    for problem in problems:
        sys.stdout.write(f"\n{problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
