"""Flash attention on against off at growing contexts: decode steps and prefill, both contexts in one process.

    OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1 PYTHONPATH=src python -m benchmarks.kv.attention

Processor time of the one thread that computes, best of the rounds, on and off in turn.
"""

import time

from benchmarks.kv.repro import Rule, prefill
from benchmarks.kv.slots import Slots, english

CONTEXTS = (128, 300, 700, 1500)
ROWS = (1, 8, 32)


def main() -> None:
    both = {
        "on": Slots(sequences=32, context=2048, flash=True),
        "off": Slots(sequences=32, context=2048, flash=False),
    }
    text = english(both["on"])
    states = {name: {} for name in both}
    for name, slots in both.items():
        for size in CONTEXTS:
            prefill(slots, 0, text[3000 : 3000 + size], Rule("64"))
            states[name][size] = slots.save(0)
    for size in CONTEXTS:
        for name, slots in both.items():
            for slot in range(32):
                slots.restore(slot, states[name][size], size)
        for rows in ROWS:
            best = {"on": 1e9, "off": 1e9}
            for _ in range(4 if rows < 32 else 3):
                for name, slots in both.items():
                    begin = time.thread_time()
                    slots.forward([(slot, [5], True) for slot in range(rows)])
                    best[name] = min(best[name], (time.thread_time() - begin) * 1e3)
            print(
                f"{size} tokens held, {rows} rows: on {best['on']:.1f}, off {best['off']:.1f} ms", flush=True
            )


if __name__ == "__main__":
    main()
