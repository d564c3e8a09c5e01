"""`halation gallery`: the page of runs, served to whoever has its link, or some runs written as a page of their own."""

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halation import __version__
from halation.distillation.config import DistillConfig
from halation.errors import InputError
from halation.gallery.config import GalleryConfig
from halation.generation.config import GenerateConfig
from halation.runs import control
from halation.training.config import TrainConfig

if TYPE_CHECKING:
    from halation.gallery.catalog import Catalog, Maker
    from halation.gallery.events import Changes
    from halation.gallery.scores import Scores
    from halation.gallery.security import Names
    from halation.gallery.server import Gallery

NUM_PORTS_TRIED = 100
SETTLED = {
    "train": {"image_size": (64, 64), "time_sampling": "logit_normal", "time_shift": 1.0},
    "distill": {"time_sampling": "logit_normal", "time_shift": 1.0},
}
"""What a record holds where a command settled what nobody chose; what a model on disk decides is not known here."""
FIRST_LOOK_S = 0.8
"""The link is printed after that even where the folders are still being searched."""

WARNING = (
    "halation gallery: warning: with --host {host} others on the network can reach this page. They need the link, which travels "
    "unencrypted; an ssh tunnel does without."
)


def run(config: GalleryConfig) -> int:
    """Serve until Ctrl+C, or write the export; returns the exit code."""
    for folder in config.dirs:
        _refuse_unreadable(folder)
    if config.export is not None:
        return _export(config, config.export)
    return _serve(config)


def _refuse_unreadable(folder: Path) -> None:
    """Said of what was named; below it, folders of others are passed by."""
    try:
        with os.scandir(folder):
            what = "" if os.access(folder, os.X_OK) else "may not be looked into"
    except FileNotFoundError:
        what = "does not exist"
    except NotADirectoryError:
        what = "is not a folder"
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    if what:
        raise InputError(f"{folder} {what}", "folders with runs below them", "name where your runs are, such as runs/")


def _serve(config: GalleryConfig) -> int:
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise InputError(f"{name} is not installed", "what a web page needs", "pip install 'halation[web]'")
    from halation.gallery.events import Changes
    from halation.gallery.scores import Scores
    from halation.gallery.security import Names, new_token
    from halation.gallery.server import Server, application

    with _listening(config.host, config.port) as listener:
        port = listener.getsockname()[1]
        token = new_token()
        catalog = catalog_of(config.dirs)
        scores = Scores(catalog)
        changes = Changes(catalog, beside=scores.refresh)
        changes.start()
        names = Names(config.host, _own_names())
        if names.everywhere:
            print(WARNING.format(host=config.host), file=sys.stderr, flush=True)
            threading.Thread(target=lambda: names.add(socket.getfqdn()), daemon=True).start()
        app = application(_gallery(config, changes, scores), token=token, names=names)
        server = Server(app, changes)
        changes.looked.wait(FIRST_LOOK_S)
        print(_greeting(config, catalog, port, token, names, done=changes.looked.is_set()), flush=True)
        with _opened(f"{_address(config.host, port)}/?token={token}") if config.open else contextlib.nullcontext():
            server.run(sockets=[listener])
    return 128 + server.stopped_by if server.stopped_by else 0


def _export(config: GalleryConfig, file: Path) -> int:
    from halation.gallery import html_export
    from halation.gallery.scores import Scores

    if config.export_pictures < 0:
        raise InputError(f"--export_pictures {config.export_pictures}", "0 or more", "leave it away for the default")
    html_export.check_target(file)
    catalog = catalog_of(config.dirs)
    scores = Scores(catalog)
    catalog.refresh()
    scores.refresh()
    made = html_export.export(html_export.chosen_runs(catalog), catalog, scores, file, config.export_pictures)
    counted = f"{made.num_pictures} picture" + ("" if made.num_pictures == 1 else "s")
    print(f"halation gallery: {made.path} ({counted}, {made.num_bytes / 1e6:.1f} MB)")
    for sentence in made.left_out:
        print(f"  {sentence}")
    return 0


def catalog_of(dirs: Sequence[Path]) -> Catalog:
    """The runs below some folders, with what only the commands know of their settings."""
    from halation.gallery.catalog import Catalog
    from halation.gallery.generation_runs import GenerationRun
    from halation.gallery.training_runs import TrainingRun
    from halation.gallery.watch_runs import WatchRun

    kinds = {"train": TrainConfig, "distill": DistillConfig, "generate": GenerateConfig}
    defaults = {command: _defaults(command, config_type) for command, config_type in kinds.items()}

    def differs(settings: Mapping[str, Any]) -> list[str]:
        return [name for name, value in settings.items() if value != defaults["generate"].get(name)]

    training = functools.partial(TrainingRun, defaults=defaults)
    makers: dict[str, Maker] = dict.fromkeys(("train", "distill", "sample"), training)
    makers["watch"] = WatchRun
    makers["generate"] = functools.partial(GenerationRun, differs=differs)
    return Catalog(dirs, makers)


