"""The Spark session as a Dagster resource. Spark steps use the same session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dagster_pyspark import LazyPySparkResource
from dagster_spark.utils import flatten_dict
from pydantic import Field, PrivateAttr

from noetl_dagster.settings import Settings, get_settings
from noetl_dagster.spark.sessions import SparkSessions

if TYPE_CHECKING:
    from dagster import InitResourceContext
    from pyspark import SparkContext
    from pyspark.sql import SparkSession


class PySparkResource(LazyPySparkResource):
    """dagster-pyspark's lazy resource over the session of this process, which is local by default.

    Example:
        .. code-block:: python

            @asset
            def totals(pyspark: PySparkResource) -> None:
                pyspark.spark_session.range(10).show()

            Definitions(assets=[totals], resources={"pyspark": PySparkResource(master="local[4]")})
    """

    spark_config: dict[str, Any] = Field(
        default_factory=dict, description="Further Spark configuration: {'spark.executor.memory': '4g'}"
    )
    master: str | None = Field(None, description="local[*], spark://, k8s://; empty: NOETL_SPARK_MASTER")
    remote: str | None = Field(None, description="Spark Connect, sc://host:port; empty: NOETL_SPARK_REMOTE")
    driver_memory: str | None = Field(None, description="For example 4g; empty: NOETL_SPARK_DRIVER_MEMORY")

    _sessions: SparkSessions | None = PrivateAttr(default=None)

    def setup_for_execution(self, context: InitResourceContext) -> None:
        """Starts no session, since many runs that have the resource never use Spark."""
        self._sessions = SparkSessions(self._settings())

    @property
    def spark_session(self) -> SparkSession:
        """The session. Get it each time: it is replaced if its JVM has died."""
        if self._sessions is None:
            self._sessions = SparkSessions(self._settings())
        return self._sessions.get()

    @property
    def spark_context(self) -> SparkContext:
        """The context of the session."""
        return self.spark_session.sparkContext

    def _settings(self) -> Settings:
        settings = get_settings()
        nested = flatten_dict(self.spark_config)  # type: ignore[no-untyped-call]
        config = {name: str(value) for name, value in nested}
        own = {
            "spark_master": self.master,
            "spark_remote": self.remote,
            "spark_driver_memory": self.driver_memory,
            "spark_config": {**settings.spark_config, **config} or None,
        }
        return settings.model_copy(update={name: value for name, value in own.items() if value is not None})
