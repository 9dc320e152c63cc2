"""A simulated clinical records service over HTTP: the source that the patient flow reads.

``noetl-dagster records-api --port 8765`` serves it; ``noetl-dagster demo`` and ``services env`` start it too.

The service is stateless. Every answer is a function of the seed and the request, so clients may request any number of
facilities and patients in any order. The demo, the tests and the benchmarks use it.
"""

from .app import Fault, FaultPlan, create_app
from .records import PAGE_SIZE, DataType, RecordBook

__all__ = ["PAGE_SIZE", "DataType", "Fault", "FaultPlan", "RecordBook", "create_app"]
