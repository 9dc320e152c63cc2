"""A clinical records service over HTTP, made from a seed: the source that the patient flow reads.

It keeps nothing. Every answer is a function of the seed and the request, so any number of facilities and
patients can be asked for, in any order, by any number of clients.

Gives an application to the demo, the tests and the benchmarks. Stands on the ground floor.
"""

from noetl_dagster.embedded.records_api.app import create_app
from noetl_dagster.embedded.records_api.faults import Fault, FaultPlan
from noetl_dagster.embedded.records_api.records import PAGE_SIZE, DataType, RecordBook

__all__ = ["PAGE_SIZE", "DataType", "Fault", "FaultPlan", "RecordBook", "create_app"]
