"""AWS as far as secrets go: moto's services behind an address, so that clients are real ones."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager

from botocore.awsrequest import AWSPreparedRequest
from botocore.compat import HTTPHeaders
from moto.backends import get_backend
from moto.core.botocore_stubber import BotocoreStubber
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.serving import served

_SCOPE = re.compile(r"Credential=[^/]+/\d+/(?P<region>[^/]+)/(?P<service>[^/]+)/")


async def answer(request: Request) -> Response:
    """What moto's service says that the request is signed for."""
    scope = _SCOPE.search(request.headers.get("authorization", ""))
    assert scope is not None, "the request is not signed"
    prepared = AWSPreparedRequest(
        method=request.method,
        url=f"https://{scope['service']}.{scope['region']}.amazonaws.com{request.url.path}",
        headers=HTTPHeaders.from_dict(dict(request.headers)),
        body=await request.body(),
        stream_output=False,
    )
    said = await asyncio.to_thread(BotocoreStubber().process_request, prepared)
    assert said is not None
    status, headers, body = said
    return Response(body, status, {name: str(value) for name, value in headers.items()})


@contextmanager
def aws_served() -> Iterator[str]:
    """Serves an empty account until the block ends; gives the address."""
    for service in ("secretsmanager", "ssm"):
        get_backend(service).reset()  # type: ignore[call-overload]
    with served(Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])) as url:
        yield url
