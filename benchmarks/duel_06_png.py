"""Duel 6: lossless PNG encoding on one core, against Pillow.

`halation.images.png_codec` is compared with Pillow at its default and at its fastest level. Photographs are
synthesized, since none can be shipped: detail at every scale whose amplitude falls with frequency as in natural images,
overlapping objects with edges, and grain. The limit is the entropy coder alone, on filtered bytes.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from benchmarks import measure
from halation.images.png_codec import CODERS, Pixels, encode_png, fastest_coder

MOST_BYTES = 1.15
"""Maximum ratio of our file size to Pillow's."""


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    pixels: Pixels
    bounded: bool = True
    """True if the file size is guaranteed, as it is for photographs."""


def photograph(height: int, width: int, roughness: float, grain: float, seed: int) -> Pixels:
    """Synthesize a photograph with forty overlapping discs of different light and detail.

    The amplitude falls with frequency to the power of `roughness`.
    """
    generator = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1.0

    def field() -> np.ndarray:
        spectrum = np.fft.rfft2(generator.normal(size=(height, width))) / frequency**roughness
        values = np.fft.irfft2(spectrum, s=(height, width))
        return values / values.std()

    common = field()
    colours = np.stack([common + 0.35 * field() for _ in range(3)], -1)
    image = 120 + 35 * colours
    y, x = np.mgrid[0:height, 0:width]
    for _ in range(40):
        radius = min(height, width) * 0.3 * generator.random() ** 2
        inside = (y - height * generator.random()) ** 2 + (x - width * generator.random()) ** 2 < radius**2
        shift = tuple(generator.integers(0, (height, width)))
        other = np.roll(colours, shift, (0, 1))
        image[inside] = (generator.uniform(50, 200, 3) + 30 * generator.random() * other)[inside]
    return np.clip(image + grain * generator.normal(size=image.shape), 0, 255).astype(np.uint8)


def street(size: int, grain: float) -> Pixels:
    """Enlarge a street scene; like decoded latents, it has soft edges and smooth areas."""
    from halation.data.streets import Streets

    small = Image.fromarray(Streets(128, 128).train(7).pixels)
    large = np.array(small.resize((size, size), Image.Resampling.BICUBIC))
    noise = grain * np.random.default_rng(7).normal(size=large.shape)
    return np.clip(large + noise, 0, 255).astype(np.uint8)


