"""Generates images for a prompt list on all GPUs: `halation generate` with other defaults."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from halation import cli
from halation.errors import InputError
from halation.models.model_folder import EXPORT_FILE, resolve_model_path
from halation.models.pipelines.call_settings import read_call_settings

# A batch of one image: images are assigned round-robin to the GPUs one by one, as this recipe documents.
DEFAULTS: dict[str, Any] = {"batch_size": 1}
# For every pipeline; a model of Halation, and a pipeline that it exported, keep the values that they were trained with.
PIPELINE_DEFAULTS: dict[str, Any] = {"num_inference_steps": 20, "height": 480, "width": 832}
GUIDANCE_SCALE = 7.5


def defaults(words: Sequence[str]) -> dict[str, Any]:
    """Return the defaults of this recipe for the model on the command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model_path", "--model-path", default="")
    folder = resolve_model_path(parser.parse_known_args(words)[0].model_path or "none")
    if folder.is_dir() and (not (folder / "model_index.json").is_file() or (folder / EXPORT_FILE).exists()):
        return DEFAULTS
    try:
        has_guidance = not folder.is_dir() or bool(read_call_settings(folder).guidance.argument)
    except InputError:  # the command reports what is wrong with the folder
        return DEFAULTS
    return DEFAULTS | PIPELINE_DEFAULTS | ({"guidance_scale": GUIDANCE_SCALE} if has_guidance else {})


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(cli.run("generate", arguments, defaults=defaults(arguments), prog="batch_generate_t2i_multigpu.py"))
