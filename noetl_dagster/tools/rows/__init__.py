"""Rows on their way: files of rows, COPY text, values into parameters and out of results."""
