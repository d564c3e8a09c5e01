"""Every row becomes one request with a safe file name, and no id becomes a path."""

from __future__ import annotations

import hashlib
import itertools
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halation.errors import InputError
from halation.generation.image_requests import ImageRequest, RequestDefaults, iter_requests
from halation.prompt_files import PromptRow, iter_prompts
from halation.sample_specs import SampleSpec

DEFAULTS = RequestDefaults(
    seed_start=42, height=480, width=832, num_frames=1, steps=20, guidance_scale=7.5, negative_prompt="blurry"
)
COCO = Path(__file__).parents[3] / "shared" / "data" / "prompts" / "coco_val2017.csv"
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
DEVICE = re.compile(r"(?i)(con|prn|aux|nul|com[0-9]|lpt[0-9])(\.|\Z)")
UNSAFE = [
    "../x", "/etc/x", "a/b", "a\\b", "C:x", "..", ".", ".hidden", "-rf", "_x", "a b", " ", "a\nb", "a\0b",
    "x" * 101, "x" * 300,
    "é", "e\u0301", "거리", "\U0001f697", "\u202egnp", "a.", "CON", "con", "Nul.txt", "COM1", "lpt9.tar.gz",
    "aux.", "a:b", "a*?",
    "~", "$HOME", "%2e%2e", "<b>",
]  # fmt: skip
SAFE = ["a", "0", "000000000139", "A", "a.b-c_d", "x" * 100, "console", "COM", "com10", "con-1", "1.png", "a_seed7"]


def row(id: str | None, seed: int | None = None, line: int = 0) -> PromptRow:
    return PromptRow(prompt="a street", image_id=id, seed=seed, line=line)


def numbered(ids: Iterable[str | None], seed: int | None = None) -> list[PromptRow]:
    return [row(id, seed, line) for line, id in enumerate(ids, start=2)]


def names(rows: Iterable[PromptRow]) -> list[str]:
    return [request.name for request in iter_requests(rows, DEFAULTS, "p.csv")]


def refused(rows: Iterable[PromptRow], defaults: RequestDefaults = DEFAULTS) -> InputError:
    with pytest.raises(InputError) as caught:
        list(iter_requests(rows, defaults, "p.csv"))
    return caught.value


def test_a_row_that_says_nothing_gets_the_defaults_and_its_place_in_the_file() -> None:
    made = list(iter_requests([PromptRow(prompt="a cat"), PromptRow(prompt="a dog", image_id="")], DEFAULTS, "p.txt"))
    spec = SampleSpec(
        index=0, id="000001", prompt="a cat", seed=42, height=480, width=832, steps=20, guidance_scale=7.5,
        negative_prompt="blurry", num_frames=1,
    )  # fmt: skip
    assert made[0] == ImageRequest(spec=spec, name="000001_seed42")
    assert (made[1].spec.id, made[1].spec.seed, made[1].name) == ("000002", 43, "000002_seed43")


def test_a_row_keeps_what_it_says() -> None:
    said = PromptRow(
        prompt=" p ", image_id="7", seed=0, negative_prompt="", width=64, height=32, steps=3, guidance_scale=0.0
    )
    spec = next(iter_requests([said], DEFAULTS, "p.csv")).spec
    wanted = SampleSpec(
        index=0, id="7", prompt=" p ", seed=0, height=32, width=64, steps=3, guidance_scale=0.0, negative_prompt=""
    )
    assert spec == wanted


@pytest.mark.parametrize("id", SAFE)
def test_a_safe_id_is_used_as_it_is(id: str) -> None:
    made = iter_requests([row(id, 5)], DEFAULTS, "p.csv")
    assert [request.name for request in made] == [f"{id}_seed5"]
    assert made.num_renamed == 0
    assert made.renamed_ids == []


@pytest.mark.parametrize("id", UNSAFE)
def test_an_unsafe_id_is_mapped_and_listed(id: str) -> None:
    made = iter_requests([row("fine", line=2), row(id, 5, line=3)], DEFAULTS, "p.csv")
    name = list(made)[1].name
    digits = hashlib.sha256(id.encode()).hexdigest()[:10]
    assert name.endswith(f"-{digits}_seed5")
    assert SAFE_NAME.match(name)
    assert not DEVICE.match(name)
    assert len(name) < 120
    (renamed,) = made.renamed_ids
    assert (renamed.index, renamed.line, renamed.id, renamed.name) == (1, 3, id, name)
    assert "not a safe part of a file name" in renamed.why


