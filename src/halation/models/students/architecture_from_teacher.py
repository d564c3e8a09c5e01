"""Derives a student's architecture from its config and the teacher's, for all families."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halation.errors import InputError
from halation.models.dit.network import DiTConfig
from halation.models.pipelines.family_quirks import get_family
from halation.models.students.config import StudentConfig

DIT_FAMILY = "dit"


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """The architecture of a transformer, in the same terms for all families."""

    width: int
    depth: int
    heads: int
    patch_size: int
    latent_channels: int
    text_width: int
    mlp_ratio: float

    @property
    def head_width(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True, kw_only=True)
class ShapeRules:
    """Constraints on the architecture of a family's transformer."""

    text_key: str = ""
    """Config key of the text embedding channels."""
    head_multiple: int = 1
    min_head_width: int = 1
    width_multiple: int = 1
    block_lists: tuple[str, ...] = ("blocks",)
    """Names of the lists of blocks, in the order in which blocks are numbered."""
    fixed_fields: tuple[str, ...] = ("latent_channels", "text_width")
    """Fields that a student cannot change."""

    def check_width(self, shape: TransformerShape, teacher: TransformerShape, family: str) -> None:
        """Reject a width or a number of heads that this family does not support."""
        if shape.width % shape.heads:
            near = max(1, round(shape.width / teacher.head_width))
            hint = (
                f"heads to {near}" if shape.width % near == 0 else f"width to {shape.heads * max(1, shape.head_width)}"
            )
            raise InputError(
                f"a student of width {shape.width} with {shape.heads} heads",
                "a width divisible by the number of heads",
                f"set {hint}; the teacher's heads are {teacher.head_width} wide",
            )
        if shape.head_width % self.head_multiple or shape.head_width < self.min_head_width:
            raise InputError(
                f"heads {shape.head_width} wide ({shape.width} / {shape.heads})",
                f"a multiple of {self.head_multiple}, at least {self.min_head_width}, "
                f"for the rotary positions of {family}",
                f"change width or heads; the teacher's heads are {teacher.head_width} wide",
            )
        if shape.width % self.width_multiple:
            raise InputError(
                f"a student of width {shape.width}",
                f"a multiple of {self.width_multiple}, for the embeddings of positions and sizes",
                f"set width to {-(-shape.width // self.width_multiple) * self.width_multiple}",
            )


_TEXT_AND_MLP_FIXED = ("latent_channels", "text_width", "mlp_ratio")
SHAPE_RULES = {
    DIT_FAMILY: ShapeRules(width_multiple=4, fixed_fields=("latent_channels", "mlp_ratio")),
    "HunyuanDiT": ShapeRules(text_key="cross_attention_dim", head_multiple=4, min_head_width=4),
    "PixArt": ShapeRules(
        text_key="caption_channels",
        width_multiple=4,
        block_lists=("transformer_blocks",),
        fixed_fields=_TEXT_AND_MLP_FIXED,
    ),
    "SD3": ShapeRules(
        text_key="joint_attention_dim",
        width_multiple=4,
        block_lists=("transformer_blocks",),
        fixed_fields=_TEXT_AND_MLP_FIXED,
    ),
    "FLUX": ShapeRules(
        text_key="joint_attention_dim",
        head_multiple=2,
        min_head_width=6,
        block_lists=("transformer_blocks", "single_transformer_blocks"),
        fixed_fields=(*_TEXT_AND_MLP_FIXED, "patch_size"),
    ),
    "Wan": ShapeRules(text_key="text_dim", head_multiple=2, min_head_width=6),
}
_FIXED_REASONS = {
    "latent_channels": "both use the latents of one autoencoder",
    "text_width": "both use the same text encoders",
    "mlp_ratio": "it is fixed in this family",
    "patch_size": "the pipeline packs latents two by two",
}
_FIELD_LABELS = {
    "latent_channels": "{} latent channels",
    "text_width": "text embeddings of {} channels",
    "mlp_ratio": "an mlp_ratio of {}",
    "patch_size": "patches of {}",
}


# -- config keys of each family


