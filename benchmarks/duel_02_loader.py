"""Duel 2: loading 100,000 latents in batches on two cores, against one .npy per sample.

Ours is the memory-mapped cache with its order and loader. The peer is fast-DiT's method: a features and a labels file
per sample, read by a Dataset with torch's DataLoader. Both sides use float16 and read in the same shuffled order, from
a warm page cache, on the same two cores.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import inputs, measure

SHAPE = (4, 32, 32)
BATCH = 256
NUM_CORES = 2
SEED = 0
STEP_S = 0.2
FINGERPRINT: dict[str, Any] = {"benchmark": "random latents", "version": 1}


class Numbers:
    """A data set whose pixels encode the index, from which an encoder computes the latent."""

    name = "numbers"
    fingerprint = FINGERPRINT
    num_validation = 0
    height = width = 1
    class_names: tuple[str, ...] = tuple(map(str, range(1000)))

    def __init__(self, num_train: int) -> None:
        self.num_train = num_train

    def train(self, index: int) -> Any:
        from halation.data.dataset_protocol import CaptionedImage

        pixels = np.array([index % 256, index // 256 % 256, index // 65536], np.uint8).reshape(1, 1, 3)
        return CaptionedImage(pixels=pixels, caption="", label=index % 1000)

    validation = train

    def captions(self) -> Iterable[str]:
        return ()

    all_captions = captions


def latent(index: int) -> np.ndarray:
    words = np.random.Philox(key=np.array([SEED, index], np.uint64)).random_raw(int(np.prod(SHAPE)) // 4)
    return (words.view(np.uint16) & 0xBBFF).view(np.float16).reshape(SHAPE)  # finite numbers between -1 and 1


def encode(pixels: list[np.ndarray]) -> np.ndarray:
    numbers = [int(p[0, 0, 0]) + 256 * int(p[0, 0, 1]) + 65536 * int(p[0, 0, 2]) for p in pixels]
    return np.stack([latent(number) for number in numbers])


def write_files(folder: Path, num: int) -> None:
    """Write the layout of fast-DiT: features/N.npy and labels/N.npy."""
    for part in ("features", "labels"):
        (folder / part).mkdir(parents=True)

    def write(index: int) -> None:
        np.save(folder / "features" / f"{index}.npy", latent(index)[None])
        np.save(folder / "labels" / f"{index}.npy", np.array([index % 1000]))

    with ThreadPoolExecutor(4) as threads:
        for _ in threads.map(write, range(num), chunksize=256):
            pass


class Files:
    """The peer's Dataset."""

    def __init__(self, folder: Path, num: int) -> None:
        self.folder, self.num = folder, num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        import torch

        features = np.load(self.folder / "features" / f"{index}.npy")
        labels = np.load(self.folder / "labels" / f"{index}.npy")
        return torch.from_numpy(features), torch.from_numpy(labels)


