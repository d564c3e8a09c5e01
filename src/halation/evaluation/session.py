"""One rank's part in an evaluation: sources and extractors opened, features of both sides on all ranks, and the numbers on the first."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from halation.data.streets.dataset import MAX_SIZE, MIN_SIZE
from halation.distributed.launcher import describe_device
from halation.distributed.stop_signals import StopSignals
from halation.distributed.world import World, run_on_rank_zero, run_with_heartbeat
from halation.errors import HalationError, InputError
from halation.evaluation.config import EvaluateConfig
from halation.evaluation.distributed_extraction import FeaturePass, first_image_size
from halation.evaluation.extractor_plan import (
    WEIGHTS_FLAGS,
    extractor_facts,
    library_versions,
    metric_settings,
    plan_extractors,
    read_saved_reference,
)
from halation.evaluation.extractors.extractor import Extractor
from halation.evaluation.extractors.registry import open_extractor
from halation.evaluation.feature_extraction import FeatureWriter
from halation.evaluation.generated_folder import match_prompts, open_generated
from halation.evaluation.image_sources import ImageFiles, ImageSource, StreetImages, find_image_files
from halation.evaluation.metrics import metric_computation
from halation.evaluation.model_images import ModelImages, open_model_images
from halation.evaluation.nearest_and_farthest import find_extremes
from halation.evaluation.saved_statistics import SavedStatistics, write_statistics
from halation.models.dit.tokenizer import find_prompt_warnings

log = logging.getLogger(__name__)


class EvaluationSession:
    """Everything one rank needs, opened in the order in which it can fail."""

    def __init__(self, world: World, config: EvaluateConfig, cache: Path) -> None:
        self.world = world
        self.config = config
        self.start_time = time.perf_counter()
        self.device = describe_device(str(world.device))
        self.plan = plan_extractors(config)
        self.metric_settings = metric_settings(config, str(world.device))
        self.generated = self._open_generated()
        self._check_ranks_agree(self.generated.key)
        self.extractors = self._open_extractors()
        self.saved_reference = self._read_saved_reference()
        self.feature_pass = FeaturePass(world, config, cache, self.plan, self.extractors, self.device)

    def _open_generated(self) -> ImageSource | ModelImages:
        config = self.config
        if config.model_path:
            images = open_model_images(config, self.device)
            step_warning = images.model_ref.step_warning(config.num_inference_steps or images.model_ref.steps)
            if step_warning and self.world.is_rank_zero:
                log.warning("--num_inference_steps: %s", step_warning)
            guidance_warning = (
                images.model_ref.guidance_warning(config.guidance_scale) if config.guidance_scale is not None else ""
            )
            if guidance_warning and self.world.is_rank_zero:
                log.warning("--guidance_scale %s", guidance_warning)
            if images.model_ref.load_args["kind"] == "checkpoint" and self.world.is_rank_zero:
                captions = (spec.prompt for spec in images.specs)
                for warning in find_prompt_warnings(
                    Path(images.model_ref.load_args["path"]), images.model_ref.name, captions
                ):
                    log.warning("%s", warning)
            return images
        return open_generated_files(config)

    def _check_ranks_agree(self, key: str) -> None:
        if len(set(self.world.all_gather_object(key))) > 1:
            raise HalationError(
                "the ranks see different images: the folder changes, or is another one on other machines"
            )

    def _open_extractors(self) -> dict[str, Extractor]:
        """Rank 0 first: what has to be downloaded is downloaded once."""
        extractors: dict[str, Extractor] = {}

        def open_all(heartbeat: Callable[[], None]) -> None:
            for label, (name, weights) in self.plan.extractors.items():
                extractors[label] = self._open_extractor(label, name, weights)
                heartbeat()

        run_on_rank_zero(self.world, "opening the extractors", open_all, self.config.dist_timeout_s)
        if not self.world.is_rank_zero:
            open_all(lambda: None)
        return extractors

    def _open_extractor(self, label: str, name: str, weights: str) -> Extractor:
        config, device = self.config, str(self.world.device)
        return open_extractor(
            name, device=device, dtype=config.dtype, resize=config.resize, weights=weights, flag=WEIGHTS_FLAGS[label]
        )

    def _read_saved_reference(self) -> SavedStatistics | None:
        """Saved ones, read before anything long begins."""
        facts = {label: extractor_facts(extractor) for label, extractor in self.extractors.items()}
        return read_saved_reference(self.config, self.plan, facts)

    # -- features

    def run(self) -> dict[str, Any]:
        """The report, on every rank."""
        with StopSignals() as signals:
            reference = None if self.saved_reference else self._open_reference()
            self._check_feasible(self.saved_reference.num if self.saved_reference else len(reference or ()))
            writers: dict[str, dict[str, FeatureWriter]] = {"reference": {}}
            if reference is not None:
                labels = self.plan.reference_labels
                writers["reference"] = self.feature_pass.extract(reference, "reference", labels, lambda: signals.number)
            writers["generated"] = self.feature_pass.extract(
                self.generated, "generated", tuple(self.extractors), lambda: signals.number
            )

            def compute_report(heartbeat: Callable[[], None]) -> dict[str, Any]:
                return run_with_heartbeat(lambda: self._build_report(writers, reference), heartbeat)

            report: dict[str, Any] = run_on_rank_zero(
                self.world, "the numbers", compute_report, self.config.dist_timeout_s
            )
            return report

    def _check_feasible(self, num_reference: int | None) -> None:
        """Before hours are spent on features that no number comes of."""
        for metric, label in self.plan.metric_labels.items():
            num_images: dict[str, int | None] = {"generated": len(self.generated)}
            if metric in metric_computation.NEEDS_REFERENCE:
                num_images["reference"] = num_reference
            metric_computation.check_num_images(
                metric, self.extractors[label].num_features, num_images, self.metric_settings
            )
            known = [num for num in num_images.values() if num is not None]
            if metric == "prdc" and self.metric_settings.nearest_k >= min(known):
                raise InputError(
                    f"--nearest_k {self.metric_settings.nearest_k} with {min(known)} images",
                    "fewer neighbours than images",
                    "change --nearest_k, or give more images",
                )
            if metric not in ("fid", "fd") and max(known) > self.config.keep_features:
                raise InputError(
                    f"{metric} of {max(known)} images with --keep_features {self.config.keep_features}",
                    "features that are kept: of more images there are only moments",
                    "raise --keep_features, or ask for fid or fd alone",
                )

    def _open_reference(self) -> ImageSource | None:
        if not self.plan.reference_labels:
            return None
        if self.config.reference == ("streets",):
            return StreetImages(size=self._street_size(), num=self.config.num_reference)
        return find_image_files(Path(self.config.reference[0]), "--reference", captions=False)

    def _street_size(self) -> int:
        """Street scenes are drawn at the size of the images they are compared with."""
        if isinstance(self.generated, ModelImages):
            height, width = self.generated.specs[0].height, self.generated.specs[0].width
        else:
            height, width = first_image_size(self.generated)
        if height != width or not MIN_SIZE <= height <= MAX_SIZE:
            raise InputError(
                f"images of {width} x {height} pixels against street scenes",
                f"square images from {MIN_SIZE} to {MAX_SIZE} pixels, as street scenes are",
                "give --height and --width, or another --reference"
                if isinstance(self.generated, ModelImages)
                else f"give another --reference, or look at {self.generated.name(0)}",
            )
        return height

    # -- numbers

    def _build_report(
        self, writers: Mapping[str, Mapping[str, FeatureWriter]], reference: ImageSource | None
    ) -> dict[str, Any]:
        feature_sets = {
            side: {
                label: self.feature_pass.load_feature_set(source, side, writer)
                for label, writer in writers[side].items()
            }
            for side, source in (("reference", reference), ("generated", self.generated))
            if source is not None
        }
        metrics: dict[str, dict[str, Any]] = {}
        for metric in self.config.metrics:
            label = self.plan.metric_labels[metric]
            inputs = metric_computation.MetricInputs(
                metric=metric,
                extractor=extractor_facts(self.extractors[label]),
                generated=feature_sets["generated"][label],
                reference=self._reference_features(feature_sets, label)
                if metric in metric_computation.NEEDS_REFERENCE
                else None,
                captions=self.generated.captions,
            )
            metrics |= metric_computation.compute_metric(inputs, self.metric_settings)
            if metric == "clip":
                metrics["clip"]["num_truncated_prompts"] = self._count_truncated(label)
        self._save_statistics(feature_sets)
        return {
            "generated": {**self._generated_facts(), "num": len(self.generated)},
            "reference": self._reference_facts(reference),
            "metrics": metrics,
            "extremes": self._find_extremes(feature_sets),
            "versions": library_versions(),
            "computed_on": self.device,
            "num_ranks": self.world.size,
            "seconds": round(time.perf_counter() - self.start_time, 2),
        }

    def _find_extremes(
        self, feature_sets: Mapping[str, Mapping[str, metric_computation.FeatureSet]]
    ) -> dict[str, Any] | None:
        """The images most and least like the reference; None where nothing is compared, and why where they cannot be told."""
        labels = self.plan.reference_labels
        if not labels:
            return None
        label = "main" if "main" in labels else labels[0]
        about = {"distance": "euclidean, to the nearest reference feature", "extractor": self.extractors[label].name}
        if not isinstance(self.generated, ImageFiles):
            return about | {"left_out": "pictures of --model_path are scored and not kept"}
        generated, reference = (
            feature_sets["generated"][label].features,
            self._reference_features(feature_sets, label).features,
        )
        if generated is None:
            return about | {"left_out": "there are more pictures than --keep_features"}
        if reference is None:
            return about | {"left_out": "the reference has no features"}
        names = self.generated.names
        found = find_extremes(
            reference,
            generated,
            name=lambda index: os.fsencode(names[index]).decode("utf-8", "replace"),  # a name need not be text
            captions=self.generated.captions,
            device=self.metric_settings.device,
        )
        return about | found

    def _count_truncated(self, label: str) -> int:
        from halation.evaluation.extractors.transformers import ClipExtractor

        extractor = self.extractors[label]
        assert isinstance(extractor, ClipExtractor)
        num = len(extractor.find_truncated(self.generated.captions or ()))
        if num:
            log.warning("%d prompts are longer than the CLIP model reads; their ends do not count", num)
        return num

    def _reference_features(
        self, feature_sets: Mapping[str, Mapping[str, metric_computation.FeatureSet]], label: str
    ) -> metric_computation.FeatureSet:
        if self.saved_reference is None:
            return feature_sets["reference"][label]
        saved = self.saved_reference
        arrays = {} if saved.features is None else {"features": np.asarray(saved.features)}
        return metric_computation.FeatureSet(num=saved.num, hash=saved.hash, moments=saved.moments, arrays=arrays)

    def _generated_facts(self) -> dict[str, Any]:
        if isinstance(self.generated, ModelImages):
            return {**self.generated.facts, "micro_batch": self.feature_pass.micro_batch}
        return self.generated.facts

    def _reference_facts(self, reference: ImageSource | None) -> dict[str, Any] | None:
        if self.saved_reference is not None:
            path = ", ".join(self.config.reference)
            return {
                "kind": "statistics",
                "path": path,
                "num": self.saved_reference.num,
                "made": self.saved_reference.facts,
            }
        return None if reference is None else {**reference.facts, "num": len(reference)}

    def _save_statistics(self, feature_sets: Mapping[str, Mapping[str, metric_computation.FeatureSet]]) -> None:
        path = self.config.save_statistics
        if path is None:
            return
        features = feature_sets["generated"]["main"]
        assert isinstance(features.moments, metric_computation.Moments)
        about = {"source": self.generated.facts, "source_hash": features.hash, "versions": library_versions()}
        write_statistics(
            path, features.moments, features.features, {**extractor_facts(self.extractors["main"]), **about}
        )


def open_generated_files(config: EvaluateConfig) -> ImageFiles:
    """The images of --generated, with their prompts where these are known."""
    files = open_generated(Path(config.generated))
    if config.prompts:
        files = match_prompts(files, config.prompts, config.seed_start)
    if config.num_samples > len(files):
        raise InputError(
            f"--num_samples {config.num_samples} of {len(files)} images in {config.generated}",
            "at most as many as there are",
            "leave --num_samples out to score all of them",
        )
    return files.first(config.num_samples) if config.num_samples else files
