"""`halation evaluate`: check the flags, start the ranks, print the report."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halation.config import check_settings
from halation.distributed import launcher
from halation.errors import InputError, format_count
from halation.evaluation.config import EvaluateConfig
from halation.logging_setup import ConsoleWarningHandler, exclusive_console_handler
from halation.models.model_folder import HUB_FACT
from halation.runs import run_folder as runs
from halation.runs.lock import FolderMonitor

if TYPE_CHECKING:
    from halation.evaluation.image_sources import ImageFiles
    from halation.evaluation.model_images import ModelImages

DISPLAY_TOLERANCE = 1e-9
"""Values closer to 0 than this are shown as 0; the JSON has the exact value."""
NUM_SHOWN = 5
"""Names of missing images in the table; the JSON has all."""
MIN_IMAGES_PER_RANK = 128
"""Without a GPU, another rank is started only for this many more images."""


def run(config: EvaluateConfig) -> int:
    """Score the images on existing ranks or on ranks started here.

    Returns 0 on success, and 1 if images of the run are missing, which --allow_missing permits.
    """
    if config.check:
        from halation.evaluation.session import dry_run

        for about in dry_run(config):
            print(f"{about['extractor']}: {about['weights']} ({about['weights_sha256'][:12]})")
        return 0
    report = evaluate(config)
    if report:
        print_report(config, report)
    return 1 if report and report["generated"].get("num_missing") else 0


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Return the report; under another launcher, it is empty on all ranks except rank 0."""
    check_settings(config)
    check_output_paths(config)
    from halation.evaluation.session import open_images, resolve_config

    with exclusive_console_handler(ConsoleWarningHandler()):
        source = open_images(config)
    config = resolve_config(config, source)
    cache = feature_cache_folder(config)
    try:
        runs.make_folder(cache)
    except InputError as error:
        raise InputError(error.found, error.expected, "check its permissions, or choose another --cache_dir") from error
    result_files = [path for path in (config.output, config.save_statistics) if path is not None]
    with FolderMonitor(cache, *(path.parent for path in result_files)) as monitor:
        if launcher.is_launched():
            return run_rank(config, source)
        report = _run_ranks(config, source, monitor)
        if config.output is not None:
            runs.write_json_with_digest(config.output, report)
    return report


