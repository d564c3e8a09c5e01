"""Options that a pipeline lacks are refused early; the class of each option is recorded."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from halation.errors import InputError
from halation.generation.workers.image_runner import force_eager
from support import tiny_models
from support.tiny_models import PROMPTS, drawn, needs_inductor, opened, plain, plain_pipe, reopened, specs

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' DPM-Solver


def reopen(family: str, **options: Any) -> Any:
    return reopened(tiny_models.built(family), **options)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("hunyuan", {"height": 40}, "multiples of 16[\\s\\S]*--height 32 --width 32, or --height 48 --width 32"),
        ("sana", {"width": 48}, "multiples of 32[\\s\\S]*--height 32 --width 32, or --height 32 --width 64"),
        ("flux", {"height": 24}, "multiples of 16"),
        ("wan", {"height": 8, "width": 8}, "the nearest: --height 16 --width 16"),
        ("sd3", {"height": 0}, "multiples of 16"),
        ("sd3", {"height": 512}, "at most 256 pixels per side"),
        ("stable_diffusion", {"height": 36}, "multiples of 8"),
        ("hunyuan", {"num_frames": 5}, "it generates images"),
        ("wan", {"num_frames": 0}, "it generates images"),
        ("wan", {"num_frames": 7}, "nearest are 5 and 9"),
        ("hunyuan", {"steps": 0}, "at least 1"),
        ("hunyuan", {"steps": 2000}, "a number of steps that the scheduler supports"),
        ("pixart", {"steps": 1}, "at least 2 steps"),
        ("hunyuan", {"guidance_scale": float("nan")}, "--guidance_scale nan"),
        ("flux", {"negative_prompt": "blue"}, "would ignore it[\\s\\S]*true_cfg_scale"),
    ],
)
def test_a_spec_the_pipeline_cannot_draw_is_refused_with_what_it_can(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        opened(family).check(specs("a dog", **changes)[0])


@pytest.mark.parametrize("family", list(tiny_models.FAMILIES))
def test_what_check_lets_pass_is_drawn_at_that_size(family: str) -> None:
    size = {"height": 64, "width": 32} if family == "sana" else {"height": 48, "width": 32}
    wanted = specs(*PROMPTS[:2], **size)
    model = opened(family)
    model.check(wanted[0])
    images = drawn(model, wanted)
    assert images[0].shape == (1, size["height"], 32, 3)
    np.testing.assert_array_equal(images, plain(plain_pipe(family), wanted))


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("hunyuan", {"dtype": "fp8"}, "one of fp32, bf16, fp16"),
        ("hunyuan", {"offload": "disk"}, "one of none, model, layers"),
        ("hunyuan", {"offload": "model"}, "on a CPU"),
        ("hunyuan", {"arguments": {"guidance_rescal": 0.5}}, "no such option[\\s\\S]*guidance_rescale"),
        ("hunyuan", {"arguments": {"height": 64}}, "use --height"),
        ("hunyuan", {"arguments": {"output_type": "np"}}, "no such option"),
        ("hunyuan", {"arguments": {"prompt_embeds": 1}}, "no such option"),
        ("hunyuan", {"arguments": {"guidance_rescale": "much"}}, "a value like its default, 0.0"),
        ("hunyuan", {"arguments": {"use_resolution_binning": 1}}, "a value like its default, True"),
        ("flux", {"arguments": {"max_sequence_length": 12.5}}, "a value like its default, 512"),
        ("sd3", {"arguments": {"clip_skip": "a"}}, "clip_skip='a'[\\s\\S]*int"),
        ("stable_diffusion", {"arguments": {"timesteps": 5}}, r"timesteps=5[\s\S]*list\[int\][\s\S]*\[1, 2\]"),
        ("stable_diffusion", {"arguments": {"timesteps": ["a"]}}, r"list\[int\]"),
        ("stable_diffusion", {"arguments": {"cross_attention_kwargs": 3}}, "dict"),
        ("hunyuan", {"arguments": {"target_size": [64, 64, 3]}}, r"tuple\[int, int\]"),
        ("wan", {"arguments": {"guidance_scale_2": True}}, "float"),
    ],
)
def test_an_option_the_pipeline_lacks_is_refused_with_those_it_has(
    family: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        reopen(family, **options)


def test_arguments_reach_the_pipeline() -> None:
    arguments = {"guidance_rescale": 0.7}
    model = reopen("hunyuan", arguments=arguments)
    images = drawn(model, specs(*PROMPTS[:2]))
    np.testing.assert_array_equal(images, plain(plain_pipe("hunyuan"), specs(*PROMPTS[:2]), **arguments))
    assert not np.array_equal(images, drawn(opened("hunyuan"), specs(*PROMPTS[:2])))
    assert model.facts["arguments"] == arguments


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        ("stable_diffusion", {"clip_skip": 99}, "clip_skip=99: IndexError"),
        ("stable_diffusion", {"timesteps": [900, 500]}, r"timesteps=\[900, 500\]: ValueError: [\s\S]*custom timestep"),
        ("sd3", {"max_sequence_length": 1000}, "max_sequence_length=1000: ValueError: [\\s\\S]*greater than 512"),
        ("pixart", {"max_sequence_length": -1}, "max_sequence_length=-1: OverflowError"),
        ("sd3", {"prompt_2": ["a", "b", "c"]}, r"prompt_2=\['a', 'b', 'c'\]: RuntimeError"),
    ],
)
def test_values_the_pipelines_call_does_not_accept_are_refused_at_the_rehearsal(
    family: str, arguments: dict[str, Any], message: str
) -> None:
    model = reopen(family, arguments=arguments)
    refusal = pytest.raises(InputError, match=rf"failed with --pipeline_args {message}[\s\S]*leave them out")
    with refusal, force_eager():
        drawn(model, specs("a dog", "a cat"))


@pytest.mark.parametrize("arguments", [{"target_size": [64, 48]}, {"target_size": None}, {"guidance_rescale": 1}])
def test_values_that_json_writes_in_another_way_reach_the_pipeline(arguments: dict[str, Any]) -> None:
    model = reopen("hunyuan", arguments=arguments)
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()}
    reference = plain(plain_pipe("hunyuan"), specs("a dog"), **given)
    np.testing.assert_array_equal(drawn(model, specs("a dog")), reference)
    assert json.loads(json.dumps(model.facts)) == model.facts


def test_guidance_that_changes_nothing_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_models.flux(tmp_path / "schnell", guidance_embeds=False)
    model = reopened(folder)
    with caplog.at_level(logging.WARNING, logger="halation"):
        for spec in specs("a dog", "a cat"):
            model.check(spec)
    assert [record.getMessage() for record in caplog.records] == [
        "FluxPipeline has no guidance: --guidance_scale has no effect"
    ]


def test_facts_name_the_pipeline_and_the_class_of_every_option_as_json() -> None:
    model = reopen("wan", dtype="bf16", scheduler="flow_euler", cfg_truncation_step=3, half_frame=True)
    assert json.loads(json.dumps(model.facts)) == model.facts
    assert model.facts["pipeline"] == "WanPipeline"
    assert model.facts["family"] == "Wan"
    assert model.facts["scheduler"] == "FlowMatchEulerDiscreteScheduler"
    assert model.facts["dtype"] == "bf16"
    assert model.facts["vae_dtype"] == "bfloat16"
    assert model.facts["options"] == {"cfg_truncation_step": "E2", "enable_half_frame": "E2", "scheduler": "E2"}
    assert opened("wan").facts["options"] == {}


@pytest.mark.parametrize("family", ["hunyuan", "sd3", "wan", "sana"])
def test_negative_prompts_are_encoded_once_for_all_batches(family: str) -> None:
    model = reopen(family)
    pipe = model._pipe
    encoders = [module for name, module in pipe.components.items() if name.startswith("text_encoder") and module]
    num_encoded = 0

    def count(*_: Any) -> None:
        nonlocal num_encoded
        num_encoded += 1

    for encoder in encoders:
        next(module for module in encoder.modules() if isinstance(module, nn.Linear)).register_forward_pre_hook(count)
    for seed in (1, 20, 40):
        wanted = specs(f"a dog {seed}", "a cat", seed=seed, negative_prompt="blue")
        np.testing.assert_array_equal(drawn(model, wanted), plain(plain_pipe(family), wanted))
    assert num_encoded == len(encoders) * (3 + 1)


@pytest.mark.slow
@needs_inductor
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["hunyuan", "wan"])
def test_compiled_blocks_draw_the_same_image_within_rounding(family: str) -> None:
    model = reopen(family, compile=True)
    assert model.facts["options"] == {"compile": "E1"}
    images = drawn(model, specs(*PROMPTS[:2]))
    reference = drawn(opened(family), specs(*PROMPTS[:2]))
    np.testing.assert_allclose(np.asarray(images, int), np.asarray(reference, int), atol=2)


WORKER = """
import sys
from pathlib import Path
from halation.models.pipelines.pipeline_model import open_pipeline
from halation.sample_specs import SampleSpec
spec = SampleSpec(index=0, id="0", prompt="a dog", seed=1, height=32, width=32, steps=1, guidance_scale=4.0)
for folder in sys.argv[2:]:
    model = open_pipeline(Path(folder), dtype=sys.argv[1], device="cpu")
    model.draw([spec], lambda: None).collect()
    print("ready", flush=True)
    sys.stdin.readline()
