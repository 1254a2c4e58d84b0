// The interface between this library and Python: every function that is called from there, and every record
// whose memory both sides read.
//
// `infer.kernels.loader` reads this file: struct fields and parameters must be of the types that its table of
// C types names, pointers of any kind, or names declared here. The library is built with a digest of this
// file, and Python refuses a library with another one, so no version has to be kept by hand.
//
// Pointers are not owned: the caller keeps the memory alive. `threads`: how many threads may execute a call; they
// are of a team that the calling thread has (threads.h).

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// A row of logits from which a token is drawn.
struct DrawRow {
  double temperature;
  double top_p;
  double min_p;
  uint64_t row;  // of the logits
  uint64_t seed;
  uint64_t position;  // of the token that is drawn
};

// A norm of rows of n numbers: RMSNorm, or LayerNorm where the mean is removed. weight, bias [n]: may be null.
struct RowNorm {
  const float* weight;
  const float* bias;
  double eps;
  int64_t is_centred;
};

// A decoder layer: its linear layers; the norms [D] of its heads, the factor [D] of its rotated queries, and the norms
// of rows that are not part of a linear layer, each of which may be null.
struct DecoderLayer {
  void* qkv;
  void* o;
  void* inner;  // gate and up, or up
  void* down;
  const float* q_norm;
  const float* k_norm;
  const float* q_factor;
  const struct RowNorm* before_attention;
  const struct RowNorm* before_mlp;  // of a parallel block without it, both read the same rows
  const struct RowNorm* after_attention;
  const struct RowNorm* after_mlp;
  const struct RowNorm* all_queries;  // over all heads together
  const struct RowNorm* all_keys;
  double residual_scale;  // factor of what attention and the MLP add
  double clip;            // largest magnitude of q, k and v; 0: any
  int64_t is_parallel;    // whether the MLP reads what attention reads
  int64_t activation;     // that `inner` does not compute: a number of infer_activate, or -1
  double positive;        // the learned numbers of xIELU
  double negative;
};

// The KV cache of a decoder layer; `window` is an index among those of the attention plan.
struct CacheAddresses {
  int64_t window;
  void* keys;
  void* values;
};

// Cosines and sines [T, D / 2] by which a decoder layer rotates, and the factors [T] of its rotated queries; null: it
// has none.
struct AngleAddresses {
  const float* cos;
  const float* sin;
  const float* growth;
};

// The digest of this file with which the library was built.
const char* infer_abi_digest(void);

// Names of the instruction sets that run here, best first, with a space after each. Returns whether the CPU is
// AMD's.
int infer_instruction_sets(char* names, int size);

// Nothing above this instruction set is used from now on; a plan of attention and a linear layer keep theirs.
void infer_set_isa(const char* name);

// The number of threads for the calls of this thread, for whoever asks infer_threads; 0, as at first: none is set.
void infer_set_threads(int threads);
int infer_threads(void);

// Whether fewer threads than are wanted execute calls while other processes need the cores, and never more than there
// are processors; at first they do. Without it tests can have any number.
void infer_govern_threads(int wanted);

// The processors of each thread of a call, for teams that begin from now on: those of thread i are cpus[ends[i - 1]] to
// cpus[ends[i] - 1]. Thread 0 is the caller, which stays where it is. Threads from num_fast on are on slower cores: they
// take part in calls with many rows, beyond the number that is wanted. num_threads 0, as at first: all threads are
// wherever the system puts them. nodes [num_threads]: the NUMA node of each thread, as the system numbers them; the
// weights of layers that are made from now on are divided among them. Null: one.
void infer_pin_threads(const int* cpus, const int* ends, const int* nodes, int num_threads, int num_fast);

// Has whole pages of memory come from a NUMA node when they are first written, if it has some left.
void infer_prefer_node(void* from, long bytes, int node);

// The calls of this thread are executed by the threads of an OpenMP runtime, whose GOMP_parallel this is; null, as at
// first: by a team.
void infer_use_openmp(void* parallel);

// How the threads of calls have fared in this process, estimated from some calls: numbers [2], nanoseconds that they
// had a core, and that they were kept from one. Returns how many threads a measured call had last; 0: none was.
int infer_company(int64_t* numbers);

