"""`halation demo`: the whole loop in a few minutes on a laptop: train, draw through a kill, score, and one page to look at all of it."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import io
import os
import shlex
import shutil
import sqlite3
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halation.config import as_json, to_current_names
from halation.data.streets import DRIVING_PROMPTS, Streets
from halation.distributed import launcher
from halation.distributed.child_process import describe_exit, start_command, wait_for_command
from halation.distributed.stop_signals import StopSignals, exit_code
from halation.errors import HalationError, InputError, Interrupted
from halation.evaluation.config import EvaluateConfig
from halation.generation.config import GenerateConfig
from halation.generation.ledger import LEDGER_FILE, count_rows
from halation.generation.metadata_and_summary import METADATA_FILE
from halation.generation.read_only_ledger import SqliteLedgerReader
from halation.images.grid import progress_figure
from halation.images.png_codec import encode_png, read_png
from halation.models.bundled_models import resolve_model_path
from halation.runs import run_folder as runs
from halation.runs.run_folder import MetricsFile, RunFolder, write_atomic
from halation.tools.config import DemoConfig
from halation.training.config import TrainConfig

POLL_S = 0.02
MODEL = "streets-64"
MODEL_SIZE = 64
NUM_IMAGES = 32
NUM_REFERENCE = 1000
WARMUP_STEPS = 40
LINE_LENGTH = 100
MAX_ROWS = 8
KILL_AFTER_NUM_IMAGES = 8
"""Images in the ledger when the kill comes: a quarter, so that even a fast machine has most of them to go."""


def raise_if_stopped(signals: StopSignals) -> None:
    """Go no further where somebody asked to stop."""
    if signals.number:
        raise Interrupted("stopped, and nothing is left running; the same command goes on", exit_code(signals.number))


def run_command(args: Sequence[str], signals: StopSignals, kill_when: Callable[[], bool]) -> tuple[int, bool]:
    """Run `halation WORDS...` to its end, or SIGKILL it as soon as `kill_when` says so; its exit code, and whether that happened.

    A signal to us is handed on, and raised as Interrupted when the command has ended: it saves what it can before that. Its own
    ranks and workers are tied to it by the kernel as it is tied to us, so a kill of one is the end of all below it.
    """
    raise_if_stopped(signals)
    process = start_command(args)
    killed = wait_for_command(process, signals, kill_when, POLL_S)
    raise_if_stopped(signals)
    return process.returncode, killed


def num_images_done(folder: Path) -> int:
    """Images that the ledger of a generation calls done, read while it is being written."""
    try:
        with SqliteLedgerReader(folder / LEDGER_FILE).connect() as connection:
            return count_rows(connection)["done"]
    except sqlite3.Error:  # not there yet
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoPaths:
    """Where the demo puts what it makes."""

    folder: Path

    @property
    def training(self) -> Path:
        return self.folder / "training"

    @property
    def progress(self) -> Path:
        return self.folder / "progress.png"

    @property
    def prompts(self) -> Path:
        return self.folder / "prompts.csv"

    @property
    def images(self) -> Path:
        return self.folder / "pictures"

    @property
    def uninterrupted(self) -> Path:
        return self.folder / "uninterrupted"

    @property
    def scores(self) -> Path:
        """Inside what it is about, because there the gallery finds it."""
        return self.images / "scores.json"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def page(self) -> Path:
        return self.folder / "gallery.html"


def train_args(config: DemoConfig) -> list[str]:
    """A training that shows something within two minutes on two cores."""
    settings = TrainConfig(
        output_dir=DemoPaths(folder=config.output_dir).training,
        data="streets",
        model="tiny",
        image_size=(32, 32),
        patch_size=4,
        num_register_tokens=2,
        n_steps=config.n_steps,
        batch_size=8,
        lr=2e-3,
        betas=(0.9, 0.95),
        warmup_steps=WARMUP_STEPS,
        decay_steps=decay_steps(config),
        ema_decay=0.98,
        ckpt_every=-(-config.n_steps // 6),
        keep_last=2,
        validation_images=16,
        sample_steps=20,
        guidance_scale=2.0,
        nproc=num_ranks(config),
        progress=config.progress,
    )
    return ["train", *settings_to_flags(settings, TrainConfig())]


def decay_steps(config: DemoConfig) -> int:
    """Over all steps but those that warm up: so the number of steps is part of what a demo is begun with."""
    return max(1, config.n_steps - WARMUP_STEPS)


def generate_args(config: DemoConfig, folder: Path, num_workers: int) -> list[str]:
    """Lines and no bars, because a bar that is killed leaves a terminal without its cursor; one image a batch, so that a kill finds
    something left to draw on a fast machine too."""
    settings = GenerateConfig(
        prompts_csv=str(DemoPaths(folder=config.output_dir).prompts),
        model_path=MODEL,
        output_dir=folder,
        batch_size=1,
        nproc=num_workers,
        progress="plain" if config.progress in ("auto", "rich") else config.progress,
    )
    return ["generate", *settings_to_flags(settings, GenerateConfig())]


def evaluate_args(config: DemoConfig) -> list[str]:
    paths = DemoPaths(folder=config.output_dir)
    settings = EvaluateConfig(
        generated=str(paths.images),
        reference=("streets",),
        metrics=("fd", "kid", "agreement"),
        allow_few=True,
        num_reference=NUM_REFERENCE,
        cache_dir=paths.cache,
        output=paths.scores,
        progress=config.progress,
    )
    return ["evaluate", *settings_to_flags(settings, EvaluateConfig())]


def export_args(config: DemoConfig) -> list[str]:
    paths = DemoPaths(folder=config.output_dir)
    return ["gallery", str(paths.training), str(paths.images), "--export", str(paths.page)]


def gallery_args(config: DemoConfig) -> list[str]:
    return ["gallery", str(config.output_dir)]


def num_ranks(config: DemoConfig) -> int:
    """What --nproc of the training says: 0 is all GPUs."""
    return config.nproc or (0 if launcher.num_gpus() else 2)


def num_workers() -> int:
    """Two, where there are two GPUs or none: one GPU has room for one."""
    return 1 if launcher.num_gpus() == 1 else 2


def settings_to_flags(settings: Any, defaults: Any) -> list[str]:
    """What has to be said to a command for these settings."""
    args: list[str] = []
    default_values = to_current_names(as_json(defaults))
    for name, value in to_current_names(as_json(settings)).items():
        if value == default_values[name]:
            continue
        args.append(f"--{name}")
        if value is not True:
            args += map(str, value if isinstance(value, list) else [value])
    return args


def format_command(args: Sequence[str]) -> str:
    """A command as a person types it, over several lines where it is long; a flag stays with its values."""
    groups = [program_name()]
    for word in args:
        if word.startswith("--"):
            groups.append(word)
        else:
            groups[-1] += f" {shlex.quote(word)}"
    lines = [groups[0]]
    for group in groups[1:]:
        if len(lines[-1]) + len(group) < LINE_LENGTH:
            lines[-1] += f" {group}"
        else:
            lines.append(f"    {group}")
    return " \\\n".join(lines)


def program_name() -> str:
    """How to call this program again: by its name only where a shell would find it."""
    beside = Path(sys.executable).with_name("halation")
    if shutil.which("halation") or not beside.exists():
        return "halation"
    return shlex.quote(os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside))


def write_prompts(path: Path) -> None:
    """The prompts of every training's samples, then captions of scenes that no model was trained on."""
    scenes = Streets(MODEL_SIZE, MODEL_SIZE)
    captions = [*DRIVING_PROMPTS, *(scenes.validation(k).caption for k in range(NUM_IMAGES - len(DRIVING_PROMPTS)))]
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["image_id", "caption"])
    rows.writerows([f"street_{number:02d}", caption] for number, caption in enumerate(captions, start=1))
    write_atomic(path, text.getvalue().encode())


