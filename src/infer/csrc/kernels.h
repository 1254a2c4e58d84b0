// The functions of the library that other files of it call; where they are defined says what they do.
#pragma once

#include <cstdint>

extern "C" {
void infer_linear(void* handle, const uint16_t* x, long x_stride, const uint16_t* residual, char* y,
                  long M, int threads);
void infer_attention_attend(void* engine, int window, void* keys, void* values, const void* q,
                            const void* k, const void* v, void* out, long q_stride, long k_stride,
                            long v_stride, const float* cos, const float* sin, const float* q_norm,
                            const float* k_norm, float eps);
}
