"""Transports carry workers' events to the log and commands to the workers: directly, over HTTP or over NATS.

All of them end in :class:`~noetl_dagster.events.transport.handler.EventHandler`. The ingestor reads the stream of NATS.
"""
