"""The page of a run in progress: allowed requests, and updates while the run goes on."""

import http.client
import json
import os
import threading
import time
from pathlib import Path

import made_results
import pytest
from made_results import result
from normkit_papers.cli.reporting import show
from normkit_papers.report import live, page, results
from test_page_browser import EVIL, browser  # noqa: F401  # a fixture

from normkit.watch import RunReader, read_run, row_files


@pytest.fixture
def serve():
    """Serve a folder; (host, port)."""
    servers = []

    def served(folder, sections=None):
        server = live.server(folder, sections=sections)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server.server_address

    yield served
    for server in servers:
        server.shutdown()
        server.server_close()


def running(folder, steps=3, norm="un"):
    """A run folder in the middle of its training."""
    made = result(norm)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(made["run"]))
    results.note(folder, 7, made["curve"][:steps], [])
    made_results.rows(folder, "un")
    return made


def request(address, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection(*address, timeout=20)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in ({"Host": f"127.0.0.1:{address[1]}"} | headers).items():
        for one in [value] if isinstance(value, str) else value:
            connection.putheader(name.replace("_", "-"), one)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def test_the_server_listens_on_localhost_alone(serve, tmp_path):
    running(tmp_path)
    assert serve(tmp_path)[0] == "127.0.0.1"


def test_other_names_of_this_machine_are_rejected(serve, tmp_path):
    """The page of another site may have its name point here; the Host header shows that name."""
    running(tmp_path)
    address = serve(tmp_path)
    port = address[1]
    wrong = ["evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", "", f"127.0.0.1:{port}.evil"]
    for host in (*wrong, [f"127.0.0.1:{port}", "evil.example"]):
        status, _, body = request(address, Host=host)
        assert status == 421
        assert b"<" not in body
    assert request(address, Host=f"LOCALHOST:{port}")[0] == 200


OTHERS = [
    "/run.json",
    "/../run.json",
    "/%2e%2e/run.json",
    "//evil.example/",
    "/?x",
    "/..%2f..%2fetc/passwd",
    "/\\\\run.json",
]


@pytest.mark.parametrize("path", [*OTHERS, "/model.safetensors", "http://evil.example/"])
def test_there_is_one_page_and_no_other_path(serve, tmp_path, path):
    running(tmp_path / "run")
    status, _, body = request(serve(tmp_path / "run"), path)
    assert (status, body) == (404, b"there is one page, at /\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT"])
def test_nothing_can_be_sent(serve, tmp_path, method):
    running(tmp_path)
    assert request(serve(tmp_path), method=method, Content_Length="0")[0] == 501


def test_links_to_elsewhere_are_not_followed(serve, tmp_path):
    running(tmp_path / "runs" / "a")
    secret = tmp_path / "secret"
    secret.write_text("secret words")
    (tmp_path / "runs" / "a" / "rows.csv").unlink()
    (tmp_path / "runs" / "a" / "rows.csv").symlink_to(secret)
    status, _, body = request(serve(tmp_path / "runs"))
    assert status == 503
    assert b"secret words" not in body
    assert body.startswith(b"no run in")


@pytest.mark.parametrize("name", ["rows.csv", "result.json", "progress.json"])
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_named_pipe_in_a_run_folder_is_skipped(serve, tmp_path, name):
    """Opening one waits for a writer; the run is left out, the others are shown."""
    for run in ("a", "b"):
        running(tmp_path / run)
    (tmp_path / "b" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "b" / name)
    address = serve(tmp_path)
    for _ in range(2):
        status, _, body = request(address)
        assert (status, body.count(b"in training, step 50")) == (200, 2)
    (tmp_path / "a" / "run.json").unlink()
    assert request(address)[0] == 503
    with pytest.raises(ValueError, match="is not a regular file"):
        (RunReader().read if name == "rows.csv" else results.live)(tmp_path / "b")


def test_a_folded_model_is_no_run_in_progress(serve, tmp_path):
    running(tmp_path / "run")
    (tmp_path / "run" / "folded").mkdir()
    for name in ("run.json", "model.safetensors"):
        (tmp_path / "run" / "folded" / name).write_bytes((tmp_path / "run" / "run.json").read_bytes())
    assert list(results.find([tmp_path], unfinished=True)) == [tmp_path / "run"]
    status, _, body = request(serve(tmp_path))
    assert (status, body.count(b"starting")) == (200, 0)


@pytest.mark.parametrize("name", ["rows.csv", "progress.json", "run.json"])
def test_a_damaged_file_hides_its_own_run_alone(serve, tmp_path, name):
    for run in ("a", "b"):
        running(tmp_path / run)
    (tmp_path / "b" / name).write_text("{}\n")
    status, _, body = request(serve(tmp_path))
    assert (status, body.count(b"in training, step 50")) == (200, 2), "those of one run"
    assert f"A run is left out: {tmp_path / 'b' / name}".encode() in body


