"""`halation demo`: the whole loop in a few minutes on a laptop: train, draw through a kill, score, and one page to look at all of it."""

from __future__ import annotations

import importlib.util
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from halation.data.streets import DRIVING_PROMPTS
from halation.distributed import launcher
from halation.distributed.launcher import ending
from halation.distributed.signals import StopSignals
from halation.errors import HalationError, InputError
from halation.generation.results import METADATA_FILE
from halation.images.grid import progress_figure
from halation.images.png import encode_png, read_png
from halation.models.bundled import meant
from halation.runs import folder as runs
from halation.runs.folder import Metrics, Run, publish
from halation.tools import demo_commands as commands
from halation.tools.config import DemoConfig
from halation.tools.demo_commands import LINE_LENGTH, MODEL, NUM_PICTURES, NUM_REFERENCE, Places, written
from halation.tools.demo_processes import heed, num_drawn, run_command

MAX_ROWS = 8
KILLED_AFTER = 8
"""Pictures in the ledger when the kill comes: a quarter, so that even a fast machine has most of them to go."""


def run(config: DemoConfig) -> int:
    """The four steps, and what they made; a command that fails, or a picture that differs, ends it with that."""
    if config.n_steps < MAX_ROWS:
        raise InputError(f"--n_steps {config.n_steps}", f"at least {MAX_ROWS} steps", "leave it out for the default")
    refuse_other_steps(config)
    runs.make_folder(config.output_dir)
    demo = Demo(config=config, places=Places(folder=config.output_dir))
    with StopSignals(ends_at_once=False) as demo.signals:
        for number, (title, step) in enumerate(STEPS, start=1):
            demo.take(f"{number}/{len(STEPS)} {title}", step)
        _say(demo.summary())
    return 0


def refuse_other_steps(config: DemoConfig) -> None:
    """The training would refuse them too, in words about settings that nobody gave."""
    training = Run(Places(folder=config.output_dir).training)
    if not (training.config.exists() and training.has_saved()):
        return
    record = runs.read_record(training)
    if record["fixed"].get("decay_steps", commands.decay_steps(config)) == commands.decay_steps(config):
        return
    begun = record.get("settings", {}).get("n_steps")
    raise InputError(
        f"--n_steps {config.n_steps}, but {config.output_dir} was begun with --n_steps {begun}",
        "the same number: the learning rate falls over all of the steps",
        f"give --n_steps {begun} to go on, or another --output_dir to begin anew",
    )


@dataclass(kw_only=True)
class Demo:
    """One demo under way: what it was asked for, and what there is to say at its end."""

    config: DemoConfig
    places: Places
    signals: StopSignals = field(default_factory=StopSignals)
    times: list[tuple[str, float]] = field(default_factory=list)
    equal: str = ""

    def take(self, title: str, step: Callable[[Demo], None]) -> None:
        _say(f"{'' if not self.times else chr(10)}{title}\n{'=' * len(title)}")
        began = time.monotonic()
        step(self)
        heed(self.signals)
        self.times.append((title, time.monotonic() - began))

    def command(self, words: Sequence[str], kill_when: Callable[[], bool] = lambda: False) -> bool:
        """Print a command, then run just that; whether it was killed, as it was wanted to be."""
        _say(f"\n{written(words)}\n")
        code, killed = run_command(words, self.signals, kill_when)
        if code and not killed:
            failure = HalationError(f"`halation {words[0]}` {ending(code)}; what it said stands above")
            failure.exit_code = max(code, 1)
            raise failure
        return killed

    def summary(self) -> str:
        config, places = self.config, self.places
        rows = [
            ("training", places.training, "the run: checkpoints, samples of every rank, losses"),
            ("progress", places.progress, "its samples step by step: rows are steps, columns are prompts"),
            ("pictures", places.pictures, f"drawn by {MODEL} through a kill; {self.equal}"),
            ("scores", places.scores, "the numbers, with all that they were computed from"),
            ("page", places.page, "both runs and the scores in one file: open it in a browser"),
        ]
        lines = [f"{name:<10}{path.resolve()}\n{'':10}{words}" for name, path, words in rows]
        spent = ", ".join(f"{title.split()[1].lower()} {seconds:.0f} s" for title, seconds in self.times)
        total = sum(seconds for _title, seconds in self.times)
        lines += [
            f"{'live':<10}{written(commands.live_words(config))}\n{'':10}the same page while runs go on"
            + ("" if has_web() else ", after pip install 'halation[web]'"),
            f"{'time':<10}{spent}; together {total:.0f} s",
            f"{'again':<10}the same command does only what is missing; without {config.output_dir} it begins anew",
        ]
        return "\nDone\n====\n\n" + "\n".join(lines)


# -- the steps


def train(demo: Demo) -> None:
    config = demo.config
    ranks = commands.num_ranks(config) or launcher.num_gpus()
    _tell(
        f"A small diffusion transformer learns the embedded street scenes on {_counted(ranks, 'rank')}. At each "
        "checkpoint every rank draws its share of the samples."
    )
    demo.command(commands.train_words(config))
    draw_progress(Run(demo.places.training), demo.places.progress, f"{config.n_steps} steps on {ranks} ranks")
    _say(f"\nIts progress in one picture: {demo.places.progress}")


