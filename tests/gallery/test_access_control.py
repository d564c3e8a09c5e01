"""Access needs the link; other host names, pages and methods are rejected."""

from __future__ import annotations

import asyncio
import hmac
import itertools
from typing import Any

import pytest

from halation.gallery import access_control
from halation.gallery.access_control import AccessMiddleware, AllowedHosts, is_loopback, new_token, parse_authority

TOKEN = new_token()
PATHS = ("/", "/static/app.js", "/api/state", "/api/runs", "/api/events", "/pictures/0123456789/g0", "/no/such/path")
METHODS = ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND")
CONTROL = "/api/runs/0123456789/control/stop"
FOREIGN_HOSTS = (
    "evil.example",
    "evil.example:8642",
    "127.0.0.1.evil.example",
    "localhost.evil.example:8642",
    "evil.localhost.example",
    "203.0.113.5:8642",
    "0.0.0.0:8642",
    "user@127.0.0.1",
    "127.0.0.1:8642@evil.example",
    "127.0.0.1:99999",
    "127.0.0.1:",
    "127.0.0.1/..",
    "127.0.0.1 evil.example",
    "[::1",
    "[evil]:80",
    "0x7f.1",
    "",
)
FOREIGN_ORIGINS = (
    "http://evil.example",
    "https://evil.example:8642",
    "null",
    "",
    "http://127.0.0.1:9999",
    "http://localhost:8642",
    "http://127.0.0.1:8642.evil.example",
    "http://127.0.0.1:8642/",
    "file://",
    "chrome-extension://127.0.0.1:8642",
    "127.0.0.1:8642",
)


class Answer:
    """What a guard said, or what the app behind it did."""

    def __init__(self, messages: list[Any]) -> None:
        self.status: int = messages[0]["status"]
        self.headers = {key.decode(): value.decode() for key, value in messages[0]["headers"]}
        self.body = b"".join(message.get("body", b"") for message in messages[1:])
        self.let_in = self.body == b"behind the guard"


def guard(*, names: AllowedHosts | None = None, allow_control: bool = False, token: str = TOKEN) -> AccessMiddleware:
    async def behind(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"behind the guard"})

    return AccessMiddleware(
        behind, token=token, allowed_hosts=names or AllowedHosts("127.0.0.1"), allow_control=allow_control
    )


def ask(
    asked: AccessMiddleware,
    path: str = "/",
    *,
    method: str = "GET",
    query: str = "",
    host: str | None = "127.0.0.1:8642",
    second_host: str | None = None,
    **said: str,
) -> Answer:
    headers = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in said.items()]
    headers += [(b"host", name.encode("latin-1")) for name in (host, second_host) if name is not None]
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode("latin-1"),
        "headers": headers,
    }
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    asyncio.run(asked(scope, receive, send))
    return Answer(messages)


def cookie_of(asked: AccessMiddleware, host: str = "127.0.0.1:8642", token: str = TOKEN) -> str:
    """What a browser sends once it opened the link."""
    return ask(asked, query=f"token={token}", host=host).headers["set-cookie"].partition(";")[0]


def test_the_link_sets_a_cookie_for_every_path_and_removes_the_token() -> None:
    """The link sets a cookie that opens every path and leaves no token in the address."""
    asked = guard()
    entered = ask(asked, query=f"token={TOKEN}")
    assert (entered.status, entered.headers["location"]) == (303, "/")
    assert entered.headers["set-cookie"].endswith("; HttpOnly; SameSite=Strict; Path=/")
    assert TOKEN not in str(entered.headers)
    for path in PATHS:
        for method in ("GET", "HEAD"):
            assert ask(asked, path, method=method, cookie=cookie_of(asked)).let_in
            assert ask(asked, path, method=method, cookie=f"a=b; {cookie_of(asked)}; c").let_in


def test_without_the_cookie_every_path_is_forbidden_and_the_link_is_explained() -> None:
    """Without the cookie every path is forbidden, and the page says where the link is printed."""
    asked = guard()
    name, _, value = cookie_of(asked).partition("=")
    wrong = ["", name, f"{name}=", f"{name}={value[:-1]}", f"{name}={value}x", f"{name}={TOKEN}", f"{name}x={value}"]
    wrong += [f"halation={value}", f"x{name}={value}", value, f"{name}=\xff"]
    for path, cookie in itertools.product(PATHS, wrong):
        assert ask(asked, path, cookie=cookie).status == 403
    said = ask(asked)
    assert "halation gallery" in said.body.decode()
    assert said.headers["content-type"] == "text/html; charset=utf-8"
    assert ask(asked, "/api/runs").headers["content-type"] == "application/json"


