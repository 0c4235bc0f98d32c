"""Metadata of checkpoints, one file each. A checkpoint without its record does not exist."""

from datetime import datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from paddock.runtime.local.node.node_context import NodeContext
from paddock.runtime.local.sandbox.sandbox import NodeSandbox
from paddock.runtime.port import Blueprint, StoredCheckpoint


class CheckpointRecord(Struct, frozen=True, kw_only=True):
    """Metadata of a checkpoint, kept beside its files and memory."""

    stored: StoredCheckpoint
    layers: tuple[str, ...]
    blueprint: Blueprint
    is_started: bool


# Created at import, not at first use: see docs/decisions/0080.
_decoder = msgspec.json.Decoder(CheckpointRecord)


class CheckpointRecords:
    """The records of one node."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._directory = context.settings.state / "checkpoints"

    async def write(
        self, sandbox: NodeSandbox, checkpoint_id: str, *, has_memory: bool, created_at: datetime
    ) -> CheckpointRecord:
        """Write the record of a checkpoint whose files and memory are stored."""
        size = await self._context.run_in_thread(
            self._context.storage.checkpoint_bytes, checkpoint_id
        )
        base, shared = await self._context.run_in_thread(
            self._context.storage.checkpoint_shared, checkpoint_id
        )
        record = CheckpointRecord(
            stored=StoredCheckpoint(
                id=checkpoint_id,
                source_uid=sandbox.uid,
                has_memory=has_memory,
                size_bytes=size,
                created_at=created_at,
                image=sandbox.record.blueprint.image,
                base_id=base,
                shared_bytes=shared,
            ),
            layers=sandbox.record.layers,
            blueprint=sandbox.record.blueprint,
            is_started=sandbox.record.is_started,
        )
        self._directory.mkdir(mode=0o700, exist_ok=True)
        temporary = self._directory / f".{checkpoint_id}.tmp"
        temporary.write_bytes(msgspec.json.encode(record))
        temporary.replace(self._path(checkpoint_id))
        return record

    def read(self, checkpoint_id: str) -> CheckpointRecord | None:
        """Return the record of a checkpoint; None if there is no such checkpoint."""
        try:
            data = self._path(checkpoint_id).read_bytes()
        except FileNotFoundError:
            return None
        record = _decoder.decode(data)
        return record if self._context.storage.has_checkpoint(checkpoint_id) else None

    async def all(self) -> tuple[CheckpointRecord, ...]:
        """Return the records of all checkpoints."""
        return await self._context.run_in_thread(self._read_all)

    def _read_all(self) -> tuple[CheckpointRecord, ...]:
        found = map(self.read, self._context.storage.checkpoints())
        return tuple(record for record in found if record is not None)

    def incomplete(self) -> tuple[str, ...]:
        """Return the checkpoints that have files and no record. Blocks on the disk."""
        names = self._context.storage.checkpoints()
        return tuple(name for name in names if not self._path(name).exists())

    def discard(self, checkpoint_id: str) -> None:
        """Remove what an interrupted attempt has left of a checkpoint. Blocks on the disk."""
        self._context.storage.delete_checkpoint(checkpoint_id)

    async def discard_incomplete(self, checkpoint_id: str) -> None:
        """Remove what an interrupted attempt has left: files of another moment than the memory that
        is stored next.
        """
        if self._context.storage.has_checkpoint(checkpoint_id):
            await self._context.run_in_thread(self.discard, checkpoint_id)

    def remove(self, checkpoint_id: str) -> None:
        """Remove the record; an unknown id is no error."""
        self._path(checkpoint_id).unlink(missing_ok=True)

    def _path(self, checkpoint_id: str) -> Path:
        return self._directory / f"{checkpoint_id}.json"
