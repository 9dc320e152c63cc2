"""The engine as a resource of anybody's project."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dagster import DagsterInvalidDefinitionError, Definitions, EnvVar, asset, materialize
from pydantic import ValidationError

from noetl_dagster.resources.noetl import NoetlResource
from noetl_dagster.settings import Settings

ADDRESS = "postgresql://ana:hidden-word@db.example/lake"


@pytest.fixture
def resource(monkeypatch: pytest.MonkeyPatch) -> Iterator[NoetlResource]:
    monkeypatch.setenv("LAKE_DB_URL", ADDRESS)
    return NoetlResource(db_url=EnvVar("LAKE_DB_URL"), minio_bucket="lake", options={"worker_slots": 4})


def test_variables_are_looked_up_outside_of_a_run_too(resource: NoetlResource) -> None:
    settings = resource.given_settings()
    assert settings is not None
    assert (settings.db_url, settings.minio_bucket, settings.worker_slots) == (ADDRESS, "lake", 4)


def test_an_asset_takes_it(resource: NoetlResource) -> None:
    seen = []

    # not annotated: Dagster refuses annotations that are text, as they are in this module
    def reads(noetl):  # type: ignore[no-untyped-def]
        seen.append(noetl.given_settings().db_url)

    reads.__annotations__ = {"noetl": NoetlResource}
    assert materialize([asset(reads)], resources={"noetl": resource}).success
    assert seen == [ADDRESS]


def test_further_options_may_be_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_TOKEN", "hidden-word")
    seen = []

    # not annotated: Dagster refuses annotations that are text, as they are in this module
    def reads(noetl):  # type: ignore[no-untyped-def]
        seen.append(noetl.given_settings().server_token.get_secret_value())

    reads.__annotations__ = {"noetl": NoetlResource}
    for token in (EnvVar("SERVER_TOKEN"), {"env": "SERVER_TOKEN"}):
        resource = NoetlResource(options={"server_token": token})
        assert materialize([asset(reads)], resources={"noetl": resource}).success
        shown = str(resource.get_resource_definition().config_schema.default_value)
        assert "hidden-word" not in shown
    assert seen == ["hidden-word", "hidden-word"]


def test_what_dagster_shows_of_it_has_no_secret(resource: NoetlResource) -> None:
    repository = Definitions(resources={"noetl": resource}).get_repository_def()
    shown = str(repository.get_top_level_resources()["noetl"].config_schema.default_value)
    assert "LAKE_DB_URL" in shown
    assert "hidden-word" not in shown


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"db_url": ADDRESS}, "db_url holds a secret"),
        ({"db_url": "postgresql://db.example/lake?user=ana&password=hidden-word"}, "db_url holds a secret"),
        ({"db_url": "host=db.example user=ana password=hidden-word"}, "db_url holds a secret"),
        ({"nats_url": "nats://hidden-word@nats.example"}, "nats_url holds a secret"),
        ({"minio_endpoint": "http://ana:hidden-word@[bad"}, "minio_endpoint holds a secret"),
        (
            {"options": {"spark_config": {"spark.hadoop.fs.s3a.secret.key": "hidden-word"}}},
            "spark_config holds a secret",
        ),
        ({"options": {"worker_slots": "hidden-word"}}, "worker_slots: Input should be a valid integer"),
        ({"default_store_tier": "hidden-word"}, "default_store_tier: Input should be"),
        ({"minio_secret_key": "hidden-word"}, "minio_secret_key holds a secret"),
        ({"credential_key": "hidden-word"}, r"EnvVar\('NOETL_CREDENTIAL_KEY'\)"),
        ({"options": {"server_token": "hidden-word"}}, "server_token holds a secret"),
        ({"options": {"worker_slot": 3}}, "did you mean 'worker_slots'"),
    ],
)
def test_what_would_be_shown_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(DagsterInvalidDefinitionError, match=message) as refused:
        Definitions(resources={"noetl": NoetlResource(**given)}).get_repository_def()
    assert "hidden-word" not in str(refused.value)


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAKE_DB_URL", raising=False)
    with pytest.raises(DagsterInvalidDefinitionError, match="LAKE_DB_URL is not set"):
        NoetlResource(db_url=EnvVar("LAKE_DB_URL")).given_settings()


def test_every_field_is_a_setting_and_described() -> None:
    for name, field in NoetlResource.model_fields.items():
        assert field.description, name
        assert name == "options" or name in Settings.model_fields


def test_a_field_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match="db_urll"):
        NoetlResource(db_urll="postgresql://db.example/lake")