// A plan of attention over a paged cache. `element`: bytes of a number in the caches; 1: int8, of 64, 128 or
// 256 numbers a head and pages of strips (attention_bytes.h), with everything else in bfloat16. `cap`: scores become cap · tanh(score / cap); 0:
// none. `slopes` [H], copied: a key n positions before a query has its score lowered by slope · n; null: none.
// `rounded`: if not 0, the key at position j has rounded · slope · j added instead, with slope · j in bfloat16.
// `windows` [num_windows]: 0 = none. `num_pages`: of the caches; they are divided among the NUMA nodes of the threads,
// the heads of a node together, page by page, then those of the next one. 0: the heads of a cell lie together. Null if
// the instruction set does not have it.
void* infer_attention_new(const char* isa_name, int H, int G, int D, long page_size, int element, float scale,
                          float cap, const float* slopes, float rounded, const int64_t* windows, int num_windows,
                          long num_pages);
void infer_attention_free(void* plan);

// How caches with G heads made now are divided among the NUMA nodes of the threads: ends [8], behind the heads of each
// node, and its number in the system, nodes [8]. Returns how many they are.
int infer_attention_heads(int G, int* ends, int* nodes);

// Divides a step into work items and returns their number. starts [B + 1], lengths [B], slots [T],
// tables [B, table_width]; slots and tables are kept, not copied.
int infer_attention_plan(void* plan, int B, const int64_t* starts, const int64_t* lengths, const int64_t* slots,
                         const int64_t* tables, long table_width, int threads);

// One layer of the planned step: writes k, v to their cells, then attends. Strides are elements from token to
// token. When q and k are read (bfloat16 only), their heads are normalised if there are norms [D], and then rotated
// if there are `cos` and `sin` [T, D / 2]; the queries are then multiplied by `q_factor` [D] and `growth` [T]. Each of
// them may be null. `sinks` [H], if not null: scores that take a share of their head's weights and have no value.
void infer_attention_attend(void* plan, int window, void* keys, void* values, const void* q, const void* k,
                            const void* v, void* out, long q_stride, long k_stride, long v_stride, const float* cos,
                            const float* sin, const float* q_norm, const float* k_norm, float eps,
                            const float* q_factor, const float* growth, const float* sinks);

// Whether an instruction set has linear layers and runs here within the limit of infer_set_isa.
int infer_linear_runs_here(const char* isa_name);

// The size of a packed weight, which is the same for all instruction sets.
long infer_linear_packed_bytes(long N, long K, int bits, int gate);

// The size of a panel whose columns hold their K inputs in GGUF blocks of a type (its number in GGUF files); 0: no
// panel can be of that type.
long infer_blocks_panel_bytes(int type, long K);

// `blocks` GGUF blocks of `type`, one that panels can be of, become blocks of Q8_0 (`wanted` 8) or float32 (0). 32 float32
// are a block of type 0, which becomes Q8_0. Q8_0 rounds the numbers of most types. Returns 0 if there is no such
// conversion.
int infer_blocks_convert(const uint8_t* source, int type, uint8_t* to, int wanted, long blocks, int threads);

// A layer whose weight is to be written to `packed` by infer_linear_pack; bias [N] and norm [K] are copied and
// may be null. bits: 16 or 8. rotated: whether int8 is that of rotated rows (linear.h). gate: 0, or 1 for SILU or 2 for GELU, then y has N / 2 columns. `blocks` [panels]:
// types of the GGUF blocks in which each panel holds its weights, which are to be written by
// infer_linear_pack_blocks to memory that is zero, panel after panel; bits is then 8. Null: no blocks. A panel is 32
// columns, with a gate 16 of each half.
void* infer_linear_new(const char* isa_name, char* packed, long N, long K, int bits, int gate, int float_out,
                       int rotated, const float* bias, const float* norm, float eps, const int* blocks);
void infer_linear_free(void* layer);

// Rows of a weight (bfloat16, `stride` elements apart) become columns from `column` on; the sources of a fused
// layer come one by one. Columns that fill up the last panel stay as they are: columns do not meet in a product.
void infer_linear_pack(void* layer, const uint16_t* source, long rows, long stride, long column, int threads);

