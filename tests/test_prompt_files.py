"""Prompt files are read exactly, or refused with file, line and column."""

# ruff: noqa: RUF001

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halation.csv_jsonl_reader import BLOCK_SIZE, check_text, csv_rows, decode_blocks, iter_lines
from halation.errors import InputError
from halation.prompt_files import (
    PromptFile,
    PromptRow,
    collect_prompts,
    is_prompt_file,
    iter_prompts,
    read_prompts,
)

SHARED = Path(__file__).parents[2] / "shared"

TRICKY = [
    "null",
    "None",
    "NaN",
    "007",
    "  spaces   stay  ",
    "a, b",
    'she said "hi"',
    "two\nlines",
    "two\r\nlines",
    "\u05e8\u05d7\u05d5\u05d1 \u0634\u0627\u0631\u0639",
    "\U0001f697\U0001f3fd\u200d\u2640\ufe0f",
    "cafe\u0301 caf\u00e9",
    "π–거리 멀티 GPU 샘플링 기능 가이드",
    "Ελλάδα «ΝΑΤΟ» δρόμος",
    "ёлка и «её» дом – Вінниця",
    "« café », « thé », « blé »".replace(" »", "\xa0»"),
    "“Über” ‘Öl’ “Äpfel” ŻÓŁTY KOŚCIÓŁ, GŁÓWNY",
    "x" * 2**20,
]


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refused(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_prompts(path)
    assert caught.value.exit_code == 2
    assert str(path) in caught.value.found
    return caught.value.found


def quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv_gives_back_what_was_written(tmp_path: Path, mark: bytes, end: str) -> None:
    text = end.join(["prompt,other", *[f"{quoted(prompt)},1" for prompt in TRICKY]])
    path = write(tmp_path, "p.csv", mark + text.encode())
    assert [row.prompt for row in read_prompts(path)] == TRICKY


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_txt_gives_back_what_was_written_without_blank_lines(tmp_path: Path, mark: bytes, end: str) -> None:
    wanted = [prompt for prompt in TRICKY if "\n" not in prompt]
    path = write(tmp_path, "p.txt", mark + (end + "  " + end).join(["", *wanted, ""]).encode())
    rows = read_prompts(path)
    assert [row.prompt for row in rows] == wanted
    assert [row.line for row in rows] == [3 + 2 * index for index in range(len(wanted))]


def test_json_lines_give_back_what_was_written(tmp_path: Path) -> None:
    text = "\n".join(json.dumps({"prompt": prompt, "seed": 5}) for prompt in TRICKY)
    assert [row.prompt for row in read_prompts(write(tmp_path, "p.jsonl", text))] == TRICKY


def test_parquet_gives_back_what_was_written(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"caption": TRICKY, "image_id": list(range(len(TRICKY)))})
    parquet.write_table(table, tmp_path / "p.parquet")
    rows = read_prompts(tmp_path / "p.parquet")
    assert [row.prompt for row in rows] == TRICKY
    assert rows[3].image_id == "3"


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=2, max_size=2), max_size=6
    )
)
def test_any_quoted_text_survives_csv(records: list[list[str]]) -> None:
    text = "\n".join(["a,b", *[",".join(quoted(field) for field in record) for record in records]])
    assert [list(row.values.values()) for row in csv_rows("x", text)] == records


def outcome(rows: Callable[[], Iterable[object]]) -> list[object] | str:
    try:
        return list(rows())
    except InputError as error:
        return str(error)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*'ab,"\n\r ', '""', '",', '"\n', "\r\n", "한"]), max_size=30).map("".join))
