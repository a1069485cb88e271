"""Translates PTX instructions to C++ that calls the emulator (include/runtime.h)."""

import itertools
import re

from asm_statements import Unknown, instructions, listed, split_operands
from ptx_tables import (
    ATOMICS,
    BINARY_BITS,
    BINARY_F32,
    COMPARISONS,
    CONSTRAINTS,
    MATRIX_TYPES,
    TYPES,
    UNARY_F32,
    WITHOUT_EFFECT,
)

STATEMENTS = itertools.count()  # makes labels unique


def translate(asm):
    """A block of C++ that does what the statement does. Operand i is the variable emu_o<i>."""
    body = " ".join(Translator(asm).all())
    head, tail = "", ""
    for i, (constraint, expression, is_output) in enumerate(asm.operands):
        name = f"emu_o{i}"
        if not re.search(rf"\b{name}\b", body):
            continue
        kind, convert = CONSTRAINTS[constraint[-1]]
        is_input = not is_output or constraint[0] == "+"
        head += f"{kind} {name}" + (f" = {convert.format(expression)}" if is_input else "") + "; "
        if is_output:
            tail += f"emu_set({expression}, {name}); "
    return "{ " + head + body + " " + tail + "}"


class Translator:
    def __init__(self, asm):
        self.asm = asm
        self.number = next(STATEMENTS)
        self.registers = set()  # declared by .reg

    def all(self):
        return [self.statement(text) for text in instructions(self.asm.template)]

    # --- Operands

    def value(self, text):
        """A C++ expression; an lvalue if it is a register."""
        text = text.strip()
        if match := re.fullmatch(r"%(\d+)", text):
            return f"emu_o{match[1]}"
        if text in self.registers:
            return "emu_r_" + re.sub(r"\W", "_", text)
        if match := re.fullmatch(r"0f([0-9a-fA-F]{8})", text):
            return f"emu_bits<float>(0x{match[1]}u)"
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return text
        if text == "%laneid":
            return "uint32_t(emu_cur->lane)"
        raise Unknown("operand " + text)

    def values(self, operands):
        return [self.value(operand) for operand in operands]

    def address(self, text):
        """The base and the offset of [%0] or [%0 + 16]."""
        base, _, offset = text.strip().strip("[]").partition("+")
        return self.value(base), offset.strip() or "0"

    def shared(self, text):
        base, offset = self.address(text)
        return f"emu_shared(uint32_t({base}) + {offset})"

    def pointer(self, text, name):
        """The pointer of an address; of shared memory if the instruction's name says so."""
        if ".shared" in name:
            return self.shared(text)
        base, offset = self.address(text)
        return f"((char*)({base}) + {offset})"

    # --- Statements

    def statement(self, text):
        if match := re.match(r"@(!?)(%?\w+) (.*)", text):
            return f"if ({match[1]}{self.value(match[2])}) " + self.statement(match[3])
        if match := re.match(r"(\$?\w+):(?!:) ?(.*)", text):
            return f"emu_label_{self.number}_{match[1].strip('$')}: ;" + (
                self.statement(match[2]) if match[2] else ""
            )
        name, _, rest = text.partition(" ")
        if name == ".reg":
            return self.declaration(rest)
        base = name.split(".")[0]
        if base in WITHOUT_EFFECT:
            return "{ }"
        method = getattr(self, "do_" + base, None)
        if method is None and base in UNARY_F32:
            method = self.unary_f32
        if method is None and base in BINARY_F32 | BINARY_BITS:
            method = self.binary
        code = method and method(name, split_operands(rest))
        if code is None:
            raise Unknown(text)
        return "{ " + code + " }"

    def declaration(self, rest):
        kind, names = rest.split(" ", 1)
        names = [name.strip() for name in names.split(",")]
        self.registers.update(names)
        kind = {".f16": ".b16", ".f16x2": ".b32"}.get(kind, kind)
        return f"{TYPES[kind.strip('.')]} {', '.join(self.values(names))};"

    # Each do_ method translates the instructions that start with a word; None says that it does not know one.

    # --- Arithmetic

    def unary_f32(self, name, ops):
        if not name.endswith(".f32"):
            return None
        out, x = self.values(ops)
        flush = "emu_ftz({})" if ".ftz" in name else "{}"
        return f"{out} = {flush.format(UNARY_F32[name.split('.')[0]].format(flush.format(x)))};"

    def binary(self, name, ops):
        base = name.split(".")[0]
        out, a, b = self.values(ops)
        if name == "mul.rn.bf16x2":
            return f"{out} = emu_mul_bf16x2({a}, {b});"
        if name.endswith(".f32") and base in BINARY_F32:
            result = BINARY_F32[base].format(a, b)
            return f"{out} = " + (f"emu_saturate({result});" if ".sat" in name else f"{result};")
        if name in ("add.sat.s32", "sub.sat.s32"):
            return f"{out} = emu_saturate_s32((long long)int32_t({a}) {BINARY_BITS[base]} int32_t({b}));"
        if base in BINARY_BITS and re.search(r"\.[bsu](32|64)$", name):
            return f"{out} = {a} {BINARY_BITS[base]} ({b});"
        return None

    def do_fma(self, name, ops):
        if not name.endswith(".f32"):
            return None
        out, *factors = self.values(ops)
        result = f"fmaf({', '.join(factors)})"
        if ".ftz" in name:
            result = f"emu_ftz({result})"
        if ".sat" in name:
            result = f"emu_saturate({result})"
        return f"{out} = {result};"

    def do_shr(self, name, ops):
        if not name.endswith((".u32", ".b32")):
            return None
        out, a, b = self.values(ops)
        return f"{out} = uint32_t({a}) >> ({b});"

    def do_not(self, name, ops):
        return "{} = !{};".format(*self.values(ops)) if name.endswith(".pred") else None

    def do_setp(self, name, ops):
        _, test, kind = name.split(".")
        out, a, b = self.values(ops)
        kind = TYPES[kind]
        return f"{out} = {kind}({a}) {COMPARISONS[test]} {kind}({b});"

    def do_selp(self, name, ops):
        out, a, b, flag = self.values(ops)
        return f"{out} = {flag} ? {a} : {b};"

    def do_mov(self, name, ops):
        width = 64 if name.endswith("64") else 32
        if ops[1].startswith("{"):
            parts = self.values(listed(ops[1]))
            bits = width // len(parts)
            packed = " | ".join(
                f"uint{width}_t(emu_bits<uint{bits}_t>({part})) << {bits * i}" for i, part in enumerate(parts)
            )
            return f"{self.value(ops[0])} = {packed};"
        source = self.value(ops[1])
        if ops[0].startswith("{"):
            parts = self.values(listed(ops[0]))
            bits = width // len(parts)
            return " ".join(
                f"emu_set({part}, uint{bits}_t({source} >> {bits * i}));" for i, part in enumerate(parts)
            )
        return f"emu_set({self.value(ops[0])}, {source});"

    def do_cvt(self, name, ops):
        out, *inputs = self.values(ops)
        if match := re.fullmatch(r"cvt\.rn\.satfinite\.(e4m3|e5m2)x2\.f32", name):
            high, low = (f"emu_f32_to_{match[1]}({x})" for x in inputs)
            return f"{out} = uint16_t({high} << 8 | {low});"
        if name == "cvt.rn.bf16x2.f32":
            high, low = (f"emu_to_bf16({x})" for x in inputs)
            return f"{out} = uint32_t({high}) << 16 | {low};"
        if name == "cvt.rn.f16x2.f32":
            high, low = (f"_cvtss_sh({x}, 0)" for x in inputs)
            return f"{out} = uint32_t({high}) << 16 | uint16_t({low});"
        if re.fullmatch(r"cvt\.rna\.(satfinite\.)?tf32\.f32", name):
            return f"{out} = (emu_word32({inputs[0]}) + 0x1000) & 0xffffe000u;"
        return None

    def do_bra(self, name, ops):
        return f"goto emu_label_{self.number}_{ops[0].strip('$')};"

    # --- Memory

    def do_ld(self, name, ops):
        parts = name.split(".")
        kind = TYPES[parts[-1]]
        pointer = self.pointer(ops[1], name)
        if ops[0].startswith("{"):
            sets = (f"emu_set({out}, emu_p[{i}]);" for i, out in enumerate(self.values(listed(ops[0]))))
            return f"{kind}* emu_p = ({kind}*){pointer}; " + " ".join(sets)
        out = self.value(ops[0])
        if {"acquire", "relaxed", "volatile"} & set(parts):  # perhaps in a loop until another thread stores
            load = f"emu_load_acquire({pointer}, sizeof({kind}), __LINE__)"
            return f"emu_set({out}, emu_from_word<{kind}>({load}));"
        return f"emu_set({out}, *({kind}*){pointer});"

    do_ldu = do_ld

    def do_st(self, name, ops):
        kind = TYPES[name.split(".")[-1]]
        values = self.values(listed(ops[1]) if ops[1].startswith("{") else [ops[1]])
        sets = (f"emu_set(emu_p[{i}], {x});" for i, x in enumerate(values))
        return f"{kind}* emu_p = ({kind}*){self.pointer(ops[0], name)}; " + " ".join(sets)

    def do_atom(self, name, ops):
        parts = name.split(".")
        kind = TYPES[parts[-1]]
        operation = next((part for part in parts if part in ATOMICS), None)
        if operation is None or "v2" in parts or "v4" in parts:
            return None
        operands = [f"({kind})({x})" for x in self.values(ops[2:])]
        result = ATOMICS[operation].format(*operands)
        pointer = f"{kind}* emu_p = ({kind}*){self.pointer(ops[1], name)};"
        out = "" if ops[0] == "_" else f" emu_set({self.value(ops[0])}, emu_old);"
        return f"{pointer} {kind} emu_old = *emu_p; *emu_p = {result};{out}"

    def do_red(self, name, ops):
        if not ops[1].startswith("{"):
            return self.do_atom(name, ["_", *ops])
        if ".add." not in name:
            return None
        kind = TYPES[name.split(".")[-1]]
        adds = (f"emu_p[{i}] += {x};" for i, x in enumerate(self.values(listed(ops[1]))))
        return f"{kind}* emu_p = ({kind}*){self.pointer(ops[0], name)}; " + " ".join(adds)

    # --- Barriers

    def do_mbarrier(self, name, ops):
        action = name.split(".")[1]
        has_output = not ops[0].startswith("[")
        operands = ops[1:] if has_output else ops
        barrier = f"(uint64_t*){self.pointer(operands[0], name)}"
        rest = self.values(operands[1:])
        if action == "init":
            return f"emu_mbar_init({barrier}, {rest[0]});"
        if action == "inval":
            return f"emu_mbar_inval({barrier});"
        if action == "expect_tx":
            return f"emu_mbar_expect_tx({barrier}, {rest[0]}, __LINE__);"
        if action == "complete_tx":
            return f"emu_mbar_complete_tx({barrier}, {rest[0]});"
        if action == "try_wait":
            # The thread sleeps until the phase completes, so that the loop around it ends at once.
            return f"emu_mbar_wait({barrier}, uint32_t({rest[0]}), __LINE__); {self.value(ops[0])} = true;"
        if action == "test_wait":
            return f"{self.value(ops[0])} = emu_mbar_test({barrier}, uint32_t({rest[0]}), __LINE__);"
        if action != "arrive" or "noComplete" in name:
            return None
        code = ""
        count = rest[0] if rest else "1"
        if ".expect_tx" in name:
            code, count = f"emu_mbar_expect_tx({barrier}, {rest[0]}, __LINE__); ", "1"
        arrive = f"emu_mbar_arrive({barrier}, {count}, __LINE__)"
        keeps_state = has_output and ops[0] != "_"
        return code + (f"emu_set({self.value(ops[0])}, {arrive});" if keeps_state else f"{arrive};")

    def do_bar(self, name, ops):
        if "cluster" in name:
            return None
        if ".warp.sync" in name:
            return (
                f"emu_warp_collective(emu_what_syncwarp, {self.value(ops[0])}, nullptr, nullptr, __LINE__);"
            )
        if match := re.search(r"\.red\.(popc|and|or)", name):
            field = {"popc": "count", "and": "all", "or": "any"}[match[1]]
            out, bar = self.values(ops[:2])
            threads = self.value(ops[2]) if len(ops) == 4 else "0"
            negated = "!" if ops[-1].startswith("!") else ""
            value = negated + self.value(ops[-1].strip("!"))
            return f"{out} = emu_bar_sync({bar}, {threads}, {value}, __LINE__).{field};"
        bar, *threads = self.values(ops)
        if ".arrive" in name:
            return f"emu_bar_arrive({bar}, {threads[0]}, __LINE__);"
        if ".sync" in name:
            return f"emu_bar_sync({bar}, {threads[0] if threads else 0}, 0, __LINE__);"
        return None

    do_barrier = do_bar

    def do_elect(self, name, ops):
        out, mask = self.value(ops[0].split("|")[-1]), self.value(ops[1])
        wait = f"emu_warp_collective(emu_what_elect, {mask}, nullptr, nullptr, __LINE__);"
        return f"{wait} {out} = emu_cur->lane == 0;"

    # --- Matrices

    def do_wgmma(self, name, ops):
        """The waits of wgmma: products are computed when they are issued (wgmma.py)."""
        waits = ("wgmma.fence", "wgmma.commit_group", "wgmma.wait_group")
        return "" if name.startswith(waits) else None

    def do_ldmatrix(self, name, ops):
        return self.move_matrices("ldmatrix", name, ops[1], ops[0])

    def do_stmatrix(self, name, ops):
        return self.move_matrices("stmatrix", name, ops[0], ops[1])

    def move_matrices(self, base, name, address, registers):
        registers = self.values(listed(registers))
        if "m8n8" not in name or f".x{len(registers)}" not in name:
            return None
        pointers = ", ".join(f"(uint32_t*)&{r}" for r in registers)
        matrix = f"EmuMatrix emu_m = {{{self.shared(address)}, {{{pointers}}}}};"
        return f"{matrix} emu_{base}(&emu_m, {len(registers)}, {int('.trans' in name)}, __LINE__);"

    def do_mma(self, name, ops):
        match = re.search(
            r"m16n8k(\d+)\.row\.col(?:\.satfinite)?\.(?:f32|s32)\.(\w+)\.(\w+)\.(?:f32|s32)$", name
        )
        if ".sync" not in name or not match or match[2] not in MATRIX_TYPES:
            return None

        def pointers(registers, kind):
            return "{" + ", ".join(f"({kind}*)&{r}" for r in self.values(listed(registers))) + "}"

        d, a, b, c = (pointers(o, kind) for o, kind in zip(ops, ("float", "uint32_t", "uint32_t", "float")))
        types = f"{MATRIX_TYPES[match[2]]}, {MATRIX_TYPES[match[3]]}"
        return f"EmuMma emu_m = {{{match[1]}, {types}, {a}, {b}, {c}, {d}}}; emu_mma(&emu_m, __LINE__);"

    # --- Asynchronous copies

    def do_cp(self, name, ops):
        if "multicast" in name:
            return None
        if ".bulk" in name:
            return self.bulk_copy(name, ops)
        if name.startswith("cp.async.mbarrier.arrive"):
            # The copies are done. Without .noinc the pending count is first raised by one.
            arrive = f"emu_mbar_arrive((uint64_t*){self.shared(ops[0])}, 1, __LINE__);"
            return arrive if ".noinc" in name else ""
        if name.startswith(("cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all")):
            return ""
        if not name.startswith(("cp.async.ca.shared", "cp.async.cg.shared")):
            return None
        # Done at once. Bytes beyond those of the source are 0.
        source, size, *given = self.values([ops[1].strip("[]"), *ops[2:]])
        names = f"char* emu_p = {self.shared(ops[0])}; uint32_t emu_n = {given[0] if given else size};"
        return (
            f"{names} memcpy(emu_p, (const void*){source}, emu_n); memset(emu_p + emu_n, 0, {size} - emu_n);"
        )

    def bulk_copy(self, name, ops):
        adds = name.startswith("cp.reduce")
        if ".commit_group" in name:
            return "emu_bulk_commit();"
        if ".wait_group" in name:
            return f"emu_bulk_wait({self.value(ops[0])}, {int('.read' in name)}, __LINE__);"
        if ".prefetch" in name:
            return ""
        if ".tensor" in name:
            return self.tensor_copy(name, ops)
        if name.startswith(("cp.async.bulk.global.shared", "cp.reduce.async.bulk.global.shared")):
            if adds and not name.endswith(".add.f32"):
                return None
            target, size = self.value(ops[0].strip("[]")), self.value(ops[2])
            return f"emu_bulk_store((void*){target}, {self.shared(ops[1])}, {size}, {int(adds)}, __LINE__);"
        if name.startswith("cp.async.bulk.shared"):
            source, size = self.value(ops[1].strip("[]")), self.value(ops[2])
            places = f"{self.shared(ops[0])}, (const void*){source}"
            return f"emu_bulk_load({places}, {size}, (uint64_t*){self.shared(ops[3])}, __LINE__);"
        return None

    def tensor_copy(self, name, ops):
        reduces = name.startswith("cp.reduce")
        if "im2col" in name or "gather" in name or "scatter" in name or reduces and ".add" not in name:
            return None
        rank = re.search(r"tensor\.(\d)d", name)[1]
        loads = re.search(r"\.shared::\w+\.global", name)
        tensor, coords = split_operands(ops[1 if loads else 0].strip()[1:-1])
        array = "int emu_c[] = {" + ", ".join(f"(int){c}" for c in self.values(listed(coords))) + "};"
        tensor = f"(const void*)({self.value(tensor)})"
        if loads:
            barrier = f"(uint64_t*){self.shared(ops[2])}"
            return (
                f"{array} emu_tma_load({self.shared(ops[0])}, {tensor}, {rank}, emu_c, {barrier}, __LINE__);"
            )
        source = self.shared(ops[1])
        return f"{array} emu_tma_store({tensor}, {source}, {rank}, emu_c, {int(reduces)}, __LINE__);"
