// wgmma.mma_async: products of tiles in shared memory (A also in registers), computed when they are issued.
#include "internal.h"
#include "numbers.h"

constexpr int ROWS = 64, MOST_COLUMNS = 256, MOST_K = 32, ROWS_AT_ONCE = 8;

// --- Operands in shared memory

// swizzle 0: none; 1, 2, 3: pieces of 16 bytes move in lines of 128, 64, 32 bytes.
struct Descriptor {
  unsigned start, leading, stride, swizzle;
  unsigned line_bytes() const { return swizzle ? 256 >> swizzle : 16; }
};

static Descriptor decode(uint64_t d) {
  if (d >> 49 & 7) emu_fail("wgmma: a descriptor with a base offset is not emulated");
  auto bytes = [d](int bit) { return unsigned(d >> bit & 0x3fff) << 4; };
  return {bytes(0), bytes(16), bytes(32), unsigned(d >> 62)};
}

static const char* piece_at(const Descriptor& d, const char* smem, uint64_t address) {
  unsigned bits = d.swizzle == 1 ? 7 : d.swizzle == 2 ? 3 : d.swizzle == 3 ? 1 : 0;
  address ^= (address >> 7 & bits) << 4;
  return smem + (address & 0x3ffff) - EMU_SMEM_BASE;
}

// The 4, 8 or 16 numbers of a piece of 16 bytes.
static inline void widen(const char* from, float* to, int type) {
  if (type == EMU_BF16) {
    __m128i x = _mm_loadu_si128((const __m128i*)from);
    _mm256_storeu_ps(to, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)));
  } else if (type == EMU_F16) {
    _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)));
  } else if (type == EMU_TF32) {
    for (int i = 0; i < 4; i++) {
      uint32_t word;
      memcpy(&word, from + 4 * i, 4);
      to[i] = emu_element(word, 0, type);
    }
  } else {
    const float* table = type == EMU_E4M3 ? emu_fp8_tables().e4m3 : emu_fp8_tables().e5m2;
    for (int i = 0; i < 16; i++) to[i] = table[(uint8_t)from[i]];
  }
}

// An operand of `lines` rows of A, or columns of B, each of k numbers: where it is and how it is stored.
struct Operand {
  uint64_t descriptor;
  const char* smem;
  int lines, k, type;
  bool transposed; // neighbours in memory belong to different lines
};

// Writes it as [line][k], or [k][line] if by_k.
static void gather(const Operand& o, bool by_k, float* out, int pitch) {
  Descriptor d = decode(o.descriptor);
  int width = emu_width(o.type), per_piece = 16 / width, per_row = d.line_bytes() / 2;
  if (o.transposed && width != 2) emu_fail("wgmma: only 16-bit operands can be transposed");
  if (o.transposed && !d.swizzle) emu_fail("wgmma: a transposed operand without swizzle is not emulated");
  alignas(64) float values[16];
  // A piece holds numbers along k, or along the lines if transposed.
  int outer = o.transposed ? o.k : o.lines, inner = o.transposed ? o.lines : o.k;
  bool straight = o.transposed == by_k; // the piece is contiguous in `out`
  for (int i = 0; i < outer; i++)
    for (int x = 0; x < inner; x += per_piece) {
      uint64_t at = d.start + uint64_t(i / 8) * d.stride + (i % 8) * d.line_bytes();
      if (o.transposed) at += uint64_t(x / per_row) * d.leading + (x % per_row) * 2;
      else at += d.swizzle ? x * width : uint64_t(x * width / 16) * d.leading;
      const char* from = piece_at(d, o.smem, at);
      widen(from, straight ? out + i * pitch + x : values, o.type);
      for (int e = 0; e < per_piece && !straight; e++) out[(x + e) * pitch + i] = values[e];
    }
}

// --- Registers

static EmuWgmma* wgmma_of(EmuFiber* f) { return (EmuWgmma*)f->arg; }
// Row of a thread's first registers; the others are 8 below.
static int row_of(int thread) { return thread / 32 * 16 + thread % 32 / 4; }

alignas(64) static float sums[ROWS][MOST_COLUMNS], tile_a[ROWS][MOST_K], tile_b[MOST_K][MOST_COLUMNS];

