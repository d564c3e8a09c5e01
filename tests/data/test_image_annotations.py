"""CSV files that list images and captions."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from halation.data.image_folder import ImageFolder
from halation.errors import InputError


def refused(table: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        ImageFolder(table, 8, 8)
    assert caught.value.exit_code == 2
    return caught.value


def listed(folder: Path, text: str, num: int = 3) -> Path:
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for index in range(num):
        Image.new("RGB", (20, 12), (index, 30, 60)).save(folder / "pictures" / f"{index}.png")
    (folder / "list.csv").write_text(text)
    return folder / "list.csv"


@pytest.mark.parametrize(
    "columns",
    [
        "file_name,text", "filename,caption", "File,Prompt", "image,description", "image_path,text",
        "Image Path,Caption",
        " path , text ",
    ],
)  # fmt: skip
def test_a_csv_file_lists_images_below_its_folder(tmp_path: Path, columns: str) -> None:
    path = listed(tmp_path, f'{columns}\npictures/2.png,"wet, shiny"\npictures/0.png,dry\n')
    source = ImageFolder(path, 8, 8)
    assert (source.num_train, source.num_validation, source.class_names) == (2, 0, ())
    assert [source.train(index).caption for index in range(2)] == ["dry", "wet, shiny"]
    assert [int(source.train(index).pixels[4, 4, 0]) for index in range(2)] == [0, 2]
    assert source.name == str(path)
    assert source.check().num_checked == 2


def test_the_names_of_the_columns_do_not_matter_to_the_fingerprint(tmp_path: Path) -> None:
    first = ImageFolder(listed(tmp_path / "a", "file_name,text\npictures/1.png,x\n"), 8, 8).fingerprint
    other = ImageFolder(listed(tmp_path / "b", "size,path,prompt\n9,pictures/1.png,x\n"), 8, 8).fingerprint
    assert first == other


def test_the_usual_names_of_columns_go_before_others(tmp_path: Path) -> None:
    path = listed(tmp_path, "path,file_name,prompt,text\nnone,pictures/1.png,no,yes\n")
    assert ImageFolder(path, 8, 8).train(0).caption == "yes"


@pytest.mark.parametrize(
    ("header", "found", "action"),
    [
        (
            "image,path,text",
            "'image' and 'path' could each be the column of files among 'image', 'path', 'text'",
            "'file_name'",
        ),
        ("image,caption,prompt", "'caption' and 'prompt' could each be the column of captions", "to 'text'"),
        ("picture,text,x", "no column of files among 'picture', 'text', 'x'", "rename the right one to 'file_name'"),
        ("file,label,x", "no column of captions among 'file', 'label', 'x'", "rename the right one to 'text'"),
        ("file_name;text", "no column of files among 'file_name;text'", "put commas between"),
        ("text,text,image", "the column 'text' appears twice", "rename or remove"),
    ],
)  # fmt: skip
def test_columns_that_cannot_be_told_are_refused_with_those_found(
    tmp_path: Path, header: str, found: str, action: str
) -> None:
    error = refused(listed(tmp_path, f"{header}\npictures/0.png,a,b\n"))
    assert "list.csv, line 1" in error.found
    assert found in error.found
    assert action in error.action


def test_whole_paths_may_lead_into_the_folder_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, beside = tmp_path / "data", tmp_path / "beside.png"
    Image.new("RGB", (20, 12)).save(beside)
    path = listed(inside, f"path,text\n{inside}/pictures/1.png,x\n")
    assert ImageFolder(path, 8, 8).file_name(0) == "pictures/1.png"
    for name in (str(beside), "../beside.png", f"{inside}/../beside.png", f"{inside}x.png"):
        error = refused(listed(inside, f"path,text\n{name},x\n"))
        assert f"line 2, column 1: path {name!r} is outside the folder" in error.found
        assert (
            "move list.csv into a folder above all its images, or link to their folder and give --follow_links"
            in error.action
        )
    (inside / "link").symlink_to(tmp_path)
    linked = listed(inside, "path,text\nlink/beside.png,x\n")
    with pytest.raises(InputError, match=r"link/beside\.png: it is a link that leads out of"):
        ImageFolder(linked, 8, 8).check()
    monkeypatch.setenv("HALATION_FOLLOW_LINKS", "1")
    assert ImageFolder(linked, 8, 8).check().broken == {}


def test_a_csv_file_that_lacks_something_is_refused(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "none.csv").found
    error = refused(listed(tmp_path, "path,text\npictures/9.png,x\npictures/1.png,y\n"))
    assert "lists 1 file that cannot be found: pictures/9.png (line 2)" in error.found
    assert error.expected == "every path to be a file in that folder"
    assert "lists no images" in refused(listed(tmp_path, "path,text\n")).found
    assert "path is ''" in refused(listed(tmp_path, "path,text\n,x\n")).found
    (tmp_path / "list.csv").write_bytes("path,text\npictures/1.png,caf\xe9\n".encode("latin-1"))
    assert "line 2, column 19: byte 0xe9 is not UTF-8" in refused(tmp_path / "list.csv").found
