// Tests of the emulator itself: products with a known result, and faulty kernels whose error it must name.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

// The emulated libraries' functions that the tests call.
extern "C" {
int cuMemAlloc_v2(uint64_t* at, size_t bytes);
int cuModuleLoadData(void** module, const void* image);
int cuModuleGetFunction(void** function, void* module, const char* name);
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned smem, void* stream, void** args, void** extra);
int cuTensorMapEncodeTiled(uint64_t* out, int type, unsigned rank, void* base, const uint64_t* dims,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
                           int interleave, int swizzle, int promotion, int fill);
int nvrtcCreateProgram(void** program, const char* source, const char*, int, const char**, const char**);
int nvrtcCompileProgram(void* program, int, const char**);
int nvrtcGetPTX(void* program, char* out);
int nvrtcGetPTXSize(void* program, size_t* bytes);
}

// What all kernels here start with.
static const char* HEAD = R"(
#include <cuda_runtime.h>
typedef unsigned char uint8;
typedef unsigned int uint32;
typedef unsigned long long int uint64;
typedef struct CUtensorMap_st { alignas(64) unsigned long long int opaque[16]; } CUtensorMap;
inline __device__ uint32 shared(const void* p) { return (uint32)__cvta_generic_to_shared(p); }
inline __device__ void init(uint64* b, uint32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" : : "r"(shared(b)), "r"(count) : "memory");
}
inline __device__ void arrive(uint64* b, uint32 count = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" : : "r"(shared(b)), "r"(count) : "memory");
}
inline __device__ void expect(uint64* b, uint32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               : : "r"(shared(b)), "r"(bytes) : "memory");
}
inline __device__ void wait(uint64* b, uint32 parity) {
  asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra again;\n}\n" : : "r"(shared(b)), "r"(parity) : "memory");
}
inline __device__ uint32 load(const uint32* at) {
  uint32 x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
)";
static const char* SHARED_MEMORY = R"(
  extern __shared__ __align__(1024) uint8 dynamic_shared_mem[];
  uint64* bar = (uint64*)dynamic_shared_mem;
  float* tile = (float*)(dynamic_shared_mem + 1024);
)";

static int failures;
static void report(const std::string& name, bool ok) {
  printf("%s %s\n", ok ? "ok    " : "FAILED", name.c_str());
  failures += !ok;
}

static float* allocate(size_t floats) {
  uint64_t at;
  if (cuMemAlloc_v2(&at, floats * sizeof(float))) abort();
  return (float*)at;
}

// Compiles and launches the kernel k of a source; returns the first error.
static int launch(const std::string& source, unsigned blocks, unsigned threads, unsigned smem, void** args) {
  void *program, *module, *function;
  size_t bytes;
  nvrtcCreateProgram(&program, (HEAD + source).c_str(), nullptr, 0, nullptr, nullptr);
  if (int rc = nvrtcCompileProgram(program, 0, nullptr)) return rc;
  nvrtcGetPTXSize(program, &bytes);
  std::vector<char> image(bytes);
  nvrtcGetPTX(program, image.data());
  if (int rc = cuModuleLoadData(&module, image.data())) return rc;
  if (int rc = cuModuleGetFunction(&function, module, "k")) return rc;
  return cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, smem, nullptr, args, nullptr);
}

// --- Products

constexpr int N = 64,
              ROWS = 60; // of a tile of N x N; the rows beyond ROWS are outside of the matrix and load as 0
static float entry(int row, int column) { return row < ROWS ? float((row * 7 + column * 3) % 11 - 5) : 0.f; }
static uint16_t bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits >> 16;
}

// Replaces each $NAME of a text.
static std::string with(std::string text, const std::vector<std::pair<std::string, std::string>>& values) {
  for (auto& [name, value] : values)
    for (size_t at; (at = text.find("$" + name)) != std::string::npos;)
      text.replace(at, name.size() + 1, value);
  return text;
}
static std::string number(int i) { return std::to_string(i); }

