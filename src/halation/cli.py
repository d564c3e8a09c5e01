"""The command line: `halation COMMAND --flags`; parses first and imports the heavy libraries after, so that --help is instant."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import sys
import traceback
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from halation.errors import HalationError, InputError, refused_by_system


class Command(NamedTuple):
    """A command: its module has `run(config)`, and the module `config` beside that has the class of its flags."""

    module: str
    config: str
    sentence: str


COMMANDS = {
    "train": Command(
        "training.command", "TrainConfig", "train a diffusion transformer on every rank, with samples from every rank"
    ),
    "distill": Command(
        "distillation.command",
        "DistillConfig",
        "distil a teacher into a smaller student, or one that draws in few steps",
    ),
    "sample": Command("sampling.command", "SampleConfig", "draw pictures from a checkpoint on every rank"),
    "generate": Command(
        "generation.command", "GenerateConfig", "draw a picture for every prompt of a list on every GPU, resumable"
    ),
    "evaluate": Command(
        "evaluation.command",
        "EvaluateConfig",
        "score pictures: FID, KID, precision and recall, CLIP score, on every GPU, or an error",
    ),
    "watch": Command(
        "watcher.command",
        "WatchConfig",
        "follow a folder of checkpoints: draw from each, score it, plot it, keep the best",
    ),
    "ctl": Command("tools.ctl", "CtlConfig", "ask a running training to sample, save or stop at its next step"),
    "gallery": Command(
        "gallery.command",
        "GalleryConfig",
        "look at runs in a browser: samples by step, pictures, losses and scores, live",
    ),
    "demo": Command(
        "tools.demo",
        "DemoConfig",
        "the whole loop on embedded data in minutes: train, draw through a kill, score, look",
    ),
    "doctor": Command("tools.doctor", "DoctorConfig", "show devices, versions, backends, and what is missing"),
}
TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 failures, 2 bad input, 130 or 143 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if words else 2
    if words[0] in ("-V", "--version", "version"):
        from halation import __version__

        print(f"halation {__version__}")
        return 0
    return run(words[0], words[1:])


def run(
    command: str, words: Sequence[str], *, defaults: Mapping[str, Any] | None = None, prog: str | None = None
) -> int:
    """Run one command and return its exit code; a recipe brings its own defaults and the name it goes by."""
    # Read by torch when it is imported. A rank that outlives the host of the store by a moment would print twenty-five frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    code = _outcome(command, words, defaults, prog)
    if code and "RANK" in os.environ and "torch" in sys.modules:
        # A rank that failed must not wait, in taking its groups down, for peers that wait for it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _outcome(command: str, words: Sequence[str], defaults: Mapping[str, Any] | None, prog: str | None) -> int:
    name = prog or "halation"
    try:
        if command not in COMMANDS:
            raise InputError(f"there is no command '{command}'", f"one of {', '.join(COMMANDS)}", _nearest(command))
        config = parse(command, words, defaults=defaults, prog=prog)
        return int(importlib.import_module(f"halation.{COMMANDS[command].module}").run(config))
    except HalationError as error:
        _say(f"{name}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader went away (halation ... | head); Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        logging.getLogger(__name__).debug("unexpected", exc_info=True)
        refusal = refused_by_system(error)
        if refusal:
            _say(f"{name}: {refusal}")
            return 1
        _say(f"{name}: this is a defect in Halation or in a library below it:\n{traceback.format_exc()}")
        return 1


def parse(
    command: str, words: Sequence[str], *, defaults: Mapping[str, Any] | None = None, prog: str | None = None
) -> Any:
    """The command's config: defaults, below `--config FILE`, below flags."""
    import tyro

    from halation.config import from_file

    kind = config_type(command)
    file, rest = _take_config(words)
    if hasattr(kind, "check_words"):
        kind.check_words(rest)
    settings = {**(defaults or {}), **(from_file(kind, file) if file else {})}
    return parse_flags(tyro, kind, settings, rest, prog=prog or f"halation {command}")


def config_type(command: str) -> Any:
    """The dataclass of a command's flags."""
    package = COMMANDS[command].module.rpartition(".")[0]
    return getattr(importlib.import_module(f"halation.{package}.config"), COMMANDS[command].config)


