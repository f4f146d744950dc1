"""WebDataset's tar files that others wrote: of this machine, at a URL, or what a command prints (`pipe:`).

The library opens pipes and puts members together to samples. None of its decoders runs: texts are taken as bytes, and
what else a sample holds (.jpg, .pth, pickles) is not read.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any

from matmix.data.artifacts import one_line, parse_json
from matmix.data.prepare.base import Chunk, Position, WholeTar
from matmix.data.prepare.streams import is_stream, open_stream, stream_digest
from matmix.data.prepare.text import sources
from matmix.data.prepare.text.compressed import open_text
from matmix.data.prepare.text.documents import decode, strings_in
from matmix.data.prepare.text.sources import TextSource
from matmix.data.storage.remote import RemoteError

_SKIPPED = 1 << 20
_HEADER = 512
_DAMAGE = (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, zlib.error, RecursionError, MemoryError)


@dataclass(frozen=True)
class TarFile(TextSource):
    """The samples of a tar file: members with one name up to the first dot. A record is (key, {suffix: bytes}), where
    only the members that may hold what the options name have bytes."""

    compression: str = ""
    """"" or the suffix .gz, .xz, .zst."""

    end = None

    @property
    def place(self) -> str:
        return self.path if is_stream(self.path) else super().place

    def digest(self) -> str:
        return stream_digest(self.path, self.bytes) if is_stream(self.path) else super().digest()

    def chunks(self, start: Position, stop: int | None) -> Iterator[Chunk]:
        begin, records, size = replace(start, line=start.offset + 1), [], 0
        number, read = start.offset, 0
        for number, (read, record) in enumerate(self.samples(start.offset, stop), start=start.offset + 1):
            records.append(record)
            size += _HEADER + sum(map(len, record[1].values()))
            if size >= sources.CHUNK_BYTES:
                end = replace(begin, offset=number, line=number + 1)
                yield Chunk(self, begin, end, min(read, self.bytes), records)
                begin, records, size = end, [], 0
        if records:
            end = replace(begin, offset=number, line=number + 1)
            yield Chunk(self, begin, end, min(read, self.bytes), records)

    def texts(self) -> Iterator[str]:
        for _, (key, members) in self.samples(0, None):
            for name, raw in members.items():
                where = f"sample {key} of {self.name}, its member .{name},"
                yield from strings_in(parse_json(raw or b"null", where) if name == "json" else decode(raw, where, 1))

    def cut(self, places: Sequence[int], share: int) -> list[int | None]:
        if self.bytes <= share:
            return [0 if 2 * place < self.bytes else None for place in places]
        count = sum(1 for _ in self.samples(0, None))
        cuts = [count * place // self.bytes for place in places]
        return [cut if cut < count else None for cut in cuts]

    # -- reading -----------------------------------------------------------------------------------------------------

    def samples(self, start: int, stop: int | None) -> Iterator[tuple[int, tuple[str, dict[str, bytes]]]]:
        """Yields samples `start` to `stop`, each with the bytes that were read before its end."""
        from webdataset.tariterators import group_by_keys  # imports torch

        try:
            with self._open() as stream:
                read = [0]
                for number, sample in enumerate(group_by_keys(self._members(stream, read))):
                    if number == stop:
                        return
                    if number >= start:
                        members = {name: raw for name, raw in sample.items() if not name.startswith("__")}
                        yield read[0], (sample["__key__"], members)
        except (FileNotFoundError, RemoteError):
            raise
        except _DAMAGE as error:
            if str(error).startswith(self.name):
                raise
            why = one_line(error.args[0] if error.args else repr(error))
            what = "cannot be read" if isinstance(error, OSError) else "is damaged, or no tar file"
            raise ValueError(f"{self.name} {what}: {why}") from error

    def _members(self, stream: IO[bytes], read: list[int]) -> Iterator[dict[str, Any]]:
        """Yields the members as the library does. Its own iterator reads all of each, however large it says it is."""
        wanted = {*self.options.fields, "json", "txt" if "text" in self.options.fields else "json"}
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=WholeTar) as tar:
            for member in tar:
                tar.members = []  # else it remembers all of them
                top, name = member.name.partition("/")[0], member.name.rpartition("/")[2]
                if not member.isreg() or name.startswith(".") or (top.startswith("__") and top.endswith("__")):
                    continue
                content = b""
                if name.partition(".")[2].lower() in wanted:
                    if member.size > self.options.longest_line:
                        raise self.too_long(f"member {one_line(member.name)}")
                    content = tar.extractfile(member).read()
                read[0] = tar.offset
                yield {"fname": member.name, "data": content, "__url__": self.name}
            while rest := tar.fileobj.read(_SKIPPED):
                if rest.strip(b"\0"):
                    raise tarfile.ReadError("something stands behind its end, as where `cat` put files together")

    @contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        if is_stream(self.path):
            with open_stream(self.path) as stream:
                yield stream
        else:
            with open_text(self.path, self.compression, 0, self.name) as (stream, _):
                yield stream
