"""The ``spark`` tool: SQL or a function over DataFrames, and its inputs."""
