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
exec env ${FV_PRELOAD:+LD_PRELOAD="$FV_PRELOAD"} "$python" -m pytest "$@"
