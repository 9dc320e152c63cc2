"""The projection: ``noetl.execution``, folded from the log in commit order.

It can be dropped and made again; whoever reads it reads the log's tail too. Gives ``Projection`` and
``read_execution`` to the engine, sensors and the replay on Spark. Stands on ``connection``, ``context``,
``queries``, ``state`` and ``types``.
"""
