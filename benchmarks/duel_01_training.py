"""Duel 1: training DiT-XL/2 on cached 256 px latents, against plain scripts.

`halation train` is compared with a well-tuned plain script and with DiT as written. Ours is the shipped command in a
separate process, from PNG files through an autoencoder and the latent cache to the step; the peers get latents that are
already on the device. The turns alternate: command, script, command, script.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import inputs, measure, shipped

TRAINING_FLOPS = 0.712e12  # per image of DiT-XL/2 at 256 px: three forwards of 118.6 giga multiply-adds
LOG_EVERY = 5


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One size of the duel."""

    model: str
    depth: int
    hidden: int
    heads: int
    image_size: int
    batch: int
    written_batch: int
    warm_up: int
    windows: int
    turns: int
    num_workers: int
    flags: tuple[str, ...]
    tuned: bool

    @property
    def until_step(self) -> int:
        return self.warm_up + self.windows * LOG_EVERY

    @property
    def num_images(self) -> int:
        """Enough for every step of a turn: the end of an epoch would save during the measurement."""
        return (self.until_step + 2 * LOG_EVERY) * self.batch


XLARGE = Setting(
    model="xlarge", depth=28, hidden=1152, heads=16, image_size=256, batch=256, written_batch=64, warm_up=10, windows=6,
    turns=2, num_workers=8, flags=("--dtype", "bf16", "--compile"), tuned=True,
)  # fmt: skip
TINY = Setting(
    model="tiny", depth=5, hidden=160, heads=5, image_size=128, batch=16, written_batch=4, warm_up=5, windows=3,
    turns=2, num_workers=0, flags=("--dtype", "fp32"), tuned=False,
)  # fmt: skip


class Command:
    """`halation train` on a prepared folder; each turn is a new run with the same cache."""

    def __init__(self, setting: Setting, work: Path) -> None:
        self.setting, self.work = setting, work
        self.turn = itertools.count()
        measure.say(f"writing {setting.num_images} images and an autoencoder")
        self.data = inputs.class_folder(work / "pictures", setting.num_images)
        self.vae = inputs.vae_folder(work / "vae")
        self.first_loss = self.last_loss = self.data_s = 0.0

    def rates(self) -> list[float]:
        setting, number = self.setting, next(self.turn)
        run = self.work / f"run_{number}"
        size = str(setting.image_size)
        words = [
            "--data", str(self.data), "--vae", str(self.vae), "--model", setting.model, "--image_size", size, size,
            "--batch_size", str(setting.batch), "--n_steps", "100000", "--ckpt_every", "0", "--no_sample",
            "--validation_images", "0", "--log_every", str(LOG_EVERY), "--report_to", "none", "--progress", "plain",
            "--cache_dir", str(self.work / "cache"), "--num_workers", str(setting.num_workers), "--nproc", "1",
            *setting.flags,
        ]  # fmt: skip
        log = self.work / f"run_{number}.log"
        lines = shipped.train(words, run, log, until_step=setting.until_step, limit_s=420)
        self.first_loss, self.last_loss = lines[0]["loss"], lines[-1]["loss"]
        self.data_s = statistics.median(line["data_s"] for line in lines[1:])
        found = shipped.rates(lines, setting.batch, setting.warm_up)
        measure.say(f"halation train: {statistics.median(found):.1f} images/s ({measure.spread(found)})")
        return found


def cached_latents(cache: Path) -> np.ndarray:
    """Read the latents of the command from its cache, without Halation's reader."""
    from safetensors.numpy import load_file

    return np.concatenate([load_file(path)["x"] for path in sorted((cache / "latents").glob("train-*.safetensors"))])


def expected_first_loss(latents: np.ndarray, batch: int) -> float:
    """Return the first loss: a new DiT predicts zero, so it is the mean of (noise - latent)^2.

    The mean is over the first batch of the shuffled order.
    """
    from halation.data.prefetch import ShuffledOrder
    from halation.flow.seeded_noise import training_draw

    rows = ShuffledOrder(0, len(latents)).indices(0, batch)
    noise = np.stack([training_draw(0, position, latents.shape[1:]).noise for position in range(batch)])
    return float(np.square(noise - latents[rows].astype(np.float32), dtype=np.float64).mean())


