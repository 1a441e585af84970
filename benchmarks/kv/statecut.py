"""A saved sequence state (flash attention on) as blocks of tokens, and back.

The layout is llama.cpp's `llama_kv_cache::state_write`: per stream the number of cells; for the stream
that has some: position, number of sequences and sequence of each cell; then for each layer the keys, and for
each layer the values, one row per cell in the order of the cells.
"""

import struct

import numpy as np

Block = tuple[bytes, int, np.ndarray]
"""Header, first position, rows: (layers x 2, tokens, row bytes)."""


def split(
    state: np.ndarray, block_tokens: int
) -> list[tuple[tuple[int, int, int, int, bytes], int, np.ndarray]]:
    raw = state
    magic, _sequence, streams = struct.unpack_from("<Iii", raw, 0)
    offset, stream, cells = 12, -1, 0
    for index in range(streams):
        (count,) = struct.unpack_from("<I", raw, offset)
        offset += 4
        if count:
            stream, cells = index, count
            break
    assert stream >= 0
    meta = np.frombuffer(raw, np.int32, cells * 3, offset).reshape(cells, 3)
    assert (meta[:, 0] == np.arange(cells)).all(), "cells are in the order of positions"
    offset += cells * 12
    v_trans, layers, _, _ = struct.unpack_from("<IIII", raw, offset)
    assert not v_trans
    fixed = bytes(raw[offset : offset + 16])
    offset += 16
    kind, row = struct.unpack_from("<iQ", raw, offset)
    stride = 12 + cells * row
    body = (
        raw[offset : offset + stride * 2 * layers]
        .reshape(2 * layers, stride)[:, 12:]
        .reshape(2 * layers, cells, row)
    )
    header = (magic, streams, kind, row, fixed)
    return [
        (header, start, np.ascontiguousarray(body[:, start : start + block_tokens]))
        for start in range(0, cells, block_tokens)
    ]


def join(blocks: list[tuple[tuple[int, int, int, int, bytes], int, np.ndarray]]) -> np.ndarray:
    (magic, streams, kind, row, fixed), _, first = blocks[0]
    cells = sum(block[2].shape[1] for block in blocks)
    sections = first.shape[0]
    meta = np.zeros((cells, 3), np.int32)
    meta[:, 0] = np.arange(cells)
    meta[:, 1] = 1
    head = struct.pack("<Iii", magic, 0, streams) + struct.pack("<I", cells) + meta.tobytes() + fixed
    tail = struct.pack("<I", 0) * (streams - 1)
    stride = 12 + cells * row
    out = np.empty(len(head) + sections * stride + len(tail), np.uint8)
    out[: len(head)] = np.frombuffer(head, np.uint8)
    body = out[len(head) : len(head) + sections * stride].reshape(sections, stride)
    body[:, :12] = np.frombuffer(struct.pack("<iQ", kind, row), np.uint8)
    rows = body[:, 12:]
    place = 0
    for _, _, block in blocks:
        width = block.shape[1] * row
        rows[:, place : place + width] = block.reshape(sections, width)
        place += width
    out[len(head) + sections * stride :] = np.frombuffer(tail, np.uint8) if tail else 0
    return out
