"""The eight places: how each is laid out, so that every one can be told at a glance; `draw` makes the picture."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from halation.data.streets import objects as things
from halation.data.streets.attributes import TOPIC_CARS, TOPIC_LAYOUT, Attributes, Dice, Place
from halation.data.streets.canvas import Canvas, Paint, Rgb, View
from halation.data.streets.ground import (
    ASPHALT,
    ROW_DEPTHS,
    WET_ASPHALT,
    WHITE,
    YELLOW,
    asphalt,
    building,
    cars_along,
    dashes,
    heaven,
    puddles,
)

_GREENS: tuple[Rgb, ...] = ((58, 132, 52), (74, 146, 48), (46, 118, 60))
_COATS: tuple[Rgb, ...] = ((206, 60, 50), (40, 90, 180), (240, 190, 50), (120, 60, 140))


def draw(attributes: Attributes, size: int) -> NDArray[np.uint8]:
    """The picture of a scene, (size, size, 3); equal attributes give equal pictures."""
    canvas = Canvas(size, attributes.time, attributes.weather)
    dice = Dice(TOPIC_LAYOUT, attributes.variation)
    _LAYOUTS[attributes.place](canvas, attributes, dice)
    return canvas.pixels()


def _residential(canvas: Canvas, attributes: Attributes, dice: Dice) -> None:
    view = View(horizon=dice.between(0.40, 0.42), vanish=dice.between(0.48, 0.52))
    heaven(canvas, dice)
    canvas.box(0, view.horizon, 1, 1, (104, 150, 72))
    walls: tuple[Rgb, ...] = ((186, 84, 62), (214, 150, 104), (168, 66, 56), (226, 196, 150))
    roofs: tuple[Rgb, ...] = ((92, 56, 50), (74, 62, 66))
    for near in (0.2, 0.33, 0.55)[3 - attributes.num_houses // 2 :]:
        for side in (-1, 1):
            x, y = view.at(side * 1.04, near)
            lit = (dice.chance(0.7), dice.chance(0.7), dice.chance(0.7))
            wall, roof = dice.pick(walls), dice.pick(roofs)
            things.house(canvas, x, y, 0.84 * near, 0.72 * near, wall, roof, lit)
    canvas.fill(view.strip(-0.66, 0.66), (178, 174, 168))
    asphalt(canvas, view.strip(-0.5, 0.5), view.horizon)
    puddles(canvas, view, dice, (-0.2, 0.15))
    for across, near in dice.few(((-0.6, 0.3), (0.6, 0.4), (-0.6, 0.5), (0.6, 0.62)), attributes.num_trees):
        x, y = view.at(across, near)
        things.tree(canvas, x, y, 0.75 * near, dice.pick(_GREENS))
    for _ in range(attributes.num_pedestrians):
        x, y = view.at(dice.pick((-0.57, 0.57)), dice.between(0.5, 0.7))
        things.pedestrian(canvas, x, y, 0.2, dice.pick(_COATS))
    slots = ((-0.38, 0.28), (0.38, 0.32), (-0.38, 0.46), (0.38, 0.56), (-0.38, 0.78), (0.38, 0.9))
    cars_along(canvas, view, attributes, slots, 0.36)


def _towers(canvas: Canvas, attributes: Attributes, dice: Dice, base: float) -> None:
    """Office blocks left and right of a gap in the middle, front on."""
    glass: tuple[Rgb, ...] = ((92, 122, 156), (126, 140, 158), (74, 98, 132), (150, 160, 172))
    right_half = attributes.num_houses // 2
    for side, num in ((-1, attributes.num_houses - right_half), (1, right_half)):
        width = 0.40 / num
        for place in range(num):
            left = 0.5 + side * (0.1 + width * (place + (1 if side < 0 else 0)))
            top = dice.between(0.03, 0.14) + 0.1 * (num - 1 - place)
            canvas.box(left, top, left + width * 0.96, base, dice.pick(glass))
            columns = 2 if num == 3 else 3
            step_x, step_y = width * 0.96 / (columns + 0.3), (base - top) / 5.3
            for column in range(columns):
                for row in range(5):
                    x, y = left + step_x * (column + 0.3), top + step_y * (row + 0.35)
                    pane = things.window_paint(canvas, dice.chance(0.6))
                    canvas.box(x, y, x + 0.68 * step_x, y + 0.55 * step_y, pane)


def _intersection(canvas: Canvas, attributes: Attributes, dice: Dice) -> None:
    view = View(horizon=dice.between(0.42, 0.44), vanish=dice.between(0.49, 0.51))
    heaven(canvas, dice)
    base = 0.5
    canvas.box(0, view.horizon, 1, 1, (176, 176, 180))
    _towers(canvas, attributes, dice, base)
    canvas.box(0, base, 1, 1, (186, 184, 182))
    asphalt(canvas, view.strip(-0.62, 0.62), view.horizon)
    asphalt(canvas, [(0, 0.56), (1, 0.56), (1, 0.74), (0, 0.74)], view.horizon)
    puddles(canvas, view, dice, (-0.35, 0.3))
    for left in (0.0, 0.12, 0.24, 0.68, 0.8, 0.92):
        canvas.box(left, 0.645, left + 0.07, 0.655, canvas.lamplit(YELLOW))
    for stripe in range(7):
        across = -0.58 + 0.175 * stripe
        canvas.fill(view.strip(across, across + 0.1, 0.58, 0.7), canvas.lamplit(WHITE))
    canvas.fill(view.strip(-0.02, 0.02, 0.78, 1.0), canvas.lamplit(YELLOW))
    slots = ((0.3, 0.635), (0.68, 0.635), (0.21, 0.73), (0.5, 0.73), (0.79, 0.73), (0.63, 0.97))
    cars = Dice(TOPIC_CARS, attributes.variation)
    for (x, y), colour in zip(cars.few(slots, attributes.num_cars), attributes.car_colours, strict=True):
        if y > 0.9:
            things.car_along(canvas, x, y, 0.27, colour, facing=False)
        else:
            things.car_across(canvas, x + cars.between(-0.02, 0.02), y, 0.25, colour, left=y < 0.7)
    for place in range(attributes.num_pedestrians):
        things.pedestrian(canvas, (0.27, 0.78)[place % 2], 0.83, 0.22, dice.pick(_COATS))
    shows = dice.pick((0, 0, 1, 2, 2))
    for place in range(attributes.num_traffic_lights):
        things.traffic_light(canvas, (0.09, 0.91)[place % 2], 0.92, 0.56, shows)


def _highway(canvas: Canvas, attributes: Attributes, dice: Dice) -> None:
    view = View(horizon=dice.between(0.43, 0.46), vanish=dice.between(0.47, 0.53))
    heaven(canvas, dice)
    horizon = view.horizon
    canvas.fill(
        [
            (0, horizon),
            (0, horizon - 0.06),
            (0.2, horizon - 0.1),
            (0.45, horizon - 0.03),
            (0.75, horizon - 0.09),
            (1, horizon - 0.05),
            (1, horizon),
        ],
        (120, 140, 168),
    )
    canvas.box(0, horizon, 1, 1, (186, 172, 108))
    for across, near in dice.few(((-2.6, 0.16), (2.4, 0.17), (-2.0, 0.22), (2.0, 0.23)), attributes.num_trees):
        x, y = view.at(across, near)
        things.tree(canvas, x, y, 0.9 * near, dice.pick(_GREENS))
    asphalt(canvas, view.strip(-1.15, 1.15), horizon)
    for across in (-1.06, 1.06):
        canvas.fill(view.strip(across - 0.025, across + 0.025, 0.03), canvas.lamplit(WHITE))
    canvas.fill(view.strip(-0.03, 0.03, 0.03), canvas.lamplit(YELLOW))
    for across in (-0.53, 0.53):
        dashes(canvas, view, across, 0.025)
    puddles(canvas, view, dice, (-0.3, 0.3))
    _guard_rails(canvas, view)
    if attributes.num_signs:
        _gantry(canvas, view)
    slots = ((-0.27, 0.14), (0.27, 0.15), (-0.8, 0.19), (0.8, 0.2), (-0.27, 0.28), (0.27, 0.33))
    cars_along(canvas, view, attributes, slots, 0.44)


def _guard_rails(canvas: Canvas, view: View) -> None:
    for across in (-1.26, 1.26):
        for near in (0.12, 0.16, 0.21, 0.28, 0.38):
            (x, y), (_, top) = view.at(across, near), view.at(across, near, 0.2)
            canvas.box(x - 0.02 * near, top, x + 0.02 * near, y, (110, 114, 120))
        canvas.fill(view.upright(across, 0.04, 0.6, 0.12, 0.24), (206, 212, 218))


def _gantry(canvas: Canvas, view: View) -> None:
    near, steel = 0.24, (116, 120, 126)
    (left, ground), (right, top) = view.at(-1.36, near), view.at(1.36, near, 1.3)
    for post in (left, right):
        canvas.box(post - 0.01, top, post + 0.01, ground, steel)
    canvas.box(left, top, right, top + 0.018, steel)
    for start in (0.12, 0.56):
        panel = left + start * (right - left)
        canvas.box(panel, top - 0.035, panel + 0.32 * (right - left), top + 0.085, canvas.lamplit((238, 240, 240)))
        canvas.box(
            panel + 0.008,
            top - 0.027,
            panel + 0.32 * (right - left) - 0.008,
            top + 0.077,
            canvas.lamplit((14, 112, 72)),
        )
        canvas.box(
            panel + 0.035,
            top + 0.012,
            panel + 0.32 * (right - left) - 0.035,
            top + 0.034,
            canvas.lamplit((238, 240, 240)),
        )


def _rainy(canvas: Canvas, attributes: Attributes, dice: Dice) -> None:
    view = View(horizon=dice.between(0.39, 0.41), vanish=dice.between(0.48, 0.52))
    canvas.fill([(0, 0), (1, 0), (1, 0.5), (0, 0.5)], (60, 70, 92, 90))
    canvas.box(0, view.horizon, 1, 1, (70, 76, 90))
    walls: tuple[Rgb, ...] = ((84, 92, 116), (104, 96, 108), (70, 84, 110), (116, 104, 104))

    def pane() -> Paint:
        # Lamps are on by day too: it is their reflections that make the street look wet.
        return (255, 206, 112, 255) if dice.chance(0.55) else things.window_paint(canvas, False)

    for far, near in ROW_DEPTHS[3 - attributes.num_houses // 2 :]:
        for side in (-1, 1):
            building(canvas, view, side, (far, near), dice.between(1.3, 1.55), dice.pick(walls), pane)
    canvas.fill(view.strip(-0.78, 0.78), (96, 102, 116))
    canvas.mirror(view.strip(-0.78, 0.78), view.horizon, 110)
    asphalt(canvas, view.strip(-0.56, 0.56), view.horizon, 165)
    puddles(canvas, view, dice, (-0.3, 0.05, 0.35))
    dashes(canvas, view, 0.0, 0.02, (190, 196, 204))
    for side in (-1, 1):
        x, y = view.at(side * 0.64, 0.5)
        things.street_lamp(canvas, x, y, 0.5, -side)
        lamp = x - side * 0.11
        canvas.box(lamp - 0.015, y, lamp + 0.015, y + 0.22, (255, 220, 140, 110))
    cars_along(canvas, view, attributes, ((-0.28, 0.3), (0.28, 0.4), (-0.28, 0.62), (0.28, 0.85)), 0.36)
    for place in range(attributes.num_pedestrians):
        x, y = view.at((0.68, -0.68)[place % 2], dice.between(0.52, 0.6))
        things.pedestrian(canvas, x, y, 0.22, dice.pick(_COATS))
        things.umbrella(canvas, x, y, 0.22, dice.pick(_COATS))
    for _ in range(34):
        x, y, length = dice.between(-0.05, 1.05), dice.between(-0.1, 0.95), dice.between(0.07, 0.13)
        canvas.line((x, y), (x - 0.22 * length, y + length), 0.006, (206, 216, 232, 120))


def _suburban(canvas: Canvas, attributes: Attributes, dice: Dice) -> None:
    bend = dice.pick((-1, 1)) * dice.between(0.3, 0.4)
    view = View(horizon=dice.between(0.44, 0.46), vanish=0.5 - 0.35 * bend, bend=bend)
    heaven(canvas, dice)
    canvas.fill([(0, 0.52), (0, 0.40), (0.25, 0.37), (0.5, 0.41), (0.75, 0.37), (1, 0.40), (1, 0.52)], (64, 118, 70))
    canvas.box(0, view.horizon, 1, 1, (112, 182, 72))
    canvas.fill(view.strip(-0.42, 0.42), (206, 200, 188))
    asphalt(canvas, view.strip(-0.34, 0.34), view.horizon)
    puddles(canvas, view, dice, (-0.15, 0.12))
    dashes(canvas, view, 0.0, 0.018)
    walls: tuple[Rgb, ...] = ((244, 236, 214), (206, 222, 232), (246, 216, 176))
    roofs: tuple[Rgb, ...] = ((176, 72, 54), (120, 84, 70), (84, 98, 122))
    houses = ((0.36, 0.49), (0.66, 0.49), (0.2, 0.65), (0.81, 0.65))
    for x, y in houses[4 - attributes.num_houses :]:
        width = 0.13 if y < 0.55 else 0.28
        lit = (dice.chance(0.7), dice.chance(0.7), dice.chance(0.7))
        things.house(canvas, x, y, width, 0.55 * width, dice.pick(walls), dice.pick(roofs), lit)
    trees = (
        (-0.03, 0.8, 0.42),
        (1.03, 0.8, 0.42),
        (0.36, 0.57, 0.17),
        (0.66, 0.57, 0.17),
        (0.03, 0.56, 0.2),
        (0.97, 0.56, 0.2),
    )
    for x, y, height in sorted(trees[: attributes.num_trees], key=lambda tree: tree[1]):
        things.tree(canvas, x, y, height, dice.pick(_GREENS))
    cars_along(canvas, view, attributes, ((-0.17, 0.34), (0.17, 0.55), (-0.17, 0.8)), 0.27)


def _parking(canvas: Canvas, attributes: Attributes, dice: Dice) -> None:
    view = View(horizon=-0.25, vanish=dice.between(0.48, 0.52))
    heaven(canvas, dice)
    canvas.box(0, 0.2, 1, 0.3, (84, 150, 70))
    left = dice.between(0.2, 0.3)
    canvas.box(left, 0.08, left + 0.5, 0.27, (232, 222, 204))
    canvas.box(left, 0.08, left + 0.5, 0.13, dice.pick(((196, 40, 44), (30, 90, 170), (230, 130, 30))))
    for pane in range(4):
        x = left + 0.03 + 0.118 * pane
        canvas.box(x, 0.16, x + 0.09, 0.25, things.window_paint(canvas, True))
    for x in ((0.06, 0.94, 0.15, 0.85))[: attributes.num_trees]:
        things.tree(canvas, x, 0.29, 0.22, dice.pick(_GREENS))
    asphalt(canvas, [(0, 0.29), (1, 0.29), (1, 1), (0, 1)], 0.29, 50)
    puddles(canvas, view, dice, (-0.3, 0.3))
    rows = ((0.52, 0.66), (0.78, 0.99))
    for far, near in rows:
        for line in range(7):
            across = -0.75 + 0.25 * line
            canvas.fill(view.strip(across - 0.013, across + 0.013, far, near), canvas.lamplit(WHITE))
        canvas.fill(view.strip(-0.76, 0.76, far - 0.008, far + 0.008), canvas.lamplit(WHITE))
    slots = [(-0.625 + 0.25 * bay, near) for near in (0.65, 0.975) for bay in range(6) if near < 0.9 or 0 < bay < 5]
    cars = Dice(TOPIC_CARS, attributes.variation)
    for (across, near), colour in zip(cars.few(slots, attributes.num_cars), attributes.car_colours, strict=True):
        x, y = view.at(across, near)
        things.car_above(canvas, x, y, 0.205 * near, colour)


def _city(canvas: Canvas, attributes: Attributes, dice: Dice) -> None:
    view = View(horizon=dice.between(0.37, 0.39), vanish=dice.between(0.48, 0.52))
    heaven(canvas, dice)
    canvas.box(0, view.horizon, 1, 1, (196, 188, 178))
    walls: tuple[Rgb, ...] = ((232, 190, 128), (222, 160, 110), (240, 216, 166), (206, 138, 104))
    awnings: tuple[Rgb, ...] = ((200, 48, 48), (36, 120, 96), (44, 84, 168))

    def pane() -> Paint:
        return things.window_paint(canvas, dice.chance(0.55))

    for far, near in ROW_DEPTHS[3 - attributes.num_houses // 2 :]:
        for side in (-1, 1):
            height = dice.between(1.15, 1.35)
            building(canvas, view, side, (far, near), height, dice.pick(walls), pane)
            canvas.fill(view.upright(side * 0.72, far, near, 0.34, 0.46), dice.pick(awnings))
    canvas.fill(view.strip(-0.78, 0.78), (204, 198, 190))
    asphalt(canvas, view.strip(-0.6, 0.6), view.horizon)
    cars_along(canvas, view, attributes, ((-0.27, 0.26), (0.27, 0.32), (-0.27, 0.46)), 0.38)
    canvas.fill(view.strip(-2, 2, 0.6, 0.9), WET_ASPHALT if canvas.weather == "wet" else ASPHALT)
    puddles(canvas, view, dice, (-0.3, 0.35))
    for stripe in range(8):
        across = -0.88 + 0.235 * stripe
        canvas.fill(view.strip(across, across + 0.13, 0.62, 0.88), canvas.lamplit((246, 246, 242)))
    for place in range(attributes.num_signs):
        things.sign(canvas, (0.12, 0.88)[place % 2], 0.78, 0.46, dice.pick((0, 1, 2, 3)))
    places = dice.few((0.27, 0.42, 0.57, 0.72), attributes.num_pedestrians)
    for x in places:
        things.pedestrian(canvas, x + dice.between(-0.03, 0.03), 0.86, 0.32, dice.pick(_COATS))


def _rural(canvas: Canvas, attributes: Attributes, dice: Dice) -> None:
    bend = dice.pick((-1, 1)) * dice.between(0.55, 0.7)
    view = View(horizon=dice.between(0.46, 0.48), vanish=0.5 - 0.2 * bend, bend=bend)
    heaven(canvas, dice)
    canvas.disc(dice.between(0.1, 0.25), 0.52, 0.42, 0.2, (104, 142, 116))
    canvas.disc(dice.between(0.75, 0.9), 0.52, 0.45, 0.17, (124, 158, 96))
    canvas.box(0, view.horizon, 1, 1, (150, 176, 62))
    canvas.fill([(0, 0.62), (1, 0.56), (1, 1), (0, 1)], (134, 164, 54))
    canvas.fill([(0, 0.8), (1, 0.74), (1, 1), (0, 1)], (118, 150, 48))
    if attributes.num_houses:
        x = 0.2 if bend < 0 else 0.8
        things.house(canvas, x, 0.56, 0.17, 0.09, (176, 44, 38), (110, 104, 104), (True, True, True))
    for x, y, height in dice.few(
        (
            (0.06, 0.58, 0.26),
            (0.93, 0.58, 0.27),
            (0.36, 0.5, 0.13),
            (0.64, 0.5, 0.14),
            (0.97, 0.78, 0.42),
            (0.03, 0.78, 0.42),
        ),
        attributes.num_trees,
    ):
        things.conifer(canvas, x, y, height, dice.pick(_GREENS))
    track = view.strip(-0.24, 0.24)
    canvas.fill(view.strip(-0.28, 0.28), (176, 150, 104))
    canvas.fill(track, (150, 128, 96) if canvas.weather == "dry" else (92, 84, 76))
    if canvas.weather == "wet":
        canvas.mirror(track, view.horizon, 80)
    puddles(canvas, view, dice, (-0.05,))
    _fence(canvas, view)
    cars_along(canvas, view, attributes, ((-0.1, 0.3), (0.1, 0.55)), 0.26)


def _fence(canvas: Canvas, view: View) -> None:
    side = -0.42 if view.bend > 0 else 0.42
    wood, depths = (142, 106, 70), (0.22, 0.29, 0.38, 0.5, 0.64, 0.8, 1.0)
    for near in depths:
        (x, y), (_, top) = view.at(side, near), view.at(side, near, 0.22)
        canvas.box(x - 0.016 * near, top, x + 0.016 * near, y, wood)
    for low, high in ((0.07, 0.105), (0.15, 0.185)):
        edge = [view.at(side, near, high) for near in depths] + [view.at(side, near, low) for near in reversed(depths)]
        canvas.fill(edge, wood)


_LAYOUTS: dict[Place, Callable[[Canvas, Attributes, Dice], None]] = {
    "residential": _residential,
    "urban intersection": _intersection,
    "highway": _highway,
    "rainy street": _rainy,
    "suburban": _suburban,
    "parking lot": _parking,
    "city crossing": _city,
    "rural": _rural,
}
