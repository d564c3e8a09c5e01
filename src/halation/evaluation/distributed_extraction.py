"""One pass over one side's images by all ranks: what is missing in the stores is computed, and every rank hears what went wrong."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from halation.distributed.stop_signals import exit_code
from halation.distributed.world import HeartbeatMonitor, World
from halation.errors import HalationError, InputError, Interrupted
from halation.evaluation import feature_extraction as extraction
from halation.evaluation.config import EvaluateConfig
from halation.evaluation.extractor_plan import ExtractorPlan, caption_embedder, extractor_facts, load_feature_set
from halation.evaluation.extractors.extractor import Extractor
from halation.evaluation.feature_extraction import FeatureWriter
from halation.evaluation.feature_store import FORMAT_VERSION, FeatureStore
from halation.evaluation.image_sources import ImageFiles, ImageSource, hash_json
from halation.evaluation.metrics import metric_computation
from halation.evaluation.model_images import ModelImages
from halation.evaluation.preprocess_pool import ExtractorBatch, PreparedBatch, PreprocessPool, SourcePreprocessor
from halation.generation.workers.image_runner import ImageModel
from halation.progress import StepProgress
from halation.runs.run_folder import read_json_with_digest, write_json_with_digest

MAX_DECODE_WORKERS = 16
STOP_KEY = "evaluate/stop"
SIZE_MISMATCH_TEXT = "where the first image has"


class FeaturePass:
    """The passes of one evaluation; all ranks call the same ones in the same order."""

    def __init__(
        self,
        world: World,
        config: EvaluateConfig,
        cache: Path,
        plan: ExtractorPlan,
        extractors: Mapping[str, Extractor],
        device_name: str,
    ) -> None:
        self.world = world
        self.config = config
        self.cache = cache
        self.plan = plan
        self.extractors = extractors
        self.device_name = device_name
        self.micro_batch = config.model_batch_size
        self._model: ImageModel | None = None
        self._pass_numbers = itertools.count()

    def extract(
        self, source: ImageSource | ModelImages, side: str, labels: Sequence[str], stop_signal: Callable[[], int]
    ) -> dict[str, FeatureWriter]:
        """A feature writer for each extractor, whose store is complete."""
        moments_only = len(source) > self.config.keep_features
        starts = self._chunk_starts(source, moments_only)
        order = source.order if isinstance(source, ModelImages) else None
        writers = {}
        for label in labels:
            needs_captions = side == "generated" and label == self.plan.metric_labels.get("clip")
            captions = source.captions if needs_captions else None
            texts = None if captions is None else caption_embedder(self.extractors[label], captions, order)
            key = self._store_key(label, starts, moments_only, captions)
            store = FeatureStore(self.cache / source.key[:24] / key, len(source), starts)
            writers[label] = FeatureWriter(
                label=label, extractor=self.extractors[label], store=store, embed_texts=texts, moments_only=moments_only
            )
        self._check_ranks_agree([str(writer.store.folder) for writer in writers.values()])
        self._fill_stores(source, side, writers, stop_signal)
        return writers

    def _check_ranks_agree(self, folders: list[str]) -> None:
        answers = self.world.all_gather_object([folders, self.device_name])
        if len({hash_json(word[0]) for word in answers}) > 1:
            devices = ", ".join(sorted({word[1] for word in answers}))
            raise HalationError(
                f"the ranks would not compute the same features: they see other images or weights, or compute on different devices ({devices})"
            )

    def _chunk_starts(self, source: ImageSource | ModelImages, moments_only: bool) -> Sequence[int]:
        if isinstance(source, ModelImages):
            return source.chunk_starts(extraction.MOMENTS_CHUNK_SIZE) if moments_only else source.chunk_starts()
        return range(0, len(source), extraction.chunk_size(len(source), self.config.batch_size, moments_only))

    def _store_key(self, label: str, starts: Sequence[int], moments_only: bool, captions: Sequence[str] | None) -> str:
        """Everything that decides the features, besides the images."""
        facts = {name: value for name, value in extractor_facts(self.extractors[label]).items() if name != "weights"}
        threads = self.config.threads if self.device_name == "cpu" else 0
        layout = [
            FORMAT_VERSION,
            self.config.batch_size,
            starts[1] if len(starts) > 1 else 0,
            len(starts),
            moments_only,
        ]
        libraries = [version(name) for name in ("torch", "transformers", "numpy", "pillow")]
        return hash_json([facts, layout, threads, self.device_name, libraries, captions])[:24]

    def _fill_stores(
        self,
        source: ImageSource | ModelImages,
        side: str,
        writers: Mapping[str, FeatureWriter],
        stop_signal: Callable[[], int],
    ) -> None:
        config, world = self.config, self.world
        pass_number = next(self._pass_numbers)
        todo: list[int] = world.broadcast_from_rank_zero(
            sorted({chunk for writer in writers.values() for chunk in writer.store.clean_up()})
            if world.is_rank_zero
            else None
        )
        rank_chunks = todo[world.rank :: world.size]
        if isinstance(source, ModelImages) and todo:
            self._open_model(source, bool(rank_chunks), pass_number)
        stop = _StopFlag(world, stop_signal)
        total = sum(len(next(iter(writers.values())).store.chunk_rows(chunk)) for chunk in rank_chunks)
        kind = config.progress if world.is_rank_zero and total else "none"
        with HeartbeatMonitor(world, f"features {side} {pass_number}", config.dist_timeout_s) as monitor:
            with StepProgress(kind, total, 0, side) as progress:
                num_done = 0

                def on_batch(num: int) -> None:
                    nonlocal num_done
                    num_done += num
                    monitor.heartbeat()
                    progress.update(num_done, f"on each of {world.size} ranks" if world.size > 1 else "", {})

                batches = extraction.plan_batches(writers, rank_chunks, config.batch_size)
                broken = extraction.extract_features(
                    self._iter_prepared(source, batches, writers, monitor.heartbeat, stop) if rank_chunks else iter(()),
                    writers,
                    batch_size=config.batch_size,
                    device=world.device,
                    expected_size=self._expected_size(source, side),
                    on_batch=on_batch,
                    stop=stop,
                )
            reports = monitor.gather_results(
                {"signal": stop(), "broken": {str(index): why for index, why in broken.items()}}
            )
        signal_number = max(word["signal"] for word in reports)
        if signal_number:
            raise Interrupted("stopped; the same command goes on where it was", exit_code(signal_number))
        raise_if_broken(source, side, {int(index): why for word in reports for index, why in word["broken"].items()})

    def _expected_size(self, source: ImageSource | ModelImages, side: str) -> tuple[int, int] | None:
        """The size that all images of a folder must have."""
        if side == "reference" or not isinstance(source, ImageFiles) or source.kind == "run" or self.config.allow_sizes:
            return None
        return first_image_size(source)

    def _iter_prepared(
        self,
        source: ImageSource | ModelImages,
        batches: Iterator[ExtractorBatch],
        writers: Mapping[str, FeatureWriter],
        heartbeat: Callable[[], None],
        stop: Callable[[], int],
    ) -> Iterator[tuple[ExtractorBatch, PreparedBatch]]:
        transforms = {label: writer.extractor.transform for label, writer in writers.items()}
        if isinstance(source, ModelImages):
            assert self._model is not None
            yield from source.iter_prepared(self._model, self.micro_batch, batches, transforms, heartbeat, stop)
            return
        with PreprocessPool(
            SourcePreprocessor(source=source, transforms=transforms), self._num_workers(len(source))
        ) as pool:
            yield from pool.iter_batches(batches)

    def _open_model(self, source: ModelImages, has_chunks: bool, pass_number: int) -> None:
        """The model on ranks that draw, and one micro-batch for all and for every later call: it is part of the images' bits."""
        micro_batch_file = self.cache / source.key[:24] / "micro_batch.json"
        saved_micro_batch: int = self.world.broadcast_from_rank_zero(
            read_json_with_digest(micro_batch_file)["micro_batch"]
            if self.world.is_rank_zero and micro_batch_file.is_file()
            else 0
        )
        with HeartbeatMonitor(self.world, f"opening the model {pass_number}", self.config.dist_timeout_s) as monitor:
            micro_batch = self.config.model_batch_size
            if has_chunks:
                self._model = source.open_model(str(self.world.device))
                monitor.heartbeat()
                micro_batch = saved_micro_batch or source.find_micro_batch(self._model)
            self.micro_batch = min(monitor.gather_results(micro_batch))
        if self.world.is_rank_zero and not saved_micro_batch:
            micro_batch_file.parent.mkdir(exist_ok=True)
            write_json_with_digest(micro_batch_file, {"micro_batch": self.micro_batch})

    def _num_workers(self, num: int) -> int:
        if self.config.decode_workers >= 0:
            return self.config.decode_workers
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        cores = len(os.sched_getaffinity(0))
        return max(1, min(MAX_DECODE_WORKERS, cores // ranks_here, -(-num // 32)))

    def load_feature_set(
        self, source: ImageSource | ModelImages, side: str, writer: FeatureWriter
    ) -> metric_computation.FeatureSet:
        """What a complete store holds, by index; images that an earlier call let pass are looked at again."""
        expected = self._expected_size(source, side)
        if expected is not None:
            sizes = np.concatenate(list(writer.store.iter_array("sizes"))).tolist()
            raise_if_broken(source, side, extraction.find_size_mismatches(range(len(sizes)), sizes, expected))
        return load_feature_set(writer, np.argsort(source.order) if isinstance(source, ModelImages) else None)


class _StopFlag:
    """A person's wish to stop, told to one rank and heard by all at their next batch."""

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


def raise_if_broken(source: ImageSource | ModelImages, side: str, broken: Mapping[int, str]) -> None:
    if not broken:
        return
    first = sorted(broken)[: extraction.MAX_BROKEN]
    lines = "\n".join(f"  {source.name(index)}: {broken[index]}" for index in first)
    more = f"\n  and {len(broken) - len(first)} more" if len(broken) > len(first) else ""
    found = f"{side} images that cannot be scored:\n{lines}{more}"
    if isinstance(source, ModelImages):
        raise HalationError(f"{found}\nthe model could not draw them; the same command tries them again")
    if any(SIZE_MISMATCH_TEXT in why for why in broken.values()):
        action = "remove or replace them, or pass --allow_sizes where different sizes are meant"
        raise InputError(found, "whole images of one size", action)
    if isinstance(source, ImageFiles) and source.kind == "run":
        action = "draw them again: the same `halation generate` with --verify"
        raise InputError(found, "the images that the run drew", action)
    raise InputError(found, "whole PNG, JPEG or WebP images", "remove or replace them")


def first_image_size(source: ImageSource) -> tuple[int, int]:
    """Height and width of the first image."""
    from halation.data.decode import BrokenImageError

    try:
        height, width = source.load(0).pixels.shape[:2]
    except BrokenImageError as error:
        raise InputError(
            f"{source.name(0)}: {error}",
            "a whole PNG, JPEG or WebP image",
            "do what it says, or remove or replace the file",
        ) from error
    return int(height), int(width)
