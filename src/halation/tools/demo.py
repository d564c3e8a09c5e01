"""`halation demo`: train, generate (killed and resumed), evaluate, export; in minutes."""

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
from halation.errors import HalationError, InputError, Interrupted, format_count, install_command
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
"""Images in the ledger at the time of the kill: a quarter, so that even a fast machine still has most of them to do."""


def run(config: DemoConfig) -> int:
    """Run the four steps; raise if a command fails or an image differs."""
    if config.n_steps < MAX_ROWS:
        raise InputError(f"--n_steps {config.n_steps}", f"at least {MAX_ROWS} steps", "leave it out for the default")
    demo = Demo(config=config)
    demo.check_same_steps()
    runs.make_folder(config.output_dir)
    steps = {
        "Train a small model, with samples from every rank": demo.train,
        "Generate images, with a kill in between": demo.generate,
        "Evaluate the images": demo.evaluate,
        "Look at the results": demo.export_page,
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
    """One demo: its files, the commands it runs, and the texts it prints between them."""

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
        self.scores = self.images / "scores.json"  # the gallery finds it there
        self.page = folder / "gallery.html"
        self.decay_steps = max(1, self.config.n_steps - WARMUP_STEPS)
        self.num_ranks = self.config.nproc or launcher.num_gpus() or 2
        self.num_workers = 1 if launcher.num_gpus() == 1 else 2

    # -- the commands

    def train_command(self) -> list[str]:
        """A training with visible results within two minutes on two cores."""
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
        """A generation with one image per batch, so that images are left to do after the kill.

        Progress is printed as plain lines, because a killed progress bar leaves the cursor hidden.
        """
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
            failure = HalationError(f"`halation {words[0]}` {describe_exit(code)}; see its messages above")
            failure.exit_code = max(code, 1)
            raise failure
        print()
        return killed

    # -- the steps

    def check_same_steps(self) -> None:
        """Raise if the number of steps changed; the training's error would name other settings."""
        training = RunFolder(self.training)
        if not (training.config.exists() and training.has_checkpoints()):
            return
        record = runs.read_record(training)
        if record["fixed"].get("decay_steps", self.decay_steps) != self.decay_steps:
            n_steps = record.get("settings", {}).get("n_steps")
            raise InputError(
                f"--n_steps {self.config.n_steps}, but {self.config.output_dir} was started with --n_steps {n_steps}",
                "the same number: the learning rate decays over all steps",
                f"give --n_steps {n_steps} to resume, or another --output_dir to start over",
            )

    def train(self) -> None:
        print_paragraph(
            "A small diffusion transformer learns the embedded street scenes on "
            f"{format_count(self.num_ranks, 'rank')}. At each checkpoint every rank produces its share of the samples."
        )
        self.print_and_run(self.train_command())
        draw_progress(
            RunFolder(self.training),
            self.progress,
            f"{format_count(self.config.n_steps, 'step')} on {format_count(self.num_ranks, 'rank')}",
        )
        print(f"The progress of the training in one image: {self.progress}", flush=True)

    def generate(self) -> None:
        if not self.prompts.exists():
            write_prompts(self.prompts)
        command = self.generate_command(self.images, self.num_workers)
        num_before = num_images_done(self.images)
        if num_before:
            print_paragraph(
                f"{num_before} of {NUM_IMAGES} images are there from an earlier call. The same command resumes:"
            )
        else:
            print_paragraph(
                f"{MODEL}, a model that comes with Halation, generates images for the {NUM_IMAGES} captions of "
                f"{self.prompts} on {format_count(self.num_workers, 'worker')}. The demo kills this command and its "
                "workers in the middle (SIGKILL)."
            )
            killed = self.print_and_run(command, lambda: num_images_done(self.images) >= KILL_AFTER_NUM_IMAGES)
            num_before = num_images_done(self.images)
            print_paragraph(
                f"Killed after {num_before} of {NUM_IMAGES} images. The same command resumes:"
                if killed
                else f"All {num_before} images were done before the kill. The same command has nothing left to do:"
            )
        self.print_and_run(command)
        print_paragraph(
            f"Kept: {format_count(num_before, 'image')}, generated after the kill: {NUM_IMAGES - num_before}. For "
            "comparison, the same images without a kill, on one worker:"
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
            f"FD-streets, KID-streets and prompt agreement of these images, against {NUM_REFERENCE} validation scenes "
            "that no model was trained on."
        )
        self.print_and_run(self.evaluate_command())
        card = resolve_model_path(MODEL) / "README.md"
        card = card.relative_to(Path.cwd()) if card.is_relative_to(Path.cwd()) else card
        print_paragraph(
            f"{NUM_IMAGES} images are far too few for FD and KID: these two only show how to compute them, not how "
            "good the model is. Prompt agreement, the share of a caption's details that its image shows, needs fewer "
            f"images. The model card has all three scores on 5,000 images: {card}"
        )

    def export_page(self) -> None:
        print_paragraph("The training, the images and the scores in one file that opens from disk without a server.")
        self.print_and_run(self.export_command())

    def print_summary(self) -> None:
        equal = f"{self.num_equal} of {NUM_IMAGES} are bit-identical to those without a kill"
        has_web = all(importlib.util.find_spec(name) for name in ("starlette", "uvicorn"))
        spent = ", ".join(f"{title} {seconds:.0f} s" for title, seconds in self.step_times.items())
        rows = [
            ("training", self.training, "the run: checkpoints, samples of every rank, losses"),
            ("progress", self.progress, "its samples by step: rows are steps, columns are prompts"),
            ("pictures", self.images, f"generated by {MODEL}, killed and resumed; {equal}"),
            ("scores", self.scores, "the scores, with their provenance"),
            ("page", self.page, "both runs and the scores in one file: open it in a browser"),
        ]
        print("Done\n====\n")
        for name, path, text in rows:
            print(f"{name:<10}{path.resolve()}\n{'':10}{text}")
        print(f"{'live':<10}{format_command(['gallery', str(self.config.output_dir)])}")
        print(f"{'':10}the same page, live during runs" + ("" if has_web else f", after {install_command('web')}"))
        print(f"{'time':<10}{spent}; together {sum(self.step_times.values()):.0f} s")
        again = f"the same command does only what is missing; remove {self.config.output_dir} to start over"
        print(f"{'again':<10}{again}", flush=True)


# -- processes


def raise_if_stopped(signals: StopSignals) -> None:
    if signals.number:
        raise Interrupted("stopped, nothing is left running; run the same command to resume", exit_code(signals.number))


def run_command(words: Sequence[str], signals: StopSignals, kill_when: Callable[[], bool]) -> tuple[int, bool]:
    """Run `halation WORDS...`; SIGKILL it once `kill_when` is true. Returns (code, killed).

    A signal to this process is forwarded, and raised as Interrupted when the command has saved its work and exited.
    Ranks and workers are tied to the command by the kernel, so a kill ends them too.
    """
    raise_if_stopped(signals)
    process = start_command(words)
    killed = wait_for_command(process, signals, kill_when, POLL_S)
    raise_if_stopped(signals)
    return process.returncode, killed


def num_images_done(folder: Path) -> int:
    """Number of images that are done in a generation's ledger, which may be in use."""
    try:
        with SqliteLedgerReader(folder / LEDGER_FILE).connect() as connection:
            return count_rows(connection)["done"]
    except sqlite3.Error:  # not there yet
        return 0


# -- files and texts


def write_prompts(path: Path) -> None:
    """Write the default sample prompts, then captions of validation scenes."""
    scenes = Streets(MODEL_SIZE, MODEL_SIZE)
    captions = [*DRIVING_PROMPTS, *(scenes.validation(k).caption for k in range(NUM_IMAGES - len(DRIVING_PROMPTS)))]
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["image_id", "caption"])
    rows.writerows([f"street_{number:02d}", caption] for number, caption in enumerate(captions, start=1))
    write_atomic(path, text.getvalue().encode())


