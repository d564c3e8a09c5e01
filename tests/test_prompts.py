"""Prompt files are read exactly, or refused with file, line and column."""

# ruff: noqa: RUF001

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halation.errors import InputError
from halation.prompts import PromptRow, from_flags, read_prompts
from halation.tables import csv_rows, decode

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
    assert "fields where the header has 2 (prompt, seed)" in found


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ('prompt\nx\n"never closed\n', "line 3, column 1: a quote that is never closed"),
        ('prompt,seed\n"a" b,3\n', "line 2, column 4: text after a closing quote"),
        ("prompt,prompt\na,b\n", "line 1, column 1: the column 'prompt' is there twice"),
        ("prompt,seed\na,seven\n", "line 2, column 1: seed is 'seven'"),
        ("prompt,seed\na,1_000\n", "line 2, column 1: seed is '1_000'"),
        ("prompt,guidance_scale\na,nan\n", "line 2, column 1: guidance_scale is 'nan'"),
        ("Prompt,seed\na,1\n", "no prompt column among 'Prompt' (nearest: 'prompt'), 'seed'"),
        ("captions\na\n", "no prompt column among 'captions' (nearest: 'caption')"),
        ("prompt\n", "has no prompts"),
        ("", "line 1, column 1: no line with text"),
    ],
)
def test_faulty_csv_is_refused_where_the_fault_is(tmp_path: Path, content: str, place: str) -> None:
    assert place in refused(write(tmp_path, "p.csv", content))


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ('{"prompt": "a",}', "line 2, column 16: not JSON"),
        ('["a"]', "line 2, column 1: JSON, but a list"),
        ('{"text": "a"}', "line 2, column 1: no prompt column among 'text'"),
        ('{"prompt": null}', "line 2, column 1: the prompt is None"),
        ('{"prompt": 7}', "line 2, column 1: the prompt is 7"),
        ('{"prompt": "a", "prompt": "b"}', "line 2, column 1: the key 'prompt' is there twice"),
        ('{"prompt": "a\\ud83d"}', "line 2, column 1: half of a surrogate pair"),
        ('{"prompt": "a", "seed": 1.5}', "line 2, column 1: seed is 1.5"),
        ('{"prompt": "a", "seed": true}', "line 2, column 1: seed is True"),
        ('{"prompt": "a", "guidance_scale": NaN}', "line 2, column 1: NaN is not JSON"),
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


@pytest.mark.parametrize("text", ["a cafÃ© in Paris, très joli, déjà vu", "the driverâ€™s seat", "20Â°C"])
def test_one_damaged_letter_of_the_usual_kind_is_enough(tmp_path: Path, text: str) -> None:
    assert "read as cp1252" in refused(write(tmp_path, "p.txt", text))


def test_letters_lost_in_conversion_are_refused(tmp_path: Path) -> None:
    assert "line 1, column 4: a replacement character" in refused(write(tmp_path, "p.txt", "caf\ufffd"))


def test_real_text_in_many_scripts_is_not_taken_for_damage() -> None:
    for text in REAL:
        assert decode("x", text.encode()) == text


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


def test_other_kinds_of_files_are_refused(tmp_path: Path) -> None:
    assert "ends with 'docx'" in refused(write(tmp_path, "p.docx", "a"))
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


def test_prompts_from_flags_come_before_those_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "p.txt", "c\nd\n")
    assert from_flags(["a", "b"], path) == ["a", "b", "c", "d"]
    assert from_flags(["a"], None) == ["a"]
    assert from_flags([], None) == []


def test_reading_prompts_needs_no_torch_and_no_numpy() -> None:
    script = "import sys, halation.prompts; sys.exit(bool({'torch', 'numpy', 'PIL'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
