"""Duel 10: FID, KID and CLIP score of images in memory, against clean-fid and a script.

Ours is what `halation evaluate --model_path` does with a generated batch: preprocess it for both networks, run both in
one pass, store features in chunks, and compute the metrics from features. The peer writes PNG files, runs clean-fid on
them, and then a script for the CLIP score. Both sides have the same images, weights and reference features; models are
loaded before the clock starts. The limit is the networks alone, with inputs that are already on the device. The last
rows are the pass of `halation evaluate` over the PNG folder, by the number of decode processes: if these keep the
networks busy, it reaches its limit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import clean_fid, inputs, measure, oracles, scored
from benchmarks.stages import Turn, median_total, medians_by_stage
from halation.evaluation import feature_extraction as extraction
from halation.evaluation.evaluator import DRAWN_CHUNK_SIZE, extractor_facts
from halation.evaluation.extractors import open_extractor
from halation.evaluation.extractors.extractor import Extractor
from halation.evaluation.feature_extraction import FeatureWriter, load_feature_set
from halation.evaluation.feature_store import FeatureStore
from halation.evaluation.image_sources import ImageSource, find_image_files
from halation.evaluation.metrics import metric_computation as measures
from halation.evaluation.metrics.kid import SEED
from halation.evaluation.preprocess_pool import (
    ExtractorBatch,
    PreparedBatch,
    PreprocessPool,
    SourcePreprocessor,
    prepare_images,
)
from halation.images.png_codec import Pixels

BATCH_SIZE = 32
"""The default of `halation evaluate`."""
MOST_DIFFERENCE = {"fid": 0.01, "kid": 1e-4, "clip": 0.01}
"""Maximum differences between the sides, in the unit of each metric."""
MOST_BATCHES, MOST_PNG, MOST_REFERENCE, MOST_OF_FOLDER = 8, 256, 3000, 1024
"""Maximum number of batches to time the networks alone, images to time Pillow, real images, files of the last rows."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    num: int
    size: int
    clip: scored.ClipShape
    rounds: int
    num_workers: tuple[int, ...]
    """Decode processes for the pass over the folder."""


FULL = Setting(num=5000, size=512, clip=scored.LARGE, rounds=3, num_workers=(0, 1, 2, 4, 8, 16))
ON_CPU = Setting(num=64, size=256, clip=scored.BASE, rounds=3, num_workers=(0, 1, 2))
SMALL = Setting(num=32, size=128, clip=scored.LITTLE, rounds=1, num_workers=(1,))


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Everything that both sides share, loaded."""

    setting: Setting
    work: Path
    device: torch.device
    images: Sequence[Pixels]
    captions: Sequence[str]
    extractors: dict[str, Extractor]
    reference: measures.FeatureSet
    peer: clean_fid.CleanFid
    peer_reference: clean_fid.Reference
    script: clean_fid.ClipScript

    @property
    def folder(self) -> Path:
        return self.work / "png"


def opened(setting: Setting, work: Path, fid: Any) -> Bench:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measure.say(f"making {setting.num} images, as many of reference, and the networks")
    weights = scored.inception_file(work / "inception.pth")
    clip = scored.clip_folder(work / "clip", setting.clip)
    extractors = {
        "main": open_extractor("inception", device=str(device), weights=str(weights)),
        "clip": open_extractor("clip", device=str(device), weights=str(clip)),
    }
    real = scored.images(min(setting.num, MOST_REFERENCE), setting.size, 1.6, seed=1000)
    shutil.rmtree(work / "reference", ignore_errors=True)  # --work may have features of another number of images
    writers = _open_writers({"main": extractors["main"]}, work / "reference", len(real), None)
    extraction_of(_drawn(real, writers, Turn()), writers, device)
    reference = load_feature_set(writers["main"])
    assert reference.features is not None
    images = scored.images(setting.num, setting.size, 1.9, seed=0)
    clean_fid.write_folder(images, work / "png", num_threads=measure.num_cores())
    return Bench(
        setting=setting,
        work=work,
        device=device,
        images=images,
        captions=scored.captions(setting.num),
        extractors=extractors,
        reference=reference,
        peer=clean_fid.CleanFid(fid=fid, network=extractors["main"], device=device),
        peer_reference=clean_fid.reference_of(reference.features),
        script=clean_fid.ClipScript(clip, device),
    )


def _open_writers(
    extractors: dict[str, Extractor], folder: Path, num: int, captions: Sequence[str] | None
) -> dict[str, FeatureWriter]:
    starts = range(0, num, DRAWN_CHUNK_SIZE)
    return {
        label: FeatureWriter(
            label=label,
            extractor=extractor,
            store=FeatureStore(folder / label, num, starts),
            captions=captions if captions and label == "clip" else None,
        )
        for label, extractor in extractors.items()
    }


def extraction_of(
    prepared: Iterator[tuple[ExtractorBatch, PreparedBatch]], writers: dict[str, FeatureWriter], device: torch.device
) -> None:
    """Run Halation's own extraction."""
    broken = extraction.extract_features(
        prepared,
        writers,
        batch_size=BATCH_SIZE,
        device=device,
        expected_size=None,
        on_batch=lambda _num: None,
        stop=lambda: 0,
    )
    if broken:
        raise SystemExit(f"broken images: {broken}")


