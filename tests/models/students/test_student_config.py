"""The shape of a student: accepted settings, refusals with numbers, results per family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halation.errors import InputError
from halation.models.dit.network import DiTConfig
from halation.models.students.architecture_from_teacher import dit_config, select_layers, transformer_config
from halation.models.students.config import StudentConfig

WAN = {
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "num_layers": 40,
    "ffn_dim": 13824,
    "patch_size": [1, 2, 2],
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
}
HUNYUAN = {
    "num_attention_heads": 16,
    "attention_head_dim": 88,
    "hidden_size": 1408,
    "num_layers": 40,
    "mlp_ratio": 4.3637,
    "patch_size": 2,
    "in_channels": 4,
    "cross_attention_dim": 1024,
}
PIXART = {
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "num_layers": 28,
    "patch_size": 2,
    "in_channels": 4,
    "cross_attention_dim": 1152,
    "caption_channels": 4096,
}
SD3 = {
    "num_attention_heads": 24,
    "attention_head_dim": 64,
    "num_layers": 24,
    "patch_size": 2,
    "in_channels": 16,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pos_embed_max_size": 384,
    "dual_attention_layers": list(range(13)),
}
FLUX = {
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "num_layers": 19,
    "num_single_layers": 38,
    "in_channels": 64,
    "joint_attention_dim": 4096,
    "axes_dims_rope": [16, 56, 56],
    "patch_size": 1,
}
TEACHERS = {
    "WanPipeline": WAN,
    "HunyuanDiTPipeline": HUNYUAN,
    "PixArtSigmaPipeline": PIXART,
    "PixArtAlphaPipeline": {**PIXART, "sample_size": 128},
    "StableDiffusion3Pipeline": SD3,
    "FluxPipeline": FLUX,
}


def dit() -> DiTConfig:
    return DiTConfig.of_size("small", height=32, width=32, channels=4, patch_size=2, vocabulary_size=9)


def test_a_file_may_leave_everything_to_the_teacher(tmp_path: Path) -> None:
    file = tmp_path / "student_config.json"
    keys = ("family", "width", "depth", "heads", "patch", "latent_channels", "text_width", "mlp_ratio", "layers")
    file.write_text(json.dumps(dict.fromkeys(keys)))
    assert StudentConfig.read(file) == StudentConfig() == StudentConfig.read("")
    for name, teacher in TEACHERS.items():
        config, layers = transformer_config(name, teacher, StudentConfig())
        assert config == teacher
        assert layers == tuple(range(len(layers)))
    assert dit_config(dit(), StudentConfig()) == (dit(), tuple(range(12)))
    asked = StudentConfig.from_json({"width": 64, "patch": 4, "layers": [0, 3]})
    assert asked == StudentConfig(width=64, patch_size=4, layers=(0, 3))
    assert StudentConfig.from_json(asked.as_json()) == asked


@pytest.mark.parametrize(
    ("content", "found", "action"),
    [
        ('{"widht": 64}', "'widht'", "write width"),
        ('{"pach": 2}', "'pach'", "write patch"),
        ('{"width": "64"}', 'width is "64"', "change width"),
        ('{"width": 0}', "width is 0", "change width"),
        ('{"depth": true}', "depth is true", "change depth"),
        ('{"heads": 2.5}', "heads is 2.5", "change heads"),
        ('{"family": 3}', "family is 3", "change family"),
        ('{"mlp_ratio": "wide"}', 'mlp_ratio is "wide"', "change mlp_ratio"),
        ('{"mlp_ratio": NaN}', "mlp_ratio is NaN", "change mlp_ratio"),
        ('{"layers": []}', "layers is []", "change layers"),
        ('{"layers": [1, -1]}', r"layers is [1, -1]", "change layers"),
        ('{"layers": 4}', "layers is 4", "change layers"),
        ('{"patch": 2, "patch_size": 2}', "patch_size twice", "remove one"),
        ('{"layers": [0, 1], "depth": 3}', "depth 3 with 2 layers", "leave depth out"),
        ("[64]", "contains a list", "braces"),
        ("{width: 64}", "is not JSON", "correct"),
    ],
)
def test_a_file_that_is_no_students_is_refused(tmp_path: Path, content: str, found: str, action: str) -> None:
    file = tmp_path / "student.json"
    file.write_text(content)
    with pytest.raises(InputError) as caught:
        StudentConfig.read(file)
    assert found in caught.value.found
    assert action in caught.value.action


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        StudentConfig.read(tmp_path / "student.json")
    with pytest.raises(InputError, match="Is a directory"):
        StudentConfig.read(tmp_path)


@pytest.mark.parametrize(
    ("pipeline", "asked", "words"),
    [
        ("WanPipeline", {"latent_channels": 4}, "the student has 4 latent channels, the teacher 16"),
        ("WanPipeline", {"text_width": 768}, "the student has text embeddings of 768 channels, the teacher 4096"),
        ("FluxPipeline", {"latent_channels": 64}, "the student has 64 latent channels, the teacher 16"),
        ("FluxPipeline", {"patch_size": 1}, "the student has patches of 1, the teacher 2"),
        ("StableDiffusion3Pipeline", {"mlp_ratio": 2.5}, "the student has an mlp_ratio of 2.5, the teacher 4"),
        ("PixArtSigmaPipeline", {"family": "sd3"}, "family sd3 for a teacher of the family pixart"),
        ("WanPipeline", {"width": 1536}, "width 1536 with 40 heads"),
        ("HunyuanDiTPipeline", {"width": 96, "heads": 16}, "heads 6 wide"),
        ("WanPipeline", {"width": 60, "heads": 20}, "heads 3 wide"),
        ("FluxPipeline", {"width": 96, "heads": 24}, "heads 4 wide"),
        ("PixArtSigmaPipeline", {"width": 90, "heads": 15}, "a student of width 90"),
        ("PixArtAlphaPipeline", {"width": 1136}, "a student of width 1136"),
        ("WanPipeline", {"layers": (0, 40)}, "layer 40 of a teacher that has 40"),
        ("FluxPipeline", {"layers": (19, 56)}, "of FLUX"),
        ("FluxPipeline", {"layers": (0, 30, 1)}, "of FLUX"),
    ],
)
def test_a_student_that_does_not_fit_its_teacher_is_refused_with_both_numbers(
    pipeline: str, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError) as caught:
        transformer_config(pipeline, TEACHERS[pipeline], StudentConfig(**asked))
    assert words in caught.value.found


def test_the_way_out_of_a_refusal_works() -> None:
    with pytest.raises(InputError) as caught:
        transformer_config("WanPipeline", WAN, StudentConfig(width=1536))
    assert "heads to 12" in caught.value.action
    transformer_config("WanPipeline", WAN, StudentConfig(width=1536, heads=12))
    with pytest.raises(InputError) as caught:
        transformer_config("WanPipeline", WAN, StudentConfig(layers=(50,)))
    assert caught.value.expected == "layers from 0 to 39"
    with pytest.raises(InputError) as caught:
        transformer_config("PixArtSigmaPipeline", PIXART, StudentConfig(width=90, heads=15))
    assert "width to 92" in caught.value.action


def test_each_family_calls_a_shape_by_its_own_names() -> None:
    student = StudentConfig(width=768, heads=12, depth=6)
    made = {name: transformer_config(name, teacher, student)[0] for name, teacher in TEACHERS.items()}
    for config in made.values():
        assert (config["num_attention_heads"], config["attention_head_dim"]) == (12, 64)
    assert made["WanPipeline"]["ffn_dim"] == round(13824 / 5120 * 768)
    assert made["WanPipeline"]["patch_size"] == [1, 2, 2]
    assert made["HunyuanDiTPipeline"]["hidden_size"] == 768
    assert made["HunyuanDiTPipeline"]["mlp_ratio"] == 4.3637
    assert made["PixArtSigmaPipeline"]["cross_attention_dim"] == 768
    assert made["StableDiffusion3Pipeline"]["caption_projection_dim"] == 768
    assert made["StableDiffusion3Pipeline"]["dual_attention_layers"] == [0, 1, 2]  # of 0, 5, 9, 14, 18, 23
    assert made["FluxPipeline"]["axes_dims_rope"] == [8, 28, 28]
    assert (made["FluxPipeline"]["num_layers"], made["FluxPipeline"]["num_single_layers"]) == (2, 4)
    wider = StudentConfig(family="Wan", mlp_ratio=2.0, patch_size=4)
    assert transformer_config("WanPipeline", WAN, wider)[0]["ffn_dim"] == 10240
    assert transformer_config("WanPipeline", WAN, wider)[0]["patch_size"] == [1, 4, 4]
    larger = transformer_config("StableDiffusion3Pipeline", SD3, StudentConfig(patch_size=4))[0]
    assert (larger["patch_size"], larger["pos_embed_max_size"]) == (4, 192)


def test_a_dit_may_read_with_fewer_channels_but_works_in_the_same_latents() -> None:
    config, layers = dit_config(dit(), StudentConfig(width=192, heads=3, depth=4, text_width=128, family="dit"))
    assert (config.hidden, config.heads, config.depth, config.text_hidden) == (192, 3, 4, 128)
    assert layers == (0, 4, 7, 11)
    with pytest.raises(InputError, match="the student has 16 latent channels, the teacher 4"):
        dit_config(dit(), StudentConfig(latent_channels=16))
    with pytest.raises(InputError, match="the student has an mlp_ratio of 2, the teacher 4"):
        dit_config(dit(), StudentConfig(mlp_ratio=2.0))
    with pytest.raises(InputError, match="patch size 5"):
        dit_config(dit(), StudentConfig(patch_size=5))


def test_layers_are_spread_from_first_to_last_and_repeat_if_there_are_more() -> None:
    """Layers are spread evenly from the first to the last and repeat if the student has more."""
    assert select_layers(5, 40) == (0, 10, 20, 29, 39)
    assert select_layers(40, 40) == tuple(range(40))
    assert select_layers(1, 40) == (0,)
    assert select_layers(6, 3) == (0, 0, 1, 1, 2, 2)
    assert transformer_config("FluxPipeline", FLUX, StudentConfig(depth=4))[1] == (0, 19, 37, 56)
    assert transformer_config("FluxPipeline", FLUX, StudentConfig(depth=1))[0]["num_single_layers"] == 0
