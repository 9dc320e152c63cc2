"""Encrypts what ``noetl.credential`` and ``noetl.keychain`` hold."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

import orjson
from cryptography.fernet import Fernet, InvalidToken

from noetl_dagster.errors import CredentialError
from noetl_dagster.settings import Settings


class Encryption:
    """Encrypts mappings with the key of the settings, which is never stored in the database."""

    def __init__(self, settings: Settings) -> None:
        key = settings.credential_key
        self._key = None if key is None else key.get_secret_value()

    @property
    def has_key(self) -> bool:
        """Reports whether a key is set; it may still be malformed."""
        return self._key is not None

    def seal(self, name: str, data: Mapping[str, Any]) -> bytes:
        """Returns a credential's data encrypted. Raises ``CredentialError`` without a valid key."""
        remedy = (
            'make one with python -c "from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())"'
        )
        return self._fernet(name, remedy).encrypt(orjson.dumps(dict(data)))

    def unseal(self, name: str, sealed: bytes) -> dict[str, Any]:
        """Returns the decrypted data of :meth:`seal`.

        Raises:
            CredentialError: the data was encrypted with another key, or there is none.
        """
        try:
            fernet = self._fernet(name, "set it to the key with which the credential was stored in the database")
            data: dict[str, Any] = orjson.loads(fernet.decrypt(bytes(sealed)))
        except InvalidToken:
            raise CredentialError(
                f"credential {name!r} in the database was encrypted with another key; "
                "set NOETL_CREDENTIAL_KEY to that key or store the credential again"
            ) from None
        return data

    def digest(self, text: bytes) -> str:
        """Returns a keyed digest that distinguishes texts; without the key guesses cannot be verified."""
        return hmac.new((self._key or "").encode(), text, hashlib.sha256).hexdigest()[:32]

    @property
    def key_problem(self) -> str | None:
        """Returns what is wrong with the key itself, None if nothing is."""
        if self._key is None:
            return "NOETL_CREDENTIAL_KEY is not set"
        try:
            Fernet(self._key)
        except ValueError:
            return "NOETL_CREDENTIAL_KEY is not a Fernet key (32 bytes, URL-safe base64)"
        return None

    def _fernet(self, name: str, remedy: str) -> Fernet:
        if self._key is None or self.key_problem is not None:
            raise CredentialError(f"credential {name!r}: {self.key_problem}; {remedy}")
        return Fernet(self._key)
