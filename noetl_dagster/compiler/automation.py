"""Sensors for what playbooks declare: automation, observed sources, and the limits of concurrency pools.

The parameter ``among`` names the folder of the playbooks if a project has several; each has sensors of its own names.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Any, TypeVar

from dagster import (
    AssetKey,
    AssetObservation,
    AssetSelection,
    AutomationConditionSensorDefinition,
    DagsterInstance,
    DataVersion,
    DefaultSensorStatus,
    MetadataValue,
    ObserveResult,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
    SourceAsset,
    sensor,
)
from pydantic import Field, TypeAdapter, ValidationError

from noetl_dagster.compiler.external_assets import DATA_VERSION
from noetl_dagster.compiler.job import PlaybookJob
from noetl_dagster.compiler.names import sensor_name
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import NoetlError
from noetl_dagster.playbook.assets import ObservationSpec, key_text
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.storage.locations import matching
from noetl_dagster.tools.access.credential_types import CredentialType

POOLS_INTERVAL = 60

Contents = TypeVar("Contents")


def read_cursor(
    context: SensorEvaluationContext, kind: TypeAdapter[Contents], empty: Contents, consequence: str
) -> Contents:
    """Returns a sensor's cursor; ``empty`` if there is none, or if it is malformed, which the tick's log reports."""
    if not context.cursor:
        return empty
    try:
        return kind.validate_json(context.cursor)
    except ValidationError as error:
        context.log.warning(
            f"the cursor {context.cursor[:200]!r} of sensor {context.sensor_name} is malformed "
            f"({error.errors()[0]['msg']}), and this tick replaces it; {consequence}"
        )
        return empty


def build_automation_sensor(jobs: Sequence[PlaybookJob], among: str | None = None) -> SensorDefinition | None:
    """Builds the sensor that requests assets of playbooks with ``automation``."""
    keys = [
        key
        for job in jobs
        if any(one.spec is not None and one.spec.automation_condition for one in job.plan.assets)
        for key in job.plan.keys
    ]
    if not keys:
        return None
    return AutomationConditionSensorDefinition(
        sensor_name("noetl_automation", among),
        target=AssetSelection.assets(*keys),
        default_status=DefaultSensorStatus.RUNNING,
    )


def limits_of(playbooks: Iterable[Playbook]) -> dict[str, int]:
    """Returns the slots of each pool; the smallest number if playbooks differ."""
    limits: dict[str, int] = {}
    for playbook in playbooks:
        for name, slots in playbook.dagster.pools.items():
            limits[name] = min(slots, limits.get(name, slots))
    return limits


def set_limits(instance: DagsterInstance, limits: dict[str, int]) -> list[str]:
    """Sets the slots of Dagster's pools; returns the pools that were changed."""
    storage = instance.event_log_storage
    if not limits or not storage.supports_global_concurrency_limits:
        return []
    current_limits = {pool.name: pool.limit for pool in storage.get_pool_limits()}
    changed = [name for name, slots in limits.items() if current_limits.get(name) != slots]
    for name in changed:
        storage.set_concurrency_slots(name, limits[name])
    return changed


def build_pool_sensor(playbooks: Sequence[Playbook], among: str | None = None) -> SensorDefinition | None:
    """Builds a sensor that keeps the limits of Dagster's pools as playbooks set them; None if none sets any."""
    limits = limits_of(playbooks)
    if not limits:
        return None

    @sensor(
        name=sensor_name("noetl_pools", among),
        description="Keeps the slots of concurrency pools as the playbooks set them.",
        minimum_interval_seconds=POOLS_INTERVAL,
        default_status=DefaultSensorStatus.RUNNING,
    )
    def noetl_pools(context: SensorEvaluationContext) -> SkipReason:
        changed = set_limits(context.instance, limits)
        return SkipReason(f"set: {', '.join(changed)}" if changed else f"{len(limits)} pools are as they should be")

    return noetl_pools


LEAST_SECONDS = 5
_SEEN: TypeAdapter[dict[str, float]] = TypeAdapter(dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]])
_SHOWN = 1_000

# The statistics of a table, without reading it: any write counts, so that a change is seen.
TABLE = """
SELECT greatest(relation.reltuples::bigint, 0) AS rows, relation.relfilenode::text AS file,
       pg_table_size(relation.oid) AS bytes,
       pg_stat_get_tuples_inserted(relation.oid) + pg_stat_get_tuples_updated(relation.oid)
           + pg_stat_get_tuples_deleted(relation.oid) AS changes
FROM pg_class AS relation WHERE relation.oid = $1::text::regclass
"""


