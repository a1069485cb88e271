// cuBLASLt: products of matrices, stored by columns or rows, with the epilogues that the project uses.
#include "internal.h"
#include "numbers.h"
#include <cmath>
#include <cstdio>
#include <cstdlib>

typedef int Status;
enum { CUBLAS_OK = 0, INVALID = 7, NOT_SUPPORTED = 15 };
#define CUBLAS_API extern "C" __attribute__((visibility("default"))) Status

// cudaDataType
enum Type { F32 = 0, F64 = 1, F16 = 2, I8 = 3, I32 = 10, BF16 = 14, E4M3 = 28, E5M2 = 29 };
static size_t bytes_of(int type) {
  switch (type) {
  case F64:
    return 8;
  case F32:
  case I32:
    return 4;
  case F16:
  case BF16:
    return 2;
  default:
    return 1;
  }
}

struct Layout {
  int type;
  uint64_t rows, cols;
  int64_t ld;
  int by_rows = 0, batch = 1;
  int64_t stride = 0;
  int64_t at(uint64_t r, uint64_t c) const { return by_rows ? int64_t(r) * ld + c : int64_t(c) * ld + r; }
};
struct Desc {
  int compute, scale;
  int transposed[3] = {0, 0, 0};
  uint32_t epilogue = 1;
  void* bias = nullptr;
  int64_t bias_stride = 0;
  int bias_type = -1; // -1: follows D's
  void* aux = nullptr;
  int64_t aux_ld = 0, aux_stride = 0;
  int aux_type = -1;
  float* scales[4] = {}; // of A, B, C, D
};
constexpr int COMPUTE_TF32 = 77;

// --- Handles and attributes

static Status unknown(const char* what, int which) {
  fprintf(stderr, "EMU ERROR: cuBLASLt: %s %d is not emulated\n", what, which);
  return NOT_SUPPORTED;
}

CUBLAS_API cublasLtCreate(void** handle) {
  *handle = (void*)48; // any address but null
  return CUBLAS_OK;
}
CUBLAS_API cublasLtDestroy(void*) { return CUBLAS_OK; }
extern "C" __attribute__((visibility("default"))) size_t cublasLtGetVersion() { return 130000; }

CUBLAS_API cublasLtMatrixLayoutCreate(Layout** l, int type, uint64_t rows, uint64_t cols, int64_t ld) {
  *l = new Layout{type, rows, cols, ld};
  return CUBLAS_OK;
}
CUBLAS_API cublasLtMatrixLayoutDestroy(Layout* l) {
  delete l;
  return CUBLAS_OK;
}
CUBLAS_API cublasLtMatrixLayoutSetAttribute(Layout* l, int which, const void* value, size_t) {
  switch (which) {
  case 0:
    l->type = *(int*)value;
    break;
  case 1:
    l->by_rows = *(int*)value;
    if (l->by_rows > 1) return unknown("order", l->by_rows);
    break;
  case 2:
    l->rows = *(uint64_t*)value;
    break;
  case 3:
    l->cols = *(uint64_t*)value;
    break;
  case 4:
    l->ld = *(int64_t*)value;
    break;
  case 5:
    l->batch = *(int*)value;
    break;
  case 6:
    l->stride = *(int64_t*)value;
    break;
  default:
    return unknown("layout attribute", which);
  }
  return CUBLAS_OK;
}

CUBLAS_API cublasLtMatmulDescCreate(Desc** d, int compute, int scale) {
  *d = new Desc{compute, scale};
  return CUBLAS_OK;
}
CUBLAS_API cublasLtMatmulDescDestroy(Desc* d) {
  delete d;
  return CUBLAS_OK;
}
CUBLAS_API cublasLtMatmulDescSetAttribute(Desc* d, int which, const void* value, size_t) {
  switch (which) {
  case 0:
    d->compute = *(int*)value;
    break;
  case 1:
    d->scale = *(int*)value;
    break;
  case 2:
    return *(int*)value ? unknown("pointer mode", *(int*)value) : CUBLAS_OK;
  case 3:
  case 4:
  case 5:
    d->transposed[which - 3] = *(int*)value;
    break;
  case 7:
    d->epilogue = *(uint32_t*)value;
    break;
  case 8:
    d->bias = *(void**)value;
    break;
  case 10:
    d->bias_stride = *(int64_t*)value;
    break;
  case 11:
    d->aux = *(void**)value;
    break;
  case 12:
    d->aux_ld = *(int64_t*)value;
    break;
  case 13:
    d->aux_stride = *(int64_t*)value;
    break;
  case 17:
  case 18:
  case 19:
  case 20:
    d->scales[which - 17] = *(float**)value;
    break;
  case 22:
    d->aux_type = *(int*)value;
    break;
  case 25:
    break; // fast accumulation
  case 26:
    d->bias_type = *(int*)value;
    break;
  default:
    return unknown("description attribute", which);
  }
  return CUBLAS_OK;
}

