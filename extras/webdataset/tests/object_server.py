"""A web server of a folder that answers range requests, and a proxy that delays answers and spoils some of them."""

import hashlib
import http.client
import random
import socket
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 100

    def __init__(self, handler):
        super().__init__(("127.0.0.1", 0), handler)
        self.closing = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_):
        """A client that has given up is not an error."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def answer(self, status, headers=(), body=b""):
        self.send_response_only(status)
        headers = dict(headers)
        headers.setdefault("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def running(server):
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def serve_folder(folder: Path):
    """A server of the files in `folder`. Their ETags are their checksums; /weak has a weak one, /secret is denied."""

    class FromFolder(Handler):
        def do_GET(self):
            path = folder / self.path.lstrip("/")
            if self.path.startswith("/weak"):
                return self.answer(200, {"ETag": 'W/"1"', "Last-Modified": "Mon, 23 Nov 2026 00:00:00 GMT"}, b"x")
            if self.path.startswith("/secret"):
                return self.answer(403)
            if not path.is_file():
                return self.answer(404)
            content = path.read_bytes()
            etag = {"ETag": f'"{hashlib.md5(content).hexdigest()}"', "Last-Modified": "Mon, 23 Nov 2026 00:00:00 GMT"}
            if self.headers.get("If-Match", etag["ETag"]) != etag["ETag"]:
                return self.answer(412)
            if "Range" not in self.headers:
                return self.answer(200, {**etag, "Content-Length": str(len(content))}, content)
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            part = content[first : last + 1]
            etag["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
            self.answer(206 if part else 416, etag, part)

        do_HEAD = do_GET

        def do_PUT(self):
            (folder / self.path.lstrip("/")).write_bytes(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(201, {"ETag": '"new"'})

    return running(Server(FromFolder))


class Faults:
    """What a proxy does to its answers: shares of them that it replaces by a 503, cuts in the middle, or holds back.

    seen: how many requests it got, by method, path and range. most: how many it had at the same time. spoilt: what it
    did to how many. hold(path, range) is called before each request is answered. short: how many of the next ranges
    lack a byte that their headers count.
    """

    short = 0

    def hold(self, path, span):
        pass

    def __init__(self, seconds=0.0, refused=0.0, cut=0.0, stalled=0.0, seed=0):
        self.seconds, self.shares, self.random = seconds, (refused, cut, stalled), random.Random(seed)
        self.seen, self.spoilt = Counter(), Counter()
        self.now = self.most = 0
        self.lock = threading.Lock()

    def choose(self):
        with self.lock:
            return self.random.choices(("refused", "cut", "stalled", ""), (*self.shares, 1 - sum(self.shares)))[0]


def serve_through(upstream: str, faults: Faults):
    """A proxy of the server at `upstream`."""
    host = upstream.removeprefix("http://")

    class Proxy(Handler):
        def forward(self):
            with faults.lock:
                faults.seen[self.command, self.path.partition("?")[0], self.headers.get("Range")] += 1
                faults.now += 1
                faults.most = max(faults.most, faults.now)
            try:
                faults.hold(self.path, self.headers.get("Range"))
                self.spoil(faults.choose())
            finally:
                with faults.lock:
                    faults.now -= 1

        def spoil(self, fault):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.server.closing.wait(faults.seconds)
            with faults.lock:
                faults.spoilt[fault] += 1
            if fault == "refused":
                return self.answer(503)
            if fault == "stalled":
                self.server.closing.wait(20)
            connection = http.client.HTTPConnection(host, timeout=30)
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            headers = {name: value for name, value in answer.getheaders() if name.lower() != "transfer-encoding"}
            if fault == "cut" and len(content) > 1:
                self.close_connection = True
                headers["Content-Length"] = str(len(content))
                self.answer(answer.status, headers, content[: len(content) // 2])
                return self.connection.shutdown(socket.SHUT_RDWR)
            if answer.status == 206 and faults.short:
                faults.short -= 1
                content = content[:-1]
                headers["Content-Length"] = str(len(content))
            self.answer(answer.status, headers, content)

        do_GET = do_HEAD = do_PUT = forward

    return running(Server(Proxy))
