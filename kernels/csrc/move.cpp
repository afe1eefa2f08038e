// Accepted draft nodes move to where plain decoding would have put them, in all layers at once.

#include <vector>

#include "cache.h"

// caches[layer] [num_blocks, 2, num_kv_heads, block_size, head_size]: K and V of slot src[i] are copied to dst[i], as
// if all at once. Returns the first i whose slots lie outside, having changed nothing, or -1.
extern "C" int64_t tandem_move_slots(void* const* caches, int32_t num_layers, const int64_t* src, const int64_t* dst,
                                     int64_t count, int64_t num_slots, int32_t num_kv_heads, int32_t head_size,
                                     int32_t block_size, int32_t dtype, int32_t interleaved) {
  for (int64_t i = 0; i < count; ++i)
    if (src[i] < 0 || src[i] >= num_slots || dst[i] < 0 || dst[i] >= num_slots) return i;
  const HeadShape shape = {block_size, head_size, (DType)dtype, interleaved != 0};
  const int64_t row = int64_t(head_size) * bytes_of(shape.dtype);
  std::vector<char> rows(count * num_kv_heads * 2 * row);
  auto head = [&](void* cache, int64_t slot, int part, int h) {
    return (char*)cache + ((slot / block_size * 2 + part) * num_kv_heads + h) * shape.bytes();
  };
  for (int n = 0; n < num_layers; ++n) {
    char* at = rows.data();
    for (int64_t i = 0; i < count; ++i)
      for (int h = 0; h < num_kv_heads; ++h, at += 2 * row) {
        shape.get_key(head(caches[n], src[i], 0, h), int(src[i] % block_size), at);
        shape.get_value(head(caches[n], src[i], 1, h), int(src[i] % block_size), at + row);
      }
    at = rows.data();
    for (int64_t i = 0; i < count; ++i)
      for (int h = 0; h < num_kv_heads; ++h, at += 2 * row) {
        shape.put_key(head(caches[n], dst[i], 0, h), int(dst[i] % block_size), at);
        shape.put_value(head(caches[n], dst[i], 1, h), int(dst[i] % block_size), at + row);
      }
  }
  return -1;
}
