"""Training in latents: cached once, the same for any ranks, with a portable export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image

from halation.sampling.config import SampleConfig
from halation.training.config import TrainConfig
from support.rank_functions import run_job, small_config, train
from support.rank_pool import RankPool, RanksFailed

pytestmark = pytest.mark.ranks

NUM_IMAGES = 26


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    rows = []
    for index in range(NUM_IMAGES):
        pixels = np.full((40, 40, 3), (index * 9 % 256, 128, 255 - index * 9 % 256), np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:02d}.png")
        rows.append(json.dumps({"file_name": f"{index:02d}.png", "text": f"colour number {index}"}))
    (folder / "metadata.jsonl").write_text("\n".join(rows))
    return folder


def save_vae(folder: Path, seed: int) -> Path:
    state = torch.get_rng_state()
    torch.manual_seed(seed)  # diffusers initialises from the global generator and from nothing else
    AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=4,
        sample_size=32,
    ).save_pretrained(folder)
    torch.set_rng_state(state)
    return folder


def latent_config(folder: Path, images: Path, vae: Path, **changes: Any) -> TrainConfig:
    settings = {"data": str(images), "vae": str(vae), "patch_size": 4, "sample_prompts": ("colour number 3",)}
    return small_config(folder, **settings | changes)


def draw(ranks: RankPool, size: int, checkpoint: Path, folder: Path) -> bytes:
    rendezvous = folder.with_name(folder.name + "_meeting")
    rendezvous.mkdir()
    folder.mkdir()
    config = SampleConfig(checkpoint=checkpoint, output_dir=folder, progress="none")
    ranks.run(size, run_job, "sample", config, rendezvous)
    return (folder / "sample_00.png").read_bytes()


def test_latents_are_cached_once_and_an_export_needs_no_other_autoencoder(
    ranks: RankPool, images: Path, tmp_path: Path
) -> None:
    """All ranks cache latents once; an export draws the same without the first autoencoder."""
    vae = save_vae(tmp_path / "vae", seed=1)
    config = latent_config(tmp_path / "run", images, vae)
    ranks.run(2, train, config)
    shards = sorted((tmp_path / "run/cache/latents").glob("*.safetensors"))
    assert shards
    published = (tmp_path / "run/samples/step_0000002/sample_00.png").read_bytes()
    assert draw(ranks, 1, tmp_path / "run", tmp_path / "drawn") == published

    shutil.copytree(tmp_path / "run/export", tmp_path / "elsewhere")
    shutil.rmtree(vae)
    shutil.rmtree(tmp_path / "run")
    assert draw(ranks, 2, tmp_path / "elsewhere", tmp_path / "drawn_elsewhere") == published


def test_another_autoencoder_under_the_same_name_is_refused(ranks: RankPool, images: Path, tmp_path: Path) -> None:
    vae = save_vae(tmp_path / "vae", seed=1)
    ranks.run(1, train, latent_config(tmp_path / "run", images, vae))
    shutil.rmtree(vae)
    save_vae(vae, seed=2)
    with pytest.raises(RanksFailed, match="was started with other settings"):
        ranks.run(1, train, latent_config(tmp_path / "run", images, vae, n_steps=4))


def test_samples_of_a_start_that_never_saved_do_not_pass_for_new_ones(ranks: RankPool, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    stale = config.output_dir / "samples/step_0000002"
    ranks.run(1, train, small_config(tmp_path / "other", seed=5))
    shutil.copytree(tmp_path / "other/samples/step_0000002", stale)
    before = (stale / "sample_00.png").read_bytes()
    ranks.run(1, train, config)
    assert (stale / "sample_00.png").read_bytes() != before