def run(config: DemoConfig) -> int:
    """The four steps, and what they made; a command that fails, or an image that differs, ends it with that."""
    if config.n_steps < MAX_ROWS:
        raise InputError(f"--n_steps {config.n_steps}", f"at least {MAX_ROWS} steps", "leave it out for the default")
    check_same_steps(config)
    runs.make_folder(config.output_dir)
    demo = DemoRun(config=config, paths=DemoPaths(folder=config.output_dir))
    with StopSignals(exit_on_second=False) as demo.signals:
        for number, (title, step) in enumerate(STEPS, start=1):
            demo.run_step(f"{number}/{len(STEPS)} {title}", step)
        _print(demo.summary())
    return 0


def check_same_steps(config: DemoConfig) -> None:
    """The training would refuse them too, in words about settings that nobody gave."""
    training = RunFolder(DemoPaths(folder=config.output_dir).training)
    if not (training.config.exists() and training.has_checkpoints()):
        return
    record = runs.read_record(training)
    if record["fixed"].get("decay_steps", decay_steps(config)) == decay_steps(config):
        return
    begun = record.get("settings", {}).get("n_steps")
    raise InputError(
        f"--n_steps {config.n_steps}, but {config.output_dir} was begun with --n_steps {begun}",
        "the same number: the learning rate falls over all of the steps",
        f"give --n_steps {begun} to go on, or another --output_dir to begin anew",
    )