"""


def resident_bytes(workers: list[subprocess.Popen[str]], kind: str) -> int:
    """Memory of the workers: `Pss` counts a page of n processes as 1/n, `Anonymous` is not from files."""
    lines = [line for each in workers for line in Path(f"/proc/{each.pid}/smaps_rollup").read_text().splitlines()]
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))


def answers(workers: list[subprocess.Popen[str]]) -> None:
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc to see shared memory")
def test_workers_share_one_copy_of_the_weights(tmp_path: Path) -> None:
    big = tiny_models.hunyuan(tmp_path / "big", hidden=512, num_layers=8)
    num_bytes = sum(file.stat().st_size for file in big.glob("*/*.safetensors"))
    assert num_bytes > 140e6
    command = [sys.executable, "-c", WORKER, "fp32", str(tiny_models.built("hunyuan")), str(big)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    try:
        answers(workers)
        before = {kind: resident_bytes(workers, kind) for kind in ("Pss", "Anonymous")}
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
        answers(workers)
        grown = {kind: resident_bytes(workers, kind) - amount for kind, amount in before.items()}
    finally:
        for worker in workers:
            worker.communicate("\n")
    assert grown["Pss"] < 1.4 * num_bytes, (grown, num_bytes)
    assert grown["Anonymous"] < 0.3 * num_bytes, (grown, num_bytes)
