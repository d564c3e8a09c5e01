"""The command line, `halation COMMAND --flags`: parse first, import heavy libraries after."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import importlib
import io
import itertools
import json
import logging
import os
import shutil
import sys
import time
import traceback
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from halation import __version__
from halation.config import format_range, load_settings, setting_aliases, to_current_names
from halation.distributed import launcher, stop_signals
from halation.errors import HalationError, InputError, os_error_message, shorten
from halation.help_text import HelpPage, choices
from halation.input_files import RefusedFileError, use_limits
from halation.other_names import accepted_names, find_setting, nearest_name


class Command(NamedTuple):
    """A command: `module` has `run(config)`; the config module next to it has class `config`."""

    module: str
    config: str
    summary: str


COMMANDS = {
    "train": Command("training.command", "TrainConfig", "train a diffusion transformer, with samples from every rank"),
    "distill": Command(
        "distillation.command",
        "DistillConfig",
        "distil a teacher into a smaller student, or one that samples in few steps",
    ),
    "sample": Command("sampling.command", "SampleConfig", "sample images from a checkpoint on every rank"),
    "generate": Command(
        "generation.command", "GenerateConfig", "generate an image for each prompt of a list on all GPUs, resumable"
    ),
    "evaluate": Command(
        "evaluation.command",
        "EvaluateConfig",
        "score images: FID, KID, precision and recall, CLIP score, on all GPUs",
    ),
    "watch": Command(
        "watcher.command",
        "WatchConfig",
        "watch a folder of checkpoints: generate from each, score it, plot it, keep the best",
    ),
    "ctl": Command("tools.ctl", "CtlConfig", "ask a running training to sample, save or stop at its next step"),
    "gallery": Command(
        "gallery.command",
        "GalleryConfig",
        "show runs in a browser, live: samples by step, images, losses and scores",
    ),
    "demo": Command(
        "tools.demo",
        "DemoConfig",
        "the whole workflow on embedded data in minutes: train, generate, score, view",
    ),
    "doctor": Command("tools.doctor", "DoctorConfig", "show devices, versions, backends and missing packages"),
}
RANK_COMMANDS = ("train", "distill", "sample", "evaluate")
"""Commands that join the ranks of torchrun or srun."""
HELP_FLAGS = ("-h", "--help", "--help_all")
MARK_TIMEOUT_S = 10.0
"""How long a rank waits until another one has written their common error."""
TRUE_WORDS, FALSE_WORDS = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0 is done, 1 failures, 2 bad input, 130 or 143 interrupted.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(_usage_text())
        return 0 if args else 2
    if args[0] in ("-V", "--version", "version"):
        print(f"halation {__version__}")
        return 0
    return run(args[0], args[1:])


def run(
    command: str, args: Sequence[str], *, defaults: Mapping[str, Any] | None = None, prog: str | None = None
) -> int:
    """Run one command and return its exit code; recipes pass their own defaults and name."""
    # Read by torch on import. A rank that outlives the host of the store would print a C++ stack trace of 25 frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if command in RANK_COMMANDS and launcher.is_launched():
        stop_signals.remember_signals()
    code = _run_command(command, args, defaults, prog)
    if code and "RANK" in os.environ and "torch" in sys.modules:
        # On teardown of its groups, a failed rank would wait for peers that wait for it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run_command(command: str, args: Sequence[str], defaults: Mapping[str, Any] | None, prog: str | None) -> int:
    name = prog or "halation"
    try:
        if command not in COMMANDS:
            near = difflib.get_close_matches(command, COMMANDS, n=1, cutoff=0.5)
            action = f"did you mean `halation {near[0]}`?" if near else "run `halation --help`"
            raise InputError(f"there is no command '{command}'", f"one of {', '.join(COMMANDS)}", action)
        scale, follow_links, args = _pop_input_flags(args)
        with use_limits(scale, follow_links):
            config = parse(command, args, defaults=defaults, prog=prog)
            return int(importlib.import_module(f"halation.{COMMANDS[command].module}").run(config))
    except RefusedFileError as refused:
        error = refused.as_input_error()
        print_error(f"{name}: {error}")
        return error.exit_code
    except HalationError as error:
        print_error(f"{name}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader closed the pipe (halation ... | head); Python would report it again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        logging.getLogger(__name__).debug("unexpected", exc_info=True)
        message = os_error_message(error)
        if message:
            print_error(f"{name}: {message}")
            return 1
        print_error(f"{name}: this is a bug in Halation or in a library it uses:\n{traceback.format_exc()}")
        return 1


def parse(
    command: str, args: Sequence[str], *, defaults: Mapping[str, Any] | None = None, prog: str | None = None
) -> Any:
    """Parse the config of a command: flags override `--config FILE`, which overrides defaults."""
    config_class = config_type(command)
    prog = prog or f"halation {command}"
    _, _, args = _pop_input_flags(args)  # recipes parse before they run
    file, rest = _pop_config_flag(args)
    asked = [word[:2] + word[2:].replace("-", "_") for word in rest]
    if hasattr(config_class, "check_words"):
        config_class.check_words(rest)
    settings = to_current_names({**(defaults or {}), **(load_settings(config_class, file) if file else {})})
    if not {*HELP_FLAGS}.isdisjoint(asked):
        with print_once():
            print(_help_text(config_class, prog, settings, everything="--help_all" in asked))
        raise SystemExit(0)
    rest = [word for word, plain in zip(rest, asked, strict=True) if plain != "--print_config"]
    required = [
        f.name for f in dataclasses.fields(config_class) if f.default is f.default_factory is dataclasses.MISSING
    ]
    default = {} if any(name not in settings for name in required) else {"default": config_class(**settings)}
    if not default and settings:  # flags must supply the required settings; put those of the file in front of them
        rest = [*_as_flags(settings), *rest]
    words = normalize_args(config_class, rest)
    ArgumentCheck(config_class, prog, needs=[] if default else required).check(words)
    config = _convert(config_class, prog, words, default)
    if "--print_config" in asked:
        with print_once():
            print(_settings_file(config), end="")
        raise SystemExit(0)
    return config


def _convert(config_class: Any, prog: str, words: Sequence[str], default: dict[str, Any]) -> Any:
    import tyro

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            config = (tyro.conf.AvoidSubcommands,)
            return tyro.cli(config_class, prog=prog, args=words, use_underscores=True, config=config, **default)
    except SystemExit as end:
        text = " ".join(said.getvalue().translate(dict.fromkeys(range(0x2500, 0x2580), " ")).split())
        raise InputError(
            f"the flags cannot be read: {text}", "flags and values as in the help", f"see `{prog} --help_all`"
        ) from end


def _help_text(config_class: Any, prog: str, defaults: Mapping[str, Any], *, everything: bool) -> str:
    ranges = {field.name: format_range(field) for field in dataclasses.fields(config_class)}
    notes = {name: f"{text[0].upper()}{text[1:]}." for name, text in ranges.items() if text}
    for name, others in accepted_names(ranges.keys()).items():
        notes[name] = f"{notes.get(name, '')} Also {', '.join(f'--{other}' for other in others)}.".strip()
    bold = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    page = HelpPage(config_class, defaults, shutil.get_terminal_size().columns, bold=bold)
    return page.format(prog, notes, everything=everything)


def _settings_file(config: Any) -> str:
    """Return the settings as YAML, in the form that --config reads."""
    import yaml

    hints = typing.get_type_hints(type(config), include_extras=True)
    hidden = {name for name, hint in hints.items() if "Suppress" in str(getattr(hint, "__metadata__", ""))}
    values = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    shown = {name: value for name, value in values.items() if name not in hidden}
    return str(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True))


class ArgumentCheck:
    """Checks normalized words before tyro converts them, so that each refusal has the three parts of our messages."""

    def __init__(self, config_class: Any, prog: str, needs: Sequence[str]) -> None:
        self.prog, self.needs = prog, needs
        self.hints = typing.get_type_hints(config_class)
        fields = dataclasses.fields(config_class)
        marked = typing.get_type_hints(config_class, include_extras=True)
        self.positionals = [f.name for f in fields if "Positional" in str(getattr(marked[f.name], "__metadata__", ""))]

    def check(self, words: Sequence[str]) -> None:
        """Raise InputError for an unknown flag, a missing or wrong value, or a word without a flag."""
        positions = [*(k for k, word in enumerate(words) if word.startswith("--")), len(words)]
        free = list(words[: positions[0]])
        given = set()
        for start, stop in itertools.pairwise(positions):
            name = self._setting(words[start])
            values = words[start + 1 : stop]
            given.add(name)
            num = self._num_values(self.hints[name], len(values))
            if len(values) < num:
                many = "a value" if num == 1 else f"{num} values"
                raise InputError(
                    f"{words[start]} without a value" if not values else f"{words[start]} {' '.join(values)}",
                    f"{many} for {words[start]}",
                    f"give {many}; `{self.prog} --help_all` explains the flag",
                )
            if len(values) > num and not self.positionals:
                self._refuse_word(values[num], words[start], num)
            free += values[num:]
            for value in values[:num]:
                self._check_value(words[start], self.hints[name], value)
        self._check_positionals(free, given)

    def _setting(self, flag: str) -> str:
        """Return the setting of a flag."""
        name = flag[2:].replace("-", "_")
        for known in (name, name.removeprefix("no_")):
            if known in self.hints and (known == name or self.hints[known] is bool):
                return known
        if known in self.hints:
            raise InputError(
                f"{flag}, but --{known} is no switch", f"a value for --{known}", f"give --{known} and a value"
            )
        near = nearest_name(name, self.hints.keys())
        raise InputError(
            f"there is no flag {shorten(flag)}",
            f"a flag of `{self.prog}`",
            f"did you mean --{near}?" if near else f"see `{self.prog} --help_all`",
        )

    @staticmethod
    def _num_values(hint: Any, available: int) -> int:
        if typing.get_origin(hint) is tuple:
            inner = typing.get_args(hint)
            return available if inner[-1] is Ellipsis else len(inner)
        return 0 if hint is bool else 1

    def _refuse_word(self, word: str, flag: str, num: int) -> None:
        values = "no value" if num == 0 else "one value" if num == 1 else f"{num} values"
        after = f" after {flag}" if flag else ""
        raise InputError(
            f"{shorten(repr(word))}{after} belongs to no flag",
            f"{values} after {flag}" if flag else "flags, each followed by its value",
            "put quotes around a text with spaces" if num else f"see `{self.prog} --help`",
        )

    def _check_value(self, flag: str, hint: Any, value: str) -> None:
        allowed = choices(hint)
        is_optional = type(None) in typing.get_args(hint)
        if allowed:
            if value not in allowed and value != "" and not (is_optional and value == "None"):
                near = difflib.get_close_matches(value, allowed, n=1)
                raise InputError(
                    f"{flag} {shorten(value)}".strip(),
                    f"one of {', '.join(allowed)}",
                    f"did you mean {near[0]}?" if near else "choose one of these",
                )
            return
        plain = [part for part in (typing.get_args(hint) or (hint,)) if part is not type(None)]
        kind = next((part for part in (int, float) if plain[0] is part), None)
        if kind is None or (is_optional and value == "None"):
            return
        try:
            kind(value)
        except ValueError as error:
            expected = "a whole number" if kind is int else "a number"
            raise InputError(
                f"{flag} {shorten(value)}".strip(), expected, f"give one; `{self.prog} --help_all` explains the flag"
            ) from error

    def _check_positionals(self, words: Sequence[str], given: set[str]) -> None:
        taken = 0
        for name in self.positionals:
            is_list = typing.get_origin(self.hints[name]) is tuple
            values = words[taken:] if is_list else words[taken : taken + 1]
            for value in values:
                self._check_value(name.upper(), self.hints[name], value)
            taken += len(values)
            if values:
                given.add(name)
        if taken < len(words):
            self._refuse_word(words[taken], "", 0)
        missing = [name for name in self.needs if name not in given]
        if missing:
            name = missing[0]
            flag = name.upper() if name in self.positionals else f"--{name}"
            raise InputError(
                f"`{self.prog}` without {flag}", f"{flag}, which has no default", f"give it; see `{self.prog} --help`"
            )


def config_type(command: str) -> Any:
    """The dataclass of a command's flags."""
    package = COMMANDS[command].module.rpartition(".")[0]
    return getattr(importlib.import_module(f"halation.{package}.config"), COMMANDS[command].config)


