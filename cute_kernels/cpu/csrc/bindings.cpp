// Python bindings. Python checks user arguments; sizes that would cause out-of-bounds reads are checked here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "calls.hpp"
#include "compensate_bindings.hpp"

using namespace nb::literals;

NB_MODULE(_engine, m) {
  using namespace magicube;
  bind_compensation(m);
  // What is alive when a process ends is no leak of this module: torch.compile holds its models until then.
  nb::set_leak_warnings(false);
  m.def("isa", [] { return std::string(selected().name); });
  m.def("reads_masks", [] { return reads_masks(); });
  m.def("panel_columns", [] { return selected().spmm_columns; });
  // Returns the value before. Tests start threads for little work.
  m.def("set_serial_work", [](int64_t work) { return std::exchange(serial_work, work); }, "work"_a);
  m.def("want_openmp", &want_openmp, "value"_a);  // likewise
  m.def("isas", [] {
    std::vector<std::string> names;
    for (const Engine* engine : usable()) names.emplace_back(engine->name);
    return names;
  });
  m.def("read_tensors", [](nb::handle type) { return tensors.open(type.ptr()); }, "type"_a);
  m.def("scan", [](const nb::dict& attributes, const nb::tuple& stamp, int64_t rows, int64_t columns_total, int64_t vector_length,
                   int64_t stride, int64_t bits, bool is_signed) {
    return scan(selected(), attributes, stamp, rows, columns_total, vector_length, stride, bits, is_signed);
  }, "attributes"_a, "stamp"_a, "rows"_a, "columns_total"_a, "vector_length"_a, "stride"_a, "bits"_a,
        "is_signed"_a);
  nb::class_<Operand>(m, "Operand")
      .def("__init__", [](Operand* self, uintptr_t data, int64_t batch_bytes, int64_t run_bytes, bool runs_along_inner,
                          int bits, bool is_signed) {
        new (self) Operand{pointer<const uint8_t>(data), batch_bytes, run_bytes, runs_along_inner, bits, is_signed};
      }, "data"_a, "batch_bytes"_a, "run_bytes"_a, "runs_along_inner"_a, "bits"_a, "is_signed"_a);
  nb::class_<GivenScales>(m, "Scales")
      .def("__init__", [](GivenScales* self, uintptr_t rows, uintptr_t columns, uintptr_t bias, int64_t row_batch,
                          int64_t column_batch, bool one_row, bool one_column) {
        new (self) GivenScales{{pointer<const float>(rows), pointer<const float>(columns), pointer<const float>(bias),
                                row_batch, column_batch}, one_row, one_column};
      }, "rows"_a, "columns"_a, "bias"_a, "row_batch"_a, "column_batch"_a, "one_row"_a = false, "one_column"_a = false);
  nb::class_<Sparse>(m, "Sparse")
      .def("__init__", [](Sparse* self, uintptr_t row_start, uintptr_t row_end, uintptr_t columns, uintptr_t planes,
                          uintptr_t row_sums, int64_t plane_bytes, int64_t vector_rows, int64_t rows,
                          int64_t columns_total, int vector_length, int stride, int bits, bool is_signed, uintptr_t masks) {
        new (self) Sparse{pointer<const int64_t>(row_start), pointer<const int64_t>(row_end),
                          pointer<const int32_t>(columns), pointer<const uint8_t>(planes),
                          pointer<const int64_t>(row_sums), plane_bytes, vector_rows, rows, columns_total,
                          vector_length, stride, bits, is_signed, pointer<const uint64_t>(masks)};
      }, "row_start"_a, "row_end"_a, "columns"_a, "planes"_a, "row_sums"_a, "plane_bytes"_a, "vector_rows"_a, "rows"_a,
         "columns_total"_a, "vector_length"_a, "stride"_a, "bits"_a, "is_signed"_a, "masks"_a);
  m.def("spmm", [](const Sparse& a, const Operand& b, const GivenScales& scales, uintptr_t out,
                   int out_type, int64_t n, int64_t batch, int threads) {
    const RepeatedScales repeated(scales, a.rows, n);
    spmm(SpmmArgs{a, b, repeated, pointer<void>(out), static_cast<Out>(out_type), n, batch, {}, 1, 1}, threads);
  }, "a"_a, "b"_a, "scales"_a, "out"_a, "out_type"_a, "n"_a, "batch"_a, "threads"_a);
  m.def("spmm_transposed", [](uintptr_t offsets, uintptr_t blocks, uintptr_t values, uintptr_t b, uintptr_t out, int64_t rows,
                              int64_t inner, int64_t n, int64_t batch, int vector_length, bool a_signed, bool b_signed,
                              int64_t vectors, int threads) {
    spmm_transposed(TransposedArgs{pointer<const int64_t>(offsets), pointer<const int32_t>(blocks), pointer<const uint8_t>(values),
                                   pointer<const uint8_t>(b), pointer<int32_t>(out), rows, inner, n, batch, 0, vector_length,
                                   a_signed, b_signed}, vectors, threads);
  }, "offsets"_a, "blocks"_a, "values"_a, "b"_a, "out"_a, "rows"_a, "inner"_a, "n"_a, "batch"_a, "vector_length"_a, "a_signed"_a,
     "b_signed"_a, "vectors"_a, "threads"_a);
  m.def("sparse_linear", [](const Sparse& a, uintptr_t x, int64_t row_elements, uintptr_t x_scale, double low, double high,
                            const GivenScales& scales, int64_t rows, uintptr_t out, int out_type, int threads, bool turned,
                            int x_type) {
    const DenseLeft columns{nullptr, pointer<const void>(x), row_elements, pointer<const float>(x_scale), low, high, nullptr,
                            real_type(x_type)};
    const RepeatedScales repeated(scales, a.rows, rows);
    spmm(SpmmArgs{a, {nullptr, 0, 0, true, 8, true}, repeated, pointer<void>(out), static_cast<Out>(out_type), rows, 1, columns, 1, 1,
                  turned}, threads);
  }, "a"_a, "x"_a, "row_elements"_a, "x_scale"_a, "low"_a, "high"_a, "scales"_a, "rows"_a, "out"_a, "out_type"_a, "threads"_a,
     "turned"_a = false, "x_type"_a = static_cast<int>(Out::kFloat32));
  nb::class_<PreparedSddmm>(m, "Sddmm")  // all but what changes from call to call
      .def("__init__", [](PreparedSddmm* self, const Operand& x, const Operand& y, uintptr_t row_start, uintptr_t row_end,
                          uintptr_t columns, const GivenScales& scales, int64_t out_batch, int out_type, int64_t vector_rows,
                          int64_t rows, int64_t n, int64_t inner, int64_t batch, int vector_length, int stride) {
        new (self) PreparedSddmm{{x, y, pointer<const int64_t>(row_start), pointer<const int64_t>(row_end),
                                  pointer<const int32_t>(columns), scales, nullptr, out_batch, static_cast<Out>(out_type),
                                  vector_rows, rows, n, inner, batch, vector_length, stride}, scales};
      }, "x"_a, "y"_a, "row_start"_a, "row_end"_a, "columns"_a, "scales"_a, "out_batch"_a, "out_type"_a, "vector_rows"_a,
         "rows"_a, "n"_a, "inner"_a, "batch"_a, "vector_length"_a, "stride"_a);
  m.def("sddmm", [](const PreparedSddmm& prepared, uintptr_t x, uintptr_t y, uintptr_t row_scale, uintptr_t col_scale,
                    uintptr_t out, int threads) {
    SddmmArgs args = prepared.args;
    GivenScales scales = prepared.scales;
    scales.rows = pointer<const float>(row_scale), scales.columns = pointer<const float>(col_scale);
    const RepeatedScales repeated(scales, args.rows, args.n);
    args.x.data = pointer<const uint8_t>(x), args.y.data = pointer<const uint8_t>(y);
    args.scales = repeated, args.out = pointer<void>(out);
    sddmm(args, threads);
  }, "prepared"_a, "x"_a, "y"_a, "row_scale"_a, "col_scale"_a, "out"_a, "threads"_a);
  using Steps = std::tuple<int64_t, int64_t, int64_t>;
  nb::class_<AttentionArgs>(m, "Attention")  // all but what changes from call to call
      .def("__init__", [](AttentionArgs* self, Steps q, Steps k, Steps v, uintptr_t row_start, uintptr_t row_end,
                          uintptr_t columns, int64_t bias_matrix, int out_type, int64_t batch, int64_t heads, int64_t patterns,
                          int64_t queries, int64_t keys, int64_t depth, int64_t width, int64_t stored, int64_t longest,
                          int vector_length, int operand_bits, int softmax_bits, double scale, double empty, bool causal) {
        const auto rows = [](const Steps& x) { return FloatRows{nullptr, std::get<0>(x), std::get<1>(x), std::get<2>(x)}; };
        new (self) AttentionArgs{rows(q), rows(k), rows(v), pointer<const int64_t>(row_start), pointer<const int64_t>(row_end),
                                 pointer<const int32_t>(columns), nullptr, bias_matrix, nullptr, nullptr,
                                 static_cast<Out>(out_type), batch, heads, patterns, queries, keys, depth, width, stored, longest,
                                 vector_length, operand_bits, softmax_bits, static_cast<float>(scale),
                                 static_cast<float>(empty), causal};
      }, "q"_a, "k"_a, "v"_a, "row_start"_a, "row_end"_a, "columns"_a, "bias_matrix"_a, "out_type"_a, "batch"_a, "heads"_a,
         "patterns"_a, "queries"_a, "keys"_a, "depth"_a, "width"_a, "stored"_a, "longest"_a, "vector_length"_a, "operand_bits"_a,
         "softmax_bits"_a, "scale"_a, "empty"_a, "causal"_a);
  m.def("attention", [](const AttentionArgs& prepared, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t bias, uintptr_t out,
                        uintptr_t lse, int threads) {
    AttentionArgs args = prepared;
    args.q.data = pointer<const float>(q), args.k.data = pointer<const float>(k), args.v.data = pointer<const float>(v);
    args.bias = pointer<const float>(bias), args.out = pointer<void>(out), args.lse = pointer<float>(lse);
    attention(args, threads);
  }, "prepared"_a, "q"_a, "k"_a, "v"_a, "bias"_a, "out"_a, "lse"_a, "threads"_a);
  m.def("quantize", [](uintptr_t x, uintptr_t out, uintptr_t scale, int64_t rows,
                       int64_t columns, int64_t row_elements, int64_t out_row_bytes, int bits, bool is_double,
                       bool is_signed, bool truncate, bool given_scale, int scale_mode, int threads) {
    return quantize(QuantizeArgs{pointer<const void>(x), pointer<void>(out), pointer<void>(scale), nullptr, rows,
                                       columns, row_elements, out_row_bytes, bits, is_double, is_signed, truncate,
                                       given_scale, scale_mode}, threads);
  }, "x"_a, "out"_a, "scale"_a, "rows"_a, "columns"_a, "row_elements"_a, "out_row_bytes"_a, "bits"_a,
     "is_double"_a, "is_signed"_a, "truncate"_a, "given_scale"_a, "scale_mode"_a, "threads"_a);
  m.def("digits", [](uintptr_t x, uintptr_t planes, uintptr_t scale, int64_t rows,
                     int64_t columns, int64_t row_elements, int64_t out_row_bytes, int64_t plane_bytes, int count,
                     bool exact, double high, float radix, float ahead0, float ahead1, bool power, bool truncate,
                     double limit, int scale_mode, int threads) {
    return digits(DigitsArgs{pointer<const float>(x), pointer<int8_t>(planes), pointer<void>(scale), nullptr,
                                   rows, columns, row_elements, out_row_bytes, plane_bytes, count, exact, high, radix,
                                   {ahead0, ahead1}, power, truncate, limit, scale_mode}, threads);
  }, "x"_a, "planes"_a, "scale"_a, "rows"_a, "columns"_a, "row_elements"_a, "out_row_bytes"_a,
     "plane_bytes"_a, "count"_a, "exact"_a, "high"_a, "radix"_a, "ahead0"_a, "ahead1"_a, "power"_a, "truncate"_a,
     "limit"_a, "scale_mode"_a, "threads"_a);
  m.def("compress", [](uintptr_t mask, uintptr_t values, int64_t rows, int64_t columns,
                       int64_t mask_row, int64_t values_row_bytes, int element_bytes, int vector_length, int stride,
                       uintptr_t lengths, uintptr_t row_start, uintptr_t out_columns, uintptr_t out_values,
                       int threads) {
    compress(CompressArgs{pointer<const uint8_t>(mask), pointer<const uint8_t>(values), rows, columns, mask_row,
                                values_row_bytes, element_bytes, vector_length, stride, pointer<int64_t>(lengths),
                                pointer<const int64_t>(row_start), pointer<int32_t>(out_columns),
                                pointer<uint8_t>(out_values)}, threads);
  }, "mask"_a, "values"_a, "rows"_a, "columns"_a, "mask_row"_a, "values_row_bytes"_a, "element_bytes"_a,
     "vector_length"_a, "stride"_a, "lengths"_a, "row_start"_a, "out_columns"_a, "out_values"_a, "threads"_a);
  nb::class_<RealMatrix>(m, "RealMatrix")
      .def("__init__", [](RealMatrix* self, uintptr_t data, int64_t rows, int64_t columns, int64_t stride, bool is_double,
                          bool column_major) {
        new (self) RealMatrix{pointer<const void>(data), rows, columns, stride, is_double, column_major};
      }, "data"_a, "rows"_a, "columns"_a, "stride"_a, "is_double"_a, "column_major"_a);
  m.def("probe_right", [](const RealMatrix& b, uintptr_t w, uintptr_t wbar, uintptr_t products, uintptr_t bounds, int threads) {
    probe_right(ProbeArgs{b, pointer<const float>(w), pointer<const double>(wbar), pointer<double>(products),
                          pointer<double>(bounds)}, threads);
  }, "b"_a, "w"_a, "wbar"_a, "products"_a, "bounds"_a, "threads"_a);
  m.def("judge", [](const RealMatrix& a, uintptr_t products, uintptr_t bounds, const RealMatrix& c, uintptr_t w,
                    uintptr_t wbar, uintptr_t gram, int threads) {
    JudgeSums sums;
    judge(JudgeArgs{a, c, pointer<const double>(products), pointer<const double>(bounds), pointer<const float>(w),
                    pointer<const double>(wbar), &sums}, threads);
    std::memcpy(pointer<void>(gram), sums.gram, sizeof sums.gram);
    return std::make_tuple(sums.product, sums.claimed, sums.norm, sums.a_bound, sums.c_bound);
  }, "a"_a, "products"_a, "bounds"_a, "c"_a, "w"_a, "wbar"_a, "gram"_a, "threads"_a);
  m.def("bound_sums", [](uintptr_t a, int64_t a_stride, bool a_columns, uintptr_t b, int64_t b_stride, bool b_columns, uintptr_t c,
                         int64_t rows, int64_t inner, int64_t columns, uintptr_t w, int threads) {
    BoundSums sums;
    bound_sums(BoundArgs{{pointer<const void>(a), rows, inner, a_stride, false, a_columns},
                         {pointer<const void>(b), inner, columns, b_stride, false, b_columns},
                         {pointer<const void>(c), rows, columns, columns, false, false}, pointer<const double>(w), &sums}, threads);
    return std::make_tuple(sums.a, sums.b, sums.c, sums.error);
  }, "a"_a, "a_stride"_a, "a_columns"_a, "b"_a, "b_stride"_a, "b_columns"_a, "c"_a, "rows"_a, "inner"_a, "columns"_a, "w"_a,
     "threads"_a);
  m.def("pack_digits", [](uintptr_t digits, int64_t rows, int64_t columns, int64_t row_elements, int64_t column_elements,
                          uintptr_t packed, uintptr_t column_sums, int threads) {
    require(row_elements == 1 || column_elements == 1, "rows or columns must be contiguous");
    ask_for_large_pages(pointer<void>(packed), (columns + kPanel - 1) / kPanel * kPanel * ((rows + kQuad - 1) / kQuad * kQuad));
    pack_digits(PackArgs{pointer<const int8_t>(digits), rows, columns, row_elements, column_elements, pointer<int8_t>(packed),
                         pointer<int32_t>(column_sums)}, threads);
  }, "digits"_a, "rows"_a, "columns"_a, "row_elements"_a, "column_elements"_a, "packed"_a, "column_sums"_a, "threads"_a);
  nb::class_<PackedRight>(m, "PackedRight")
      .def("__init__", [](PackedRight* self, uintptr_t packed, uintptr_t column_sums, int64_t inner, int64_t n, bool nibbles,
                          int64_t group, uintptr_t group_scales, uintptr_t group_minima) {
        require(packed % 64 == 0 && column_sums % 64 == 0, "packed digits must be aligned to 64 bytes");
        require(group >= 0 && group % 8 == 0, "group must be a multiple of 8");
        new (self) PackedRight{pointer<const int8_t>(packed), pointer<const int32_t>(column_sums), inner, n, nibbles, group,
                               pointer<const float>(group_scales), pointer<const float>(group_minima)};
      }, "packed"_a, "column_sums"_a, "inner"_a, "n"_a, "nibbles"_a, "group"_a = 0, "group_scales"_a = 0, "group_minima"_a = 0);
  m.def("dense", [](const PackedRight& right, uintptr_t a, int64_t row_elements, const GivenScales& scales, bool columns_first,
                    int64_t rows, uintptr_t out, int64_t row_step, int64_t column_step, int out_type, int threads, bool adds) {
    const RepeatedScales repeated(scales, rows, right.n);
    require(!adds || static_cast<Out>(out_type) == Out::kFloat32, "only float32 results are added");
    dense(DenseArgs{right, {pointer<const int8_t>(a), nullptr, row_elements, nullptr, 0.0, 0.0}, repeated, columns_first, rows,
                    row_step, column_step, pointer<void>(out), static_cast<Out>(out_type), adds}, threads);
  }, "right"_a, "a"_a, "row_elements"_a, "scales"_a, "columns_first"_a, "rows"_a, "out"_a, "row_step"_a, "column_step"_a,
     "out_type"_a, "threads"_a, "adds"_a = false);
  m.def("linear", [](const PackedRight& right, uintptr_t x, int64_t row_elements, uintptr_t x_scale, double low, double high,
                     const GivenScales& scales, int64_t rows, uintptr_t out, int64_t row_step, int64_t column_step, int out_type,
                     int threads, uintptr_t factors, int activation, int x_type) {
    require(activation >= 0 && activation <= static_cast<int>(Activation::kSilu), "no such activation");
    const RepeatedScales repeated(scales, rows, right.n);
    dense(DenseArgs{right, {nullptr, pointer<const void>(x), row_elements, pointer<const float>(x_scale), low, high,
                            pointer<const float>(factors), real_type(x_type)}, repeated,
                    true, rows, row_step, column_step, pointer<void>(out), static_cast<Out>(out_type), false,
                    static_cast<Activation>(activation)}, threads);
  }, "right"_a, "x"_a, "row_elements"_a, "x_scale"_a, "low"_a, "high"_a, "scales"_a, "rows"_a, "out"_a, "row_step"_a,
     "column_step"_a, "out_type"_a, "threads"_a, "factors"_a = 0, "activation"_a = 0,
     "x_type"_a = static_cast<int>(Out::kFloat32));
  nb::class_<IntegerLinear>(m, "IntegerLinear")
      .def("__init__", [](IntegerLinear* self, const Sparse& a, int64_t rows, int64_t row_elements, bool given_scale, int out_type) {
        new (self) IntegerLinear{row_quantization(rows, a.columns_total, row_elements, given_scale), a, {}, false,
                                 static_cast<Out>(out_type)};
      }, "a"_a, "rows"_a, "row_elements"_a, "given_scale"_a, "out_type"_a)
      .def("__init__", [](IntegerLinear* self, const PackedRight& right, int64_t rows, int64_t row_elements, bool given_scale,
                          int out_type) {
        new (self) IntegerLinear{row_quantization(rows, right.inner, row_elements, given_scale), {}, right, true,
                                 static_cast<Out>(out_type)};
      }, "right"_a, "rows"_a, "row_elements"_a, "given_scale"_a, "out_type"_a);
  m.def("integer_linear", [](const IntegerLinear& prepared, uintptr_t x, uintptr_t ints, uintptr_t x_scale, uintptr_t scale,
                             bool one_scale, uintptr_t bias, uintptr_t out, int threads) {
    QuantizeArgs args = prepared.x;
    args.x = pointer<const void>(x), args.out = pointer<void>(ints), args.scale = pointer<void>(x_scale);
    prepared.run(args, pointer<const float>(scale), one_scale, pointer<const float>(bias), pointer<void>(out), threads);
  }, "prepared"_a, "x"_a, "ints"_a, "x_scale"_a, "scale"_a, "one_scale"_a, "bias"_a, "out"_a, "threads"_a);
  m.def("probe_digits", [](uintptr_t b, uintptr_t digits, uintptr_t scale, int64_t rows, int64_t columns, uintptr_t w,
                           uintptr_t wbar, uintptr_t products, uintptr_t bounds, int threads) {
    probe_digits(ProbeDigitsArgs{pointer<const float>(b), pointer<const int8_t>(digits), pointer<const float>(scale), rows,
                                 columns, pointer<const double>(w), pointer<const double>(wbar), pointer<double>(products),
                                 pointer<double>(bounds)}, threads);
  }, "b"_a, "digits"_a, "scale"_a, "rows"_a, "columns"_a, "w"_a, "wbar"_a, "products"_a, "bounds"_a, "threads"_a);
  nb::class_<DirectRight>(m, "DirectRight")
      .def("__init__", [](DirectRight* self, uintptr_t packed, uintptr_t column_sums, uintptr_t col_scale, uintptr_t vectors,
                          uintptr_t bounds, double unit, double largest_scale, int64_t inner, int64_t n) {
        require(packed % 64 == 0 && column_sums % 64 == 0, "packed digits must be aligned to 64 bytes");
        new (self) DirectRight{pointer<const int8_t>(packed), pointer<const int32_t>(column_sums),
                               pointer<const float>(col_scale), pointer<const float>(vectors), pointer<const float>(bounds),
                               unit, largest_scale, inner, n};
      }, "packed"_a, "column_sums"_a, "col_scale"_a, "vectors"_a, "bounds"_a, "unit"_a, "largest_scale"_a, "inner"_a, "n"_a);
  m.def("direct", [](const DirectRight& right, uintptr_t a, int64_t a_stride, int64_t rows, uintptr_t out, int threads) {
    DirectSums sums;
    const DirectArgs args{right, pointer<const float>(a), a_stride, rows, pointer<float>(out), &sums};
    direct(args, threads);
    double energy = 0;
    for (int p = 0; p < kProbes; ++p) energy += sums.gram[p * (kProbes + 1)];
    // bytes cost less than a tensor, and few callers read them
    return nb::make_tuple(energy, error_rounding(sums), sums.norm, epilogue_rounding(args),
                          nb::bytes(reinterpret_cast<const char*>(sums.gram), sizeof sums.gram));
  }, "right"_a, "a"_a, "a_stride"_a, "rows"_a, "out"_a, "threads"_a);
  m.def("spread_slots", [](uintptr_t until, uintptr_t first, uintptr_t order, int64_t rows, int tiles, int group,
                           int window, uintptr_t slots, int64_t columns, int threads) {
    order_columns_checked(ReorderArgs{pointer<const int>(until), pointer<const int64_t>(first),
                                      pointer<const int64_t>(order), rows, tiles, group, window, pointer<int64_t>(slots)}, columns, threads);
  }, "until"_a, "first"_a, "order"_a, "rows"_a, "tiles"_a, "group"_a, "window"_a, "slots"_a,
     "columns"_a, "threads"_a);
}