// One of the four products along k, whose tiles are 16 numbers wide. B is K-major for A Bᵀ, MN-major for A B.
static std::string product_step(int step, bool transposed, bool registers) {
  std::string sums, outputs;
  for (int i = 0; i < N / 2; i++) {
    sums += (i ? ", %" : "%") + number(i);
    outputs += (i ? ", \"+f\"(d[" : "\"+f\"(d[") + number(i) + "])";
  }
  const char* descriptor = "\"l\"(uint64(1073741888u) << 32 | (65536u + $OFFSET + (shared(tile) >> 4)))";
  int along_k = step * 2, along_rows = step * 128;
  std::string load = !registers ? "" : R"({
    uint32 row = warp * 16 + lane % 16, piece = $PIECE + lane / 16;
    uint32 at = shared(tile) + row * 128 + ((piece ^ (row & 7)) * 16);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[$STEP][0]), "=r"(a[$STEP][1]), "=r"(a[$STEP][2]), "=r"(a[$STEP][3]) : "r"(at));
  })";
  std::string product = R"(
    asm volatile("{\n.reg .pred set;\nsetp.ne.b32 set, $ADDS, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {$SUMS}, $A, %32, set, 1, 1, $TRANS;\n}\n"
                 : $OUTPUTS : $B_DESCRIPTOR, $INPUTS);)";
  std::string from_registers = R"("r"(a[$STEP][0]), "r"(a[$STEP][1]), "r"(a[$STEP][2]), "r"(a[$STEP][3]))";
  return with(load + product,
              {{"ADDS", number(step != 0)},
               {"SUMS", sums},
               {"OUTPUTS", outputs},
               {"B_DESCRIPTOR", with(descriptor, {{"OFFSET", number(transposed ? along_rows : along_k)}})},
               {"INPUTS", registers ? from_registers : with(descriptor, {{"OFFSET", number(along_k)}})},
               {"A", registers ? "{%33, %34, %35, %36}" : "%33"},
               {"TRANS", std::string(registers ? "" : "0, ") + (transposed ? "1" : "0")},
               {"PIECE", number(along_k)},
               {"STEP", number(step)}});
}

static std::string product_source(bool transposed, bool registers) {
  std::string source = R"(extern "C" __global__ void __launch_bounds__(128)
k(const __grid_constant__ CUtensorMap map, float* out) {)";
  source += SHARED_MEMORY;
  source += R"(
  if (threadIdx.x == 0) init(bar, 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    expect(bar, 8192);
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];"
                 :: "r"(shared(tile)), "l"(&map), "r"(shared(bar)), "r"(0), "r"(0) : "memory");
  }
  wait(bar, 0);
  float d[32];
  uint32 a[4][4], lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  asm volatile("wgmma.fence.sync.aligned;");
)";
  for (int step = 0; step < 4; step++) source += product_step(step, transposed, registers);
  return source + R"(
  asm volatile("wgmma.commit_group.sync.aligned;");
  asm volatile("wgmma.wait_group.sync.aligned 0;");
  for (int i = 0; i < 32; i++)
    out[(warp * 16 + lane / 4 + i / 2 % 2 * 8) * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
})";
}

static bool equals_product(const float* out, bool transposed) {
  for (int r = 0; r < N; r++)
    for (int c = 0; c < N; c++) {
      float want = 0;
      for (int x = 0; x < N; x++) want += entry(r, x) * (transposed ? entry(x, c) : entry(c, x));
      if (out[r * N + c] == want) continue;
      printf("  at %d, %d: %f, not %f\n", r, c, out[r * N + c], want);
      return false;
    }
  return true;
}

// A tile A comes by TMA; then A A (transposed) or A Aᵀ by wgmma, with the left A in registers or shared
// memory.
static void test_product(bool transposed, bool registers) {
  float *data = allocate(N * N / 2), *out = allocate(N * N);
  for (int r = 0; r < N; r++)
    for (int c = 0; c < N; c++) ((uint16_t*)data)[r * N + c] = bf16(r < ROWS ? entry(r, c) : 99.f);
  alignas(64) uint64_t map[16];
  const uint64_t dims[] = {N, ROWS}, strides[] = {N * 2};
  const uint32_t box[] = {N, N}, steps[] = {1, 1};
  constexpr int BF16 = 9, SWIZZLE_128 = 3;
  bool ok = cuTensorMapEncodeTiled(map, BF16, 2, data, dims, strides, box, steps, 0, SWIZZLE_128, 0, 0) == 0;
  void* args[] = {map, &out};
  ok = ok && launch(product_source(transposed, registers), 1, 128, 1024 + 8192, args) == 0;
  report(std::string("TMA and wgmma, A in ") + (registers ? "registers" : "shared memory") +
             (transposed ? ", B by rows" : ", B by columns"),
         ok && equals_product(out, transposed));
}

// --- Errors

struct Fault {
  const char* name;
  unsigned blocks, threads;
  const char* text; // on standard error
  const char* body; // of a kernel with an argument float* out, whose 4096 numbers are 0
  const char* environment = nullptr;
};

