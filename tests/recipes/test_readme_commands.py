"""Every command of every recipe's README runs, made small, in a copy of the recipe."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from halation.data.streets import Streets
from halation.images.png_codec import encode_png
from support import tiny_models
from support.docs import ROOT, SHELL, Command, Inputs, blocks, environment, shell_commands, without_blocks

RECIPES = {path.parent.name: path for path in sorted((ROOT / "recipes").glob("*/README.md"))}
INLINE = re.compile(r"`((?:[A-Z_]+=\S+ )*(?:bash|python|torchrun|wandb|tensorboard)\s[^`]+)`")

QUIET = "--validation_images 2 --report_to none"
TRAIN = f"--n_steps 2 --sample_steps 1 --sample_prompts road --max_images 16 {QUIET}"
DIT = f"{TRAIN} --model tiny --image_size 32 --patch_size 8 --eval_images 16 --eval_reference 16"
WAN = "--num_epochs 1 --batch_size 3 --max_images 6 --sample_steps 2 --teacher_steps 4 --teacher_states 2 --report_to none"
STREETS = "--n_steps 2 --batch_size 2 --no_compile --dtype fp32 --num_workers 0 --sample_steps 2 --validation_images 2"
DISTIL = "--n_steps 2 --batch_size 2 --teacher_steps 4 --teacher_states 4 --trajectories 4 --dtype fp32 --no_sample"
SMALL = {
    "batch_generate_t2i_multigpu.py": "--nproc 2 --num_samples 2 --height 32 --width 32",
    "run_full_evaluation.sh": "",  # made small by its variables
    "run_ddp.sh": DIT,
    "run_single_gpu.sh": DIT,
    "dit_registers/train.py": DIT,
    "scripts/train_waymo_base.sh": f"{TRAIN} --image_size 64 64 --batch_size 1",
    "hydit/train_deepspeed.py": f"{TRAIN} --image_size 64 64 --batch_size 1",
    "hydit/tiny_hunyuan.py": "",
    "train_distillation.py": WAN,
    "tiny_wan.py": "",
    "train.sh": STREETS,
    "distil.sh": f"{DISTIL} --no_teacher_samples",
    "pack.py": "",
    "measure.py": "--num_samples 6 --num_inference_steps 2 --nproc 1",
    "ls": "",
}
"""Programs that run here, with the flags that make them small."""
ELSEWHERE = {
    "scripts/test_sampling.sh": "test_hunyuan_waymo.py::test_the_quick_test_runs_four_ranks_and_tells_what_it_checked",
    "test_parallel_sample_generation.py": "test_wan_distill.py::"
    "test_the_script_that_tries_four_ranks_tells_what_it_checked",
    "test_fixes.py": "test_wan_distill.py::test_a_script_of_the_recipe_finds_its_fix",
    "test_nccl_timeout_fix.py": "test_wan_distill.py::test_a_script_of_the_recipe_finds_its_fix",
    "streets_net/train.py": "test_streets_net_recipe.py::test_the_command_on_the_page_writes_a_network_with_its_record",
}
"""Programs that other tests of this folder run."""
NOT_HERE = {
    "tail": "runs until Ctrl+C",
    "grep": "reads from tail",
    "tensorboard": "serves a page until Ctrl+C",
    "wandb": "needs an account",
    "WANDB_MODE": "online, needs an account",
}
"""Programs and variables that need what is not here."""
OUTPUTS = {"dit_registers": "runs", "hunyuan_waymo": "results/waymo_*", "wan_distill": "outputs/wan_t2i"}
"""Run folders that each command of a page begins anew: its commands are alternatives."""
MADE = {
    "coco_eval": ("generated_images/0_seed42.png", "eval_output_results.json"),
    "dit_registers": ("model.pth", "runs/dit_registers/export/model.safetensors"),
    "hunyuan_waymo": ("results/waymo_base/samples/step_0000002/gpu_0_sample.png", "FOLDER/model_index.json"),
    "streets_64": ("runs/streets-64/export/model.safetensors", "outputs/streets_64/streets-64-fast_2_steps.json"),
    "wan_distill": ("outputs/wan_t2i/samples/epoch_0001_rank_1_sample_01.png", "FOLDER/model_index.json"),
}
"""Files that are there after the last command of a page."""


def page_commands(page: Path) -> Iterator[Command]:
    """The commands of a page, with the variables that their block exports before them; then those in the text."""
    for block in blocks(page):
        exported: tuple[tuple[str, str], ...] = ()
        for command in shell_commands(block) if block.language in SHELL - {""} else ():
            if command.words[0] == "export":
                name, _, value = command.words[1].partition("=")
                exported = (*exported, (name, value))
            else:
                yield replace(command, environment=(*exported, *command.environment))
    for text in INLINE.findall(without_blocks(page)):
        words = shlex.split(text)
        variables = [word for word in words if re.match(r"[A-Z_]+=", word)]
        settings = tuple((name, value) for name, _, value in (word.partition("=") for word in variables))
        yield Command(page=page, line=0, words=tuple(words[len(variables) :]), environment=settings)


def program(command: Command) -> str:
    """The key of a command in the tables: its script, with the recipe if others have one of that name."""
    if command.words[0] not in ("bash", "python", "torchrun"):
        return command.words[0]
    script = next(word for word in command.words[1:] if word.endswith((".py", ".sh")))
    with_recipe = f"{command.page.parent.name}/{script}"
    return with_recipe if with_recipe in SMALL.keys() | ELSEWHERE.keys() else script


def needs_more(command: Command) -> bool:
    return bool(NOT_HERE.keys() & {program(command), *dict(command.environment)})


def test_each_command_of_a_recipe_is_run_or_says_why_not() -> None:
    found = [command for page in RECIPES.values() for command in page_commands(page)]
    known = SMALL.keys() | ELSEWHERE.keys()
    assert [command.words for command in found if not needs_more(command) and program(command) not in known] == []
    names = {program(command) for command in found} | {name for command in found for name, _ in command.environment}
    assert (SMALL.keys() | ELSEWHERE.keys() | NOT_HERE.keys()) - names == set(), "no page has these any more"
    for cited in ELSEWHERE.values():
        file, _, name = cited.partition("::")
        assert f"def {name}(" in (Path(__file__).parent / file).read_text(), cited
    assert len(found) > 30


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("inputs"))


def placed(name: str, inputs: Inputs, folder: Path) -> Path:
    """A copy of the recipe, with the inputs that its page expects beside it."""
    recipe = folder / "recipes" / name
    leftovers = ("__pycache__", "runs", "results", "outputs", "wandb", "tensorboard")
    shutil.copytree(RECIPES[name].parent, recipe, ignore=shutil.ignore_patterns(*leftovers))
    if name == "coco_eval":
        (recipe / "mscoco_data").mkdir()
        (recipe / "mscoco_data" / "prompts.csv").symlink_to(inputs.prompts("csv"))
    if name == "dit_registers":
        (recipe / "FOLDER" / "road").mkdir(parents=True)  # the class that is sampled
        for index in range(40):  # an evaluation needs 16
            image = encode_png(Streets(32, 32).train(index).pixels, {})
            (recipe / "FOLDER" / "road" / f"{index}.png").write_bytes(image)
    return recipe


def runnable(command: Command, inputs: Inputs) -> list[str]:
    """The words of the command for this machine: no GPUs, two ranks, a free port, tiny models."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    stand_in = {
        "--nproc_per_node=4": "--nproc_per_node=2",
        "--master_port=29500": f"--master_port={port}",
        "/path/to/your/model": str(tiny_models.built("sd3")),
        "/path/to/model": str(tiny_models.built("sd3")),
        "Wan-AI/Wan2.2-T2V-A14B-Diffusers": "tiny",
    }
    words: list[str] = []
    flag = ""
    for word in command.words:
        flag = word if word.startswith("--") else flag
        if flag != "--gpu_ids":
            words.append(stand_in.get(word, word))
    if "--help" in words:
        return words
    words += SMALL[program(command)].split()
    if "--eval_every" in words:
        words += ["--eval_every", "2", "--eval_weights", str(inputs.inception)]
    return words


