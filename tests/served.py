"""A small HTTP server in this process, for as long as a test needs it."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class Quiet(BaseHTTPRequestHandler):
    """Logs nothing, and answers a GET with its `reply`."""

    def do_GET(self) -> None:
        """Answer it."""
        self.answer(*self.reply())

    def reply(self) -> tuple[int, bytes]:
        """Return a status and a body for ``self.path``."""
        raise NotImplementedError

    def answer(self, code: int, body: bytes, kind: str | None = None) -> None:
        """Send a whole answer."""
        self.send_response(code)
        self.send_header("Content-Type", kind or "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Yield ``host:port`` at which ``handler`` answers."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