def normalize_args(config_type: Any, args: Sequence[str]) -> list[str]:
    """Use current names; allow `--gpu_ids 0,1,2` for lists of numbers or choices, `--compile False` for switches."""
    hints = typing.get_type_hints(config_type)
    args = _use_current_names(config_type, _resolve_positionals(config_type, args))
    lists = {
        name for name, hint in hints.items() if typing.get_origin(hint) is tuple and str not in typing.get_args(hint)
    }
    switches = {name for name, hint in hints.items() if hint is bool}
    optional_switches = {name for name, hint in hints.items() if hint == (bool | None)}
    result: list[str] = []
    position = 0
    current = ""
    while position < len(args):
        word = args[position]
        position += 1
        if word.startswith("--"):
            current = word[2:].replace("-", "_")
            value = args[position].lower() if position < len(args) else ""
            if current in switches and value in TRUE_WORDS + FALSE_WORDS:
                result.append(word if value in TRUE_WORDS else f"--no_{current}")
                position += 1
                continue
            # For tyro these flags take a value, because None is a third state; users may omit it.
            if current.removeprefix("no_") in optional_switches:
                has_value = value in TRUE_WORDS + FALSE_WORDS
                is_on = (value in TRUE_WORDS if has_value else True) != current.startswith("no_")
                result.extend([f"--{current.removeprefix('no_')}", str(is_on)])
                position += has_value
                continue
        elif current in lists and "," in word:
            result.extend(part for part in word.split(",") if part)
            continue
        result.append(word)
    return result


