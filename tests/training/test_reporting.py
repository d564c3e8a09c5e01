"""What a run logs when it begins."""

from __future__ import annotations

from halation.training.config import TrainConfig
from halation.training.reporting import count_adapter_layers, describe_parameters


def test_a_run_of_adapters_says_what_is_trained_beside_what_there_is() -> None:
    assert describe_parameters(TrainConfig(), 2_800_000, 2_800_000) == "2.8 M parameters"
    words = describe_parameters(TrainConfig(lora_rank=4), 12_300, 2_800_000)
    assert words == "adapters of rank 4 with 0.0123 M of 2.8 M parameters"


def test_layers_with_adapters_are_counted_by_their_names_in_a_block() -> None:
    layers = [f"blocks.{k}.attn1.{layer}" for k in (0, 1) for layer in ("to_q", "to_out.0")]
    names = [f"{layer}.lora_{side}.default.weight" for layer in layers for side in "AB"]
    assert count_adapter_layers([*names, "proj_out.weight"]) == {"to_q": 2, "to_out.0": 2}