// Calls f with each register of the accumulator and its place in `sums`.
template <class F> static void for_each_sum(EmuFiber** lanes, int n, F f) {
  for (int t = 0; t < 128; t++) {
    float** d = wgmma_of(lanes[t])->d;
    for (int i = 0; i < n / 2; i++) f(*d[i], sums[row_of(t) + i % 4 / 2 * 8][t % 4 * 2 + i / 4 * 8 + i % 2]);
  }
}

static void gather_registers(EmuFiber** lanes, int step) {
  int type = wgmma_of(lanes[0])->type_a, per_register = 4 / emu_width(type);
  for (int t = 0; t < 128; t++) {
    const uint32_t* a = wgmma_of(lanes[t])->step[step].a;
    for (int r = 0; r < 4; r++)
      for (int i = 0; i < per_register; i++)
        tile_a[row_of(t) + r % 2 * 8][(r / 2 * 4 + t % 4) * per_register + i] = emu_element(a[r], i, type);
  }
}

// --- Products

// sums += tile_a * tile_b, for some rows at once. Columns from n to the next multiple of 16 hold rubbish.
static void multiply_rows(int row, int n, int k) {
  typedef float Vector __attribute__((vector_size(64)));
  constexpr int LANES = 16;
  for (int c = 0; c < n; c += LANES) {
    Vector s[ROWS_AT_ONCE];
    for (int r = 0; r < ROWS_AT_ONCE; r++) s[r] = *(Vector*)&sums[row + r][c];
    for (int x = 0; x < k; x++) {
      Vector b = *(Vector*)&tile_b[x][c];
      for (int r = 0; r < ROWS_AT_ONCE; r++) s[r] += tile_a[row + r][x] * b;
    }
    for (int r = 0; r < ROWS_AT_ONCE; r++) *(Vector*)&sums[row + r][c] = s[r];
  }
}

static void check_descriptors(EmuFiber** lanes, int step) {
  const EmuWgmma* first = wgmma_of(lanes[0]);
  const EmuWgmmaStep& s = first->step[step];
  for (int t = 32; t < 128; t += 32) {
    const EmuWgmmaStep& other = wgmma_of(lanes[t])->step[step];
    if (other.b_desc != s.b_desc || (!first->a_in_registers && other.a_desc != s.a_desc))
      emu_fail("wgmma: the warps of a warpgroup have different descriptors: B %016lx and %016lx",
               (unsigned long)s.b_desc, (unsigned long)other.b_desc);
  }
}

static void run_step(EmuFiber** lanes, int step) {
  const EmuWgmma* m = wgmma_of(lanes[0]);
  const EmuWgmmaStep& s = m->step[step];
  const char* smem = lanes[0]->smem;
  int k = 32 / emu_width(m->type_a);
  check_descriptors(lanes, step);
  if (!s.adds)
    for (int r = 0; r < ROWS; r++) memset(sums[r], 0, m->n * sizeof(float));
  if (m->a_in_registers) gather_registers(lanes, step);
  else gather({s.a_desc, smem, ROWS, k, m->type_a, bool(m->trans_a)}, false, tile_a[0], MOST_K);
  gather({s.b_desc, smem, m->n, k, m->type_b, bool(m->trans_b)}, true, tile_b[0], MOST_COLUMNS);
  if (m->neg_a != m->neg_b)
    for (auto& row : tile_a)
      for (float& x : row) x = -x;
  for (int r = 0; r < ROWS; r += ROWS_AT_ONCE) multiply_rows(r, m->n, k);
}

static void run_wgmma(EmuFiber** lanes) {
  const EmuWgmma* m = wgmma_of(lanes[0]);
  if (m->step[0].adds) for_each_sum(lanes, m->n, [](float& reg, float& sum) { sum = reg; });
  for (int step = 0; step < m->steps; step++) run_step(lanes, step);
  for_each_sum(lanes, m->n, [](float& reg, float& sum) { reg = sum; });
}

extern "C" void emu_wgmma(EmuWgmma* m, int line) {
  static const char WGMMA[] = "wgmma";
  if (m->n % 8 || m->n > MOST_COLUMNS) emu_fail("wgmma of %d columns", m->n);
  emu_group_collective(WGMMA, run_wgmma, m, line);
}
