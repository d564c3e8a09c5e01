"""Makes docs/api.md of the docstrings and the settings themselves: `python docs/reference.py`, after any of them changed."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

import halation
from halation import cli, errors
from halation.cli import COMMANDS
from halation.config import format_range
from halation.help_text import choices, format_default, read_fields, value_word
from halation.other_names import OTHER_NAMES

PAGE = Path(__file__).with_name("api.md")
COMMAND = "python docs/reference.py"
LATER = {"free": "yes", "grows": "may grow", "refused": "no"}
OPENING = f"""\
<!-- Made by `{COMMAND}` of docstrings and settings: change those, not this page. -->

# Reference

Flags, defaults and sentences are those of the code. The [pages on the jobs](README.md) say how it fits together.

- [From Python](#from-python): functions and errors
- Commands: {{commands}}
- [Names of other tools](#names-of-other-tools): flags of diffusers, kohya, accelerate and SimpleTuner
- [Environment](#environment): variables; [Extras](#extras): packages

Names that are not on this page are internal and may change without a word.
"""
RULES = """\
## Commands

For all of them:

- Dashes and underscores are the same: `--n-steps 100` is `--n_steps 100` is `--n_steps=100`.
- `--help` shows the flags that most users need, a line each; `--help_all` shows all of them in full sentences.
- `--print_config` prints the settings in the form that `--config` reads, and exits.
- `--config FILE` (YAML, TOML or JSON) holds settings by the names below; a flag goes before the file. A run's own `config.json` is such a file.
- A switch that is off is turned on by its name (`--compile`) and off by `--no_compile` or `--compile False`.
- A flag that takes several values takes them one after the other; numbers and choices also with commas (`--gpu_ids 0,1,2`).
- An empty default means that the sentence beside it says what happens.
- *Later* says whether [a later call of the same run](training.md#resume) may change it; `--accept_changes` allows the rest where it can.
- Exit codes: 0 done; 1 finished with failures, or failed; 2 bad input or settings; 130 or 143 stopped, and the same command goes on.
"""

ENVIRONMENT = """\
### Environment

| variable | what it does |
| --- | --- |
| `CUDA_VISIBLE_DEVICES` | the GPUs there are; `--gpu_ids` count within them |
| `HALATION_CACHE` | folder for what can be made again: features, thumbnails, downloaded weights; by default `~/.cache/halation` |
| `HF_HUB_OFFLINE` | `1`: nothing is downloaded, neither models nor weights of extractors |
| `HF_TOKEN`, `HF_HOME`, `HF_HUB_CACHE`, `HF_ENDPOINT` | those of huggingface_hub ([models of the Hub](generation.md#models-of-the-hub)) |
| `MASTER_PORT` | the port that ranks try first; where it is taken, the system picks one |
| `RAY_ADDRESS` | the cluster that `--cluster auto` joins |
| `WANDB_MODE` | where it is not set, wandb is offline |
| `WANDB_PROJECT`, `WANDB_ENTITY`, `WANDB_NAME`, `MLFLOW_TRACKING_URI`, ... | project, team and name of a run in [trackers](training.md#trackers) |
| `HALATION_FAULT`, `HALATION_FAULT_LOG` | [make something fail on purpose](reliability.md#how-faults-are-made) |
| `HALATION_INPUT_LIMITS`, `HALATION_FOLLOW_LINKS` | `--input_limits` and `--follow_links`: [limits on input](security.md#limits-on-input) |

Variables of torchrun, SLURM, NCCL and gloo mean what they always mean ([several machines](cluster.md)). `halation doctor` shows those that matter.
"""

EXTRA_PURPOSES = {
    "train": "TensorBoard, LoRA (`--lora_rank`), lists in Parquet",
    "wandb": "`--report_to wandb`",
    "trackio": "`--report_to trackio`",
    "mlflow": "`--report_to mlflow`",
    "swanlab": "`--report_to swanlab`",
    "comet": "`--report_to comet_ml`",
    "clearml": "`--report_to clearml`",
    "aim": "`--report_to aim`",
    "fast": "PNGs compressed by ISA-L",
    "video": "MP4 files, `--num_frames` above 1",
    "ray": "`--cluster ray`, `auto` and `ray://`",
    "web": "`halation gallery`",
    "deepspeed": "`--engine deepspeed`",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of a config, as a person needs it."""

    name: str
    flag: str
    default: str
    meaning: str
    later: str
    section: str


def settings(config_type: type) -> Iterator[Setting]:
    """What `--help` lists of a config, in the order it is declared; of a config that builds on another, its own part alone."""
    own = read_fields(config_type)
    hints = typing.get_type_hints(config_type, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(config_type)}
    for name, (section, sentence) in own.items():
        hint, marks = hints[name], []
        if typing.get_origin(hint) is typing.Annotated:
            hint, *marks = typing.get_args(hint)
        if tyro.conf.Suppress in marks:
            continue
        assert sentence, f"{config_type.__name__}.{name} has no sentence"
        default = fields[name].default
        text = format_default(default)
        shown = f"`{text}`" if text and not isinstance(default, bool) else text
        yield Setting(
            name=name,
            flag=flag(name, hint, marks),
            default="**required**" if default is dataclasses.MISSING else shown,
            meaning=in_cell(sentence) + options(hint) + limits(fields[name]),
            later=LATER[fields[name].metadata.get("change", "refused")],
            section=section,
        )


def flag(name: str, hint: Any, marks: typing.Sequence[Any]) -> str:
    """How the setting is written on the command line, with a word for its value."""
    described = next((mark for mark in marks if hasattr(mark, "aliases")), None)
    if tyro.conf.Positional in marks:
        return in_cell(f"`{(described and described.metavar) or name.upper()}`")
    names = [f"--{name}", *((described and described.aliases) or ())]
    place = value_word(hint)
    return ", ".join(f"`{one} {place}`" if place else f"`{one}`" for one in names)


def options(hint: Any) -> str:
    """The values that may be chosen from, as a sentence."""
    word = "Any" if typing.get_origin(hint) is tuple else "One"
    found = ", ".join(f"`{one}`" for one in choices(hint))
    return f" {word} of {found}." if found else ""


def limits(field: dataclasses.Field[Any]) -> str:
    """The range of a number, as a sentence."""
    text = format_range(field)
    return f" {text[0].upper()}{text[1:]}." if text else ""


def in_cell(sentence: str) -> str:
    """A docstring on one line of a table, with its flags set as code."""
    text = " ".join(sentence.split()).replace("|", "\\|")
    parts = text.split("`")  # every second one is code already
    parts[::2] = [re.sub(r"(?<![\w-])--[a-z]\w+", r"`\g<0>`", part) for part in parts[::2]]
    return "`".join(parts)


def tables(command: str, rows: list[Setting]) -> Iterator[str]:
    """The settings of a command, a table for each section; the last column where there is a difference to tell."""
    tells = len({row.later for row in rows}) > 1
    head = ["flag", "default", "meaning", *(["later"] if tells else [])]
    for section in dict.fromkeys(row.section for row in rows):
        if section:
            yield f"#### {command}: {section}\n"
        yield "\n".join(
            line(cells)
            for cells in (
                head,
                ["---"] * len(head),
                *([row.flag, row.default, row.meaning, row.later][: len(head)] for row in rows if row.section == section),
            )
        ) + "\n"  # fmt: skip


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def command_part(command: str) -> Iterator[str]:
    config_type = cli.config_type(command)
    yield f"### halation {command}\n"
    yield in_markdown(config_type.__doc__)
    base = config_type.__mro__[1]
    if base is not object:
        other = next(key for key, known in COMMANDS.items() if known.config == base.__name__)
        unused = sorted(set(read_fields(config_type)) - {row.name for row in settings(config_type)})
        without = ", ".join(f"`--{one}`" for one in unused)
        yield f"It also has every flag of [halation {other}](#halation-{other}) but {without}.\n"
    yield from tables(command, list(settings(config_type)))


def in_markdown(docstring: str | None) -> str:
    """A docstring as it stands, with its indented blocks set as Python and its arguments as a list."""
    return "\n\n".join(map(_block, re.split(r"\n{2,}", inspect.cleandoc(docstring or "")))) + "\n"


def _block(text: str) -> str:
    if text.startswith("    "):
        return f"```python\n{textwrap.dedent(text)}\n```"
    if all(re.match(r"\w+: |    ", one) for one in text.splitlines()):
        return re.sub(r"^(\w+): ", r"- `\1`: ", re.sub(r"\n +", " ", text), flags=re.MULTILINE)
    return text


def python_part() -> Iterator[str]:
    """The functions and classes of the package itself, in the order of the commands, then the adapters and the errors."""
    yield "## From Python\n"
    yield in_markdown(halation.__doc__).partition("\n\n")[2]
    public = [name for name in halation.__all__ if name != "__version__"]
    for name in sorted(public, key=lambda name: [*COMMANDS, *public].index(name)):
        yield from thing_part(f"halation.{name}", getattr(halation, name))
    yield from adapters_part()
    yield "### Errors\n"
    yield "What a caller may catch, all from `halation.errors`. On the command line each is a message without a traceback, and an exit code.\n"
    rows = [line(["error", "is a", "exit code", "when"]), line(["---"] * 4)]
    for name, thing in vars(errors).items():
        if isinstance(thing, type) and issubclass(thing, BaseException) and thing.__module__ == errors.__name__:
            given = "exit_code" in inspect.signature(thing.__init__).parameters
            code = "130 or 143" if given else str(vars(thing).get("exit_code", 1))
            rows.append(line([f"`{name}`", f"`{thing.__bases__[0].__name__}`", code, in_cell(thing.__doc__ or "")]))
    yield "\n".join(rows) + "\n"


def thing_part(name: str, thing: Any) -> Iterator[str]:
    """A function, or a class with what can be called of it."""
    yield f"### {name}\n"
    of = [command for command in COMMANDS if isinstance(thing, type) and cli.config_type(command) is thing]
    if of:
        yield f"The settings of [`halation {of[0]}`](#halation-{of[0]}), frozen; each is a keyword.\n"
        return
    if isinstance(thing, type) and (dataclasses.is_dataclass(thing) or issubclass(thing, dict)):
        yield in_markdown(thing.__doc__)
        yield "\n".join(_members(thing)) + "\n"
        return
    yield call(name, thing)
    command = name.partition(".")[2]
    yield in_markdown(thing.__doc__).replace(f"`halation {command}`", f"[`halation {command}`](#halation-{command})")
    for method, function in vars(thing).items() if isinstance(thing, type) else ():
        if inspect.isfunction(function) and function.__doc__ and (method == "__call__" or method[0] != "_"):
            variable = "sampler" if thing is halation.RankSampler else "model"
            yield call(variable if method == "__call__" else f"{variable}.{method}", function)
            yield in_markdown(function.__doc__)


def _members(thing: type) -> Iterator[str]:
    """The fields, properties and methods of a class, inherited ones first."""
    for each in [base for base in reversed(thing.__mro__) if base.__module__.startswith("halation")]:
        for field, (_, text) in read_fields(each).items() if dataclasses.is_dataclass(each) else ():
            yield f"- `{field}: {each.__annotations__[field]}`" + (f": {in_cell(text)}" if text else "")
        for name, member in vars(each).items():
            function = member.fget if isinstance(member, property) else member
            if name[0] != "_" and inspect.isfunction(function) and function.__doc__:
                signature = str(inspect.signature(function)).replace("self, ", "").replace("self", "").replace("'", "")
                shown = (
                    signature.removeprefix("()").replace(" -> ", ": ") if isinstance(member, property) else signature
                )
                yield f"- `{name}{shown}`: {in_cell(' '.join(function.__doc__.split()))}"


def adapters_part() -> Iterator[str]:
    """What stands in halation.adapters, read and not imported: each file needs a library that may not be there."""
    for path in sorted((Path(halation.__file__).parent / "adapters").glob("[a-z]*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
                continue
            name = f"halation.adapters.{path.stem}.{node.name}"
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
            made = methods[0] if isinstance(node, ast.ClassDef) and methods else node
            yield f"### {name}\n"
            yield fenced(name, [*map(str, _arguments(made))], "")
            yield in_markdown(ast.get_docstring(node))


def _arguments(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    if isinstance(node, ast.ClassDef):
        return []
    arguments = re.split(r", (?![^\[]*\])", ast.unparse(node.args))
    return [re.sub(r"^(\w+: [^=]+)=", r"\1 = ", one) for one in arguments if one != "self"]


def call(name: str, thing: Any) -> str:
    found = inspect.signature(thing)
    arguments = [one for one in found.parameters.values() if one.name != "self"]
    written = [str(one).replace("''", '""').replace("'", "") for one in arguments]
    by_name = [k for k, one in enumerate(arguments) if one.kind is one.KEYWORD_ONLY]
    if by_name:
        written.insert(by_name[0], "*")
    returned = "" if found.return_annotation in (found.empty, None, "None") else f" -> {found.return_annotation}"
    return fenced(name, written, returned)


def fenced(name: str, arguments: list[str], returned: str) -> str:
    """A call as Python writes it, one argument a line where it is long."""
    flat = f"{name}({', '.join(arguments)}){returned}"
    lines = "".join(f"    {one},\n" for one in arguments)
    return f"```python\n{flat if len(flat) <= 100 else f'{name}({chr(10)}{lines}){returned}'}\n```\n"


def extras_part() -> Iterator[str]:
    """What can be installed besides; an extra without a sentence fails here."""
    yield "### Extras\n"
    yield "`pip install '.[train,web]'` in the clone installs two. One that is missing names itself when it is needed; `halation doctor` lists all.\n"
    rows = [
        line([f"`{name}`", EXTRA_PURPOSES[name], ", ".join(f"`{one}`" for one in needs)])
        for name, needs in errors.read_extras().items()
    ]
    yield "\n".join([line(["extra", "for", "packages"]), line(["---"] * 3), *rows]) + "\n"


def names_part() -> Iterator[str]:
    """The names that other tools have for settings, and the answers to those that mean something else."""
    yield "### Names of other tools\n"
    yield (
        "They are accepted as flags, as keys of a `--config` file and as keywords in Python, by the commands that have "
        "the setting of the third column. Otherwise the message is what they mean there, and what there is here.\n"
    )
    rows = [line(["name", "in", "the same as", "otherwise"]), line(["---"] * 4)]
    for name, other in OTHER_NAMES.items():
        same = " or ".join(f"`--{one}`" for one in other.settings.split())
        answer = in_cell(f"{other.meaning}: {other.ours}") if other.meaning else ""
        rows.append(line([f"`{name}`", other.tools, same, answer]))
    yield "\n".join(rows) + "\n"


def page() -> str:
    """The whole page."""
    names = ", ".join(f"[{command}](#halation-{command})" for command in COMMANDS)
    parts = [
        OPENING.format(commands=names),
        *python_part(),
        RULES,
        *(part for one in COMMANDS for part in command_part(one)),
        *names_part(),
        ENVIRONMENT,
        *extras_part(),
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE} is made anew\n")
