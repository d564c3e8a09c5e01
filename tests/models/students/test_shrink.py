"""Weights that a student takes from its teacher: exact, and better than random ones."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from torch import Tensor, nn

from halation.models.dit.denoiser import DiTDenoiser
from halation.models.dit.network import sincos_positions
from halation.models.students.architecture_from_teacher import dit_config, transformer_config
from halation.models.students.build import open_student
from halation.models.students.config import StudentConfig
from halation.models.students.shrink import (
    HeadLayout,
    ShrinkPlan,
    _within_head_indices,
    evenly_spaced_indices,
    shrink_weights,
)
from support import tiny_models

PIPELINES = {
    "hunyuan": ("HunyuanDiT", "HunyuanDiTPipeline"),
    "pixart": ("PixArt", "PixArtAlphaPipeline"),
    "sd3": ("SD3", "StableDiffusion3Pipeline"),
    "flux": ("FLUX", "FluxPipeline"),
    "wan": ("Wan", "WanPipeline"),
}


def student_of(teacher: DiTDenoiser, init: str = "teacher", **shape: Any) -> DiTDenoiser:
    student = open_student(
        teacher,
        StudentConfig(**shape),
        init=init,  # type: ignore[arg-type]
        seed=1,
        dtype="fp32",
        weights_dtype="fp32",
        lora=None,
        height=16,
        width=16,
    )
    assert isinstance(student, DiTDenoiser)
    return student


def rows(teacher: DiTDenoiser, num: int, seed: int) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor]:
    """States on the way to images that are one pattern a class, and what leads there."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num) % 3
    place = torch.linspace(0, 6, 16)
    waves = torch.stack([torch.sin(place)[:, None] * torch.cos((label + 1) * place) for label in range(3)])
    x0 = waves[labels].unsqueeze(1).expand(-1, 3, -1, -1)
    noise = torch.randn(x0.shape, generator=generator)
    t = torch.rand(num, generator=generator)
    return teacher.noise_path.add_noise(x0, noise, t), t, {"label": labels}, teacher.noise_path.target(x0, noise, t)


