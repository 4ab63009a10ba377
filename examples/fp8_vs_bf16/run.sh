#!/usr/bin/env bash
# BF16 against FP8 on English and German: tokenizer, tokens, one training run a recipe, held-out text, report.
# Every stage is skipped when it is done and goes on where it was stopped, so calling this again does what is left.
set -euo pipefail
usage() {
  cat <<'TEXT'
usage: bash examples/fp8_vs_bf16/run.sh [options] [-- --section.key VALUE ...]
  --data DIR         folder of .jsonl, .jsonl.gz or .jsonl.zst with "text" and "lang" (en, de); files called heldout* are
                     held out whole, without any 2 % of the documents are. Default: get_texts.sh gets Debian's documentation
  --recipes "..."    default "none delayed current blockwise mxfp8 nvfp4"; none is BF16, the baseline, and always trained
  --out DIR          default runs/fp8_vs_bf16
  --jobs N           runs side by side, each with its share of the cores; default 2, or 1 on a single core
  --second-seed N    also train BF16 from this seed, as a yardstick for what luck does; 0: do not. Default 4321
  -- ...             overrides of pretrain.toml for all runs, e.g. -- --train.steps 200
TEXT
}
fail() { echo "run.sh: error: $*" >&2; exit 2; }
cd "$(dirname "$0")/../.."
HERE=examples/fp8_vs_bf16
DATA="" RECIPES="none delayed current blockwise mxfp8 nvfp4" OUT=runs/fp8_vs_bf16 SECOND=4321
CORES=$(nproc) JOBS=""
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) usage; exit 0 ;;
    --) shift; break ;;
    --data | --recipes | --out | --jobs | --second-seed) [ $# -ge 2 ] || fail "$1 wants a value; see --help" ;;&
    --data) DATA="$2" ;;
    --recipes) RECIPES="$2" ;;
    --out) OUT="$2" ;;
    --jobs) JOBS="$2" ;;
    --second-seed) SECOND="$2" ;;
    *) fail "$1: unknown option; see --help (overrides of pretrain.toml stand behind --)" ;;
  esac
  shift 2
done
MORE=("$@")
JOBS="${JOBS:-$((CORES > 1 ? 2 : 1))}"
for number in "$JOBS" "$SECOND"; do
  [[ "$number" =~ ^[0-9]+$ ]] || fail "'$number' is no number; see --help"
done
[ "$JOBS" -ge 1 ] || fail "--jobs 0: at least one; nearest: 1"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((CORES / JOBS > 0 ? CORES / JOBS : 1))}"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error
say() { printf '\n\033[1m%s\033[0m\n' "$*" >&2; }
began=$SECONDS

# -- which runs ------------------------------------------------------------------------------------------------------
names=(bf16) recipes=(none) seeds=("")
for recipe in $RECIPES; do
  if [ "$recipe" != none ]; then names+=("$recipe") recipes+=("$recipe") seeds+=(""); fi
done
if [ "$SECOND" != 0 ]; then names+=("bf16-seed-$SECOND") recipes+=(none) seeds+=("$SECOND"); fi

