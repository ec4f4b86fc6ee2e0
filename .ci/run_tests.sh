#!/usr/bin/env bash
# run_tests.sh PYTHON SOURCE RUN [PYTEST ARGUMENTS]: pytest in the folder RUN, which shows everything of SOURCE except
# the package itself, so that only an installed fastverify can be imported. LD_PRELOAD for pytest alone: $FV_PRELOAD.
set -euo pipefail
python=$(realpath -s "$1")
source=$(realpath "$2")
run=$3
shift 3
rm -rf "$run"
mkdir -p "$run"
for entry in "$source"/* "$source"/.ci; do
    case $(basename "$entry") in
        fastverify | tests | build | dist | *.egg-info) ;;
        *) ln -s "$entry" "$run/" ;;
    esac
done
cp -r "$source/tests" "$run/tests"
cd "$run"
# One process per core where xdist is there, whole files each (module fixtures are made once); PYTEST_ARGS="-n 0" turns it off.
parallel=$("$python" -c 'import os, xdist; n = min(len(os.sched_getaffinity(0)), 4); print(f"-n {n} --dist loadfile" if n > 1 else "")' 2>/dev/null || true)
# shellcheck disable=SC2086
exec env ${FV_PRELOAD:+LD_PRELOAD="$FV_PRELOAD"} "$python" -m pytest $parallel "$@"
