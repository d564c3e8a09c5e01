"""The weights of a student from its teacher's: blocks kept by number, channels kept evenly, heads kept whole.

Nothing here knows a family: a tensor is cut by its name and by the two shapes it has to go between.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halation.models.dit.network import TEXT_HEADS, DiTConfig
from halation.models.students.shapes import Dialect

_FROM_HEADS = ("to_out.0", "to_add_out", "out")
_HEADS = (
    *("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "qkv", "q", "kv"),
    *("norm_q", "norm_k", "norm_added_q", "norm_added_k", "q_scale", "k_scale"),
)


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How channels are dealt out over heads, and which of a head's turn together."""

    num: int
    parts: tuple[int, ...]

    @property
    def width(self) -> int:
        return sum(self.parts)


@dataclass(frozen=True, kw_only=True)
class Patches:
    """Pixels of a patch, and whether its channels come before them in the layer that reads or writes patches."""

    size: int
    channels_first: bool = False


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What becomes of a teacher: which of its blocks are kept, and how heads and patches of the two are made."""

    layers: tuple[int, ...]
    heads: tuple[Heads, Heads]
    patches: tuple[Patches, Patches]
    lists: tuple[str, ...] = ("blocks",)
    firsts: tuple[int, ...] = (0,)
    """The number of the first block of each of the teacher's lists."""
    text_heads: tuple[Heads, Heads] | None = None
    """Those of a text encoder that belongs to the model."""

    @classmethod
    def between(
        cls, dialect: Dialect, teacher: Mapping[str, Any], student: Mapping[str, Any], layers: Sequence[int]
    ) -> Cut:
        """For the configs of two transformers of a pipeline."""

        def heads(config: Mapping[str, Any]) -> Heads:
            shape = dialect.read(config)
            axes = config.get("axes_dims_rope")
            return Heads(num=shape.heads, parts=dialect.rotary(shape.head_width) if axes is None else tuple(axes))

        return cls(
            layers=tuple(layers),
            heads=(heads(teacher), heads(student)),
            patches=(Patches(size=dialect.read(teacher).patch_size), Patches(size=dialect.read(student).patch_size)),
            lists=dialect.lists,
            firsts=(0, int(teacher["num_layers"]))[: len(dialect.lists)],
        )

    @classmethod
    def of_dits(cls, teacher: DiTConfig, student: DiTConfig, layers: Sequence[int]) -> Cut:
        heads = [Heads(num=dit.heads, parts=(dit.hidden // dit.heads,)) for dit in (teacher, student)]
        texts = [Heads(num=TEXT_HEADS, parts=(dit.text_hidden // TEXT_HEADS,)) for dit in (teacher, student)]
        patches = [Patches(size=dit.patch_size, channels_first=True) for dit in (teacher, student)]
        return cls(
            layers=tuple(layers),
            heads=(heads[0], heads[1]),
            patches=(patches[0], patches[1]),
            text_heads=(texts[0], texts[1]),
        )


@torch.no_grad()
def shrunk(teacher: nn.Module, student: nn.Module, cut: Cut) -> dict[str, Tensor]:
    """Every parameter of the student, from the teacher's; one that the teacher has nothing like stays as it is.

    What has the same shape in both is the same to the bit.
    """
    there = dict(teacher.named_parameters())
    weights: dict[str, Tensor] = {}
    for name, own in student.named_parameters():
        source = _source(name, own, there, cut)
        if source is None:
            weights[name] = own.detach()
        elif source.shape == own.shape:
            weights[name] = source.detach()
        else:
            owner = student.get_submodule(name.rpartition(".")[0])
            reads = name.endswith(".weight") and isinstance(owner, (nn.Linear, nn.Conv2d, nn.Conv3d))
            weights[name] = _fitted(name, source.detach().float(), own.shape, cut, reads=reads)
    return weights


def _source(name: str, own: Tensor, there: Mapping[str, Tensor], cut: Cut) -> Tensor | None:
    """The teacher's tensor of this name in the block that is kept; where that block has none, or one for another purpose (more or
    fewer vectors of modulation), in the nearest block that has one."""
    number = next((place for place, known in enumerate(cut.lists) if name.startswith(f"{known}.")), None)
    if number is None:
        return there.get(name)
    prefix = cut.lists[number]
    _, place, rest = name.removeprefix(prefix).split(".", 2)
    first = cut.firsts[number]
    later = cut.firsts[number + 1] if number + 1 < len(cut.firsts) else None
    mine = [layer - first for layer in cut.layers if layer >= first and (later is None or layer < later)]
    layer = mine[int(place)]
    others = {int(key.split(".")[1]): value for key, value in there.items() if _is_like(key, prefix, rest)}
    ranked = [others[other] for other in sorted(others, key=lambda other: (abs(other - layer), other))]
    fitting = (tensor for tensor in ranked if _is_proportional(tensor, own, cut))
    return next(fitting, ranked[0] if ranked else None)


def _is_like(key: str, prefix: str, rest: str) -> bool:
    return key.startswith(f"{prefix}.") and key.removeprefix(prefix).split(".", 2)[2] == rest


def _is_proportional(tensor: Tensor, own: Tensor, cut: Cut) -> bool:
    before, after = (heads.num * heads.width for heads in cut.heads)
    sizes = zip(tensor.shape, own.shape, strict=True) if tensor.ndim == own.ndim else ()
    return tensor.ndim == own.ndim and all(one == other or one * after == other * before for one, other in sizes)


# One tensor


def _fitted(name: str, tensor: Tensor, shape: torch.Size, cut: Cut, *, reads: bool) -> Tensor:
    """`reads` says that the second axis is what a layer reads, and not what it holds.

    What fewer channels are read from is not scaled up, nor are queries of narrower heads. Tried on a DiT of 3.1 M parameters trained
    on streets (mean square of its answer 1.11) and its student of 96 of 160 channels and 3 of 5 blocks, 0.9 M: as they are, inputs
    leave an error of 0.45, and 0.038 after 120 steps of learning; scaled by the root of the ratio 0.43 and 0.040, by the ratio 0.58
    and 0.051. A random student begins at 1.11 and is at 0.149 by then.
    """
    tensor = _repatched(name, tensor, cut)
    for axis, size in enumerate(shape):
        before = tensor.shape[axis]
        if before == size:
            continue
        tensor = tensor.index_select(axis, _kept(name, axis, before, size, cut))
        if reads and axis == 1 and size > before:  # channels that are there several times count once
            tensor = tensor * (before / size)
    return tensor


def evenly(num: int, total: int) -> list[int]:
    """Channel j of `num` is channel floor(j * total / num): of sines and cosines, and of quarters and sixths that stand one after
    the other, a whole fraction keeps exactly the ones that a narrower model would have."""
    return [place * total // num for place in range(num)]


def _kept(name: str, axis: int, before: int, size: int, cut: Cut) -> Tensor:
    layer = name.removesuffix(".weight").removesuffix(".bias")
    teacher, student = _heads_of(name, cut)
    if axis == 1 and re.match(
        r"single_transformer_blocks\.\d+\.proj_out$", layer
    ):  # attention first, then its feed-forward part
        inner, narrow = teacher.num * teacher.width, student.num * student.width
        rest = [inner + place for place in evenly(size - narrow, before - inner)]
        return torch.tensor([*_whole_heads(teacher, student), *rest])
    is_of_heads = any(layer.endswith(f".{ending}") for ending in (_HEADS if axis == 0 else _FROM_HEADS))
    if is_of_heads and before == teacher.width and size == student.width:
        return torch.tensor(_within_head(teacher, student))
    if is_of_heads and before % (teacher.num * teacher.width) == 0:
        inner = teacher.num * teacher.width
        heads = _whole_heads(teacher, student)
        return torch.tensor([chunk * inner + place for chunk in range(before // inner) for place in heads])
    return torch.tensor(evenly(size, before))


def _heads_of(name: str, cut: Cut) -> tuple[Heads, Heads]:
    return cut.text_heads if cut.text_heads is not None and name.startswith("text.layers.") else cut.heads


def _whole_heads(teacher: Heads, student: Heads) -> list[int]:
    within = _within_head(teacher, student)
    return [head * teacher.width + place for head in evenly(student.num, teacher.num) for place in within]


def _within_head(teacher: Heads, student: Heads) -> list[int]:
    """Channels of a head in pairs, which rotary positions turn, evenly in the part of each axis."""
    kept: list[int] = []
    first = 0
    for before, size in zip(teacher.parts, student.parts, strict=True):
        step = 1 if before % 2 or size % 2 else 2
        pairs = evenly(size // step, before // step)
        kept += [first + step * pair + inner for pair in pairs for inner in range(step)]
        first += before
    return kept


def _repatched(name: str, tensor: Tensor, cut: Cut) -> Tensor:
    """Layers that read or write patches, for patches of another size: read are means over the smaller, and their sum stays."""
    before, after = cut.patches
    if before.size == after.size:
        return tensor
    if tensor.ndim >= 4:  # a convolution
        flat = tensor.flatten(0, -3).unsqueeze(0)
        resized = F.interpolate(flat, size=(after.size, after.size), mode="area")
        return resized.reshape(*tensor.shape[:-2], after.size, after.size) * (before.size / after.size) ** 2
    if name == "patches.weight":
        return _resized(tensor, before, after) * (before.size / after.size) ** 2
    if name.startswith(("proj_out.", "head.")):
        return _resized(tensor.movedim(0, -1), before, after).movedim(-1, 0)
    return tensor


def _resized(tensor: Tensor, before: Patches, after: Patches) -> Tensor:
    """The last axis, a patch and its channels, as a patch of another size."""
    channels = tensor.shape[-1] // before.size**2
    order = (channels, before.size, before.size) if before.channels_first else (before.size, before.size, channels)
    grid = tensor.reshape(-1, *order)
    grid = grid if before.channels_first else grid.movedim(-1, 1)
    grid = F.interpolate(grid, size=(after.size, after.size), mode="area")
    grid = grid if before.channels_first else grid.movedim(1, -1)
    return grid.reshape(*tensor.shape[:-1], -1)
