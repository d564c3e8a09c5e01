"""Commands on the pages of the documentation, and the small inputs to run them with."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from halation.data.streets import Streets
from halation.images.png_codec import encode_png
from halation.training.config import TrainConfig

ROOT = Path(__file__).parents[2]
SHELL = frozenset({"bash", "sh", "shell", "console", "zsh", ""})
LAUNCHERS = frozenset({"torchrun", "srun", "python", "python3", "nohup", "time", "timeout", "exec", "env", "docker"})
"""Programs that may start `halation`."""
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<language>[\w-]*)[^`]*$")
RUN = re.compile(r"^ *<!-- run(?:: exit (?P<code>\d+))? -->$")
OPERATORS = frozenset("();<>|&")
HALATION = str(Path(sys.executable).with_name("halation"))
NUM_IMAGES = 8
LINKED = "pictures_of_the_table"
SIZE = 64
OWN_SIZES = ("tiny", "mini", "small", "base", "large", "xlarge")
FAMILIES = ("hunyuan", "flux", "wan", "sana", "sd3", "stable-diffusion-3", "pixart")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page; `code` is the exit code expected by a `<!-- run -->` mark above it."""

    page: Path
    line: int
    language: str
    lines: tuple[str, ...]
    code: int | None


@dataclass(frozen=True, kw_only=True)
class Command:
    """A simple shell command with the variables set in front of it."""

    page: Path
    line: int
    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    code: int | None = None

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def arguments(self) -> tuple[str, ...] | None:
        """The words after `halation`, also behind a launcher; None for a command of another program."""
        for position, word in enumerate(self.words):
            module = word in ("halation", "halation.cli") and position > 0 and self.words[position - 1] == "-m"
            if module or Path(word).name == "halation":
                return self.words[position + 1 :]
            if Path(self.words[0]).name not in LAUNCHERS:
                return None
        return None


def pages() -> list[Path]:
    """All Markdown pages: of the project, its documentation, recipes and examples, and the model cards."""
    folders = [ROOT / "docs", ROOT / "recipes", ROOT / "examples", ROOT / "benchmarks", ROOT / "src" / "halation"]
    return sorted([*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))])


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    position = 0
    while position < len(lines):
        fence = FENCE.match(lines[position])
        position += 1
        if fence is None:
            continue
        start = position
        while position < len(lines) and lines[position].strip() != fence["ticks"]:
            position += 1
        mark = RUN.match(lines[start - 2]) if start > 1 else None
        inner = tuple(line.removeprefix(fence["indent"]) for line in lines[start:position])
        code = int(mark["code"] or 0) if mark else None
        yield Block(page=page, line=start + 1, language=fence["language"], lines=inner, code=code)
        position += 1


