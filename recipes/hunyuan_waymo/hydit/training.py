"""`halation train` with the defaults of this recipe.

These are HunyuanDiT, street scenes, eight driving prompts and a sample from every GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from halation import cli
from halation.distributed import launcher
from halation.errors import HalationError, InputError
from halation.training.config import TrainConfig

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hydit.sample_settings import num_steps, prompts

TINY = "tiny_hunyuandit"
NUM_CPU_RANKS = 2
MAX_STREETS = 512
"""Default number of street scenes to train on; they are rendered and encoded in seconds on two cores."""

DEFAULTS: dict[str, Any] = {
    "output_dir": Path("results/waymo_base"),
    "image_size": (256, 256),
    "n_steps": 1_000,
    "batch_size": 4,
    "validation_images": 16,
    "sample_names": "gpu",
    "sample_all": False,
    "sample_steps": num_steps,
}


def main(words: Sequence[str], *, prog: str, engine: str = "auto") -> int:
    """Train, and return the exit code.

    Defaults of missing flags depend on the machine, the environment and the other flags.
    """
    defaults = DEFAULTS | by_environment() | {"engine": engine}
    try:
        # Parsed twice: some flags decide the defaults of others.
        asked: TrainConfig = cli.parse("train", words, defaults=defaults, prog=prog)
        _refuse_lost_model(asked.model_path)
        defaults |= by_flags(asked)
        if not asked.model_path:
            defaults["model_path"] = str(tiny(asked.output_dir.absolute().parent / TINY))
    except HalationError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return error.exit_code
    if defaults["nproc"]:
        print(f"{prog}: no GPU found; ranks on the CPU: {asked.nproc}", file=sys.stderr)
    return cli.run("train", words, defaults=defaults, prog=prog)


def by_environment() -> dict[str, Any]:
    """Return the defaults from MODEL_PATH, DATA and the GPUs of the machine."""
    gpus = launcher.num_gpus()
    return {
        "model_path": os.environ.get("MODEL_PATH", ""),
        "data": os.environ.get("DATA") or "streets",
        "dtype": "bf16" if gpus else "fp32",
        "nproc": 0 if gpus or launcher.is_launched() else NUM_CPU_RANKS,
    }


def _refuse_lost_model(model_path: str) -> None:
    """Reject a missing path in MODEL_PATH; names on the Hub do not start with a slash or dot."""
    is_path = model_path == os.environ.get("MODEL_PATH") and model_path.startswith(("/", "."))
    if is_path and not Path(model_path).is_dir():
        raise InputError(
            f"MODEL_PATH={model_path} is not a folder",
            "a HunyuanDiT in diffusers layout, or its name on the Hub",
            "correct MODEL_PATH, or unset it to train the tiny model",
        )


def by_flags(asked: TrainConfig) -> dict[str, Any]:
    """Return the defaults that depend on other settings.

    A run keeps ten checkpoints, and an untrained model gets a larger learning rate.
    """
    return {
        "lr": TrainConfig.lr if asked.model_path else 1e-3,
        "max_images": MAX_STREETS if asked.data == "streets" else 0,
        "ckpt_every": max(10, asked.n_steps // 10),
        "ckpt_latest_every": max(100, asked.n_steps // 50),
        "sample_prompts": () if asked.sample_prompts_file else tuple(prompts),
    }


def tiny(folder: Path) -> Path:
    """Return the tiny HunyuanDiT; create it if it is missing."""
    if not (folder / "model_index.json").is_file():
        print(f"MODEL_PATH is not set: creating a tiny HunyuanDiT in {folder}", file=sys.stderr)
    from hydit import tiny_hunyuan

    try:
        tiny_hunyuan.ensure(folder)
    except OSError as error:
        raise InputError(
            f"cannot write to directory {folder.parent}: {error.strerror or error}",
            "a writable folder with 15 MB of free space",
            "free disk space, check permissions (chmod 755), or choose another --output_dir",
        ) from error
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], prog="train_waymo_base.sh"))
