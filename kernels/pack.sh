#!/bin/sh
# kernels/pack.sh BUILD LIBRARY FOLDER: everything that a machine with a GPU needs, in one folder: the script `check`,
# and files.tar.gz, which it unpacks: the program, that library of kernels, the C library and those of Debian, the Lua
# files of the test runner, specs and examples. CUDA's own libraries are those of that machine.
set -e
build=$1 library=$2 folder=$3 to=$3/files
multiarch=$(gcc -print-multiarch 2>/dev/null || echo x86_64-linux-gnu)
rm -rf "$folder"
mkdir -p "$to/bin" "$to/lib" "$to/lua" "$to/cpath"
cp "$build/moonflow" "$library" "$to/bin/"
strip -g "$to/bin/moonflow" "$to/bin/$(basename "$library")"
# Of both, but what belongs to CUDA and its driver.
ldd "$build/moonflow" "$library" | awk '$3 ~ /^\// { print $3 } $1 ~ /^\/.*ld-/ { print $1 }' | sort -u |
  grep -v -e cuda -e cublas -e cudnn -e nvrtc -e nccl | while read -r file; do
  cp -L "$file" "$to/lib/"
done
strip -g "$to"/lib/* 2>/dev/null || true
for name in busted busted.lua cliargs cliargs.lua dkjson.lua luassert mediator.lua pl say system term; do
  [ -e "/usr/share/lua/5.1/$name" ] && cp -r "/usr/share/lua/5.1/$name" "$to/lua/"
done
for name in lfs.so system term; do
  [ -e "/usr/lib/$multiarch/lua/5.1/$name" ] && cp -rL "/usr/lib/$multiarch/lua/5.1/$name" "$to/cpath/"
done
cp /usr/bin/busted "$to/busted.lua"
mkdir -p "$to/spec"
cp -r spec/cuda spec/oracle spec/shell.lua "$to/spec/"
cp -r examples "$to/"
tar -C "$folder" -czf "$folder/files.tar.gz" files
rm -rf "$to"
cp kernels/check.sh "$folder/check"
chmod +x "$folder/check"
mib=$(du -sm "$folder" | cut -f1)
echo "$folder: $mib MiB"
[ "$mib" -lt 60 ] || { echo 'pack: more than 60 MiB' >&2; exit 1; }