def _batches(writers: dict[str, FeatureWriter]) -> Iterator[ExtractorBatch]:
    store = next(iter(writers.values())).store
    return extraction.plan_batches(writers, range(store.num_chunks), BATCH_SIZE)


def _drawn(
    images: Sequence[Pixels], writers: dict[str, FeatureWriter], turn: Turn
) -> Iterator[tuple[ExtractorBatch, PreparedBatch]]:
    """Yield prepared batches in the same way as for images of a loaded model."""

    def loader(index: int) -> Callable[[], tuple[Pixels, bytes]]:
        return lambda: (images[index], hashlib.sha256(images[index].tobytes()).digest())

    preparations = {label: writer.extractor.transform for label, writer in writers.items()}
    for batch in _batches(writers):
        with turn.stage("prepare", waiting=False):
            ready = prepare_images([(index, loader(index)) for index in batch.indices], preparations)
        yield batch, ready


def ours(bench: Bench) -> Turn:
    turn, folder = Turn(), bench.work / "features"
    shutil.rmtree(folder, ignore_errors=True)
    with turn.stage("features"):
        writers = _open_writers(bench.extractors, folder, len(bench.images), bench.captions)
        extraction_of(_drawn(bench.images, writers, turn), writers, bench.device)
    for clock in (turn.wall_s, turn.cpu_s):
        clock["features"] -= clock["prepare"]
    rules = measures.MetricSettings(allow_few=True, device=str(bench.device))
    with turn.stage("moments"):
        sides = {label: load_feature_set(writer) for label, writer in writers.items()}
    for metric, label in (("fid", "main"), ("kid", "main"), ("clip", "clip")):
        with turn.stage(metric):
            subject = measures.MetricInputs(
                metric=metric,
                extractor=extractor_facts(bench.extractors[label]),
                generated=sides[label],
                reference=bench.reference if label == "main" else None,
                captions=bench.captions,
            )
            found = measures.compute_metric(subject, rules)[metric]
        turn.values[metric] = found["value"]
        if metric == "kid":
            turn.values["subset_size"] = found["subset_size"]
    return turn


def theirs(bench: Bench, subset_size: int) -> Turn:
    turn = Turn()
    sample = bench.images[:MOST_PNG]
    with tempfile.TemporaryDirectory(dir=bench.work) as scratch, turn.stage("png"):
        clean_fid.write_folder(sample, Path(scratch) / "png", num_threads=1)
    for clock in (turn.wall_s, turn.cpu_s):
        clock["png"] *= len(bench.images) / len(sample)
    with turn.stage("clean-fid"):
        features = bench.peer.features(bench.folder)
    with turn.stage("fid"):
        turn.values["fid"] = bench.peer.frechet(features, bench.peer_reference)
    with turn.stage("kid"):
        turn.values["kid"] = bench.peer.kernel(features, bench.peer_reference, subset_size=subset_size, seed=SEED)
    with turn.stage("clip script"):
        turn.values["clip"] = float(bench.script.scores(bench.folder, bench.captions).mean(dtype=np.float64))
    return turn


