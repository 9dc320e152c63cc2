"""The Spark session of a process, results as DataFrames, and DataFrames as results.

The spark tool and the Spark engine of fan-outs use it.
"""
