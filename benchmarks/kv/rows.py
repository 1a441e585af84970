"""What a portion of a prompt costs behind a long context, by its number of rows, flash attention on and off.

    OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1 PYTHONPATH=src python -m benchmarks.kv.rows [--contexts 0,1500,6000]

Milliseconds of the one thread that computes, best of three; on and off in turn, in one process.
"""

import argparse
import time

from benchmarks.kv.repro import Rule, prefill
from benchmarks.kv.slots import Slots, english

ROWS = (1, 4, 8, 16, 32, 48, 63, 64, 128, 256)
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", default="0,500,1500,3000,6000")
    contexts = [int(one) for one in parser.parse_args().contexts.split(",")]
    both = {
        name: Slots(sequences=1, context=max(contexts) + max(ROWS) + 64, flash=name == "on")
        for name in ("on", "off")
    }
    text = english(both["on"])
    for context in contexts:
        if context:
            for slots in both.values():
                prefill(slots, 0, text[:context], Rule("512"))
        for rows in ROWS:
            best = dict.fromkeys(both, 1e9)
            for _ in range(ROUNDS):
                for name, slots in both.items():
                    begin = time.thread_time()
                    slots.forward([(0, text[context : context + rows], True)])
                    best[name] = min(best[name], (time.thread_time() - begin) * 1e3)
                    slots.cut(0, context)
            print(f"{context} held, {rows} rows: on {best['on']:.0f}, off {best['off']:.0f} ms", flush=True)


if __name__ == "__main__":
    main()
