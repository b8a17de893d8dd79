#!/bin/sh
# Runs the C specs given and busted inside the program; sums their counts into the last line.
passed=0 failed=0 skipped=0 log=$BUILD/spec.log
count() { # the numbers of a closing line "N passed, N failed[, N skipped]"
  line=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$log" | tail -n 1)
  if [ -z "$line" ]; then echo "$1: ended without a result"; failed=$((failed + 1)); return; fi
  set -- $line 0 0
  passed=$((passed + $1)) failed=$((failed + $3)); [ "$6" = skipped ] && skipped=$((skipped + $5))
}
for spec in "$@"; do
  "$spec" >"$log" 2>&1; rc=$?
  count "$spec"
  [ $rc -eq 0 ] || { echo "-- $spec (exit $rc)"; tail -n 40 "$log"; }
done
if ls spec/*_spec.lua >/dev/null 2>&1; then
  "$BUILD/moonflow" /usr/bin/busted ${BUSTED_FLAGS:-} --output=plainTerminal spec >"$log" 2>&1; rc=$?
  cat "$log"
  result=$(grep -E '^[0-9]+ success' "$log" | tail -n 1)
  if [ -z "$result" ]; then echo "busted: ended without a result (exit $rc)"; failed=$((failed + 1)); else
    set -- $(echo "$result" | grep -oE '[0-9]+ [a-z]+' | grep -oE '^[0-9]+')
    passed=$((passed + $1)) failed=$((failed + $2 + $3)) skipped=$((skipped + $4))
  fi
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
