"""The loop of `halation watch`: generate from each checkpoint, score it, keep the best.

Both run as separate processes, so that a crash or the GPU memory of one checkpoint does not affect the next.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from halation.distributed.child_process import run_command
from halation.distributed.stop_signals import StopSignals, exit_code
from halation.errors import HalationError, InputError, Interrupted, format_count
from halation.generation.config import RESOLVED_SETTINGS
from halation.generation.metadata_and_summary import SUMMARY_FILE
from halation.progress import WatchProgress
from halation.runs import run_folder as runs
from halation.runs.lock import FolderMonitor
from halation.watcher import checkpoint_scanner, checkpoint_scores
from halation.watcher.checkpoint_scanner import CheckpointFolder, CheckpointScanner
from halation.watcher.config import WatchConfig

MAX_TRIES = 2
IMAGE_SETTINGS_KEY = "image settings"
"""Key in the record of the settings that all checkpoints are drawn with."""
FAILED_FILE, BEST_FILE, BEST_FOLDER, PINNED_FOLDER, FEATURES_FOLDER = (
    "failed.json",
    "best",
    "best_checkpoint",
    ".pinned",
    "features",
)


class ScoringError(Exception):
    """Generating from a checkpoint or scoring it failed; the watch continues with the next."""

    def __init__(self, phase: str, returncode: int, reason: str) -> None:
        super().__init__(reason)
        self.phase = phase
        self.returncode = returncode
        self.reason = reason


@dataclass(kw_only=True)
class WatchState:
    """State of this call about checkpoints without a score."""

    waiting: set[str] = field(default_factory=set)
    tries: dict[str, int] = field(default_factory=dict)
    shown_warnings: set[str] = field(default_factory=set)
    reference_features: set[Path] | None = None


class CheckpointWatcher:
    """The watch loop, on a locked output folder."""

    def __init__(
        self,
        config: WatchConfig,
        folder: Path,
        progress: WatchProgress,
        signals: StopSignals,
        prompts: str,
        monitor: FolderMonitor,
    ) -> None:
        self.monitor = monitor
        self.config = config
        self.folder = folder
        self.progress = progress
        self.signals = signals
        self.prompts = folder / prompts
        self.scanner = CheckpointScanner(folder=config.run, settle_s=config.settle_s)
        self.state = WatchState()
        self.scores: list[checkpoint_scores.CheckpointScore] = []
        self.failures: dict[str, dict[str, Any]] = {}

    def run(self) -> int:
        self._restore()
        self.update_results()
        is_checked = False
        while not self.signals.number:
            self.monitor.check_now()
            waiting = self.list_waiting()
            if self.config.once and not waiting and not self.scanner.unsettled:
                return self._finish()
            if not is_checked:
                self._check_evaluation()
                is_checked = True
            elif waiting:
                self.score_next(waiting)
            else:
                self._wait_for_next_scan()
        raise Interrupted(
            f"stopped with {format_count(len(self.list_waiting()), 'checkpoint')} waiting; "
            "run the same command to resume",
            exit_code(self.signals.number),
        )

    def _check_evaluation(self) -> None:
        """Validate the evaluation settings once, before waiting for the first checkpoint."""
        self.progress.show_status("checking the reference and the extractors")
        arguments = ["evaluate", "--check", "--prompts", str(self.prompts), *_format_flags(self.config, "num_samples")]
        result = run_command(
            [*arguments, *self._metric_arguments()],
            self.folder / "check.log",
            self.signals,
            lambda _value: None,
            self.monitor,
        )
        if result.returncode:
            raise _command_error(result.output_tail, result.returncode)

    def _restore(self) -> None:
        """Read the failures of an earlier call; they are retried, because the cause may be fixed."""
        if (self.folder / FAILED_FILE).exists():
            self.failures = runs.read_json_with_digest(self.folder / FAILED_FILE)
        runs.remove_temporaries(self.folder)
        checkpoint_scanner.clean_up(self.folder)

    def list_waiting(self) -> list[CheckpointFolder]:
        """Complete checkpoints without a score: oldest first, then those that failed once."""
        found = {each.name: each for each in self.scanner.scan()}
        for pin in sorted((self.folder / PINNED_FOLDER).glob("[!.]*")):
            step = checkpoint_scanner.parse_step(pin.name)
            if step is not None:  # the command was stopped while scoring it
                found[pin.name] = CheckpointFolder(step=step, name=pin.name, folder=pin)
        self._warn_skipped(found)
        scored = {score.step: score.checkpoint for score in self.scores}
        unscored = []
        for each in found.values():
            if each.step in scored:
                if scored[each.step] != each.name:
                    self._warn_once(
                        f"skipping {each.name}: step {each.step} was already scored from {scored[each.step]}"
                    )
            elif self._is_wanted(each) and self.state.tries.get(each.name, 0) < MAX_TRIES:
                unscored.append(each)
        self.state.waiting = {each.name for each in unscored}
        return sorted(unscored, key=lambda each: (self.state.tries.get(each.name, 0), each.step))

    def _is_wanted(self, checkpoint: CheckpointFolder) -> bool:
        return checkpoint.step % self.config.every == 0 and checkpoint.step >= self.config.min_step

    def _warn_skipped(self, found: dict[str, CheckpointFolder]) -> None:
        for name in sorted(self.state.waiting - found.keys()):
            self.progress.show_event("warning", f"{name} was removed before it was scored; skipping it")
        for name in sorted(self.scanner.unnumbered):
            self._warn_once(f"skipping {name}: its name has no number that could be a step")
        if not found:
            for name in sorted(self.scanner.unrecognized):
                self._warn_once(f"skipping {name}: it has no model_index.json, so it is not a pipeline")
        for name, problem in self.scanner.incomplete.items():
            self._warn_once(f"{name} is incomplete and no longer changes: {problem}")

    def _warn_once(self, text: str) -> None:
        if text not in self.state.shown_warnings:
            self.state.shown_warnings.add(text)
            self.progress.show_event("warning", text)

    def score_next(self, waiting: list[CheckpointFolder]) -> None:
        """Score the first waiting checkpoint; a failure is recorded and does not stop the watch."""
        checkpoint = waiting[0]
        self.state.waiting.discard(checkpoint.name)  # no warning if its folder is removed from now on
        if len(waiting) > 1:
            self.progress.show_event(
                "message", f"{format_count(len(waiting), 'checkpoint')} waiting; scoring the oldest first"
            )
        try:
            self.score_checkpoint(checkpoint)
        except ScoringError as error:
            self.monitor.check_now()
            if checkpoint.folder.exists() or (self.folder / PINNED_FOLDER / checkpoint.name).exists():
                self._handle_failure(checkpoint, error)
            else:
                self.progress.show_event("warning", f"{checkpoint.name} was removed before it was scored; skipping it")
        else:
            self.update_results()
            score = next(each for each in self.scores if each.step == checkpoint.step)
            metric = checkpoint_scores.deciding_metric(score, self.config.best_by)
            comparable = [each for each in self.scores if metric in each.metrics]
            self.progress.show_event(
                "scored",
                checkpoint_scores.format_score(score, comparable, metric),
                step=score.step,
                checkpoint=score.checkpoint,
                metrics={name: score.value(name) for name in score.metrics},
            )

    def score_checkpoint(self, checkpoint: CheckpointFolder) -> None:
        """Generate images, score them, write a grid; evaluation.json completes the step."""
        step_folder = checkpoint_scores.step_folder(self.folder, checkpoint.step)
        step_folder.mkdir(exist_ok=True)
        model, images_folder, scores_file = (
            self._pin_checkpoint(checkpoint),
            step_folder / "pictures",
            step_folder / ".scores.json",
        )
        scores_file.unlink(missing_ok=True)
        try:
            self._run_command("drawing", checkpoint, self._generate_arguments(model, images_folder), step_folder)
        except ScoringError as error:
            summary = read_finished_summary(images_folder)
            if not summary:
                raise
            if not self.config.allow_missing:
                found = f"{summary['failed']} of {format_count(summary['planned'], 'image')} failed"
                reason = f"{found}; with --allow_missing the others are scored"
                raise ScoringError(error.phase, error.returncode, reason) from error
        try:
            self._run_command("scoring", checkpoint, self._evaluate_arguments(images_folder, scores_file), step_folder)
        except ScoringError as error:
            if error.returncode != 1 or not scores_file.exists():  # with 1, images are missing
                raise
        self._remove_unused_features()
        evaluation = runs.read_json_with_digest(scores_file)
        problem = checkpoint_scores.find_evaluation_problem(evaluation)
        if problem:
            raise ScoringError("scoring", 1, problem)
        checkpoint_scores.write_grid(images_folder, step_folder / "grid.png")
        if not (model / runs.COMMIT_FILE).exists():  # a checkpoint of Halation has its own settings
            self._record_image_settings(images_folder)
        value = {"step": checkpoint.step, "checkpoint": checkpoint.name, **evaluation}
        runs.write_json_with_digest(step_folder / checkpoint_scores.EVALUATION_FILE, value)
        scores_file.unlink()

    def _pin_checkpoint(self, checkpoint: CheckpointFolder) -> Path:
        """Hard-link the checkpoint, in case its trainer removes it; return the folder to use."""
        pin = self.folder / PINNED_FOLDER / checkpoint.name
        try:
            if pin.exists() or checkpoint_scanner.hard_link(checkpoint.folder, pin):
                return pin
        except FileNotFoundError as error:
            raise ScoringError("taking it", 1, f"{error.filename}: {error.strerror}") from error
        return checkpoint.folder

    def _run_command(self, phase: str, checkpoint: CheckpointFolder, arguments: list[str], place: Path) -> None:
        status = f"step {checkpoint.step}: {phase}"
        self.progress.show_status(status)

        def report(value: dict[str, Any]) -> None:
            if {"done", "planned"} <= value.keys():
                self.progress.show_status(status, f"{value['done']} of {format_count(value['planned'], 'image')}")

        result = run_command(arguments, place / f"{arguments[0]}.log", self.signals, report, self.monitor)
        if result.returncode:
            raise ScoringError(phase, result.returncode, result.output_tail)

    def _generate_arguments(self, model: Path, images_folder: Path) -> list[str]:
        config = self.config
        arguments = [
            "generate",
            "--prompts_csv",
            str(self.prompts),
            "--model_path",
            str(model),
            "--output_dir",
            str(images_folder),
        ]
        arguments += _format_flags(config, "num_samples", "seed_start", "batch_size")
        # Checkpoints are compared, so all are drawn with the settings of the first scored one.
        known = {name: value for name, value in self._image_settings().items() if getattr(config, name) is None}
        config = replace(config, **known)
        given = [name for name in RESOLVED_SETTINGS if getattr(config, name) is not None]
        arguments += _format_flags(config, *given, *_non_empty_names(config, "dtype", "gpu_ids", "nproc"))
        return [*arguments, *(["--raw"] if config.raw else []), "--progress", "json"]

    def _image_settings(self) -> dict[str, Any]:
        """Return size, steps and guidance of the scored checkpoints; empty before the first score."""
        fixed = runs.read_record(runs.RunFolder(self.folder))["fixed"]
        if IMAGE_SETTINGS_KEY in fixed:
            return dict(fixed[IMAGE_SETTINGS_KEY])
        scored = (path.parent / "pictures" for path in self.folder.glob(f"step_*/{checkpoint_scores.EVALUATION_FILE}"))
        folder = next((each for each in scored if (each / runs.CONFIG_FILE).exists()), None)
        return {} if folder is None else _read_image_settings(folder)

    def _record_image_settings(self, images_folder: Path) -> None:
        """Record the settings of the first score, because its images may be removed."""
        run = runs.RunFolder(self.folder)
        if IMAGE_SETTINGS_KEY not in runs.read_record(run)["fixed"]:
            runs.record_facts(run, {IMAGE_SETTINGS_KEY: _read_image_settings(images_folder)}, accept_changes=False)

    def _evaluate_arguments(self, images_folder: Path, scores_file: Path) -> list[str]:
        arguments = ["evaluate", "--generated", str(images_folder), "--output", str(scores_file), "--progress", "none"]
        arguments += ["--cache_dir", str(self.folder / FEATURES_FOLDER)]
        return [
            *arguments,
            *(["--allow_missing"] if self.config.allow_missing else []),
            *self._metric_arguments(),
            *_format_flags(self.config, *_non_empty_names(self.config, "gpu_ids", "nproc")),
        ]

    def _metric_arguments(self) -> list[str]:
        """Flags for the reference, metrics and extractor of an evaluation."""
        config = self.config
        arguments = _format_flags(config, "reference", "num_reference", "resize")
        arguments += _format_flags(config, *_non_empty_names(config, "metrics", "extractor", "weights", "clip_model"))
        return [*arguments, *(["--allow_few"] if config.allow_few else [])]

    def _remove_unused_features(self) -> None:
        """Keep only the features of the reference; those of images are used once."""
        there = set((self.folder / FEATURES_FOLDER).glob("*"))
        if self.state.reference_features is None:
            self.state.reference_features = there
        for leftover in there - self.state.reference_features:
            runs.remove_folder(leftover)

    def _handle_failure(self, checkpoint: CheckpointFolder, error: ScoringError) -> None:
        if error.phase == "scoring" and error.returncode == InputError.exit_code and not self.scores:
            # An input error at the first checkpoint would occur at all of them.
            raise _command_error(error.reason, error.returncode)
        tries = self.state.tries[checkpoint.name] = self.state.tries.get(checkpoint.name, 0) + 1
        again = "retrying once" if tries < MAX_TRIES else "skipping it"
        self.progress.show_event("warning", f"step {checkpoint.step}: {error.phase} failed, {again}:\n{error.reason}")
        self._record_failure(checkpoint.name, checkpoint.step, tries, error)
        if tries == MAX_TRIES:
            runs.remove_folder(self.folder / PINNED_FOLDER / checkpoint.name)

    def _record_failure(self, name: str, step: int | None, tries: int, error: ScoringError) -> None:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        facts = {
            "step": step,
            "while": error.phase,
            "tries": tries,
            "exit_code": error.returncode,
            "reason": error.reason,
        }
        self.failures[name] = facts | {"time": when}
        runs.write_json_with_digest(self.folder / FAILED_FILE, self.failures)

    def _wait_for_next_scan(self) -> None:
        """Wait until the next scan or a signal."""
        unsettled = "".join(f", {name} ({why})" for name, why in self.scanner.unsettled.items())
        self.progress.show_status(f"waiting for checkpoints in {self.config.run}", unsettled.removeprefix(", "))
        end = time.monotonic() + self.config.poll_s
        while not self.signals.number and time.monotonic() < end:
            self.monitor.check()
            time.sleep(min(0.1, max(0.0, end - time.monotonic())))

    # -- results

    def update_results(self) -> None:
        """Update all files derived from the evaluations; also called at the start, after a kill."""
        self.scores = checkpoint_scores.read_scores(self.folder)
        if not self.scores:
            return
        checkpoint_scores.write_metrics(self.folder, self.scores, str(self.config.run))
        _, best = self._find_best()
        self._update_best_checkpoint(best)
        self._warn_changed_reference()
        scored = {score.checkpoint for score in self.scores}
        for score in self.scores:
            if self.config.images == "none" or (self.config.images == "best" and score is not best):
                runs.remove_folder(checkpoint_scores.step_folder(self.folder, score.step) / "pictures")
            runs.remove_folder(self.folder / PINNED_FOLDER / score.checkpoint)
        if scored & self.failures.keys():
            self.failures = {name: facts for name, facts in self.failures.items() if name not in scored}
            runs.write_json_with_digest(self.folder / FAILED_FILE, self.failures)

    def _find_best(self) -> tuple[str, checkpoint_scores.CheckpointScore]:
        """Return the deciding metric and the best checkpoint by it."""
        metric = checkpoint_scores.deciding_metric(self.scores[-1], self.config.best_by)
        return metric, checkpoint_scores.best_score([each for each in self.scores if metric in each.metrics], metric)

    def _warn_changed_reference(self) -> None:
        """Warn if the reference changed between scores: such scores cannot be compared."""
        first = checkpoint_scores.reference_hashes(self.scores[0])
        for score in self.scores[1:]:
            if checkpoint_scores.reference_hashes(score) - first:
                self._warn_once(
                    f"step {score.step} was compared with another reference than step {self.scores[0].step}"
                )

    def _update_best_checkpoint(self, best: checkpoint_scores.CheckpointScore) -> None:
        """Update best_checkpoint/ and `best`, the file with its name.

        `best` is removed before best_checkpoint/ is replaced, and written after it.
        """
        best_folder, best_file = self.folder / BEST_FOLDER, self.folder / BEST_FILE
        if best_folder.exists() and best_file.exists() and best_file.read_text().strip() == best.checkpoint:
            return
        names = [self.folder / PINNED_FOLDER, self.config.run, self.config.run / "checkpoints"]
        source = next((top / best.checkpoint for top in names if (top / best.checkpoint).is_dir()), None)
        incoming = runs.temporary_path(best_folder)
        try:
            checkpoint_scanner.copy_checkpoint(source or self.config.run / best.checkpoint, incoming)
        except FileNotFoundError:
            self._warn_once(f"{best.checkpoint} is the best, but it was removed: cannot copy it to {best_folder}")
            return
        best_file.unlink(missing_ok=True)
        runs.publish_folder(incoming, best_folder, "best_checkpoint")
        runs.write_atomic(best_file, f"{best.checkpoint}\n".encode())

    def _finish(self) -> int:
        for name, problem in self.scanner.incomplete.items():
            self._record_failure(name, checkpoint_scanner.parse_step(name), 0, ScoringError("waiting", 1, problem))
        scored = {score.checkpoint for score in self.scores}
        unscored = [name for name in (*self.state.tries, *self.scanner.incomplete) if name not in scored]
        if not self.scores and not unscored:
            raise InputError(
                f"no checkpoint to score in {self.config.run}",
                "step_* folders of a Halation run, or subfolders with a model_index.json and a number in their name",
                "check the folder, --min_step and --every, or leave --once out to wait for checkpoints",
            )
        if self.scores:
            metric, best = self._find_best()
            num = len(self.scores)
            self.progress.show_event(
                "message",
                f"{format_count(num, 'checkpoint')} scored; the best by {metric} is {best.checkpoint}: "
                f"{self.folder / BEST_FOLDER}; all in {self.folder / 'metrics.png'}",
            )
        if unscored:
            self.progress.show_event(
                "warning", f"without a score: {', '.join(unscored)}; the reasons are in {self.folder / FAILED_FILE}"
            )
        return 1 if unscored or any(score.num_missing for score in self.scores) else 0


def read_finished_summary(images_folder: Path) -> dict[str, Any]:
    """Return the summary of a generation that has tried all images and made some, else {}."""
    if not (images_folder / SUMMARY_FILE).is_file():
        return {}
    summary: dict[str, Any] = runs.read_json_with_digest(images_folder / SUMMARY_FILE)
    return summary if summary["done"] and not summary["open"] else {}


def _command_error(message: str, code: int) -> HalationError:
    """Wrap the error message of a subprocess in an error of this command."""
    failure = HalationError(message.removeprefix("halation: "))
    if code == InputError.exit_code:
        failure.exit_code = InputError.exit_code
    return failure


def _read_image_settings(images_folder: Path) -> dict[str, Any]:
    fixed = runs.read_record(runs.RunFolder(images_folder))["fixed"]
    return {name: fixed[name] for name in RESOLVED_SETTINGS if name in fixed}


def _non_empty_names(config: WatchConfig, *names: str) -> list[str]:
    return [name for name in names if getattr(config, name) not in (None, "", (), 0)]


def _format_flags(config: WatchConfig, *names: str) -> list[str]:
    """Format settings as flags of the same name for another command."""
    arguments = []
    for name in names:
        value = getattr(config, name)
        arguments += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return arguments
