"""Estimated and measured memory of fine-tuning steps, for real shapes with random weights.

`python -m benchmarks.memory_estimate` needs one GPU of 80 GB, 10 GB of disk and four minutes. It builds HunyuanDiT
(1.5 B parameters) and SD3-medium (2 B), runs a few steps of each with LoRA in bf16 and of all weights, in the session
of `halation train`, and prints a line per case: the estimate, the peak that torch allocated, the peak that it reserved,
and estimate / allocated (goal: 0.85 to 1.15). A case that fails is a line, and the next one runs. `--tiny` (or no GPU)
uses tiny shapes on the CPU, where the bytes of all tensors take the place of the peak. `--only NAME ...` runs some
cases.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import finetune_hunyuan, hunyuan, inputs, measure
from halation.distributed.world import World, init_from_env
from halation.training import command, memory_fit_check
from halation.training.config import TrainConfig
from halation.training.loop import StepReport
from halation.training.reporting import ThroughputWindow
from halation.training.session import TrainingSession

NUM_STEPS = 4
GOAL = 0.15
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class SD3Shape:
    """Size of the components of a Stable Diffusion 3 pipeline; text encoders have one layer."""

    layers: int
    heads: int
    head_size: int
    clip_widths: tuple[int, int]
    t5_width: int
    latent_size: int
    max_positions: int
    vae_channels: tuple[int, ...]
    vae_layers: int


SD3_MEDIUM = SD3Shape(
    layers=24, heads=24, head_size=64, clip_widths=(768, 1280), t5_width=4096, latent_size=128, max_positions=192,
    vae_channels=(128, 256, 512, 512), vae_layers=2,
)  # fmt: skip
SD3_TINY = SD3Shape(
    layers=3, heads=2, head_size=16, clip_widths=(32, 32), t5_width=64, latent_size=8, max_positions=16,
    vae_channels=(8, 8, 8, 8), vae_layers=1,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fine-tuning; settings are those of `halation train`."""

    name: str
    family: str
    batch_size: int = 4
    settings: tuple[tuple[str, Any], ...] = ()


LORA: tuple[tuple[str, Any], ...] = (("lora_rank", 16),)
CASES = (
    Case(name="hunyuan_lora", family="hunyuan", settings=LORA),
    Case(name="sd3_lora", family="sd3", settings=LORA),
    Case(name="hunyuan_full", family="hunyuan"),
    Case(name="sd3_full", family="sd3"),
    Case(name="hunyuan_full_checkpointed", family="hunyuan", settings=(("gradient_checkpointing", True),)),
    Case(name="sd3_full_bf16", family="sd3", settings=(("weights_dtype", "bf16"), ("ema_decay", 0.0))),
)


class EnoughSteps(Exception):
    """Ends the session after the last measured step, before it saves."""


class MeasuredSession(TrainingSession):
    """The session of `halation train`, for a few steps."""

    def _build_networks(self) -> None:
        if self.config.gradient_checkpointing:
            self.denoiser.enable_gradient_checkpointing()
        self.memory_estimate = memory_fit_check.check_batch_fits(
            self.task, self.config, self.global_batch, capacity=math.inf
        )
        super()._build_networks()
        if self.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _log(self, report: StepReport, window: ThroughputWindow, is_saved: bool) -> None:
        super()._log(report, window, is_saved)
        if report.step == NUM_STEPS:
            raise EnoughSteps

    def state_bytes(self) -> int:
        """Bytes of weights, autoencoder, optimizer and EMA, summed over their tensors."""
        module, space = self.denoiser.module, self.denoiser.space
        tensors = [*module.parameters(), *module.buffers(), *(self.ema.tensors().values() if self.ema else ())]
        tensors += [value for state in self.engine.optimizer.state.values() for value in state.values()]
        return sum(tensor.nbytes for tensor in tensors) + int(getattr(space, "num_bytes", 0))


