/*
 * Prints the sizes, offsets and default values behind src/headrace/engine/llama/definitions.py.
 *
 * A development-time program: run it when the pinned xllamacpp changes, compare what it prints with
 * the tables in definitions.py, and commit only the numbers.
 *
 *   pip download --no-deps --no-binary :all: xllamacpp==2026.10.11549      # the sdist, then unpack it
 *   L=xllamacpp-2026.10.11549/thirdparty/llama.cpp
 *   gcc -I$L/include -I$L/ggml/include -o /tmp/llama_offsets tools/llama_offsets.c && /tmp/llama_offsets
 *
 * One line each: "size STRUCT BYTES", "field STRUCT NAME OFFSET BYTES" or "value NAME NUMBER".
 */
#include <stddef.h>
#include <stdio.h>

#include "llama.h"

#define SIZE(s) printf("size %s %zu\n", #s, sizeof(struct s))
#define FIELD(s, f) printf("field %s %s %zu %zu\n", #s, #f, offsetof(struct s, f), sizeof(((struct s *)0)->f))
#define VALUE(v) printf("value %s %lld\n", #v, (long long)(v))

static void print_model_params(void) {
    SIZE(llama_model_params);
    FIELD(llama_model_params, devices);
    FIELD(llama_model_params, tensor_buft_overrides);
    FIELD(llama_model_params, n_gpu_layers);
    FIELD(llama_model_params, split_mode);
    FIELD(llama_model_params, load_mode);
    FIELD(llama_model_params, lazy_mode);
    FIELD(llama_model_params, main_gpu);
    FIELD(llama_model_params, tensor_split);
    FIELD(llama_model_params, progress_callback);
    FIELD(llama_model_params, progress_callback_user_data);
    FIELD(llama_model_params, kv_overrides);
    FIELD(llama_model_params, vocab_only);
    FIELD(llama_model_params, check_tensors);
    FIELD(llama_model_params, use_extra_bufts);
    FIELD(llama_model_params, no_host);
    FIELD(llama_model_params, no_alloc);
    FIELD(llama_model_params, load_mtp);
}

static void print_context_params(void) {
    SIZE(llama_context_params);
    FIELD(llama_context_params, n_ctx);
    FIELD(llama_context_params, n_batch);
    FIELD(llama_context_params, n_ubatch);
    FIELD(llama_context_params, n_seq_max);
    FIELD(llama_context_params, n_rs_seq);
    FIELD(llama_context_params, n_outputs_max);
    FIELD(llama_context_params, n_outputs_max_per_seq);
    FIELD(llama_context_params, n_threads);
    FIELD(llama_context_params, n_threads_batch);
    FIELD(llama_context_params, ctx_type);
    FIELD(llama_context_params, rope_scaling_type);
    FIELD(llama_context_params, pooling_type);
    FIELD(llama_context_params, attention_type);
    FIELD(llama_context_params, flash_attn_type);
    FIELD(llama_context_params, rope_freq_base);
    FIELD(llama_context_params, rope_freq_scale);
    FIELD(llama_context_params, yarn_ext_factor);
    FIELD(llama_context_params, yarn_attn_factor);
    FIELD(llama_context_params, yarn_beta_fast);
    FIELD(llama_context_params, yarn_beta_slow);
    FIELD(llama_context_params, yarn_orig_ctx);
    FIELD(llama_context_params, defrag_thold);
    FIELD(llama_context_params, cb_eval);
    FIELD(llama_context_params, cb_eval_user_data);
    FIELD(llama_context_params, type_k);
    FIELD(llama_context_params, type_v);
    FIELD(llama_context_params, moe_cache_size);
    FIELD(llama_context_params, abort_callback);
    FIELD(llama_context_params, abort_callback_data);
    FIELD(llama_context_params, embeddings);
    FIELD(llama_context_params, offload_kqv);
    FIELD(llama_context_params, no_perf);
    FIELD(llama_context_params, op_offload);
    FIELD(llama_context_params, swa_full);
    FIELD(llama_context_params, kv_unified);
    FIELD(llama_context_params, samplers);
    FIELD(llama_context_params, n_samplers);
    FIELD(llama_context_params, ctx_other);
}

static void print_small_structs(void) {
    SIZE(llama_batch);
    FIELD(llama_batch, n_tokens);
    FIELD(llama_batch, token);
    FIELD(llama_batch, embd);
    FIELD(llama_batch, pos);
    FIELD(llama_batch, n_seq_id);
    FIELD(llama_batch, seq_id);
    FIELD(llama_batch, logits);
    SIZE(gguf_init_params);
    FIELD(gguf_init_params, no_alloc);
    FIELD(gguf_init_params, ctx);
}

static void print_values(void) {
    VALUE(GGML_TYPE_F16);
    VALUE(GGML_TYPE_Q4_0);
    VALUE(GGML_TYPE_Q4_1);
    VALUE(GGML_TYPE_Q8_0);
    VALUE(LLAMA_FTYPE_MOSTLY_Q4_0);
    VALUE(LLAMA_FTYPE_MOSTLY_Q4_1);
    VALUE(LLAMA_FTYPE_MOSTLY_Q8_0);
    VALUE(LLAMA_VOCAB_TYPE_NONE);
    VALUE(LLAMA_VOCAB_TYPE_SPM);
    VALUE(LLAMA_VOCAB_TYPE_BPE);
    VALUE(LLAMA_TOKEN_ATTR_CONTROL);
    VALUE(LLAMA_TOKEN_ATTR_USER_DEFINED);
    VALUE(LLAMA_FLASH_ATTN_TYPE_AUTO);
    VALUE(LLAMA_FLASH_ATTN_TYPE_DISABLED);
    VALUE(LLAMA_FLASH_ATTN_TYPE_ENABLED);
    VALUE(LLAMA_LOAD_MODE_AUTO);
    VALUE(LLAMA_LOAD_MODE_NONE);
    VALUE(LLAMA_LOAD_MODE_MMAP);
    VALUE(LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED);
    VALUE(LLAMA_POOLING_TYPE_UNSPECIFIED);
    VALUE(LLAMA_POOLING_TYPE_NONE);
    VALUE(LLAMA_ATTENTION_TYPE_UNSPECIFIED);
    VALUE(LLAMA_SPLIT_MODE_LAYER);
    VALUE(LLAMA_LAZY_MODE_AUTO);
    VALUE(GGML_LOG_LEVEL_WARN);
    VALUE(GGML_LOG_LEVEL_ERROR);
    VALUE(GGML_LOG_LEVEL_CONT);
    VALUE(GGUF_TYPE_UINT32);
    VALUE(GGUF_TYPE_STRING);
    VALUE(GGUF_TYPE_ARRAY);
}

int main(void) {
    print_model_params();
    print_context_params();
    print_small_structs();
    print_values();
    return 0;
}
