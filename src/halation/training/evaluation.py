"""Evaluations in training: the average of the weights draws on all ranks, its images become features where they are, and the first counts."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import itertools
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halation import work_division
from halation.data.dataset_factory import check_dataset, open_dataset
from halation.data.dataset_protocol import ImageDataset
from halation.data.decode import decode
from halation.data.image_folder import ImageFolder
from halation.data.streets import caption, scene
from halation.distributed import rng
from halation.distributed.launcher import describe_device
from halation.distributed.world import HeartbeatMonitor, World, run_on_rank_zero, run_with_heartbeat
from halation.errors import HalationError, InputError, os_error_message
from halation.evaluation import feature_extraction
from halation.evaluation.config import EvaluateConfig
from halation.evaluation.extractor_plan import (
    caption_embedder,
    extractor_facts,
    library_versions,
    load_feature_set,
    plan_extractors,
)
from halation.evaluation.extractors.extractor import Extractor
from halation.evaluation.extractors.registry import open_extractor
from halation.evaluation.feature_extraction import FeatureWriter
from halation.evaluation.feature_store import FeatureStore
from halation.evaluation.image_sources import ImageSource, LoadedImage, StreetImages, hash_json
from halation.evaluation.metrics import metric_computation
from halation.evaluation.metrics.caption_agreement import has_street_captions
from halation.evaluation.metrics.metric_computation import NEEDS_CAPTIONS
from halation.evaluation.preprocess_pool import PreprocessPool, SourcePreprocessor, prepare_images
from halation.fault_injection import fault_point
from halation.images.plot import draw_panels, metric_panels
from halation.images.png_codec import encode_png
from halation.runs import run_folder as runs
from halation.sample_specs import SampleBatch
from halation.sampling.denoiser_sampler import DenoiserSampler, SampleSettings
from halation.sampling.sample_folder import SampleRow
from halation.training.config import TrainConfig

MIN_REFERENCE_IMAGES = 16
"""Real images below which no metric means anything."""

log = logging.getLogger(__name__)

OnBatch = Callable[[range, list[np.ndarray]], None]
"""What is done with the images of a whole batch, given by their indices."""
EvaluationReport = dict[str, Any]
Heartbeat = Callable[[], None]
RECOVERABLE_ERRORS = (HalationError, OSError, RuntimeError, ValueError, MemoryError)


@dataclass(frozen=True, kw_only=True)
class TrainingImages:
    """The first images that a run trains on, as it sees them: cropped and at its size."""

    image_folder: ImageFolder
    num_images: int

    @property
    def captions(self) -> tuple[str, ...] | None:
        return None  # a reference's captions are of no use to any number

    def __len__(self) -> int:
        return self.num_images

    @property
    def key(self) -> str:
        return hash_json([self.image_folder.fingerprint, "train", self.num_images])

    @property
    def facts(self) -> dict[str, Any]:
        size = [self.image_folder.height, self.image_folder.width]
        return {"kind": "training pictures", "path": self.image_folder.name, "size": size}

    def name(self, index: int) -> str:
        return str(self.image_folder.folder / self.image_folder.file_name(index))

    @property
    def loader(self) -> Callable[[str], LoadedImage]:
        return partial(load_training_image, self.image_folder.height, self.image_folder.width)

    def image_ref(self, index: int) -> str:
        return self.name(index)

    def load(self, index: int) -> LoadedImage:
        return self.loader(self.image_ref(index))


def load_training_image(height: int, width: int, path: str) -> LoadedImage:
    """The image of a file as a run at this size sees it."""
    pixels = decode(Path(path), height, width)
    return LoadedImage(pixels, hashlib.sha256(pixels.tobytes()).digest())


@dataclass(frozen=True, kw_only=True)
class EvaluationData:
    """The reference of a run's evaluations and what is drawn to be compared with it."""

    reference: ImageSource
    prompts: tuple[str, ...]


def open_evaluation_data(config: TrainConfig, source: ImageDataset, run: runs.RunFolder) -> EvaluationData:
    """Validation scenes, or the training images of a folder; metrics that this data cannot serve are refused."""
    if config.data == "streets":
        height, _width = config.image_size
        reference: ImageSource = StreetImages(size=height, num=config.eval_reference)
        prompts = [caption(scene("heldout", index)) for index in range(min(config.eval_images, config.eval_reference))]
    else:
        folder = _open_image_folder(config, source, run)
        reference = TrainingImages(image_folder=folder, num_images=min(config.eval_reference, folder.num_train))
        prompts = [folder.prompt(index) for index in range(min(config.eval_images, len(reference)))]
        _check_metrics_supported(config, folder, prompts)
    return EvaluationData(reference=reference, prompts=tuple(prompts))