def without_blocks(page: Path) -> str:
    """The text of a page without its fenced blocks."""
    return re.sub(r"^(`{3,}).*?^\1$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def commands(page: Path) -> Iterator[Command]:
    """The commands in all shell blocks and Kubernetes manifests of a page."""
    for block in blocks(page):
        if block.language in SHELL:
            yield from shell_commands(block)
        elif block.language in ("yaml", "yml"):
            for part in yaml.safe_load_all("\n".join(block.lines)):
                for words in manifest_commands(part):
                    yield Command(page=page, line=block.line, words=tuple(words))


def shell_commands(block: Block) -> Iterator[Command]:
    """The commands of a block; without a language only lines that start with `halation` count."""
    lines = [line if block.language or line.startswith("halation ") else "" for line in block.lines]
    for offset, line in _logical_lines(lines):
        for words in _simple_commands(line):
            environment = []
            while words and (assignment := re.match(r"^([A-Za-z_]\w*)=(.*)$", words[0], re.DOTALL)):
                environment.append((assignment[1], assignment[2]))
                words = words[1:]
            if not words and environment[-1][1].startswith("halation "):  # command="halation ...", which is run later
                words = shlex.split(environment.pop()[1])
            if words:
                yield Command(
                    page=block.page,
                    line=block.line + offset,
                    words=tuple(words),
                    environment=tuple(environment),
                    code=block.code,
                )


def _logical_lines(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Lines joined with their continuations, each with its number; here-documents are left out."""
    position = 0
    while position < len(lines):
        start, line = position, lines[position]
        position += 1
        while line.endswith("\\") or _has_open_quote(line):
            line = line.removesuffix("\\") + "\n" + lines[position]
            position += 1
        for end in re.findall(r"<<-?\s*['\"]?(\w+)", line):
            position = lines.index(end, position) + 1
        yield start, line


def _has_open_quote(line: str) -> bool:
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return True
    return False


def _simple_commands(line: str) -> Iterator[list[str]]:
    """The words of each command on a line, without redirections and comments."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    redirected = False
    for token in [*lexer, ";"]:
        if token and set(token) <= OPERATORS:
            redirected = token[0] in "<>"
            if redirected and words and words[-1].isdigit():
                words.pop()  # 2>
            if not redirected and words:
                yield words
                words = []
        elif redirected:
            redirected = False
        else:
            words.append(token)


def manifest_commands(part: Any) -> Iterator[list[str]]:
    """Everything in a manifest that is a command."""
    if isinstance(part, dict):
        if isinstance(part.get("command"), list):
            yield [str(word) for word in part["command"]]
        if isinstance(part.get("entrypoint"), str):
            yield shlex.split(part["entrypoint"])
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            yield from manifest_commands(inner)


# Inputs that the commands name, made small, and flags that make the commands small


def environment(folder: Path) -> dict[str, str]:
    """The environment of a command: one thread, no GPU, no network, its own cache."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HALATION")}
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**clean, **own, "PATH": path, "HALATION_CACHE": str(folder / "cache")}


class Inputs:
    """Models, images, prompts and runs that commands read, each made when it is first used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cached_property
    def run(self) -> Path:
        """A finished training with a checkpoint, samples and an export."""
        small = "--model tiny --image_size 32 --patch_size 8 --batch_size 2 --n_steps 2 --ckpt_every 1 --sample_steps 2"
        rest = "--data streets --validation_images 2 --report_to none --nproc 1"
        return self._made("run", ["train", *small.split(), *rest.split()])

    @functools.cached_property
    def generated(self) -> Path:
        """Images of `halation generate`."""
        prompts = self.prompts("csv")
        small = ["--model_path", "testcard", "--height", str(SIZE), "--width", str(SIZE), "--nproc", "1"]
        return self._made("generated", ["generate", "--prompts_csv", str(prompts), *small])

    def _made(self, name: str, words: list[str]) -> Path:
        command = [HALATION, *words, "--output_dir", name]
        subprocess.run(command, cwd=self.folder, env=environment(self.folder), check=True, capture_output=True)
        return self.folder / name

    @functools.cached_property
    def images(self) -> Path:
        """Images with captions; beside them a table of the same."""
        folder = self.folder / "pictures"
        folder.mkdir()
        rows, table = [], ["image,caption"]
        for number in range(NUM_IMAGES):
            scene = Streets(SIZE, SIZE).train(number)
            (folder / f"{number}.png").write_bytes(encode_png(scene.pixels, {}))
            rows.append(json.dumps({"file_name": f"{number}.png", "text": scene.caption}))
            table.append(f'{LINKED}/{number}.png,"{scene.caption}"')
        (folder / "metadata.jsonl").write_text("\n".join(rows) + "\n")
        (self.folder / "images.csv").write_text("\n".join(table) + "\n")
        return folder

    def prompts(self, ending: str) -> Path:
        """A list of prompts in the format of its ending."""
        captions = [Streets(SIZE, SIZE).train(number).caption for number in range(NUM_IMAGES)]
        path = self.folder / f"prompts.{ending}"
        if ending == "txt":
            path.write_text("".join(f"{caption}\n" for caption in captions))
        elif ending == "jsonl":
            path.write_text("".join(json.dumps({"prompt": caption}) + "\n" for caption in captions))
        else:
            path.write_text("".join(["image_id,prompt\n", *(f'{k},"{text}"\n' for k, text in enumerate(captions))]))
        return path

    @functools.cached_property
    def inception(self) -> Path:
        from support import tiny_models

        return tiny_models.inception_safetensors(self.folder / "inception.safetensors")

    @functools.cached_property
    def clip(self) -> Path:
        from support import tiny_models

        return tiny_models.clip_model(self.folder / "clip")

    @functools.cached_property
    def student(self) -> Path:
        path = self.folder / "student.json"
        path.write_text('{"depth": 1}')
        return path

    def model(self, name: str) -> Path:
        """A pipeline of the family in the name; without one, a run or a PixArt pipeline."""
        from support import tiny_models

        for family in FAMILIES:
            if family in name.lower():
                return tiny_models.built("sd3" if family == "stable-diffusion-3" else family)
        return self.run if Path(name).parts[0] in ("runs", "run", "RUN", "teacher") else tiny_models.built("pixart")

    def data(self, name: str) -> Path:
        if name.endswith(".csv"):
            return self.images.with_suffix(".csv")
        return self.prompts(Path(name).suffix[1:]) if Path(name).suffix else self.images


def place_inputs(inputs: Inputs, command: str, config: Any, folder: Path) -> None:
    """Put the inputs of a command at the paths that it names."""
    from support import tiny_models

    kinds: dict[str, Callable[[str], Path]] = {
        "model_path": inputs.model,
        "teacher_path": inputs.model,
        "model": inputs.model,
        "checkpoint": lambda _: inputs.run,
        "run": lambda _: inputs.run,
        "dirs": lambda _: inputs.run,
        "data": inputs.data,
        "data_path": inputs.data,
        "prompts_csv": lambda name: inputs.prompts(Path(name).suffix[1:]),
        "prompts_file": lambda name: inputs.prompts(Path(name).suffix[1:]),
        "sample_prompts_file": lambda name: inputs.prompts(Path(name).suffix[1:]),
        "generated": lambda _: inputs.generated,
        "reference": lambda _: inputs.images,
        "vae": lambda _: tiny_models.built("pixart") / "vae",
        "student_config": lambda _: inputs.student,
    }
    if command in ("evaluate", "watch"):
        kinds["prompts"] = kinds["prompts_csv"]
    for field, source in kinds.items():
        values = getattr(config, field, ())
        for value in values if isinstance(values, tuple) else (values,):
            if value and not is_built_in(field, str(value)) and not (folder / value).exists():
                name = "streets" if str(value).endswith("/") or value == Path("runs") else ""  # a folder of runs
                place(source(str(value)), folder / value / (name if field == "dirs" else ""))


def is_built_in(field: str, value: str) -> bool:
    """True for names that come with the package and need no file."""
    own = {"model": OWN_SIZES, "data": ("streets",), "data_path": ("streets",), "reference": ("streets",)}
    return value in own.get(field, ()) or value.startswith(("streets-64", "testcard")) or value == "-"


def place(source: Path, goal: Path) -> None:
    goal.parent.mkdir(parents=True, exist_ok=True)
    if source.name in ("run", "generated"):  # a command may write into these
        shutil.copytree(source, goal)
    else:
        goal.symlink_to(source, target_is_directory=source.is_dir())
    if source.name == "images.csv":  # a table names images beside it
        (goal.parent / LINKED).symlink_to(source.with_suffix(""), target_is_directory=True)


def shrink_flags(inputs: Inputs, command: str, config: Any, folder: Path) -> list[str]:
    """Flags to append to a command: a few steps, few and small images, one process."""
    flags = SMALL[command](inputs, config, folder) if command in SMALL else []
    return [str(flag) for flag in flags]


def _size(name: str, folder: Path) -> list[Any]:
    """Flags for the image size if the model has none of its own."""
    pipeline = (folder / name / "model_index.json").is_file() or name.startswith("testcard")
    return ["--height", SIZE, "--width", SIZE] if pipeline else []


QUIET = ("--nproc", 1, "--progress", "none")


def _train(inputs: Inputs, config: TrainConfig, folder: Path) -> Sequence[Any]:
    few = "--n_steps 2 --batch_size 2 --sample_steps 2 --validation_images 2 --max_images 8 --ckpt_every 2"
    flags = [*QUIET, *few.split(), "--report_to", "none", "--no_compile"]
    if config.model_path or config.vae:
        flags += ["--image_size", SIZE, SIZE]
    if not config.model_path and config.model in OWN_SIZES:
        flags += ["--model", "tiny", *([] if config.vae else ["--image_size", 32, 32, "--patch_size", 8])]
    if config.eval_every:
        flags += ["--eval_every", 2, "--eval_images", 4, "--eval_reference", 8, "--eval_clip_model", inputs.clip]
        flags += [] if config.data == "streets" else ["--eval_weights", inputs.inception]
    return flags


def _distill(inputs: Inputs, config: Any, folder: Path) -> Sequence[Any]:
    few = "--batch_size 2 --sample_steps 2 --teacher_steps 8"
    flags = [*QUIET, *few.split(), "--report_to", "none", "--no_compile"]
    flags += ["--num_epochs", 1] if config.num_epochs else ["--n_steps", 2]
    if (folder / config.teacher_path / "model_index.json").is_file():
        flags += ["--image_size", SIZE, SIZE]
    return [*flags, "--trajectories", 0] if config.data_path.endswith((".txt", ".csv")) else [*flags, "--max_images", 4]


def _generate(inputs: Inputs, config: Any, folder: Path) -> Sequence[Any]:
    flags = [*QUIET, "--num_inference_steps", 2, "--num_samples", 2, "--no_compile", *_size(config.model_path, folder)]
    flags += ["--num_frames", 5] if config.num_frames > 1 else []
    flags += ["--offload", "none"]  # offloading needs a GPU
    return [*flags, "--cfg_truncation_step", 1] if config.cfg_truncation_step else flags


def _evaluate(inputs: Inputs, config: Any, folder: Path) -> Sequence[Any]:
    flags = [*QUIET, "--allow_few", "--num_reference", 16, "--decode_workers", 0, "--kid_subsets", 2]
    if config.model_path:
        flags += ["--num_inference_steps", 2, "--num_samples", 4, *_size(config.model_path, folder)]
    if config.reference != ("streets",) and config.extractor in ("", "inception"):
        flags += ["--inception_weights", inputs.inception]
    return [*flags, "--clip_model", inputs.clip] if "clip" in config.metrics else flags


def _watch(inputs: Inputs, config: Any, folder: Path) -> Sequence[Any]:
    few = ["--num_samples", 4, "--num_reference", 16, "--num_inference_steps", 2, "--allow_few", "--settle_s", 0]
    weights = [] if config.reference in ((), ("streets",)) else ["--weights", inputs.inception]
    return [*QUIET, "--once", *few, *weights]


SMALL: dict[str, Callable[[Inputs, Any, Path], Sequence[Any]]] = {
    "train": _train,
    "distill": _distill,
    "sample": lambda inputs, config, folder: [*QUIET, "--sample_steps", 2],
    "generate": _generate,
    "evaluate": _evaluate,
    "watch": _watch,
    "doctor": lambda inputs, config, folder: ["--nproc", 1],
}
