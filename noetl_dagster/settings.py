"""All settings, from ``NOETL_*`` environment variables. No other module reads them."""

from __future__ import annotations

import ssl
from datetime import timedelta
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import Field, SecretStr
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from noetl_dagster import machine
from noetl_dagster.setting_types import (
    SUBJECT_NAME,
    DatabaseAddress,
    HttpAddress,
    Json,
    Listed,
    LogLevel,
    NoneIfEmpty,
    PodRights,
    PodTemplate,
    address_with,
    separate_addresses,
)

METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""A variable of ``prometheus_client``: the folder in which several processes combine their metrics."""


WITHHELD: dict[str, str] = {}
"""Variables of settings that are missing in ``os.environ`` while playbook code runs; see ``process.environment``."""

DEFAULT_POOL = "default"
"""The pool of steps and workers that name no pool."""

POOL_NAME = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
"""Pool names are parts of NATS subjects and of names of Kubernetes objects."""

MOST_PROCESSES = 1024
"""Maximum number of processes that work on the loops of one run."""


class StoreTier(StrEnum):
    """The tiers that store results, as in ``noetl.result_ref.store_tier``."""

    MEMORY = "memory"
    KV = "kv"
    DISK = "disk"
    OBJECT = "object"
    S3 = "s3"
    GCS = "gcs"
    DB = "db"
    DUCKDB = "duckdb"
    EVENTLOG = "eventlog"
    MINIO = "minio"
    PVC = "pvc"


class LogFormat(StrEnum):
    """Formats of log lines."""

    TEXT = "text"
    JSON = "json"


class EventTransport(StrEnum):
    """Ways in which a worker's events reach the log."""

    DIRECT = "direct"
    HTTP = "http"
    NATS = "nats"


class PythonIsolation(StrEnum):
    """Where Python code of playbooks runs: in a thread of the process that carries out the command, or in its own."""

    THREAD = "thread"
    SUBPROCESS = "subprocess"


class RunLauncher(StrEnum):
    """Launchers for the executions that the HTTP API accepts."""

    WARM = "warm"
    DAGSTER = "dagster"


