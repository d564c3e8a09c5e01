"""Declares settings, checks them, and reads them from files or JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import tomllib
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from halation import input_files
from halation.errors import InputError, format_value, shorten
from halation.help_text import choices
from halation.other_names import find_setting, nearest_name

ChangePolicy = Literal["refused", "free", "grows"]
ConfigType = TypeVar("ConfigType")
ABOVE_ZERO, BELOW_ONE = sys.float_info.min, math.nextafter(1, 0)
MAX_SEED = 2**63 - 2**32
"""Leaves room for the image index, which is added to the seed."""
RENAMED_SETTINGS = {
    "max_pictures": "max_images",
    "heldout_pictures": "validation_images",
    "eval_pictures": "eval_images",
    "export_pictures": "export_images",
    "pictures": "images",
    "sheet_size": "model_batch_size",
    "activation_checkpointing": "gradient_checkpointing",
}
"""Earlier to current names. Flags, config files and Python calls accept both; config.json stores the earlier one."""


def setting(
    default: Any, *, change: ChangePolicy = "refused", low: float = -math.inf, high: float = sys.float_info.max
) -> Any:
    """Declare a field with a default; `change` is the policy for resumed runs.

    A number, or each number of a list, must be in [`low`, `high`]. Without `low` it is not checked.
    """
    if isinstance(default, list | dict):
        raise TypeError("a default must not be shared between configs")
    return dataclasses.field(default=default, metadata={"change": change, "low": low, "high": high})


def free_setting(default: Any, *, low: float = -math.inf, high: float = sys.float_info.max) -> Any:
    """Declare a setting that may change on resume: it affects neither weights nor images."""
    return setting(default, change="free", low=low, high=high)


class Conflict:
    """A rejected combination of settings: one row of the `CONFLICTS` table of a config class.

    It applies if all of `names` and none of `without` are given, or if `when` returns True. A setting is given if it
    differs from its default. The default `action` is to leave the first of `names` out.
    """

    def __init__(
        self,
        names: str,
        expected: str | Callable[[Any], str],
        action: str | Callable[[Any], str] = "",
        *,
        without: str = "",
        when: Callable[[Any], bool] | None = None,
    ) -> None:
        self.names, self.without, self.when = names.split(), without.split(), when
        self.expected, self.action = expected, action or f"leave --{self.names[0]} out"

    def check(self, config: Any) -> None:
        """Raise InputError if the config has this combination."""
        if self.when is not None:
            applies = self.when(config)
        else:
            defaults = {field.name: field.default for field in dataclasses.fields(config)}
            given = {name for name, default in defaults.items() if getattr(config, name) != default}
            applies = given.issuperset(self.names) and given.isdisjoint(self.without)
        if not applies:
            return
        found = " with ".join(_format_flag(name, getattr(config, name)) for name in self.names)
        if self.without:
            word = "without" if found else "neither" if len(self.without) > 1 else "no"
            found = f"{found} {word} {' nor '.join(f'--{name}' for name in self.without)}".strip()
        raise InputError(
            found, *(text if isinstance(text, str) else text(config) for text in (self.expected, self.action))
        )


def _format_flag(name: str, value: Any) -> str:
    """Format a setting as on the command line."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no_{name}"
    return " ".join([f"--{name}", *(str(each) or '""' for each in (value if isinstance(value, tuple) else (value,)))])


def format_range(field: dataclasses.Field[Any]) -> str:
    """Return the range of a number as text, empty for a setting without a range."""
    low, high = field.metadata.get("low", -math.inf), field.metadata.get("high", math.inf)
    if low == -math.inf:
        return ""
    most = ", below 1" if high == BELOW_ONE else f", at most {high}" if high < 1e30 else ""
    return ("above 0" if low == ABOVE_ZERO else f"from {low} on") + most


def check_settings(config: Any) -> None:
    """Raise InputError for numbers out of range and for conflicting settings."""
    for field in dataclasses.fields(config):
        value, range_text = getattr(config, field.name), format_range(field)
        numbers = () if value is None or not range_text else value if isinstance(value, tuple) else (value,)
        if not all(
            field.metadata["low"] <= number <= field.metadata["high"] for number in numbers
        ):  # NaN is in no range
            raise InputError(
                _format_flag(field.name, value),
                f"a number {range_text}",
                f"change --{field.name}; see --help",
            )
    for conflict in getattr(config, "CONFLICTS", ()):
        conflict.check(config)


def from_json(config_type: type[ConfigType], values: Mapping[str, Any]) -> ConfigType:
    """Return the config from the output of `as_json`."""
    return config_type(**validate_settings(config_type, values, "the settings of a rank"))


def as_json(config: Any) -> dict[str, Any]:
    """Return the settings as plain JSON values, in declaration order."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    return to_stored_names(values)


def to_stored_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rename settings to the names that config.json stores."""
    earlier = {new: old for old, new in RENAMED_SETTINGS.items()}
    return {earlier.get(name, name): value for name, value in values.items()}