def test_a_text_in_blocks_is_read_and_refused_as_the_whole_is(text: str) -> None:
    pieces = [piece for piece in re.split("(?<=\n)", "a,b\n" + text) if piece]
    whole = "".join(pieces)
    assert outcome(lambda: csv_rows("x", iter(pieces))) == outcome(lambda: csv_rows("x", whole))
    assert outcome(lambda: iter_lines("x", iter(pieces))) == outcome(lambda: iter_lines("x", whole))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_file_of_many_blocks_keeps_its_rows_and_their_lines(tmp_path: Path, end: str) -> None:
    prompts = [f"거리 {number}, {TRICKY[number % (len(TRICKY) - 1)]}" for number in range(60_000)]
    content = end.join(["prompt,seed", *[f"{quoted(prompt)},{number}" for number, prompt in enumerate(prompts)]])
    path = write(tmp_path, "p.csv", content)
    assert path.stat().st_size > 2 * BLOCK_SIZE
    rows = read_prompts(path)
    assert [row.prompt for row in rows] == prompts
    line = 2
    for number, row in enumerate(rows):
        assert (row.seed, row.line) == (number, line)
        line += 1 + row.prompt.count("\n")


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (b"a\0", "line 60002, column 2: a NUL character"),
        (b"ab\xff", "line 60002, column 3: byte 0xff is not UTF-8"),
        ("the driverâ€™s".encode(), "line 60002, column 11: 'â€™s' looks like UTF-8 that was read as cp1252"),
        (b"a,b", "line 60002, column 1: 2 fields, but the header has 1"),
        (b'"a\nb" c', "line 60003, column 3: text after a closing quote"),
        (b'"a\nb', "line 60002, column 1: a quote that is never closed"),
        (b"abc\rd", "line 60002, column 4: a carriage return"),
    ],
)
def test_a_fault_far_down_is_refused_where_it_is(tmp_path: Path, fault: bytes, found: str) -> None:
    content = b"prompt\n" + b"a street after the rain, with reflections\n".replace(b",", b"") * 60_000 + fault
    assert len(content) > 2 * BLOCK_SIZE
    assert found in refused(write(tmp_path, "p.csv", content + b"\nx\n"))


def test_a_field_longer_than_a_block_is_read_and_one_without_an_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALATION_INPUT_LIMITS", "8")
    long = 'a "quoted" word\n' * (5 * BLOCK_SIZE // 16)
    rows = read_prompts(write(tmp_path, "p.csv", f"prompt,seed\n{quoted(long)},1\nb,2\n"))
    assert [(row.prompt == long, row.seed, row.line) for row in rows] == [
        (True, 1, 2),
        (False, 2, 3 + long.count("\n")),
    ]
    assert "line 3, column 1: a quote that is never closed" in refused(
        write(tmp_path, "p.csv", 'prompt\nx\n"' + "y\n" * BLOCK_SIZE)
    )


def test_plain_csv_fields_are_kept_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path, "p.csv", 'image_id,prompt\n\n000139, a 5" pipe \n\n1,\n2,""\n')
    rows = read_prompts(path)
    assert [(row.image_id, row.prompt, row.line) for row in rows] == [
        ("000139", ' a 5" pipe ', 3),
        ("1", "", 5),
        ("2", "", 6),
    ]


def test_a_row_carries_what_its_file_says(tmp_path: Path) -> None:
    header = "caption,id,seed,negative_prompt,width,height,num_inference_steps,guidance_scale"
    path = write(tmp_path, "p.csv", f"{header}\na cat,../x,7,blurry,832,480,20,7.5\na dog,,,,,,,\n")
    full, empty = read_prompts(path)
    assert full == PromptRow(
        prompt="a cat", image_id="../x", seed=7, negative_prompt="blurry", width=832, height=480, steps=20,
        guidance_scale=7.5, line=2,
    )  # fmt: skip
    assert empty == PromptRow(prompt="a dog", image_id="", negative_prompt="", line=3)
    path = write(
        tmp_path, "p.jsonl", '{"prompt": "a cat", "seed": 7, "guidance_scale": 3, "image_id": 12, "width": null}'
    )
    assert read_prompts(path) == [PromptRow(prompt="a cat", seed=7, guidance_scale=3.0, image_id="12", line=1)]


@pytest.mark.parametrize(
    ("name", "content"),
    [("p.csv", "file_name,text\n0.png,a cat\n"), ("p.jsonl", '{"file_name": "0.png", "text": "a cat"}\n')],
)
def test_the_list_a_model_was_trained_on_is_a_list_of_prompts(tmp_path: Path, name: str, content: str) -> None:
    assert [row.prompt for row in read_prompts(write(tmp_path, name, content))] == ["a cat"]


def test_prompt_wins_over_caption(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path, "p.csv", "caption,prompt\nc,p\n"))[0].prompt == "p"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["p.csv", "p.txt", "p.jsonl"])
def test_utf_16_is_refused(tmp_path: Path, encoding: str, name: str) -> None:
    found = refused(write(tmp_path, name, "prompt\na cat\n".encode(encoding)))
    assert "UTF-16" in found
    assert "line 1, column" in found


