"""Evaluation during training: reference and prompts, a report per step, metrics and plot."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from halation.data.dataset_protocol import ImageDataset
from halation.data.image_folder import ImageFolder
from halation.data.streets import caption, scene
from halation.distributed import rng
from halation.distributed.launcher import describe_device
from halation.distributed.world import World, run_on_all_ranks, run_on_rank_zero
from halation.errors import HalationError, InputError, format_count
from halation.evaluation.config import EvaluateConfig
from halation.evaluation.drawn_images import SampledImages
from halation.evaluation.evaluator import (
    EvaluatedImages,
    Evaluator,
    Heartbeat,
    extractor_facts,
    plan_extractors,
    without_paths,
)
from halation.evaluation.extractors.extractor import Extractor
from halation.evaluation.image_sources import ImageSource, StreetImages, TrainingImages
from halation.evaluation.metrics.caption_agreement import has_street_captions
from halation.evaluation.metrics.metric_computation import NEEDS_CAPTIONS
from halation.images.plot import draw_panels, metric_panels
from halation.images.png_codec import encode_png
from halation.runs import run_folder as runs
from halation.sampling.all_rank_sampler import DenoiserSampler, SampleSettings
from halation.training.build_components import check_dataset, open_dataset
from halation.training.config import TrainConfig

MIN_REFERENCE_IMAGES = 16
"""With fewer real images, no metric is meaningful."""

log = logging.getLogger(__name__)

EvaluationReport = dict[str, Any]
RECOVERABLE_ERRORS = (HalationError, OSError, RuntimeError, ValueError, MemoryError)


@dataclass(frozen=True, kw_only=True)
class EvaluationData:
    """The reference of a run's evaluations, and the prompts of the images compared with it."""

    reference: ImageSource
    prompts: tuple[str, ...]


def open_evaluation_data(config: TrainConfig, source: ImageDataset, run: runs.RunFolder) -> EvaluationData:
    """Open the validation scenes of streets, or the training images of a folder.

    Raises an InputError for metrics that cannot be computed on this data.
    """
    height, width = config.image_size
    if config.data == "streets":
        num_prompts = min(config.eval_images, config.eval_reference)
        return EvaluationData(
            reference=StreetImages(size=height, num=config.eval_reference),
            prompts=tuple(caption(scene("heldout", index)) for index in range(num_prompts)),
        )
    folder = source
    if not isinstance(folder, ImageFolder) or config.aspect_buckets:
        # The run trains on a cache of the images, or in buckets: open the images themselves, at one size.
        folder = open_dataset(config.data, height, width, config.validation_images, max_images=config.max_images)
        check_dataset(folder, Path(config.cache_dir) if config.cache_dir else run.folder / "cache", quiet=True)
    assert isinstance(folder, ImageFolder)
    reference = TrainingImages(image_folder=folder, num_images=min(config.eval_reference, folder.num_train))
    prompts = tuple(folder.prompt(index) for index in range(min(config.eval_images, len(reference))))
    if folder.num_train < MIN_REFERENCE_IMAGES:
        raise InputError(
            f"--eval_every with {format_count(folder.num_train, 'image')} in {folder.name}",
            f"at least {MIN_REFERENCE_IMAGES} real images to compare with",
            "leave --eval_every out, or give more images",
        )
    caption_metrics = [metric for metric in config.eval_metrics if metric in NEEDS_CAPTIONS]
    if caption_metrics and folder.class_names:
        raise InputError(
            f"--eval_metrics {' '.join(caption_metrics)}, but {folder.name} has classes",
            "images with captions for these metrics",
            "choose other metrics",
        )
    if "agreement" in caption_metrics and not has_street_captions(prompts):
        raise InputError(
            f"--eval_metrics agreement, but no caption of {folder.name} names anything the streets network detects",
            "captions with the vocabulary of the embedded street scenes",
            "use clip instead",
        )
    return EvaluationData(reference=reference, prompts=prompts)


