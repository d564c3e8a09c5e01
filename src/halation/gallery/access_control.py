"""Access control for the page: a token in the link, then a cookie; and connection limits.

Cross-origin requests and requests with an unknown Host header are rejected.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import re
import secrets
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Protocol

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
SECURITY_HEADERS_BYTES = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
CONTROL_PATH = re.compile(r"/api/runs/[0-9a-f]{10}/control/(?:sample|save|stop)")
AUTHORITY = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9](?:[a-z0-9._-]{0,251}[a-z0-9])?)(?::([0-9]{1,5}))?")
COOKIE_PREFIX = "halation"
MAX_CLOSED_PER_S = 1600
"""Limit on closing connections of one address for new ones: its queue of 2,048 is processed in 1.3 s."""
PER_ADDRESS_SHARE = 2
"""One address may hold 1/PER_ADDRESS_SHARE of all connections without the token or the cookie."""
FORBIDDEN_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">\
<title>Halation</title></head>
<body><h1>This page needs its link</h1>
<p>Open the link that <code>halation gallery</code> printed where it was started: it ends in \
<code>?token=</code> and a long word.</p>
<p>A gallery that was started again has a new link.</p></body></html>
"""
# After a navigation from another site, browsers do not send a SameSite=Strict cookie in the redirect that sets it. They
# send it in a navigation that starts from this page.
REDIRECT_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=/"><title>Halation</title></head>
<body><p><a href="/">Open the gallery</a></p></body></html>
"""


def new_token() -> str:
    """Return 256 random bits, URL-safe."""
    return secrets.token_urlsafe(32)


def is_loopback(host: str) -> bool:
    """Return True if an address or name is loopback."""
    if host == "localhost":
        return True
    address = _parse_ip(host)
    return address is not None and address.is_loopback


def parse_authority(text: str) -> tuple[str, int] | None:
    """Name (or address, without brackets) and port of a Host header; None if it is invalid."""
    match = AUTHORITY.fullmatch(text.lower())
    if match is None:
        return None
    name, port = match[1].strip("[]"), int(match[2] or 80)
    if port > 65535 or (match[1].startswith("[") and _parse_ip(name) is None):
        return None
    return name, port


class AllowedHosts:
    """Host names under which the page is served; this prevents DNS rebinding.

    Any port is allowed: through `ssh -L 9000:127.0.0.1:8642` the page is at port 9000. If the page listens on the
    network, any IP address is allowed, because machines do not know all of theirs (containers, routers) and an address
    cannot be rebound. Names are limited to those of the machine.
    """

    def __init__(self, listen_host: str, host_names: Iterable[str] = ()) -> None:
        self.is_public = not is_loopback(listen_host.lower())
        self.host_names = {name.lower() for name in host_names}
        if self.is_public:
            self.host_names.add(listen_host.lower())

    def add(self, name: str) -> None:
        """Add another name of this machine, found later because a network lookup may take seconds."""
        self.host_names.add(name.lower())

    def is_allowed(self, name: str) -> bool:
        if is_loopback(name):
            return True
        return self.is_public and (_parse_ip(name) is not None or name in self.host_names)


class AccessMiddleware:
    """Middleware that checks requests, logs in by token and adds security headers.

    The cookie's name contains the port that the browser uses, because browsers send cookies to all ports of a host,
    and two galleries (or two tunnels) must not overwrite each other's.
    """

    def __init__(self, app: App, *, token: str, allowed_hosts: AllowedHosts, allow_control: bool) -> None:
        self.app = app
        self.allowed_hosts = allowed_hosts
        self.allow_control = allow_control
        self._token = token.encode()
        # Not the token itself: browsers also send cookies to other servers on other ports of this host.
        self._cookie_value = hashlib.blake2b(b"halation gallery cookie", key=self._token, digest_size=32).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # the page has none
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        send = _add_security_headers(send)
        refusal = self._refusal(scope)
        if refusal is not None:
            status, sentence = refusal
            methods = b"POST" if self._is_control(scope) else b"GET, HEAD"
            headers = [(b"allow", methods)] if status == 405 else []
            await _send_response(send, status, json.dumps({"error": sentence}), "application/json", headers)
        elif scope["path"] == "/" and _query_values(scope, "token"):
            await self._log_in(scope, send)
        elif self._has_cookie(scope):
            _mark_authorised(scope)
            await self.app(scope, receive, send)
        elif scope["path"] == "/":
            await _send_response(send, 403, FORBIDDEN_PAGE, "text/html; charset=utf-8")
        else:
            sentence = "open the link that halation gallery printed"
            await _send_response(send, 403, json.dumps({"error": sentence}), "application/json")

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Status and message if a request is rejected before its token or cookie is checked."""
        hosts, origins = _header_values(scope, b"host"), _header_values(scope, b"origin")
        here = parse_authority(hosts[0]) if len(hosts) == 1 else None
        if here is None or not self.allowed_hosts.is_allowed(here[0]):
            return 403, "unknown host name; open the link as it was printed"
        own_origins = [f"{scheme}://{hosts[0].lower()}" for scheme in ("http", "https")]  # a proxy may have added TLS
        if any(origin.lower() not in own_origins for origin in origins):
            return 403, "cross-origin requests are not allowed"
        method = scope["method"]
        if method not in ("GET", "HEAD") and not (method == "POST" and self._is_control(scope)):
            return 405, "this page is read-only"
        if method == "POST" and not origins:
            return 403, "a POST request needs an Origin header"
        if all(site in ("same-origin", "none") for site in _header_values(scope, b"sec-fetch-site")):
            return None
        # By the browser's Fetch metadata, the request comes from another page: only links to "/" are allowed.
        is_navigation = _header_values(scope, b"sec-fetch-mode") == ["navigate"]
        is_page = _header_values(scope, b"sec-fetch-dest") in ([], ["document"])
        if is_navigation and is_page and scope["path"] == "/" and method == "GET":
            return None
        return 403, "cross-origin requests are not allowed"

    def _is_control(self, scope: Scope) -> bool:
        return self.allow_control and CONTROL_PATH.fullmatch(scope["path"]) is not None

    async def _log_in(self, scope: Scope, send: Send) -> None:
        given = _query_values(scope, "token")
        if not (_any_equal(given, self._token) or self._has_cookie(scope)):
            await _send_response(send, 403, FORBIDDEN_PAGE, "text/html; charset=utf-8")
            return
        _mark_authorised(scope)
        cookie = f"{self._cookie_name(scope)}={self._cookie_value}; HttpOnly; SameSite=Strict; Path=/"
        headers = [(b"set-cookie", cookie.encode())]
        if _header_values(scope, b"sec-fetch-site") in (["cross-site"], ["same-site"]):
            await _send_response(send, 200, REDIRECT_PAGE, "text/html; charset=utf-8", headers)
        else:
            await _send_response(send, 303, "", "text/html; charset=utf-8", [*headers, (b"location", b"/")])

    def _cookie_name(self, scope: Scope) -> str:
        here = parse_authority(_header_values(scope, b"host")[0])
        assert here is not None
        return f"{COOKIE_PREFIX}_{here[1]}"

    def _has_cookie(self, scope: Scope) -> bool:
        name = self._cookie_name(scope)
        pairs = [pair.strip().partition("=") for line in _header_values(scope, b"cookie") for pair in line.split(";")]
        return _any_equal([value for key, _, value in pairs if key == name], self._cookie_value.encode())


