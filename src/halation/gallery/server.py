"""The HTTP server of the page. Routes are fixed: no part of a request becomes a file path."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import re
import resource
import socket
import sys
import termios
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from halation.errors import InputError
from halation.gallery.access_control import AccessMiddleware, AllowedHosts, App, ConnectionTable, client_network
from halation.gallery.event_stream import ChangeFeed, EventStream
from halation.gallery.generation_runs import RowQuery
from halation.gallery.run_catalog import RunCatalog, SafeRunEntry
from halation.gallery.run_file_reader import NUM_LOG_LINES, encode_json, open_regular_file

log = logging.getLogger(__name__)

PAGE_FOLDER = Path(__file__).with_name("page")
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
RUN_ID = re.compile(r"[0-9a-f]{10}")
IMAGE_KEY = re.compile(r"[a-z][0-9a-f]{0,16}(?:\.[0-9]{1,9})?(?:\.raw)?")
QUERY_TEXT = re.compile(r"[^\x00-\x1f\x7f]{0,400}")
THUMBNAIL_SIZES = (256, 512)
MAX_IMAGE_BYTES = 256 << 20
MAX_ROWS = 1_000
NUM_THUMBNAIL_WORKERS = 4
"""Thumbnails made concurrently: each keeps a core busy, and other requests should not wait for them."""
CACHE_FOREVER = "private, max-age=31536000, immutable"
ROW_STATE_FILTERS = ("", "done", "failed", "open")
CONTROL_ACTIONS = ("sample", "save", "stop")
CONTROLLABLE_KINDS = ("train", "distill")
LISTEN_BACKLOG = 2048
TCP_USER_TIMEOUT_S = 60
MAX_CONNECTIONS = 512
MIN_CONNECTIONS = 32
NUM_RESERVED_DESCRIPTORS = 64
DESCRIPTORS_PER_CONNECTION = 3
"""One for the socket, the others for files of a response."""
EVENT_STREAM_SHARE = 4
"""At most 1/EVENT_STREAM_SHARE of the connections may be event streams."""
ACCEPT_BATCH = 4
"""Connections accepted before the open ones are read again, so that requests are read while connections are new."""
ACCEPT_RETRY_S = 0.2
READ_BYTES = 16 << 10
"""Bytes passed to the parser at a time; a header that is not complete after two of them is rejected."""
REQUEST_TIMEOUT_S = 10.0
"""Time limit for a complete request header; without the token or the cookie, for the whole connection."""
KEEP_ALIVE_S = 5
SEND_TIMEOUT_S = 60.0
MIN_SEND_BYTES = 64 << 10
"""A client must read at least this much of a response in SEND_TIMEOUT_S."""
LOG_CLOSED_EVERY_S = 60.0
IMAGE_CHUNK_BYTES = 4 << 20
"""Larger images are streamed, so that many slow clients do not hold many images in memory."""

RequestHandler = Callable[["GalleryContext", Request], Any]


@dataclass(frozen=True, kw_only=True)
class GalleryContext:
    """Data and functions behind the routes."""

    catalog: RunCatalog
    change_feed: ChangeFeed
    roots: tuple[str, ...]
    version: str
    get_thumbnail: Callable[[Path, int], bytes | None]
    """Thumbnail of an image file; None if it is no image."""
    get_scores: Callable[[], Mapping[str, Any]]
    """Response of /api/scores."""
    find_score_image: Callable[[str, str], Path | None]
    """File of an image key of a report, by the id of its run or of the report."""
    send_control: Callable[[Path, str], object] | None = None
    """Sends a request to a running training; None if the page is read-only."""


def build_app(gallery: GalleryContext, *, token: str, allowed_hosts: AllowedHosts) -> App:
    """Build the ASGI app: routes, compression and access control."""
    max_event_streams = max_connections() // EVENT_STREAM_SHARE
    page_files = {path.name: path for path in PAGE_FOLDER.iterdir() if path.suffix in CONTENT_TYPES}

    def route(path: str, handler: RequestHandler, *, method: str = "GET") -> Route:
        def respond(request: Request) -> Response:
            value = handler(gallery, request)
            return value if isinstance(value, Response) else _json_response(value)

        async def answer(request: Request) -> Response:
            return await anyio.to_thread.run_sync(respond, request)

        return Route(path, answer, methods=[method])

    async def events(request: Request) -> Any:
        last_event_id = request.headers.get("last-event-id", "")
        return EventStream(
            gallery.change_feed,
            last_event_id=last_event_id,
            head_only=request.method == "HEAD",
            max_streams=max_event_streams,
        )

    async def static(request: Request) -> Response:
        path = page_files.get(request.path_params.get("name", "index.html"))
        if path is None:
            raise HTTPException(404, "there is no such file")
        body = path.read_bytes()
        tag = f'"{hashlib.blake2b(body, digest_size=8).hexdigest()}"'
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if_none_match = request.headers.get("if-none-match", "")
        if tag in (part.strip().removeprefix("W/") for part in if_none_match.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=CONTENT_TYPES[path.suffix])

    state = {"version": gallery.version, "control": gallery.send_control is not None, "roots": list(gallery.roots)}
    routes = [
        Route("/", static),
        Route("/static/{name}", static),
        route("/api/state", lambda gallery, request: state),
        route("/api/runs", lambda gallery, request: {"runs": [entry.summary() for entry in gallery.catalog.entries()]}),
        route("/api/runs/{id}", lambda *asked: _find_entry(*asked).detail()),
        route("/api/runs/{id}/metrics", _get_metrics),
        route("/api/runs/{id}/log", lambda *asked: {"lines": _find_entry(*asked).log(NUM_LOG_LINES)}),
        route("/api/runs/{id}/config", lambda *asked: _find_entry(*asked).config()),
        route("/api/runs/{id}/rows", _get_rows),
        route("/api/runs/{id}/spec/{key}", _get_spec),
        route("/api/scores", lambda gallery, request: gallery.get_scores()),
        Route("/api/events", events),
        route("/pictures/{id}/{key}", _get_image),
        Route("/thumbs/{id}/{key}", _thumbnail_handler(gallery)),
    ]
    if gallery.send_control is not None:
        routes.append(route("/api/runs/{id}/control/{action}", _post_control, method="POST"))
    app = Starlette(
        routes=routes,
        middleware=[Middleware(GZipMiddleware, minimum_size=1000, compresslevel=4)],
        exception_handlers={HTTPException: _http_error_response, Exception: _server_error_response},
    )
    app.router.redirect_slashes = False
    return AccessMiddleware(
        app, token=token, allowed_hosts=allowed_hosts, allow_control=gallery.send_control is not None
    )


# -- responses


def _json_response(value: Any, status: int = 200) -> Response:
    return Response(encode_json(value).encode(), status, media_type="application/json")


async def _http_error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = _json_response({"error": error.detail}, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _server_error_response(request: Request, error: Exception) -> Response:
    """Omit the message, which may contain a path; the server prints the traceback."""
    return _json_response({"error": "internal error; see the terminal where the gallery was started"}, 500)


def _get_metrics(gallery: GalleryContext, request: Request) -> Any:
    metrics = _require_method(_find_entry(gallery, request), "metrics")
    return metrics(_int_param(request, "after", 0, low=0))


def _get_rows(gallery: GalleryContext, request: Request) -> Any:
    search = _require_method(_find_entry(gallery, request), "search")
    state = _text_param(request, "state")
    if state not in ROW_STATE_FILTERS:
        raise HTTPException(400, f"state must be {', '.join(filter(None, ROW_STATE_FILTERS))} or omitted")
    query = RowQuery(
        offset=_int_param(request, "offset", 0, low=0),
        limit=_int_param(request, "limit", 100, low=0, high=MAX_ROWS),
        text=_text_param(request, "q"),
        state=state,
        worker=_text_param(request, "worker"),
        seed=_int_param(request, "seed", None),
    )
    return search(query)


def _get_spec(gallery: GalleryContext, request: Request) -> Any:
    spec = _require_method(_find_entry(gallery, request), "spec")(_image_key(request))
    if spec is None:
        raise HTTPException(404, "there is no such image")
    return spec


def _get_image(gallery: GalleryContext, request: Request) -> Response:
    path = _image_path(gallery, request)
    try:
        with open_regular_file(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes > MAX_IMAGE_BYTES:
                raise HTTPException(404, "this is not an image")
            is_large = num_bytes > IMAGE_CHUNK_BYTES
            body = file.read(16) if is_large else file.read()
    except OSError as error:
        raise HTTPException(404, "the image is gone") from error
    return _image_response(body, request, large_file=path if is_large else None)


def _read_chunks(path: Path) -> Iterator[bytes]:
    """Stream a large file in chunks, as fast as the client reads it."""
    try:
        file = open_regular_file(path)
    except OSError:  # removed after its type was read
        return
    with file:
        while file.tell() < MAX_IMAGE_BYTES and (chunk := file.read(IMAGE_CHUNK_BYTES)):
            yield chunk


def _thumbnail_handler(gallery: GalleryContext) -> Callable[[Request], Awaitable[Response]]:
    limiter: list[anyio.CapacityLimiter] = []  # belongs to an event loop, so the first request creates it

    def get_thumbnail(request: Request) -> Response:
        size = _int_param(request, "s", THUMBNAIL_SIZES[0])
        if size not in THUMBNAIL_SIZES:
            raise HTTPException(400, f"s must be one of {', '.join(map(str, THUMBNAIL_SIZES))}")
        body = gallery.get_thumbnail(_image_path(gallery, request), size)
        if body is None:
            raise HTTPException(404, "the image is gone or cannot be read")
        return _image_response(body, request)

    async def answer(request: Request) -> Response:
        if not limiter:
            limiter.append(anyio.CapacityLimiter(NUM_THUMBNAIL_WORKERS))
        return await anyio.to_thread.run_sync(get_thumbnail, request, limiter=limiter[0])

    return answer


def _post_control(gallery: GalleryContext, request: Request) -> Response:
    entry = _find_entry(gallery, request)
    action = request.path_params["action"]
    if action not in CONTROL_ACTIONS or gallery.send_control is None:
        raise HTTPException(404, "there is no such request")
    if entry.kind not in CONTROLLABLE_KINDS or entry.summary()["state"] != "running":
        raise HTTPException(409, "only a running training accepts requests")
    try:
        gallery.send_control(entry.folder, action)
    except InputError as error:  # it has just ended, or its folder is not writable
        raise HTTPException(409, error.found) from error
    return _json_response({"asked": action}, 202)


# -- request parameters


def _find_entry(gallery: GalleryContext, request: Request) -> SafeRunEntry:
    id = request.path_params["id"]
    entry = gallery.catalog.get(id) if RUN_ID.fullmatch(id) else None
    if entry is None:
        raise HTTPException(404, "there is no such run")
    return entry


def _require_method(entry: SafeRunEntry, name: str) -> Callable[..., Any]:
    """Return a method that only some kinds of runs have, or raise 404."""
    method: Callable[..., Any] | None = getattr(entry, name, None)
    if method is None:
        raise HTTPException(404, f"a run of {entry.kind} has no {name}")
    return method


def _image_key(request: Request) -> str:
    key: str = request.path_params["key"]
    if not IMAGE_KEY.fullmatch(key):
        raise HTTPException(404, "there is no such image")
    return key


def _image_path(gallery: GalleryContext, request: Request) -> Path:
    """File of a key. Entries return only files inside their run; this is checked again here."""
    id, key = request.path_params["id"], _image_key(request)
    entry = gallery.catalog.get(id) if RUN_ID.fullmatch(id) else None
    path = entry.image(key) if entry is not None else None
    if path is not None and entry is not None and not path.resolve().is_relative_to(entry.folder.resolve()):
        path = None
    if path is None and RUN_ID.fullmatch(id):
        path = gallery.find_score_image(id, key)
    if path is None or not path.is_file():
        raise HTTPException(404, "there is no such image")
    return path


def _int_param(request: Request, name: str, default: Any, *, low: int = -(2**63), high: int = 2**63 - 1) -> Any:
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not re.fullmatch(r"-?[0-9]{1,19}", text) or not low <= int(text) <= high:
        raise HTTPException(400, f"{name} must be a whole number" + (f" up to {high}" if high < 2**62 else ""))
    return int(text)


def _text_param(request: Request, name: str) -> str:
    text = request.query_params.get(name, "")
    if not QUERY_TEXT.fullmatch(text):
        raise HTTPException(400, f"{name} must have at most 400 characters")
    return text


def _image_response(body: bytes, request: Request, *, large_file: Path | None = None) -> Response:
    """Response with the media type of the content; a file that is no image is rejected.

    `body` is the whole image, or the start of `large_file`.
    """
    media_type = image_type(body)
    if media_type is None:
        raise HTTPException(404, "this is not an image")
    headers = {"Cache-Control": CACHE_FOREVER if request.query_params.get("v") else "private, no-cache"}
    if large_file is None:
        return Response(body, headers=headers, media_type=media_type)
    chunks = _read_chunks(large_file) if request.method == "GET" else ()
    return StreamingResponse(chunks, headers=headers, media_type=media_type)


def image_type(body: bytes) -> str | None:
    if body.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if body.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if body[:4] == b"RIFF" and body[8:12] == b"WEBP":
        return "image/webp"
    return None


# -- serving


def max_connections() -> int:
    """Limit of open connections, from the limit of open files of this process."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    affordable = (soft_limit - NUM_RESERVED_DESCRIPTORS) // DESCRIPTORS_PER_CONNECTION
    return min(MAX_CONNECTIONS, max(MIN_CONNECTIONS, affordable))


