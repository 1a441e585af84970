"""What goes wrong between `llama_memory_seq_cp` and the next decode call (per-sequence layout).

PYTHONPATH=src python -m benchmarks.kv.hazards
"""

import numpy as np

from benchmarks.kv import statecut
from benchmarks.kv.repro import Rule, answer, prefill
from benchmarks.kv.slots import Slots, english


def body(state: np.ndarray) -> bytes:
    """Keys and values alone: the header differs by slot."""
    return statecut.split(state, 1 << 20)[0][2].tobytes()


def main() -> None:
    slots = Slots(sequences=6, context=1024)
    text = english(slots)
    one, other = text[:300], text[5000:5300]
    rule = Rule("32")
    row = prefill(slots, 0, one, rule)
    expected = answer(slots, 5, prefill(slots, 5, one, rule), 16)
    state = slots.save(0)

    slots.copy(0, 1)
    print("state of a copy saved before the next decode is right:", body(slots.save(1)) == body(state))
    slots.forward([(5, [1], False)])
    print("... after it:", body(slots.save(1)) == body(state))

    slots.drop(1)
    slots.copy(0, 1)
    slots.drop(0)
    print("source dropped before the next decode, copy right:", answer(slots, 1, row, 16) == expected)

    slots.drop(1)
    slots.restore(0, state, 300)
    slots.copy(0, 1)
    slots.drop(0)
    prefill(slots, 3, other, rule)
    foreign = slots.save(3)
    slots.restore(0, state, 300)
    slots.drop(1)
    slots.copy(0, 1)
    slots.restore(0, foreign, 300)
    print("source overwritten by a restore before it, copy right:", answer(slots, 1, row, 16) == expected)

    for slot in (0, 1, 2):
        slots.drop(slot)
    slots.restore(0, state, 300)
    slots.copy(0, 1)
    slots.drop(1)
    prefill(slots, 2, other, rule)
    second = slots.save(2)
    slots.drop(1)
    slots.restore(0, state, 300)
    slots.copy(0, 1)
    slots.restore(1, second, 300)
    print("target restored before it, target right:", body(slots.save(1)) == body(second), end=" ")
    slots.forward([(5, [1], False)])
    print("and after the decode:", body(slots.save(1)) == body(second))

    slots.drop(3)
    broken = state.copy()
    broken[0] ^= 1
    for name, bad in (("magic", broken), ("cut short", state[: len(state) // 2].copy())):
        try:
            slots.restore(3, bad, 300)
            print("a state with a wrong", name, "was taken")
        except AssertionError as error:
            print(
                f"a state with a wrong {name} is refused: read {error.args[0][0]}, slot holds",
                int(slots.api.llama_memory_seq_pos_max(slots.memory, 3)) + 1,
            )
    flipped = state.copy()
    flipped[len(flipped) // 2] ^= 0x55
    slots.restore(3, flipped, 300)
    print("a state with a flipped bit in the values is taken (no checksum)")
    print(
        "sizes with flags 0, 1 (partial), 2 (on device):",
        [int(slots.api.llama_state_seq_get_size_ext(slots.context, 0, flag)) for flag in (0, 1, 2)],
    )


if __name__ == "__main__":
    main()