def test_a_mapped_name_can_still_be_read() -> None:
    starts = [name.rpartition("-")[0] for name in names(numbered(["../x", "Café au lait.png", "거리", "x" * 300], 1))]
    assert starts == ["x", "Cafe_au_lait_png", "id", "x" * 60]


def test_twins_in_capitals_get_names_of_their_own() -> None:
    made = iter_requests(numbered(["Cat", "cat", "CAT", "dog"], 1), DEFAULTS, "p.csv")
    found = [request.name for request in made]
    assert (found[0], found[3]) == ("Cat_seed1", "dog_seed1")
    assert found[1] == f"cat-{hashlib.sha256(b'cat').hexdigest()[:10]}_seed1"
    assert [(renamed.line, renamed.id) for renamed in made.renamed_ids] == [(3, "cat"), (4, "CAT")]
    assert "differs only in its capitals" in made.renamed_ids[0].why


def test_twins_in_capitals_with_other_seeds_do_not_meet() -> None:
    assert names([row("Cat", 1), row("cat", 2)]) == ["Cat_seed1", "cat_seed2"]


def test_an_id_that_looks_like_a_mapped_name_cannot_take_or_lose_a_file() -> None:
    mapped = names([row("../x", 1)])[0].removesuffix("_seed1")
    for ids in ([mapped, "../x"], ["../x", mapped], ["../x", mapped.upper(), mapped]):
        found = names(numbered(ids, 1))
        assert len({name.lower() for name in found}) == len(ids)
        assert len(set(found)) == len(ids)


def test_the_same_id_and_seed_twice_is_refused_with_both_lines() -> None:
    error = refused([row("a", 1, 2), row("b", 1, 3), row("a", 2, 4), row("a", 1, 9)])
    assert error.found == "p.csv: the same image_id and seed twice: 'a' with seed 1: lines 2 and 9"
    assert "each image_id once per seed" in error.expected
    assert "remove the repeated rows" in error.action


def test_an_unsafe_id_twice_is_refused_too() -> None:
    assert "'../x' with seed 1: lines 2 and 3" in refused(numbered(["../x", "../x"], 1)).found


def test_ten_repetitions_are_listed_and_the_rest_are_counted() -> None:
    found = refused(numbered([f"{number % 5}" for number in range(30)], 1)).found
    assert found.count(" with seed 1: lines ") == 10
    assert found.endswith("; and 15 more")
    assert "more" not in refused(numbered([f"{number % 5}" for number in range(15)], 1)).found


def test_no_request_is_given_from_the_first_repetition_on() -> None:
    made = iter_requests(numbered(["a", "b", "a", "c"], 1), DEFAULTS, "p.csv")
    assert [next(made).name, next(made).name] == ["a_seed1", "b_seed1"]
    with pytest.raises(InputError, match="twice"):
        next(made)


def test_a_counted_id_that_another_row_has_is_refused_only_with_the_same_seed() -> None:
    assert names([row("000002"), row(None)]) == ["000002_seed42", "000002_seed43"]
    assert "'000002' with seed 43" in refused([row("000002", 43, 2), row(None, None, 3)]).found


def test_ids_with_several_seeds_are_counted() -> None:
    made = iter_requests([row("a"), row("b"), row("a"), row("a"), row("c"), row("c")], DEFAULTS, "p.csv")
    assert len(list(made)) == 6
    assert made.num_shared_ids == 2


def test_a_seed_beyond_the_last_one_is_refused_with_its_line() -> None:
    late = RequestDefaults(**{**vars(DEFAULTS), "seed_start": 2**63 - 2})
    assert [r.spec.seed for r in iter_requests(numbered("ab"), late, "p")] == [2**63 - 2, 2**63 - 1]
    error = refused(numbered("abc"), late)
    assert error.found.startswith("p.csv, line 4, column 1: the seed would be ")
    assert "2**63 - 1" in error.expected
    negative = RequestDefaults(**{**vars(DEFAULTS), "seed_start": -1})
    assert "the seed would be -1 + 0 = -1" in refused(numbered("a"), negative).found


def test_a_huge_id_is_shown_in_part() -> None:
    assert len(refused(numbered(["x" * 2**20] * 2, 1)).found) < 300


