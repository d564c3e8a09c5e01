"""The memory estimate is near what autograd keeps, and a refusal names a batch that fits."""

from __future__ import annotations

import pytest
import torch

from halation.models.dit.denoiser import DiTDenoiser, create_dit
from halation.training import memory_fit_check, training_task
from halation.training.loop import denoising_objective

CPU = torch.device("cpu")


def kept_bytes(denoiser: DiTDenoiser, rows: int, size: int) -> int:
    """Bytes of all storages that a forward keeps for its backward."""
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = denoising_objective(denoiser)(
            denoiser.module, training_task.dummy_batch(denoiser, rows, (size, size), CPU)
        )
    assert losses.requires_grad
    return sum(seen.values())


@pytest.mark.parametrize(("size", "patch", "registers"), [(32, 8, 0), (32, 4, 4), (64, 4, 0)])
def test_the_estimate_is_within_a_quarter_of_what_is_kept(size: int, patch: int, registers: int) -> None:
    denoiser = create_dit(
        "tiny", height=size, width=size, captions=["a car at night"], patch_size=patch, num_register_tokens=registers
    ).init_weights(0)
    each = (kept_bytes(denoiser, 4, size) - kept_bytes(denoiser, 2, size)) / 2
    config = denoiser.config
    cost = memory_fit_check.ImageCost(
        flops=denoiser.flops_per_image(),
        hidden_size=config.hidden,
        num_blocks=config.depth,
        num_values=1,
        dtype="fp32",
        gradient_checkpointing=False,
    )
    assert 0.75 < cost.activation_bytes() / each < 1.25


def cost(checkpointing: bool = False) -> memory_fit_check.ImageCost:
    return memory_fit_check.ImageCost(
        flops=10**9, hidden_size=100, num_blocks=6, num_values=10, dtype="fp32", gradient_checkpointing=checkpointing
    )


def test_a_batch_that_does_not_fit_is_refused_with_a_size_that_does() -> None:
    """A batch that fits is accepted; one that does not is refused with a size that does."""
    each = cost().bytes_on(CPU)
    assert memory_fit_check.batch_error(64, 1, cost(), CPU, 64 * each) is None
    error = memory_fit_check.batch_error(64, 2, cost(), CPU, 50 * each)
    assert error is not None
    assert "--batch_size 32 " in error.action
    assert "--accumulate 4 " in error.action
    assert memory_fit_check.batch_error(32, 4, cost(), CPU, 50 * each) is None


def test_where_not_even_one_image_fits_a_smaller_model_is_the_advice() -> None:
    error = memory_fit_check.batch_error(1, 1, cost(), CPU, cost().bytes_on(CPU) / 2)
    assert error is not None
    assert "--model" in error.action


def test_checkpointing_keeps_less_and_ranks_share_a_machine() -> None:
    assert cost(checkpointing=True).activation_bytes() < cost().activation_bytes() / 3
    alone, shared = memory_fit_check.free_bytes(CPU, 1), memory_fit_check.free_bytes(CPU, 4)
    assert 0 < shared < alone


def test_weights_too_large_for_a_device_are_refused_unless_sharded() -> None:
    """Weights that cannot be trained on one device are refused; sharded ones are not."""
    billions = 14_300_000_000
    refusal = memory_fit_check.weights_error(billions, 0, 4, 1, 141e9)
    assert refusal is not None
    assert "266 GiB" in str(refusal)
    assert "--engine fsdp" in str(refusal)
    assert memory_fit_check.weights_error(billions, 0, 4, 8, 141e9) is None
    assert memory_fit_check.weights_error(20_000_000, billions, 2, 1, 141e9) is None, "adapters"
    assert memory_fit_check.weights_error(1_400_000_000, 0, 4, 1, 40e9) is None
