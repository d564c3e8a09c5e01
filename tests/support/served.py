"""A gallery that answers real requests on a real port, in a thread of the test's own process, and somebody who asks it."""

from __future__ import annotations

import contextlib
import functools
import gzip
import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halation.gallery.access_control import AllowedHosts, new_token
from halation.gallery.command import build_catalog
from halation.gallery.evaluation_reports import ScoreIndex
from halation.gallery.event_stream import ChangeFeed
from halation.gallery.server import GalleryContext, GalleryServer, build_app, open_listener
from halation.gallery.thumbnails import ThumbnailCache
from halation.runs import control_requests


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        def refuse(word: str) -> None:
            raise ValueError(f"{word} is not JSON")

        assert self.headers["content-type"] == "application/json"
        body = gzip.decompress(self.body) if self.headers.get("content-encoding") == "gzip" else self.body
        return json.loads(body, parse_constant=refuse)


@dataclass(frozen=True, kw_only=True)
class Visitor:
    """Whoever opened the link."""

    port: int
    token: str
    changes: ChangeFeed

    @functools.cached_property
    def cookie(self) -> str:
        entered = self.ask(f"/?token={self.token}", cookie="")
        assert entered.status == 303
        return entered.headers["set-cookie"].partition(";")[0]

    def ask(self, path: str, *, method: str = "GET", cookie: str | None = None, **headers: str) -> Answer:
        """`path` goes over the wire as it is given, unlike in a browser, which would tidy it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            connection.putrequest(method, path, skip_host="host" in headers, skip_accept_encoding=True)
            said = {"cookie": self.cookie if cookie is None else cookie, **headers}
            for name, value in said.items():
                connection.putheader(name.replace("_", "-"), value)
            connection.endheaders()
            response = connection.getresponse()
            body = response.read()
            return Answer(status=response.status, headers={k.lower(): v for k, v in response.getheaders()}, body=body)

    def ids(self) -> dict[str, str]:
        return {run["name"]: run["id"] for run in self.ask("/api/runs").json["runs"]}

    @contextlib.contextmanager
    def listening(self, **headers: str) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            said = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("GET", "/api/events", headers={"cookie": self.cookie, **said})
            with connection.getresponse() as response:
                yield response


@contextlib.contextmanager
def serving(
    *folders: Path, cache: Path, allow_control: bool = False, look_every_s: float = 0.05, heartbeat_s: float = 15.0
) -> Iterator[Visitor]:
    catalog = build_catalog(folders)
    scores = ScoreIndex(catalog)
    changes = ChangeFeed(catalog, refresh_extra=scores.refresh, poll_every_s=look_every_s, heartbeat_s=heartbeat_s)
    gallery = GalleryContext(
        catalog=catalog,
        change_feed=changes,
        roots=tuple(folder.name for folder in folders),
        version="0.0.0",
        get_thumbnail=ThumbnailCache(cache).get,
        get_scores=scores.build_response,
        find_score_image=scores.image,
        send_control=control_requests.send_request if allow_control else None,
    )
    token = new_token()
    with open_listener("127.0.0.1", 0) as listener:
        server = GalleryServer(build_app(gallery, token=token, allowed_hosts=AllowedHosts("127.0.0.1")), changes)
        changes.start()
        assert changes.first_poll_done.wait(30)
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
        thread.start()
        try:
            yield Visitor(port=listener.getsockname()[1], token=token, changes=changes)
        finally:
            server.should_exit = True
            thread.join(30)
        assert not thread.is_alive()
