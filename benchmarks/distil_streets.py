"""Measures the students of `halation distill` with a teacher of the street scenes.

(a) small: is a student with a quarter of the parameters better with `--objective velocity` than when trained from
    scratch with equal steps and data? It starts once from the teacher's weights, cut to size, as `halation distill`
    does, and once from the same random weights as the training from scratch.
(b) few:   how much of the gap between the teacher at 4 and at 50 steps does a 4-step student close, and how much
    faster is it?
(c) cache: how much faster is an epoch with cached teacher targets?

Every training and every score is the shipped command in a separate process. With `--work DIR` runs are kept, and the
same command again does only what is missing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks import inputs, measure, shipped
from benchmarks.street_scores import Jury, Score, captions, run, table, with_interval
from halation.data.streets import caption, scene
from halation.images.grid import make_grid
from halation.images.png_codec import encode_png
from halation.models.checkpoint_loading import build_dit, find_checkpoint, load_denoiser, read_sampling_settings
from halation.models.denoiser import Denoiser, SolverSettings, sample_batch
from halation.sample_specs import SampleBatch, SampleSpec

PIXELS = 32
FEW = 4
GUIDANCE = 3.0
"""Guidance of the teacher; a student has it distilled into its weights."""
SMALL_SHAPE = {"family": "dit", "width": 96, "depth": 3, "heads": 3, "text_width": 48}
GOAL_CLOSED, GOAL_CACHE = 0.8, 2.0
PARTS = ("small", "few", "cache")
DTYPE = "bf16"
"""For every training and all sampling, on both sides."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Numbers of steps, images and rounds."""

    batch: int
    teacher_steps: int
    many: int
    """Steps of the teacher's images and trajectories."""
    num_scored: int
    num_reference: int

    small_steps: int
    small_images: int
    small_states: int
    small_draws: int
    """Sampling steps of the small students, and of the teacher they are compared with."""
    small_guidances: tuple[float, ...]
    """Guidance scales for the student trained from scratch; the best one counts."""

    few_steps: int
    num_trajectories: int
    num_states: int

    cache_steps: int
    rounds: int


