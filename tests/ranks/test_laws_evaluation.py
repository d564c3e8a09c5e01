"""Evaluations in training: invisible, the same on any ranks and after any stop."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from halation.data.streets import caption, scene
from halation.distributed import rng
from halation.errors import HalationError, Interrupted
from halation.evaluation.config import EvaluateConfig
from halation.evaluation.session import open_images, resolve_config
from halation.training import command as job
from halation.training.config import TrainConfig
from halation.training.periodic_tasks import PeriodicTasks
from halation.training.session import TrainingSession
from support import rank_functions, run_readers
from support.rank_pool import RankPool, RanksFailed

pytestmark = pytest.mark.ranks

NUM_STEPS = 2
NAMES = {
    "FD-streets",
    "KID-streets",
    "precision (streets)",
    "recall (streets)",
    "density (streets)",
    "coverage (streets)",
    "prompt agreement",
}


def evaluated(folder: Path, **changes: Any) -> TrainConfig:
    """Eighteen images on batches of four: five batches, of which the last is padded, for one, two or three ranks."""
    settings = {
        "n_steps": NUM_STEPS,
        "lr": 2e-2,
        "ema_decay": 0.5,
        "sample": False,
        "validation_images": 0,
        "eval_every": 1,
        "eval_images": 18,
        "eval_reference": 24,
        "eval_batch_size": 4,
    }
    return job.resolve_config(rank_functions.small_config(folder, **settings | changes))


class StateCheckingSession(TrainingSession):
    """Looks at everything that an evaluation could disturb, before and after."""

    num_looks = 0

    def _evaluate(self, step: int, saved: bool) -> bool:
        before = self._visible()
        due = super()._evaluate(step, saved)
        assert self._visible() == before
        self.num_looks += due
        return due

    def _visible(self) -> dict[str, Any]:
        weights = [parameter.detach() for _, parameter in self.engine.named_parameters()]
        return {
            "random": rng.capture(self.world.device),
            "modes": [module.training for module in self.denoiser.module.modules()],
            "grad": torch.is_grad_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "weights": [getattr(weight, "to_local", lambda w=weight: w)().numpy().tobytes() for weight in weights],
            "averages": [average.numpy().tobytes() for average in self.ema.tensors().values()],
        }


def train_suspiciously(world: Any, config: TrainConfig) -> int:
    with job.open_run_on_rank_zero(config, world), StateCheckingSession(world, config) as session:
        session.prepare()
        next(iter(session.denoiser.shard_units())).eval()  # one module in its own mode, which must stay its own
        session.run()
        return session.num_looks


def report(folder: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"evaluation/step_{step:07d}.json").read_text())
    return found


def numbers(folder: Path, step: int) -> dict[str, Any]:
    """Everything an evaluation found, except how long it took."""
    metrics = report(folder, step)["metrics"]
    return {key: {name: value for name, value in found.items() if name != "seconds"} for key, found in metrics.items()}


@pytest.mark.parametrize(
    ("engine", "size"),
    [
        pytest.param("single", 1, marks=pytest.mark.slow),
        pytest.param("ddp", 2, marks=pytest.mark.slow),
        ("fsdp", 2),
        pytest.param("ddp", 3, marks=pytest.mark.slow),
        pytest.param("fsdp", 3, marks=pytest.mark.slow),
    ],
)
def test_evaluating_at_every_step_leaves_the_bits_of_training(
    ranks: RankPool, tmp_path: Path, engine: str, size: int
) -> None:
    """Training that evaluates at every step has the bits of training that never evaluates."""
    looking, never = tmp_path / "looking", tmp_path / "never"
    assert ranks.run(size, train_suspiciously, evaluated(looking, engine=engine)) == [NUM_STEPS] * size
    assert ranks.run(size, train_suspiciously, evaluated(never, engine=engine, eval_every=0)) == [0] * size
    assert not (never / "evaluation").exists()
    assert run_readers.checkpoint_bytes(looking, NUM_STEPS) == run_readers.checkpoint_bytes(never, NUM_STEPS)
    assert run_readers.losses(looking) == run_readers.losses(never)
    for rank in range(size):
        mine, theirs = (
            json.loads((folder / f"checkpoints/step_{NUM_STEPS:07d}/rank_state_{rank}.json").read_text())
            for folder in (looking, never)
        )
        assert mine == theirs, "python, numpy and torch drew nothing"

    lines = [row for row in run_readers.metric_rows(looking) if "num_generated" in row]
    assert [row["step"] for row in lines] == [1] * len(NAMES) + [2] * len(NAMES)
    assert {row["metric"] for row in lines} == NAMES
    assert all(row["few"] for row in lines if row["metric"] != "prompt agreement"), "a quick look is marked"
    assert numbers(looking, 1) != numbers(looking, 2), "it is the weights of the step that draw"
    assert (looking / "evaluation/metrics.png").read_bytes().startswith(b"\x89PNG")
    left = sorted(path.name for path in (looking / "evaluation").iterdir())
    assert left == ["metrics.png", "reference", "step_0000001.json", "step_0000002.json"], (
        "no image, no features of them"
    )


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run of two ranks, trained and evaluated once for each engine."""
    known: dict[str, Path] = {}

    def folder(engine: str) -> Path:
        if engine not in known:
            known[engine] = tmp_path_factory.mktemp(f"evaluated_{engine}")
            ranks.run(2, rank_functions.train, evaluated(known[engine], engine=engine))
        return known[engine]

    return folder


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp", "auto"])
def test_a_checkpoint_gives_the_numbers_of_its_training_on_one_two_and_three_ranks(
    ranks: RankPool, tmp_path: Path, trained: Callable[[str], Path], engine: str
) -> None:
    whole = trained(engine)
    for size in (1, 3) if engine == "auto" else (3,):
        folder = tmp_path / f"on_{size}"
        shutil.copytree(whole, folder)
        shutil.rmtree(folder / "evaluation")
        ranks.run(size, rank_functions.train, evaluated(folder, engine=engine))
        assert numbers(folder, NUM_STEPS) == numbers(whole, NUM_STEPS)
        assert report(folder, NUM_STEPS)["num_ranks"] == size


