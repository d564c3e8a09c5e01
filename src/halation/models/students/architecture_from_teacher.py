"""From a student's config and its teacher's to the student's: one shape for all families, and what each family calls it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
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
class ConfigFormat:
    """How a family writes a shape down. `rotary_dims` are the channels of a head that turn together, one number an axis."""

    read: Callable[[Mapping[str, Any]], TransformerShape]
    make_config: Callable[[Mapping[str, Any], TransformerShape, Sequence[int]], dict[str, Any]]
    rotary_dims: Callable[[int], tuple[int, ...]] = lambda head: (head,)
    head_multiple: int = 1
    width_multiple: int = 1
    block_lists: tuple[str, ...] = ("blocks",)
    """Names of the lists of blocks, in the order in which blocks are counted."""
    fixed_fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What no student may change, and why."""


_SAME_LATENTS_REASON = "both work in the latents of one autoencoder"
_SAME_TEXTS_REASON = "both read the texts of the same encoders"
_FIXED_MLP_RATIO_REASON = "this family's feed-forward parts are always that much wider"
_COMMON_FIXED_FIELDS = {"latent_channels": _SAME_LATENTS_REASON, "text_width": _SAME_TEXTS_REASON}


# Families


def _two_axis_rotary_dims(head: int) -> tuple[int, ...]:
    return (head // 2, head // 2)


def _wan_rotary_dims(head: int) -> tuple[int, ...]:
    side = 2 * (head // 6)
    return (head - 2 * side, side, side)


def flux_rotary_dims(teacher: Sequence[int], head: int) -> tuple[int, ...]:
    """The teacher's axes in proportion, each even; what rounding leaves goes to the first."""
    total = sum(teacher)
    axes = [max(2, int(axis * head / total) // 2 * 2) for axis in teacher]
    axes[0] += head - sum(axes)
    return tuple(axes)


def _make_shape_reader(names: Mapping[str, str], **computed: Any) -> Callable[[Mapping[str, Any]], TransformerShape]:
    """A shape from a config by the names it has there; a callable computes it."""

    def read(config: Mapping[str, Any]) -> TransformerShape:
        heads = int(config["num_attention_heads"])
        values: dict[str, Any] = {
            "width": heads * int(config["attention_head_dim"]),
            "heads": heads,
            "depth": int(config["num_layers"]),
            "patch_size": 1,
            "mlp_ratio": 4.0,
        }
        values |= {name: config[key] for name, key in names.items()}
        values |= {name: make(config) for name, make in computed.items()}
        return TransformerShape(**values)

    return read


def _head_settings(shape: TransformerShape) -> dict[str, Any]:
    return {"num_attention_heads": shape.heads, "attention_head_dim": shape.head_width, "num_layers": shape.depth}


def _hunyuan_config(teacher: Mapping[str, Any], shape: TransformerShape, layers: Sequence[int]) -> dict[str, Any]:
    return {
        **_head_settings(shape),
        "hidden_size": shape.width,
        "mlp_ratio": shape.mlp_ratio,
        "patch_size": shape.patch_size,
    }


def _pixart_config(teacher: Mapping[str, Any], shape: TransformerShape, layers: Sequence[int]) -> dict[str, Any]:
    return {**_head_settings(shape), "cross_attention_dim": shape.width, "patch_size": shape.patch_size}


def _sd3_config(teacher: Mapping[str, Any], shape: TransformerShape, layers: Sequence[int]) -> dict[str, Any]:
    dual = set(teacher.get("dual_attention_layers") or ())
    kept = [place for place, layer in enumerate(layers) if layer in dual]
    # Positions are counted in patches: with larger ones the same image has fewer.
    largest = teacher["pos_embed_max_size"] * teacher["patch_size"] // shape.patch_size
    return {
        **_head_settings(shape),
        "caption_projection_dim": shape.width,
        "patch_size": shape.patch_size,
        "pos_embed_max_size": largest,
        "dual_attention_layers": kept,
    }


def _flux_config(teacher: Mapping[str, Any], shape: TransformerShape, layers: Sequence[int]) -> dict[str, Any]:
    double = sum(layer < teacher["num_layers"] for layer in layers)
    return {
        **_head_settings(shape),
        "num_layers": double,
        "num_single_layers": len(layers) - double,
        "axes_dims_rope": list(flux_rotary_dims(teacher["axes_dims_rope"], shape.head_width)),
    }


def _wan_config(teacher: Mapping[str, Any], shape: TransformerShape, layers: Sequence[int]) -> dict[str, Any]:
    return {
        **_head_settings(shape),
        "ffn_dim": round(shape.mlp_ratio * shape.width),
        "patch_size": [teacher["patch_size"][0], shape.patch_size, shape.patch_size],
    }


CONFIG_FORMATS: Mapping[str, ConfigFormat] = {
    "HunyuanDiT": ConfigFormat(
        read=_make_shape_reader(
            {
                "patch_size": "patch_size",
                "latent_channels": "in_channels",
                "text_width": "cross_attention_dim",
                "mlp_ratio": "mlp_ratio",
            }
        ),
        make_config=_hunyuan_config,
        rotary_dims=_two_axis_rotary_dims,
        head_multiple=4,
        fixed_fields=_COMMON_FIXED_FIELDS,
    ),
    "PixArt": ConfigFormat(
        read=_make_shape_reader(
            {"patch_size": "patch_size", "latent_channels": "in_channels", "text_width": "caption_channels"}
        ),
        make_config=_pixart_config,
        width_multiple=4,
        block_lists=("transformer_blocks",),
        fixed_fields={**_COMMON_FIXED_FIELDS, "mlp_ratio": _FIXED_MLP_RATIO_REASON},
    ),
    "SD3": ConfigFormat(
        read=_make_shape_reader(
            {"patch_size": "patch_size", "latent_channels": "in_channels", "text_width": "joint_attention_dim"}
        ),
        make_config=_sd3_config,
        width_multiple=4,
        block_lists=("transformer_blocks",),
        fixed_fields={**_COMMON_FIXED_FIELDS, "mlp_ratio": _FIXED_MLP_RATIO_REASON},
    ),
    "FLUX": ConfigFormat(
        read=_make_shape_reader(
            {"text_width": "joint_attention_dim"},
            patch_size=lambda config: 2,
            latent_channels=lambda config: config["in_channels"] // 4,
            depth=lambda config: config["num_layers"] + config["num_single_layers"],
        ),
        make_config=_flux_config,
        head_multiple=2,
        block_lists=("transformer_blocks", "single_transformer_blocks"),
        fixed_fields={
            **_COMMON_FIXED_FIELDS,
            "mlp_ratio": _FIXED_MLP_RATIO_REASON,
            "patch_size": "the pipeline itself packs latents two by two",
        },
    ),
    "Wan": ConfigFormat(
        read=_make_shape_reader(
            {"latent_channels": "in_channels", "text_width": "text_dim"},
            patch_size=lambda config: config["patch_size"][-1],
            mlp_ratio=lambda config: config["ffn_dim"] / (config["num_attention_heads"] * config["attention_head_dim"]),
        ),
        make_config=_wan_config,
        rotary_dims=_wan_rotary_dims,
        head_multiple=2,
        fixed_fields=_COMMON_FIXED_FIELDS,
    ),
}


# What becomes of it


def resolve_shape(
    student: StudentConfig, teacher: TransformerShape, name: str, config_format: ConfigFormat
) -> tuple[TransformerShape, tuple[int, ...]]:
    """The student's shape and, for each of its blocks, the teacher's block that it stands for; or why there is none."""
    _check_family(student, name)
    for key, why in config_format.fixed_fields.items():
        _check_same(key, getattr(student, key), getattr(teacher, key), why)
    overrides = {
        field.name: getattr(student, field.name)
        for field in dataclasses.fields(TransformerShape)
        if getattr(student, field.name) is not None
    }
    if student.layers is not None:
        overrides["depth"] = len(student.layers)
    shape = dataclasses.replace(teacher, **overrides)
    _check_width(shape, teacher, name, config_format)
    return shape, () if student.layers is None else _check_layers(student.layers, teacher.depth)


def select_layers(num: int, depth: int) -> tuple[int, ...]:
    """`num` of `depth` blocks, evenly, the first and the last among them; more than there are repeat evenly."""
    if num == 1:
        return (0,)
    if num <= depth:
        return tuple(round(place * (depth - 1) / (num - 1)) for place in range(num))
    return tuple(place * depth // num for place in range(num))


def transformer_config(
    class_name: str, teacher: Mapping[str, Any], student: StudentConfig
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The config of a pipeline's transformer in the student's shape, and which of the teacher's blocks each of its own stands for."""
    name = get_family(class_name).name
    config_format = _widen_for_size_embeddings(CONFIG_FORMATS[name], name, teacher)
    teacher_shape = config_format.read(teacher)
    shape, layers = resolve_shape(student, teacher_shape, name, config_format)
    if not layers:
        layers = (
            _select_flux_layers(teacher, shape.depth)
            if name == "FLUX"
            else select_layers(shape.depth, teacher_shape.depth)
        )
    if name == "FLUX":
        _check_flux_layer_order(layers, teacher["num_layers"])
    if shape == teacher_shape and layers == tuple(range(teacher_shape.depth)):
        return dict(teacher), layers
    return {**teacher, **config_format.make_config(teacher, shape, layers)}, layers


def _widen_for_size_embeddings(config_format: ConfigFormat, name: str, teacher: Mapping[str, Any]) -> ConfigFormat:
    """PixArt-Alpha at 1,024 puts three embeddings of sizes beside each other, which together are as wide as the model."""
    use_additional_conditions = teacher.get("use_additional_conditions")
    if name == "PixArt" and (
        use_additional_conditions or (use_additional_conditions is None and teacher.get("sample_size") == 128)
    ):
        return dataclasses.replace(config_format, width_multiple=3 * config_format.width_multiple)
    return config_format


def _select_flux_layers(teacher: Mapping[str, Any], num: int) -> tuple[int, ...]:
    double, single = int(teacher["num_layers"]), int(teacher["num_single_layers"])
    if num == 1:
        return (0,)
    first = min(max(1, round(num * double / (double + single))), num - 1) if single else num
    return (*select_layers(first, double), *(double + layer for layer in select_layers(num - first, single)))


def _check_flux_layer_order(layers: Sequence[int], double: int) -> None:
    """The single blocks of FLUX come after all the double ones, of which there must be one."""
    kinds = [layer < double for layer in layers]
    if not kinds[0] or kinds != sorted(kinds, reverse=True):
        raise InputError(
            f"layers {list(layers)} of FLUX",
            f"at least one double block (0 to {double - 1}), and single ones (from {double} on) after them",
            "reorder the layers",
        )


def dit_config(teacher: DiTConfig, student: StudentConfig) -> tuple[DiTConfig, tuple[int, ...]]:
    """The config of a DiT in the student's shape, and which of the teacher's blocks each of its own stands for."""
    teacher_shape = TransformerShape(
        width=teacher.hidden,
        depth=teacher.depth,
        heads=teacher.heads,
        patch_size=teacher.patch_size,
        latent_channels=teacher.channels,
        text_width=teacher.text_hidden,
        mlp_ratio=4.0,
    )
    shape, layers = resolve_shape(student, teacher_shape, DIT_FAMILY, DIT_CONFIG_FORMAT)
    config = dataclasses.replace(
        teacher,
        hidden=shape.width,
        depth=shape.depth,
        heads=shape.heads,
        patch_size=shape.patch_size,
        text_hidden=shape.text_width,
    )
    return config, layers or select_layers(shape.depth, teacher_shape.depth)


def _raise_no_dict_config(*_: Any) -> Any:
    raise TypeError("a DiT has a config of its own")


DIT_CONFIG_FORMAT = ConfigFormat(
    read=_raise_no_dict_config,
    make_config=_raise_no_dict_config,
    width_multiple=4,
    fixed_fields={"latent_channels": _SAME_LATENTS_REASON, "mlp_ratio": _FIXED_MLP_RATIO_REASON},
)


# Refusals


def _normalize_name(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower())


def _check_family(student: StudentConfig, name: str) -> None:
    if student.family is None or _normalize_name(student.family) in (
        _normalize_name(name),
        f"halation{_normalize_name(name)}",
    ):
        return
    raise InputError(
        f"a student of the family {student.family}, of a teacher of the family {_normalize_name(name)}",
        "one family for both: they read the same texts and work in the same latents",
        f'write "family": "{_normalize_name(name)}", or null',
    )


def check_patch_size(class_name: str, teacher: Mapping[str, Any], student: StudentConfig) -> None:
    """For pipelines that tell the transformer a time for each token, and so know how many there are."""
    own = CONFIG_FORMATS[get_family(class_name).name].read(teacher).patch_size
    _check_same("patch_size", student.patch_size, own, "the pipeline tells each token of that size its time")


_FIELD_LABELS = {
    "latent_channels": "{} latent channels",
    "text_width": "texts of {} channels",
    "mlp_ratio": "an mlp_ratio of {}",
    "patch_size": "patches of {}",
}


def _check_same(key: str, student: Any, teacher: Any, why: str) -> None:
    if student is None or student == teacher:
        return
    number = f"{teacher:g}"
    raise InputError(
        f"the student has {_FIELD_LABELS[key].format(f'{student:g}')}, the teacher {number}",
        f"{number} for both: {why}",
        f"set {key} to {number}, or to null",
    )


def _check_width(shape: TransformerShape, teacher: TransformerShape, name: str, config_format: ConfigFormat) -> None:
    if shape.width % shape.heads:
        near = max(1, round(shape.width / teacher.head_width))
        hint = f"heads to {near}" if shape.width % near == 0 else f"width to {shape.heads * max(1, shape.head_width)}"
        raise InputError(
            f"a student {shape.width} wide with {shape.heads} heads",
            "a width that the heads divide",
            f"set {hint}; the teacher's are {teacher.head_width} wide each",
        )
    least = config_format.head_multiple * (3 if name in ("Wan", "FLUX") else 1)
    if shape.head_width % config_format.head_multiple or shape.head_width < least:
        raise InputError(
            f"heads {shape.head_width} wide ({shape.width} over {shape.heads})",
            f"a multiple of {config_format.head_multiple} from {least} on, which the rotary positions of {name} can take",
            f"change width or heads; the teacher's are {teacher.head_width} wide",
        )
    if shape.width % config_format.width_multiple:
        raise InputError(
            f"a student {shape.width} wide",
            f"a multiple of {config_format.width_multiple}, which its positions and sizes are embedded in",
            f"set width to {-(-shape.width // config_format.width_multiple) * config_format.width_multiple}",
        )


def _check_layers(layers: tuple[int, ...], depth: int) -> tuple[int, ...]:
    wrong = next((layer for layer in layers if not 0 <= layer < depth), None)
    if wrong is not None:
        raise InputError(
            f"layer {wrong} of a teacher that has {depth}", f"layers from 0 to {depth - 1}", "change layers"
        )
    return layers
