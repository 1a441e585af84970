"""What a shared prefix saves: 32 requests of 1 500 shared + 50 own tokens, one after another in arrival order.

    OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1 PYTHONPATH=src python -m benchmarks.kv.reuse [--chunk=63] [off]

Prefill alone (no decoding beside it), so a request's time to first token is the sum of the work before it. Times are
processor time of the one thread that computes: a busy neighbour on the machine does not count.
"""

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks.kv import statecut
from benchmarks.kv.repro import Rule, prefill
from benchmarks.kv.slots import Slots, english

SHARED, OWN, REQUESTS, COLD = 1500, 50, 32, 2


def main() -> None:
    is_flash = "off" not in sys.argv
    rule = Rule(next((one.split("=")[1] for one in sys.argv if one.startswith("--chunk=")), "63"))
    slots = Slots(sequences=33, context=2048, flash=is_flash)
    text = english(slots)
    shared = text[3000 : 3000 + SHARED]
    own = [text[30000 + 61 * index : 30000 + 61 * index + OWN] for index in range(REQUESTS)]
    print("".join(line for line in open("/proc/self/status") if line.startswith("VmRSS")), end="")

    def run(name: str, take: Callable[[int], None], count: int) -> None:
        took = []
        for index in range(count):
            begin = time.thread_time()
            take(index)
            prefill(slots, index, shared + own[index], rule)
            took.append((time.thread_time() - begin) * 1e3)
        for slot in range(REQUESTS):
            slots.drop(slot)
        total = sum(took[:1]) + statistics.mean(took) * (REQUESTS - 1) if count < REQUESTS else sum(took)
        print(
            f"{name:34} each {statistics.median(took):7.1f} ms (max {max(took):.1f})  32 requests {total / 1e3:6.1f} s",
            flush=True,
        )

    prefill(slots, 32, shared + own[0], rule)
    slots.cut(32, SHARED)
    state = slots.save(32)
    blocks = statecut.split(state, 64) if is_flash else []
    scratch: list[np.ndarray] = [np.empty_like(state)]

    run("cold", lambda index: None, COLD)
    run("seq_cp from a donor slot", lambda index: slots.copy(32, index), REQUESTS)

    def through(index: int) -> None:
        slots.save(32, scratch[0])
        slots.restore(index, scratch[0], SHARED)

    run("save + restore from a donor slot", through, REQUESTS)
    run("restore from host memory", lambda index: slots.restore(index, state, SHARED), REQUESTS)
    if is_flash:
        run(
            "restore from 24 blocks of 64",
            lambda index: slots.restore(index, statecut.join(blocks), SHARED),
            REQUESTS,
        )
    # In place: the slot still holds the prefix and another tail.
    took = []
    for index in range(8):
        begin = time.thread_time()
        slots.cut(32, SHARED)
        prefill(slots, 32, shared + own[index], rule)
        took.append((time.thread_time() - begin) * 1e3)
    print(f"{'cut in place':34} each {statistics.median(took):7.1f} ms")
    # Spread the state over files the way a disk tier would.
    path = "/tmp/kv-spike.state"
    for _ in range(3):
        begin = time.thread_time()
        state.tofile(path)
        wrote = time.thread_time()
        back = np.fromfile(path, np.uint8)
        read = time.thread_time()
        slots.restore(1, back, SHARED)
        done = time.thread_time()
        print(
            f"disk (page cache): write {(wrote - begin) * 1e3:.1f}, read {(read - wrote) * 1e3:.1f}, restore {(done - read) * 1e3:.1f} ms"
        )


if __name__ == "__main__":
    main()
