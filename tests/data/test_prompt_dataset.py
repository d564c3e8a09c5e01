"""Laws of a list of prompts as a source, and of telling it from images."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from halation.data.prefetch import BatchPrefetcher, ShuffledOrder
from halation.data.prompt_dataset import PromptDataset
from halation.distillation.command import has_images
from halation.errors import InputError

TEXTS = ["a car, red", "비 오는 거리", "  a tram at night"]


def write(folder: Path, kind: str) -> Path:
    path = folder / f"prompts.{kind}"
    if kind == "txt":
        path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(TEXTS).encode() + b"\n\n")
    elif kind == "csv":
        path.write_text("id,prompt\n" + "".join(f'{number},"{text}"\n' for number, text in enumerate(TEXTS)))
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps({"prompt": text}) for text in TEXTS))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"prompt": TEXTS}), path)
    return path


@pytest.mark.parametrize("kind", ["txt", "csv", "jsonl", "parquet"])
def test_every_kind_of_file_gives_the_same_source(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind)
    assert not has_images(str(path))
    source = PromptDataset(str(path), 16, 32)
    (tmp_path / "other").mkdir()
    assert source.fingerprint == PromptDataset(write(tmp_path / "other", "txt"), 16, 32).fingerprint
    assert [source.train(index).caption for index in range(source.num_train)] == TEXTS
    assert list(source.all_captions()) == list(source.captions()) == TEXTS
    assert (source.num_validation, source.class_names) == (0, ())
    assert source.train(0).pixels.shape == (16, 32, 3)
    with pytest.raises(IndexError, match="no validation images"):
        source.validation(0)


def test_more_items_than_prompts_go_round_and_fewer_prompts_may_be_taken(tmp_path: Path) -> None:
    path = str(write(tmp_path, "txt"))
    source = PromptDataset(path, 8, 8, num_items=7)
    assert [source.caption(index) for index in range(source.num_train)] == [TEXTS[index % 3] for index in range(7)]
    for index in (-1, 7):
        with pytest.raises(IndexError, match="which has 7"):
            source.train(index)
    assert PromptDataset(path, 8, 8, num_items=2).num_train == 3
    first = PromptDataset(path, 8, 8, max_prompts=2, num_items=3)
    assert [first.caption(index) for index in range(3)] == [TEXTS[0], TEXTS[1], TEXTS[0]]


def test_the_fingerprint_follows_the_texts_their_order_the_items_and_the_size(tmp_path: Path) -> None:
    def fingerprint(texts: list[str], height: int = 8, num_items: int = 0) -> str:
        (tmp_path / "p.txt").write_text("\n".join(texts))
        found = PromptDataset(str(tmp_path / "p.txt"), height, 8, num_items=num_items).fingerprint
        return json.dumps(found, sort_keys=True)

    different = [fingerprint(["a", "b"]), fingerprint(["b", "a"]), fingerprint(["a", "b", "b"]), fingerprint(["ab"])]
    different += [fingerprint(["a", "b"], height=16), fingerprint(["a", "b"], num_items=4)]
    assert len(set(different)) == len(different)
    assert fingerprint(["a", "b"], num_items=2) == different[0]


def test_a_loader_takes_prompts_without_making_images(tmp_path: Path) -> None:
    source = PromptDataset(str(write(tmp_path, "txt")), 4096, 4096, num_items=1000)
    positions = [(0, list(range(500))), (1, list(range(500, 1000)))]
    seen = []
    with BatchPrefetcher(source, ShuffledOrder(3, source.num_train), positions, memory_bytes=2**30) as batches:
        for batch in batches:
            assert batch["captions"] == [source.caption(int(index)) for index in batch["indices"]]
            assert batch["pixels"].shape == (500, 4096, 4096, 3)  # 25 GB, were they there
            assert (batch["labels"] == -1).all()
            assert (batch["originals"] == 4096).all()
            seen += batch["indices"].tolist()
    assert sorted(seen) == list(range(1000))


def test_images_are_not_taken_for_prompts(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    for header in ("image,caption", "File Name,prompt", "prompt,path"):
        (tmp_path / "list.csv").write_text(f"{header}\na.png,a.png\n")
        assert has_images(str(tmp_path / "list.csv"))
    (tmp_path / "folder.txt").mkdir()
    for words in ("streets", str(tmp_path), str(tmp_path / "folder.txt"), str(tmp_path / "absent")):
        assert has_images(words)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.txt", "", "has no prompts"),
        ("blank.txt", "\n  \n\n", "has no prompts"),
        ("empty.csv", "", "no line with text"),
        ("header.csv", "prompt,seed\n", "has no prompts"),
        ("other.csv", "words,seed\na,1\n", "no prompt column"),
        ("broken.jsonl", '{"prompt": "a"}\n{"prompt"\n', "line 2"),
        ("prompts.md", "a car\n", "ends with '.md'"),
    ],
)
def test_files_without_prompts_are_refused_by_name(tmp_path: Path, name: str, content: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(content)

    def opened() -> None:
        assert not has_images(str(path))
        PromptDataset(str(path), 8, 8)

    with pytest.raises(InputError) as caught:
        opened()
    assert said in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["gone.txt", "gone.csv"])
def test_a_file_that_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    assert not has_images(str(tmp_path / name))
    with pytest.raises(InputError, match="no such file"):
        PromptDataset(str(tmp_path / name), 8, 8)


def test_negative_numbers_are_our_mistake(tmp_path: Path) -> None:
    path = str(write(tmp_path, "txt"))
    for numbers in ({"num_items": -1}, {"max_prompts": -2}):
        with pytest.raises(ValueError, match="at least 0"):
            PromptDataset(path, 8, 8, **numbers)
