"""A service for tests: it says what it was asked. `service_program.py PORT [FILE]` ends at once if FILE is there."""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

GO = threading.Event()
"""Set by a request for /go: then an answer to /parts is completed."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_any(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/parts":
            self.send(200, [("transfer-encoding", "chunked")], b"4\r\none \r\n")
            self.wfile.flush()
            GO.wait()
            self.wfile.write(b"3\r\ntwo\r\n0\r\n\r\n")
            return
        if self.path == "/breaks":
            self.send(200, [("content-length", "10")], b"abc")
            self.close_connection = True
            return
        if self.path == "/go":
            GO.set()
        told = {"method": self.command, "path": self.path, "headers": dict(self.headers), "body": body.decode()}
        answer = json.dumps({**told, "pid": os.getpid()}).encode()
        status = 418 if self.path.startswith("/teapot") else 200
        self.send(status, [("content-length", str(len(answer))), ("x-own", "kept")], answer)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any

    def send(self, status, headers, body):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def main():
    if any(Path(file).exists() for file in sys.argv[2:]):
        sys.exit("no, thanks")
    with ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
