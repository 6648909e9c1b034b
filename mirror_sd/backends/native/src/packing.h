// Weights into the layouts of kernels.h, and single rows back out of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace mirror {

uint16_t to_half(float x);
float from_half(uint16_t h);
uint16_t to_bf16(float x);

// Bytes of a packed matrix.
size_t packed_bytes(Format format, int outputs, int inputs);

// weights: [outputs][inputs]. Returns the matrix's multiplier. `out` has packed_bytes.
float pack(Format format, const float* weights, int outputs, int inputs, int threads, uint8_t* out);

// Output `row` of a packed matrix as floats, `inputs` of them: the embedding of a token.
void unpack_row(const Matrix& matrix, int row, float* out);

}  // namespace mirror
