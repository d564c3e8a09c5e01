"""From a student's config and its teacher's to the student's: one shape for all families."""

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
    """What any transformer here consists of."""

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
    """What the shape of a family's transformer must keep to."""

    text_key: str = ""
    """Where its config has the channels of the texts."""
    head_multiple: int = 1
    min_head_width: int = 1
    width_multiple: int = 1
    block_lists: tuple[str, ...] = ("blocks",)
    """Names of the lists of blocks, in the order in which blocks are counted."""
    fixed_fields: tuple[str, ...] = ("latent_channels", "text_width")
    """What no student may change."""

    def check_width(self, shape: TransformerShape, teacher: TransformerShape, family: str) -> None:
        """Refuse a width or heads that a transformer of this family cannot have."""
        if shape.width % shape.heads:
            near = max(1, round(shape.width / teacher.head_width))
            hint = (
                f"heads to {near}" if shape.width % near == 0 else f"width to {shape.heads * max(1, shape.head_width)}"
            )
            raise InputError(
                f"a student {shape.width} wide with {shape.heads} heads",
                "a width that the heads divide",
                f"set {hint}; the teacher's are {teacher.head_width} wide each",
            )
        if shape.head_width % self.head_multiple or shape.head_width < self.min_head_width:
            raise InputError(
                f"heads {shape.head_width} wide ({shape.width} over {shape.heads})",
                f"a multiple of {self.head_multiple} from {self.min_head_width} on, "
                f"which the rotary positions of {family} can take",
                f"change width or heads; the teacher's are {teacher.head_width} wide",
            )
        if shape.width % self.width_multiple:
            raise InputError(
                f"a student {shape.width} wide",
                f"a multiple of {self.width_multiple}, which its positions and sizes are embedded in",
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
    "latent_channels": "both work in the latents of one autoencoder",
    "text_width": "both read the texts of the same encoders",
    "mlp_ratio": "this family's feed-forward parts are always that much wider",
    "patch_size": "the pipeline itself packs latents two by two",
}
_FIELD_LABELS = {
    "latent_channels": "{} latent channels",
    "text_width": "texts of {} channels",
    "mlp_ratio": "an mlp_ratio of {}",
    "patch_size": "patches of {}",
}


# -- what each family's config calls it


def read_shape(family: str, config: Mapping[str, Any]) -> TransformerShape:
    """The shape that the config of a pipeline's transformer describes."""
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
    """The teacher's config with the student's shape in it."""
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
                # Positions are counted in patches: with larger ones the same image has fewer.
                "pos_embed_max_size": teacher["pos_embed_max_size"] * teacher["patch_size"] // shape.patch_size,
                "dual_attention_layers": [place for place, layer in enumerate(layers) if layer in dual],
            }
        case "FLUX":
            double = sum(layer < teacher["num_layers"] for layer in layers)
            # The teacher's axes in proportion, each even; what rounding leaves goes to the first.
            before = teacher["axes_dims_rope"]
            axes = [max(2, int(axis * shape.head_width / sum(before)) // 2 * 2) for axis in before]
            axes[0] += shape.head_width - sum(axes)
            config |= {"num_layers": double, "num_single_layers": len(layers) - double, "axes_dims_rope": axes}
        case "Wan":
            patch_size = [teacher["patch_size"][0], shape.patch_size, shape.patch_size]
            config |= {"ffn_dim": round(shape.mlp_ratio * shape.width), "patch_size": patch_size}
    return config


def rotary_dims(family: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The channels of a head that rotary positions turn together, one number an axis."""
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


# -- the student's shape


def transformer_config(
    class_name: str, teacher: Mapping[str, Any], student: StudentConfig
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """A pipeline's transformer in the student's shape, and which of the teacher's blocks each of its own stands for."""
    family = get_family(class_name).name
    rules = SHAPE_RULES[family]
    has_sizes = teacher.get("use_additional_conditions")
    if family == "PixArt" and (has_sizes or (has_sizes is None and teacher.get("sample_size") == 128)):
        # PixArt-Alpha at 1,024 puts three embeddings of sizes beside each other, together as wide as the model.
        rules = dataclasses.replace(rules, width_multiple=3 * rules.width_multiple)
    teacher_shape = read_shape(family, teacher)
    shape = _resolve_shape(student, teacher_shape, family, rules)
    layers = student.layers or select_layers(shape.depth, teacher_shape.depth)
    if family == "FLUX":
        double, single = int(teacher["num_layers"]), int(teacher["num_single_layers"])
        if not student.layers and shape.depth > 1:  # of both kinds, in proportion
            first = min(max(1, round(shape.depth * double / (double + single))), shape.depth - 1)
            first = first if single else shape.depth
            rest = select_layers(shape.depth - first, single)
            layers = (*select_layers(first, double), *(double + layer for layer in rest))
        kinds = [layer < double for layer in layers]
        if not kinds[0] or kinds != sorted(kinds, reverse=True):
            raise InputError(
                f"layers {list(layers)} of FLUX",
                f"at least one double block (0 to {double - 1}), and single ones (from {double} on) after them",
                "reorder the layers",
            )
    if shape == teacher_shape and layers == tuple(range(teacher_shape.depth)):
        return dict(teacher), layers
    return _write_shape(family, teacher, shape, layers), layers


def dit_config(teacher: DiTConfig, student: StudentConfig) -> tuple[DiTConfig, tuple[int, ...]]:
    """A DiT in the student's shape, and which of the teacher's blocks each of its own stands for."""
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
    """`num` of `depth` blocks, evenly, the first and the last among them; more than there are repeat evenly."""
    if num == 1:
        return (0,)
    if num <= depth:
        return tuple(round(place * (depth - 1) / (num - 1)) for place in range(num))
    return tuple(place * depth // num for place in range(num))


def _resolve_shape(
    student: StudentConfig, teacher: TransformerShape, family: str, rules: ShapeRules
) -> TransformerShape:
    """The student's shape, or an error where the family has no such shape."""
    word = re.sub(r"[^a-z0-9]", "", family.lower())
    if student.family is not None and re.sub(r"[^a-z0-9]", "", student.family.lower()) not in (word, f"halation{word}"):
        raise InputError(
            f"a student of the family {student.family}, of a teacher of the family {word}",
            "one family for both: they read the same texts and work in the same latents",
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
    """For pipelines that tell the transformer a time for each token, and so know how many there are."""
    shape = read_shape(get_family(class_name).name, teacher)
    _check_same("patch_size", student, shape, "the pipeline tells each token of that size its time")


def _check_same(key: str, student: StudentConfig, teacher: TransformerShape, why: str) -> None:
    asked, number = getattr(student, key), f"{getattr(teacher, key):g}"
    if asked is not None and asked != getattr(teacher, key):
        raise InputError(
            f"the student has {_FIELD_LABELS[key].format(f'{asked:g}')}, the teacher {number}",
            f"{number} for both: {why}",
            f"set {key} to {number}, or to null",
        )
