"""Playbooks over results that are in chunks: loops, checks, selected fields, the same values as small ones."""

from __future__ import annotations