def plain_rates(setting: Setting, latents: np.ndarray, *, tuned: bool) -> tuple[list[float], float]:
    """Return the script's images per second by window, and its last loss; free its memory."""
    import torch

    from benchmarks.plain_dit import PlainTraining, Shape

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        torch.set_num_threads(1)  # like a rank of the command
    torch.set_float32_matmul_precision("high")
    shape = Shape(depth=setting.depth, hidden=setting.hidden, heads=setting.heads, grid=setting.image_size // 8)
    device = torch.device("cuda" if on_gpu else "cpu")
    training = PlainTraining(
        shape,
        torch.from_numpy(latents[:4096].astype(np.float32)).to(device),
        setting.batch if tuned else setting.written_batch,
        tuned=tuned,
        compiled=tuned and setting.tuned,
        bf16=tuned and setting.tuned,
    )
    training.rate(setting.warm_up)
    found = [training.rate(LOG_EVERY) for _ in range(setting.windows)]
    measure.say(f"plain, {'tuned' if tuned else 'as written'}: {statistics.median(found):.1f} images/s")
    loss = training.loss
    del training
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return found, loss


def duel(setting: Setting, work: Path) -> measure.Report:
    command = Command(setting, work)
    ours: list[float] = []
    tuned: list[float] = []
    for _ in range(setting.turns):
        ours += command.rates()
        latents = cached_latents(work / "cache")
        found, tuned_loss = plain_rates(setting, latents, tuned=True)
        tuned += found
    written, _ = plain_rates(setting, latents, tuned=False)
    peak = measure.matrix_peak()
    facts: dict[str, Any] = measure.machine() | {"matrix_tflops": round(peak / 1e12, 2), "batch": setting.batch}
    limit = peak / TRAINING_FLOPS if setting.model == "xlarge" else None
    rate = statistics.median(ours)
    if limit is not None:
        facts |= {"mfu": round(rate / limit, 4), "mfu_plain": round(statistics.median(tuned) / limit, 4)}
    expected = expected_first_loss(latents, setting.batch)
    difference = abs(command.first_loss - expected)
    facts |= {"ours": measure.spread(ours), "plain": measure.spread(tuned), "data_wait_s": command.data_s}
    check = f"first loss off by {difference:.1e}; last {command.last_loss:.3f}, plain {tuned_loss:.3f}"
    rows = (
        measure.Row(
            case=f"(b) well-tuned script, batch {setting.batch}", ours=rate, peer=statistics.median(tuned),
            unit="images/s", limit=limit, check=check, equality="E1",
        ),
        measure.Row(
            case=f"(a) DiT as written, batch {setting.written_batch}", ours=rate, peer=statistics.median(written),
            unit="images/s", limit=limit, check=check, equality="E1",
        ),
    )  # fmt: skip
    if difference > 1e-4 * expected:
        raise SystemExit(f"the command's first loss is {command.first_loss}, but its latents give {expected}")
    return measure.Report(name="duel_01_training", rows=rows, facts=facts)


def main(arguments: list[str] | None = None) -> measure.Report:
    parser = measure.parser(__doc__ or "")
    parser.add_argument("--batch", type=int, help="images per step for the command and the tuned script (default: 256)")
    asked = parser.parse_args(arguments)
    import torch

    setting = XLARGE if asked.size == "full" and torch.cuda.is_available() else TINY
    if asked.size == "full" and setting is TINY:
        measure.say("no GPU: running the small size instead")
    if asked.batch:
        setting = dataclasses.replace(setting, batch=asked.batch)
    with inputs.workplace(asked.work) as work:
        report = duel(setting, work)
    measure.finish(report, asked.output)
    return report


if __name__ == "__main__":
    main()
