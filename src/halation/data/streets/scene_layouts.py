"""The layouts of the eight kinds of places; `draw` renders the image."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from halation.data.streets import objects as things
from halation.data.streets.canvas import Canvas, Paint, Point, Rgb, RoadCamera
from halation.data.streets.objects import draw_car_along
from halation.data.streets.scene_attributes import CARS_STREAM, LAYOUT_STREAM, Attributes, SceneRng, StreetPlace

CarPosition = tuple[float, float]
"""Possible positions of a car: (across, near) of `RoadCamera`."""

ASPHALT = (92, 93, 98)
WET_ASPHALT = (58, 61, 70)
WHITE = (236, 236, 232)
YELLOW = (244, 202, 54)
ROW_DEPTHS = ((0.12, 0.2), (0.2, 0.36), (0.36, 1.2))
"""Far and near ends of the three buildings of a closed row."""
_GREENS: tuple[Rgb, ...] = ((58, 132, 52), (74, 146, 48), (46, 118, 60))
_COATS: tuple[Rgb, ...] = ((206, 60, 50), (40, 90, 180), (240, 190, 50), (120, 60, 140))


def draw_sky(canvas: Canvas, rng: SceneRng) -> None:
    """Draw sun or moon, clouds or stars."""
    x, y = rng.uniform(0.4, 0.6), rng.uniform(0.07, 0.12)
    if canvas.weather == "wet":
        for _ in range(3):
            cloud_x, cloud_y = rng.uniform(0.1, 0.9), rng.uniform(0.02, 0.16)
            canvas.draw_ellipse(cloud_x, cloud_y, 0.24, 0.045, (168, 176, 186))
    elif canvas.time == "day":
        canvas.draw_ellipse(x, y, 0.055, 0.055, (255, 240, 150, 255))
        for _ in range(2):
            cloud_x, cloud_y = rng.uniform(0.1, 0.9), rng.uniform(0.1, 0.22)
            canvas.draw_ellipse(cloud_x, cloud_y, 0.11, 0.03, (250, 252, 255))
            canvas.draw_ellipse(cloud_x + 0.03, cloud_y - 0.025, 0.06, 0.03, (250, 252, 255))
    elif canvas.time == "dusk":
        canvas.draw_glow(x, y + 0.18, 0.2, (255, 200, 110))
        canvas.draw_ellipse(x, y + 0.18, 0.07, 0.07, (255, 206, 110, 255))
    else:
        for _ in range(10):
            canvas.draw_ellipse(rng(), rng.uniform(0.0, 0.35), 0.007, 0.007, (236, 238, 255, 255))
        canvas.draw_ellipse(x, y, 0.05, 0.05, (244, 242, 220, 255))
        canvas.draw_ellipse(x + 0.022, y - 0.012, 0.04, 0.042, (12, 15, 42, 255))


def draw_asphalt(canvas: Canvas, road: Sequence[Point], horizon: float, strength: int = 105) -> None:
    """Draw asphalt; wet, it is darker and mirrors everything above the horizon, drawn before."""
    if canvas.weather == "wet":
        canvas.draw_polygon(road, WET_ASPHALT)
        canvas.draw_reflection(road, horizon, strength)
    else:
        canvas.draw_polygon(road, ASPHALT)


def draw_puddles(canvas: Canvas, view: RoadCamera, rng: SceneRng, positions: Sequence[float]) -> None:
    """Draw puddles that reflect the sky at these positions, if it is wet."""
    if canvas.weather == "wet":
        for across in positions:
            near = rng.uniform(0.45, 0.9)
            x, y = view.project(across, near)
            sky = (178, 194, 214, 120) if canvas.time == "day" else (130, 120, 150, 90)
            canvas.draw_ellipse(x, y, 0.13 * near, 0.028 * near, sky)


def draw_dashed_line(canvas: Canvas, view: RoadCamera, across: float, width: float, paint: Rgb = WHITE) -> None:
    """Draw a dashed line; equal lengths on the ground are equal steps of 1 / near."""
    distance = 1.0
    while distance < 9.0:
        canvas.draw_polygon(
            view.ground_strip(across - width, across + width, 1 / (distance + 0.55), 1 / distance),
            canvas.apply_lamp_light(paint),
        )
        distance += 1.1


def draw_cars_along(
    canvas: Canvas, view: RoadCamera, attributes: Attributes, positions: Sequence[CarPosition], width: float
) -> None:
    """Draw cars on some of the slots, far ones first; cars on the left half face the viewer."""
    rng = SceneRng(CARS_STREAM, attributes.variation)
    chosen = rng.choose_several(positions, attributes.num_cars)
    for (across, near), colour in zip(chosen, attributes.car_colours, strict=True):
        x, y = view.project(across, near)
        x += rng.uniform(-0.02, 0.02) * near
        draw_car_along(canvas, x, y, width * near, colour, facing=across < 0)


def draw_building(
    canvas: Canvas,
    view: RoadCamera,
    side: int,
    span: tuple[float, float],
    height: float,
    wall: Rgb,
    pane: Callable[[], Paint],
) -> None:
    """Draw one building of a closed row along the road.

    `side` is -1 for left and 1 for right; `span` is (far, near).
    """
    across, (far, near) = side * 0.78, span
    canvas.draw_polygon(view.wall_polygon(across, far, near, 0.0, height), wall)
    start, stop = 1 / near, 1 / far
    columns, rows = 3, 3
    for column in range(columns):
        left = start + (stop - start) * (column + 0.22) / columns
        right = start + (stop - start) * (column + 0.78) / columns
        for row in range(rows):
            low, high = height * (row + 0.5) / (rows + 0.4), height * (row + 1.05) / (rows + 0.4)
            canvas.draw_polygon(view.wall_polygon(across, 1 / right, 1 / left, low, high), pane())


def draw(attributes: Attributes, size: int) -> NDArray[np.uint8]:
    """Render a scene as (size, size, 3); equal attributes give equal images."""
    canvas = Canvas(size, attributes.time, attributes.weather)
    rng = SceneRng(LAYOUT_STREAM, attributes.variation)
    _LAYOUTS[attributes.place](canvas, attributes, rng)
    return canvas.pixels()


def _draw_residential(canvas: Canvas, attributes: Attributes, rng: SceneRng) -> None:
    view = RoadCamera(horizon=rng.uniform(0.40, 0.42), vanishing_x=rng.uniform(0.48, 0.52))
    draw_sky(canvas, rng)
    canvas.draw_rectangle(0, view.horizon, 1, 1, (104, 150, 72))
    walls: tuple[Rgb, ...] = ((186, 84, 62), (214, 150, 104), (168, 66, 56), (226, 196, 150))
    roofs: tuple[Rgb, ...] = ((92, 56, 50), (74, 62, 66))
    for near in (0.2, 0.33, 0.55)[3 - attributes.num_houses // 2 :]:
        for side in (-1, 1):
            x, y = view.project(side * 1.04, near)
            lit = (rng.chance(0.7), rng.chance(0.7), rng.chance(0.7))
            wall, roof = rng.choose(walls), rng.choose(roofs)
            things.draw_house(canvas, x, y, 0.84 * near, 0.72 * near, wall, roof, lit)
    canvas.draw_polygon(view.ground_strip(-0.66, 0.66), (178, 174, 168))
    draw_asphalt(canvas, view.ground_strip(-0.5, 0.5), view.horizon)
    draw_puddles(canvas, view, rng, (-0.2, 0.15))
    for across, near in rng.choose_several(((-0.6, 0.3), (0.6, 0.4), (-0.6, 0.5), (0.6, 0.62)), attributes.num_trees):
        x, y = view.project(across, near)
        things.draw_tree(canvas, x, y, 0.75 * near, rng.choose(_GREENS))
    for _ in range(attributes.num_pedestrians):
        x, y = view.project(rng.choose((-0.57, 0.57)), rng.uniform(0.5, 0.7))
        things.draw_pedestrian(canvas, x, y, 0.2, rng.choose(_COATS))
    positions = ((-0.38, 0.28), (0.38, 0.32), (-0.38, 0.46), (0.38, 0.56), (-0.38, 0.78), (0.38, 0.9))
    draw_cars_along(canvas, view, attributes, positions, 0.36)


def _draw_towers(canvas: Canvas, attributes: Attributes, rng: SceneRng, base: float) -> None:
    """Draw office blocks left and right of a gap in the middle, seen from the front."""
    glass: tuple[Rgb, ...] = ((92, 122, 156), (126, 140, 158), (74, 98, 132), (150, 160, 172))
    right_half = attributes.num_houses // 2
    for side, num in ((-1, attributes.num_houses - right_half), (1, right_half)):
        width = 0.40 / num
        for index in range(num):
            left = 0.5 + side * (0.1 + width * (index + (1 if side < 0 else 0)))
            top = rng.uniform(0.03, 0.14) + 0.1 * (num - 1 - index)
            canvas.draw_rectangle(left, top, left + width * 0.96, base, rng.choose(glass))
            columns = 2 if num == 3 else 3
            step_x, step_y = width * 0.96 / (columns + 0.3), (base - top) / 5.3
            for column in range(columns):
                for row in range(5):
                    x, y = left + step_x * (column + 0.3), top + step_y * (row + 0.35)
                    pane = things.window_paint(canvas, rng.chance(0.6))
                    canvas.draw_rectangle(x, y, x + 0.68 * step_x, y + 0.55 * step_y, pane)


def _draw_intersection(canvas: Canvas, attributes: Attributes, rng: SceneRng) -> None:
    view = RoadCamera(horizon=rng.uniform(0.42, 0.44), vanishing_x=rng.uniform(0.49, 0.51))
    draw_sky(canvas, rng)
    base = 0.5
    canvas.draw_rectangle(0, view.horizon, 1, 1, (176, 176, 180))
    _draw_towers(canvas, attributes, rng, base)
    canvas.draw_rectangle(0, base, 1, 1, (186, 184, 182))
    draw_asphalt(canvas, view.ground_strip(-0.62, 0.62), view.horizon)
    draw_asphalt(canvas, [(0, 0.56), (1, 0.56), (1, 0.74), (0, 0.74)], view.horizon)
    draw_puddles(canvas, view, rng, (-0.35, 0.3))
    for left in (0.0, 0.12, 0.24, 0.68, 0.8, 0.92):
        canvas.draw_rectangle(left, 0.645, left + 0.07, 0.655, canvas.apply_lamp_light(YELLOW))
    for stripe in range(7):
        across = -0.58 + 0.175 * stripe
        canvas.draw_polygon(view.ground_strip(across, across + 0.1, 0.58, 0.7), canvas.apply_lamp_light(WHITE))
    canvas.draw_polygon(view.ground_strip(-0.02, 0.02, 0.78, 1.0), canvas.apply_lamp_light(YELLOW))
    positions = ((0.3, 0.635), (0.68, 0.635), (0.21, 0.73), (0.5, 0.73), (0.79, 0.73), (0.63, 0.97))
    cars = SceneRng(CARS_STREAM, attributes.variation)
    for (x, y), colour in zip(cars.choose_several(positions, attributes.num_cars), attributes.car_colours, strict=True):
        if y > 0.9:
            things.draw_car_along(canvas, x, y, 0.27, colour, facing=False)
        else:
            things.draw_car_across(canvas, x + cars.uniform(-0.02, 0.02), y, 0.25, colour, left=y < 0.7)
    for index in range(attributes.num_pedestrians):
        things.draw_pedestrian(canvas, (0.27, 0.78)[index % 2], 0.83, 0.22, rng.choose(_COATS))
    lit_lamp = rng.choose((0, 0, 1, 2, 2))
    for index in range(attributes.num_traffic_lights):
        things.draw_traffic_light(canvas, (0.09, 0.91)[index % 2], 0.92, 0.56, lit_lamp)


def _draw_highway(canvas: Canvas, attributes: Attributes, rng: SceneRng) -> None:
    view = RoadCamera(horizon=rng.uniform(0.43, 0.46), vanishing_x=rng.uniform(0.47, 0.53))
    draw_sky(canvas, rng)
    horizon = view.horizon
    canvas.draw_polygon(
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
    canvas.draw_rectangle(0, horizon, 1, 1, (186, 172, 108))
    for across, near in rng.choose_several(
        ((-2.6, 0.16), (2.4, 0.17), (-2.0, 0.22), (2.0, 0.23)), attributes.num_trees
    ):
        x, y = view.project(across, near)
        things.draw_tree(canvas, x, y, 0.9 * near, rng.choose(_GREENS))
    draw_asphalt(canvas, view.ground_strip(-1.15, 1.15), horizon)
    for across in (-1.06, 1.06):
        canvas.draw_polygon(view.ground_strip(across - 0.025, across + 0.025, 0.03), canvas.apply_lamp_light(WHITE))
    canvas.draw_polygon(view.ground_strip(-0.03, 0.03, 0.03), canvas.apply_lamp_light(YELLOW))
    for across in (-0.53, 0.53):
        draw_dashed_line(canvas, view, across, 0.025)
    draw_puddles(canvas, view, rng, (-0.3, 0.3))
    for across in (-1.26, 1.26):  # guard rails
        for near in (0.12, 0.16, 0.21, 0.28, 0.38):
            (x, y), (_, top) = view.project(across, near), view.project(across, near, 0.2)
            canvas.draw_rectangle(x - 0.02 * near, top, x + 0.02 * near, y, (110, 114, 120))
        canvas.draw_polygon(view.wall_polygon(across, 0.04, 0.6, 0.12, 0.24), (206, 212, 218))
    if attributes.num_signs:
        _draw_gantry(canvas, view)
    positions = ((-0.27, 0.14), (0.27, 0.15), (-0.8, 0.19), (0.8, 0.2), (-0.27, 0.28), (0.27, 0.33))
    draw_cars_along(canvas, view, attributes, positions, 0.44)


def _draw_gantry(canvas: Canvas, view: RoadCamera) -> None:
    near, steel = 0.24, (116, 120, 126)
    (left, ground), (right, top) = view.project(-1.36, near), view.project(1.36, near, 1.3)
    for post in (left, right):
        canvas.draw_rectangle(post - 0.01, top, post + 0.01, ground, steel)
    canvas.draw_rectangle(left, top, right, top + 0.018, steel)
    for start in (0.12, 0.56):
        panel = left + start * (right - left)
        canvas.draw_rectangle(
            panel, top - 0.035, panel + 0.32 * (right - left), top + 0.085, canvas.apply_lamp_light((238, 240, 240))
        )
        canvas.draw_rectangle(
            panel + 0.008,
            top - 0.027,
            panel + 0.32 * (right - left) - 0.008,
            top + 0.077,
            canvas.apply_lamp_light((14, 112, 72)),
        )
        canvas.draw_rectangle(
            panel + 0.035,
            top + 0.012,
            panel + 0.32 * (right - left) - 0.035,
            top + 0.034,
            canvas.apply_lamp_light((238, 240, 240)),
        )


def _draw_rainy_street(canvas: Canvas, attributes: Attributes, rng: SceneRng) -> None:
    view = RoadCamera(horizon=rng.uniform(0.39, 0.41), vanishing_x=rng.uniform(0.48, 0.52))
    canvas.draw_polygon([(0, 0), (1, 0), (1, 0.5), (0, 0.5)], (60, 70, 92, 90))
    canvas.draw_rectangle(0, view.horizon, 1, 1, (70, 76, 90))
    walls: tuple[Rgb, ...] = ((84, 92, 116), (104, 96, 108), (70, 84, 110), (116, 104, 104))

    def pane() -> Paint:
        # Lamps are on by day too: their reflections make the street look wet.
        return (255, 206, 112, 255) if rng.chance(0.55) else things.window_paint(canvas, False)

    for far, near in ROW_DEPTHS[3 - attributes.num_houses // 2 :]:
        for side in (-1, 1):
            draw_building(canvas, view, side, (far, near), rng.uniform(1.3, 1.55), rng.choose(walls), pane)
    canvas.draw_polygon(view.ground_strip(-0.78, 0.78), (96, 102, 116))
    canvas.draw_reflection(view.ground_strip(-0.78, 0.78), view.horizon, 110)
    draw_asphalt(canvas, view.ground_strip(-0.56, 0.56), view.horizon, 165)
    draw_puddles(canvas, view, rng, (-0.3, 0.05, 0.35))
    draw_dashed_line(canvas, view, 0.0, 0.02, (190, 196, 204))
    for side in (-1, 1):
        x, y = view.project(side * 0.64, 0.5)
        things.draw_street_lamp(canvas, x, y, 0.5, -side)
        lamp = x - side * 0.11
        canvas.draw_rectangle(lamp - 0.015, y, lamp + 0.015, y + 0.22, (255, 220, 140, 110))
    draw_cars_along(canvas, view, attributes, ((-0.28, 0.3), (0.28, 0.4), (-0.28, 0.62), (0.28, 0.85)), 0.36)
    for index in range(attributes.num_pedestrians):
        x, y = view.project((0.68, -0.68)[index % 2], rng.uniform(0.52, 0.6))
        things.draw_pedestrian(canvas, x, y, 0.22, rng.choose(_COATS))
        things.draw_umbrella(canvas, x, y, 0.22, rng.choose(_COATS))
    for _ in range(34):
        x, y, length = rng.uniform(-0.05, 1.05), rng.uniform(-0.1, 0.95), rng.uniform(0.07, 0.13)
        canvas.draw_line((x, y), (x - 0.22 * length, y + length), 0.006, (206, 216, 232, 120))


def _draw_suburban(canvas: Canvas, attributes: Attributes, rng: SceneRng) -> None:
    bend = rng.choose((-1, 1)) * rng.uniform(0.3, 0.4)
    view = RoadCamera(horizon=rng.uniform(0.44, 0.46), vanishing_x=0.5 - 0.35 * bend, bend=bend)
    draw_sky(canvas, rng)
    canvas.draw_polygon(
        [(0, 0.52), (0, 0.40), (0.25, 0.37), (0.5, 0.41), (0.75, 0.37), (1, 0.40), (1, 0.52)], (64, 118, 70)
    )
    canvas.draw_rectangle(0, view.horizon, 1, 1, (112, 182, 72))
    canvas.draw_polygon(view.ground_strip(-0.42, 0.42), (206, 200, 188))
    draw_asphalt(canvas, view.ground_strip(-0.34, 0.34), view.horizon)
    draw_puddles(canvas, view, rng, (-0.15, 0.12))
    draw_dashed_line(canvas, view, 0.0, 0.018)
    walls: tuple[Rgb, ...] = ((244, 236, 214), (206, 222, 232), (246, 216, 176))
    roofs: tuple[Rgb, ...] = ((176, 72, 54), (120, 84, 70), (84, 98, 122))
    houses = ((0.36, 0.49), (0.66, 0.49), (0.2, 0.65), (0.81, 0.65))
    for x, y in houses[4 - attributes.num_houses :]:
        width = 0.13 if y < 0.55 else 0.28
        lit = (rng.chance(0.7), rng.chance(0.7), rng.chance(0.7))
        things.draw_house(canvas, x, y, width, 0.55 * width, rng.choose(walls), rng.choose(roofs), lit)
    trees = (
        (-0.03, 0.8, 0.42),
        (1.03, 0.8, 0.42),
        (0.36, 0.57, 0.17),
        (0.66, 0.57, 0.17),
        (0.03, 0.56, 0.2),
        (0.97, 0.56, 0.2),
    )
    for x, y, height in sorted(trees[: attributes.num_trees], key=lambda tree: tree[1]):
        things.draw_tree(canvas, x, y, height, rng.choose(_GREENS))
    draw_cars_along(canvas, view, attributes, ((-0.17, 0.34), (0.17, 0.55), (-0.17, 0.8)), 0.27)


def _draw_parking_lot(canvas: Canvas, attributes: Attributes, rng: SceneRng) -> None:
    view = RoadCamera(horizon=-0.25, vanishing_x=rng.uniform(0.48, 0.52))
    draw_sky(canvas, rng)
    canvas.draw_rectangle(0, 0.2, 1, 0.3, (84, 150, 70))
    left = rng.uniform(0.2, 0.3)
    canvas.draw_rectangle(left, 0.08, left + 0.5, 0.27, (232, 222, 204))
    canvas.draw_rectangle(left, 0.08, left + 0.5, 0.13, rng.choose(((196, 40, 44), (30, 90, 170), (230, 130, 30))))
    for pane in range(4):
        x = left + 0.03 + 0.118 * pane
        canvas.draw_rectangle(x, 0.16, x + 0.09, 0.25, things.window_paint(canvas, True))
    for x in ((0.06, 0.94, 0.15, 0.85))[: attributes.num_trees]:
        things.draw_tree(canvas, x, 0.29, 0.22, rng.choose(_GREENS))
    draw_asphalt(canvas, [(0, 0.29), (1, 0.29), (1, 1), (0, 1)], 0.29, 50)
    draw_puddles(canvas, view, rng, (-0.3, 0.3))
    rows = ((0.52, 0.66), (0.78, 0.99))
    for far, near in rows:
        for line in range(7):
            across = -0.75 + 0.25 * line
            canvas.draw_polygon(
                view.ground_strip(across - 0.013, across + 0.013, far, near), canvas.apply_lamp_light(WHITE)
            )
        canvas.draw_polygon(view.ground_strip(-0.76, 0.76, far - 0.008, far + 0.008), canvas.apply_lamp_light(WHITE))
    positions = [(-0.625 + 0.25 * bay, near) for near in (0.65, 0.975) for bay in range(6) if near < 0.9 or 0 < bay < 5]
    cars = SceneRng(CARS_STREAM, attributes.variation)
    for (across, near), colour in zip(
        cars.choose_several(positions, attributes.num_cars), attributes.car_colours, strict=True
    ):
        x, y = view.project(across, near)
        things.draw_car_above(canvas, x, y, 0.205 * near, colour)


def _draw_city_crossing(canvas: Canvas, attributes: Attributes, rng: SceneRng) -> None:
    view = RoadCamera(horizon=rng.uniform(0.37, 0.39), vanishing_x=rng.uniform(0.48, 0.52))
    draw_sky(canvas, rng)
    canvas.draw_rectangle(0, view.horizon, 1, 1, (196, 188, 178))
    walls: tuple[Rgb, ...] = ((232, 190, 128), (222, 160, 110), (240, 216, 166), (206, 138, 104))
    awnings: tuple[Rgb, ...] = ((200, 48, 48), (36, 120, 96), (44, 84, 168))

    def pane() -> Paint:
        return things.window_paint(canvas, rng.chance(0.55))

    for far, near in ROW_DEPTHS[3 - attributes.num_houses // 2 :]:
        for side in (-1, 1):
            height = rng.uniform(1.15, 1.35)
            draw_building(canvas, view, side, (far, near), height, rng.choose(walls), pane)
            canvas.draw_polygon(view.wall_polygon(side * 0.72, far, near, 0.34, 0.46), rng.choose(awnings))
    canvas.draw_polygon(view.ground_strip(-0.78, 0.78), (204, 198, 190))
    draw_asphalt(canvas, view.ground_strip(-0.6, 0.6), view.horizon)
    draw_cars_along(canvas, view, attributes, ((-0.27, 0.26), (0.27, 0.32), (-0.27, 0.46)), 0.38)
    canvas.draw_polygon(view.ground_strip(-2, 2, 0.6, 0.9), WET_ASPHALT if canvas.weather == "wet" else ASPHALT)
    draw_puddles(canvas, view, rng, (-0.3, 0.35))
    for stripe in range(8):
        across = -0.88 + 0.235 * stripe
        canvas.draw_polygon(
            view.ground_strip(across, across + 0.13, 0.62, 0.88), canvas.apply_lamp_light((246, 246, 242))
        )
    for index in range(attributes.num_signs):
        things.draw_sign(canvas, (0.12, 0.88)[index % 2], 0.78, 0.46, rng.choose((0, 1, 2, 3)))
    positions = rng.choose_several((0.27, 0.42, 0.57, 0.72), attributes.num_pedestrians)
    for x in positions:
        things.draw_pedestrian(canvas, x + rng.uniform(-0.03, 0.03), 0.86, 0.32, rng.choose(_COATS))


def _draw_rural(canvas: Canvas, attributes: Attributes, rng: SceneRng) -> None:
    bend = rng.choose((-1, 1)) * rng.uniform(0.55, 0.7)
    view = RoadCamera(horizon=rng.uniform(0.46, 0.48), vanishing_x=0.5 - 0.2 * bend, bend=bend)
    draw_sky(canvas, rng)
    canvas.draw_ellipse(rng.uniform(0.1, 0.25), 0.52, 0.42, 0.2, (104, 142, 116))
    canvas.draw_ellipse(rng.uniform(0.75, 0.9), 0.52, 0.45, 0.17, (124, 158, 96))
    canvas.draw_rectangle(0, view.horizon, 1, 1, (150, 176, 62))
    canvas.draw_polygon([(0, 0.62), (1, 0.56), (1, 1), (0, 1)], (134, 164, 54))
    canvas.draw_polygon([(0, 0.8), (1, 0.74), (1, 1), (0, 1)], (118, 150, 48))
    if attributes.num_houses:
        x = 0.2 if bend < 0 else 0.8
        things.draw_house(canvas, x, 0.56, 0.17, 0.09, (176, 44, 38), (110, 104, 104), (True, True, True))
    for x, y, height in rng.choose_several(
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
        things.draw_conifer(canvas, x, y, height, rng.choose(_GREENS))
    track = view.ground_strip(-0.24, 0.24)
    canvas.draw_polygon(view.ground_strip(-0.28, 0.28), (176, 150, 104))
    canvas.draw_polygon(track, (150, 128, 96) if canvas.weather == "dry" else (92, 84, 76))
    if canvas.weather == "wet":
        canvas.draw_reflection(track, view.horizon, 80)
    draw_puddles(canvas, view, rng, (-0.05,))
    _draw_fence(canvas, view)
    draw_cars_along(canvas, view, attributes, ((-0.1, 0.3), (0.1, 0.55)), 0.26)


def _draw_fence(canvas: Canvas, view: RoadCamera) -> None:
    side = -0.42 if view.bend > 0 else 0.42
    wood, depths = (142, 106, 70), (0.22, 0.29, 0.38, 0.5, 0.64, 0.8, 1.0)
    for near in depths:
        (x, y), (_, top) = view.project(side, near), view.project(side, near, 0.22)
        canvas.draw_rectangle(x - 0.016 * near, top, x + 0.016 * near, y, wood)
    for low, high in ((0.07, 0.105), (0.15, 0.185)):
        edge = [view.project(side, near, high) for near in depths] + [
            view.project(side, near, low) for near in reversed(depths)
        ]
        canvas.draw_polygon(edge, wood)


_LAYOUTS: dict[StreetPlace, Callable[[Canvas, Attributes, SceneRng], None]] = {
    "residential": _draw_residential,
    "urban intersection": _draw_intersection,
    "highway": _draw_highway,
    "rainy street": _draw_rainy_street,
    "suburban": _draw_suburban,
    "parking lot": _draw_parking_lot,
    "city crossing": _draw_city_crossing,
    "rural": _draw_rural,
}