def read_shape(family: str, config: Mapping[str, Any]) -> TransformerShape:
    """Read the architecture from the config of a pipeline's transformer."""
    heads = int(config["num_attention_heads"])
    width = heads * int(config["attention_head_dim"])
    depth, latent_channels = int(config["num_layers"]), config["in_channels"]
    patch_size, mlp_ratio = config.get("patch_size", 1), 4.0
    match family:
        case "HunyuanDiT":
            mlp_ratio = config["mlp_ratio"]
        case "FLUX":
            depth, patch_size, latent_channels = depth + config["num_single_layers"], 2, latent_channels // 4
        case "Wan":
            patch_size, mlp_ratio = patch_size[-1], config["ffn_dim"] / width
    return TransformerShape(
        width=width,
        depth=depth,
        heads=heads,
        patch_size=patch_size,
        latent_channels=latent_channels,
        text_width=config[SHAPE_RULES[family].text_key],
        mlp_ratio=mlp_ratio,
    )


def _write_shape(
    family: str, teacher: Mapping[str, Any], shape: TransformerShape, layers: Sequence[int]
) -> dict[str, Any]:
    """Return the teacher's config with the student's architecture."""
    sizes = {"num_attention_heads": shape.heads, "attention_head_dim": shape.head_width, "num_layers": shape.depth}
    patches = {} if family == "FLUX" else {"patch_size": shape.patch_size}
    config = {**teacher, **sizes, **patches}
    match family:
        case "HunyuanDiT":
            config |= {"hidden_size": shape.width, "mlp_ratio": shape.mlp_ratio}
        case "PixArt":
            config |= {"cross_attention_dim": shape.width}
        case "SD3":
            dual = set(teacher.get("dual_attention_layers") or ())
            config |= {
                "caption_projection_dim": shape.width,
                # Positions are counted in patches; with larger patches, an image has fewer of them.
                "pos_embed_max_size": teacher["pos_embed_max_size"] * teacher["patch_size"] // shape.patch_size,
                "dual_attention_layers": [place for place, layer in enumerate(layers) if layer in dual],
            }
        case "FLUX":
            double = sum(layer < teacher["num_layers"] for layer in layers)
            # The teacher's axes in proportion, each even; the remainder goes to the first.
            before = teacher["axes_dims_rope"]
            axes = [max(2, int(axis * shape.head_width / sum(before)) // 2 * 2) for axis in before]
            axes[0] += shape.head_width - sum(axes)
            config |= {"num_layers": double, "num_single_layers": len(layers) - double, "axes_dims_rope": axes}
        case "Wan":
            patch_size = [teacher["patch_size"][0], shape.patch_size, shape.patch_size]
            config |= {"ffn_dim": round(shape.mlp_ratio * shape.width), "patch_size": patch_size}
    return config


def rotary_dims(family: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the channels of a head that rotary positions use, one number per axis."""
    head = int(config["attention_head_dim"])
    match family:
        case "HunyuanDiT":
            return (head // 2, head // 2)
        case "FLUX":
            return tuple(config["axes_dims_rope"])
        case "Wan":
            side = 2 * (head // 6)
            return (head - 2 * side, side, side)
    return (head,)


# -- the student's architecture


def transformer_config(
    class_name: str, teacher: Mapping[str, Any], student: StudentConfig
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the student's transformer config, and the teacher's block for each of its blocks."""
    family = get_family(class_name).name
    rules = SHAPE_RULES[family]
    has_sizes = teacher.get("use_additional_conditions")
    if family == "PixArt" and (has_sizes or (has_sizes is None and teacher.get("sample_size") == 128)):
        # PixArt-Alpha at 1,024 pixels concatenates three size embeddings to the width of the model.
        rules = dataclasses.replace(rules, width_multiple=3 * rules.width_multiple)
    teacher_shape = read_shape(family, teacher)
    shape = _resolve_shape(student, teacher_shape, family, rules)
    layers = student.layers or select_layers(shape.depth, teacher_shape.depth)
    if family == "FLUX":
        double, single = int(teacher["num_layers"]), int(teacher["num_single_layers"])
        if not student.layers and shape.depth > 1:  # blocks of both kinds, in proportion
            first = min(max(1, round(shape.depth * double / (double + single))), shape.depth - 1)
            first = first if single else shape.depth
            rest = select_layers(shape.depth - first, single)
            layers = (*select_layers(first, double), *(double + layer for layer in rest))
        kinds = [layer < double for layer in layers]
        if not kinds[0] or kinds != sorted(kinds, reverse=True):
            raise InputError(
                f"layers {list(layers)} of FLUX",
                f"at least one double block (0 to {double - 1}), followed by single blocks (from {double})",
                "reorder the layers",
            )
    if shape == teacher_shape and layers == tuple(range(teacher_shape.depth)):
        return dict(teacher), layers
    return _write_shape(family, teacher, shape, layers), layers


def dit_config(teacher: DiTConfig, student: StudentConfig) -> tuple[DiTConfig, tuple[int, ...]]:
    """Return the student's DiT config, and the teacher's block for each of its blocks."""
    teacher_shape = TransformerShape(
        width=teacher.hidden,
        depth=teacher.depth,
        heads=teacher.heads,
        patch_size=teacher.patch_size,
        latent_channels=teacher.channels,
        text_width=teacher.text_hidden,
        mlp_ratio=4.0,
    )
    shape = _resolve_shape(student, teacher_shape, DIT_FAMILY, SHAPE_RULES[DIT_FAMILY])
    config = dataclasses.replace(
        teacher,
        hidden=shape.width,
        depth=shape.depth,
        heads=shape.heads,
        patch_size=shape.patch_size,
        text_hidden=shape.text_width,
    )
    return config, student.layers or select_layers(shape.depth, teacher_shape.depth)


def select_layers(num: int, depth: int) -> tuple[int, ...]:
    """Select `num` of `depth` blocks evenly, including the first and the last.

    If `num` is larger than `depth`, blocks repeat evenly.
    """
    if num == 1:
        return (0,)
    if num <= depth:
        return tuple(round(place * (depth - 1) / (num - 1)) for place in range(num))
    return tuple(place * depth // num for place in range(num))


def _resolve_shape(
    student: StudentConfig, teacher: TransformerShape, family: str, rules: ShapeRules
) -> TransformerShape:
    """Return the student's architecture; raise InputError if the family does not support it."""
    word = re.sub(r"[^a-z0-9]", "", family.lower())
    if student.family is not None and re.sub(r"[^a-z0-9]", "", student.family.lower()) not in (word, f"halation{word}"):
        raise InputError(
            f"a student of the family {student.family} for a teacher of the family {word}",
            "the same family for both: they use the same text encoders and latents",
            f'write "family": "{word}", or null',
        )
    for key in rules.fixed_fields:
        _check_same(key, student, teacher, _FIXED_REASONS[key])
    names = [field.name for field in dataclasses.fields(TransformerShape)]
    overrides = {name: getattr(student, name) for name in names if getattr(student, name) is not None}
    if student.layers is not None:
        overrides["depth"] = len(student.layers)
    shape = dataclasses.replace(teacher, **overrides)
    rules.check_width(shape, teacher, family)
    wrong = next((layer for layer in student.layers or () if not 0 <= layer < teacher.depth), None)
    if wrong is not None:
        raise InputError(
            f"layer {wrong} of a teacher that has {teacher.depth}",
            f"layers from 0 to {teacher.depth - 1}",
            "change layers",
        )
    return shape


def check_patch_size(class_name: str, teacher: Mapping[str, Any], student: StudentConfig) -> None:
    """Reject another patch size for pipelines that pass one time per token."""
    shape = read_shape(get_family(class_name).name, teacher)
    _check_same("patch_size", student, shape, "the pipeline passes one time per token, for tokens of that size")


def _check_same(key: str, student: StudentConfig, teacher: TransformerShape, why: str) -> None:
    asked, number = getattr(student, key), f"{getattr(teacher, key):g}"
    if asked is not None and asked != getattr(teacher, key):
        raise InputError(
            f"the student has {_FIELD_LABELS[key].format(f'{asked:g}')}, the teacher {number}",
            f"{number} for both: {why}",
            f"set {key} to {number}, or to null",
        )
