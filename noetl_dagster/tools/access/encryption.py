"""Encrypts credentials and tokens for the database: Fernet tokens under ``NOETL_CREDENTIAL_KEY``."""

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
        return self._fernet(name).encrypt(orjson.dumps(dict(data)))

    def unseal(self, name: str, sealed: bytes) -> dict[str, Any]:
        """Returns the decrypted data of :meth:`seal`.

        Raises:
            CredentialError: the data was encrypted with another key, or there is none.
        """
        try:
            data: dict[str, Any] = orjson.loads(self._fernet(name).decrypt(bytes(sealed)))
        except InvalidToken:
            raise CredentialError(
                f"credential {name!r} in the database was encrypted with another key; "
                "set NOETL_CREDENTIAL_KEY to that key or store the credential again"
            ) from None
        return data

    def digest(self, text: bytes) -> str:
        """Returns a keyed digest that distinguishes texts; without the key guesses cannot be verified."""
        return hmac.new((self._key or "").encode(), text, hashlib.sha256).hexdigest()[:32]

    def _fernet(self, name: str) -> Fernet:
        try:
            if self._key is not None:
                return Fernet(self._key)
        except ValueError:
            pass
        state = "is not set" if self._key is None else "is not a Fernet key (32 bytes, URL-safe base64)"
        raise CredentialError(
            f"credential {name!r}: NOETL_CREDENTIAL_KEY {state}; make one with "
            'python -c "from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())"'
        )
