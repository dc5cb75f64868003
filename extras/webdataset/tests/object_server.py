"""A web server of a folder that answers range requests as object stores do, and spoils some of its answers."""

import hashlib
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Faults:
    """What the server does to its answers: shares of them that it refuses (503), cuts in the middle, or holds back.

    seen: how many requests it got, by method, path and range. spoilt: what it did to how many. hold(method, path,
    range) is called before each request is answered. short: ranges lack a byte that their headers count.
    """

    def __init__(self):
        self.shares, self.random, self.short, self.hold = (0, 0, 0), random.Random(1), False, lambda *_: None
        self.seen, self.spoilt, self.lock, self.closing = Counter(), Counter(), threading.Lock(), threading.Event()

    def of(self, *request) -> str:
        """Counts a request, and says what is done to it."""
        with self.lock:
            self.seen[request] += 1
            fault = self.random.choices(("refused", "cut", "stalled", ""), (*self.shares, 1 - sum(self.shares)))[0]
            self.spoilt[fault] += 1
        self.hold(*request)
        if fault == "stalled":
            self.closing.wait(20)
        return fault


@contextmanager
def serve(folder: Path, faults: Faults) -> Iterator[str]:
    """The address of the server. ETags are the files' checksums; /weak has a weak one, /secret is denied."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

        def log_message(self, *_):
            pass

        def answer(self, status, body=b"", sent=None, **headers):
            self.send_response_only(status)
            for name, value in {"Content-Length": len(body), **headers}.items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body if sent is None else sent)

        def do_GET(self):
            fault, path = faults.of(self.command, self.path, self.headers.get("Range")), folder / self.path[1:]
            content = path.read_bytes() if path.is_file() else b""
            etag = 'W/"1"' if path.name.startswith("weak") else f'"{hashlib.md5(content).hexdigest()}"'
            if fault == "refused" or path.name.startswith("secret") or not path.is_file():
                return self.answer(503 if fault == "refused" else 404 if not path.is_file() else 403)
            if self.headers.get("If-Match", etag) != etag:
                return self.answer(412)
            headers, status = {"ETag": etag, "Last_Modified": "Mon, 23 Nov 2026 00:00:00 GMT"}, 200
            if span := self.headers.get("Range"):
                first, last = map(int, span.removeprefix("bytes=").split("-"))
                status, size, content = 206, len(content), content[first : last + 1]
                headers["Content_Range"] = f"bytes {first}-{first + len(content) - 1}/{size}"
                content = content[:-1] if faults.short else content
            self.answer(status, content, content[: len(content) // 2] if fault == "cut" else None, **headers)
            if fault == "cut":
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

        do_HEAD = do_GET

        def do_PUT(self):
            (folder / self.path[1:]).write_bytes(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(201, ETag='"new"')

    class Server(ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 100

        def handle_error(self, *_):
            """A client that has given up is not an error."""

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        faults.closing.set()
        server.shutdown()
        thread.join()
