// Shared by the instruction-set builds of the CPU engine: arguments, thread group, table of entry points.
//
// Each of portable.cpp, avx2.cpp and avx512.cpp compiles the same drivers with its own flags inside an anonymous
// namespace. Those files use no standard-library templates: the linker could otherwise keep the AVX-512 copy of a
// shared template and run it on a machine without AVX-512. Threads and memory therefore live in threads.cpp.
#pragma once

#include <cstdint>

namespace magicube {

constexpr int kPanel = 64;          // bytes of a row of a part of a panel; most columns of a panel
constexpr int kQuad = 4;            // nonzeros per 32-bit multiply-accumulate lane
constexpr int64_t kMaxColumns = int64_t{1} << 28;  // of the sparse operand: 8 * column must fit 32 bits
constexpr int64_t kStreamBytes = 1 << 20;  // an output of this size does not fit L2
constexpr int kMaxDigits = 2;
constexpr int kMaxVector = 32;
constexpr int kFewColumns = 16;     // of the dense operand, for which an instruction set may have kernels of their own
constexpr int64_t kExactRun = 32768;  // products of two bytes that int32 sums without overflow
constexpr int64_t kStagedBytes = 256 * 1024;  // staged rows of the right operand of an SDDMM
constexpr int64_t kDotColumns = 8;  // of dot products that a kernel computes at once

enum class Out : int { kInt32, kInt64, kFloat32, kFloat16, kBFloat16 };
enum class Activation : int { kNone, kRelu, kGelu, kGeluTanh, kSilu };  // of float results

// Dense integer operand. A run is a sequence of contiguous elements.
struct Operand {
  const uint8_t* data;
  int64_t batch_bytes;    // from one matrix of the batch to the next
  int64_t run_bytes;      // from one run to the next
  bool runs_along_inner;  // runs are along the inner (reduction) dimension
  int bits;
  bool is_signed;

  int digits() const { return bits > 8 ? 2 : 1; }
};

// SR-BCRS with its values as digit planes: planes[digit][block][row of the vector][position in the stride].
struct Sparse {
  const int64_t* row_start;
  const int64_t* row_end;
  const int32_t* columns;
  const uint8_t* planes;
  const int64_t* row_sums;  // [digit][vector row][row of the vector], for the offset of signed operands
  int64_t plane_bytes;
  int64_t vector_rows;
  int64_t rows;
  int64_t columns_total;
  int vector_length;
  int stride;
  int bits;
  bool is_signed;
  const uint64_t* masks;  // (vector rows, K / 64 rounded up), a bit per column that is stored, or null