@pytest.fixture(scope="module")
def trained(make_denoiser: Callable[..., DiTDenoiser]) -> DiTDenoiser:
    """A teacher that has learned something; of random numbers any part is as good as any other."""
    teacher = make_denoiser(awake=False, classes=True)
    optimizer = torch.optim.AdamW(teacher.module.parameters(), lr=3e-3)
    for step in range(20):
        x, t, condition, target = rows(teacher, 6, step)
        loss = (teacher.predict(x, t, condition) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return teacher


@torch.no_grad()
def error(student: DiTDenoiser, teacher: DiTDenoiser) -> float:
    x, t, condition, _ = rows(teacher, 32, 1000)
    return float((student.predict(x, t, condition) - teacher.predict(x, t, condition)).square().mean())


@pytest.mark.parametrize(
    ("shape", "most"),
    [
        ({"depth": 3}, 0.5),
        ({"width": 96, "heads": 3}, 0.75),
        ({"width": 80, "heads": 5, "depth": 3}, 0.75),
        ({"patch_size": 2}, 0.75),
    ],
)
def test_a_shrunk_student_is_nearer_to_a_trained_teacher_than_a_random_one(
    trained: DiTDenoiser, shape: dict[str, Any], most: float
) -> None:
    assert error(student_of(trained, **shape), trained) < most * error(student_of(trained, "random", **shape), trained)


def test_what_has_the_same_shape_is_the_same_to_the_bit(make_denoiser: Callable[..., DiTDenoiser]) -> None:
    teacher = make_denoiser()
    before = {name: value.clone() for name, value in teacher.module.state_dict().items()}
    student = student_of(teacher)
    assert student.module.state_dict().keys() == before.keys()
    for name, value in student.module.state_dict().items():
        assert torch.equal(value, before[name])
    with torch.no_grad():
        for parameter in student.module.parameters():
            parameter.add_(1)
    for name, value in teacher.module.state_dict().items():
        assert torch.equal(value, before[name]), "the teacher is left as it is"


def test_a_student_of_some_layers_is_the_teacher_without_the_others(make_denoiser: Callable[..., DiTDenoiser]) -> None:
    teacher = make_denoiser(classes=True)
    student = student_of(teacher, layers=(0, 3, 1))
    rest = copy.deepcopy(teacher)
    blocks: nn.ModuleList = rest.module.blocks  # type: ignore[assignment]
    rest.module.blocks = nn.ModuleList([blocks[0], blocks[3], blocks[1]])
    x, t, condition, _ = rows(teacher, 3, 0)
    assert torch.equal(student.predict(x, t, condition), rest.predict(x, t, condition))


def test_heads_are_kept_whole_and_every_part_of_a_fused_layer_alike(make_denoiser: Callable[..., DiTDenoiser]) -> None:
    teacher, heads = make_denoiser(classes=True), [0, 1, 3]  # 3 of 5, evenly
    config, layers = dit_config(teacher.config, StudentConfig(width=96, heads=3))
    student = student_of(teacher, width=96, heads=3)
    weights = shrink_weights(teacher.module, student.module, ShrinkPlan.for_dits(teacher.config, config, layers))
    channels = evenly_spaced_indices(96, 160)
    full = teacher.module.state_dict()["blocks.2.attention.projections.qkv.weight"].reshape(3, 5, 32, 160)
    kept = weights["blocks.2.attention.projections.qkv.weight"].reshape(3, 3, 32, 96)
    assert torch.equal(kept, full[:, heads][..., channels])
    out = teacher.module.state_dict()["blocks.2.attention.out.weight"].reshape(160, 5, 32)
    assert torch.equal(
        weights["blocks.2.attention.out.weight"].reshape(96, 3, 32), out[channels][:, heads].reshape(96, 3, 32)
    )
    modulation = teacher.module.state_dict()["blocks.2.modulation.bias"].reshape(6, 160)
    assert torch.equal(weights["blocks.2.modulation.bias"].reshape(6, 96), modulation[:, channels])


def test_the_channels_that_are_kept_have_the_positions_of_a_narrower_model() -> None:
    wide, narrow = sincos_positions(4, 4, 160), sincos_positions(4, 4, 80)
    torch.testing.assert_close(wide[:, evenly_spaced_indices(80, 160)], narrow, rtol=0, atol=1e-6)
    # A Wan head of 24: 8 channels turn with the frame, 8 with the row, 8 with the column, in pairs.
    kept = _within_head_indices(
        HeadLayout(num_heads=1, axis_widths=(16, 16, 16)), HeadLayout(num_heads=1, axis_widths=(8, 8, 8))
    )
    assert len(kept) == 24
    angles = [torch.cat([get_1d_rotary_pos_embed(size, 5, use_real=True)[0]] * 3, dim=1) for size in (16, 8)]
    torch.testing.assert_close(angles[0][:, kept], angles[1])


def test_a_wider_student_begins_as_its_teacher_as_far_as_repeated_channels_can_tell() -> None:
    teacher, student = nn.ModuleDict({"a": nn.Linear(4, 4)}), nn.ModuleDict({"a": nn.Linear(8, 8)})
    heads = HeadLayout(num_heads=1, axis_widths=(4,)), HeadLayout(num_heads=1, axis_widths=(8,))
    dit = ShrinkPlan.for_dits(*[_dit(width) for width in (4, 8)], layers=())
    student.load_state_dict(
        shrink_weights(teacher, student, ShrinkPlan(layers=(), heads=heads, patch_sizes=dit.patch_sizes))
    )
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    expected = teacher["a"](x).repeat_interleave(2, dim=1)
    torch.testing.assert_close(student["a"](x.repeat_interleave(2, dim=1)), expected)


def _dit(width: int) -> Any:
    from halation.models.dit.network import DiTConfig

    return DiTConfig(
        height=4, width=4, channels=3, patch_size=2, depth=1, hidden=width, heads=1, conditioning="class", num_classes=2
    )


def modules(family: str, **shape: Any) -> tuple[nn.Module, nn.Module, ShrinkPlan]:
    folder = tiny_models.built(family) / "transformer"
    before = json.loads((folder / "config.json").read_text())
    name, pipeline = PIPELINES[family]
    after, layers = transformer_config(pipeline, before, StudentConfig(**shape))
    kind = getattr(diffusers, before["_class_name"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        student = kind.from_config(after)
    return (
        kind.from_pretrained(str(folder)),
        student,
        ShrinkPlan.for_transformers(name, before, after, layers),
    )


@pytest.mark.parametrize("family", PIPELINES)
def test_every_weight_of_every_family_comes_from_the_teacher(family: str) -> None:
    teacher, student, cut = modules(family, width=16, heads=1 if family in ("wan", "flux") else 2)
    weights = shrink_weights(teacher, student, cut)
    own = dict(student.named_parameters())
    assert weights.keys() == own.keys()
    there = dict(teacher.named_parameters())
    for name, weight in weights.items():
        assert weight.shape == own[name].shape
        # Nothing is scaled on the way down, so that every number is one of the teacher's.
        assert torch.isin(weight.flatten(), there[name].flatten()).all(), name
    if family == "flux":  # attention and feed-forward side by side in one layer: 2 heads of 16, then 128
        columns = [*range(16), *range(32, 160, 2)]
        name = "single_transformer_blocks.0.proj_out.weight"
        assert torch.equal(weights[name], there[name][::2][:, columns])


def test_special_blocks_of_a_family_take_weights_from_the_nearest_like_them() -> None:
    """Blocks that a family builds differently take weights from the nearest block like them."""
    teacher, student, cut = modules("sd3", layers=(0,))  # the last block of SD3 has no text to pass on
    weights = shrink_weights(teacher, student, cut)
    there = dict(teacher.named_parameters())
    name = "transformer_blocks.0.{}"
    assert torch.equal(weights[name.format("attn.to_q.weight")], there["transformer_blocks.0.attn.to_q.weight"])
    modulation = there["transformer_blocks.1.norm1_context.linear.weight"]
    assert torch.equal(weights[name.format("norm1_context.linear.weight")], modulation)
    teacher, student, cut = modules(
        "hunyuan", depth=4
    )  # the fourth of four reads what the first wrote; none of two does
    weights = shrink_weights(teacher, student, cut)
    own = dict(student.named_parameters())
    assert torch.equal(weights["blocks.3.skip_linear.weight"], own["blocks.3.skip_linear.weight"])
    assert torch.equal(
        weights["blocks.3.attn1.to_q.weight"], dict(teacher.named_parameters())["blocks.1.attn1.to_q.weight"]
    )


def test_patches_of_another_size_read_and_write_the_same_constant() -> None:
    for family in ("pixart", "wan"):
        teacher, student, cut = modules(family, patch_size=4)
        weights = shrink_weights(teacher, student, cut)
        there = dict(teacher.named_parameters())
        reading = "patch_embedding.weight" if family == "wan" else "pos_embed.proj.weight"
        torch.testing.assert_close(weights[reading].sum((-1, -2)), there[reading].sum((-1, -2)))
        before, after = there["proj_out.weight"], weights["proj_out.weight"]
        channels = before.shape[0] // 4
        corners = before.reshape(2, 2, channels, -1).repeat_interleave(2, dim=0).repeat_interleave(2, dim=1)
        torch.testing.assert_close(after.reshape(4, 4, channels, -1), corners)
