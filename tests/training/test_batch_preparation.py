"""The images and rows of each rank and step, the same in total for any number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halation import work_division as plan
from halation.data.dataset_protocol import ImageDataset
from halation.data.prefetch import BatchPrefetcher, ShuffledOrder
from halation.data.prompt_dataset import PromptDataset
from halation.data.streets import Streets
from halation.distillation import teacher_targets
from halation.distillation.objectives import NoiseTransform, TeacherInputs, TeacherTargetTransform
from halation.flow.seeded_noise import training_draw
from halation.models.denoiser import null_condition
from halation.models.dit.denoiser import DiTDenoiser, create_dit
from halation.training.loop import MicroBatch
from halation.training.training_task import BatchTransform, positions, to_micro_batches


@given(
    global_batch=st.integers(1, 40),
    most=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    steps=st.integers(1, 3),
)
def test_every_position_is_taken_once_in_order_while_the_number_of_ranks_changes(
    global_batch: int, most: int, sizes: list[int], steps: int
) -> None:
    done = 0
    for number, size in enumerate(sizes):  # each size trains a few steps, then the run is resumed on the next
        first = number * steps
        rows = [list(positions(first, done, first + steps, global_batch, size, rank, most)) for rank in range(size)]
        for step in range(steps):
            taken = []
            for rank in range(size):
                at, mine = rows[rank][step]
                assert at == first + step
                taken.append(mine[: len(plan.rank_range(global_batch, size, rank))])
            assert np.concatenate(taken).tolist() == list(range(done, done + global_batch))
            done += global_batch


@given(global_batch=st.integers(1, 40), most=st.integers(1, 9), size=st.integers(1, 5))
def test_all_ranks_make_the_same_forwards_of_at_most_the_batch_size(global_batch: int, most: int, size: int) -> None:
    number, rows = plan.micro_batch_layout(global_batch, size, most)
    assert rows <= most
    for rank in range(size):
        ((_, mine),) = positions(0, 0, 1, global_batch, size, rank, most)
        assert len(mine) == number * rows
        assert mine.min() >= 0
        assert mine.max() < global_batch


# -- what becomes of them


CPU = torch.device("cpu")
TEXTS = ("a red car", "a blue bus", "a tram at night")
SIZE = (32, 32)


@pytest.fixture(scope="module")
def denoiser() -> DiTDenoiser:
    shape = create_dit("tiny", height=32, width=32, captions=TEXTS, patch_size=16)
    config = dataclasses.replace(shape.config, depth=1, hidden=32, heads=2, text_hidden=16)
    return DiTDenoiser(config=config, space=shape.space, tokenizer=shape.tokenizer).init_weights(0)


def prompts(folder: Path) -> PromptDataset:
    (folder / "prompts.txt").write_text("\n".join(TEXTS))
    return PromptDataset(folder / "prompts.txt", *SIZE, num_items=12)


def rows_of(
    denoiser: DiTDenoiser, source: ImageDataset, prepare: Callable[[dict[str, Any]], dict[str, Any]], rows: int
) -> list[tuple[np.ndarray, MicroBatch]]:
    """Two batches of six items, as micro-batches of `rows`, each with the items in it."""
    seen: list[np.ndarray] = []

    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        seen.extend(np.split(batch["indices"], range(rows, 6, rows)))
        return prepare(batch)

    order = ShuffledOrder(0, source.num_train)
    with BatchPrefetcher(
        source, order, [(4, range(6)), (5, range(6, 12))], num_threads=1, transform=transform
    ) as loader:
        micro = [one for batch in loader for one in to_micro_batches(denoiser.space, batch, rows, CPU)]
    return list(zip(seen, micro, strict=True))


def lessons_of(
    folder: Path, denoiser: DiTDenoiser, source: ImageDataset, plan: teacher_targets.TargetPlan
) -> teacher_targets.TeacherTargets:
    """Answers that say which item and which time they belong to."""
    items = TeacherInputs(denoiser, source, CPU, plan.dropout_mask)
    fingerprint = {"plan": plan.as_json()}
    teacher_targets.build(
        plan,
        folder,
        range(source.num_train),
        path=denoiser.noise_path,
        predict=lambda x, t, condition: (
            x * 0 + t.reshape(-1, 1, 1, 1) + condition["tokens"].sum(1).reshape(-1, 1, 1, 1)
        ),
        condition=items.condition,
        x0=items.x0 if plan.has_images else None,
        prompt=items.prompt,
        fingerprint=fingerprint,
        device=CPU,
    )
    return teacher_targets.open_targets(folder, fingerprint)


@pytest.mark.parametrize("images", [False, True])
def test_a_lesson_arrives_with_its_item_s_caption_its_time_and_its_answer(
    tmp_path: Path, denoiser: DiTDenoiser, images: bool
) -> None:
    source: ImageDataset = Streets(32, 32, num_train=12) if images else prompts(tmp_path)
    plan = teacher_targets.TargetPlan(
        objective="velocity",
        has_images=images,
        times=(1.0, 0.8, 0.6, 0.3, 0.0),
        teacher_steps=4,
        num_states=4,
        sample_shape=(3, 32, 32),
        seed=1,
        caption_dropout=0.4,
    )
    kept = lessons_of(tmp_path / "lessons", denoiser, source, plan)
    prepare = TeacherTargetTransform(denoiser, kept, plan, size=SIZE, num_real=5, pin=False)
    chosen = set()
    for items, rows in rows_of(denoiser, source, prepare, rows=3):
        null = null_condition(denoiser, 1)
        for row, item in enumerate(items.tolist()):
            told = denoiser.encode_prompts([source.train(item).caption])
            told = null if bool(plan.dropout_mask([item])) else told
            assert torch.equal(rows.condition["tokens"][row], told["tokens"][0])
            assert torch.equal(rows.condition["mask"][row], told["mask"][0])
            expected = float(rows.t[row]) + float(told["tokens"].sum())
            assert rows.extra["target"][row].mean() == pytest.approx(expected, rel=1e-3)
            state = [kept.read([item], [which])[0][0] for which in range(4)]
            (which,) = [which for which in range(4) if torch.equal(state[which].float(), rows.extra["state"][row])]
            chosen.add(which)
        assert rows.x0.shape == rows.noise.shape == (3, 0)
        assert rows.extra["state"].dtype == rows.extra["target"].dtype == rows.t.dtype == torch.float32
        assert rows.step in (4, 5)
    assert chosen == {0, 1, 2, 3}


def test_padding_rows_weigh_nothing_and_micro_batches_make_the_whole_batch(
    tmp_path: Path, denoiser: DiTDenoiser
) -> None:
    """Padding rows weigh nothing, and micro-batches together are the whole batch."""
    source = prompts(tmp_path)
    common: dict[str, Any] = {
        "seed": 1,
        "dropout": 0.0,
        "time_shift": 1.0,
        "size": SIZE,
        "from_prompts": True,
        "pin": False,
    }
    prepare = NoiseTransform(denoiser, num_real=5, **common)
    whole = [rows for _, rows in rows_of(denoiser, source, prepare, rows=6)]
    parts = [rows for _, rows in rows_of(denoiser, source, prepare, rows=2)]
    assert [rows.weight.tolist() for rows in whole] == [[1, 1, 1, 1, 1, 0]] * 2
    assert torch.equal(torch.cat([rows.weight for rows in parts[:3]]), whole[0].weight)
    assert torch.equal(torch.cat([rows.noise for rows in parts[:3]]), whole[0].noise)
    assert torch.equal(torch.cat([rows.extra["renoise"] for rows in parts[3:]]), whole[1].extra["renoise"])


@pytest.mark.parametrize("images", [False, True])
def test_noise_to_draw_from_is_that_of_the_position_and_images_are_left_alone(
    tmp_path: Path, denoiser: DiTDenoiser, images: bool
) -> None:
    source: ImageDataset = Streets(32, 32, num_train=12) if images else prompts(tmp_path)
    common: dict[str, Any] = {"seed": 1, "dropout": 0.5, "time_shift": 3.0, "size": SIZE, "pin": False}
    prepare = NoiseTransform(denoiser, from_prompts=not images, num_real=6, **common)
    times = []
    for number, (items, rows) in enumerate(rows_of(denoiser, source, prepare, rows=6)):
        draws = [training_draw(1, 6 * number + row, (3, 32, 32)) for row in range(6)]
        assert torch.equal(rows.noise, torch.from_numpy(np.stack([draw.noise for draw in draws])))
        assert rows.x0.numel() == 0
        assert abs(float(np.corrcoef(rows.noise.flatten(), rows.extra["renoise"].flatten())[0, 1])) < 0.05
        assert not torch.equal(rows.extra["renoise"][0], rows.extra["renoise"][1])
        captions = [
            "" if draw.u_drop < 0.5 else source.train(item).caption
            for draw, item in zip(draws, items.tolist(), strict=True)
        ]
        assert torch.equal(rows.condition["tokens"], denoiser.encode_prompts(captions)["tokens"])
        shifted = [3 * draw.u_time / (1 + 2 * draw.u_time) for draw in draws]
        assert rows.t.tolist() == pytest.approx([min(max(t, 0.02), 0.98) for t in shifted])
        times += rows.t.tolist()
    assert len(set(times)) > 6


def test_images_of_a_training_become_what_the_model_learns(denoiser: DiTDenoiser) -> None:
    source = Streets(32, 32, num_train=12)
    prepare = BatchTransform(
        denoiser, seed=1, dropout=0.0, time_sampling="uniform", time_shift=1.0, num_real=6, pin=False
    )
    for items, rows in rows_of(denoiser, source, prepare, rows=6):
        pixels = torch.from_numpy(np.stack([source.train(item).pixels for item in items.tolist()]))
        assert torch.equal(rows.x0, denoiser.space.encode(pixels))
        assert rows.noise.shape == rows.x0.shape
        assert rows.extra == {}
