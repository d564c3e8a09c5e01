"""Test of sampling on four ranks: real processes sample with a tiny Wan.

The result of each check is printed on a line. `python test_parallel_sample_generation.py [FOLDER]`; without a folder
the images are discarded.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from halation import work_division
from halation.errors import InputError
from halation.images.png_codec import read_png

NUM_RANKS = 4
PROMPTS = ("A cat", "A dog", "A bird", "A fish", "A glass vase of tulips on a piano", "A greenhouse full of ferns")
EPOCH = 10
SIZE = 64
PATIENCE_S = 300.0
RULE = "=" * 80
SUMMARY = f"""✓ ALL CHECKS PASSED

Sampling on {NUM_RANKS} ranks:
1. generate_and_save_samples takes rank and world_size
2. the prompts are divided among the ranks
3. every rank that has prompts samples
4. every file name has the rank, so that no image overwrites another
5. world_size decides the shares, and one that is not the group's is rejected"""
Check = tuple[bool, str]


def draw(models: tuple[Any, Any], folder: Path, **place: int) -> list[dict[str, Any]]:
    """Call the function as a training loop does; without rank and world_size, in one process."""
    import torch
    from train_distillation import generate_and_save_samples

    teacher, student = models
    return generate_and_save_samples(
        student, teacher.text_encoder, teacher.vae, teacher, PROMPTS, folder, EPOCH, "cpu", "cpu", torch.float32,
        {"image_size": SIZE, "sample_steps": 2}, **place,
    )  # fmt: skip


