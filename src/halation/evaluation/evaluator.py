"""Extracts features and computes metrics, for `halation evaluate` and for training.

All ranks call the same methods in the same order.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from halation.data.decode import BrokenImageError
from halation.distributed.launcher import describe_device
from halation.distributed.world import World, run_on_all_ranks, run_on_rank_zero, run_with_heartbeat
from halation.errors import HalationError, InputError, format_count
from halation.evaluation import feature_extraction as extraction
from halation.evaluation.config import EvaluateConfig
from halation.evaluation.drawn_images import DrawnImages, SampledImages
from halation.evaluation.extractors import open_extractor
from halation.evaluation.extractors.extractor import Extractor
from halation.evaluation.feature_extraction import FeatureWriter
from halation.evaluation.feature_store import FORMAT_VERSION, FeatureStore
from halation.evaluation.image_sources import ImageFiles, ImageSource
from halation.evaluation.metrics import metric_computation
from halation.evaluation.preprocess_pool import ExtractorBatch, PreparedBatch, PreprocessPool, SourcePreprocessor
from halation.fault_injection import fault_point
from halation.progress import StepProgress
from halation.runs.run_folder import hash_json

log = logging.getLogger(__name__)

WEIGHTS_FLAGS = {
    "main": "--weights",
    "inception": "--inception_weights",
    "clip": "--clip_model",
    "streets": "--extractor",
}
"""The flag that sets the weights of each label."""
MAX_DECODE_WORKERS = 16
DRAWN_CHUNK_SIZE = 64
"""Number of generated images whose features are stored together."""
SIZE_MISMATCH_TEXT = "where the first image has"
Writers = dict[str, FeatureWriter]
FeatureSets = Mapping[str, metric_computation.FeatureSet]
Heartbeat = Callable[[], None]
EvaluatedImages = ImageSource | DrawnImages | SampledImages
FeatureFolder = Callable[[EvaluatedImages, str, list[Any]], Path]
"""Returns the folder of the features of a source by the extractor of a label.

The list holds everything else that the features depend on.
"""


@dataclass(frozen=True, kw_only=True)
class ExtractorPlan:
    """Assigns extractors, identified by labels, to metrics."""

    extractors: dict[str, tuple[str, str]]
    """Name and weights of the extractor of each label."""
    metric_labels: dict[str, str]
    """The label of each metric."""

    @property
    def reference_labels(self) -> tuple[str, ...]:
        """Labels of metrics that need a reference."""
        compared = [name for name in self.metric_labels if name in metric_computation.NEEDS_REFERENCE]
        return tuple(dict.fromkeys(self.metric_labels[name] for name in compared))

    def open_extractor(self, label: str, config: EvaluateConfig, device: str) -> Extractor:
        name, weights = self.extractors[label]
        return open_extractor(
            name,
            device=device,
            dtype=config.dtype,
            resize=config.resize,
            weights=weights,
            flag=WEIGHTS_FLAGS[label],
        )


def plan_extractors(config: EvaluateConfig) -> ExtractorPlan:
    """Choose one extractor for each kind of features, shared by the metrics that use it."""
    default_weights = {"inception": config.inception_weights, "clip": config.clip_model}.get(config.extractor, "")
    main = (config.extractor, config.weights or default_weights)
    extractors: dict[str, tuple[str, str]] = {}
    metric_labels: dict[str, str] = {}
    for metric in config.metrics:
        match metric:
            case "fd" | "kid" | "prdc":
                label, extractor = "main", main
            case "fid" | "is" if config.extractor == "inception":
                label, extractor = "main", main
            case "fid" | "is":
                label, extractor = "inception", ("inception", config.inception_weights)
            case "clip":
                label, extractor = "clip", ("clip", config.clip_model)
            case _:
                label, extractor = "streets", ("streets", "")
        if extractor == main:
            label = "main"
        extractors[label] = extractor
        metric_labels[metric] = label
    if config.save_statistics is not None:
        extractors["main"] = main
    return ExtractorPlan(extractors=extractors, metric_labels=metric_labels)


def extractor_facts(extractor: Extractor) -> dict[str, Any]:
    return {
        **extractor.facts,
        "num_features": extractor.num_features,
        "fd_title": extractor.fd_title,
        "kid_title": extractor.kid_title,
    }


def without_paths(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts without the path of the weights, which does not affect the features."""
    return {name: value for name, value in facts.items() if name != "weights"}


