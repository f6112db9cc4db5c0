// Python bindings of split.hpp, select.hpp and correct.hpp.
#pragma once

#include "calls.hpp"
#include "compensate_args.hpp"

namespace magicube {
namespace {

int split_residual(SplitArgs args, int most_threads) {
  require(args.scale_mode >= kScaleAll && args.scale_mode <= kScaleColumns, "scale_mode must be 0, 1 or 2");
  uint8_t flags = 0;
  args.flags = &flags;
  const int threads = threads_for(2 * kWorkPerEntry * args.x.rows * args.x.columns, most_threads);
  run_kernel<&Engine::split_residual>(args, threads, split_shared_bytes(args), split_local_bytes(args));
  return flags;
}

void magnitude_sums(const MagnitudeArgs& args, int most_threads) {
  run_kernel<&Engine::magnitude_sums>(args, threads_for(kWorkPerMaskEntry * args.x.rows * args.x.columns, most_threads), 0, 0);
}

void select_entries(const SelectArgs& args, int most_threads) {
  require(args.vector_length >= 1 && args.vector_length <= kMaxVector, "vector_length must be in [1, 32]");
  require(kMaxVector % args.vector_length == 0, "vector_length must divide 32");
  const int threads = threads_for(kWorkPerMaskEntry * args.x.rows * args.x.columns, most_threads);
  run_kernel<&Engine::select_entries>(args, threads, 0, select_local_bytes(args));
}

void correct(CorrectArgs args, int most_threads) {
  const auto& a = args.product.a;
  require(args.row_step == 1 || args.column_step == 1, "rows or columns of the output must be contiguous");
  require(a.columns_total < kMaxColumns && a.digits() == 1 && args.product.b.digits() == 1, "operands must have one digit");
  const int threads = threads_for(a.plane_bytes * args.product.n, most_threads);
  const Engine& engine = selected();
  args.product.parts = spmm_panel_parts(args.product, engine.spmm_parts);
  args.product.staged_panels = spmm_staged_panels(args.product, threads, engine.spmm_columns * args.product.parts);
  run_kernel<&Engine::correct>(args, threads, spmm_shared_bytes(args.product), correct_local_bytes(args, engine.spmm_scratch_bytes));
}

FloatMatrix float_matrix(uintptr_t data, int64_t rows, int64_t columns, int64_t row_elements) {
  return {pointer<const float>(data), rows, columns, row_elements};
}

void bind_compensation(nb::module_& m) {
  using namespace nb::literals;
  m.def("split_residual", [](uintptr_t x, int64_t rows, int64_t columns, int64_t row_elements, uintptr_t leading, uintptr_t residual,
                             uintptr_t scales, uintptr_t sums, double high, bool truncate, int scale_mode, int threads) {
    return split_residual({float_matrix(x, rows, columns, row_elements), pointer<int8_t>(leading), pointer<int8_t>(residual),
                           pointer<double>(scales), pointer<double>(sums), nullptr, high, truncate, scale_mode}, threads);
  }, "x"_a, "rows"_a, "columns"_a, "row_elements"_a, "leading"_a, "residual"_a, "scales"_a, "sums"_a, "high"_a, "truncate"_a,
     "scale_mode"_a, "threads"_a);
  m.def("magnitude_sums", [](uintptr_t x, int64_t rows, int64_t columns, int64_t row_elements, uintptr_t row_sums,
                             uintptr_t column_sums, int threads) {
    magnitude_sums({float_matrix(x, rows, columns, row_elements), pointer<double>(row_sums), pointer<double>(column_sums)}, threads);
  }, "x"_a, "rows"_a, "columns"_a, "row_elements"_a, "row_sums"_a, "column_sums"_a, "threads"_a);
  m.def("count_entries", [](uintptr_t x, int64_t rows, int64_t columns, int64_t row_elements, uintptr_t levels, bool one_level,
                            bool is_signed, bool across, int vector_length, uintptr_t lengths, uintptr_t largest, int threads) {
    select_entries({float_matrix(x, rows, columns, row_elements), pointer<const float>(levels), one_level, is_signed, across,
                    vector_length, pointer<int64_t>(lengths), pointer<float>(largest), nullptr, false, false, 16, nullptr, nullptr,
                    nullptr, nullptr}, threads);
  }, "x"_a, "rows"_a, "columns"_a, "row_elements"_a, "levels"_a, "one_level"_a, "is_signed"_a, "across"_a, "vector_length"_a,
     "lengths"_a, "largest"_a, "threads"_a);
  m.def("fill_entries", [](uintptr_t x, int64_t rows, int64_t columns, int64_t row_elements, uintptr_t levels, bool one_level,
                           bool is_signed, bool across, int vector_length, uintptr_t scales, bool one_scale, bool truncate, int stride,
                           uintptr_t row_start, uintptr_t out_columns, uintptr_t out_values, uintptr_t row_sums, int threads) {
    require(stride == 16 || stride == 32 || stride == 64, "stride must be 16, 32 or 64");
    select_entries({float_matrix(x, rows, columns, row_elements), pointer<const float>(levels), one_level, is_signed, across,
                    vector_length, nullptr, nullptr, pointer<const double>(scales), one_scale, truncate, stride,
                    pointer<const int64_t>(row_start), pointer<int32_t>(out_columns), pointer<int8_t>(out_values),
                    pointer<int64_t>(row_sums)}, threads);
  }, "x"_a, "rows"_a, "columns"_a, "row_elements"_a, "levels"_a, "one_level"_a, "is_signed"_a, "across"_a, "vector_length"_a,
     "scales"_a, "one_scale"_a, "truncate"_a, "stride"_a, "row_start"_a, "out_columns"_a, "out_values"_a, "row_sums"_a, "threads"_a);
  m.def("correct", [](const Sparse& a, const Operand& b, const GivenScales& scales, uintptr_t out, int64_t row_step,
                      int64_t column_step, int64_t n, int threads) {
    const RepeatedScales repeated(scales, a.rows, n);
    require(scales.rows != nullptr && scales.columns != nullptr, "both scales must be given");
    if (a.rows == 0 || n == 0) return;
    correct({{a, b, repeated, nullptr, Out::kFloat32, n, 1, {}, 1, 1}, pointer<float>(out), row_step, column_step}, threads);
  }, "a"_a, "b"_a, "scales"_a, "out"_a, "row_step"_a, "column_step"_a, "n"_a, "threads"_a);
}

}  // namespace
}  // namespace magicube
