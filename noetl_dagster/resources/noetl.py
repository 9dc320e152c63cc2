"""The engine as a Dagster resource, with fields for the settings of a deployment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, get_args

from dagster import ConfigurableResource, DagsterInvalidDefinitionError, EnvVar
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr, ValidationError

from noetl_dagster.playbook.wording import did_you_mean
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.settings import Settings


def _setting(name: str) -> Any:
    """Returns a field for a setting, with its description and without a default value."""
    description = Settings.model_fields[name].description
    return Field(None, description=f"{description}; default: NOETL_{name.upper()}")


class NoetlResource(ConfigurableResource[Any], EngineProvider):
    """The NoETL engine: event log, transport and result tiers. Empty fields come from ``NOETL_*`` variables.

    Dagster stores and shows a resource's configuration in clear text. So secrets, and addresses that contain a
    password, must be given as ``EnvVar``.

    Examples:
        >>> load_playbooks(
        ...     "playbooks",
        ...     resources={"noetl": NoetlResource(db_url=EnvVar("LAKE_DB_URL"), minio_bucket="lake")},
        ... )

    Raises:
        DagsterInvalidDefinitionError: in Definitions, if a secret is in clear text or a setting is unknown.
    """

    home: str | None = _setting("home")
    embedded: bool | None = _setting("embedded")
    db_url: str | None = _setting("db_url")
    nats_url: str | None = _setting("nats_url")
    nats_namespace: str | None = _setting("nats_namespace")
    playbooks_path: str | None = _setting("playbooks_path")
    minio_endpoint: str | None = _setting("minio_endpoint")
    minio_access_key: str | None = _setting("minio_access_key")
    minio_secret_key: str | None = _setting("minio_secret_key")
    minio_bucket: str | None = _setting("minio_bucket")
    s3_bucket: str | None = _setting("s3_bucket")
    gcs_bucket: str | None = _setting("gcs_bucket")
    pvc_mount_path: str | None = _setting("pvc_mount_path")
    default_store_tier: str | None = _setting("default_store_tier")
    credentials_file: str | None = _setting("credentials_file")
    credential_key: str | None = _setting("credential_key")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Further settings by the names of docs/reference/settings.md: {'worker_slots': 32}",
    )

    model_config = ConfigDict(extra="forbid")
    _settled: Settings | None = PrivateAttr(None)

    def get_resource_definition(self) -> Any:
        """Checks the fields before Dagster uses the resource."""
        in_clear = {name: value for name, value in self._given().items() if _variable_in(value) is None}
        for name, value in in_clear.items():
            annotation = Settings.model_fields[name].annotation
            if SecretStr in (annotation, *get_args(annotation)) or _holds_password(name, value):
                variable = f"NOETL_{name.upper()}"
                raise DagsterInvalidDefinitionError(
                    f"NoetlResource: {name} holds a secret, and Dagster shows a resource's configuration; give "
                    f"EnvVar({variable!r}), in YAML {{env: {variable}}}, or leave it out and set that variable"
                )
        _settings_of(in_clear)
        return super().get_resource_definition()

    def given_settings(self) -> Settings | None:
        """Returns the settings that the fields define; None if all fields are empty."""
        if self._settled is None:
            values = self._given()
            if not values:
                return None
            self._settled = _settings_of({name: _value(value) for name, value in values.items()})
        return self._settled

    def _given(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in type(self).model_fields if name != "options"}
        values = {name: value for name, value in fields.items() if value is not None} | self.options
        for name in values:
            if name not in Settings.model_fields:
                hint = did_you_mean(name, tuple(Settings.model_fields)) or "docs/reference/settings.md has their names"
                raise DagsterInvalidDefinitionError(f"NoetlResource: there is no setting {name!r}; {hint}")
        return values


_VARIABLES = (EnvVar, type(EnvVar.int("any")))
_PASSWORD = re.compile(r"://[^/@]*:[^/@]*@|(?:password|passwd|token|secret)\s*=", re.IGNORECASE)

_SECRET = re.compile(r"secret|passw|token|credential", re.IGNORECASE)


def _variable_in(value: Any) -> str | None:
    """Returns the variable to which a value refers: an ``EnvVar``, or Dagster's form of it in configuration."""
    if isinstance(value, _VARIABLES):
        return str(value.env_var_name)
    return str(value["env"]) if isinstance(value, Mapping) and set(value) == {"env"} else None


def _value(value: Any) -> Any:
    """Returns the value of a field. Outside of a run, Dagster has not resolved its variable."""
    variable = _variable_in(value)
    if variable is None:
        return value
    text = os.environ.get(variable)
    if text is None:
        raise DagsterInvalidDefinitionError(f"NoetlResource: the environment variable {variable} is not set")
    return text


def _settings_of(values: Mapping[str, Any]) -> Settings:
    try:
        return Settings.model_validate(values)
    except ValidationError as error:  # its text would contain the values
        reasons = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise DagsterInvalidDefinitionError(f"NoetlResource: {reasons}") from None


def _holds_password(name: str, value: Any) -> bool:
    """Returns True if an address or connection string contains a secret. In a NATS URL, a user may be a token."""
    if isinstance(value, Mapping):
        return any(_SECRET.search(str(key)) or _holds_password(name, one) for key, one in value.items())
    if not isinstance(value, str):
        return False
    return _PASSWORD.search(value) is not None or (name == "nats_url" and "@" in value)
