"""Assets in a tier: the common part for MinIO, a shared volume and GCS.

Every run stores an asset (or one partition of it) as a new object. A small pointer names the current one. It is
replaced after the object is complete, so readers never see half a value.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import threading
from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, get_args

from dagster import ConfigurableIOManager, InputContext, MetadataValue, OutputContext, UPathIOManager
from pydantic import BaseModel, Field, PrivateAttr
from upath import UPath

from noetl_dagster.errors import ReferenceNotAvailableError, StorageError
from noetl_dagster.io_managers import conversion
from noetl_dagster.io_managers.metadata import is_partitioned, storage_metadata
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.result_ref import STORED_METADATA, RefKind, ResultRef
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage import codec, locations
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.storage.tiers import open_tier
from noetl_dagster.storage.tiers.base import CHUNK, Bytes, Tier

KEEP_REPLACED = timedelta(days=1)
"""Time for which a replaced asset is kept: no run reads one input for longer."""

_ROOT = UPath("memory:///")
"""Of Dagster's paths, which serve as keys: no file is at any of them, since nothing is stored there."""

_POINTER = ".ref.json"


class AssetNotStoredError(StorageError, FileNotFoundError):
    """An asset or partition was never materialised here. Dagster can be configured to skip such partitions."""


class Replaced(BaseModel, frozen=True):
    """A value that was current until ``at``. Readers that read the pointer earlier may still read it."""

    uri: str
    at: datetime


class StoredAsset(ResultRef):
    """The pointer: the reference to the current value of an asset, by which a playbook's step reads it too.

    Attributes:
        replaced: earlier values that still exist.
    """

    replaced: tuple[Replaced, ...] = ()


