"""The server over real HTTP: its answers, its refusals and its events."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from benchmarks.big_folders import (
    distinct,
    generation_folder,
    images,
    prompt_of,
    sample,
    settle,
    spec_of,
    training_folder,
)

from halation.gallery.run_file_reader import encode_json
from halation.gallery.server import IMAGE_KEY, image_type
from halation.generation.image_requests import ImageRequest
from halation.generation.ledger import LEDGER_FILE, Ledger
from halation.runs import lock
from halation.runs import run_folder as runs
from support.gallery import PAYLOADS, GalleryClient, serving

CANARY = b"\x89PNG\r\n\x1a\n CANARY "
TRAVERSALS = (
    "..",
    "../",
    "../../secret.png",
    "..%2f..%2fsecret.png",
    "%2e%2e",
    "%2e%2e%2fsecret.png",
    "%2e%2e/%2e%2e/secret.png",
    "%252e%252e%252fsecret.png",
    "..%252fsecret.png",
    "%25252e%25252e",
    "..%5c..%5csecret.png",
    "..%c0%af..%c0%afsecret.png",
    "%ff%fe",
    "....//secret.png",
    "/etc/passwd",
    "%2fetc%2fpasswd",
    "//etc/passwd",
    "file:///etc/passwd",
    "C:%5csecret.png",
    "secret.png",
    "g0%00.png",
    "%00",
    "s100.0%00",
    "g0%0a",
    "g0%0d%0aSet-Cookie:%20a=b",
    "g0/../../secret.png",
    "g0%20",
    "g-1",
    "g999999999999999999999999",
    "G0",
    "%F0%9F%92%A9",
    "g%D9%A1",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training, a generation with payloads as prompts and ids, and a file that must not be served."""
    place = tmp_path_factory.mktemp("gallery")
    (place / "secret.png").write_bytes(CANARY)
    training_folder(place / "runs" / "train", 3, 4, size=16, raw=True, prompts=PAYLOADS[:4])
    folder = generation_folder(place / "runs" / "generate", 0, size=16)
    requests = [
        ImageRequest(spec=dataclasses.replace(spec_of(index, 16, prompt), id=prompt[::-1]), name=f"{index:06d}")
        for index, prompt in enumerate(PAYLOADS)
    ]
    with Ledger(folder / LEDGER_FILE) as ledger:
        ledger.add_plan(requests, {"prompts": "0" * 64})
        settle(folder, ledger, requests, 20, ("0", "1"), images(16))
    return place


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[GalleryClient]:
    with serving(root / "runs", cache=root / "cache") as client:
        yield client


def until(condition: Callable[[], bool], limit_s: float = 20.0) -> bool:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def next_change(stream: http.client.HTTPResponse) -> dict[str, object]:
    """The data of the next change, past heartbeats and numbers."""
    while True:
        line = stream.readline()
        assert line, "the stream ended"
        if line.startswith(b"data: "):
            told: dict[str, object] = json.loads(line[6:])
            return told


# -- what it answers