def test_a_wrong_token_is_forbidden_and_an_old_link_keeps_the_session() -> None:
    """A wrong token is forbidden and sets no cookie, but an old link does not end a session."""
    asked = guard()
    for token in (
        "",
        "x",
        TOKEN[:-1],
        TOKEN + "x",
        TOKEN.swapcase(),
        "%00",
        f"{TOKEN}%00",
        "\xff",
        "%ff%fe",
        "a&token=b",
    ):
        said = ask(asked, query=f"token={token}")
        assert said.status == 403
        assert "set-cookie" not in said.headers
    assert ask(asked, query="token=old", cookie=cookie_of(asked)).status == 303
    assert ask(asked, "/api/runs", query=f"token={TOKEN}").status == 403


def test_secrets_are_compared_in_a_time_that_does_not_depend_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    equal = hmac.compare_digest

    def counted(left: Any, right: Any) -> bool:
        compared.append((left, right))
        return equal(left, right)

    monkeypatch.setattr(access_control.hmac, "compare_digest", counted)
    asked = guard()
    assert ask(asked, query="token=wrong").status == 403
    assert compared == [(b"wrong", TOKEN.encode())]
    cookie = cookie_of(asked)
    compared.clear()
    assert ask(asked, "/api/runs", cookie=cookie).let_in
    assert len(compared) == 1


def test_two_galleries_on_one_host_have_cookies_of_their_own_also_through_tunnels() -> None:
    first, second = guard(token=new_token()), guard(token=(other := new_token()))
    cookies = [
        cookie_of(guard(), host=host) for host in ("127.0.0.1:8642", "127.0.0.1:8643", "localhost:9000", "127.0.0.1")
    ]
    assert [cookie.partition("=")[0] for cookie in cookies] == [
        "halation_8642", "halation_8643", "halation_9000", "halation_80",
    ]  # fmt: skip
    assert ask(first, "/api/runs", cookie=cookie_of(second, token=other)).status == 403


@pytest.mark.parametrize("method", METHODS)
def test_a_page_that_is_only_looked_at_takes_no_other_method(method: str) -> None:
    asked = guard()
    for path in (*PATHS, CONTROL, "*"):
        for cookie in ("", cookie_of(asked)):
            said = ask(asked, path, method=method, cookie=cookie, origin="http://127.0.0.1:8642")
            assert (said.status, said.headers["allow"]) == (405, "GET, HEAD")


def test_control_takes_a_post_of_our_own_page_and_nothing_else() -> None:
    asked = guard(allow_control=True)
    ours = {"cookie": cookie_of(asked), "origin": "http://127.0.0.1:8642"}
    assert ask(asked, CONTROL, method="POST", **ours).let_in
    assert ask(asked, CONTROL, method="POST", origin=ours["origin"]).status == 403
    assert ask(asked, CONTROL, method="POST", cookie=ours["cookie"]).status == 403
    assert ask(asked, CONTROL, method="POST", sec_fetch_site="same-site", **ours).status == 403
    for origin in FOREIGN_ORIGINS:
        assert ask(asked, CONTROL, method="POST", cookie=ours["cookie"], origin=origin).status == 403
    for method in METHODS[1:]:
        assert ask(asked, CONTROL, method=method, **ours).status == 405
    for path in (*PATHS, CONTROL + "/", CONTROL.replace("stop", "erase"), CONTROL.replace("0123456789", "../../etc")):
        assert ask(asked, path, method="POST", **ours).status == 405


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_a_foreign_name_that_points_here_is_refused_even_with_the_token(host: str) -> None:
    asked = guard()
    assert ask(asked, query=f"token={TOKEN}", host=host).status == 403
    assert ask(asked, "/api/runs", host=host, cookie=cookie_of(asked)).status == 403