def _defaults(command: str, config_type: type[Any]) -> dict[str, Any]:
    """Settings that nobody chose, as they stand in a run's record."""
    fields = dataclasses.fields(config_type)
    values = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    values |= {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}
    values |= SETTLED.get(command, {})
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def _gallery(config: GalleryConfig, changes: Changes, scores: Scores) -> Gallery:
    from halation.gallery.server import Gallery
    from halation.gallery.thumbnails import Thumbnails

    return Gallery(
        catalog=scores.catalog,
        changes=changes,
        roots=tuple(map(str, config.dirs)),
        version=__version__,
        thumbnail=Thumbnails().get,
        scores=scores.answer,
        score_picture=scores.picture,
        ask=functools.partial(control.ask, by="the gallery") if config.allow_control else None,
    )


# -- where it listens


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket at the port that was asked for, or where that is taken at the next free one, which is said."""
    from halation.gallery.server import listen

    if not 0 <= port <= 65535:
        raise InputError(
            f"--port {port}", "a number from 0 (any free one) to 65535", "leave --port away for the default"
        )
    last = min(port + NUM_PORTS_TRIED, 65535)
    for attempt in range(port, last + 1):
        try:
            listener = listen(host, attempt)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise _refused(host, attempt, error) from error
            continue
        if attempt != port:
            print(f"halation gallery: port {port} is taken, this is {attempt}", flush=True)
        with listener:
            yield listener
        return
    raise InputError(f"ports {port} to {last} are all taken", "a free port", "name another with --port, or 0 for any")


def _refused(host: str, port: int, error: OSError) -> InputError:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return InputError(
            f"--host {host} is no address of this machine",
            "127.0.0.1, or 0.0.0.0 for the whole network",
            "leave --host away; over ssh a tunnel is all it takes",
        )
    return InputError(
        f"cannot listen on {host} port {port}: {error.strerror}", "a port one may use", "choose --port above 1023"
    )


def _own_names() -> tuple[str, ...]:
    """What others may call this machine, without asking the network, which could take seconds."""
    name = socket.gethostname()
    short = name.partition(".")[0]
    return name, short, f"{short}.local"


def _address(host: str, port: int) -> str:
    """Where a browser on this machine finds the page."""
    shown = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


# -- what is said


def _greeting(config: GalleryConfig, catalog: Catalog, port: int, token: str, names: Names, *, done: bool) -> str:
    folders = ", ".join(str(folder) if str(folder) != "." else "this folder" for folder in config.dirs)
    lines = [
        f"halation gallery: {_counted(catalog, done=done)} below {folders}",
        "",
        f"  open           {_address(config.host, port)}/?token={token}",
    ]
    if names.everywhere:
        lines.append(f"  from outside   http://{_outside(config.host)}:{port}/?token={token}")
    else:
        inner = "[::1]" if ":" in config.host else "127.0.0.1"
        lines.append(f"  from a laptop  ssh -N -L {port}:{inner}:{port} {_login()}   then open the link there")
    if config.allow_control:
        lines.append("  control        whoever has the link may ask trainings to sample, save or stop")
    lines += ["  to end         Ctrl+C; the runs do not notice", ""]
    return "\n".join(lines)


def _counted(catalog: Catalog, *, done: bool) -> str:
    summaries = [entry.summary() for entry in catalog.entries()]
    running = sum(summary["state"] == "running" for summary in summaries)
    counted = f"{len(summaries)} run" + ("" if len(summaries) == 1 else "s")
    if not summaries:
        counted = "no runs yet" if done else "looking for runs"
    return counted + (f" ({running} running)" if running else "") + ("" if done or not summaries else " so far")


def _outside(host: str) -> str:
    if host in ("0.0.0.0", "::", ""):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _login() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = "you"
    return shlex.quote(f"{user}@{socket.gethostname()}")


@contextlib.contextmanager
def _opened(link: str) -> Iterator[None]:
    """The link in a browser. By way of a private file, because everybody on a machine can read what a command is called with."""
    with tempfile.TemporaryDirectory(prefix="halation-gallery-") as folder:
        file = Path(folder) / "open.html"
        file.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(link)}">\n')

        def opened() -> None:
            if not webbrowser.open(file.as_uri()):
                print("halation gallery: there is no browser here; open the link above", file=sys.stderr, flush=True)

        threading.Thread(target=opened, daemon=True).start()
        yield
