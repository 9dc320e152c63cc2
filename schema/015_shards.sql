-- Results of shards for reducers in SQL: one row a shard that is done, while its event is in the log.
-- ``data`` holds small results; ``ref`` names a stored one.

CREATE OR REPLACE VIEW noetl.shard_result AS
SELECT execution_id,
       node_name                    AS step,
       meta ->> 'loop_id'           AS loop_id,
       meta ->> 'shard_id'          AS shard_id,
       meta ->> 'iter_key'          AS iter_key,
       current_index                AS iter_index,
       result -> 'data'             AS data,
       result -> 'reference' ->> 'ref' AS ref,
       duration,
       created_at                   AS ended_at
FROM noetl.event
WHERE event_type = 'loop.shard.done' AND meta ? 'loop_id';
