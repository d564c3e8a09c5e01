"""Evaluations in training: the average of the weights draws on all ranks, its pictures become features where they are, and the first counts."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import itertools
import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halation import plan
from halation.data.dataset import Pictures
from halation.distributed import rng
from halation.distributed.launcher import computes_on
from halation.distributed.world import Vigil, World, alive, on_first
from halation.errors import HalationError, InputError, refused_by_system
from halation.evaluation import features
from halation.evaluation.config import EvaluateConfig
from halation.evaluation.extractor_plan import cast, embedding, facts_of, side_of, versions
from halation.evaluation.extractors.extractor import Extractor
from halation.evaluation.extractors.registry import open_extractor
from halation.evaluation.feature_store import Store
from halation.evaluation.features import Desk
from halation.evaluation.image_sources import hashed
from halation.evaluation.metrics import measure
from halation.evaluation.preprocess import Preparations, Preparer, prepare
from halation.faults import fault_point
from halation.images import plot
from halation.images.png import encode_png
from halation.runs import folder as runs
from halation.sampling.denoiser_sampler import Drawing, SampleSettings
from halation.sampling.files import Row
from halation.specs import Sheet
from halation.training.config import TrainConfig
from halation.training.evaluation_reference import comparison

log = logging.getLogger(__name__)


Take = Callable[[range, list[np.ndarray]], None]
"""What is done with the pictures of a whole sheet, given by their indices."""
Report = dict[str, Any]
Beat = Callable[[], None]
SURVIVED = (HalationError, OSError, RuntimeError, ValueError, MemoryError)


def evaluation_settings(
    samples: SampleSettings, prompts: Sequence[str], *, num: int, steps: int, sheet_size: int
) -> SampleSettings:
    """As the run's samples, for `num` pictures of these prompts, over and over where they are fewer.

    Every picture has a seed of its own, whatever samples do: pictures from one noise would be less varied than the model.
    """
    return dataclasses.replace(
        samples, prompts=tuple(islice(cycle(prompts), num)), steps=steps, sheet_size=sheet_size, same_seed=False
    )


class Handing:
    """Hands the pictures of each whole sheet on; a sheet that lacks one is not worth scoring."""

    def __init__(self, take: Take) -> None:
        self._take = take

    def put(self, sheet: Sheet, pictures: Mapping[int, np.ndarray], rows: Sequence[Row]) -> None:
        if len(pictures) == len(rows):
            first = sheet.specs[0].index
            self._take(range(first, first + len(rows)), [pictures[number] for number in range(len(rows))])

    def finish(self) -> None:
        """Everything was handed on at once."""


class Appraisal:
    """The evaluations of one run; everything that can be refused is refused when it is made."""

    def __init__(
        self, world: World, config: TrainConfig, run: runs.Run, source: Pictures, samples: SampleSettings
    ) -> None:
        self.world = world
        self.config = config
        self.run_folder = run.folder
        self.folder = run.folder / "evaluation"
        self.timeout_s = config.sample_timeout_s or config.dist_timeout_s
        self.turns = itertools.count()
        self.compared = comparison(config, source, run)
        self.settings = evaluation_settings(
            samples,
            self.compared.prompts,
            num=config.eval_pictures,
            steps=config.eval_steps or samples.steps,
            sheet_size=config.eval_batch_size,
        )
        asked = EvaluateConfig(
            metrics=config.eval_metrics,
            extractor=config.eval_extractor,
            weights=config.eval_weights,
            clip_model=config.eval_clip_model,
        )
        self.cast = cast(asked)
        self.computes_on = computes_on(str(world.device))
        self.facts: dict[str, dict[str, Any]] = on_first(world, "the extractors", self._look, config.dist_timeout_s)

    def _look(self, beat: Beat) -> dict[str, dict[str, Any]]:
        """Open every extractor once, so that what is missing is told now and what must be downloaded is there; keep none."""
        facts = {}
        with self._undisturbed():
            for label in self.cast.extractors:
                try:
                    facts[label] = facts_of(self._opened(label, "cpu"))
                except InputError as error:
                    raise _in_our_flags(error, label) from error
                beat()
        return facts

    def _opened(self, label: str, device: str) -> Extractor:
        name, weights = self.cast.extractors[label]
        return open_extractor(name, device=device, weights=weights)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """A network that is built draws first weights nobody asked for; the run's random states must not know."""
        before = rng.capture(self.world.device)
        try:
            yield
        finally:
            rng.restore(before, self.world.device)

    # -- what is there already

    @property
    def key(self) -> str:
        """Everything besides the weights of the model that decides the numbers."""
        facts = {label: _without_paths(facts) for label, facts in self.facts.items()}
        how = [self.config.eval_metrics, asdict(self.settings), self.config.threads, self.computes_on]
        return hashed([facts, how, self.compared.reference.key])[:24]

    def report_of(self, step: int) -> Report | None:
        """What an evaluation of this step has found, if it was made in this very way."""
        try:
            report: Report = json.loads(self._report_path(step).read_bytes())
        except (OSError, ValueError):
            return None
        return report if report.get("key") == self.key else None

    def _report_path(self, step: int) -> Path:
        return self.folder / f"{runs.step_name(step)}.json"

    # -- an evaluation

    def run(
        self, step: int, drawing: Drawing, averaged: Callable[[], AbstractContextManager[None]], stop: Callable[[], int]
    ) -> Report | None:
        """On all ranks; the same report everywhere, or None where it was stopped. An error is the same on all ranks too.

        Extractors are opened here and by nobody kept: between evaluations the device's memory is training's.
        """
        began = time.perf_counter()
        name = f"evaluating step {step} #{next(self.turns)}"
        extractors: dict[str, Extractor] = {}

        def open_all(beat: Beat) -> None:
            with self._undisturbed():
                for label in self.cast.extractors:
                    extractors[label] = self._opened(label, str(self.world.device))
                    beat()

        self._together(f"{name}: extractors", open_all)
        reference = self._reference_desks(extractors)
        if not self._fill_reference(reference, f"{name}: reference", stop):
            return None
        generated = self._generated_desks(step, extractors)
        with averaged():
            rows = self._draw(drawing, generated, name)
        _refuse_failed(rows, len(self.settings.prompts))
        if self._lacking(generated):
            return None

        def count(beat: Beat) -> Report:
            report = alive(lambda: self._report(step, reference, generated, began), beat)
            runs.publish_json(self._report_path(step), report)
            for folder in self.folder.glob("step_*/"):
                shutil.rmtree(folder, ignore_errors=True)
            return report

        found: Report = on_first(self.world, f"{name}: numbers", count, self.timeout_s)
        return found

    def _together(self, name: str, action: Callable[[Beat], None]) -> None:
        """On all ranks apart; where it fails on one, all hear why and none goes on."""
        error = ""
        with Vigil(self.world, name, self.timeout_s) as vigil:
            try:
                action(vigil.beat)
            except SURVIVED as problem:
                log.debug("%s failed", name, exc_info=True)
                error = refused_by_system(problem) or f"{type(problem).__name__}: {problem}"
            words = vigil.finish(error)
        for rank, word in enumerate(words):
            if word:
                raise HalationError(f"rank {rank}: {word}")

    def _lacking(self, desks: Mapping[str, Desk]) -> list[int]:
        """Chunks that are not there for all desks, as the first rank sees it."""
        missing: list[int] = self.world.from_first(
            sorted({chunk for desk in desks.values() for chunk in desk.store.sweep()}) if self.world.first else None
        )
        return missing

    def _how(self, label: str) -> list[Any]:
        """What decides the features of a picture besides the picture."""
        return [_without_paths(self.facts[label]), self.config.eval_batch_size, self.config.threads, self.computes_on]

    # -- features

    def _reference_desks(self, extractors: Mapping[str, Extractor]) -> dict[str, Desk]:
        source, batch = self.compared.reference, self.config.eval_batch_size
        starts = range(0, len(source), features.chunk_size(len(source), batch, moments_only=False))
        desks = {}
        for label in self.cast.with_reference:
            folder = self.folder / "reference" / hashed([source.key, self._how(label)])[:24]
            desks[label] = Desk(key=label, extractor=extractors[label], store=Store(folder, len(source), starts))
        return desks

    def _fill_reference(self, desks: Mapping[str, Desk], name: str, stop: Callable[[], int]) -> bool:
        """Once for a run; whether all of it is there."""
        todo = self._lacking(desks)
        if not todo:
            return True
        source, batch = self.compared.reference, self.config.eval_batch_size
        mine = todo[self.world.rank :: self.world.size]
        log.info("features of %d reference pictures for evaluations", len(source))

        def fill(beat: Beat) -> None:
            preparations = {label: desk.extractor.preparation for label, desk in desks.items()}
            preparer = Preparer(source=source, preparations=preparations)
            with Preparations(preparer, self.config.num_workers if mine else 0) as prepared:
                broken = features.extract(
                    prepared.of(features.sheets(desks, mine, batch)),
                    desks,
                    batch_size=batch,
                    device=self.world.device,
                    expected_size=None,
                    on_sheet=lambda _num: beat(),
                    stop=stop,
                )
            if broken:
                index = min(broken)
                raise HalationError(f"{source.name(index)}: {broken[index]}")

        self._together(name, fill)
        return not self._lacking(desks)

    def _generated_desks(self, step: int, extractors: Mapping[str, Extractor]) -> dict[str, Desk]:
        """A chunk a sheet."""
        num, prompts = len(self.settings.prompts), self.settings.prompts
        starts = range(0, num, self.config.eval_batch_size)
        desks = {}
        for label, extractor in extractors.items():
            texts = embedding(extractor, prompts, None) if label == self.cast.parts.get("clip") else None
            folder = self.folder / runs.step_name(step) / hashed([asdict(self.settings), self._how(label)])[:24]
            desks[label] = Desk(key=label, extractor=extractor, store=Store(folder, num, starts), texts=texts)
        return desks

    def _draw(self, drawing: Drawing, desks: Mapping[str, Desk], name: str) -> list[Row]:
        sheets = plan.cut(self.settings.specs(), self.config.eval_batch_size)
        todo = self._lacking(desks)
        log.info("drawing %d of %d sheets for an evaluation on %d ranks", len(todo), len(sheets), self.world.size)

        def take(indices: range, pictures: list[np.ndarray]) -> None:
            fault_point("evaluate.features")
            self._score(desks, indices, pictures)

        return drawing.draw_sheets(sheets, todo, Handing(take), name)

    def _score(self, desks: Mapping[str, Desk], indices: range, pictures: list[np.ndarray]) -> None:
        loaders = [(index, _loader(pixels)) for index, pixels in zip(indices, pictures, strict=True)]
        prepared = prepare(loaders, {label: desk.extractor.preparation for label, desk in desks.items()})
        for label, desk in desks.items():
            broken = desk.take(indices, prepared, self.config.eval_batch_size, self.world.device)
            if broken:
                desk.drop()
                raise HalationError(f"the features of picture {broken[0]} by {label} are not finite")
            desk.finish(desk.store.chunk_of(indices[0]))

    # -- numbers

    def _report(self, step: int, reference: Mapping[str, Desk], generated: Mapping[str, Desk], began: float) -> Report:
        rules = measure.Rules(allow_few=True, device=str(self.world.device))
        real = {label: side_of(desk, None) for label, desk in reference.items()}
        drawn = {label: side_of(desk, None) for label, desk in generated.items()}
        found: dict[str, dict[str, Any]] = {}
        for metric in self.config.eval_metrics:
            label = self.cast.parts[metric]
            subject = measure.Subject(
                metric=metric,
                extractor=self.facts[label],
                generated=drawn[label],
                reference=real[label] if metric in measure.NEEDS_REFERENCE else None,
                captions=self.settings.prompts,
            )
            found |= measure.measure(subject, rules)
        settings = {name: value for name, value in asdict(self.settings).items() if name != "prompts"}
        about = {"kind": "training", "path": str(self.run_folder), "step": step, "weights": "average"}
        return {
            "step": step,
            "generated": {**about, "num": len(self.settings.prompts), "settings": settings},
            "reference": {**self.compared.reference.facts, "num": len(self.compared.reference)} if real else None,
            "metrics": found,
            "versions": versions(),
            "computed_on": self.computes_on,
            "num_ranks": self.world.size,
            "seconds": round(time.perf_counter() - began, 2),
            "key": self.key,
        }


