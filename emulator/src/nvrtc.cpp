// NVRTC: tools/kernel/compile.sh makes a shared object of a source. Results are kept by a hash of all that
// decides them.
#include "internal.h"
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>
#include <sys/stat.h>
#include <unistd.h>

struct Program {
  std::string source, log, image;
};
enum { NVRTC_OK = 0, COMPILATION_FAILED = 6 };
#define NVRTC_API extern "C" __attribute__((visibility("default"))) int

NVRTC_API nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return NVRTC_OK;
}
NVRTC_API nvrtcCreateProgram(Program** out, const char* source, const char*, int, const char**,
                             const char**) {
  *out = new Program{emu_stable_order(source), "", ""};
  return NVRTC_OK;
}
NVRTC_API nvrtcDestroyProgram(Program** p) {
  delete *p;
  *p = nullptr;
  return NVRTC_OK;
}
NVRTC_API nvrtcAddNameExpression(Program*, const char*) { return NVRTC_OK; }

static int size_of(const std::string& text, size_t* bytes) {
  *bytes = text.size() + 1;
  return NVRTC_OK;
}
static int copy(const std::string& text, char* out) {
  memcpy(out, text.c_str(), text.size() + 1);
  return NVRTC_OK;
}
NVRTC_API nvrtcGetProgramLogSize(Program* p, size_t* bytes) { return size_of(p->log, bytes); }
NVRTC_API nvrtcGetProgramLog(Program* p, char* out) { return copy(p->log, out); }
NVRTC_API nvrtcGetPTXSize(Program* p, size_t* bytes) { return size_of(p->image, bytes); }
NVRTC_API nvrtcGetPTX(Program* p, char* out) { return copy(p->image, out); }
NVRTC_API nvrtcGetCUBINSize(Program* p, size_t* bytes) { return size_of(p->image, bytes); }
NVRTC_API nvrtcGetCUBIN(Program* p, char* out) { return copy(p->image, out); }
extern "C" __attribute__((visibility("default"))) const char* nvrtcGetErrorString(int) {
  return "error of the emulator's NVRTC";
}

// --- Compilation

static std::string text_of(const char* variable) {
  const char* text = getenv(variable);
  return text ? text : "";
}

// Set by tools/run.
static std::string folder(const char* variable) {
  std::string path = text_of(variable);
  if (path.empty()) {
    fprintf(stderr, "EMU ERROR: %s is not set: start the program by emulator/tools/run\n", variable);
    abort();
  }
  return path;
}

// FNV-1a.
static uint64_t hash(const std::string& text, uint64_t h = 1469598103934665603ull) {
  for (unsigned char c : text) h = (h ^ c) * 1099511628211ull;
  return h;
}

// Of all files that decide what a source becomes.
static uint64_t hash_of_tools(const std::string& home) {
  std::vector<std::filesystem::path> files;
  for (const char* part : {"/include", "/tools/kernel"})
    for (auto& entry : std::filesystem::recursive_directory_iterator(home + part))
      if (entry.is_regular_file()) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  uint64_t h = 0;
  for (auto& path : files) {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    h = hash(text.str(), h + 1);
  }
  return h;
}

static int run(const std::string& command, std::string& output) {
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  if (!pipe) return -1;
  char buffer[4096];
  size_t n;
  while ((n = fread(buffer, 1, sizeof buffer, pipe)) > 0) output.append(buffer, n);
  return pclose(pipe);
}

// Compiles the source to BASE.so, beside which it leaves BASE.cu and BASE.cpp. Whether that worked.
static bool compile(const std::string& source, const std::string& home, const std::string& base,
                    const std::string& flags, std::string& log) {
  std::string temporary = base + "." + std::to_string(getpid());
  std::ofstream(temporary + ".cu") << source;
  auto start = std::chrono::steady_clock::now();
  int rc = run("'" + home + "/tools/kernel/compile.sh' '" + temporary + "' '" + base + "' " + flags, log);
  std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  if (emu_env("EMU_VERBOSE", 0))
    fprintf(stderr, "emu: compiled %s in %.1f s (rc %d)\n", base.c_str(), seconds.count(), rc);
  if (rc) fprintf(stderr, "EMU ERROR: %s.cu does not compile:\n%.6000s\n", base.c_str(), log.c_str());
  return rc == 0;
}

NVRTC_API nvrtcCompileProgram(Program* p, int, const char**) {
  static std::mutex lock; // two threads may compile the same source
  std::lock_guard<std::mutex> guard(lock);
  static std::string home = folder("EMU_HOME"), kernels = folder("EMU_BUILD") + "/kernels";
  static uint64_t tools = hash_of_tools(home);
  std::string flags = text_of("EMU_CXXFLAGS");
  char name[20];
  snprintf(name, sizeof name, "%016lx", (unsigned long)hash(p->source, hash(flags, tools)));
  std::string base = kernels + "/" + name, object = base + ".so";
  mkdir(kernels.c_str(), 0755);
  bool there = access(object.c_str(), R_OK) == 0;
  if (!there && !compile(p->source, home, base, flags, p->log)) return COMPILATION_FAILED;
  p->image = "emu:" + object;
  return NVRTC_OK;
}
