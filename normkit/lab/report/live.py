"""The page of runs in progress, served to this machine alone; it updates itself.

Nothing in a run folder is executed or named by an address: there is one page, at /, made anew when its files change.
"""

import contextlib
import hashlib
import html
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from normkit.lab.report import page, results, rows
from normkit.lab.report.settings import Results

HERE = "127.0.0.1"
WATCHED = (results.FILE, results.PROGRESS, results.SETTINGS, rows.FILE)
LAST_PORT = 65535
MOST = 50  # runs on a page
POLICY = "frame-ancestors 'none'; form-action 'none'; base-uri 'none'"
WAITING = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="3"><title>normkit watch</title>'


class Watched:
    """What there is to see below a path, made anew only where files have changed; threads may ask at once.

    Of rows that were appended only the new ones are read.
    """

    def __init__(self, path: Path, extras: Callable[[Results, rows.Reader], page.Extras]):
        self.path, self.extras, self.reader = path, extras, rows.Reader()
        self._lock = Lock()
        self._made: tuple[str, bytes] = ("", b"")

    def folders(self) -> list[Path]:
        """The folders of runs, the first of them."""
        found = sorted({file.parent for name in (results.SETTINGS, results.FILE) for file in self.path.rglob(name)})
        return [folder for folder in found if self._inside(folder)][:MOST]

    def _inside(self, folder: Path) -> bool:
        """No file of a run may be a link to what lies elsewhere."""
        root = self.path.resolve()
        return all((folder / name).resolve().is_relative_to(root) for name in WATCHED)

    def version(self) -> str:
        """Changes when a file does."""
        stats = []
        for folder in self.folders():
            for file in (folder / name for name in WATCHED):
                if file.is_file():
                    status = file.stat()
                    stats.append(f"{file}:{status.st_size}:{status.st_mtime_ns}")
        return f'"{hashlib.sha256("|".join(stats).encode(errors="replace")).hexdigest()[:24]}"'

    def now(self) -> tuple[str, bytes]:
        """Version and page; ValueError, saying what is waited for, where there is nothing to show yet."""
        with self._lock:
            version = self.version()
            if version != self._made[0]:
                found = {folder: results.live(folder) for folder in self.folders()}
                if not found:
                    raise ValueError(f"no run in {self.path} yet")
                extras = self.extras(found, self.reader)
                made = page.page(found, f"{self.path.name} (live)", "", extras, live=True, reader=self.reader)
                self._made = version, made
            return self._made


def server(
    path: Path, port: int = 0, extras: Callable[[Results, rows.Reader], page.Extras] | None = None
) -> ThreadingHTTPServer:
    """A server of this page on this machine's own address, at a free port unless one is named; not yet started.

    It answers GET and HEAD of / alone, and only where it is addressed as this machine (a page elsewhere that has its
    name point here is refused). ValueError where there is no such folder, or the port is taken.
    """
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}")
    if not 0 <= port <= LAST_PORT:
        raise ValueError(f"port must be 0 (a free one) to {LAST_PORT}; got {port}")
    watched = Watched(path, extras or (lambda found, reader: page.NOTHING))

    class Handler(BaseHTTPRequestHandler):
        """Answers for the page."""

        server_version, sys_version, protocol_version, timeout = "normkit", "", "HTTP/1.1", 30

        def do_GET(self) -> None:
            """The page, or that it has not changed."""
            host = self.headers.get("Host", "")
            if len(self.headers.get_all("Host", [])) != 1 or host.lower() not in self.names():
                self.answer(421, "text/plain", b"this is served to this machine alone, as 127.0.0.1 or localhost\n")
            elif self.path != "/":
                self.answer(404, "text/plain", b"there is one page, at /\n")
            else:
                self.page()

        do_HEAD = do_GET

        def names(self) -> set[str]:
            """What a reader on this machine calls it."""
            port = self.connection.getsockname()[1]
            return {f"{name}:{port}" for name in (HERE, "localhost")}

        def page(self) -> None:
            """The page as it is now."""
            try:
                version, data = watched.now()
            except (ValueError, OSError) as error:  # a file that is being written, or not there yet
                text = " ".join(str(error).split())
                if "text/html" in self.headers.get("Accept", ""):
                    self.answer(503, "text/html", f"{WAITING}<p>waiting: {html.escape(text)}</p>\n".encode())
                else:
                    self.answer(503, "text/plain", text.encode(errors="replace"))
                return
            if self.headers.get("If-None-Match") == version:
                self.answer(304, "", b"", version)
            else:
                self.answer(200, "text/html", data, version)

        def answer(self, status: int, kind: str, data: bytes, version: str = "") -> None:
            """One answer, whole; nothing of it is kept or guessed at, no page elsewhere may frame or read it."""
            self.send_response(status)
            given = {
                "Content-Type": f"{kind}; charset=utf-8" if kind else "",
                "Content-Length": str(len(data)) if status != 304 else "",
                "ETag": version,
                "Cache-Control": "no-store",
                "X-Content-Type-Options": "nosniff",
                "X-Frame-Options": "DENY",
                "Referrer-Policy": "no-referrer",
                "Cross-Origin-Resource-Policy": "same-origin",
                "Content-Security-Policy": POLICY if status == 200 else f"default-src 'none'; {POLICY}",
            }
            for name, value in given.items():
                if value:
                    self.send_header(name, value)
            with contextlib.suppress(ConnectionError):  # the reader has gone
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing of requests."""

    try:
        return ThreadingHTTPServer((HERE, port), Handler)
    except OSError as error:
        raise ValueError(f"port {port} cannot be had: {error.strerror}; name another, or none") from None
