"""Makes what vLLM loads from a GGUF file: GGUF FOLDER DTYPE. Run by the Python that has vLLM.

transformers reads the file, turns every weight into plain numbers and writes them, the tokenizer and the chat
template of the file in Hugging Face's form. In float32 these are exactly the weights that llama.cpp computes with
from the same file; bfloat16 rounds them once more.
"""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

file, folder, dtype = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
# Without `dequantize` the model remembers where it came from, and refuses to be saved.
model = AutoModelForCausalLM.from_pretrained(
    file.parent,
    gguf_file=file.name,
    dtype=getattr(torch, dtype),
    quantization_config=GgufConfig(dequantize=True),
)
model.save_pretrained(folder)
AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
