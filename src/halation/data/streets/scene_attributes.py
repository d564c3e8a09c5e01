"""The attributes of street scene k, a pure function of the split and k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import numpy as np

Split = Literal["train", "heldout"]
StreetPlace = Literal[
    "residential",
    "urban intersection",
    "highway",
    "rainy street",
    "suburban",
    "parking lot",
    "city crossing",
    "rural",
]
TimeOfDay = Literal["day", "dusk", "night"]
Weather = Literal["dry", "wet"]
Colour = Literal["red", "blue", "white", "black", "yellow", "silver"]

SPLITS: tuple[Split, ...] = get_args(Split)
PLACES: tuple[StreetPlace, ...] = get_args(StreetPlace)
TIMES: tuple[TimeOfDay, ...] = get_args(TimeOfDay)
WEATHERS: tuple[Weather, ...] = get_args(Weather)
CAR_COLOURS: tuple[Colour, ...] = get_args(Colour)

_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class _PlaceRules:
    """The objects of a place; a count is chosen uniformly from its tuple."""

    num_cars: tuple[int, ...]
    num_trees: tuple[int, ...] = (0,)
    num_houses: tuple[int, ...] = (0,)
    num_signs: tuple[int, ...] = (0,)
    num_pedestrians: tuple[int, ...] = (0,)
    num_traffic_lights: tuple[int, ...] = (0,)
    wet_probability: float = 0.35


_PLACE_RULES: dict[StreetPlace, _PlaceRules] = {
    "residential": _PlaceRules(
        num_cars=(0, 1, 2, 2, 3, 4),
        num_trees=(0, 1, 2),
        num_houses=(6,),
        num_pedestrians=(0, 0, 1),
        wet_probability=0.5,
    ),
    "urban intersection": _PlaceRules(
        num_cars=(0, 1, 2, 3, 4, 5), num_houses=(4, 5, 6), num_pedestrians=(0, 0, 1, 2), num_traffic_lights=(2,)
    ),
    "highway": _PlaceRules(num_cars=(0, 1, 2, 3, 4), num_trees=(0, 2, 3), num_signs=(1,)),
    "rainy street": _PlaceRules(
        num_cars=(0, 0, 1, 2, 3), num_houses=(6,), num_pedestrians=(0, 1, 2), wet_probability=1.0
    ),
    "suburban": _PlaceRules(num_cars=(0, 0, 1, 2), num_trees=(4, 5, 6), num_houses=(2, 3, 4)),
    "parking lot": _PlaceRules(num_cars=(0, 1, 2, 3, 4, 5, 5), num_trees=(2, 3, 4), num_houses=(1,)),
    "city crossing": _PlaceRules(num_cars=(0, 0, 1, 2), num_houses=(6,), num_signs=(2,), num_pedestrians=(1, 2, 3)),
    "rural": _PlaceRules(num_cars=(0, 0, 1, 1, 2), num_trees=(2, 3, 4), num_houses=(0, 1)),
}


@dataclass(frozen=True, kw_only=True)
class Attributes:
    """The attributes of one scene; they decide its image at every size, and its caption."""

    place: StreetPlace
    time: TimeOfDay
    weather: Weather
    car_colours: tuple[Colour, ...]
    """One colour per car, so the length is the number of cars."""
    num_trees: int
    num_houses: int
    """Houses, or buildings, depending on the place."""
    num_signs: int
    num_pedestrians: int
    num_traffic_lights: int
    variation: int
    """The scene's number: it decides everything else, such as the positions of trees."""

    def __post_init__(self) -> None:
        rules = _PLACE_RULES[self.place]
        for name in ("num_cars", "num_trees", "num_houses", "num_signs", "num_pedestrians", "num_traffic_lights"):
            num, allowed = getattr(self, name), getattr(rules, name)
            if num not in allowed:
                raise ValueError(f"{name} is {num} in a scene of place {self.place!r}, which has one of {set(allowed)}")
        if self.weather == "dry" and rules.wet_probability == 1.0:
            raise ValueError(f"the weather is dry in a scene of place {self.place!r}, which is always wet")

    @property
    def num_cars(self) -> int:
        return len(self.car_colours)


class SceneRng:
    """Random numbers in [0, 1) from a counter-based stream with two keys.

    Only the raw words of Philox are used: numpy guarantees those for all versions, but not its distributions.
    """

    def __init__(self, stream: int, number: int) -> None:
        self._words = np.random.Philox(key=(stream << 64) | number)
        self._values: list[float] = []

    def __call__(self) -> float:
        if not self._values:
            self._values = ((self._words.random_raw(128) >> np.uint64(11)) * 2.0**-53).tolist()
        return self._values.pop()

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self()

    def choose(self, items: Sequence[_Item]) -> _Item:
        return items[int(self() * len(items))]

    def chance(self, probability: float) -> bool:
        return self() < probability

    def choose_several(self, items: Sequence[_Item], num: int) -> list[_Item]:
        """Return `num` different items in their original order."""
        indices = list(range(len(items)))
        chosen = [indices.pop(int(self() * len(indices))) for _ in range(num)]
        return [items[place] for place in sorted(chosen)]


# Each topic has its own stream, so that a change in one does not affect the others.
SCENE_STREAM = 0x5CE9E
LAYOUT_STREAM = 0x1A704
CARS_STREAM = 0xCA25
CAPTION_STREAM = 0xCA97105


def scene(split: Split, index: int) -> Attributes:
    """Return the attributes of scene `index` of a split.

    The splits are disjoint: train scenes have even numbers and validation scenes odd ones. The number is a key of every
    random stream of a scene, and one of its attributes.
    """
    number = 2 * index + SPLITS.index(split)
    rng = SceneRng(SCENE_STREAM, number)
    place = rng.choose(PLACES)
    rules = _PLACE_RULES[place]
    return Attributes(
        place=place,
        time=rng.choose(("day", "day", "dusk", "night")),
        weather="wet" if rng.chance(rules.wet_probability) else "dry",
        car_colours=tuple(rng.choose(CAR_COLOURS) for _ in range(rng.choose(rules.num_cars))),
        num_trees=rng.choose(rules.num_trees),
        num_houses=rng.choose(rules.num_houses),
        num_signs=rng.choose(rules.num_signs),
        num_pedestrians=rng.choose(rules.num_pedestrians),
        num_traffic_lights=rng.choose(rules.num_traffic_lights),
        variation=number,
    )