def test_a_file_that_may_not_be_read_hides_its_own_run_alone(serve, tmp_path, monkeypatch):
    for run in ("a", "b"):
        running(tmp_path / run)
    read = results.live

    def protected(folder):
        if folder.name == "b":
            raise PermissionError(13, "Permission denied", str(folder / "run.json"))
        return read(folder)

    monkeypatch.setattr(results, "live", protected)
    status, _, body = request(serve(tmp_path))
    assert (status, body.count(b"in training, step 50")) == (200, 2)
    assert b"A run is left out: [Errno 13] Permission denied" in body


def test_a_page_of_the_current_folder_has_its_name(tmp_path, monkeypatch):
    running(tmp_path / "demo")
    monkeypatch.chdir(tmp_path / "demo")
    assert b"<h1>demo (live)</h1>" in live.Watched(Path(), lambda *_: page.NO_SECTIONS).now()[1]
    show({Path(): result()}, Path(), "")
    assert "<title>demo</title>" in Path("report.html").read_text()


def test_links_that_lead_to_themselves_are_left_out(serve, tmp_path):
    for run in ("a", "b"):
        running(tmp_path / run)
    (tmp_path / "b" / "rows.csv").unlink()
    (tmp_path / "b" / "rows.csv").symlink_to(tmp_path / "b" / "rows.csv")
    (tmp_path / "c").symlink_to(tmp_path / "c")
    status, _, body = request(serve(tmp_path))
    assert (status, body.count(b"in training, step 50")) == (200, 2)


def test_a_slow_page_does_not_block_other_requests(serve, tmp_path):
    """While one request makes the page again, others get the previous one."""
    made, begun, go_on = running(tmp_path), threading.Event(), threading.Event()

    def sections(found, reader):
        if begun.is_set():
            begun.clear()
            go_on.wait(20)
        return page.NO_SECTIONS

    address = serve(tmp_path, sections)
    version = request(address)[1]["ETag"]
    results.note(tmp_path, 7, made["curve"][:5], [])
    begun.set()
    slow = threading.Thread(target=request, args=(address,))
    slow.start()
    while begun.is_set():
        time.sleep(0.01)
    assert request(address)[1]["ETag"] == version
    go_on.set()
    slow.join()
    assert request(address)[1]["ETag"] != version


def test_headers_forbid_caching_and_framing(serve, tmp_path):
    running(tmp_path)
    status, headers, body = request(serve(tmp_path))
    assert status == 200
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert b"connect-src 'self'" in body
    assert b"in training, step 50" in body


def test_an_unchanged_run_is_not_sent_again(serve, tmp_path):
    made = running(tmp_path)
    address = serve(tmp_path)
    version = request(address)[1]["ETag"]
    assert request(address, If_None_Match=version)[::2] == (304, b"")
    results.note(tmp_path, 7, made["curve"][:5], [])
    status, headers, body = request(address, If_None_Match=version)
    assert status == 200
    assert headers["ETag"] != version
    assert b"in training, step 100" in body


def test_a_run_may_end_and_start_again(serve, tmp_path):
    address = serve(tmp_path)
    assert request(address)[0] == 503
    assert b"refresh" in request(address, Accept="text/html")[2]
    made = running(tmp_path / "a")
    assert b"in training" in request(address)[2]
    results.write(tmp_path / "a", made)
    assert b"in training" not in request(address)[2]
    running(tmp_path / "a", steps=2)  # again from the start
    assert b"in training, step 25" in request(address)[2]
    (tmp_path / "a" / "rows.csv").write_text("step,site,norm,quantity,value\n1,a,un,rms,1.0\n25,a,un,rm")  # half a line
    assert b'"x":[1],"sites":{"a":[1.0]}' in request(address)[2]
    (tmp_path / "a" / "progress.json").write_text('{"curve": [')
    assert request(address)[0] == 503
    running(tmp_path / "a")
    assert request(address)[0] == 200


def same(one, two):
    return repr((one.sites, one.quantities)) == repr((two.sites, two.quantities))


