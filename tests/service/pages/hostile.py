"""Texts that a page must show and not obey."""

from __future__ import annotations

HOSTILE = (
    "<script>alert(1)</script>",
    '"><svg onload=alert(1)>',
    "'-alert(1)-'",
    "{{ 7 * 7 }}",
    "{0.__class__}",
    "]]></svg><img src=x onerror=alert(1)>",
    "javascript:alert(1)",
    "</textarea></title></style>",
    "word" * 5_000,
    "\u6f22\u5b57" * 40,
    "\u202egnp.exe\u202c",
    "nul\x00bell\x07escape\x1b[31m",
    "next\u2028line\u0085",
    "",
)
"""Names, results and messages as an attacker would choose them."""
