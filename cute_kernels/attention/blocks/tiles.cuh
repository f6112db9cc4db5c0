// Quantization of attention's K and V to one byte per entry with scales of tiles of keys, in one kernel.
//
// Formula: q = round(x / scale), scale = amax / (2^(kBits - 1) - 1) over a tile of kKeys keys; a tile of K whose row amaxes
// differ has per-row scales instead.
// Architectures: sm_80 and later.
// Work: a CTA per tile. Pipeline: cp.async brings the tile to shared memory for both passes (amax, integers): all of K and V is
// read once, and many small CTAs keep loads in flight. Scales of matrices need a cluster's barriers and two looks at long ones.
#pragma once

#include "attention/quantize_qkv.cuh"

namespace magicube {

// k, v: (matrices, keys, kHead); key_scales: (matrices, keys); tile_scales: (2, matrices, tiles), of K, 0 where keys have scales of
// their own, then of V.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
attention_tiles(const typename Config::Source* k, const typename Config::Source* v, uint8_t* k_out, uint8_t* v_out,
                float* key_scales, float* tile_scales, int64_t keys, int64_t matrices) {
  using M = MatrixOfRows<Config>;
  using Q = Quantizer<Config>;
  extern __shared__ __align__(16) uint8_t vectors[];
  __shared__ RowMaxima shared[Q::kWarps + 2];
  const uint32_t tiles = uint32_t(keys + Config::kKeys - 1) / Config::kKeys, number = blockIdx.x / tiles;
  const bool of_keys = number < matrices;
  const int64_t matrix = of_keys ? number : number - matrices, first = int64_t{blockIdx.x % tiles} * Config::kKeys;
  const int64_t row = matrix * keys + first, place = row * Config::kHead;
  const int rows = int(min(keys - first, int64_t{Config::kKeys}));
  const M own((of_keys ? k : v) + place, (of_keys ? k_out : v_out) + place, of_keys ? key_scales + row : nullptr,
              shared_address(vectors), rows, 0);
  griddepcontrol_wait();
  own.fetch();
  pdl_launch_dependents();
  const RowMaxima maxima = reduce_in_cluster<Q::kWarps, 1>(own.maxima(of_keys), shared);
  const float scale = scale_of<float, Range<Config>::kHigh>(maxima.absmax);
  // False for NaN.
  const bool alike = !of_keys || __uint_as_float(maxima.absmax) * float(rows) <= kMaxAbsmaxRatio<Config> * maxima.sum;
  if (threadIdx.x == 0) tile_scales[blockIdx.x] = alike ? scale : 0.0f;
  if (alike) own.encode_matrix(maxima.absmax, scale);
  else own.encode_rows();
}

}  // namespace magicube