def test_of_a_file_that_grows_only_the_new_lines_are_read(tmp_path, monkeypatch):
    parsed, parse = [], row_files._parse
    monkeypatch.setattr(
        row_files,
        "_parse",
        lambda data, *rest, **more: (parsed.append(data.count(b"\n")), parse(data, *rest, **more))[1],
    )
    reader, path = RunReader(), tmp_path / "rows.csv"
    head = "step,site,norm,quantity,value\n"
    path.write_text(f"{head}1,a,un,rms,1.0\n26,a,un,r")
    assert reader.read(tmp_path).of("rms") == {"a": ("un", [1], [1.0])}
    with path.open("a") as file:
        file.write("ms,2.0\n51,a,un,rms,nan\n")
    assert reader.read(tmp_path).of("rms")["a"].points() == [(1, 1.0), (26, 2.0)]
    assert parsed == [2, 2]
    assert same(reader.read(tmp_path), read_run(tmp_path))

    longer = "".join(f"{step},b,pnv,rms,3.0\n" for step in range(1, 99))  # another run, already longer than the old
    path.write_text(head + longer)
    assert same(reader.read(tmp_path), read_run(tmp_path))
    path.write_text(head + longer[: len(longer) // 2])  # cut, as where a run is resumed
    assert same(reader.read(tmp_path), read_run(tmp_path))
    path.write_text("nonsense\n")
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"rows\.csv is cut short or no file of rows .*: its first line is not step,site"
        ):
            reader.read(tmp_path)
    path.unlink()
    assert reader.read(tmp_path).quantities == {}


def test_hostile_files_are_shown_as_text(serve, tmp_path):
    made = running(tmp_path / "a")
    made["run"]["model"]["norm"] = EVIL
    (tmp_path / "a" / "run.json").write_text(json.dumps(made["run"]))
    body = request(serve(tmp_path))[2]
    assert body.count(b"<script") == 3  # data, the page's, what keeps it up to date
    assert b"<img" not in body
    bad = tmp_path / "<img src=x onerror=alert(1)>"
    bad.mkdir()
    (bad / "run.json").write_text("{")
    status, headers, body = request(serve(bad), Accept="text/html")
    assert (status, body.count(b"<img")) == (503, 0)
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")


def test_a_port_that_is_taken_is_an_error(serve, tmp_path):
    running(tmp_path)
    taken = serve(tmp_path)[1]
    with pytest.raises(ValueError, match=f"port {taken} cannot be opened"):
        live.server(tmp_path, taken)
    with pytest.raises(ValueError, match="port must be 0"):
        live.server(tmp_path, 99999)
    with pytest.raises(ValueError, match="there is no folder"):
        live.server(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"run\.json is no folder; name that of a run, or of several runs"):
        live.server(tmp_path / "run.json")


def test_an_open_page_follows_the_run(browser, serve, tmp_path):  # noqa: F811
    made = running(tmp_path, steps=20)
    address = serve(tmp_path, lambda found, reader: page.PageSections(findings={tmp_path: [EVIL]}))
    site = f"http://{address[0]}:{address[1]}/"
    troubles, requested = [], []
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.on("console", lambda message: troubles.append(message.text))
    tab.on("pageerror", lambda error: troubles.append(str(error)))
    tab.on("request", lambda request: requested.append(request.url))
    tab.goto(site)
    assert "in training, step 475" in tab.locator("table.sortable").inner_text()
    each = tab.locator("#statistics select").nth(1)
    each.select_option("place")
    tab.locator("#curves input[type=checkbox]").uncheck()
    results.note(tmp_path, 7, made["curve"], made["valid"][:3])
    tab.locator("table.sortable", has_text="in training, step 5,000").wait_for(timeout=15_000)
    assert tab.locator("#curves figcaption").all_inner_texts() == ["Training loss", "Validation loss"]
    assert each.input_value() == "place"  # what was chosen stays
    assert not tab.locator("#curves input[type=checkbox]").is_checked()
    assert "up to date at" in tab.locator("#live").inner_text()
    assert EVIL in tab.locator("#findings").inner_text()
    tab.close()
    assert set(requested) == {site}
    assert not troubles


def test_an_update_keeps_order_words_and_focus(browser, serve, tmp_path):  # noqa: F811
    for name, norm in (("a", "layer"), ("b", "un"), ("c", "pnv")):
        running(tmp_path / name, steps=20, norm=norm)
    made = result("un")
    address = serve(tmp_path)
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.goto(f"http://{address[0]}:{address[1]}/")
    tab.locator("#table input").fill("training")
    head = tab.locator("th button", has_text="status")
    head.click()
    head.click()
    results.note(tmp_path / "b", 7, made["curve"], [])
    tab.locator("tbody tr", has_text="in training, step 5,000").wait_for(timeout=15_000)
    names = tab.locator("table.sortable tbody th").all_inner_texts()
    assert (names[0], sorted(names)) == ("un", ["layer", "pnv", "un"]), "5,000 is before 475 in descending order"
    assert tab.locator("th[aria-sort=descending]").inner_text().startswith("status")
    assert tab.evaluate("document.activeElement.textContent").startswith("status")
    assert tab.locator("#table input").input_value() == "training"
    assert tab.locator("#table [role=status]").inner_text() == "3 of 3 rows"
    assert tab.locator("#live").get_attribute("aria-live") == "off"
    tab.close()


def test_runs_beyond_the_most_are_counted_and_the_latest_are_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "MOST", 2)
    for name in "cba":
        running(tmp_path / name)
        time.sleep(0.02)
    data = live.Watched(tmp_path, lambda found, reader: page.NO_SECTIONS).now()[1].decode()
    assert "The page shows the 2 of 3 runs that changed last" in data
    assert [name for name in "abc" if str(tmp_path / name) in data] == ["a", "b"]