def _use_current_names(config_type: Any, args: Sequence[str]) -> list[str]:
    """Replace earlier names of flags, and names in other tools, by their current names."""
    settings = {field.name for field in dataclasses.fields(config_type)}
    aliases = setting_aliases(config_type)
    words = _split_equals(args)
    for position, word in enumerate(words):
        flag = word[2:].replace("-", "_") if word.startswith("--") else ""
        no = "no_" if flag.startswith("no_") else ""
        name = flag.removeprefix("no_")
        if not flag or flag in settings or name in settings:
            continue
        following = words[position + 1 : position + 2]
        value = following[0] if following and not following[0].startswith("--") else None
        new, converted = (aliases[name], value) if name in aliases else find_setting(name, value or "", settings, "--")
        if new:
            words[position] = f"--{no}{new}"
            if value is not None:
                words[position + 1] = str(converted)
    return words


def _resolve_positionals(config_type: Any, args: Sequence[str]) -> list[str]:
    """Accept `--run X` for a positional argument: config files and scripts use names."""
    names = [f.name for f in dataclasses.fields(config_type) if f.metadata.get("positional")]
    args = _split_equals(args) if names else list(args)
    for name in names:
        values = [args[k + 1] for k, word in enumerate(args[:-1]) if word == f"--{name}"]
        if values:  # the last one wins
            kept = [k for k, word in enumerate(args) if word != f"--{name}" and (k == 0 or args[k - 1] != f"--{name}")]
            args = [values[-1], *(args[k] for k in kept)]
    return args