def metric_settings(config: EvaluateConfig, device: str) -> metric_computation.MetricSettings:
    return metric_computation.MetricSettings(
        allow_few=config.allow_few,
        kid_subsets=config.kid_subsets,
        kid_subset_size=config.kid_subset_size,
        nearest_k=config.nearest_k,
        bootstrap=config.bootstrap,
        device=device,
    )


def library_versions() -> dict[str, str]:
    names = ("halation", "torch", "diffusers", "transformers", "numpy", "pillow")
    return {**{name: version(name) for name in names}, "python": platform.python_version()}


class Evaluator:
    """Extracts features of image sources and computes metrics.

    The caller opens the sources and the extractors.
    """

    def __init__(
        self,
        world: World,
        config: EvaluateConfig,
        plan: ExtractorPlan,
        extractors: Mapping[str, Extractor],
        facts: Mapping[str, Mapping[str, Any]],
        feature_folder: FeatureFolder,
        recoverable: tuple[type[Exception], ...] = (),
    ) -> None:
        self.world = world
        self.config = config
        self.plan = plan
        self.extractors = extractors
        self.facts = facts
        """The `extractor_facts` of each label."""
        self.feature_folder = feature_folder
        self.recoverable = recoverable
        """Error types that are raised on all ranks if they occur on one; other errors end the rank."""
        self.device_name = describe_device(str(world.device))
        self.metric_settings = metric_settings(config, str(world.device))

    # -- features

    def extract(self, source: EvaluatedImages, side: str, name: str, stop: Callable[[], int]) -> Writers | None:
        """Extract all missing features; return the feature writers, or None if stopped before."""
        writers = self._make_writers(source, side)
        missing = self._missing_chunks(writers)
        if isinstance(source, SampledImages):
            return writers if self._extract_sampled(source, writers, missing, name) else None
        if isinstance(source, DrawnImages) and missing:
            folder = next(iter(writers.values())).store.folder.parent
            source.open_on_ranks(self.world, folder, bool(missing[self.world.rank :: self.world.size]))
        if missing:
            log.info(
                "features of %s on %s",
                format_count(len(source), f"{side} image"),
                format_count(self.world.size, "rank"),
            )

        def extract(heartbeat: Heartbeat) -> dict[str, Any]:
            chunks = missing[self.world.rank :: self.world.size]
            broken = self._extract_chunks(source, side, writers, chunks, heartbeat, stop)
            return {"stopped": bool(stop()), "broken": {str(index): why for index, why in broken.items()}}

        reports = run_on_all_ranks(self.world, name, self.config.dist_timeout_s, extract, self.recoverable)
        if any(report["stopped"] for report in reports):
            return None
        broken = {int(index): why for report in reports for index, why in report["broken"].items()}
        raise_if_broken(source, side, broken)
        return writers

    def _make_writers(self, source: EvaluatedImages, side: str) -> Writers:
        config, num = self.config, len(source)
        moments_only = num > config.keep_features
        starts: Sequence[int]
        if isinstance(source, SampledImages):
            starts = range(0, num, config.batch_size)
        elif isinstance(source, DrawnImages):
            starts = source.chunk_starts(extraction.MOMENTS_CHUNK_SIZE if moments_only else DRAWN_CHUNK_SIZE)
        else:
            starts = range(0, num, extraction.chunk_size(num, config.batch_size, moments_only))
        layout = [FORMAT_VERSION, config.batch_size, starts[1] if len(starts) > 1 else 0, len(starts), moments_only]
        writers = {}
        for label in self.extractors if side == "generated" else self.plan.reference_labels:
            needs_captions = side == "generated" and label == self.plan.metric_labels.get("clip")
            captions = source.captions if needs_captions else None
            store = FeatureStore(self.feature_folder(source, label, [layout, captions]), num, starts)
            if captions is not None and isinstance(source, DrawnImages):
                captions = tuple(captions[index] for index in source.order)
            writers[label] = FeatureWriter(
                label=label,
                extractor=self.extractors[label],
                store=store,
                captions=captions,
                moments_only=moments_only,
            )
        answers = self.world.all_gather_object(
            [[str(writer.store.folder) for writer in writers.values()], self.device_name]
        )
        if len({hash_json(folders) for folders, _device in answers}) > 1:
            devices = ", ".join(sorted({device for _folders, device in answers}))
            raise HalationError(
                "the ranks would compute different features: their images or weights differ, "
                f"or they run on different devices ({devices})"
            )
        return writers

    def _missing_chunks(self, writers: Writers) -> list[int]:
        """Return the chunks that are missing in any store, as seen by rank 0."""
        missing: list[int] = self.world.broadcast_from_rank_zero(
            sorted({chunk for writer in writers.values() for chunk in writer.store.clean_up()})
            if self.world.is_rank_zero
            else None
        )
        return missing

    def _extract_chunks(
        self,
        source: ImageSource | DrawnImages,
        side: str,
        writers: Writers,
        chunks: Sequence[int],
        heartbeat: Heartbeat,
        stop: Callable[[], int],
    ) -> dict[int, str]:
        """Extract the chunks of this rank; return the problems of broken images by index."""
        if not chunks:
            return {}
        config, world = self.config, self.world
        store = next(iter(writers.values())).store
        total, num_done = sum(len(store.chunk_rows(chunk)) for chunk in chunks), 0
        with StepProgress(config.progress if world.is_rank_zero else "none", total, 0, side) as progress:

            def on_batch(num: int) -> None:
                nonlocal num_done
                num_done += num
                heartbeat()
                progress.update(num_done, f"on each of {world.size} ranks" if world.size > 1 else "", {})

            batches = extraction.plan_batches(writers, chunks, config.batch_size)
            return extraction.extract_features(
                self._iter_prepared(source, batches, writers, heartbeat, stop),
                writers,
                batch_size=config.batch_size,
                device=world.device,
                expected_size=self._expected_size(source, side),
                on_batch=on_batch,
                stop=stop,
            )

    def _iter_prepared(
        self,
        source: ImageSource | DrawnImages,
        batches: Iterator[ExtractorBatch],
        writers: Writers,
        heartbeat: Heartbeat,
        stop: Callable[[], int],
    ) -> Iterator[tuple[ExtractorBatch, PreparedBatch]]:
        transforms = {label: writer.extractor.transform for label, writer in writers.items()}
        if isinstance(source, DrawnImages):
            yield from source.iter_prepared(batches, transforms, heartbeat, stop)
            return
        num_workers = self.config.decode_workers
        if num_workers < 0:
            cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            num_workers = max(1, min(MAX_DECODE_WORKERS, cores, -(-len(source) // 32)))
        with PreprocessPool(SourcePreprocessor(source=source, transforms=transforms), num_workers) as pool:
            yield from pool.iter_batches(batches)

    def _extract_sampled(self, source: SampledImages, writers: Writers, missing: Sequence[int], name: str) -> bool:
        """Sample on all ranks and extract features; return True if all features are stored.

        The rank that sampled a batch extracts its features.
        """
        config, world = self.config, self.world
        num_batches = next(iter(writers.values())).store.num_chunks
        log.info(
            "sampling %d of %s for an evaluation on %s",
            len(missing),
            format_count(num_batches, "batch"),
            format_count(world.size, "rank"),
        )
        # Every chunk is one batch.
        batches = {batch.indices: batch for batch in extraction.plan_batches(writers, missing, config.batch_size)}
        transforms = {label: writer.extractor.transform for label, writer in writers.items()}

        def on_batch(indices: range, images: list[np.ndarray]) -> None:
            fault_point("evaluate.features")
            broken: dict[int, str] = {}
            batch = batches[indices]
            prepared = source.prepare(batch, images, transforms)
            extraction.write_batch(batch, prepared, writers, broken, batch_size=config.batch_size, device=world.device)
            if broken:
                index = min(broken)
                raise HalationError(f"image {index}: {broken[index]}")

        source.draw(missing, on_batch, name)
        return not self._missing_chunks(writers)

    def _expected_size(self, source: EvaluatedImages, side: str) -> tuple[int, int] | None:
        """Return the size that all images of a folder must have, or None for any size."""
        if side == "reference" or not isinstance(source, ImageFiles) or source.kind == "run" or self.config.allow_sizes:
            return None
        return first_image_size(source)

    # -- metrics, on rank 0

    def compute(self, name: str, action: Callable[[], Any]) -> Any:
        """Run an action on rank 0 and return its result on all ranks."""
        return run_on_rank_zero(
            self.world, name, lambda heartbeat: run_with_heartbeat(action, heartbeat), self.config.dist_timeout_s
        )

    def load_features(self, source: EvaluatedImages, side: str, writers: Writers) -> FeatureSets:
        """Load the features of complete stores by label.

        Image sizes are checked again, because an earlier call may have allowed different sizes.
        """
        expected = self._expected_size(source, side)
        if expected is not None:
            sizes = np.concatenate(list(next(iter(writers.values())).store.iter_array("sizes"))).tolist()
            raise_if_broken(source, side, extraction.find_size_mismatches(range(len(sizes)), sizes, expected))
        order = source.order if isinstance(source, DrawnImages) else None
        return {label: extraction.load_feature_set(writer, order) for label, writer in writers.items()}

    def compute_metrics(
        self, generated: FeatureSets, reference: FeatureSets, captions: Sequence[str] | None
    ) -> dict[str, dict[str, Any]]:
        metrics: dict[str, dict[str, Any]] = {}
        for metric in self.config.metrics:
            label = self.plan.metric_labels[metric]
            inputs = metric_computation.MetricInputs(
                metric=metric,
                extractor=self.facts[label],
                generated=generated[label],
                reference=reference[label] if metric in metric_computation.NEEDS_REFERENCE else None,
                captions=captions,
            )
            metrics |= metric_computation.compute_metric(inputs, self.metric_settings)
        return metrics

    def provenance(self, start_time: float) -> dict[str, Any]:
        """Return the provenance for a report; `start_time` is a value of `time.perf_counter`."""
        return {
            "versions": library_versions(),
            "computed_on": self.device_name,
            "num_ranks": self.world.size,
            "seconds": round(time.perf_counter() - start_time, 2),
        }


def raise_if_broken(source: EvaluatedImages, side: str, broken: Mapping[int, str]) -> None:
    if not broken:
        return
    first = sorted(broken)[: extraction.MAX_BROKEN]
    lines = "\n".join(f"  {source.name(index)}: {broken[index]}" for index in first)
    more = f"\n  and {len(broken) - len(first)} more" if len(broken) > len(first) else ""
    found = f"{side} images that cannot be scored:\n{lines}{more}"
    if isinstance(source, DrawnImages):
        raise HalationError(f"{found}\nthe model could not generate them; run the same command to retry")
    if any(SIZE_MISMATCH_TEXT in why for why in broken.values()):
        action = "remove or replace them, or pass --allow_sizes if different sizes are intended"
        raise InputError(found, "complete images of one size", action)
    if isinstance(source, ImageFiles) and source.kind == "run":
        action = "generate them again: run the same `halation generate` with --verify"
        raise InputError(found, "the images that the run generated", action)
    raise InputError(found, "complete PNG, JPEG or WebP images", "remove or replace them")


def first_image_size(source: ImageSource) -> tuple[int, int]:
    """Return height and width of the first image."""
    try:
        height, width = source.load(0).pixels.shape[:2]
    except BrokenImageError as error:
        raise InputError(
            f"{source.name(0)}: {error}",
            "a complete PNG, JPEG or WebP image",
            "follow the message, or remove or replace the file",
        ) from error
    return int(height), int(width)
