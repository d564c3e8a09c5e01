"""What a command on a page takes for granted, made small: models, images, prompts, a run; and the flags that make the command small too."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from halation.data.streets import Streets
from halation.images.png_codec import encode_png
from halation.training.config import TrainConfig
from support import tiny_extractors, tiny_pipelines

HALATION = str(Path(sys.executable).with_name("halation"))
NUM_IMAGES = 8
LINKED = "pictures_of_the_table"
SIZE = 64
OWN_SIZES = ("tiny", "mini", "small", "base", "large", "xlarge")
FAMILIES = ("hunyuan", "flux", "wan", "sana", "sd3", "stable-diffusion-3", "pixart")


def environment(folder: Path) -> dict[str, str]:
    """One thread, no GPU, no network, and a cache of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HALATION")}
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**clean, **own, "PATH": path, "HALATION_CACHE": str(folder / "cache")}


class Store:
    """The furniture, each piece made when it is first asked for; commands get copies, or links to what nobody writes into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cached_property
    def run(self) -> Path:
        """A finished training with a checkpoint, samples and an export."""
        small = "--model tiny --image_size 32 --patch_size 8 --batch_size 2 --n_steps 2 --ckpt_every 1 --sample_steps 2 --validation_images 2"
        return self._made("run", ["train", "--data", "streets", *small.split(), "--report_to", "none", "--nproc", "1"])

    @functools.cached_property
    def generated(self) -> Path:
        """Images of `halation generate`."""
        prompts = self.prompts("csv")
        small = ["--model_path", "testcard", "--height", str(SIZE), "--width", str(SIZE), "--nproc", "1"]
        return self._made("generated", ["generate", "--prompts_csv", str(prompts), *small])

    def _made(self, name: str, words: list[str]) -> Path:
        command = [HALATION, *words, "--output_dir", name]
        subprocess.run(command, cwd=self.folder, env=environment(self.folder), check=True, capture_output=True)
        return self.folder / name

    @functools.cached_property
    def images(self) -> Path:
        """Images with captions; beside them a table of the same."""
        folder = self.folder / "pictures"
        folder.mkdir()
        rows, table = [], ["image,caption"]
        for number in range(NUM_IMAGES):
            scene = Streets(SIZE, SIZE).train(number)
            (folder / f"{number}.png").write_bytes(encode_png(scene.pixels, {}))
            rows.append(json.dumps({"file_name": f"{number}.png", "text": scene.caption}))
            table.append(f'{LINKED}/{number}.png,"{scene.caption}"')
        (folder / "metadata.jsonl").write_text("\n".join(rows) + "\n")
        (self.folder / "images.csv").write_text("\n".join(table) + "\n")
        return folder

    def prompts(self, ending: str) -> Path:
        """A list of prompts in the format of its ending."""
        captions = [Streets(SIZE, SIZE).train(number).caption for number in range(NUM_IMAGES)]
        path = self.folder / f"prompts.{ending}"
        if ending == "txt":
            path.write_text("".join(f"{caption}\n" for caption in captions))
        elif ending == "jsonl":
            path.write_text("".join(json.dumps({"prompt": caption}) + "\n" for caption in captions))
        else:
            path.write_text("".join(["image_id,prompt\n", *(f'{k},"{text}"\n' for k, text in enumerate(captions))]))
        return path

    @functools.cached_property
    def inception(self) -> Path:
        return tiny_extractors.inception_safetensors(self.folder / "inception.safetensors")

    @functools.cached_property
    def clip(self) -> Path:
        return tiny_extractors.clip(self.folder / "clip")

    @functools.cached_property
    def student(self) -> Path:
        path = self.folder / "student.json"
        path.write_text('{"depth": 1}')
        return path

    def model(self, name: str) -> Path:
        """A pipeline of the family in the name; without one, a run of ours."""
        for family in FAMILIES:
            if family in name.lower():
                return tiny_pipelines.built("sd3" if family == "stable-diffusion-3" else family)
        return self.run if Path(name).parts[0] in ("runs", "run", "RUN", "teacher") else tiny_pipelines.built("pixart")

    def data(self, name: str) -> Path:
        if name.endswith(".csv"):
            return self.images.with_suffix(".csv")
        return self.prompts(Path(name).suffix[1:]) if Path(name).suffix else self.images


def furnish(store: Store, command: str, config: Any, folder: Path) -> None:
    """Put what the command reads where it says that this is."""
    kinds: dict[str, Callable[[str], Path]] = {
        "model_path": store.model,
        "teacher_path": store.model,
        "model": store.model,
        "checkpoint": lambda _: store.run,
        "run": lambda _: store.run,
        "dirs": lambda _: store.run,
        "data": store.data,
        "data_path": store.data,
        "prompts_csv": lambda name: store.prompts(Path(name).suffix[1:]),
        "prompts_file": lambda name: store.prompts(Path(name).suffix[1:]),
        "sample_prompts_file": lambda name: store.prompts(Path(name).suffix[1:]),
        "generated": lambda _: store.generated,
        "reference": lambda _: store.images,
        "vae": lambda _: tiny_pipelines.built("pixart") / "vae",
        "student_config": lambda _: store.student,
    }
    if command in ("evaluate", "watch"):
        kinds["prompts"] = kinds["prompts_csv"]
    for field, source in kinds.items():
        values = getattr(config, field, ())
        for value in values if isinstance(values, tuple) else (values,):
            if value and not known(field, str(value)) and not (folder / value).exists():
                name = "streets" if str(value).endswith("/") or value == Path("runs") else ""  # a folder of runs
                place(source(str(value)), folder / value / (name if field == "dirs" else ""))


def known(field: str, value: str) -> bool:
    """Names that come with the package."""
    own = {"model": OWN_SIZES, "data": ("streets",), "data_path": ("streets",), "reference": ("streets",)}
    return value in own.get(field, ()) or value.startswith(("streets-64", "testcard")) or value == "-"


def place(source: Path, goal: Path) -> None:
    goal.parent.mkdir(parents=True, exist_ok=True)
    if source.name in ("run", "generated"):  # a command may write into these
        shutil.copytree(source, goal)
    else:
        goal.symlink_to(source, target_is_directory=source.is_dir())
    if source.name == "images.csv":  # a table names images beside it
        (goal.parent / LINKED).symlink_to(source.with_suffix(""), target_is_directory=True)


def small(store: Store, command: str, config: Any, folder: Path) -> list[str]:
    """Flags after the command's own, of which the last one wins: a few steps of few and small images on one process."""
    flags = SMALL[command](store, config, folder) if command in SMALL else []
    return [str(flag) for flag in flags]