def settings_of(command: Command, inputs: Inputs, folder: Path) -> dict[str, str]:
    small = {
        "MODEL_PATH": str(tiny_models.built("hunyuan" if "waymo" in command.page.parent.name else "sd3")),
        "DATA": str(inputs.images),
        "REFERENCE": str(inputs.images),
        "COCO_CAPTIONS": "",
        "CUDA_VISIBLE_DEVICES": "",
        "NUM_SAMPLES": "2",
    }
    told = {name: small.get(name, value) for name, value in command.environment}
    if program(command) == "run_full_evaluation.sh":
        told |= {"INCEPTION_WEIGHTS": str(inputs.inception), "CLIP_MODEL": str(inputs.clip), "ALLOW_FEW": "true"}
        told |= {"NUM_STEPS": "2", "HEIGHT": "32", "WIDTH": "32"}
    return {**environment(folder), **told}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [name for name in RECIPES if name in MADE])
def test_the_commands_of_a_recipes_page_work(name: str, inputs: Inputs, tmp_path: Path) -> None:
    recipe = placed(name, inputs, tmp_path)
    for command in page_commands(RECIPES[name]):
        if needs_more(command) or program(command) not in SMALL:
            continue
        for old in recipe.glob(OUTPUTS.get(name, "no such folder")) if SMALL[program(command)] else ():
            shutil.rmtree(old)
        words, settings = runnable(command, inputs), settings_of(command, inputs, tmp_path)
        line = words if command.words[0] != "ls" else ["bash", "-c", " ".join(words)]  # the shell expands step_*
        done = subprocess.run(line, cwd=recipe, env=settings, capture_output=True, text=True, timeout=300)
        # Without real images the evaluation ends with what it could compute.
        is_partial = program(command) == "run_full_evaluation.sh" and "REFERENCE" not in settings
        assert done.returncode == int(is_partial), f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    assert [file for file in MADE[name] if not (recipe / file).is_file()] == []
