"""From prepared images to features on one device, chunk by chunk; an image's features depend on it and the batch size alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from halation.evaluation.extractors.extractor import Extractor
from halation.evaluation.feature_store import FeatureStore
from halation.evaluation.metrics.moments import Moments, merge_moments, moments
from halation.evaluation.preprocess_pool import ExtractorBatch, PreparedBatch
from halation.fault_injection import fault_point

MAX_BATCHES_PER_CHUNK = 8
MOMENTS_CHUNK_SIZE = 16_384
"""Where only moments are kept a chunk has to be worth the millions of numbers of its covariance."""
MAX_BROKEN = 10
"""Broken images after which a rank looks no further."""
EmbedTexts = Callable[[Sequence[int]], np.ndarray]


def chunk_size(num: int, batch_size: int, moments_only: bool) -> int:
    """Images that are computed and put away together: a few batches, fewer where there are so few images that ranks would go without.

    It follows from the images and the batch alone, so that any number of ranks can go on with what another left.
    """
    if moments_only:
        return -(-MOMENTS_CHUNK_SIZE // batch_size) * batch_size
    return batch_size * max(1, min(MAX_BATCHES_PER_CHUNK, num // (16 * batch_size)))


@dataclass(kw_only=True)
class FeatureWriter:
    """One extractor at work: its store, and what it has made of the chunk in hand."""

    label: str
    extractor: Extractor
    store: FeatureStore
    embed_texts: EmbedTexts | None = None
    """Where given, embeds the captions of these images, to be kept beside their features."""
    moments_only: bool = False
    _rows: list[dict[str, np.ndarray]] = field(default_factory=list)

    def extract_batch(
        self, indices: Sequence[int], prepared: PreparedBatch, batch_size: int, device: torch.device
    ) -> list[int]:
        """Features of these images; returns those whose features are no numbers."""
        inputs = prepared.inputs[self.label]
        arrays = run_extractor(self.extractor, inputs, batch_size, device)
        if self.embed_texts is not None:
            arrays["texts"] = self.embed_texts(indices)
        finite = np.isfinite(arrays["features"]).all(axis=1)
        self._rows.append(arrays | {"digests": prepared.digests, "sizes": prepared.sizes})
        return [index for index, good in zip(indices, finite, strict=True) if not good]

    def write_chunk(self, chunk: int) -> None:
        """Put the chunk away."""
        parts, self._rows = self._rows, []  # gone whatever becomes of the writing: the next chunk must not find them
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
    """All outputs of the extractor; every batch has the same shape, or an image's last bits would know its neighbours' number."""
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
    """The batches of these chunks, each for the extractors that have not seen them; all stores are cut alike."""
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
    """Fill the stores; returns, by index, what was wrong with images. A chunk with a broken image is not stored."""
    store = next(iter(writers.values())).store
    broken: dict[int, str] = {}
    for batch, images in prepared:
        if stop() or len(broken) >= MAX_BROKEN:
            break
        fault_point("features")
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
        on_batch(len(batch.indices))
    return broken


def find_size_mismatches(indices: range, sizes: Sequence[Sequence[int]], expected: tuple[int, int]) -> dict[int, str]:
    """Images of another size (height and width), and what is to be said of them."""
    return {
        index: f"{size[1]} x {size[0]} pixels where the first image has {expected[1]} x {expected[0]}"
        for index, size in zip(indices, sizes, strict=True)
        if tuple(size) != expected
    }


def read_moments(store: FeatureStore, moments_only: bool) -> Moments:
    """Over all chunks in index order, without holding more than one of them."""
    if not moments_only:
        return moments(store.iter_array("features"))
    chunks = (store.read_chunk(chunk) for chunk in range(store.num_chunks))
    return merge_moments(
        Moments(num=int(chunk["num"][0]), mean=chunk["mean"][0], scatter=chunk["scatter"][0]) for chunk in chunks
    )