def _open_image_folder(config: TrainConfig, source: ImageDataset, run: runs.RunFolder) -> ImageFolder:
    """The images themselves at one size, also where the run trains on what a cache made of them, or in buckets."""
    if isinstance(source, ImageFolder) and not config.aspect_buckets:
        return source
    height, width = config.image_size
    folder = open_dataset(config.data, height, width, config.validation_images, max_images=config.max_images)
    check_dataset(folder, Path(config.cache_dir) if config.cache_dir else run.folder / "cache", quiet=True)
    assert isinstance(folder, ImageFolder)
    return folder


def _check_metrics_supported(config: TrainConfig, folder: ImageFolder, prompts: list[str]) -> None:
    if folder.num_train < MIN_REFERENCE_IMAGES:
        raise InputError(
            f"--eval_every with {folder.num_train} images in {folder.name}",
            f"at least {MIN_REFERENCE_IMAGES} real images to compare with",
            "leave --eval_every out, or give more images",
        )
    caption_metrics = [metric for metric in config.eval_metrics if metric in NEEDS_CAPTIONS]
    if caption_metrics and folder.class_names:
        raise InputError(
            f"--eval_metrics {' '.join(caption_metrics)}, but {folder.name} has classes",
            "images with captions, for metrics that compare with words",
            "ask for other metrics",
        )
    if "agreement" in caption_metrics and not has_street_captions(prompts):
        raise InputError(
            f"--eval_metrics agreement, but no caption of {folder.name} names what the streets network looks for",
            "captions in the words of the embedded street scenes",
            "ask for clip instead",
        )


def evaluation_settings(
    samples: SampleSettings, prompts: Sequence[str], *, num_images: int, steps: int, batch_size: int
) -> SampleSettings:
    """As the run's samples, for `num_images` images of these prompts, over and over where they are fewer.

    Every image has a seed of its own, whatever samples do: images from one noise would be less varied than the model.
    """
    return dataclasses.replace(
        samples, prompts=tuple(islice(cycle(prompts), num_images)), steps=steps, batch_size=batch_size, same_seed=False
    )


class CallbackSink:
    """Hands the images of each whole batch on; a batch that lacks one is not worth scoring."""

    def __init__(self, on_batch: OnBatch) -> None:
        self._on_batch = on_batch

    def put(self, batch: SampleBatch, images: Mapping[int, np.ndarray], rows: Sequence[SampleRow]) -> None:
        if len(images) == len(rows):
            first = batch.specs[0].index
            self._on_batch(range(first, first + len(rows)), [images[number] for number in range(len(rows))])

    def finish(self) -> None:
        """Everything was handed on at once."""


