"""A canvas in unit coordinates with light by time of day, and a camera along a road."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from halation.data.streets.scene_attributes import TimeOfDay, Weather

Point = tuple[float, float]
Rgb = tuple[int, int, int]
# Three numbers are a surface, which is shaded by the time of day. With a fourth number, the opacity, the colour is used
# unshaded: lamps, lit windows, shadows, films of water.
Paint = Rgb | tuple[int, int, int, int]

OVERSAMPLING = 4
OVERSAMPLING_LARGE = 2
"""Above `LARGE_SIZE` pixels, where aliasing is invisible and more oversampling would cost time."""
LARGE_SIZE = 256

_SKY: dict[tuple[TimeOfDay, Weather], tuple[Rgb, Rgb]] = {
    ("day", "dry"): ((62, 138, 226), (196, 228, 250)),
    ("day", "wet"): ((138, 150, 164), (206, 212, 218)),
    ("dusk", "dry"): ((84, 58, 128), (255, 158, 84)),
    ("dusk", "wet"): ((82, 66, 100), (206, 140, 116)),
    ("night", "dry"): ((6, 9, 32), (34, 42, 84)),
    ("night", "wet"): ((16, 18, 30), (48, 52, 72)),
}
_AMBIENT: dict[tuple[TimeOfDay, Weather], tuple[float, float, float]] = {
    ("day", "dry"): (1.0, 1.0, 1.0),
    ("day", "wet"): (0.80, 0.83, 0.88),
    ("dusk", "dry"): (0.74, 0.56, 0.56),
    ("dusk", "wet"): (0.62, 0.50, 0.54),
    ("night", "dry"): (0.33, 0.36, 0.50),
    ("night", "wet"): (0.31, 0.33, 0.43),
}


@lru_cache(maxsize=32)
def _draw_sky_gradient(time: TimeOfDay, weather: Weather, side: int) -> Image.Image:
    """Return an empty canvas with the gradient of the sky over the upper half."""
    top, bottom = (np.array(colour, dtype=np.float64) for colour in _SKY[time, weather])
    depth = np.minimum(np.linspace(0.0, 1.0, side) / 0.5, 1.0)[:, None]
    column = np.rint(top + (bottom - top) * depth).astype(np.uint8)
    return Image.fromarray(np.repeat(column[:, None, :], side, axis=1))


class Canvas:
    """A square of side 1, y down, rendered with oversampling for antialiased edges."""

    def __init__(self, size: int, time: TimeOfDay, weather: Weather) -> None:
        self.size = size
        self.time = time
        self.weather = weather
        self.is_dark = time != "day"
        self.side = size * (OVERSAMPLING if size <= LARGE_SIZE else OVERSAMPLING_LARGE)
        self.image = _draw_sky_gradient(time, weather, self.side).copy()
        self._ambient = _AMBIENT[time, weather]
        self._opaque_draw = ImageDraw.Draw(self.image)
        self._blending_draw = ImageDraw.Draw(self.image, "RGBA")

    def _resolve_paint(self, paint: Paint) -> tuple[ImageDraw.ImageDraw, tuple[int, ...]]:
        if len(paint) == 4:
            return (self._opaque_draw, paint[:3]) if paint[3] == 255 else (self._blending_draw, paint)
        red, green, blue = self._ambient
        return self._opaque_draw, (int(paint[0] * red), int(paint[1] * green), int(paint[2] * blue))

    def draw_polygon(self, points: Sequence[Point], paint: Paint) -> None:
        brush, colour = self._resolve_paint(paint)
        side = self.side
        brush.polygon([(x * side, y * side) for x, y in points], fill=colour)

    def draw_rectangle(self, left: float, top: float, right: float, bottom: float, paint: Paint) -> None:
        brush, colour = self._resolve_paint(paint)
        x, y = round(left * self.side), round(top * self.side)
        # Pillow includes the last row and column.
        far_x, far_y = max(x, round(right * self.side) - 1), max(y, round(bottom * self.side) - 1)
        brush.rectangle((x, y, far_x, far_y), fill=colour)

    def draw_ellipse(self, x: float, y: float, radius_x: float, radius_y: float, paint: Paint) -> None:
        brush, colour = self._resolve_paint(paint)
        side = self.side
        brush.ellipse(
            ((x - radius_x) * side, (y - radius_y) * side, (x + radius_x) * side, (y + radius_y) * side), fill=colour
        )

    def draw_line(self, start: Point, end: Point, thickness: float, paint: Paint) -> None:
        brush, colour = self._resolve_paint(paint)
        side = self.side
        points = (start[0] * side, start[1] * side, end[0] * side, end[1] * side)
        brush.line(points, fill=colour, width=max(1, round(thickness * side)))

    def apply_lamp_light(self, paint: Rgb) -> Paint:
        """Return a surface near street lamps, dimmed less: a car's colour stays visible at night."""
        red, green, blue = (0.45 + 0.55 * part for part in self._ambient)
        return int(paint[0] * red), int(paint[1] * green), int(paint[2] * blue), 255

    def draw_glow(self, x: float, y: float, radius: float, colour: Rgb) -> None:
        """Draw a halo around a lamp if it is dark."""
        if self.is_dark:
            for share, opacity in ((1.0, 28), (0.65, 40), (0.35, 60)):
                self.draw_ellipse(x, y, radius * share, radius * share, (*colour, opacity))

    def draw_reflection(self, road: Sequence[Point], horizon: float, strength: int) -> None:
        """Draw the image above the horizon, mirrored, on a wet road."""
        side = self.side
        line = round(horizon * side)
        above = self.image.crop((0, 0, side, line)).transpose(Image.Transpose.FLIP_TOP_BOTTOM)
        above = above.resize((side, side - line), Image.Resampling.NEAREST)
        mask = Image.new("L", (side, side - line))
        ImageDraw.Draw(mask).polygon([(x * side, y * side - line) for x, y in road], fill=strength)
        self.image.paste(above, (0, line), mask)

    def pixels(self) -> NDArray[np.uint8]:
        small = self.image.resize((self.size, self.size), Image.Resampling.HAMMING, reducing_gap=2.0)
        return np.array(small, dtype=np.uint8)


@dataclass(frozen=True, kw_only=True)
class RoadCamera:
    """A level camera: ground positions are (across, near).

    `near` is 1 at the lower edge of the image and 0 at the horizon.
    """

    horizon: float
    vanishing_x: float
    bend: float = 0.0
    """Sideways displacement of the road in the middle distance."""

    def project(self, across: float, near: float, height: float = 0.0) -> Point:
        x = self.vanishing_x + across * near + self.bend * near * (1.0 - near)
        return x, self.horizon + (1.0 - self.horizon) * near - height * near

    def ground_strip(self, left: float, right: float, far: float = 0.0, near: float = 1.0) -> list[Point]:
        """Return a strip of ground along the road between two distances."""
        steps = (0.0, 1.0) if self.bend == 0.0 else (0.0, 0.15, 0.3, 0.45, 0.6, 0.8, 1.0)
        depths = [far + (near - far) * step for step in steps]
        return [self.project(left, depth) for depth in depths] + [
            self.project(right, depth) for depth in reversed(depths)
        ]

    def wall_polygon(self, across: float, far: float, near: float, low: float, high: float) -> list[Point]:
        """Return a section of a wall along the road."""
        corners = ((far, low), (far, high), (near, high), (near, low))
        return [self.project(across, depth, height) for depth, height in corners]