class Connection(Protocol):
    """The interface of an open connection that the table needs."""

    address: str
    """Address of an IPv4 client; network of an IPv6 client, which can use any address in it."""
    is_authorised: bool
    """True if a request of the connection had the token or the cookie."""
    opened_at: float
    """In seconds of the clock of `accept_delay_s`."""

    @property
    def is_idle(self) -> bool:
        """True if no request is in progress and nothing is left to send."""
        ...

    def is_overdue(self) -> bool:
        """Return True if the next request, or reading a response, exceeded its time limit."""
        ...

    def abort(self) -> None: ...


class ConnectionTable:
    """Open connections; at the limit, selects the one to close for a new one.

    Unauthorised connections (without the token or the cookie) are closed first: the oldest of the address that has most
    of them. So a client with 5,000 silent connections closes its own, and a browser at the same address is served,
    because its request arrives with its connection. Next is the oldest idle connection. Responses in progress are never
    aborted for a new connection.
    """

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self.max_per_address = max_connections // PER_ADDRESS_SHARE
        self.num_closed = 0
        """Connections that were closed or rejected because of the limits."""
        self._connections: dict[Connection, None] = {}  # in the order in which they were opened
        self._unauthorised: dict[str, dict[Connection, None]] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: Connection) -> None:
        self._connections[connection] = None
        self._unauthorised.setdefault(connection.address, {})[connection] = None

    def remove(self, connection: Connection) -> None:
        self._connections.pop(connection, None)
        self._remove_unauthorised(connection)

    def mark_authorised(self, connection: Connection) -> None:
        connection.is_authorised = True
        self._remove_unauthorised(connection)

    def make_room(self, address: str) -> bool:
        """Make room for a connection from `address`; return False if none can be closed."""
        same_address = self._unauthorised.get(address, {})
        if len(same_address) >= self.max_per_address:
            self._close(next(iter(same_address)))
        elif len(self) >= self.max_connections and not self.close_one():
            self.num_closed += 1
            return False
        return True

    def accept_delay_s(self, now: float) -> float:
        """Seconds to leave new connections in the kernel's queue, if those to close are too new.

        A request may arrive some milliseconds after its connection, through a tunnel or from a busy machine.
        """
        largest = max(self._unauthorised.values(), key=len, default={})
        if not largest or (len(largest) < self.max_per_address and len(self) < self.max_connections):
            return 0.0
        return next(iter(largest)).opened_at + self.max_per_address / MAX_CLOSED_PER_S - now

    def close_one(self) -> bool:
        """Close the least needed connection; return False if all of them are in use."""
        largest = max(self._unauthorised.values(), key=len, default={})
        idle = (connection for connection in self._connections if connection.is_authorised and connection.is_idle)
        connection = next(iter(largest), None) or next(idle, None)
        if connection is not None:
            self._close(connection)
        return connection is not None

    def close_overdue(self) -> None:
        for connection in [connection for connection in self._connections if connection.is_overdue()]:
            connection.abort()

    def _close(self, connection: Connection) -> None:
        self.num_closed += 1
        self.remove(connection)
        connection.abort()

    def _remove_unauthorised(self, connection: Connection) -> None:
        same_address = self._unauthorised.get(connection.address, {})
        same_address.pop(connection, None)
        if not same_address:
            self._unauthorised.pop(connection.address, None)


