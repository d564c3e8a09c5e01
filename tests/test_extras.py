"""A missing optional library is reported in one error with the extra, before any work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

from halation import errors
from halation.distillation import command as distill
from halation.distillation.config import DistillConfig
from halation.distributed.engines import deepspeed
from halation.errors import InputError, read_extras
from halation.gallery import command as gallery
from halation.gallery.config import GalleryConfig
from halation.generation import command as generate
from halation.generation.config import GenerateConfig
from halation.models.pipelines.training.lora import LoraSettings, inject_lora
from halation.training import command as train
from halation.training.config import TrainConfig

EXTRAS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
Ask = Callable[[Path], object]


def _train(**settings: object) -> Ask:
    return lambda _folder: train.resolve_config(TrainConfig(**settings))  # type: ignore[arg-type]


def _generate(**settings: object) -> Ask:
    return lambda _folder: generate.check_config(
        GenerateConfig(prompts_csv="x", model_path="testcard", **settings)  # type: ignore[arg-type]
    )


def _distill(folder: Path) -> None:
    distill.resolve_config(DistillConfig(teacher_path=str(folder), data_path="streets", lora_rank=4))


CASES: dict[str, tuple[str, str, Ask]] = {
    "tensorboard": ("tensorboard", "train", _train(report_to=("tensorboard", "none"))),
    "wandb": ("wandb", "wandb", _train(report_to=("wandb",))),
    "trackio": ("trackio", "trackio", _train(report_to=("trackio",))),
    **{
        name: (name, extra, _train(report_to=(name,)))
        for name, extra in (("mlflow",) * 2, ("swanlab",) * 2, ("comet_ml", "comet"), ("clearml",) * 2, ("aim",) * 2)
    },
    "adapters": (
        "peft",
        "train",
        lambda folder: train.resolve_config(TrainConfig(model_path=str(folder), lora_rank=4)),
    ),
    "a student's adapters": ("peft", "train", _distill),
    "adapters of a checkpoint": (
        "peft",
        "train",
        lambda _folder: inject_lora(nn.Linear(2, 2), LoraSettings(rank=1), ["x"], 0),
    ),
    "deepspeed": ("deepspeed", "deepspeed", lambda _folder: deepspeed.import_deepspeed(None)),  # type: ignore[arg-type]
    "video": ("av", "video", _generate(num_frames=5)),
    "isal": ("isal", "fast", _generate(png="isal")),
    "ray": ("ray", "ray", _generate(cluster="ray")),
    "web": ("uvicorn", "web", lambda folder: gallery.run(GalleryConfig(dirs=(folder,)))),
}


def without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on Python finds no such package, as if it were not installed."""

    class Finder(PathFinder):
        @classmethod
        def find_spec(
            cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
        ) -> ModuleSpec | None:
            return None if fullname.partition(".")[0] == package else super().find_spec(fullname, path, target)

    finders = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
    monkeypatch.setattr(sys, "meta_path", finders)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("what", CASES)
def test_a_missing_extra_names_itself(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, extra, ask = CASES[what]
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    without(package, monkeypatch)
    with pytest.raises(InputError, match="not installed") as caught:
        ask(tmp_path)
    assert "\n" not in caught.value.found
    assert caught.value.action.startswith("pip install ")
    assert f'"{next(entry for entry in EXTRAS[extra] if entry.startswith(package))}"' in caught.value.action
    assert "halation" not in caught.value.action, "the name is not on the package index"


def test_the_doctor_looks_for_every_extra_that_there_is() -> None:
    wanted = {name: tuple(entries) for name, entries in EXTRAS.items() if name != "dev"}
    assert wanted == read_extras()


def test_an_installed_copy_reads_its_extras_from_its_metadata(tmp_path: Path) -> None:
    """Without pyproject.toml beside it, as in a wheel, the package finds the same packages in its metadata."""
    shutil.copy(Path(errors.__file__), tmp_path / "copied_errors.py")
    facts = tmp_path / "halation-0.1.dist-info"
    facts.mkdir()
    lines = [f'Requires-Dist: {entry} ; extra == "{name}"' for name, entries in EXTRAS.items() for entry in entries]
    (facts / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", "Name: halation", "Version: 0.1", *lines, ""]))
    code = "import copied_errors as e; print(sorted(e.read_extras().items())); print(e.install_command('ray'))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    table, command_line = done.stdout.splitlines()
    assert table == str(sorted(read_extras().items()))
    assert command_line == f'pip install "{EXTRAS["ray"][0]}"'
