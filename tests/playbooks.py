"""Playbooks as tests write them: without the lines with which every one of them begins."""

from __future__ import annotations

from textwrap import dedent

from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.playbook.models import Playbook


def text_of(name: str, body: str) -> str:
    """The file of a playbook: its head, then its ``workload`` and ``workflow``."""
    head = f"apiVersion: noetl.io/v2\nkind: Playbook\nmetadata: {{name: {name}, path: tests/{name}}}\n"
    return head + dedent(body)


def playbook(body: str, name: str = "sample") -> Playbook:
    """A playbook from its ``workload`` and ``workflow``."""
    return parse_playbook(text_of(name, body), file=f"{name}.yaml")