class AssetIOManager(UPathIOManager):
    """Stores assets and op outputs in one tier, below a folder. Dagster's paths serve as keys only.

    Accepts bytes, text, JSON values, pandas, polars and Arrow tables, Spark frames (as Parquet datasets), and
    paths of files and folders. Loads the type of the input's annotation.
    """

    def __init__(self, settings: Settings, tier: StoreTier, prefix: str = "assets") -> None:
        super().__init__(_ROOT)
        self._settings = settings
        self._tier_name = tier
        self._prefix = prefix.strip("/")
        self._results = ResultStore(settings, None)
        self._tier: Tier = open_tier(tier, settings, None)
        self._stored = threading.local()  # between the storing of an output and its metadata

    # -- UPathIOManager ------------------------------------------------------------------------------

    def dump_to_path(self, context: OutputContext, obj: Any, path: UPath) -> None:
        """Stores a value."""
        key = self._key(path)
        self._stored.asset = self._guarded(context, lambda: run_sync(self._replace(key, obj, context.run_id)))

    def load_from_path(self, context: InputContext, path: UPath) -> Any:
        """Loads a value as its annotation specifies."""
        wanted = conversion.kind_of_annotation(context.dagster_type.typing_type)
        if context.has_asset_partitions and len(context.asset_partition_keys) > 1:
            wanted = _kind_of_values(context.dagster_type.typing_type)
        return self._guarded(context, lambda: self._load(self._key(path), wanted))

    def get_metadata(self, context: OutputContext, obj: Any) -> dict[str, MetadataValue]:
        """Returns the metadata of the value that was just stored."""
        stored: StoredAsset | None = self._stored.__dict__.pop("asset", None)
        if stored is None:
            return {}
        name = context.asset_key.to_user_string() if context.has_asset_key else context.get_identifier()[-1]
        ref = stored.model_copy(update={"source_step": name})
        return {
            **storage_metadata(ref, partitioned=is_partitioned(context)),
            "path": MetadataValue.path(ref.physical_uri),
            STORED_METADATA: MetadataValue.json(
                ref.model_dump(mode="json", exclude={"replaced"}, exclude_defaults=True)
            ),
        }

    def path_exists(self, path: UPath) -> bool:
        """Reports whether a value is stored."""
        return run_sync(self._tier.exists(self._tier.uri(self._key(path) + _POINTER)))

    def make_directory(self, path: UPath) -> None:
        """Does nothing: keys need no folders."""

    def make_safe_partition_path(self, base_path: UPath, partition: str) -> UPath:
        """Returns the path of a partition, escaped so that it stays below the asset's."""
        name = "%2F" + partition[1:] if partition.startswith("/") else partition  # as UPathIOManager does
        return base_path / "/".join("%2E%2E" if segment == ".." else segment for segment in name.split("/"))

    # -- storing -------------------------------------------------------------------------------------

    async def _replace(self, key: str, value: Any, run: str) -> StoredAsset:
        """Stores a value next to the current one, replaces the pointer and removes values replaced long ago."""
        before = None
        with suppress(AssetNotStoredError):
            before = await self._pointer(key)
        stored = await self._store(f"{key}/{run}", value)
        if before is not None:
            earlier_values = await self._without_old(before, stored.physical_uri)
            stored = stored.model_copy(update={"replaced": earlier_values})
        await self._tier.put(key + _POINTER, stored.model_dump_json(exclude_none=True).encode())
        return stored

    async def _without_old(self, before: StoredAsset, current: str) -> tuple[Replaced, ...]:
        """Removes old values and returns the others. A process that is killed here leaves nothing unrecorded."""
        now = datetime.now(UTC)
        until = now - KEEP_REPLACED
        latest = before.physical_uri
        earlier_values = [one for one in (*before.replaced, Replaced(uri=latest, at=now)) if one.uri != current]
        for one in earlier_values:
            if one.at <= until and one.uri != latest:
                await self._tier.delete(one.uri)
        return tuple(one for one in earlier_values if one.at > until or one.uri == latest)

    async def _store(self, key: str, value: Any) -> StoredAsset:
        if isinstance(value, Path):
            if value.is_dir():
                return await self._store_folder(key, value)
            return await self._store_file(key + value.suffix, value)
        if type(value).__module__.startswith("pyspark.sql") and type(value).__name__ == "DataFrame":
            return await self._store_spark(key, value)
        content_type = "text/plain" if isinstance(value, str) else None
        encoded = await asyncio.to_thread(codec.encode, value, content_type=content_type)
        uri = await self._tier.put(key + codec.EXTENSIONS[encoded.content_type], encoded.data)
        return self._asset(
            key,
            uri,
            content_type=encoded.content_type,
            bytes_size=len(encoded.data),
            sha256=await asyncio.to_thread(codec.digest_of, encoded.data),
            rows=encoded.rows,
            extra=encoded.extra,
            preview=encoded.preview,
        )

    async def _store_file(self, key: str, path: Path) -> StoredAsset:
        digest = hashlib.sha256()
        size = 0

        async def chunks() -> AsyncIterator[Bytes]:
            nonlocal size
            with path.open("rb") as file:
                while chunk := await asyncio.to_thread(file.read, CHUNK):
                    digest.update(chunk)
                    size += len(chunk)
                    yield chunk

        parquet = path.suffix == ".parquet"
        uri = await self._tier.put_stream(key, chunks())
        return self._asset(
            key,
            uri,
            content_type=codec.PARQUET if parquet else codec.BINARY,
            bytes_size=size,
            sha256=digest.hexdigest(),
            rows=conversion.parquet_rows([path]) if parquet else None,
        )

    async def _store_folder(self, key: str, folder: Path, columns: dict[str, str] | None = None) -> StoredAsset:
        stored = await asyncio.to_thread(self._dataset, key, folder, columns)
        for name in stored.extra["files"]:
            await self._store_file(f"{key}/{name}", folder / name)
        return stored

    async def _store_spark(self, key: str, frame: Any) -> StoredAsset:
        """Stores a Spark frame: in place on the shared volume, for buckets first on this machine."""
        uri = self._tier.uri(key)
        columns = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
        if self._tier_name is StoreTier.PVC:
            await asyncio.to_thread(frame.write.mode("overwrite").parquet, uri)
            written = locations.local_path(self._settings, uri)
            assert written is not None, "a volume holds files"
            return self._dataset(key, written, columns)
        conversion.require_local_spark(frame.sparkSession, uri)
        with tempfile.TemporaryDirectory(prefix="noetl-") as folder:
            target = Path(folder) / "frame"
            await asyncio.to_thread(frame.write.parquet, target.as_uri())
            return await self._store_folder(key, target, columns)

    def _dataset(self, key: str, folder: Path, columns: dict[str, str] | None) -> StoredAsset:
        """Returns the pointer to the files below a folder, without the marker files of Spark and Hadoop."""
        files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith((".", "_")))
        names = sorted(str(path.relative_to(folder)) for path in files)
        parquet = [folder / name for name in names if name.endswith(".parquet")]
        return self._asset(
            key,
            self._tier.uri(key) + "/",
            kind=RefKind.DATASET,
            content_type=codec.PARQUET if parquet else codec.BINARY,
            bytes_size=sum((folder / name).stat().st_size for name in names),
            rows=conversion.parquet_rows(parquet) if parquet else None,
            extra={"files": names, "columns": columns or {}},
        )

    def _asset(self, key: str, uri: str, **facts: Any) -> StoredAsset:
        where = {"ref": uri, "physical_uri": uri, "store_tier": self._tier_name}
        return StoredAsset(execution_id=0, source_step=key, name="asset", **where, **facts)

    # -- loading -------------------------------------------------------------------------------------

    def _load(self, key: str, wanted: str) -> Any:
        with suppress(ReferenceNotAvailableError):  # replaced between reading the pointer and reading the object
            return self._load_current(key, wanted)
        return self._load_current(key, wanted)

    def _load_current(self, key: str, wanted: str) -> Any:
        ref = run_sync(self._pointer(key))
        if wanted == "path":
            return conversion.to_path(self._settings, ref)
        if wanted == "spark":
            return conversion.to_spark(self._settings, ref)
        return conversion.convert(run_sync(self._results.get(ref)), wanted, ref.ref)

    async def _pointer(self, key: str) -> StoredAsset:
        uri = self._tier.uri(key + _POINTER)
        try:
            return StoredAsset.model_validate_json(bytes(await self._tier.get(uri)))
        except KeyError as error:
            raise AssetNotStoredError(f"nothing is stored at {uri}; materialise it first") from error

    def _key(self, path: UPath) -> str:
        relative = path.path.lstrip("/")
        return f"{self._prefix}/{relative}" if self._prefix else relative

    def _guarded(self, context: InputContext | OutputContext, action: Any) -> Any:
        """Runs an action and adds the asset's name to its storage errors."""
        try:
            return action()
        except StorageError as error:
            where = context.asset_key.to_user_string() if context.has_asset_key else context.get_identifier()
            raise type(error)(f"{where}: {error}") from error


def _kind_of_values(annotation: Any) -> str:
    """Returns the kind of the values of ``dict[str, pandas.DataFrame]``, the annotation of several partitions."""
    arguments = get_args(annotation)
    return conversion.kind_of_annotation(arguments[-1]) if arguments else "object"


class TieredIOManager(ConfigurableIOManager):
    """The common base; ``NOETL_*`` settings provide everything that is not configured."""

    tier: ClassVar[StoreTier]
    """The tier that stores the assets."""

    prefix: str = Field("assets", description="Folder below the bucket or mount")
    _inner: AssetIOManager | None = PrivateAttr(None)

    @abstractmethod
    def store_settings(self) -> Settings:
        """Returns the settings from this manager's configuration and the environment."""

    @property
    def inner(self) -> AssetIOManager:
        """Returns the IO manager that does the work, made on first use."""
        if self._inner is None:
            self._inner = AssetIOManager(self.store_settings(), self.tier, self.prefix)
        return self._inner

    def handle_output(self, context: OutputContext, obj: Any) -> None:
        """Stores an output."""
        self.inner.handle_output(context, obj)

    def load_input(self, context: InputContext) -> Any:
        """Loads an input."""
        return self.inner.load_input(context)
