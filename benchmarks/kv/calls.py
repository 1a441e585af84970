"""What copying, cutting, saving and restoring a slot costs, and whether the rest stays bit-identical.

OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1 PYTHONPATH=src python -m benchmarks.kv.calls [unified] [off]
"""

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks.kv import statecut
from benchmarks.kv.slots import Slots, digest, english

LENGTHS = (200, 1500, 4000)


def timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return (time.perf_counter() - begin) * 1e3


def fill(slots: Slots, slot: int, tokens: list[int], chunk: int = 512) -> np.ndarray:
    rows: dict[int, np.ndarray] = {}
    start = slots.lengths[slot]
    while start < len(tokens):
        end = min(len(tokens), (start // chunk + 1) * chunk)
        rows = slots.forward([(slot, tokens[start:end], end == len(tokens))])
        start = end
    return rows[slot]


def greedy(slots: Slots, slot: int, row: np.ndarray, count: int = 64) -> tuple[list[int], list[str]]:
    tokens, digests = [int(row.argmax())], [digest(row)]
    for _ in range(count - 1):
        row = slots.forward([(slot, [tokens[-1]], True)])[slot]
        tokens.append(int(row.argmax()))
        digests.append(digest(row))
    return tokens, digests


def same(name: str, one: tuple[list[int], list[str]], other: tuple[list[int], list[str]]) -> None:
    print(
        f"   {name}: tokens {'same' if one[0] == other[0] else 'DIFFER'}, logits {'same' if one[1] == other[1] else 'DIFFER'}",
        flush=True,
    )


def main() -> None:
    is_unified, is_flash = "unified" in sys.argv, "off" not in sys.argv
    slots = Slots(
        sequences=8, context=4352, layout="unified" if is_unified else "per_sequence", flash=is_flash
    )
    text = english(slots)
    print(
        f"layout {'unified' if is_unified else 'per sequence'}, flash {is_flash}, 8 slots of 4352", flush=True
    )
    fill(slots, 7, text[:100])
    for length in LENGTHS:
        tokens = text[5000 : 5000 + length]
        row = fill(slots, 0, tokens)
        print(
            f"{length} tokens: size {slots.save_size(0)} = {slots.save_size(0) / length:.1f} B/token",
            flush=True,
        )
        buffer = np.zeros(slots.save_size(0), np.uint8)
        saves = [timed(lambda: slots.save(0, buffer)) for _ in range(7)]
        state = buffer.copy()
        baseline = greedy(slots, 0, row)
        slots.cut(0, length)
        # --- state into another slot
        restores = []
        for _ in range(5):
            restores.append(timed(lambda: slots.restore(3, state, length)))
        same("restore to another slot", baseline, greedy_after(slots, 3, tokens, row))
        # --- copy
        copies, firsts, plain = [], [], []
        for _ in range(5):
            slots.drop(2)
            copies.append(timed(lambda: slots.copy(0, 2, length)))
            firsts.append(timed(lambda: slots.forward([(7, [text[0]], True)])))
            plain.append(timed(lambda: slots.forward([(7, [text[0]], True)])))
        same("seq_cp to another slot", baseline, greedy_after(slots, 2, tokens, row))
        # --- tail removed
        cuts = []
        for _ in range(5):
            slots.drop(4)
            slots.restore(4, state, length)
            cuts.append(timed(lambda: slots.cut(4, length - 72)))
        head = length - 72
        slots.drop(5)
        fill(slots, 5, tokens[:head], 32)
        slots.drop(6)
        fill(slots, 6, tokens[:head], 32)
        for token in tokens[head:]:
            slots.forward([(6, [token], True)])
        slots.cut(6, head)
        again = tokens[head : head + 8]
        row_a = slots.forward([(5, again, True)])[5]
        row_b = slots.forward([(6, again, True)])[6]
        same("tail cut, then 8 tokens and 64 greedy", greedy(slots, 5, row_a), greedy(slots, 6, row_b))
        drops = []
        for _ in range(5):
            slots.restore(4, state, length)
            drops.append(timed(lambda: slots.drop(4)))
        # --- prefix of a saved state, cut in host memory and by seq_rm after restore
        keep = length // 2 // 64 * 64
        slots.restore(4, state, length)
        slots.cut(4, keep)
        row_a = slots.forward([(4, tokens[keep : keep + 8], True)])[4]
        one = greedy(slots, 4, row_a, 16)
        slots.drop(3)
        slots.drop(5)
        fill(slots, 5, tokens[:keep])
        row_b = slots.forward([(5, tokens[keep : keep + 8], True)])[5]
        same("restore then cut, against only the head in the same chunks", greedy(slots, 5, row_b, 16), one)
        if is_flash:
            begin = time.perf_counter()
            blocks = statecut.split(state, 64)
            split_ms = (time.perf_counter() - begin) * 1e3
            begin = time.perf_counter()
            head_state = statecut.join(blocks[: keep // 64])
            join_ms = (time.perf_counter() - begin) * 1e3
            slots.drop(3)
            slots.restore(3, head_state, keep)
            row_c = slots.forward([(3, tokens[keep : keep + 8], True)])[3]
            same("state built from 64-token blocks", one, greedy(slots, 3, row_c, 16))
            print(
                f"   split into {len(blocks)} blocks {split_ms:.2f} ms, join {keep} tokens {join_ms:.2f} ms"
            )
        median = statistics.median
        print(
            f"   save {min(saves):.2f} (median {median(saves):.2f})  restore {min(restores):.2f} ({median(restores):.2f})"
            f"  seq_cp call {min(copies):.3f}  next decode {min(firsts):.2f} ({median(firsts):.2f}) against {min(plain):.2f}"
            f"  cut {min(cuts):.3f}  drop {min(drops):.3f} ms",
            flush=True,
        )
        for slot in range(7):
            slots.drop(slot)
    rss = [line for line in open("/proc/self/status") if line.startswith(("VmRSS", "VmHWM"))]
    print("".join(rss))


def greedy_after(slots: Slots, slot: int, tokens: list[int], row: np.ndarray) -> tuple[list[int], list[str]]:
    """Greedy from a slot that holds the whole prompt, whose last logits are known."""
    return greedy(slots, slot, row)


if __name__ == "__main__":
    main()
