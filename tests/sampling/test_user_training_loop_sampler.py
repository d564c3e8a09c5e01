"""RankSampler in a user's loop on one rank: arguments, state it leaves, refusals."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import gethostname
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from halation import RankSampler
from halation.errors import InputError
from halation.gallery.run_catalog import RunCatalog
from halation.gallery.training_runs import TrainingRun
from halation.images.png_codec import read_png
from halation.runs.lock import lock_folder
from halation.runs.run_folder import MetricsFile
from halation.sampling.user_function_sampler import as_pixels

IMAGE = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)


def plain(prompt: str, generator: torch.Generator) -> np.ndarray:
    return torch.randint(0, 256, (4, 4, 3), generator=generator, dtype=torch.uint8).numpy()


def test_without_a_group_it_is_a_world_of_one_that_makes_none(tmp_path: Path) -> None:
    sampler = RankSampler(plain, ["one", "two"], tmp_path / "run", 5, every=10, settings={"steps": (1, 2)})
    assert sampler(5) == ()
    assert not (tmp_path / "run").exists()
    samples = sampler(20, loss=0.5)
    assert not torch.distributed.is_initialized()
    assert [(s.prompt, s.seed, s.state, s.rank) for s in samples] == [("one", 5, "done", 0), ("two", 6, "done", 0)]
    pixels, text = read_png(samples[1].file)
    assert (pixels == plain("two", torch.Generator().manual_seed(6))).all()
    said = json.loads(text["halation"])
    assert said == {"index": 1, "id": "sample_01", "prompt": "two", "seed": 6, "settings": {"steps": [1, 2]}}
    folder = tmp_path / "run" / "samples" / "step_0000020"
    assert {path.name for path in folder.iterdir()} == {
        "sample_00.png", "sample_00.txt", "sample_01.png", "sample_01.txt", "grid.png", "samples.json",
    }  # fmt: skip


def test_a_step_that_is_complete_is_drawn_again_only_when_asked_or_changed(tmp_path: Path) -> None:
    asked: list[str] = []

    def draw(prompt: str, generator: torch.Generator) -> np.ndarray:
        asked.append(prompt)
        return IMAGE

    first = RankSampler(draw, ["one", "two"], tmp_path / "run")(1)
    assert RankSampler(draw, ["one", "two"], tmp_path / "run")(1) == first
    assert asked == ["one", "two"]
    first[0].file.write_bytes(first[0].file.read_bytes()[:-4])
    RankSampler(draw, ["one", "two"], tmp_path / "run")(1)
    assert asked == ["one", "two", "one"]
    RankSampler(draw, ["one", "three"], tmp_path / "run")(1)
    assert asked[3:] == ["three"]
    RankSampler(draw, ["one", "three"], tmp_path / "run", again=True)(1)
    assert asked[4:] == ["one", "three"]


def test_steps_reached_by_training_are_drawn_anew_and_later_ones_dropped(tmp_path: Path) -> None:
    """Steps that a process reached by training are drawn anew, and later ones are dropped."""
    asked: list[str] = []

    def draw(prompt: str, generator: torch.Generator) -> np.ndarray:
        asked.append(prompt)
        if len(asked) == 2:
            raise ValueError("once")
        return IMAGE

    first = RankSampler(draw, ["one"], tmp_path / "run", every=10)
    for step in (0, 10, 20, 30):
        first(step, loss=1.0)
    assert len(asked) == 4
    resumed = RankSampler(draw, ["one"], tmp_path / "run", every=10)
    resumed(0, loss=2.0)  # complete: weights of the start are what they were
    assert len(asked) == 4
    again = RankSampler(draw, ["one"], tmp_path / "run", every=10)
    again(10, loss=3.0)  # what failed is drawn; the steps after it stay
    assert len(asked) == 5
    lines = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in lines.read_rows()] == [(0, 1.0), (10, 3.0), (20, 1.0), (30, 1.0)]
    for step in range(11, 21):
        again(step, loss=4.0)
    assert len(asked) == 6
    assert [(row["step"], row["loss"]) for row in lines.read_rows()] == [(0, 1.0), (10, 3.0), (20, 4.0)]
    assert sorted(path.name[-2:] for path in (tmp_path / "run" / "samples").iterdir()) == ["00", "10", "20"]
    again(20, loss=5.0)
    assert len(asked) == 6


@pytest.mark.parametrize(
    ("loss", "shown"), [(torch.tensor(0.5, requires_grad=True), 0.5), (np.float32(0.25), 0.25), (float("nan"), None)]
)
def test_a_loss_may_be_what_a_training_has_at_hand(tmp_path: Path, loss: Any, shown: float | None) -> None:
    (sample,) = RankSampler(plain, "one", tmp_path / "run")(np.int64(3), loss=loss)
    assert sample.file is not None
    said = json.loads((sample.file.parent / "samples.json").read_text())
    assert (said["step"], said["loss"]) == (3, shown)


@pytest.mark.parametrize(
    ("step", "loss", "words"), [(-1, None, "step -1"), (1.5, None, "step 1.5"), (1, torch.zeros(2), "not a number")]
)
def test_a_step_or_a_loss_that_is_none_is_refused_before_anything_is_drawn(
    tmp_path: Path, step: Any, loss: Any, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        RankSampler(plain, "one", tmp_path / "run")(step, loss=loss)
    assert not (tmp_path / "run").exists()


def test_a_failed_image_has_no_file_and_one_line_that_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def draw(prompt: str, generator: torch.Generator) -> np.ndarray:
        raise ValueError("broken today")

    (sample,) = RankSampler(draw, "one", tmp_path / "run")(5)
    assert (sample.state, sample.file) == ("failed", None)
    said = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert said == ["Error during sampling on rank 0: prompt 0 'one' at step 5: ValueError: broken today"]


def test_the_old_kind_of_shards_is_refused_by_name(tmp_path: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = torch.nn.Sequential(FullyShardedDataParallel.__new__(FullyShardedDataParallel))
    torch.nn.Module.__init__(wrapped[0])
    with pytest.raises(InputError, match=r"FSDP1(.|\n)*fully_shard"):
        RankSampler(plain, "one", tmp_path / "run", model=wrapped)
    with pytest.raises(InputError, match="FSDP1"):
        RankSampler(plain, "one", tmp_path / "run").use(wrapped)


def test_other_weights_are_in_place_while_it_draws_and_only_then(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    seen: list[float] = []

    @contextlib.contextmanager
    def averaged() -> Iterator[None]:
        before = model.bias.detach().clone()
        model.bias.data.fill_(9.0)
        yield
        model.bias.data.copy_(before)

    def draw(prompt: str, generator: torch.Generator) -> np.ndarray:
        seen.append(model.bias.item())
        raise OSError("no disk")

    before = model.bias.item()
    samples = RankSampler(draw, "one", tmp_path / "run", model=model, weights=averaged)(0)
    assert seen == [9.0]
    assert model.bias.item() == before
    assert [(sample.state, sample.reason) for sample in samples] == [("failed", "OSError: no disk")]


def test_inside_an_autocast_region_the_weights_in_place_are_the_ones_that_draw(tmp_path: Path) -> None:
    model = torch.nn.Linear(12, 12)

    @contextlib.contextmanager
    def doubled() -> Iterator[None]:
        model.weight.data.mul_(2.0)
        yield
        model.weight.data.mul_(0.5)

    def draw(prompt: str, generator: torch.Generator) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.sigmoid(model(torch.randn(1, 12, generator=generator))).float().reshape(3, 2, 2)

    samplers = [RankSampler(draw, "one", tmp_path / name, model=model, weights=doubled) for name in ("in", "out")]
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(1, 12))  # now the cache of casts holds the weights as they are
        (inside,) = samplers[0](1)
    (outside,) = samplers[1](1)
    assert inside.file.read_bytes() == outside.file.read_bytes()


LEAKED: list[Any] = []
"""Contexts that a draw entered and never left."""


def leak(context: Any) -> None:
    context.__enter__()
    LEAKED.append(context)


BACKENDS: Any = torch.backends
MISBEHAVIOURS = {
    "autocast entered": lambda: leak(torch.autocast("cpu", torch.bfloat16)),
    "autocast entered with its cache": lambda: leak(torch.autocast("cpu", torch.bfloat16, cache_enabled=True)),
    "autocast on": lambda: torch.set_autocast_enabled("cpu", True),
    "autocast dtype": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "autocast cache": lambda: torch.set_autocast_cache_enabled(True),
    "autocast depth": torch.autocast_decrement_nesting,
    "inference mode": lambda: leak(torch.inference_mode()),
    "gradients on": lambda: torch.set_grad_enabled(True),
    "gradients off": lambda: leak(torch.no_grad()),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 2),
    "denormals": lambda: torch.set_flush_denormal(True),
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "cudnn": lambda: [setattr(BACKENDS.cudnn, name, True) for name in ("benchmark", "deterministic")],
    "tf32": lambda: [setattr(owner, "allow_tf32", True) for owner in (BACKENDS.cudnn, BACKENDS.cuda.matmul)],
    "matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "fp32 precision": lambda: setattr(BACKENDS, "fp32_precision", "tf32"),
    "mkldnn precision": lambda: setattr(BACKENDS.mkldnn.matmul, "fp32_precision", "bf16"),
    "mkldnn off": lambda: setattr(BACKENDS.mkldnn, "enabled", False),
    "attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
}


def torch_state() -> list[Any]:
    """Settings of torch by their public names."""
    smallest = torch.tensor([torch.finfo(torch.float32).tiny], dtype=torch.float32, device="cpu")
    cudnn, mkldnn = BACKENDS.cudnn, BACKENDS.mkldnn
    return [
        (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
        (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(), (smallest / 2).item() > 0),
        (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, mkldnn.enabled),
        (torch.get_float32_matmul_precision(), BACKENDS.cuda.matmul.allow_tf32, BACKENDS.fp32_precision),
        [part.fp32_precision for part in (BACKENDS.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv)],
        (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
    ]


def trained_bits(sampler: Callable[[nn.Module], RankSampler] | None, autocast: bool, inside: bool) -> list[Any]:
    """Losses and weights of a few steps; samples are drawn after each, or inside of an autocast region before it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = sampler(model) if sampler is not None else lambda step: ()
    seen: list[Any] = []
    for step in range(1, 4):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if inside:
                draw(step)
            batch = torch.randn(2, 4, 8, 64)
            values = model(nn.functional.scaled_dot_product_attention(batch, batch, batch))
            loss = (values - 1e-39).float().square().mean() + (torch.ones(1) / 3).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append((loss.item(), loss.dtype))
        if not inside:
            draw(step)
    return [seen, [weight.detach().numpy().tobytes() for weight in model.parameters()]]


