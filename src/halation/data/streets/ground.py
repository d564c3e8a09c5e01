"""What several places share: sky, asphalt dry or wet, markings, cars in their lane, closed rows of buildings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from halation.data.streets.attributes import TOPIC_CARS, Attributes, Dice
from halation.data.streets.canvas import Canvas, Paint, Point, Rgb, View
from halation.data.streets.objects import car_along

Slot = tuple[float, float]
"""Where a car may stand: across and near, as `View` counts them."""

ASPHALT = (92, 93, 98)
WET_ASPHALT = (58, 61, 70)
WHITE = (236, 236, 232)
YELLOW = (244, 202, 54)
ROW_DEPTHS = ((0.12, 0.2), (0.2, 0.36), (0.36, 1.2))
"""From where to where, far to near, the three buildings of a closed row stand."""


def heaven(canvas: Canvas, dice: Dice) -> None:
    """Sun or moon, clouds or stars."""
    x, y = dice.between(0.4, 0.6), dice.between(0.07, 0.12)
    if canvas.weather == "wet":
        for _ in range(3):
            cloud_x, cloud_y = dice.between(0.1, 0.9), dice.between(0.02, 0.16)
            canvas.disc(cloud_x, cloud_y, 0.24, 0.045, (168, 176, 186))
    elif canvas.time == "day":
        canvas.disc(x, y, 0.055, 0.055, (255, 240, 150, 255))
        for _ in range(2):
            cloud_x, cloud_y = dice.between(0.1, 0.9), dice.between(0.1, 0.22)
            canvas.disc(cloud_x, cloud_y, 0.11, 0.03, (250, 252, 255))
            canvas.disc(cloud_x + 0.03, cloud_y - 0.025, 0.06, 0.03, (250, 252, 255))
    elif canvas.time == "dusk":
        canvas.glow(x, y + 0.18, 0.2, (255, 200, 110))
        canvas.disc(x, y + 0.18, 0.07, 0.07, (255, 206, 110, 255))
    else:
        for _ in range(10):
            canvas.disc(dice(), dice.between(0.0, 0.35), 0.007, 0.007, (236, 238, 255, 255))
        canvas.disc(x, y, 0.05, 0.05, (244, 242, 220, 255))
        canvas.disc(x + 0.022, y - 0.012, 0.04, 0.042, (12, 15, 42, 255))


def asphalt(canvas: Canvas, road: Sequence[Point], horizon: float, strength: int = 105) -> None:
    """Asphalt; wet, it is darker and mirrors what stands above the horizon, so draw that first."""
    if canvas.weather == "wet":
        canvas.fill(road, WET_ASPHALT)
        canvas.mirror(road, horizon, strength)
    else:
        canvas.fill(road, ASPHALT)


def puddles(canvas: Canvas, view: View, dice: Dice, places: Sequence[float]) -> None:
    """Where it is wet, water that shows the sky, at these places across the road."""
    if canvas.weather == "wet":
        for across in places:
            near = dice.between(0.45, 0.9)
            x, y = view.at(across, near)
            sky = (178, 194, 214, 120) if canvas.time == "day" else (130, 120, 150, 90)
            canvas.disc(x, y, 0.13 * near, 0.028 * near, sky)


def dashes(canvas: Canvas, view: View, across: float, width: float, paint: Rgb = WHITE) -> None:
    """A broken line; equal lengths on the ground are equal steps of 1 / near."""
    distance = 1.0
    while distance < 9.0:
        canvas.fill(
            view.strip(across - width, across + width, 1 / (distance + 0.55), 1 / distance), canvas.lamplit(paint)
        )
        distance += 1.1


def cars_along(canvas: Canvas, view: View, attributes: Attributes, slots: Sequence[Slot], width: float) -> None:
    """Cars on some of the slots, far ones first; those left of the middle face the viewer."""
    dice = Dice(TOPIC_CARS, attributes.variation)
    chosen = dice.few(slots, attributes.num_cars)
    for (across, near), colour in zip(chosen, attributes.car_colours, strict=True):
        x, y = view.at(across, near)
        x += dice.between(-0.02, 0.02) * near
        car_along(canvas, x, y, width * near, colour, facing=across < 0)


def building(
    canvas: Canvas,
    view: View,
    side: int,
    span: tuple[float, float],
    height: float,
    wall: Rgb,
    pane: Callable[[], Paint],
) -> None:
    """One building of a closed row along the road; `side` is -1 for left and 1 for right, `span` is far and near."""
    across, (far, near) = side * 0.78, span
    canvas.fill(view.upright(across, far, near, 0.0, height), wall)
    start, stop = 1 / near, 1 / far
    columns, rows = 3, 3
    for column in range(columns):
        left = start + (stop - start) * (column + 0.22) / columns
        right = start + (stop - start) * (column + 0.78) / columns
        for row in range(rows):
            low, high = height * (row + 0.5) / (rows + 0.4), height * (row + 1.05) / (rows + 0.4)
            canvas.fill(view.upright(across, 1 / right, 1 / left, low, high), pane())