def to_current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rename settings to their current names."""
    return {RENAMED_SETTINGS.get(name, name): value for name, value in values.items()}


def fixed_settings(config: Any) -> dict[str, Any]:
    """Return the settings that a resumed run must not change."""
    names = {f.name: None for f in dataclasses.fields(config) if f.metadata.get("change", "refused") == "refused"}
    values = as_json(config)
    return {name: values[name] for name in to_stored_names(names)}


def read_settings_file(path: Path) -> dict[str, Any]:
    """Read settings from a YAML, TOML or JSON file; the file extension selects the format."""
    if not path.is_file():
        raise InputError(
            f"there is no file {path}", "a YAML, TOML or JSON file of settings", "check the path given to --config"
        )
    try:
        text = input_files.read_bytes(path, input_files.MAX_SETTINGS_BYTES).decode("utf-8-sig")
        match path.suffix.lower():
            case ".yaml" | ".yml":
                values = _parse_yaml(text)
            case ".toml":
                max_dots = input_files.limit(input_files.MAX_SETTINGS_DOTS)
                for number, line in enumerate(text.split("\n"), start=1):
                    if line.count(".") > max_dots:
                        raise ValueError(f"line {number} has more than {max_dots} dots; write it in several lines")
                values = tomllib.loads(text)
            case ".json":
                values = json.loads(text)
            case ending:
                raise InputError(
                    f"{path} ends in {ending or 'nothing'}", "a file ending in .yaml, .yml, .toml or .json", "rename it"
                )
    except InputError:
        raise
    except input_files.RefusedFileError as error:
        raise error.as_input_error() from error
    except RecursionError:
        raise InputError(f"{path} is nested too deep", "a flat table of settings", "correct it") from None
    except Exception as error:
        raise InputError(
            f"{path} cannot be read: {error}", "a well-formed file of settings", "correct the place it names"
        ) from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise InputError(
            f"{path} holds a {type(values).__name__}", "a table of settings (key: value)", "write one setting per line"
        )
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def _parse_yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """A safe loader that reads 1e-4 as a number (YAML 1.1: text) and rejects aliases.

        A few nested aliases can expand to more values than fit in memory.
        """

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                event = self.peek_event()  # type: ignore[no-untyped-call]
                raise yaml.composer.ComposerError(
                    None, None, f"an alias (*{event.anchor[:40]}); write the value itself", event.start_mark
                )
            return super().compose_node(parent, index)

        def construct_scalar(self, node: Any) -> Any:
            value = super().construct_scalar(node)
            max_digits = input_files.limit(input_files.MAX_SETTINGS_DIGITS)
            if node.tag == "tag:yaml.org,2002:int" and len(value) > max_digits:
                raise ValueError(f"a number of {len(value)} digits, and the limit is {max_digits}")
            return value

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )
    return yaml.load(text, Loader)


def load_settings(config_type: type[ConfigType], path: Path) -> dict[str, Any]:
    """Read and validate the settings of a file.

    An unknown key raises InputError, which suggests a known one that is spelled alike.
    """
    values = read_settings_file(path)
    if {"job", "settings", "fixed"} <= values.keys() and isinstance(values["settings"], dict):
        values = values["settings"]  # the config.json of a run
    return validate_settings(config_type, values, str(path))


def validate_settings(config_type: type[ConfigType], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert settings to their declared types; errors name the setting and its source."""
    import pydantic

    hints = typing.get_type_hints(config_type)
    names = [f.name for f in dataclasses.fields(config_type)]  # type: ignore[arg-type]
    aliases = setting_aliases(config_type)
    settings: dict[str, Any] = {}
    for given, value in values.items():
        key = given if given in names else aliases.get(given, "")
        if not key:
            key, value = find_setting(given, value, set(names), f"{where}: ")
        key = key or given
        if key in settings or (key != given and key in values):
            raise InputError(f"{where}: both '{key}' and '{given}'", "one of them: they are the same", "remove one")
        if key not in names:
            near = nearest_name(key, set(names))
            raise InputError(
                f"{where}: unknown setting '{shorten(key, 100)}'",
                "settings of this command; --help_all lists all of them",
                f"did you mean '{near}'?" if near else "correct or remove it",
            )
        is_list = typing.get_origin(hints[key]) is tuple and typing.get_args(hints[key])[-1] is Ellipsis
        if is_list and not isinstance(value, list | tuple):  # as on the command line, one value is a list of one
            value = [value]
        try:
            adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(hints[key])
            settings[key] = adapter.validate_json(json.dumps(value, default=str), strict=True)
        except (ValueError, TypeError, RecursionError) as error:  # pydantic's own is a ValueError
            problem = error.errors()[0]["msg"] if isinstance(error, pydantic.ValidationError) else str(error)
            raise InputError(
                f"{where}: {key} is {_show_value(value)}",
                f"one of {', '.join(choices(hints[key]))}"
                if choices(hints[key])
                else f"a value of its type ({problem})",
                "correct it; --help shows the type",
            ) from error
    return settings


def _show_value(value: Any) -> str:
    try:
        return format_value(value, 1000)
    except ValueError:
        return "a number of too many digits"
    except RecursionError:
        return "nested too deep"


def setting_aliases(config_type: type[ConfigType]) -> dict[str, str]:
    """Map the aliases that the command line accepts to setting names."""
    hints = typing.get_type_hints(config_type, include_extras=True)
    aliases = {old: new for old, new in RENAMED_SETTINGS.items() if new in hints}
    for name, hint in hints.items():
        for note in getattr(hint, "__metadata__", ()):
            for alias in getattr(note, "aliases", None) or ():
                aliases[alias.lstrip("-").replace("-", "_")] = name
    return aliases
