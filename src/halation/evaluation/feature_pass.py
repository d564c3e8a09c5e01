"""One pass over one side's pictures by all ranks: what is missing in the stores is computed, and every rank hears what went wrong."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from halation.distributed.signals import exit_code
from halation.distributed.world import Vigil, World
from halation.errors import HalationError, InputError, Interrupted
from halation.evaluation import features as extraction
from halation.evaluation.config import EvaluateConfig
from halation.evaluation.extractor_plan import Cast, embedding, facts_of, side_of
from halation.evaluation.extractors.extractor import Extractor
from halation.evaluation.feature_store import FORMAT, Store
from halation.evaluation.features import Desk
from halation.evaluation.image_sources import Files, Source, hashed
from halation.evaluation.metrics import measure
from halation.evaluation.model_images import Live
from halation.evaluation.preprocess import Preparations, Prepared, Preparer, Sheet
from halation.generation.workers.model_runner import Painter
from halation.runs.folder import publish_json, read_json
from halation.step_progress import Progress

MAX_WORKERS = 16
WISH = "evaluate/stop"
MIXED_SIZES = "where the first picture has"


class Passes:
    """The passes of one evaluation; all ranks call the same ones in the same order."""

    def __init__(
        self,
        world: World,
        config: EvaluateConfig,
        cache: Path,
        cast: Cast,
        extractors: Mapping[str, Extractor],
        computes_on: str,
    ) -> None:
        self.world = world
        self.config = config
        self.cache = cache
        self.cast = cast
        self.extractors = extractors
        self.computes_on = computes_on
        self.micro_batch = config.sheet_size
        self._painter: Painter | None = None
        self._turns = itertools.count()

    def features(
        self, source: Source | Live, side: str, labels: Sequence[str], signal: Callable[[], int]
    ) -> dict[str, Desk]:
        """A desk for each extractor, whose store is complete."""
        moments_only = len(source) > self.config.keep_features
        starts = self._starts(source, moments_only)
        order = source.order if isinstance(source, Live) else None
        desks = {}
        for label in labels:
            worded = side == "generated" and label == self.cast.parts.get("clip")
            captions = source.captions if worded else None
            texts = None if captions is None else embedding(self.extractors[label], captions, order)
            key = self._key(label, starts, moments_only, captions)
            store = Store(self.cache / source.key[:24] / key, len(source), starts)
            desks[label] = Desk(
                key=label, extractor=self.extractors[label], store=store, texts=texts, moments_only=moments_only
            )
        self._agree([str(desk.store.folder) for desk in desks.values()])
        self._fill(source, side, desks, signal)
        return desks

    def _agree(self, folders: list[str]) -> None:
        words = self.world.exchange([folders, self.computes_on])
        if len({hashed(word[0]) for word in words}) > 1:
            devices = ", ".join(sorted({word[1] for word in words}))
            raise HalationError(
                f"the ranks would not compute the same features: they see other pictures or weights, or compute on different devices ({devices})"
            )

    def _starts(self, source: Source | Live, moments_only: bool) -> Sequence[int]:
        if isinstance(source, Live):
            return source.starts(extraction.MOMENTS_CHUNK) if moments_only else source.starts()
        return range(0, len(source), extraction.chunk_size(len(source), self.config.batch_size, moments_only))

    def _key(self, label: str, starts: Sequence[int], moments_only: bool, captions: Sequence[str] | None) -> str:
        """Everything that decides the features, besides the pictures."""
        facts = {name: value for name, value in facts_of(self.extractors[label]).items() if name != "weights"}
        threads = self.config.threads if self.computes_on == "cpu" else 0
        cut = [FORMAT, self.config.batch_size, starts[1] if len(starts) > 1 else 0, len(starts), moments_only]
        libraries = [version(name) for name in ("torch", "transformers", "numpy", "pillow")]
        return hashed([facts, cut, threads, self.computes_on, libraries, captions])[:24]

    def _fill(self, source: Source | Live, side: str, desks: Mapping[str, Desk], signal: Callable[[], int]) -> None:
        config, world = self.config, self.world
        turn = next(self._turns)
        todo: list[int] = world.from_first(
            sorted({chunk for desk in desks.values() for chunk in desk.store.sweep()}) if world.first else None
        )
        mine = todo[world.rank :: world.size]
        if isinstance(source, Live) and todo:
            self._open(source, bool(mine), turn)
        stop = _Wish(world, signal)
        total = sum(len(next(iter(desks.values())).store.rows(chunk)) for chunk in mine)
        kind = config.progress if world.first and total else "none"
        with Vigil(world, f"features {side} {turn}", config.dist_timeout_s) as vigil:
            with Progress(kind, total, 0, side) as progress:
                counted = 0

                def on_sheet(num: int) -> None:
                    nonlocal counted
                    counted += num
                    vigil.beat()
                    progress.update(counted, f"on each of {world.size} ranks" if world.size > 1 else "", {})

                coming = extraction.sheets(desks, mine, config.batch_size)
                broken = extraction.extract(
                    self._prepared(source, coming, desks, vigil.beat, stop) if mine else iter(()),
                    desks,
                    batch_size=config.batch_size,
                    device=world.device,
                    expected_size=self._expected(source, side),
                    on_sheet=on_sheet,
                    stop=stop,
                )
            words = vigil.finish({"signal": stop(), "broken": {str(index): why for index, why in broken.items()}})
        number = max(word["signal"] for word in words)
        if number:
            raise Interrupted("stopped; the same command goes on where it was", exit_code(number))
        refuse_broken(source, side, {int(index): why for word in words for index, why in word["broken"].items()})

    def _expected(self, source: Source | Live, side: str) -> tuple[int, int] | None:
        """The size that all pictures of a folder must have."""
        if side == "reference" or not isinstance(source, Files) or source.kind == "run" or self.config.allow_sizes:
            return None
        return first_size(source)

    def _prepared(
        self,
        source: Source | Live,
        coming: Iterator[Sheet],
        desks: Mapping[str, Desk],
        beat: Callable[[], None],
        stop: Callable[[], int],
    ) -> Iterator[tuple[Sheet, Prepared]]:
        preparations = {label: desk.extractor.preparation for label, desk in desks.items()}
        if isinstance(source, Live):
            assert self._painter is not None
            yield from source.draw(self._painter, self.micro_batch, coming, preparations, beat, stop)
            return
        with Preparations(Preparer(source=source, preparations=preparations), self._num_workers(len(source))) as ready:
            yield from ready.of(coming)

    def _open(self, source: Live, any_mine: bool, turn: int) -> None:
        """The model on ranks that draw, and one micro-batch for all and for every later call: it is part of the pictures' bits."""
        recorded = self.cache / source.key[:24] / "micro_batch.json"
        known: int = self.world.from_first(
            read_json(recorded)["micro_batch"] if self.world.first and recorded.is_file() else 0
        )
        with Vigil(self.world, f"opening the model {turn}", self.config.dist_timeout_s) as vigil:
            found = self.config.sheet_size
            if any_mine:
                self._painter = source.open(str(self.world.device))
                vigil.beat()
                found = known or source.rehearse(self._painter)
            self.micro_batch = min(vigil.finish(found))
        if self.world.first and not known:
            recorded.parent.mkdir(parents=True, exist_ok=True)
            publish_json(recorded, {"micro_batch": self.micro_batch})

    def _num_workers(self, num: int) -> int:
        if self.config.decode_workers >= 0:
            return self.config.decode_workers
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        cores = len(os.sched_getaffinity(0))
        return max(1, min(MAX_WORKERS, cores // ranks_here, -(-num // 32)))

    def side_of(self, source: Source | Live, side: str, desk: Desk) -> measure.Side:
        """What a complete store holds, by index; pictures that an earlier call let pass are looked at again."""
        expected = self._expected(source, side)
        if expected is not None:
            sizes = np.concatenate(list(desk.store.blocks("sizes"))).tolist()
            refuse_broken(source, side, extraction.misfits(range(len(sizes)), sizes, expected))
        return side_of(desk, np.argsort(source.order) if isinstance(source, Live) else None)


class _Wish:
    """A person's wish to stop, told to one rank and heard by all at their next sheet."""

    def __init__(self, world: World, signal: Callable[[], int]) -> None:
        self.world = world
        self.signal = signal

    def __call__(self) -> int:
        number = self.signal()
        if self.world.size == 1:
            return number
        if number:
            self.world.store.set(WISH, str(number))
            return number
        return int(self.world.store.get(WISH)) if self.world.store.check([WISH]) else 0


def refuse_broken(source: Source | Live, side: str, broken: Mapping[int, str]) -> None:
    if not broken:
        return
    first = sorted(broken)[: extraction.MAX_BROKEN]
    lines = "\n".join(f"  {source.name(index)}: {broken[index]}" for index in first)
    more = f"\n  and {len(broken) - len(first)} more" if len(broken) > len(first) else ""
    found = f"{side} pictures that cannot be scored:\n{lines}{more}"
    if isinstance(source, Live):
        raise HalationError(f"{found}\nthe model could not draw them; the same command tries them again")
    if any(MIXED_SIZES in why for why in broken.values()):
        action = "remove or replace them, or pass --allow_sizes where different sizes are meant"
        raise InputError(found, "whole pictures of one size", action)
    if isinstance(source, Files) and source.kind == "run":
        action = "draw them again: the same `halation generate` with --verify"
        raise InputError(found, "the pictures that the run drew", action)
    raise InputError(found, "whole PNG, JPEG or WebP pictures", "remove or replace them")


def first_size(source: Source) -> tuple[int, int]:
    """Height and width of the first picture."""
    from halation.data.decode import BrokenPictureError

    try:
        height, width = source.load(0).pixels.shape[:2]
    except BrokenPictureError as error:
        raise InputError(
            f"{source.name(0)}: {error}", "a whole PNG, JPEG or WebP picture", "remove or replace it"
        ) from error
    return int(height), int(width)