def _split_equals(args: Sequence[str]) -> list[str]:
    result = []
    for word in args:
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


def _pop_config_flag(args: Sequence[str]) -> tuple[Path | None, list[str]]:
    rest, file = [], None
    args = list(args)
    position = 0
    while position < len(args):
        word = args[position]
        if word == "--config" or word.startswith("--config="):
            value = word.partition("=")[2] if "=" in word else (args[position + 1] if position + 1 < len(args) else "")
            if not value:
                raise InputError("--config without a file", "--config FILE.yaml, .toml or .json", "give a file")
            position += 1 if "=" in word else 2
            file = Path(value)
            continue
        rest.append(word)
        position += 1
    return file, rest


def _pop_input_flags(args: Sequence[str]) -> tuple[str | None, bool, list[str]]:
    """Split off `--input_limits SCALE` and `--follow_links`.

    All commands have these flags, and no run records them.
    """
    scale, follow_links, rest = None, False, []
    words = iter(args)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in ("--input_limits", "--input-limits"):
            scale = value if equals else next(words, "")
        elif flag in ("--follow_links", "--follow-links"):
            follow_links = value.lower() not in FALSE_WORDS
        else:
            rest.append(word)
    return scale, follow_links, rest


def _usage_text() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: halation COMMAND [--flags]",
            "",
            "Train, sample and generate with diffusion transformers on all available GPUs.",
            "",
            "commands:",
            *lines,
            "",
            "halation COMMAND --help shows the flags that most users need, --help_all all of them. "
            "Dashes and underscores are the same; flags override --config FILE (YAML, TOML, JSON), and --print_config "
            "prints such a file.",
            "--input_limits SCALE raises the limits on input files; "
            "--follow_links allows links in an image folder that point outside of it.",
        ]
    )


def print_error(text: str) -> None:
    """Print an error; on ranks of torchrun, once for all ranks of this machine that have the same one."""
    _write_once(text.rstrip() + "\n", sys.stderr)


@contextlib.contextmanager
def print_once() -> Iterator[None]:
    """Print what the body prints, such as help, once for all ranks of torchrun on this machine."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        yield
        return
    streams = sys.stdout, sys.stderr
    # With the encoding of the stream: it decides which characters are used for boxes.
    held = [io.TextIOWrapper(io.BytesIO(), encoding=stream.encoding, write_through=True) for stream in streams]
    try:
        with contextlib.redirect_stdout(held[0]), contextlib.redirect_stderr(held[1]):
            yield
    finally:
        for text, stream in zip(held, streams, strict=True):
            text.seek(0)
            if written := text.read():
                _write_once(written, stream)


def _write_once(text: str, stream: TextIO) -> None:
    """Write a text unless another rank of this torchrun on this machine writes the same one.

    A failure of one rank alone, or with another text, is always written. torchrun has a folder for every start of its
    ranks: the rank that creates a file with the hash of the text there writes it, and then marks the file. The others
    wait for the mark, because torchrun ends all ranks when the first of them has exited.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    marker: int | None = None
    if error_file:
        path = (
            Path(error_file).parents[1] / f"halation_{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:16]}"
        )
        try:
            marker = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError:
            deadline = time.monotonic() + MARK_TIMEOUT_S
            while path.exists() and time.monotonic() < deadline:
                if path.stat().st_size:
                    return
                time.sleep(0.02)
    stream.write(text)
    stream.flush()
    if marker is not None:
        os.write(marker, b"written")
        os.close(marker)


if __name__ == "__main__":
    sys.exit(main())