class Settings(BaseSettings):
    """Settings of one process. The embedded services fill empty addresses."""

    model_config = SettingsConfigDict(
        env_prefix="NOETL_",
        # variables of containers are often empty rather than missing
        env_ignore_empty=True,
        frozen=True,
        extra="ignore",
        allow_inf_nan=False,
        # values may be secrets
        hide_input_in_errors=True,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Reads the variables of this process, withheld ones included."""
        assert isinstance(env_settings, EnvSettingsSource)
        withheld = {name.lower(): value for name, value in WITHHELD.items()}
        env_settings.env_vars = withheld | dict(env_settings.env_vars)
        return init_settings, env_settings

    home: Path = Field(Path(".noetl"), description="State folder of the embedded services and of Dagster")
    playbooks_path: Path = Field(Path("playbooks"), description="Folder whose playbooks become jobs")
    playbook_bytes: int = Field(
        4 * 1024**2, ge=1024, description="Largest size of a playbook; aliases count with everything that they repeat"
    )
    check_seconds: float = Field(
        10.0, gt=0, description="Maximum processor time for checking a playbook that a client sends to the HTTP API"
    )
    check_bytes: int = Field(
        1024**3, ge=128 * 1024**2, description="Maximum memory of a process that checks playbooks for the HTTP API"
    )
    log_level: Annotated[str, LogLevel] = Field("WARNING", description="Level of the noetl_dagster loggers")
    log_format: LogFormat = Field(LogFormat.TEXT, description="text, or json: one JSON object per line")

    tracing_endpoint: Annotated[str | None, address_with("http", "https", host="host:4318")] = Field(
        None, description="Collector of traces, OTLP over HTTP: http://collector:4318; empty: no traces"
    )
    tracing_sampling: float = Field(1.0, ge=0, le=1, description="Share of traced executions, 0 to 1")

    db_url: Annotated[str | None, DatabaseAddress] = Field(
        None,
        description="Event log, postgresql://user:password@host/database; several hosts, separated by commas, are a "
        "primary and its standbys; empty: embedded PostgreSQL",
    )
    db_pool_size: int = Field(8, ge=2, description="Connections of a process to the event log")
    schema_apply: bool = Field(
        True,
        description="Apply schema/*.sql when a process of the control plane starts; false: wait until "
        "'noetl-dagster provision' has done so",
    )
    dagster_db_url: Annotated[str | None, DatabaseAddress] = Field(
        None, description="Dagster's own storage, like NOETL_DB_URL; empty: embedded PostgreSQL"
    )

    health_port: Annotated[int | None, NoneIfEmpty] = Field(
        None,
        ge=0,
        le=65535,
        description="Port of /health, /ready and /metrics of worker and ingest; 0: any free port, "
        "which is printed; empty: none",
    )
    health_host: str = Field("127.0.0.1", description="Address that /health, /ready and /metrics listen on")

    nats_url: Annotated[str | None, address_with("nats", "tls", "ws", "wss")] = Field(
        None, description="NATS servers, nats://... or tls://..., separated by commas; empty: embedded"
    )
    nats_ca: Path | None = Field(None, description="CA certificate of NATS, PEM; empty: the system's")
    nats_namespace: str = Field(
        "noetl", pattern=SUBJECT_NAME, description="Prefix of the streams, subjects and KV buckets"
    )
    event_transport: EventTransport = Field(
        EventTransport.DIRECT, description="How workers send events to the log: direct, http or nats"
    )
    nats_replicas: int = Field(1, ge=1, description="Replicas of streams: 1 on one server, 3 in a cluster")

    server_url: Annotated[str, HttpAddress] = Field(
        "http://127.0.0.1:8700", description="HTTP API that workers claim commands from"
    )
    pages_url: Annotated[str | None, HttpAddress] = Field(
        None, description="Address at which users reach the pages of executions; empty: NOETL_SERVER_URL"
    )
    dagster_url: Annotated[str, HttpAddress] = Field(
        "http://127.0.0.1:3000", description="Address at which users reach Dagster's UI"
    )
    server_token: SecretStr | None = Field(None, description="Bearer token that workers send to the HTTP API")
    server_ca: Path | None = Field(None, description="CA certificate of the API, PEM; empty: the system's")
    service_host: str = Field("127.0.0.1", description="Address that the HTTP API listens on")
    service_port: int = Field(
        8700, ge=0, le=65535, description="Port of the HTTP API; 0: any free port, which is printed"
    )
    service_processes: int = Field(1, ge=1, description="Number of processes that 'serve' starts")
    service_tokens: SecretStr | None = Field(
        None,
        description='Tokens of the HTTP API, JSON: {"<token>": ["<scope>", ...]} with scopes of worker:<worker id>, '
        "pool:<pool>, operator, reader; empty: no tokens are needed, on loopback addresses only",
    )
    service_tls_cert: Path | None = Field(None, description="Certificate of the HTTP API, PEM")
    service_tls_key: Path | None = Field(None, description="Key of the certificate, PEM")
    service_tls_terminated: bool = Field(False, description="A proxy in front of the HTTP API terminates TLS")
    service_body_bytes: int = Field(8 * 1024**2, ge=1024, description="Largest request body of the HTTP API")
    service_rate: float = Field(
        2000.0, gt=0, description="Maximum requests per second of one client: a known token, otherwise an address"
    )
    service_connections: int = Field(
        4096, ge=1, description="Maximum connections of one process of the HTTP API; further ones get 503"
    )
    service_proxies: Annotated[tuple[str, ...], NoDecode, Listed] = Field(
        (),
        description="Addresses or networks of proxies, separated by commas, whose X-Forwarded-For is the client's "
        "address; empty: none",
    )
    service_page_bytes: int = Field(
        8 * 1024**2, ge=64 * 1024, description="Maximum size of a page of events of the HTTP API"
    )

    run_processes: int = Field(
        0,
        ge=0,
        le=MOST_PROCESSES,
        description="Processes that work on the loops of one run, including the driver; 0: one per core and 512 MiB "
        "of the container's limits, once a loop keeps the driver busy",
    )

    worker_pool: str = Field(DEFAULT_POOL, pattern=POOL_NAME, description="Pool that a worker serves")
    worker_slots: int = Field(16, ge=1, description="Maximum commands that a worker process runs at once")
    worker_tool_pools: Annotated[dict[str, int], NoDecode, Json] = Field(
        default_factory=dict, description='Maximum commands at once by tool kind, JSON: {"postgres": 4, "spark": 1}'
    )
    worker_heartbeat_seconds: float = Field(15.0, gt=0, description="Interval of a worker's capacity reports")
    worker_drain_seconds: float = Field(
        60.0, ge=0, description="Time in which the commands of a stopping worker may finish"
    )

    minio_endpoint: Annotated[str | None, HttpAddress] = Field(
        None, description="S3 endpoint of the minio tier; empty: embedded"
    )
    minio_access_key: str = Field("noetl", description="Access key of the minio tier")
    minio_secret_key: SecretStr = Field(
        SecretStr(""), description="Secret key of the minio tier; empty: generated for the embedded store"
    )
    minio_bucket: str = Field("noetl-results", description="Bucket of the minio tier, created if missing")
    minio_region: str = Field("us-east-1", description="Region sent to the minio tier")
    minio_session_token: SecretStr = Field(SecretStr(""), description="Session token of keys that expire")
    minio_verify: bool = Field(True, description="Check the certificate of the minio tier's endpoint")
    minio_retries: int = Field(3, ge=0, description="Retries of a request to the minio tier")
    s3_bucket: str | None = Field(None, description="Bucket of the s3 tier; credentials: the AWS environment")
    gcs_bucket: str | None = Field(None, description="Bucket of the gcs tier")
    gcs_endpoint: Annotated[str | None, HttpAddress] = Field(
        None, description="Endpoint of the gcs tier, for emulators"
    )
    stores_shared: bool = Field(
        True,
        description="Other event logs use the same stores; false: maintenance also removes objects of executions "
        "that this log does not know",
    )

    default_store_tier: StoreTier = Field(StoreTier.MINIO, description="Tier of results that are not inline")
    pvc_mount_path: Path | None = Field(
        None, description="Mount of the pvc tier; with embedded services: a folder of NOETL_HOME"
    )
    pvc_tier_threshold_bytes: int = Field(
        10 * 1024**2, ge=0, description="Results above this size are stored in the pvc tier, if it is mounted"
    )
    http_body_bytes: int = Field(
        32 * 1024**2,
        ge=1024,
        description="Larger responses of the http tool are stored while they arrive; larger scripts and keychain "
        "tokens are refused",
    )
    http_deny: Annotated[tuple[str, ...], NoDecode, Listed] = Field(
        (),
        description="Networks (10.0.0.0/8), addresses and host names (*.internal), separated by commas, that the http "
        "tool, transfers, scripts, keychain entries and requests for tokens must not reach",
    )
    chunks_ahead: int = Field(16, ge=0, description="Chunks of a step that may wait for the next step")
    inline_result_bytes: int = Field(
        8 * 1024,
        ge=0,
        description="Results up to this size are stored in the event itself; workers, API and ingestors need the same "
        "value, because they refuse larger results",
    )
    event_bytes: int = Field(
        1024**2, ge=64 * 1024, description="Largest event of a worker: its meta, context, result and error as JSON"
    )
    chunk_bytes: int = Field(
        8 * 1024**2,
        ge=1024,
        description="Size of the chunks of a large result, stored while the next is made",
    )
    loop_collection_threshold: int = Field(1000, ge=0, description="Larger loop collections become references")

    command_heartbeat_seconds: float = Field(15.0, gt=0, description="Interval of a running command's heartbeats")
    command_heartbeat_timeout_seconds: float = Field(
        300.0, gt=0, description="Time after which a claim without heartbeats expires"
    )

    partition_hours: Annotated[float | None, NoneIfEmpty] = Field(
        None,
        ge=1 / 60,
        description="Hours of executions that a partition of the event log contains, such as 24; empty: a calendar "
        "month. Three partitions are created ahead, so maintenance must run more often than that",
    )
    retention_days: Annotated[float | None, NoneIfEmpty] = Field(
        None, gt=0, description="Age of partitions of events that are dropped with their executions; empty: never"
    )
    recovery_attempts: int = Field(5, ge=0, description="Maximum resumptions of an execution whose process has ended")
    recovery_backoff_seconds: float = Field(30.0, gt=0, description="Pause before a resumption; it doubles")
    recovery_grace_seconds: float | None = Field(
        2.0,
        gt=0,
        description="Time without its process after which the HTTP API resumes an execution for the first time; "
        "empty: the recovery sensor alone resumes executions",
    )

    runs_at_once: int | None = Field(
        None, ge=1, description="Maximum runs that this machine drives at once; empty: four per core, 16 at most"
    )

    engine_at_once: int = Field(
        200, ge=1, description="Executions without a Dagster run that a machine drives side by side; others wait"
    )

    run_launcher: RunLauncher = Field(
        RunLauncher.WARM,
        description="Runs of executions that the HTTP API accepts: warm, in processes of its machine; dagster, "
        "through Dagster's run coordinator and launcher, which creates pods in a cluster",
    )
    workspace: Path = Field(Path("workspace.yaml"), description="Workspace file for run_launcher dagster")

    playbook_env: Annotated[tuple[str, ...], NoDecode, Listed] = Field(
        (),
        description="Environment variables that Python code, shell steps and secret://env/ may read, beside basic ones "
        "such as PATH and HOME: names or patterns, separated by commas, for example MY_API_KEY,AWS_*; never NOETL_*",
    )

    python_isolation: PythonIsolation = Field(
        PythonIsolation.THREAD, description="Isolation of Python code without 'isolation': thread, or subprocess"
    )
    playbook_user: str | None = Field(
        None, description="User, by name or number, of shell steps and Python code in a subprocess; needs root"
    )
    playbook_memory_bytes: Annotated[int | None, NoneIfEmpty] = Field(
        None,
        ge=64 * 1024**2,
        description="Largest address space of one process of a shell step or of Python code in a subprocess; empty: "
        "no limit",
    )
    playbook_seconds: Annotated[float | None, NoneIfEmpty] = Field(
        None, gt=0, description="Longest time of a shell step or of Python code in a subprocess; empty: no limit"
    )
    playbook_processes: Annotated[int | None, NoneIfEmpty] = Field(
        None,
        ge=1,
        description="Maximum number of processes and threads of NOETL_PLAYBOOK_USER; empty: no limit",
    )

    credentials_file: Path | None = Field(None, description="YAML or JSON: name -> {type, data}")
    credential_key: SecretStr | None = Field(None, description="Fernet key of noetl.credential and keychain")
    container_allow: Annotated[tuple[str, ...], NoDecode, Listed, PodRights] = Field(
        (),
        description="Rights that playbooks may ask of pods, separated by commas: hostPath:/data, serviceAccount:spark, "
        "secret:keys, capability:NET_ADMIN, volume:nfs, privileged, allowPrivilegeEscalation, ...; empty: none",
    )
    container_pod: Annotated[PodTemplate, NoDecode, Json] = Field(
        default_factory=PodTemplate,
        description="What every pod of a container step has, as JSON of a pod template: metadata with labels and "
        "annotations, and spec with at most one container. Tasks add to it",
    )
    container_deadline_seconds: float = Field(
        86_400.0, gt=0, description="Seconds after which the job of a container step without a timeout is ended"
    )
    container_start_seconds: float = Field(
        600.0,
        gt=0,
        description="Seconds for which a container's job may wait for something that Kubernetes reports, such as an "
        "image that cannot be pulled, a quota, or missing capacity",
    )
    file_folders: Annotated[tuple[Path, ...], NoDecode, Listed] = Field(
        (),
        description="Further folders, separated by commas, for absolute paths of scripts, and for absolute paths of "
        "files that begin with a template",
    )
    secrets_path: Path = Field(Path("/run/secrets"), description="Folder of the secret provider 'file'")
    google_secrets_endpoint: Annotated[str | None, HttpAddress] = Field(
        None,
        description="Endpoint of Google's Secret Manager: a regional one, or http://host:port of an emulator; "
        "empty: Google's own",
    )
    default_postgres_credential: str | None = Field(
        None, description="'embedded': unknown postgres credentials refer to the embedded server"
    )

    duckdb_memory: str = Field(
        "",
        description="Memory of a duckdb call, such as 4GB; larger data is spilled to disk; empty: half of the "
        "container's limit, or DuckDB's own choice",
    )

    spark_master: str = Field("local[*]", description="Spark master: local[*], spark://, k8s://")
    spark_remote: Annotated[str | None, address_with("sc")] = Field(
        None, description="Spark Connect address, sc://host:port"
    )
    spark_driver_java_options: str = Field(
        "", description="Further JVM options of a local driver, for example -XX:+UseSerialGC"
    )
    spark_staging: bool = Field(
        True,
        description="Local masters read and write objects as files in the state folder; false: through Python data "
        "sources, as clusters do",
    )
    spark_driver_memory: str = Field(
        "", description="Memory of a local Spark driver; empty: half of the container's limit, or 2g"
    )
    spark_config: Annotated[dict[str, str], NoDecode, Json] = Field(
        default_factory=dict, description='Further Spark configuration, JSON: {"spark.executor.memory": "4g"}'
    )

    embedded: bool = Field(True, description="Start embedded services for the addresses that are not set")

    @property
    def spark_address(self) -> str:
        """The Spark master, or the Spark Connect address."""
        return self.spark_remote or self.spark_master

    @property
    def driven_at_once(self) -> int:
        """Number of runs that this machine drives at once. Each run has about ten connections to PostgreSQL."""
        return self.runs_at_once or min(4 * machine.cores(), 16)

    @property
    def partition_width(self) -> timedelta | None:
        """The width of a partition of the event log; None means a month."""
        return None if self.partition_hours is None else timedelta(hours=self.partition_hours)

    @property
    def nats_servers(self) -> list[str]:
        """The address of each server of ``nats_url``."""
        return separate_addresses(self.nats_url or "")

    @property
    def nats_tls(self) -> ssl.SSLContext | None:
        """The TLS context for ``tls://`` servers of NATS; None means the system's authorities."""
        return None if self.nats_ca is None else _trusting(self.nats_ca)


@cache
def _trusting(authority: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority)


@cache
def get_settings() -> Settings:
    """Reads the settings of this process once, and returns them."""
    return Settings()


def settings_with(**values: object) -> Settings:
    """Returns the settings of this process with some values replaced; None keeps the value.

    Raises:
        ValidationError: a value is none that the setting may have.
    """
    update = {name: value for name, value in values.items() if value is not None}
    return Settings.model_validate(get_settings().model_dump() | update)


def plain_settings(settings: Settings, *, changed: bool = False) -> dict[str, Any]:
    """Returns the settings as JSON values, if ``changed`` without defaults; includes secrets, so never store it."""
    values = settings.model_dump(mode="json", exclude_none=changed, exclude_defaults=changed)
    for name in values:
        secret = getattr(settings, name)
        if isinstance(secret, SecretStr):
            values[name] = secret.get_secret_value()
    return values


def dump_settings(settings: Settings) -> str:
    """Returns :func:`plain_settings` as text for :func:`load_settings`."""
    return orjson.dumps(plain_settings(settings), option=orjson.OPT_SORT_KEYS).decode()


def load_settings(text: str) -> Settings:
    """Reads the output of :func:`dump_settings`."""
    return Settings.model_validate_json(text)