class TrainingEvaluator:
    """The evaluations of one run; everything that can be refused is refused when it is made."""

    def __init__(
        self, world: World, config: TrainConfig, run: runs.RunFolder, source: ImageDataset, samples: SampleSettings
    ) -> None:
        self.world = world
        self.config = config
        self.run_folder = run.folder
        self.folder = run.folder / "evaluation"
        self.folder.mkdir(exist_ok=True)
        self.timeout_s = config.sample_timeout_s or config.dist_timeout_s
        self.run_counter = itertools.count()
        self.data = open_evaluation_data(config, source, run)
        self.settings = evaluation_settings(
            samples,
            self.data.prompts,
            num_images=config.eval_images,
            steps=config.eval_steps or samples.steps,
            batch_size=config.eval_batch_size,
        )
        evaluate_config = EvaluateConfig(
            metrics=config.eval_metrics,
            extractor=config.eval_extractor,
            weights=config.eval_weights,
            clip_model=config.eval_clip_model,
        )
        self.extractor_plan = plan_extractors(evaluate_config)
        self.device_name = describe_device(str(world.device))
        self.extractor_facts: dict[str, dict[str, Any]] = run_on_rank_zero(
            world, "the extractors", self._check_extractors, config.dist_timeout_s
        )

    def _check_extractors(self, heartbeat: Heartbeat) -> dict[str, dict[str, Any]]:
        """Open every extractor once, so that what is missing is told now and what must be downloaded is there; keep none."""
        facts = {}
        with self._preserve_rng():
            for label in self.extractor_plan.extractors:
                try:
                    facts[label] = extractor_facts(self._open_extractor(label, "cpu"))
                except InputError as error:
                    raise _rename_flags(error, label) from error
                heartbeat()
        return facts

    def _open_extractor(self, label: str, device: str) -> Extractor:
        name, weights = self.extractor_plan.extractors[label]
        return open_extractor(name, device=device, weights=weights)

    @contextmanager
    def _preserve_rng(self) -> Iterator[None]:
        """A network that is built draws first weights nobody asked for; the run's random states must not know."""
        rng_state = rng.capture(self.world.device)
        try:
            yield
        finally:
            rng.restore(rng_state, self.world.device)

    # -- what is there already

    @property
    def key(self) -> str:
        """Everything besides the weights of the model that decides the numbers."""
        facts = {label: _without_paths(facts) for label, facts in self.extractor_facts.items()}
        how = [self.config.eval_metrics, self.settings.as_json(), self.config.threads, self.device_name]
        return hash_json([facts, how, self.data.reference.key])[:24]

    def read_report(self, step: int) -> EvaluationReport | None:
        """What an evaluation of this step has found, if it was made in this very way."""
        try:
            report: EvaluationReport = runs.read_json_with_digest(self._report_path(step))
        except FileNotFoundError:
            return None
        except (OSError, InputError) as error:
            log.warning("step %d is evaluated again: %s", step, error)
            return None
        return report if report.get("key") == self.key else None

    def _report_path(self, step: int) -> Path:
        return self.folder / f"{runs.step_name(step)}.json"

    # -- an evaluation

    def run(
        self,
        step: int,
        sampler: DenoiserSampler,
        swap_in_ema: Callable[[], AbstractContextManager[None]],
        stop: Callable[[], int],
    ) -> EvaluationReport | None:
        """On all ranks; the same report everywhere, or None where it was stopped. An error is the same on all ranks too.

        Extractors are opened here and by nobody kept: between evaluations the device's memory is training's.
        """
        start_time = time.perf_counter()
        name = f"evaluating step {step} #{next(self.run_counter)}"
        extractors: dict[str, Extractor] = {}

        def open_all(heartbeat: Heartbeat) -> None:
            with self._preserve_rng():
                for label in self.extractor_plan.extractors:
                    extractors[label] = self._open_extractor(label, str(self.world.device))
                    heartbeat()

        self._run_on_all_ranks(f"{name}: extractors", open_all)
        reference = self._reference_writers(extractors)
        if not self._extract_reference(reference, f"{name}: reference", stop):
            return None
        generated = self._generated_writers(step, extractors)
        with swap_in_ema():
            rows = self._draw_images(sampler, generated, name)
        _check_none_failed(rows, len(self.settings.prompts))
        if self._missing_chunks(generated):
            return None

        def compute_metrics(heartbeat: Heartbeat) -> EvaluationReport:
            report = run_with_heartbeat(lambda: self._make_report(step, reference, generated, start_time), heartbeat)
            runs.write_json_with_digest(self._report_path(step), report)
            for folder in self.folder.glob("step_*/"):
                shutil.rmtree(folder, ignore_errors=True)
            return report

        step_report: EvaluationReport = run_on_rank_zero(
            self.world, f"{name}: numbers", compute_metrics, self.timeout_s
        )
        return step_report

    def _run_on_all_ranks(self, name: str, action: Callable[[Heartbeat], None]) -> None:
        """On all ranks apart; where it fails on one, all hear why and none goes on."""
        error = ""
        with HeartbeatMonitor(self.world, name, self.timeout_s) as monitor:
            try:
                action(monitor.heartbeat)
            except RECOVERABLE_ERRORS as problem:
                log.debug("%s failed", name, exc_info=True)
                error = os_error_message(problem) or f"{type(problem).__name__}: {problem}"
            errors = monitor.gather_results(error)
        for rank, message in enumerate(errors):
            if message:
                raise HalationError(f"rank {rank}: {message}")

    def _missing_chunks(self, writers: Mapping[str, FeatureWriter]) -> list[int]:
        """Chunks that are not there for all feature writers, as the first rank sees it."""
        missing: list[int] = self.world.broadcast_from_rank_zero(
            sorted({chunk for writer in writers.values() for chunk in writer.store.clean_up()})
            if self.world.is_rank_zero
            else None
        )
        return missing

    def _feature_key(self, label: str) -> list[Any]:
        """What decides the features of an image besides the image."""
        return [
            _without_paths(self.extractor_facts[label]),
            self.config.eval_batch_size,
            self.config.threads,
            self.device_name,
        ]

    # -- features

    def _reference_writers(self, extractors: Mapping[str, Extractor]) -> dict[str, FeatureWriter]:
        source, batch = self.data.reference, self.config.eval_batch_size
        starts = range(0, len(source), feature_extraction.chunk_size(len(source), batch, moments_only=False))
        writers = {}
        for label in self.extractor_plan.reference_labels:
            folder = self.folder / "reference" / hash_json([source.key, self._feature_key(label)])[:24]
            writers[label] = FeatureWriter(
                label=label, extractor=extractors[label], store=FeatureStore(folder, len(source), starts)
            )
        return writers

    def _extract_reference(self, writers: Mapping[str, FeatureWriter], name: str, stop: Callable[[], int]) -> bool:
        """Once for a run; whether all of it is there."""
        missing = self._missing_chunks(writers)
        if not missing:
            return True
        source, batch = self.data.reference, self.config.eval_batch_size
        rank_chunks = missing[self.world.rank :: self.world.size]
        log.info("features of %d reference images for evaluations", len(source))

        def extract_chunks(heartbeat: Heartbeat) -> None:
            preparations = {label: writer.extractor.transform for label, writer in writers.items()}
            preparer = SourcePreprocessor(source=source, transforms=preparations)
            with PreprocessPool(preparer, self.config.num_workers if rank_chunks else 0) as prepared:
                broken = feature_extraction.extract_features(
                    prepared.iter_batches(feature_extraction.plan_batches(writers, rank_chunks, batch)),
                    writers,
                    batch_size=batch,
                    device=self.world.device,
                    expected_size=None,
                    on_batch=lambda _num: heartbeat(),
                    stop=stop,
                )
            if broken:
                index = min(broken)
                raise HalationError(f"{source.name(index)}: {broken[index]}")

        self._run_on_all_ranks(name, extract_chunks)
        return not self._missing_chunks(writers)

    def _generated_writers(self, step: int, extractors: Mapping[str, Extractor]) -> dict[str, FeatureWriter]:
        """A chunk a batch."""
        num, prompts = len(self.settings.prompts), self.settings.prompts
        starts = range(0, num, self.config.eval_batch_size)
        writers = {}
        for label, extractor in extractors.items():
            texts = (
                caption_embedder(extractor, prompts, None)
                if label == self.extractor_plan.metric_labels.get("clip")
                else None
            )
            folder = (
                self.folder / runs.step_name(step) / hash_json([self.settings.as_json(), self._feature_key(label)])[:24]
            )
            writers[label] = FeatureWriter(
                label=label, extractor=extractor, store=FeatureStore(folder, num, starts), embed_texts=texts
            )
        return writers

    def _draw_images(
        self, sampler: DenoiserSampler, writers: Mapping[str, FeatureWriter], name: str
    ) -> list[SampleRow]:
        batches = work_division.make_batches(self.settings.specs(), self.config.eval_batch_size)
        missing = self._missing_chunks(writers)
        log.info("drawing %d of %d batches for an evaluation on %d ranks", len(missing), len(batches), self.world.size)

        def on_batch(indices: range, images: list[np.ndarray]) -> None:
            fault_point("evaluate.features")
            self._write_features(writers, indices, images)

        return sampler.draw_batches(batches, missing, CallbackSink(on_batch), name)

    def _write_features(self, writers: Mapping[str, FeatureWriter], indices: range, images: list[np.ndarray]) -> None:
        loaders = [(index, _make_loader(pixels)) for index, pixels in zip(indices, images, strict=True)]
        prepared = prepare_images(loaders, {label: writer.extractor.transform for label, writer in writers.items()})
        for label, writer in writers.items():
            broken = writer.extract_batch(indices, prepared, self.config.eval_batch_size, self.world.device)
            if broken:
                writer.discard_rows()
                raise HalationError(f"the features of image {broken[0]} by {label} are not finite")
            writer.write_chunk(writer.store.chunk_index(indices[0]))

    # -- numbers

    def _make_report(
        self,
        step: int,
        reference: Mapping[str, FeatureWriter],
        generated: Mapping[str, FeatureWriter],
        start_time: float,
    ) -> EvaluationReport:
        metric_settings = metric_computation.MetricSettings(allow_few=True, device=str(self.world.device))
        reference_features = {label: load_feature_set(writer, None) for label, writer in reference.items()}
        generated_features = {label: load_feature_set(writer, None) for label, writer in generated.items()}
        metrics: dict[str, dict[str, Any]] = {}
        for metric in self.config.eval_metrics:
            label = self.extractor_plan.metric_labels[metric]
            inputs = metric_computation.MetricInputs(
                metric=metric,
                extractor=self.extractor_facts[label],
                generated=generated_features[label],
                reference=reference_features[label] if metric in metric_computation.NEEDS_REFERENCE else None,
                captions=self.settings.prompts,
            )
            metrics |= metric_computation.compute_metric(inputs, metric_settings)
        settings = {name: value for name, value in self.settings.as_json().items() if name != "prompts"}
        about = {"kind": "training", "path": str(self.run_folder), "step": step, "weights": "average"}
        return {
            "step": step,
            "generated": {**about, "num": len(self.settings.prompts), "settings": settings},
            "reference": {**self.data.reference.facts, "num": len(self.data.reference)} if reference_features else None,
            "metrics": metrics,
            "versions": library_versions(),
            "computed_on": self.device_name,
            "num_ranks": self.world.size,
            "seconds": round(time.perf_counter() - start_time, 2),
            "key": self.key,
        }