@pytest.mark.parametrize("engine", ["auto", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_halation_evaluate_finds_the_same_numbers_for_the_same_images_of_the_run(
    ranks: RankPool, tmp_path: Path, trained: Callable[[str], Path], engine: str
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(caption(scene("heldout", index)) for index in range(18)))
    asked = EvaluateConfig(
        model_path=str(trained(engine)),
        prompts=str(prompts),
        reference=("streets",),
        num_reference=24,
        num_inference_steps=2,
        batch_size=4,
        model_batch_size=4,
        decode_workers=0,
        allow_few=True,
        cache_dir=tmp_path / "cache",
        output=tmp_path / "report.json",
        progress="none",
    )
    (tmp_path / "rendezvous").mkdir()
    config = resolve_config(asked, open_images(asked))
    ranks.run(2, rank_functions.run_job, "evaluate", config, tmp_path / "rendezvous")
    found = json.loads((tmp_path / "report.json").read_text())["metrics"]
    timeless = {key: {name: one[name] for name in one if name != "seconds"} for key, one in found.items()}
    assert timeless == numbers(trained(engine), NUM_STEPS)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("engine", "point", "culprit"),
    [
        pytest.param("auto", "evaluate.features:2:raise", 1, marks=pytest.mark.slow),
        pytest.param("fsdp", "evaluate.features:2:raise", 0, marks=pytest.mark.slow),
        pytest.param("fsdp", "sample.decode:2:raise", 1, marks=pytest.mark.slow),
        pytest.param("auto", "sample.forward:2:raise", 1, marks=pytest.mark.slow),
        pytest.param("auto", "chunk.write:2:ENOSPC", 1, marks=pytest.mark.slow),
        ("auto", "chunk.write:4:ENOSPC", 1),
        pytest.param("fsdp", "chunk.write:5:ENOSPC", 0, marks=pytest.mark.slow),
        pytest.param("auto", "features:1:raise", 1, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_raises_costs_one_evaluation_which_a_restart_completes(
    ranks: RankPool, tmp_path: Path, trained: Callable[[str], Path], engine: str, point: str, culprit: int
) -> None:
    """The first three chunks that a rank writes are of the reference, the next ones of its two or three batches."""
    whole, folder, fired = trained(engine), tmp_path / "run", tmp_path / "fired"
    config = evaluated(folder, engine=engine, eval_every=NUM_STEPS)
    environment = {"HALATION_FAULT": f"{point}:{culprit}", "HALATION_FAULT_LOG": str(fired)}
    ranks.run(2, rank_functions.train, config, environment=environment)
    assert fired.read_text() == f"{point}:{culprit}\n"
    assert run_readers.checkpoint_bytes(folder, NUM_STEPS) == run_readers.checkpoint_bytes(whole, NUM_STEPS)
    assert not (folder / f"evaluation/step_{NUM_STEPS:07d}.json").exists()
    for rank in (0, 1):
        said = run_readers.rank_log(folder, rank)
        assert f"the evaluation of step {NUM_STEPS} failed; training continues" in said
        assert f"rank {culprit}: " in said

    kept = {path: path.stat().st_mtime_ns for path in folder.glob("evaluation/step_*/*/chunk_*")}
    assert len(kept) == (0 if point.startswith(("features", "chunk.write:2")) else 4), (
        "the other batches need not be drawn again"
    )
    ranks.run(2, rank_functions.train, config)
    assert numbers(folder, NUM_STEPS) == numbers(whole, NUM_STEPS)
    drawn = [line for line in run_readers.rank_log(folder, 0).splitlines() if "batches for an evaluation" in line]
    assert f"sampling {5 - len(kept)} of 5 batches" in drawn[-1]
    assert {row["metric"] for row in run_readers.metric_rows(folder) if "num_generated" in row} == NAMES


class Clumsy(TrainingSession):
    """Whose evaluations fail on all ranks after the first batch, while the averages sit in the model."""

    num_failures = 0

    def _make_periodic_tasks(self) -> PeriodicTasks:
        periodic_tasks = super()._make_periodic_tasks()
        asked = 0

        def stop() -> int:
            nonlocal asked
            asked = asked + 1 if periodic_tasks.ema.is_swapped else 0
            if asked == 2:
                asked = 0
                self.num_failures += 1
                raise HalationError("clumsy")
            return 0

        periodic_tasks.stop = stop
        return periodic_tasks


def train_clumsily(world: Any, config: TrainConfig) -> int:
    with job.open_run_on_rank_zero(config, world), Clumsy(world, config) as session:
        session.prepare()
        session.run()
        return session.num_failures


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("engine", ["fsdp", "auto"])
def test_an_evaluation_that_fails_while_drawing_leaves_the_bits_of_training(
    ranks: RankPool, tmp_path: Path, trained: Callable[[str], Path], engine: str
) -> None:
    """An evaluation that fails in the middle of its drawing leaves the bits of training."""
    assert ranks.run(2, train_clumsily, evaluated(tmp_path, engine=engine)) == [NUM_STEPS] * 2
    assert not list(tmp_path.glob("evaluation/step_*.json"))
    assert "the evaluation of step 1 failed; training continues: clumsy" in run_readers.rank_log(tmp_path, 0)
    assert run_readers.losses(tmp_path) == run_readers.losses(trained(engine))
    assert run_readers.checkpoint_bytes(tmp_path, NUM_STEPS) == run_readers.checkpoint_bytes(trained(engine), NUM_STEPS)


@pytest.mark.faults
@pytest.mark.slow
def test_a_run_killed_while_it_evaluates_goes_on_with_what_is_there(
    ranks: RankPool, tmp_path: Path, trained: Callable[[str], Path]
) -> None:
    whole, folder = trained("auto"), tmp_path / "run"
    config = evaluated(folder, eval_every=NUM_STEPS, dist_timeout_s=4.0)
    with pytest.raises(RanksFailed):
        ranks.run(
            2,
            rank_functions.train,
            config,
            environment={"HALATION_FAULT": "evaluate.features:2:kill:1"},
            world_timeout_s=4.0,
        )
    ranks.run(1, rank_functions.train, config)
    assert numbers(folder, NUM_STEPS) == numbers(whole, NUM_STEPS)


@pytest.mark.slow
@pytest.mark.faults
def test_a_rank_that_hangs_while_it_evaluates_is_named_in_time(ranks: RankPool, tmp_path: Path) -> None:
    config = evaluated(tmp_path, n_steps=1, sample_timeout_s=2.0)
    with pytest.raises(RanksFailed) as caught:
        ranks.run(2, rank_functions.train, config, environment={"HALATION_FAULT": "evaluate.features:1:sleep=5:1"})
    trouble = caught.value.troubles[0]
    assert trouble.kind == "RankFailure"
    assert "rank 1 has made no progress for 2 s in evaluating step 1" in trouble.message


class Stopped(TrainingSession):
    """Whose last rank is asked to stop when the evaluation of the first step begins."""

    def _evaluate(self, step: int, saved: bool) -> bool:
        if step == 1 and self.world.rank == self.world.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super()._evaluate(step, saved)


def train_until_stopped(world: Any, config: TrainConfig) -> tuple[int, int]:
    with job.open_run_on_rank_zero(config, world), Stopped(world, config) as session:
        session.prepare()
        try:
            session.run()
        except Interrupted as interruption:
            return session.train_state.step, interruption.exit_code
    return session.train_state.step, 0


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "ckpt_every"), [("fsdp", 1), ("auto", 0)])
def test_a_stop_request_ends_an_evaluation_at_a_saved_step(
    ranks: RankPool, tmp_path: Path, trained: Callable[[str], Path], engine: str, ckpt_every: int
) -> None:
    """A stop request is granted during an evaluation at a saved step, else at the next step."""
    config = evaluated(tmp_path, engine=engine, ckpt_every=ckpt_every)
    step = 1 if ckpt_every else 2
    assert ranks.run(2, train_until_stopped, config) == [(step, 143)] * 2
    assert not (tmp_path / "evaluation/step_0000001.json").exists()
    ranks.run(2, rank_functions.train, config)
    for done in range(step, NUM_STEPS + 1):
        assert numbers(tmp_path, done) == numbers(trained(engine), done)


@pytest.mark.slow
def test_metric_lines_are_written_from_a_report_without_evaluating_again(
    ranks: RankPool, tmp_path: Path, trained: Callable[[str], Path]
) -> None:
    """Missing metric lines are written from the report; a finished evaluation is not repeated."""
    folder = tmp_path / "run"
    shutil.copytree(trained("auto"), folder)
    before = (folder / "evaluation/step_0000002.json").read_bytes()
    rows = run_readers.metric_rows(folder)
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows if not (row["step"] == 2 and "num_generated" in row))
    )
    ranks.run(1, rank_functions.train, evaluated(folder))
    assert (folder / "evaluation/step_0000002.json").read_bytes() == before
    assert [row for row in run_readers.metric_rows(folder) if "metric" in row] == [
        row for row in rows if "metric" in row
    ]
    ranks.run(1, rank_functions.train, evaluated(folder, eval_images=20))
    assert report(folder, 2)["generated"]["num"] == 20, "asked for in another way it is another evaluation"


