"""Copying, cutting, saving and restoring in the unified layout: 200 and 1 500 tokens, best of five by the clock."""

import time
from collections.abc import Callable

from benchmarks.kv.repro import Rule, answer, prefill
from benchmarks.kv.slots import Slots, english


def best(action: Callable[[], object], undo: Callable[[], object] = lambda: None) -> float:
    took = []
    for _ in range(5):
        begin = time.perf_counter()
        action()
        took.append((time.perf_counter() - begin) * 1e3)
        undo()
    return min(took)


def main() -> None:
    slots = Slots(sequences=8, context=2048, layout="unified")
    text = english(slots)
    for size in (200, 1500):
        row = prefill(slots, 0, text[:size], Rule("64"))
        plain = best(lambda: slots.forward([(7, [1], False)]))
        half = size // 2 // 64 * 64
        copied = best(lambda: slots.copy(0, 1, half), lambda: slots.drop(1))
        slots.copy(0, 1)
        after = best(lambda: slots.forward([(7, [1], False)]))
        state = slots.save(0)
        saved = best(lambda: slots.save(0, state))
        restored = best(lambda: slots.restore(2, state, size), lambda: slots.drop(2))
        slots.restore(2, state, size)
        is_same = answer(slots, 1, row, 16) == answer(slots, 2, row, 16)
        cut = best(lambda: slots.cut(2, half))
        print(
            f"{size}: seq_cp of {half} {copied:.3f}, next decode {after:.1f} against {plain:.1f}, save {saved:.2f}, "
            f"restore {restored:.2f}, cut {cut:.3f} ms; copy and restore same bits: {is_same}",
            flush=True,
        )
        for slot in range(8):
            slots.drop(slot)


if __name__ == "__main__":
    main()
