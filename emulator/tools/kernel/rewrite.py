"""Makes C++ of CUDA kernels: asm statements become calls of the emulator, and each kernel gets a launcher.

  rewrite.py SOURCE OUTPUT

Lines keep their numbers. What the emulator does not know is an error that names it.
"""

import re
import sys

from asm_statements import Asm, Unknown
from ptx import translate
from wgmma import Wgmma, wgmma_call

# Headers that include/emu_device.h stands for.
CUDA_HEADER = re.compile(r"^[ \t]*#include\s*<(?:cuda[\w/.]*|cooperative_groups[\w/.]*|mma\.h)>", re.M)
# Comments are matched too, so that nothing inside them is.
ASM = re.compile(r"/\*.*?\*/|//[^\n]*|(?<!\w)(?:asm|__asm__)\s*(?:volatile\s*|__volatile__\s*)?\(", re.S)
SHARED_ARRAY = re.compile(
    r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+|alignas\(\d+\)\s+)?(\w+)\s+(\w+)\[\];"
)
KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?'
    r"(?:__cluster_dims__\([^)]*\)\s*)?(\w+)\s*\("
)


def rewrite(source):
    text = replace_asm(CUDA_HEADER.sub("", source))
    text = SHARED_ARRAY.sub(r"\1* \2 = (\1*)emu_cur->smem;", text)
    if re.search(r"\b__shared__\b", text):
        raise Unknown("static __shared__ variables")
    launchers = [
        f'extern "C" void emu_launch_{kernel}(void** args) {{ emu_call({kernel}, args); }}\n'
        for kernel in KERNEL.findall(text)
    ]
    return '#include "emu_device.h"\n#line 1 "kernel.cu"\n' + text + "\n" + "".join(launchers)


def replace_asm(source):
    out, at = [], 0
    products = []  # wgmma statements that go on from one another

    def flush():
        if products:
            out.append(wgmma_call(products) + "\n" * sum(w.asm.lines for w in products))
            products.clear()

    while match := ASM.search(source, at):
        between = source[at : match.start()]
        if match[0].startswith("/"):
            flush()
            out.append(between + match[0])
            at = match.end()
            continue
        asm = Asm(source, match.start(), match.end() - 1)
        at = asm.end
        product = Wgmma(asm) if "wgmma.mma_async" in asm.template else None
        if between.strip() or not product or products and not product.goes_on(products[-1]):
            flush()
        out.append(between)
        if product:
            products.append(product)
        else:
            out.append(translated(asm) + "\n" * asm.lines)
    flush()
    return "".join(out) + source[at:]


def translated(asm):
    try:
        return translate(asm)
    except (Unknown, KeyError, ValueError, IndexError, TypeError) as error:
        raise Unknown(f"{error} in: {asm.template}") from error


def main(source, output):
    try:
        with open(source, encoding="utf-8") as file:
            text = rewrite(file.read())
    except Unknown as error:
        return f"EMU: not emulated: {error}"
    with open(output, "w", encoding="utf-8") as file:
        file.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
