"""Runs llama.cpp's own server: MODEL THREADS SEQUENCES CONTEXT BATCH IS_CACHED. Prints `LISTENING URL`."""

import sys
import time

import xllamacpp

model, threads, sequences, context, batch, is_cached = sys.argv[1], *map(int, sys.argv[2:])
params = xllamacpp.CommonParams()
params.model.path = model
params.cpuparams.n_threads = threads
params.cpuparams_batch.n_threads = threads
params.n_parallel = sequences
params.n_ctx = sequences * context
params.n_batch = batch
params.n_ubatch = batch
params.kv_unified = False
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
params.cont_batching = True
params.cache_prompt = bool(is_cached)
params.cache_ram_mib = 8192 if is_cached else 0
params.cache_idle_slots = bool(is_cached)
params.fit_params = False
params.hostnames = ["127.0.0.1"]
params.port = 0
params.n_threads_http = 40
params.use_jinja = True
params.ui = False
server = xllamacpp.Server(params)
address = server.listening_address
address = address() if callable(address) else address
print("LISTENING", address, flush=True)
while True:
    time.sleep(3600)