def parse_flags(
    tyro: types.ModuleType, config_type: Any, settings: dict[str, Any], words: Sequence[str], prog: str
) -> Any:
    required = [
        f.name for f in dataclasses.fields(config_type) if f.default is f.default_factory is dataclasses.MISSING
    ]
    default = {} if any(name not in settings for name in required) else {"default": config_type(**settings)}
    if not default and settings:  # flags must give the rest; put the file's settings in front of them
        words = [*_as_flags(settings), *words]
    return tyro.cli(
        config_type,
        prog=prog,
        args=normalised(config_type, words),
        use_underscores=True,
        config=(tyro.conf.AvoidSubcommands,),
        **default,
    )


def normalised(config_type: Any, words: Sequence[str]) -> list[str]:
    """Allow what people write: `--gpu_ids 0,1,2` for lists of numbers or choices, and `--compile False` for switches."""
    hints = typing.get_type_hints(config_type)
    words = _in_their_places(config_type, words)
    lists = {
        name for name, hint in hints.items() if typing.get_origin(hint) is tuple and str not in typing.get_args(hint)
    }
    switches = {name for name, hint in hints.items() if hint is bool}
    choices = {name for name, hint in hints.items() if hint == (bool | None)}
    result: list[str] = []
    words = _split_equals(words)
    position = 0
    current = ""
    while position < len(words):
        word = words[position]
        position += 1
        if word.startswith("--"):
            current = word[2:].replace("-", "_")
            value = words[position].lower() if position < len(words) else ""
            if current in switches and value in TRUE + FALSE:
                result.append(word if value in TRUE else f"--no_{current}")
                position += 1
                continue
            # For tyro these take a value, because "not said" is a third one; a person may leave it out.
            if current.removeprefix("no_") in choices:
                said = value in TRUE + FALSE
                yes = (value in TRUE if said else True) != current.startswith("no_")
                result.extend([f"--{current.removeprefix('no_')}", str(yes)])
                position += said
                continue
        elif current in lists and "," in word:
            result.extend(part for part in word.split(",") if part)
            continue
        result.append(word)
    return result


def _in_their_places(config_type: Any, words: Sequence[str]) -> list[str]:
    """`--run X` for what is otherwise given by its place: config files and scripts know settings by their names."""
    names = [f.name for f in dataclasses.fields(config_type) if f.metadata.get("positional")]
    words = _split_equals(words) if names else list(words)
    for name in names:
        values = [words[k + 1] for k, word in enumerate(words[:-1]) if word == f"--{name}"]
        if values:  # the last one wins
            kept = [
                k for k, word in enumerate(words) if word != f"--{name}" and (k == 0 or words[k - 1] != f"--{name}")
            ]
            words = [values[-1], *(words[k] for k in kept)]
    return words


def _split_equals(words: Sequence[str]) -> list[str]:
    result = []
    for word in words:
        flag, equals, value = word.partition("=")
        result.extend([flag, value] if equals and flag.startswith("--") else [word])
    return result


def _as_flags(settings: dict[str, Any]) -> list[str]:
    flags = []
    for name, value in settings.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no_{name}")
        elif isinstance(value, tuple):
            flags.extend([f"--{name}", *map(str, value)])
        else:
            flags.extend([f"--{name}", str(value)])
    return flags


def _take_config(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    rest, file = [], None
    words = list(words)
    position = 0
    while position < len(words):
        word = words[position]
        if word == "--config" or word.startswith("--config="):
            value = (
                word.partition("=")[2] if "=" in word else (words[position + 1] if position + 1 < len(words) else "")
            )
            if not value:
                raise InputError("--config without a file", "--config FILE.yaml, .toml or .json", "name the file")
            position += 1 if "=" in word else 2
            file = Path(value)
            continue
        rest.append(word)
        position += 1
    return file, rest


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {command.sentence}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: halation COMMAND [--flags]",
            "",
            "Train, sample and generate with diffusion transformers on every GPU that is there.",
            "",
            "commands:",
            *lines,
            "",
            "halation COMMAND --help lists the flags. Dashes and underscores are the same; --config FILE (YAML, TOML, JSON) lies below flags.",
        ]
    )


def _nearest(command: str) -> str:
    import difflib

    near = difflib.get_close_matches(command, COMMANDS, n=1, cutoff=0.5)
    return f"did you mean `halation {near[0]}`?" if near else "run `halation --help`"


def _say(text: str) -> None:
    sys.stderr.write(text.rstrip() + "\n")


if __name__ == "__main__":
    sys.exit(main())
