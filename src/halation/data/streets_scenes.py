"""Which street scene has which number: the attributes of scene k, a pure function of the part and k, without a pixel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

Part = Literal["train", "heldout"]
Place = Literal[
    "residential",
    "urban intersection",
    "highway",
    "rainy street",
    "suburban",
    "parking lot",
    "city crossing",
    "rural",
]
Time = Literal["day", "dusk", "night"]
Weather = Literal["dry", "wet"]
Colour = Literal["red", "blue", "white", "black", "yellow", "silver"]

PARTS: tuple[Part, ...] = ("train", "heldout")
PLACES: tuple[Place, ...] = (
    "residential",
    "urban intersection",
    "highway",
    "rainy street",
    "suburban",
    "parking lot",
    "city crossing",
    "rural",
)
TIMES: tuple[Time, ...] = ("day", "dusk", "night")
WEATHERS: tuple[Weather, ...] = ("dry", "wet")
CAR_COLOURS: tuple[Colour, ...] = ("red", "blue", "white", "black", "yellow", "silver")

_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class Attributes:
    """The labels of one scene; they decide its picture at every size, and its caption."""

    place: Place
    time: Time
    weather: Weather
    car_colours: tuple[Colour, ...]
    """One colour a car, so its length is the number of cars."""
    num_trees: int
    num_houses: int
    """Houses, or buildings where the place has those."""
    num_signs: int
    num_pedestrians: int
    num_traffic_lights: int
    variation: int
    """The scene's number: it decides whatever the labels leave open, such as where a tree stands."""

    @property
    def num_cars(self) -> int:
        return len(self.car_colours)


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What may stand at one place; a count is drawn evenly from its tuple."""

    cars: tuple[int, ...]
    trees: tuple[int, ...] = (0,)
    houses: tuple[int, ...] = (0,)
    signs: tuple[int, ...] = (0,)
    pedestrians: tuple[int, ...] = (0,)
    traffic_lights: tuple[int, ...] = (0,)
    chance_wet: float = 0.35


_KINDS: dict[Place, _Kind] = {
    "residential": _Kind(cars=(0, 1, 2, 2, 3, 4), trees=(0, 1, 2), houses=(6,), pedestrians=(0, 0, 1), chance_wet=0.5),
    "urban intersection": _Kind(
        cars=(0, 1, 2, 3, 4, 5), houses=(4, 5, 6), pedestrians=(0, 0, 1, 2), traffic_lights=(2,)
    ),
    "highway": _Kind(cars=(0, 1, 2, 3, 4), trees=(0, 2, 3), signs=(1,)),
    "rainy street": _Kind(cars=(0, 0, 1, 2, 3), houses=(6,), pedestrians=(0, 1, 2), chance_wet=1.0),
    "suburban": _Kind(cars=(0, 0, 1, 2), trees=(4, 5, 6), houses=(2, 3, 4)),
    "parking lot": _Kind(cars=(0, 1, 2, 3, 4, 5, 5), trees=(2, 3, 4), houses=(1,)),
    "city crossing": _Kind(cars=(0, 0, 1, 2), houses=(6,), signs=(2,), pedestrians=(1, 2, 3)),
    "rural": _Kind(cars=(0, 0, 1, 1, 2), trees=(2, 3, 4), houses=(0, 1)),
}


class Dice:
    """Numbers in [0, 1) from a counter-based stream that its two keys alone decide.

    Only the raw words of Philox are used: numpy promises those for ever, but not what its distributions make of them.
    """

    def __init__(self, topic: int, number: int) -> None:
        self._words = np.random.Philox(key=(topic << 64) | number)
        self._values: list[float] = []

    def __call__(self) -> float:
        if not self._values:
            self._values = ((self._words.random_raw(128) >> np.uint64(11)) * 2.0**-53).tolist()
        return self._values.pop()

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self()

    def pick(self, items: Sequence[_Item]) -> _Item:
        return items[int(self() * len(items))]

    def chance(self, probability: float) -> bool:
        return self() < probability

    def few(self, items: Sequence[_Item], num: int) -> list[_Item]:
        """`num` different items, in the order they are given in."""
        places = list(range(len(items)))
        chosen = [places.pop(int(self() * len(places))) for _ in range(num)]
        return [items[place] for place in sorted(chosen)]


# A topic is one half of the key, so that what one topic draws never shifts what another does.
TOPIC_SCENE = 0x5CE9E
TOPIC_LAYOUT = 0x1A704
TOPIC_CARS = 0xCA25
TOPIC_CAPTION = 0xCA97105


def scene(part: Part, index: int) -> Attributes:
    """The attributes of scene `index` of a part.

    The parts cannot meet: train scenes have even numbers and held-out scenes odd ones, the number keys every stream
    a scene is drawn from, and it is among the attributes.
    """
    number = 2 * index + PARTS.index(part)
    dice = Dice(TOPIC_SCENE, number)
    place = dice.pick(PLACES)
    kind = _KINDS[place]
    return Attributes(
        place=place,
        time=dice.pick(("day", "day", "dusk", "night")),
        weather="wet" if dice.chance(kind.chance_wet) else "dry",
        car_colours=tuple(dice.pick(CAR_COLOURS) for _ in range(dice.pick(kind.cars))),
        num_trees=dice.pick(kind.trees),
        num_houses=dice.pick(kind.houses),
        num_signs=dice.pick(kind.signs),
        num_pedestrians=dice.pick(kind.pedestrians),
        num_traffic_lights=dice.pick(kind.traffic_lights),
        variation=number,
    )