def evaluation_settings(
    samples: SampleSettings, prompts: Sequence[str], *, num_images: int, steps: int, batch_size: int
) -> SampleSettings:
    """The run's sample settings for `num_images` images of these prompts, repeated as needed.

    Every image has its own seed, even with --same_seed: images from one noise would be less varied than the model's.
    """
    return dataclasses.replace(
        samples,
        prompts=tuple(islice(cycle(prompts), num_images)),
        rows=(),
        steps=steps,
        batch_size=batch_size,
        same_seed=False,
    )


class TrainingEvaluator:
    """The evaluations of one run: `prepare()` once, then `run()` at every evaluated step."""

    def __init__(
        self, world: World, config: TrainConfig, run: runs.RunFolder, source: ImageDataset, samples: SampleSettings
    ) -> None:
        self.world = world
        self.config = config
        self.run_folder = run.folder
        self.source = source
        self.samples = samples
        self.folder = run.folder / "evaluation"
        self.run_counter = itertools.count()
        self.evaluate_config = EvaluateConfig(
            metrics=config.eval_metrics,
            extractor=config.eval_extractor,
            weights=config.eval_weights,
            clip_model=config.eval_clip_model,
            allow_few=True,
            batch_size=config.eval_batch_size,
            keep_features=sys.maxsize,
            decode_workers=config.num_workers,
            dist_timeout_s=config.sample_timeout_s or config.dist_timeout_s,
            progress="none",
        )
        self.plan = plan_extractors(self.evaluate_config)
        self.device_name = describe_device(str(world.device))

    def prepare(self) -> None:
        """Open the reference data and every extractor once, to fail before the first step."""
        config, samples = self.config, self.samples
        self.folder.mkdir(exist_ok=True)
        self.data = open_evaluation_data(config, self.source, runs.RunFolder(self.run_folder))
        self.settings = evaluation_settings(
            samples,
            self.data.prompts,
            num_images=config.eval_images,
            steps=config.eval_steps or samples.steps,
            batch_size=config.eval_batch_size,
        )
        self.extractor_facts: dict[str, dict[str, Any]] = run_on_rank_zero(
            self.world, "the extractors", self._check_extractors, config.dist_timeout_s
        )

    def _check_extractors(self, heartbeat: Heartbeat) -> dict[str, dict[str, Any]]:
        """Open every extractor once to find or download its weights, and keep none of them.

        Building a network draws random initial weights; the fork keeps the random states of the run unchanged.
        """
        facts = {}
        with rng.fork_rng():
            for label in self.plan.extractors:
                try:
                    facts[label] = extractor_facts(self.plan.open_extractor(label, self.evaluate_config, "cpu"))
                except InputError as error:
                    raise _rename_flags(error) from error
                heartbeat()
        return facts

    @property
    def key(self) -> str:
        """Hash of everything that decides the scores, except the weights of the model."""
        facts = {label: without_paths(facts) for label, facts in self.extractor_facts.items()}
        how = [self.config.eval_metrics, self.settings.as_json(), self.config.threads, self.device_name]
        return runs.hash_json([facts, how, self.data.reference.key])[:24]

    def read_report(self, step: int) -> EvaluationReport | None:
        """Return the report of an earlier evaluation of this step, if it has the same settings."""
        try:
            report: EvaluationReport = runs.read_json_with_digest(self._report_path(step))
        except FileNotFoundError:
            return None
        except (OSError, InputError) as error:
            log.warning("evaluating step %d again: %s", step, error)
            return None
        return report if report.get("key") == self.key else None

    def _report_path(self, step: int) -> Path:
        return self.folder / f"{runs.step_name(step)}.json"

    def run(
        self,
        step: int,
        sampler: DenoiserSampler,
        swap_in_ema: Callable[[], AbstractContextManager[None]],
        stop: Callable[[], int],
    ) -> EvaluationReport | None:
        """Evaluate a step; return the same report on all ranks, or None after a stop.

        Errors are raised on all ranks. Extractors are opened here and not kept: between evaluations, training needs
        the device memory.
        """
        start_time = time.perf_counter()
        name = f"evaluating step {step} #{next(self.run_counter)}"
        extractors: dict[str, Extractor] = {}

        def open_extractors(heartbeat: Heartbeat) -> None:
            with rng.fork_rng():
                for label in self.plan.extractors:
                    extractors[label] = self.plan.open_extractor(label, self.evaluate_config, str(self.world.device))
                    heartbeat()

        timeout_s = self.evaluate_config.dist_timeout_s
        run_on_all_ranks(self.world, f"{name}: extractors", timeout_s, open_extractors, RECOVERABLE_ERRORS)

        def feature_folder(source: EvaluatedImages, label: str, _layout: list[Any]) -> Path:
            facts = without_paths(self.extractor_facts[label])
            how = [facts, self.config.eval_batch_size, self.config.threads, self.device_name]
            if isinstance(source, SampledImages):
                return self.folder / runs.step_name(step) / runs.hash_json([self.settings.as_json(), how])[:24]
            return self.folder / "reference" / runs.hash_json([source.key, how])[:24]

        evaluator = Evaluator(
            self.world,
            self.evaluate_config,
            self.plan,
            extractors,
            self.extractor_facts,
            feature_folder,
            RECOVERABLE_ERRORS,
        )
        images = SampledImages(sampler=sampler, settings=self.settings, swap_in_ema=swap_in_ema)
        reference = evaluator.extract(self.data.reference, "reference", f"{name}: reference", stop)
        generated = None if reference is None else evaluator.extract(images, "generated", name, stop)
        if reference is None or generated is None:
            return None

        def write_report() -> EvaluationReport:
            reference_features = evaluator.load_features(self.data.reference, "reference", reference)
            generated_features = evaluator.load_features(images, "generated", generated)
            settings = {name: value for name, value in self.settings.as_json().items() if name != "prompts"}
            about = {"kind": "training", "path": str(self.run_folder), "step": step, "weights": "average"}
            report = {
                "step": step,
                "generated": {**about, "num": len(images), "settings": settings},
                "reference": {**self.data.reference.facts, "num": len(self.data.reference)} if reference else None,
                "metrics": evaluator.compute_metrics(generated_features, reference_features, images.captions),
                **evaluator.provenance(start_time),
                "key": self.key,
            }
            runs.write_json_with_digest(self._report_path(step), report)
            for folder in self.folder.glob("step_*/"):
                shutil.rmtree(folder, ignore_errors=True)
            return report

        step_report: EvaluationReport = evaluator.compute(f"{name}: numbers", write_report)
        return step_report