settings() { # of run number $1, one word a line
  printf '%s\n' --run.dir "$OUT/runs/${names[$1]}" --precision.recipe "${recipes[$1]}" \
    --data.train "[{ path = \"$OUT/en/train\", weight = 0.5 }, { path = \"$OUT/de/train\", weight = 0.5 }]" \
    --data.valid "[{ path = \"$OUT/en/valid\", name = \"en\" }, { path = \"$OUT/de/valid\", name = \"de\" }]" \
    --data.tokenizer "$OUT/tokenizer/tokenizer.model"
  if [ -n "${seeds[$1]}" ]; then printf '%s\n' --run.seed "${seeds[$1]}"; fi
  if [ ${#MORE[@]} -gt 0 ]; then printf '%s\n' "${MORE[@]}"; fi
}

mkdir -p "$OUT/runs" || fail "--out $OUT: cannot be made; name another folder"
exec 9>"$OUT/.lock"
flock -n 9 || fail "--out $OUT: another call of run.sh works there; wait for it, or name another folder"

say "1/5  what would be refused is refused now"
for i in "${!names[@]}"; do
  mapfile -t words < <(settings "$i")
  megafp8 check $HERE/pretrain.toml --ranks 1 "${words[@]}" >/dev/null
done
mapfile -t words < <(settings 0)
STEPS=$(megafp8 pretrain $HERE/pretrain.toml --print-config "${words[@]}" | sed -n 's/^steps = \([0-9]*\).*/\1/p')
echo "${#names[@]} runs of $STEPS steps, $JOBS side by side with $OMP_NUM_THREADS threads each: ${names[*]}" >&2

say "2/5  texts and tokenizer"
if [ -z "$DATA" ]; then
  bash $HERE/get_texts.sh "$OUT/texts"
  DATA="$OUT/texts"
fi
[ -d "$DATA" ] || fail "--data $DATA: no such folder"
list() { # paths as a TOML list
  local text="" path
  for path in "$@"; do text+="\"$path\", "; done
  echo "[${text%, }]"
}
shopt -s nullglob
train=() heldout=()
for path in "$DATA"/*.jsonl "$DATA"/*.jsonl.gz "$DATA"/*.jsonl.zst; do
  if [[ "$(basename "$path")" == heldout* ]]; then heldout+=("$path"); else train+=("$path"); fi
done
shopt -u nullglob
[ ${#train[@]} -gt 0 ] || fail "--data $DATA: no .jsonl, .jsonl.gz or .jsonl.zst there besides heldout*"
corpus=($HERE/corpus.toml --source.files "$(list "${train[@]}")")
if [ ${#heldout[@]} -gt 0 ]; then
  corpus+=(--source.valid_files "$(list "${heldout[@]}")")
else
  corpus+=(--source.valid_files "[]" --split.valid_share 0.02)
fi
megafp8 tokenizer train "${corpus[@]}" --output.folder "$OUT/tokenizer"

say "3/5  text -> .bin/.idx, a language at a time"
for language in en de; do
  megafp8 preprocess "${corpus[@]}" --source.languages "[\"$language\"]" \
    --tokenizer.path "$OUT/tokenizer/tokenizer.model" --output.folder "$OUT/$language"
done

# -- training and held-out text, JOBS at a time ------------------------------------------------------------------------
judge() { # $1 run folder, $2 language: in the recipe with the checkpoint's scales, and the weights alone in bf16
  local newest kept
  newest=$(printf '%s\n' "$1"/checkpoints/step_* | tail -n 1)
  for how in "$2" "$2-bf16"; do
    kept="$1/heldout/$how.json"
    if [ "$kept" -nt "$newest/manifest.json" ] && [ "$kept" -nt "$OUT/$2/valid.bin" ]; then continue; fi
    local trained=()
    if [ "$how" = "$2" ]; then trained=(--as-trained); fi
    megafp8 eval --perplexity "$1" --data "$OUT/$2/valid" --save "$how" "${trained[@]}" || return $?
  done
}

one_run() { # number of the run; SIGTERM is for the process in front, and what would follow it does not begin
  local folder="$OUT/runs/${names[$1]}" code=0
  mapfile -t words < <(settings "$1")
  trap 'code=75' TERM
  megafp8 pretrain $HERE/pretrain.toml --nproc 1 --train.threads "$OMP_NUM_THREADS" "${words[@]}" || code=$?
  for language in en de; do
    if [ "$code" = 0 ]; then judge "$folder" "$language" || code=$?; fi
  done
  return "$code"
}

step_of() { # of a run that may not have begun
  local line
  line=$(tail -n 40 "$OUT/runs/$1/log.txt" 2>/dev/null | grep -o 'iteration *[0-9]*/' | tail -n 1 | tr -dc 0-9) || true
  echo "${line:-0}"
}

progress() { # a line for all running runs and for the whole
  local text="" name done=0 line spent=$((SECONDS - phase)) rest="?"
  for name in "${names[@]}"; do done=$((done + $(step_of "$name"))); done
  for i in "${!running[@]}"; do
    name=${names[${running[$i]}]}
    line=$(grep -o 'tokens/s: [0-9]*\|lm loss: [0-9.E+-]*\|eta: [0-9:]*' "$OUT/runs/$name/log.txt" 2>/dev/null | tail -n 3 |
      tr '\n' ' ') || true
    if [ "$(step_of "$name")" = "$STEPS" ]; then line="on held-out text"; fi
    text+=" | $name $(step_of "$name")/$STEPS ${line:-starting}"
  done
  if [ $((done - done_before)) -gt 0 ]; then
    rest=$(((total - done) * spent / (done - done_before)))
    rest="$((rest / 3600))h$((rest % 3600 / 60))m$((rest % 60))s"
  fi
  echo "[$((100 * done / total)) % of all steps, $spent s, eta $rest]$text" >&2
}

say "4/5  training, and held-out English and German"
for file in "$OUT"/runs/*.pid; do # a call that was killed has left its runs at work, each a process group of its own
  [ -f "$file" ] || continue
  pid=$(<"$file")
  if [[ "$(ps -o args= -p "$pid" 2>/dev/null)" == *run.sh* ]]; then
    echo "run.sh: $(basename "$file" .pid) is still at work for a call that is gone; it saves and stops" >&2
    kill -TERM -- "-$pid" 2>/dev/null || true
    while kill -0 "$pid" 2>/dev/null; do sleep 0.2; done
  fi
  rm -f "$file"
done
declare -A running=()
stopped="" worst=0 next=0 total=$((STEPS * ${#names[@]})) done_before=0 phase=$SECONDS shown=0
for name in "${names[@]}"; do done_before=$((done_before + $(step_of "$name"))); done
halt() {
  stopped=yes
  echo "run.sh: stopping: every run saves first" >&2
  for pid in "${!running[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
}
trap halt INT TERM HUP
while [ $next -lt ${#names[@]} ] || [ ${#running[@]} -gt 0 ]; do
  while [ -z "$stopped" ] && [ "$worst" = 0 ] && [ $next -lt ${#names[@]} ] && [ ${#running[@]} -lt "$JOBS" ]; do
    set -m # a process group of its own: the terminal's Ctrl-C reaches a run once, through halt
    one_run $next >"$OUT/runs/${names[$next]}.out" 2>&1 </dev/null 9>&- &
    set +m
    echo $! >"$OUT/runs/${names[$next]}.pid"
    running[$!]=$next
    next=$((next + 1))
  done
  for pid in "${!running[@]}"; do
    if kill -0 "$pid" 2>/dev/null; then continue; fi
    code=0
    wait "$pid" || code=$?
    name=${names[${running[$pid]}]}
    rm -f "$OUT/runs/$name.pid"
    unset "running[$pid]"
    if [ -n "$stopped" ] && [[ "$code" =~ ^(130|143)$ ]]; then code=75; fi # what holds no state simply ends
    if [ "$code" = 0 ]; then
      echo "$name: done" >&2
    elif [ "$worst" = 0 ] || [ "$worst" = 75 ]; then
      worst=$code
    fi
    if [ "$code" != 0 ] && [ "$code" != 75 ]; then
      echo "run.sh: $name ended with code $code; the end of $OUT/runs/$name.out:" >&2
      tail -n 5 "$OUT/runs/$name.out" >&2
      halt
    fi
  done
  if [ ${#running[@]} -eq 0 ] && { [ -n "$stopped" ] || [ "$worst" != 0 ]; }; then break; fi
  if [ $((SECONDS - shown)) -ge "$([ -t 2 ] && echo 5 || echo 30)" ]; then progress; shown=$SECONDS; fi
  sleep 1 || true
done
trap - INT TERM HUP
if [ "$worst" != 0 ] || [ -n "$stopped" ]; then
  echo "run.sh: stopped; the same command goes on from the last checkpoints" >&2
  exit $((worst > 0 ? worst : 75))
fi

say "5/5  report"
folders=()
for name in "${names[@]}"; do folders+=("$OUT/runs/$name"); done
megafp8 report "${folders[@]}" --out "$OUT/report" --compare --title "BF16 against FP8 on English and German"
say "done in $((SECONDS - began)) s: $OUT/report/report.html, and compare.md, compare.png, compare.json beside it"
