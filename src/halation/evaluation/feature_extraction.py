"""Extracts features of prepared images on one device and stores them chunk by chunk.

The features of an image depend only on the image and the batch size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from halation.evaluation.extractors.extractor import Extractor
from halation.evaluation.feature_store import FeatureStore
from halation.evaluation.metrics.metric_computation import FeatureSet
from halation.evaluation.metrics.moments import Moments, merge_moments, moments
from halation.evaluation.preprocess_pool import ExtractorBatch, PreparedBatch
from halation.fault_injection import fault_point

MAX_BATCHES_PER_CHUNK = 8
MOMENTS_CHUNK_SIZE = 16_384
"""If only moments are kept, a chunk stores a covariance, which is large even for few images."""
MAX_BROKEN = 10
"""Number of broken images after which a rank stops."""


def chunk_size(num: int, batch_size: int, moments_only: bool) -> int:
    """Return the number of images in a chunk: up to eight batches, fewer for small sets.

    Small sets have smaller chunks so that all ranks have work. The size depends only on the number of images and the
    batch size, so that any number of ranks can resume.
    """
    if moments_only:
        return -(-MOMENTS_CHUNK_SIZE // batch_size) * batch_size
    return batch_size * max(1, min(MAX_BATCHES_PER_CHUNK, num // (16 * batch_size)))


@dataclass(kw_only=True)
class FeatureWriter:
    """Runs one extractor and writes its features to its store."""

    label: str
    extractor: Extractor
    store: FeatureStore
    captions: Sequence[str] | None = None
    """Captions by position; if given, their embeddings are stored beside the features."""
    moments_only: bool = False
    _rows: list[dict[str, np.ndarray]] = field(default_factory=list)

    def extract_batch(
        self, indices: Sequence[int], prepared: PreparedBatch, batch_size: int, device: torch.device
    ) -> list[int]:
        """Extract the features of these images; return the indices with non-finite features."""
        inputs = prepared.inputs[self.label]
        arrays = run_extractor(self.extractor, inputs, batch_size, device)
        if self.captions is not None:
            arrays["texts"] = self.extractor.embed_texts([self.captions[index] for index in indices]).numpy()
        finite = np.isfinite(arrays["features"]).all(axis=1)
        self._rows.append(arrays | {"digests": prepared.digests, "sizes": prepared.sizes})
        return [index for index, good in zip(indices, finite, strict=True) if not good]

    def write_chunk(self, chunk: int) -> None:
        """Write the rows collected so far as a chunk."""
        parts, self._rows = self._rows, []  # cleared even if writing fails, for the next chunk
        rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        if self.moments_only:
            chunk_moments = moments(rows["features"])
            rows = {
                "num": np.array([chunk_moments.num]),
                "mean": chunk_moments.mean[None],
                "scatter": chunk_moments.scatter[None],
            } | {name: rows[name] for name in ("digests", "sizes")}
        self.store.write_chunk(chunk, rows)

    def discard_rows(self) -> None:
        self._rows.clear()


def run_extractor(
    extractor: Extractor, inputs: np.ndarray, batch_size: int, device: torch.device
) -> dict[str, np.ndarray]:
    """Return all outputs of the extractor.

    The last batch is padded, because another batch shape would change the last bits.
    """
    outputs: list[dict[str, np.ndarray]] = []
    for start in range(0, len(inputs), batch_size):
        batch = inputs[start : start + batch_size]
        num = len(batch)
        if num < batch_size:
            batch = np.concatenate([batch, np.repeat(batch[-1:], batch_size - num, axis=0)])
        found = extractor(torch.from_numpy(batch).to(device, non_blocking=True))
        outputs.append({name: value[:num].float().cpu().numpy() for name, value in found.items()})
    return {name: np.concatenate([output[name] for output in outputs]) for name in outputs[0]}


def plan_batches(
    writers: Mapping[str, FeatureWriter], chunks: Sequence[int], batch_size: int
) -> Iterator[ExtractorBatch]:
    """Yield the batches of these chunks, each with the extractors whose stores lack the chunk.

    All stores have the same chunks.
    """
    missing = {name: set(writer.store.missing_chunks()) for name, writer in writers.items()}
    store = next(iter(writers.values())).store
    for chunk in chunks:
        labels = tuple(name for name in writers if chunk in missing[name])
        rows = store.chunk_rows(chunk)
        for start in range(0, len(rows), batch_size):
            yield ExtractorBatch(rows[start : start + batch_size], labels)


def extract_features(
    prepared: Iterable[tuple[ExtractorBatch, PreparedBatch]],
    writers: Mapping[str, FeatureWriter],
    *,
    batch_size: int,
    device: torch.device,
    expected_size: tuple[int, int] | None,
    on_batch: Callable[[int], None],
    stop: Callable[[], int],
) -> dict[int, str]:
    """Extract and store features; return the problems of broken images by index.

    A chunk with a broken image is not stored.
    """
    broken: dict[int, str] = {}
    for batch, images in prepared:
        if stop() or len(broken) >= MAX_BROKEN:
            break
        fault_point("features")
        write_batch(batch, images, writers, broken, batch_size=batch_size, device=device, expected_size=expected_size)
        on_batch(len(batch.indices))
    return broken


def write_batch(
    batch: ExtractorBatch,
    images: PreparedBatch,
    writers: Mapping[str, FeatureWriter],
    broken: dict[int, str],
    *,
    batch_size: int,
    device: torch.device,
    expected_size: tuple[int, int] | None = None,
) -> None:
    """Extract the features of one batch; the last batch of a chunk stores the chunk.

    Problems of broken images are added to `broken`.
    """
    store = next(iter(writers.values())).store
    broken |= images.broken
    if expected_size is not None:
        mismatches = find_size_mismatches(batch.indices, images.sizes.tolist(), expected_size)
        broken |= {index: why for index, why in mismatches.items() if index not in images.broken}
    for name in batch.labels:
        for index in writers[name].extract_batch(batch.indices, images, batch_size, device):
            broken.setdefault(index, f"its features by {name} are not finite")
    chunk = store.chunk_index(batch.indices[0])
    if batch.indices[-1] == store.chunk_rows(chunk)[-1]:
        is_complete = not any(index in broken for index in store.chunk_rows(chunk))
        for name in batch.labels:
            if is_complete:
                writers[name].write_chunk(chunk)
            else:
                writers[name].discard_rows()


def find_size_mismatches(indices: range, sizes: Sequence[Sequence[int]], expected: tuple[int, int]) -> dict[int, str]:
    """Return a message for each image whose size (height and width) is not the expected one."""
    return {
        index: f"{size[1]} x {size[0]} pixels where the first image has {expected[1]} x {expected[0]}"
        for index, size in zip(indices, sizes, strict=True)
        if tuple(size) != expected
    }


def load_feature_set(writer: FeatureWriter, order: np.ndarray | None = None) -> FeatureSet:
    """Load a complete store by index; `order` maps positions to indices if they differ."""
    store = writer.store
    arrays: dict[str, np.ndarray] = {}
    if writer.moments_only:  # one chunk at a time, to limit memory
        digests = np.concatenate(list(store.iter_array("digests")))
        chunks = (store.read_chunk(chunk) for chunk in range(store.num_chunks))
        all_moments = merge_moments(
            Moments(num=int(chunk["num"][0]), mean=chunk["mean"][0], scatter=chunk["scatter"][0]) for chunk in chunks
        )
    else:
        arrays = store.read_all()
        if order is not None:
            inverse = np.argsort(order)
            arrays = {name: array[inverse] for name, array in arrays.items()}
        digests, all_moments = arrays["digests"], moments(arrays["features"])
    return FeatureSet(
        num=store.num, hash=hashlib.sha256(digests.tobytes()).hexdigest(), moments=all_moments, arrays=arrays
    )
