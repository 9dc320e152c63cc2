"""``noetl-dagster serve`` does not expose anything by accident."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from noetl_dagster.cli.commands.serve import check_exposure
from noetl_dagster.errors import ServiceError
from noetl_dagster.service.tokens import parse_tokens
from noetl_dagster.settings import Settings

TOKENS = SecretStr('{"secret-token": ["reader"]}')


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"service_host": "127.0.0.1"}, None),
        ({"service_host": "::1"}, None),
        ({"service_host": "localhost"}, None),
        ({"service_host": "0.0.0.0"}, "without tokens"),
        ({"service_host": "example.org"}, "without tokens"),
        ({"service_host": "0.0.0.0", "service_tokens": TOKENS}, "without TLS"),
        ({"service_host": "0.0.0.0", "service_tokens": TOKENS, "service_tls_terminated": True}, None),
        ({"service_host": "0.0.0.0", "service_tokens": TOKENS, "service_tls_cert": Path("c.pem")}, None),
    ],
)
def test_beyond_loopback_only_with_tokens_and_tls(
    changes: dict[str, object], complaint: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings().model_copy(update=changes)
    if complaint is None:
        check_exposure(settings)
        return
    with pytest.raises(SystemExit):
        check_exposure(settings)
    assert complaint in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "text",
    [
        *("no json", '["secret"]', '{"secret": ["root"]}', '{"secret": "reader"}', "7"),
        *("{}", '{"": ["reader"]}', '{"secret": []}', '{"secret": ["worker"]}', '{"secret": ["pool:A b"]}'),
    ],
)
def test_broken_tokens_are_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ServiceError, match="NOETL_SERVICE_TOKENS") as caught:
        parse_tokens(SecretStr(text))
    assert '"secret"' not in str(caught.value)
