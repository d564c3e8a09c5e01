"""Every setting says what it means and what a resumed run may do with it."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path
from typing import Any

import pytest

from halation import cli
from halation.config import (
    Conflict,
    as_json,
    check_settings,
    fixed_settings,
    from_json,
    load_settings,
    setting,
    to_current_names,
)
from halation.errors import InputError
from halation.help_text import read_fields
from halation.other_names import OTHER_NAMES
from halation.training.config import TrainConfig


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_setting_has_a_group_and_a_sentence(command: str) -> None:
    config_type = cli.config_type(command)
    texts = {name: text for base in config_type.__mro__[-2::-1] for name, text in read_fields(base).items()}
    grouped = "COMMON" in vars(config_type)
    for field in dataclasses.fields(config_type):
        group, sentence = texts[field.name]
        assert re.search(r"[a-z]{3}.*\.$", sentence), field.name
        assert group or not grouped, field.name
    assert set(getattr(config_type, "COMMON", "").split()) <= texts.keys()


def test_every_other_name_stands_for_a_setting_or_has_an_answer() -> None:
    known = {field.name for command in cli.COMMANDS for field in dataclasses.fields(cli.config_type(command))}
    for name, other in OTHER_NAMES.items():
        assert set(other.settings.split()) <= known, name
        assert other.settings or other.meaning, name
        assert bool(other.meaning) == bool(other.ours), name
        named = re.findall(r"--(\w+)", f"{other.ours} {other.action}")
        assert set(named) <= known | {"config", "repo", "local"}, name
    tools = " ".join(other.tools for other in OTHER_NAMES.values())
    assert all(tool in tools for tool in ("diffusers", "kohya", "accelerate", "SimpleTuner"))


def test_settings_of_two_calls_compare_as_json_and_leave_out_what_is_free() -> None:
    first = TrainConfig()
    more = dataclasses.replace(first, n_steps=30_000, nproc=4, ckpt_every=7, sample_prompts=("a",), progress="none")
    other = dataclasses.replace(first, lr=1.0)
    assert fixed_settings(first) == fixed_settings(more)
    assert {name for name in fixed_settings(first) if fixed_settings(first)[name] != fixed_settings(other)[name]} == {
        "lr"
    }
    assert as_json(more)["sample_prompts"] == ["a"]
    assert list(to_current_names(as_json(first))) == [field.name for field in dataclasses.fields(TrainConfig)]


def test_what_decides_weights_or_data_is_never_free() -> None:
    decisive = {
        "data",
        "image_size",
        "model",
        "seed",
        "lr",
        "dtype",
        "batch_size",
        "caption_dropout",
        "num_register_tokens",
        "engine",
    }
    assert decisive <= fixed_settings(TrainConfig()).keys()


def test_a_default_that_could_be_shared_between_configs_is_refused() -> None:
    with pytest.raises(TypeError, match="shared"):
        setting([])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    share: float = setting(0.5, low=0, high=1)
    sizes: tuple[int, ...] = setting((), low=1)
    limit: int | None = setting(None, low=2)
    cache: bool = setting(True)
    name: str = setting("")
    mode: str = setting("fast")

    CONFLICTS = (
        Conflict("name mode", "one of them", "leave one out"),
        Conflict("sizes", "a name for them", "give --name", without="name"),
        Conflict("cache limit", "a cache", when=lambda config: not config.cache and config.limit is not None),
    )


@pytest.mark.parametrize(
    ("changes", "found", "expected", "action"),
    [
        ({"share": 1.5}, "--share 1.5", "a number from 0 on, at most 1", "change --share"),
        ({"share": float("nan")}, "--share nan", "a number from 0 on, at most 1", "change --share"),
        ({"sizes": (3, 0), "name": "a"}, "--sizes 3 0", "a number from 1 on", "change --sizes"),
        ({"limit": 1}, "--limit 1", "a number from 2 on", "change --limit"),
        ({"name": "a", "mode": "slow"}, "--name a with --mode slow", "one of them", "leave one out"),
        ({"sizes": (3, 4)}, "--sizes 3 4 without --name", "a name for them", "give --name"),
        ({"cache": False, "limit": 2}, "--no_cache with --limit 2", "a cache", "leave --cache out"),
    ],
)
def test_a_number_out_of_its_range_and_settings_that_do_not_go_together_are_refused(
    changes: dict[str, Any], found: str, expected: str, action: str
) -> None:
    with pytest.raises(InputError) as caught:
        check_settings(Settings(**changes))
    assert caught.value.found == found
    assert caught.value.expected == expected
    assert caught.value.action.startswith(action)


@pytest.mark.parametrize("changes", [{}, {"name": "a", "sizes": (1,)}, {"mode": "slow", "limit": 2}, {"cache": False}])
def test_settings_in_their_ranges_that_go_together_are_not_refused(changes: dict[str, Any]) -> None:
    check_settings(Settings(**changes))


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_settings_come_back_from_json_and_conflicts_name_settings(command: str) -> None:
    """The settings of a command come back from JSON, and conflicts name the settings."""
    config_type = cli.config_type(command)
    required = {"run": Path("a/run"), "action": "stop", "checkpoint": "a/run"}
    names = {field.name: field for field in dataclasses.fields(config_type)}
    given = {name: value for name, value in required.items() if name in names and command != "demo"}
    config = config_type(**given)
    for field in names.values():
        if (
            field.type in ("str", "Path", "tuple[str, ...]", "Path | None", "tuple[int, ...]")
            and field.name not in given
        ):
            value = {"str": "x", "Path": Path("x"), "tuple[str, ...]": ("x", "y"), "Path | None": Path("x")}
            config = dataclasses.replace(config, **{field.name: value.get(field.type, (3, 4))})
    assert from_json(config_type, as_json(config)) == config
    for conflict in getattr(config_type, "CONFLICTS", ()):
        assert {*conflict.names, *conflict.without} <= names.keys()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "merge.yaml",
            "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1},*a{i - 1}]}}\n" for i in range(1, 40)),
            "alias",
        ),
        (
            "values.yaml",
            "seed: [&a0 [x]" + "".join(f",&a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)) + "]",
            "alias",
        ),
        ("self.yaml", "seed: &a [*a]", "alias"),
        ("hex.yaml", "seed: 0x" + "f" * 100_000, "a number of 100002 digits"),
        ("sixty.yaml", "seed: " + "1:" * 400_000 + "1", "digits"),
        ("deep.yaml", "seed: " + "[" * 5000, "nested too deep"),
        ("dots.toml", "a." * 500_000 + "a=1", "line 1 has more than 256 dots"),
        ("deep.toml", "seed=" + "[" * 5000, "nested too deep"),
        ("hex.toml", "seed = 0x" + "f" * 100_000, "digits"),
        ("deep.json", '{"seed": ' + "[" * 100_000, "nested too deep"),
        ("deep_value.toml", "\n".join(["seed" + ".a" * 250 + " = " + "{a=" * 60 + "1" + "}" * 60]), "seed is"),
        ("long.json", '{"' + "x" * 1_000_000 + '": 1}', "unknown setting 'xxx"),
    ],
    ids=lambda text: text if len(text) < 20 else "",
)  # fmt: skip
def test_settings_that_would_take_long_or_much_memory_are_refused(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    (tmp_path / name).write_text(text)
    start = time.process_time()
    with pytest.raises(InputError) as caught:
        load_settings(TrainConfig, tmp_path / name)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 6000
    assert time.process_time() - start < 10
