"""Trains the network of the `streets` extractor and measures it on validation scenes."""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageFilter
from torch import Tensor, nn
from torch.nn import functional as F

from halation.data.streets import caption, draw, scene
from halation.data.streets.scene_attributes import CAR_COLOURS, PLACES, TIMES, WEATHERS, Attributes
from halation.evaluation.extractors import streets_classifier
from halation.evaluation.extractors.resize import resize_to_square
from halation.evaluation.extractors.streets_classifier import (
    HEADS,
    INPUT_SIZE,
    NUM_FEATURES,
    StreetsNet,
    StreetsNetRecord,
)
from halation.evaluation.metrics.caption_agreement import caption_agreement
from halation.evaluation.metrics.frechet import frechet_distance
from halation.evaluation.metrics.moments import moments
from halation.input_files import file_sha256

Pixels: TypeAlias = npt.NDArray[np.uint8]

SIZES = (32, 48, 64, 96, 128)
WEIGHT_OF_HEAD = {"place": 1.0, "time": 1.0, "weather": 1.0, "cars": 2.0}
NUM_HINTS = len(CAR_COLOURS) + 6
"""Other known attributes: cars of each colour, trees, houses, signs, pedestrians, traffic lights, and image size."""
NUM_HARMS = 3
"""Blur, noise and brightness, each 0 for an unchanged image."""


def labels_of(attributes: Attributes) -> list[int]:
    return [
        PLACES.index(attributes.place),
        TIMES.index(attributes.time),
        WEATHERS.index(attributes.weather),
        attributes.num_cars,
    ]


def hints_of(attributes: Attributes, size: int) -> list[float]:
    colours = [float(attributes.car_colours.count(colour)) for colour in CAR_COLOURS]
    things = (attributes.num_trees, attributes.num_houses, attributes.num_signs)
    return [*colours, *things, attributes.num_pedestrians, attributes.num_traffic_lights, math.log2(size)]


class Scenes:
    """The training images, rendered once into a file, and their attributes."""

    def __init__(self, num: int, folder: str) -> None:
        shape = (num, INPUT_SIZE, INPUT_SIZE, 3)
        self.pixels = np.memmap(Path(folder) / "pixels.u8", dtype=np.uint8, mode="w+", shape=shape)
        scenes = [scene("train", index) for index in range(num)]
        sizes = [SIZES[index % len(SIZES)] for index in range(num)]
        for index, (attributes, size) in enumerate(zip(scenes, sizes, strict=True)):
            self.pixels[index] = np.rint(resize_to_square(draw(attributes, size), INPUT_SIZE, "clean"))
        self.labels = torch.tensor([labels_of(attributes) for attributes in scenes])
        hints = torch.tensor([hints_of(*known) for known in zip(scenes, sizes, strict=True)])
        self.hints = (hints - hints.mean(0)) / (hints.std(0) + 1e-6)

    def images(self, chosen: Tensor) -> Tensor:
        return torch.from_numpy(self.pixels[chosen.numpy()]).float()


def blurred(images: Tensor, sigma: Tensor) -> Tensor:
    """Blur each image with a Gaussian of its own width; `sigma` is a column."""
    kernel = torch.exp(-0.5 * (torch.arange(-4, 5) / sigma) ** 2)
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(3, dim=0)
    planes = images.permute(0, 3, 1, 2).reshape(1, -1, INPUT_SIZE, INPUT_SIZE)
    planes = F.conv2d(F.pad(planes, (4, 4, 0, 0), mode="replicate"), kernel[:, None, None, :], groups=len(kernel))
    planes = F.conv2d(F.pad(planes, (0, 0, 4, 4), mode="replicate"), kernel[:, None, :, None], groups=len(kernel))
    return planes.reshape(-1, 3, INPUT_SIZE, INPUT_SIZE).permute(0, 2, 3, 1)


def grain(num: int, dice: torch.Generator) -> Tensor:
    """Return noise in squares of 1, 2 or 4 pixels, like artifacts of models with patches."""
    coarse = (1, 1, 2, 4)[int(torch.randint(4, (), generator=dice))]
    side = INPUT_SIZE // coarse
    noise = torch.randn(num, side, side, 3, generator=dice)
    return noise.repeat_interleave(coarse, 1).repeat_interleave(coarse, 2)


