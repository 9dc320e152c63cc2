"""``python -m records_api --port 8765 --seed 7 --faults 0.05``: serves on 127.0.0.1."""

from __future__ import annotations

import socket
from typing import Annotated

import typer
import uvicorn

from .app import create_app


def serve(
    host: Annotated[str, typer.Option(help="address that it listens on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free port, which is printed")] = 8765,
    seed: Annotated[int, typer.Option(help="the seed of the records")] = 0,
    faults: Annotated[float, typer.Option(min=0.0, max=1.0, help="share of attempts that fail")] = 0.0,
    facilities: Annotated[int, typer.Option(min=1, help="number of listed facilities")] = 5,
    patients: Annotated[int, typer.Option(min=1, help="patients of each listed facility")] = 100,
) -> None:
    """Serve simulated clinical records until interrupted."""
    app = create_app(seed=seed, faults=faults, facilities=facilities, patients=patients)
    # uvicorn logs an error for each dropped connection, which is intended here
    config = uvicorn.Config(app, log_level="critical", access_log=False)
    # without its protocol, asyncio leaves Nagle's algorithm on, and each answer waits for an acknowledgement
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    typer.echo(f"records API on http://{host}:{listener.getsockname()[1]}")
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    typer.run(serve)