def test_the_page_files_come_from_a_fixed_table_and_are_cached_until_changed(
    client: GalleryClient,
) -> None:
    """The page and its files come from a fixed table and are sent again only if changed."""
    shell = client.ask("/")
    assert (shell.status, shell.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"/static/app.js" in shell.body
    for name, kind in (("app.js", "text/javascript"), ("style.css", "text/css")):
        file = client.ask(f"/static/{name}")
        assert (file.status, file.headers["content-type"]) == (200, f"{kind}; charset=utf-8")
        assert file.headers["cache-control"] == "no-cache"
        again = client.ask(f"/static/{name}", if_none_match=file.headers["etag"])
        assert (again.status, again.body) == (304, b"")
    for name in ("", "app.js/", "../server.py", "..%2fserver.py", "__init__.py", "APP.JS", "app.js%00"):
        assert client.ask(f"/static/{name}").status == 404


def test_every_address_of_the_api_answers_json_that_is_not_kept(client: GalleryClient) -> None:
    ids = client.ids()
    train, generate = ids["train"], ids["generate"]
    paths = ["/api/state", "/api/runs", "/api/scores"]
    paths += [f"/api/runs/{id}{rest}" for id in (train, generate) for rest in ("", "/log", "/config")]
    paths += [f"/api/runs/{train}/metrics?after=0", f"/api/runs/{generate}/rows", f"/api/runs/{generate}/spec/g0"]
    for path in paths:
        answer = client.ask(path)
        assert answer.status == 200, path
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert isinstance(answer.json, dict)
        head = client.ask(path, method="HEAD")
        assert (head.status, head.body) == (200, b"")
        assert head.headers["content-length"] == answer.headers["content-length"]
    assert client.ask("/api/state").json == {"version": "0.0.0", "control": False, "roots": ["runs"]}
    assert len(client.ask(f"/api/runs/{train}").json["steps"]) == 3
    assert client.ask(f"/api/runs/{train}/log").json["lines"] == ["2026-01-02 03:04:05,678 INFO [rank 0] trained"]


def test_settings_that_somebody_chose_are_named(client: GalleryClient) -> None:
    told = client.ask(f"/api/runs/{client.ids()['train']}/config").json
    assert "sample_raw" in told["differs"]
    assert "lr" not in told["differs"]
    told = client.ask(f"/api/runs/{client.ids()['generate']}/config").json
    assert "height" in told["differs"]
    assert "seed_start" not in told["differs"]


def test_what_a_run_is_not_able_to_is_not_found(client: GalleryClient) -> None:
    ids = client.ids()
    for path in (
        f"{ids['train']}/rows",
        f"{ids['train']}/spec/g0",
        f"{ids['generate']}/metrics",
        f"{ids['generate']}/spec/g60",
        "0000000000",
        "0000000000/log",
        ids["train"].upper() + "x",
        ids["train"] + "/",
        ids["train"] + "/config.json",
    ):
        answer = client.ask(f"/api/runs/{path}")
        assert answer.status == 404
        assert set(answer.json) == {"error"}


def test_rows_are_paged_searched_and_filtered_and_nonsense_is_refused(client: GalleryClient) -> None:
    rows = f"/api/runs/{client.ids()['generate']}/rows"
    page = client.ask(f"{rows}?offset=10&limit=5").json
    assert (page["total"], [row["index"] for row in page["rows"]]) == (60, [10, 11, 12, 13, 14])
    assert client.ask(f"{rows}?state=failed").json["total"] == 3
    assert client.ask(f"{rows}?seed=45").json["rows"][0]["index"] == 3
    assert client.ask(f"{rows}?q=SVG%20animate").json["total"] == 1
    assert client.ask(f"{rows}?worker=1").json["total"] == 28
    for bad in (
        "offset=-1",
        "limit=1001",
        "limit=1e3",
        "seed=x",
        "seed=1%00",
        "state=gone",
        "q=%00",
        "offset=" + "9" * 30,
    ):
        assert client.ask(f"{rows}?{bad}").status == 400, bad


def test_big_answers_are_compressed_and_small_ones_and_images_are_not(client: GalleryClient) -> None:
    ids = client.ids()
    big = client.ask(f"/api/runs/{ids['train']}", accept_encoding="gzip")
    assert big.headers["content-encoding"] == "gzip"
    assert big.json == client.ask(f"/api/runs/{ids['train']}").json
    assert "content-encoding" not in client.ask("/api/state", accept_encoding="gzip").headers
    assert "content-encoding" not in client.ask(f"/pictures/{ids['generate']}/g0", accept_encoding="gzip").headers


def test_a_loss_that_is_no_number_is_null_and_not_an_end_of_the_page(tmp_path: Path) -> None:
    folder = training_folder(tmp_path / "run", 1, 1, size=16)
    with open(folder / runs.METRICS_FILE, "a") as file:
        file.write('{"step": 101, "time_s": 10.1, "loss": NaN, "grad_norm": Infinity}\n')
    with serving(folder, cache=tmp_path / "cache") as client:
        (id,) = client.ids().values()
        row = client.ask(f"/api/runs/{id}/metrics?after=0").json["rows"][-1]
        assert row["step"] == 101
        assert row.get("loss") is None
        assert client.ask(f"/api/runs/{id}").status == 200
    assert json.loads(encode_json({"a": [1.0, float("nan"), {"b": (float("-inf"),)}]})) == {
        "a": [1.0, None, {"b": [None]}]
    }


def test_images_are_sent_unchanged_with_their_type_and_cached_if_versioned(client: GalleryClient, root: Path) -> None:
    """Images are sent unchanged, typed by content, and cached if the address has a version."""
    ids = client.ids()
    step = client.ask(f"/api/runs/{ids['train']}").json["steps"][0]
    image = step["cells"]["ema"][0]
    full = client.ask(f"/pictures/{ids['train']}/{image['key']}?v={image['v']}")
    assert full.headers["content-type"] == "image/png"
    assert full.headers["cache-control"] == "private, max-age=31536000, immutable"
    assert full.body in [path.read_bytes() for path in distinct(root / "runs" / "train")]
    assert client.ask(f"/pictures/{ids['train']}/{image['key']}").headers["cache-control"] == "private, no-cache"
    for query in ("", "?s=512", "?v=1&s=256"):
        thumb = client.ask(f"/thumbs/{ids['train']}/{image['key']}{query}")
        assert thumb.headers["content-type"] == f"{image_type(thumb.body)}"
    for size in ("0", "-1", "255", "100000000", "x"):
        assert client.ask(f"/thumbs/{ids['train']}/{image['key']}?s={size}").status == 400
    assert client.ask(f"/pictures/{ids['train']}/{image['key']}", method="HEAD").body == b""


def test_a_image_that_is_another_file_or_elsewhere_is_not_shown(tmp_path: Path) -> None:
    folder = generation_folder(tmp_path / "run", 4, size=16)
    (tmp_path / "secret.png").write_bytes(distinct(folder)[0].read_bytes())
    files = [folder / f"{spec_of(index, 16, '').id}_seed{42 + index}.png" for index in range(4)]
    for file in files[1:]:
        file.unlink()
    files[1].symlink_to(tmp_path / "secret.png")
    files[2].write_text("<html><script>window.hacked=1</script>")
    with serving(folder, cache=tmp_path / "cache") as client:
        (id,) = client.ids().values()
        for kind in ("pictures", "thumbs"):
            assert client.ask(f"/{kind}/{id}/g0").status == 200
            for index in (1, 2, 3, 4):
                answer = client.ask(f"/{kind}/{id}/g{index}")
                assert (answer.status, answer.headers["content-type"]) == (404, "application/json")


# -- what it refuses


def test_script_in_prompts_and_ids_stays_text_in_json(client: GalleryClient) -> None:
    ids = client.ids()
    rows = client.ask(f"/api/runs/{ids['generate']}/rows?limit=100")
    assert [row["prompt"] for row in rows.json["rows"]] == list(PAYLOADS)
    assert [row["id"] for row in rows.json["rows"]] == [prompt[::-1] for prompt in PAYLOADS]
    detail = client.ask(f"/api/runs/{ids['train']}")
    assert [prompt["prompt"] for prompt in detail.json["prompts"]] == list(PAYLOADS[:4])
    specs = [client.ask(f"/api/runs/{ids['generate']}/spec/g{index}") for index in range(60)]
    assert [answer.json["spec"]["prompt"] for answer in specs] == list(PAYLOADS)
    for answer in (rows, detail, *specs):
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert b"<" not in answer.body


@pytest.mark.parametrize("word", TRAVERSALS)
def test_no_word_of_an_address_leads_out_of_a_run(client: GalleryClient, word: str) -> None:
    ids = client.ids()
    train, generate = ids["train"], ids["generate"]
    paths = [f"/{word}", f"/static/{word}", f"/api/{word}", f"/api/runs/{word}", f"/api/runs/{word}/config"]
    paths += [f"/api/runs/{generate}/{word}", f"/api/runs/{generate}/spec/{word}", f"/api/runs/{word}/spec/g0"]
    for kind in ("pictures", "thumbs"):
        paths += [f"/{kind}/{word}", f"/{kind}/{word}/g0", f"/{kind}/{generate}/{word}", f"/{kind}/{train}/{word}"]
        paths += [f"/{kind}/{train}/../{word}"]
    for path in paths:
        answer = client.ask(path)
        assert answer.status in (400, 404), path
        assert b"CANARY" not in answer.body
        assert b"root:" not in answer.body
        assert "set-cookie" not in answer.headers
    for path, name in (
        (f"/api/runs/{train}/metrics", "after"),
        (f"/thumbs/{train}/s100.0", "s"),
        (f"/api/runs/{generate}/rows", "offset"),
        (f"/api/runs/{generate}/rows", "limit"),
        (f"/api/runs/{generate}/rows", "seed"),
        (f"/api/runs/{generate}/rows", "state"),
    ):
        assert client.ask(f"{path}?{name}={word}").status == 400
    for name in ("q", "worker"):
        answer = client.ask(f"/api/runs/{generate}/rows?{name}={word}")
        assert answer.status in (200, 400)
        assert b"CANARY" not in answer.body
    assert client.ask(f"/pictures/{generate}/g0?v={word}").headers["content-type"] == "image/png"
    assert client.ask(f"/?token={word}", cookie="").status == 403


def test_an_address_with_a_host_in_it_is_not_found(client: GalleryClient) -> None:
    ours = f"127.0.0.1:{client.port}"
    assert client.ask("http://evil.example/api/runs", host=ours).status == 404
    assert client.ask(f"http://127.0.0.1:{client.port}/api/runs", host="evil.example").status == 403


def test_without_control_only_looking_is_allowed(client: GalleryClient) -> None:
    ids = client.ids()
    paths = ["/", "/api/runs", f"/pictures/{ids['generate']}/g0", f"/api/runs/{ids['train']}/control/stop", "/nowhere"]
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        for path in paths:
            answer = client.ask(path, method=method, origin=f"http://127.0.0.1:{client.port}", content_length="0")
            assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


def test_foreign_names_foreign_pages_and_strangers_are_refused_over_the_wire(client: GalleryClient) -> None:
    for path in ("/", "/api/runs", "/api/events", "/static/app.js", f"/pictures/{client.ids()['generate']}/g0"):
        assert client.ask(path, host="evil.example").status == 403
        assert client.ask(path, origin="http://evil.example").status == 403
        assert client.ask(path, cookie="").status == 403
        assert client.ask(path, cookie=f"halation_{client.port}={client.token}").status == 403
    tunnelled = client.cookie.replace(str(client.port), "9000", 1)
    assert client.ask("/api/runs", host="localhost:9000", cookie=tunnelled).status == 200


def test_control_requests_need_our_page_and_permission(tmp_path: Path) -> None:
    """A running training takes requests only from our page and only if control is allowed."""
    done = training_folder(tmp_path / "runs" / "done", 1, 1, size=16)
    running = training_folder(tmp_path / "runs" / "running", 1, 1, size=16)
    generation_folder(tmp_path / "runs" / "generate", 1, size=16)
    with (
        lock.lock_folder(running, "train"),
        serving(tmp_path / "runs", cache=tmp_path / "c", allow_control=True) as client,
    ):
        ids = client.ids()
        ours = {"method": "POST", "origin": f"http://127.0.0.1:{client.port}", "content_length": "0"}
        assert client.ask("/api/state").json["control"] is True
        for action in ("sample", "save", "stop"):
            answer = client.ask(f"/api/runs/{ids['running']}/control/{action}", **ours)
            assert (answer.status, answer.json) == (202, {"asked": action})
        assert len(list((running / "control").glob("*.json"))) == 3
        for name in ("done", "generate"):
            assert client.ask(f"/api/runs/{ids[name]}/control/stop", **ours).status == 409
        assert not (done / "control").exists()
        assert client.ask("/api/runs/0000000000/control/stop", **ours).status == 404
        assert client.ask(f"/api/runs/{ids['running']}/control/erase", **ours).status == 405
        assert client.ask(f"/api/runs/{ids['running']}/control/stop").status in (404, 405)
        assert (
            client.ask(f"/api/runs/{ids['running']}/control/stop", **ours | {"origin": "http://evil.example"}).status
            == 403
        )
        assert client.ask(f"/api/runs/{ids['running']}/control/stop", cookie="", **ours).status == 403
        assert len(list((running / "control").glob("*.json"))) == 3


# -- what it tells


def test_a_page_hears_of_new_samples_at_once_uncompressed_and_each_by_its_id(tmp_path: Path) -> None:
    folder = training_folder(tmp_path / "run", 1, 1, size=16)
    with lock.lock_folder(folder, "train"), serving(folder, cache=tmp_path / "cache") as client:
        (id,) = client.ids().values()
        with client.listening(accept_encoding="gzip") as stream:
            assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert stream.headers["content-encoding"] is None
            assert stream.headers["cache-control"] == "no-store"
            sample(folder, 200, [prompt_of(0)], distinct(folder))
            began = time.monotonic()
            told = next_change(stream)
            assert told["id"] == id
            assert isinstance(told["version"], int)
            assert time.monotonic() - began < 10
        assert until(lambda: len(client.ask(f"/api/runs/{id}").json["steps"]) == 2)


def test_a_page_hears_when_runs_come_and_go(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with serving(tmp_path / "runs", cache=tmp_path / "cache") as client, client.listening() as stream:
        assert client.ids() == {}
        client.changes.catalog._scanned_at = -1e9  # type: ignore[attr-defined]
        training_folder(tmp_path / "runs" / "new", 1, 1, size=16)
        client.changes.catalog._scanned_at = -1e9  # type: ignore[attr-defined]
        assert next_change(stream) == {"id": ""}
        assert list(client.ids()) == ["new"]


def test_a_silent_page_is_kept_alive_and_one_that_left_is_let_go(tmp_path: Path) -> None:
    folder = training_folder(tmp_path / "run", 1, 1, size=16)
    with serving(folder, cache=tmp_path / "cache", heartbeat_s=0.05) as client:
        with client.listening() as stream:
            lines = [stream.readline() for _ in range(8)]
            assert lines.count(b": still here\n") >= 2
            assert client.changes.num_listeners == 1
        assert until(lambda: client.changes.num_listeners == 0)
    with serving(folder, cache=tmp_path / "cache", heartbeat_s=60) as client:
        with client.listening():
            assert until(lambda: client.changes.num_listeners == 1)
        assert until(lambda: client.changes.num_listeners == 0)


def test_a_page_that_was_away_hears_what_it_missed_once_and_never_misses_the_last(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with serving(tmp_path / "runs", cache=tmp_path / "cache", look_every_s=60) as client:
        changes = client.changes
        changes.publish(["aaaaaaaaaa"])
        with client.listening() as stream:
            stream.readline()
            number = stream.readline().decode().strip().removeprefix("id: ")
        for _ in range(10_000):
            changes.publish(["bbbbbbbbbb"])
        changes.publish(["cccccccccc", "bbbbbbbbbb"])
        with client.listening(last_event_id=number) as stream:
            assert [next_change(stream)["id"] for _ in range(2)] == ["cccccccccc", "bbbbbbbbbb"]
            changes.publish([""])
            assert next_change(stream)["id"] == ""
        with client.listening(last_event_id="of.another.server") as stream:
            assert [next_change(stream)["id"] for _ in range(4)] == ["aaaaaaaaaa", "cccccccccc", "bbbbbbbbbb", ""]
        assert changes.changes_since(0)[0] == changes.parse_event_id("")


def test_a_page_that_does_not_read_costs_no_memory_and_nobody_else_a_wait(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with serving(tmp_path / "runs", cache=tmp_path / "cache", look_every_s=60) as client:
        with contextlib.closing(socket.create_connection(("127.0.0.1", client.port))) as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            words = f"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\nCookie: {client.cookie}\r\n\r\n"
            deaf.sendall(words.encode())
            assert until(lambda: client.changes.num_listeners == 1)
            with client.listening() as stream:
                for number in range(300):
                    client.changes.publish([f"{number:010d}"])
                    assert next_change(stream)["id"] == f"{number:010d}"
        assert until(lambda: client.changes.num_listeners == 0)


def test_the_head_of_the_events_ends_at_once(client: GalleryClient) -> None:
    answer = client.ask("/api/events", method="HEAD")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")


def test_a_server_that_ends_does_not_wait_for_pages_that_listen(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with contextlib.ExitStack() as stack:
        with serving(tmp_path / "runs", cache=tmp_path / "cache") as client:
            streams = [stack.enter_context(client.listening()) for _ in range(3)]
            assert until(lambda: client.changes.num_listeners == 3)
            began = time.monotonic()
        assert time.monotonic() - began < 5
        for stream in streams:
            assert b"".join(iter(stream.readline, b"")).startswith(b"retry: ")


def test_keys_are_matched_whole() -> None:
    for key in ("s100.3", "s100.3.raw", "t.0", "g0", "e0123456789.4"):
        assert IMAGE_KEY.fullmatch(key)
    for key in ("", "g0\n", "g0/", "..", "g0.png", "s1.2.3", "g٣", "s100.0.raw.raw"):
        assert not IMAGE_KEY.fullmatch(key)
