"""Fan-outs: the expansion into shards, groups of shards in this process or on Spark, and the fan-in."""