def free_memory(device: torch.device) -> None:
    """Give back what the extractors took, once nothing holds them any more, an error's traceback neither."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def evaluation_rows(report: EvaluationReport) -> list[dict[str, Any]]:
    """The report's lines in metrics.jsonl, a number each."""
    fields = ("value", "std", "better", "num_generated", "num_reference", "few", "extractor", "seconds")
    by_name = {found["name"]: found for found in report["metrics"].values()}  # fid and fd may be the same number
    return [
        {"step": report["step"], "metric": name, **{key: found[key] for key in fields}}
        for name, found in by_name.items()
    ]


def is_evaluation_row(row: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl is one of those."""
    return "metric" in row and "num_generated" in row


def publish_plot(run: runs.RunFolder, rows: list[dict[str, Any]]) -> None:
    """Every metric over the steps, as soon as there are two of them."""
    lines = [row for row in rows if is_evaluation_row(row)]
    if len({row["step"] for row in lines}) > 1:
        title = f"{run.folder.resolve().name}: evaluations of the averaged weights"
        runs.write_atomic(
            run.folder / "evaluation" / "metrics.png",
            encode_png(draw_panels(metric_panels(lines), title), {}),
        )


def remove_reports_after(run: runs.RunFolder, step: int) -> None:
    """Drop evaluations of steps that are about to be trained again; -1 forgets all of them."""
    for path in (run.folder / "evaluation").glob("step_*"):
        if path.name.removesuffix(".json") > runs.step_name(step) or step < 0:
            runs.remove_path(path)


def _rename_flags(error: InputError, label: str) -> InputError:
    """An extractor speaks of the flags of `halation evaluate`; in training they have other names."""
    names = {
        "--weights": "--eval_clip_model" if label == "clip" else "--eval_weights",
        "--extractor": "--eval_extractor",
    }
    parts = [error.found, error.expected, error.action]
    for theirs, ours in names.items():
        parts = [re.sub(rf"{theirs}\b", ours, part) for part in parts]
    return InputError(parts[0], parts[1], f"{parts[2]}; --eval_every 0 trains without evaluations")


def _check_none_failed(rows: list[SampleRow], num: int) -> None:
    failed = [row for row in rows if row["state"] == "failed"]
    if failed:
        first = failed[0]
        raise HalationError(
            f"{len(failed)} of {num} images could not be drawn or scored, the first of them on rank {first['rank']}: {first['reason']}"
        )


def _make_loader(pixels: np.ndarray) -> Callable[[], tuple[np.ndarray, bytes]]:
    return lambda: (pixels, hashlib.sha256(np.ascontiguousarray(pixels).data).digest())


def _without_paths(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The same weights in another place are the same weights."""
    return {name: value for name, value in facts.items() if name != "weights"}
