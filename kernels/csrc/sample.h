// One token per row of logits; tandem_kernels/draw_tokens.py defines the distribution.
#pragma once

#include <cstdint>

// The largest of size > 0 values: the first of equals, and the first NaN where there is one.
int64_t argmax(const float* row, int64_t size);