def rank_main(rank: int, size: int, folder: str, model: str) -> None:
    """Run one rank: sample with a student in DDP, then again with an error on rank 1.

    The results are written to a file.
    """
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(size)})
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    place = {"rank": rank, "world_size": size}
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    teacher, student = opened(model)
    models = teacher, torch.nn.parallel.DistributedDataParallel(student)
    state = torch.random.get_rng_state()
    refusal = ""
    try:
        draw(models, Path(folder) / "four", rank=rank, world_size=size + 1)
    except InputError as error:
        refusal = str(error)
    rows = draw(models, Path(folder) / "four", **place)
    untouched = torch.equal(state, torch.random.get_rng_state()) and student.training
    os.environ["HALATION_FAULT"] = "sample.prepare:1+:raise:1"
    with logged_errors() as errors:  # expected ones, which would look like a failed test on the terminal
        states = [row["state"] for row in draw(models, Path(folder) / "fault", **place)]
    found = {"rows": rows, "refusal": refusal, "untouched": untouched, "states": states, "errors": errors}
    (Path(folder) / f"rank_{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@contextlib.contextmanager
def logged_errors() -> Iterator[list[str]]:
    """Collect the errors that Halation logs, instead of printing them."""
    lines: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("halation")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def opened(model: str) -> tuple[Any, Any]:
    """Load the teacher's pipeline and create a student, the same on every rank."""
    from halation.models.pipelines import load

    load.filter_library_warnings()
    import diffusers
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.disable_progress_bar()
    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(model, use_safetensors=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        student: Any = type(pipe.transformer).from_config(pipe.transformer.config)
    return pipe, student.train()


def drawn(folder: Path, model: Path) -> tuple[list[int | None], list[dict[str, Any]]]:
    """Run the ranks; return their exit codes and results."""
    context = multiprocessing.get_context("spawn")
    arguments = (NUM_RANKS, str(folder), str(model))
    processes = [context.Process(target=rank_main, args=(rank, *arguments)) for rank in range(NUM_RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
        if process.is_alive():
            process.kill()
            process.join()
    paths = [folder / f"rank_{rank}.json" for rank in range(NUM_RANKS)]
    return [process.exitcode for process in processes], [
        json.loads(path.read_text()) for path in paths if path.exists()
    ]


def checks(folder: Path) -> Iterator[Check]:
    """Yield the checks one by one, so that those before an error are still printed."""
    import tiny_wan
    from train_distillation import generate_and_save_samples

    parameters = inspect.signature(generate_and_save_samples).parameters
    defaults = {name: parameters[name].default for name in ("rank", "world_size") if name in parameters}
    yield defaults == {"rank": 0, "world_size": 1}, f"generate_and_save_samples takes rank and world_size: {defaults}"
    shares = [len(work_division.rank_range(len(PROMPTS), NUM_RANKS, rank)) for rank in range(NUM_RANKS)]
    yield shares == [2, 2, 2, 0], f"{len(PROMPTS)} prompts on {NUM_RANKS} ranks are divided as {shares}"
    model = folder / "tiny_wan"
    tiny_wan.ensure(model)
    codes, words = drawn(folder, model)
    yield codes == [0] * NUM_RANKS, f"{NUM_RANKS} processes exited, including the one without prompts: {codes}"
    rows = words[0]["rows"]
    yield all(word["rows"] == rows for word in words), "every rank returned the rows of all images"
    drew = sorted({row["rank"] for row in rows if row["state"] == "done"})
    yield {0, 1, 2} <= set(drew), f"every rank with prompts sampled: ranks {drew}"
    yield all(word["untouched"] for word in words), "the random state and mode of every rank are unchanged"
    refused = [word["refusal"] for word in words]
    yield all(f"of {NUM_RANKS + 1}" in text for text in refused), "a world_size other than the group's is rejected"
    yield from _files(folder / "four", rows)
    alone = draw(opened(str(model)), folder / "one")
    same = [
        np.array_equal(read_png(folder / "four" / row["file"])[0], read_png(folder / "one" / other["file"])[0])
        for row, other in zip(rows, alone, strict=True)
    ]
    yield all(same), f"one process alone samples the same {len(same)} images, pixel for pixel"
    states = words[0]["states"]
    good = states[2] == "failed" and states[:2] + states[4:] == ["done"] * 4
    yield good, f"errors on rank 1 fail only images of its share: {states}"
    logged = {line.partition(":")[0] for word in words for line in word["errors"]}
    yield logged == {"Error during sampling on GPU 1"}, f"these errors, and no others, are logged: {sorted(logged)}"


def _files(folder: Path, rows: list[dict[str, Any]]) -> Iterator[Check]:
    places = [work_division.rank_and_offset(index, len(PROMPTS), NUM_RANKS) for index in range(len(PROMPTS))]
    stems = [f"epoch_{EPOCH:04d}_rank_{rank}_sample_{number:02d}" for rank, number in places]
    wanted = {f"{stem}{kind}" for stem in stems for kind in (".png", ".txt")}
    found = {path.name for path in folder.iterdir()} - {
        f"epoch_{EPOCH:04d}_grid.png",
        f"epoch_{EPOCH:04d}_samples.json",
    }
    yield found == wanted, f"{len(wanted)} files, {stems[0]}.png to {stems[-1]}.txt, and no others"
    yield [row["file"] for row in rows] == [f"{stem}.png" for stem in stems], "names follow the shares of the ranks"
    texts = [(folder / f"{stem}.txt").read_text(encoding="utf-8") for stem in stems]
    yield texts == list(PROMPTS), "each image has its prompt in a file beside it"
    images = [read_png(folder / f"{stem}.png")[0] for stem in stems]
    distinct = len({image.tobytes() for image in images if np.ptp(image)})
    shapes = {image.shape for image in images}
    yield shapes == {(SIZE, SIZE, 3)}, f"images are {SIZE} x {SIZE}: {sorted(shapes)}"
    yield distinct == len(PROMPTS), f"{distinct} of {len(PROMPTS)} images differ from all others"


def report(found: Iterator[Check]) -> bool:
    good = True
    try:
        for passed, sentence in found:
            print(f"{'ok  ' if passed else 'FAIL'} {sentence}", flush=True)
            good &= passed
    except (OSError, KeyError, ValueError, IndexError, InputError) as error:
        print(f"FAIL {type(error).__name__}: {error}", flush=True)
        good = False
    return good


def main(words: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="halation_samples_") as scratch:
        folder = Path(words[0]) if words else Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            print(f"{folder} is not empty; give another folder, or none")
            return 2
        print(f"{NUM_RANKS} processes sample {len(PROMPTS)} prompts with a tiny Wan", flush=True)
        good = report(checks(folder))
    print(f"{RULE}\n{SUMMARY}\n{RULE}" if good else "SOME CHECKS FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
