"""Out of memory while sampling: the batch is halved and marked; training is unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from halation.training import command as job
from halation.training.config import TrainConfig
from halation.training.session import TrainingSession
from support.rank_functions import PROMPTS, small_config
from support.rank_pool import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.faults]


def train_cramped(world: Any, config: TrainConfig, most_rows: int) -> list[int]:
    """Forwards without gradient of over `most_rows` rows find no memory; return the sizes tried."""
    tried: list[int] = []

    def refuse(_module: Any, arguments: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled() and len(arguments[0]) != 32:  # 32 rows are the validation loss
            tried.append(len(arguments[0]))
            if len(arguments[0]) > most_rows:
                raise torch.OutOfMemoryError("no room for so many rows")

    with job.open_run_on_rank_zero(config, world), TrainingSession(world, config) as session:
        session.prepare()
        session.denoiser.module.register_forward_pre_hook(refuse)
        session.run()
    return tried


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "samples/step_0000002/samples.json").read_text())["samples"]
    return rows


def weights_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "checkpoints/step_0000002").glob("*.safetensors")}


def test_a_batch_too_large_is_drawn_in_halves_and_marked(ranks: RankPool, tmp_path: Path) -> None:
    config = small_config(tmp_path / "cramped", sample_prompts=PROMPTS[:4], sample_batch_size=4)
    tried = ranks.run(1, train_cramped, config, 4)[0]
    assert tried[0] == 8  # four images and their null branches, refused
    assert set(tried[1:]) == {4}
    assert [row["state"] for row in rows_of(config.output_dir)] == ["done"] * 4
    assert [row["micro_batch"] for row in rows_of(config.output_dir)] == [2] * 4

    roomy = small_config(tmp_path / "roomy", sample_prompts=PROMPTS[:4], sample_batch_size=4)
    assert set(ranks.run(1, train_cramped, roomy, 8)[0]) == {8}
    assert all("micro_batch" not in row for row in rows_of(roomy.output_dir))
    assert weights_of(config.output_dir) == weights_of(roomy.output_dir)


def test_a_single_image_that_does_not_fit_is_a_failed_row_and_training_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    config = small_config(tmp_path / "hopeless", sample_prompts=PROMPTS[:2], sample_batch_size=2)
    assert 1 not in ranks.run(1, train_cramped, config, 1)[0]
    assert [row["state"] for row in rows_of(config.output_dir)] == ["failed"] * 2
    assert "no room for so many rows" in rows_of(config.output_dir)[0]["reason"]
    assert (config.output_dir / "export/model.safetensors").exists()
