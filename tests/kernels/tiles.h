// What AMX does to tiles, in software: so the kernels' code for it runs, slowly, on a CPU without it.
//
// isa/amx.h includes this file where INFER_TILES names it; only test_tiles_in_software.py does so. A tile is 16 rows of
// 64 bytes. What the hardware would refuse ends the process.
//
// Inside a namespace of amx.h, so it includes nothing.

#pragma once

namespace tiles_in_software {

extern "C" long write(int, const void*, unsigned long);  // of the system

struct State {
  TileConfig shape;
  alignas(64) char of[8][16][64] = {};
};
inline State& state() {
  static thread_local State own;
  return own;
}
inline void need(bool holds, const char* what) {
  if (holds) return;
  (void)!write(2, what, std::strlen(what));
  std::abort();
}
inline void load_config(const void* from) {
  state() = {*(const TileConfig*)from};
  const TileConfig& shape = state().shape;
  need(shape.palette == 1, "a configuration that is none");
  for (int i = 0; i < 8; ++i)
    need(shape.rows[i] <= 16 && shape.colsb[i] <= 64 && !shape.rows[i] == !shape.colsb[i], "an impossible shape");
}
inline void store_config(void* to) { *(TileConfig*)to = state().shape; }
inline void release() { state() = {}; }

inline void in_use(int tile) { need(state().shape.palette == 1 && state().shape.rows[tile], "a tile without a shape"); }
inline void zero(int tile) {
  in_use(tile);
  std::memset(state().of[tile], 0, 1024);
}
inline void load(int tile, const void* from, long stride) {
  zero(tile);
  const TileConfig& shape = state().shape;
  for (int r = 0; r < shape.rows[tile]; ++r)
    std::memcpy(state().of[tile][r], (const char*)from + r * stride, shape.colsb[tile]);
}
inline void store(int tile, void* to, long stride) {
  in_use(tile);
  const TileConfig& shape = state().shape;
  for (int r = 0; r < shape.rows[tile]; ++r)
    std::memcpy((char*)to + r * stride, state().of[tile][r], shape.colsb[tile]);
}

// Checks a product's shape; `add_row(m, columns, words)` for each row of the sums.
template <class AddRow>
inline void multiply(int to, int a, int b, AddRow add_row) {
  const TileConfig& shape = state().shape;
  for (int tile : {to, a, b}) in_use(tile);
  need(to != a && to != b && a != b, "one tile twice in a product");
  need(shape.rows[a] == shape.rows[to] && shape.colsb[b] == shape.colsb[to], "a product of another shape");
  need(shape.rows[b] == shape.colsb[a] / 4 && shape.colsb[a] % 4 == 0, "a product's inner size");
  for (int m = 0; m < shape.rows[to]; ++m) add_row(m, shape.colsb[to] / 4, shape.colsb[a] / 4);
}

inline float upper_half(uint32_t bits) {
  bits &= 0xffff0000;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Even and odd products are added up apart, then to each other.
TARGET("avx512f,avx512bw,fma")
[[maybe_unused]] void add_bf16(int to, int a, int b) {
  State& s = state();
  multiply(to, a, b, [&](int m, int columns, int words) {
    float even[16] = {}, odd[16] = {};
    for (int k = 0; k < words; ++k) {
      uint32_t pair, pairs[16];
      std::memcpy(&pair, s.of[a][m] + 4 * k, 4);
      std::memcpy(pairs, s.of[b][k], 64);
      for (int n = 0; n < 16; ++n) {
        even[n] = __builtin_fmaf(upper_half(pair << 16), upper_half(pairs[n] << 16), even[n]);
        odd[n] = __builtin_fmaf(upper_half(pair), upper_half(pairs[n]), odd[n]);
      }
    }
    for (int n = 0; n < columns; ++n) ((float*)s.of[to][m])[n] += even[n] + odd[n];
  });
}

template <class A, class B>
void add_bytes(int to, int a, int b) {
  State& s = state();
  multiply(to, a, b, [&](int m, int columns, int words) {
    int32_t* sums = (int32_t*)s.of[to][m];
    for (int k = 0; k < words; ++k) {
      const A* four = (const A*)s.of[a][m] + 4 * k;
      const B* fours = (const B*)s.of[b][k];
      for (int n = 0; n < columns; ++n)
        for (int i = 0; i < 4; ++i) sums[n] += four[i] * fours[4 * n + i];
    }
  });
}
END_TARGET

}  // namespace tiles_in_software

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbusd
#undef _tile_dpbsud
#define _tile_loadconfig tiles_in_software::load_config
#define _tile_storeconfig tiles_in_software::store_config
#define _tile_release tiles_in_software::release
#define _tile_zero tiles_in_software::zero
#define _tile_loadd tiles_in_software::load
#define _tile_stream_loadd tiles_in_software::load
#define _tile_stored tiles_in_software::store
#define _tile_dpbf16ps tiles_in_software::add_bf16
#define _tile_dpbssd tiles_in_software::add_bytes<int8_t, int8_t>
#define _tile_dpbusd tiles_in_software::add_bytes<uint8_t, int8_t>
#define _tile_dpbsud tiles_in_software::add_bytes<int8_t, uint8_t>
