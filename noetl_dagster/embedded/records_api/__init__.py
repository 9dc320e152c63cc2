"""A simulated clinical records service over HTTP: the source that the patient flow reads.

The service is stateless. Every answer is a function of the seed and the request, so clients may request any number of
facilities and patients in any order. The demo, the tests and the benchmarks use it.
"""

from noetl_dagster.embedded.records_api.app import Fault, FaultPlan, create_app
from noetl_dagster.embedded.records_api.records import PAGE_SIZE, DataType, RecordBook

__all__ = ["PAGE_SIZE", "DataType", "Fault", "FaultPlan", "RecordBook", "create_app"]
