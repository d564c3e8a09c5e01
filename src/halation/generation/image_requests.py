"""Turns prompt rows into image requests with safe file names.

Ids come from user files. Only ids that are safe on every file system are used in file names; others are mapped.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from halation.csv_jsonl_reader import error_at
from halation.errors import InputError
from halation.prompt_files import NUM_SEEDS, PromptRow
from halation.sample_specs import SampleBatch, SampleSpec

NUM_LISTED = 10
_MAX_ID_LENGTH = 100
_MAX_STEM_LENGTH = 60
_NUM_HASH_DIGITS = 10
_RESERVED_NAMES = r"(?:CON|PRN|AUX|NUL|COM[0-9]|LPT[0-9])(?:\.|\Z)"
_SAFE_ID = re.compile(rf"(?!(?i:{_RESERVED_NAMES}))[A-Za-z0-9][A-Za-z0-9._-]{{0,{_MAX_ID_LENGTH - 1}}}(?<!\.)\Z")
_UNSAFE_CHARACTER = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRequest:
    """A requested image and its file name."""

    spec: SampleSpec
    name: str
    """File stem, safe on every file system: `{id}_seed{seed}` if the id is safe, else a mapped name."""


@dataclass(frozen=True, kw_only=True)
class BatchTask:
    """A batch to generate, and which of its images are wanted.

    The other images stay in the batch because its shape affects the bits.
    """

    number: int
    requests: tuple[ImageRequest, ...]
    batch_size: int
    micro_batch: int
    wanted: frozenset[int]

    @property
    def batch(self) -> SampleBatch:
        specs = [request.spec for request in self.requests]
        fillers = [specs[-1]] * (self.batch_size - len(specs))
        return SampleBatch(specs=(*specs, *fillers), num_real=len(specs))

    def as_json(self) -> dict[str, Any]:
        """Return the message that is sent to a worker."""
        requests = [{"name": request.name, "spec": request.spec.as_json()} for request in self.requests]
        sizes = {"batch_size": self.batch_size, "micro_batch": self.micro_batch}
        return {"number": self.number, "requests": requests, **sizes, "wanted": sorted(self.wanted)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> BatchTask:
        requests = tuple(ImageRequest(spec=SampleSpec(**row["spec"]), name=row["name"]) for row in value["requests"])
        return cls(**{**value, "requests": requests, "wanted": frozenset(value["wanted"])})

    def image_id(self, index: int) -> str:
        return next(request.spec.id for request in self.requests if request.spec.index == index)

    def with_single_image(self, index: int, number: int) -> BatchTask:
        """Return a batch of the same shape that repeats one image, to find which one fails."""
        kept_request = next(request for request in self.requests if request.spec.index == index)
        return replace(self, number=number, requests=(kept_request,), wanted=frozenset({index}))


@dataclass(frozen=True, kw_only=True)
class RequestDefaults:
    """Default values for rows that do not set them."""

    seed_start: int
    """The seed of the first row of the file; row k gets seed_start + k."""
    height: int
    width: int
    num_frames: int
    steps: int
    guidance_scale: float | None
    negative_prompt: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RenamedId:
    """A request whose file name is not its id and seed."""

    index: int
    line: int
    id: str
    name: str
    why: str


RowCheck = Callable[[PromptRow, SampleSpec], None]
"""Raises InputError for a row that the model cannot draw or would ignore in part."""


def iter_requests(
    rows: Iterable[PromptRow], defaults: RequestDefaults, source: str, check: RowCheck | None = None
) -> RequestIterator:
    """Return the requests of a file's rows in order; `source` is the file name for messages."""
    return RequestIterator(rows, defaults, source, check)


