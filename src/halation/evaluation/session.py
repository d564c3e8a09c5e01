"""One rank of `halation evaluate`: opens images, checks settings, builds the report."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from halation.data.streets.dataset import MAX_SIZE, MIN_SIZE
from halation.distributed.launcher import describe_device
from halation.distributed.stop_signals import StopSignals, exit_code
from halation.distributed.world import World, run_on_rank_zero
from halation.errors import HalationError, InputError, Interrupted, format_count
from halation.evaluation import evaluator, saved_statistics
from halation.evaluation.config import EvaluateConfig, check_reference, fid_conflict
from halation.evaluation.drawn_images import SampledImages
from halation.evaluation.evaluator import EvaluatedImages, Evaluator, ExtractorPlan, FeatureSets, Heartbeat, Writers
from halation.evaluation.extractors.extractor import Extractor
from halation.evaluation.generated_folder import match_prompts, open_generated
from halation.evaluation.image_sources import ImageFiles, ImageSource, StreetImages, find_image_files
from halation.evaluation.metrics import metric_computation
from halation.evaluation.metrics.caption_agreement import has_street_captions
from halation.evaluation.metrics.nearest_neighbors import find_extremes
from halation.evaluation.model_images import ModelImages, open_model_images
from halation.prompt_files import PromptFile
from halation.runs.run_folder import hash_json

log = logging.getLogger(__name__)
STOP_KEY = "evaluate/stop"


class EvaluationSession:
    """One evaluation on one rank; everything that can fail early is opened first."""

    def __init__(
        self, world: World, config: EvaluateConfig, cache: Path, generated: ImageFiles | ModelImages | None = None
    ) -> None:
        self.world = world
        self.config = config
        self.cache = cache
        self.start_time = time.perf_counter()
        self.device_name = describe_device(str(world.device))
        self.plan = evaluator.plan_extractors(config)
        self.generated = generated or open_images(config)
        if isinstance(self.generated, ModelImages):
            self.generated = replace(self.generated, config=config, device=self.device_name)
            if world.is_rank_zero:
                captions = (spec.prompt for spec in self.generated.specs)
                model_ref = self.generated.model_ref
                for warning in model_ref.warnings(config.num_inference_steps, config.guidance_scale, captions):
                    log.warning("%s", warning)
        if len(set(world.all_gather_object(self.generated.key))) > 1:
            raise HalationError(
                "ranks see different images: the folder changed during the run or differs between machines"
            )
        self.extractors = self._open_extractors()
        self.facts = {label: evaluator.extractor_facts(extractor) for label, extractor in self.extractors.items()}
        self.saved_reference = read_saved_reference(config, self.plan, self.facts)
        self.evaluator = Evaluator(world, config, self.plan, self.extractors, self.facts, self._feature_folder)

    def _open_extractors(self) -> dict[str, Extractor]:
        """Open the extractors on rank 0 first, so that weights are downloaded once."""
        extractors: dict[str, Extractor] = {}

        def open_all(heartbeat: Heartbeat) -> None:
            for label in self.plan.extractors:
                extractors[label] = self.plan.open_extractor(label, self.config, str(self.world.device))
                heartbeat()

        run_on_rank_zero(self.world, "opening the extractors", open_all, self.config.dist_timeout_s)
        if not self.world.is_rank_zero:
            open_all(lambda: None)
        return extractors

    def _feature_folder(self, source: EvaluatedImages, label: str, layout_and_captions: list[Any]) -> Path:
        """Return the cache folder, named by a hash of everything that affects the features."""
        assert not isinstance(source, SampledImages)
        layout, captions = layout_and_captions
        threads = self.config.threads if self.device_name == "cpu" else 0
        libraries = [version(name) for name in ("torch", "transformers", "numpy", "pillow")]
        how = [evaluator.without_paths(self.facts[label]), layout, threads, self.device_name, libraries, captions]
        return self.cache / source.key[:24] / hash_json(how)[:24]

    def run(self) -> dict[str, Any]:
        """Run the evaluation and return the report on every rank."""
        with StopSignals() as signals:
            stop = StopFlag(self.world, lambda: signals.number)
            reference = None if self.saved_reference else self._open_reference()
            self._check_feasible(self.saved_reference.num if self.saved_reference else len(reference or ()))
            writers: dict[str, Writers] = {}
            for side, source in (("reference", reference), ("generated", self.generated)):
                if source is not None:
                    complete = self.evaluator.extract(source, side, f"features {side}", stop)
                    if complete is None:
                        raise Interrupted("stopped; run the same command to resume", exit_code(stop()))
                    writers[side] = complete
            report: dict[str, Any] = self.evaluator.compute(
                "computing metrics", lambda: self._build_report(writers, reference)
            )
            return report

    def _check_feasible(self, num_reference: int | None) -> None:
        """Raise if a metric cannot be computed, before hours are spent on features."""
        settings = self.evaluator.metric_settings
        for metric, label in self.plan.metric_labels.items():
            num_images: dict[str, int | None] = {"generated": len(self.generated)}
            if metric in metric_computation.NEEDS_REFERENCE:
                num_images["reference"] = num_reference
            metric_computation.check_num_images(metric, self.extractors[label].num_features, num_images, settings)
            known = [num for num in num_images.values() if num is not None]
            if metric == "prdc" and settings.nearest_k >= min(known):
                raise InputError(
                    f"--nearest_k {settings.nearest_k} with {format_count(min(known), 'image')}",
                    "fewer neighbours than images",
                    "change --nearest_k, or give more images",
                )
            if metric not in ("fid", "fd") and max(known) > self.config.keep_features:
                raise InputError(
                    f"{metric} of {format_count(max(known), 'image')} with --keep_features {self.config.keep_features}",
                    "kept features: for more images, only moments are kept",
                    "raise --keep_features, or compute only fid or fd",
                )

    def _open_reference(self) -> ImageSource | None:
        if not self.plan.reference_labels:
            return None
        if self.config.reference == ("streets",):
            return StreetImages(size=self._street_size(), num=self.config.num_reference)
        return find_image_files(Path(self.config.reference[0]), "--reference", captions=False)

    def _street_size(self) -> int:
        """Return the size of the street scenes, which is that of the images to score."""
        if isinstance(self.generated, ModelImages):
            height, width = self.generated.specs[0].height, self.generated.specs[0].width
        else:
            height, width = evaluator.first_image_size(self.generated)
        if height != width or not MIN_SIZE <= height <= MAX_SIZE:
            raise InputError(
                f"images of {width} x {height} pixels against street scenes",
                f"square images from {MIN_SIZE} to {MAX_SIZE} pixels, as street scenes are",
                "give --height and --width, or another --reference"
                if isinstance(self.generated, ModelImages)
                else f"give another --reference, or check {self.generated.name(0)}",
            )
        return height

    # -- the report, on rank 0

    def _build_report(self, writers: dict[str, Writers], reference: ImageSource | None) -> dict[str, Any]:
        evaluator, saved = self.evaluator, self.saved_reference
        reference_features: FeatureSets = {}
        reference_facts: dict[str, Any] | None = None
        if reference is not None:
            reference_features = evaluator.load_features(reference, "reference", writers["reference"])
            reference_facts = {**reference.facts, "num": len(reference)}
        elif saved is not None:
            arrays = {} if saved.features is None else {"features": np.asarray(saved.features)}
            features = metric_computation.FeatureSet(
                num=saved.num, hash=saved.hash, moments=saved.moments, arrays=arrays
            )
            reference_features = dict.fromkeys(self.plan.reference_labels, features)
            path = ", ".join(self.config.reference)
            reference_facts = {"kind": "statistics", "path": path, "num": saved.num, "made": saved.facts}
        generated_features = evaluator.load_features(self.generated, "generated", writers["generated"])
        metrics = evaluator.compute_metrics(generated_features, reference_features, self.generated.captions)
        if isinstance(self.generated, ImageFiles) and self.generated.missing:
            for entry in metrics.values():
                entry["num_missing"] = len(self.generated.missing)
        if "clip" in metrics:
            extractor = self.extractors[self.plan.metric_labels["clip"]]
            num_truncated = len(extractor.find_truncated(self.generated.captions or ()))
            if num_truncated:
                log.warning("%s cut off at the CLIP model's token limit", format_count(num_truncated, "prompt"))
            metrics["clip"]["num_truncated_prompts"] = num_truncated
        if self.config.save_statistics is not None:
            self._save_statistics(self.config.save_statistics, generated_features["main"])
        generated_facts = self.generated.facts
        if isinstance(self.generated, ModelImages):
            generated_facts["micro_batch"] = self.generated.micro_batch or self.config.model_batch_size
        return {
            "generated": {**generated_facts, "num": len(self.generated)},
            "reference": reference_facts,
            "metrics": metrics,
            "extremes": self._find_extremes(generated_features, reference_features),
            **evaluator.provenance(self.start_time),
        }

    def _find_extremes(self, generated_features: FeatureSets, reference_features: FeatureSets) -> dict[str, Any] | None:
        """Return the images nearest to and farthest from the reference, or why they are left out.

        None without a reference.
        """
        labels = self.plan.reference_labels
        if not labels:
            return None
        label = "main" if "main" in labels else labels[0]
        about = {"distance": "euclidean, to the nearest reference feature", "extractor": self.extractors[label].name}
        if not isinstance(self.generated, ImageFiles):
            return about | {"left_out": "pictures of --model_path are scored and not kept"}
        generated, reference = generated_features[label].features, reference_features[label].features
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
            device=self.evaluator.metric_settings.device,
        )
        return about | found

    def _save_statistics(self, path: Path, features: metric_computation.FeatureSet) -> None:
        assert isinstance(features.moments, metric_computation.Moments)
        about = {"source": self.generated.facts, "source_hash": features.hash, "versions": evaluator.library_versions()}
        saved_statistics.write_statistics(path, features.moments, features.features, {**self.facts["main"], **about})


class StopFlag:
    """Shares a stop signal of one rank with all ranks, which check it at each batch."""

    def __init__(self, world: World, stop_signal: Callable[[], int]) -> None:
        self.world = world
        self.stop_signal = stop_signal

    def __call__(self) -> int:
        number = self.stop_signal()
        if self.world.size == 1:
            return number
        if number:
            self.world.store.set(STOP_KEY, str(number))
            return number
        return int(self.world.store.get(STOP_KEY)) if self.world.store.check([STOP_KEY]) else 0


def read_saved_reference(
    config: EvaluateConfig, plan: ExtractorPlan, facts: Mapping[str, Mapping[str, Any]]
) -> saved_statistics.SavedStatistics | None:
    """Read the statistics given by --reference; None if it gives images or is not needed."""
    paths = [Path(path) for path in config.reference if Path(path).suffix in saved_statistics.SUFFIXES]
    labels = plan.reference_labels
    if not paths or not labels:
        return None
    if len(labels) > 1:
        names = " and ".join(str(facts[label]["extractor"]) for label in labels)
        raise InputError(
            f"statistics as the reference of {names}",
            "metrics of one extractor, that of the statistics",
            "select fewer --metrics",
        )
    return saved_statistics.read_statistics(paths, facts[labels[0]])


def open_images(config: EvaluateConfig) -> ImageFiles | ModelImages:
    """Open the images to score, with prompts if known, without decoding or loading a model."""
    if config.model_path:
        return open_model_images(config, "cpu")
    files = open_generated(Path(config.generated), allow_missing=config.allow_missing)
    if config.prompts:
        files = match_prompts(files, config.prompts, config.seed_start)
    if config.num_samples > len(files):
        raise InputError(
            f"--num_samples {config.num_samples} of {format_count(len(files), 'image')} in {config.generated}",
            "at most the number of images",
            "omit --num_samples to score all images",
        )
    return files.first(config.num_samples) if config.num_samples else files


def choose_extractor(config: EvaluateConfig) -> str:
    """Return the extractor of the flags, of the reference statistics, or the default."""
    if config.extractor:
        return config.extractor
    if config.reference == ("streets",):
        return "streets"
    return saved_statistics.read_extractor_name(config.reference[0]) if config.reference else "inception"


def resolve_config(config: EvaluateConfig, source: ImageFiles | ModelImages) -> EvaluateConfig:
    """Fill in the extractor and the metrics; raise if settings conflict."""
    extractor = choose_extractor(config)
    config = replace(config, extractor=extractor)
    metrics: Any = config.metrics
    if not metrics and (config.save_statistics is None or config.reference):
        has_captions = extractor == "streets" and source.captions is not None and has_street_captions(source.captions)
        metrics = ("fd", "kid", "prdc", *(("agreement",) if has_captions else ()))
        if extractor == "inception":
            metrics = ("fid", "kid")
    config = replace(config, metrics=tuple(dict.fromkeys(metrics)))
    fid_conflict().check(config)
    check_reference(config, [metric for metric in metrics if metric in metric_computation.NEEDS_REFERENCE])
    caption_metrics = [metric for metric in metrics if metric in metric_computation.NEEDS_CAPTIONS]
    if caption_metrics and source.captions is None:
        why = getattr(source, "no_captions", "")
        raise InputError(
            f"no prompts for {', '.join(caption_metrics)}" + (f" ({why})" if why else ""),
            "the prompt of every image",
            "give --prompts FILE, or an output folder of `halation generate`",
        )
    for metric in metrics:  # before weights are opened or downloaded
        metric_computation.check_num_images(
            metric, 0, {"generated": len(source)}, evaluator.metric_settings(config, "cpu")
        )
    return config


def dry_run(config: EvaluateConfig) -> list[dict[str, Any]]:
    """Check all that an evaluation needs except the images; return the extractor facts."""
    config = replace(config, extractor=choose_extractor(config))
    plan = evaluator.plan_extractors(replace(config, metrics=config.metrics or ("fd", "kid")))
    fid_conflict().check(config)
    check_reference(config, plan.reference_labels)
    facts, errors = {}, []
    for label in plan.extractors:
        try:
            extractor = plan.open_extractor(label, config, "cpu")
            facts[label] = evaluator.extractor_facts(extractor)
            if label == plan.metric_labels.get("clip"):
                extractor.embed_texts(("a prompt",))  # the text encoder is a separate part of the model
        except InputError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise InputError(
            "; ".join(error.found for error in errors),
            "; ".join(error.expected for error in errors),
            "; ".join(error.action for error in errors),
        )
    num_reference: int | None = config.num_reference
    statistics = read_saved_reference(config, plan, facts)
    if statistics is not None:
        num_reference = statistics.num
    elif plan.reference_labels and config.reference != ("streets",):
        num_reference = len(find_image_files(Path(config.reference[0]), "--reference", captions=False))
    num_generated: dict[str, int | None] = {}
    if config.prompts:
        num_rows = sum(1 for _row in PromptFile.from_values(config.prompts).rows())
        num_generated = {"generated": min(config.num_samples or num_rows, num_rows)}
    for metric, label in plan.metric_labels.items():
        num_images: dict[str, int | None] = {
            **num_generated,
            **({"reference": num_reference} if metric in metric_computation.NEEDS_REFERENCE else {}),
        }
        metric_computation.check_num_images(
            metric, facts[label]["num_features"], num_images, evaluator.metric_settings(config, "cpu")
        )
    return list(facts.values())
