"""Translates wgmma.mma_async: neighbouring products of one accumulator become one call of the emulator."""

import re

from asm_statements import Unknown, instructions, listed, split_operands
from ptx_tables import MATRIX_TYPES

NAME = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k\d+\.f32\.(\w+)\.(\w+)")


class Wgmma:
    """One product, as C++ expressions: D (n / 2 registers), A (registers, or a descriptor), the
    descriptor of B, and whether it adds to D.
    """

    def __init__(self, asm):
        self.asm = asm
        product, flag = find_product(asm)
        name, rest = product.split(" ", 1)
        match = NAME.fullmatch(name)
        if not match or match[2] not in MATRIX_TYPES or match[2] in ("s8", "u8"):
            raise Unknown(product)
        self.n = int(match[1])
        self.types = MATRIX_TYPES[match[2]], MATRIX_TYPES[match[3]]
        ops = split_operands(rest)
        self.outputs = [self.expression(x) for x in listed(ops[0])]
        if len(self.outputs) != self.n // 2:
            raise Unknown(f"wgmma with {len(self.outputs)} outputs for {self.n} columns")
        self.a_in_registers = ops[1].startswith("{")
        self.a = [self.expression(x) for x in listed(ops[1])]
        self.b = self.expression(ops[2])
        self.adds = self.expression(flag or ops[3])
        # Signs of A and B, then whether each is transposed: only with 16 bits, and A only in shared memory.
        self.neg_a, self.neg_b, *transposed = (self.expression(x) for x in ops[4:])
        self.trans_a = transposed[0] if len(transposed) == 2 else "0"
        self.trans_b = transposed[-1] if transposed else "0"

    def expression(self, operand):
        """The C++ expression of an operand's number, or a number itself."""
        operand = operand.strip()
        return self.asm.operands[int(operand[1:])][1] if operand.startswith("%") else operand

    def flags(self):
        return self.trans_a, self.trans_b, f"({self.neg_a}) < 0", f"({self.neg_b}) < 0"

    def goes_on(self, other):
        """Whether it continues another's sum."""

        def kind(w):
            return w.n, w.types, w.outputs, w.a_in_registers, w.flags()

        return kind(self) == kind(other)

    def step(self):
        """An EmuWgmmaStep."""
        if self.a_in_registers:
            a = f"0, emu_word({self.b}), {{{', '.join(f'emu_word32({x})' for x in self.a)}}}"
        else:
            a = f"emu_word({self.a[0]}), emu_word({self.b}), {{}}"
        return f"{{{a}, int({self.adds})}}"


def find_product(asm):
    """The product of a statement, and the operand that its predicate stands for, if it sets one."""
    product = flag = None
    for part in instructions(asm.template):
        if part.startswith("setp.ne.b32"):
            flag = split_operands(part.split(" ", 1)[1])[1]
        elif part.startswith("wgmma.mma_async"):
            product = part
        elif not part.startswith(".reg"):
            raise Unknown(part)
    return product, flag


def wgmma_call(group):
    """One call for products that go on from one another."""
    first = group[0]
    steps = ", ".join(w.step() for w in group)
    outputs = ", ".join(f"&({x})" for x in first.outputs)
    fields = [first.n, *first.types, int(first.a_in_registers), *first.flags(), len(group), "emu_d", "emu_s"]
    return (
        f"{{ EmuWgmmaStep emu_s[] = {{{steps}}}; float* emu_d[] = {{{outputs}}}; "
        f"EmuWgmma emu_w = {{{', '.join(map(str, fields))}}}; emu_wgmma(&emu_w, __LINE__); }}"
    )