def build_sd3(folder: Path, shape: SD3Shape, dtype: torch.dtype, device: str) -> Path:
    """Build and save a Stable Diffusion 3 pipeline with random weights; nothing is downloaded."""
    import diffusers
    import tokenizers
    import transformers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    names = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    vocabulary = {name: index for index, name in enumerate(names)}
    clip_tokenizers = [
        transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77) for _ in shape.clip_widths
    ]
    t5_tokenizer = hunyuan._tokenizers()[1]
    with torch.device(device):
        transformer: Any = diffusers.SD3Transformer2DModel(
            sample_size=shape.latent_size,
            patch_size=2,
            in_channels=16,
            out_channels=16,
            num_layers=shape.layers,
            num_attention_heads=shape.heads,
            attention_head_dim=shape.head_size,
            caption_projection_dim=shape.heads * shape.head_size,
            joint_attention_dim=shape.t5_width,
            pooled_projection_dim=sum(shape.clip_widths),
            pos_embed_max_size=shape.max_positions,
        )
        clips: list[Any] = [_clip(width, vocabulary) for width in shape.clip_widths]
        t5: Any = transformers.T5EncoderModel(
            transformers.T5Config(
                vocab_size=len(t5_tokenizer),
                d_model=shape.t5_width,
                d_kv=64,
                d_ff=shape.t5_width * 5 // 2,
                num_layers=1,
                num_heads=max(1, shape.t5_width // 64),
                feed_forward_proj="gated-gelu",
            )
        )
    hunyuan._fill(transformer)
    pipe: Any = diffusers.StableDiffusion3Pipeline(
        transformer=transformer.to(dtype),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(shape).to(dtype),
        text_encoder=clips[0].to(dtype),
        tokenizer=clip_tokenizers[0],
        text_encoder_2=clips[1].to(dtype),
        tokenizer_2=clip_tokenizers[1],
        text_encoder_3=t5.to(dtype),
        tokenizer_3=t5_tokenizer,
    )
    pipe.save_pretrained(str(folder), safe_serialization=True)
    return folder


def _clip(width: int, vocabulary: dict[str, int]) -> Any:
    import transformers

    config = transformers.CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=max(1, width // 64),
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return transformers.CLIPTextModelWithProjection(config)


def _vae(shape: SD3Shape) -> Any:
    import diffusers

    return diffusers.AutoencoderKL(
        latent_channels=16,
        block_out_channels=shape.vae_channels,
        down_block_types=("DownEncoderBlock2D",) * len(shape.vae_channels),
        up_block_types=("UpDecoderBlock2D",) * len(shape.vae_channels),
        layers_per_block=shape.vae_layers,
        norm_num_groups=min(32, shape.vae_channels[0]),
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5305,
    )


def build(family: str, folder: Path, device: str) -> Path:
    """Build the pipeline of a family, of the real shape on a GPU, unless it exists."""
    if (folder / "model_index.json").exists():
        return folder
    began = time.perf_counter()
    is_real = device == "cuda"
    dtype = torch.bfloat16 if is_real else torch.float32
    if family == "hunyuan":
        size = finetune_hunyuan.REAL if is_real else finetune_hunyuan.TINY
        hunyuan.build(folder, size.shape, dtype, device)
    else:
        build_sd3(folder, SD3_MEDIUM if is_real else SD3_TINY, dtype, device)
    free_memory()
    measure.say(f"built {family} in {time.perf_counter() - began:.1f} s")
    return folder


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def config_of(case: Case, model: Path, work: Path, is_real: bool) -> TrainConfig:
    config = TrainConfig(
        output_dir=work / f"run_{case.name}",
        model_path=str(model),
        data="streets",
        max_images=(NUM_STEPS + 1) * case.batch_size,  # fewer than an epoch, whose end would save
        image_size=(512, 512) if is_real else (64, 64),
        dtype="bf16" if is_real else "fp32",
        batch_size=case.batch_size,
        n_steps=1000,
        engine="single",
        ckpt_every=0,
        log_every=1,
        validation_images=0,
        sample=False,
        report_to=("none",),
        progress="none",
        cache_dir=str(work / f"cache_{case.family}"),
    )
    return command.resolve_config(dataclasses.replace(config, **dict(case.settings)))


def run_case(world: World, config: TrainConfig) -> tuple[memory_fit_check.MemoryEstimate, float, float, float]:
    """Train a few steps; return the estimate, what it is compared with, the measured bytes and those reserved."""
    session = MeasuredSession(world, config)
    with command.open_run_on_rank_zero(config, world), session:
        session.prepare()
        with contextlib.suppress(EnoughSteps):
            session.run()
        estimate = session.memory_estimate
        if world.device.type == "cuda":
            return estimate, estimate.total, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        state = estimate.total - estimate.activations - estimate.gradients
        return estimate, state, session.state_bytes(), 0.0


def measure_cases(cases: tuple[Case, ...], world: World, work: Path) -> list[measure.Row]:
    """Run the cases one after the other, each with free memory; print a line after each."""
    device = world.device.type
    rows = []
    for case in cases:
        began = time.perf_counter()
        try:
            model = build(case.family, work / case.family, device)
            config = config_of(case, model, work, device == "cuda")
            estimate, compared, found, reserved = run_case(world, config)
        except Exception:  # noqa: BLE001 - the next case runs even if this one fails
            measure.say(f"{case.name}: failed after {time.perf_counter() - began:.0f} s\n{traceback.format_exc()}")
            continue
        finally:
            free_memory()
        ratio = compared / found
        measure.say(
            f"{case.name}: estimated {compared / GIB:.3f} GiB, measured {found / GIB:.3f} GiB "
            f"(reserved {reserved / GIB:.3f}), ratio {ratio:.3f}; {time.perf_counter() - began:.0f} s"
        )
        measure.say(f"{case.name}: {estimate}, total {estimate.total / GIB:.3f} GiB")
        rows.append(
            measure.Row(
                case=case.name, ours=compared / GIB, peer=found / GIB, unit="GiB", limit=None,
                check="within 15 %" if abs(ratio - 1) <= GOAL else "NOT within 15 %", equality="-",
                note=f"reserved {reserved / GIB:.2f} GiB; {estimate}",
            )
        )  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> measure.Report:
    parser = measure.parser(__doc__ or "")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="run only these cases")
    asked = parser.parse_args(arguments)
    is_real = asked.size == "full" and not asked.tiny and torch.cuda.is_available()
    if not is_real and not asked.tiny:
        measure.say("no GPU, or --size small: running tiny shapes on the CPU instead")
    cases = tuple(case for case in CASES if asked.only is None or case.name in asked.only)
    world = init_from_env(torch.device("cuda:0" if is_real else "cpu"))
    with world.close_on_success(), inputs.workplace(asked.work) as work:
        measure.say(measure.describe_facts(measure.machine()))
        rows = measure_cases(cases, world, work.resolve())
    report = measure.Report(name="memory_estimate", rows=tuple(rows), facts=measure.machine())
    measure.finish(report, asked.output)
    if len(rows) < len(cases):
        raise SystemExit(f"{len(cases) - len(rows)} of {len(cases)} cases failed; their errors are above")
    return report


if __name__ == "__main__":
    main()
