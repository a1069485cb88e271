#!/bin/sh
# compile.sh TEMPORARY BASE FLAG…: makes a shared object of the kernels in TEMPORARY.cu: BASE.so. Beside it stay the
# source (BASE.cu) and what it was rewritten to (BASE.cpp). tools/run sets EMU_HOME and EMU_BUILD.
temporary=$1 base=$2
shift 2
mv "$temporary.cu" "$base.cu"
if [ -n "$EMU_NVRTC" ]; then
  # Apart from the emulator's libraries, which have the same names.
  env -u LD_LIBRARY_PATH python3 -B "$EMU_HOME/tools/check_kernels.py" "$base.cu" ||
    [ "$EMU_NVRTC" = warn ] || exit 1
fi
# Without the site's packages, which take longer to load than the script runs.
python3 -S -X "pycache_prefix=$EMU_BUILD/pycache" "$EMU_HOME/tools/kernel/rewrite.py" \
  "$base.cu" "$temporary.cpp" || exit 1
mv "$temporary.cpp" "$base.cpp"
# The compiled header in the build folder comes before its source.
g++ -x c++ -shared "@$EMU_HOME/tools/kernel/flags" -I"$EMU_BUILD/include" -I"$EMU_HOME/include" "$@" \
  "$base.cpp" -o "$temporary.so" -L"$EMU_BUILD/lib" -lemu -lm || exit 1
mv "$temporary.so" "$base.so"