def shapes(size: int) -> Pixels:
    image = Image.new("RGB", (size, size), (120, 170, 210))
    draw = ImageDraw.Draw(image)
    for number, (x, y, red) in enumerate(np.random.default_rng(3).integers(0, 256, (150, 3)).tolist()):
        left, top = x * size // 256, y * size // 256
        shape = draw.ellipse if number % 2 else draw.rectangle
        shape((left, top, left + red * size // 1024, top + size // 16), fill=(red, x, y))
    return np.array(image)


def cases(size: int) -> list[Case]:
    noise = np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)
    tall, wide = 480 * size // 1024, 832 * size // 1024
    return [
        Case(name=f"photograph {size}", pixels=photograph(size, size, 1.6, 1.0, seed=1)),
        Case(name=f"soft photograph {size}", pixels=photograph(size, size, 1.9, 0.5, seed=2)),
        Case(name=f"rough photograph {size}", pixels=photograph(size, size, 1.4, 1.5, seed=3)),
        Case(name=f"scene with grain {size}", pixels=street(size, 1.0)),
        Case(name=f"scene without grain {size}", pixels=street(size, 0.0)),
        Case(name=f"photograph {tall}x{wide}", pixels=photograph(tall, wide, 1.6, 1.0, seed=4)),
        Case(name="photograph 64", pixels=photograph(64, 64, 1.6, 1.0, seed=5)),
        Case(name=f"noise {size}", pixels=noise, bounded=False),
        Case(name=f"drawing {size}", pixels=shapes(size), bounded=False),
        Case(name=f"flat colour {size}", pixels=np.full((size, size, 3), 200, np.uint8), bounded=False),
    ]


def pillow(pixels: Pixels, **options: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", **options)
    return file.getvalue()


def milliseconds(work: Callable[[], object], num: int) -> float:
    began = time.perf_counter()
    for _ in range(num):
        work()
    return (time.perf_counter() - began) / num * 1e3


def residuals(pixels: Pixels) -> memoryview:
    """Return the bytes that `encode_png` passes to its coder."""
    seen: list[memoryview] = []

    def keep(data: memoryview) -> bytes:
        seen.append(data)
        return b""

    encode_png(pixels, {}, keep)
    return seen[0]


def compare(case: Case, rounds: int) -> list[measure.Row]:
    pixels = case.pixels
    num = max(1, (1 << 20) // pixels.size)  # one small image is too fast to time
    filtered = residuals(pixels)
    turns: dict[str, Callable[[], float]] = {
        "default": lambda: milliseconds(lambda: pillow(pixels), num),
        "level 1": lambda: milliseconds(lambda: pillow(pixels, compress_level=1), num),
    }
    names = [name for name in CODERS if name != "isal" or fastest_coder() == "isal"]
    for name in names:
        coder = CODERS[name]
        turns[name] = lambda coder=coder: milliseconds(lambda: encode_png(pixels, {}, coder), num)  # type: ignore[misc]
        turns[f"{name} alone"] = lambda coder=coder: milliseconds(lambda: coder(filtered), num)  # type: ignore[misc]
    middle = measure.medians(measure.interleaved(turns, rounds))
    sizes = {"default": len(pillow(pixels)), "level 1": len(pillow(pixels, compress_level=1))}
    rows = []
    for name in reversed(names):
        data = encode_png(pixels, {}, CODERS[name])
        with Image.open(io.BytesIO(data)) as image:
            difference = int(np.abs(np.array(image).astype(np.int16) - pixels).max())
        for peer, words in (("default", "Pillow"), ("level 1", "Pillow level 1")):
            if peer == "level 1" and (name == "zlib" or not case.bounded):
                continue  # shown only where it is the closer competitor: photographs with the faster coder
            share = len(data) / sizes[peer]
            if case.bounded and peer == "default" and share > MOST_BYTES:
                raise SystemExit(f"{case.name}, {name}: {share:.3f} times the size of Pillow's file")
            rows.append(
                measure.Row(
                    case=f"{case.name}, {name} : {words}", ours=middle[name], peer=middle[peer], unit="ms",
                    limit=middle[f"{name} alone"], check=f"max difference {difference}, {share:.3f} x the bytes", equality="E0",
                )
            )  # fmt: skip
    return rows


def two_threads(pixels: Pixels, rounds: int) -> float:
    """Return the throughput of two threads relative to one: 2 if no lock is held."""
    coder = CODERS[fastest_coder()]

    def work() -> None:
        for _ in range(8):
            encode_png(pixels, {}, coder)

    def both() -> float:
        threads = [threading.Thread(target=work) for _ in range(2)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 16 / (time.perf_counter() - began)

    middle = measure.medians(measure.interleaved({"one": lambda: 1e3 / milliseconds(work, 1) * 8, "two": both}, rounds))
    return middle["two"] / middle["one"]


def duel(size: int, rounds: int) -> measure.Report:
    cores = sorted(os.sched_getaffinity(0))
    facts = measure.machine() | {"best coder": fastest_coder()}
    rows = []
    images = cases(size)
    for case in images:
        measure.say(f"{case.name}: turns A B A B")
        os.sched_setaffinity(0, cores[:1])
        try:
            rows += compare(case, rounds)
        finally:
            os.sched_setaffinity(0, cores)
    if len(cores) > 1:
        facts["two threads"] = f"{two_threads(images[0].pixels, rounds):.2f} x one"
    return measure.Report(name="duel_06_png", rows=tuple(rows), facts=facts)


def main(arguments: list[str] | None = None) -> measure.Report:
    asked = measure.parser(__doc__ or "").parse_args(arguments)
    report = duel(256, 5) if asked.size == "small" else duel(1024, 7)
    measure.finish(report, asked.output)
    if any("max difference 0," not in row.check for row in report.rows):
        raise SystemExit("a decoded image differs from the original")
    return report


if __name__ == "__main__":
    main()