def free_memory(device: torch.device) -> None:
    """Give back what the extractors took, once nothing holds them any more, an error's traceback neither."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def lines_of(report: Report) -> list[dict[str, Any]]:
    """The report's lines in metrics.jsonl, a number each."""
    kept = ("value", "std", "better", "num_generated", "num_reference", "few", "extractor", "seconds")
    by_name = {found["name"]: found for found in report["metrics"].values()}  # fid and fd may be the same number
    return [
        {"step": report["step"], "metric": name, **{key: found[key] for key in kept}} for name, found in by_name.items()
    ]


def is_line(row: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl is one of those."""
    return "metric" in row and "num_generated" in row


def publish_plot(run: runs.Run, rows: list[dict[str, Any]]) -> None:
    """Every metric over the steps, as soon as there are two of them."""
    lines = [row for row in rows if is_line(row)]
    if len({row["step"] for row in lines}) > 1:
        title = f"{run.folder.resolve().name}: evaluations of the averaged weights"
        runs.publish(
            run.folder / "evaluation" / "metrics.png", encode_png(plot.plot(plot.metric_panels(lines), title), {})
        )


def forget_after(run: runs.Run, step: int) -> None:
    """Drop evaluations of steps that are about to be trained again; -1 forgets all of them."""
    for path in (run.folder / "evaluation").glob("step_*"):
        if path.name.removesuffix(".json") > runs.step_name(step) or step < 0:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _in_our_flags(error: InputError, label: str) -> InputError:
    """An extractor speaks of the flags of `halation evaluate`; in training they have other names."""
    names = {
        "--weights": "--eval_clip_model" if label == "clip" else "--eval_weights",
        "--extractor": "--eval_extractor",
    }
    parts = [error.found, error.expected, error.action]
    for theirs, ours in names.items():
        parts = [re.sub(rf"{theirs}\b", ours, part) for part in parts]
    return InputError(parts[0], parts[1], f"{parts[2]}; --eval_every 0 trains without evaluations")


def _refuse_failed(rows: list[Row], num: int) -> None:
    failed = [row for row in rows if row["state"] == "failed"]
    if failed:
        first = failed[0]
        raise HalationError(
            f"{len(failed)} of {num} pictures could not be drawn or scored, the first of them on rank {first['rank']}: {first['reason']}"
        )


def _loader(pixels: np.ndarray) -> Callable[[], tuple[np.ndarray, bytes]]:
    return lambda: (pixels, hashlib.sha256(np.ascontiguousarray(pixels).data).digest())


def _without_paths(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The same weights in another place are the same weights."""
    return {name: value for name, value in facts.items() if name != "weights"}
