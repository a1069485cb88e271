"""Parses asm statements of CUDA C++ and the PTX in them."""

import re


class Unknown(Exception):
    """What the emulator does not know."""


class Asm:
    """One statement: its template, its operands, and its extent in the source.

    operands: (constraint, expression, whether it is an output) in the order of their numbers.
    """

    def __init__(self, source, start, open_paren):
        self.start = start
        i = skip_space(source, open_paren + 1)
        self.template, i = string_at(source, i)
        self.operands = []
        section = 0  # 1: outputs, 2: inputs, 3: clobbers
        while source[i] != ")":
            if source[i] == ":":
                section += 1
                i = skip_space(source, i + 1)
            elif source[i] == ",":
                i = skip_space(source, i + 1)
            elif source[i] == '"':
                constraint, i = string_at(source, i)
                if section < 3:
                    expression, i = balanced(source, i)
                    self.operands.append((constraint, expression.strip(), section == 1))
                i = skip_space(source, i)
            else:
                raise Unknown("operands near: " + source[i : i + 60])
        i = skip_space(source, i + 1)
        self.end = i + 1 if source[i] == ";" else i
        self.lines = source.count("\n", start, self.end)


def skip_space(s, i):
    while i < len(s) and (s[i].isspace() or s.startswith("\\\n", i)):
        i += 1
    return i


def string_at(s, i):
    """The value of adjacent string literals at i, and where they end."""
    out = []
    while i < len(s) and s[i] == '"':
        i += 1
        while s[i] != '"':
            if s[i] == "\\":
                i += 1
                out.append({"n": "\n", "t": "\t"}.get(s[i], s[i]))
            else:
                out.append(s[i])
            i += 1
        i = skip_space(s, i + 1)
    return "".join(out), i


def balanced(s, i):
    """The text inside the parentheses that open at i, and where they end."""
    depth, start = 0, i
    while True:
        if s[i] == '"':
            i += 1
            while s[i] != '"':
                i += 2 if s[i] == "\\" else 1
        elif s[i] == "(":
            depth += 1
        elif s[i] == ")":
            depth -= 1
            if depth == 0:
                return s[start + 1 : i], i + 1
        i += 1


def instructions(template):
    """The instructions of a template, without comments and the braces of scopes."""
    text = re.sub(r"//[^\n]*", "", template).replace("%%", "%").strip()
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    parts, depth, current = [], 0, ""
    for c in text:
        # A brace at the start of a statement opens a scope, another one a list of operands.
        if c == "{" and depth == 0 and not current.strip():
            continue
        if c == "}" and depth == 0 or c == ";" and depth == 0:
            parts.append(current)
            current = ""
            continue
        depth += {"{": 1, "}": -1}.get(c, 0)
        current += c
    parts.append(current)
    return [" ".join(part.split()) for part in parts if part.strip()]


def split_operands(text):
    """Operands between commas that are outside of braces and brackets."""
    out, depth, current = [], 0, ""
    for c in text:
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(c, 0)
        if c == "," and depth == 0:
            out.append(current.strip())
            current = ""
        else:
            current += c
    if current.strip():
        out.append(current.strip())
    return out


def listed(text):
    """The operands of a list in braces."""
    return [x.strip() for x in text.strip().strip("{}").split(",") if x.strip()]
