"""Captions of street scenes in the vocabulary of the driving prompts, and their parsing."""

from __future__ import annotations

import re
from typing import TypedDict

from halation.data.streets.scene_attributes import (
    CAPTION_STREAM,
    CAR_COLOURS,
    Attributes,
    Colour,
    SceneRng,
    StreetPlace,
    TimeOfDay,
    Weather,
)

DRIVING_PROMPTS: tuple[str, ...] = (
    "A residential street scene with wet roads and parked cars during daytime",
    "An urban intersection with traffic lights and multiple vehicles",
    "A highway scene with clear lane markings and distant cars",
    "A rainy street with reflections on the pavement and buildings",
    "A suburban road with trees and houses on both sides",
    "A parking lot scene with various parked vehicles",
    "A city street with pedestrian crossings and traffic signs",
    "A rural road with natural scenery and minimal traffic",
)

MAX_CARS = 5
"""The maximum per scene."""

_PLACE_PHRASES: dict[StreetPlace, str] = {
    "residential": "A residential street scene",
    "urban intersection": "An urban intersection",
    "highway": "A highway scene",
    "rainy street": "A rainy street",
    "suburban": "A suburban road",
    "parking lot": "A parking lot scene",
    "city crossing": "A city street",
    "rural": "A rural road",
}
# Details that every scene of a place has, in alternative sets; a parking lot has only its cars.
_FIXED_DETAILS: dict[StreetPlace, tuple[tuple[str, ...], ...]] = {
    "residential": (("houses on both sides",),),
    "urban intersection": (("traffic lights",), ("traffic lights",), ("traffic lights", "buildings")),
    "highway": (("clear lane markings",),),
    "rainy street": (
        ("reflections on the pavement", "buildings"),
        ("reflections on the pavement",),
        ("buildings",),
    ),
    "suburban": (("trees", "houses on both sides"), ("trees", "houses on both sides"), ("houses on both sides",)),
    "parking lot": (),
    "city crossing": (("pedestrian crossings", "traffic signs"), ("pedestrian crossings",), ("traffic signs",)),
    "rural": (("natural scenery",),),
}
# The words for cars at each place: singular and plural.
_CAR_WORDS: dict[StreetPlace, tuple[str, str]] = {
    "residential": ("parked car", "parked cars"),
    "urban intersection": ("vehicle", "vehicles"),
    "highway": ("distant car", "distant cars"),
    "rainy street": ("car", "cars"),
    "suburban": ("car", "cars"),
    "parking lot": ("parked vehicle", "parked vehicles"),
    "city crossing": ("vehicle", "vehicles"),
    "rural": ("car", "cars"),
}
_NUMBER_WORDS = ("no", "one", "two", "three", "four", "five")
# Phrases for a range of counts. They include those of the driving prompts, so that training contains them.
_AMOUNT_RANGES: dict[str, range] = {
    "minimal traffic": range(0, 2),
    "multiple vehicles": range(3, MAX_CARS + 1),
    "various parked vehicles": range(3, MAX_CARS + 1),
    "parked cars": range(2, MAX_CARS + 1),
    "distant cars": range(2, MAX_CARS + 1),
}
_PLACE_AMOUNTS: dict[StreetPlace, str] = {
    "residential": "parked cars",
    "urban intersection": "multiple vehicles",
    "highway": "distant cars",
    "parking lot": "various parked vehicles",
    "rural": "minimal traffic",
}
_TIME_PHRASES: dict[TimeOfDay, str] = {"day": "during daytime", "dusk": "at dusk", "night": "at night"}
_ROAD_PHRASES: dict[Weather, str] = {"dry": "dry roads", "wet": "wet roads"}


class Mentioned(TypedDict):
    """The attributes that a caption mentions; None for others."""

    place: StreetPlace | None
    time: TimeOfDay | None
    weather: Weather | None
    cars: range | None
    """The numbers of cars that match."""
    car_colours: tuple[Colour, ...] | None
    """Colours with at least one car each."""


def caption(attributes: Attributes) -> str:
    """Return a caption: always the place, other attributes at random, all of them true."""
    rng = SceneRng(CAPTION_STREAM, attributes.variation)
    fixed_details = _FIXED_DETAILS[attributes.place]
    details = []
    # The road of a rainy street is always wet; the driving prompt of a residential street mentions its road.
    if attributes.place != "rainy street" and rng.chance(0.7 if attributes.place == "residential" else 0.4):
        details.append(_ROAD_PHRASES[attributes.weather])
    # A residential street always has houses, but its driving prompt does not mention them, hence the low chance.
    if fixed_details and rng.chance(0.3 if attributes.place == "residential" else 0.85):
        details += rng.choose(fixed_details)
    if rng.chance(0.95 if attributes.place == "parking lot" else 0.7):
        details.append(_describe_cars(attributes, rng))
    if attributes.place in ("residential", "urban intersection") and attributes.num_pedestrians and rng.chance(0.5):
        details.append("pedestrians")
    words = [_PLACE_PHRASES[attributes.place]]
    if details:  # "with a", "with a and b", "with a, b and c"
        words += ["with", " and ".join(part for part in (", ".join(details[:-1]), details[-1]) if part)]
    if rng.chance(0.6):
        words.append(_TIME_PHRASES[attributes.time])
    return " ".join(words)


def _describe_cars(attributes: Attributes, rng: SceneRng) -> str:
    """Describe the cars by number, by an amount or, for a single car, by colour."""
    one, many = _CAR_WORDS[attributes.place]
    num = attributes.num_cars
    amount = _PLACE_AMOUNTS.get(attributes.place)
    if amount is not None and num in _AMOUNT_RANGES[amount] and rng.chance(0.6):
        return amount
    if num == 1:
        return f"a {attributes.car_colours[0]} {one}" if rng.chance(0.6) else f"one {one}"
    return f"{_NUMBER_WORDS[num]} {many}"


_COUNT_PATTERN = re.compile(rf"\b({'|'.join(_NUMBER_WORDS)}) (?:parked |distant )?(?:cars?|vehicles?)\b")
_COLOUR_PATTERN = re.compile(rf"\ba ({'|'.join(CAR_COLOURS)}) (?:parked |distant )?(?:car|vehicle)\b")


def mentioned(text: str) -> Mentioned:
    """Parse a caption, or a prompt in the same vocabulary; the inverse of `caption`."""
    place = next((place for place, head in _PLACE_PHRASES.items() if text.startswith(head)), None)
    weather = next((weather for weather, road in _ROAD_PHRASES.items() if road in text), None)
    cars, colours = _parse_cars(text)
    return {
        "place": place,
        "time": next((time for time, words in _TIME_PHRASES.items() if words in text), None),
        "weather": "wet" if weather is None and place == "rainy street" else weather,
        "cars": cars,
        "car_colours": colours,
    }


def _parse_cars(text: str) -> tuple[range | None, tuple[Colour, ...] | None]:
    coloured = _COLOUR_PATTERN.search(text)
    if coloured:
        colour = next(colour for colour in CAR_COLOURS if colour == coloured[1])
        return range(1, 2), (colour,)
    counted = _COUNT_PATTERN.search(text)
    if counted:
        num = _NUMBER_WORDS.index(counted[1])
        return range(num, num + 1), None
    return next((numbers for words, numbers in _AMOUNT_RANGES.items() if words in text), None), None