class GalleryConnection(H11Protocol):
    """A connection of uvicorn with time limits for requests and responses."""

    def __init__(self, server: GalleryServer, address: str) -> None:
        super().__init__(server.config, server.server_state, {"connection": self})
        self.connection_table = server.connection_table
        self.address = address
        self.is_authorised = False
        self.opened_at = self._waiting_since = self._sent_at = self.loop.time()
        self._num_unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.connection_table.add(self)

    def data_received(self, data: bytes) -> None:
        # In pieces, because the parser has no size limit for a header that arrives in one piece.
        for start in range(0, len(data), READ_BYTES):
            if not self.transport.is_closing():
                super().data_received(data[start : start + READ_BYTES])

    def connection_lost(self, exc: Exception | None) -> None:
        self.connection_table.remove(self)
        super().connection_lost(exc)

    def mark_authorised(self) -> None:
        self.connection_table.mark_authorised(self)

    def on_response_complete(self) -> None:
        self._waiting_since = self.loop.time()
        super().on_response_complete()

    def resume_writing(self) -> None:
        self._sent_at = self.loop.time()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # the invalid data follow a request that was already answered
            self.transport.close()

    @property
    def is_idle(self) -> bool:
        is_answered = self.cycle is None or self.cycle.response_complete
        return is_answered and not self.transport.get_write_buffer_size()

    def is_overdue(self) -> bool:
        now = self.loop.time()
        if not self.is_authorised:
            return now - self.opened_at > REQUEST_TIMEOUT_S
        if self.is_idle and now - self._waiting_since > REQUEST_TIMEOUT_S:
            return True
        num_unsent = self._count_unsent()
        if num_unsent == 0 or num_unsent <= self._num_unsent - MIN_SEND_BYTES:
            self._sent_at, self._num_unsent = now, num_unsent
        self._num_unsent = max(num_unsent, self._num_unsent)
        return now - self._sent_at > SEND_TIMEOUT_S

    def _count_unsent(self) -> int:
        """Bytes not yet sent to the client, including those in the kernel's buffer.

        The kernel buffers megabytes and accepts more in large steps.
        """
        num_unsent = self.transport.get_write_buffer_size()
        if num_unsent:
            with contextlib.suppress(OSError):  # not supported on every system
                queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
                num_unsent += int.from_bytes(queued, sys.byteorder)
        return num_unsent

    def abort(self) -> None:
        self.transport.abort()


