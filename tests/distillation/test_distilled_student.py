"""A distilled student draws what its teacher draws, better than one trained alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

from halation.distillation import command as distill
from halation.distillation.config import DistillConfig
from halation.models.checkpoint_loading import build_dit, load_denoiser
from halation.models.denoiser import Denoiser, SolverSettings, sample_batch
from halation.models.dit.denoiser import DiTDenoiser
from halation.models.students.build import open_student
from halation.models.students.config import StudentConfig
from halation.sample_specs import SampleBatch, SampleSpec
from support import rank_functions
from support.rank_pool import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

GUIDANCE = 2.0
SHAPE = {"depth": 2}
SCENES = ("A highway scene", "A rural road at night", "A parking lot scene", "A rainy street at dusk")


def images(denoiser: Denoiser, guidance: float) -> np.ndarray:
    """Drawn from the same seeds by every model."""
    common = {"height": 32, "width": 32, "steps": 6}
    specs = [
        SampleSpec(  # type: ignore[arg-type]
            index=index, id=str(index), prompt=prompt, seed=index, guidance_scale=guidance, **common
        )
        for index, prompt in enumerate(SCENES * 2)
    ]
    batch = SampleBatch(specs=tuple(specs), num_real=len(specs))
    return (
        sample_batch(denoiser, batch, SolverSettings(sampler="euler", use_cfg=guidance != 1.0))
        .pixels_or_raise()
        .astype(np.float64)
    )


def random_copy(student: Path, seed: int, folder: Path) -> Path:
    """An export of the student's shape with random weights, for a training to begin with."""
    description = json.loads((student / "export" / "config.json").read_text())
    module = build_dit(description).init_weights(seed).module
    folder.mkdir()
    save_file({name: value.detach() for name, value in module.named_parameters()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(description))
    return folder


def untrained(teacher: DiTDenoiser) -> Denoiser:
    """What the student keeps of the teacher's weights before it learns."""
    how = {
        "init": "teacher",
        "seed": 0,
        "dtype": "fp32",
        "weights_dtype": "fp32",
        "lora": None,
        "height": 32,
        "width": 32,
    }
    return open_student(teacher, StudentConfig.from_json(SHAPE), **how)  # type: ignore[arg-type]


def test_a_student_is_nearer_to_its_teacher_than_untrained_or_trained_alone(ranks: RankPool, tmp_path: Path) -> None:
    """What is seen is what was taught, not what was inherited."""
    common = {"batch_size": 16, "sample": False, "ema_decay": 0.9, "betas": (0.9, 0.95)}
    learning = {**common, "n_steps": 30, "lr": 3e-3, "warmup_steps": 5, "decay_steps": 25, "max_images": 240}
    longer = learning | {"n_steps": 60, "decay_steps": 55}
    ranks.run(1, rank_functions.train, rank_functions.small_config(tmp_path / "teacher", **longer))
    (tmp_path / "student.json").write_text(json.dumps(SHAPE))
    config = DistillConfig(
        teacher_path=str(tmp_path / "teacher"),
        teacher_guidance=GUIDANCE,
        teacher_states=2,
        student_config=str(tmp_path / "student.json"),
        data_path="streets",
        output_dir=tmp_path / "distilled",
        progress="none",
        report_to=("none",),
        **learning,  # type: ignore[arg-type]
    )
    ranks.run(1, rank_functions.distill, distill.resolve_config(config))
    first = random_copy(tmp_path / "distilled", config.seed, tmp_path / "first")
    own = rank_functions.small_config(
        tmp_path / "scratch", **learning, model=str(first), patch_size=0, validation_images=0
    )
    ranks.run(1, rank_functions.train, own)

    teacher = load_denoiser(tmp_path / "teacher", raw=False)
    assert isinstance(teacher, DiTDenoiser)
    wanted = images(teacher, GUIDANCE)

    def distance(denoiser: Denoiser, guidance: float) -> float:
        return float(np.square(images(denoiser, guidance) - wanted).mean())

    distilled = distance(load_denoiser(tmp_path / "distilled", raw=False), 1.0)
    scratch = load_denoiser(tmp_path / "scratch", raw=False)
    assert distilled < 0.5 * distance(untrained(teacher), 1.0)
    assert distilled < 0.5 * min(distance(scratch, 1.0), distance(scratch, GUIDANCE))
