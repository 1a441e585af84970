"""Does a decode row depend on the number of threads, and on whether it is alone in its call?

    OMP_WAIT_POLICY=passive PYTHONPATH=src python -m benchmarks.kv.threads

With several threads and 512 or more cells (contexts are padded to 256, so from 257 tokens on), flash attention
divides the keys of a row that is alone in its call among the threads.
"""

import numpy as np

from benchmarks.kv.repro import Rule, prefill
from benchmarks.kv.slots import Slots, digest, english


def main() -> None:
    for flash in (True, False):
        seen: dict[int, list[str]] = {}
        for threads in (1, 2, 3):
            slots = Slots(sequences=4, context=1024, threads=threads, flash=flash)
            text = english(slots)
            row: list[str] = []
            for size in (200, 300, 700):
                tokens = text[:size]
                for slot in range(2):
                    row.append(digest(prefill(slots, slot, tokens, Rule("32"))))
                alone = slots.forward([(0, [text[size]], True)])[0]
                slots.cut(0, size)
                slots._single = 1
                both = slots.forward([(0, [text[size]], True), (1, [text[size]], True)])
                slots.cut(0, size)
                chunk = slots.forward([(0, text[size : size + 2], True)])[0]
                slots.cut(0, size)
                slots.forward([(0, [text[size]], True)])
                second = slots.forward([(0, [text[size + 1]], True)])[0]
                print(
                    f"flash {flash}, {threads} threads, {size} tokens: row alone = row beside another: "
                    f"{np.array_equal(alone, both[0])}, two rows = chunk of two: {np.array_equal(second, chunk)}",
                    flush=True,
                )
                row += [digest(alone), digest(both[0]), digest(chunk)]
                slots.drop(0)
                slots.drop(1)
            seen[threads] = row
            slots.engine.shutdown()
        for threads in (2, 3):
            same = [one == two for one, two in zip(seen[1], seen[threads], strict=True)]
            print(
                f"flash {flash}: 1 against {threads} threads (prefill, prefill, alone, beside, chunk) x 3: {same}"
            )


if __name__ == "__main__":
    main()
