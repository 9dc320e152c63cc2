"""Inputs that are paths: a copy of what lies in a bucket, which the process takes away when it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from noetl_dagster.settings import Settings
from tests.embedded.peers import s3_client

READ = """
import sys
from noetl_dagster.io_managers.conversion import to_path
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.settings import Settings
endpoint, bucket = sys.argv[1:]
uri = f"s3://{bucket}/report.txt"
stored = ResultRef(ref=uri, execution_id=0, source_step="", name="", store_tier="minio", physical_uri=uri)
path = to_path(Settings(minio_endpoint=endpoint, minio_bucket=bucket), stored)
print(path, path.read_text())
"""


def test_the_copy_of_an_object_goes_with_the_process(settings: Settings) -> None:
    store = s3_client(settings)
    store.create_bucket(Bucket=settings.minio_bucket)
    store.put_object(Bucket=settings.minio_bucket, Key="report.txt", Body=b"text")

    command = [sys.executable, "-c", READ, str(settings.minio_endpoint), settings.minio_bucket]
    reader = subprocess.run(command, capture_output=True, text=True)

    assert reader.returncode == 0, reader.stderr
    path, text = reader.stdout.split()
    assert text == "text"
    assert not Path(path).parent.exists()
