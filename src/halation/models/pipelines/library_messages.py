"""What diffusers, transformers and DeepSpeed tell their users that ours need not read: defaults we do not touch, cuts we report ourselves."""

from __future__ import annotations

import logging

import diffusers
import transformers

_KNOWN = (
    "requires torchvision",  # image processors that no pipeline here calls
    "Token indices sequence length is longer",  # said once by the tokenizer, though the pipeline cuts the text itself
    "that should be kept in float32: []",  # a list of nothing
    "Setting accelerator to CPU",  # said by DeepSpeed, which transformers imports wherever it is installed
    "The following part of your input was truncated",  # said for every single caption; ours are counted
)


class _Known(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not any(words in text for words in _KNOWN)


def silence() -> None:
    """Keep these messages from the terminal; may be called twice."""
    for library in (transformers.utils.logging, diffusers.utils.logging):
        logger = library.get_logger(library.__name__.split(".")[0])
        for handler in logger.handlers:
            if not any(isinstance(each, _Known) for each in handler.filters):
                handler.addFilter(_Known())
    words = logging.getLogger("DeepSpeed")  # its handlers come with its import, which may be still to come
    if not any(isinstance(each, _Known) for each in words.filters):
        words.addFilter(_Known())
