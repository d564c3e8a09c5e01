"""A gallery answers its user under thousands of idle, partial or slow connections."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from benchmarks.big_folders import generation_folder, spec_of
from hypothesis import given
from hypothesis import strategies as st

from halation.gallery.access_control import ConnectionTable, client_network

LINK = re.compile(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{43})")
ANSWER_S = 6.0
"""The law is 2 s on a quiet machine. The gallery without limits answered after minutes, or never."""
MAX_LOG_BYTES = 2_000
MAX_GROWTH_BYTES = 150 << 20
MAX_PER_CLIENT = 800
"""Connections of one client process, which has a limit of its own."""
SILENT, HALF_HEADER, DRIPPED_HEADER = "", "GET / HTTP/1.1\r\nHost: 127", "GET / HTTP/1.1\r\n"

# Opens connections without waiting for any of them, sends `words` on each, then `drip` every half second, until it is
# ended.
CLIENT = """
import select, socket, sys, time
port, num, words, drip = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode(), sys.argv[4].encode()
opened, waiting = [], {}
poll = select.epoll()
for _ in range(num):
    connection = socket.socket()
    connection.setblocking(False)
    connection.connect_ex(("127.0.0.1", port))
    poll.register(connection, select.EPOLLOUT)
    waiting[connection.fileno()] = connection
    opened.append(connection)
end = time.monotonic() + 5
while waiting and time.monotonic() < end:
    for number, _ in poll.poll(0.1):
        connection = waiting.pop(number)
        poll.unregister(connection)
        try:
            connection.send(words)
        except OSError:
            pass
print("open", flush=True)
while True:
    time.sleep(0.5)
    for connection in opened if drip else ():
        try:
            connection.send(drip)
        except OSError:
            pass
