"""What words of PTX mean in C++."""

# Of an asm operand's constraint: the C++ type, and the conversion of an expression to it.
CONSTRAINTS = {
    "f": ("float", "(float)({})"),
    "d": ("double", "(double)({})"),
    "h": ("uint16_t", "emu_word16({})"),
    "r": ("uint32_t", "emu_word32({})"),
    "n": ("uint32_t", "(uint32_t)({})"),
    "l": ("uint64_t", "emu_word({})"),
}
# Of a PTX type.
TYPES = {
    "pred": "bool",
    "f32": "float",
    "f64": "double",
    **{kind + "8": "uint8_t" for kind in "bu"},
    **{kind + bits: f"uint{bits}_t" for kind in "bu" for bits in ("16", "32", "64")},
    **{"s" + bits: f"int{bits}_t" for bits in ("8", "16", "32", "64")},
}
# Of the elements of matrices.
MATRIX_TYPES = {
    "bf16": "EMU_BF16",
    "f16": "EMU_F16",
    "tf32": "EMU_TF32",
    "e4m3": "EMU_E4M3",
    "e5m2": "EMU_E5M2",
    "s8": "EMU_S8",
    "u8": "EMU_U8",
}
# These have no effect where one thread runs at a time and copies and products are ordered by the emulator.
WITHOUT_EFFECT = (
    "fence membar griddepcontrol setmaxnreg prefetch prefetchu nanosleep applypriority discard".split()
)

# C++ expressions, by the first word of an instruction.
UNARY_F32 = {
    "ex2": "exp2f({})",
    "lg2": "log2f({})",
    "rcp": "1.f / {}",
    "rsqrt": "1.f / sqrtf({})",
    "sqrt": "sqrtf({})",
    "sin": "sinf({})",
    "cos": "cosf({})",
    "tanh": "tanhf({})",
}
BINARY_F32 = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "min": "fminf({}, {})",
    "max": "fmaxf({}, {})",
}
BINARY_BITS = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^", "shl": "<<"}
# By the name of a comparison; lo to hs are those of unsigned numbers.
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
COMPARISONS |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
# The new value of *emu_p; emu_old is the one before.
ATOMICS = {
    "add": "emu_old + {0}",
    "min": "emu_old < {0} ? emu_old : {0}",
    "max": "emu_old > {0} ? emu_old : {0}",
    "exch": "{0}",
    "and": "emu_old & {0}",
    "or": "emu_old | {0}",
    "xor": "emu_old ^ {0}",
    "inc": "emu_old >= {0} ? 0 : emu_old + 1",
    "cas": "emu_old == {0} ? {1} : emu_old",
}