def test_a_nul_is_refused_where_it_is(tmp_path: Path) -> None:
    assert "line 2, column 3: a NUL character" in refused(write(tmp_path, "p.txt", "one\nab\0c\n"))


def test_a_byte_that_is_not_utf_8_is_refused_where_it_is(tmp_path: Path) -> None:
    found = refused(write(tmp_path, "p.txt", "거리\nün café\n".encode()[:-3] + b"\xe9\n"))
    assert "line 2, column 7: byte 0xe9 is not UTF-8" in found


@pytest.mark.parametrize(("name", "content"), [("p.txt", "one\ntwo\rthree\n"), ("p.csv", "prompt\ntwo\rthree\n")])
def test_a_bare_carriage_return_is_refused_where_it_is(tmp_path: Path, name: str, content: str) -> None:
    assert "line 2, column 4: a carriage return" in refused(write(tmp_path, name, content))


@pytest.mark.parametrize("record", ["a cat, red,1", "a cat"])
def test_ragged_rows_are_refused_with_their_line(tmp_path: Path, record: str) -> None:
    found = refused(write(tmp_path, "p.csv", f'prompt,seed\n"two\nlines",3\n{record}\n'))
    assert "line 4, column 1: " in found
    assert "fields, but the header has 2 (prompt, seed)" in found


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ('prompt\nx\n"never closed\n', "line 3, column 1: a quote that is never closed"),
        ('prompt,seed\n"a" b,3\n', "line 2, column 4: text after a closing quote"),
        ("prompt,prompt\na,b\n", "line 1, column 1: the column 'prompt' appears twice"),
        ("prompt,seed\na,seven\n", "line 2, column 1: seed is 'seven'"),
        ("prompt,seed\na,1_000\n", "line 2, column 1: seed is '1_000'"),
        ("prompt,guidance_scale\na,nan\n", "line 2, column 1: guidance_scale is 'nan'"),
        ("Prompt,seed\na,1\n", "no prompt column among 'Prompt' (nearest: 'prompt'), 'seed'"),
        ("caption,text\na,b\n", "no prompt column among 'caption', 'text'"),
        ("captions\na\n", "no prompt column among 'captions' (nearest: 'caption')"),
        ("prompt\n", "has no prompts"),
        ("", "line 1, column 1: no line with text"),
    ],
)
def test_faulty_csv_is_refused_where_the_fault_is(tmp_path: Path, content: str, place: str) -> None:
    assert place in refused(write(tmp_path, "p.csv", content))


@pytest.mark.parametrize(
    ("header", "word"),
    [
        ("image_id;prompt", "semicolons"),
        ('"image_id";"prompt"', "semicolons"),
        ("\ufeffcaption;seed", "semicolons"),
        ("image_id\tprompt", "tabs"),
        ("Prompt|seed", "bars"),
    ],
)
def test_columns_that_are_not_separated_by_commas_are_named(tmp_path: Path, header: str, word: str) -> None:
    path = write(tmp_path, "p.csv", f"{header}\n1;a cat, red\n")
    column = re.search(r"[;\t|]", header.removeprefix("\ufeff"))
    assert column is not None
    assert f"line 1, column {column.start() + 1}: this file has {word} between the columns" in refused(path)
    with pytest.raises(InputError, match="expected: commas between the columns"):
        read_prompts(path)


def test_semicolons_inside_a_column_are_nothing_to_complain_about(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path, "p.csv", "prompt\na; b\tc\n"))[0].prompt == "a; b\tc"
    assert "no prompt column among 'wet; red'" in refused(write(tmp_path, "p.csv", "wet; red\na; b\n"))


VALUES = [
    ("seed", "0", 0), ("seed", "+7", 7), ("seed", str(2**63 - 1), 2**63 - 1), ("seed", " 5 ", 5), ("seed", "", None),
    ("width", "1", 1), ("width", "16384", 16384), ("height", "480", 480), ("steps", "10000", 10000),
    ("num_inference_steps", "1", 1), ("guidance_scale", "0", 0.0), ("guidance_scale", "7.5", 7.5),
    ("guidance_scale", ".5e1", 5.0),
]  # fmt: skip