def test_rows_are_read_only_as_requests_are_asked_for() -> None:
    taken = itertools.count()
    made = iter_requests((row(str(number)) for number in taken), DEFAULTS, "p.csv")
    assert [next(made).spec.index for _ in range(3)] == [0, 1, 2]
    assert next(taken) == 3


IDS = st.one_of(
    st.sampled_from([*SAFE, *UNSAFE, "Cat", "cat", "CAT", "cat_seed1", ""]),
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.from_regex(r"[A-Ca-c][a-c._-]{0,3}", fullmatch=True),
    st.none(),
)


@st.composite
def unrepeated(draw: st.DrawFn) -> list[PromptRow]:
    """Rows in which no id has one seed twice, whichever way they are read."""
    drawn = draw(st.lists(st.tuples(IDS, st.integers(0, 2)), max_size=30))
    rows: dict[tuple[str, int], PromptRow] = {}
    for id, seed in drawn:
        rows.setdefault((id or f"{len(rows) + 1:06d}", seed), row(id, seed, len(rows) + 2))
    return list(rows.values())


@settings(max_examples=200, deadline=None)
@given(unrepeated())
@example(numbered(["../x", names([row("../x", 1)])[0].removesuffix("_seed1"), "../X"], 1))
def test_names_are_safe_and_unique_even_where_capitals_do_not_count(rows: list[PromptRow]) -> None:
    made = iter_requests(rows, DEFAULTS, "p.csv")
    found = [request.name for request in made]
    assert len({name.casefold() for name in found}) == len(rows)
    for name in found:
        assert SAFE_NAME.match(name)
        assert not DEVICE.match(name)
        assert len(name) < 200
    listed = {renamed.index: renamed for renamed in made.renamed_ids}
    assert made.num_renamed == len(listed)
    for index, (one, name) in enumerate(zip(rows, found, strict=True)):
        as_it_is = f"{one.image_id or f'{index + 1:06d}'}_seed{one.seed}"
        assert (index in listed) == (name != as_it_is)
        if index in listed:
            assert (listed[index].name, listed[index].line) == (name, one.line)


@settings(max_examples=100, deadline=None)
@given(unrepeated(), st.data())
def test_the_first_rows_get_the_same_names_whatever_follows(rows: list[PromptRow], data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(0, len(rows)))
    assert names(rows[:num_rows]) == names(rows)[:num_rows]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.from_regex(r"[a-z0-9][a-z0-9_]{0,6}", fullmatch=True), unique=True, max_size=20))
def test_ids_that_are_safe_and_differ_are_unchanged(ids: list[str]) -> None:
    kept = [id for id in ids if not DEVICE.match(id)]
    assert names(numbered(kept, 1)) == [f"{id}_seed1" for id in kept]


@pytest.mark.skipif(not COCO.is_file(), reason="the list of COCO captions is not part of the project")
def test_the_coco_list_keeps_its_ids() -> None:
    made = iter_requests(iter_prompts(COCO), DEFAULTS, str(COCO))
    found = [request.name for request in made]
    assert found[:2] == ["000000000139_seed42", "000000000285_seed43"]
    assert (len(found), made.num_renamed, made.num_shared_ids) == (5000, 0, 0)


def test_making_requests_needs_no_torch() -> None:
    script = "import sys, halation.generation.image_requests; sys.exit(bool({'torch', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.slow
def test_a_million_rows_take_seconds_and_little_memory() -> None:
    script = """
import collections, itertools, re, time
from pathlib import Path
from halation.generation.image_requests import RequestDefaults, iter_requests
from halation.prompt_files import PromptRow
defaults = RequestDefaults(
    seed_start=0, height=1, width=1, num_frames=1, steps=1, guidance_scale=1.0, negative_prompt=""
)
ids = itertools.chain((f"{number:012d}" for number in range(1_000_000)), [None])
rows = (PromptRow(prompt="a", image_id=id, line=line) for line, id in enumerate(ids, start=2))
start = time.process_time()
(last,) = collections.deque(iter_requests(rows, defaults, "p"), maxlen=1)
assert last.name == "1000001_seed1000000", "counted ids go on beyond six digits"
assert time.process_time() - start < 30, time.process_time() - start
peak = int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text()).group(1)) * 1024
assert peak < 300 * 2**20, peak
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
