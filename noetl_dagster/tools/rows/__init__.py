"""Rows on their way: files of rows, COPY text, values into parameters and out of results.

Gives readers, writers and conversions to sql and transfer. Stands on the ground floor.
"""
