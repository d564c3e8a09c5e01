from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from halation.errors import InputError
from halation.flow.ema import Ema
from halation.models.dit.denoiser import DiTDenoiser
from halation.models.dit.network import SIZES, DiT, DiTConfig, sincos_positions

Make = Callable[..., DiTDenoiser]
XLARGE = {"height": 32, "width": 32, "channels": 4, "patch_size": 2, "conditioning": "class", "num_classes": 1000}


def batch(denoiser: DiTDenoiser, num: int = 2) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    shape = (denoiser.config.channels, denoiser.config.height, denoiser.config.width)
    prompts = ["cat", "dog"] if denoiser.class_names else ["a red car", "an unknown thing"]
    x = torch.randn((num, *shape), generator=generator)
    return x, torch.linspace(0.2, 0.9, num), denoiser.encode_prompts((prompts * num)[:num])


def gradients(denoiser: DiTDenoiser) -> dict[str, Tensor]:
    x, t, condition = batch(denoiser)
    denoiser.module.zero_grad()
    denoiser.predict(x, t, condition).square().mean().backward()
    missing = [name for name, parameter in denoiser.module.named_parameters() if parameter.grad is None]
    assert not missing, "DDP waits for every parameter's gradient"
    return {name: parameter.grad.clone() for name, parameter in denoiser.module.named_parameters()}


def test_xlarge_has_the_size_and_the_cost_of_dit_xl_2() -> None:
    module = DiT(DiTConfig.of_size("xlarge", **XLARGE))
    assert (module.config.depth, module.config.hidden, module.config.heads) == (28, 1152, 16)
    assert sum(parameter.numel() for parameter in module.parameters()) == pytest.approx(675e6, rel=0.005)
    assert module.flops() == pytest.approx(237e9, rel=0.005)
    assert next(module.parameters()).is_meta


def test_tiny_can_be_trained_on_a_cpu_and_sizes_grow() -> None:
    shape = {"height": 32, "width": 32, "channels": 3, "patch_size": 4, "vocabulary_size": 500}
    counts = [sum(p.numel() for p in DiT(DiTConfig.of_size(name, **shape)).parameters()) for name in SIZES]
    assert 2e6 < counts[0] < 3.5e6
    assert counts == sorted(counts)


@pytest.mark.parametrize("classes", [False, True])
@pytest.mark.parametrize("num_register_tokens", [0, 3])
def test_the_counted_operations_are_those_a_forward_makes(
    make_denoiser: Make, classes: bool, num_register_tokens: int
) -> None:
    denoiser = make_denoiser(classes=classes, num_register_tokens=num_register_tokens)
    # The counter sees attention only where it is made of plain matrix products.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        denoiser.predict(*batch(denoiser, 2))
    assert 2 * denoiser.flops_per_image() == counter.get_total_flops()


def test_a_fresh_model_predicts_zero_and_each_block_is_the_identity(make_denoiser: Make) -> None:
    denoiser = make_denoiser(awake=False)
    x, t, condition = batch(denoiser)
    assert not denoiser.predict(x, t, condition).any()
    tokens, c = torch.randn(2, 16, 160, generator=torch.Generator().manual_seed(1)), torch.ones(2, 160)
    text = torch.ones(2, 48, 96)
    block = denoiser.shard_units()[-1]
    assert torch.equal(block(tokens, c, text, torch.ones(2, 1, 1, 48, dtype=torch.bool)), tokens)


def test_weights_are_a_function_of_the_seed_whatever_the_global_generator_does(make_denoiser: Make) -> None:
    state = torch.get_rng_state()
    first = make_denoiser(seed=3, awake=False).module.state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(17)
    second = make_denoiser(seed=3, awake=False).module.state_dict()
    other = make_denoiser(seed=4, awake=False).module.state_dict()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        assert torch.isfinite(tensor).all()
    assert not torch.equal(first["blocks.0.attention.out.weight"], other["blocks.0.attention.out.weight"])
    assert not torch.equal(first["blocks.0.attention.out.weight"], first["blocks.1.attention.out.weight"])