  int digits() const { return bits > 8 ? 2 : 1; }
};

struct Scales {
  const float* rows;     // (rows,) or null
  const float* columns;  // (n,) or null
  const float* bias;     // (rows,) or null
  int64_t row_batch;     // elements between the scales of two matrices of a batch, 0 for the same ones
  int64_t column_batch;
};

// Rows of an operand: int8, or floats that the call quantizes.
struct DenseLeft {
  const int8_t* ints;    // (rows, inner); not read if `reals` is given
  const void* reals;     // (rows, inner) or null
  int64_t row_elements;  // from one row to the next
  const float* scale;    // of all reals; null: amax of a row over `high`
  double low, high;      // smallest and largest integer
  const float* factors = nullptr;  // of the columns of reals, before they are quantized; or null. Dense product only
  Out reals_type = Out::kFloat32;
};

struct SpmmArgs {
  Sparse a;
  Operand b;
  Scales scales;
  void* out;  // (batch, rows, n), contiguous; or (n, rows)
  Out out_type;
  int64_t n;
  int64_t batch;
  DenseLeft columns;  // of B, quantized into the shared buffer in place of `b`, if its `reals` are given
  int64_t staged_panels;  // panels in the shared buffer
  int64_t parts;          // of a panel, each with kPanel bytes of a row
  bool turned = false;    // the output is (n, rows), floats, of one batch; never by the kernels of few columns
};

struct SddmmArgs {
  Operand x;
  Operand y;
  const int64_t* row_start;
  const int64_t* row_end;
  const int32_t* columns;
  Scales scales;
  void* out;  // (batch, blocks, vector_length, stride), contiguous, zero
  int64_t out_batch;  // elements
  Out out_type;
  int64_t vector_rows;
  int64_t rows;
  int64_t n;
  int64_t inner;
  int64_t batch;
  int vector_length;
  int stride;
};

// A batch of float matrices with contiguous rows; elements from one to the next.
struct FloatRows {
  const float* data;
  int64_t group;  // groups of heads
  int64_t head;
  int64_t row;
};

constexpr int64_t kKeyStep = 32;   // stride of the pattern of an attention
constexpr int64_t kKeyPiece = 64;  // keys per ticket

// Sparse attention. Matrix i uses the pattern i % patterns: vector rows and columns of the patterns are consecutive.
struct AttentionArgs {
  FloatRows q;  // (batch, queries, depth)
  FloatRows k;  // (batch, keys, depth)
  FloatRows v;  // (batch, keys, width)
  const int64_t* row_start;  // (patterns * vector rows), multiples of kKeyStep
  const int64_t* row_end;
  const int32_t* columns;    // with the keys of the patterns before, -1 in the padding
  const float* bias;         // (keys,) or null
  int64_t bias_matrix;       // elements to the bias of the next matrix, 0 for the same one
  void* out;                 // (batch, queries, width), contiguous
  float* lse;                // (batch, queries) or null
  Out out_type;
  int64_t batch, heads;      // matrices, and those of a group
  int64_t patterns, queries, keys, depth, width;
  int64_t stored;            // entries of `columns`
  int64_t longest;           // most vectors of a vector row
  int vector_length;
  int operand_bits;          // of Q, K and V: 4 or 8, signed
  int softmax_bits;          // 4 or 8, unsigned
  float scale;               // of the logits
  float empty;               // scale of a query without keys
  bool causal;
};

struct QuantizeArgs {
  const void* x;
  void* out;       // int8, uint8, int16, uint16 or packed 4-bit, contiguous rows of out_row_bytes
  void* scale;     // the dtype of x: read when given_scale, else written
  uint8_t* flags;  // one byte, zero on entry: kNegative, kNonFinite
  int64_t rows;
  int64_t columns;
  int64_t row_elements;  // from one row of x to the next
  int64_t out_row_bytes;
  int bits;
  bool is_double;
  bool is_signed;
  bool truncate;
  bool given_scale;
  int scale_mode;
};

// Digit planes of float32: planes[i] has the shape of x, contiguous rows of out_row_bytes.
struct DigitsArgs {
  const float* x;
  int8_t* planes;
  void* scale;     // float, or double where exact
  uint8_t* flags;  // one byte, zero on entry: kNonFinite
  int64_t rows;
  int64_t columns;
  int64_t row_elements;  // from one row of x to the next
  int64_t out_row_bytes;
  int64_t plane_bytes;
  int count;       // of digits, 1 to 3; 2 where exact
  bool exact;      // quotients in double
  double high;     // integer of the amax
  float radix;     // steps of a digit per step of the digit before
  float ahead[2];  // added before the roundings to the first two of three digits
  bool power;      // scales are powers of two
  bool truncate;   // where exact: digits round toward zero
  double limit;    // where exact: largest digit
  int scale_mode;
};

// Two calls: with `lengths` the stored vectors of each vector row are counted, without it they are written.
constexpr int kTransposedColumns = 32;  // of B in a panel of a product with a transpose

struct TransposedArgs {
  const int64_t* offsets;  // (rows + 1): vectors of each row of A^T
  const int32_t* blocks;   // (vectors): first of its rows of B, by vector_length
  const uint8_t* values;   // (vectors, vector_length)
  const uint8_t* b;        // (batch, inner, n), contiguous
  int32_t* out;            // (batch, rows, n), contiguous
  int64_t rows, inner, n, batch;
  int64_t pairs;      // of rows of B that vectors may read
  int vector_length;  // 2, 4, 8, 16 or 32
  bool a_signed, b_signed;
};

struct CompressArgs {
  const uint8_t* mask;    // (rows, columns) of 0 and 1
  const uint8_t* values;  // (rows, columns) integers of element_bytes, 1 or 2
  int64_t rows;
  int64_t columns;
  int64_t mask_row;  // bytes from one row to the next
  int64_t values_row_bytes;
  int element_bytes;
  int vector_length;
  int stride;
  int64_t* lengths;          // (vector rows), or null
  const int64_t* row_start;  // (vector rows + 1), multiples of the stride
  int32_t* out_columns;      // -1 in the padding
  uint8_t* out_values;       // [block][row of the vector][position in the stride], zero in the padding
};

struct ReorderArgs {
  const int* until;      // (rows, tiles, 8): columns of each residue up to and with a tile
  const int64_t* first;  // (rows, 8): where the columns of a residue begin in `order`
  const int64_t* order;  // (vectors,)
  int64_t rows;
  int tiles, group, window;
  int64_t* slots;  // (vectors,)
};

constexpr int kProbes = 16;
constexpr int64_t kGroupRows = 24;  // rows per converted block: a multiple of the rows of every register tile

// float32 or float64 with contiguous rows or, if column_major, contiguous columns.
struct RealMatrix {
  const void* data;
  int64_t rows;
  int64_t columns;
  int64_t stride;  // elements from one row, or column, to the next
  bool is_double;
  bool column_major;
};

struct ProbeArgs {
  RealMatrix b;        // (K, N)
  const float* w;      // (N, kProbes)
  const double* wbar;  // (N,)
  double* products;    // (K, kProbes), B W
  double* bounds;      // (K,), |B| wbar
};

struct JudgeSums {
  double gram[kProbes * kProbes];  // of Y = A (B W) - C W
  double product;                  // ||A (B W)||_F^2
  double claimed;                  // ||C W||_F^2
  double norm;                     // ||C||_F^2
  double a_bound;                  // || |A| bounds ||^2
  double c_bound;                  // || |C| wbar ||^2
};

struct JudgeArgs {
  RealMatrix a;            // (M, K)
  RealMatrix c;            // (M, N)
  const double* products;  // (K, kProbes)
  const double* bounds;    // (K,)
  const float* w;          // (N, kProbes)
  const double* wbar;      // (N,)
  JudgeSums* out;
};

constexpr int kFewProbes = 3;
constexpr int64_t kBoundRows = 48;  // rows, or contiguous runs, with sums of their own

struct BoundSums {
  double a, b, c;  // ||A||_F^2, ||B||_F^2, ||C||_F^2
  double error;    // ||A (B W) - C W||_F^2
};

// float32 matrices.
struct BoundArgs {
  RealMatrix a;     // (M, K)
  RealMatrix b;     // (K, N)
  RealMatrix c;     // (M, N)
  const double* w;  // (kFewProbes, N), or null for norms alone
  BoundSums* out;
};

constexpr int64_t kErrorBlock = 64;  // products that float32 sums before they are added in float64
constexpr int64_t kDirectRows = 48;  // rows of A whose digits are multiplied by all of B, a multiple of every tile but those of AMX
constexpr int64_t kMostBlockRows = 64;  // the same of any dense product

// Right operand of a dense product, packed once: [panel][k / 4][column][k % 4], zeros in the padding. Nibbles hold v + 8, those of
// k and k + 4 in a byte: [panel][k / 8][column][k % 4].
struct PackedRight {
  const int8_t* packed;
  const int32_t* column_sums;  // whole panels, of each group: [panel][group][column]; not read for nibbles
  int64_t inner;
  int64_t n;
  bool nibbles = false;
  int64_t group = 0;                    // k that share a scale, a multiple of 8; 0 for none
  const float* group_scales = nullptr;  // [panel][group][column]
  const float* group_minima = nullptr;  // likewise, added to each scaled integer; or null

