"""Probes of a container."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.kubernetes.cluster.kubelet.process import Process
from tests.kubernetes.cluster.store import Object


def serves(place: str, probe: Object, seconds: float) -> bool:
    """Asks a gRPC server for its health, over a connection of its own as the kubelet does."""
    with grpc.insecure_channel(place) as channel:
        asked = health_pb2.HealthCheckRequest(service=probe.get("service", ""))
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=seconds)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class Probes:
    """Carries out the probes of one container until it is stopped, in a thread.

    Attributes:
        started: whether the startup probe has succeeded.
        ready: whether the readiness probe succeeds.
        failed: why the container has to be restarted; empty while it does not.
    """

    def __init__(self, container: Object, process: Process, address: str, pace: float) -> None:
        self._container, self._process, self._address, self._pace = container, process, address, pace
        self._over = threading.Event()
        probes = [container.get(f"{name}Probe") for name in ("startup", "readiness", "liveness")]
        self._startup, self._readiness, self._liveness = probes
        self.started = self._startup is None
        self.ready = self.started and self._readiness is None
        self.failed = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        if any(probes):
            self._thread.start()

    def stop(self) -> None:
        self._over.set()

    def _run(self) -> None:
        if self._startup and not self._began(self._startup):
            return
        self.started = True
        self.ready = self._readiness is None
        due = {id(probe): time.monotonic() + self._delay(probe) for probe in self._probes()}
        failures = dict.fromkeys(due, 0)
        while not self._over.is_set() and not self.failed:
            for probe in self._probes():
                if time.monotonic() < due[id(probe)]:
                    continue
                succeeded = self._succeeds(probe)
                failures[id(probe)] = 0 if succeeded else failures[id(probe)] + 1
                failing = failures[id(probe)] >= probe.get("failureThreshold", 3)
                if probe is self._readiness:
                    self.ready = succeeded or (self.ready and not failing)
                elif failing:
                    self.failed = "Liveness probe failed"
                due[id(probe)] = time.monotonic() + probe.get("periodSeconds", 10) * self._pace
            self._over.wait(0.02)

    def _began(self, probe: Object) -> bool:
        """Whether the startup probe succeeds; its patience is as long as the manifest says, however often it looks."""
        period = probe.get("periodSeconds", 10)
        deadline = time.monotonic() + self._delay(probe) + period * probe.get("failureThreshold", 3)
        self._over.wait(self._delay(probe))
        while not self._over.is_set():
            if self._succeeds(probe):
                return True
            if time.monotonic() > deadline:
                self.failed = "Startup probe failed"
                return False
            self._over.wait(period * self._pace)
        return False

    def _probes(self) -> list[Object]:
        return [probe for probe in (self._readiness, self._liveness) if probe]

    def _delay(self, probe: Object) -> float:
        return float(probe.get("initialDelaySeconds", 0)) * self._pace

    def _succeeds(self, probe: Object) -> bool:
        seconds = float(probe.get("timeoutSeconds", 1))
        ways: dict[str, Callable[[Object, float], bool]] = {
            "httpGet": self._http,
            "exec": lambda given, patience: self._process.run(given["command"], patience),
            "grpc": lambda given, patience: serves(f"{self._address}:{given['port']}", given, patience),
        }
        for name, way in ways.items():
            if name in probe:
                return way(probe[name], seconds)
        raise NotImplementedError(f"no such probe here: {probe}")

    def _http(self, given: Object, seconds: float) -> bool:
        host, port = given.get("host", self._address), self._port(given["port"])
        connection = http.client.HTTPConnection(host, port, timeout=seconds)
        headers = {header["name"]: header["value"] for header in given.get("httpHeaders") or ()}
        try:
            connection.request("GET", given.get("path", "/"), headers=headers)
            return 200 <= connection.getresponse().status < 400
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _port(self, port: int | str) -> int:
        named = {entry.get("name"): entry["containerPort"] for entry in self._container.get("ports") or ()}
        return int(named.get(port, port))
