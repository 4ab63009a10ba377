#!/usr/bin/env bash
# The demo: raw text to a trained, compared and exported model. Every command below is the one that a large run uses,
# and every one picks up where it was stopped, so calling this script again does what is left.
set -euo pipefail
cd "$(dirname "$0")/../.."
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error
OUT=runs/tiny
RUN=(megafp8 pretrain examples/tiny_cpu/pretrain.toml --nproc "${NPROC:-2}")
say() { printf '\n\033[1m%s\033[0m\n' "$*" >&2; }
start=$SECONDS

say "1/6  tokenizer: SentencePiece on the documentation and source of Python's standard library"
megafp8 tokenizer train examples/tiny_cpu/corpus.toml

say "2/6  text -> .bin/.idx"
megafp8 preprocess examples/tiny_cpu/corpus.toml

say "3/6  pretrain in BF16"
"${RUN[@]}" --run.dir $OUT/bf16 "$@"

say "4/6  pretrain in FP8: delayed scaling, E4M3 forward, E5M2 backward; same seed, same samples"
"${RUN[@]}" --run.dir $OUT/fp8 --precision.recipe delayed "$@"

say "5/6  report"
megafp8 report $OUT/bf16 $OUT/fp8 --out $OUT/report --title "BF16 against FP8 on the standard library's text"

say "6/6  export to Hugging Face, reload, compare"
megafp8 convert --to hf $OUT/fp8 $OUT/hf

say "done in $((SECONDS - start)) s"
cat <<SUMMARY
  report        $OUT/report/report.html   (open it in a browser)
  BF16 run      $OUT/bf16            (config, metrics, TensorBoard events, checkpoints)
  FP8 run       $OUT/fp8
  HF model      $OUT/hf          (transformers.AutoModelForCausalLM.from_pretrained)
  try           megafp8 generate $OUT/fp8 --prompt "Return the" --max-new-tokens 40
SUMMARY
