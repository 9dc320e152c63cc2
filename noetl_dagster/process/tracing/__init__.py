"""Traces of executions, sent as spans over OTLP.

The event that ends something also records its span. Ids are functions of names, so drivers, helper processes, workers
on other machines and resumed runs add to one trace without coordination. While tracing is off, OpenTelemetry is not
imported and no thread runs.
"""