CUBLAS_API cublasLtMatmulPreferenceCreate(void** p) {
  *p = malloc(16); // an address of its own
  return CUBLAS_OK;
}
CUBLAS_API cublasLtMatmulPreferenceDestroy(void* p) {
  free(p);
  return CUBLAS_OK;
}
CUBLAS_API cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return CUBLAS_OK; }

struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace;
  Status state;
  float waves;
  int reserved[4];
};
CUBLAS_API cublasLtMatmulAlgoGetHeuristic(void*, Desc*, Layout*, Layout*, Layout*, Layout*, void*, int count,
                                          Heuristic* out, int* found) {
  *found = 0;
  if (count < 1) return INVALID;
  memset(out, 0, sizeof *out);
  *found = 1;
  return CUBLAS_OK;
}

// --- Elements

[[noreturn]] static void unknown_type(int type) {
  fprintf(stderr, "EMU ERROR: cuBLASLt: data type %d is not emulated\n", type);
  abort();
}
static double load(const void* from, int64_t i, int type) {
  switch (type) {
  case F32:
    return ((const float*)from)[i];
  case F64:
    return ((const double*)from)[i];
  case F16:
    return _cvtsh_ss(((const uint16_t*)from)[i]);
  case BF16:
    return emu_bf16(((const uint16_t*)from)[i]);
  case E4M3:
    return emu_e4m3_to_f32(((const uint8_t*)from)[i]);
  case E5M2:
    return emu_e5m2_to_f32(((const uint8_t*)from)[i]);
  case I8:
    return ((const int8_t*)from)[i];
  case I32:
    return ((const int32_t*)from)[i];
  default:
    unknown_type(type);
  }
}
static void store(void* to, int64_t i, int type, double v) {
  switch (type) {
  case F32:
    ((float*)to)[i] = v;
    return;
  case F64:
    ((double*)to)[i] = v;
    return;
  case F16:
    ((uint16_t*)to)[i] = _cvtss_sh(float(v), 0);
    return;
  case BF16:
    ((uint16_t*)to)[i] = emu_f32_to_bf16(float(v));
    return;
  case E4M3:
    ((uint8_t*)to)[i] = emu_f32_to_e4m3(float(v));
    return;
  case I32:
    ((int32_t*)to)[i] = int32_t(v);
    return;
  default:
    unknown_type(type);
  }
}

// --- Products

struct Sizes {
  size_t m, n, k;
};

// c[j][i] += sum over p of a[p][i] * b[j][p], for rows i0 to i1 and COUNT columns from j.
template <int COUNT, class T>
static void multiply_block(const T* a, const T* b, T* c, size_t i0, size_t i1, size_t j, Sizes s) {
  for (size_t p = 0; p < s.k; p++) {
    const T* row = a + p * s.m;
    T* out = c + j * s.m;
    T factors[COUNT];
    for (int h = 0; h < COUNT; h++) factors[h] = b[(j + h) * s.k + p];
#pragma GCC ivdep
    for (size_t i = i0; i < i1; i++)
      for (int h = 0; h < COUNT; h++) out[h * s.m + i] += row[i] * factors[h];
  }
}
template <class T> static void multiply(const T* a, const T* b, T* c, Sizes s) {
  constexpr size_t BLOCK = 256; // rows of the result that stay in cache
  std::fill_n(c, s.m * s.n, T(0));
  for (size_t i = 0; i < s.m; i += BLOCK) {
    size_t j = 0, end = std::min(s.m, i + BLOCK);
    for (; j + 4 <= s.n; j += 4) multiply_block<4>(a, b, c, i, end, j, s);
    for (; j < s.n; j++) multiply_block<1>(a, b, c, i, end, j, s);
  }
}

// Long sums in parts, as on a GPU: one sum in f32 would lose more.
template <class T> static void multiply_in_parts(const T* a, const T* b, T* c, Sizes s) {
  constexpr size_t PART = 256;
  if (s.k <= PART) return multiply(a, b, c, s);
  std::vector<double> sums(s.m * s.n, 0.0);
  std::vector<T> part(s.n * PART);
  for (size_t p = 0; p < s.k; p += PART) {
    Sizes sp = {s.m, s.n, std::min(PART, s.k - p)};
    for (size_t j = 0; j < s.n; j++) memcpy(&part[j * sp.k], &b[j * s.k + p], sp.k * sizeof(T));
    multiply(a + p * s.m, part.data(), c, sp);
    for (size_t i = 0; i < sums.size(); i++) sums[i] += c[i];
  }
  for (size_t i = 0; i < sums.size(); i++) c[i] = T(sums[i]);
}

// The 10 bits of a mantissa that tf32 has, to nearest.
static float to_tf32(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return emu_from_bits((bits + 0xfff + (bits >> 13 & 1)) & 0xffffe000u);
}

// --- Epilogues: a bias (4), a GELU by tanh (32), the two with the GELU's input kept (128 more), or a product
// with the GELU's slope at the kept input (192). Bit 0 says none.

