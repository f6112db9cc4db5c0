// What the instruction-set builds of the CPU engine share: arguments, team of threads, table of entry points.
//
// Each of portable.cpp, avx2.cpp and avx512.cpp compiles the same drivers with its own flags inside an anonymous
// namespace. Those files use no standard-library templates: the linker could otherwise keep the AVX-512 copy of a
// shared template and run it on a machine without AVX-512. Threads and memory therefore live in threads.cpp.
#pragma once

#include <cstdint>

namespace magicube {

constexpr int kPanel = 64;          // columns of the dense operand that are worked on at a time
constexpr int kQuad = 4;            // nonzeros that one 32-bit multiply-accumulate lane takes
constexpr int64_t kMaxColumns = int64_t{1} << 28;  // of the sparse operand: eight times a column fits 32 bits
constexpr int64_t kStreamBytes = 1 << 20;  // an output of this size does not stay in a second-level cache
constexpr int kMaxDigits = 2;
constexpr int kMaxVector = 32;
constexpr int64_t kExactRun = 32768;  // products of two bytes that int32 can sum without overflow
constexpr int64_t kStagedBytes = 256 * 1024;  // staged rows of the SDDMM's right operand

enum class Out : int { kInt32, kInt64, kFloat32, kFloat16, kBFloat16 };

// A dense integer operand. A run is a stretch of elements that are contiguous in memory.
struct Operand {
  const uint8_t* data;
  int64_t batch_bytes;    // from one matrix of the batch to the next
  int64_t run_bytes;      // from one run to the next
  bool runs_along_inner;  // runs go along the inner (reduction) dimension
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

  int digits() const { return bits > 8 ? 2 : 1; }
};

struct Scales {
  const float* left;   // one a row of the output, or null
  const float* right;  // one a column of the output, or null
  const float* bias;   // one a row of the output, or null
  int64_t left_batch;
  int64_t right_batch;
};

struct SpmmArgs {
  Sparse a;
  Operand b;
  Scales scales;
  void* out;  // (batch, rows, n), contiguous
  Out out_type;
  int64_t n;
  int64_t batch;
  int staged_panels;  // panels that the shared buffer has room for: one, or one for each thread
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
  bool exact;      // the rule of double quotients
  double high;     // the integer that the largest magnitude becomes
  float radix;     // steps of the second digit in one of the first
  float ahead[2];  // added before the roundings to the first two of three digits
  bool power;      // scales are powers of two
  bool truncate;   // where exact: digits round toward zero
  double limit;    // where exact: largest digit
  int scale_mode;
};

// Two calls: with `lengths` the kept vectors of each vector row are counted, without they are written.
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

struct SpreadArgs {
  const int* until;      // (rows, tiles, 8): columns of each residue up to and with a tile
  const int64_t* first;  // (rows, 8): where the columns of a residue begin in `order`
  const int64_t* order;  // (vectors,)
  int64_t rows;
  int tiles, group, window;
  int64_t* slots;  // (vectors,)
};

constexpr int kScaleAll = 0, kScaleRows = 1, kScaleColumns = 2;  // one scale, one a row, one a column
constexpr uint8_t kNegative = 1;
constexpr uint8_t kNonFinite = 2;

// The threads of one call. Tickets hand out work in order; a barrier returns them to zero.
class Team {
 public:
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual int64_t ticket() = 0;
  virtual void barrier() = 0;
  virtual uint8_t* shared() const = 0;  // one buffer for all threads
  virtual uint8_t* local() const = 0;   // one buffer a thread

 protected:
  ~Team() = default;
};

struct Engine {
  const char* name;
  void (*spmm)(const SpmmArgs&, Team&);
  void (*sddmm)(const SddmmArgs&, Team&);
  void (*quantize)(const QuantizeArgs&, Team&);
  void (*digits)(const DigitsArgs&, Team&);
  void (*compress)(const CompressArgs&, Team&);
  int64_t spmm_scratch_bytes;  // one a thread, a multiple of 64
};

extern const Engine kPortable;
#ifdef MAGICUBE_X86
extern const Engine kAvx2;
extern const Engine kAvx512;
#endif

// One for each thread where memory allows, else one that the threads share.
int spmm_staged_panels(const SpmmArgs& args, int threads);

// Orders the columns of vector rows for kernels with a window of tiles.
void spread_slots(const SpreadArgs& args, Team& team);

// Buffer sizes in bytes; all are multiples of 64.
int64_t spmm_panel_bytes(const SpmmArgs& args);
int64_t spmm_local_bytes(const SpmmArgs& args, int64_t scratch_bytes);
int64_t sddmm_staged_rows(const SddmmArgs& args);
int64_t sddmm_shared_bytes(const SddmmArgs& args);
int64_t sddmm_local_bytes(const SddmmArgs& args);
int64_t compress_mask_bytes(int64_t columns);
int64_t compress_local_bytes(const CompressArgs& args);
int64_t slice_maxima_bytes(int64_t lines, int64_t real_bytes);  // of one thread
int64_t slice_shared_bytes(int64_t lines, int64_t real_bytes, int threads);

// Calls body on `threads` threads, the caller's among them, with zeroed tickets and 64-byte aligned buffers; on fewer
// where the system has no more threads to give.
void run_team(int threads, int64_t shared_bytes, int64_t local_bytes, void (*body)(const void*, Team&), const void* args);

}  // namespace magicube
