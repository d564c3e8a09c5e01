"""Laws of a generation: images and metadata depend on specs, model and batch alone."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import pytest

from support import run_readers, tiny_models
from support.commands import (
    assert_generated,
    finish,
    fired,
    generate,
    generate_log,
    run_generate,
    undisturbed_generation,
)


def mixed_rows(path: Path, num_rows: int = 21) -> Path:
    """Rows with their own sizes, steps, guidance, seeds and negative prompts; no group fills its last batch."""
    generator = random.Random(3)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image_id", "prompt", "seed", "negative_prompt", "width", "height", "steps", "guidance_scale"])
        for number in range(num_rows):
            width, height = generator.choice([(24, 16), (16, 24), (32, 32)])
            steps, guidance = generator.choice([(2, 4.0), (3, 4.0), (2, 1.0)])
            seed = number * 7 if number % 3 else ""
            writer.writerow(
                [
                    f"id{number}",
                    f"row {number}, a cat",
                    seed,
                    "dog" if number % 4 else "",
                    width,
                    height,
                    steps,
                    guidance,
                ]
            )
    return path


SHUFFLED = ";".join(
    f"paint:{number}:sleep={seconds}:{worker}"
    for worker in range(3)
    for number, seconds in enumerate(random.Random(worker).choices([0, 0.02, 0.3], k=9), 1)
    if seconds
)


def test_any_number_of_workers_and_any_order_of_arrival_leave_the_same_bytes(tmp_path: Path) -> None:
    prompts = mixed_rows(tmp_path / "prompts.csv")
    states, workers = [], []
    for nproc, fault in [(1, ""), (2, SHUFFLED), (3, SHUFFLED), (3, "")]:
        folder = tmp_path / f"{len(states)}"
        folder.mkdir()
        assert run_generate(folder, fault, prompts=prompts, nproc=nproc) == 0, generate_log(folder)
        assert bool(fired(folder / "log")) == bool(fault)
        assert run_readers.generation_problems(folder / "out", 21) == []
        states.append(run_readers.images_and_metadata(folder / "out"))
        workers.append({row["worker"] for row in run_readers.ledger_rows(folder / "out")})
    assert all(state == states[0] for state in states)
    assert len(states[0][0]) == 21
    assert [len(names) > 1 for names in workers[:3]] == [False, True, True], "several did take part"


def test_videos_are_the_same_for_any_number_of_workers_and_damage_is_repaired(tmp_path: Path) -> None:
    """Videos and their frames are the same for any number of workers, and damage is repaired."""

    def files(folder: Path) -> dict[str, bytes]:
        names = [*(folder / "out").rglob("*.png"), *(folder / "out").rglob("*.mp4")]
        return {str(path.relative_to(folder / "out")): path.read_bytes() for path in names}

    settings = {"prompts": "one\ntwo\nthree\n", "num_frames": 3, "height": 32, "width": 32, "batch_size": 2}
    for nproc in (1, 2):
        folder = tmp_path / str(nproc)
        folder.mkdir()
        assert (
            run_generate(folder, "picture.rename:2:kill:0:once" if nproc == 2 else "", nproc=nproc, **settings) == 0
        ), generate_log(folder)
        assert run_readers.leftovers(folder / "out") == []
    whole = files(tmp_path / "1")
    assert len(whole) == 3 * 4
    assert files(tmp_path / "2") == whole
    frame = tmp_path / "1" / "out" / sorted(whole)[1]
    assert frame.name.startswith("frame_")
    frame.write_bytes(frame.read_bytes()[:-1])
    (tmp_path / "1" / "out" / sorted(name for name in whole if name.endswith(".mp4"))[2]).unlink()
    assert run_generate(tmp_path / "1", verify=True, nproc=1, **settings) == 0, generate_log(tmp_path / "1")
    assert "2 generated now" in generate_log(tmp_path / "1")
    assert files(tmp_path / "1") == whole


def test_each_image_says_in_its_text_what_metadata_and_the_file_of_prompts_say(tmp_path: Path) -> None:
    from PIL import Image

    prompts = mixed_rows(tmp_path / "prompts.csv")
    assert run_generate(tmp_path, prompts=prompts) == 0
    with open(prompts, newline="") as file:
        rows = list(csv.DictReader(file))
    for row, line in zip(rows, run_readers.metadata_rows(tmp_path / "out"), strict=True):
        with Image.open(tmp_path / "out" / line["file_name"]) as image:
            spec = json.loads(image.text["halation"])
        for name in ("prompt", "negative_prompt", "seed", "width", "height", "steps", "guidance_scale"):
            assert spec[name] == line[name]
            assert row[name] == "" or str(spec[name]) == row[name]
        assert line["file_name"] == f"{row['image_id']}_seed{spec['seed']}.png"
        assert spec["seed"] == int(row["seed"] or 42 + line["index"])


def test_the_batch_may_be_drawn_in_parts(tmp_path: Path) -> None:
    """The test card knows no rounding, so that a micro-batch changes the way and not the images."""
    assert run_generate(tmp_path, micro_batch=3) == 0
    assert_generated(tmp_path)
    assert {row["micro_batch"] for row in run_readers.ledger_rows(tmp_path / "out")} == {0}
    assert run_readers.summary(tmp_path / "out")["smaller_micro_batches"] == 0
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())["fixed"]["micro_batch"] == 3


def test_a_folder_drawn_in_two_calls_is_the_folder_of_one(tmp_path: Path) -> None:
    assert run_generate(tmp_path, num_samples=7) == 0, generate_log(tmp_path)
    assert run_readers.generation_problems(tmp_path / "out", 7) == []
    assert run_generate(tmp_path, num_samples=18, nproc=3) == 0, generate_log(tmp_path)
    assert run_generate(tmp_path) == 0, generate_log(tmp_path)
    assert_generated(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["pixart"])
def test_neighbours_workers_and_interruptions_do_not_reach_a_real_models_images(tmp_path: Path, family: str) -> None:
    """Row 1 has other neighbours in another list, and is drawn in a batch of fillers when it alone is missing."""
    model = tiny_models.built(family)
    settings = {
        "model_path": model,
        "height": 32,
        "width": 32,
        "guidance_scale": 4.0,
        "micro_batch": 2,
        "batch_size": 2,
    }
    prompts = "a red cat on the street\ntwo dogs\na house at night\n"
    for number, text in enumerate((prompts, prompts.replace("cat", "car"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert finish(generate(folder, text, nproc=number + 1, **settings), folder / "log") == 0, generate_log(folder)
        assert run_readers.generation_problems(folder / "out", 3) == []
    one, other = (run_readers.images_and_metadata(tmp_path / str(number) / "out")[0] for number in range(2))
    first, *rest = sorted(one)
    assert one[first] != other[first], "the prompt reaches the image"
    assert {name: other[name] for name in rest} == {name: one[name] for name in rest}
    (tmp_path / "0" / "out" / rest[0]).unlink()
    assert finish(generate(tmp_path / "0", prompts, nproc=1, **settings), tmp_path / "0" / "log") == 0
    assert run_readers.images_and_metadata(tmp_path / "0" / "out")[0] == one


def test_the_folder_of_a_call_nobody_disturbed_holds_every_prompt_once() -> None:
    images, _metadata = undisturbed_generation()
    assert list(images) == [f"{index + 1:06d}_seed{index + 42}.png" for index in range(24)]
    assert len(set(images.values())) == 24