static const Fault FAULTS[] = {
    {"a barrier that half the block reaches", 1, 128, "deadlock", R"(
  if (threadIdx.x < 64) asm volatile("bar.sync 1, 128;" ::: "memory");
  else asm volatile("bar.sync 2, 128;" ::: "memory");)"},
    {"an mbarrier nobody arrives at", 1, 64, "1 of 2 pending", R"(
  if (threadIdx.x == 0) init(bar, 2);
  __syncthreads();
  if (threadIdx.x == 0) arrive(bar);
  wait(bar, 0);)"},
    {"an arrival too many", 1, 64, "mbarrier overrun", R"(
  if (threadIdx.x == 0) init(bar, 64);
  __syncthreads();
  if (threadIdx.x == 1) for (int i = 0; i < 2; i++) arrive(bar, 40);)"},
    {"a phase that a waiter misses", 1, 64, "has not yet left its wait", R"(
  if (threadIdx.x == 0) init(bar, 1);
  __syncthreads();
  if (threadIdx.x == 32) wait(bar, 0);
  if (threadIdx.x == 0) { arrive(bar); arrive(bar); })"},
    {"an mbarrier without initialisation", 1, 32, "is not initialised", "arrive(bar);"},
    {"a bulk load that is read before it arrives", 1, 1, "nan", R"(
  init(bar, 1);
  expect(bar, 16);
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 16, [%2];"
               :: "r"(shared(tile)), "l"(out + 16), "r"(shared(bar)));
  float x = tile[0];
  wait(bar, 0);
  out[0] = x;)"},
    {"an mbarrier that is gone when its load arrives", 1, 1, "is not initialised", R"(
  init(bar, 1);
  init(bar + 1, 1);
  expect(bar, 16);
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 16, [%2];"
               :: "r"(shared(tile)), "l"(out), "r"(shared(bar)));
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(shared(bar)));
  wait(bar + 1, 0);)"},
    {"a block that waits for a later one goes on", 4, 1, "rc 0 out 7", R"(
  uint32* turn = (uint32*)(out + 8);
  if (blockIdx.x == 0) {
    while (load(turn) != 3) {}
    out[0] = 7;
  } else asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(turn) : "memory");)"},
    {"a turn that never comes", 2, 32, "deadlock", "while (load((uint32*)out + 8) != 3) {}"},
    {"a shuffle in a branch", 1, 32, "shuffle", R"(
  float x = 1;
  if (threadIdx.x < 16) x = __shfl_sync(-1, x, 0);
  out[0] = x;
  __syncwarp();)"},
    {"an unknown instruction", 1, 32, "frobnicate", R"(
  uint32 x;
  asm volatile("frobnicate.u32 %0, 1;" : "=r"(x));
  out[0] = x;)"},
    {"a write past shared memory", 1, 32, "EMU ERROR: signal 11",
     "dynamic_shared_mem[8192 + threadIdx.x] = 1;"},
    {"a write past an allocation", 1, 1, "EMU ERROR: signal 11", "out[4096] = 1;", "EMU_GUARD=1"},
    {"a bulk store that is not awaited", 1, 1, "wait_group", R"(
  *(float4*)tile = {1, 2, 3, 4};
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 16;\ncp.async.bulk.commit_group;"
               :: "l"(out), "r"(shared(tile)) : "memory");)"},
    {"a thread that waits for its stores is the last to go on", 1, 64, "rc 0 out 7", R"(
  volatile float* seen = tile + 8;
  if (threadIdx.x == 0) {
    *(float4*)tile = {1, 2, 3, 4};
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 16;\ncp.async.bulk.commit_group;\n"
                 "cp.async.bulk.wait_group.read 0;\ncp.async.bulk.wait_group 0;"
                 :: "l"(out + 4), "r"(shared(tile)) : "memory");
    out[0] = *seen;
  } else if (threadIdx.x == 32) *seen = 7;)"},
    {"a vote of a block is counted", 1, 128, "rc 0 out 5", R"(
  uint32 vote = threadIdx.x == 70;
  asm volatile("{\n.reg .pred own, any;\nsetp.ne.b32 own, %0, 0;\nbar.red.or.pred any, %1, 128, own;\n"
               "selp.b32 %0, 1, 0, any;\n}\n" : "+r"(vote) : "r"(3) : "memory");
  if (threadIdx.x == 3) out[0] = vote + 4;)"},
};

// In a process of its own, because the error ends it.
static void run_fault(const Fault& fault) {
  if (fault.environment) putenv(strdup(fault.environment));
  float* out = allocate(4096);
  memset(out, 0, 4096 * sizeof(float));
  void* args[] = {&out};
  std::string source =
      "extern \"C\" __global__ void k(float* out) {" + std::string(SHARED_MEMORY) + fault.body;
  int rc = launch(source + "\n}\n", fault.blocks, fault.threads, 4096, args);
  fprintf(stderr, "rc %d out %f", rc, out[0]);
  _exit(0);
}

static void test_fault(const Fault& fault) {
  int pipe_ends[2];
  if (pipe(pipe_ends)) abort();
  if (!fork()) {
    dup2(pipe_ends[1], STDERR_FILENO);
    run_fault(fault);
  }
  close(pipe_ends[1]);
  std::string printed;
  char buffer[4096];
  ssize_t n;
  while ((n = read(pipe_ends[0], buffer, sizeof buffer)) > 0) printed.append(buffer, n);
  close(pipe_ends[0]);
  wait(nullptr);
  bool ok = printed.find(fault.text) != std::string::npos;
  report(fault.name, ok);
  if (!ok) printf("  expected: %s\n  printed: %s\n", fault.text, printed.c_str());
}

int main() {
  setbuf(stdout, nullptr);
  for (bool transposed : {false, true})
    for (bool registers : {false, true}) test_product(transposed, registers);
  for (auto& fault : FAULTS) test_fault(fault);
  printf("%d failures\n", failures);
  return failures != 0;
}
