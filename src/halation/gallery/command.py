"""`halation gallery`: serve the page of runs, or write runs into one HTML file."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import getpass
import html
import importlib.util
import json
import os
import shlex
import socket
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from halation import __version__
from halation.config import check_settings, to_stored_names
from halation.distillation.config import DistillConfig
from halation.errors import InputError, format_count, install_command
from halation.gallery import html_export
from halation.gallery.access_control import AllowedHosts, new_token
from halation.gallery.config import GalleryConfig
from halation.gallery.evaluation_reports import ScoreIndex
from halation.gallery.generation_runs import GenerationRun
from halation.gallery.run_catalog import RunCatalog, RunFactory
from halation.gallery.thumbnails import ThumbnailCache
from halation.gallery.training_runs import TrainingRun
from halation.gallery.watcher_runs import WatchRun
from halation.generation.config import GenerateConfig
from halation.runs import control_requests
from halation.training.config import DIT_DEFAULTS, TrainConfig

NUM_PORTS_TRIED = 100
RESOLVED_DEFAULTS = {
    "train": {"image_size": (64, 64), "time_sampling": "logit_normal", "time_shift": 1.0},
    "distill": {"time_sampling": "logit_normal", "time_shift": 1.0},
}
"""Defaults that a command resolves before it writes the record; those that depend on a model are not known here."""
FIRST_POLL_TIMEOUT_S = 0.8
"""The link is printed after this time even if the folders are still being scanned."""

HOST_WARNING = (
    "halation gallery: warning: with --host {host} others on the network can reach this page. They need the link, "
    "which is sent unencrypted; use an ssh tunnel to avoid that."
)


def run(config: GalleryConfig) -> int:
    """Serve until Ctrl+C, or write the export; returns the exit code."""
    check_settings(config)
    for folder in config.dirs:
        _check_readable(folder)
    if config.export is not None:
        return _export(config, config.export)
    return _serve(config)


def _check_readable(folder: Path) -> None:
    """Raise if a given folder cannot be read; unreadable folders below it are only skipped."""
    try:
        with os.scandir(folder):
            problem = "" if os.access(folder, os.X_OK) else "cannot be entered: permission denied"
    except FileNotFoundError:
        problem = "does not exist"
    except NotADirectoryError:
        problem = "is not a folder"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    if problem:
        raise InputError(
            f"{folder} {problem}", "folders with runs below them", "give the folder of your runs, such as runs/"
        )


def _serve(config: GalleryConfig) -> int:
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise InputError(f"{name} is not installed", "the packages of the server", install_command("web"))
    from halation.gallery.event_stream import ChangeFeed
    from halation.gallery.server import GalleryContext, GalleryServer, build_app

    with _open_listener(config.host, config.port) as listener:
        port = listener.getsockname()[1]
        token = new_token()
        catalog = build_catalog(config.dirs)
        scores = ScoreIndex(catalog)
        change_feed = ChangeFeed(catalog, refresh_extra=scores.refresh)
        change_feed.start()
        # Names of this machine that need no network lookup, which could take seconds.
        host_name = socket.gethostname()
        short_name = host_name.partition(".")[0]
        allowed_hosts = AllowedHosts(config.host, (host_name, short_name, f"{short_name}.local"))
        if allowed_hosts.is_public:
            print(HOST_WARNING.format(host=config.host), file=sys.stderr, flush=True)
            threading.Thread(target=lambda: allowed_hosts.add(socket.getfqdn()), daemon=True).start()
        control = functools.partial(control_requests.send_request, by="the gallery") if config.allow_control else None
        context = GalleryContext(
            catalog=catalog,
            change_feed=change_feed,
            roots=tuple(map(str, config.dirs)),
            version=__version__,
            get_thumbnail=ThumbnailCache().get,
            get_scores=scores.build_response,
            find_score_image=scores.image,
            send_control=control,
        )
        app = build_app(context, token=token, allowed_hosts=allowed_hosts)
        server = GalleryServer(app, change_feed)
        change_feed.first_poll_done.wait(FIRST_POLL_TIMEOUT_S)
        print(
            _startup_message(
                config, catalog, port, token, allowed_hosts, scan_done=change_feed.first_poll_done.is_set()
            ),
            flush=True,
        )
        with (
            _open_in_browser(f"{_local_url(config.host, port)}/?token={token}")
            if config.open
            else contextlib.nullcontext()
        ):
            server.run(sockets=[listener])
    return 128 + server.stop_signal if server.stop_signal else 0


def _export(config: GalleryConfig, file: Path) -> int:
    html_export.check_export_path(file)
    catalog = build_catalog(config.dirs)
    scores = ScoreIndex(catalog)
    catalog.refresh()
    scores.refresh()
    result = html_export.export(html_export.select_runs(catalog), catalog, scores, file, config.export_images)
    counted = format_count(result.num_images, "image")
    print(f"halation gallery: {result.path} ({counted}, {result.num_bytes / 1e6:.1f} MB)")
    for sentence in result.left_out:
        print(f"  {sentence}")
    return 0


def build_catalog(dirs: Sequence[Path]) -> RunCatalog:
    """Build the catalog of the runs below some folders, with the defaults of each command."""
    config_types: dict[str, type[Any]] = {"train": TrainConfig, "distill": DistillConfig, "generate": GenerateConfig}
    defaults: dict[str, dict[str, Any]] = {}
    for command, config_type in config_types.items():
        fields = dataclasses.fields(config_type)
        values = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
        values |= {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}
        if command in RESOLVED_DEFAULTS:
            values |= {name: value for name, value in DIT_DEFAULTS.items() if values[name] is None}
            values |= RESOLVED_DEFAULTS[command]
        # In the form of a run's record.
        defaults[command] = to_stored_names(json.loads(json.dumps(values, default=str)))
    training_factory = functools.partial(TrainingRun, defaults=defaults)
    factories: dict[str, RunFactory] = dict.fromkeys(("train", "distill", "sample"), training_factory)
    factories["watch"] = WatchRun
    factories["generate"] = functools.partial(GenerationRun, defaults=defaults)
    return RunCatalog(dirs, factories)


# -- listening


@contextlib.contextmanager
def _open_listener(host: str, port: int) -> Iterator[socket.socket]:
    """Open a socket at the requested port, or print and use the next free one."""
    from halation.gallery.server import open_listener

    if not 0 <= port <= 65535:
        raise InputError(f"--port {port}", "a number from 0 (any free port) to 65535", "omit --port for the default")
    last = min(port + NUM_PORTS_TRIED, 65535)
    for attempt in range(port, last + 1):
        try:
            listener = open_listener(host, attempt)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise _listen_error(host, attempt, error) from error
            continue
        if attempt != port:
            print(f"halation gallery: port {port} is in use, using port {attempt}", flush=True)
        with listener:
            yield listener
        return
    raise InputError(f"ports {port} to {last} are all in use", "a free port", "give another --port, or 0 for any")


def _listen_error(host: str, port: int, error: OSError) -> InputError:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return InputError(
            f"--host {host} is not an address of this machine",
            "127.0.0.1, or 0.0.0.0 for the whole network",
            "omit --host; for access over ssh a tunnel is enough",
        )
    return InputError(
        f"cannot listen on {host} port {port}: {error.strerror}", "a port that is permitted", "use a --port above 1023"
    )


def _local_url(host: str, port: int) -> str:
    """URL of the page for a browser on this machine."""
    shown = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


# -- messages


def _startup_message(
    config: GalleryConfig, catalog: RunCatalog, port: int, token: str, allowed_hosts: AllowedHosts, *, scan_done: bool
) -> str:
    summaries = [entry.summary() for entry in catalog.entries()]
    running = sum(summary["state"] == "running" for summary in summaries)
    counted = format_count(len(summaries), "run")
    if not summaries:
        counted = "no runs yet" if scan_done else "looking for runs"
    counted += (f" ({running} running)" if running else "") + ("" if scan_done or not summaries else " so far")
    folders = ", ".join(str(folder) if str(folder) != "." else "this folder" for folder in config.dirs)
    lines = [
        f"halation gallery: {counted} below {folders}",
        "",
        f"  open           {_local_url(config.host, port)}/?token={token}",
    ]
    if allowed_hosts.is_public:
        host = f"[{config.host}]" if ":" in config.host else config.host
        shown = socket.gethostname() if config.host in ("0.0.0.0", "::", "") else host
        lines.append(f"  from outside   http://{shown}:{port}/?token={token}")
    else:
        inner = "[::1]" if ":" in config.host else "127.0.0.1"
        lines.append(f"  from a laptop  ssh -N -L {port}:{inner}:{port} {_ssh_target()}   then open the link there")
    if config.allow_control:
        lines.append("  control        anyone with the link can make trainings sample, save or stop")
    lines += ["  to end         Ctrl+C; the runs are not affected", ""]
    return "\n".join(lines)


def _ssh_target() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user of a container may have no name
        user = "you"
    return shlex.quote(f"{user}@{socket.gethostname()}")


@contextlib.contextmanager
def _open_in_browser(link: str) -> Iterator[None]:
    """Open the link in a browser through a private file: other users can read command lines."""
    with tempfile.TemporaryDirectory(prefix="halation-gallery-") as folder:
        file = Path(folder) / "open.html"
        file.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(link)}">\n')

        def open_file() -> None:
            if not webbrowser.open(file.as_uri()):
                print("halation gallery: no browser found; open the link above", file=sys.stderr, flush=True)

        threading.Thread(target=open_file, daemon=True).start()
        yield