def compare_outputs(one: Path, other: Path) -> tuple[int, list[str]]:
    """Return the number of bit-identical images, and the files that differ or are missing."""
    names = [*sorted({path.name for folder in (one, other) for path in folder.glob("*.png")}), METADATA_FILE]
    contents = [[path.read_bytes() if path.exists() else None for path in (one / name, other / name)] for name in names]
    different = [name for name, (first, second) in zip(names, contents, strict=True) if first != second]
    num_equal = len(names) - 1 - sum(name != METADATA_FILE for name in different)
    if num_equal != NUM_IMAGES and not different:
        different = [f"their number ({format_count(num_equal, 'image')}, expected {NUM_IMAGES})"]
    return num_equal, different


def draw_progress(run: RunFolder, path: Path, title: str) -> None:
    """Write a figure: rows are steps, columns are prompts, with the loss below."""
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
    """Format a command for a shell, on several lines if long; flags stay with their values."""
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
    """How to call this program: by its name if a shell would find it, else by its path."""
    beside = Path(sys.executable).with_name("halation")
    if shutil.which("halation") or not beside.exists():
        return "halation"
    return shlex.quote(os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside))


def print_paragraph(text: str) -> None:
    print(textwrap.fill(text, LINE_LENGTH, break_long_words=False, break_on_hyphens=False), flush=True)
