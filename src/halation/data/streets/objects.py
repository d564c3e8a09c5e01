"""Draws the objects of a street; positions are where an object touches the ground."""

from __future__ import annotations

from halation.data.streets.canvas import Canvas, Paint, Rgb

CAR_PAINT: dict[str, Rgb] = {
    "red": (214, 34, 36),
    "blue": (34, 84, 206),
    "white": (242, 242, 240),
    "black": (38, 38, 46),
    "yellow": (246, 200, 24),
    "silver": (158, 166, 174),
}
_GLASS = (70, 100, 128)
_RUBBER = (22, 22, 24)


def dim(paint: Rgb, factor: float) -> Rgb:
    return int(paint[0] * factor), int(paint[1] * factor), int(paint[2] * factor)


def _draw_car_lamps(canvas: Canvas, x: float, y: float, width: float, facing: bool) -> None:
    """Draw a car's two lamps, with their reflections on a wet road and glow in the dark."""
    colour = (255, 244, 190) if facing else (255, 38, 28)
    for lamp in (x - 0.36 * width, x + 0.36 * width):
        canvas.draw_rectangle(
            lamp - 0.1 * width, y - 0.34 * width, lamp + 0.1 * width, y - 0.23 * width, (*colour, 255)
        )
        canvas.draw_glow(lamp, y - 0.28 * width, 0.24 * width, colour)
        if canvas.weather == "wet":
            canvas.draw_rectangle(lamp - 0.07 * width, y, lamp + 0.07 * width, y + 0.4 * width, (*colour, 90))


def draw_car_along(canvas: Canvas, x: float, y: float, width: float, colour: str, facing: bool) -> None:
    """Draw a car on the viewer's road, from behind or facing; (x, y) is its ground centre."""
    paint = CAR_PAINT[colour]
    half = width / 2
    canvas.draw_ellipse(x, y - 0.01 * width, 0.58 * width, 0.09 * width, (0, 0, 0, 110))
    for side in (-0.36 * width, 0.36 * width):
        canvas.draw_rectangle(x + side - 0.1 * width, y - 0.2 * width, x + side + 0.1 * width, y, _RUBBER)
    roof, belt, sill = y - 0.78 * width, y - 0.46 * width, y - 0.1 * width
    canvas.draw_polygon(
        [(x - 0.3 * width, roof), (x + 0.3 * width, roof), (x + 0.44 * width, belt), (x - 0.44 * width, belt)],
        canvas.apply_lamp_light(dim(paint, 0.86)),
    )
    canvas.draw_polygon(
        [
            (x - 0.25 * width, roof + 0.07 * width),
            (x + 0.25 * width, roof + 0.07 * width),
            (x + 0.36 * width, belt),
            (x - 0.36 * width, belt),
        ],
        canvas.apply_lamp_light(_GLASS),
    )
    corner = 0.06 * width
    canvas.draw_polygon(
        [
            (x - half, belt + corner),
            (x - half + corner, belt),
            (x + half - corner, belt),
            (x + half, belt + corner),
            (x + half, sill),
            (x - half, sill),
        ],
        canvas.apply_lamp_light(paint),
    )
    canvas.draw_rectangle(x - half, sill - 0.07 * width, x + half, sill, canvas.apply_lamp_light(dim(paint, 0.6)))
    _draw_car_lamps(canvas, x, y, width, facing)


