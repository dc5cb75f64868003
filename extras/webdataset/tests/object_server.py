"""A web server of a folder that answers range requests as object stores do, and spoils some of its answers."""

import hashlib
import random
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ObjectServer(ThreadingHTTPServer):
    """ETags are the files' checksums, and If-Match is ignored; weak.tar has a weak ETag, and secret.tar is denied.

    shares: of the answers that are refused (503), cut in the middle, or held back. spoilt: what was done to some.
    short: ranges lack a byte that their headers count. seen: the method, path and range of each request.
    hold(request) is called before a request is answered.
    """

    daemon_threads = True
    request_queue_size = 100

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.shares = (0, 0, 0)
        self.random = random.Random(1)
        self.short = False
        self.hold = lambda request: None
        self.seen = []
        self.spoilt = set()

    def handle_error(self, *_):
        """A client that has given up is not an error."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        server = self.server
        request = self.command, self.path, self.headers.get("Range")
        server.seen.append(request)
        weights = *server.shares, 1 - sum(server.shares)
        (fault,) = server.random.choices(("refused", "cut", "stalled", ""), weights)
        server.spoilt.add(fault)
        server.hold(request)
        if fault == "stalled":
            self.rfile.read(1)  # until the client gives up
        path = server.folder / self.path[1:]
        content = path.read_bytes() if path.is_file() else b""
        if fault == "refused":
            return self.answer(503)
        if not path.is_file():
            return self.answer(404)
        if path.name == "secret.tar":
            return self.answer(403)
        checksum = hashlib.md5(content).hexdigest()
        etag = 'W/"1"' if path.name == "weak.tar" else f'"{checksum}"'
        headers = {"ETag": etag, "Last-Modified": "Mon, 23 Nov 2026 00:00:00 GMT"}
        status = 200
        _, _, wanted = request
        if wanted:
            status = 206
            size = len(content)
            first, last = map(int, wanted.removeprefix("bytes=").split("-"))
            content = content[first : last + 1]
            headers["Content-Range"] = f"bytes {first}-{first + len(content) - 1}/{size}"
            if server.short:
                content = content[:-1]
        sent = len(content) // 2 if fault == "cut" else None
        self.answer(status, content, headers, sent)
        if fault == "cut":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    do_HEAD = do_GET

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        (self.server.folder / self.path[1:]).write_bytes(content)
        self.answer(201, headers={"ETag": '"new"'})

    def answer(self, status, body=b"", headers=None, sent=None):
        self.send_response_only(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])
