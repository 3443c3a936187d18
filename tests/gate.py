"""A door before a server that lets in who has the password, as a proxy in a company does."""

from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.error import HTTPError
from urllib.request import Request, urlopen

HOP = ("host", "connection", "transfer-encoding", "content-length", "accept-encoding")


@contextmanager
def gate(uri: str, user: str, password: str) -> Iterator[str]:
    """Yield ``host:port`` of a door to ``uri``."""
    key = "Basic " + b64encode(f"{user}:{password}".encode()).decode()

    class Door(BaseHTTPRequestHandler):
        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Authorization") != key:
                return self._answer(401, b"who are you?", "text/plain")
            headers = {k: v for k, v in self.headers.items() if k.lower() not in HOP}
            request = Request(uri + self.path, body or None, headers, method=self.command)
            try:
                with urlopen(request, timeout=60) as answer:
                    self._answer(answer.status, answer.read(), answer.headers["Content-Type"])
            except HTTPError as error:
                self._answer(error.code, error.read(), error.headers["Content-Type"])

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass_on  # noqa: N815

        def _answer(self, code: int, body: bytes, kind: str | None) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind or "application/octet-stream")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Door) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
