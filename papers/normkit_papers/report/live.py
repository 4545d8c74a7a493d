"""The page of runs in progress, served to this machine only; it updates itself.

No file of a run folder has an address: there is one page, at /, made again when the files change.
"""

import contextlib
import hashlib
import html
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from normkit.watch.row_files import FILE, RunReader
from normkit_papers.report import page, results
from normkit_papers.report.settings import Results

Sections = Callable[[Results, RunReader], page.PageSections]

HERE = "127.0.0.1"
WATCHED = (results.FILE, results.PROGRESS, results.SETTINGS, FILE)
LAST_PORT = 65535
MOST = 50  # runs on a page
POLICY = "frame-ancestors 'none'; form-action 'none'; base-uri 'none'"
WAITING = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="3"><title>normkit watch</title>'


class Watched:
    """The page of the runs below a path, made again only when files have changed.

    Threads may call it at once. Of rows that were appended only the new ones are read.
    """

    def __init__(self, path: Path, sections: Sections):
        self.path, self.sections, self.reader = path, sections, RunReader()
        self._lock = Lock()
        self._made: tuple[str, bytes] = ("", b"")

    def folders(self) -> list[Path]:
        """The folders of all runs that may be shown, those that changed last first."""
        found = sorted({file.parent for name in (results.SETTINGS, results.FILE) for file in self.path.rglob(name)})
        runs = (folder for folder in found if (folder / results.FILE).exists() or results.is_unfinished(folder))
        return sorted(filter(self._is_readable, runs), key=_changed, reverse=True)

    def _is_readable(self, folder: Path) -> bool:
        """Return True if the files of a run are regular ones, and no links to files elsewhere."""
        root = self.path.resolve()
        for file in (folder / name for name in WATCHED):
            try:
                inside = file.resolve().is_relative_to(root)
            except (OSError, RuntimeError):  # a link that leads to itself
                return False
            if not inside or (file.exists() and not file.is_file()):
                return False
        return True

    def version(self) -> str:
        """A text that changes whenever a file does."""
        stats = []
        for folder in sorted(self.folders()[:MOST]):
            for file in (folder / name for name in WATCHED):
                if file.is_file():
                    status = file.stat()
                    stats.append(f"{file}:{status.st_size}:{status.st_mtime_ns}")
        return f'"{hashlib.sha256("|".join(stats).encode(errors="replace")).hexdigest()[:24]}"'

    def now(self) -> tuple[str, bytes]:
        """Version and page; the previous ones while another thread makes them again.

        Raises:
            ValueError: if there is no page yet; the message states the reason.
        """
        version = self.version()
        if version == self._made[0]:
            return self._made
        if not self._lock.acquire(blocking=False):
            if not self._made[0]:
                raise ValueError("the page is being made")
            return self._made
        try:
            found, folders = {}, self.folders()
            few = f"The page shows the {MOST} of {len(folders)} runs that changed last; name a folder with fewer."
            notes = [few] if len(folders) > MOST else []
            for folder in sorted(folders[:MOST]):
                try:
                    self.reader.read(folder)
                    found[folder] = results.live(folder)
                except (ValueError, OSError) as error:  # one damaged run hides no other
                    notes.append(f"A run is left out: {error}.")
            if not found:
                raise ValueError(notes[-1] if notes else f"no run in {self.path} yet")
            sections = self.sections(found, self.reader)
            title = f"{self.path.resolve().name} (live)"
            made = page.page(found, title, sections=sections, live=True, reader=self.reader, notes=notes)
            self._made = version, made
        finally:
            self._lock.release()
        return self._made


def _changed(folder: Path) -> int:
    """The time of a run's latest change."""
    return max((file.stat().st_mtime_ns for name in WATCHED if (file := folder / name).is_file()), default=0)


def server(path: Path, port: int = 0, sections: Sections | None = None) -> ThreadingHTTPServer:
    """Create a server of the page on this machine's own address; the caller starts it.

    It answers GET and HEAD of / only, and only if it is addressed as this machine: the page of another site may have
    its name point here.

    Args:
        path: Folder of a run, or of runs.
        port: Port; 0 for a free one.
        sections: Makes the content of the page besides results.

    Raises:
        ValueError: if there is no such folder, or the port is taken.
    """
    if not path.is_dir():
        problem = f"{path} is no folder" if path.exists() else f"there is no folder {path}"
        raise ValueError(f"{problem}; name that of a run, or of several runs")
    if not 0 <= port <= LAST_PORT:
        raise ValueError(f"port must be 0 (a free one) to {LAST_PORT}; got {port}")
    watched = Watched(path, sections or (lambda found, reader: page.NO_SECTIONS))

    class Handler(BaseHTTPRequestHandler):
        """Answers requests for the page."""

        server_version, sys_version, protocol_version, timeout = "normkit", "", "HTTP/1.1", 30

        def do_GET(self) -> None:
            """Answer with the page, or 304 if it has not changed."""
            host = self.headers.get("Host", "")
            if len(self.headers.get_all("Host", [])) != 1 or host.lower() not in self.names():
                self.answer(421, "text/plain", b"this is served to this machine alone, as 127.0.0.1 or localhost\n")
            elif self.path != "/":
                self.answer(404, "text/plain", b"there is one page, at /\n")
            else:
                self.page()

        do_HEAD = do_GET

        def names(self) -> set[str]:
            """Hosts by which a browser on this machine addresses the server."""
            port = self.connection.getsockname()[1]
            return {f"{name}:{port}" for name in (HERE, "localhost")}

        def page(self) -> None:
            """Send the page as it is now."""
            try:
                version, data = watched.now()
            except (ValueError, OSError) as error:  # a file that is being written, or does not exist yet
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
            """Send an answer that is not cached, and that other sites can neither frame nor read."""
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
            with contextlib.suppress(ConnectionError):  # the browser has closed the connection
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Do not log requests."""

    try:
        return ThreadingHTTPServer((HERE, port), Handler)
    except OSError as error:
        raise ValueError(f"port {port} cannot be opened: {error.strerror}; give another, or none") from None