def ours(cache: Any, num_samples: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    from halation.data.prefetch import BatchPrefetcher, ShuffledOrder

    positions = ((step, np.arange(step * BATCH, (step + 1) * BATCH)) for step in range(num_samples // BATCH))
    with BatchPrefetcher(cache, ShuffledOrder(seed, cache.num_train), positions, num_threads=NUM_CORES) as batches:
        for batch in batches:
            yield batch["pixels"], batch["labels"]


def peer(files: Files, num_samples: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    from torch.utils.data import DataLoader

    from halation.data.prefetch import ShuffledOrder

    order = ShuffledOrder(seed, files.num).indices(0, num_samples // BATCH * BATCH).tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DataLoader counts all cores, not those available to this process
        loader: Any = DataLoader(files, BATCH, sampler=order, num_workers=NUM_CORES)  # type: ignore[arg-type]
        for features, labels in loader:
            yield features.squeeze(1).numpy(), labels.squeeze(1).numpy()


def rate(batches: Iterator[Any]) -> float:
    """Return samples per second after the first batch, without the start of workers."""
    next(batches)
    began = time.perf_counter()
    num = sum(len(pixels) for pixels, _ in batches)
    return num / (time.perf_counter() - began)


def behind_a_step(batches: Iterator[Any]) -> float:
    """Return samples per second with a consumer slower than both loaders.

    A sleep takes the place of the training step.
    """
    next(batches)
    began, num = time.perf_counter(), 0
    for pixels, _ in batches:
        time.sleep(STEP_S)
        num += len(pixels)
    return num / (time.perf_counter() - began)


def prepared_rate(cache: Any, num_samples: int) -> float:
    """Return the rate of our loader with noise, times and dropped captions for every sample."""
    from halation.data.prefetch import BatchPrefetcher, ShuffledOrder
    from halation.flow.seeded_noise import training_draw

    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        noise = np.stack([training_draw(SEED, int(position), SHAPE).noise for position in batch["positions"]])
        return batch | {"noise": noise}

    positions = ((step, np.arange(step * BATCH, (step + 1) * BATCH)) for step in range(num_samples // BATCH))
    order = ShuffledOrder(SEED, cache.num_train)
    with BatchPrefetcher(cache, order, positions, num_threads=NUM_CORES, transform=transform) as batches:
        return rate((batch["pixels"], batch["labels"]) for batch in batches)


def copy_rate() -> float:
    """Return samples per second of a plain gather from memory into batches on one core."""
    source = np.zeros((16384, int(np.prod(SHAPE))), np.float16) + 1
    target = np.empty((BATCH, source.shape[1]), np.float16)
    rows = np.random.default_rng(0).permutation(len(source))[: len(source) // BATCH * BATCH].reshape(-1, BATCH)
    np.take(source, rows[0], axis=0, out=target)
    began = time.perf_counter()
    for wanted in rows:
        np.take(source, wanted, axis=0, out=target)
    return rows.size / (time.perf_counter() - began)


def duel(num: int, num_peer: int, rounds: int, work: Path) -> measure.Report:
    from halation.data import latent_cache

    measure.say(f"writing {num} latents as a cache, and as {2 * num} files")
    latent_cache.build(Numbers(num), work / "cache", encode, fingerprint=FINGERPRINT)
    cache = latent_cache.open_cache(work / "cache", FINGERPRINT)
    write_files(work / "files", num)
    files = Files(work / "files", num)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:NUM_CORES])
    try:
        largest = largest_difference(cache, files, num_peer)
        measure.say("both warm; turns A B A B")
        turns = {
            "ours": lambda: rate(ours(cache, num, 1)),
            "peer": lambda: rate(peer(files, num_peer, 1)),
            "prepared": lambda: prepared_rate(cache, num_peer),
            "copy": copy_rate,
        }
        found = measure.interleaved(turns, rounds)
        few = 8 * BATCH
        stepping = {
            "ours": lambda: behind_a_step(ours(cache, few, 2)),
            "peer": lambda: behind_a_step(peer(files, few, 2)),
        }
        hidden = measure.medians(measure.interleaved(stepping, rounds))
    finally:
        os.sched_setaffinity(0, cores)
    middle = measure.medians(found)
    limit = middle["copy"]
    size = 2 * int(np.prod(SHAPE))
    facts = measure.machine() | {
        "cores used": NUM_CORES, "latents": num, "ours": measure.spread(found["ours"]), "files": measure.spread(found["peer"]),
        "ours_GB_s": round(middle["ours"] * size / 1e9, 3), "memcpy_GB_s": round(limit * size / 1e9, 3),
    }  # fmt: skip
    check = f"largest difference {largest}"
    rows = (
        measure.Row(
            case="latents and labels", ours=middle["ours"], peer=middle["peer"], unit="samples/s", limit=limit, check=check,
            equality="E0",
        ),
        measure.Row(
            case="with our noise for each sample", ours=middle["prepared"], peer=middle["peer"], unit="samples/s", limit=limit,
            check=check, equality="E0", note="ours also draws each sample's noise by its position; the peer leaves that to the device",
        ),
        measure.Row(
            case=f"behind a step of {STEP_S} s (a sleep)", ours=hidden["ours"], peer=hidden["peer"], unit="samples/s",
            limit=BATCH / STEP_S, check=check, equality="E0", note="where the step is slower than both loaders there is nothing to gain",
        ),
    )  # fmt: skip
    return measure.Report(name="duel_02_loader", rows=rows, facts=facts)


def largest_difference(cache: Any, files: Files, num: int) -> float:
    """Compare the first samples of both; the page cache is warm from writing them."""
    largest = 0.0
    for (mine, my_labels), (theirs, their_labels) in zip(ours(cache, num, SEED), peer(files, num, SEED), strict=True):
        largest = max(largest, float(np.abs(mine.astype(np.float32) - theirs.astype(np.float32)).max()))
        largest = max(largest, float(np.abs(my_labels - their_labels).max()))
    return largest


def main(arguments: list[str] | None = None) -> measure.Report:
    asked = measure.parser(__doc__ or "").parse_args(arguments)
    small = asked.size == "small"
    with inputs.workplace(asked.work) as work:
        report = duel(4096 if small else 100_000, 2048 if small else 20_480, 3 if small else 5, work)
    measure.finish(report, asked.output)
    if any("difference 0.0" not in row.check for row in report.rows):
        raise SystemExit("the two loaders returned different latents")
    return report


if __name__ == "__main__":
    main()