"""


@dataclass(kw_only=True)
class Gallery:
    """A `halation gallery` process of its own, and its user."""

    process: psutil.Process
    port: int
    stderr: Path
    cookie: str = ""

    def connect(self, timeout_s: float = 60.0) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def answer_s(self, path: str = "/api/runs") -> float:
        """Seconds until the user has an answer on a new connection."""
        began = time.monotonic()
        with contextlib.closing(self.connect()) as connection:
            connection.request("GET", path, headers={"cookie": self.cookie})
            response = connection.getresponse()
            assert (response.status, bool(response.read())) == (200, True)
        return time.monotonic() - began

    def listen(self) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self.connect()
        connection.request("GET", "/api/events", headers={"cookie": self.cookie})
        return connection, connection.getresponse()

    def socket(self, words: str) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(words.encode())
        return connection

    def request(self, path: str) -> str:
        return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nCookie: {self.cookie}\r\n\r\n"


@contextlib.contextmanager
def serving(folder: Path, descriptors: int) -> Iterator[Gallery]:
    command = [sys.executable, "-m", "halation.cli", "gallery", str(folder), "--port", "0"]
    environment = {**os.environ, "HALATION_CACHE": str(folder / ".cache")}
    stderr = folder.parent / "stderr.txt"
    with (
        open(stderr, "wb") as stderr_file,
        subprocess.Popen(
            ["bash", "-c", f'ulimit -n {descriptors}; exec "$@"', "bash", *command],
            stdout=subprocess.PIPE,
            stderr=stderr_file,
            text=True,
            env=environment,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            match = next(filter(None, map(LINK.search, process.stdout)))
            gallery = Gallery(process=psutil.Process(process.pid), port=int(match[1]), stderr=stderr)
            with contextlib.closing(gallery.connect()) as connection:
                connection.request("GET", f"/?token={match[2]}")
                gallery.cookie = str(connection.getresponse().headers["set-cookie"]).partition(";")[0]
            yield gallery
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
        finally:
            if process.poll() is None:
                process.kill()


@contextlib.contextmanager
def clients(port: int, num: int, words: str, drip: str = "") -> Iterator[Callable[[], bool]]:
    """`num` connections, held open by as many processes as they need; whether all of them are open."""
    counts = [min(MAX_PER_CLIENT, num - start) for start in range(0, num, MAX_PER_CLIENT)]
    command = [sys.executable, "-c", CLIENT, str(port)]
    with contextlib.ExitStack() as stack:
        processes = []
        for count in counts:
            process = subprocess.Popen([*command, str(count), words, drip], stdout=subprocess.PIPE)
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None
            stack.enter_context(process.stdout)
            os.set_blocking(process.stdout.fileno(), False)
            processes.append(process)
        unopened = set(processes)

        def all_open() -> bool:
            unopened.difference_update(
                process for process in list(unopened) if process.stdout and process.stdout.read()
            )
            return not unopened

        yield all_open


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generation_folder(tmp_path / "runs" / "generate", 3, size=16)
    return tmp_path / "runs"


def until(condition: Callable[[], bool], limit_s: float = 30.0) -> bool:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def check_flood(gallery: Gallery, num: int, words: str, drip: str = "") -> None:
    """The user has answers while `num` connections open, stay, and end; no page that listens is cut off."""
    rss = gallery.process.memory_info().rss
    answers_s = [gallery.answer_s()]
    listening, stream = gallery.listen()
    with contextlib.closing(listening), contextlib.closing(stream):
        assert stream.readline().startswith(b"retry")
        with clients(gallery.port, num, words, drip) as all_open:
            while not all_open():
                answers_s.append(gallery.answer_s())
            answers_s += [gallery.answer_s() for _ in range(3)]
        answers_s.append(gallery.answer_s())
        stream.readline()
        assert stream.readline() == b"\n"
        assert listening.sock is not None
        assert not _is_closed(listening.sock)
    assert max(answers_s) < ANSWER_S
    assert gallery.process.memory_info().rss - rss < MAX_GROWTH_BYTES


# -- connections without a request


@pytest.mark.ranks
@pytest.mark.parametrize("words", [SILENT, HALF_HEADER])
def test_an_answer_comes_while_more_connections_than_descriptors_send_nothing(folder: Path, words: str) -> None:
    with serving(folder, descriptors=256) as gallery:
        check_flood(gallery, 600, words)
        # Where the kernel keeps connections to itself that send nothing, none has to be closed for another.
        assert not words or until(lambda: gallery.stderr.stat().st_size > 0)
        lines = gallery.stderr.read_text().splitlines()
    sentence = r"too many connections: \d+ were closed; at most 64 may be open, 32 of them from one address"
    assert len(lines) <= 2, "one line a minute"
    assert all(re.search(sentence, line) for line in lines)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("words", "drip"), [(SILENT, ""), (HALF_HEADER, ""), (DRIPPED_HEADER, "X: y\r\n")])
@pytest.mark.parametrize("descriptors", [256, 1024])
def test_5000_connections_cost_neither_answers_nor_memory_nor_a_core_nor_a_log(
    folder: Path, descriptors: int, words: str, drip: str
) -> None:
    with serving(folder, descriptors) as gallery:
        check_flood(gallery, 5_000, words, drip)
        with clients(gallery.port, 1_000, words, drip) as all_open:
            assert until(all_open)
            assert until(lambda: len(gallery.process.net_connections("tcp")) < 5), "silent connections stay for ever"
            used = sum(gallery.process.cpu_times()[:2])
            time.sleep(3)
            assert sum(gallery.process.cpu_times()[:2]) - used < 1.0
        assert gallery.stderr.stat().st_size < MAX_LOG_BYTES


@pytest.mark.slow
@pytest.mark.ranks
def test_a_connection_without_a_complete_request_is_closed_whatever_it_sends(folder: Path) -> None:
    body_header = "POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\n"
    with serving(folder, descriptors=1024) as gallery, contextlib.ExitStack() as stack:
        state = gallery.request("/api/state")
        started = {"": "", "GET /": "x", body_header: "x", gallery.request("/nowhere").replace("ookie", "x"): "G"}
        started |= {state: "", f"{state}GET /": "x"}
        connections = []
        for words, drip in started.items():
            connections.append((stack.enter_context(gallery.socket(words)), drip))
        began = time.monotonic()
        left = list(connections)
        while left and time.monotonic() - began < 40:
            time.sleep(0.2)
            left = [pair for pair in left if not _is_closed(*pair)]
        assert not left
        assert gallery.answer_s() < ANSWER_S
        assert gallery.stderr.read_text() == ""


def _is_closed(connection: socket.socket, drip: str = "") -> bool:
    """Whether the other side closed it, after one more byte was sent and what came was read."""
    connection.setblocking(False)
    try:
        if drip:
            connection.send(drip.encode())
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.ranks
def test_nothing_that_a_client_without_the_link_sends_becomes_a_traceback(folder: Path) -> None:
    chunked = "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    host = "HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    cases = [
        (403, chunked, "zz\r\n"),
        (400, "\x00\x01\r\n\r\n", ""),
        (400, "GET /" + "a" * 100_000, ""),
        (400, f"GET / {host}" + "".join(f"H{number}: x\r\n" for number in range(10_000)) + "\r\n", ""),
        (400, "GET /?" + "&".join(f"token={number}" for number in range(10_000)) + f" {host}\r\n", ""),
        (403, "GET /?" + "&".join(f"token={number}" for number in range(1_000)) + f" {host}\r\n", ""),
        (403, f"GET / {host}Range: bytes=" + "0-1," * 3_000 + "\r\n\r\n", ""),
        (403, f"GET / {host}Connection: upgrade\r\nUpgrade: websocket\r\n\r\n", "x" * 1_000),
        (403, f"GET / {host}\r\n" * 500, ""),
    ]
    with serving(folder, descriptors=256) as gallery:
        for status, first, second in cases:
            with gallery.socket("") as connection:
                with contextlib.suppress(ConnectionError):  # refused before all of it was sent
                    connection.sendall(first.encode())
                assert connection.recv(65536).startswith(f"HTTP/1.1 {status} ".encode())
                with contextlib.suppress(OSError):
                    connection.sendall(second.encode())
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass
        assert gallery.answer_s() < ANSWER_S
        assert gallery.stderr.read_text() == ""


# -- connections of users


@pytest.mark.ranks
def test_event_streams_have_their_own_limit_and_a_message_beyond_it(folder: Path) -> None:
    """Pages that listen to events have their own limit, and the next one gets a message."""
    with serving(folder, descriptors=256) as gallery, contextlib.ExitStack() as stack:
        streams = []
        for _ in range(16):
            connection, response = gallery.listen()
            stack.callback(connection.close)
            assert response.status == 200
            streams.append((connection, response))
        connection, response = gallery.listen()
        stack.callback(connection.close)
        assert response.status == 503
        assert b"16 pages of this gallery are already open; close some of them" in response.read()
        assert gallery.answer_s() < ANSWER_S
        for opened in streams.pop():
            opened.close()

        def is_heard() -> bool:
            connection, response = gallery.listen()
            with contextlib.closing(connection), contextlib.closing(response):
                return response.status == 200

        assert until(is_heard), "a page that was closed leaves its place to another"
        assert gallery.stderr.read_text() == ""


def large_image(folder: Path, num_bytes: int) -> str:
    """Makes the first image of the generation large, and gives its address."""
    file = folder / "generate" / f"{spec_of(0, 16, '').id}_seed42.png"
    with open(file, "r+b") as opened:
        opened.truncate(num_bytes)
    return "/pictures/{id}/g0"


def first_run(gallery: Gallery) -> str:
    with contextlib.closing(gallery.connect()) as connection:
        connection.request("GET", "/api/runs", headers={"cookie": gallery.cookie})
        return re.findall(rb'"id":"([0-9a-f]{10})"', connection.getresponse().read())[0].decode()


@pytest.mark.ranks
def test_a_large_image_comes_whole_and_clients_that_do_not_read_it_cost_no_memory(folder: Path) -> None:
    num_bytes = 40_000_123
    address = large_image(folder, num_bytes)
    with serving(folder, descriptors=256) as gallery, contextlib.ExitStack() as stack:
        path = address.format(id=first_run(gallery))
        rss = gallery.process.memory_info().rss
        for _ in range(12):
            deaf = socket.socket()
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stack.enter_context(deaf)
            deaf.connect(("127.0.0.1", gallery.port))
            deaf.sendall(gallery.request(path).encode())
            assert deaf.recv(15) == b"HTTP/1.1 200 OK"
        with contextlib.closing(gallery.connect()) as connection:
            connection.request("GET", path, headers={"cookie": gallery.cookie})
            response = connection.getresponse()
            body = response.read()
        assert (response.status, response.headers["content-type"]) == (200, "image/png")
        assert len(body) == num_bytes
        assert body.startswith(b"\x89PNG")
        with contextlib.closing(gallery.connect()) as connection:
            connection.request("HEAD", path, headers={"cookie": gallery.cookie})
            assert connection.getresponse().status == 200
        assert gallery.process.memory_info().rss - rss < MAX_GROWTH_BYTES
        assert gallery.stderr.read_text() == ""


@pytest.mark.slow
@pytest.mark.ranks
def test_a_client_that_hardly_reads_is_closed_and_one_that_reads_slowly_is_not(folder: Path) -> None:
    num_bytes = 8_000_000
    address = large_image(folder, num_bytes)
    with serving(folder, descriptors=1024) as gallery, contextlib.ExitStack() as stack:
        request = gallery.request(address.format(id=first_run(gallery))).replace(
            "\r\n\r\n", "\r\nConnection: close\r\n\r\n"
        )
        rates = {65_536: 30_000, 4_096: 100}  # bytes read each half second, by the size of the buffer
        num_read = dict.fromkeys(rates, 0)
        sockets = {}
        for size in rates:
            sockets[size] = stack.enter_context(socket.socket())
            sockets[size].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
            sockets[size].settimeout(60)
            sockets[size].connect(("127.0.0.1", gallery.port))
            sockets[size].sendall(request.encode())
        began = time.monotonic()
        while time.monotonic() - began < 90:
            for size, rate in rates.items():
                with contextlib.suppress(ConnectionError):
                    num_read[size] += len(sockets[size].recv(rate))
            time.sleep(0.5)
        for size, connection in sockets.items():
            with contextlib.suppress(ConnectionError):
                while got := connection.recv(1 << 20):
                    num_read[size] += len(got)
        assert num_read[4_096] < num_bytes < num_read[65_536]
        assert gallery.stderr.read_text() == ""


# -- which connection is closed


@dataclass(eq=False)
class Client:
    """A connection as the table sees it."""

    address: str
    is_authorised: bool = False
    opened_at: float = 0.0
    is_idle: bool = True
    aborted: bool = False

    def is_overdue(self) -> bool:
        return False

    def abort(self) -> None:
        self.aborted = True


@given(
    st.integers(4, 12),
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.booleans()), max_size=60),
)
def test_the_table_keeps_its_limits_and_never_closes_a_connection_in_use_by_a_user(
    max_connections: int, arrivals: list[tuple[str, bool, bool]]
) -> None:
    table = ConnectionTable(max_connections)
    clients: list[Client] = []
    for address, is_authorised, is_idle in arrivals:
        in_use = [client for client in clients if client.is_authorised and not client.is_idle]
        num_open_before = sum(not client.aborted for client in clients)
        accepted = table.make_room(address)
        assert accepted or len(in_use) == num_open_before == max_connections
        if not accepted:
            continue
        client = Client(address)
        table.add(client)
        clients.append(client)
        if is_authorised:
            table.mark_authorised(client)
            client.is_idle = is_idle
        open_clients = [client for client in clients if not client.aborted]
        assert len(table) == len(open_clients) <= max_connections
        for name in "abc":
            unauthorised = [client for client in open_clients if client.address == name and not client.is_authorised]
            assert len(unauthorised) <= table.max_per_address
        assert not any(client.aborted for client in in_use)


def test_a_flood_from_one_address_closes_its_own_connections_oldest_first() -> None:
    table = ConnectionTable(8)
    others = [Client("quiet"), Client("user")]
    for client in others:
        table.add(client)
    table.mark_authorised(others[1])
    flood = [Client("flood") for _ in range(100)]
    for client in flood:
        assert table.make_room(client.address)
        table.add(client)
    assert not any(client.aborted for client in others)
    assert [client.aborted for client in flood] == [True] * 96 + [False] * 4
    assert table.num_closed == 96


def test_an_ipv6_client_is_known_by_its_network() -> None:
    assert client_network("2001:db8::1") == client_network("2001:db8::ffff:2") != client_network("2001:db8:0:1::1")
    assert client_network("::ffff:192.0.2.7") == client_network("192.0.2.7") == "192.0.2.7"
    assert client_network("fe80::1%eth0") == client_network("fe80::2")
