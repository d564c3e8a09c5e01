"""Laws of training for fine-tuned pipelines, on every engine."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import halation
from halation.images.png_codec import read_png
from halation.sampling.config import SampleConfig
from halation.training.config import TrainConfig
from support import rank_functions, run_readers, tiny_models
from support.rank_pool import RankPool, RanksFailed

pytestmark = pytest.mark.ranks

NUM_STEPS = 2
PATIENCE = {"timeout_s": 200.0, "world_timeout_s": 100.0}
SLOW = pytest.mark.slow
HUNYUAN = [
    pytest.param("hunyuan", "ddp", 3, marks=SLOW),
    pytest.param("hunyuan", "fsdp", 2, marks=SLOW),
    pytest.param("hunyuan", "fsdp", 3, marks=SLOW),
    pytest.param("hunyuan", "zero1", 2, marks=SLOW),
    pytest.param("hunyuan", "zero2", 3, marks=SLOW),
    pytest.param("hunyuan", "zero3", 3, marks=SLOW),
]
PAIRS = [
    ("hunyuan", "fsdp", 2),
    *(pair for pair in HUNYUAN if pair.values[1:] != ("fsdp", 2)),
    pytest.param("pixart", "fsdp", 3, marks=SLOW),
    pytest.param("pixart_sigma", "ddp", 2, marks=SLOW),
    pytest.param("sd3", "ddp", 3, marks=SLOW),
    pytest.param("sd3", "zero2", 2, marks=SLOW),
    pytest.param("flux", "fsdp", 2, marks=SLOW),
    pytest.param("flux", "zero3", 3, marks=SLOW),
]


def tuned(folder: Path, family: str, engine: str, **changes: Any) -> TrainConfig:
    """A fine-tuning of seconds, with steps that show in the images; `zero2` is stage 2 of DeepSpeed."""
    settings: dict[str, Any] = {
        "model": TrainConfig.model,
        "patch_size": 0,
        "model_path": str(tiny_models.built(family)),
        "max_images": 6,
        "n_steps": NUM_STEPS,
        "lr": 2e-3,
        "ema_decay": 0.5,
        "ckpt_every": 1,
        "dist_timeout_s": 100.0,
        "engine": "deepspeed" if engine.startswith("zero") else engine,
    }
    if engine.startswith("zero"):
        settings["zero_stage"] = int(engine[-1])
    return rank_functions.small_config(folder, **settings | changes)


def rank_states(folder: Path, size: int) -> list[Any]:
    place = folder / f"checkpoints/step_{NUM_STEPS:07d}"
    return [json.loads((place / f"rank_state_{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.parametrize(("family", "engine", "size"), PAIRS)
def test_sampling_at_every_step_leaves_the_bits_of_fine_tuning(
    ranks: RankPool, tmp_path: Path, family: str, engine: str, size: int
) -> None:
    """Fine-tuning that samples at every step has the bits of one that never samples."""
    drawing = tuned(tmp_path / "drawing", family, engine, sample_raw=True, sample_offload=True)
    ranks.run(size, rank_functions.train, drawing, **PATIENCE)
    never = tuned(tmp_path / "never", family, engine, sample=False, ckpt_every=0, validation_images=0)
    ranks.run(size, rank_functions.train, never, **PATIENCE)
    assert len(list((tmp_path / "drawing/samples").glob("step_*/sample_*.png"))) == (1 + NUM_STEPS) * 2 * 2
    assert not (tmp_path / "never/samples").exists()
    assert run_readers.checkpoint_bytes(tmp_path / "drawing", NUM_STEPS) == run_readers.checkpoint_bytes(
        tmp_path / "never", NUM_STEPS
    )
    assert run_readers.losses(tmp_path / "drawing") == run_readers.losses(tmp_path / "never")
    assert rank_states(tmp_path / "drawing", size) == rank_states(tmp_path / "never", size)


def test_defaults_are_resolved_once_for_all_ranks_and_later_starts(ranks: RankPool, tmp_path: Path) -> None:
    missing: dict[str, Any] = dict.fromkeys(("batch_size", "accumulate", "lr", "dtype", "warmup_steps", "ckpt_every"))
    config = tuned(tmp_path, "hunyuan", "ddp", max_images=40, sample=False, validation_images=0, **missing)
    assert ranks.run(3, rank_functions.train_until, config, 1, **PATIENCE) == [128 + signal.SIGTERM] * 3
    record = json.loads((tmp_path / "config.json").read_text())
    resolved = {"batch_size": 1, "accumulate": 1, "lr": 1e-5, "dtype": "fp32", "warmup_steps": 0, "ckpt_every": 10}
    assert {name: record["settings"][name] for name in resolved} == resolved
    assert record["fixed"]["global batch"] == 3
    ranks.run(2, rank_functions.train, config, **PATIENCE)
    after = json.loads((tmp_path / "config.json").read_text())
    assert after["fixed"] == record["fixed"]
    assert {name: after["settings"][name] for name in resolved} == resolved
    assert sorted(run_readers.losses(tmp_path)) == [1, 2]


def num_fitting(world: Any, config: TrainConfig, sides: tuple[int, ...]) -> list[int]:
    """The images of several sizes that the memory estimate says fit, by `memory_fit_check`."""
    from halation.training import memory_fit_check, pipeline_finetuning

    numbers = []
    for side in sides:
        sized = dataclasses.replace(config, image_size=(side, side), dtype="fp32")
        denoiser = pipeline_finetuning.open_denoiser(sized, world.device)
        numbers.append(memory_fit_check.num_images_that_fit(world, sized, denoiser))
    return numbers


def test_more_small_images_fit_into_memory_than_large_ones(ranks: RankPool, tmp_path: Path) -> None:
    config = tuned(tmp_path, "hunyuan", "ddp")
    small, large = ranks.run(1, num_fitting, config, (32, 512), **PATIENCE)[0]
    assert small > 2 * large > 2


def test_the_base_model_is_sampled_once_before_the_first_step(ranks: RankPool, tmp_path: Path) -> None:
    changes = {"n_steps": 2, "ckpt_every": 0, "sample_prompts": rank_functions.PROMPTS[:3], "guidance_scale": 3.0}
    config = tuned(tmp_path / "run", "hunyuan", "ddp", image_size=(64, 64), **changes)
    assert ranks.run(2, rank_functions.train_until, config, 1, **PATIENCE) == [128 + signal.SIGTERM] * 2
    place = tmp_path / "run/samples/step_0000000"
    before = {path.name: path.stat().st_mtime_ns for path in place.iterdir()}
    assert len(before) == 3 + 3 + 2, "images, prompts, grid and index"
    index = json.loads((place / "samples.json").read_text())
    assert (index["step"], index["loss"], [row["state"] for row in index["samples"]]) == (0, None, ["done"] * 3)
    ranks.run(1, rank_functions.train, config, **PATIENCE)
    assert {path.name: path.stat().st_mtime_ns for path in place.iterdir()} == before
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(config.sample_prompts) + "\n")
    halation.generate(
        prompts_csv=prompts, model_path=config.model_path, output_dir=tmp_path / "base", height=64, width=64,
        num_inference_steps=2, guidance_scale=3.0, batch_size=1, seed_start=42, progress="none", nproc=1,
    )  # fmt: skip
    images = [
        [read_png(path)[0] for path in sorted(folder.glob("*.png")) if path.name != "grid.png"]
        for folder in (place, tmp_path / "base")
    ]
    np.testing.assert_array_equal(*images)


@pytest.mark.parametrize(
    ("family", "engine", "size"),
    [
        # Fast ones of resumed fine-tuning: adapters, and buckets on another number of ranks, below.
        pytest.param("hunyuan", "zero3", 2, marks=SLOW),
        *HUNYUAN,
        pytest.param("sd3", "fsdp", 2, marks=SLOW),
        pytest.param("flux", "ddp", 3, marks=SLOW),
    ],
)
def test_a_stopped_fine_tuning_ends_in_the_bits_of_one_that_never_stopped(
    ranks: RankPool, tmp_path: Path, family: str, engine: str, size: int
) -> None:
    changes = {"ckpt_every": 0, "n_steps": 3, "sample_prompts": ("a street",)}
    ranks.run(size, rank_functions.train, tuned(tmp_path / "whole", family, engine, **changes), **PATIENCE)
    stopped = tuned(tmp_path / "stopped", family, engine, **changes)
    assert (
        ranks.run(size, rank_functions.train_until, stopped, 1, size - 1, **PATIENCE) == [128 + signal.SIGTERM] * size
    )
    ranks.run(size, rank_functions.train, stopped, **PATIENCE)
    assert run_readers.checkpoint_bytes(tmp_path / "stopped", 3) == run_readers.checkpoint_bytes(tmp_path / "whole", 3)
    assert run_readers.losses(tmp_path / "stopped") == run_readers.losses(tmp_path / "whole")
    images = [run_readers.sample_files(tmp_path / name / "samples/step_0000003") for name in ("stopped", "whole")]
    assert images[0] == images[1]


@pytest.mark.parametrize(
    ("family", "engine"),
    [
        pytest.param("hunyuan", "zero3", marks=SLOW),
        ("hunyuan", "ddp"),
        *(pytest.param(family, "fsdp", marks=SLOW) for family in ("hunyuan", "pixart", "sd3", "flux")),
    ],
)
def test_a_pipeline_checkpoint_gives_the_published_images_on_any_ranks(
    ranks: RankPool, tmp_path: Path, family: str, engine: str
) -> None:
    """A checkpoint of a pipeline gives the published images on one, two and three ranks."""
    changes = {"sample_prompts": rank_functions.PROMPTS, "sample_batch_size": 2, "ckpt_every": 0, "n_steps": 1}
    ranks.run(2, rank_functions.train, tuned(tmp_path / "run", family, engine, **changes), **PATIENCE)
    published = run_readers.sample_files(tmp_path / "run/samples/step_0000001")
    assert len(published) == 5 + 5 + 1, "images, prompts and the grid"
    assert len({data for name, data in published.items() if name.endswith(".png")}) == 6, "prompts and seeds differ"
    for size in (1, 3):
        rendezvous = tmp_path / f"rendezvous_{size}"
        rendezvous.mkdir()
        output = tmp_path / f"by_hand_{size}"
        config = SampleConfig(checkpoint=tmp_path / "run", output_dir=output, progress="none", dist_timeout_s=60.0)
        ranks.run(size, rank_functions.run_job, "sample", config, rendezvous, **PATIENCE)
        assert run_readers.sample_files(output) == published


OWN_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"height": 64, "width": 32},
    {"steps": 3, "guidance_scale": 1.0},
    {"negative_prompt": "a rainy day", "seed": 7},
    {"steps": 3},
)


@pytest.mark.parametrize("sizes", [(), pytest.param((1, 2), marks=SLOW)])
def test_rows_with_settings_of_their_own_give_the_same_images_on_any_ranks(
    ranks: RankPool, tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    """Prompts of other sizes, steps and guidance: sharded on three ranks, and from a file on one."""
    prompts = rank_functions.PROMPTS
    rows = tuple(json.dumps({"prompt": text} | own) for text, own in zip(prompts, OWN_SETTINGS, strict=True))
    changes = {"sample_prompts": prompts, "sample_rows": rows, "guidance_scale": 2.0, "ckpt_every": 0, "n_steps": 1}
    config = tuned(tmp_path / "run", "hunyuan", "fsdp", **changes)
    ranks.run(3, rank_functions.train, config, **PATIENCE)
    place = tmp_path / "run/samples/step_0000001"
    index = run_readers.sample_rows(tmp_path / "run", 1)
    assert [row["state"] for row in index] == ["done"] * 5
    assert [(row["height"], row["steps"], row["guidance_scale"]) for row in index] == [
        (32, 2, 2.0), (64, 2, 2.0), (32, 3, 1.0), (32, 2, 2.0), (32, 3, 2.0),
    ]  # fmt: skip
    assert [read_png(place / row["file"])[0].shape[:2] for row in index] == [(row["height"], 32) for row in index]
    published = run_readers.sample_files(place)
    for size in sizes:
        shutil.rmtree(place)
        ranks.run(size, rank_functions.train, config, **PATIENCE)
        assert run_readers.sample_files(place) == published
        one = dataclasses.replace(config, sample_prompts=prompts[2:3], sample_rows=rows[2:3])
        ranks.run(size, rank_functions.train, one, **PATIENCE)
        assert [row["state"] for row in run_readers.sample_rows(tmp_path / "run", 1)] == ["done"]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(rows))
    rendezvous = tmp_path / "rendezvous"
    rendezvous.mkdir()
    by_file = SampleConfig(
        checkpoint=tmp_path / "run", prompts_file=str(file), output_dir=tmp_path / "by_file", progress="none"
    )
    ranks.run(1, rank_functions.run_job, "sample", by_file, rendezvous, **PATIENCE)
    assert run_readers.sample_files(tmp_path / "by_file") == published


@SLOW
@pytest.mark.parametrize("engine", ["zero3", "fsdp", "ddp"])
def test_no_one_and_five_prompts_on_three_ranks_are_each_drawn_once(
    ranks: RankPool, tmp_path: Path, engine: str
) -> None:
    for num in (0, 1, 5):
        config = tuned(
            tmp_path / str(num),
            "hunyuan",
            engine,
            n_steps=1,
            sample_prompts=rank_functions.PROMPTS[:num],
            sample=num > 0,
        )
        ranks.run(3, rank_functions.train, config, **PATIENCE)
        if num:
            rows = run_readers.sample_rows(tmp_path / str(num), 1)
            assert [row["state"] for row in rows] == ["done"] * num


@SLOW
@pytest.mark.parametrize("family", ["hunyuan", "pixart", "sd3", "flux"])
def test_engines_agree_after_some_steps(ranks: RankPool, tmp_path: Path, family: str) -> None:
    weights = {}
    for engine in ("ddp", "fsdp", "zero1", "zero2", "zero3"):
        config = tuned(tmp_path / engine, family, engine, n_steps=4, lr=1e-4, ckpt_every=0, sample=False)
        ranks.run(2, rank_functions.train, config, **PATIENCE)
        weights[engine] = (run_readers.losses(tmp_path / engine), run_readers.validation_losses(tmp_path / engine))
    losses, validation = weights["ddp"]
    for engine, (others, theirs) in weights.items():
        assert others == pytest.approx(losses, rel=1e-5), engine
        assert theirs == pytest.approx(validation, rel=1e-5), engine


@pytest.mark.parametrize("engine", ["fsdp", pytest.param("ddp", marks=SLOW), pytest.param("zero2", marks=SLOW)])
def test_adapters_alone_are_trained_saved_and_resumed(ranks: RankPool, tmp_path: Path, engine: str) -> None:
    changes = {"lora_rank": 2, "n_steps": 3, "ckpt_every": 0, "lr": 1e-2}
    ranks.run(2, rank_functions.train, tuned(tmp_path / "whole", "hunyuan", engine, **changes), **PATIENCE)
    stopped = tuned(tmp_path / "stopped", "hunyuan", engine, **changes)
    ranks.run(2, rank_functions.train_until, stopped, 2, 0, **PATIENCE)
    ranks.run(2, rank_functions.train, stopped, **PATIENCE)
    assert run_readers.checkpoint_bytes(tmp_path / "stopped", 3) == run_readers.checkpoint_bytes(tmp_path / "whole", 3)
    names = run_readers.tensors_at(tmp_path / "whole", 3, "model")
    assert names
    assert all("lora" in name for name in names)
    assert any(np.abs(values).max() > 0 for name, values in names.items() if "lora_B" in name)
    assert (tmp_path / "whole/export/pytorch_lora_weights.safetensors").exists()


def images_of_two_shapes(folder: Path) -> Path:
    """Twelve captioned images, half of them twice as wide as high."""
    folder.mkdir()
    rows = []
    for index in range(12):
        size = (128, 64) if index % 2 else (96, 96)
        pixels = np.random.default_rng(index).integers(0, 255, (size[1], size[0], 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
        rows.append(json.dumps({"file_name": f"{index}.png", "text": f"image {index}"}))
    (folder / "metadata.jsonl").write_text("\n".join(rows))
    return folder


@SLOW
def test_in_buckets_another_number_of_ranks_and_another_batch_go_on(ranks: RankPool, tmp_path: Path) -> None:
    data = str(images_of_two_shapes(tmp_path / "data"))
    changes = {"data": data, "max_images": 0, "aspect_buckets": True, "image_size": (96, 96), "sample": False}
    changes |= {"validation_images": 0, "ckpt_every": 0, "lr": 1e-4, "ema_decay": 0.9}
    whole = tuned(tmp_path / "whole", "hunyuan", "ddp", n_steps=6, batch_size=4, **changes)
    ranks.run(1, rank_functions.train, whole, **PATIENCE)
    moved = tuned(tmp_path / "moved", "hunyuan", "ddp", n_steps=6, batch_size=2, **changes)
    ranks.run(2, rank_functions.train_until, moved, 3, 0, **PATIENCE)
    ranks.run(3, rank_functions.train, moved, **PATIENCE)
    assert run_readers.losses(tmp_path / "moved") == pytest.approx(run_readers.losses(tmp_path / "whole"), rel=1e-4)
    larger = tuned(tmp_path / "moved", "hunyuan", "ddp", n_steps=8, batch_size=6, accept_changes=True, **changes)
    ranks.run(1, rank_functions.train, larger, **PATIENCE)
    assert sorted(run_readers.losses(tmp_path / "moved")) == list(range(1, 9))


def test_a_change_that_nothing_was_saved_with_is_not_recorded(ranks: RankPool, tmp_path: Path) -> None:
    begun = tuned(tmp_path, "hunyuan", "single", n_steps=1)
    ranks.run(1, rank_functions.train, begun, **PATIENCE)
    record = (tmp_path / "config.json").read_bytes()
    adapters = tuned(tmp_path, "hunyuan", "single", n_steps=2, lora_rank=2, accept_changes=True)
    with pytest.raises(RanksFailed, match="does not match the model of these settings"):
        ranks.run(1, rank_functions.train, adapters, **PATIENCE)
    assert (tmp_path / "config.json").read_bytes() == record
    ranks.run(1, rank_functions.train, tuned(tmp_path, "hunyuan", "single", n_steps=2), **PATIENCE)
