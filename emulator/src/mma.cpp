// Matrix instructions of a warp: ldmatrix, stmatrix and mma.sync.
#include "internal.h"
#include "numbers.h"

static void need_all_lanes(EmuFiber** lanes, const char* what) {
  for (int i = 0; i < 32; i++)
    if (!lanes[i]) emu_fail("%s without lane %d", what, i);
}

// --- ldmatrix, stmatrix

struct MatrixCall {
  EmuMatrix* m;
  int count, trans;
};
static MatrixCall* matrix_call(EmuFiber* f) { return (MatrixCall*)f->arg; }

// Lanes 8k to 8k + 7 hold the addresses of matrix k's rows; each lane gets two neighbours of a row or column.
static void move_matrices(EmuFiber** lanes, bool store) {
  need_all_lanes(lanes, store ? "stmatrix" : "ldmatrix");
  const MatrixCall* call = matrix_call(lanes[0]);
  for (int k = 0; k < call->count; k++) {
    uint16_t* rows[8];
    for (int r = 0; r < 8; r++) rows[r] = (uint16_t*)matrix_call(lanes[k * 8 + r])->m->at;
    for (int l = 0; l < 32; l++) {
      uint16_t* reg = (uint16_t*)matrix_call(lanes[l])->m->r[k];
      for (int h = 0; h < 2; h++) {
        int across = l % 4 * 2 + h;
        uint16_t& cell = call->trans ? rows[across][l / 4] : rows[l / 4][across];
        if (store) cell = reg[h];
        else reg[h] = cell;
      }
    }
  }
}

static void matrix(const char* what, EmuExec exec, EmuMatrix* m, int count, int trans, int line) {
  emu_cur->line = line;
  if (emu_cur->lane < 8 * count && (uintptr_t)m->at % 16)
    emu_fail("%s: the row at shared address %#lx is not aligned to 16 bytes", what,
             emu_shared_address(emu_cur, m->at));
  MatrixCall call = {m, count, trans};
  emu_warp_collective(what, ~0u, exec, &call, line);
}

static const char LDMATRIX[] = "ldmatrix", STMATRIX[] = "stmatrix", MMA[] = "mma.sync";

extern "C" void emu_ldmatrix(EmuMatrix* m, int count, int trans, int line) {
  matrix(LDMATRIX, [](EmuFiber** lanes) { move_matrices(lanes, false); }, m, count, trans, line);
}
extern "C" void emu_stmatrix(EmuMatrix* m, int count, int trans, int line) {
  matrix(STMATRIX, [](EmuFiber** lanes) { move_matrices(lanes, true); }, m, count, trans, line);
}

// --- mma.sync

constexpr int MOST_K = 64;
struct MmaTile {
  alignas(64) float a[16][MOST_K], b[MOST_K][8], c[16][8];
};

static EmuMma* mma_of(EmuFiber* f) { return (EmuMma*)f->arg; }

static void gather(EmuFiber** lanes, MmaTile& tile) {
  const EmuMma* first = mma_of(lanes[0]);
  int width = emu_width(first->type_a), per_register = 4 / width, step = 4 * per_register;
  int b_registers = first->k * 8 * width / 4 / 32, a_registers = 2 * b_registers;
  bool integer = first->type_a >= EMU_S8;
  for (int l = 0; l < 32; l++) {
    const EmuMma* m = mma_of(lanes[l]);
    int row = l / 4, x = l % 4 * per_register;
    for (int r = 0; r < a_registers; r++)
      for (int i = 0; i < per_register; i++)
        tile.a[row + r % 2 * 8][r / 2 * step + x + i] = emu_element(*m->a[r], i, m->type_a);
    for (int r = 0; r < b_registers; r++)
      for (int i = 0; i < per_register; i++)
        tile.b[r * step + x + i][row] = emu_element(*m->b[r], i, m->type_b);
    for (int i = 0; i < 4; i++) {
      int32_t word;
      memcpy(&word, m->c[i], 4);
      tile.c[row + i / 2 * 8][l % 4 * 2 + i % 2] = integer ? float(word) : *m->c[i];
    }
  }
}

static void multiply_integers(MmaTile& tile, int k) {
  for (int r = 0; r < 16; r++)
    for (int n = 0; n < 8; n++) {
      int64_t sum = 0;
      for (int x = 0; x < k; x++) sum += int64_t(tile.a[r][x]) * int64_t(tile.b[x][n]);
      int32_t out = int32_t(tile.c[r][n]) + int32_t(sum);
      memcpy(&tile.c[r][n], &out, 4);
    }
}

static void multiply(MmaTile& tile, int k) {
  for (int r = 0; r < 16; r++) {
    __m256 sum = _mm256_load_ps(tile.c[r]);
    for (int x = 0; x < k; x++)
      sum = _mm256_fmadd_ps(_mm256_set1_ps(tile.a[r][x]), _mm256_load_ps(tile.b[x]), sum);
    _mm256_store_ps(tile.c[r], sum);
  }
}

static void run_mma(EmuFiber** lanes) {
  need_all_lanes(lanes, "mma.sync");
  static MmaTile tile;
  const EmuMma* first = mma_of(lanes[0]);
  gather(lanes, tile);
  if (first->type_a >= EMU_S8) multiply_integers(tile, first->k);
  else multiply(tile, first->k);
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < 4; i++) *mma_of(lanes[l])->d[i] = tile.c[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2];
}

extern "C" void emu_mma(EmuMma* m, int line) { emu_warp_collective(MMA, ~0u, run_mma, m, line); }
