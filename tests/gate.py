"""A door before a server that lets in who has the password, as a proxy in a company does."""

from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from served import Quiet, served

HOP = ("host", "connection", "transfer-encoding", "content-length", "accept-encoding")


@contextmanager
def gate(uri: str, user: str, password: str) -> Iterator[str]:
    """Yield ``host:port`` of a door to ``uri``."""
    key = "Basic " + b64encode(f"{user}:{password}".encode()).decode()

    class Door(Quiet):
        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Authorization") != key:
                return self.answer(401, b"who are you?", "text/plain")
            headers = {k: v for k, v in self.headers.items() if k.lower() not in HOP}
            request = Request(uri + self.path, body or None, headers, method=self.command)
            try:
                with urlopen(request, timeout=60) as answer:
                    self.answer(answer.status, answer.read(), answer.headers["Content-Type"])
            except HTTPError as error:
                self.answer(error.code, error.read(), error.headers["Content-Type"])

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass_on  # noqa: N815

    with served(Door) as place:
        yield place
