"""Spark SQL's scripts in statements.

Spark has backslashes in strings, strings in double quotes and names in backticks, so that PostgreSQL's rules
would cut them at a semicolon. Its own scanner is in the JVM, which a client of Spark Connect does not have.
"""

from __future__ import annotations

from functools import cache
from typing import Any


def split_spark_statements(sql: str) -> list[str]:
    """The statements of a script, without their semicolons; empty ones and bare comments are left out.

    A compound statement, ``BEGIN ... END``, and all that follows it stay in one piece. So does text that cannot
    be read, for which Spark then has the words.
    """
    if ";" not in sql:
        return [sql.strip()] if sql.strip() else []
    from sqlglot import TokenType
    from sqlglot.errors import TokenError

    try:
        tokens = _dialect().tokenize(sql)
    except TokenError:
        return [sql.strip()]
    statements: list[str] = []
    start, words = 0, 0
    for token in tokens:
        if token.token_type is TokenType.SEMICOLON:
            if words:
                statements.append(sql[start : token.start].strip())
            start, words = token.end + 1, 0
        elif token.token_type is TokenType.BEGIN and not words:
            return [*statements, sql[start:].strip()]
        else:
            words += 1
    if words:
        statements.append(sql[start:].strip())
    return statements


@cache
def _dialect() -> Any:
    """sqlglot's Spark SQL with dollar quotes, which it leaves out; 0.5 s to import, so only where it is needed."""
    from sqlglot import TokenType
    from sqlglot.dialects.databricks import Databricks

    class SparkSql(Databricks):
        class Tokenizer(Databricks.Tokenizer):
            HEREDOC_STRINGS = ["$"]  # noqa: RUF012
            HEREDOC_TAG_IS_IDENTIFIER = True
            HEREDOC_STRING_ALTERNATIVE = TokenType.PARAMETER

    return SparkSql()
