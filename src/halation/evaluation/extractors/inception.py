"""FID's Inception as an extractor: which weights it has, how each resize rule's reference scales its input, and what its distances are called."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from halation.errors import InputError
from halation.evaluation.extractors.extractor import DTYPES, Extractor
from halation.evaluation.extractors.inception_network import NUM_FEATURES, SIZE, inception_from, unfit
from halation.evaluation.extractors.preparation import Rule, SquareResize, described
from halation.evaluation.extractors.weights import FID_SHA256, default_weights, read_tensors, sha256_of

NORMALISATION: dict[Rule, str] = {"clean": "(x-128)/128", "tf": "(x-128)/128", "torch": "2*(x/255)-1"}
"""What each rule's reference does with 0..255: clean-fid and torch-fidelity as TensorFlow's graph did, pytorch-fid by its unit range."""


class InceptionExtractor(Extractor):
    """Features of the last average pooling (2048), and logits without bias (1008) for the inception score."""

    def __init__(self, weights: str, *, device: str, dtype: str, rule: Rule, flag: str = "--weights") -> None:
        file = Path(weights) if weights else default_weights(flag)
        tensors = read_tensors(file, flag)
        if why := unfit(tensors):
            raise InputError(
                f"{file} does not hold FID's Inception: {why}",
                "the weights of pytorch-fid or torch-fidelity",
                f"check {flag}, or leave it out to use the released file",
            )
        sha256 = sha256_of([file])
        is_pinned = sha256 == FID_SHA256
        self.name = "inception"
        self.fd_title = "FID" if is_pinned else "FD-inception"
        self.kid_title = "KID" if is_pinned else "KID-inception"
        self.num_features = NUM_FEATURES
        self.preparation = SquareResize(size=SIZE, rule=rule)
        self.device = torch.device(device)
        self.facts = {
            "extractor": self.name,
            "weights": str(file),
            "weights_sha256": sha256,
            "pinned": is_pinned,
            "dtype": dtype,
            "resize": rule,
            "input_size": [SIZE, SIZE],
            "normalisation": NORMALISATION[rule],
            "preparation": {**described(self.preparation), "normalisation": NORMALISATION[rule]},
            "library": f"halation on torch {torch.__version__}",
        }
        self._rule = rule
        self._dtype = DTYPES[dtype]
        self._network = inception_from(tensors).to(device=self.device, dtype=self._dtype)

    def _outputs(self, batch: Tensor) -> dict[str, Tensor]:
        x = batch.permute(0, 3, 1, 2)  # (B, H, W, 3) in memory is what channels_last means
        x = 2 * (x / 255) - 1 if self._rule == "torch" else (x - 128) / 128
        features, logits = self._network(x.to(self._dtype))
        return {"features": features, "logits": logits}
