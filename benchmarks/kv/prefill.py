"""Prefill speed by chunk size, flash attention on or off: tokens per second of processor time, best of two.

OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1 PYTHONPATH=src python -m benchmarks.kv.prefill [off]
"""

import sys
import time

from benchmarks.kv.repro import Rule, prefill
from benchmarks.kv.slots import Slots, english


def main() -> None:
    slots = Slots(sequences=2, context=2048, flash="off" not in sys.argv)
    text = english(slots)[3000:4500]
    best: dict[str, float] = {}
    for _ in range(2):
        for chunk in ("32", "63", "64", "128", "512"):
            slots.drop(0)
            begin = time.thread_time()
            prefill(slots, 0, text[:500], Rule(chunk))
            middle = time.thread_time()
            prefill(slots, 0, text, Rule(chunk))
            end = time.thread_time()
            for name, speed in (
                (f"{chunk}, first 500", 500 / (middle - begin)),
                (f"{chunk}, 1500", 1500 / (end - begin)),
            ):
                best[name] = max(best.get(name, 0), round(speed))
    print(best)


if __name__ == "__main__":
    main()
