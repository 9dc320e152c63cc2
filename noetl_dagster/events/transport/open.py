"""The transport that the settings ask for."""

from __future__ import annotations

from nats.aio.client import Client as NatsClient

from noetl_dagster.events.log import EventLog
from noetl_dagster.events.transport.base import EventTransport
from noetl_dagster.events.transport.direct import DirectTransport
from noetl_dagster.events.transport.http import ApiClient, HttpTransport
from noetl_dagster.events.transport.intake import EventIntake
from noetl_dagster.events.transport.nats.names import Names
from noetl_dagster.events.transport.nats.transport import NatsTransport
from noetl_dagster.settings import EventTransport as Kind
from noetl_dagster.settings import Settings


def open_transport(settings: Settings, log: EventLog, client: NatsClient) -> EventTransport:
    """``NOETL_EVENT_TRANSPORT``; over NATS, events above the stream's limit go over HTTP."""
    match settings.event_transport:
        case Kind.DIRECT:
            return DirectTransport(EventIntake(log, settings.command_heartbeat_timeout_seconds))
        case Kind.HTTP:
            return HttpTransport(ApiClient(settings))
        case Kind.NATS:
            return NatsTransport(client, Names.of(settings), large=HttpTransport(ApiClient(settings)))