class RequestIterator(Iterator[ImageRequest]):
    """Creates requests one by one; each depends only on its row and earlier rows.

    Two rows with the same id and seed would share one file. After the first such row no more requests are yielded, and
    the iteration ends with an InputError that lists all of them.
    """

    def __init__(
        self, rows: Iterable[PromptRow], defaults: RequestDefaults, source: str, check: RowCheck | None = None
    ) -> None:
        self.renamed_ids: list[RenamedId] = []
        """Renamed requests, in order; the caller may clear the list during iteration."""
        self.num_renamed = 0
        self._source = source
        self._check = check
        # Digests bound the memory for a million long ids. At 128 bits, equal digests mean equal text.
        self._line_by_name: dict[int, int] = {}
        self._other_names: set[int] = set()
        self._ids: set[int] = set()
        self._shared_ids: set[int] = set()
        self._repetitions: list[str] = []
        self._num_repetitions = 0
        self._iterator = self._make_requests(rows, defaults)

    @property
    def num_shared_ids(self) -> int:
        """Number of ids seen more than once so far, with different seeds."""
        return len(self._shared_ids)

    def __next__(self) -> ImageRequest:
        return next(self._iterator)

    def _make_requests(self, rows: Iterable[PromptRow], defaults: RequestDefaults) -> Iterator[ImageRequest]:
        for index, row in enumerate(rows):
            spec = _make_spec(index, row, defaults, self._source)
            if self._check is not None:
                _check_row(self._check, row, spec, self._source)
            preferred_name = f"{spec.id}_seed{spec.seed}"
            key = _digest(preferred_name)
            if key in self._line_by_name:
                self._record_repetition(spec, row.line, self._line_by_name[key])
                continue
            name = self._choose_name(spec, preferred_name, key, row.line)
            self._line_by_name[key] = row.line
            self._record_id(spec.id)
            if not self._num_repetitions:
                yield ImageRequest(spec=spec, name=name)
        if self._num_repetitions:
            raise self._repetition_error()

    def _choose_name(self, spec: SampleSpec, preferred_name: str, key: int, line: int) -> str:
        if not _SAFE_ID.match(spec.id):
            name, why = self._make_safe_name(spec), "the id is not a safe part of a file name"
        else:
            folded = preferred_name.lower()
            folded_key = key if folded == preferred_name else _digest(folded)
            if not self._is_taken(folded_key):
                if folded_key != key:
                    self._other_names.add(folded_key)
                return preferred_name
            name, why = (
                self._make_safe_name(spec),
                "an earlier row has this name, or one that differs only in its capitals",
            )
        self.num_renamed += 1
        self.renamed_ids.append(RenamedId(index=spec.index, line=line, id=spec.id, name=name, why=why))
        return name

    def _is_taken(self, folded_key: int) -> bool:
        # The folded name of a safe lower-case id is the name itself; an unsafe id is never part of a name.
        return folded_key in self._line_by_name or folded_key in self._other_names

    def _make_safe_name(self, spec: SampleSpec) -> str:
        # Keep letters without accents, digits and dashes; replace the rest by underscores.
        letters = unicodedata.normalize("NFKD", spec.id[:_MAX_STEM_LENGTH])
        plain = "".join(letter for letter in letters if not unicodedata.combining(letter))
        start = _UNSAFE_CHARACTER.sub("_", plain)[:_MAX_STEM_LENGTH].lstrip("_-") or "id"
        for attempt in itertools.count():
            text = spec.id if attempt == 0 else f"{spec.id}\0{attempt}"
            digits = hashlib.sha256(text.encode()).hexdigest()[:_NUM_HASH_DIGITS]
            name = f"{start}-{digits}_seed{spec.seed}"
            folded_key = _digest(name.lower())
            if not self._is_taken(folded_key):
                self._other_names.add(folded_key)
                return name
        raise AssertionError("counting never ends")

    def _record_id(self, id: str) -> None:
        key = _digest(id)
        (self._shared_ids if key in self._ids else self._ids).add(key)

    def _record_repetition(self, spec: SampleSpec, line: int, first_line: int) -> None:
        self._num_repetitions += 1
        if self._num_repetitions <= NUM_LISTED:
            shown = spec.id if len(spec.id) <= _MAX_STEM_LENGTH else spec.id[:_MAX_STEM_LENGTH] + "..."
            self._repetitions.append(f"{shown!r} with seed {spec.seed}: lines {first_line} and {line}")

    def _repetition_error(self) -> InputError:
        more = self._num_repetitions - len(self._repetitions)
        listed = "; ".join(self._repetitions) + (f"; and {more} more" if more else "")
        return InputError(
            f"{self._source}: the same image_id and seed twice: {listed}",
            "each image_id once per seed, because the two form the file name",
            "remove the repeated rows, or give them another seed or image_id",
        )


def _make_spec(index: int, row: PromptRow, defaults: RequestDefaults, source: str) -> SampleSpec:
    seed = row.seed
    if seed is None:
        seed = defaults.seed_start + index
        if not 0 <= seed < NUM_SEEDS:
            found = f"the seed would be {defaults.seed_start} + {index} = {seed}"
            raise error_at(source, row.line, 1, found, "a seed from 0 to 2**63 - 1", "choose another --seed_start")
    return SampleSpec(
        index=index,
        id=row.image_id or f"{index + 1:06d}",
        prompt=row.prompt,
        seed=seed,
        height=defaults.height if row.height is None else row.height,
        width=defaults.width if row.width is None else row.width,
        steps=defaults.steps if row.steps is None else row.steps,
        guidance_scale=defaults.guidance_scale if row.guidance_scale is None else row.guidance_scale,
        negative_prompt=defaults.negative_prompt if row.negative_prompt is None else row.negative_prompt,
        num_frames=defaults.num_frames,
    )


def _check_row(check: RowCheck, row: PromptRow, spec: SampleSpec, source: str) -> None:
    """Check a row that has settings of its own; the message names its line."""
    if row.height is row.width is row.guidance_scale is None and not row.negative_prompt:
        return
    try:
        check(row, spec)
    except InputError as error:
        raise error_at(source, row.line, 1, error.found, error.expected, error.action) from error


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big")
