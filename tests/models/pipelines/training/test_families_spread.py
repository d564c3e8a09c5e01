"""Families under engines: sharded is whole bit for bit, compiled blocks are close."""

from __future__ import annotations

import pytest

from support import family_rank_jobs as jobs
from support import tiny_pipelines
from support.marks import needs_inductor
from support.rank_pool import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.mark.parametrize(
    ("family", "size"), [("hunyuan", 2), ("hunyuan", 3), ("pixart", 2), ("sd3", 2), ("flux", 3), ("wan_one", 2)]
)
def test_a_sharded_family_answers_and_draws_with_the_bits_of_the_whole(family: str, size: int, ranks: RankPool) -> None:
    folder = tiny_pipelines.built(family)
    assert ranks.run(size, jobs.sharded_equals_whole, folder, "fp32", 0) == [[True, True, True]] * size


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 3), ("bf16", 2)])
def test_sharded_experts_answer_the_rows_of_each_rank_with_the_bits_of_the_whole(
    dtype: str, size: int, ranks: RankPool
) -> None:
    assert ranks.run(size, jobs.sharded_experts_equal_whole, tiny_pipelines.built("wan"), dtype) == [[True] * 4] * size


@pytest.mark.parametrize("family", ["hunyuan", "flux"])
def test_float32_adapters_on_a_bfloat16_base_are_sharded_together(family: str, ranks: RankPool) -> None:
    folder = tiny_pipelines.built(family)
    assert ranks.run(2, jobs.sharded_equals_whole, folder, "bf16", 2) == [[True, True, True]] * 2


@needs_inductor
def test_compiled_and_recomputed_blocks_under_ddp_differ_by_rounding_alone(ranks: RankPool) -> None:
    for difference in ranks.run(2, jobs.compiled_close_to_eager, tiny_pipelines.built("hunyuan"), timeout_s=280.0):
        assert difference < 1e-4


@pytest.mark.parametrize(
    ("family", "lora_rank"), [("hunyuan", 0), ("hunyuan", 2), ("pixart", 0), ("sd3", 2), ("flux", 0), ("wan_one", 0)]
)
def test_a_family_partitioned_by_zero_answers_and_draws_with_the_bits_of_the_whole(
    family: str, lora_rank: int, ranks: RankPool
) -> None:
    pytest.importorskip("deepspeed")
    folder = tiny_pipelines.built(family)
    assert ranks.run(2, jobs.partitioned_equals_whole, folder, lora_rank) == [[True, True, True]] * 2
