"""A watch that goes on: new checkpoints are drawn from and scored one after another, and what follows from their scores is kept up to date.

Drawing and scoring are commands of their own, so that a crash or the GPU memory of one checkpoint never harms the next.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halation.distributed.signals import StopSignals, exit_code
from halation.distributed.subcommand import run_command
from halation.errors import HalationError, InputError, Interrupted
from halation.runs import folder as runs
from halation.watcher import checkpoint_scanner, checkpoint_scores
from halation.watcher.checkpoint_scanner import Arrivals, Checkpoint
from halation.watcher.config import WatchConfig
from halation.watcher.display import Spectator

MAX_TRIES = 2
FAILED_FILE, BEST_FILE, BEST_FOLDER, PINNED, FEATURES = "failed.json", "best", "best_checkpoint", ".pinned", "features"


class Unscored(Exception):
    """A checkpoint could not be drawn from or scored; the next one may."""

    def __init__(self, doing: str, code: int, reason: str) -> None:
        super().__init__(reason)
        self.doing = doing
        self.code = code
        self.reason = reason


@dataclass(kw_only=True)
class Memory:
    """What this call has seen of checkpoints that have no score."""

    waiting: set[str] = field(default_factory=set)
    tries: dict[str, int] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    features: set[Path] | None = None


class Watch:
    """One call on a held folder."""

    def __init__(
        self, config: WatchConfig, folder: Path, spectator: Spectator, signals: StopSignals, prompts: str
    ) -> None:
        self.config = config
        self.folder = folder
        self.spectator = spectator
        self.signals = signals
        self.prompts = folder / prompts
        self.arrivals = Arrivals(folder=config.run, settle_s=config.settle_s)
        self.memory = Memory()
        self.verdicts: list[checkpoint_scores.Verdict] = []
        self.failed: dict[str, dict[str, Any]] = {}

    def run(self) -> int:
        self._recall()
        self.settle()
        rehearsed = False
        while not self.signals.number:
            waiting = self.waiting()
            if self.config.once and not waiting and not self.arrivals.unsettled:
                return self._end()
            if not rehearsed:
                self._rehearse()
                rehearsed = True
            elif waiting:
                self.take(waiting)
            else:
                self._pause()
        raise Interrupted(
            f"stopped with {len(self.waiting())} checkpoints waiting; the same command goes on",
            exit_code(self.signals.number),
        )

    def _rehearse(self) -> None:
        """What would be refused of every checkpoint after its pictures are drawn is refused before the first, who may be hours away."""
        self.spectator.doing("looking at the reference and the extractors")
        words = ["evaluate", "--check", "--prompts", str(self.prompts), *_flags(self.config, "num_samples")]
        ended = run_command([*words, *self._rules()], self.folder / "check.log", self.signals, lambda _value: None)
        if ended.code:
            raise _refusal(ended.words, ended.code)

    def _recall(self) -> None:
        """Failures of an earlier call are known, and tried again: whoever calls again may have mended the cause."""
        if (self.folder / FAILED_FILE).exists():
            self.failed = runs.read_json(self.folder / FAILED_FILE)
        runs.remove_temporaries(self.folder)
        checkpoint_scanner.swept(self.folder)

    def waiting(self) -> list[Checkpoint]:
        """Whole checkpoints without a score, the oldest first, after them those that failed once."""
        found = {each.name: each for each in self.arrivals.look()}
        for pin in sorted((self.folder / PINNED).glob("[!.]*")):
            step = checkpoint_scanner.step_of(pin.name)
            if step is not None:  # it was being scored when this was stopped
                found[pin.name] = Checkpoint(step=step, name=pin.name, folder=pin)
        self._notice(found)
        scored = {verdict.step: verdict.checkpoint for verdict in self.verdicts}
        fresh = []
        for each in found.values():
            if each.step in scored:
                if scored[each.step] != each.name:
                    self._warn_once(
                        f"{each.name} is left out: step {each.step} was scored from {scored[each.step]} already"
                    )
            elif self._is_wanted(each) and self.memory.tries.get(each.name, 0) < MAX_TRIES:
                fresh.append(each)
        self.memory.waiting = {each.name for each in fresh}
        return sorted(fresh, key=lambda each: (self.memory.tries.get(each.name, 0), each.step))

    def _is_wanted(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.step % self.config.every == 0 and checkpoint.step >= self.config.min_step

    def _notice(self, found: dict[str, Checkpoint]) -> None:
        for name in sorted(self.memory.waiting - found.keys()):
            self.spectator.warn(f"{name} was removed before its turn came; it is skipped")
        for name in sorted(self.arrivals.unnumbered):
            self._warn_once(f"{name} is left out: there is no number in its name that could be a step")
        if not found:
            for name in sorted(self.arrivals.foreign):
                self._warn_once(f"{name} is left out: it holds no model_index.json, so it is no pipeline")
        for name, problem in self.arrivals.broken.items():
            self._warn_once(f"{name} is not whole and does not change any more: {problem}")

    def _warn_once(self, text: str) -> None:
        if text not in self.memory.told:
            self.memory.told.add(text)
            self.spectator.warn(text)

    def take(self, waiting: list[Checkpoint]) -> None:
        """Score the first of them; what goes wrong with it is remembered, and the others go on."""
        checkpoint = waiting[0]
        if len(waiting) > 1:
            self.spectator.say(f"{len(waiting)} checkpoints wait; the oldest first")
        try:
            self.score(checkpoint)
        except Unscored as error:
            if checkpoint.folder.exists() or (self.folder / PINNED / checkpoint.name).exists():
                self._fail(checkpoint, error)
            else:
                self.memory.waiting.discard(checkpoint.name)
                self.spectator.warn(f"{checkpoint.name} was removed before it was scored; it is skipped")
        else:
            self.settle()
            verdict = next(each for each in self.verdicts if each.step == checkpoint.step)
            metric = checkpoint_scores.deciding(verdict, self.config.best_by)
            alike = [each for each in self.verdicts if metric in each.metrics]
            self.spectator.scored(checkpoint_scores.sentence(verdict, alike, metric), verdict)

    def score(self, checkpoint: Checkpoint) -> None:
        """Pictures, numbers, a grid; the evaluation file comes last and says that the step is done."""
        place = checkpoint_scores.folder_of(self.folder, checkpoint.step)
        place.mkdir(exist_ok=True)
        model, drawn, scores = self._pinned(checkpoint), place / "pictures", place / ".scores.json"
        self._command("drawing", checkpoint, self._drawing(model, drawn), place)
        self._command("scoring", checkpoint, self._scoring(drawn, scores), place)
        self._sweep_features()
        evaluation = runs.read_json(scores)
        problem = checkpoint_scores.problem_of(evaluation)
        if problem:
            raise Unscored("scoring", 1, problem)
        checkpoint_scores.write_grid(drawn, place / "grid.png")
        value = {"step": checkpoint.step, "checkpoint": checkpoint.name, **evaluation}
        runs.publish_json(place / checkpoint_scores.EVALUATION_FILE, value)
        scores.unlink()

    def _pinned(self, checkpoint: Checkpoint) -> Path:
        """The checkpoint under a second name, which its trainer does not know of; itself where there can be no second name."""
        pin = self.folder / PINNED / checkpoint.name
        try:
            if pin.exists() or checkpoint_scanner.linked(checkpoint.folder, pin):
                return pin
        except FileNotFoundError as error:
            raise Unscored("taking it", 1, f"{error.filename}: {error.strerror}") from error
        return checkpoint.folder

    def _command(self, doing: str, checkpoint: Checkpoint, words: list[str], place: Path) -> None:
        where = f"step {checkpoint.step}: {doing}"
        self.spectator.doing(where)

        def report(value: dict[str, Any]) -> None:
            if {"done", "planned"} <= value.keys():
                self.spectator.doing(where, f"{value['done']} of {value['planned']} pictures")

        ended = run_command(words, place / f"{words[0]}.log", self.signals, report)
        if ended.code:
            raise Unscored(doing, ended.code, ended.words)

    def _drawing(self, model: Path, drawn: Path) -> list[str]:
        config = self.config
        words = ["generate", "--prompts_csv", str(self.prompts), "--model_path", str(model), "--output_dir", str(drawn)]
        words += _flags(config, "num_samples", "seed_start", "batch_size")
        given = ("num_inference_steps", "guidance_scale", "height", "width", "dtype", "gpu_ids", "nproc")
        words += _flags(config, *_given(config, *given))
        return [*words, *(["--raw"] if config.raw else []), "--progress", "json"]

    def _scoring(self, drawn: Path, scores: Path) -> list[str]:
        words = ["evaluate", "--generated", str(drawn), "--output", str(scores), "--progress", "none"]
        words += ["--cache_dir", str(self.folder / FEATURES)]
        return [*words, *self._rules(), *_flags(self.config, *_given(self.config, "gpu_ids", "nproc"))]

    def _rules(self) -> list[str]:
        """What an evaluation compares, and how."""
        config = self.config
        words = _flags(config, "reference", "num_reference", "resize")
        words += _flags(config, *_given(config, "metrics", "extractor", "weights", "clip_model"))
        return [*words, *(["--allow_few"] if config.allow_few else [])]

    def _sweep_features(self) -> None:
        """Features of the reference serve again, and came with the first scoring of this call; those of later pictures serve nobody."""
        there = set((self.folder / FEATURES).glob("*"))
        if self.memory.features is None:
            self.memory.features = there
        for leftover in there - self.memory.features:
            checkpoint_scanner.removed(leftover)

    def _fail(self, checkpoint: Checkpoint, error: Unscored) -> None:
        if error.doing == "scoring" and error.code == InputError.exit_code and not self.verdicts:
            # What is refused of the first one would be refused of all.
            raise _refusal(error.reason, error.code)
        tries = self.memory.tries[checkpoint.name] = self.memory.tries.get(checkpoint.name, 0) + 1
        again = "it is tried once more" if tries < MAX_TRIES else "it is left out"
        self.spectator.warn(f"step {checkpoint.step}: {error.doing} failed, {again}:\n{error.reason}")
        self._record_failure(checkpoint.name, checkpoint.step, tries, error)
        if tries == MAX_TRIES:
            checkpoint_scanner.removed(self.folder / PINNED / checkpoint.name)

    def _record_failure(self, name: str, step: int | None, tries: int, error: Unscored) -> None:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        facts = {"step": step, "while": error.doing, "tries": tries, "exit_code": error.code, "reason": error.reason}
        self.failed[name] = facts | {"time": when}
        runs.publish_json(self.folder / FAILED_FILE, self.failed)

    def _pause(self) -> None:
        """Wait for the next look; a signal ends it."""
        held_up = "".join(f", {name} ({why})" for name, why in self.arrivals.unsettled.items())
        self.spectator.doing(f"waiting for checkpoints in {self.config.run}", held_up.removeprefix(", "))
        end = time.monotonic() + self.config.poll_s
        while not self.signals.number and time.monotonic() < end:
            time.sleep(min(0.1, max(0.0, end - time.monotonic())))

    # -- after

    def settle(self) -> None:
        """Bring everything that follows from the evaluations up to date; a call that was killed is mended by the next one."""
        self.verdicts = checkpoint_scores.read_verdicts(self.folder)
        if not self.verdicts:
            return
        checkpoint_scores.write_metrics(self.folder, self.verdicts, str(self.config.run))
        _, best = self._best()
        self._keep(best)
        self._compare()
        scored = {verdict.checkpoint for verdict in self.verdicts}
        for verdict in self.verdicts:
            if self.config.pictures == "none" or (self.config.pictures == "best" and verdict is not best):
                checkpoint_scanner.removed(checkpoint_scores.folder_of(self.folder, verdict.step) / "pictures")
            checkpoint_scanner.removed(self.folder / PINNED / verdict.checkpoint)
        if scored & self.failed.keys():
            self.failed = {name: facts for name, facts in self.failed.items() if name not in scored}
            runs.publish_json(self.folder / FAILED_FILE, self.failed)

    def _best(self) -> tuple[str, checkpoint_scores.Verdict]:
        """The metric that decides, and the best checkpoint by it."""
        metric = checkpoint_scores.deciding(self.verdicts[-1], self.config.best_by)
        return metric, checkpoint_scores.best_of([each for each in self.verdicts if metric in each.metrics], metric)

    def _compare(self) -> None:
        """Numbers stand on one line only where they were compared with the same pictures; a reference may change behind our back."""
        first = checkpoint_scores.reference_of(self.verdicts[0])
        for verdict in self.verdicts[1:]:
            if checkpoint_scores.reference_of(verdict) - first:
                self._warn_once(
                    f"step {verdict.step} was compared with another reference than step {self.verdicts[0].step}"
                )

    def _keep(self, best: checkpoint_scores.Verdict) -> None:
        """best_checkpoint/ is the best one's files, and `best` its name: written after them and taken away before."""
        place, card = self.folder / BEST_FOLDER, self.folder / BEST_FILE
        if place.exists() and card.exists() and card.read_text().strip() == best.checkpoint:
            return
        names = [self.folder / PINNED, self.config.run, self.config.run / "checkpoints"]
        source = next((top / best.checkpoint for top in names if (top / best.checkpoint).is_dir()), None)
        incoming = self.folder / f".{BEST_FOLDER}.incoming"
        checkpoint_scanner.removed(incoming)
        try:
            checkpoint_scanner.kept(source or self.config.run / best.checkpoint, incoming)
        except FileNotFoundError:
            self._warn_once(f"{best.checkpoint} is the best, but it was removed: {place} cannot hold it")
            return
        card.unlink(missing_ok=True)
        checkpoint_scanner.removed(place)
        incoming.rename(place)
        runs.publish(card, f"{best.checkpoint}\n".encode())

    def _end(self) -> int:
        for name, problem in self.arrivals.broken.items():
            self._record_failure(name, checkpoint_scanner.step_of(name), 0, Unscored("waiting", 1, problem))
        scored = {verdict.checkpoint for verdict in self.verdicts}
        lost = [name for name in (*self.memory.tries, *self.arrivals.broken) if name not in scored]
        if not self.verdicts and not lost:
            raise InputError(
                f"no checkpoint to score in {self.config.run}",
                "step_* folders of a Halation run, or subfolders with a model_index.json and a number in their name",
                "check the folder, --min_step and --every, or leave --once out to wait for checkpoints",
            )
        if self.verdicts:
            metric, best = self._best()
            num = len(self.verdicts)
            self.spectator.say(
                f"{num} checkpoint{'s' if num != 1 else ''} scored; the best by {metric} is {best.checkpoint}: "
                f"{self.folder / BEST_FOLDER}; all in {self.folder / 'metrics.png'}"
            )
        if lost:
            self.spectator.warn(f"without a score: {', '.join(lost)}; the reasons are in {self.folder / FAILED_FILE}")
        return 1 if lost else 0


def _refusal(words: str, code: int) -> HalationError:
    """What another command said, as our own error."""
    failure = HalationError(words.removeprefix("halation: "))
    if code == InputError.exit_code:
        failure.exit_code = InputError.exit_code
    return failure


def _given(config: WatchConfig, *names: str) -> list[str]:
    return [name for name in names if getattr(config, name) not in (None, "", (), 0)]


def _flags(config: WatchConfig, *names: str) -> list[str]:
    """Settings as the flags of the same name of another command."""
    words = []
    for name in names:
        value = getattr(config, name)
        words += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words
