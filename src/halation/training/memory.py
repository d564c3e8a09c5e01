"""Whether a batch can fit, asked before it is tried: on a CPU the answer of the system is to kill the process, or to swap for hours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from halation.errors import InputError

# Measured with saved-tensor hooks on the tiny and small DiT at 16 to 256 tokens: 1.9 to 2.5 kept values for each value that a
# matrix product puts out; with checkpointing one block's share and the blocks' inputs.
KEPT_PER_OUTPUT = 2.2
HOST_COPIES = 5  # batches the loader holds ahead, and the one in use
BYTES = {"fp32": 4.0, "bf16": 2.6, "fp16": 2.6}  # autocast leaves norms and residuals in float32


@dataclass(frozen=True, kw_only=True)
class PictureCost:
    """What one picture of a batch costs, roughly."""

    flops: int
    """Operations of one forward."""
    hidden: int
    depth: int
    num_values: int
    """Values of one sample as the model sees it."""
    dtype: str
    checkpointing: bool

    def activation_bytes(self) -> float:
        kept = KEPT_PER_OUTPUT * self.flops / (2 * self.hidden)
        return kept * BYTES[self.dtype] * (min(1.0, 1.5 / self.depth) if self.checkpointing else 1.0)

    def on(self, device: torch.device) -> float:
        """Bytes a picture. On a GPU, where a batch too large is a clean error, half of it: only the hopeless is refused early."""
        if device.type == "cuda":
            return self.activation_bytes() / 2
        return self.activation_bytes() + HOST_COPIES * 5 * self.num_values


def free_bytes(device: torch.device, num_sharing: int) -> float:
    """Memory this rank may still take, where `num_sharing` ranks share the machine's."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    import psutil

    return min(float(psutil.virtual_memory().available), _cgroup_free()) / max(1, num_sharing)


def _cgroup_free() -> float:
    """What a container or a batch job may still take (cgroup 2); infinite where nothing limits it."""
    free = float("inf")
    try:
        name = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        folder = Path("/sys/fs/cgroup") / name.lstrip("/")
        for place in (folder, *folder.parents):
            limit = place / "memory.max"
            if limit.exists() and (text := limit.read_text().strip()) != "max":
                free = min(free, float(text) - _held(place))
    except (OSError, StopIteration, ValueError):
        pass
    return max(free, 0.0)


def _held(place: Path) -> float:
    """Bytes in use less the file cache, which the system gives up as soon as somebody asks for memory."""
    cached = 0.0
    for line in (place / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name in ("active_file", "inactive_file"):
            cached += float(value)
    return float((place / "memory.current").read_text()) - cached


def refuse_weights(
    num_trained: int, num_frozen: int, weight_bytes: int, num_shards: int, capacity: float
) -> InputError | None:
    """The error for a model whose training cannot fit into a device of `capacity` bytes, whatever the batch: weights, their gradients,
    two moments, and an average in float32."""
    needed = num_trained * (4 * weight_bytes + 4) / num_shards + num_frozen * weight_bytes
    if needed <= capacity:
        return None
    return InputError(
        f"training {num_trained / 1e9:.1f} billion parameters takes {needed / 2**30:.0f} GiB on each device before any picture",
        f"at most the {capacity / 2**30:.0f} GiB of one",
        "share them out with --engine fsdp or deepspeed on more GPUs, train adapters (--lora_rank 16), use --weights_dtype bf16, or a smaller model",
    )


def refuse_batch(rows: int, accumulate: int, cost: PictureCost, device: torch.device, free: float) -> InputError | None:
    """The error for a batch that cannot fit into `free` bytes, with one that should; None where it may fit."""
    each = cost.on(device)
    if rows * each <= free:
        return None
    found = f"--batch_size {rows} would take about {_size(rows * each)}, and {_size(free)} are free on {device}"
    if 0.8 * free < each:
        return InputError(
            found, "a batch that fits", "try a smaller --model or --image_size; not even one picture fits"
        )
    fits = 1 << (int(0.8 * free / each).bit_length() - 1)
    return InputError(found, "a batch that fits", advice(fits, accumulate * -(-rows // fits)))


def advice(batch_size: int, accumulate: int) -> str:
    return (
        f"try --batch_size {batch_size} (with --accumulate {accumulate} for the same global batch), "
        "--activation_checkpointing or --dtype bf16"
    )


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.0f} MiB"
