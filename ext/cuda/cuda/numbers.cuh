// Numbers of 16 and 32 bits as float32 and back, and several of them read at a time.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "launch.h"

namespace colofunc {

__device__ __forceinline__ float widened(float x) {
  return x;
}
__device__ __forceinline__ float widened(__half x) {
  return __half2float(x);
}
__device__ __forceinline__ float widened(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

template <class T>
__device__ __forceinline__ T rounded(float x);
template <>
__device__ __forceinline__ float rounded<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half rounded<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 rounded<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// COUNT elements that are read or written by one instruction, where they are aligned.
template <class T, int COUNT>
struct alignas(sizeof(T) * COUNT) Several {
  T values[COUNT];
};

inline bool aligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Calls start(T()) with the type that `kind` says.
template <class Start>
cudaError_t by_kind(Kind kind, const Start& start) {
  switch (kind) {
    case Kind::FLOAT: return start(float());
    case Kind::HALF: return start(__half());
    case Kind::BFLOAT16: return start(__nv_bfloat16());
  }
  return cudaErrorInvalidValue;
}

// Multiprocessors of the current device.
inline cudaError_t multiprocessors(int* count) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace colofunc
