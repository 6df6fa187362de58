#!/usr/bin/env bash
# Makes .venvs/VERSION in this checkout: vLLM-Omni VERSION on CPU, the development tools, and this package installed editable.
#
#   tools/environment/create.sh 0.30.0
#
# A second call does nothing when nothing it depends on has changed. Packages come from PyPI, and from $PIP_FIND_LINKS and
# $PIP_INDEX_URL where those are set. torch's CPU build is not on PyPI: where no configured place has it, it is taken from
# PyTorch's own index, or from $TORCH_CPU_INDEX.
set -euo pipefail

fail() {
  echo "create.sh: $*" >&2
  exit 1
}

say() {
  printf "[%4ds] %s\n" "$SECONDS" "$*"
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
lock=$here/lock.txt

known=$(cd "$here" && ls host-*.txt | sed 's/^host-//; s/\.txt$//' | paste -sd ' ')
[[ $# -eq 1 ]] || fail "expected one argument, the vLLM-Omni release (one of: $known), found $#"
version=$1
host=$here/host-$version.txt
[[ -f $host ]] || fail "no host-$version.txt; expected one of: $known"

venv=$root/.venvs/$version
python=$venv/bin/python
mkdir -p "$root/.venvs"
# Held until this process ends: a second call waits, then finds the work done.
exec 9>"$root/.venvs/.$version.lock"
flock 9

# Two hashes, so that a changed entry point does not reinstall two hundred packages.
packages_hash=$(cat "$lock" "$host" "$here"/*.py "$here/create.sh" | sha256sum | cut -d' ' -f1)
project_hash=$(awk '/^\[/ {keep = /^\[(project|build-system)/} keep' "$root/pyproject.toml" | cat - <(echo "$packages_hash $root") \
  | sha256sum | cut -d' ' -f1)
packages_stamp=$venv/.packages
ready=$venv/.ready

if [[ -x $python && -f $ready && $(<"$ready") == "$project_hash" ]]; then
  say ".venvs/$version is current"
  exit 0
fi
rm -f "$ready"

find_python() {
  local candidate
  for candidate in python3.11 python3.12 python3.10 python3.13 python3; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

if ! "$python" -c '' 2>/dev/null; then
  base=$(find_python) || fail "found no Python >=3.10,<3.14 on PATH; install python3.11"
  say "creating .venvs/$version from $("$base" --version)"
  rm -rf "$venv"
  "$base" -m venv "$venv"
fi

uv_pin=$(grep -E '^uv==' "$lock")
if [[ $("$venv/bin/uv" --version 2>/dev/null | cut -d' ' -f2) != "${uv_pin#uv==}" ]]; then
  say "installing $uv_pin"
  "$python" -m pip install --quiet --disable-pip-version-check "$uv_pin"
fi

# uv does not read pip's configuration.
sources=()
for link in ${PIP_FIND_LINKS:-}; do
  sources+=(--find-links "$link")
done
if [[ -n ${PIP_INDEX_URL:-} ]]; then
  sources+=(--default-index "$PIP_INDEX_URL")
fi

if [[ ! -f $packages_stamp || $(<"$packages_stamp") != "$packages_hash" ]]; then
  rm -f "$packages_stamp"
  torch_pin=$(grep -E '^torch==' "$lock")
  if ! "$venv/bin/uv" pip install --quiet --python "$python" --dry-run --no-deps "${sources[@]}" "$torch_pin" 2>/dev/null; then
    torch_index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
    say "$torch_pin is in no configured place; taking it from $torch_index"
    # The index also lists some ordinary packages, in few versions: without best-match uv would look for those only there.
    sources+=(--index "$torch_index" --index-strategy unsafe-best-match)
  fi
  say "installing the locked packages"
  # Exact, so that a package which left the lock leaves the environment too; this package comes back below.
  "$venv/bin/uv" pip install --quiet --python "$python" --exact --no-deps "${sources[@]}" -r "$lock" -r "$host"
  # Else the first imports compile 40 s worth of modules, and all of them do where PYTHONDONTWRITEBYTECODE is set. A few packages carry
  # templates that are not Python: their failures say nothing.
  say "compiling them to bytecode"
  "$python" -m compileall -q -j 0 -x '/tests?/' "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" >/dev/null 2>&1 || true
  say "checking torchvision and torchaudio"
  "$python" "$here/mend.py"
  say "importing the host"
  log=$(VLLM_PLUGINS='' "$python" -c 'import torch, torchvision, torchaudio, vllm, vllm_omni' 2>&1) \
    || fail "the environment is installed but its packages do not import:"$'\n'"$log"
  echo "$packages_hash" >"$packages_stamp"
fi

say "installing this package, editable"
"$venv/bin/uv" pip install --quiet --python "$python" --no-deps --no-build-isolation --editable "$root"
echo "$project_hash" >"$ready"
say ".venvs/$version is ready"
