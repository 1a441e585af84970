"""What headrace assumes about the one llama.cpp build it embeds: declarations, layouts, numbers.

The build is the shared library inside the `xllamacpp` wheel, pinned by version and SHA-256. A wrong
declaration corrupts memory silently, so nothing here is believed until `verify` has compared it with
the library itself. To move to another build: run `tools/llama_offsets.c` against its headers, replace
the numbers, and let the tests run.

Only what headrace calls is declared. Pointers that headrace never follows are `void *`.
"""

from typing import Final, NamedTuple

PACKAGE: Final = "xllamacpp"
PACKAGE_VERSION: Final = "2026.10.11549"
LIBRARY_FILE: Final = "xllamacpp.abi3.so"
BACKEND_NAME: Final = "llama.cpp 11549 (xllamacpp 2026.10.11549)"

LIBRARY_SHA256: Final = {
    ("linux", "x86_64"): "78dcbbfcc861ee3377554325dc12864829a76ec3de6f1882886d4a82a2def7f5",
}
"""By (sys.platform, machine). A platform that is not here has not been verified."""

CONVERTED_SHA256: Final = "2bee9587dc93d258aac88b8abefe479bea465140b6a6ca5da1eba52463be2c3d"
"""What `convert` must make of the default model (SmolLM2-135M-Instruct, Q4_1)."""

SOURCE_SHA256: Final = "c17ee1163006f70726abb9f72137830818f3d8cb60bfc34cb232d08428eaa22b"
"""Of the package's source archive, which has the source of the same llama.cpp build in it."""

PROCESSOR_FLAGS: Final = ("avx2", "fma", "bmi2")
"""Instruction sets the x86-64 library uses without asking, as /proc/cpuinfo spells them."""

TYPE_F32: Final = 0
TYPE_F16: Final = 1
TYPE_Q4_0: Final = 2
TYPE_Q4_1: Final = 3
TYPE_Q8_0: Final = 8
TYPE_BF16: Final = 30

FILE_TYPE_BY_TENSOR_TYPE: Final = {TYPE_Q4_0: 2, TYPE_Q4_1: 3, TYPE_Q8_0: 7, TYPE_BF16: 32}
"""Value of the GGUF key `general.file_type` for a file made mostly of one tensor type."""

GGUF_MAGIC: Final = b"GGUF"
GGUF_UINT32: Final = 4
GGUF_STRING: Final = 8
GGUF_ARRAY: Final = 9

VOCABULARY_NONE: Final = 0
TOKEN_CONTROL: Final = 1 << 3
TOKEN_USER_DEFINED: Final = 1 << 4

FLASH_ATTENTION_OFF: Final = 0
FLASH_ATTENTION_ON: Final = 1
LOAD_MODE_MMAP: Final = 1

LOG_WARN: Final = 3
LOG_ERROR: Final = 4
LOG_CONTINUED: Final = 5


class Field(NamedTuple):
    """One struct member; offset and size in bytes."""

    name: str
    offset: int
    size: int


class Layout(NamedTuple):
    """How a struct lies in memory (x86-64, System V), sizes in bytes."""

    name: str
    size: int
    fields: tuple[Field, ...]


def _layout(name: str, size: int, fields: str) -> Layout:
    """A layout from `name offset size` triples, the way the C program prints them."""
    words = fields.split()
    triples = zip(words[0::3], words[1::3], words[2::3], strict=True)
    return Layout(
        name, size, tuple(Field(field, int(offset), int(width)) for field, offset, width in triples)
    )


MODEL_PARAMS: Final = _layout(
    "llama_model_params",
    80,
    """devices 0 8  tensor_buft_overrides 8 8  n_gpu_layers 16 4  split_mode 20 4  load_mode 24 4
    lazy_mode 28 4  main_gpu 32 4  tensor_split 40 8  progress_callback 48 8
    progress_callback_user_data 56 8  kv_overrides 64 8  vocab_only 72 1  check_tensors 73 1
    use_extra_bufts 74 1  no_host 75 1  no_alloc 76 1  load_mtp 77 1""",
)
CONTEXT_PARAMS: Final = _layout(
    "llama_context_params",
    168,
    """n_ctx 0 4  n_batch 4 4  n_ubatch 8 4  n_seq_max 12 4  n_rs_seq 16 4  n_outputs_max 20 4
    n_outputs_max_per_seq 24 4  n_threads 28 4  n_threads_batch 32 4  ctx_type 36 4
    rope_scaling_type 40 4  pooling_type 44 4  attention_type 48 4  flash_attn_type 52 4
    rope_freq_base 56 4  rope_freq_scale 60 4  yarn_ext_factor 64 4  yarn_attn_factor 68 4
    yarn_beta_fast 72 4  yarn_beta_slow 76 4  yarn_orig_ctx 80 4  defrag_thold 84 4
    cb_eval 88 8  cb_eval_user_data 96 8  type_k 104 4  type_v 108 4  moe_cache_size 112 8
    abort_callback 120 8  abort_callback_data 128 8  embeddings 136 1  offload_kqv 137 1
    no_perf 138 1  op_offload 139 1  swa_full 140 1  kv_unified 141 1  samplers 144 8
    n_samplers 152 8  ctx_other 160 8""",
)
BATCH: Final = _layout(
    "llama_batch",
    56,
    "n_tokens 0 4  token 8 8  embd 16 8  pos 24 8  n_seq_id 32 8  seq_id 40 8  logits 48 8",
)
GGUF_PARAMS: Final = _layout("gguf_init_params", 16, "no_alloc 0 1  ctx 8 8")