def generate(demo: Demo) -> None:
    config, places = demo.config, demo.places
    if not places.prompts.exists():
        commands.write_prompts(places.prompts)
    workers = commands.num_workers()
    words = commands.generate_words(config, places.pictures, workers)
    num_before = num_drawn(places.pictures)
    if num_before == 0:
        _tell(
            f"{MODEL}, a model that comes with Halation, draws the {NUM_PICTURES} captions of {places.prompts} on "
            f"{_counted(workers, 'worker')}. This command is killed in the middle, on purpose (SIGKILL, and its workers "
            "with it)."
        )
        killed = demo.command(words, lambda: num_drawn(places.pictures) >= KILLED_AFTER)
        num_before = num_drawn(places.pictures)
        if killed:
            end = f"Killed after {num_before} of {NUM_PICTURES} pictures. The same command goes on:"
        else:
            end = (
                f"All {num_before} pictures were there before the kill came. The same command has nothing left to draw:"
            )
        _tell(end, gap=True)
    else:
        _tell(f"{num_before} of {NUM_PICTURES} pictures are there from an earlier call. The same command goes on:")
    demo.command(words)
    _tell(
        f"{num_before} pictures were kept, {NUM_PICTURES - num_before} drawn after that. For comparison, the same without "
        "a kill, and by one worker:",
        gap=True,
    )
    demo.command(commands.generate_words(config, places.uninterrupted, 1))
    num_equal, different = compare(places.pictures, places.uninterrupted)
    if different:
        raise HalationError(f"{places.pictures} and {places.uninterrupted} differ in {', '.join(different)}")
    demo.equal = f"{num_equal} of {NUM_PICTURES} equal those drawn without one, byte by byte"
    _tell(
        f"Compared byte by byte: {num_equal} of {NUM_PICTURES} pictures are equal, and so is {METADATA_FILE} (prompts, "
        "seeds, settings, hashes).",
        gap=True,
    )


def evaluate(demo: Demo) -> None:
    _tell(
        f"FD-streets, KID-streets and prompt agreement of these pictures, against {NUM_REFERENCE} scenes that no model was "
        "trained on."
    )
    demo.command(commands.evaluate_words(demo.config))
    _tell(
        f"{NUM_PICTURES} pictures are far too few for FD and KID: these two show how it is done, not how good the model is. "
        "Prompt agreement, the part of what a caption says that its picture shows, bears it better. All three of 5,000 "
        f"pictures are in the model's card: {_near(meant(MODEL) / 'README.md')}",
        gap=True,
    )


def page(demo: Demo) -> None:
    _tell("The training, the pictures and the scores in one file, which opens from the disk without a server.")
    demo.command(commands.page_words(demo.config))


STEPS: tuple[tuple[str, Callable[[Demo], None]], ...] = (
    ("Train a small model, with samples from every rank", train),
    ("Generate through a kill", generate),
    ("Evaluate the pictures", evaluate),
    ("Look at all of it", page),
)


# -- what they show


def compare(one: Path, other: Path) -> tuple[int, list[str]]:
    """How many pictures of two generations are the same bytes, and which files are not, or are in one of them alone."""
    names = sorted({path.name for folder in (one, other) for path in folder.glob("*.png")})
    different = [name for name in (*names, METADATA_FILE) if _bytes(one / name) != _bytes(other / name)]
    num_equal = len(names) - sum(name != METADATA_FILE for name in different)
    if num_equal != NUM_PICTURES and not different:
        different = [f"their number ({num_equal} pictures, {NUM_PICTURES} were asked for)"]
    return num_equal, different


def draw_progress(run: Run, path: Path, title: str) -> None:
    """Rows are steps, columns are prompts, the loss below."""
    folders = sorted(run.samples.glob("step_*"))
    if len(folders) > MAX_ROWS:
        folders = [folders[round(i * (len(folders) - 1) / (MAX_ROWS - 1))] for i in range(MAX_ROWS)]
    rows = [(int(folder.name.removeprefix("step_")), list(_pictures(folder))) for folder in folders]
    loss = [(row["step"], row["loss"]) for row in Metrics(run.metrics).lines() if "loss" in row]
    publish(path, encode_png(progress_figure(rows, list(DRIVING_PROMPTS), loss, title), {}))


def has_web() -> bool:
    return all(importlib.util.find_spec(name) for name in ("starlette", "uvicorn"))


def _pictures(folder: Path) -> Iterator[NDArray[np.uint8] | None]:
    for index in range(len(DRIVING_PROMPTS)):
        path = folder / f"sample_{index:02d}.png"
        yield read_png(path)[0] if path.exists() else None


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _near(path: Path) -> Path:
    """As a person who stands here would write it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _tell(paragraph: str, *, gap: bool = False) -> None:
    if gap:
        _say("")
    _say(textwrap.fill(paragraph, LINE_LENGTH, break_long_words=False, break_on_hyphens=False))


def _say(text: str) -> None:
    print(text, flush=True)
