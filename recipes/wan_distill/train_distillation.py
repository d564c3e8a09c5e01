"""Distils a video teacher into an image student.

This is `halation distill` with the flags and defaults of this recipe, with or without torchrun.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from halation import cli
from halation.distributed import launcher
from halation.errors import HalationError, InputError

RECIPE = Path(__file__).resolve().parent
TINY = "tiny"
PATIENCE_S = 300.0

DEFAULTS: dict[str, Any] = {
    "output_dir": Path("outputs/wan_t2i"),
    "student_config": "config/student_config.json",
    "data_path": "data/static_prompts.txt",
    "batch_size": 4,
    "num_epochs": 10,
    "sample": False,
    "sample_names": "rank",
    "sample_steps": 10,
}
FOR_TINY: dict[str, Any] = {
    "image_size": (64, 64),
    "teacher_steps": 10,
    "teacher_guidance": 2.0,
    "lr": 2e-3,
    "ema_decay": 0.98,
}

RENAMED = {
    "--num_steps": "--n_steps",
    "--save_samples": "--sample",
    "--no_save_samples": "--no_sample",
    "--gradient_checkpointing": "--gradient_checkpointing",
    "--mixed_precision": "--dtype",
}
PRECISIONS = {
    "--mixed_precision": {"no": "fp32", "fp16": "fp16", "bf16": "bf16"},
    "--teacher_dtype": {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"},
}
HELP = """flags of this recipe, besides those of `halation distill`:
  --save_samples            sample at the end of epochs (--sample); off by default
  --sample_dir DIR          folder of the samples, empty or of this run; by default OUTPUT_DIR/samples
  --num_steps INT           total optimizer steps (--n_steps), instead of --num_epochs
  --mixed_precision no|fp16|bf16    precision of the student (--dtype)
  --gradient_checkpointing  recompute activations inside blocks (--gradient_checkpointing)
  --distributed             accepted; ranks of torchrun or srun are joined with and without it
  --teacher_path tiny       a tiny Wan with two experts, created beside OUTPUT_DIR
