"""Compiles kernels by NVIDIA's compiler for sm_90a, without a GPU, and prints registers, stack and spills.

  check_kernels.py [FILE.cu …]

Without files: all kernels with wgmma or TMA that the emulator has met. Reports are kept beside the sources
(FILE.sm90.txt). The exit code is 1 if a kernel does not compile, or spills more than NVRTC_MAXSPILL bytes (if
that is set). fetch_compiler.sh fetches the compiler.
"""

import ctypes
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

BUILD = Path(os.environ.get("EMU_BUILD") or Path(__file__).resolve().parents[2] / "target/emulator")
CUDA = Path(os.environ.get("EMU_CUDA") or BUILD / "wheels/nvidia/cu13")
FAILURE = "FAILS in "


def load_nvrtc():
    builtins = next((CUDA / "lib").glob("libnvrtc-builtins.so.*"))
    ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(CUDA / "lib/libnvrtc.so.13"))


def compile_to_ptx(nvrtc, source):
    """The PTX, or None; and the log."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def text_of(size_function, text_function):
        size_function(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        text_function(program, text)
        return text.value

    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernel.cu", 0, None, None)
    include = CUDA / "include"
    options = [
        "--gpu-architecture=compute_90a",
        f"--include-path={include}",
        f"--include-path={include}/cccl",
        "-lineinfo",
    ]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), array)
    log = text_of(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode(errors="replace")
    ptx = None if failed else text_of(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx, log


def assemble(ptx):
    """Whether ptxas compiles it; and its output."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_bytes(ptx)
        command = [
            CUDA / "bin/ptxas",
            "-v",
            "-arch=sm_90a",
            "-lineinfo",
            file,
            "-o",
            file.with_suffix(".cubin"),
        ]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return ran.returncode == 0, ran.stderr + ran.stdout


def summary(output):
    """A line per kernel of ptxas's output, then its warnings."""
    lines = []
    for name, rest in re.findall(
        r"Compiling entry function '(\w+)'.*?\n(.*?)(?=Compiling entry|\Z)", output, re.S
    ):
        frame = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        stack, stores, loads = re.search(frame, rest).groups()
        registers = re.search(r"Used (\d+) registers", rest)[1]
        lines.append(
            f"{name}: {registers} registers, {stack} bytes stack, {stores} spill stores, {loads} spill loads"
        )
    notes = [
        line.strip() for line in output.splitlines() if re.search(r"warning|serializ|setmaxnreg", line, re.I)
    ]
    return "\n".join(lines + notes)


def report(nvrtc, path):
    kept = path.with_suffix(".sm90.txt")
    if kept.exists():
        return kept.read_text()
    ptx, log = compile_to_ptx(nvrtc, path.read_bytes())
    if ptx is None:
        text = FAILURE + "NVRTC\n" + log
    else:
        fine, output = assemble(ptx)
        text = summary(output) if fine else FAILURE + "ptxas\n" + output
    kept.write_text(text)
    return text


def met_kernels():
    """Sources of kernels that use the tensor cores of Hopper, or its copies."""
    sources = sorted((BUILD / "kernels").glob("*.cu"))
    return [path for path in sources if re.search("wgmma|CUtensorMap", path.read_text())]


def main(paths):
    if not CUDA.is_dir():
        return f"no compiler in {CUDA}: run emulator/tools/fetch_compiler.sh"
    paths = [Path(path) for path in paths] or met_kernels()
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        return f"no file {', '.join(missing)}"
    if not paths:
        return f"no kernel in {BUILD / 'kernels'} uses wgmma or TMA: run tests on the emulator first"
    nvrtc = load_nvrtc()
    most_spilled = int(os.environ.get("NVRTC_MAXSPILL", sys.maxsize))
    bad = False
    for path in paths:
        text = report(nvrtc, path)
        spills = re.findall(r"(\d+) spill stores, (\d+) spill loads", text)
        bad |= text.startswith(FAILURE) or any(int(a) + int(b) > most_spilled for a, b in spills)
        print(path.stem, text.rstrip(), flush=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
