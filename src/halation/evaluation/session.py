"""One rank's part in an evaluation: sources and extractors opened, features of both sides on all ranks, and the numbers on the first."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from halation.data.streets.dataset import LARGEST, SMALLEST
from halation.distributed.launcher import computes_on
from halation.distributed.signals import StopSignals
from halation.distributed.world import World, alive, on_first
from halation.errors import HalationError, InputError
from halation.evaluation.config import EvaluateConfig
from halation.evaluation.extractor_plan import FLAGS, cast, facts_of, rules_of, saved_reference, versions
from halation.evaluation.extractors.extractor import Extractor
from halation.evaluation.extractors.registry import open_extractor
from halation.evaluation.feature_pass import Passes, first_size
from halation.evaluation.features import Desk
from halation.evaluation.generated_images import open_generated, with_prompts
from halation.evaluation.image_sources import Files, Scenes, Source, files_below
from halation.evaluation.metrics import measure
from halation.evaluation.model_images import Live, open_live
from halation.evaluation.nearest_images import extremes
from halation.evaluation.saved_statistics import Statistics, write_statistics
from halation.models.dit.prompt_warnings import remarks

log = logging.getLogger(__name__)


class Scoring:
    """Everything one rank needs, opened in the order in which it can fail."""

    def __init__(self, world: World, config: EvaluateConfig, cache: Path) -> None:
        self.world = world
        self.config = config
        self.began = time.perf_counter()
        self.device = computes_on(str(world.device))
        self.cast = cast(config)
        self.rules = rules_of(config, str(world.device))
        self.generated = self._generated()
        self._agree(self.generated.key)
        self.extractors = self._extractors()
        self.statistics = self._statistics()
        self.passes = Passes(world, config, cache, self.cast, self.extractors, self.device)

    def _generated(self) -> Source | Live:
        config = self.config
        if config.model_path:
            live = open_live(config, self.device)
            misuse = live.subject.misuse(config.num_inference_steps or live.subject.steps)
            if misuse and self.world.first:
                log.warning("--num_inference_steps: %s", misuse)
            misguided = live.subject.misguided(config.guidance_scale) if config.guidance_scale is not None else ""
            if misguided and self.world.first:
                log.warning("--guidance_scale %s", misguided)
            if live.subject.order["kind"] == "checkpoint" and self.world.first:
                captions = (spec.prompt for spec in live.specs)
                for words in remarks(Path(live.subject.order["path"]), live.subject.name, captions):
                    log.warning("%s", words)
            return live
        return generated_files(config)

    def _agree(self, key: str) -> None:
        if len(set(self.world.exchange(key))) > 1:
            raise HalationError(
                "the ranks see different pictures: the folder changes, or is another one on other machines"
            )

    def _extractors(self) -> dict[str, Extractor]:
        """Rank 0 first: what has to be downloaded is downloaded once."""
        opened: dict[str, Extractor] = {}

        def open_all(beat: Callable[[], None]) -> None:
            for label, (name, weights) in self.cast.extractors.items():
                opened[label] = self._opened(label, name, weights)
                beat()

        on_first(self.world, "opening the extractors", open_all, self.config.dist_timeout_s)
        if not self.world.first:
            open_all(lambda: None)
        return opened

    def _opened(self, label: str, name: str, weights: str) -> Extractor:
        config, device = self.config, str(self.world.device)
        return open_extractor(
            name, device=device, dtype=config.dtype, resize=config.resize, weights=weights, flag=FLAGS[label]
        )

    def _statistics(self) -> Statistics | None:
        """Saved ones, read before anything long begins."""
        facts = {label: facts_of(extractor) for label, extractor in self.extractors.items()}
        return saved_reference(self.config, self.cast, facts)

    # -- features

    def run(self) -> dict[str, Any]:
        """The report, on every rank."""
        with StopSignals() as signals:
            reference = None if self.statistics else self._reference()
            self._refuse_hopeless(self.statistics.num if self.statistics else len(reference or ()))
            desks: dict[str, dict[str, Desk]] = {"reference": {}}
            if reference is not None:
                labels = self.cast.with_reference
                desks["reference"] = self.passes.features(reference, "reference", labels, lambda: signals.number)
            desks["generated"] = self.passes.features(
                self.generated, "generated", tuple(self.extractors), lambda: signals.number
            )

            def numbers(beat: Callable[[], None]) -> dict[str, Any]:
                return alive(lambda: self._report(desks, reference), beat)

            report: dict[str, Any] = on_first(self.world, "the numbers", numbers, self.config.dist_timeout_s)
            return report

    def _refuse_hopeless(self, num_reference: int | None) -> None:
        """Before hours are spent on features that no number comes of."""
        for metric, label in self.cast.parts.items():
            sides: dict[str, int | None] = {"generated": len(self.generated)}
            if metric in measure.NEEDS_REFERENCE:
                sides["reference"] = num_reference
            measure.few(metric, self.extractors[label].num_features, sides, self.rules)
            known = [num for num in sides.values() if num is not None]
            if metric == "prdc" and self.rules.nearest_k >= min(known):
                raise InputError(
                    f"--nearest_k {self.rules.nearest_k} with {min(known)} pictures",
                    "fewer neighbours than pictures",
                    "change --nearest_k, or give more pictures",
                )
            if metric not in ("fid", "fd") and max(known) > self.config.keep_features:
                raise InputError(
                    f"{metric} of {max(known)} pictures with --keep_features {self.config.keep_features}",
                    "features that are kept: of more pictures there are only moments",
                    "raise --keep_features, or ask for fid or fd alone",
                )

    def _reference(self) -> Source | None:
        if not self.cast.with_reference:
            return None
        if self.config.reference == ("streets",):
            return Scenes(size=self._square(), num=self.config.num_reference)
        return files_below(Path(self.config.reference[0]), "--reference", captions=False)

    def _square(self) -> int:
        """Street scenes are drawn at the size of the pictures they are compared with."""
        if isinstance(self.generated, Live):
            height, width = self.generated.specs[0].height, self.generated.specs[0].width
        else:
            height, width = first_size(self.generated)
        if height != width or not SMALLEST <= height <= LARGEST:
            raise InputError(
                f"pictures of {width} x {height} pixels against street scenes",
                f"square pictures from {SMALLEST} to {LARGEST} pixels, as street scenes are",
                "give --height and --width, or another --reference"
                if isinstance(self.generated, Live)
                else f"give another --reference, or look at {self.generated.name(0)}",
            )
        return height

    # -- numbers

    def _report(self, desks: Mapping[str, Mapping[str, Desk]], reference: Source | None) -> dict[str, Any]:
        sides = {
            side: {label: self.passes.side_of(source, side, desk) for label, desk in desks[side].items()}
            for side, source in (("reference", reference), ("generated", self.generated))
            if source is not None
        }
        found: dict[str, dict[str, Any]] = {}
        for metric in self.config.metrics:
            label = self.cast.parts[metric]
            subject = measure.Subject(
                metric=metric,
                extractor=facts_of(self.extractors[label]),
                generated=sides["generated"][label],
                reference=self._reference_side(sides, label) if metric in measure.NEEDS_REFERENCE else None,
                captions=self.generated.captions,
            )
            found |= measure.measure(subject, self.rules)
            if metric == "clip":
                found["clip"]["num_truncated_prompts"] = self._num_truncated(label)
        self._save_statistics(sides)
        return {
            "generated": {**self._generated_facts(), "num": len(self.generated)},
            "reference": self._reference_facts(reference),
            "metrics": found,
            "extremes": self._extremes(sides),
            "versions": versions(),
            "computed_on": self.device,
            "num_ranks": self.world.size,
            "seconds": round(time.perf_counter() - self.began, 2),
        }

    def _extremes(self, sides: Mapping[str, Mapping[str, measure.Side]]) -> dict[str, Any] | None:
        """The pictures most and least like the reference; None where nothing is compared, and why where they cannot be told."""
        labels = self.cast.with_reference
        if not labels:
            return None
        label = "main" if "main" in labels else labels[0]
        about = {"distance": "euclidean, to the nearest reference feature", "extractor": self.extractors[label].name}
        if not isinstance(self.generated, Files):
            return about | {"left_out": "pictures of --model_path are scored and not kept"}
        drawn, real = sides["generated"][label].features, self._reference_side(sides, label).features
        if drawn is None:
            return about | {"left_out": "there are more pictures than --keep_features"}
        if real is None:
            return about | {"left_out": "the reference has no features"}
        names = self.generated.names
        found = extremes(
            real,
            drawn,
            name=lambda index: os.fsencode(names[index]).decode("utf-8", "replace"),  # a name need not be text
            captions=self.generated.captions,
            device=self.rules.device,
        )
        return about | found

    def _num_truncated(self, label: str) -> int:
        from halation.evaluation.extractors.transformers import ClipExtractor

        extractor = self.extractors[label]
        assert isinstance(extractor, ClipExtractor)
        num = len(extractor.truncated(self.generated.captions or ()))
        if num:
            log.warning("%d prompts are longer than the CLIP model reads; their ends do not count", num)
        return num

    def _reference_side(self, sides: Mapping[str, Mapping[str, measure.Side]], label: str) -> measure.Side:
        if self.statistics is None:
            return sides["reference"][label]
        found = self.statistics
        arrays = {} if found.features is None else {"features": np.asarray(found.features)}
        return measure.Side(num=found.num, hash=found.hash, moments=found.moments, arrays=arrays)

    def _generated_facts(self) -> dict[str, Any]:
        if isinstance(self.generated, Live):
            return {**self.generated.facts, "micro_batch": self.passes.micro_batch}
        return self.generated.facts

    def _reference_facts(self, reference: Source | None) -> dict[str, Any] | None:
        if self.statistics is not None:
            path = ", ".join(self.config.reference)
            return {"kind": "statistics", "path": path, "num": self.statistics.num, "made": self.statistics.facts}
        return None if reference is None else {**reference.facts, "num": len(reference)}

    def _save_statistics(self, sides: Mapping[str, Mapping[str, measure.Side]]) -> None:
        path = self.config.save_statistics
        if path is None:
            return
        side = sides["generated"]["main"]
        assert isinstance(side.moments, measure.Moments)
        about = {"source": self.generated.facts, "source_hash": side.hash, "versions": versions()}
        write_statistics(path, side.moments, side.features, {**facts_of(self.extractors["main"]), **about})


def generated_files(config: EvaluateConfig) -> Files:
    """The pictures of --generated, with their prompts where these are known."""
    files = open_generated(Path(config.generated))
    if config.prompts:
        files = with_prompts(files, config.prompts, config.seed_start)
    if config.num_samples > len(files):
        raise InputError(
            f"--num_samples {config.num_samples} of {len(files)} pictures in {config.generated}",
            "at most as many as there are",
            "leave --num_samples out to score all of them",
        )
    return files.first(config.num_samples) if config.num_samples else files