  int64_t groups() const { return group ? (inner + group - 1) / group : 1; }
};

struct PackArgs {
  const int8_t* digits;     // (rows, columns); one of the two steps is 1
  int64_t rows;
  int64_t columns;
  int64_t row_elements;     // from one row to the next
  int64_t column_elements;  // from one column to the next
  int8_t* packed;           // as PackedRight
  int32_t* column_sums;
};

struct DenseArgs {
  PackedRight right;
  DenseLeft left;
  Scales scales;           // of the rows, of the columns; bias of a column
  bool columns_first;      // multiply by the scale of the column before that of the row
  int64_t rows;
  int64_t row_step;        // elements of the output from one row to the next
  int64_t column_step;     // and from one column to the next; one of the two steps is 1
  void* out;
  Out out_type;
  bool adds = false;       // float32 results are added to the output
  Activation activation = Activation::kNone;  // of float results
};

struct ProbeDigitsArgs {
  const float* b;        // (rows, columns), contiguous
  const int8_t* digits;  // likewise
  const float* scale;    // (columns,)
  int64_t rows;
  int64_t columns;
  const double* w;     // (columns, kProbes)
  const double* wbar;  // (columns,)
  double* products;    // (2, rows, kProbes): dB W, (B - dB) W
  double* bounds;      // (2, rows): |dB| wbar, |B - dB| wbar
};

struct DirectSums {
  double gram[kProbes * kProbes];  // of (A B - C) W, roundings of C apart
  double bound;                    // || |A| |dB| wbar + |dA| |B - dB| wbar ||^2
  double norm;                     // ||C||_F^2
};

// Prepared right operand of a direct product. Vectors and bounds are divided by `unit`, a power of two.
struct DirectRight {
  const int8_t* packed;
  const int32_t* column_sums;
  const float* col_scale;  // (n,)
  const float* vectors;    // (inner, 2, kProbes): dB W, (B - dB) W
  const float* bounds;     // (2, inner)
  double unit;
  double largest_scale;  // of col_scale
  int64_t inner;
  int64_t n;
};

struct DirectArgs : DirectRight {
  const float* a;    // (rows, inner)
  int64_t a_stride;  // elements
  int64_t rows;
  float* out;  // (rows, n), contiguous
  DirectSums* sums;
};

constexpr int kScaleAll = 0, kScaleRows = 1, kScaleColumns = 2;  // per tensor, per row, per column
constexpr uint8_t kNegative = 1;
constexpr uint8_t kNonFinite = 2;

constexpr int64_t kNoTicket = int64_t{1} << 40;  // more than any call has; a multiple of it fits int64

// Threads of one call. Tickets distribute the pieces of a phase in order; a barrier ends the phase. A thread may come late or
// never: what another phase reads is written by tickets. Code after the last barrier may be that of rank 0.
class ThreadGroup {
 public:
  virtual int rank() const = 0;
  virtual int size() const = 0;  // at most
  virtual int64_t ticket() = 0;  // kNoTicket in a phase that is complete
  [[nodiscard]] virtual bool barrier() = 0;  // false: the call is over, its arguments gone, so return at once; never for rank 0
  virtual uint8_t* shared() const = 0;  // shared by all threads
  virtual uint8_t* local() const = 0;   // per thread