FULL = Size(
    batch=32, teacher_steps=2800, many=50, num_scored=500, num_reference=5000, small_steps=400, small_images=2000, small_states=2,
    small_draws=20, small_guidances=(1.0, GUIDANCE), few_steps=800, num_trajectories=600, num_states=12, cache_steps=40, rounds=3,
)  # fmt: skip
QUICK = Size(
    batch=8, teacher_steps=20, many=8, num_scored=16, num_reference=64, small_steps=4, small_images=16, small_states=1, small_draws=8,
    small_guidances=(GUIDANCE,), few_steps=4, num_trajectories=16, num_states=6, cache_steps=3, rounds=1,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Place:
    """The work folder, the size of the benchmark, and the seeds of its trainings."""

    work: Path
    size: Size
    seeds: tuple[int, ...]

    @property
    def jury(self) -> Jury:
        size = self.size
        return Jury(work=self.work, num_images=size.num_scored, num_reference=size.num_reference, dtype=DTYPE)

    @property
    def small_shape(self) -> Path:
        file = self.work / "small_student.json"
        file.write_text(json.dumps(SMALL_SHAPE))
        return file


# Trainings


def rates(lr: float, num_steps: int) -> tuple[object, ...]:
    """Return the flags of a short schedule (warm-up and cosine), the same for both sides."""
    warm_up = max(1, num_steps // 25)
    return (
        "--n_steps", num_steps, "--lr", lr, "--warmup_steps", warm_up, "--decay_steps", num_steps - warm_up, "--betas", 0.9, 0.95,
        "--ema_decay", 0.995, "--dtype", DTYPE,
        "--report_to", "none", "--progress", "none", "--nproc", 1, "--ckpt_every", 0, "--no_sample",
    )  # fmt: skip


def train(place: Place, name: str, seed: int, *words: object) -> Path:
    folder = place.work / name
    common = (
        "--output_dir", folder, "--data", "streets", "--image_size", PIXELS, "--batch_size", place.size.batch, "--validation_images", 0,
    )  # fmt: skip
    run(place.work, name, ["train", *common, "--seed", seed, *words])
    return folder


def distil(place: Place, name: str, teacher: Path, seed: int, *words: object) -> Path:
    folder = place.work / name
    asked = (
        "--teacher_path",
        teacher,
        "--teacher_guidance",
        GUIDANCE,
        "--teacher_steps",
        place.size.many,
        "--teacher_batch_size",
        32,
    )
    common = ("--output_dir", folder, "--batch_size", place.size.batch, "--no_teacher_samples")
    run(place.work, name, ["distill", *common, *asked, "--seed", seed, *words])
    return folder


def make_teacher(place: Place) -> Path:
    settings = rates(2e-3, place.size.teacher_steps)
    return train(place, "teacher", 0, "--model", "tiny", "--patch_size", 4, *settings)


def random_copy(student: Path, seed: int, folder: Path) -> Path:
    """Write an export of the same architecture with random weights, to start a training from."""
    description = json.loads((student / "export" / "config.json").read_text())
    denoiser = build_dit(description).init_weights(seed)
    folder.mkdir(exist_ok=True)
    save_file(
        {name: value.detach() for name, value in denoiser.module.named_parameters()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(description))
    return folder


def num_parameters(folder: Path) -> int:
    return sum(parameter.numel() for parameter in load_denoiser(folder, raw=False).module.parameters())


# (a) A quarter of the parameters


def small(place: Place, teacher: Path) -> tuple[list[Score], list[str]]:
    size, jury = place.size, place.jury
    scores: list[Score] = []
    for seed in place.seeds:
        settings = ("--max_images", size.small_images, *rates(2e-3, size.small_steps))
        targets = ("--teacher_states", size.small_states, "--cache_dir", place.work / f"small_targets_{seed}")
        words = (
            "--data",
            "streets",
            "--objective",
            "velocity",
            "--student_config",
            place.small_shape,
            *targets,
            *settings,
        )
        distilled = distil(place, f"small_distilled_{seed}", teacher, seed, *words)
        anew = distil(place, f"small_anew_{seed}", teacher, seed, *words, "--student_init", "random")
        first = random_copy(distilled, seed, place.work / f"small_first_{seed}")
        scratch = train(place, f"small_scratch_{seed}", seed, "--model", first, *settings)
        steps = size.small_draws
        scores.append(jury.score("teacher", teacher, seed, steps=steps, guidance=GUIDANCE))
        scores.append(jury.score("small_distilled", distilled, seed, steps=steps, guidance=1.0))
        scores.append(jury.score("small_anew", anew, seed, steps=steps, guidance=1.0))
        scores += [
            jury.score("small_scratch", scratch, seed, steps=steps, guidance=value) for value in size.small_guidances
        ]
    share = num_parameters(place.work / f"small_distilled_{place.seeds[0]}") / num_parameters(teacher)
    if share > 0.25:
        raise SystemExit(f"the small student has {share:.1%} of the teacher's parameters, more than a quarter")
    return scores, [f"the small student has {share:.1%} of the teacher's parameters", *_gains(scores, place.seeds)]


def _gains(scores: Sequence[Score], seeds: Sequence[int]) -> list[str]:
    """Compare by seed with the best guidance of the training from scratch, for each score."""

    def of(name: str, seed: int) -> list[Score]:
        return [each for each in scores if (each.name, each.seed) == (name, seed)]

    lines = []
    for name, words in (("small_distilled", "distilled"), ("small_anew", "distilled from random weights")):
        distances, shares = [], []
        for seed in seeds:
            ours, theirs = of(name, seed)[0], of("small_scratch", seed)
            distances.append(min(each.fd for each in theirs) / ours.fd)
            shares.append(ours.agreement - max(each.agreement for each in theirs))
        lines += [
            f"RATIO distil_streets | small: FD-streets, scratch over {words} | {with_interval(distances, 3)}",
            f"GAIN distil_streets | small: agreement, {words} less scratch | {with_interval(shares, 3)}",
        ]
    return lines


# (b) Four steps


def few(place: Place, teacher: Path, objectives: Sequence[str]) -> tuple[list[Score], list[str]]:
    size, jury = place.size, place.jury
    prompts = captions(place.work, "train", size.num_trajectories)
    scores: list[Score] = []
    for seed in place.seeds:
        scores += [jury.score("teacher", teacher, seed, steps=steps, guidance=GUIDANCE) for steps in (FEW, size.many)]
    lines: list[str] = []
    for objective in objectives:
        for seed in place.seeds:
            student = distil(
                place, f"few_{objective}_{seed}", teacher, seed, "--objective", objective, "--student_steps", FEW, "--data", prompts,
                "--teacher_states", size.num_states, "--cache_dir", place.work / f"few_targets_{seed}", *rates(5e-4, size.few_steps),
            )  # fmt: skip
            scores.append(jury.score(objective, student, seed, steps=FEW, guidance=1.0))
        lines.append(_closed(scores, objective, place.seeds))
    shown = place.work / f"few_{objectives[0]}_{place.seeds[0]}"
    draw_grid(place, teacher, shown)
    return scores, [*lines, speed(place, teacher, shown)]


def _closed(scores: Sequence[Score], objective: str, seeds: Sequence[int]) -> str:
    distance = {(each.name, each.steps, each.seed): each.fd for each in scores}
    many = max(each.steps for each in scores)
    shares = []
    for seed in seeds:
        worst, best = distance["teacher", FEW, seed], distance["teacher", many, seed]
        shares.append((worst - distance[objective, FEW, seed]) / (worst - best))
    verdict = "held" if statistics.fmean(shares) >= GOAL_CLOSED else "MISSED"
    return f"CLOSED distil_streets | {objective}, {FEW} steps | {with_interval(shares, 3)} of the gap | goal {GOAL_CLOSED}: {verdict}"


def batch_of(num: int, steps: int, guidance: float) -> SampleBatch:
    def spec(index: int) -> SampleSpec:
        prompt = caption(scene("heldout", index))
        return SampleSpec(
            index=index, id=str(index), prompt=prompt, seed=index, height=PIXELS, width=PIXELS, steps=steps, guidance_scale=guidance
        )  # fmt: skip

    return SampleBatch(specs=tuple(spec(index) for index in range(num)), num_real=num)


def make_sampler(model: Path, steps: int, guidance: float, num: int) -> Callable[[], np.ndarray]:
    """Return a function that samples the same batch at every call, with the run's sampler."""
    found = find_checkpoint(model)
    denoiser: Denoiser = load_denoiser(found, raw=False, checked=True)
    sampling = read_sampling_settings(found)
    solver = SolverSettings(sampler=sampling["sampler"], shift=sampling.get("time_shift", 1.0), use_cfg=guidance != 1.0)
    batch = batch_of(num, steps, guidance)
    return lambda: sample_batch(denoiser, batch, solver).pixels_or_raise()


def speed(place: Place, teacher: Path, student: Path, num: int = 16) -> str:
    torch.set_num_threads(1)
    many = place.size.many
    turns: dict[str, Callable[[], float]] = {
        "teacher": partial(measure.seconds, make_sampler(teacher, many, GUIDANCE, num)),
        "student": partial(measure.seconds, make_sampler(student, FEW, 1.0, num)),
    }
    measure.interleaved(turns, 1)
    rate = {name: num / value for name, value in measure.medians(measure.interleaved(turns, 5)).items()}
    how = f"{FEW} steps against {many} with guidance, {rate['student']:.1f} and {rate['teacher']:.2f} images/s"
    return f"RATIO distil_streets | few: {how} | {rate['student'] / rate['teacher']:.1f}x"


def draw_grid(place: Place, teacher: Path, student: Path, num: int = 8, scale: int = 3) -> None:
    """Write a grid with three rows: teacher with many and few steps, student; same seeds."""
    rows = [(teacher, place.size.many, GUIDANCE), (teacher, FEW, GUIDANCE), (student, FEW, 1.0)]
    drawn = [image for model, steps, guidance in rows for image in make_sampler(model, steps, guidance, num)()]
    cells = [np.kron(image, np.ones((scale, scale, 1), np.uint8)) for image in drawn]
    who = [
        f"{name}, {steps} steps" for name, steps in (("teacher", place.size.many), ("teacher", FEW), ("student", FEW))
    ]
    labels = [who[number // num] for number in range(len(cells))]
    (place.work / "distilled.png").write_bytes(encode_png(make_grid(cells, num, labels), {}))


# (c) Cached teacher targets


def cache(place: Place, teacher: Path) -> list[str]:
    """Measure a small student, where the teacher dominates the time, and one of equal size."""
    images = place.size.batch * place.size.cache_steps
    data = ("--data", "streets", "--max_images", images, "--teacher_states", 1)
    quarter = ("--student_config", place.small_shape)
    return [
        _cache_line(place, teacher, "quarter", (*data, *quarter), images),
        _cache_line(place, teacher, "teacher's shape", data, images),
    ]


def _cache_line(place: Place, teacher: Path, name: str, words: Sequence[object], images: int) -> str:
    turns: dict[str, Callable[[], float]] = {
        flag: partial(epoch_s, place, teacher, flag, words) for flag in ("teacher_cache", "no_teacher_cache")
    }
    figures = measure.interleaved(turns, place.size.rounds)
    kept, asked = (statistics.median(figures[flag]) for flag in turns)
    verdict = "held" if asked / kept >= GOAL_CACHE else "MISSED"
    spreads = [measure.spread(values) for values in figures.values()]
    how = f"{name}, an epoch of {images}: {kept:.1f} s kept ({spreads[0]}), {asked:.1f} s asked ({spreads[1]})"
    return f"RATIO distil_streets | cache: {how} | {asked / kept:.2f}x | goal {GOAL_CACHE}: {verdict}"


_turns = itertools.count()


def epoch_s(place: Place, teacher: Path, flag: str, words: Sequence[object]) -> float:
    """Return the seconds of an epoch, from the median step by the run's clock.

    Cached teacher targets are computed before the first step.
    """
    folder = distil(
        place, f"epoch_{next(_turns)}_{flag}", teacher, 0, "--objective", "velocity", *words, f"--{flag}",
        "--cache_dir", place.work / "epoch_targets", *rates(1e-3, place.size.cache_steps), "--log_every", 1,
    )  # fmt: skip
    lines = shipped.training_lines(folder)
    steps = [later["time_s"] - sooner["time_s"] for sooner, later in itertools.pairwise(lines)]
    return statistics.median(steps) * place.size.cache_steps


# Command line


def asked_for(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test of a minute or two; its numbers are meaningless"
    )
    parser.add_argument(
        "--teacher", type=Path, help="a run of `halation train` on streets at 32 pixels, instead of a new one"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--objectives", nargs="+", choices=["trajectory", "dmd"], default=["trajectory"], help="for few"
    )
    parser.add_argument("--seeds", type=int, default=0, help="trainings of each kind (default 3, quick 1)")
    parser.add_argument("--work", type=Path, help="folder for runs and scores (default: a temporary one, removed)")
    parser.add_argument("--output", type=Path, help="also write scores and lines as JSON to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    asked = asked_for(arguments)
    scores: list[Score] = []
    lines: list[str] = []
    with inputs.workplace(asked.work) as work:
        num_seeds = asked.seeds or (1 if asked.quick else 3)
        place = Place(work=work.resolve(), size=QUICK if asked.quick else FULL, seeds=tuple(range(num_seeds)))
        teacher = asked.teacher.resolve() if asked.teacher else make_teacher(place)
        for part in asked.only:
            found, told = answered(part, place, teacher, asked.objectives)
            scores, lines = scores + found, lines + told
    facts = measure.machine() | asdict(place.size)
    print(f"\ndistil_streets: {measure.describe_facts(facts)}")
    print("\n".join([table(scores), *lines]), flush=True)
    result = {"facts": facts, "scores": [asdict(each) for each in scores], "lines": lines}
    if asked.output is not None:
        asked.output.write_text(json.dumps(result, indent=2) + "\n")
    return result


def answered(part: str, place: Place, teacher: Path, objectives: Sequence[str]) -> tuple[list[Score], list[str]]:
    if part == "small":
        return small(place, teacher)
    if part == "few":
        return few(place, teacher, objectives)
    return [], cache(place, teacher)


if __name__ == "__main__":
    main()
