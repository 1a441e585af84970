"""The built-in model in the forms that the servers load."""

import argparse
import subprocess
from pathlib import Path

from headrace.engine.builtin import builtin_model_path
from headrace.engine.llama import prepare_model

DTYPES = ("bfloat16", "float32")


def converted_builtin(cache: Path) -> Path:
    """Path of the weights as headrace makes them, made in `cache` if they are not there."""
    return prepare_model(builtin_model_path(), cache).path


def add_library(parser: argparse.ArgumentParser) -> None:
    """`--library`, of headrace's engine. Other servers are the wheel's in any case."""
    parser.add_argument("--library", choices=("wheel", "native"), default="wheel", help="headrace's")


def for_vllm(python: Path, gguf: Path, folder: Path, dtype: str) -> Path:
    """The same weights in Hugging Face's form, made in `folder` by the Python that has vLLM (20 s)."""
    script = Path(__file__).with_name("vllm_weights.py")
    done = subprocess.run(
        [str(python), str(script), str(gguf), str(folder), dtype],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stdout[-2000:])
    return folder


def faster_dtype() -> str:
    """What vLLM computes faster in on this machine: bfloat16 where the processor multiplies it itself."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    return "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(flags) else "float32"
