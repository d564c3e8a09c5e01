"""`halation demo`: train, generate through a kill, evaluate and export a page, in minutes."""

from __future__ import annotations

import csv
import importlib.util
import io
import os
import shlex
import shutil
import sqlite3
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from halation.data.streets import DRIVING_PROMPTS, Streets
from halation.distributed import launcher
from halation.distributed.child_process import describe_exit, start_command, wait_for_command
from halation.distributed.stop_signals import StopSignals, exit_code
from halation.errors import HalationError, InputError, Interrupted
from halation.generation.ledger import LEDGER_FILE, count_rows
from halation.generation.metadata_and_summary import METADATA_FILE
from halation.generation.read_only_ledger import SqliteLedgerReader
from halation.images.grid import progress_figure
from halation.images.png_codec import encode_png, read_png
from halation.models.model_folder import resolve_model_path
from halation.runs import run_folder as runs
from halation.runs.run_folder import MetricsFile, RunFolder, write_atomic
from halation.tools.config import DemoConfig

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


def run(config: DemoConfig) -> int:
    """Run the four steps; a command that fails, or an image that differs, is an error."""
    if config.n_steps < MAX_ROWS:
        raise InputError(f"--n_steps {config.n_steps}", f"at least {MAX_ROWS} steps", "leave it out for the default")
    demo = Demo(config=config)
    demo.check_same_steps()
    runs.make_folder(config.output_dir)
    steps = {
        "Train a small model, with samples from every rank": demo.train,
        "Generate through a kill": demo.generate,
        "Evaluate the images": demo.evaluate,
        "Look at all of it": demo.export_page,
    }
    with StopSignals(exit_on_second=False) as demo.signals:
        for number, (title, step) in enumerate(steps.items(), start=1):
            title = f"{number}/{len(steps)} {title}"
            print("\n" * (number > 1) + f"{title}\n{'=' * len(title)}", flush=True)
            start_time = time.monotonic()
            step()
            raise_if_stopped(demo.signals)
            demo.step_times[title.split()[1].lower()] = time.monotonic() - start_time
        demo.print_summary()
    return 0


