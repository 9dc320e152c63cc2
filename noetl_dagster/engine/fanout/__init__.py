"""Fan-out: one command a shard, groups of shards for Dagster or slices for Spark, one fan-in."""
