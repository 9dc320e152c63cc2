"""A token server that checks what it is sent, and resources that check its tokens."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, unquote_plus

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from tests.serving import served

PASSWORD = "correct horse battery"
ACCOUNT = "etl@project.iam.gserviceaccount.com"
REFRESH_TOKEN = "refresh-token-number-0"


@cache
def private_key() -> rsa.RSAPrivateKey:
    """The key of the service account, of which the server knows the public part."""
    return rsa.generate_private_key(65537, 2048)


def private_pem() -> str:
    return private_key().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def _decoded(part: str) -> bytes:
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


def _encoded(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


class TokenServer:
    """Issues tokens to those who prove that they may have one.

    Attributes:
        given: the tokens, in order.
        asked: the forms of the requests.
        life: ``expires_in`` of the answers.
        accepts: how clients may authenticate.
        rotates: a refresh token is valid once, and each answer has the next one.
        status: of all answers, if it is not 200.
        gate: answers wait until it is set; ``arrived`` is set when one waits.
        revoked: tokens that resources do not accept any more.
        next: what the next token is.
    """

    def __init__(self) -> None:
        self.given: list[str] = []
        self.asked: list[dict[str, str]] = []
        self.life: Any = 3600
        self.accepts = {"basic", "post"}
        self.rotates = False
        self.refresh_token = REFRESH_TOKEN
        self.status = 200
        self.gate, self.arrived = threading.Event(), threading.Event()
        self.gate.set()
        self.revoked: set[str] = set()
        self.visits: list[str] = []
        self.next: str | None = None
        self.url = ""

    async def token(self, request: Request) -> Response:
        form = dict(parse_qsl((await request.body()).decode()))
        self.asked.append(form)
        self.arrived.set()
        await asyncio.to_thread(self.gate.wait)
        if self.status != 200:
            return PlainTextResponse("not now", self.status)
        if form.get("grant_type") == "urn:ietf:params:oauth:grant-type:jwt-bearer":
            return self._of_account(form["assertion"])
        way, secret = "post", form.get("client_secret")
        if (header := request.headers.get("authorization", "")).startswith("Basic "):
            way, secret = "basic", unquote_plus(base64.b64decode(header[6:]).decode().partition(":")[2])
        if secret != PASSWORD or way not in self.accepts:
            return JSONResponse({"error": "invalid_client", "error_description": f"{secret!r} is wrong"}, 401)
        if form.get("grant_type") == "refresh_token":
            if form["refresh_token"] != self.refresh_token:
                text = f"{form['refresh_token']} is used up"
                return JSONResponse({"error": "invalid_grant", "error_description": text}, 400)
            if self.rotates:
                self.refresh_token = f"refresh-token-number-{len(self.given) + 1}"
                return self._issued(refresh_token=self.refresh_token)
        return self._issued()

    def _issued(self, **more: Any) -> Response:
        self.given.append(self.next or f"token-number-{len(self.given)}")
        return JSONResponse({"access_token": self.given[-1], "expires_in": self.life, "token_type": "Bearer", **more})

    def _of_account(self, assertion: str) -> Response:
        signed, _, signature = assertion.rpartition(".")
        private_key().public_key().verify(_decoded(signature), signed.encode(), PKCS1v15(), SHA256())
        claims = json.loads(_decoded(signed.partition(".")[2]))
        now = time.time()
        if claims["iss"] != ACCOUNT or claims["aud"] != f"{self.url}/token":
            return JSONResponse({"error": "invalid_grant", "error_description": "Invalid issuer or audience"}, 400)
        if not claims["iat"] - 60 < now < claims["exp"] <= claims["iat"] + 3600:
            return JSONResponse({"error": "invalid_grant", "error_description": "Invalid times"}, 400)
        if "target_audience" in claims:
            return JSONResponse({"id_token": self._id_token(claims["target_audience"])})
        return self._issued(scope=claims["scope"], subject=claims.get("sub"))

    def _id_token(self, audience: str) -> str:
        number = len(self.given)
        claims = {"aud": audience, "email": ACCOUNT, "exp": time.time() + self.life, "number": number}
        text = f"{_encoded({'alg': 'RS256'})}.{_encoded(claims)}"
        signature = private_key().sign(text.encode(), PKCS1v15(), SHA256())
        self.given.append(f"{text}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}")
        return self.given[-1]

    async def metadata(self, request: Request) -> Response:
        if request.headers.get("metadata-flavor") != "Google" or request.path_params["account"] != "default":
            return PlainTextResponse("forbidden", 403)
        self.asked.append(dict(request.query_params))
        if request.path_params["what"] == "identity":
            return PlainTextResponse(self._id_token(request.query_params["audience"]))
        return self._issued()

    async def whoami(self, request: Request) -> Response:
        """Answers to bearers of a token; to those of an id token with its audience."""
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        self.visits.append(token)
        if token not in self.given or token in self.revoked or "all" in self.revoked:
            return PlainTextResponse("unknown token", 401)
        audience = json.loads(_decoded(token.split(".")[1]))["aud"] if token.count(".") == 2 else None
        return JSONResponse({"known": True, "audience": audience})

    async def stored(self, request: Request) -> Response:
        """An object of Google's store, for bearers of a token."""
        answer = await self.whoami(request)
        headers = {"ETag": '"1"', "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT"}
        return Response(b"content", headers=headers) if answer.status_code == 200 else answer


@contextmanager
def token_server() -> Iterator[TokenServer]:
    made = TokenServer()
    account = "/computeMetadata/v1/instance/service-accounts/{account}/{what}"
    routes = [
        Route("/token", made.token, methods=["POST"]),
        Route("/whoami", made.whoami, methods=["GET", "POST"]),
        Route("/text", lambda request: PlainTextResponse("no JSON"), methods=["POST"]),
        Route("/empty", lambda request: JSONResponse({"id": 1}), methods=["POST"]),
        Route("/moved", lambda request: RedirectResponse("/token"), methods=["POST"]),
        Route(account, made.metadata),
        Route("/bucket/{path}", made.stored),
    ]
    with served(Starlette(routes=routes)) as made.url:
        yield made
        made.gate.set()