@pytest.mark.parametrize(("column", "text", "value"), VALUES)
def test_a_value_within_its_bounds_is_read(tmp_path: Path, column: str, text: str, value: float | None) -> None:
    (row,) = read_prompts(write(tmp_path, "p.csv", f"prompt,{column}\na,{text}\n"))
    assert getattr(row, column.removeprefix("num_inference_")) == value


@pytest.mark.parametrize(
    ("column", "text", "expected"),
    [
        ("seed", "-1", "a whole number from 0 to 2**63 - 1"),
        ("seed", str(2**63), "a whole number from 0 to 2**63 - 1"),
        ("seed", "9" * 900, "a whole number from 0 to 2**63 - 1"),
        ("seed", "1.5", "a whole number from 0 to 2**63 - 1"),
        ("width", "0", "a whole number from 1 to 16384"),
        ("width", "16385", "a whole number from 1 to 16384"),
        ("height", "-480", "a whole number from 1 to 16384"),
        ("steps", "0", "a whole number from 1 to 10000"),
        ("num_inference_steps", "10001", "a whole number from 1 to 10000"),
        ("guidance_scale", "-0.1", "a finite number, 0 or more"),
        ("guidance_scale", "1e400", "a finite number, 0 or more"),
        ("guidance_scale", "9" * 400, "a finite number, 0 or more"),
    ],
)
def test_a_value_beyond_its_bounds_is_refused(tmp_path: Path, column: str, text: str, expected: str) -> None:
    for name, content in (
        ("p.csv", f"prompt,{column}\na,1\nb,{text}\n"),
        ("p.jsonl", f'{{"prompt": "a"}}\n{{"prompt": "b", "{column}": {text}}}\n'),
    ):
        line = 3 if name == "p.csv" else 2
        with pytest.raises(InputError) as caught:
            read_prompts(write(tmp_path, name, content))
        assert f"{name}, line {line}, column 1: {column} is " in caught.value.found
        assert caught.value.expected == expected
        assert len(caught.value.found) < 200 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ('{"prompt": "a",}', "line 2, column 16: not JSON"),
        ('["a"]', "line 2, column 1: a JSON list"),
        ('{"words": "a"}', "line 2, column 1: no prompt column among 'words'"),
        ('{"prompt": null}', "line 2, column 1: the prompt is None"),
        ('{"prompt": 7}', "line 2, column 1: the prompt is 7"),
        ('{"prompt": "a", "prompt": "b"}', "line 2, column 1: the key 'prompt' appears twice"),
        ('{"prompt": "a\\ud83d"}', "line 2, column 1: half of a surrogate pair"),
        ('{"prompt": "a", "seed": 1.5}', "line 2, column 1: seed is 1.5"),
        ('{"prompt": "a", "seed": true}', "line 2, column 1: seed is True"),
        ('{"prompt": "a", "guidance_scale": NaN}', "line 2, column 1: NaN is not JSON"),
        ('{"prompt": "a\\u0000b"}', "line 2, column 1: a NUL character in prompt"),
        ('{"prompt": "a", "image_id": "\\u0000"}', "line 2, column 1: a NUL character in image_id"),
        ('{"prompt": "a", "image_id": ["b"]}', "line 2, column 1: image_id is ['b']"),
        (
            '{"prompt": "one\\ncaf\\u00c3\\u00a9"}',
            "line 2, column 1: in prompt: 'Ã©' looks like UTF-8 that was read as cp1252",
        ),
        (
            '{"prompt": "a", "negative_prompt": "\\ufffd"}',
            "line 2, column 1: in negative_prompt: a replacement character",
        ),
        ("[" * 200_000, "line 2, column 1: JSON that is nested too deep"),
        ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "line 2, column 1: a number of 5000 digits"),
    ],
)
def test_faulty_json_lines_are_refused_where_the_fault_is(tmp_path: Path, line: str, place: str) -> None:
    assert place in refused(write(tmp_path, "p.jsonl", f'{{"prompt": "good"}}\n{line}\n'))


@pytest.mark.parametrize("page", ["cp1252", "cp1253", "cp1251", "cp437", "cp850", "latin-1"])
@pytest.mark.parametrize(
    "text", ["# 멀티 GPU 샘플링 기능 가이드: 거리", "мокрая улица ночью", "一条下雨的街道，有倒影"]
)
def test_utf_8_read_in_another_code_page_is_refused(tmp_path: Path, page: str, text: str) -> None:
    damaged = text.encode().decode(page, errors="ignore")
    found = refused(write(tmp_path, "p.txt", f"a street\n{damaged}\n"))
    assert "line 2, column " in found
    assert "looks like UTF-8 that was read as" in found