def draw_car_across(canvas: Canvas, x: float, y: float, length: float, colour: str, left: bool) -> None:
    """Draw a car on a crossing road, from the side."""
    paint = CAR_PAINT[colour]
    turn = -length if left else length
    profile = (
        (-0.5, 0.09),
        (-0.5, 0.24),
        (-0.42, 0.27),
        (-0.3, 0.42),
        (0.08, 0.42),
        (0.24, 0.27),
        (0.46, 0.23),
        (0.5, 0.09),
    )
    canvas.draw_ellipse(x, y, 0.52 * length, 0.05 * length, (0, 0, 0, 110))
    canvas.draw_polygon(
        [(x + turn * across, y - length * up) for across, up in profile], canvas.apply_lamp_light(paint)
    )
    for window in (
        ((-0.34, 0.28), (-0.26, 0.385), (-0.12, 0.385), (-0.12, 0.28)),
        ((-0.08, 0.28), (-0.08, 0.385), (0.05, 0.385), (0.15, 0.28)),
    ):
        canvas.draw_polygon(
            [(x + turn * across, y - length * up) for across, up in window], canvas.apply_lamp_light(_GLASS)
        )
    for wheel in (-0.29, 0.29):
        canvas.draw_ellipse(x + turn * wheel, y - 0.085 * length, 0.095 * length, 0.095 * length, _RUBBER)
        canvas.draw_ellipse(x + turn * wheel, y - 0.085 * length, 0.045 * length, 0.045 * length, (150, 150, 156))
    front, back = x + 0.47 * turn, x - 0.48 * turn
    canvas.draw_ellipse(front, y - 0.18 * length, 0.03 * length, 0.03 * length, (255, 244, 190, 255))
    canvas.draw_ellipse(back, y - 0.2 * length, 0.025 * length, 0.03 * length, (255, 38, 28, 255))
    canvas.draw_glow(front, y - 0.18 * length, 0.14 * length, (255, 244, 190))


def draw_car_above(canvas: Canvas, x: float, y: float, width: float, colour: str) -> None:
    """Draw a parked car slightly from above: boot, rear window, roof, windscreen, bonnet."""
    paint = CAR_PAINT[colour]
    canvas.draw_ellipse(x + 0.04 * width, y - 0.5 * width, 0.58 * width, 0.62 * width, (0, 0, 0, 90))
    rows = (  # from far to near: half width and height of the far edge, then of the near edge
        (0.36, 1.22, 0.44, 0.98, paint),
        (0.40, 0.98, 0.36, 0.86, _GLASS),
        (0.36, 0.86, 0.40, 0.56, dim(paint, 0.93)),
        (0.40, 0.56, 0.46, 0.38, _GLASS),
        (0.47, 0.40, 0.50, 0.28, paint),
        (0.50, 0.28, 0.50, 0.10, dim(paint, 0.78)),
    )
    for wheel in (-0.38, 0.38):
        canvas.draw_rectangle(x + (wheel - 0.1) * width, y - 0.16 * width, x + (wheel + 0.1) * width, y, _RUBBER)
    canvas.draw_polygon(
        [
            (x - 0.42 * width, y - 1.1 * width),
            (x + 0.42 * width, y - 1.1 * width),
            (x + 0.5 * width, y - 0.28 * width),
            (x - 0.5 * width, y - 0.28 * width),
        ],
        canvas.apply_lamp_light(dim(paint, 0.82)),
    )
    for far_half, far_up, near_half, near_up, surface in rows:
        far_y, near_y = y - far_up * width, y - near_up * width
        canvas.draw_polygon(
            [
                (x - far_half * width, far_y),
                (x + far_half * width, far_y),
                (x + near_half * width, near_y),
                (x - near_half * width, near_y),
            ],
            canvas.apply_lamp_light(surface),
        )
    for lamp in (-0.38, 0.38):
        canvas.draw_rectangle(
            x + (lamp - 0.09) * width, y - 0.27 * width, x + (lamp + 0.09) * width, y - 0.18 * width, (196, 30, 26)
        )


def draw_tree(canvas: Canvas, x: float, y: float, height: float, green: Rgb) -> None:
    canvas.draw_ellipse(x, y, 0.28 * height, 0.05 * height, (0, 0, 0, 80))
    canvas.draw_rectangle(x - 0.05 * height, y - 0.45 * height, x + 0.05 * height, y, (96, 66, 42))
    for across, up, radius, shade in ((-0.15, 0.55, 0.22, 0.8), (0.16, 0.57, 0.21, 0.8), (0.0, 0.73, 0.27, 1.0)):
        canvas.draw_ellipse(x + across * height, y - up * height, radius * height, radius * height, dim(green, shade))
    canvas.draw_ellipse(x - 0.07 * height, y - 0.8 * height, 0.12 * height, 0.11 * height, dim(green, 1.22))