@pytest.mark.slow
def test_evaluations_after_the_checkpoint_are_forgotten_and_made_again(
    ranks: RankPool, tmp_path: Path, trained: Callable[[str], Path]
) -> None:
    folder = tmp_path / "run"
    assert ranks.run(2, rank_functions.train_until, evaluated(folder), 1) == [143, 143]
    stale = folder / "evaluation/step_0000002.json"
    stale.parent.mkdir(exist_ok=True)
    stale.write_text("{}")
    ranks.run(2, rank_functions.train, evaluated(folder))
    whole = trained("auto")
    for step in (1, 2):
        assert numbers(folder, step) == numbers(whole, step)
    lines = [(row["step"], row["metric"]) for row in run_readers.metric_rows(folder) if "num_generated" in row]
    assert len(lines) == len(set(lines)) == 2 * len(NAMES)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    generator = np.random.default_rng(3)
    rows = []
    for index in range(20):
        pixels = generator.integers(0, 256, (40, 48, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:02d}.png")
        rows.append(json.dumps({"file_name": f"{index:02d}.png", "text": f"noise number {index}"}))
    (folder / "metadata.jsonl").write_text("\n".join(rows))
    return folder


def test_a_folder_is_compared_with_its_training_images_also_where_they_are_cached(
    ranks: RankPool, tmp_path: Path, images: Path
) -> None:
    changes = {"data": str(images), "eval_extractor": "streets", "eval_metrics": ("kid",), "n_steps": 1}
    for cache in ("memory", "pixels"):
        ranks.run(1, rank_functions.train, evaluated(tmp_path / cache, cache=cache, sample_prompts=(), **changes))
    assert numbers(tmp_path / "memory", 1) == numbers(tmp_path / "pixels", 1)
    found = report(tmp_path / "pixels", 1)
    assert found["reference"]["num"] == found["metrics"]["kid"]["num_reference"] == 20
    assert found["reference"]["path"] == str(images)


@pytest.mark.parametrize(
    ("changes", "found", "advice"),
    [
        ({"eval_extractor": "inception", "eval_weights": "/nosuch.pth"}, r"/nosuch\.pth", "check --eval_weights"),
        (
            {"eval_metrics": ("clip",), "eval_clip_model": "nobody/nothing"},
            "nobody/nothing",
            "pass --eval_clip_model FOLDER",
        ),
        ({"eval_extractor": "nosuch"}, "the extractor 'nosuch'", "check --eval_extractor"),
        ({"eval_weights": "mine.pth"}, r"--eval_weights mine\.pth for the streets extractor", "omit it"),
    ],
)
def test_an_extractor_that_cannot_be_opened_is_refused_before_the_first_step(
    ranks: RankPool, tmp_path: Path, changes: dict[str, Any], found: str, advice: str
) -> None:
    """An extractor that cannot be opened is refused before step 1, with the flags of training."""
    with pytest.raises(RanksFailed, match=found) as caught:
        ranks.run(2, rank_functions.train, evaluated(tmp_path, **changes))
    assert advice in str(caught.value)
    assert "--eval_every 0" in str(caught.value)
    assert not (tmp_path / "metrics.jsonl").exists()