@pytest.mark.skipif(not SHARED.is_dir(), reason="the seed documents are not part of the project")
def test_the_document_in_the_wrong_code_page_is_refused_and_the_original_read(tmp_path: Path) -> None:
    """A prompt file in the wrong code page is refused; its UTF-8 original is read."""
    original, damaged = (next((SHARED / "seeds").glob(f"{number}_*")).read_bytes() for number in ("000", "001"))
    text = original.decode()
    assert [row.prompt for row in read_prompts(write(tmp_path, "p.txt", original))] == [
        line for line in text.split("\n") if line.strip()
    ]
    assert "line 1, column 9: " in refused(write(tmp_path, "p.txt", damaged))
    assert "line 2, column 9: " in refused(write(tmp_path, "p.csv", b"prompt\n" + damaged))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the list of COCO captions is not part of the project")
def test_the_coco_list_is_read_as_the_csv_module_reads_it() -> None:
    path = SHARED / "data" / "prompts" / "coco_val2017.csv"
    with path.open(encoding="utf-8", newline="") as file:
        wanted = [(record["image_id"], record["prompt"]) for record in csv.DictReader(file)]
    assert len(wanted) == 5000
    assert [(row.image_id, row.prompt) for row in iter_prompts(path)] == wanted


@pytest.mark.parametrize("text", ["a cafÃ© in Paris, très joli, déjà vu", "the driverâ€™s seat", "20Â°C"])
def test_one_damaged_letter_of_the_usual_kind_is_enough(tmp_path: Path, text: str) -> None:
    assert "read as cp1252" in refused(write(tmp_path, "p.txt", text))


def test_letters_lost_in_conversion_are_refused(tmp_path: Path) -> None:
    assert "line 1, column 4: a replacement character" in refused(write(tmp_path, "p.txt", "caf\ufffd"))


def test_real_text_in_many_scripts_is_not_taken_for_damage() -> None:
    for text in REAL:
        check_text("x", text.encode())
        assert "".join(decode_blocks(text.encode())) == text


REAL = [
    "Ένας δρόμος με βροχή και αντανακλάσεις στο πεζοδρόμιο… «Ωραία», είπε.",
    "ΑΥΤΟΚΙΝΗΤΟΔΡΟΜΟΣ ΜΕ ΣΑΦΕΙΣ ΛΩΡΙΔΕΣ",
    "Тихая сельская дорога, «берёзы» и её ёлки; съёмка – ночь…",
    "Її під'їзд і вулиця в Києві, ЇЇ ВУЛИЦЯ",
    "Ein Fußgängerüberweg „Größe“ — ÄÖÜ ß – 20 °C, 5 €",
    "L’été à « Orléans », où l’œuvre d’Éric s’élève… ÇA, C’EST L’ÂME",
    "O coração da irmã, “IRMÔ, ação, pão e maçã",
    "Příliš žluťoučký kůň úpěl ďábelské ódy ŽLUŤOUČKÝ",
    "Zażółć gęślą jaźń ŻÓŁĆ ŁÓDŹ",
    "đường phố mưa với ánh phản chiếu ĐƯỜNG PHỐ Â Ã Ê Ô",
    "┌─┬─┐ │ ├ ┼ ┤ └─┴─┘ ░▒▓█",
    "雨の通り、歩道の反射", "거리의 자동차", "湿滑的街道", "ถนนที่ฝนตก", "שביל כפרי", "شارع ممطر", "बारिश वाली सड़क",
]  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ({"prompt": ["a", "b\0c"]}, "line 2, column 1: a NUL character in prompt"),
        ({"prompt": ["a", None]}, "line 2, column 1: the prompt is None"),
        ({"prompt": ["a"], "seed": [1.5]}, "line 1, column 1: seed is 1.5"),
        ({"prompt": ["a"] * 5000, "seed": [*range(4999), -1]}, "line 5000, column 1: seed is -1"),
        ({"captions": ["a"]}, "no prompt column among 'captions' (nearest: 'caption')"),
        ({"prompt": ["cafÃ©"]}, "line 1, column 1: in prompt: 'Ã©' looks like"),
    ],
)
def test_faulty_parquet_is_refused_with_its_row(tmp_path: Path, columns: dict[str, list[object]], found: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), tmp_path / "p.parquet")
    assert found in refused(tmp_path / "p.parquet")


