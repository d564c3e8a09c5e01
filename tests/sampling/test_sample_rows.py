"""Prompt files whose rows have their own size, steps, guidance, negative prompt and seed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from halation import cli, work_division
from halation.errors import InputError
from halation.models.dit.denoiser import create_dit
from halation.models.pipelines.training.denoiser import PipelineDenoiser
from halation.prompt_files import collect_prompts, parse_rows
from halation.sampling.all_rank_sampler import SampleSettings
from support import rank_functions, run_readers, tiny_models

CSV = "prompt,seed,steps,guidance_scale,negative_prompt,image_id\na car,7,,,,x\na tree,,3,1.5,a dog,y\na house,,,,,z\n"
OWN = ({"seed": 7}, {"steps": 3, "guidance_scale": 1.5, "negative_prompt": "a dog"}, {})


def settings(prompts: Sequence[str], rows: Sequence[dict[str, Any]], **changes: Any) -> SampleSettings:
    common: dict[str, Any] = {"height": 32, "width": 32, "steps": 2, "seed": 42, "same_seed": False}
    common |= {"sampler": "euler", "guidance_scale": 2.0, "batch_size": 2, "dtype": "fp32"}
    return SampleSettings(prompts=tuple(prompts), rows=tuple(rows), **common | changes)


def test_rows_of_a_file_set_what_they_name_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "prompts.csv").write_text(CSV)
    prompts, rows = collect_prompts(["first"], (), tmp_path / "prompts.csv")
    assert prompts == ("first", "a car", "a tree", "a house")
    assert parse_rows(prompts, rows) == ({}, *OWN)
    assert parse_rows(("first", "another"), rows) == (), "rows belong to their prompts"
    specs = settings(prompts, parse_rows(prompts, rows)).specs()
    assert [spec.seed for spec in specs] == [42, 7, 44, 45]
    assert [(spec.steps, spec.guidance_scale, spec.negative_prompt) for spec in specs] == [
        *[(2, 2.0, "")] * 2, (3, 1.5, "a dog"), (2, 2.0, ""),
    ]  # fmt: skip
    plain, _ = collect_prompts((), (), tmp_path / "prompts.csv")
    assert settings(plain, ()).as_json().keys() == settings(plain, OWN).as_json().keys() - {"rows"}
    assert SampleSettings.from_json(json.loads(json.dumps(settings(plain, OWN).as_json()))) == settings(plain, OWN)


def test_a_batch_has_one_shape_and_one_guidance() -> None:
    specs = settings("abcd", [{}, {"steps": 3}, {"guidance_scale": 1.0}, {}]).specs()
    batches = work_division.make_batches(specs, 2, by_guidance=True)
    assert [[spec.index for spec in batch.real_specs] for batch in batches] == [[0, 3], [1], [2]]


def test_equal_keys_are_grouped_in_the_order_of_their_first() -> None:
    assert work_division.group_equal("abacb") == [[0, 2], [1, 4], [3]]
    assert work_division.group_equal("") == []


@pytest.mark.parametrize(
    ("row", "changes", "found"),
    [
        ({"height": 48}, {}, "an image of 48 x 32"),
        ({"negative_prompt": "a dog", "guidance_scale": 1.0}, {}, "negative_prompt in its row, with"),
        ({"negative_prompt": "a dog"}, {"guidance_scale": 1.0}, "at guidance 1"),
        ({"steps": 3}, {"distilled": {"objective": "dmd", "steps": 2}}, "with a model that was distilled"),
    ],
)
def test_a_row_without_effect_is_refused_by_its_number(
    row: dict[str, Any], changes: dict[str, Any], found: str
) -> None:
    model = create_dit("tiny", height=32, width=32, captions=["a car"], patch_size=8).init_weights(0)
    settings(["a car", "a tree"], [{}, {"seed": 3}], **changes).check_rows(model)
    with pytest.raises(InputError, match=re.escape(found)) as caught:
        settings(["a car", "a tree"], [{}, row], **changes).check_rows(model)
    assert caught.value.found.startswith("prompt 2 ('a tree'): ")


def test_training_and_sampling_read_the_same_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A training samples by the rows of its file, and `halation sample` gives the same images."""
    (tmp_path / "prompts.csv").write_text(CSV)
    run = ["train", "--model", "tiny", "--image_size", "32", "--patch_size", "8", "--batch_size", "2", "--n_steps", "1"]
    run += ["--validation_images", "0", "--report_to", "none", "--progress", "none", "--nproc", "1"]
    run += ["--sample_steps", "2", "--output_dir", str(tmp_path / "run"), "--sample_prompts_file"]
    assert cli.main([*run, str(tmp_path / "prompts.csv")]) == 0
    rows = run_readers.sample_rows(tmp_path / "run", 1)
    assert [(row["seed"], row["steps"], row["guidance_scale"], row["negative_prompt"]) for row in rows] == [
        (7, 2, 3.0, ""), (43, 3, 1.5, "a dog"), (44, 2, 3.0, ""),
    ]  # fmt: skip
    published = run_readers.sample_files(tmp_path / "run/samples/step_0000001")
    sample = ["sample", "--checkpoint", str(tmp_path / "run"), "--progress", "none", "--nproc", "1", "--output_dir"]
    assert cli.main([*sample, str(tmp_path / "again")]) == 0
    assert cli.main([*sample, str(tmp_path / "by_file"), "--prompts_file", str(tmp_path / "prompts.csv")]) == 0
    plain = tmp_path / "plain.txt"
    plain.write_text("a car\na tree\na house\n")
    assert cli.main([*sample, str(tmp_path / "plain"), "--prompts_file", str(plain)]) == 0
    assert run_readers.sample_files(tmp_path / "again") == published
    assert run_readers.sample_files(tmp_path / "by_file") == published
    equal = [(tmp_path / "plain" / name).read_bytes() == published[name] for name in sorted(published) if "_0" in name]
    assert equal == [False, True, False, True, True, True], "a car and a tree have settings of their own"
    (tmp_path / "wide.csv").write_text("prompt,width\na car,64\n")
    capsys.readouterr()
    assert cli.main([*sample, str(tmp_path / "wide"), "--prompts_file", str(tmp_path / "wide.csv")]) == 2
    assert "prompt 1 ('a car'): an image of 32 x 64" in capsys.readouterr().err


def test_a_guidance_that_a_model_without_it_would_ignore_is_refused(tmp_path: Path) -> None:
    folder = tiny_models.flux(tmp_path / "schnell", guidance_embeds=False)
    model = PipelineDenoiser.open(folder, dtype="fp32", weights_dtype="fp32", lora=None, height=32, width=32)
    assert model.default_steps == 4
    settings(["a car"], [{"steps": 3}]).check_rows(model)
    with pytest.raises(InputError, match="guidance_scale in its row, with FLUX"):
        settings(["a car"], [{"guidance_scale": 3.0}]).check_rows(model)


def test_a_distillation_reads_only_the_seeds_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.csv").write_text(CSV)
    (tmp_path / "data.txt").write_text("a car\na tree\n")
    words = ["--teacher_path", str(rank_functions.tiny_teacher()), "--data_path", str(tmp_path / "data.txt")]
    words += ["--report_to", "none", "--progress", "none", "--nproc", "1", "--output_dir", str(tmp_path / "run")]
    assert cli.main(["distill", *words, "--sample_prompts_file", str(tmp_path / "prompts.csv")]) == 2
    assert "guidance_scale, negative_prompt, steps in --sample_prompts_file" in capsys.readouterr().err
