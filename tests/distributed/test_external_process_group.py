"""What is borrowed from a caller goes back as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halation.distributed.external_process_group import eval_mode, external_world, is_sharded, unwrap_model
from halation.errors import InputError


def network() -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).train()
    made[0].weight.requires_grad_(False)
    made[1].eval()
    return made


@pytest.mark.parametrize("fails", [False, True])
def test_modes_and_what_is_trained_are_as_before_also_after_an_error(fails: bool) -> None:
    module = network()
    modes = [part.training for part in module.modules()]

    def use() -> None:
        with eval_mode(module):
            assert not any(part.training for part in module.modules())
            module.requires_grad_(False)
            if fails:
                raise ValueError("in between")

    if fails:
        with pytest.raises(ValueError, match="in between"):
            use()
    else:
        use()
    assert [part.training for part in module.modules()] == modes
    assert [weight.requires_grad for weight in module.parameters()] == [False, True]


def test_a_wrapper_is_taken_off_and_a_bare_module_stays() -> None:
    module = network()
    assert unwrap_model(module) is module
    assert unwrap_model(nn.DataParallel(module)) is module
    assert not is_sharded(module)


def test_alone_there_is_a_world_of_one_and_no_group_is_made() -> None:
    with external_world(0, 1, torch.device("cpu"), 10.0) as world:
        assert world.all_gather_object({"word": (1, 2)}) == [{"word": [1, 2]}]
        assert not torch.distributed.is_initialized()


def test_ranks_without_a_group_are_refused() -> None:
    with (
        pytest.raises(InputError, match="is not initialised"),
        external_world(1, 2, torch.device("cpu"), 10.0),
    ):
        pass