def _size(name: str, folder: Path) -> list[Any]:
    """A size, where the model does not have its own."""
    pipeline = (folder / name / "model_index.json").is_file() or name.startswith("testcard")
    return ["--height", SIZE, "--width", SIZE] if pipeline else []


QUIET = ("--nproc", 1, "--progress", "none")


def _train(store: Store, config: TrainConfig, folder: Path) -> Sequence[Any]:
    flags = [
        *QUIET,
        "--n_steps",
        2,
        "--batch_size",
        2,
        "--sample_steps",
        2,
        "--validation_images",
        2,
        "--max_images",
        8,
    ]
    flags += ["--report_to", "none", "--no_compile", "--ckpt_every", 2]
    if config.model_path or config.vae:
        flags += ["--image_size", SIZE, SIZE]
    if not config.model_path and config.model in OWN_SIZES:
        flags += ["--model", "tiny", *([] if config.vae else ["--image_size", 32, 32, "--patch_size", 8])]
    if config.eval_every:
        flags += ["--eval_every", 2, "--eval_images", 4, "--eval_reference", 8, "--eval_clip_model", store.clip]
        flags += [] if config.data == "streets" else ["--eval_weights", store.inception]
    return flags


def _distill(store: Store, config: Any, folder: Path) -> Sequence[Any]:
    flags = [
        *QUIET,
        "--batch_size",
        2,
        "--sample_steps",
        2,
        "--teacher_steps",
        8,
        "--report_to",
        "none",
        "--no_compile",
    ]
    flags += ["--num_epochs", 1] if config.num_epochs else ["--n_steps", 2]
    if (folder / config.teacher_path / "model_index.json").is_file():
        flags += ["--image_size", SIZE, SIZE]
    return [*flags, "--trajectories", 0] if config.data_path.endswith((".txt", ".csv")) else [*flags, "--max_images", 4]


def _generate(store: Store, config: Any, folder: Path) -> Sequence[Any]:
    flags = [*QUIET, "--num_inference_steps", 2, "--num_samples", 2, "--no_compile", *_size(config.model_path, folder)]
    flags += ["--num_frames", 5] if config.num_frames > 1 else []
    flags += ["--offload", "none"]  # there is no GPU that parts could leave
    return [*flags, "--cfg_truncation_step", 1] if config.cfg_truncation_step else flags


def _evaluate(store: Store, config: Any, folder: Path) -> Sequence[Any]:
    flags = [*QUIET, "--allow_few", "--num_reference", 16, "--decode_workers", 0, "--kid_subsets", 2]
    if config.model_path:
        flags += ["--num_inference_steps", 2, "--num_samples", 4, *_size(config.model_path, folder)]
    if config.reference != ("streets",) and config.extractor in ("", "inception"):
        flags += ["--inception_weights", store.inception]
    return [*flags, "--clip_model", store.clip] if "clip" in config.metrics else flags


def _watch(store: Store, config: Any, folder: Path) -> Sequence[Any]:
    few = ["--num_samples", 4, "--num_reference", 16, "--num_inference_steps", 2, "--allow_few", "--settle_s", 0]
    weights = [] if config.reference in ((), ("streets",)) else ["--weights", store.inception]
    return [*QUIET, "--once", *few, *weights]


SMALL: dict[str, Callable[[Store, Any, Path], Sequence[Any]]] = {
    "train": _train,
    "distill": _distill,
    "sample": lambda store, config, folder: [*QUIET, "--sample_steps", 2],
    "generate": _generate,
    "evaluate": _evaluate,
    "watch": _watch,
    "doctor": lambda store, config, folder: ["--nproc", 1],
}