def evaluation_rows(report: EvaluationReport) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl for a report, one per metric."""
    fields = ("value", "std", "better", "num_generated", "num_reference", "few", "extractor", "seconds")
    by_name = {found["name"]: found for found in report["metrics"].values()}  # fid and fd may be the same number
    return [
        {"step": report["step"], "metric": name, **{key: found[key] for key in fields}}
        for name, found in by_name.items()
    ]


def is_evaluation_row(row: Mapping[str, Any]) -> bool:
    """Return True if a line of metrics.jsonl is from an evaluation."""
    return "metric" in row and "num_generated" in row


def publish_plot(run: runs.RunFolder, rows: list[dict[str, Any]]) -> None:
    """Plot every metric over the steps, once at least two steps were evaluated."""
    lines = [row for row in rows if is_evaluation_row(row)]
    if len({row["step"] for row in lines}) > 1:
        title = f"{run.folder.resolve().name}: evaluations of the averaged weights"
        runs.write_atomic(
            run.folder / "evaluation" / "metrics.png",
            encode_png(draw_panels(metric_panels(lines), title), {}),
        )


def _rename_flags(error: InputError) -> InputError:
    """Replace flags of `halation evaluate` in an extractor's message by those of training."""
    names = {
        "--weights": "--eval_weights",
        "--inception_weights": "--eval_weights",
        "--clip_model": "--eval_clip_model",
        "--extractor": "--eval_extractor",
    }
    found, expected, action = (
        re.sub(r"--\w+", lambda flag: names.get(flag[0], flag[0]), part)
        for part in (error.found, error.expected, error.action)
    )
    return InputError(found, expected, f"{action}; --eval_every 0 trains without evaluations")
