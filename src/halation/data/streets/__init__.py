"""The embedded dataset: small street scenes with captions, generated from their number."""

from halation.data.streets.captions import DRIVING_PROMPTS, Mentioned, caption, mentioned
from halation.data.streets.dataset import Streets
from halation.data.streets.scene_attributes import CAR_COLOURS, PLACES, TIMES, WEATHERS, Attributes, scene
from halation.data.streets.scene_layouts import draw

__all__ = [
    "CAR_COLOURS",
    "DRIVING_PROMPTS",
    "PLACES",
    "TIMES",
    "WEATHERS",
    "Attributes",
    "Mentioned",
    "Streets",
    "caption",
    "draw",
    "mentioned",
    "scene",
]