"""


def main(words: Sequence[str], prog: str = "train_distillation.py") -> int:
    """Distil, and return the exit code."""
    try:
        words, sample_dir, distributed = translated(words)
        if {"-h", "--help", "--help_all", "--help-all"} & {*words}:
            with cli.print_once():
                print(HELP)
        defaults = DEFAULTS | by_machine() | by_flags(words)
        asked = cli.parse(
            "distill", words, defaults=defaults, prog=prog
        )  # parsed twice: some flags decide the defaults of others
        words = [*words, "--student_config", found(asked.student_config), "--data_path", found(asked.data_path)]
        if asked.teacher_path == TINY:
            defaults |= FOR_TINY
            words += ["--teacher_path", str(tiny(asked.output_dir.absolute().parent / "tiny_wan"))]
        if sample_dir:
            link(asked.output_dir, Path(sample_dir))
    except HalationError as error:
        cli.print_error(f"{prog}: {error}")
        return error.exit_code
    if distributed and not launcher.is_launched() and asked.nproc <= 1:
        print(f"{prog}: --distributed without torchrun or srun: one process; --nproc N starts N", file=sys.stderr)
    if asked.sample_prompts and not asked.sample:
        print(f"{prog}: --sample_prompts without --save_samples: there will be no samples", file=sys.stderr)
    return cli.run("distill", words, defaults=defaults, prog=prog)


def translated(words: Sequence[str]) -> tuple[list[str], str, bool]:
    """Return the arguments for `halation distill`, the sample folder, and --distributed."""
    result: list[str] = []
    sample_dir, distributed, flag = "", False, ""
    for word in words:
        name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if name:
            flag = "--" + name[2:].replace("-", "_")
            distributed |= flag == "--distributed"
            if flag not in ("--distributed", "--sample_dir"):
                result.append(RENAMED.get(flag, flag))
            if not equals:
                continue
        if flag == "--sample_dir":
            sample_dir = value
        elif flag == "--distributed":
            distributed = value.lower() not in cli.FALSE_WORDS
        else:
            result.append(precision(flag, value))
    return result, sample_dir, distributed


def precision(flag: str, value: str) -> str:
    """Translate a precision to its name in `halation distill`; other values are unchanged."""
    known = PRECISIONS.get(flag)
    if flag == "--mixed_precision" and known is not None and value not in known:
        raise InputError(f"--mixed_precision {value}", "no, fp16 or bf16", "use one of them")
    return known.get(value, value) if known else value


def by_machine() -> dict[str, Any]:
    """Return the defaults of the machine; without a launcher, one process."""
    return {"nproc": 0 if launcher.is_launched() else 1, "dtype": "bf16" if launcher.num_gpus() else "fp32"}


def by_flags(words: Sequence[str]) -> dict[str, Any]:
    """Disable the default number of epochs if steps are given; reject both flags together."""
    if "--n_steps" not in words:
        return {}
    if "--num_epochs" in words:
        raise InputError("--num_steps with --num_epochs", "one of them: each sets the length", "leave one out")
    return {"num_epochs": 0}


def found(path: str) -> str:
    """Resolve a file name relative to the recipe if it does not exist in the current folder."""
    beside = RECIPE / path
    return str(beside) if path and not Path(path).exists() and beside.exists() else path


def tiny(folder: Path) -> Path:
    """Return the tiny teacher; the first process of a machine creates it, the others wait."""
    import tiny_wan

    deadline = time.monotonic() + PATIENCE_S
    while int(os.environ.get("LOCAL_RANK", "0")) > 0 and time.monotonic() < deadline:
        if (folder / "model_index.json").is_file():
            return folder
        time.sleep(0.1)
    tiny_wan.ensure(folder)
    return folder


def link(output_dir: Path, sample_dir: Path) -> None:
    """Link the samples of a run to another folder.

    The folder must be empty, because samples of later steps are removed when a run resumes.
    """
    samples = output_dir / "samples"
    if samples.resolve() == sample_dir.resolve():
        return
    if samples.exists() or (sample_dir.exists() and (not sample_dir.is_dir() or any(sample_dir.iterdir()))):
        taken = samples if samples.exists() else sample_dir
        raise InputError(
            f"--sample_dir {sample_dir}, but {taken} is already in use",
            "an empty folder, for a run that has no samples yet",
            "choose another folder, or leave --sample_dir out",
        )
    try:
        sample_dir.mkdir(parents=True, exist_ok=True)
        output_dir.mkdir(parents=True, exist_ok=True)
        samples.symlink_to(sample_dir.resolve(), target_is_directory=True)
    except FileExistsError:  # another rank was faster
        pass
    except OSError as error:
        raise InputError(
            f"--sample_dir {sample_dir}: {error.strerror}", "a writable folder", "choose another"
        ) from error


def generate_and_save_samples(
    student_model: Any,
    teacher_text_encoder: Any,
    teacher_vae: Any,
    teacher_wan: Any,
    sample_prompts: Sequence[str],
    sample_dir: str | Path,
    epoch: int,
    device: Any,
    teacher_device: Any,
    teacher_dtype: Any,
    student_config: Any,
    proj_layer: Any = None,
    rank: int = 0,
    world_size: int = 1,
) -> list[dict[str, Any]]:
    """Sample an epoch in your own training loop on all ranks; see `epoch_samples.draw`."""
    import epoch_samples

    return epoch_samples.draw(
        student=student_model,
        text_encoder=teacher_text_encoder,
        vae=teacher_vae,
        teacher=teacher_wan,
        prompts=tuple(sample_prompts),
        folder=Path(sample_dir),
        epoch=epoch,
        device=device,
        teacher_device=teacher_device,
        teacher_dtype=teacher_dtype,
        settings=student_config,
        projection=proj_layer,
        rank=rank,
        world_size=world_size,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
