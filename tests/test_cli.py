"""The command line answers quickly, takes flags in all spellings, and explains its errors."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from halation import cli
from halation.config import as_json, validate_settings

HALATION = Path(sys.executable).with_name("halation")
TINY = [
    *"--model tiny --image_size 32 --patch_size 8 --batch_size 2".split(),  # noqa: SIM905
    *"--n_steps 2 --ckpt_every 0 --sample_steps 1".split(),  # noqa: SIM905
    *"--validation_images 0 --report_to none --progress none --nproc 1".split(),  # noqa: SIM905
]

Refused = Callable[..., str]


@contextlib.contextmanager
def cleaned_up() -> Iterator[None]:
    """A command owns its process, so it leaves its environment and its log file behind; here other tests follow."""
    environment = dict(os.environ)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        logger = logging.getLogger("halation")
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    with cleaned_up():
        yield


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a command that is refused, and return what a person reads."""

    def run(*words: object) -> str:
        assert cli.main([str(word) for word in words]) == 2
        said = capsys.readouterr().err
        assert said.startswith("halation: ")
        assert "Traceback" not in said
        lines = said.splitlines()
        assert sum(line.startswith("  expected: ") for line in lines) == 1, said
        assert sum(line.startswith("  to do:    ") for line in lines) == 1, said
        return said

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    with cleaned_up():
        assert cli.main(["train", *TINY, "--output_dir", str(folder)]) == 0
    return folder


def class_folder(folder: Path) -> Path:
    for number, name in enumerate(("ash_tree", "birch")):
        (folder / name).mkdir(parents=True)
        for image in range(2):
            colour = np.full((32, 32, 3), 60 * number + 20 * image, np.uint8)
            Image.fromarray(colour).save(folder / name / f"{image}.png")
    return folder


# -- quickly, and without torch


