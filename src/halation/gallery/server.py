"""The page over HTTP: a fixed table of addresses, answered from what the catalog knows; no word of a request becomes a path."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halation.errors import InputError
from halation.gallery.catalog import Catalog, Entry
from halation.gallery.events import Changes, EventStream
from halation.gallery.run_files import NUM_LOG_LINES, finite, opened
from halation.gallery.security import App, Guard, Names

PAGE = Path(__file__).with_name("page")
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
ID = re.compile(r"[0-9a-f]{10}")
KEY = re.compile(r"[a-z][0-9a-f]{0,16}(?:\.[0-9]{1,9})?(?:\.raw)?")
WORD = re.compile(r"[^\x00-\x1f\x7f]{0,400}")
THUMBNAIL_SIZES = (256, 512)
MAX_PICTURE_BYTES = 256 << 20
MAX_ROWS = 1_000
NUM_THUMBNAILERS = 4
"""Thumbnails made at one time: they keep a core busy, and other questions should not wait for them."""
FOREVER = "private, max-age=31536000, immutable"
STATES = ("", "done", "failed", "open")
ACTIONS = ("sample", "save", "stop")
CONTROLLED = ("train", "distill")
LISTEN_BACKLOG = 128
CLIENT_LOST_S = 60

Handler = Callable[["Gallery", Request], Any]


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """What the page is made of."""

    catalog: Catalog
    changes: Changes
    roots: tuple[str, ...]
    version: str
    thumbnail: Callable[[Path, int], bytes | None]
    """Bytes of a small picture of a file; None where it is no picture."""
    scores: Callable[[], Mapping[str, Any]]
    """What /api/scores answers."""
    score_picture: Callable[[str, str], Path | None]
    """The file of a key that a report gave out, by the id of its run or of the report."""
    ask: Callable[[Path, str], object] | None = None
    """Asks a running training for something; None where the page may only look."""


def application(gallery: Gallery, *, token: str, names: Names) -> App:
    """Everything behind the guard."""
    page = {path.name: path for path in PAGE.iterdir() if path.suffix in CONTENT_TYPES}

    def route(path: str, handler: Handler, *, method: str = "GET") -> Route:
        async def answer(request: Request) -> Any:
            return await anyio.to_thread.run_sync(functools.partial(handler, gallery, request))

        return Route(path, answer, methods=[method])

    async def events(request: Request) -> Any:
        said = request.headers.get("last-event-id", "")
        return EventStream(gallery.changes, last_event_id=said, only_head=request.method == "HEAD")

    async def shell(request: Request) -> Response:
        return _static(page["index.html"], request)

    async def static(request: Request) -> Response:
        path = page.get(request.path_params["name"])
        if path is None:
            raise HTTPException(404, "there is no such file")
        return _static(path, request)

    routes = [
        Route("/", shell),
        Route("/static/{name}", static),
        route("/api/state", _state),
        route("/api/runs", _runs),
        route("/api/runs/{id}", _detail),
        route("/api/runs/{id}/metrics", _metrics),
        route("/api/runs/{id}/log", _log),
        route("/api/runs/{id}/config", _config),
        route("/api/runs/{id}/rows", _rows),
        route("/api/runs/{id}/spec/{key}", _spec),
        route("/api/scores", _scores),
        Route("/api/events", events),
        route("/pictures/{id}/{key}", _picture),
        Route("/thumbs/{id}/{key}", _thumbs(gallery)),
    ]
    if gallery.ask is not None:
        routes.append(route("/api/runs/{id}/control/{action}", _control, method="POST"))
    inner = Starlette(
        routes=routes,
        middleware=[Middleware(GZipMiddleware, minimum_size=1000, compresslevel=4)],
        exception_handlers={HTTPException: _refuse, Exception: _failed},
    )
    inner.router.redirect_slashes = False
    return Guard(inner, token=token, names=names, allow_control=gallery.ask is not None)


# -- answers


def encoded(value: Any) -> bytes:
    """JSON that every browser reads: a loss that is not a number is null. No `<`, whatever takes it for a page one day."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(finite(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").encode()


