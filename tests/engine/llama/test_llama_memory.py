"""What memory is there, and what a model takes."""

from pathlib import Path

import pytest

from headrace.engine.llama import memory
from headrace.engine.llama.memory import Demand, Shape
from headrace.errors import MemoryShortage

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n"}


def test_without_a_control_group_the_machine_decides(tmp_path: Path) -> None:
    assert memory.available_bytes(write(tmp_path, MEMINFO)) == 8 * GIB


def test_the_unified_hierarchy_limits(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/serving/worker\n",
        "sys/fs/cgroup/serving/worker/memory.max": "max\n",
        "sys/fs/cgroup/serving/worker/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/serving/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/serving/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/serving/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
    }
    assert memory.available_bytes(write(tmp_path, MEMINFO | files)) == GIB + GIB // 2


def test_the_old_hierarchy_limits(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu:/\n4:memory:/box\n0::/\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/box/memory.stat": "total_inactive_file 0\n",
    }
    assert memory.available_bytes(write(tmp_path, MEMINFO | files)) == GIB


def test_inside_a_container_the_mount_is_the_group(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/../outside\n",
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
    }
    assert memory.available_bytes(write(tmp_path, MEMINFO | files)) == 0


def test_this_machine_has_some() -> None:
    assert memory.available_bytes() > GIB // 8


def test_a_shortage_says_what_is_needed_what_is_there_and_what_to_lower() -> None:
    demand = Demand(weights=2 * GIB, kv=3 * GIB, compute=GIB)
    with pytest.raises(MemoryShortage) as caught:
        memory.check_fits(Path("big.gguf"), demand, 4 * GIB)
    text = str(caught.value)
    for words in (
        "6144 MiB",
        "KV cache 3072",
        "only 4096 MiB",
        "max_batch_size (--batch-size), max_context_tokens (--context) or max_batch_tokens",
    ):
        assert words in text


def test_what_fits_passes() -> None:
    memory.check_fits(Path("small.gguf"), Demand(weights=1, kv=1, compute=1), 3)


def test_kv_counts_padded_contexts_and_attention_scores_only_without_flash_attention() -> None:
    shape = Shape(
        weights_bytes=1,
        kv_bytes_per_token=100,
        layers=1,
        embedding=64,
        feed_forward=256,
        heads=4,
        vocabulary=1000,
    )

    def estimate(*, is_flash_attention: bool, pool_tokens: int | None = None) -> Demand:
        return memory.estimate_demand(
            shape,
            sequences=4,
            context_tokens=1000,
            batch_tokens=512,
            is_flash_attention=is_flash_attention,
            pool_tokens=pool_tokens,
        )

    flash = estimate(is_flash_attention=True)
    assert flash.kv == 4 * 1024 * 100
    assert estimate(is_flash_attention=False).compute >= flash.compute + 512 * 1024 * 4 * 4
    pooled = estimate(is_flash_attention=True, pool_tokens=4000)
    assert (pooled.kv, pooled.compute > flash.compute) == (4096 * 100, True)
    assert estimate(is_flash_attention=True, pool_tokens=1500).kv == 1536 * 100
