// cubecl declares vector types and local variables in an order that changes from run to run. Sorted, equal
// kernels have equal sources, and a kept one is found again.
#include "internal.h"
#include <cctype>
#include <sstream>

using Lines = std::vector<std::string>;

static bool starts_with(const std::string& line, const std::string& start) {
  return line.compare(0, start.size(), start) == 0;
}

// "float l_mut_3;"
static bool is_local(const std::string& line) {
  size_t space = line.find(' ');
  if (space == std::string::npos || line.back() != ';' || !starts_with(line.substr(space), " l_mut_"))
    return false;
  auto in_word = [](char c) { return isalnum((unsigned char)c) || c == '_'; };
  return line.substr(0, space) != "return" && std::all_of(line.begin(), line.begin() + space, in_word) &&
         std::all_of(line.begin() + space + 1, line.end() - 1, in_word);
}

// Lines of the declaration that starts at line i: of a vector ("struct __align__(8) float_2 {" to "};", with
// fields of plain types) or a local variable; 0 if none does.
static size_t declaration_at(const Lines& lines, size_t i) {
  if (is_local(lines[i])) return 1;
  if (!starts_with(lines[i], "struct __align__(")) return 0;
  for (size_t end = i + 1; end < lines.size(); end++) {
    if (lines[end] == "};") return end + 1 - i;
    if (!starts_with(lines[end], "    ")) return 0;
  }
  return 0;
}

std::string emu_stable_order(const std::string& source) {
  Lines lines;
  std::istringstream in(source);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  std::string out;
  for (size_t i = 0; i < lines.size();) {
    Lines neighbours; // declarations that follow one another
    while (i < lines.size()) {
      size_t count = declaration_at(lines, i);
      if (count == 0) break;
      std::string text;
      for (; count; count--) text += lines[i++] + "\n";
      neighbours.push_back(text);
    }
    std::sort(neighbours.begin(), neighbours.end());
    for (auto& text : neighbours) out += text;
    if (i < lines.size()) out += lines[i++] + "\n";
  }
  return out;
}