@pytest.mark.parametrize(
    "words", [["--help"], ["train", "--help"], ["distill", "--help_all"], ["sample", "--help"], ["train", "-h"]]
)
def test_help_answers_within_half_a_second(words: list[str]) -> None:
    """In processor time, which does not depend on other work of the machine."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([HALATION, *words], capture_output=True, text=True, timeout=30)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0, done.stderr
        assert "usage: halation" in done.stdout
    assert min(seconds) < 0.5, seconds


def test_parsing_and_refusing_import_no_torch() -> None:
    script = (
        "import sys; from halation import cli; cli.parse('train', ['--n-steps', '3']);"
        " cli.parse('sample', ['--checkpoint', 'x']);"
        "assert cli.main(['train', '--data', 'nosuch']) == 2;"
        " assert cli.main(['sample', '--checkpoint', 'nosuch']) == 2;"
        "heavy = {'torch', 'diffusers', 'transformers'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_without_a_command_the_overview_is_shown_and_counts_as_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "halation COMMAND --help" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("halation ")


# -- flags as people write them


def test_dashes_and_underscores_are_the_same() -> None:
    assert cli.parse("train", ["--n-steps", "7", "--ckpt_latest-every", "3", "--no-sample"]) == cli.parse(
        "train", ["--n_steps", "7", "--ckpt_latest_every", "3", "--no_sample"]
    )
    assert cli.parse("train", ["--n-steps=7"]).n_steps == 7


def test_a_flag_given_twice_means_the_last() -> None:
    config = cli.parse(
        "train", ["--lr", "1", "--gpu_ids", "0", "1", "--compile", "--lr", "2e-4", "--gpu-ids", "3", "--no_compile"]
    )
    assert (config.lr, config.gpu_ids, config.compile) == (2e-4, (3,), False)


@pytest.mark.parametrize(
    "words", ["--gpu_ids 0 1 2 3", "--gpu_ids 0,1,2,3", "--gpu-ids=0,1 2,3", "--gpu_ids 0, 1, 2, 3"]
)
def test_lists_are_written_with_spaces_or_commas(words: str) -> None:
    assert cli.parse("train", words.split()).gpu_ids == (0, 1, 2, 3)


def test_commas_stay_in_prompts() -> None:
    config = cli.parse("train", ["--sample_prompts", "a car, at night", "rain", "--report-to", "tensorboard,wandb"])
    assert config.sample_prompts == ("a car, at night", "rain")
    assert config.report_to == ("tensorboard", "wandb")


@pytest.mark.parametrize(
    ("words", "value"),
    [("--sample False", False), ("--sample true", True), ("--sample=0", False), ("--no-sample", False)],
)
def test_a_switch_may_have_its_value_spelled_out(words: str, value: bool) -> None:
    assert cli.parse("train", words.split()).sample is value


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("", None),
        ("--same_seed", True),
        ("--same-seed True", True),
        ("--same_seed=off", False),
        ("--no_same_seed", False),
    ],
)
def test_a_switch_that_may_be_left_open_has_three_values(words: str, value: bool | None) -> None:
    assert cli.parse("sample", ["--checkpoint", "x", *words.split(), "--nproc", "2"]).same_seed is value


# -- files of settings

FILES = {
    "settings.yaml": "n-steps: 7\nlr: 1e-4\nimage_size: 48\nsample_prompts: [a, 'b, c']\n"
    "compile: true\noutput_dir: there\n",
    "settings.toml": 'n_steps = 7\nlr = 1e-4\nimage_size = [48]\nsample_prompts = ["a", "b, c"]\n'
    'compile = true\noutput_dir = "there"\n',
    "settings.json": json.dumps(
        {
            "n_steps": 7,
            "lr": 1e-4,
            "image_size": [48],
            "sample_prompts": ["a", "b, c"],
            "compile": True,
            "output_dir": "there",
        }
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_lies_above_defaults_and_below_flags(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name])
    config = cli.parse("train", ["--n_steps", "9", "--config", str(tmp_path / name), "--no_compile"])
    assert (config.n_steps, config.compile) == (9, False)
    assert (config.lr, config.image_size, config.sample_prompts) == (1e-4, (48,), ("a", "b, c"))
    assert (config.output_dir, config.log_every) == (Path("there"), 10)


RENAMED = [
    ("train", "max_pictures", "max_images", "7", 7),
    ("train", "heldout_pictures", "validation_images", "9", 9),
    ("train", "eval_pictures", "eval_images", "50", 50),
    ("train", "activation_checkpointing", "gradient_checkpointing", "true", True),
    ("distill", "max_pictures", "max_images", "7", 7),
    ("evaluate", "sheet_size", "model_batch_size", "3", 3),
    ("watch", "pictures", "images", "best", "best"),
    ("gallery", "export_pictures", "export_images", "5", 5),
]


@pytest.mark.parametrize(("command", "old", "new", "word", "value"), RENAMED)
def test_a_renamed_flag_works_by_both_names_on_the_command_line_and_in_files(
    command: str, old: str, new: str, word: str, value: object, tmp_path: Path
) -> None:
    needed = {"watch": ["runs/a"], "gallery": ["."]}.get(command, [])
    for name in (old, new, old.replace("_", "-")):
        for words in ([f"--{name}", word], [f"--{name}={word}"]):
            assert getattr(cli.parse(command, [*needed, *words]), new) == value
    for name in (old, new):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps({name: value}))
        assert getattr(cli.parse(command, ["--config", str(file), *needed]), new) == value
    assert {old, new} & set(as_json(cli.parse(command, needed))) == {old}, "files keep the earlier name"


def test_a_switch_is_renamed_with_its_negation_too() -> None:
    assert cli.parse("train", ["--no_activation_checkpointing"]).gradient_checkpointing is False
    assert cli.parse("train", ["--activation_checkpointing"]).gradient_checkpointing is True


def test_both_names_of_a_setting_in_one_file_are_refused(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "both.yaml").write_text("max_pictures: 3\nmax_images: 4\n")
    said = refused("train", "--config", tmp_path / "both.yaml")
    assert "both 'max_images' and 'max_pictures'" in said


def test_a_file_may_give_what_is_required(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"checkpoint": "x", "prompts": ["a", "b"], "raw": true}')
    config = cli.parse("sample", [f"--config={tmp_path / 's.json'}", "--nproc", "2"])
    assert (config.checkpoint, config.prompts, config.raw, config.nproc) == ("x", ("a", "b"), True, 2)


def test_an_unknown_key_names_file_key_and_nearest(tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("n_step: 7\n")
    said = refused("train", "--config", path)
    assert str(path) in said
    assert "'n_step'" in said
    assert "'n_steps'" in said


@pytest.mark.parametrize(
    ("text", "word"),
    [("n_steps: many", "n_steps"), ("lr: '1'", "lr"), ("dtype: int8", "dtype"), ("gpu_ids: [a]", "gpu_ids")],
)
def test_a_value_of_another_type_is_refused_by_name(text: str, word: str, tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    said = refused("train", "--config", path)
    assert f"{path}: {word} is" in said


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("s.yaml", b"a: [1"),
        ("s.json", b"{"),
        ("s.toml", b"= 3"),
        ("s.ini", b"a=1"),
        ("s.yaml", b"- a\n"),
        ("s.yaml", b"a: \xff\xfe"),
    ],
)
def test_a_file_that_holds_no_settings_is_refused(name: str, content: bytes, tmp_path: Path, refused: Refused) -> None:
    (tmp_path / name).write_bytes(content)
    assert name in refused("train", "--config", tmp_path / name)


def test_config_without_a_file_is_refused(tmp_path: Path, refused: Refused) -> None:
    assert "--config" in refused("train", "--config")
    assert "nosuch.yaml" in refused("train", "--config", tmp_path / "nosuch.yaml")


def test_a_recipe_brings_defaults_that_files_and_flags_override(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("lr: 3.0")
    words = ["--config", str(tmp_path / "s.yaml"), "--seed", "5"]
    config = cli.parse("train", words, defaults={"batch_size": 128, "lr": 2.0, "seed": 4})
    assert (config.batch_size, config.lr, config.seed) == (128, 3.0, 5)


# -- what is refused


def test_an_unknown_command_suggests_the_nearest(refused: Refused) -> None:
    assert "halation train" in refused("tran")
    assert "halation --help" in refused("xyzzy")


@pytest.mark.parametrize(
    ("words", "found", "expected", "action"),
    [
        ("train --n_step 4", "there is no flag --n_step", "a flag of `halation train`", "did you mean --n_steps?"),
        ("train --learning_rates 4", "there is no flag --learning_rates", "a flag", "did you mean --learning_rate?"),
        ("train --xyzzy", "there is no flag --xyzzy", "a flag of", "see `halation train --help_all`"),
        ("train --no_lr", "--no_lr, but --lr is no switch", "a value for --lr", "give --lr and a value"),
        ("train --dtype bf17", "--dtype bf17", "one of fp32, bf16, fp16", "did you mean bf16?"),
        ("train --engine quick", "--engine quick", "one of auto, single, ddp", "choose one of these"),
        ("train --report_to wandb,nosuch", "--report_to nosuch", "one of tensorboard", "choose one of these"),
        ("train --lr fast", "--lr fast", "a number", "give one"),
        ("train --n_steps 1.5", "--n_steps 1.5", "a whole number", "give one"),
        ("train --gpu_ids 0 a", "--gpu_ids a", "a whole number", "give one"),
        ("train --lr", "--lr without a value", "a value for --lr", "give a value"),
        ("train --betas 0.9 --seed 1", "--betas 0.9", "2 values for --betas", "give 2 values"),
        ("train --lr 1 2", "'2' after --lr belongs to no flag", "one value after --lr", "put quotes around"),
        ("train runs/a", "'runs/a' belongs to no flag", "flags, each followed by its value", "see `halation train"),
        ("train --compile maybe", "'maybe' after --compile belongs to no flag", "no value after", "see `halation"),
        ("sample", "`halation sample` without --checkpoint", "--checkpoint, which has no default", "give it"),
        ("watch", "`halation watch` without RUN", "RUN, which has no default", "give it"),
        ("ctl runs/a stopp", "ACTION stopp", "one of sample, save, stop", "did you mean stop?"),
        ("ctl runs/a stop now", "'now' belongs to no flag", "flags, each followed", "see `halation ctl"),
    ],
)
def test_wrong_words_are_refused_in_three_parts(
    words: str, found: str, expected: str, action: str, refused: Refused
) -> None:
    said = refused(*words.split())
    assert said.startswith(f"halation: {found}"), said
    assert f"\n  expected: {expected}" in said, said
    assert f"\n  to do:    {action}" in said, said


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("train --learning_rate 3e-4", "lr", 3e-4),
        ("train --train_batch_size 3", "batch_size", 3),
        ("train --gradient-accumulation-steps=4", "accumulate", 4),
        ("train --max_train_steps 9", "n_steps", 9),
        ("train --resolution 512", "image_size", (512,)),
        ("train --mixed_precision no", "dtype", "fp32"),
        ("train --mixed_precision bf16", "dtype", "bf16"),
        ("train --pretrained_model_name_or_path a/b", "model_path", "a/b"),
        ("train --network_dim 8", "lora_rank", 8),
        ("train --rank 8", "lora_rank", 8),
        ("train --lora_layers to_q to_k", "lora_targets", ("to_q", "to_k")),
        ("train --enable_bucket", "aspect_buckets", True),
        ("train --no_enable_bucket", "aspect_buckets", False),
        ("train --checkpointing_steps 50", "ckpt_every", 50),
        ("train --validation_prompts x y", "sample_prompts", ("x", "y")),
        ("train --num_processes 2", "nproc", 2),
        ("train --num_inference_steps 5", "sample_steps", 5),
        ("train --prompts x", "sample_prompts", ("x",)),
        ("distill --num_train_epochs 3", "num_epochs", 3),
        ("distill --train_data_dir d", "data_path", "d"),
        ("distill --data d", "data_path", "d"),
        ("generate --steps 7", "num_inference_steps", 7),
        ("generate --sample_steps 7", "num_inference_steps", 7),
        ("generate --seed 7", "seed_start", 7),
        ("generate --checkpoint m", "model_path", "m"),
        ("generate --prompt a --outdir o", "prompts", ("a",)),
        ("sample --model m --steps 7", "sample_steps", 7),
        ("sample --model_path m", "checkpoint", "m"),
        ("sample --checkpoint m --seed 7", "sample_seed", 7),
        ("evaluate --steps 7 --seed 3", "num_inference_steps", 7),
        ("evaluate --prompts_csv p.csv", "prompts", ("p.csv",)),
        ("watch runs/a --cfg_scale 2", "guidance_scale", 2.0),
    ],
)
def test_names_of_other_tools_and_commands_are_accepted(words: str, name: str, value: object) -> None:
    command, *rest = words.split()
    assert getattr(cli.parse(command, rest), name) == value


@pytest.mark.parametrize(
    ("words", "found", "rest"),
    [
        ("train --steps 9", "--steps (Halation, kohya): ambiguous in a training", "--n_steps"),
        ("distill --steps 9", "--steps (Halation, kohya): ambiguous in a training", "--sample_steps"),
        ("train --checkpoint runs/a", "--checkpoint (Halation): ambiguous in a training", "--model RUN"),
        ("train --adam_beta1 0.9", "--adam_beta1 (diffusers, SimpleTuner): the first decay", "--betas 0.9 0.999"),
        ("train --lr_scheduler cosine", "--lr_scheduler (diffusers", "--decay_steps"),
        ("train --resolution 512,768", "--resolution 512,768 (diffusers", "height first"),
        ("train --lora_layers=to_q,to_k", "--lora_layers to_q,to_k (diffusers)", "separated by spaces"),
        ("train --use_8bit_adam", "--use_8bit_adam (diffusers, kohya)", "--weights_dtype bf16"),
        ("train --resume_from_checkpoint latest", "--resume_from_checkpoint (diffusers", "resumes by itself"),
        ("train --num_train_epochs 3", "--num_train_epochs (diffusers, SimpleTuner): passes", "--n_steps"),
        ("generate --num_images_per_prompt 4", "--num_images_per_prompt (diffusers)", "several times"),
        ("generate --adam_beta1 0.9", "--adam_beta1 (diffusers", "in other commands"),
        ("generate --learning_rate 1", "--learning_rate (diffusers, kohya, SimpleTuner) stands for --lr", "leave it"),
    ],
)
def test_names_that_mean_something_else_are_answered_with_ours(
    words: str, found: str, rest: str, refused: Refused
) -> None:
    said = refused(*words.split())
    assert said.startswith(f"halation: {found}"), said
    assert rest in said


def test_files_and_python_take_the_same_other_names(tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("learning_rate: 3e-4\nresolution: 512\nmixed_precision: no\nvalidation_prompt: a car\n")
    config = cli.parse("train", ["--config", str(path)])
    assert (config.lr, config.image_size, config.dtype, config.sample_prompts) == (3e-4, (512,), "fp32", ("a car",))
    path.write_text("learning_rate: 3e-4\nlr: 1e-4\n")
    assert "both 'lr' and 'learning_rate'" in refused("train", "--config", path)
    path.write_text("adam_beta1: 0.9\n")
    assert f"{path}: adam_beta1 (diffusers, SimpleTuner)" in refused("train", "--config", path)
    path.write_text("resolution: [512, 768]\n")
    assert "height first" in refused("train", "--config", path)
    path.write_text("quux_frobnicator: 1\n")
    assert "did you mean" not in refused("train", "--config", path)
    path.write_text("dtype: fp8\n")
    assert "one of fp32, bf16, fp16" in refused("train", "--config", path)
    given = validate_settings(cli.config_type("generate"), {"steps": 4, "prompt": "a car"}, "halation.generate()")
    assert given == {"num_inference_steps": 4, "prompts": ("a car",)}


# -- help and --print_config


def shown_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, *words: str) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as end:
        cli.main(list(words))
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_fits_the_terminal_and_one_screen(
    command: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = shown_help(capsys, monkeypatch, columns, command, "--help")
    lines = said.splitlines()
    assert max(map(len, lines)) <= columns
    assert len(lines) <= 48
    assert not re.search(r"\[(None|''|\(\))?\]|\x1b|None", said)
    flags = [line for line in lines if line.startswith("  ")]
    assert all(re.match(r"  (--)?\S.*?  +\S", line) or len(line.split()) > 2 for line in flags), said
    assert f"halation {command} --help_all" in " ".join(said.split())
    full = shown_help(capsys, monkeypatch, columns, command, "--help-all")
    assert max(map(len, full.splitlines())) <= columns
    names = set(re.findall(r"^  --(?:\[no_\])?(\w+)", full, re.MULTILINE))
    assert names >= set(re.findall(r"^  --(?:\[no_\])?(\w+)", said, re.MULTILINE))


def test_help_shows_groups_defaults_and_the_words_of_the_field(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = shown_help(capsys, monkeypatch, 80, "train", "--help")
    groups = re.findall(r"^(\w.*):$", said, re.MULTILINE)
    assert groups[:3] == ["output and data", "model", "optimisation"]
    assert {"distributed", "sampling", "evaluation"} <= set(groups)
    assert re.search(r"^  --keep_last N .* \[3\]$", said, re.MULTILINE)
    assert re.search(r"^  --batch_size N .* \[32\]$", said, re.MULTILINE)
    assert re.search(r"^  --dtype fp32\|bf16\|fp16 .* \[fp32\]$", said, re.MULTILINE)
    for word in ("validation", "radient checkpointing", "Mixed precision", "radient accumulation", "Learning rate"):
        assert word in said
    full = shown_help(capsys, monkeypatch, 80, "train", "--help_all")
    assert "--[no_]sample  [on]" in full
    flat = " ".join(full.split())
    assert "Learning rate after warm-up; by default 1e-4" in flat
    assert "Above 0. Also --learning_rate." in flat
    assert "One of auto, single, ddp, fsdp, deepspeed." in flat


def test_help_shows_the_defaults_of_a_recipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.run("train", ["-h"], defaults={"batch_size": 128}, prog="train.py")
    said = capsys.readouterr().out
    assert said.startswith("usage: train.py [--flags]")
    assert re.search(r"^  --batch_size N .* \[128\]$", said, re.MULTILINE)


@pytest.mark.parametrize("words", [["train", "--lr", "1e-5", "--sample_prompts", "a: 'b'", "#c"], ["watch", "runs/a"]])
def test_printed_settings_are_a_config_file(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([*words, "--print-config"])
    assert end.value.code == 0
    (tmp_path / "s.yaml").write_text(capsys.readouterr().out)
    assert cli.parse(words[0], ["--config", str(tmp_path / "s.yaml")]) == cli.parse(words[0], words[1:])


# -- what is refused elsewhere


def test_data_that_is_no_folder_of_images(tmp_path: Path, refused: Refused) -> None:
    here = ["train", *TINY, "--output_dir", tmp_path / "run", "--data"]
    assert "does not exist" in refused(*here, tmp_path / "nosuch")
    (tmp_path / "file").write_text("")
    assert "is a file" in refused(*here, tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "is empty" in refused(*here, tmp_path / "empty")


def test_metadata_without_a_caption_column_names_the_nearest(tmp_path: Path, refused: Refused) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(folder / "a.png")
    (folder / "metadata.csv").write_text("file_name,label\na.png,a car\n")
    said = refused("train", *TINY, "--output_dir", tmp_path / "run", "--data", folder)
    assert "'text'" in said
    assert "'label'" in said


@pytest.mark.parametrize("ids", [["7"], ["-1"], ["0", "0"], ["0,1"]])
def test_gpus_that_are_not_there_are_refused_with_what_is(ids: list[str], tmp_path: Path, refused: Refused) -> None:
    said = refused("train", *TINY, "--output_dir", tmp_path / "run", "--gpu_ids", *ids)
    assert "this machine has" in said
    assert not (tmp_path / "run").exists()
    assert "this machine has" in refused("sample", "--checkpoint", tmp_path, "--gpu_ids", *ids)


def test_sizes_that_do_not_fit_the_patch_or_the_streets(tmp_path: Path, refused: Refused) -> None:
    here = ["train", *TINY, "--output_dir", tmp_path / "run", "--image_size"]
    assert "--image_size 32 32" in refused(*here, 30)
    assert "--image_size" in refused(*here, 32, 32, 32)
    assert "from 32 to 512" in refused(*here, 24)
    assert "from 32 to 512" in refused(*here, 64, 32)
    assert "multiples of 8" in refused(*here, 68, "--patch_size", "0")


@pytest.mark.parametrize(
    "words",
    [
        "--batch_size 0", "--n_steps 0", "--sample_steps 0", "--ckpt_every -1", "--lr nan", "--lr 0",
        "--ema_decay 1", "--betas 0.9 1",
        "--caption_dropout 1.5", "--seed -1", "--sample_seed 99999999999999999999", "--guidance_scale inf",
        "--nproc -1",
        "--num_register_tokens -2", "--dist_timeout_s 0", "--model giant", "--vae nosuch", "--cache latents",
    ],
)  # fmt: skip
def test_numbers_and_names_nothing_could_work_with(words: str, tmp_path: Path, refused: Refused) -> None:
    flag, *values = words.split()
    said = refused("train", *TINY, "--output_dir", tmp_path / "run", flag, *values)
    assert flag in said or values[0] in said


def test_a_batch_that_cannot_fit_names_a_smaller_one_at_once(tmp_path: Path, refused: Refused) -> None:
    began = time.monotonic()
    said = refused("train", *TINY, "--output_dir", tmp_path / "run", "--batch_size", 100_000_000)
    assert time.monotonic() - began < 20
    smaller = int(said.split("try --batch_size ")[1].split()[0])
    assert 1 <= smaller < 10_000_000


def test_a_refused_first_start_binds_nobody_to_its_settings(tmp_path: Path, refused: Refused) -> None:
    refused("train", *TINY, "--output_dir", tmp_path / "run", "--batch_size", 100_000_000)
    assert cli.main(["train", *TINY, "--output_dir", str(tmp_path / "run")]) == 0


def test_other_settings_on_resume_are_refused_with_a_diff(trained: Path, refused: Refused) -> None:
    said = refused("train", *TINY, "--output_dir", trained, "--seed", 5, "--lr", "3e-4", "--n_steps", 9)
    assert "  lr: 0.0001 -> 0.0003" in said
    assert "  seed: 0 -> 5" in said
    assert "n_steps" not in said
    assert "--accept_changes" in said
    said = refused("train", *TINY, "--output_dir", trained, "--validation_images", 3)
    assert "  validation_images: 0 -> 3" in said, "by the name of the flag"


def test_fewer_steps_than_were_done(trained: Path, refused: Refused) -> None:
    assert "--n_steps 2 or more" in refused("train", *TINY, "--output_dir", trained, "--n_steps", 1)


def test_an_output_folder_that_cannot_be_written(tmp_path: Path, trained: Path, refused: Refused) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert str(folder) in refused("train", *TINY, "--output_dir", folder)
        assert str(folder) in refused("sample", "--checkpoint", trained, "--nproc", 1, "--output_dir", folder)


def test_sampling_from_what_is_no_model(tmp_path: Path, trained: Path, refused: Refused) -> None:
    (tmp_path / "empty").mkdir()
    here = ["--nproc", 1, "--output_dir", tmp_path / "out"]
    assert "no complete checkpoint" in refused("sample", "--checkpoint", tmp_path / "empty", *here)
    assert "nosuch" in refused("sample", "--checkpoint", tmp_path / "nosuch", *here)
    assert "--sample_steps" in refused("sample", "--checkpoint", trained, *here, "--sample_steps", -3)
    assert "--batch_size" in refused("sample", "--checkpoint", trained, *here, "--batch_size", -1)


def test_a_folder_of_other_images_is_refused_with_a_diff(tmp_path: Path, trained: Path, refused: Refused) -> None:
    here = [
        "sample",
        "--checkpoint",
        trained,
        "--nproc",
        1,
        "--output_dir",
        tmp_path,
        "--prompts",
        "a street",
        "--progress",
        "none",
    ]
    assert cli.main(list(map(str, here))) == 0
    said = refused(*here, "--sample_steps", 2)
    assert "  steps: 1 -> 2" in said
    assert "--output_dir" in said


def test_a_folder_with_files_under_our_names_is_left_alone(tmp_path: Path, trained: Path, refused: Refused) -> None:
    (tmp_path / "sample_00.txt").write_text("mine")
    words = ["sample", "--checkpoint", trained, "--prompts", "a street", "--progress", "none", "--nproc", 1]
    assert "sample_00.txt" in refused(*words, "--output_dir", tmp_path)
    assert (tmp_path / "sample_00.txt").read_text() == "mine"
    of_training = next((trained / "samples").glob("step_*"))
    before = {path.name: path.read_bytes() for path in of_training.iterdir()}
    assert "did not write" in refused(*words, "--output_dir", of_training)
    assert {path.name: path.read_bytes() for path in of_training.iterdir()} == before


def test_the_file_that_names_the_newest_checkpoint_is_followed(tmp_path: Path, trained: Path, refused: Refused) -> None:
    words = [
        "sample",
        "--prompts",
        "a street",
        "--progress",
        "none",
        "--nproc",
        "1",
        "--output_dir",
        str(tmp_path / "drawn"),
    ]
    assert cli.main([*words, "--checkpoint", str(trained / "checkpoints/latest")]) == 0
    assert (tmp_path / "drawn/sample_00.png").exists()
    assert "is a file" in refused(*words, "--checkpoint", trained / "export/model.safetensors")


def test_the_record_of_a_run_is_a_config_file(trained: Path) -> None:
    config = cli.parse("train", ["--config", str(trained / "config.json"), "--n_steps", "77"])
    assert config.n_steps == 77
    assert config.output_dir == trained
    assert config.model == "tiny"


def test_prompt_files_that_are_not_there_or_not_text(tmp_path: Path, trained: Path, refused: Refused) -> None:
    (tmp_path / "prompts.txt").write_bytes("grün\n".encode("utf-16"))
    for name in ("nosuch.txt", "prompts.txt"):
        file = tmp_path / name
        assert name in refused("train", *TINY, "--output_dir", tmp_path / "run", "--sample_prompts_file", file)
        assert name in refused(
            "sample", "--checkpoint", trained, "--nproc", 1, "--output_dir", tmp_path / "o", "--prompts_file", file
        )


def test_a_prompt_for_a_class_model_that_is_no_class_names_the_nearest(tmp_path: Path, refused: Refused) -> None:
    here = ["train", *TINY, "--data", str(class_folder(tmp_path / "data")), "--output_dir", str(tmp_path / "run")]
    assert "birch" in refused(*here, "--sample_prompts", "birsh")
    assert cli.main(here) == 0
    drawn = refused(
        "sample", "--checkpoint", tmp_path / "run", "--nproc", 1, "--output_dir", tmp_path / "o", "--prompts", "ashtree"
    )
    assert "ash_tree" in drawn


def test_a_recipe_speaks_under_its_own_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("nosuch", [], prog="recipe.sh") == 2
    assert capsys.readouterr().err.startswith("recipe.sh: there is no command 'nosuch'")