def test_a_socket_that_stays_open_is_refused_whoever_asks() -> None:
    async def behind(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("it got past the guard")

    said: list[Any] = []

    async def send(message: Any) -> None:
        said.append(message)

    asked = AccessMiddleware(behind, token=TOKEN, allowed_hosts=AllowedHosts("127.0.0.1"), allow_control=True)
    asyncio.run(asked({"type": "websocket", "path": "/api/runs", "headers": []}, send, send))
    assert said == [{"type": "websocket.close", "code": 1008}]


def test_no_host_or_two_are_refused() -> None:
    asked = guard()
    assert ask(asked, host=None, cookie=cookie_of(asked)).status == 403
    assert ask(asked, host="127.0.0.1:8642", cookie=cookie_of(asked), second_host="evil.example").status == 403
    assert ask(asked, host="127.0.0.1:8642", cookie=cookie_of(asked), second_host="127.0.0.1:8642").status == 403


@pytest.mark.parametrize(
    "host", ["127.0.0.1:9000", "localhost:9000", "LOCALHOST:1", "localhost", "[::1]:9000", "127.8.9.1:80"]
)
def test_any_port_of_a_loopback_name_is_ours_as_it_is_through_a_tunnel(host: str) -> None:
    asked = guard()
    cookie = cookie_of(asked, host=host)
    assert ask(asked, "/api/runs", host=host, cookie=cookie, origin=f"http://{host.lower()}").let_in


@pytest.mark.parametrize("origin", FOREIGN_ORIGINS)
def test_a_foreign_page_is_refused_even_with_the_cookie(origin: str) -> None:
    asked = guard()
    for path in PATHS:
        assert ask(asked, path, cookie=cookie_of(asked), origin=origin).status == 403
    assert "access-control-allow-origin" not in ask(asked, cookie=cookie_of(asked), origin=origin).headers


def test_what_a_browser_says_of_the_asking_page_is_heard() -> None:
    asked = guard()
    cookie = cookie_of(asked)
    for site in ("cross-site", "same-site"):
        for path in PATHS[1:]:
            assert ask(asked, path, cookie=cookie, sec_fetch_site=site, sec_fetch_mode="no-cors").status == 403
            assert ask(asked, path, cookie=cookie, sec_fetch_site=site, sec_fetch_mode="navigate").status == 403
        framed = {"sec_fetch_site": site, "sec_fetch_mode": "navigate", "sec_fetch_dest": "iframe"}
        assert ask(asked, cookie=cookie, **framed).status == 403
    for site in ("same-origin", "none"):
        assert ask(asked, "/api/runs", cookie=cookie, sec_fetch_site=site).let_in


def test_a_link_in_another_page_works_although_the_cookie_is_strict() -> None:
    """A link in another page works although a strict cookie is not sent after a redirect."""
    said = ask(
        guard(),
        query=f"token={TOKEN}",
        sec_fetch_site="cross-site",
        sec_fetch_mode="navigate",
        sec_fetch_dest="document",
    )
    assert said.status == 200
    assert 'http-equiv="refresh" content="0; url=/"' in said.body.decode()
    assert TOKEN not in said.body.decode()
    assert "SameSite=Strict" in said.headers["set-cookie"]


def test_on_the_network_addresses_and_own_names_still_need_the_token() -> None:
    """On the network, addresses and own names are accepted, and the token is still needed."""
    names = AllowedHosts("0.0.0.0", ["Gpu01", "gpu01.local"])
    names.add("gpu01.cluster.example")
    asked = guard(names=names)
    accepted = [
        "10.1.2.3:8642",
        "gpu01:8642",
        "GPU01.local:8642",
        "gpu01.cluster.example",
        "[fe80::1]:8642",
        "localhost:9",
    ]
    for host in accepted:
        assert ask(asked, "/api/runs", host=host).status == 403
        assert ask(asked, "/api/runs", host=host, cookie=cookie_of(asked, host=host)).let_in
    for host in ("evil.example", "gpu01.evil.example", "gpu02:8642", "gpu01.local.evil.example"):
        assert ask(asked, "/api/runs", host=host, cookie=cookie_of(asked)).status == 403
    assert AllowedHosts("gallery.example").is_allowed("gallery.example")
    assert not AllowedHosts("127.0.0.1", ["gpu01"]).is_allowed("gpu01")


def test_every_answer_has_the_headers_that_keep_a_page_to_itself() -> None:
    asked = guard()
    cookie = cookie_of(asked)
    answers = [
        ask(asked, query=f"token={TOKEN}"),
        ask(asked, cookie=cookie),
        ask(asked),
        ask(asked, "/api/x"),
        ask(asked, method="PUT"),
        ask(asked, host="evil.example"),
    ]
    assert [answer.status for answer in answers] == [303, 200, 403, 403, 405, 403]
    for answer in answers:
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; ")
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cross-origin-opener-policy"] == "same-origin"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store"


def test_tokens_are_long_and_never_the_same() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 43


def test_a_host_is_read_strictly() -> None:
    assert parse_authority("LocalHost:8642") == ("localhost", 8642)
    assert parse_authority("[::1]") == ("::1", 80)
    assert parse_authority("gpu_01.local:1") == ("gpu_01.local", 1)
    for host in ("", "a b", "a:b", "a:1:2", "::1", "[::1]x", "a\n", "a:65536", "é", ".", "a."):
        assert parse_authority(host) is None
    assert is_loopback("127.1.2.3")
    assert not is_loopback("127.1")