@dataclass(kw_only=True)
class Demo:
    """One demo: where its files are, the commands it runs, and what it prints between them."""

    config: DemoConfig
    signals: StopSignals = field(default_factory=StopSignals)
    step_times: dict[str, float] = field(default_factory=dict)
    num_equal: int = 0

    def __post_init__(self) -> None:
        folder = self.config.output_dir
        self.training = folder / "training"
        self.progress = folder / "progress.png"
        self.prompts = folder / "prompts.csv"
        self.images = folder / "pictures"
        self.uninterrupted = folder / "uninterrupted"
        self.scores = self.images / "scores.json"  # where the gallery looks for it
        self.page = folder / "gallery.html"
        self.decay_steps = max(1, self.config.n_steps - WARMUP_STEPS)
        self.num_ranks = self.config.nproc or launcher.num_gpus() or 2
        self.num_workers = 1 if launcher.num_gpus() == 1 else 2

    # -- the commands

    def train_command(self) -> list[str]:
        """A training that shows something within two minutes on two cores."""
        n_steps = self.config.n_steps
        flags = (
            f"--image_size 32 32 --model tiny --patch_size 4 --num_register_tokens 2 --n_steps {n_steps} "
            f"--batch_size 8 --lr 0.002 --warmup_steps {WARMUP_STEPS} --decay_steps {self.decay_steps} "
            f"--betas 0.9 0.95 --ema_decay 0.98 --nproc {self.num_ranks} --validation_images 16 "
            f"--ckpt_every {-(-n_steps // 6)} --keep_last 2 --sample_steps 20 --guidance_scale 2.0 "
            f"--progress {self.config.progress}"
        )
        return ["train", "--output_dir", str(self.training), *flags.split()]

    def generate_command(self, folder: Path, num_workers: int) -> list[str]:
        """One image a batch, so that a kill finds images left; plain lines, since a killed bar leaves no cursor."""
        progress = "plain" if self.config.progress in ("auto", "rich") else self.config.progress
        flags = f"--model_path {MODEL} --batch_size 1 --nproc {num_workers} --progress {progress}"
        return ["generate", "--prompts_csv", str(self.prompts), "--output_dir", str(folder), *flags.split()]

    def evaluate_command(self) -> list[str]:
        folders = ["--cache_dir", str(self.config.output_dir / "cache"), "--output", str(self.scores)]
        flags = f"--reference streets --metrics fd kid agreement --allow_few --num_reference {NUM_REFERENCE}"
        progress = ["--progress", self.config.progress]
        return ["evaluate", "--generated", str(self.images), *flags.split(), *folders, *progress]

    def export_command(self) -> list[str]:
        return ["gallery", str(self.training), str(self.images), "--export", str(self.page)]

    def print_and_run(self, words: Sequence[str], kill_when: Callable[[], bool] = lambda: False) -> bool:
        """Print a command and run it; True if it was killed because `kill_when` was true."""
        print(f"\n{format_command(words)}\n", flush=True)
        code, killed = run_command(words, self.signals, kill_when)
        if code and not killed:
            failure = HalationError(f"`halation {words[0]}` {describe_exit(code)}; its messages are above")
            failure.exit_code = max(code, 1)
            raise failure
        print()
        return killed

    # -- the steps

    def check_same_steps(self) -> None:
        """Refuse another number of steps here: the training would refuse it in words about other settings."""
        training = RunFolder(self.training)
        if not (training.config.exists() and training.has_checkpoints()):
            return
        record = runs.read_record(training)
        if record["fixed"].get("decay_steps", self.decay_steps) != self.decay_steps:
            n_steps = record.get("settings", {}).get("n_steps")
            raise InputError(
                f"--n_steps {self.config.n_steps}, but {self.config.output_dir} was begun with --n_steps {n_steps}",
                "the same number: the learning rate falls over all of the steps",
                f"give --n_steps {n_steps} to go on, or another --output_dir to begin anew",
            )

    def train(self) -> None:
        print_paragraph(
            f"A small diffusion transformer learns the embedded street scenes on {_pluralize(self.num_ranks, 'rank')}. "
            "At each checkpoint every rank draws its share of the samples."
        )
        self.print_and_run(self.train_command())
        draw_progress(RunFolder(self.training), self.progress, f"{self.config.n_steps} steps on {self.num_ranks} ranks")
        print(f"Its progress in one image: {self.progress}", flush=True)

    def generate(self) -> None:
        if not self.prompts.exists():
            write_prompts(self.prompts)
        command = self.generate_command(self.images, self.num_workers)
        num_before = num_images_done(self.images)
        if num_before:
            print_paragraph(
                f"{num_before} of {NUM_IMAGES} images are there from an earlier call. The same command goes on:"
            )
        else:
            print_paragraph(
                f"{MODEL}, a model that comes with Halation, draws the {NUM_IMAGES} captions of {self.prompts} on "
                f"{_pluralize(self.num_workers, 'worker')}. This command is killed in the middle, on purpose (SIGKILL, "
                "and its workers with it)."
            )
            killed = self.print_and_run(command, lambda: num_images_done(self.images) >= KILL_AFTER_NUM_IMAGES)
            num_before = num_images_done(self.images)
            print_paragraph(
                f"Killed after {num_before} of {NUM_IMAGES} images. The same command goes on:"
                if killed
                else f"All {num_before} images were there before the kill came. The same command has nothing to draw:"
            )
        self.print_and_run(command)
        print_paragraph(
            f"{num_before} images were kept, {NUM_IMAGES - num_before} drawn after that. For comparison, the same "
            "without a kill, and by one worker:"
        )
        self.print_and_run(self.generate_command(self.uninterrupted, 1))
        self.num_equal, different = compare_outputs(self.images, self.uninterrupted)
        if different:
            raise HalationError(f"{self.images} and {self.uninterrupted} differ in {', '.join(different)}")
        print_paragraph(
            f"Compared byte by byte: {self.num_equal} of {NUM_IMAGES} images are equal, and so is {METADATA_FILE} "
            "(prompts, seeds, settings, hashes).",
        )

    def evaluate(self) -> None:
        print_paragraph(
            f"FD-streets, KID-streets and prompt agreement of these images, against {NUM_REFERENCE} scenes that no "
            "model was trained on."
        )
        self.print_and_run(self.evaluate_command())
        card = resolve_model_path(MODEL) / "README.md"
        card = card.relative_to(Path.cwd()) if card.is_relative_to(Path.cwd()) else card
        print_paragraph(
            f"{NUM_IMAGES} images are far too few for FD and KID: these two show how it is done, not how good the "
            "model is. Prompt agreement, the part of what a caption says that its image shows, bears it better. All "
            f"three of 5,000 images are in the model's card: {card}"
        )

    def export_page(self) -> None:
        print_paragraph(
            "The training, the images and the scores in one file, which opens from the disk without a server."
        )
        self.print_and_run(self.export_command())

    def print_summary(self) -> None:
        equal = f"{self.num_equal} of {NUM_IMAGES} equal those drawn without one, byte by byte"
        has_web = all(importlib.util.find_spec(name) for name in ("starlette", "uvicorn"))
        spent = ", ".join(f"{title} {seconds:.0f} s" for title, seconds in self.step_times.items())
        rows = [
            ("training", self.training, "the run: checkpoints, samples of every rank, losses"),
            ("progress", self.progress, "its samples step by step: rows are steps, columns are prompts"),
            ("pictures", self.images, f"drawn by {MODEL} through a kill; {equal}"),
            ("scores", self.scores, "the numbers, with all that they were computed from"),
            ("page", self.page, "both runs and the scores in one file: open it in a browser"),
        ]
        print("Done\n====\n")
        for name, path, text in rows:
            print(f"{name:<10}{path.resolve()}\n{'':10}{text}")
        print(f"{'live':<10}{format_command(['gallery', str(self.config.output_dir)])}")
        print(f"{'':10}the same page while runs go on" + ("" if has_web else ", after pip install 'halation[web]'"))
        print(f"{'time':<10}{spent}; together {sum(self.step_times.values()):.0f} s")
        again = f"the same command does only what is missing; without {self.config.output_dir} it begins anew"
        print(f"{'again':<10}{again}", flush=True)


