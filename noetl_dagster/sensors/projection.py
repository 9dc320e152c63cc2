"""The sensor that updates the projection."""

from __future__ import annotations

from dagster import DefaultSensorStatus, SensorDefinition, SensorEvaluationContext, SkipReason, sensor

from noetl_dagster.events.projection import Projection
from noetl_dagster.resources.engines import EngineProvider

PROJECTION_INTERVAL = 30
"""Seconds between two ticks. Runs update the projection themselves; the sensor handles the remaining events."""


def build_projection_sensor(noetl: EngineProvider) -> SensorDefinition:
    """Builds a sensor whose ticks update the projection; its skip reasons show the lag."""

    @sensor(
        name="noetl_projection",
        description="Projects the event log into noetl.execution.",
        minimum_interval_seconds=PROJECTION_INTERVAL,
        default_status=DefaultSensorStatus.RUNNING,
    )
    def noetl_projection(context: SensorEvaluationContext) -> SkipReason:
        projection = Projection(noetl.engine().runtime.pool)
        taken = noetl.run(projection.catch_up())
        lag = noetl.run(projection.lag_seconds())
        return SkipReason(f"{taken} events projected, {lag:.1f} s behind")

    return noetl_projection