 protected:
  ~ThreadGroup() = default;
};

struct Structure {
  const int64_t* row_start;  // (vector_rows)
  const int64_t* row_end;    // (vector_rows)
  const int32_t* columns;    // (padded)
  int64_t vector_rows, padded, columns_total;
  int64_t stride;  // a power of two
};

// Of compensate_args.hpp.
struct SplitArgs;
struct MagnitudeArgs;
struct SelectArgs;
struct CorrectArgs;

struct Engine {
  const char* name;
  void (*spmm)(const SpmmArgs&, ThreadGroup&);
  void (*spmm_transposed)(const TransposedArgs&, ThreadGroup&);
  void (*sddmm)(const SddmmArgs&, ThreadGroup&);
  void (*attention)(const AttentionArgs&, ThreadGroup&);
  void (*quantize)(const QuantizeArgs&, ThreadGroup&);
  void (*digits)(const DigitsArgs&, ThreadGroup&);
  void (*compress)(const CompressArgs&, ThreadGroup&);
  void (*probe_right)(const ProbeArgs&, ThreadGroup&);
  void (*judge)(const JudgeArgs&, ThreadGroup&);
  void (*bound_sums)(const BoundArgs&, ThreadGroup&);
  void (*pack_digits)(const PackArgs&, ThreadGroup&);
  void (*probe_digits)(const ProbeDigitsArgs&, ThreadGroup&);
  void (*direct)(const DirectArgs&, ThreadGroup&);
  void (*dense)(const DenseArgs&, ThreadGroup&);
  void (*split_residual)(const SplitArgs&, ThreadGroup&);
  void (*magnitude_sums)(const MagnitudeArgs&, ThreadGroup&);
  void (*select_entries)(const SelectArgs&, ThreadGroup&);
  void (*correct)(const CorrectArgs&, ThreadGroup&);
  bool (*is_structure_valid)(const Structure&);
  int64_t spmm_columns;        // of B in a part of a panel
  int64_t spmm_parts;          // of a panel, at most
  int64_t spmm_scratch_bytes;  // per thread, a multiple of 64
  int64_t dot_bytes;           // of a staged digit of an SDDMM
  int64_t serial_work;         // multiply-adds in about half a millisecond: with less, a thread costs more than it saves
  bool spmm_alone = false;     // whether a thread may take a whole panel
};

extern const Engine kPortable;
#ifdef MAGICUBE_X86
extern const Engine kAvx2;
extern const Engine kAvxVnni;
extern const Engine kAvx512;
extern const Engine kAmx;
#endif

// Parts of a panel: fewer where they would fill more than half of L2.
int64_t spmm_panel_parts(const SpmmArgs& args, int64_t most);

// Panels of an SpMM that several threads stage before they multiply: few barriers where a thread may wait for another.
int64_t spmm_staged_panels(const SpmmArgs& args, int threads, int64_t columns);

// Order the columns of vector rows for kernels with a window of tiles.
void order_columns(const ReorderArgs& args, ThreadGroup& group);

// Buffer sizes in bytes; all are multiples of 64.
int64_t spmm_panel_bytes(const SpmmArgs& args);
int64_t spmm_row_bytes(const SpmmArgs& args);     // from one quantized column to the next
int64_t spmm_shared_bytes(const SpmmArgs& args);  // panels, quantized columns, their scales
int64_t spmm_local_bytes(const SpmmArgs& args, int64_t scratch_bytes);
int64_t spmm_own_bytes(const SpmmArgs& args, int64_t columns);  // of a panel by one thread; 0: threads share each panel
int64_t sddmm_staged_rows(const SddmmArgs& args, int64_t dot_bytes);
int64_t sddmm_shared_bytes(const SddmmArgs& args, int64_t dot_bytes);
int64_t sddmm_local_bytes(const SddmmArgs& args, int64_t dot_bytes);

// Buffers of an attention in bytes. Shared: those of one matrix, one behind another. Per thread: one each.
struct AttentionSizes {
  int64_t depth;   // of a staged row of Q or K, in digits
  int64_t panels;  // of V
  int64_t keys, key_scales, values, maxima, matrix;         // shared, their sum last
  int64_t matrices;                                         // at once
  int64_t queries, columns, numbers, scores, weights, sums, thread;  // per thread, their sum and scratch last
};
AttentionSizes attention_sizes(const AttentionArgs& args, int64_t columns, int64_t scratch_bytes, int64_t dot_bytes);
int64_t compress_mask_bytes(int64_t columns);
int64_t compress_local_bytes(const CompressArgs& args);
int64_t slice_maxima_bytes(int64_t slices, int64_t real_bytes);  // per thread
int64_t slice_shared_bytes(int64_t slices, int64_t real_bytes, int threads);

// Blocks of the sums over `terms` products, and elements from one row of a block of float64 to the next.
int64_t sum_block(int64_t terms);
int64_t block_pitch(int64_t terms);
int64_t probe_bytes(int64_t rows);        // of probes in float64
int64_t probe_local_bytes(int64_t terms);  // of a converted block
int64_t judge_chunk_rows(int64_t rows);   // rows with sums of their own
int64_t judge_shared_bytes(const JudgeArgs& args);
int64_t bound_shared_bytes(const BoundArgs& args);
int64_t digit_pitch(int64_t inner);  // digits from one staged row to the next
int64_t direct_shared_bytes(int64_t rows);
int64_t direct_local_bytes(int64_t inner);
int64_t staged_bytes(int64_t rows, int64_t inner, int64_t groups);  // rows of digits, with their sums and what is split off
int64_t dense_shared_bytes(const DenseArgs& args, int threads);  // digits, scales and sums of the rows that the threads share

// Ask for pages of 2 MB where there are whole ones: a pass over memory then waits less for addresses.
void ask_for_large_pages(void* memory, int64_t bytes);

// Call body on at most `threads` threads, the caller included, with 64-byte aligned buffers.
void run_thread_group(int threads, int64_t shared_bytes, int64_t local_bytes, void (*body)(const void*, ThreadGroup&),
                      const void* args);
bool is_openmp_ready();        // whether it would use the threads of torch's OpenMP, which wake at once
bool want_openmp(bool value);  // whether it may; returns the value before

}  // namespace magicube