# -- processes


def raise_if_stopped(signals: StopSignals) -> None:
    if signals.number:
        raise Interrupted("stopped, and nothing is left running; the same command goes on", exit_code(signals.number))


def run_command(words: Sequence[str], signals: StopSignals, kill_when: Callable[[], bool]) -> tuple[int, bool]:
    """Run `halation WORDS...`, or SIGKILL it once `kill_when` is true: its exit code, and whether it was killed.

    A signal to this process is passed on, and raised as Interrupted when the command has ended: it saves what it can
    before that. Ranks and workers are tied to the command by the kernel, so a kill ends them too.
    """
    raise_if_stopped(signals)
    process = start_command(words)
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


# -- files and texts


def write_prompts(path: Path) -> None:
    """The prompts of every training's samples, then captions of scenes that no model was trained on."""
    scenes = Streets(MODEL_SIZE, MODEL_SIZE)
    captions = [*DRIVING_PROMPTS, *(scenes.validation(k).caption for k in range(NUM_IMAGES - len(DRIVING_PROMPTS)))]
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["image_id", "caption"])
    rows.writerows([f"street_{number:02d}", caption] for number, caption in enumerate(captions, start=1))
    write_atomic(path, text.getvalue().encode())


def compare_outputs(one: Path, other: Path) -> tuple[int, list[str]]:
    """How many images of two generations have the same bytes, and which files differ or are in one of them alone."""
    names = [*sorted({path.name for folder in (one, other) for path in folder.glob("*.png")}), METADATA_FILE]
    contents = [[path.read_bytes() if path.exists() else None for path in (one / name, other / name)] for name in names]
    different = [name for name, (first, second) in zip(names, contents, strict=True) if first != second]
    num_equal = len(names) - 1 - sum(name != METADATA_FILE for name in different)
    if num_equal != NUM_IMAGES and not different:
        different = [f"their number ({num_equal} images, {NUM_IMAGES} were asked for)"]
    return num_equal, different


def draw_progress(run: RunFolder, path: Path, title: str) -> None:
    """Rows are steps, columns are prompts, the loss below."""
    folders = sorted(run.samples.glob("step_*"))
    if len(folders) > MAX_ROWS:
        folders = [folders[round(i * (len(folders) - 1) / (MAX_ROWS - 1))] for i in range(MAX_ROWS)]
    files = [[folder / f"sample_{index:02d}.png" for index in range(len(DRIVING_PROMPTS))] for folder in folders]
    rows = [
        (int(folder.name.removeprefix("step_")), [read_png(file)[0] if file.exists() else None for file in samples])
        for folder, samples in zip(folders, files, strict=True)
    ]
    loss = [(row["step"], row["loss"]) for row in MetricsFile(run.metrics).read_rows() if "loss" in row]
    write_atomic(path, encode_png(progress_figure(rows, list(DRIVING_PROMPTS), loss, title), {}))


def format_command(words: Sequence[str]) -> str:
    """A command as it is typed, over several lines where it is long; a flag stays with its values."""
    groups = [program_name()]
    for word in words:
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


def print_paragraph(text: str) -> None:
    print(textwrap.fill(text, LINE_LENGTH, break_long_words=False, break_on_hyphens=False), flush=True)


def _pluralize(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
