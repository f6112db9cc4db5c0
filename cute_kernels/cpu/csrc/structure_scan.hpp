// Scan of a sparse matrix's structure, straight from the attributes of its Python object.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <stdexcept>

#include "engine.hpp"

namespace nb = nanobind;

namespace magicube {
namespace {

constexpr int64_t kLockedScan = 1 << 14;  // entries that are scanned in less time than Python's lock takes to change hands

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

// Torch tensors, read without a call of Python: DLPack's C exchange API, in the layout of dlpack.h 1.3.
struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t dtype_code, dtype_bits;
  uint16_t dtype_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DLPackExchangeAPI {
  uint32_t major, minor;
  void* older;
  void* managed[3];
  int (*dltensor_from_py_object)(void* object, DLTensor* out);  // fills `out` with pointers that the object owns
  void* current_work_stream;
};
constexpr int32_t kDLCPU = 1;
constexpr uint8_t kDLInt = 0, kDLUInt = 1;

class TensorReader {
 public:
  // Reads tensors of exactly this type; false if it has no exchange API that this code can use.
  bool open(PyObject* type) {
    PyObject* capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    void* found = capsule == nullptr ? nullptr : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_XDECREF(capsule);
    PyErr_Clear();
    const auto* api = static_cast<const DLPackExchangeAPI*>(found);  // static in torch
    if (api == nullptr || api->major != 1 || api->dltensor_from_py_object == nullptr) return false;
    type_ = type;
    read_ = api->dltensor_from_py_object;
    return true;
  }

  // Fills `out` with a contiguous CPU tensor; false for any other object.
  bool read(PyObject* object, DLTensor* out) const {
    if (type_ == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(object)) != type_) return false;
    if (read_(object, out) != 0) {
      PyErr_Clear();
      return false;
    }
    if (out->device_type != kDLCPU) return false;
    out->data = static_cast<char*>(out->data) + out->byte_offset;
    for (int dim = 0; dim < out->ndim; ++dim) {
      if (out->shape[dim] == 0) return true;
    }
    int64_t contiguous = 1;
    for (int dim = out->ndim - 1; dim >= 0; --dim) {
      if (out->shape[dim] != 1 && out->strides != nullptr && out->strides[dim] != contiguous) return false;
      contiguous *= out->shape[dim];
    }
    return true;
  }

  // As `read`, and `out` has one dimension of elements of `bits` bits.
  bool read_array(PyObject* object, int bits, DLTensor* out) const {
    return read(object, out) && out->ndim == 1 && out->dtype_bits == bits && out->dtype_lanes == 1;
  }

 private:
  PyObject* type_ = nullptr;  // torch.Tensor, which lives as long as the process
  int (*read_)(void*, DLTensor*) = nullptr;
};

TensorReader tensors;

// Whether the structure of a sparse matrix is valid; false too unless `attributes` still holds the tensors of `stamp`,
// each with the size and dtype that a constructor checked. `stamp` has entries (name, tensor, version) of row_start,
// row_end, col_indices, values and scale, or of row_offsets, col_indices, values and scale, or of the first two of those.
bool scan(const Engine& engine, const nb::dict& attributes, const nb::tuple& stamp, int64_t rows, int64_t columns_total,
          int64_t vector_length, int64_t stride, int64_t bits, bool is_signed) {
  if (vector_length < 1 || stride < 1 || (stride & (stride - 1)) != 0) return false;
  PyObject* tensor[5];
  const size_t count = stamp.size();
  require(count == 2 || count == 4 || count == 5, "stamp must have 2, 4 or 5 entries");
  for (size_t i = 0; i < count; ++i) {
    const nb::handle entry = stamp[i];
    require(PyTuple_Check(entry.ptr()) && PyTuple_Size(entry.ptr()) == 3, "stamp must hold tuples of 3");
    tensor[i] = PyTuple_GetItem(entry.ptr(), 1);
    if (PyDict_GetItemWithError(attributes.ptr(), PyTuple_GetItem(entry.ptr(), 0)) != tensor[i]) return false;
  }
  DLTensor start, end, columns, values;
  const int64_t vector_rows = (rows + vector_length - 1) / vector_length;
  const bool offsets = count < 5;
  if (!tensors.read_array(tensor[0], 64, &start) || start.shape[0] != vector_rows + offsets) return false;
  if (!offsets && (!tensors.read_array(tensor[1], 64, &end) || end.shape[0] != vector_rows)) return false;
  if (!tensors.read_array(tensor[offsets ? 1 : 2], 32, &columns)) return false;
  const int64_t padded = columns.shape[0];
  if (bits != 0) {  // (..., padded / stride, V, stride), 4 bits two per byte; or (..., padded, V)
    const int64_t sizes[3] = {padded / stride, vector_length, bits == 4 && !offsets ? stride / 2 : stride};
    const int dims = offsets ? 2 : 3;
    if (!tensors.read(tensor[offsets ? 2 : 3], &values) || values.ndim < dims) return false;
    if (!std::equal(sizes, sizes + dims, values.shape + values.ndim - dims)) return false;
    const bool is_unsigned = bits == 4 && !offsets ? true : !is_signed && bits != 12;  // as STORAGE_DTYPES
    if (values.dtype_bits != (bits > 8 ? 16 : 8) || values.dtype_lanes != 1) return false;
    if (values.dtype_code != (is_unsigned ? kDLUInt : kDLInt)) return false;
  }
  const auto* first = static_cast<const int64_t*>(start.data);
  const Structure structure{first, offsets ? first + 1 : static_cast<const int64_t*>(end.data),
                            static_cast<const int32_t*>(columns.data), vector_rows, padded, columns_total, stride};
  if (padded < kLockedScan) return engine.is_structure_valid(structure);
  nb::gil_scoped_release release;
  return engine.is_structure_valid(structure);
}

}  // namespace
}  // namespace magicube
