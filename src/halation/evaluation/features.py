"""From prepared pictures to features on one device, chunk by chunk; a picture's features depend on it and the batch size alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from halation.evaluation.extractors.extractor import Extractor
from halation.evaluation.feature_store import Store
from halation.evaluation.metrics.moments import Moments, merged, moments
from halation.evaluation.preprocess import Prepared, Sheet
from halation.faults import fault_point

MOST_BATCHES = 8
MOMENTS_CHUNK = 16_384
"""Where only moments are kept a chunk has to be worth the millions of numbers of its covariance."""
MAX_BROKEN = 10
"""Broken pictures after which a rank looks no further."""
Texts = Callable[[Sequence[int]], np.ndarray]


def chunk_size(num: int, batch_size: int, moments_only: bool) -> int:
    """Pictures that are computed and put away together: a few batches, fewer where there are so few pictures that ranks would go without.

    It follows from the pictures and the batch alone, so that any number of ranks can go on with what another left.
    """
    if moments_only:
        return -(-MOMENTS_CHUNK // batch_size) * batch_size
    return batch_size * max(1, min(MOST_BATCHES, num // (16 * batch_size)))


@dataclass(kw_only=True)
class Desk:
    """One extractor at work: its store, and what it has made of the chunk in hand."""

    key: str
    extractor: Extractor
    store: Store
    texts: Texts | None = None
    """Where given, embeds the captions of these pictures, to be kept beside their features."""
    moments_only: bool = False
    _rows: list[dict[str, np.ndarray]] = field(default_factory=list)

    def take(self, indices: Sequence[int], prepared: Prepared, batch_size: int, device: torch.device) -> list[int]:
        """Features of these pictures; returns those whose features are no numbers."""
        inputs = prepared.inputs[self.key]
        arrays = run(self.extractor, inputs, batch_size, device)
        if self.texts is not None:
            arrays["texts"] = self.texts(indices)
        finite = np.isfinite(arrays["features"]).all(axis=1)
        self._rows.append(arrays | {"digests": prepared.digests, "sizes": prepared.sizes})
        return [index for index, good in zip(indices, finite, strict=True) if not good]

    def finish(self, chunk: int) -> None:
        """Put the chunk away."""
        parts, self._rows = self._rows, []  # gone whatever becomes of the writing: the next chunk must not find them
        rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        if self.moments_only:
            found = moments(rows["features"])
            rows = {"num": np.array([found.num]), "mean": found.mean[None], "scatter": found.scatter[None]} | {
                name: rows[name] for name in ("digests", "sizes")
            }
        self.store.put(chunk, rows)

    def drop(self) -> None:
        self._rows.clear()


def run(extractor: Extractor, inputs: np.ndarray, batch_size: int, device: torch.device) -> dict[str, np.ndarray]:
    """All outputs of the extractor; every batch has the same shape, or a picture's last bits would know its neighbours' number."""
    outputs: list[dict[str, np.ndarray]] = []
    for start in range(0, len(inputs), batch_size):
        batch = inputs[start : start + batch_size]
        num = len(batch)
        if num < batch_size:
            batch = np.concatenate([batch, np.repeat(batch[-1:], batch_size - num, axis=0)])
        found = extractor(torch.from_numpy(batch).to(device, non_blocking=True))
        outputs.append({name: value[:num].float().cpu().numpy() for name, value in found.items()})
    return {name: np.concatenate([output[name] for output in outputs]) for name in outputs[0]}


def sheets(desks: Mapping[str, Desk], chunks: Sequence[int], batch_size: int) -> Iterator[Sheet]:
    """The sheets of these chunks, each for the extractors that have not seen them; all stores are cut alike."""
    lacking = {name: set(desk.store.missing()) for name, desk in desks.items()}
    store = next(iter(desks.values())).store
    for chunk in chunks:
        names = tuple(name for name in desks if chunk in lacking[name])
        rows = store.rows(chunk)
        for start in range(0, len(rows), batch_size):
            yield Sheet(rows[start : start + batch_size], names)


def extract(
    prepared: Iterable[tuple[Sheet, Prepared]],
    desks: Mapping[str, Desk],
    *,
    batch_size: int,
    device: torch.device,
    expected_size: tuple[int, int] | None,
    on_sheet: Callable[[int], None],
    stop: Callable[[], int],
) -> dict[int, str]:
    """Fill the stores; returns, by index, what was wrong with pictures. A chunk with a broken picture is not stored."""
    store = next(iter(desks.values())).store
    broken: dict[int, str] = {}
    for sheet, pictures in prepared:
        if stop() or len(broken) >= MAX_BROKEN:
            break
        fault_point("features")
        broken |= pictures.broken
        if expected_size is not None:
            found = misfits(sheet.indices, pictures.sizes.tolist(), expected_size)
            broken |= {index: why for index, why in found.items() if index not in pictures.broken}
        for name in sheet.names:
            for index in desks[name].take(sheet.indices, pictures, batch_size, device):
                broken.setdefault(index, f"its features by {name} are not finite")
        chunk = store.chunk_of(sheet.indices[0])
        if sheet.indices[-1] == store.rows(chunk)[-1]:
            whole = not any(index in broken for index in store.rows(chunk))
            for name in sheet.names:
                if whole:
                    desks[name].finish(chunk)
                else:
                    desks[name].drop()
        on_sheet(len(sheet.indices))
    return broken


def misfits(indices: range, sizes: Sequence[Sequence[int]], expected: tuple[int, int]) -> dict[int, str]:
    """Pictures of another size (height and width), and what is to be said of them."""
    return {
        index: f"{size[1]} x {size[0]} pixels where the first picture has {expected[1]} x {expected[0]}"
        for index, size in zip(indices, sizes, strict=True)
        if tuple(size) != expected
    }


def stored_moments(store: Store, moments_only: bool) -> Moments:
    """Over all chunks in index order, without holding more than one of them."""
    if not moments_only:
        return moments(store.blocks("features"))
    chunks = (store.get(chunk) for chunk in range(store.num_chunks))
    return merged(
        Moments(num=int(chunk["num"][0]), mean=chunk["mean"][0], scatter=chunk["scatter"][0]) for chunk in chunks
    )