def test_parquet_that_is_broken_inside_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    letters = pyarrow.array([b"a", b"b\xff"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"prompt": letters}), tmp_path / "p.parquet")
    assert "line 2, column 1: byte 0xff is not UTF-8" in refused(tmp_path / "p.parquet")
    parquet.write_table(pyarrow.table([["a"], ["b"]], names=["prompt", "prompt"]), tmp_path / "p.parquet")
    assert "the column 'prompt' appears twice" in refused(tmp_path / "p.parquet")
    parquet.write_table(pyarrow.table({"prompt": [str(n) * 20 for n in range(9999)]}), tmp_path / "p.parquet")
    data = bytearray((tmp_path / "p.parquet").read_bytes())
    data[100:2000] = bytes(1900)
    assert "is not a Parquet file" in refused(write(tmp_path, "p.parquet", bytes(data)))


@pytest.mark.parametrize("ending", ["csv", "txt", "jsonl", "parquet"])
def test_a_file_is_known_by_the_hash_of_its_bytes_and_gives_its_rows_again(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"p.{ending}"
    if ending == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"prompt": ["a", "b"]}), path)
    else:
        texts = {"csv": "prompt\r\na\r\nb", "txt": "a\nb", "jsonl": '{"prompt": "a"}\n{"prompt": "b"}'}
        path.write_bytes(codecs.BOM_UTF8 + texts[ending].encode())
    file = PromptFile.open(path)
    assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (file.name, file.format) == (str(path), ending)
    assert list(file.rows()) == list(file.rows()) == read_prompts(path)
    assert [row.prompt for row in file.rows()] == ["a", "b"]
    assert len(repr(file)) < 300 + len(str(path)), "the bytes stay out of logs"


def test_rows_before_a_faulty_one_can_be_had_and_the_encoding_is_checked_first(tmp_path: Path) -> None:
    rows = iter_prompts(write(tmp_path, "p.csv", "prompt,seed\na,1\nb,2\nc,x\n"))
    assert [row.prompt for row in itertools.islice(rows, 2)] == ["a", "b"]
    with pytest.raises(InputError, match="line 4"):
        next(rows)
    with pytest.raises(InputError, match="line 4, column 1: byte 0xff"):
        iter_prompts(write(tmp_path, "p.csv", b"prompt,seed\na,1\nb,x\n\xff\n"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "letters", ["a street after the rain, with reflections and a red car", "비 온 뒤의 거리 \U0001f697"]
)
def test_a_million_rows_take_seconds_and_little_more_than_their_bytes(tmp_path: Path, letters: str) -> None:
    text = "image_id,prompt,seed\n" + "".join(f'{number:012d},"{letters}",{number}\n' for number in range(1_000_000))
    path = write(tmp_path, "p.csv", text)
    script = """
import re, sys, time
from pathlib import Path
from halation.prompt_files import iter_prompts
start = time.process_time()
assert sum(1 for _ in iter_prompts(sys.argv[1])) == 1_000_000
assert time.process_time() - start < 30, time.process_time() - start
peak = int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text()).group(1)) * 1024
assert peak - Path(sys.argv[1]).stat().st_size < 100 * 2**20, peak
"""
    assert subprocess.run([sys.executable, "-c", script, str(path)], check=False).returncode == 0


def test_other_kinds_of_files_are_refused(tmp_path: Path) -> None:
    assert "ends with 'docx'" in refused(write(tmp_path, "p.docx", "a"))
    with pytest.raises(InputError, match="the format 'xml'"):
        read_prompts("-", format="xml")
    assert "is not a Parquet file" in refused(write(tmp_path, "p.parquet", "prompt\na\n"))
    assert "no such file" in refused(tmp_path / "missing.csv")
    assert "has no prompts" in refused(write(tmp_path, "p.txt", "\n \n"))
    (tmp_path / "folder.csv").mkdir()
    assert "is a folder" in refused(tmp_path / "folder.csv")


def test_parquet_without_pyarrow_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match="pip install pyarrow"):
        read_prompts(write(tmp_path, "p.parquet", b"PAR1"))


