"""Two more questions of bits: tiled prefill with several threads; short chunks with flash attention off.

OMP_WAIT_POLICY=passive PYTHONPATH=src python -m benchmarks.kv.small
"""

import numpy as np

from benchmarks.kv.repro import Rule, prefill
from benchmarks.kv.slots import Slots, digest, english


def main() -> None:
    seen = []
    for threads in (1, 2, 3):
        slots = Slots(sequences=2, context=1024, threads=threads)
        text = english(slots)
        seen.append([])
        for size in (100, 300, 500):
            seen[-1].append(digest(prefill(slots, 0, text[:size], Rule("64"))))
            slots.drop(0)
        slots.engine.shutdown()
    print(
        "chunks of 64, 1 = 2 = 3 threads:",
        [len(set(found)) == 1 for found in zip(*seen, strict=True)],
        flush=True,
    )
    for flash in (False, True):
        slots = Slots(sequences=2, context=1024, flash=flash)
        text = english(slots)
        prefill(slots, 0, text[:130], Rule("64"))
        rows = [slots.forward([(0, [token], True)])[0] for token in text[130:162]]
        for count in (2, 3, 4, 5, 6, 8, 16, 32):
            slots.cut(0, 130)
            row = slots.forward([(0, text[130 : 130 + count], True)])[0]
            print(
                f"flash {flash}: {count} tokens at once = one by one: {np.array_equal(row, rows[count - 1])}",
                flush=True,
            )


if __name__ == "__main__":
    main()