@dataclass(kw_only=True)
class DemoRun:
    """One demo under way: what it was asked for, and what there is to say at its end."""

    config: DemoConfig
    paths: DemoPaths
    signals: StopSignals = field(default_factory=StopSignals)
    step_times: list[tuple[str, float]] = field(default_factory=list)
    comparison: str = ""

    def run_step(self, title: str, step: Callable[[DemoRun], None]) -> None:
        _print(f"{'' if not self.step_times else chr(10)}{title}\n{'=' * len(title)}")
        began = time.monotonic()
        step(self)
        raise_if_stopped(self.signals)
        self.step_times.append((title, time.monotonic() - began))

    def print_and_run(self, args: Sequence[str], kill_when: Callable[[], bool] = lambda: False) -> bool:
        """Print a command, then run just that; whether it was killed, as it was wanted to be."""
        _print(f"\n{format_command(args)}\n")
        code, killed = run_command(args, self.signals, kill_when)
        if code and not killed:
            failure = HalationError(f"`halation {args[0]}` {describe_exit(code)}; what it said stands above")
            failure.exit_code = max(code, 1)
            raise failure
        return killed

    def summary(self) -> str:
        config, paths = self.config, self.paths
        rows = [
            ("training", paths.training, "the run: checkpoints, samples of every rank, losses"),
            ("progress", paths.progress, "its samples step by step: rows are steps, columns are prompts"),
            ("pictures", paths.images, f"drawn by {MODEL} through a kill; {self.comparison}"),
            ("scores", paths.scores, "the numbers, with all that they were computed from"),
            ("page", paths.page, "both runs and the scores in one file: open it in a browser"),
        ]
        lines = [f"{name:<10}{path.resolve()}\n{'':10}{words}" for name, path, words in rows]
        spent = ", ".join(f"{title.split()[1].lower()} {seconds:.0f} s" for title, seconds in self.step_times)
        total = sum(seconds for _title, seconds in self.step_times)
        lines += [
            f"{'live':<10}{format_command(gallery_args(config))}\n{'':10}the same page while runs go on"
            + ("" if has_web() else ", after pip install 'halation[web]'"),
            f"{'time':<10}{spent}; together {total:.0f} s",
            f"{'again':<10}the same command does only what is missing; without {config.output_dir} it begins anew",
        ]
        return "\nDone\n====\n\n" + "\n".join(lines)


# -- the steps


def train(demo: DemoRun) -> None:
    config = demo.config
    ranks = num_ranks(config) or launcher.num_gpus()
    _print_paragraph(
        f"A small diffusion transformer learns the embedded street scenes on {_pluralize(ranks, 'rank')}. At each "
        "checkpoint every rank draws its share of the samples."
    )
    demo.print_and_run(train_args(config))
    draw_progress(RunFolder(demo.paths.training), demo.paths.progress, f"{config.n_steps} steps on {ranks} ranks")
    _print(f"\nIts progress in one image: {demo.paths.progress}")