MODEL_DEFAULTS: Final[dict[str, int | float]] = {
    "devices": 0,
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "main_gpu": 0,
    "tensor_split": 0,
    "kv_overrides": 0,
    "vocab_only": 0,
    "check_tensors": 0,
    "use_extra_bufts": 1,
    "no_host": 0,
    "no_alloc": 0,
}
CONTEXT_DEFAULTS: Final[dict[str, int | float]] = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_rs_seq": 0,
    "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1,
    "n_threads": 4,
    "n_threads_batch": 4,
    "ctx_type": 0,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "attention_type": -1,
    "flash_attn_type": -1,
    "rope_freq_base": 0.0,
    "yarn_ext_factor": -1.0,
    "yarn_beta_slow": -1.0,
    "yarn_orig_ctx": 0,
    "defrag_thold": -1.0,
    "cb_eval": 0,
    "type_k": TYPE_F16,
    "type_v": TYPE_F16,
    "moe_cache_size": 0,
    "abort_callback": 0,
    "embeddings": 0,
    "offload_kqv": 1,
    "no_perf": 1,
    "op_offload": 1,
    "swa_full": 1,
    "kv_unified": 0,
    "samplers": 0,
    "n_samplers": 0,
    "ctx_other": 0,
}

DECLARATIONS: Final = """
struct llama_model_params {
    void *devices; void *tensor_buft_overrides;
    int32_t n_gpu_layers; int32_t split_mode; int32_t load_mode; int32_t lazy_mode; int32_t main_gpu;
    void *tensor_split; void *progress_callback; void *progress_callback_user_data; void *kv_overrides;
    bool vocab_only; bool check_tensors; bool use_extra_bufts; bool no_host; bool no_alloc; bool load_mtp;
};
struct llama_context_params {
    uint32_t n_ctx; uint32_t n_batch; uint32_t n_ubatch; uint32_t n_seq_max; uint32_t n_rs_seq;
    uint32_t n_outputs_max; uint32_t n_outputs_max_per_seq; int32_t n_threads; int32_t n_threads_batch;
    int32_t ctx_type; int32_t rope_scaling_type; int32_t pooling_type; int32_t attention_type;
    int32_t flash_attn_type;
    float rope_freq_base; float rope_freq_scale; float yarn_ext_factor; float yarn_attn_factor;
    float yarn_beta_fast; float yarn_beta_slow; uint32_t yarn_orig_ctx; float defrag_thold;
    void *cb_eval; void *cb_eval_user_data; int32_t type_k; int32_t type_v; size_t moe_cache_size;
    void *abort_callback; void *abort_callback_data;
    bool embeddings; bool offload_kqv; bool no_perf; bool op_offload; bool swa_full; bool kv_unified;
    void *samplers; size_t n_samplers; void *ctx_other;
};
struct llama_batch {
    int32_t n_tokens; int32_t *token; float *embd; int32_t *pos; int32_t *n_seq_id; int32_t **seq_id;
    int8_t *logits;
};
struct gguf_init_params { bool no_alloc; void *ctx; };

typedef struct opaque_model llama_model;
typedef struct opaque_context llama_context;
typedef struct opaque_vocab llama_vocab;
typedef struct opaque_memory *llama_memory;
typedef struct opaque_gguf gguf;
typedef void (*log_callback)(int32_t level, const char *text, void *user_data);

struct llama_model_params llama_model_default_params(void);
struct llama_context_params llama_context_default_params(void);
void llama_backend_init(void);
void llama_log_set(log_callback callback, void *user_data);

llama_model *llama_model_load_from_file(const char *path, struct llama_model_params params);
void llama_model_free(llama_model *model);
const llama_vocab *llama_model_get_vocab(const llama_model *model);
int32_t llama_model_meta_val_str(const llama_model *model, const char *key, char *buffer, size_t size);
int32_t llama_model_n_ctx_train(const llama_model *model);
int32_t llama_model_ftype(const llama_model *model);
const char *llama_ftype_name(int32_t file_type);
uint64_t llama_model_size(const llama_model *model);
uint64_t llama_model_n_params(const llama_model *model);
const char *llama_model_chat_template(const llama_model *model, const char *name);
bool llama_model_has_encoder(const llama_model *model);
bool llama_model_has_decoder(const llama_model *model);
bool llama_model_is_recurrent(const llama_model *model);
bool llama_model_is_hybrid(const llama_model *model);
bool llama_model_is_diffusion(const llama_model *model);

llama_context *llama_init_from_model(llama_model *model, struct llama_context_params params);
void llama_free(llama_context *context);
uint32_t llama_n_ctx(const llama_context *context);
uint32_t llama_n_ctx_seq(const llama_context *context);
uint32_t llama_n_batch(const llama_context *context);
uint32_t llama_n_seq_max(const llama_context *context);
int32_t llama_n_threads(llama_context *context);
llama_memory llama_get_memory(const llama_context *context);
bool llama_memory_seq_rm(llama_memory memory, int32_t sequence, int32_t from, int32_t to);
int32_t llama_memory_seq_pos_max(llama_memory memory, int32_t sequence);
void llama_memory_seq_cp(llama_memory memory, int32_t source, int32_t target, int32_t from, int32_t to);
size_t llama_state_get_size(llama_context *context);
size_t llama_state_seq_get_size(llama_context *context, int32_t sequence);
size_t llama_state_seq_get_data(llama_context *context, uint8_t *target, size_t size, int32_t sequence);
size_t llama_state_seq_set_data(llama_context *context, const uint8_t *source, size_t size, int32_t sequence);
struct llama_batch llama_batch_init(int32_t tokens, int32_t embedding, int32_t sequences);
void llama_batch_free(struct llama_batch batch);
int32_t llama_decode(llama_context *context, struct llama_batch batch);
float *llama_get_logits(llama_context *context);

int32_t llama_vocab_type(const llama_vocab *vocab);
int32_t llama_vocab_n_tokens(const llama_vocab *vocab);
const char *llama_vocab_get_text(const llama_vocab *vocab, int32_t token);
int32_t llama_vocab_get_attr(const llama_vocab *vocab, int32_t token);
bool llama_vocab_is_eog(const llama_vocab *vocab, int32_t token);
int32_t llama_vocab_bos(const llama_vocab *vocab);
int32_t llama_vocab_eos(const llama_vocab *vocab);
bool llama_vocab_get_add_bos(const llama_vocab *vocab);
int32_t llama_tokenize(const llama_vocab *vocab, const char *text, int32_t length, int32_t *tokens,
                       int32_t capacity, bool add_special, bool parse_special);
int32_t llama_token_to_piece(const llama_vocab *vocab, int32_t token, char *buffer, int32_t length,
                             int32_t left_strip, bool special);

gguf *gguf_init_from_file(const char *path, struct gguf_init_params params);
void gguf_free(gguf *file);
int64_t gguf_find_key(const gguf *file, const char *key);
int32_t gguf_get_kv_type(const gguf *file, int64_t key);
int32_t gguf_get_arr_type(const gguf *file, int64_t key);
size_t gguf_get_arr_n(const gguf *file, int64_t key);
const void *gguf_get_arr_data(const gguf *file, int64_t key);
const void *gguf_get_val_data(const gguf *file, int64_t key);
const char *gguf_get_val_str(const gguf *file, int64_t key);
void gguf_set_val_u32(gguf *file, const char *key, uint32_t value);
size_t gguf_get_data_offset(const gguf *file);
size_t gguf_get_alignment(const gguf *file);
int64_t gguf_get_n_tensors(const gguf *file);
const char *gguf_get_tensor_name(const gguf *file, int64_t tensor);
int32_t gguf_get_tensor_type(const gguf *file, int64_t tensor);
size_t gguf_get_tensor_offset(const gguf *file, int64_t tensor);
size_t gguf_get_tensor_size(const gguf *file, int64_t tensor);
const int64_t *gguf_get_tensor_ne(const gguf *file, int64_t tensor);
void gguf_set_tensor_type(gguf *file, const char *name, int32_t type);
size_t gguf_get_meta_size(const gguf *file);
void gguf_get_meta_data(const gguf *file, void *buffer);

size_t ggml_row_size(int32_t type, int64_t elements);
int64_t ggml_blck_size(int32_t type);
const char *ggml_type_name(int32_t type);
size_t ggml_quantize_chunk(int32_t type, const float *source, void *target, int64_t start, int64_t rows,
                           int64_t elements_per_row, const float *importance);
void dequantize_row_q4_1(const void *source, float *target, int64_t elements);
"""
