"""Every example config runs at small size, with flags that override it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from halation import cli
from support.docs import HALATION, ROOT, Inputs, environment, place_inputs, shrink_flags

CONFIGS = sorted((ROOT / "examples" / "configs").glob("*.yaml"))


def command(config: Path) -> list[str]:
    """The words after `halation` of the command in the file's first lines."""
    line = next(line for line in config.read_text().splitlines() if line.startswith("#   halation "))
    words = line.removeprefix("#   halation ").split()
    assert words[1:] == ["--config", str(config.relative_to(ROOT))]
    return words


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("inputs"))


def test_the_example_configs_are_those_of_the_six_common_jobs() -> None:
    names = [(config.stem, command(config)[0]) for config in CONFIGS]
    assert names == [
        ("distil_few_steps", "distill"),
        ("evaluate", "evaluate"),
        ("finetune_lora", "train"),
        ("generate", "generate"),
        ("train_dit", "train"),
        ("watch", "watch"),
    ]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_an_example_config_is_read_and_a_flag_overrides_it(config: Path) -> None:
    job = command(config)[0]
    plain = cli.parse(job, ["--config", str(config)])
    changed = cli.parse(job, ["--config", str(config), "--batch_size", "3"])
    assert plain.batch_size != changed.batch_size == 3
    assert {**vars(plain), "batch_size": 3} == vars(changed)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_an_example_config_works_at_small_size(config: Path, inputs: Inputs, tmp_path: Path) -> None:
    job = command(config)[0]
    words = [job, "--config", str(config)]
    settings = cli.parse(job, words[1:])
    place_inputs(inputs, job, settings, tmp_path)
    small = shrink_flags(inputs, job, settings, tmp_path)
    if hasattr(settings, "dtype"):
        small += ["--dtype", "fp32"]
    line = [HALATION, *words, *small]
    done = subprocess.run(
        line, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, f"{' '.join(line)}\n{done.stdout}\n{done.stderr}"
