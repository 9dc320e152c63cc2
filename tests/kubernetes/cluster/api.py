"""The HTTP server of the API."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.kubernetes.cluster import protobuf
from tests.kubernetes.cluster.discovery import described
from tests.kubernetes.cluster.failures import Refused
from tests.kubernetes.cluster.requests import Address, Objects, address_of, concerns, selected, verb_of
from tests.kubernetes.cluster.rights import Rights
from tests.kubernetes.cluster.store import Object

WATCH_SECONDS = 300.0


@dataclass
class Api:
    """What a request is answered from.

    Attributes:
        log: what a container wrote, by namespace, pod, container (empty: the first) and the query.
        refuse: asked first, with method and path: a test lets requests fail there.
    """

    objects: Objects
    rights: Rights
    log: Callable[[str, str, str, Mapping[str, str]], bytes]
    refuse: Callable[[str, str], Refused | None] = lambda method, path: None
    ended: bool = False


class Server(ThreadingHTTPServer):
    """Serves the API over TLS, from a thread for each connection."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], api: Api, certificate: Path) -> None:
        super().__init__(address, _Handler)
        self.api = api
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate)

    def finish_request(self, request: Any, client_address: Any) -> None:
        try:
            request.settimeout(WATCH_SECONDS)
            secured = self._context.wrap_socket(request, server_side=True)
            super().finish_request(secured, client_address)
        except OSError:  # the client went, or does not trust us
            pass

    def begin(self) -> None:
        threading.Thread(target=self.serve_forever, args=(0.05,), name="kubernetes-api", daemon=True).start()

    def end(self) -> None:
        self.api.ended = True
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise an answer takes 40 ms: clients delay acknowledgements
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        split = urlsplit(self.path)
        query = dict(parse_qsl(split.query, keep_blank_values=True))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            refused = self.server.api.refuse(self.command, split.path)
            if refused is not None:
                raise refused
            self._answer_to(split.path, query, body)
        except Refused as error:
            self._send(error.code, error.status())

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _handle  # noqa: N815

    def _answer_to(self, path: str, query: Mapping[str, str], body: bytes) -> None:
        said = described(path)
        if said is not None:
            self._send(200, said)
            return
        address = address_of(path)
        if address is None:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        api = self.server.api
        verb = verb_of(self.command, address, query)
        api.rights.check(
            self.headers.get("Authorization", "").partition(" ")[2],  # "Bearer", in pods "bearer"
            verb,
            address.kind.group,
            address.resource,
            address.namespace,
            address.name,
        )
        if verb == "watch":
            self._watch(address, query)
        elif address.part == "log":
            log = api.log(address.namespace, address.name, query.get("container", ""), query)
            self._send_bytes(200, "text/plain", log)
        else:
            self._send(201 if verb == "create" else 200, self._objects(verb, address, query, body))

    def _objects(self, verb: str, address: Address, query: Mapping[str, str], body: bytes) -> Object:
        objects = self.server.api.objects
        match verb:
            case "get":
                return objects.store.need(*address.key)
            case "list":
                return objects.list(address, query)
            case "create":
                return objects.create(address, self._parsed(body), query)
            case "update":
                return objects.replace(address, self._parsed(body), query)
            case "patch":
                content_type = self.headers.get("Content-Type", "").split(";")[0].strip()
                return objects.patch(address, content_type, body, query)
            case _:
                return objects.delete(address, query, self._parsed(body) if body else {})

    def _watch(self, address: Address, query: Mapping[str, str]) -> None:
        """Streams changes until the client goes, its time is over, or the cluster ends."""
        store = self.server.api.objects.store
        deadline = time.monotonic() + float(query.get("timeoutSeconds") or WATCH_SECONDS)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        since = query.get("resourceVersion", "")
        seen: set[Any] = set()
        if since in ("", "0") or query.get("sendInitialEvents") == "true":
            with store.frozen():
                reached = store.version
                found = store.list(address.kind.name, address.namespace or None)
            for one in found:
                if selected(one, query):
                    self._chunk({"type": "ADDED", "object": one})
                    metadata = one["metadata"]
                    seen.add((address.kind.name, metadata.get("namespace", ""), metadata["name"]))
            if query.get("sendInitialEvents") == "true":
                self._bookmark(address, reached, {"k8s.io/initial-events-end": "true"})
        else:
            reached = int(since)
        while time.monotonic() < deadline and not self.server.api.ended:
            changes, reached = store.changes(reached, 0.5)
            for change in changes:
                if concerns(change, address, query):
                    self._chunk({"type": change.type, "object": change.object})
                    seen.add(change.key)
                elif change.key in seen:
                    seen.discard(change.key)  # no longer selected: gone, for who watches
                    self._chunk({"type": "DELETED", "object": change.object})
        self.wfile.write(b"0\r\n\r\n")

    def _bookmark(self, address: Address, version: int, annotations: Mapping[str, str]) -> None:
        metadata = {"resourceVersion": str(version), "annotations": dict(annotations)}
        said = {"kind": address.kind.name, "apiVersion": address.kind.api_version, "metadata": metadata}
        self._chunk({"type": "BOOKMARK", "object": said})

    def _chunk(self, event: Object) -> None:
        line = json.dumps(event).encode() + b"\n"
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.wfile.flush()

    def _send(self, code: int, content: Object) -> None:
        self._send_bytes(code, "application/json", json.dumps(content).encode())

    def _send_bytes(self, code: int, content_type: str, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _parsed(self, body: bytes) -> Any:
        if self.headers.get("Content-Type", "").startswith(protobuf.CONTENT_TYPE):
            return protobuf.decoded(body)
        try:
            return json.loads(body)
        except ValueError as error:
            raise Refused(400, "BadRequest", f"the body is no JSON: {error}") from None