def client_network(host: str) -> str:
    """The address of an IPv4 client, the /64 network of an IPv6 client."""
    address = _parse_ip(host.partition("%")[0])
    if not isinstance(address, ipaddress.IPv6Address):
        return host
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False))


def _mark_authorised(scope: Scope) -> None:
    """Mark the connection, so that it is closed after unauthorised ones."""
    connection = scope.get("state", {}).get("connection")
    if connection is not None:
        connection.mark_authorised()


def _any_equal(given: Iterable[str], secret: bytes) -> bool:
    """Compare in constant time."""
    return any(hmac.compare_digest(value.encode("utf-8", "surrogateescape"), secret) for value in given)


def _header_values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key == name]


def _query_values(scope: Scope, name: str) -> list[str]:
    query = scope["query_string"].decode("latin-1")
    pairs = (pair.partition("=") for pair in query.split("&"))
    return [urllib.parse.unquote(value, errors="surrogateescape") for key, _, value in pairs if key == name]


def _parse_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _add_security_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", []))
            present = {key.lower() for key, _ in headers}
            headers += [(key, value) for key, value in SECURITY_HEADERS_BYTES if key not in present]
            if b"cache-control" not in present:
                headers.append((b"cache-control", b"no-store"))
            message = {**message, "headers": headers}
        await send(message)

    return send_with_headers


async def _send_response(
    send: Send, status: int, text: str, content_type: str, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    body = text.encode()
    own = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": body})