constexpr uint32_t WITH_BIAS = 4, WITH_GELU = 32, KEEPS_INPUT = 128, GELU_SLOPE = 192;
static bool known_epilogue(uint32_t e) {
  for (uint32_t known : {0u, 1u, WITH_BIAS, WITH_GELU, WITH_GELU | WITH_BIAS, WITH_GELU | KEEPS_INPUT,
                         WITH_GELU | KEEPS_INPUT | WITH_BIAS, GELU_SLOPE})
    if (e == known) return true;
  return false;
}

static double tanh_of_gelu(double x) { return std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)); }
static double gelu(double x) { return 0.5 * x * (1 + tanh_of_gelu(x)); }
static double gelu_slope(double x) {
  double t = tanh_of_gelu(x);
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x);
}

// The arguments of cublasLtMatmul.
struct Call {
  const Desc& d;
  const Layout &la, &lb, &lc, &ld;
  double alpha, beta;
  const char *a, *b, *c;
  char* out;
  Sizes sizes;
};

// One element of D from its product, in batch entry `batch`.
static double finish(const Call& call, double v, size_t i, size_t j, int batch) {
  const Desc& d = call.d;
  int aux_type = d.aux_type >= 0 ? d.aux_type : call.ld.type;
  int bias_type = d.bias_type >= 0 ? d.bias_type : call.ld.type == E4M3 ? BF16 : call.ld.type;
  int64_t aux_at = batch * d.aux_stride + j * d.aux_ld + i;
  if (d.epilogue & WITH_BIAS) v += load(d.bias, batch * d.bias_stride + i, bias_type);
  if (d.epilogue == GELU_SLOPE) return v * gelu_slope(load(d.aux, aux_at, aux_type));
  if (d.epilogue & KEEPS_INPUT) store(d.aux, aux_at, aux_type, v);
  return d.epilogue & WITH_GELU ? gelu(v) : v;
}

template <class T> static void run_batch_entry(const Call& call, int batch) {
  const Desc& d = call.d;
  auto [m, n, k] = call.sizes;
  auto entry = [batch](const char* matrix, const Layout& l) {
    return matrix + batch * l.stride * bytes_of(l.type);
  };
  const char *a_entry = entry(call.a, call.la), *b_entry = entry(call.b, call.lb),
             *c_entry = entry(call.c, call.lc);
  char* out_entry = (char*)entry(call.out, call.ld);
  auto number = [&d](double v) { return d.compute == COMPUTE_TF32 ? T(to_tf32(float(v))) : T(v); };
  std::vector<T> a(m * k), b(n * k), c(m * n);
  for (size_t p = 0; p < k; p++)
    for (size_t i = 0; i < m; i++)
      a[p * m + i] =
          number(load(a_entry, d.transposed[0] ? call.la.at(p, i) : call.la.at(i, p), call.la.type));
  for (size_t j = 0; j < n; j++)
    for (size_t p = 0; p < k; p++)
      b[j * k + p] =
          number(load(b_entry, d.transposed[1] ? call.lb.at(j, p) : call.lb.at(p, j), call.lb.type));
  multiply_in_parts(a.data(), b.data(), c.data(), call.sizes);
  double factor = call.alpha * (d.scales[0] ? *d.scales[0] : 1.0) * (d.scales[1] ? *d.scales[1] : 1.0);
  for (size_t j = 0; j < n; j++)
    for (size_t i = 0; i < m; i++) {
      double v = factor * c[j * m + i];
      if (call.beta != 0) v += call.beta * load(c_entry, call.lc.at(i, j), call.lc.type);
      store(out_entry, call.ld.at(i, j), call.ld.type, finish(call, v, i, j, batch));
    }
}

CUBLAS_API cublasLtMatmul(void*, Desc* d, const void* alpha, const char* a, Layout* la, const char* b,
                          Layout* lb, const void* beta, const char* c, Layout* lc, char* out, Layout* ld,
                          const void*, void*, size_t, void*) {
  uint64_t m = d->transposed[0] ? la->cols : la->rows, k = d->transposed[0] ? la->rows : la->cols;
  uint64_t n = d->transposed[1] ? lb->rows : lb->cols, k_of_b = d->transposed[1] ? lb->cols : lb->rows;
  if (m != ld->rows || n != ld->cols || k != k_of_b) {
    fprintf(stderr, "EMU ERROR: cublasLtMatmul: the sizes of the matrices do not agree\n");
    return INVALID;
  }
  if (!known_epilogue(d->epilogue)) return unknown("epilogue", d->epilogue);
  bool wide = d->scale == F64;
  auto scalar = [wide](const void* at) { return wide ? *(const double*)at : double(*(const float*)at); };
  Call call = {*d, *la, *lb, *lc, *ld, scalar(alpha), scalar(beta), a, b, c, out, {m, n, k}};
  for (int batch = 0; batch < ld->batch; batch++) {
    if (wide) run_batch_entry<double>(call, batch);
    else run_batch_entry<float>(call, batch);
  }
  return CUBLAS_OK;
}
