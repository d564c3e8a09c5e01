"""ZeRO 1, 2 and 3 obey the laws of every engine, on a module that trains in milliseconds."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from halation.distributed.checkpoint.reader import CheckpointReader
from support import training_loops
from support.rank_pool import RankPool

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="the extra `deepspeed` is not installed"),
]

STAGES = [pytest.param(stage, id=f"zero{stage}") for stage in (1, 2, 3)]
PAIRS = [pytest.param(stage, size, id=f"zero{stage}-{size}") for stage, size in ((1, 3), (2, 2), (3, 3))]
OFFLOADS = [
    pytest.param(1, False, marks=pytest.mark.slow),
    (2, False),
    (3, False),
    pytest.param(1, True, marks=pytest.mark.slow),
    pytest.param(2, True, marks=pytest.mark.slow),
    (3, True),
]


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_every_stage_trains_like_ddp_within_rounding_and_ranks_agree(ranks: RankPool, size: int) -> None:
    expected, norms, raw, average = ranks.run(size, training_loops.engine_losses, "ddp", {})[0]
    for stage in (1, 2, 3):
        rows = ranks.run(size, training_loops.engine_losses, "deepspeed", {"stage": stage})
        assert rows[0][0] == pytest.approx(expected, abs=1e-5)
        assert rows[0][1] == pytest.approx(norms, abs=1e-5)
        for row in rows:
            assert row[0] == rows[0][0]
            assert torch.equal(row[2], rows[0][2])
            assert torch.equal(row[3], rows[0][3])
        torch.testing.assert_close(rows[0][2], raw, atol=1e-5, rtol=0)
        torch.testing.assert_close(rows[0][3], average, atol=1e-5, rtol=0)
        assert not torch.allclose(rows[0][2], rows[0][3])  # or the averages were never there


@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_add_up_to_the_gradient_of_the_whole_batch(ranks: RankPool, stage: int) -> None:
    expected, norms, *_ = ranks.run(2, training_loops.engine_losses, "ddp", {"num_micro": 3})[0]
    found, found_norms, *_ = ranks.run(2, training_loops.engine_losses, "deepspeed", {"stage": stage, "num_micro": 3})[
        0
    ]
    assert found == pytest.approx(expected, abs=1e-5)
    assert found_norms == pytest.approx(norms, abs=1e-5)


@pytest.mark.parametrize(("stage", "size"), PAIRS)
def test_drawing_with_the_averages_leaves_every_bit_of_a_training_as_it_is(
    ranks: RankPool, stage: int, size: int
) -> None:
    assert all(ranks.run(size, training_loops.sampling_is_invisible, {"stage": stage}))


@pytest.mark.parametrize(("stage", "size"), PAIRS)
def test_a_training_that_was_saved_and_loaded_is_the_one_that_never_stopped(
    ranks: RankPool, tmp_path: Path, stage: int, size: int
) -> None:
    assert all(ranks.run(size, training_loops.resume_is_exact, tmp_path, {"stage": stage, "num_micro": 2}))


@pytest.mark.parametrize(("stage", "offload"), OFFLOADS)
def test_another_number_of_ranks_goes_on_with_the_same_weights(
    ranks: RankPool, tmp_path: Path, stage: int, offload: bool
) -> None:
    settings = {"stage": stage, "offload_optimizer": offload}
    drawn = ranks.run(3, training_loops.save_after, tmp_path, settings)[0]
    same_size, expected = ranks.run(3, training_loops.go_on, tmp_path, settings)[0]
    image, losses = ranks.run(2, training_loops.go_on, tmp_path, settings)[1]
    assert torch.equal(drawn, same_size)
    assert torch.equal(drawn, image)
    assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_is_safetensors_that_give_whole_tensors_in_their_shape(
    ranks: RankPool, tmp_path: Path, stage: int
) -> None:
    ranks.run(3, training_loops.save_after, tmp_path, {"stage": stage})
    folder = tmp_path / "step_0000003"
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    module = training_loops.small_module()
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters() if p.requires_grad}
    reader = CheckpointReader(folder)
    for part in ("model", "ema"):
        assert {name: tuple(tensor.shape) for name, tensor in reader.read_part(part)} == shapes
    moments = {name: tuple(tensor.shape) for name, tensor in reader.read_part("optimizer")}
    assert moments == {
        f"{key}/{name}": shape for key in ("exp_avg", "exp_avg_sq") for name, shape in shapes.items()
    } | {f"step/{name}": () for name in shapes}
    held = sum(_num_elements(path) for path in folder.glob("model-*"))
    assert held == sum(math.prod(shape) for shape in shapes.values())  # no element twice


def _num_elements(path: Path) -> int:
    with safe_open(path, framework="pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118


@pytest.mark.parametrize(("stage", "offload"), OFFLOADS)
def test_a_gradient_that_is_not_finite_on_one_rank_leaves_no_trace_on_any(
    ranks: RankPool, stage: int, offload: bool
) -> None:
    settings = {"stage": stage, "num_micro": 2, "offload_optimizer": offload}
    for clean, skipped in ranks.run(2, training_loops.skipping_leaves_no_trace, settings, math.nan):
        assert clean
        assert skipped == [True]


def test_a_loss_scale_is_taken_out_of_the_gradient_again(ranks: RankPool) -> None:
    for stage in (2, 3):
        plain = ranks.run(2, training_loops.engine_losses, "deepspeed", {"stage": stage})[0]
        scaled = ranks.run(2, training_loops.scaled_losses, {"stage": stage}, 2.0**10)[0]
        assert scaled[0] == pytest.approx(plain[0], abs=1e-5)
        assert scaled[1] == pytest.approx(plain[1], abs=1e-5)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_bf16_of_the_file_keeps_float32_masters_whose_averages_change_places_exactly(
    ranks: RankPool, tmp_path: Path, stage: int
) -> None:
    plain = ranks.run(2, training_loops.engine_losses, "deepspeed", {"stage": stage})[0][0]
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    for losses, dtypes, exact in ranks.run(2, training_loops.precise, {"dtype": "bf16"}, config, tmp_path):
        assert dtypes == {"torch.bfloat16"}
        assert exact
        assert losses == pytest.approx(plain[:4], abs=0.05)
        assert losses != plain[:4]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"train_batch_size": 7}, "train_batch_size 7 in --deepspeed_config, but .* makes it 6"),
        ({"train_micro_batch_size_per_gpu": 9}, "train_micro_batch_size_per_gpu 9 .*--batch_size makes it 6"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps 4 .*--accumulate makes it 1"),
        ({"gradient_clipping": 2.0}, "gradient_clipping 2.0 .*--grad_clip makes it 0.5"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer Lamb"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}, "lr 1.0 .*--lr makes it 0.05"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.5, 0.5]}}}, "betas .*--betas makes it"),
        ({"scheduler": {"type": "WarmupLR"}}, "--warmup_steps and --decay_steps"),
        ({"fp16": {"enabled": True}}, "use --dtype"),
        ({"bf16": {"enabled": True}}, "but --dtype fp32"),
        ({"zero_optimization": {"stage": 0}}, "--engine ddp"),
        ({"zero_optimization": 3}, "a JSON object"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "cannot be saved"),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "plain ZeRO"),
        ("{", "is not JSON"),
        ("[]", "a JSON object"),
    ],
)
def test_a_file_that_contradicts_the_flags_is_refused_with_both_values(
    ranks: RankPool, tmp_path: Path, config: Any, words: str
) -> None:
    settings = {"dtype": "bf16", "stage": 1} if "data_types" in config else {}
    message = ranks.run(1, training_loops.refusal, config, tmp_path, settings)[0]
    assert re.search(words, message), message


def test_a_file_that_agrees_or_says_auto_is_accepted_and_its_other_keys_pass(ranks: RankPool, tmp_path: Path) -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 6,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "betas": [0.9, 0.99], "weight_decay": "auto"}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10},
    }
    assert ranks.run(1, training_loops.accepted, config, tmp_path)[0] == (3, 10)


@pytest.mark.slow
def test_deepspeed_is_imported_on_demand_and_its_absence_names_the_extra(tmp_path: Path) -> None:
    """DeepSpeed is imported only on demand; if it is missing, the error names its extra."""
    code = (
        "import sys; import halation.training.session; assert 'deepspeed' not in sys.modules\n"
        "import torch; sys.modules['deepspeed'] = None\n"
        "from halation.distributed import world; from halation.training.build_components import build_engine\n"
        "from halation.errors import InputError\n"
        "try: build_engine('deepspeed', world.init_from_env(), torch.nn.Linear(1, 1), [])\n"
        "except InputError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert """pip install "deepspeed>=""" in done.stdout
