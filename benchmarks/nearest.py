"""Shows the nearest training image beside each sample of a run, to detect copies.

python benchmarks/nearest.py --samples RUN/samples/step_0003916 --data FOLDER --output nearest.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from halation.images.grid import make_grid
from halation.images.png_codec import encode_png, read_png
from halation.training.build_components import open_dataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=Path, required=True, help="a folder with samples.json")
    parser.add_argument("--data", required=True, help="the data set that the run was trained on")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--columns", type=int, default=8)
    arguments = parser.parse_args()
    rows = [
        row for row in json.loads((arguments.samples / "samples.json").read_text())["samples"] if row["state"] == "done"
    ]
    samples = [read_png(arguments.samples / row["file"])[0] for row in rows]
    height, width = samples[0].shape[:2]
    source = open_dataset(arguments.data, height, width, 64)
    training = np.stack([source.train(index).pixels for index in range(source.num_train)]).astype(np.float32)
    captions = [source.train(index).caption for index in range(source.num_train)]
    cells, labels = [], []
    for row, sample in zip(rows, samples, strict=True):
        distance = np.sqrt(((training - sample.astype(np.float32)) ** 2).mean(axis=(1, 2, 3)))
        nearest = int(distance.argmin())
        seen = "seen" if row["prompt"] in captions else "not seen"
        cells += [sample, training[nearest].astype(np.uint8)]
        labels += [f"{row['prompt']} ({seen})", f"nearest: {captions[nearest]}, {distance[nearest]:.0f} grey levels"]
        print(
            f"{row['prompt']:24} {seen:9} nearest {captions[nearest]:30} root mean square {distance[nearest]:6.2f} grey levels"
        )
    arguments.output.write_bytes(encode_png(make_grid(cells, arguments.columns, labels), {}))


if __name__ == "__main__":
    main()
