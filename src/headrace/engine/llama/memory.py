"""Does a model fit? Decided by arithmetic before anything is allocated.

Linux grants allocations it cannot back and kills the process when the pages are touched, so a failed
allocation is not something one can wait for.
"""

from pathlib import Path
from typing import NamedTuple

from headrace.engine.llama.gguf import GgufFile
from headrace.errors import MemoryShortage, ModelError

_KV_VALUE_BYTES = 2
_FIXED_BYTES = 48 << 20
"""Vocabulary tables, graph and scheduler of the library, allocator slack."""


class Shape(NamedTuple):
    """The numbers of a model that decide how much memory it takes."""

    weights_bytes: int
    kv_bytes_per_token: int
    layers: int
    embedding: int
    feed_forward: int
    heads: int
    vocabulary: int


class Demand(NamedTuple):
    """Memory a model needs with given settings, in bytes."""

    weights: int
    kv: int
    compute: int

    @property
    def total(self) -> int:
        """Everything together."""
        return self.weights + self.kv + self.compute


def read_shape(file: GgufFile) -> Shape:
    """The shape of the model in `file`. Raises `ModelError` when the file lacks what a decoder has."""
    architecture = file.text("general.architecture")
    if architecture is None:
        raise ModelError(
            f"The model file {file.path} does not say its architecture: it is no language model."
        )
    layers = file.number(f"{architecture}.block_count") or 0
    embedding = file.number(f"{architecture}.embedding_length") or 0
    heads = max(file.numbers(f"{architecture}.attention.head_count", layers) or [0])
    if not (layers and embedding and heads):
        raise ModelError(
            f"The model file {file.path} ({architecture}) does not describe an attention decoder "
            "(layers, embedding length and heads); headrace runs only these."
        )
    kv_heads = file.numbers(f"{architecture}.attention.head_count_kv", layers) or [heads] * layers
    key = file.number(f"{architecture}.attention.key_length") or embedding // heads
    value = file.number(f"{architecture}.attention.value_length") or embedding // heads
    feed_forward = max(file.numbers(f"{architecture}.feed_forward_length", layers) or [4 * embedding])
    return Shape(
        weights_bytes=file.weights_bytes,
        kv_bytes_per_token=sum(kv_heads) * (key + value) * _KV_VALUE_BYTES,
        layers=layers,
        embedding=embedding,
        feed_forward=feed_forward,
        heads=heads,
        vocabulary=_vocabulary_size(file, architecture),
    )


def estimate_demand(
    shape: Shape,
    *,
    sequences: int,
    context_tokens: int,
    batch_tokens: int,
    is_flash_attention: bool,
    pool_tokens: int | None,
) -> Demand:
    """An upper estimate of the memory for a model with these settings. `pool_tokens`: cells that all sequences share; None:
    each has its own for its whole context.

    The compute part is a rule of thumb checked against what the library reports: activations of one
    batch, the logits of all sequences twice (graph and output), and without flash attention the
    attention scores of one batch over every position it may look at.
    """
    kv_tokens = sequences * _padded(context_tokens) if pool_tokens is None else _padded(pool_tokens)
    activations = batch_tokens * (8 * shape.embedding + 3 * shape.feed_forward) * 4
    logits = 2 * sequences * shape.vocabulary * 4
    seen = _padded(context_tokens) if pool_tokens is None else kv_tokens
    mask = batch_tokens * seen * 4
    scores = 0 if is_flash_attention else batch_tokens * seen * shape.heads * 4 * 5 // 4
    return Demand(
        weights=shape.weights_bytes,
        kv=kv_tokens * shape.kv_bytes_per_token,
        compute=activations + logits + mask + scores + _FIXED_BYTES,
    )


def check_fits(path: Path, demand: Demand, available: int) -> None:
    """Raise `MemoryShortage` when `demand` exceeds `available` bytes."""
    if demand.total <= available:
        return
    raise MemoryShortage(
        f"The model {path.name} needs about {_mib(demand.total)} MiB with these settings "
        f"(weights {_mib(demand.weights)}, KV cache {_mib(demand.kv)}, computing {_mib(demand.compute)}), "
        f"but only {_mib(available)} MiB are available. "
        "Lower max_batch_size (--batch-size), max_context_tokens (--context) or max_batch_tokens, or use a smaller model."
    )


def available_bytes(root: Path = Path("/")) -> int:
    """Memory this process may still take: what the machine has free, or its control group allows."""
    limits = [_machine_available(root / "proc/meminfo")]
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, group = line.split(":", 2)
        if number == "0":
            mount, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mount, limit, usage = (
                root / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        limits += _group_allowances(mount, group, limit, usage)
    return max(0, min(limits))


def _group_allowances(mount: Path, group: str, limit_file: str, usage_file: str) -> list[int]:
    """What each control group from the process's own up to the root still allows, in bytes.

    Page cache that the kernel can drop (`inactive_file`) counts as usage there, but not here. In a
    container the group's path may not exist below the mount; the mount itself is then its group.
    """
    allowances = []
    directory = mount / group.strip("/")
    while True:
        limit = _read(directory / limit_file).strip()
        usage = _read(directory / usage_file).strip()
        if limit.isdigit() and usage.isdigit():
            stat = dict(line.split(" ", 1) for line in _read(directory / "memory.stat").splitlines())
            reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))
            allowances.append(int(limit) - int(usage) + reclaimable)
        if directory == mount:
            return allowances
        directory = directory.parent


def _machine_available(meminfo: Path) -> int:
    for line in _read(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 1 << 62


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _vocabulary_size(file: GgufFile, architecture: str) -> int:
    for tensor in file.tensors:
        if tensor.name == "token_embd.weight":
            return tensor.shape[1]
    return file.number(f"{architecture}.vocab_size") or 0


def _padded(context_tokens: int) -> int:
    """The library rounds the context of a sequence up to a multiple of 256."""
    return -(-context_tokens // 256) * 256


def _mib(size: int) -> int:
    return -(-size // (1 << 20))