class GalleryServer(uvicorn.Server):
    """uvicorn with connection limits.

    It ends event streams on shutdown, and records the stop signal for the exit code. It accepts connections itself:
    uvicorn has no limit that is checked before a descriptor is used, and asyncio prints a traceback for each connection
    without a free descriptor.
    """

    def __init__(self, app: App, change_feed: ChangeFeed) -> None:
        # Always the same parser and event loop, whatever else is installed.
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
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )
        self.change_feed = change_feed
        self.connection_table = ConnectionTable(max_connections())
        self.stop_signal = 0
        self._num_logged = 0
        self._logged_at = -LOG_CLOSED_EVERY_S

    def handle_exit(self, sig: int, frame: object) -> None:
        self.stop_signal = self.stop_signal or sig
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        for listener in sockets or []:
            self._start_accepting(listener)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in sockets or []:
            asyncio.get_running_loop().remove_reader(listener)
        self.change_feed.close()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # once a second
            self.connection_table.close_overdue()
            self._log_closed()
        return await super().on_tick(counter)

    def _start_accepting(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:  # not closed meanwhile
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPT_BATCH):
            delay_s = self.connection_table.accept_delay_s(loop.time())
            if delay_s > 0:
                loop.remove_reader(listener)
                loop.call_later(delay_s, self._start_accepting, listener)
                return
            try:
                connected, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # out of descriptors, in this process or on the machine
                self.connection_table.close_one()
                loop.remove_reader(listener)
                loop.call_later(ACCEPT_RETRY_S, self._start_accepting, listener)
                return
            network = client_network(address[0])
            if self.connection_table.make_room(network):
                task = loop.create_task(self._adopt(connected, network))
                self.server_state.tasks.add(task)
                task.add_done_callback(self.server_state.tasks.discard)
            else:
                connected.close()

    async def _adopt(self, connected: socket.socket, network: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: GalleryConnection(self, network), connected)
        except OSError:  # the client has already disconnected
            connected.close()

    def _log_closed(self) -> None:
        """Log closed connections at most once a minute, so that clients cannot fill a disk."""
        table, now = self.connection_table, asyncio.get_running_loop().time()
        if table.num_closed > self._num_logged and now - self._logged_at >= LOG_CLOSED_EVERY_S:
            log.warning(
                "halation gallery: warning: too many connections: %d were closed; at most %d may be open, "
                "%d of them from one address without the link's token",
                table.num_closed - self._num_logged,
                table.max_connections,
                table.max_per_address,
            )
            self._num_logged, self._logged_at = table.num_closed, now


def open_listener(host: str, port: int) -> socket.socket:
    """Open a listening socket; raises OSError on failure."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a suspended laptop does not close its connections
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_S * 1000)
        if hasattr(socket, "TCP_DEFER_ACCEPT"):  # the kernel holds back connections that send nothing
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, int(REQUEST_TIMEOUT_S))
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
