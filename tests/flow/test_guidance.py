from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halation.flow.samplers import SAMPLERS, drop_conditions, guided_velocity, schedule


class Recorder:
    """A prediction that depends on x, t and the condition, and remembers how large each batch was."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, x: Tensor, t: Tensor, condition: dict[str, Tensor]) -> Tensor:
        assert len(t) == len(x) == len(condition["label"])
        assert t.dtype == torch.float32
        self.batches.append(len(x))
        return x * t[:, None] + condition["label"][:, None]


CONDITION, NULL = {"label": torch.tensor([1.0, 2.0, 3.0])}, {"label": torch.tensor([10.0, 10.0, 20.0])}
X, T = torch.arange(6.0).reshape(3, 2), torch.tensor(0.5, dtype=torch.float64)


def test_guidance_extrapolates_from_null_to_conditional_in_one_forward() -> None:
    """Guidance extrapolates from the null to the conditional prediction in one forward."""
    predict = Recorder()
    scales = torch.tensor([0.0, 1.0, 3.0])
    velocity = guided_velocity(predict, CONDITION, NULL, scales)(X, T)
    assert predict.batches == [6]
    with_prompt, without = X / 2 + CONDITION["label"][:, None], X / 2 + NULL["label"][:, None]
    assert torch.allclose(velocity, without + scales[:, None] * (with_prompt - without))
    assert torch.equal(velocity[1], with_prompt[1]), "a row with scale 1 is the conditional prediction to the bit"


def test_a_scale_of_one_runs_the_conditional_branch_only() -> None:
    predict = Recorder()
    velocity = guided_velocity(predict, CONDITION, NULL, 1.0)(X, T)
    assert predict.batches == [3]
    assert torch.equal(velocity, X / 2 + CONDITION["label"][:, None])


def test_a_tensor_of_ones_still_runs_the_pair_so_that_values_never_decide_shapes() -> None:
    predict = Recorder()
    guided_velocity(predict, CONDITION, NULL, torch.ones(3))(X, T)
    assert predict.batches == [6]


@pytest.mark.parametrize(("truncate_from", "expected"), [(0, [3] * 4), (2, [6, 6, 3, 3]), (4, [6] * 4), (9, [6] * 4)])
def test_truncated_guidance_runs_the_conditional_branch_only_from_that_step_on(
    truncate_from: int, expected: list[int]
) -> None:
    predict, times = Recorder(), schedule(4, 3.0)
    velocity = guided_velocity(predict, CONDITION, NULL, 4.0, truncate_from=truncate_from, times=times)
    list(SAMPLERS["euler"](velocity, X, times))
    assert predict.batches == expected


def test_truncation_without_times_or_before_the_first_step_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the times"):
        guided_velocity(Recorder(), CONDITION, NULL, 2.0, truncate_from=1)
    with pytest.raises(ValueError, match="counts steps from 0"):
        guided_velocity(Recorder(), CONDITION, NULL, 2.0, truncate_from=-1, times=schedule(4))


def test_dropped_rows_become_the_null_condition_and_the_others_stay() -> None:
    condition = {"tokens": torch.arange(6).reshape(3, 2), "label": torch.arange(3)}
    null = {"tokens": torch.full((3, 2), -1), "label": torch.full((3,), -1)}
    result = drop_conditions(condition, null, torch.tensor([True, False, True]))
    assert result["tokens"].tolist() == [[-1, -1], [2, 3], [-1, -1]]
    assert result["label"].tolist() == [-1, 1, -1]