def _json(value: Any, status: int = 200) -> Response:
    return Response(encoded(value), status, media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = _json({"error": error.detail}, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _failed(request: Request, error: Exception) -> Response:
    """Said without its words, which may hold a path; the traceback is printed where the gallery was started."""
    return _json({"error": "the gallery could not answer; where it was started it says why"}, 500)


def _static(path: Path, request: Request) -> Response:
    body = path.read_bytes()
    tag = f'"{hashlib.blake2b(body, digest_size=8).hexdigest()}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    said = request.headers.get("if-none-match", "")
    if tag in (part.strip().removeprefix("W/") for part in said.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=CONTENT_TYPES[path.suffix])


def _state(gallery: Gallery, request: Request) -> Response:
    return _json({"version": gallery.version, "control": gallery.ask is not None, "roots": list(gallery.roots)})


def _runs(gallery: Gallery, request: Request) -> Response:
    return _json({"runs": [entry.summary() for entry in gallery.catalog.entries()]})


def _detail(gallery: Gallery, request: Request) -> Response:
    return _json(_entry(gallery, request).detail())


def _metrics(gallery: Gallery, request: Request) -> Response:
    metrics = _ability(_entry(gallery, request), "metrics")
    return _json(metrics(_number(request, "after", 0, low=0)))


def _log(gallery: Gallery, request: Request) -> Response:
    return _json({"lines": _entry(gallery, request).log(NUM_LOG_LINES)})


def _config(gallery: Gallery, request: Request) -> Response:
    return _json(_entry(gallery, request).config())


def _rows(gallery: Gallery, request: Request) -> Response:
    from halation.gallery.generation_runs import Query

    search = _ability(_entry(gallery, request), "search")
    state = _word(request, "state")
    if state not in STATES:
        raise HTTPException(400, f"state is {', '.join(filter(None, STATES))} or left away")
    query = Query(
        offset=_number(request, "offset", 0, low=0),
        limit=_number(request, "limit", 100, low=0, high=MAX_ROWS),
        q=_word(request, "q"),
        state=state,
        worker=_word(request, "worker"),
        seed=_number(request, "seed", None),
    )
    return _json(search(query))


def _spec(gallery: Gallery, request: Request) -> Response:
    spec = _ability(_entry(gallery, request), "spec")(_key(request))
    if spec is None:
        raise HTTPException(404, "there is no such picture")
    return _json(spec)


def _scores(gallery: Gallery, request: Request) -> Response:
    return _json(gallery.scores())


def _picture(gallery: Gallery, request: Request) -> Response:
    path = _file(gallery, request)
    try:
        with opened(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_PICTURE_BYTES or image_type(file.peek(16)) is None:  # type: ignore[attr-defined]
                raise HTTPException(404, "this is not a picture")
            body = file.read()
    except OSError as error:
        raise HTTPException(404, "the picture is gone") from error
    return _image(body, request)


def _thumbs(gallery: Gallery) -> Callable[[Request], Awaitable[Response]]:
    limiter: list[anyio.CapacityLimiter] = []  # belongs to a loop, so it is made by the first who asks in it

    def small(request: Request) -> Response:
        size = _number(request, "s", THUMBNAIL_SIZES[0])
        if size not in THUMBNAIL_SIZES:
            raise HTTPException(400, f"s is one of {', '.join(map(str, THUMBNAIL_SIZES))}")
        body = gallery.thumbnail(_file(gallery, request), size)
        if body is None:
            raise HTTPException(404, "the picture is gone or cannot be read")
        return _image(body, request)

    async def answer(request: Request) -> Response:
        if not limiter:
            limiter.append(anyio.CapacityLimiter(NUM_THUMBNAILERS))
        return await anyio.to_thread.run_sync(small, request, limiter=limiter[0])

    return answer


def _control(gallery: Gallery, request: Request) -> Response:
    entry = _entry(gallery, request)
    action = request.path_params["action"]
    if action not in ACTIONS or gallery.ask is None:
        raise HTTPException(404, "there is no such request")
    if entry.kind not in CONTROLLED or entry.summary()["state"] != "running":
        raise HTTPException(409, "only a training that is running can be asked")
    try:
        gallery.ask(entry.folder, action)
    except InputError as error:  # it has ended in this moment, or its folder is another person's
        raise HTTPException(409, error.found) from error
    return _json({"asked": action}, 202)


# -- what a request names


def _entry(gallery: Gallery, request: Request) -> Entry:
    id = request.path_params["id"]
    entry = gallery.catalog.get(id) if ID.fullmatch(id) else None
    if entry is None:
        raise HTTPException(404, "there is no such run")
    return entry


def _ability(entry: Entry, name: str) -> Callable[..., Any]:
    """What only some kinds of runs can do."""
    method: Callable[..., Any] | None = getattr(entry, name, None)
    if method is None:
        raise HTTPException(404, f"a run of {entry.kind} has no {name}")
    return method


def _key(request: Request) -> str:
    key: str = request.path_params["key"]
    if not KEY.fullmatch(key):
        raise HTTPException(404, "there is no such picture")
    return key


def _file(gallery: Gallery, request: Request) -> Path:
    """The file of a key, and once more proof that it lies in its run: entries promise it, and this is where it would hurt."""
    id, key = request.path_params["id"], _key(request)
    entry = gallery.catalog.get(id) if ID.fullmatch(id) else None
    path = entry.picture(key) if entry is not None else None
    if path is not None and entry is not None and not path.resolve().is_relative_to(entry.folder.resolve()):
        path = None
    if path is None and ID.fullmatch(id):
        path = gallery.score_picture(id, key)
    if path is None or not path.is_file():
        raise HTTPException(404, "there is no such picture")
    return path


def _number(request: Request, name: str, default: Any, *, low: int = -(2**63), high: int = 2**63 - 1) -> Any:
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not re.fullmatch(r"-?[0-9]{1,19}", text) or not low <= int(text) <= high:
        raise HTTPException(400, f"{name} is a whole number" + (f" up to {high}" if high < 2**62 else ""))
    return int(text)


def _word(request: Request, name: str) -> str:
    text = request.query_params.get(name, "")
    if not WORD.fullmatch(text):
        raise HTTPException(400, f"{name} is at most 400 letters")
    return text


def _image(body: bytes, request: Request) -> Response:
    """Typed by what it is: a file of another kind under a picture's name is not shown."""
    kind = image_type(body)
    if kind is None:
        raise HTTPException(404, "this is not a picture")
    headers = {"Cache-Control": FOREVER if request.query_params.get("v") else "private, no-cache"}
    return Response(body, headers=headers, media_type=kind)


def image_type(body: bytes) -> str | None:
    if body.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if body.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if body[:4] == b"RIFF" and body[8:12] == b"WEBP":
        return "image/webp"
    return None


# -- serving


class Server(uvicorn.Server):
    """uvicorn, but pages that listen are told to go, where it would wait for them for ever, and a signal is an exit code."""

    def __init__(self, app: App, changes: Changes) -> None:
        # One parser and one loop everywhere, whatever else is installed.
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=1,
            )
        )
        self.changes = changes
        self.stopped_by = 0

    def handle_exit(self, sig: int, frame: object) -> None:
        self.stopped_by = self.stopped_by or sig
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.changes.close()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; OSError where it cannot."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a laptop that was shut does not say goodbye
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, CLIENT_LOST_S * 1000)
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