def draw_conifer(canvas: Canvas, x: float, y: float, height: float, green: Rgb) -> None:
    canvas.draw_rectangle(x - 0.04 * height, y - 0.2 * height, x + 0.04 * height, y, (86, 60, 40))
    for low, high, half, shade in ((0.14, 0.6, 0.25, 0.8), (0.36, 0.8, 0.2, 0.95), (0.58, 1.0, 0.14, 1.1)):
        canvas.draw_polygon(
            [(x - half * height, y - low * height), (x + half * height, y - low * height), (x, y - high * height)],
            dim(green, shade),
        )


def window_paint(canvas: Canvas, lit: bool) -> Paint:
    """Draw a window pane, in a warm colour if the room is lit and it is dark outside."""
    if canvas.is_dark and lit:
        return (255, 214, 120, 255)
    return (112, 150, 182)


def draw_house(
    canvas: Canvas,
    x: float,
    y: float,
    width: float,
    height: float,
    wall: Rgb,
    roof: Rgb,
    lit: tuple[bool, bool, bool],
) -> None:
    """Draw a gabled house; `height` is that of the wall without the roof."""
    half, eaves = width / 2, y - height
    canvas.draw_rectangle(x - half, eaves, x + half, y, wall)
    canvas.draw_polygon([(x - 0.58 * width, eaves), (x + 0.58 * width, eaves), (x, eaves - 0.45 * width)], roof)
    canvas.draw_polygon(
        [(x - 0.36 * width, eaves), (x + 0.36 * width, eaves), (x, eaves - 0.27 * width)], dim(wall, 0.9)
    )
    frame: Paint = (238, 236, 228)
    pane, tall = 0.1 * width, 0.24 * height
    for across, up, inside in ((-0.27, 0.68, lit[0]), (0.27, 0.68, lit[1]), (-0.27, 0.28, lit[2])):
        middle_x, middle_y = x + across * width, y - up * height
        canvas.draw_rectangle(
            middle_x - 1.25 * pane, middle_y - 0.6 * tall, middle_x + 1.25 * pane, middle_y + 0.6 * tall, frame
        )
        canvas.draw_rectangle(
            middle_x - pane,
            middle_y - 0.45 * tall,
            middle_x + pane,
            middle_y + 0.45 * tall,
            window_paint(canvas, inside),
        )
    canvas.draw_rectangle(x + 0.14 * width, y - 0.46 * height, x + 0.36 * width, y, dim(roof, 0.7))


def draw_pedestrian(canvas: Canvas, x: float, y: float, height: float, coat: Rgb) -> None:
    canvas.draw_ellipse(x, y, 0.16 * height, 0.03 * height, (0, 0, 0, 90))
    trousers = canvas.apply_lamp_light((44, 48, 72))
    canvas.draw_polygon(
        [
            (x - 0.1 * height, y),
            (x - 0.02 * height, y),
            (x + 0.02 * height, y - 0.45 * height),
            (x - 0.08 * height, y - 0.45 * height),
        ],
        trousers,
    )
    canvas.draw_polygon(
        [
            (x + 0.03 * height, y),
            (x + 0.11 * height, y),
            (x + 0.08 * height, y - 0.45 * height),
            (x - 0.01 * height, y - 0.45 * height),
        ],
        trousers,
    )
    canvas.draw_polygon(
        [
            (x - 0.13 * height, y - 0.4 * height),
            (x + 0.13 * height, y - 0.4 * height),
            (x + 0.1 * height, y - 0.82 * height),
            (x - 0.1 * height, y - 0.82 * height),
        ],
        canvas.apply_lamp_light(coat),
    )
    canvas.draw_ellipse(x, y - 0.9 * height, 0.085 * height, 0.095 * height, canvas.apply_lamp_light((224, 176, 140)))


