"""What evaluations in training draw, compare with, refuse and leave behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from halation import work_division
from halation.data.image_folder import ImageFolder
from halation.data.streets import Streets
from halation.errors import InputError
from halation.evaluation.drawn_images import CallbackSink
from halation.images.png_codec import read_png
from halation.runs.run_folder import RunFolder
from halation.sampling.all_rank_sampler import SampleSettings
from halation.training import command as job
from halation.training import evaluation
from halation.training.config import TrainConfig
from halation.training.evaluation import evaluation_settings, open_evaluation_data
from halation.training.periodic_tasks import CheckpointSchedule, remove_reports_after
from support import rank_functions


def config(folder: Path, **changes: Any) -> TrainConfig:
    settings = {"eval_every": 1, "eval_images": 20, "eval_reference": 16, "eval_batch_size": 4}
    return job.resolve_config(rank_functions.small_config(folder, **settings | changes))


def settings_of(folder: Path) -> SampleSettings:
    asked = config(folder)
    samples = SampleSettings(
        prompts=("a street",),
        height=asked.image_size[0],
        width=asked.image_size[1],
        steps=asked.sample_steps,
        seed=asked.sample_seed,
        same_seed=True,
        sampler=asked.sampler,
        guidance_scale=3.0,
        batch_size=asked.sample_batch_size,
        dtype=asked.dtype,
    )
    return evaluation_settings(samples, ("one", "two", "three"), num_images=7, steps=5, batch_size=4)


def images(folder: Path, num: int, *, captions: str = "", classes: tuple[str, ...] = ()) -> ImageFolder:
    for index in range(num):
        place = folder / classes[index % len(classes)] if classes else folder
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((32, 32, 3), index, np.uint8)).save(place / f"{index:02d}.png")
    if not classes:
        rows = [
            json.dumps({"file_name": f"{index:02d}.png", "text": captions or f"grey {index}"}) for index in range(num)
        ]
        (folder / "metadata.jsonl").write_text("\n".join(rows))
    return ImageFolder(folder, 32, 32, validation_images=0)


# -- what is drawn


def test_prompts_go_round_and_every_image_has_a_seed_of_its_own(tmp_path: Path) -> None:
    specs = settings_of(tmp_path).specs()
    assert [spec.prompt for spec in specs] == ["one", "two", "three", "one", "two", "three", "one"]
    assert [spec.seed for spec in specs] == list(range(42, 49)), "although samples were told to share one"
    assert {spec.steps for spec in specs} == {5}


def test_whole_batches_are_handed_on_by_their_indices_and_others_are_not(tmp_path: Path) -> None:
    taken: list[tuple[range, list[int]]] = []
    handing = CallbackSink(lambda indices, pixels: taken.append((indices, [int(image[0]) for image in pixels])))
    for batch in work_division.make_batches(settings_of(tmp_path).specs(), 4):
        rows = [{"index": spec.index} for spec in batch.real_specs]
        drawn = {number: np.array([row["index"]]) for number, row in enumerate(rows)}
        handing.put(batch, drawn, rows)
        handing.put(batch, {number: drawn[number] for number in drawn if number}, rows)
    handing.finish()
    assert taken == [(range(0, 4), [0, 1, 2, 3]), (range(4, 7), [4, 5, 6])]


@given(st.integers(1, 300), st.integers(0, 100), st.integers(1, 300))
def test_evaluations_fall_on_multiples_and_on_the_last_step_and_move_no_save(
    n_steps: int, every: int, step: int
) -> None:
    dates = {"n_steps": n_steps, "ckpt_every": 7, "ckpt_latest_every": 0, "num_images": 1000, "global_batch": 3}
    cadence = CheckpointSchedule(**dates, eval_every=every)
    assert cadence.should_evaluate(step) == (every > 0 and (step % every == 0 or step == n_steps))
    assert cadence.save_kind(step) == CheckpointSchedule(**dates).save_kind(step)


# -- what it is compared with


def test_streets_are_compared_with_held_out_scenes_by_their_captions(tmp_path: Path) -> None:
    streets = Streets(32, 32)
    found = open_evaluation_data(config(tmp_path), streets, RunFolder(tmp_path))
    assert (len(found.reference), len(found.prompts)) == (16, 16)
    for index in (0, 15):
        assert np.array_equal(found.reference.load(index).pixels, streets.validation(index).pixels)
        assert found.prompts[index] == streets.validation(index).caption


def test_a_folder_is_compared_with_what_it_trains_on_by_captions_or_classes(tmp_path: Path) -> None:
    worded, sorted_ = images(tmp_path / "a", 20), images(tmp_path / "b", 20, classes=("cat", "dog"))
    for source, prompts in ((worded, {f"grey {index}" for index in range(20)}), (sorted_, {"cat", "dog"})):
        asked = config(tmp_path / "run", data=source.name, sample_prompts=())
        found = open_evaluation_data(asked, source, RunFolder(tmp_path / "run"))
        assert len(found.reference) == 16
        assert set(found.prompts) <= prompts
        assert found.prompts[3] == source.prompt(3)
        assert np.array_equal(found.reference.load(3).pixels, source.train(3).pixels)
        assert (asked.eval_extractor, asked.eval_metrics) == ("inception", ("fd", "kid", "prdc"))


# -- what is refused


def test_fid_by_the_streets_network_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fid with --eval_extractor streets"):
        config(tmp_path, eval_metrics=("fid",))
    assert job.resolve_config(rank_functions.small_config(tmp_path, eval_metrics=("fid",))).eval_metrics == ("fid",), (
        "never asked"
    )


@pytest.mark.parametrize(("name", "value"), [("eval_images", 4), ("eval_batch_size", 0), ("eval_every", -1)])
def test_numbers_out_of_range_are_refused(tmp_path: Path, name: str, value: int) -> None:
    with pytest.raises(InputError, match=f"--{name} {value}"):
        config(tmp_path, **{name: value})


def test_metrics_of_words_are_refused_where_there_are_classes(tmp_path: Path) -> None:
    source = images(tmp_path / "data", 20, classes=("cat", "dog"))
    asked = config(tmp_path / "run", data=source.name, eval_metrics=("kid", "clip"))
    with pytest.raises(InputError, match=r"--eval_metrics clip, but .* has classes"):
        open_evaluation_data(asked, source, RunFolder(tmp_path / "run"))


def test_agreement_is_refused_where_no_caption_speaks_of_streets(tmp_path: Path) -> None:
    asked = {"eval_metrics": ("agreement",), "eval_extractor": "streets"}
    source = images(tmp_path / "grey", 20)
    with pytest.raises(InputError, match="names anything the streets network detects"):
        open_evaluation_data(config(tmp_path / "run", data=source.name, **asked), source, RunFolder(tmp_path / "run"))
    source = images(tmp_path / "street", 20, captions="A rural road with two cars")
    assert open_evaluation_data(
        config(tmp_path / "run", data=source.name, **asked), source, RunFolder(tmp_path / "run")
    ).prompts


def test_a_handful_of_images_is_nothing_to_compare_with(tmp_path: Path) -> None:
    source = images(tmp_path / "data", 5)
    with pytest.raises(InputError, match="at least 16 real images"):
        open_evaluation_data(config(tmp_path / "run", data=source.name), source, RunFolder(tmp_path / "run"))


# -- what is left behind


def test_lines_plot_and_what_is_forgotten(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    folder = tmp_path / "evaluation"
    (folder / "reference").mkdir(parents=True)
    numbers = {"std": None, "better": "lower", "num_generated": 4, "num_reference": 4, "few": True, "extractor": "x"}
    rows = []
    for step in (10, 20):
        found = {"fd": {**numbers, "name": "FD-x", "value": float(step), "seconds": 1.0, "note": "not in a line"}}
        lines = evaluation.evaluation_rows({"step": step, "metrics": found})
        assert [(line["step"], line["metric"], line["value"]) for line in lines] == [(step, "FD-x", step)]
        rows += [{"step": step, "loss": 1.0}, {"step": step, "metric": "heldout_loss", "value": 1.0}, *lines]
        evaluation.publish_plot(run, rows)
        assert (folder / "metrics.png").exists() == (step == 20), "one point is no curve"
        (folder / f"step_{step:07d}.json").write_text("{}")
    assert read_png(folder / "metrics.png")[0].ndim == 3
    (folder / "step_0000020").mkdir()
    remove_reports_after(run, 10)
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.png", "reference", "step_0000010.json"]
    remove_reports_after(run, -1)
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.png", "reference"]