Observed = tuple[DataVersion, dict[str, Any]]
"""The version of a source's data, which changes with its content, and metadata."""


async def observe(runtime: Runtime, spec: ObservationSpec) -> Observed:
    """Observes a source.

    Raises:
        NoetlError: the source cannot be reached, or does not exist.
    """
    if spec.table is not None:
        return await _observe_table(runtime, spec, spec.table)
    assert spec.object is not None
    return await asyncio.to_thread(_observe_objects, runtime, spec.object)


def _observe_objects(runtime: Runtime, pattern: str) -> Observed:
    listed = matching(runtime.settings, pattern)
    digest = hashlib.sha256("\n".join(f"{entry.key} {entry.etag} {entry.bytes}" for entry in listed).encode())
    metadata: dict[str, Any] = {
        "dagster/uri": pattern,
        "objects": len(listed),
        "bytes": sum(entry.bytes for entry in listed),
        "names": MetadataValue.json([entry.key for entry in listed[:_SHOWN]]),
    }
    if listed:
        metadata["newest"] = MetadataValue.timestamp(max(entry.modified for entry in listed))
    return DataVersion(digest.hexdigest()[:32]), metadata


async def _observe_table(runtime: Runtime, spec: ObservationSpec, table: str) -> Observed:
    context = runtime.tool_context
    credential = await context.credentials.resolve(spec.auth, CredentialType.POSTGRES)
    pool = runtime.pool if credential is None else await context.clients.postgres(credential)
    try:
        row = await pool.fetchrow(TABLE, table)
    except Exception as error:  # Dagster stores its text too
        SECRETS.redact_error(error)
        raise NoetlError(f"table {table} cannot be observed: {error}") from error
    return DataVersion(f"{row['file']}-{row['changes']}"), {
        "dagster/relation_identifier": table,
        "dagster/row_count": row["rows"],
        "bytes": row["bytes"],
        "changes": row["changes"],
    }


def source_assets(
    playbooks: Iterable[Playbook], noetl: EngineProvider, made: Collection[AssetKey]
) -> list[SourceAsset]:
    """Returns the sources that playbooks observe: each once, as an observable asset.

    Args:
        made: the assets that playbooks make; they are no sources.
    """
    sources = {
        AssetKey(spec.asset): _source_asset(playbook, spec, noetl)
        for playbook in playbooks
        for spec in playbook.dagster.observe
    }
    return [source for key, source in sources.items() if key not in made]


def _source_asset(playbook: Playbook, spec: ObservationSpec, noetl: EngineProvider) -> SourceAsset:
    def look(_context):  # type: ignore[no-untyped-def]  # Dagster refuses annotations that are text
        version, metadata = noetl.run(observe(noetl.engine().runtime, spec))
        return ObserveResult(data_version=version, metadata=metadata)

    return SourceAsset(
        key=AssetKey(spec.asset),
        description=f"{spec.object or spec.table}, looked at every {spec.every:g} s",
        group_name=playbook.dagster.group,
        observe_fn=look,
    )


def build_observation_sensor(
    playbooks: Sequence[Playbook], noetl: EngineProvider, among: str | None = None
) -> SensorDefinition | None:
    """Builds a sensor that observes every source when it is due, without a run; None without sources."""
    specs = {key_text(spec.asset): spec for playbook in playbooks for spec in playbook.dagster.observe}
    if not specs:
        return None

    @sensor(
        name=sensor_name("noetl_observe", among),
        description="Looks at the sources that playbooks observe.",
        minimum_interval_seconds=max(int(min(spec.every for spec in specs.values())), LEAST_SECONDS),
        default_status=DefaultSensorStatus.RUNNING,
    )
    def noetl_observe(context: SensorEvaluationContext) -> SensorResult:
        now = time.time()
        seen = read_cursor(context, _SEEN, {}, "every source is due")
        events, problems = [], []
        for name, spec in specs.items():
            if 0 <= now - seen.get(name, 0.0) < spec.every - LEAST_SECONDS:
                continue
            seen[name] = now
            try:
                version, metadata = noetl.run(observe(noetl.engine().runtime, spec))
            except NoetlError as error:
                problems.append(f"{name}: {error}")
                continue
            tags = {DATA_VERSION: version.value}
            events.append(AssetObservation(AssetKey(spec.asset), metadata=metadata, tags=tags))
        for problem in problems:
            context.log.error(problem)
        cursor = _SEEN.dump_json({name: moment for name, moment in seen.items() if name in specs}).decode()
        reason = "; ".join(problems) or f"{len(events)} sources observed"
        return SensorResult(asset_events=events, cursor=cursor, skip_reason=reason)

    return noetl_observe