def harmed(images: Tensor, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Blur, add noise, brighten or darken some of the images; return also the amounts.

    Generated images are never as clean as rendered ones. Their attributes should still be recognized, while the
    features, which are trained to predict the amounts, should differ.
    """
    num = len(images)
    amounts = torch.rand(num, NUM_HARMS, generator=dice) * (torch.rand(num, NUM_HARMS, generator=dice) < 0.4)
    amounts *= torch.rand(num, 1, generator=dice) < 0.6
    blur, noise, light = (amounts[:, column, None, None, None] for column in range(NUM_HARMS))
    images = torch.where(blur > 0, blurred(images, 0.3 + 1.2 * amounts[:, :1]), images)
    light = light * torch.where(torch.rand(light.shape, generator=dice) < 0.5, -1.0, 1.0)
    images = images * (1.0 + 0.2 * light) + 20.0 * noise * grain(num, dice)
    # The square root gives small amounts more weight.
    told = torch.cat([amounts[:, :2].sqrt(), light[:, 0, 0]], dim=1)
    return images.clamp(0.0, 255.0), told


def loss_of(outputs: dict[str, Tensor], labels: Tensor, guesses: Tensor, extras: Tensor) -> Tensor:
    """Cross-entropy of the heads plus squared errors of the other attributes.

    Without the latter, features would encode only the labels.
    """
    squares = (guesses - extras).square().mean(0)
    loss = 0.05 * squares[:NUM_HINTS].sum() + squares[NUM_HINTS:].sum()
    for column, (head, weight) in enumerate(WEIGHT_OF_HEAD.items()):
        loss = loss + weight * F.cross_entropy(outputs[head].float(), labels[:, column])
    return loss


def trained(scenes: Scenes, arguments: argparse.Namespace) -> StreetsNet:
    torch.manual_seed(arguments.seed)
    dice = torch.Generator().manual_seed(arguments.seed)
    net = StreetsNet().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    # Only training needs it, so it is not saved.
    extra = nn.Linear(NUM_FEATURES, NUM_HINTS + NUM_HARMS)
    weights = [*net.parameters(), *extra.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=arguments.lr, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.lr, arguments.num_steps, pct_start=0.15)
    order = torch.empty(0, dtype=torch.int64)
    start = time.monotonic()
    for step in range(arguments.num_steps):
        if len(order) < arguments.batch_size:
            order = torch.cat([order, torch.randperm(len(scenes.labels), generator=dice)])
        chosen, order = order[: arguments.batch_size], order[arguments.batch_size :]
        images, harms = harmed(scenes.images(chosen), dice)
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.bf16):
            outputs = net(images)
            guesses = extra(outputs["features"]).float()
        loss = loss_of(outputs, scenes.labels[chosen], guesses, torch.cat([scenes.hints[chosen], harms], dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == arguments.num_steps - 1:
            print(f"step {step}  loss {loss.item():.4f}  {time.monotonic() - start:.0f} s", flush=True)
    return net.eval().requires_grad_(False)


def rounded(net: StreetsNet) -> None:
    """Round weights to float16 as in the file, so that the shipped network is measured."""
    for weight in net.parameters():
        if weight.dim() > 1:
            weight.copy_(weight.half())


def seen(net: StreetsNet, images: Iterable[Pixels]) -> dict[str, npt.NDArray[np.float32]]:
    """Run the network on images of any size."""
    prepared = (torch.from_numpy(resize_to_square(image, INPUT_SIZE, "clean")) for image in images)
    outputs = []
    while batch := list(islice(prepared, 100)):
        outputs.append(net(torch.stack(batch)))
    return {name: torch.cat([output[name] for output in outputs]).numpy() for name in outputs[0]}


def examined(net: StreetsNet, arguments: argparse.Namespace) -> StreetsNetRecord:
    """Measure the accuracy on validation scenes."""
    scenes = [scene("heldout", index) for index in range(arguments.num_validation)]
    labels = np.array([labels_of(attributes) for attributes in scenes])
    outputs = {size: seen(net, (draw(attributes, size) for attributes in scenes)) for size in SIZES}
    accuracy = {
        str(size): {
            head: round(float((outputs[size][head].argmax(1) == labels[:, column]).mean()), 4)
            for column, head in enumerate(HEADS)
        }
        for size in SIZES
    }
    ceiling = caption_agreement(outputs[INPUT_SIZE], [caption(attributes) for attributes in scenes])
    return StreetsNetRecord(
        seed=arguments.seed,
        num_trained_on=arguments.num_images,
        num_steps=arguments.num_steps,
        num_validated_on=len(scenes),
        accuracy=accuracy,
        agreement=round(ceiling.value, 4),
        agreement_by_attribute={
            name: None if share is None else round(share, 4) for name, share in ceiling.by_attribute.items()
        },
    )


def jpeg(image: Pixels, quality: int) -> Pixels:
    file = BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file))


def spoiled(scenes: Sequence[Attributes]) -> Iterator[tuple[str, list[Pixels]]]:
    """Yield sets of images of the scenes with different kinds and degrees of degradation."""
    good = [draw(attributes, INPUT_SIZE) for attributes in scenes]
    yield "as they are", good
    for sigma in (0.5, 1.0, 2.0, 3.0):
        blur = ImageFilter.GaussianBlur(sigma)
        yield f"blur, sigma {sigma} pixels", [np.asarray(Image.fromarray(image).filter(blur)) for image in good]
    noise = np.random.default_rng(0).standard_normal((len(good), INPUT_SIZE, INPUT_SIZE, 3))
    for sigma in (5, 10, 20, 40):
        yield f"noise, sigma {sigma} of 255", list(np.clip(np.rint(good + sigma * noise), 0, 255).astype(np.uint8))
    for quality in (95, 80, 50, 25, 10):
        yield f"JPEG of quality {quality}", [jpeg(image, quality) for image in good]
    for size in (128, 48, 32):
        yield f"drawn at {size} pixels", [draw(attributes, size) for attributes in scenes]
    for num in (1, 2, 4):
        kept = [attributes.place in PLACES[num:] for attributes in scenes]
        yield f"without {num} of 8 places", [image for image, keep in zip(good, kept, strict=True) if keep]
    yield (
        "without night",
        [image for image, attributes in zip(good, scenes, strict=True) if attributes.time != "night"],
    )
    for num in (500, 100, 10):
        yield f"only {num} different ones", [good[index % num] for index in range(len(good))]


def print_distances(net: StreetsNet, num: int) -> None:
    """Print the distances of degraded images to clean images of other scenes.

    They should increase with the degradation.
    """
    good = seen(net, (draw(scene("heldout", index), INPUT_SIZE) for index in range(num)))
    reference = moments(good["features"])
    for name, images in spoiled([scene("heldout", num + index) for index in range(num)]):
        distance = frechet_distance(reference, moments(seen(net, images)["features"]))
        print(f"{name:28} FD-streets {distance:8.2f}", flush=True)


def print_record(record: StreetsNetRecord) -> None:
    for size, shares in record.accuracy.items():
        print(f"{size:>4} pixels  " + "  ".join(f"{head} {100 * share:.1f} %" for head, share in shares.items()))
    print(f"agreement with their own captions {100 * record.agreement:.1f} %")


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("streets_net.safetensors"), help="file to write")
    parser.add_argument("--num_images", "--num_pictures", type=int, default=16_000, help="scenes to train on")
    parser.add_argument(
        "--num_validation", "--num_heldout", type=int, default=2_000, help="validation scenes to measure it on"
    )
    parser.add_argument("--num_steps", type=int, default=1_300)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="torch threads; the number affects rounding")
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16, if the CPU is faster with it")
    return parser.parse_args()


def main() -> None:
    arguments = arguments_of()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        net = trained(Scenes(arguments.num_images, folder), arguments)
    rounded(net)
    record = examined(net, arguments)
    streets_classifier.save_network(net, record, arguments.output)
    print_record(record)
    print(f"{arguments.output}: {arguments.output.stat().st_size} bytes, SHA-256 {file_sha256(arguments.output)}")
    print_distances(net, arguments.num_validation)


if __name__ == "__main__":
    main()
