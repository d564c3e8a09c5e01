"""The network that ships with Halation as an extractor: features of street scenes, and what is in them; it needs no download."""

from __future__ import annotations

import torch
from torch import Tensor

from halation.evaluation.extractors.extractor import DTYPES, Extractor
from halation.evaluation.extractors.preparation import SquareResize, described


class StreetsExtractor(Extractor):
    """Features, and the logits of each attribute's head; pictures are always resized by the clean rule it was trained with."""

    def __init__(self, *, device: str, dtype: str) -> None:
        from halation.evaluation.extractors import streets_network

        self.name = "streets"
        self.fd_title = "FD-streets"
        self.kid_title = "KID-streets"
        self.num_features = streets_network.NUM_FEATURES
        self.preparation = SquareResize(size=streets_network.INPUT_SIZE, rule="clean")
        self.device = torch.device(device)
        self.facts = {
            "extractor": self.name,
            "weights": streets_network.WEIGHTS.name,
            "weights_sha256": streets_network.sha256(),
            "dtype": dtype,
            "resize": "clean",
            "input_size": [streets_network.INPUT_SIZE, streets_network.INPUT_SIZE],
            "preparation": described(self.preparation),
            "agreement_of_real_pictures": streets_network.record().agreement,
            "library": f"halation on torch {torch.__version__}",
        }
        self._dtype = DTYPES[dtype]
        self._network = streets_network.load().to(device=self.device, dtype=self._dtype)

    def _outputs(self, batch: Tensor) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = self._network(batch.to(self._dtype))
        return outputs