def test_no_registers_is_the_plain_model_and_registers_leave_all_other_weights_alone(make_denoiser: Make) -> None:
    plain = make_denoiser(awake=False).module.state_dict()
    with_registers = make_denoiser(awake=False, num_register_tokens=4).module.state_dict()
    assert set(with_registers) - set(plain) == {"registers"}
    assert set(plain) <= set(with_registers)
    assert all(torch.equal(tensor, with_registers[name]) for name, tensor in plain.items())


def test_registers_take_part_get_gradients_and_are_gone_from_the_output(make_denoiser: Make) -> None:
    plain, registered = make_denoiser(), make_denoiser(num_register_tokens=4)
    with torch.no_grad():
        before, after = plain.predict(*batch(plain)), registered.predict(*batch(registered))
    assert before.shape == after.shape == (2, 3, 16, 16)
    assert not torch.equal(before, after)
    assert gradients(registered)["registers"].abs().sum(dim=1).min() > 0


@pytest.mark.parametrize("classes", [False, True])
def test_every_parameter_gets_a_gradient_and_padding_tokens_none(make_denoiser: Make, classes: bool) -> None:
    denoiser = make_denoiser(classes=classes, num_register_tokens=2)
    found = gradients(denoiser)
    assert all(torch.isfinite(gradient).all() for gradient in found.values())
    silent = [name for name, gradient in found.items() if not gradient.any()]
    assert silent == []
    if not classes:
        assert not found["text.tokens.weight"][0].any()
        assert not found["text.positions"][-1].any(), "no prompt here is that long"


def test_checkpointing_gives_the_same_gradients_to_the_bit(make_denoiser: Make) -> None:
    denoiser = make_denoiser(num_register_tokens=1)
    kept = gradients(denoiser)
    denoiser.module.gradient_checkpointing = True
    assert all(getattr(block, "gradient_checkpointing", False) for block in denoiser.module.blocks)
    again = gradients(denoiser)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_checkpointing_keeps_fewer_activations(make_denoiser: Make) -> None:
    def kept_bytes(checkpointing: bool) -> int:
        denoiser = make_denoiser()
        denoiser.module.gradient_checkpointing = checkpointing
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            denoiser.predict(*batch(denoiser, 8))
        return total

    assert kept_bytes(True) < kept_bytes(False) / 3


def test_time_text_and_the_order_of_words_reach_the_output(denoiser: DiTDenoiser) -> None:
    x, t, _ = batch(denoiser, 1)
    prompts = ["", "a red car", "a red tree", "car red a"]
    outputs = [denoiser.predict(x, t, denoiser.encode_prompts([prompt])) for prompt in prompts]
    outputs.append(denoiser.predict(x, t + 0.05, denoiser.encode_prompts([""])))
    for index, output in enumerate(outputs):
        assert all((output - other).abs().max() > 1e-4 for other in outputs[:index])


def test_what_stands_behind_the_mask_does_not_reach_the_output(denoiser: DiTDenoiser) -> None:
    x, t, condition = batch(denoiser, 1)
    changed = {**condition, "tokens": torch.where(condition["mask"], condition["tokens"], 5)}
    assert torch.equal(denoiser.predict(x, t, condition), denoiser.predict(x, t, changed))


def test_a_patch_goes_back_to_where_it_came_from() -> None:
    module = DiT(
        DiTConfig(
            height=8, width=12, channels=2, patch_size=2, depth=1, hidden=8, heads=2, vocabulary_size=1, text_hidden=8
        )
    )
    x = torch.arange(2 * 2 * 8 * 12.0).reshape(2, 2, 8, 12)
    assert torch.equal(module._unpatchify(module._patchify(x)), x)
    assert torch.equal(module._patchify(x)[0, 1], x[0, :, 0:2, 2:4].flatten()), "tokens run along rows"


def test_positions_differ_everywhere_and_rows_and_columns_have_their_own_half() -> None:
    positions = sincos_positions(3, 5, 16)
    assert positions.shape == (15, 16)
    assert len({tuple(row) for row in positions.tolist()}) == 15
    grid = positions.reshape(3, 5, 16)
    assert torch.equal(grid[:, 0, :8], grid[:, 4, :8])
    assert torch.equal(grid[0, :, 8:], grid[2, :, 8:])


