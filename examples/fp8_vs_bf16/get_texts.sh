#!/usr/bin/env bash
# Parallel English and German documentation from Debian's packages, as JSON lines in DIR (texts that may be trained on and
# passed on under their packages' free licences): LibreOffice's help, manual pages, the Debian administrator's handbook.
# Nothing is installed: packages are downloaded and unpacked in DIR. Done parts are not done again.
#
#   bash examples/fp8_vs_bf16/get_texts.sh [DIR]       DIR: default runs/fp8_vs_bf16/texts
set -euo pipefail
here="$(cd "$(dirname "$0")/../.." && pwd)"
out="${1:-runs/fp8_vs_bf16/texts}"
packages=(libreoffice-help-en-us libreoffice-help-de manpages manpages-de debian-handbook)
python="${PYTHON:-python3}"

fail() { echo "get_texts.sh: error: $*" >&2; exit 3; }
if [ -f "$out/texts.json" ]; then
  echo "$out: the texts are there already" >&2
  exit 0
fi
for tool in apt-get dpkg; do
  command -v "$tool" >/dev/null || fail "$tool is not here: the packages are Debian's (or Ubuntu's). On another system" \
    "give the experiment any folder of JSON lines with \"text\" and \"lang\": run.sh --data DIR"
done
command -v "$python" >/dev/null || fail "$python is not here; name a Python with PYTHON=..."
mkdir -p "$out/packages" "$out/unpacked" || fail "$out cannot be written; name another folder"

for package in "${packages[@]}"; do
  if compgen -G "$out/packages/${package}_*.deb" >/dev/null; then continue; fi
  echo "downloading $package" >&2
  rm -rf "$out/packages/partial" && mkdir "$out/packages/partial"
  (cd "$out/packages/partial" && apt-get -q -o APT::Sandbox::User="$(id -un)" download "$package" >&2) ||
    fail "apt-get download $package did not work (see above); if the package is unknown: apt-get update," \
      "or add Debian's main section to the sources"
  mv "$out"/packages/partial/*.deb "$out/packages/"  # whole, or not there
done
rm -rf "$out/packages/partial"
for file in "$out"/packages/*.deb; do
  dpkg -x "$file" "$out/unpacked" || fail "$file is damaged; remove it and run this again"
done
"$python" "$here/tools/debian_texts.py" "$out/unpacked" "$out"
rm -rf "$out/unpacked"
