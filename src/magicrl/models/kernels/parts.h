// Functions of other files that `step.cpp` calls. Those files include this one, so that a compiler compares both.

#pragma once

#include "vectors.h"

extern "C" {
void attend(int, void*, const void*, int64_t, const void*, const void*, int64_t, int64_t, const void*, const void*, int64_t,
            const void*, const void*, int64_t, const int64_t*, const int64_t*, int64_t, int64_t, const int64_t*,
            const int64_t*, const int64_t*, int64_t, int64_t, int64_t, float, int);
void gated(int, void*, const void*, const void*, int64_t, int64_t, int64_t, int);
void multiply_packed(bf16*, const bf16*, const uint32_t*, const bf16*, const bf16*, int64_t, int64_t, int64_t, int);
void multiply_rows(float*, const float*, const float*, int64_t, int64_t, int64_t, int);
void normalise(int, void*, const void*, const void*, int64_t, int64_t, float, int);
void rotate(int, void*, int64_t, const void*, int64_t, const void*, const void*, int64_t, int64_t, int64_t, int);
}
