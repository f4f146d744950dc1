"""Where the parts of an input begin: n contiguous pieces of about the same size, each of whole records.

The input counts as one line of bytes, all files one after another, cut at k/n of its length; each cut then moves to
where a record begins. A file that can be entered anywhere (lines of uncompressed text, rows of a .parquet file) is cut
at the next record. One that can only be read from its beginning (compressed text, or a text that is cut into pieces of
`max_document_chars`) stays whole in one part unless it is larger than a part; then it is read through once to find its
records. So the cuts follow from the input, its options and n, and parts in order give the documents in order.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from matmix.data.prepare.documents import ReadOptions
from matmix.data.prepare.readers import next_record, record_offsets, rows_of
from matmix.data.prepare.sources import Position, Source

# Of a file that is read through, one record's end is remembered for so many bytes of text.
REMEMBERED_BYTES = 1 << 16


def find_cuts(sources: Sequence[Source], options: ReadOptions, parts: int) -> list[Position]:
    """parts + 1 positions: part k, counted from 1, is what lies between positions k - 1 and k.

    Raises ValueError as reading does.
    """
    starts = [0, *itertools.accumulate(s.bytes for s in sources)]
    total, share = starts[-1], -(-starts[-1] // parts)
    wanted: dict[int, list[int]] = {}
    cuts = [Position()]
    for number in range(1, parts):
        place = total * number // parts
        index = bisect_right(starts, place) - 1
        wanted.setdefault(min(index, len(sources) - 1), []).append(place - starts[index])
    for index, places in wanted.items():
        for offset in _cut(sources[index], options, places, share):
            cuts.append(Position(source=index + 1) if offset is None else Position(source=index, offset=offset))
    return [*cuts, Position(source=len(sources))]


def _cut(source: Source, options: ReadOptions, places: Sequence[int], share: int) -> list[int | None]:
    """Offsets of the records to cut at for ascending places in the file's bytes; None for its end."""
    if source.kind == "parquet":
        rows = rows_of(source)
        return [row if row < rows else None for row in (rows * place // max(1, source.bytes) for place in places)]
    whole = source.kind == "txt" and options.text_documents == "file"
    if not whole and not source.compression:
        offsets = [next_record(source, options, place) for place in places]
        return [offset if offset < source.bytes else None for offset in offsets]
    if source.bytes <= share or (whole and not options.max_document_chars):
        return [0 if 2 * place < source.bytes else None for place in places]
    ends, last = array("q"), 0
    for last in record_offsets(source, options):
        if last - (ends[-1] if ends else 0) >= REMEMBERED_BYTES:
            ends.append(last)
    ends.insert(0, 0)
    found = [bisect_left(ends, last * place // source.bytes) for place in places]
    return [ends[i] if i < len(ends) and ends[i] < last else None for i in found]