def test_bfloat16_autocast_stays_close_and_keeps_float32_outside(denoiser: DiTDenoiser) -> None:
    x, t, condition = batch(denoiser)
    with torch.no_grad():
        exact = denoiser.predict(x, t, condition)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            narrow = denoiser.predict(x, t, condition)
    assert narrow.dtype == torch.float32
    assert not torch.equal(exact, narrow)
    assert (exact - narrow).norm() < 0.05 * exact.norm()


@pytest.fixture
def world_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_sharding_unit_by_unit_changes_no_bit_of_output_gradients_and_averages(
    make_denoiser: Make, checkpointing: bool
) -> None:
    plain, sharded = make_denoiser(num_register_tokens=2), make_denoiser(num_register_tokens=2)
    mesh = dist.init_device_mesh("cpu", (1,))
    for unit in (*sharded.shard_units(), sharded.module):
        fully_shard(unit, mesh=mesh)
    sharded.module.gradient_checkpointing = checkpointing
    expected, found = gradients(plain), gradients(sharded)
    for name, gradient in expected.items():
        assert torch.equal(gradient, found[name].full_tensor())
    ema = Ema(sharded.module.named_parameters(), decay=0.9)
    averages = {name: tensor.clone() for name, tensor in ema.tensors().items()}
    with torch.no_grad():
        for parameter in sharded.module.parameters():
            parameter.add_(1.0)
    with ema.swap_during(), torch.no_grad():
        assert torch.equal(sharded.predict(*batch(sharded)), plain.predict(*batch(plain)))
        for unit in (*sharded.shard_units(), sharded.module):
            unit.reshard()
    assert all(torch.equal(ema.tensors()[name], average) for name, average in averages.items())
    for name, parameter in sharded.module.named_parameters():
        assert torch.equal(parameter.full_tensor(), averages[name] + 1.0)


def test_shard_units_are_disjoint_and_called_as_wholes(denoiser: DiTDenoiser) -> None:
    units = denoiser.shard_units()
    assert len(units) == denoiser.config.depth + 1
    owned = [id(parameter) for unit in units for parameter in unit.parameters()]
    assert len(owned) == len(set(owned))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"height": 30}, "30 x 32 that is not divisible by the patch size 4"),
        ({"heads": 7}, "with 7 heads"),
        ({"num_register_tokens": -1}, "num_register_tokens is -1"),
        ({"vocabulary_size": 0}, "text conditioning with 0 words"),
        ({"conditioning": "class"}, "class conditioning with 0"),
    ],
)
def test_shapes_that_cannot_work_are_refused_with_what_to_do(change: dict[str, object], message: str) -> None:
    shape = {"height": 32, "width": 32, "channels": 3, "patch_size": 4, "vocabulary_size": 9, **change}
    with pytest.raises(InputError, match=message):
        DiTConfig.of_size("tiny", **shape)


def test_an_unknown_size_names_those_that_exist() -> None:
    with pytest.raises(InputError, match="one of tiny, mini, small, base, large, xlarge"):
        DiTConfig.of_size("huge", height=32, width=32)


def test_a_size_that_the_patch_does_not_divide_comes_with_the_nearest_that_it_does() -> None:
    with pytest.raises(InputError, match="use 48 x 32"):
        DiTConfig.of_size("tiny", height=47, width=33, channels=3, patch_size=4, vocabulary_size=9)


# Dynamo looks at `.grad` of the activations that enter a block, and torch warns about that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_blocks_compile_without_a_break_into_one_graph_for_all_of_them(
    make_denoiser: Make, checkpointing: bool
) -> None:
    denoiser = make_denoiser()
    denoiser.module.gradient_checkpointing = checkpointing
    expected = gradients(denoiser)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for block in denoiser.module.blocks:
        block.compile(backend=counter, fullgraph=True)
    found = gradients(denoiser)
    assert counter.frame_count == 1
    assert all(torch.allclose(gradient, found[name], atol=1e-6) for name, gradient in expected.items())
    torch.compiler.reset()