// The same for rows that are in int8 already, `stride` bytes apart, with the scale of each [rows]; the layer is one of
// 8 bits that is not rotated.
void infer_linear_pack_int8(void* layer, const int8_t* source, const float* scales, long rows, long stride, long column,
                            int threads);

// The same for rows of a GGUF file, `stride` bytes apart, in blocks of `type`. The panels that they come to must be of
// that type, or of one that holds the same numbers, such as Q5_K for Q4_K.
void infer_linear_pack_blocks(void* layer, const uint8_t* source, int type, long rows, long stride, long column,
                              int threads);

// Rows of a weight (bfloat16, `stride` elements apart) as rows of a GGUF file in blocks of `type`, Q4_K or Q4_1: y [rows,
// bytes of a row]. Numbers that are not finite become blocks that are not.
void infer_fit_blocks(int type, const uint16_t* source, long stride, long rows, long K, uint8_t* y, int threads);

// Weights of some columns of a layer in blocks or bfloat16, without a gate: y [count, K], bfloat16.
void infer_linear_columns(void* layer, const int64_t* columns, long count, uint16_t* y, int threads);

// x [M, K] → y [M, width], y = gate(norm(x) Wᵀ + bias) + residual. Strides in elements; `residual` [M, width of
// y] may be null; y is dense.
void infer_linear(void* layer, const uint16_t* x, long x_stride, const uint16_t* residual, char* y, long M,
                  int threads);

// The parts into which products of M rows, at most 1,024, are cut for some threads, in the order in which they are taken:
// parts [most, 6], of which as many are written as there are, at most: node (an index), panel, end of the panels, block
// of rows, step, end of the steps. Returns their number.
long infer_linear_parts(void* layer, long M, int threads, int64_t* parts, long most);

// rows [R, n] of logits without NaN, n a multiple of 16; tops [R, num_tops]: the largest of each row is among
// them; wanted, tokens [count].
void infer_draw(const float* rows, const float* tops, long stride, long n, long num_tops, const struct DrawRow* wanted,
                long count, int64_t* tokens, int threads);

// rows [R, n] of logits, n a multiple of 16; wanted, tokens [count]. A token is drawn where the temperature is above 0;
// else it is the most probable one, of equals the first. -1: the row has NaN, or its largest number is infinite.
void infer_sample(const float* rows, long stride, long n, const struct DrawRow* wanted, long count, int64_t* tokens,
                  int threads);

// Rows x [M, n], x_stride elements apart → y = residual + scale · norm(x), y_stride apart, rounded once. norm: null is
// none; residual [M, n]: may be null, and y may be x or the residual.
void infer_norm_rows(const struct RowNorm* norm, const uint16_t* x, long x_stride, const uint16_t* residual,
                     float scale, uint16_t* y, long y_stride, long M, long n, int threads);

// x [n] becomes act(x): 0 = SiLU, 1 = GELU by tanh, 2 = GELU, 3 = ReLU, 4 = its square, 5 = xIELU of the numbers.
void infer_activate(int activation, float positive, float negative, uint16_t* x, long n, int threads);

// All layers of a decoder: x [T, hidden] → y [T, hidden]. `q_size`, `kv_size`: columns of q, and of k or v, in a
// layer's qkv; `inner`: of the gate's result; `eps`: of the heads' norms. The plan must be of this step.
void infer_layers(void* plan, const struct DecoderLayer* layers, const struct CacheAddresses* caches,
                  const struct AngleAddresses* angles, int num_layers, float eps, const uint16_t* x, uint16_t* y,
                  long num_tokens, long hidden, long q_size, long kv_size, long inner, int threads);

// Reads whole lines of 64 bytes once; returns their sum, so that the compiler cannot leave it out.
uint64_t infer_read(const char* from, long bytes, int threads);

#ifdef __cplusplus
}

static_assert(sizeof(struct DrawRow) == 48 && sizeof(struct RowNorm) == 32 && sizeof(struct DecoderLayer) == 152 &&
                  sizeof(struct CacheAddresses) == 24 && sizeof(struct AngleAddresses) == 24,
              "the loader lays records out without gaps");
static_assert(sizeof(long) == 8 && sizeof(void*) == 8, "the loader takes a long for 64 bits");
#endif
