"""``kind: s3`` and ``kind: gcs``: ``tool`` reads a call and opens its bucket, ``operations`` runs it."""