def draw_umbrella(canvas: Canvas, x: float, y: float, height: float, cloth: Rgb) -> None:
    """Draw the umbrella of a pedestrian of that height at (x, y)."""
    top, rim = y - 1.32 * height, y - 0.98 * height
    canvas.draw_polygon(
        [
            (x - 0.34 * height, rim),
            (x - 0.24 * height, rim - 0.2 * height),
            (x, top),
            (x + 0.24 * height, rim - 0.2 * height),
            (x + 0.34 * height, rim),
        ],
        canvas.apply_lamp_light(cloth),
    )


def draw_traffic_light(canvas: Canvas, x: float, y: float, height: float, lit_lamp: int) -> None:
    """Draw a traffic light; `lit_lamp` is 0 for red, 1 for amber, 2 for green."""
    canvas.draw_rectangle(x - 0.035 * height, y - 0.6 * height, x + 0.035 * height, y, (52, 54, 58))
    canvas.draw_rectangle(x - 0.13 * height, y - height, x + 0.13 * height, y - 0.44 * height, (30, 31, 34))
    lamps = ((255, 48, 36), (255, 190, 40), (48, 236, 96))
    for index, lamp in enumerate(lamps):
        middle = y - (0.9 - 0.18 * index) * height
        paint: Paint = (*lamp, 255) if index == lit_lamp else dim(lamp, 0.24)
        canvas.draw_ellipse(x, middle, 0.085 * height, 0.085 * height, paint)
    canvas.draw_glow(x, y - (0.9 - 0.18 * lit_lamp) * height, 0.3 * height, lamps[lit_lamp])


def draw_sign(canvas: Canvas, x: float, y: float, height: float, shape: int) -> None:
    """Draw a traffic sign: no entry, blue crossing square, warning triangle or yellow diamond."""
    canvas.draw_rectangle(x - 0.03 * height, y - 0.75 * height, x + 0.03 * height, y, (128, 132, 136))
    middle, radius = y - 0.8 * height, 0.2 * height
    red, white = canvas.apply_lamp_light((216, 24, 30)), canvas.apply_lamp_light((250, 250, 250))
    if shape == 0:
        canvas.draw_ellipse(x, middle, radius, radius, red)
        canvas.draw_rectangle(x - 0.7 * radius, middle - 0.25 * radius, x + 0.7 * radius, middle + 0.25 * radius, white)
    elif shape == 1:
        canvas.draw_rectangle(
            x - radius, middle - radius, x + radius, middle + radius, canvas.apply_lamp_light((20, 84, 190))
        )
        canvas.draw_polygon(
            [
                (x - 0.7 * radius, middle + 0.6 * radius),
                (x + 0.7 * radius, middle + 0.6 * radius),
                (x, middle - 0.7 * radius),
            ],
            white,
        )
    elif shape == 2:
        for scale, paint in ((1.15, red), (0.6, white)):
            reach = radius * scale
            canvas.draw_polygon(
                [(x - reach, middle + 0.75 * reach), (x + reach, middle + 0.75 * reach), (x, middle - reach)], paint
            )
    else:
        reach = 1.1 * radius
        canvas.draw_polygon(
            [(x - reach, middle), (x, middle - reach), (x + reach, middle), (x, middle + reach)],
            canvas.apply_lamp_light((250, 196, 20)),
        )


def draw_street_lamp(canvas: Canvas, x: float, y: float, height: float, inward: float) -> None:
    canvas.draw_rectangle(x - 0.02 * height, y - height, x + 0.02 * height, y, (60, 62, 68))
    arm = x + inward * 0.22 * height
    canvas.draw_rectangle(min(x, arm), y - height, max(x, arm), y - 0.96 * height, (60, 62, 68))
    canvas.draw_ellipse(arm, y - 0.94 * height, 0.06 * height, 0.04 * height, (255, 226, 150, 255))
    canvas.draw_glow(arm, y - 0.94 * height, 0.26 * height, (255, 214, 130))