@pytest.mark.parametrize(
    ("autocast", "inside"),
    [
        pytest.param(False, False, id="plain", marks=pytest.mark.slow),
        pytest.param(True, False, id="autocast"),
        pytest.param(True, True, id="inside", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", MISBEHAVIOURS)
def test_a_draw_that_changes_how_torch_computes_leaves_the_training_its_bits(
    tmp_path: Path, name: str, autocast: bool, inside: bool
) -> None:
    found: list[torch.dtype] = []

    def sampler(model: nn.Module) -> RankSampler:
        def draw(prompt: str, generator: torch.Generator) -> np.ndarray:
            found.append(torch.get_default_dtype())
            MISBEHAVIOURS[name]()
            if prompt == "fails":
                raise ValueError("after it changed something")
            with torch.autocast("cpu", torch.bfloat16):
                model(torch.zeros(1, 64, device="cpu", dtype=torch.float32))
            return IMAGE

        return RankSampler(draw, ["fails", "draws"], tmp_path / "run", model=model)

    expected, state = trained_bits(None, autocast, inside), torch_state()
    try:
        assert trained_bits(sampler, autocast, inside) == expected
        assert torch_state() == state
    finally:
        LEAKED.clear()  # what inference mode leaves behind goes with its guard
        torch.set_grad_enabled(True)
    assert found == [torch.float32] * 6, "an image does not depend on the one before it"


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_a_draw_that_sets_a_precision_by_its_new_name_leaves_the_old_readable(tmp_path: Path, precision: str) -> None:
    """A draw that sets a precision by its newer name leaves the older one readable."""

    def draw(prompt: str, generator: torch.Generator) -> np.ndarray:
        BACKENDS.cuda.matmul.fp32_precision = "ieee"
        return IMAGE

    torch.set_float32_matmul_precision(precision)
    try:
        state = torch_state()
        RankSampler(draw, ["one", "two"], tmp_path / "run", model=nn.Linear(4, 4))(1)
        assert torch_state() == state
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_draw_that_changes_gpu_or_stream_leaves_those_of_training(tmp_path: Path) -> None:
    """A draw that changes the current GPU or stream leaves those of the training unchanged."""

    def draw(prompt: str, generator: torch.Generator) -> np.ndarray:
        torch.cuda.set_device(torch.cuda.device_count() - 1)
        torch.cuda.set_stream(torch.cuda.Stream())
        return IMAGE

    torch.cuda.set_device(0)
    own = torch.cuda.Stream()
    with torch.cuda.stream(own):
        RankSampler(draw, ["one", "two"], tmp_path / "run", model=nn.Linear(4, 4, device="cuda:0"))(1)
        assert (torch.cuda.current_device(), torch.cuda.current_stream()) == (0, own)


def test_the_gallery_shows_it_as_a_run(tmp_path: Path) -> None:
    settings = {"data": "pebbles", "image_size": [4, 4]}
    sampler = RankSampler(plain, ["one", "two"], tmp_path / "runs" / "mine", model=torch.nn.ReLU(), settings=settings)
    sampler(10, loss=0.25), sampler(20, loss=0.125)
    catalog = RunCatalog([tmp_path / "runs"], {"train": TrainingRun})
    catalog.refresh()
    (entry,) = catalog.entries()
    summary, detail = entry.summary(), entry.detail()
    assert (summary["name"], summary["state"], summary["title"]) == ("mine", "running", "ReLU, pebbles, 4x4")
    assert [(step["step"], step["loss"]) for step in detail["steps"]] == [(10, 0.25), (20, 0.125)]
    assert [prompt["prompt"] for prompt in detail["prompts"]] == ["one", "two"]
    assert entry.image(detail["steps"][1]["cells"]["ema"][1]["key"]) is not None
    assert (summary["done"], summary["loss"], summary["spark"]) == (20, 0.125, [[10, 0.25], [20, 0.125]])
    again = RankSampler(plain, ["one", "two", "three"], tmp_path / "runs" / "mine")  # it went on from before step 20
    again(20, loss=0.5)
    assert [row["loss"] for row in MetricsFile(tmp_path / "runs" / "mine" / "metrics.jsonl").read_rows()] == [0.25, 0.5]


@pytest.mark.parametrize(
    "image",
    [
        Image.fromarray(IMAGE),
        IMAGE,
        IMAGE / 255.0,
        torch.from_numpy(IMAGE).permute(2, 0, 1),
        (torch.from_numpy(IMAGE).permute(2, 0, 1) / 255).to(torch.float64),
        (torch.from_numpy(IMAGE).permute(2, 0, 1)[None] / 255).requires_grad_(),
    ],
    ids=["pil", "bytes", "floats", "tensor of bytes", "tensor of floats", "batch of one"],
)
def test_a_image_may_come_in_many_forms(image: Any) -> None:
    pixels = as_pixels(image)
    assert pixels.dtype == np.uint8
    assert (pixels == IMAGE).all()


def test_grey_images_become_rgb_and_floats_are_clamped() -> None:
    grey = as_pixels(torch.tensor([[[-0.5, 0.5], [1.0, 2.0]]]))
    assert grey.tolist() == [[[0] * 3, [128] * 3], [[255] * 3, [255] * 3]]


@pytest.mark.parametrize(
    "image", [None, "file.png", np.zeros((2, 2, 4), np.uint8), torch.zeros(2, 3, 8, 8), np.zeros((2, 2, 3), np.int64)]
)
def test_what_is_no_image_is_said_so(image: Any) -> None:
    with pytest.raises(InputError, match=r"draw returned .*\n  expected: one image"):
        as_pixels(image)


def test_a_image_that_is_not_finite_is_said_so() -> None:
    with pytest.raises(InputError, match="not finite"):
        as_pixels(torch.full((3, 2, 2), torch.nan))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every=0"),
        ({"seed": -1}, "seed=-1"),
        ({"prompts": [1]}, "a prompt of the type int"),
        ({"prompts": ["caf\udce9"]}, "text that can be encoded as UTF-8"),
        ({"settings": {"style": "caf\udce9"}}, "settings that are not JSON"),
        ({"settings": {"model": object}}, "settings that are not JSON"),
    ],
)
def test_arguments_that_mean_nothing_are_input_errors(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        RankSampler(**{"draw": plain, "prompts": ["one"], "out": tmp_path / "run"} | options)


@pytest.mark.parametrize("content", ["{}", '{"job": "train", "settings": {}, "fixed": {}, "changes": []}', "no json"])
def test_a_folder_of_somebody_elses_is_refused_before_training(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match="belongs to something else"):
        RankSampler(plain, ["one"], tmp_path)
    assert (tmp_path / "config.json").read_text() == content


@pytest.mark.slow
def test_a_folder_is_free_again_when_the_sampler_or_its_process_is_gone(tmp_path: Path) -> None:
    """Also where a worker that the process forked outlives it."""
    code = (
        "import os, signal, sys, time, numpy; from halation import RankSampler;"
        f"sampler = RankSampler(lambda *_: numpy.zeros((2, 2, 3), 'u1'), 'one', {str(tmp_path / 'run')!r}); sampler(1);"
        "worker = os.fork() or time.sleep(30);"
        "print(worker, flush=True); time.sleep(30)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        worker = int(owner.stdout.readline())
        try:
            with pytest.raises(InputError, match=rf"in use by a training, process {owner.pid} on {gethostname()}"):
                RankSampler(plain, "two", tmp_path / "run")(1)
            assert (tmp_path / "run" / "samples" / "step_0000001" / "sample_00.txt").read_text().startswith("one")
            owner.kill()
            owner.wait()
            first = RankSampler(plain, "two", tmp_path / "run")
            assert [sample.state for sample in first(1)] == ["done"]
        finally:
            os.kill(worker, signal.SIGKILL)
    assert [sample.state for sample in RankSampler(plain, "two", tmp_path / "run")(2)] == ["done"], "the same process"
    with pytest.raises(InputError, match=rf"process {os.getpid()} "), lock_folder(tmp_path / "run", "train"):
        pass
    del first
    gc.collect()
    with lock_folder(tmp_path / "run", "train"):
        pass


def test_ranks_without_a_group_are_told_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="init_process_group before the first"):
        RankSampler(plain, ["one"], tmp_path / "run")(0)


def test_shards_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sharded=True without a model"):
        RankSampler(plain, ["one"], tmp_path / "run", sharded=True)(0)


def test_a_disk_that_cannot_be_written_costs_the_samples_and_not_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    samples = RankSampler(plain, ["one"], tmp_path / "file" / "run")(0)
    assert [sample.state for sample in samples] == ["failed"]
    assert "cannot write to directory" in samples[0].reason


def test_importing_halation_does_not_import_torch() -> None:
    code = "import sys, halation; assert 'RankSampler' in halation.__all__; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_has_the_sampler_and_no_other_name() -> None:
    import halation

    assert halation.RankSampler is RankSampler
    with pytest.raises(AttributeError, match="no attribute 'Sampler'"):
        _ = halation.Sampler