def generate(demo: DemoRun) -> None:
    config, paths = demo.config, demo.paths
    if not paths.prompts.exists():
        write_prompts(paths.prompts)
    workers = num_workers()
    args = generate_args(config, paths.images, workers)
    num_before = num_images_done(paths.images)
    if num_before == 0:
        _print_paragraph(
            f"{MODEL}, a model that comes with Halation, draws the {NUM_IMAGES} captions of {paths.prompts} on "
            f"{_pluralize(workers, 'worker')}. This command is killed in the middle, on purpose (SIGKILL, and its workers "
            "with it)."
        )
        killed = demo.print_and_run(args, lambda: num_images_done(paths.images) >= KILL_AFTER_NUM_IMAGES)
        num_before = num_images_done(paths.images)
        if killed:
            end = f"Killed after {num_before} of {NUM_IMAGES} images. The same command goes on:"
        else:
            end = f"All {num_before} images were there before the kill came. The same command has nothing left to draw:"
        _print_paragraph(end, blank_line=True)
    else:
        _print_paragraph(
            f"{num_before} of {NUM_IMAGES} images are there from an earlier call. The same command goes on:"
        )
    demo.print_and_run(args)
    _print_paragraph(
        f"{num_before} images were kept, {NUM_IMAGES - num_before} drawn after that. For comparison, the same without "
        "a kill, and by one worker:",
        blank_line=True,
    )
    demo.print_and_run(generate_args(config, paths.uninterrupted, 1))
    num_equal, different = compare_outputs(paths.images, paths.uninterrupted)
    if different:
        raise HalationError(f"{paths.images} and {paths.uninterrupted} differ in {', '.join(different)}")
    demo.comparison = f"{num_equal} of {NUM_IMAGES} equal those drawn without one, byte by byte"
    _print_paragraph(
        f"Compared byte by byte: {num_equal} of {NUM_IMAGES} images are equal, and so is {METADATA_FILE} (prompts, "
        "seeds, settings, hashes).",
        blank_line=True,
    )


def evaluate(demo: DemoRun) -> None:
    _print_paragraph(
        f"FD-streets, KID-streets and prompt agreement of these images, against {NUM_REFERENCE} scenes that no model was "
        "trained on."
    )
    demo.print_and_run(evaluate_args(demo.config))
    _print_paragraph(
        f"{NUM_IMAGES} images are far too few for FD and KID: these two show how it is done, not how good the model is. "
        "Prompt agreement, the part of what a caption says that its image shows, bears it better. All three of 5,000 "
        f"images are in the model's card: {_relative_to_cwd(resolve_model_path(MODEL) / 'README.md')}",
        blank_line=True,
    )


def export_page(demo: DemoRun) -> None:
    _print_paragraph("The training, the images and the scores in one file, which opens from the disk without a server.")
    demo.print_and_run(export_args(demo.config))


STEPS: tuple[tuple[str, Callable[[DemoRun], None]], ...] = (
    ("Train a small model, with samples from every rank", train),
    ("Generate through a kill", generate),
    ("Evaluate the images", evaluate),
    ("Look at all of it", export_page),
)


# -- what they show


def compare_outputs(one: Path, other: Path) -> tuple[int, list[str]]:
    """How many images of two generations are the same bytes, and which files are not, or are in one of them alone."""
    names = sorted({path.name for folder in (one, other) for path in folder.glob("*.png")})
    different = [name for name in (*names, METADATA_FILE) if _read_bytes(one / name) != _read_bytes(other / name)]
    num_equal = len(names) - sum(name != METADATA_FILE for name in different)
    if num_equal != NUM_IMAGES and not different:
        different = [f"their number ({num_equal} images, {NUM_IMAGES} were asked for)"]
    return num_equal, different


def draw_progress(run: RunFolder, path: Path, title: str) -> None:
    """Rows are steps, columns are prompts, the loss below."""
    folders = sorted(run.samples.glob("step_*"))
    if len(folders) > MAX_ROWS:
        folders = [folders[round(i * (len(folders) - 1) / (MAX_ROWS - 1))] for i in range(MAX_ROWS)]
    rows = [(int(folder.name.removeprefix("step_")), list(_read_samples(folder))) for folder in folders]
    loss = [(row["step"], row["loss"]) for row in MetricsFile(run.metrics).read_rows() if "loss" in row]
    write_atomic(path, encode_png(progress_figure(rows, list(DRIVING_PROMPTS), loss, title), {}))


def has_web() -> bool:
    return all(importlib.util.find_spec(name) for name in ("starlette", "uvicorn"))


def _read_samples(folder: Path) -> Iterator[NDArray[np.uint8] | None]:
    for index in range(len(DRIVING_PROMPTS)):
        path = folder / f"sample_{index:02d}.png"
        yield read_png(path)[0] if path.exists() else None


def _read_bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _pluralize(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _relative_to_cwd(path: Path) -> Path:
    """As a person who stands here would write it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _print_paragraph(paragraph: str, *, blank_line: bool = False) -> None:
    if blank_line:
        _print("")
    _print(textwrap.fill(paragraph, LINE_LENGTH, break_long_words=False, break_on_hyphens=False))


def _print(text: str) -> None:
    print(text, flush=True)
