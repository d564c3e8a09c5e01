"""Server-sent events about changed runs; one thread polls the disk for all open pages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from starlette.exceptions import HTTPException

from halation.gallery.access_control import Receive, Scope, Send
from halation.gallery.run_catalog import READ_ERRORS

log = logging.getLogger(__name__)

POLL_EVERY_S = 1.0
HEARTBEAT_S = 15.0
RETRY_MS = 2000


class VersionedEntry(Protocol):
    @property
    def version(self) -> int: ...


class PolledCatalog(Protocol):
    """The interface of the run catalog that is polled."""

    def refresh(self) -> list[str]: ...

    def get(self, id: str, /) -> VersionedEntry | None: ...


class ChangeFeed:
    """Numbers every change, and keeps only the last one of each run.

    A page knows the number of the last change it received. So a slow or disconnected page misses only changes that
    later ones replaced, and needs no queue.
    """

    def __init__(
        self,
        catalog: PolledCatalog,
        *,
        refresh_extra: Callable[[], bool] = lambda: False,
        poll_every_s: float = POLL_EVERY_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.catalog = catalog
        self.refresh_extra = refresh_extra
        """Refreshes data that belong to no single run, after the catalog; returns True if they changed."""
        self.poll_every_s = poll_every_s
        self.heartbeat_s = heartbeat_s
        self.first_poll_done = threading.Event()
        """Set after the first poll."""
        self.server_id = secrets.token_hex(4)
        """Distinguishes event numbers of this server from those before a restart."""
        self._number = 0
        self._last_changes: dict[str, int] = {}
        self._listeners: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._error_logged = False

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def start(self) -> None:
        """Start polling, in a daemon thread: a hanging disk must not keep the command alive."""
        threading.Thread(target=self._poll_loop, name="gallery watcher", daemon=True).start()

    def close(self) -> None:
        """Stop polling and end the streams of all pages."""
        self._closed.set()
        self._wake_listeners()

    def publish(self, ids: list[str]) -> None:
        with self._lock:
            for id in ids:
                self._number += 1
                self._last_changes[id] = self._number
        if ids:
            self._wake_listeners()

    def changes_since(self, number: int) -> tuple[int, list[str]]:
        """Number of the newest change, and the ids that changed after `number`, oldest first."""
        with self._lock:
            later = sorted((at, id) for id, at in self._last_changes.items() if at > number)
            return self._number, [id for _, id in later]

    def parse_event_id(self, last_event_id: str) -> int:
        """Number of the last change that a page received, from its Last-Event-ID header.

        A new page has no such header and starts at the newest change; the id of another server starts at 0.
        """
        server_id, _, number = last_event_id.partition(".")
        if server_id == self.server_id and number.isascii() and number.isdigit() and len(number) < 16:
            return int(number)
        return 0 if last_event_id else self.changes_since(0)[0]

    @contextlib.contextmanager
    def subscribe(self) -> Iterator[asyncio.Event]:
        """Yield an event that is set at each change."""
        listener = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._listeners.add(listener)
        try:
            yield listener[1]
        finally:
            with self._lock:
                self._listeners.discard(listener)

    def _poll_loop(self) -> None:
        while not self.closed:
            try:
                changed = self.catalog.refresh()
                self.publish(changed)
                if self.refresh_extra() and "" not in changed:
                    self.publish([""])
            except READ_ERRORS:  # the contents of a folder must not end the page; logged once, not every second
                if not self._error_logged:
                    log.exception("cannot read the runs; retrying every second")
                self._error_logged = True
            self.first_poll_done.set()
            self._closed.wait(self.poll_every_s)

    def _wake_listeners(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for loop, event in listeners:
            with contextlib.suppress(RuntimeError):  # its loop has ended meanwhile
                loop.call_soon_threadsafe(event.set)


class EventStream:
    """The response to GET /api/events; ends when the page disconnects or the server stops."""

    def __init__(self, change_feed: ChangeFeed, *, last_event_id: str, head_only: bool, max_streams: int) -> None:
        self.change_feed = change_feed
        self.last_event_id = last_event_id
        self.head_only = head_only
        self.max_streams = max_streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        # Before the response starts: the page then loads its data once more, and gets every change after that load.
        number = self.change_feed.parse_event_id(self.last_event_id)
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        if self.head_only:
            await send(start)
        else:
            if self.change_feed.num_listeners >= self.max_streams:
                sentence = f"{self.max_streams} pages of this gallery are already open; close some of them"
                raise HTTPException(503, sentence, headers={"Retry-After": "10"})

            async def wait_for_disconnect() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass

            disconnected = asyncio.ensure_future(wait_for_disconnect())
            try:
                with self.change_feed.subscribe() as wake_event:
                    await send(start)
                    await self._send_events(send, number, wake_event, disconnected)
            finally:
                disconnected.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send, number: int, woken: asyncio.Event, left: asyncio.Future[Any]) -> None:
        await _send_text(send, f"retry: {RETRY_MS}\nid: {self.change_feed.server_id}.{number}\n\n")
        while not self.change_feed.closed and not left.done():
            woken.clear()
            number, ids = self.change_feed.changes_since(number)
            for id in ids:
                await _send_text(send, self._format_event(id, number if id == ids[-1] else None))
            if ids or self.change_feed.closed:
                continue
            waiting: asyncio.Future[Any] = asyncio.ensure_future(woken.wait())
            try:
                done, _ = await asyncio.wait(
                    {waiting, left}, timeout=self.change_feed.heartbeat_s, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                waiting.cancel()
            if not done:
                await _send_text(send, ": still here\n\n")

    def _format_event(self, id: str, number: int | None) -> str:
        entry = self.change_feed.catalog.get(id) if id else None
        data: dict[str, Any] = {"id": id} if entry is None else {"id": id, "version": entry.version}
        # Only the last event of a batch has a number: a page that disconnects before it gets the whole batch again.
        id_line = "" if number is None else f"id: {self.change_feed.server_id}.{number}\n"
        return f"event: change\n{id_line}data: {json.dumps(data)}\n\n"


async def _send_text(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
