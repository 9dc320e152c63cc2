"""Settings that are empty, of a wrong type, out of range or misspelt."""

from __future__ import annotations

import asyncio
import math

import pytest
from pydantic import SecretStr, ValidationError

from noetl_dagster.cli import app
from noetl_dagster.cli.doctor import CheckState
from noetl_dagster.cli.doctor.checks import program_checks
from noetl_dagster.settings import Settings, get_settings, settings_with

SECRET = "hunter-in-the-address"
TYPES = {name: field.annotation for name, field in Settings.model_fields.items()}
SECONDS = [name for name, kind in TYPES.items() if kind in (float, float | None)]
NUMBERS = [*SECONDS, *(name for name, kind in TYPES.items() if kind in (int, int | None))]
SWITCHES = [name for name, kind in TYPES.items() if kind is bool]
MAPPINGS = ["worker_tool_pools", "container_pod", "spark_config"]
LISTS = ["service_proxies", "http_deny", "playbook_env", "container_allow", "file_folders"]
PORTS = ["health_port", "service_port"]
HTTP = [
    *("tracing_endpoint", "server_url", "pages_url", "dagster_url", "minio_endpoint", "gcs_endpoint"),
    "google_secrets_endpoint",
]

WRONG: dict[str, list[str]] = {
    **{name: ["x", "1 second", "-1"] for name in NUMBERS},
    **{name: ["x", "2", "maybe"] for name in SWITCHES},
    **{name: ["x", "[", "1", "[]", '"text"', '{"a":'] for name in MAPPINGS},
    **{name: ["[", '["a",', "[1]"] for name in LISTS},
    **{name: ["-1", "65536", "http", "80.5"] for name in PORTS},
    **{
        name: [
            "x",
            "//host",
            "http://",
            "http:///path",
            "ftp://host",
            "http://host:0",
            "http://host:65536",
            "http://[::1",
        ]
        for name in HTTP
    },
    **{
        name: ["x", "host/db", "mysql://host/db", "postgresql://host:65536/db", f"http://u:{SECRET}@host/db"]
        for name in ("db_url", "dagster_db_url")
    },
    "nats_url": [
        *("x", "localhost:4222", "http://host", "nats://", "nats://host:99999", "nats://a, x://b", f"nat://{SECRET}@h")
    ],
    "spark_remote": ["x", "http://host", "sc://"],
    "nats_namespace": ["a b", "a.b", "a*", "a>", "\u00e4"],
    "worker_pool": ["A", "a_b", "-a", "a" * 64, "a b"],
    "log_level": ["x", "WARN ING", "-"],
    "log_format": ["x", "JSON LINES"],
    "event_transport": ["x", "tcp"],
    "default_store_tier": ["x", "floppy"],
    "python_isolation": ["x"],
    "run_launcher": ["x"],
}
CASES = [(name, value) for name, values in WRONG.items() for value in values]


@pytest.fixture(autouse=True)
def _settings_of_the_environment() -> None:
    get_settings.cache_clear()


@pytest.mark.parametrize(("name", "value"), CASES)
def test_a_wrong_value_is_one_line_that_names_the_variable(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variable = f"NOETL_{name}".upper()
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as caught:
        app.main()
    assert caught.value.code == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith(variable)
    assert "\n" not in message
    assert SECRET not in message


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999", "9" * 400])
@pytest.mark.parametrize("name", SECONDS)
def test_durations_and_shares_are_finite(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"NOETL_{name}".upper(), value)
    with pytest.raises(ValidationError):
        Settings()


@pytest.mark.parametrize(("name", "value"), [(name, values[0]) for name, values in WRONG.items()])
def test_a_value_that_replaces_a_setting_is_checked(name: str, value: str) -> None:
    with pytest.raises(ValidationError, match=name):
        settings_with(**{name: value})


def test_settings_with_no_other_value_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOETL_SERVER_TOKEN", SECRET)
    monkeypatch.setenv("NOETL_HTTP_DENY", "10.0.0.0/8")
    monkeypatch.setenv("NOETL_CONTAINER_POD", '{"spec": {"containers": [{"image": "a"}], "hostname": "b"}}')
    assert settings_with(worker_slots=None) == get_settings()
    assert settings_with(worker_slots=3).worker_slots == 3


def test_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"NOETL_{name}".upper(), raising=False)
    unset = Settings()
    for name in Settings.model_fields:
        monkeypatch.setenv(f"NOETL_{name}".upper(), "")
    assert Settings() == unset


def test_errors_contain_no_values() -> None:
    with pytest.raises(ValidationError) as caught:
        Settings(db_url=f"mysql://u:{SECRET}@host/db", server_token={"token": SECRET})
    assert SECRET not in str(caught.value) + repr(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("db_url", "postgresql:///noetl?host=/run/postgresql", "postgresql:///noetl?host=/run/postgresql"),
        ("db_url", "postgres://u:p%40@[::1]:5432/noetl", "postgres://u:p%40@[::1]:5432/noetl"),
        ("nats_url", "nats://a:4222, tls://u:p@b", "nats://a:4222, tls://u:p@b"),
        ("server_url", "https://host/below", "https://host/below"),
        ("log_level", "debug", "DEBUG"),
        ("spark_config", '{"a": "b"}', {"a": "b"}),
        ("http_deny", "10.0.0.0/8, *.internal", ("10.0.0.0/8", "*.internal")),
        ("service_port", "0", 0),
        ("tracing_sampling", "1", 1.0),
    ],
)
def test_right_values(name: str, value: str, read: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"NOETL_{name}".upper(), value)
    assert getattr(Settings(), name) == read


def test_numbers_have_finite_defaults_and_secrets_are_hidden() -> None:
    defaults = Settings(embedded=False, server_token=SecretStr(SECRET))
    assert all(math.isfinite(getattr(defaults, name) or 0) for name in NUMBERS)
    assert SECRET not in repr(defaults)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NOETL_DB_UR", "NOETL_DB_UR (did you mean NOETL_DB_URL?)"),
        ("NOETL_WORKERS_POOL", "NOETL_WORKERS_POOL (did you mean NOETL_WORKER_POOL?)"),
        ("NOETL_XYZ", "NOETL_XYZ"),
        ("NOETL_CREDENTIAL_PG", None),
        ("NOETL_PLATFORM_SERVICE_HOST", None),
        ("NOETL_PORT_8700_TCP", None),
    ],
)
def test_doctor_names_unknown_variables(name: str, found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    [check] = [one for one in program_checks(Settings()) if one.name == "variables"]
    finding = asyncio.run(check.find())
    if found is None:
        assert finding.state is CheckState.OK
    else:
        assert finding.state is CheckState.WARNING
        assert found in finding.what
        assert "noetl-dagster settings" in finding.remedy