def networks_alone(bench: Bench, num_batches: int = MOST_BATCHES) -> float:
    """Return seconds for all images and captions, from inputs to features on the device.

    It is extrapolated from at most `num_batches` batches.
    """
    needed = -(-len(bench.images) // BATCH_SIZE)
    tried = min(num_batches, needed)
    batches = []
    for number in range(tried):
        rows = [
            bench.images[index % len(bench.images)] for index in range(number * BATCH_SIZE, (number + 1) * BATCH_SIZE)
        ]
        batches.append(
            {
                label: torch.from_numpy(np.stack([extractor.transform(row) for row in rows])).to(bench.device)
                for label, extractor in bench.extractors.items()
            }
        )

    def work() -> None:
        for number, batch in enumerate(batches):
            for label, extractor in bench.extractors.items():
                extractor(batch[label])
            indices = range(number * BATCH_SIZE, (number + 1) * BATCH_SIZE)
            bench.extractors["clip"].embed_texts([bench.captions[index % len(bench.captions)] for index in indices])

    # Every timed batch is full, also the last one: padding is work too.
    return measure.seconds(work) * needed / tried


def folder_pass(bench: Bench, num_workers: int) -> tuple[float, float]:
    """Return files per second to features, and files per second to prepared batches only.

    The decode processes are already started.
    """
    source: ImageSource = find_image_files(bench.folder, "--generated").first(MOST_OF_FOLDER)
    stores = bench.work / f"folder_{num_workers}"
    shutil.rmtree(stores, ignore_errors=True)
    writers = _open_writers(bench.extractors, stores, len(source), bench.captions)
    preparations = {label: writer.extractor.transform for label, writer in writers.items()}
    names = tuple(writers)
    with PreprocessPool(SourcePreprocessor(source=source, transforms=preparations), num_workers) as processes:
        for _ in processes.iter_batches(
            [ExtractorBatch(range(start, start + 1), names) for start in range(max(1, num_workers))]
        ):
            pass
        supply = measure.seconds(lambda: [None for _ in processes.iter_batches(_batches(writers))])
        features = measure.seconds(
            lambda: extraction_of(processes.iter_batches(_batches(writers)), writers, bench.device)
        )
    return len(source) / features, len(source) / supply


def check(mine: Turn, other: Turn) -> str:
    words = []
    for metric, most in MOST_DIFFERENCE.items():
        found = abs(mine.values[metric] - other.values[metric])
        if found > most:
            raise SystemExit(f"{metric}: ours is {mine.values[metric]!r}, the peer's {other.values[metric]!r}")
        words.append(f"{metric} {mine.values[metric]:.5g} (off by {found:.1e})")
    return ", ".join(words)


def duel(setting: Setting, work: Path, fid: Any) -> measure.Report:
    bench = opened(setting, work, fid)
    mine: list[Turn] = []
    others: list[Turn] = []
    alone: list[float] = []
    passes: dict[int, list[tuple[float, float]]] = {workers: [] for workers in setting.num_workers}
    networks_alone(bench, num_batches=1)  # warm-up: select kernels and allocate memory before timing
    for number in range(setting.rounds):
        mine.append(ours(bench))
        measure.say(f"round {number + 1}, ours: {mine[-1].said()}")
        others.append(theirs(bench, int(mine[-1].values["subset_size"])))
        measure.say(f"round {number + 1}, peer: {others[-1].said()}")
        alone.append(networks_alone(bench))
        for workers, found in passes.items():
            found.append(folder_pass(bench, workers))
        rates = ", ".join(
            f"{workers} workers {found[-1][0]:.3g}/s (they supply {found[-1][1]:.3g}/s)"
            for workers, found in passes.items()
        )
        measure.say(f"round {number + 1}, networks alone: {alone[-1]:.2f} s; folder: {rates}")
    facts = measure.machine() | {
        "images": f"{setting.num} of {setting.size} px",
        "clip": setting.clip.name,
        "ours_s": medians_by_stage(mine),
        "peer_s": medians_by_stage(others),
        "networks_alone_s": round(statistics.median(alone), 3),
        "supply_per_s": {
            workers: round(statistics.median([one[1] for one in found]), 1) for workers, found in passes.items()
        },
    }
    rows = [*scores_rows(setting, mine, others, alone), *folder_rows(setting, others, alone, passes)]
    return measure.Report(name="duel_10_scores", rows=tuple(rows), facts=facts)


NUMBERS = ("moments", "fid", "kid", "clip")


def scores_rows(
    setting: Setting, mine: Sequence[Turn], others: Sequence[Turn], alone: Sequence[float]
) -> list[measure.Row]:
    agreed = check(mine[-1], others[-1])
    limit = statistics.median(alone)
    cases = {
        "from images in memory to numbers": ((), ()),
        "the same, the peer's files written before": ((), ("png",)),
        "features alone, files included": (NUMBERS, ("fid", "kid")),
    }
    return [
        measure.Row(
            case=f"{setting.num} x {setting.size} px, {name}",
            ours=median_total(mine, not_mine),
            peer=median_total(others, not_theirs),
            unit="s",
            limit=limit,
            check=agreed,
            equality="E1",
        )
        for name, (not_mine, not_theirs) in cases.items()
    ]


def folder_rows(
    setting: Setting,
    others: Sequence[Turn],
    alone: Sequence[float],
    passes: dict[int, list[tuple[float, float]]],
) -> list[measure.Row]:
    peer = setting.num / median_total(others, ("png", "fid", "kid"))
    return [
        measure.Row(
            case=f"PNG folder, {workers} decode processes",
            ours=statistics.median([one[0] for one in found]),
            peer=peer,
            unit="images/s",
            limit=setting.num / statistics.median(alone),
            check="the images of the lines above",
            equality="E1",
        )
        for workers, found in passes.items()
    ]


def main(arguments: list[str] | None = None) -> measure.Report:
    parser = measure.parser(__doc__ or "")
    parser.add_argument("--num", type=int, help="images on each side, instead of the default of the size")
    parser.add_argument("--rounds", type=int, help="turns of each side, instead of the default of the size")
    asked = parser.parse_args(arguments)
    setting = FULL if torch.cuda.is_available() else ON_CPU
    if asked.size == "small":
        setting = SMALL
    given = {"num": asked.num, "rounds": asked.rounds}
    setting = dataclasses.replace(setting, **{name: value for name, value in given.items() if value})
    fid = clean_fid.found()
    if fid is None:
        measure.say(f"clean-fid is not installed in {oracles.PLACES[0]}: no comparison")
        report = measure.Report(name="duel_10_scores", rows=(), facts=measure.machine())
    else:
        torch.set_num_threads(1)  # like a rank of `halation evaluate`; the networks are the same for both sides
        with inputs.workplace(asked.work) as work:
            report = duel(setting, work, fid)
    measure.finish(report, asked.output)
    return report


if __name__ == "__main__":
    main()
