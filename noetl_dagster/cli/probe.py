"""``python -m noetl_dagster.cli.probe``: checks the health of a container, for engines that run a command for it.

The command line of its first process determines the address: for ``serve`` that of the HTTP API, with TLS if it is
used; for ``worker``, ``ingest``, ``project`` and ``reap`` their health port. Other processes are healthy while they
run. The exit code is 1, with the reason, if there is no answer or the process is not healthy.
"""

from __future__ import annotations

import os
import ssl
import sys
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

ANSWER_SECONDS = 4.0
PROGRAMS = ("noetl-dagster", "noetl_dagster")
WATCHED = ("worker", "ingest", "project", "reap")


def address_of(words: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Returns the address at which a command serves ``/health``; None without one, or with a port chosen by the system.

    The command line may begin with another program (``tini --``, ``sh -c``).
    """
    words = " ".join(words).replace("=", " ").split()  # a shell has them in one word
    command = next((after for word, after in pairwise(words) if word.rpartition("/")[2] in PROGRAMS), None)
    if command == "serve":
        options = dict(pairwise(words))
        scheme = "https" if environment.get("NOETL_SERVICE_TLS_CERT") else "http"
        host = options.get("--host") or environment.get("NOETL_SERVICE_HOST")
        port = options.get("--port") or environment.get("NOETL_SERVICE_PORT") or "8700"
    elif command in WATCHED:
        scheme, host = "http", environment.get("NOETL_HEALTH_HOST")
        port = environment.get("NOETL_HEALTH_PORT") or "0"
    else:
        return None
    if port == "0":
        return None
    host = host or "127.0.0.1"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # every address of the machine
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/health"


def complaint_of(address: str) -> str | None:
    """Returns the problem at the address; None if the process reports that it is healthy.

    The certificate is not checked: it is for the names that others use, and this is the same machine.
    """
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=trusting))
    try:
        with opener.open(address, timeout=ANSWER_SECONDS):
            return None
    except HTTPError as error:
        return f"{address} answers {error.code}: {error.read(500).decode(errors='replace').strip()}"
    except (OSError, HTTPException) as error:
        return f"{address} does not answer: {error}"


def probe(process: str) -> int:
    """Checks the process with this id, prints the outcome, and returns the exit code."""
    words = Path(f"/proc/{process}/cmdline").read_text(errors="replace").split("\0")
    address = address_of(words, os.environ)
    complaint = None if address is None else complaint_of(address)
    print(complaint or ("runs without a health port" if address is None else f"{address} answers"))
    return 0 if complaint is None else 1


if __name__ == "__main__":
    sys.exit(probe(sys.argv[1] if len(sys.argv) > 1 else "1"))