def test_standard_input_is_read_as_text_or_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("prompt\n거리\n".encode())))
    assert [row.prompt for row in read_prompts("-")] == ["prompt", "거리"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("prompt\n거리\n".encode())))
    assert [row.prompt for row in read_prompts("-", format="csv")] == ["거리"]
    content = '{"prompt": "거리"}\n'.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    file = PromptFile.open("-", format="jsonl")
    assert file.sha256 == hashlib.sha256(content).hexdigest()
    assert [row.prompt for row in file.rows()] == [row.prompt for row in file.rows()] == ["거리"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"prompt\na,b\n")))
    with pytest.raises(InputError, match="standard input, line 2, column 1: 2 fields"):
        read_prompts("-", format="csv")


def test_prompts_from_flags_come_before_those_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "p.txt", "c\nd\n")
    assert collect_prompts(["a", "b"], (), path) == (("a", "b", "c", "d"), ())
    assert collect_prompts(["a"], (), None) == (("a",), ())
    assert collect_prompts([], (), None) == ((), ())


def test_reading_prompts_needs_no_torch_and_no_numpy() -> None:
    script = "import sys, halation.prompt_files; sys.exit(bool({'torch', 'numpy', 'PIL'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_columns_that_mean_nothing_are_listed(tmp_path: Path) -> None:
    path = write(tmp_path, "p.csv", "prompt,cfg,seed,num_steps\na cat,7,1,20\n")
    assert PromptFile.open(path).ignored_columns == ("cfg", "num_steps")
    assert PromptFile.open(write(tmp_path, "q.csv", "image_id,caption\n1,a cat\n")).ignored_columns == ()


@pytest.mark.parametrize(("text", "kind"), [("image_id,prompt\n1,a cat\n", "csv"), ('{"prompt": "a cat"}\n', "jsonl")])
def test_a_table_on_standard_input_is_not_taken_for_prompts(
    monkeypatch: pytest.MonkeyPatch, text: str, kind: str
) -> None:
    def given() -> io.TextIOWrapper:
        return io.TextIOWrapper(io.BytesIO(text.encode()))

    monkeypatch.setattr("sys.stdin", given())
    with pytest.raises(InputError, match=f"--prompts_format {kind}"):
        PromptFile.open("-")
    monkeypatch.setattr("sys.stdin", given())
    assert [row.prompt for row in PromptFile.open("-", kind).rows()] == ["a cat"]


def test_a_prompt_with_a_comma_on_standard_input_is_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a cat, red, on a mat\n")))
    assert [row.prompt for row in PromptFile.open("-").rows()] == ["a cat, red, on a mat"]


@pytest.mark.parametrize(
    ("values", "is_file"),
    [
        (("a red car",), False),
        (("a red car", "rain"), False),
        (("there.txt",), True),
        (("there.txt", "rain"), False),
        (("folder",), False),
        (("-",), True),
        (("missing.csv",), True),
        (("lists/missing",), True),
        (("/missing file.txt",), True),
        (("a sign that reads end.txt",), False),
        (("day and/or night",), False),
        (("",), False),
        ((), False),
        (("x" * 5000,), False),
        (("a\0b",), False),
    ],
)
def test_prompts_are_one_file_or_texts(
    values: tuple[str, ...], is_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.txt").write_text("from a file\n")
    (tmp_path / "folder").mkdir()
    assert is_prompt_file(values) is is_file


def test_texts_of_the_command_line_are_prompts_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = ('a "red" car, at night', "two\nlines", "", " grün ")
    assert [row.prompt for row in PromptFile.from_values(texts).rows()] == list(texts)
    (tmp_path / "there.txt").write_text("from a file\n")
    assert [row.prompt for row in PromptFile.from_values(("there.txt",)).rows()] == ["from a file"]
    assert collect_prompts(("there.txt",), (), None) == (("from a file",), ())
    assert collect_prompts(("a", "b"), (), "there.txt") == (("a", "b", "from a file"), ())
    with pytest.raises(InputError, match=r"no such file: missing\.txt"):
        PromptFile.from_values(("missing.txt",))
    with pytest.raises(InputError, match="--prompts"):
        PromptFile.from_values(("caf\udce9",))
