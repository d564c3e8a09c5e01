"""DeepSpeed's JSON config: the user's file merged with the flags; conflicts are errors."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from halation.errors import InputError
from halation.input_files import MAX_SETTINGS_BYTES, read_json

AUTO = "auto"
ConfigDict = dict[str, Any]
KNOWN_KEYS = frozenset(
    """
    activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comms_logger communication_data_type compile
    compression_training csv_monitor curriculum_learning data_efficiency data_types dataloader_drop_last
    disable_allgather disable_python_gc dump_state elasticity expert_parallel flops_profiler fp16
    gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor graph_harvesting
    hybrid_engine load_universal_checkpoint log_level managed_gradient_accumulation memory_breakdown monitor_config
    nebula optimizer pipeline prescale_gradients progressive_layer_drop scheduler
    seq_parallel_communication_data_type sequence_parallel_size sparse_attention sparse_gradients steps_per_print
    tensor_parallel tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
    """.split()  # noqa: SIM905 - easier to read than a list of quoted strings
)
"""Keys that DeepSpeed reads; it silently ignores all others."""


def read_config(path: str) -> ConfigDict:
    """Read the user's file; empty without one."""
    if not path:
        return {}
    try:
        config = read_json(path, max_bytes=MAX_SETTINGS_BYTES)
    except OSError as error:
        raise InputError(
            f"--deepspeed_config {path}: {error.strerror or error}",
            "DeepSpeed's JSON config",
            "give the path of the file",
        ) from error
    except ValueError as error:
        raise InputError(
            f"--deepspeed_config {path} is not JSON ({error})", "DeepSpeed's JSON config", "fix it"
        ) from error
    if not isinstance(config, dict):
        raise InputError(f"--deepspeed_config {path} is a {type(config).__name__}", "a JSON object", "fix it")
    return config


def find_unknown_keys(config: Mapping[str, Any]) -> list[str]:
    """Return unknown keys; raises InputError for one that looks like a misspelled known key."""
    unknown = [key for key in config if key not in KNOWN_KEYS]
    for key in unknown:
        near = difflib.get_close_matches(key, KNOWN_KEYS, n=1, cutoff=0.85)
        if near:
            raise InputError(f"{key!r} in --deepspeed_config", "DeepSpeed's keys", f"did you mean {near[0]!r}?")
    return unknown


def resolve_zero_stage(config: Mapping[str, Any], default_stage: int) -> int:
    """Return the ZeRO stage: the file takes precedence over the flag."""
    found = _section(config, "zero_optimization").get("stage", AUTO)
    if found == AUTO:
        return default_stage
    if found not in (1, 2, 3) or isinstance(found, bool):
        raise InputError(
            f"zero_optimization.stage {found!r} in --deepspeed_config",
            "1, 2 or 3",
            "use --engine ddp for training without sharding",
        )
    return int(found)


def merge_config(
    config: Mapping[str, Any],
    *,
    zero_stage: int,
    offload: bool,
    num_micro_batches: int,
    micro_batch_size: int,
    global_batch: int,
    grad_clip: float,
    dtype: str,
    bf16_weights: bool,
    pin_memory: bool,
) -> ConfigDict:
    """Return DeepSpeed's config: keys set by flags are checked and replaced, others are kept."""
    _check_agrees(config, "train_batch_size", global_batch, "the product of --batch_size, --accumulate and ranks")
    _check_agrees(config, "train_micro_batch_size_per_gpu", micro_batch_size, "--batch_size")
    _check_agrees(config, "gradient_accumulation_steps", num_micro_batches, "--accumulate")
    _check_agrees(config, "gradient_clipping", grad_clip, "--grad_clip")
    _check_precision(config, dtype)
    if "scheduler" in config:
        raise InputError(
            "a scheduler in --deepspeed_config",
            "the learning rate set by flags",
            "use --warmup_steps and --decay_steps, and remove the section",
        )
    flag_keys = {"train_batch_size", "optimizer", "gradient_clipping", "fp16", "amp", "torch_autocast"}
    other_settings = {key: value for key, value in config.items() if key not in flag_keys}
    zero = {key: value for key, value in _section(config, "zero_optimization").items() if value != AUTO}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pin_memory} | _section(zero, "offload_optimizer")
    _check_offload(zero)
    bf16 = {key: value for key, value in _section(config, "bf16").items() if value != AUTO}
    return other_settings | {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": num_micro_batches,
        "gradient_clipping": grad_clip,
        # If enabled, it would replace torch's linear layer in the whole process.
        "zero_optimization": {"memory_efficient_linear": False} | zero | {"stage": zero_stage},
        "bf16": bf16 | {"enabled": bool(bf16.get("enabled", False)) or bf16_weights},
        # A torch optimizer steps where its state is; DeepSpeed's CPU optimizer would have to be compiled.
        "zero_force_ds_cpu_optimizer": False,
    }


def check_optimizer(config: Mapping[str, Any], *, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
    """Raise InputError if an optimizer in the file differs from the flags."""
    section = _section(config, "optimizer")
    if not section:
        return
    if str(section.get("type", AUTO)).lower() not in (AUTO, "adam", "adamw"):
        raise InputError(
            f"optimizer {section['type']} in --deepspeed_config", "AdamW", "remove the section from the file"
        )
    params = _section(section, "params")
    for key, flag, value in (
        ("lr", "--lr", lr),
        ("weight_decay", "--weight_decay", weight_decay),
        ("eps", "eps", 1e-8),
    ):
        _check_agrees(params, key, value, flag)
    _check_agrees(
        {"betas": list(params.get("betas", AUTO))} if params.get("betas", AUTO) != AUTO else {},
        "betas",
        list(betas),
        "--betas",
    )


def offloads_optimizer(config: Mapping[str, Any]) -> bool:
    device = _section(_section(config, "zero_optimization"), "offload_optimizer").get("device", "none")
    return bool(device not in ("none", None))


def _section(config: Mapping[str, Any], name: str) -> ConfigDict:
    found = config.get(name) or {}
    if not isinstance(found, Mapping):
        raise InputError(f"{name} in --deepspeed_config is {found!r}", "a JSON object", "fix the file")
    return dict(found)


def _check_agrees(config: Mapping[str, Any], key: str, value: Any, flag: str) -> None:
    found = config.get(key, AUTO)
    if found not in (AUTO, value):
        raise InputError(
            f"{key} {found} in --deepspeed_config, but {flag} makes it {value}",
            "one value",
            f'write "auto" or {value} in the file, or change {flag}',
        )


def _check_precision(config: Mapping[str, Any], dtype: str) -> None:
    for name in ("fp16", "amp", "torch_autocast"):
        if _section(config, name).get("enabled", False) is True:
            raise InputError(
                f"{name} in --deepspeed_config",
                "the precision set by flags",
                "use --dtype, or bf16 in the file, and remove the section",
            )
    if _section(config, "bf16").get("enabled", False) is True and dtype != "bf16":
        raise InputError(
            f"bf16 in --deepspeed_config, but --dtype {dtype}", "one precision", "use --dtype bf16, or remove bf16"
        )


def _check_offload(zero: Mapping[str, Any]) -> None:
    for name in ("offload_optimizer", "offload_param"):
        section = _section(zero, name)
        device = section.get("device", "none")
        if device == "nvme" or section.get("ratio", 1.0) != 1.0:
            raise InputError(
                f"{name} to {device} with ratio {section.get('ratio', 1.0)} in --deepspeed_config",
                'all of it on the device or on "cpu"',
                "change the section: state on other devices cannot be saved",
            )