def _run_ranks(config: EvaluateConfig, source: ImageFiles | ModelImages, monitor: FolderMonitor) -> dict[str, Any]:
    """Run one rank per GPU; without a GPU, as many as cores and images allow.

    The number of ranks does not change the bits of the result.
    """
    devices = launcher.select_devices(config.nproc, config.gpu_ids, config.oversubscribe)
    if not config.nproc and devices == ("cpu",):
        cores = len(os.sched_getaffinity(0)) // config.threads
        devices = ("cpu",) * max(1, min(cores, len(source) // MIN_IMAGES_PER_RANK))
    with runs.scratch_folder("halation_report_") as scratch:
        output = scratch / "report.json"
        rank_config = replace(config, output=output)
        model_ref = getattr(source, "model_ref", None)
        hub_model = "" if model_ref is None else model_ref.hub_fact.get(HUB_FACT, "")
        if hub_model:  # all ranks use the commit that was found here, even if the branch moves
            rank_config = replace(rank_config, revision=hub_model.rpartition("@")[2])
        if len(devices) == 1:
            os.environ[launcher.DEVICE_ENV] = devices[0]
            try:
                run_rank(rank_config, source)
            finally:
                del os.environ[launcher.DEVICE_ENV]
        else:
            launcher.Launcher(run_rank, rank_config, devices, 0, scratch, monitor).run()
        report: dict[str, Any] = runs.read_json_with_digest(output)
    return report


def check_output_paths(config: EvaluateConfig) -> None:
    """Check that the output files can be written, before the results are computed."""
    for name in ("output", "save_statistics"):
        path: Path | None = getattr(config, name)
        if path is None:
            continue
        if path.is_dir():
            raise InputError(f"--{name} {path} is a folder", "a file to write", f"give --{name} a file name")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            error = "" if os.access(path.parent, os.W_OK) else "its folder cannot be written"
        except OSError as problem:
            error = problem.strerror or str(problem)
        if error:
            raise InputError(f"--{name} {path}: {error}", "a file that can be written", f"check --{name}")


def feature_cache_folder(config: EvaluateConfig) -> Path:
    if config.cache_dir is not None:
        return config.cache_dir
    return runs.cache_folder() / "features"


def run_rank(config: EvaluateConfig, source: ImageFiles | ModelImages | None = None) -> dict[str, Any]:
    """Run one rank; rank 0 writes the report to --output and returns it.

    `source` is passed if it is already open.
    """
    launcher.tie_rank_to_launcher()
    from halation.distributed.world import init_world
    from halation.evaluation.session import EvaluationSession

    world = init_world(config.gpu_ids, config.oversubscribe, config.dist_timeout_s, config.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it recommends torchvision, which is not needed
    echo = ConsoleWarningHandler()
    with world.close_on_success(), contextlib.ExitStack() as stack:
        if world.is_rank_zero:
            stack.enter_context(exclusive_console_handler(echo))
        report = EvaluationSession(world, config, feature_cache_folder(config), source).run()
        if world.is_rank_zero and config.output is not None:
            runs.write_json_with_digest(config.output, report)
        return report if world.is_rank_zero else {}


def print_report(config: EvaluateConfig, report: dict[str, Any]) -> None:
    """Print the report as a JSON object or as a table."""
    if config.json:
        print(json.dumps(report, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    reference = report["reference"]
    console = Console()
    num = report["generated"]["num"]
    left_out = report["generated"].get("num_left_out", 0)
    console.print(f"[bold]{format_count(num, 'image')}[/bold] of {escape(report['generated']['path'])}")
    if missing := report["generated"].get("missing"):
        more = " ..." if len(missing) > NUM_SHOWN else ""
        console.print(f"[yellow]{len(missing)} missing[/yellow]: {escape(', '.join(missing[:NUM_SHOWN]))}{more}")
    if left_out:
        console.print(f"{format_count(left_out, 'image')} of other formats ignored")
    if reference:
        console.print(f"against {reference['num'] or 'an unknown number'} of {escape(reference['path'])}")
    if config.save_statistics is not None:
        console.print(f"statistics in {escape(str(config.save_statistics))}")
    if not report["metrics"]:
        return
    table = Table()
    for heading in ("metric", "value", "better", "features"):
        table.add_column(heading, justify="right" if heading == "value" else "left", overflow="fold")
    for measured in report["metrics"].values():
        shown = measured["value"] if abs(measured["value"]) > DISPLAY_TOLERANCE else 0.0
        value = f"{shown:.4g}" + (f" ± {measured['std']:.2g}" if measured["std"] is not None else "")
        if "interval" in measured:
            value += f" [{measured['interval'][0]:.4g}, {measured['interval'][1]:.4g}]"
        resize = measured["resize"] if measured["resize"] in ("clean", "tf", "torch") else "its own"
        features = f"{measured['extractor']}, {resize}, {measured['precision']}"
        table.add_row(
            measured["name"] + (" *" if measured["few"] else "") + (" †" if missing else ""),
            escape(value),
            measured["better"],
            escape(features),
        )
    console.print(table)
    notes: dict[str, list[str]] = {}
    for metric, measured in report["metrics"].items():
        if measured["few"]:
            notes.setdefault(measured["note"], []).append(metric)
    if missing:
        console.print(f"† without {format_count(len(missing), 'missing image')}; do not compare with a complete run")
    for note, marked in notes.items():
        console.print(f"* {', '.join(marked)}: {note}; do not compare with scores of more images")
