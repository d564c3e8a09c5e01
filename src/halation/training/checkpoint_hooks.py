"""What is due at its dates: held-out loss and samples after a save, and evaluations, by all ranks, with the EMA in the model's place."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from halation.data.dataset import Pictures
from halation.distributed.engines.ddp_fsdp import Engine
from halation.distributed.world import Vigil, World
from halation.errors import HalationError, InputError, Interrupted, RankFailure
from halation.flow.ema import Ema
from halation.images.png import read_png
from halation.models.denoiser import Denoiser
from halation.runs import folder as runs
from halation.runs.folder import publish_json
from halation.sampling.denoiser_sampler import Drawing, SampleSettings, Shares
from halation.sampling.files import Beside, ByRank, Place, Row, is_drawn, publish_index
from halation.training import heldout
from halation.training.config import TrainConfig
from halation.training.evaluation import Appraisal, Report, free_memory, is_line, lines_of, publish_plot
from halation.training.objectives import denoising
from halation.training.trackers import Tracker

log = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True)
class Duties:
    """Held-out loss and samples of saved steps, and evaluations; called again for a step they do only what is still open."""

    world: World
    config: TrainConfig
    run: runs.Run
    source: Pictures
    denoiser: Denoiser
    engine: Engine
    ema: Ema
    settings: SampleSettings
    metrics: runs.Metrics
    trackers: list[Tracker]
    stop: Callable[[], int]
    say: Callable[[str], None]
    epoch_of: Callable[[int], int]
    appraisal: Appraisal | None = None
    beside: Place | None = None
    others: tuple[Engine, ...] = ()
    """Engines of networks that are trained and not drawn from."""

    def __post_init__(self) -> None:
        self.num_heldout = min(self.config.heldout_pictures, self.source.num_heldout)
        self.drawings = itertools.count()

    def do(self, step: int, loss: float) -> None:
        """Everything that is open for this step."""
        wanted, num_ranks = self.world.from_first(self._open(step) if self.world.first else None)
        self._do(step, loss, wanted, self._place(step, num_ranks))

    def sample(self, step: int, loss: float) -> None:
        """The samples of a step that is no date, and nothing else, in a folder of its own: names by the epoch belong to its date."""
        place = Place(folder=self.run.samples_at(step), names=self._names(), label=self._label())
        if self.world.first:
            place.clear()  # what a start that never saved this step may have left
        self._do(step, loss, ["samples", *(["raw"] if self.config.sample_raw else [])], place)

    def _do(self, step: int, loss: float, wanted: list[str], place: Place) -> None:
        if "samples" in wanted and self.world.first:
            self._claim(step, place)
        drawn: list[tuple[Place, list[Row]]] = []
        with self._room():
            with self._averaged():
                if "heldout" in wanted:
                    self._heldout(step)
                if "samples" in wanted:
                    drawn.append(self._draw(step, place))
            if "raw" in wanted:
                drawn.append(self._draw(step, dataclasses.replace(place, suffix="_raw")))
                self.engine.at_rest()
        if drawn and self.world.first:
            self._publish(step, loss, drawn)

    def _open(self, step: int) -> tuple[list[str], int]:
        """What is not there yet, everything after a save and after a kill what it left undone, and the ranks its names are made for."""
        wanted = []
        known = any(row.get("metric") == "heldout_loss" and row["step"] == step for row in self.metrics.lines())
        if self.num_heldout and not known:
            wanted.append("heldout")
        if not (self.config.sample and self.settings.prompts):
            return wanted, self.world.size
        place = self._place(step, self.world.size)
        said = place.recorded()
        if said.get("step", step) != step or said.get("settings", self._settings_json()) != self._settings_json():
            said = {}
            place.clear()  # drawn another way before this start, or at another step of this epoch; the names would hide it
        elif not said and place.prefix:
            place.clear()  # whatever these are of
        place = self._place(step, said.get("ranks", self.world.size))  # as many as began, if now there are others
        places = [place, dataclasses.replace(place, suffix="_raw")] if self.config.sample_raw else [place]
        done = place.grid.exists() and all(is_drawn(each, spec) for each in places for spec in self.settings.specs())
        if not done:
            wanted += ["samples", *(["raw"] if self.config.sample_raw else [])]
        return wanted, said.get("ranks", self.world.size)

    def _place(self, step: int, num_ranks: int) -> Place:
        if self.config.sample_names == "rank":
            by = ByRank(epoch=self.epoch_of(step), num_prompts=len(self.settings.prompts), num_ranks=num_ranks)
            return Place(folder=self.run.samples, names=by, label=self._label())
        return Place(folder=self.run.samples_at(step), names=self._names(), label=self._label())

    def _names(self) -> Literal["index", "gpu"]:
        return "gpu" if self.config.sample_names == "gpu" else "index"

    def _label(self) -> str:
        return "student" if self.beside else ""

    def _claim(self, step: int, place: Place) -> None:
        """Say how the pictures of this folder are drawn before the first is there: a kill may leave some of them behind."""
        with contextlib.suppress(OSError):  # a disk that cannot be written costs the samples, not the training
            place.folder.mkdir(parents=True, exist_ok=True)
            publish_json(place.index, self._facts(step, place) | {"samples": []})

    def _facts(self, step: int, place: Place) -> dict[str, Any]:
        names = place.names
        by_rank = {"epoch": names.epoch, "ranks": names.num_ranks} if isinstance(names, ByRank) else {}
        return {"step": step, **by_rank, "settings": self._settings_json()}

    def _settings_json(self) -> dict[str, Any]:
        settings: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self.settings)))
        return settings

    def _heldout(self, step: int) -> None:
        with Vigil(self.world, f"held-out loss at step {step}", self.config.dist_timeout_s) as vigil:
            losses = heldout.heldout_loss(
                self.world,
                self.denoiser,
                self.source,
                denoising(self.denoiser),
                num_pictures=self.num_heldout,
                dtype=self.config.dtype,
                beat=vigil.beat,
            )
            words = vigil.finish(losses)
        if not self.world.first:
            return
        values = heldout.summary(words, self.num_heldout)
        bins = {name: value for name, value in values.items() if name != "heldout_loss"}
        self.metrics.append({"step": step, "metric": "heldout_loss", "value": values["heldout_loss"], "bins": bins})
        for tracker in self.trackers:
            tracker.scalars(step, {f"heldout/{name}": value for name, value in values.items()})

    def _draw(self, step: int, place: Place) -> tuple[Place, list[Row]]:
        began = time.perf_counter()
        suffix = place.suffix
        drawing = self._drawing(self.settings, "contiguous" if place.prefix else "round")
        rows = drawing.run(place, f"step {step}{suffix} #{next(self.drawings)}")
        failed = sum(row["state"] == "failed" for row in rows)
        seconds = time.perf_counter() - began
        log.info("samples of step %d%s: %d done, %d failed, %.2f s", step, suffix, len(rows) - failed, failed, seconds)
        return place, rows

    def _drawing(self, settings: SampleSettings, shares: Shares = "round") -> Drawing:
        return Drawing(
            self.world,
            self.denoiser,
            settings,
            sharded=self.engine.sharded,
            timeout_s=self.config.sample_timeout_s or self.config.dist_timeout_s,
            stop=self.stop,
            shares=shares,
        )

    def evaluate(self, step: int) -> None:
        """The numbers of this step; one that cannot be made is reported, and training goes on."""
        if self.appraisal is None:
            return
        report = self.appraisal.report_of(step) if self.world.first else None
        if self.world.from_first(report is None):
            report = self._appraise(self.appraisal, step)
            free_memory(self.world.device)
        if self.world.first and report is not None:
            self._tell(report)

    def _appraise(self, appraisal: Appraisal, step: int) -> Report | None:
        try:
            with self._room():
                return appraisal.run(step, self._drawing(appraisal.settings), self._averaged, self.stop)
        except (RankFailure, Interrupted):
            raise
        except HalationError as error:
            log.error("the evaluation of step %d failed; training goes on: %s", step, error)
            self.engine.weights_changed()  # an evaluation fails on all ranks or on none
            return None

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        """Memory for drawing where it is scarce."""
        with contextlib.ExitStack() as stack:
            for engine in (self.engine, *self.others) if self.config.sample_offload else ():
                stack.enter_context(engine.parked())
            yield

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """The averages in the model's place; whatever happens inside, shards are where the EMA expects them when it goes back.

        After an error the module is not told of its own weights again: that may take all ranks, and the error may be one rank's.
        """
        self.ema.swap()
        try:
            self.engine.weights_changed()
            yield
        finally:
            self.engine.at_rest()
            self.ema.swap()
        self.engine.weights_changed()

    def _tell(self, report: Report) -> None:
        """The report's numbers to metrics.jsonl and the trackers, unless a kill came between the report and the rest of this."""
        step, lines = report["step"], lines_of(report)
        known = [row for row in self.metrics.lines() if row["step"] == step and is_line(row)]
        lines = [line for line in lines if line not in known]
        if not lines:
            return
        for line in lines:
            self.metrics.append(line)
        for tracker in self.trackers:
            tracker.scalars(step, {f"eval/{line['metric']}": line["value"] for line in lines})
        try:
            publish_plot(self.run, self.metrics.lines())
        except OSError as error:
            log.error("cannot plot the evaluations; training goes on: %s", error)
        words = ", ".join(f"{line['metric']} {line['value']:.4g}" for line in lines)
        few = " (few pictures: a quick look)" if any(line["few"] for line in lines) else ""
        self.say(f"evaluation of step {step}: {words}{few}")
        log.info("evaluation of step %d in %.1f s: %s", step, report["seconds"], words)

    def _publish(self, step: int, loss: float, drawn: list[tuple[Place, list[Row]]]) -> None:
        """Grid and index, and the pictures to the trackers under one tag a prompt."""
        (place, rows), *others = drawn
        beside = None
        if self.beside:
            files = {spec.index: self.beside.picture(spec) for spec in self.settings.specs()}
            beside = Beside(label=self.beside.label, files=files)
        try:
            publish_index(place, rows, self._facts(step, place) | {"loss": loss}, others, beside)
            pictures = {
                f"samples{where.suffix}/{row['index']:02d} {row['prompt'][:60]}": read_png(where.folder / row["file"])[
                    0
                ]
                for where, those in drawn
                for row in those
                if row["state"] == "done"
            }
        except OSError as error:
            log.error("cannot write to directory %s: %s; training goes on", place.folder, error.strerror or error)
            return
        except InputError as error:  # somebody removed or damaged a picture between its writing and now
            log.error("a sample cannot be read again; training goes on: %s", error)
            return
        for tracker in self.trackers:
            tracker.pictures(step, pictures)
        missing = sum(row["state"] != "done" for row in rows)
        self.say(f"samples of step {step}: {place.grid}" + (f" ({missing} missing)" if missing else ""))
