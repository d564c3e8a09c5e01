"""One rank's part in an evaluation: sources and extractors opened, features of both sides on all ranks, and the numbers on the first."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from halation.config.evaluate import EvaluateConfig
from halation.errors import HalationError, InputError, Interrupted
from halation.evaluation import extraction, measures
from halation.evaluation.extraction import Desk
from halation.evaluation.preparing import Preparations, Prepared, Preparer, Sheet
from halation.evaluation.sources import Files, Scenes, Source, files_below, hashed
from halation.evaluation.statistics import SUFFIXES, Statistics, read_statistics, write_statistics
from halation.evaluation.store import Store
from halation.jobs.cast import cast, embedding, facts_of, rules_of, side_of, versions
from halation.jobs.live import Live, open_live
from halation.jobs.scored import open_generated, with_prompts
from halation.models.extractors import Extractor, open_extractor
from halation.training.trackers import Progress
from halation.world.launch import computes_on
from halation.world.ranks import Vigil, World, on_first
from halation.world.signals import StopSignals, exit_code

log = logging.getLogger(__name__)
MAX_WORKERS = 16


class Scoring:
    """Everything one rank needs, opened in the order in which it can fail."""

    def __init__(self, world: World, config: EvaluateConfig, cache: Path) -> None:
        self.world = world
        self.config = config
        self.cache = cache
        self.began = time.perf_counter()
        self.device = computes_on(str(world.device))
        self.cast = cast(config)
        self.rules = rules_of(config, str(world.device))
        self.generated = self._generated()
        self._agree(self.generated.key)
        self.extractors = self._extractors()
        self.statistics = self._statistics()
        self.vigils = itertools.count()

    def _generated(self) -> Source | Live:
        config = self.config
        if config.model_path:
            return open_live(config, self.device)
        return generated_files(config)

    def _agree(self, key: str) -> None:
        if len(set(self.world.exchange(key))) > 1:
            raise HalationError(
                "the ranks see different pictures: the folder changes, or is another one on other machines"
            )

    def _extractors(self) -> dict[str, Extractor]:
        """Rank 0 first: what has to be downloaded is downloaded once."""
        opened: dict[str, Extractor] = {}

        def open_all(beat: Callable[[], None]) -> None:
            for label, (name, weights) in self.cast.extractors.items():
                opened[label] = self._opened(name, weights)
                beat()

        on_first(self.world, "opening the extractors", open_all, self.config.dist_timeout_s)
        if not self.world.first:
            open_all(lambda: None)
        return opened

    def _opened(self, name: str, weights: str) -> Extractor:
        config = self.config
        return open_extractor(
            name, device=str(self.world.device), dtype=config.dtype, resize=config.resize, weights=weights
        )

    def _statistics(self) -> Statistics | None:
        """Saved ones, read before anything long begins."""
        paths = [Path(path) for path in self.config.reference if Path(path).suffix in SUFFIXES]
        labels = self.cast.with_reference
        if not paths or not labels:
            return None
        if len(labels) > 1:
            names = " and ".join(self.extractors[label].name for label in labels)
            raise InputError(
                f"statistics as the reference of {names}",
                "one extractor, that of the statistics",
                "ask for fewer metrics",
            )
        return read_statistics(paths, facts_of(self.extractors[labels[0]]))

    # -- features

    def run(self) -> dict[str, Any]:
        """The report; on ranks other than the first it is empty."""
        with StopSignals() as signals:
            self.stop = lambda: signals.number
            sides: dict[str, dict[str, measures.Side]] = {}
            reference = None if self.statistics else self._reference()
            self._refuse_few(self.statistics.num if self.statistics else len(reference or ()))
            if reference is not None:
                self._agree(reference.key)
                sides["reference"] = self._features(reference, "reference", self.cast.with_reference)
            sides["generated"] = self._features(self.generated, "generated", tuple(self.extractors))
            if signals.number:
                raise Interrupted("stopped; the same command goes on where it was", exit_code(signals.number))

            def numbers(beat: Callable[[], None]) -> dict[str, Any]:
                return self._report(sides, reference, beat)

            report: dict[str, Any] = on_first(
                self.world, "the numbers", numbers, max(3600.0, self.config.dist_timeout_s)
            )
            return report

    def _refuse_few(self, num_reference: int | None) -> None:
        """Before hours are spent on features that no number comes of."""
        for metric, label in self.cast.parts.items():
            sides: dict[str, int | None] = {"generated": len(self.generated)}
            if metric in measures.NEEDS_REFERENCE:
                sides["reference"] = num_reference
            measures.few(metric, self.extractors[label].num_features, sides, self.rules)

    def _reference(self) -> Source | None:
        if not self.cast.with_reference:
            return None
        if self.config.reference == ("streets",):
            return Scenes(size=self._square(), num=self.config.num_reference)
        return files_below(Path(self.config.reference[0]), "--reference")

    def _square(self) -> int:
        """Street scenes are drawn at the size of the pictures they are compared with."""
        height, width = self._first_size()
        scenes = Scenes(size=height if height == width else -1, num=self.config.num_reference)
        if height != width:
            raise InputError(
                f"pictures of {width} x {height} pixels against street scenes, which are square",
                "square pictures from 32 to 128 pixels",
                "give another --reference",
            )
        scenes.load(0)
        return height

    def _first_size(self) -> tuple[int, int]:
        if isinstance(self.generated, Live):
            spec = self.generated.specs[0]
            return spec.height, spec.width
        size: list[int] = on_first(
            self.world,
            f"the first picture {next(self.vigils)}",
            lambda _beat: list(first_size(self.generated)),
            self.config.dist_timeout_s,
        )
        return size[0], size[1]

    def _features(self, source: Source | Live, side: str, labels: tuple[str, ...]) -> dict[str, measures.Side]:
        """On all ranks, what is missing; then, on the first, what each extractor made of the side."""
        live = isinstance(source, Live)
        moments_only = len(source) > self.config.keep_features
        order = source.order if isinstance(source, Live) else None
        starts = self._starts(source, moments_only)
        desks = {}
        for label in labels:
            worded = side == "generated" and label == self.cast.parts.get("clip")
            captions = source.captions if worded else None
            texts = None if captions is None else embedding(self.extractors[label], captions, order)
            key = self._key(label, moments_only, captions)
            store = Store(self.cache / source.key[:24] / key, len(source), starts)
            desks[label] = Desk(
                key=label, extractor=self.extractors[label], store=store, texts=texts, moments_only=moments_only
            )
        broken = self._fill(source, side, desks)
        self._refuse(source, side, broken)
        if not self.world.first or self.stop():
            return {}
        back = np.argsort(order) if live and order is not None else None
        return {label: side_of(desk, back) for label, desk in desks.items()}

    def _starts(self, source: Source | Live, moments_only: bool) -> Sequence[int]:
        if isinstance(source, Live):
            return source.starts(extraction.MOMENTS_CHUNK) if moments_only else source.starts()
        return range(0, len(source), extraction.chunk_size(len(source), self.config.batch_size, moments_only))

    def _key(self, label: str, moments_only: bool, captions: tuple[str, ...] | None) -> str:
        """Everything that decides the features, besides the pictures."""
        config = self.config
        facts = {name: value for name, value in facts_of(self.extractors[label]).items() if name != "weights"}
        threads = config.threads if self.device == "cpu" else 0
        return hashed([facts, config.batch_size, threads, self.device, moments_only, captions])[:24]

    def _fill(self, source: Source | Live, side: str, desks: Mapping[str, Desk]) -> dict[int, str]:
        config, world = self.config, self.world
        missing = sorted({chunk for desk in desks.values() for chunk in desk.store.missing()})
        todo: list[int] = world.from_first(missing)
        mine = todo[world.rank :: world.size]
        store = next(iter(desks.values())).store
        total = sum(len(store.rows(chunk)) for chunk in mine)
        same_size = (
            side == "generated" and isinstance(source, Files) and source.kind == "folder" and not config.allow_sizes
        )
        expected = self._first_size() if same_size and todo else None
        kind = config.progress if world.first and total else "none"
        with Vigil(world, f"features {side} {next(self.vigils)}", config.dist_timeout_s) as vigil:
            with Progress(kind, total, 0, side) as progress:
                counted = 0

                def on_sheet(num: int) -> None:
                    nonlocal counted
                    counted += num
                    vigil.beat()
                    progress.update(counted, f"on each of {world.size} ranks" if world.size > 1 else "", {})

                coming = extraction.sheets(desks, mine, config.batch_size)
                broken = extraction.extract(
                    self._prepared(source, coming, desks, vigil.beat, bool(mine)),
                    desks,
                    batch_size=config.batch_size,
                    device=world.device,
                    expected_size=expected,
                    on_sheet=on_sheet,
                    stop=self.stop,
                )
            words = vigil.finish({str(index): why for index, why in broken.items()})
        return {int(index): why for word in words for index, why in word.items()}

    def _prepared(
        self,
        source: Source | Live,
        coming: Iterator[Sheet],
        desks: Mapping[str, Desk],
        beat: Callable[[], None],
        any_mine: bool,
    ) -> Iterator[tuple[Sheet, Prepared]]:
        preparations = {label: desk.extractor.preparation for label, desk in desks.items()}
        if isinstance(source, Live):
            yield from self._drawn(source, coming, preparations, beat, any_mine)
        elif any_mine:
            preparer = Preparer(source=source, preparations=preparations)
            with Preparations(preparer, self._num_workers(len(source))) as prepared:
                yield from prepared.of(coming)

    def _drawn(
        self,
        source: Live,
        coming: Iterator[Sheet],
        preparations: Mapping[str, Any],
        beat: Callable[[], None],
        any_mine: bool,
    ) -> Iterator[tuple[Sheet, Prepared]]:
        micro_batch = self.config.sheet_size
        if any_mine:
            painter = source.open(str(self.world.device))
            beat()
            micro_batch = source.rehearse(painter)
            beat()
        micro_batch = min(self.world.exchange(micro_batch))  # one for all, or pictures would know which rank drew them
        if any_mine:
            yield from source.draw(painter, micro_batch, coming, preparations, beat)

    def _num_workers(self, num: int) -> int:
        if self.config.decode_workers >= 0:
            return self.config.decode_workers
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        cores = len(os.sched_getaffinity(0))
        return max(1, min(MAX_WORKERS, cores // ranks_here, -(-num // 32)))

    def _refuse(self, source: Source | Live, side: str, broken: Mapping[int, str]) -> None:
        if not broken:
            return
        first = sorted(broken)[: extraction.MAX_BROKEN]
        lines = "\n".join(f"  {source.name(index)}: {broken[index]}" for index in first)
        more = f"\n  and {len(broken) - len(first)} more" if len(broken) > len(first) else ""
        sizes = any("where the first picture has" in why for why in broken.values())
        raise InputError(
            f"{side} pictures that cannot be scored:\n{lines}{more}",
            "whole pictures of one size" if sizes else "whole PNG, JPEG or WebP pictures",
            "remove or replace them" + (", or pass --allow_sizes where different sizes are meant" if sizes else ""),
        )

    # -- numbers

    def _report(
        self, sides: Mapping[str, Mapping[str, measures.Side]], reference: Source | None, beat: Callable[[], None]
    ) -> dict[str, Any]:
        found: dict[str, dict[str, Any]] = {}
        for metric in self.config.metrics:
            label = self.cast.parts[metric]
            subject = measures.Subject(
                metric=metric,
                extractor=facts_of(self.extractors[label]),
                generated=sides["generated"][label],
                reference=self._reference_side(sides, label) if metric in measures.NEEDS_REFERENCE else None,
                captions=self.generated.captions,
            )
            found |= measures.measure(subject, self.rules)
            if metric == "clip":
                found["clip"]["num_truncated_prompts"] = self._num_truncated(label)
            beat()
        self._save_statistics(sides)
        return {
            "generated": {**self.generated.facts, "num": len(self.generated)},
            "reference": self._reference_facts(reference),
            "metrics": found,
            "versions": versions(),
            "computed_on": self.device,
            "num_ranks": self.world.size,
            "seconds": round(time.perf_counter() - self.began, 2),
        }

    def _num_truncated(self, label: str) -> int:
        from halation.models.extractor_transformers import ClipExtractor

        extractor = self.extractors[label]
        assert isinstance(extractor, ClipExtractor)
        num = len(extractor.truncated(self.generated.captions or ()))
        if num:
            log.warning("%d prompts are longer than the CLIP model reads; their ends do not count", num)
        return num

    def _reference_side(self, sides: Mapping[str, Mapping[str, measures.Side]], label: str) -> measures.Side:
        if self.statistics is None:
            return sides["reference"][label]
        found = self.statistics
        arrays = {} if found.features is None else {"features": np.asarray(found.features)}
        return measures.Side(num=found.num, hash=found.hash, moments=found.moments, arrays=arrays)

    def _reference_facts(self, reference: Source | None) -> dict[str, Any] | None:
        if self.statistics is not None:
            path = ", ".join(self.config.reference)
            return {"kind": "statistics", "path": path, "num": self.statistics.num, "made": self.statistics.facts}
        return None if reference is None else {**reference.facts, "num": len(reference)}

    def _save_statistics(self, sides: Mapping[str, Mapping[str, measures.Side]]) -> None:
        path = self.config.save_statistics
        if path is None:
            return
        side = sides["generated"]["main"]
        assert isinstance(side.moments, measures.Moments)
        about = {"source": self.generated.facts, "source_hash": side.hash, "versions": versions()}
        write_statistics(path, side.moments, side.features, {**facts_of(self.extractors["main"]), **about})


def generated_files(config: EvaluateConfig) -> Files:
    """The pictures of --generated, with their prompts where these are known."""
    files = open_generated(Path(config.generated))
    if config.prompts:
        files = with_prompts(files, config.prompts)
    return files.first(config.num_samples) if config.num_samples else files


def first_size(source: Any) -> tuple[int, int]:
    """Height and width of the first picture."""
    from halation.data.decode import BrokenPictureError

    try:
        height, width = source.load(0).pixels.shape[:2]
    except BrokenPictureError as error:
        raise InputError(
            f"{source.name(0)}: {error}", "a whole PNG, JPEG or WebP picture", "remove or replace it"
        ) from error
    return int(height), int(width)
